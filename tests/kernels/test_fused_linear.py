"""On a CPU these run MLX's own products; on CUDA the kernels, against the same float64 reference."""

import mlx.core as mx
import numpy as np
import pytest

from kernels.fused_linear import Weight, linear, linear_add, norm_linear, norm_linear_add, norm_swiglu

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


def dense_and_packed(weight: mx.array, group_size: int, bits: int) -> tuple[Weight, np.ndarray]:
    """A weight as the products take it, and the matrix that it stands for."""
    if not bits:
        return Weight(weight), wide(weight)
    packed = mx.quantize(weight, group_size=group_size, bits=bits)
    widened = [packed[0], *(array.astype(mx.float32) for array in packed[1:])]
    matrix = mx.dequantize(*widened, group_size=group_size, bits=bits)
    return Weight(*packed, group_size, bits), np.array(matrix, np.float64)


def normed(x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * norm


KINDS = [(0, 0), (32, 4), (64, 4), (128, 4), (32, 8)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_products_with_their_norm_and_residual(rows, kind, dtype):
    x, matrix = draw(rows, 256, 48, dtype)
    weight, plain = dense_and_packed(matrix, *kind)
    assert_close(linear(x, weight), wide(x) @ plain.T, dtype)
    norm = draw(7, 256, 1, dtype)[1][0] * 16 + 1
    assert_close(norm_linear(x, norm, 1e-5, weight), normed(wide(x), wide(norm), 1e-5) @ plain.T, dtype)
    residual = draw(rows, 48, 1, dtype)[0]
    assert_close(linear_add(x, weight, residual), wide(residual) + wide(x) @ plain.T, dtype)
    both = wide(residual) + normed(wide(x), wide(norm), 1e-5) @ plain.T
    assert_close(norm_linear_add(x, norm, 1e-5, weight, residual), both, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 16, 64])
def test_swiglu_of_the_norm(rows, kind, dtype):
    x, first = draw(rows, 256, 48, dtype)
    second = draw(rows + 100, 256, 48, dtype)[1]
    (gate, plain_gate), (up, plain_up) = dense_and_packed(first, *kind), dense_and_packed(second, *kind)
    norm = draw(7, 256, 1, dtype)[1][0] * 16 + 1
    y = normed(wide(x), wide(norm), 1e-5)
    gates = y @ plain_gate.T
    expected = gates / (1 + np.exp(-gates)) * (y @ plain_up.T)
    assert_close(norm_swiglu(x, norm, 1e-5, gate, up), expected, dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(40, 48), (64, 30)])
def test_odd_sizes(inputs, outputs):
    x, matrix = draw(5, inputs, outputs, mx.float16)
    assert_close(linear(x, Weight(matrix)), wide(x) @ wide(matrix).T, mx.float16)


def test_views_are_read_as_they_stand():
    x, matrix = draw(16, 64, 32, mx.float16)
    columns = mx.concatenate([x[0], x[0]], axis=1)[:, 64:]
    assert_close(linear(columns, Weight(matrix)), wide(x[0]) @ wide(matrix).T, mx.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_gives_all_outputs_side_by_side(kind):
    parts = [draw(3, 128, outputs, mx.float32) for outputs in (48, 16, 32)]
    weights = [dense_and_packed(matrix, *kind)[0] for _, matrix in parts]
    x = parts[0][0]
    got = linear(x, Weight.stack(weights))
    assert_close(got, np.concatenate([wide(linear(x, weight)) for weight in weights], axis=-1), mx.float32)
