"""Sessions whose rounds are one launch, the CUDA source run on the CPU, against the same drafter step by step.

The kernel's own numbers are checked in tests/kernels/test_draft_round.py.
"""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

import kernels.draft_round.cuda as cuda
from services.drafter import growth, session, whole
from services.drafter.compiled import ROUND_ROWS, CompiledDrafting
from services.drafter.eagle3 import model as eagle3
from services.drafter.eagle3.fused import make_draft_layer
from services.orchestrator.routing import PRESETS
from services.speculation.errors import AerieError
from services.speculation.growth import Budget
from services.speculation.messages import Features
from services.speculation.trees import path_to
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design
from tests.drafter.eagle3.test_model import LLAMA3, build
from tests.drafter.test_compiled import traceable_top_log_probs
from tests.kernels import cuda_on_cpu

pytestmark = pytest.mark.skipif(not cuda_on_cpu.AVAILABLE, reason="needs g++")

SIZES = {"hidden": 64, "target_hidden": 64, "head_dim": 32, "inner": 96, "draft_vocab": 112, "vocab": 131}
EXTRAS = {"scaling": LLAMA3, "norm_before_residual": True, "logit_scale": 1.5}
BLOCKS = 3
BUDGET = Budget(30, 4, 5)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(cuda, "build_cuda_kernel", cuda_on_cpu.build_cuda_kernel)
    monkeypatch.setattr(whole, "allocate_pinned", lambda words: np.zeros(words, np.int32))


def round_weights(drafter):
    """To half precision, in place: what both compute with."""
    half = partial(tree_map, lambda array: array.astype(mx.float16).astype(mx.float32))
    drafter._network.update(half(drafter._network.parameters()))
    drafter._embedding, drafter._head = half(drafter._embedding), half(drafter._head)


def first_rows(design):
    features, tokens = checkpoints.random_rows(design, 70)
    return np.array(tokens, np.int32), features


def observed(tmp_path, design, window=2048):
    """A drafter and a session of 70 rows."""
    drafter, _, _ = build(tmp_path, design, window)
    round_weights(drafter)
    session = drafter.new_session()
    drafter.observe(session, *first_rows(design))
    return drafter, session


def grown_by(drafter, dtype):
    """The drafter for the kernel, in another type."""
    parts = drafter._embedding, drafter._head, drafter._target_ids
    layer = make_draft_layer(drafter._spec, drafter._network, *parts)
    if layer is None:
        return None
    narrow = {n: a.astype(dtype) for n, a in vars(layer).items() if isinstance(a, mx.array) and n != "labels"}
    return replace(layer, **narrow)


def let_kernel_run(drafter, dtype, monkeypatch):
    """Rounds of the drafter by the kernel, on half-precision copies of what it holds."""
    drafter.draft_layer = grown_by(drafter, dtype)
    monkeypatch.setattr(whole, "can_run", lambda layer, depth, width: cuda.supports(layer, depth, width, BLOCKS))

    def run_round(layer, mailbox, feature_dtype, last, cache, *rest):
        last, *cache = (array.astype(dtype) for array in (last, *cache))
        done = cuda.run_round(layer, mailbox, feature_dtype, last, tuple(cache), *rest, BLOCKS)
        rows = tuple(array.astype(mx.float32) for array in done.rows)
        return cuda.Round(done.newest.astype(mx.float32), rows, done.commit)

    monkeypatch.setattr(whole, "run_round", run_round)


def scores_of(tree):
    paths = [tuple(int(tree.tokens[n]) for n in path_to(tree.parents, node)) for node in range(len(tree))]
    return dict(zip(paths, tree.log_probs.tolist(), strict=True))


def assert_same_round(drafter, compiled, a, b, budget=BUDGET):
    """``a`` step by step, ``b`` by the kernel in half precision: one tree but for close races, one session."""
    right, got = scores_of(growth.grow(drafter, a, 7, budget)), scores_of(compiled.grow(b, 7, budget))
    common = got.keys() & right.keys()
    assert len(common) >= 0.9 * len(right)
    assert max(abs(got[path] - right[path]) for path in common) < 0.03
    assert b.deferred is None
    assert (a.length, a.kv.length, a.kept.tolist()) == (b.length, b.kv.length, b.kept.tolist())
    for mine, theirs in zip(a.kv.arrays(), b.kv.arrays(), strict=True):
        np.testing.assert_allclose(*(np.array(x[:, :, : a.kv.length]) for x in (mine, theirs)), atol=0.03)
    np.testing.assert_allclose(np.array(a.last), np.array(b.last), atol=0.1)


def observe_both(drafter, compiled, a, b, design, count, seed):
    features, tokens = checkpoints.random_rows(design, count, seed)
    rows = Features(a.length, features.rows)
    drafter.observe(a, np.array(tokens, np.int32), rows)
    compiled.observe(b, np.array(tokens, np.int32), rows)


def test_rounds_leave_the_session_as_the_drafter_step_by_step_does(tmp_path, monkeypatch):
    """No new rows, one, as many as a round can read, and rows that drop out of the window on the way."""
    design = Design(**SIZES | EXTRAS)
    monkeypatch.setattr(session, "_DROP_STEP", 32)
    drafter, a = observed(tmp_path, design, window=16)
    let_kernel_run(drafter, mx.float16, monkeypatch)
    compiled, b = CompiledDrafting(drafter), drafter.new_session()
    compiled.observe(b, *first_rows(design))
    dropped = set()
    for seed, count in enumerate((0, 1, ROUND_ROWS, 3, ROUND_ROWS + 1, 5)):
        if count:
            observe_both(drafter, compiled, a, b, design, count, seed)
            assert (b.deferred is not None) == (count <= ROUND_ROWS)
        assert_same_round(drafter, compiled, a, b)
        dropped.add(b.length - b.kv.length)
    assert len(dropped) == 2


def test_a_round_of_the_preset_is_read_with_its_tree():
    """A tree that is accepted to its end gives one row more than its depth."""
    assert PRESETS["gpu"].max_depth + 1 <= ROUND_ROWS


def test_sessions_share_the_mailbox_and_budgets_differ(tmp_path, monkeypatch):
    design = Design(**SIZES)
    drafter, _ = observed(tmp_path, design)
    let_kernel_run(drafter, mx.float16, monkeypatch)
    compiled = CompiledDrafting(drafter)
    pairs = [(drafter.new_session(), drafter.new_session()) for _ in range(2)]
    for seed, pair in enumerate(pairs):
        features, tokens = checkpoints.random_rows(design, 250 + seed, seed)  # the cache grows on the way
        drafter.observe(pair[0], np.array(tokens, np.int32), features)
        compiled.observe(pair[1], np.array(tokens, np.int32), features)
    for seed, budget in enumerate((BUDGET, Budget(20, 2, 5))):
        for pair in pairs:
            observe_both(drafter, compiled, *pair, design, 4, seed)
        for pair in pairs:
            assert_same_round(drafter, compiled, *pair, budget)


def test_rows_that_no_growth_followed_are_read_before_the_next(tmp_path, monkeypatch):
    """Two rounds without a tree between them, and a tree by a stop rule, which the kernel does not grow."""
    drafter, a = observed(tmp_path, Design(**SIZES))
    b, features, tokens = drafter.new_session(), *checkpoints.random_rows(Design(**SIZES), 80, seed=2)
    drafter.observe(b, *first_rows(Design(**SIZES)))
    let_kernel_run(drafter, mx.float16, monkeypatch)
    compiled = CompiledDrafting(drafter)
    for start, stop in ((70, 73), (73, 75)):
        ids, rows = np.array(tokens[start:stop], np.int32), checkpoints.cut(features, start, stop)
        drafter.observe(a, ids, rows)
        compiled.observe(b, ids, rows)
        assert (a.length, b.length) == (stop, stop)
    ruled = Budget(9, 3, 3, min_log_prob=-9.0)
    expected, grown = scores_of(growth.grow(drafter, a, 7, ruled)), scores_of(compiled.grow(b, 7, ruled))
    assert expected.keys() == grown.keys()
    assert max(abs(expected[path] - grown[path]) for path in expected) < 1e-4
    with pytest.raises(AerieError, match="expected 75"):
        compiled.observe(b, ids, rows)


def test_a_gpu_that_does_not_run_all_blocks_is_asked_once(tmp_path, monkeypatch, caplog):
    """The round is grown step by step instead, and so are the later ones."""
    drafter, a = observed(tmp_path, Design(**SIZES))
    let_kernel_run(drafter, mx.float16, monkeypatch)
    monkeypatch.setattr(eagle3, "top_log_probs", traceable_top_log_probs)
    monkeypatch.setattr(cuda, "_PATIENCE", 0)
    compiled, b = CompiledDrafting(drafter), drafter.new_session()
    compiled.observe(b, *first_rows(Design(**SIZES)))
    for seed, count in enumerate((2, 3)):
        observe_both(drafter, compiled, a, b, Design(**SIZES), count, seed)
        assert (b.deferred is None) == (seed > 0)
        assert_same_round(drafter, compiled, a, b)
    assert caplog.text.count("at the same time") == 1


@pytest.mark.parametrize(
    "option",
    [
        {"layers": 2},
        {"qk_norm": True},
        {"recycle_post_norm": True},
        {"mlp_bias": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"fc_bias": True},
    ],
    ids=str,
)
def test_other_drafters_go_step_by_step(tmp_path, option):
    drafter, _ = observed(tmp_path, Design(**SIZES | option))
    assert grown_by(drafter, mx.float16) is None
