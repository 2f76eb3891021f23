import numpy as np
import pytest

from services.speculation.errors import AerieError, Reason
from services.targets import cpu, ragged, seams, selfcheck
from services.targets.loader import load_target
from services.targets.seams import RowRope
from tests.plain import node_logits, relative_error
from tests.targets.conftest import Family
from tests.targets.test_seams import MAMBA
from tests.tiny import SHAPE, load_plain, write_tiny, write_tiny_llama

HYBRID = {
    **SHAPE,
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.5,
}


def test_reference_paths_are_plain_decoding(family: Family):
    plain = selfcheck.decode_plainly(family.plain, 300)
    expected = node_logits(family.plain, plain.prompt, plain.tokens, [-1, 0, 1, 0, 3, 3])
    assert relative_error(np.array(plain.logits), expected) < 1e-5
    assert len(set(plain.prompt + plain.tokens)) == 16


def test_exact_target_passes_with_room_to_spare(family: Family):
    assert selfcheck.check_tree_exact(family.target, selfcheck.decode_plainly(family.plain, 300)) < 1e-4


@pytest.mark.parametrize(
    ("config", "reason", "message"),
    [
        (HYBRID, Reason.TARGET_NOT_TREE_EXACT, "cannot verify trees: its layers keep ArraysCache, KVCache"),
        (MAMBA, Reason.TARGET_UNSUPPORTED, "no decoder with layers and a norm"),
    ],
)
def test_recurrent_family_is_refused(tmp_path, config: dict, reason: Reason, message: str):
    with pytest.raises(AerieError, match=message) as caught:
        load_target(str(write_tiny(tmp_path, config)))
    assert caught.value.reason is reason


class NotAtOwnPositions(RowRope):
    """Rotates rows as if they were consecutive: wrong in every tree that is not a chain."""

    def __call__(self, x, offset=0):
        return self._base(x, offset=offset if isinstance(offset, int) else int(offset[0].item()))


def test_rope_that_ignores_positions_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "rope_maker", lambda: NotAtOwnPositions)
    with pytest.raises(AerieError, match=r"differs from plain decoding by .* relative \(limit 1e-03\)") as caught:
        load_target(str(write_tiny_llama(tmp_path)))
    assert caught.value.reason is Reason.TARGET_NOT_TREE_EXACT


def test_mask_that_ignores_the_tree_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ragged, "ancestor_mask", lambda parents: np.tri(len(parents), dtype=np.bool_))
    with pytest.raises(AerieError, match="differs from plain decoding") as caught:
        load_target(str(write_tiny_llama(tmp_path)))
    assert caught.value.reason is Reason.TARGET_NOT_TREE_EXACT


def test_missing_rope_seam_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(seams, "_ROPES", ())
    with pytest.raises(AerieError, match="cannot verify trees: its layers keep KVCache") as caught:
        load_target(str(write_tiny_llama(tmp_path)))
    assert caught.value.reason is Reason.TARGET_NOT_TREE_EXACT


def test_error_that_is_not_a_number_is_refused(family: Family):
    """NaN compares false with every limit."""
    plain = selfcheck.decode_plainly(family.plain, 300)
    broken = selfcheck.PlainPaths(plain.prompt, plain.tokens, plain.logits * float("nan"), plain.caches)
    with pytest.raises(AerieError) as caught:
        selfcheck.check_tree_exact(family.target, broken)
    assert caught.value.reason is Reason.TARGET_NOT_TREE_EXACT


def test_mlx_lm_s_models_are_not_harmed_by_a_refusal(tmp_path):
    """The attention call of a module is patched for good: other models of the family must not notice."""
    with pytest.raises(AerieError):
        load_target(str(write_tiny(tmp_path / "hybrid", HYBRID)))
    model = load_plain(tmp_path / "hybrid")
    plain = selfcheck.decode_plainly(model, 300)
    assert np.isfinite(np.array(plain.logits)).all()
