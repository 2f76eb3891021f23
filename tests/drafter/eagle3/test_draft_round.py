"""A drafter's round in one launch: the CUDA source, on the CPU, against the same drafter step by step in float32."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

import kernels.draft_round.cuda as cuda
from services.drafter import growth, whole
from services.drafter.compiled import CompiledDrafting
from services.drafter.eagle3.fused import make_draft_layer
from services.speculation.errors import AerieError
from services.speculation.growth import Budget
from services.speculation.trees import path_to
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design
from tests.drafter.eagle3.test_model import LLAMA3, build
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


@pytest.mark.parametrize(
    ("option", "dtype", "window"),
    [({}, mx.float16, 2048), (EXTRAS, mx.float16, 16), (EXTRAS, mx.bfloat16, 2048)],
    ids=["plain", "normed residual, scaled rope and logits, rows out of the window", "bfloat16"],
)
def test_equals_the_drafter_step_by_step(tmp_path, monkeypatch, option, dtype, window):
    """Every child of every expanded node is in the trees. Rows stay behind in the cache from round to round."""
    drafter, a = observed(tmp_path, Design(**SIZES | option), window)
    b, features, tokens = drafter.new_session(), *checkpoints.random_rows(Design(**SIZES | option), 100, seed=2)
    drafter.observe(b, *first_rows(Design(**SIZES | option)))
    budget = Budget(BUDGET.top_k + (BUDGET.max_depth - 1) * BUDGET.top_k**2 + 1, BUDGET.max_depth, BUDGET.top_k)
    let_kernel_run(drafter, dtype, monkeypatch)
    compiled = CompiledDrafting(drafter)
    # Rounding to eight bits decides close races for a last child and for the last place in a frontier.
    share, tolerance = (0.97, 0.03) if dtype == mx.float16 else (0.85, 0.3)
    stop = 70
    for count in (0, 1, 8, 3):
        start, stop = stop, stop + count
        if count:
            ids, rows = np.array(tokens[start:stop], np.int32), checkpoints.cut(features, start, stop)
            drafter.observe(a, ids, rows)
            compiled.observe(b, ids, rows)
        expected, grown = growth.grow(drafter, a, 7, budget), compiled.grow(b, 7, budget)
        assert len(grown) == budget.max_nodes
        got, right = scores_of(grown), scores_of(expected)
        common = got.keys() & right.keys()
        assert len(common) >= share * len(right)
        assert max(abs(got[path] - right[path]) for path in common) < tolerance
        assert (a.length, a.kv.length, a.kept.tolist()) == (b.length, b.kv.length, b.kept.tolist())
    for mine, theirs in zip(a.kv.arrays(), b.kv.arrays(), strict=True):
        np.testing.assert_allclose(np.array(mine[:, :, :stop]), np.array(theirs[:, :, :stop]), atol=tolerance)
    np.testing.assert_allclose(np.array(a.last), np.array(b.last), atol=3 * tolerance)


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


def test_blocks_that_miss_each_other_are_told(tmp_path, monkeypatch):
    drafter, session = observed(tmp_path, Design(**SIZES))
    let_kernel_run(drafter, mx.float16, monkeypatch)
    monkeypatch.setattr(cuda, "_PATIENCE", 0)
    with pytest.raises(RuntimeError, match="at the same time"):
        CompiledDrafting(drafter).grow(session, 7, BUDGET)


@pytest.mark.parametrize(
    ("option", "sizes"),
    [
        ({"layers": 2}, {}),
        ({"qk_norm": True}, {}),
        ({"recycle_post_norm": True}, {}),
        ({"mlp_bias": True}, {}),
        ({"norm_before_fc": True}, {}),
        ({"fc_norm": True}, {}),
        ({"fc_bias": True}, {}),
        ({}, {"draft_vocab": 100}),
        ({}, {"inner": 72}),
        ({}, {"head_dim": 16}),
    ],
)
def test_other_drafters_go_step_by_step(tmp_path, option, sizes):
    drafter, _ = observed(tmp_path, Design(**SIZES | option | sizes))
    layer = grown_by(drafter, mx.float16)
    assert layer is None or not cuda.supports(layer, 4, 5, BLOCKS)


def test_trees_and_types_that_a_block_can_hold(tmp_path):
    drafter, _ = observed(tmp_path, Design(**SIZES))
    layer = grown_by(drafter, mx.float16)
    assert cuda.supports(layer, 16, 16, 132)
    assert not cuda.supports(layer, 17, 16, 132)
    assert not cuda.supports(layer, 16, 17, 132)
    assert not cuda.supports(grown_by(drafter, mx.float32), 4, 5, 132)
