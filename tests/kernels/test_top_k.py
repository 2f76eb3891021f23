import mlx.core as mx
import numpy as np
import pytest

from kernels._cuda import on_cuda
from kernels.top_k import cpu, cuda, reference, top_log_probs


def by_label(implementation):
    """Columns are called three times their id plus one; gives the ids back."""

    def call(logits, k):
        values, labels = implementation(logits, k, mx.arange(logits.shape[1]) * 3 + 1)
        assert (np.array(labels) % 3 == 1).all()
        return values, labels // 3

    return call


IMPLEMENTATIONS = {
    "cpu": cpu.top_log_probs,
    "reference": reference.top_log_probs,
    "dispatched": by_label(top_log_probs),
}
if on_cuda():
    IMPLEMENTATIONS["cuda"] = by_label(cuda.top_log_probs)


@pytest.fixture(params=IMPLEMENTATIONS)
def top(request):
    """One implementation, its results as NumPy arrays."""

    def call(logits, k):
        values, ids = IMPLEMENTATIONS[request.param](logits if isinstance(logits, mx.array) else mx.array(logits), k)
        assert (values.dtype, ids.dtype) == (mx.float32, mx.int32)
        return np.array(values), np.array(ids)

    return call


def slow_top(logits, k):
    """Sorted by (-logit, id), a log-softmax in float64; NaN counts as -inf."""
    rows = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    ids = np.array([sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in rows])
    peak = rows.max(-1, keepdims=True)
    log_probs = rows - peak - np.log(np.exp(rows - peak).sum(-1, keepdims=True))
    return np.take_along_axis(log_probs, ids, -1), ids


def assert_matches(got, expected):
    np.testing.assert_array_equal(got[1], expected[1])
    # MLX sums exponentials in float32: a hundred times the rounding of one value, the same for the whole row.
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6, atol=3e-5)


@pytest.mark.parametrize(("rows", "size"), [(1, 3), (4, 300), (10, 5000)])
@pytest.mark.parametrize("k", [1, 2, 3, 10, 300])
def test_matches_a_full_sort_in_float64(top, rows, size, k):
    logits = np.random.default_rng(rows).normal(0, 4, (rows, size)).astype(np.float32)
    k = min(k, size)
    assert_matches(top(logits, k), slow_top(logits, k))


@pytest.mark.parametrize("k", [1, 2, 5, 17, 40])
def test_equal_logits_keep_the_smaller_id(top, k):
    logits = np.random.default_rng(k).integers(-2, 2, (6, 40)).astype(np.float32)
    logits[0] = 1.5
    logits[1] = np.where(np.arange(40) % 2, 0.0, -0.0)  # equal, whatever their bits
    assert_matches(top(logits, k), slow_top(logits, k))


def test_half_precision_ties_keep_the_smaller_id(top):
    logits = mx.array(np.random.default_rng(0).normal(0, 1, (3, 2000)).astype(np.float32)).astype(mx.bfloat16)
    rows = np.array(logits.astype(mx.float32))
    assert len(np.unique(rows)) < rows.size
    assert_matches(top(logits, 50), slow_top(rows, 50))


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_banned_and_broken_logits_come_last(top, bad):
    logits = np.array([[bad, 1.0, bad, 3.0, bad], [2.0, bad, 2.0, bad, bad]], np.float32)
    assert_matches(top(logits, 4), slow_top(logits, 4))
    assert np.isneginf(top(logits, 4)[0]).tolist() == [[False, False, True, True]] * 2


def test_a_row_without_a_usable_logit_has_no_finite_value(top):
    """Growth drops what is not finite; the row's neighbours are as ever."""
    logits = np.array([[np.nan, -np.inf, np.nan], [0.0, 1.0, 2.0]], np.float32)
    values, ids = top(logits, 2)
    assert not np.isfinite(values[0]).any()
    assert_matches((values[1:], ids[1:]), slow_top(logits[1:], 2))


def test_huge_logits_keep_their_order(top):
    values, ids = top(np.array([[0.0, -3e38, -2e38], [3e38, 0.0, 2.9e38]], np.float32), 3)
    assert ids.tolist() == [[0, 2, 1], [0, 2, 1]]
    np.testing.assert_allclose(values, [[0.0, -2e38, -3e38], [0.0, -1e37, -3e38]], rtol=1e-5)


def test_inputs_are_left_alone(top):
    logits = mx.array([[1.0, np.nan, 3.0]])
    top(logits, 2)
    np.testing.assert_array_equal(np.array(logits), [[1.0, np.nan, 3.0]])
