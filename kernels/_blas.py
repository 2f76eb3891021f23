"""Put a fast BLAS in front of the reference BLAS that MLX's Linux CPU wheel links.

The wheel's netlib BLAS reaches about 2 GFLOP/s. MLX resolves ``cblas_sgemm`` through the global symbol
table, so an OpenBLAS loaded there first serves it instead. This module imports neither MLX nor anything
else of ours, and does nothing on other systems or when the CUDA build of MLX is installed.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

# Distributions without modules of their own: they put their library into mlx's folder, as mlx-cpu does.
_CUDA_BUILDS = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")

loaded: str | None = None
"""Path of the BLAS library in use, or None when the one that MLX links is used."""


def _candidates() -> Iterator[str]:
    if named := os.environ.get("AERIE_BLAS"):
        yield named
        return
    # find_spec, not import: the package's own module has side effects we do not need.
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from (str(path) for path in sorted(Path(folder, "lib").glob("libopenblas*.so")))
    for folder in sys.path:
        if Path(folder, "cmeel.prefix/lib/libopenblas.so").exists():
            yield str(Path(folder, "cmeel.prefix/lib/libopenblas.so"))
    yield "libopenblas.so.0"


def preload() -> None:
    """Load the first usable BLAS. ``AERIE_BLAS`` names a library, or ``off`` to leave MLX's own."""
    global loaded
    named = os.environ.get("AERIE_BLAS")
    if loaded or sys.platform != "linux" or named == "off" or any(map(_installed, _CUDA_BUILDS)):
        return
    if "mlx.core" in sys.modules:
        warnings.warn("import aerie's packages before mlx.core: MLX now uses its slow reference BLAS", stacklevel=3)
        return
    for path in _candidates():
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            library.cblas_sgemm  # noqa: B018 - libraries with renamed symbols (scipy_cblas_*) do not help
        except (OSError, AttributeError):
            continue
        loaded = path
        return
    if named:
        warnings.warn(f"AERIE_BLAS={named} is no BLAS that loads: MLX now uses its slow reference BLAS", stacklevel=3)
    elif _installed("mlx-cpu"):
        warnings.warn(
            "no fast BLAS found: the CPU will be 10 to 70 times slower; pip install scipy-openblas32==0.3.23.293",
            stacklevel=3,
        )


def _installed(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))


def set_threads(count: int) -> bool:
    """Limit the loaded BLAS to ``count`` threads; False when no BLAS of ours is loaded."""
    if not loaded:
        return False
    ctypes.CDLL(loaded).openblas_set_num_threads(ctypes.c_int(count))
    return True


def yield_cores() -> bool:
    """Let the loaded BLAS's idle threads sleep soon, for processes that work in turn on the same cores.

    By default an OpenBLAS thread spins for 0.1 s after its last product (measured), in which another
    process, whose turn it is, lacks a core. 2^20 cycles (0.4 ms) span the gaps within a forward.
    ``OPENBLAS_THREAD_TIMEOUT``, when set, stays as it is.

    Returns:
        False when no BLAS of ours is loaded, or it has no such setting.
    """
    if not loaded:
        return False
    library = ctypes.CDLL(loaded)
    if not all(hasattr(library, name) for name in ("openblas_read_env", "blas_thread_shutdown_")):
        return False
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
    library.openblas_read_env()
    library.blas_thread_shutdown_()  # the next product starts threads that follow the setting
    return True
