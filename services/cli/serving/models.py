"""Options of models that several services take."""

import argparse

from kernels import _blas
from services.cli.options import check_models


def set_threads(options: argparse.Namespace, takes_turns: bool) -> None:
    """Check the models' options and set the matrix products' threads (UsageError).

    Args:
        options: The command line.
        takes_turns: Another process computes while this one waits, maybe on the same cores: keep none of them then.
    """
    check_models(options)
    if takes_turns:
        _blas.yield_cores()
    if options.threads is not None:
        _blas.set_threads(options.threads)
