"""The CUDA sources themselves, executed on the CPU, against the plain MLX references.

What runs on no GPU here still runs: indices, masks, barriers and the tensor cores' fragments. Timing and memory
order do not.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import kernels.commit.cuda as commit
import kernels.frontier.cuda as frontier
import kernels.fused_linear.cuda as fused_linear
import kernels.pack.cuda as pack
import kernels.top_k.cuda as top_k
import kernels.tree_attention.cuda as tree_attention
from kernels.commit import reference as commit_reference
from kernels.frontier import reference as frontier_reference
from kernels.fused_linear import reference as linear_reference
from kernels.fused_linear.weight import Weight
from kernels.pack import reference as pack_reference
from kernels.top_k import reference as top_k_reference
from kernels.tree_attention import reference as attention_reference
from tests.kernels import cuda_on_cpu

pytestmark = pytest.mark.skipif(not cuda_on_cpu.AVAILABLE, reason="needs g++")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    for module in (commit, frontier, fused_linear, pack, top_k, tree_attention):
        monkeypatch.setattr(module, "build_cuda_kernel", cuda_on_cpu.build_cuda_kernel)


def draw(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)).astype(dtype)


def assert_close(got: mx.array, expected: mx.array, tolerance: float) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    a, b = (np.array(array.astype(mx.float32)) for array in (got, expected))
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


def make_weight(outputs: int, inputs: int, dtype: mx.Dtype, group_size: int, seed: int) -> Weight:
    matrix = draw(outputs, inputs, dtype=dtype, seed=seed) * inputs**-0.5
    if not group_size:
        return Weight(matrix)
    return Weight(*mx.quantize(matrix, group_size=group_size, bits=4), group_size, 4)


def widen(array: mx.array | None) -> mx.array | None:
    return array if array is None or array.dtype == mx.uint32 else array.astype(mx.float32)


@pytest.mark.parametrize(
    ("rows", "width", "group_size", "dtype"),
    [(3, 96, 32, mx.float16), (33, 704, 64, mx.float16), (16, 96, 0, mx.bfloat16)],
    ids=["packed", "two passes over K, three tiles of rows", "dense"],
)
def test_fused_linear(rows, width, group_size, dtype):
    """The references run in float32: the CPU adds up in half precision."""
    x, residual = draw(1, rows, width, dtype=dtype), draw(1, rows, 48, dtype=dtype, seed=1)
    norm = draw(width, dtype=dtype, seed=2) * 0.1 + 1
    weights = [make_weight(48, width, dtype, group_size, seed) for seed in (3, 4)]
    wide = [replace(w, **{n: widen(getattr(w, n)) for n in ("array", "scales", "biases")}) for w in weights]
    x32, residual32, norm32 = map(widen, (x, residual, norm))
    tolerance = 2e-3 if dtype == mx.float16 else 1.5e-2
    got = fused_linear.linear(x, weights[0])
    assert_close(got, linear_reference.linear(x32, wide[0]).astype(dtype), tolerance)
    got = fused_linear.norm_linear_add(x, norm, 1e-5, weights[0], residual)
    assert_close(got, linear_reference.norm_linear_add(x32, norm32, 1e-5, wide[0], residual32).astype(dtype), tolerance)
    got = fused_linear.norm_swiglu(x, norm, 1e-5, *weights)
    assert_close(got, linear_reference.norm_swiglu(x32, norm32, 1e-5, *wide).astype(dtype), tolerance)


def make_masks(rows: int, prefix: int, held: int, capacity: int) -> tuple[mx.array, mx.array, mx.array]:
    """Every row sees itself, half of the prefix and half of the rows before it."""
    rng = np.random.default_rng(rows + prefix + held)
    visible = (rng.random((rows, capacity)) < 0.5) & (np.arange(capacity) < prefix)
    ancestors = np.concatenate([rng.random((rows, held)) < 0.5, np.tri(rows, dtype=bool)], axis=1)
    return mx.array(visible), mx.array(ancestors), mx.array([prefix])


@pytest.mark.parametrize(
    ("rows", "prefix", "held", "width", "dtype"),
    [
        (1, 0, 0, 64, mx.float16),
        (5, 1, 0, 32, mx.float32),
        (40, 150, 0, 64, mx.float16),
        (3, 37, 45, 64, mx.float16),
        (3, 37, 45, 32, mx.float32),
    ],
)
def test_tree_attention(rows, prefix, held, width, dtype):
    """Queries and new rows are transposed views; slots that were never written hold NaN."""
    capacity = 256
    visible, ancestors, length = make_masks(rows, prefix, held, capacity)
    queries, keys, values = (
        draw(1, rows, heads, width, dtype=dtype, seed=heads).transpose(0, 2, 1, 3) for heads in (6, 2, 3)
    )
    values = values[:, :2]
    written = (mx.arange(capacity) < prefix + held)[:, None]
    cache = [draw(1, 2, capacity, width, dtype=dtype, seed=seed) for seed in (8, 9)]
    spoilt = tuple(mx.where(written, array, mx.nan).astype(dtype) for array in cache)
    clean = tuple(mx.where(written, array, 0).astype(dtype) for array in cache)
    masks = visible, ancestors, length, width**-0.5
    got = tree_attention.prefix_tree_attention(queries, spoilt, (keys, values), *masks)
    tolerance = 1e-5 if dtype == mx.float32 else 5e-3
    assert_close(got, attention_reference.prefix_tree_attention(queries, clean, (keys, values), *masks), tolerance)

    joint, rotations = draw(rows, 10 * width, dtype=dtype, seed=3), draw(rows, width, seed=4)
    got_all = tree_attention.rotary_tree_attention(joint, spoilt, rotations, *masks)
    expected_all = attention_reference.rotary_tree_attention(joint, clean, rotations, *masks)
    for part, expected in zip(got_all, expected_all, strict=True):
        assert_close(part, expected, tolerance)


def test_a_barrier_that_is_missing_shows(monkeypatch):
    """The harness is one that can fail."""
    visible, ancestors, length = make_masks(5, 100, 0, 256)
    cache, new = draw(2, 1, 2, 256, 32), draw(2, 1, 2, 5, 32, seed=1)
    arguments = (draw(1, 6, 5, 32), tuple(cache), tuple(new), visible, ancestors, length, 32**-0.5)
    expected = attention_reference.prefix_tree_attention(*arguments)
    assert_close(tree_attention.prefix_tree_attention(*arguments), expected, 1e-5)
    monkeypatch.setattr(tree_attention, "_APART", tree_attention._APART.replace("__syncthreads();", "", 1))
    broken = np.array(tree_attention.prefix_tree_attention(*arguments))
    assert not np.allclose(broken, np.array(expected), atol=1e-2)


@pytest.mark.parametrize(("width", "dtype"), [(8, mx.float16), (2, mx.float32)], ids=["16 bytes", "one by one"])
def test_commit(width, dtype):
    caches = [draw(1, 3, 300, width, dtype=dtype, seed=seed) for seed in range(3)]
    rows = [draw(1, 3, 9, width, dtype=dtype, seed=seed) for seed in range(3, 6)]
    path, length = mx.array([-1, 0, 4, 8, -1]), mx.array([297])
    got = commit.commit_rows(caches, rows, path, length)
    for array, expected in zip(got, commit_reference.commit_rows(caches, rows, path, length), strict=True):
        assert mx.array_equal(array, expected)


@pytest.mark.parametrize("scratch", [0, 5])
def test_frontier(scratch):
    log_probs = draw(4, 7)
    log_probs[1, 2], log_probs[2, 3], log_probs[3, 1] = mx.nan, -mx.inf, log_probs[0, 0]
    inputs = (log_probs, mx.arange(28).reshape(4, 7), mx.array([0.0, -1, 0, 0]), draw(4, scratch) > 0, 20)
    expected = frontier_reference.choose_frontier(*inputs)
    for part, right in zip(frontier.choose_frontier(*inputs), expected, strict=True):
        np.testing.assert_array_equal(np.array(part), np.array(right))


@pytest.mark.parametrize("size", [70, 3000])
def test_top_k(size):
    logits = draw(3, size, dtype=mx.float16)
    logits[0] = mx.round(logits[0])  # ties
    logits[1, 5], logits[2, 6] = mx.nan, -mx.inf
    labels = mx.arange(size) * 2
    values, named = top_k.top_log_probs(logits, 10, labels)
    right_values, ids = top_k_reference.top_log_probs(logits, 10)
    np.testing.assert_array_equal(np.array(named), np.array(ids) * 2)
    np.testing.assert_allclose(np.array(values), np.array(right_values), atol=1e-5)


def test_pack():
    arrays = [draw(3, 50), mx.arange(300), draw(7, 2)]
    assert mx.array_equal(pack.pack_words(arrays), pack_reference.pack_words(arrays))
