"""Linear layers with what surrounds them, in plain MLX."""

import mlx.core as mx
import mlx.nn as nn

from kernels.fused_linear.weight import Weight


def linear(x: mx.array, weight: Weight) -> mx.array:
    """See ``kernels.fused_linear.linear``."""
    if weight.scales is None:
        return x @ weight.array.T
    return mx.quantized_matmul(
        x, weight.array, weight.scales, weight.biases, transpose=True, group_size=weight.group_size, bits=weight.bits
    )


def norm_linear(x: mx.array, norm: mx.array, eps: float, weight: Weight) -> mx.array:
    """See ``kernels.fused_linear.norm_linear``."""
    return linear(mx.fast.rms_norm(x, norm, eps), weight)


def linear_add(x: mx.array, weight: Weight, residual: mx.array) -> mx.array:
    """See ``kernels.fused_linear.linear_add``."""
    return residual + linear(x, weight)


def norm_linear_add(x: mx.array, norm: mx.array, eps: float, weight: Weight, residual: mx.array) -> mx.array:
    """See ``kernels.fused_linear.norm_linear_add``."""
    return residual + norm_linear(x, norm, eps, weight)


def norm_swiglu(x: mx.array, norm: mx.array, eps: float, gate: Weight, up: Weight) -> mx.array:
    """See ``kernels.fused_linear.norm_swiglu``."""
    normed = mx.fast.rms_norm(x, norm, eps)
    return nn.silu(linear(normed, gate)) * linear(normed, up)
