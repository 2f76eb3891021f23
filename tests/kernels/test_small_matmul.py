"""On a CPU these run MLX's own products; on CUDA the kernels, against the same float64 reference."""

import mlx.core as mx
import numpy as np
import pytest

from kernels.small_matmul import small_matmul, small_quantized_matmul

ROWS = [1, 2, 5, 16, 33, 64, 65]
TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 6e-2}  # the CPU adds up in half precision


def draw(rows: int, inputs: int, outputs: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(rows)
    x, weight = rng.normal(0, 1, (1, rows, inputs)), rng.normal(0, inputs**-0.5, (outputs, inputs))
    return mx.array(x.astype(np.float32)).astype(dtype), mx.array(weight.astype(np.float32)).astype(dtype)


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def assert_close(got: mx.array, expected: np.ndarray, dtype: mx.Dtype) -> None:
    assert (got.dtype, got.shape) == (dtype, expected.shape)
    assert np.abs(wide(got) - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 48), (576, 192), (40, 30)])
@pytest.mark.parametrize("rows", ROWS)
def test_dense_product(rows, inputs, outputs, dtype):
    x, weight = draw(rows, inputs, outputs, dtype)
    assert_close(small_matmul(x, weight), wide(x) @ wide(weight).T, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group_size", "bits"), [(32, 4), (64, 4), (128, 4), (32, 8)])
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_quantized_product(rows, group_size, bits, dtype):
    x, weight = draw(rows, 256, 48, dtype)
    packed = mx.quantize(weight, group_size=group_size, bits=bits)
    plain = wide(
        mx.dequantize(
            *(array.astype(mx.float32) if i else array for i, array in enumerate(packed)),
            group_size=group_size,
            bits=bits,
        )
    )
    assert_close(small_quantized_matmul(x, *packed, group_size=group_size, bits=bits), wide(x) @ plain.T, dtype)


def test_transposed_views_are_read_as_they_stand():
    x, weight = draw(16, 64, 32, mx.float16)
    assert_close(small_matmul(x[0].T.T, weight), wide(x[0]) @ wide(weight).T, mx.float16)
    columns = mx.concatenate([x[0], x[0]], axis=1)[:, 64:]
    assert_close(small_matmul(columns, weight), wide(x[0]) @ wide(weight).T, mx.float16)
