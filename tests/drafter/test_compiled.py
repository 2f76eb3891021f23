"""Drafting at fixed shapes against the same drafter run eagerly, which has float64 references of its own."""

import itertools

import numpy as np
import pytest

from kernels.top_k import reference
from services.drafter.compiled import ROUND_ROWS, CompiledDrafting
from services.drafter.eagle3 import model as eagle3
from services.drafter.eagle3.fused import swap_first_layer
from services.drafter.growth import grow
from services.speculation.errors import AerieError, Reason
from services.speculation.growth import Budget
from services.speculation.trees import path_to
from services.targets.kv_rows import STEP
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design
from tests.drafter.eagle3.test_model import LLAMA3, OPTIONS, assert_same_session, build


def traceable_top_log_probs(logits, k, labels):
    """The CPU's top-k reads its input, which cannot be traced; a GPU takes this one."""
    values, ids = reference.top_log_probs(logits, k)
    return values, labels[ids]


@pytest.fixture(autouse=True)
def traceable_top_k(monkeypatch):
    monkeypatch.setattr(eagle3, "top_log_probs", traceable_top_log_probs)


def rounds(length: int, seed: int = 0) -> list[tuple[int, int]]:
    """A prompt of 9 rows, then rounds of 1 to ROUND_ROWS rows, and one that is too many for a round."""
    rng, stops = np.random.default_rng(seed), [0, 9, 9 + ROUND_ROWS, 9 + 2 * ROUND_ROWS + 1]
    while stops[-1] < length:
        stops.append(min(length, stops[-1] + int(rng.integers(1, ROUND_ROWS))))
    return list(itertools.pairwise(stops))


def scores_by_path(tree):
    paths = [tuple(int(tree.tokens[n]) for n in path_to(tree.parents, node)) for node in range(len(tree))]
    return dict(zip(paths, tree.log_probs.tolist(), strict=True))


def assert_same_tree(a, b):
    """The same paths with the same scores; siblings whose scores differ by rounding may swap places."""
    a, b = scores_by_path(a), scores_by_path(b)
    assert a.keys() == b.keys()
    assert max(abs(a[path] - b[path]) for path in a) < 1e-4


@pytest.mark.parametrize("window", [8, 2048])
@pytest.mark.parametrize("option", ["plain", "two_layers_with_everything", "target_head", "fused", "fused_normed"])
def test_fixed_shapes_change_nothing(tmp_path, option, window):
    """The fused first layer is CUDA's; here it runs by the plain MLX references of its kernels."""
    own = {"fused": {"scaling": LLAMA3}, "fused_normed": {"norm_before_residual": True, "layers": 2}}
    design = Design(**(own | OPTIONS)[option])
    drafter, _, _ = build(tmp_path, design, window)
    if option in own:
        assert swap_first_layer(drafter._network.layers[0])
    compiled, budget = CompiledDrafting(drafter), Budget(20, 4, 3)
    features, tokens = checkpoints.random_rows(design, 46)
    a, b = drafter.new_session(), drafter.new_session()
    for start, stop in rounds(46):
        ids = np.array(tokens[start:stop], np.int32)
        drafter.observe(a, ids, checkpoints.cut(features, start, stop))
        compiled.observe(b, ids, checkpoints.cut(features, start, stop))
        assert_same_session(a, b)
        assert_same_tree(compiled.grow(b, 5, budget), grow(drafter, a, 5, budget))


def test_capacity_grows_below_a_tree(tmp_path):
    """The tree's own rows need room beyond the first allocation: nothing is clamped onto older rows."""
    drafter, _, _ = build(tmp_path, Design())
    compiled, budget = CompiledDrafting(drafter), Budget(30, 5, 6)
    features, tokens = checkpoints.random_rows(Design(), STEP + 4)
    a, b = drafter.new_session(), drafter.new_session()
    for start, stop in [(0, STEP - 9), *((n, n + 1) for n in range(STEP - 9, STEP + 4))]:
        ids = np.array(tokens[start:stop], np.int32)
        drafter.observe(a, ids, checkpoints.cut(features, start, stop))
        compiled.observe(b, ids, checkpoints.cut(features, start, stop))
        assert_same_tree(compiled.grow(b, 5, budget), grow(drafter, a, 5, budget))
    assert_same_session(a, b)


def test_rows_that_slid_out_of_the_window_leave_no_trace(tmp_path):
    drafter, _, _ = build(tmp_path, Design(), window=16)
    compiled, budget = CompiledDrafting(drafter), Budget(12, 3, 3)
    features, tokens = checkpoints.random_rows(Design(), 620)
    a, b = drafter.new_session(), drafter.new_session()
    drops = 0
    for start in range(0, 620, 5):
        ids, kept = np.array(tokens[start : start + 5], np.int32), len(b.kept)
        drafter.observe(a, ids, checkpoints.cut(features, start, start + 5))
        compiled.observe(b, ids, checkpoints.cut(features, start, start + 5))
        if len(b.kept) < kept:  # what the device was told of the place no longer holds
            drops += 1
            assert_same_tree(compiled.grow(b, 5, budget), grow(drafter, a, 5, budget))
    assert drops == 2
    assert_same_session(a, b)
    assert_same_tree(compiled.grow(b, 5, budget), grow(drafter, a, 5, budget))


def test_a_stop_rule_and_a_budget_without_room_grow_eagerly(tmp_path):
    drafter, _, _ = build(tmp_path, Design())
    compiled = CompiledDrafting(drafter)
    features, tokens = checkpoints.random_rows(Design(), 9)
    session = drafter.new_session()
    assert compiled.grow(session, 5, Budget(9, 3, 3)).tokens.tolist() == [5]
    compiled.observe(session, np.array(tokens, np.int32), features)
    assert compiled.grow(session, 5, Budget(1, 3, 3)).tokens.tolist() == [5]
    ruled = Budget(9, 3, 3, min_log_prob=-3.0)
    assert_same_tree(compiled.grow(session, 5, ruled), grow(drafter, session, 5, ruled))


def test_features_of_another_place_are_refused(tmp_path):
    drafter, _, _ = build(tmp_path, Design())
    compiled = CompiledDrafting(drafter)
    features, tokens = checkpoints.random_rows(Design(), 12)
    session = drafter.new_session()
    compiled.observe(session, np.array(tokens[:9], np.int32), checkpoints.cut(features, 0, 9))
    with pytest.raises(AerieError) as refused:
        compiled.observe(session, np.array(tokens[10:12], np.int32), checkpoints.cut(features, 10, 12))
    assert refused.value.reason is Reason.FEATURE_GAP


def test_layers_with_norms_or_biases_of_their_own_stay(tmp_path):
    for number, option in enumerate(("qk_norm", "attention_bias", "mlp_bias")):
        drafter, _, _ = build(tmp_path / str(number), Design(**OPTIONS[option]))
        assert not swap_first_layer(drafter._network.layers[0])
