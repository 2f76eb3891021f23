"""A whole tree in one launch: the CUDA source, run on the CPU, against the drafter grown depth by depth in float32."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

import kernels.tree_growth.cuda as cuda
from services.drafter import growth
from services.drafter.compiled import CompiledDrafting
from services.drafter.eagle3 import model as eagle3
from services.drafter.eagle3.fused import make_growth_layer
from services.speculation.growth import Budget
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design
from tests.drafter.eagle3.test_model import LLAMA3, build
from tests.drafter.test_compiled import scores_by_path
from tests.kernels import cuda_on_cpu

pytestmark = pytest.mark.skipif(not cuda_on_cpu.AVAILABLE, reason="needs g++")

SIZES = {"hidden": 64, "target_hidden": 64, "head_dim": 32, "inner": 96, "draft_vocab": 112, "vocab": 131}
EXTRAS = {"scaling": LLAMA3, "norm_before_residual": True, "logit_scale": 1.5}
BLOCKS = 3
BUDGET = Budget(30, 4, 5)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(cuda, "build_cuda_kernel", cuda_on_cpu.build_cuda_kernel)


def round_weights(drafter):
    """To half precision, in place: what both compute with."""
    half = partial(tree_map, lambda array: array.astype(mx.float16).astype(mx.float32))
    drafter._network.update(half(drafter._network.parameters()))
    drafter._embedding, drafter._head = half(drafter._embedding), half(drafter._head)


def observed(tmp_path, design, window=2048):
    """A drafter and a session of 70 rows."""
    drafter, _, _ = build(tmp_path, design, window)
    round_weights(drafter)
    features, tokens = checkpoints.random_rows(design, 70)
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), features)
    return drafter, session


def grown_by(drafter, dtype):
    """The drafter for the kernel, in another type."""
    parts = drafter._embedding, drafter._head, drafter._target_ids
    layer = make_growth_layer(drafter._spec, drafter._network, *parts)
    if layer is None:
        return None
    narrow = {n: a.astype(dtype) for n, a in vars(layer).items() if isinstance(a, mx.array) and n != "labels"}
    return replace(layer, **narrow)


def let_kernel_grow(drafter, dtype, monkeypatch):
    """The drafter's ``grow_at_once`` by the kernel, on half-precision copies of what it holds."""
    monkeypatch.setattr(mx, "compile", lambda function: function)  # the shim computes at once
    drafter._growth_layer = grown_by(drafter, dtype)
    monkeypatch.setattr(eagle3, "can_grow", lambda layer, depth, width: cuda.supports(layer, depth, width, BLOCKS))

    def grow_tree(layer, last, place, cache, rotations, depth, width, sinks):
        rows = [array.astype(dtype) for array in (last, *cache)]
        return cuda.grow_tree(layer, rows[0], place, tuple(rows[1:]), rotations, depth, width, sinks, BLOCKS)

    monkeypatch.setattr(eagle3, "grow_tree", grow_tree)


@pytest.mark.parametrize(
    ("option", "dtype", "window"),
    [({}, mx.float16, 2048), (EXTRAS, mx.float16, 16), (EXTRAS, mx.bfloat16, 2048)],
    ids=["plain", "normed residual, scaled rope and logits, rows out of the window", "bfloat16"],
)
def test_equals_growth_depth_by_depth(tmp_path, monkeypatch, option, dtype, window):
    """Every child of every expanded node is in the trees."""
    drafter, session = observed(tmp_path, Design(**SIZES | option), window)
    budget = Budget(BUDGET.top_k + (BUDGET.max_depth - 1) * BUDGET.top_k**2 + 1, BUDGET.max_depth, BUDGET.top_k)
    expected = growth.grow(drafter, session, 7, budget)
    let_kernel_grow(drafter, dtype, monkeypatch)
    grown = CompiledDrafting(drafter).grow(session, 7, budget)
    assert len(grown) == budget.max_nodes
    got, right = scores_by_path(grown), scores_by_path(expected)
    # Rounding to eight bits decides close races for a last child and for the last place in a frontier.
    share, tolerance = (1.0, 0.02) if dtype == mx.float16 else (0.9, 0.2)
    common = got.keys() & right.keys()
    assert len(common) >= share * len(right)
    assert max(abs(got[path] - right[path]) for path in common) < tolerance


def test_blocks_that_miss_each_other_are_told(tmp_path, monkeypatch):
    drafter, session = observed(tmp_path, Design(**SIZES))
    let_kernel_grow(drafter, mx.float16, monkeypatch)
    monkeypatch.setattr(cuda, "_PATIENCE", 0)
    with pytest.raises(RuntimeError, match="did not run at the same time"):
        CompiledDrafting(drafter).grow(session, 7, BUDGET)


@pytest.mark.parametrize(
    ("option", "sizes"),
    [
        ({"layers": 2}, {}),
        ({"qk_norm": True}, {}),
        ({"recycle_post_norm": True}, {}),
        ({"mlp_bias": True}, {}),
        ({}, {"draft_vocab": 100}),
        ({}, {"inner": 72}),
        ({}, {"head_dim": 16}),
    ],
)
def test_other_drafters_grow_depth_by_depth(tmp_path, option, sizes):
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
