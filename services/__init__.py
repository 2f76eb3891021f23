"""Aerie's services. Importing any of them first puts a fast BLAS in place (see ``kernels._blas``)."""

import kernels as kernels  # runs the BLAS preload before anything imports mlx.core

__version__ = "0.1.0"
