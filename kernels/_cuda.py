"""CUDA sources as kernels: built on first use, named by what they were built from."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx


@cache
def build_cuda_kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, header: str = ""
) -> Callable[..., Sequence[mx.array]]:
    """An ``mx.fast.cuda_kernel`` over strided inputs; raises where there is no CUDA backend.

    MLX keeps compiled kernels on disk by name alone, so the name carries a digest of the source.
    """
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:8]
    kernel: Any = mx.fast.cuda_kernel(
        name=f"aerie_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
        ensure_row_contiguous=False,
    )
    return kernel


def on_cuda() -> bool:
    """Whether arrays live on an NVIDIA GPU."""
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()
