"""Options of models that several services take."""

import argparse

from kernels import _blas
from services.cli.options import check_models


def set_threads(options: argparse.Namespace) -> None:
    """Check the models' options and set the matrix products' threads (UsageError)."""
    check_models(options)
    if options.threads is not None:
        _blas.set_threads(options.threads)
