import mlx.core as mx
import numpy as np
import pytest

from kernels.frontier import choose_frontier


@pytest.mark.parametrize("scratch", [0, 1, 7])
@pytest.mark.parametrize(("nodes", "children", "width"), [(1, 5, 5), (4, 3, 2), (10, 10, 10), (3, 4, 12)])
def test_the_best_children_with_their_parents_rows(nodes, children, width, scratch):
    rng = np.random.default_rng(nodes)
    log_probs = -rng.exponential(size=(nodes, children)).astype(np.float32)
    tokens, scores = rng.integers(0, 999, (nodes, children)), -rng.exponential(size=nodes).astype(np.float32)
    ancestors = rng.random((nodes, scratch)) < 0.5
    chosen = choose_frontier(
        mx.array(log_probs), mx.array(tokens.astype(np.int32)), mx.array(scores), mx.array(ancestors), width
    )
    ranked = sorted(range(nodes * children), key=lambda c: -(scores[c // children] + log_probs.reshape(-1)[c]))[:width]
    assert np.array(chosen.pick).tolist() == ranked
    assert np.array(chosen.parents).tolist() == [c // children for c in ranked]
    assert np.array(chosen.tokens).tolist() == [tokens.reshape(-1)[c] for c in ranked]
    totals = [scores[c // children] + log_probs.reshape(-1)[c] for c in ranked]
    np.testing.assert_allclose(np.array(chosen.scores), totals, rtol=1e-6)
    for row, child in enumerate(ranked):
        own = [*ancestors[child // children].tolist(), *(i == row for i in range(width))]
        assert np.array(chosen.ancestors)[row].tolist() == own


def test_nan_comes_after_minus_infinity():
    log_probs = mx.array([[mx.nan, -1.0, -mx.inf, -0.5]])
    chosen = choose_frontier(log_probs, mx.array([[1, 2, 3, 4]]), mx.zeros((1,)), mx.zeros((1, 0), mx.bool_), 4)
    assert np.array(chosen.tokens).tolist() == [4, 2, 3, 1]
