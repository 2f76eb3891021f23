"""Device code shared by verifier and drafter. Importing it first puts a fast BLAS in place."""

from kernels import _blas

_blas.preload()
