"""Layers in few launches, as CUDA runs them; here by the kernels' plain MLX references."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from services.targets import cuda
from services.targets.loader import load_target
from services.targets.seams import RowRope, rotation_table
from services.targets.selfcheck import check_tree_exact, decode_plainly
from tests.compiled import fuse_target
from tests.tiny import VOCAB_SIZE, load_plain, write_tiny_llama, write_tiny_qwen3

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 4.0}])
def test_fused_layers_verify_trees_under_any_rope(tmp_path, scaling):
    """A rope that keeps its frequencies in an array is looked at while the forward is traced."""
    folder = write_tiny_llama(tmp_path, rope_scaling=scaling)
    plain = decode_plainly(load_plain(folder), VOCAB_SIZE)
    assert check_tree_exact(fuse_target(load_target(str(folder)), folder), plain) < 1e-4


def test_layers_with_biases_or_other_norms_keep_their_own_forward(tmp_path):
    biased = load_plain(write_tiny_llama(tmp_path / "biased", attention_bias=True))
    normed = load_plain(write_tiny_qwen3(tmp_path / "normed"))
    turned = load_plain(write_tiny_llama(tmp_path / "turned", rope_traditional=True))
    assert [cuda.swap_blocks(model) for model in (biased, normed, turned)] == [0, 0, 0]


@pytest.mark.parametrize("positions", [[0], [5], [7, 8, 8, 9, 300]])
def test_a_rotation_table_holds_cosines_then_sines(positions):
    """Positions are a view into what the host told, as in a compiled forward."""
    told = mx.array([1, 2, *positions, 3])
    table = rotation_table(RowRope(nn.RoPE(16, base=100.0)), told[2 : 2 + len(positions)], 16)
    angles = np.array(positions)[:, None] * 100.0 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(np.array(table), np.concatenate([np.cos(angles), np.sin(angles)], axis=1), atol=3e-5)
