"""Products of 2 to 64 rows with a weight matrix, dense or 4-bit: what verifying and drafting a tree mostly does."""

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.small_matmul import cuda


def small_matmul(x: mx.array, weight: mx.array) -> mx.array:
    """``x @ weight.T``.

    Args:
        x: [..., K].
        weight: [N, K], as in a linear layer.
    """
    if on_cuda() and cuda.supports(x, weight.shape[0], weight.dtype):
        return cuda.dense(x, weight)
    return x @ weight.T


def small_quantized_matmul(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int
) -> mx.array:
    """``x @ dequantize(weight).T`` for an affine-quantised weight; arguments as in ``mx.quantized_matmul``."""
    packed = bits == 4 and group_size in (32, 64, 128) and biases is not None and scales.dtype == x.dtype
    if packed and on_cuda() and cuda.supports(x, weight.shape[0], x.dtype):
        assert biases is not None
        return cuda.quantized(x, weight, scales, biases, group_size)
    return mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
