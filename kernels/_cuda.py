"""CUDA sources as kernels: built on first use, named by what they were built from."""

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx


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
def count_multiprocessors() -> int:
    """Of the first GPU, from the driver, which MLX has loaded: as many blocks run at the same time at least."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    multiprocessor_count = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(count), multiprocessor_count, 0):
        raise RuntimeError("the CUDA driver does not tell how many multiprocessors its first device has")
    return count.value
