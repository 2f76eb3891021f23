import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from services.targets import cpu
from services.targets.cpu import TableRope, best_swiglu, rope_maker, swap_swiglu, swiglu
from services.targets.seams import RowRope
from tests.tiny import SHAPE, load_plain, write_tiny, write_tiny_gemma3, write_tiny_llama

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="mx.compile needs a C++ compiler")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"scaling_config": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"scaling_config": LLAMA3, "max_position_embeddings": 512},
    "yarn": {"scaling_config": YARN, "max_position_embeddings": 256},
    "proportional": {"scaling_config": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
    "traditional": {"traditional": True},
    "partial": {"dims": 4},
    "partial traditional": {"dims": 4, "traditional": True},
}
WIDTH = 8
POSITIONS = [0, 1, 1, 7, 7, 8, 63, 2000, 100_000]


def make_base(kind: str) -> nn.Module:
    return initialize_rope(**{"dims": WIDTH, "base": 10000.0, "traditional": False, **ROPES[kind]})


def heads(seed: int, rows: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((1, 3, rows, WIDTH)).astype(np.float32))


def one_by_one(base: nn.Module, x: mx.array, positions: list[int]) -> np.ndarray:
    """The base rope on every row alone, at its position."""
    return np.concatenate([np.array(base(x[:, :, i : i + 1], offset=p)) for i, p in enumerate(positions)], axis=2)


@pytest.mark.parametrize("kind", ROPES)
def test_row_rope_equals_its_base_row_by_row(kind: str):
    base, x = make_base(kind), heads(0, len(POSITIONS))
    got = RowRope(base)(x, offset=mx.array(POSITIONS))
    np.testing.assert_array_equal(np.array(got), one_by_one(base, x, POSITIONS))


@pytest.mark.parametrize("kind", ROPES)
def test_chosen_cpu_rope_equals_its_base(kind: str):
    """Rows at their own positions, and consecutive rows from an integer offset."""
    base, x = make_base(kind), heads(1, len(POSITIONS))
    rope = rope_maker()(base)
    assert type(rope) is (RowRope if "traditional" in kind else TableRope)
    got = rope(x, offset=mx.array(POSITIONS))
    np.testing.assert_allclose(np.array(got), one_by_one(base, x, POSITIONS), atol=1e-5)
    got = rope(x, offset=40)
    np.testing.assert_allclose(np.array(got), one_by_one(base, x, range(40, 40 + len(POSITIONS))), atol=1e-5)


def test_default_rope_turns_pairs_by_the_formula():
    """Independent of mlx: row at position p, pair (i, i + d/2) turned by p * base^(-2i/d)."""
    x = heads(2, len(POSITIONS))
    angles = np.array(POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
    first, second = np.split(np.array(x, np.float64), 2, axis=-1)
    expected = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)], axis=-1
    )
    got = np.array(rope_maker()(make_base("default"))(x, offset=mx.array(POSITIONS)))
    # float32 angles: an error of 1e-7 relative, times the position.
    np.testing.assert_allclose(got[:, :, :-1], expected[:, :, :-1], atol=1e-3)
    np.testing.assert_allclose(got[:, :, :6], expected[:, :, :6], atol=2e-5)


def test_table_rope_follows_changing_offsets_and_row_counts():
    """One instance serves all layers: its table must not outlive the rows that it was made for."""
    base = make_base("default")
    rope = rope_maker()(base)
    first, second = mx.array([4, 9, 9]), mx.array([5, 9, 9])
    x, longer = heads(3, 3), heads(4, 5)
    for offset, rows, positions in [
        (first, x, [4, 9, 9]),
        (first, x, [4, 9, 9]),
        (second, x, [5, 9, 9]),
        (7, x, [7, 8, 9]),
        (7, longer, [7, 8, 9, 10, 11]),
        (8, longer, [8, 9, 10, 11, 12]),
        (0, x, [0, 1, 2]),
    ]:
        np.testing.assert_allclose(np.array(rope(rows, offset=offset)), one_by_one(base, rows, positions), atol=1e-5)


@pytest.mark.parametrize("make", [RowRope, TableRope])
def test_batches_of_mlx_lm_go_to_the_base(make):
    base = make_base("default")
    x = mx.array(np.random.default_rng(5).standard_normal((2, 3, 4, WIDTH)).astype(np.float32))
    offsets = mx.array([3, 11])
    np.testing.assert_array_equal(np.array(make(base)(x, offset=offsets)), np.array(base(x, offset=offsets)))


@needs_compiler
def test_swiglu_equals_float64():
    gate = np.concatenate([np.linspace(-75, 75, 30001), [0.0, -0.0, 1e-30, -1e-30, 79.0, -79.0]]).astype(np.float32)
    up = np.random.default_rng(6).standard_normal(gate.shape).astype(np.float32)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    got = np.array(swiglu(mx.array(gate), mx.array(up)))
    near = gate > -16
    np.testing.assert_allclose(got[near], expected[near], rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(got[~near], expected[~near], rtol=5e-6, atol=1e-37)


@needs_compiler
def test_swiglu_saturates_without_overflow():
    gate = mx.array([-1e4, -120.0, -80.0, 120.0, 1e4, 3e38])
    expected = [0.0, 0.0, 0.0, 120.0, 1e4, 3e38]
    np.testing.assert_allclose(np.array(swiglu(gate, mx.ones(6))), expected, rtol=1e-6, atol=1e-30)


def test_best_swiglu_works_without_a_compiler(monkeypatch):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    got = best_swiglu()(mx.array([-2.0, 0.5]), mx.array([3.0, 4.0]))
    expected = [-2.0 / (1 + np.exp(2.0)) * 3, 0.5 / (1 + np.exp(-0.5)) * 4]
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-6)


@needs_compiler
def test_only_swiglu_blocks_are_swapped(tmp_path):
    """Gemma's block has the same parts around a GELU; experts take indices, too."""
    llama = load_plain(write_tiny_llama(tmp_path / "llama", num_hidden_layers=3))
    x = mx.array(np.random.default_rng(7).standard_normal((1, 5, 32)).astype(np.float32))
    before = np.array(llama.layers[0].mlp(x))
    assert swap_swiglu(llama) == 3
    np.testing.assert_allclose(np.array(llama.layers[0].mlp(x)), before, atol=1e-5)
    assert swap_swiglu(load_plain(write_tiny_gemma3(tmp_path / "gemma"))) == 0
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    shape = {**SHAPE, "model_type": "qwen3_moe", "num_hidden_layers": 2, "tie_word_embeddings": False}
    moe = {**shape, **experts, "decoder_sparse_step": 2, "mlp_only_layers": []}
    assert swap_swiglu(load_plain(write_tiny(tmp_path / "moe", moe))) == 1  # the dense layer


def test_nothing_is_swapped_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    assert swap_swiglu(load_plain(write_tiny_llama(tmp_path, num_hidden_layers=1))) == 0
