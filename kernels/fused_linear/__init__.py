"""Products of 2 to 64 rows with a weight matrix, and what surrounds them in a decoder layer.

What verifying and drafting a tree mostly does. Other row counts, types and devices take plain MLX.
"""

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.fused_linear import cuda, reference
from kernels.fused_linear.weight import Weight

__all__ = ["Weight", "linear", "linear_add", "norm_linear", "norm_linear_add", "norm_swiglu"]


def linear(x: mx.array, weight: Weight) -> mx.array:
    """``x @ W.T``: [..., K] -> [..., N]."""
    if on_cuda() and cuda.supports(x, weight):
        return cuda.linear(x, weight)
    return reference.linear(x, weight)


def norm_linear(x: mx.array, norm: mx.array, eps: float, weight: Weight) -> mx.array:
    """``rms_norm(x) @ W.T``.

    Args:
        x: [..., K].
        norm: [K], the norm's weight.
        eps: The norm's.
        weight: [N, K].
    """
    if on_cuda() and cuda.supports(x, weight):
        return cuda.norm_linear(x, norm, eps, weight)
    return reference.norm_linear(x, norm, eps, weight)


def linear_add(x: mx.array, weight: Weight, residual: mx.array) -> mx.array:
    """``residual + x @ W.T``; residual is [..., N]."""
    if on_cuda() and cuda.supports(x, weight):
        return cuda.linear_add(x, weight, residual)
    return reference.linear_add(x, weight, residual)


def norm_linear_add(x: mx.array, norm: mx.array, eps: float, weight: Weight, residual: mx.array) -> mx.array:
    """``residual + rms_norm(x) @ W.T``; arguments as in ``norm_linear`` and ``linear_add``."""
    if on_cuda() and cuda.supports(x, weight):
        return cuda.norm_linear_add(x, norm, eps, weight, residual)
    return reference.norm_linear_add(x, norm, eps, weight, residual)


def norm_swiglu(x: mx.array, norm: mx.array, eps: float, gate: Weight, up: Weight) -> mx.array:
    """``silu(y @ gate.T) * (y @ up.T)`` of ``y = rms_norm(x)``; arguments as in ``norm_linear``."""
    if on_cuda() and cuda.supports(x, gate) and cuda.supports(x, up):
        return cuda.norm_swiglu(x, norm, eps, gate, up)
    return reference.norm_swiglu(x, norm, eps, gate, up)
