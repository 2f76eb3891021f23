"""CUDA sources as kernels: built on first use, named by what they were built from."""

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@cache
def build_cuda_kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, header: str = "", strided: bool = False
) -> Callable[..., Sequence[mx.array]]:
    """An ``mx.fast.cuda_kernel``; raises where there is no CUDA backend.

    MLX keeps compiled kernels by name and template alone, so the name carries a digest of the source. An input's type
    is in neither: give each input one type for each template.

    Args:
        name: For people.
        inputs, outputs: Names in the source.
        source: The kernel's body.
        header: What comes before it.
        strided: The source heeds its inputs' strides; else MLX copies those that are not contiguous.
    """
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:8]
    kernel: Any = mx.fast.cuda_kernel(
        name=f"aerie_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
        ensure_row_contiguous=not strided,
    )
    return kernel


def write_float(value: float) -> str:
    """A literal for a source: cheaper than an input of one value, which is one more array for each launch."""
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.0f"


def on_cuda() -> bool:
    """Whether arrays live on an NVIDIA GPU."""
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()


@cache
def _load_driver() -> ctypes.CDLL:
    """The CUDA driver, which MLX has loaded."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def count_multiprocessors() -> int:
    """Of the first GPU: as many blocks run at the same time at least."""
    count = ctypes.c_int()
    multiprocessor_count = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    _check(_load_driver().cuInit(0))
    _check(_load_driver().cuDeviceGetAttribute(ctypes.byref(count), multiprocessor_count, 0))
    return count.value


def allocate_pinned(words: int) -> NDArray[np.int32]:
    """Zeroed memory of the host that kernels read and write in place, at the same address.

    An array of MLX's moves between host and GPU page by page: 0.2 ms on the way there, 0.07 ms on the way back. This
    costs a microsecond. Call, and let go of it, on a thread on which MLX has used the GPU, and with no kernel under way
    that has the address.
    """
    address = ctypes.c_void_p()
    portable_and_mapped = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
    _check(_load_driver().cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(4 * words), portable_and_mapped))
    held = (ctypes.c_int32 * words).from_address(address.value or 0)
    weakref.finalize(held, _load_driver().cuMemFreeHost, address).atexit = False
    memory = np.ctypeslib.as_array(held)
    memory[:] = 0
    return memory


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answers {status}")
