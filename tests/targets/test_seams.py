import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache

from services.speculation.errors import AerieError, Reason
from services.targets import cpu, seams
from services.targets.ragged import SessionRows
from tests.plain import relative_error
from tests.targets.conftest import Family
from tests.targets.test_ragged import random_tokens
from tests.tiny import load_plain, write_tiny, write_tiny_llama

MAMBA = {
    "model_type": "mamba",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}


def test_mlx_lm_s_own_caches_still_compute_what_they_did(family: Family):
    """A prompt longer than Gemma's window in two chunks, then single tokens; our own forwards come in between."""
    tokens = random_tokens(80, 40)
    ours, theirs = make_prompt_cache(family.target.model), make_prompt_cache(family.plain)
    for chunk in (tokens[:25], tokens[25:37], *([token] for token in tokens[37:])):
        family.target.forward([SessionRows.chunk(family.target.new_kv(), tokens[:9], "last")], frozenset([1]))
        got = family.target.model(mx.array(chunk)[None], cache=ours)[0]
        expected = family.plain(mx.array(chunk)[None], cache=theirs)[0]
        assert relative_error(np.array(got), np.array(expected)) < 1e-5


def test_parameters_and_types_stay(family: Family):
    ours, theirs = family.target.model, family.plain
    assert [name for name, _ in tree_flatten(ours.parameters())] == [n for n, _ in tree_flatten(theirs.parameters())]
    assert isinstance(ours.layers[0], type(theirs.layers[0]))
    assert type(ours.layers[0]).__name__ == type(theirs.layers[0]).__name__


def test_attention_of_other_families_is_untouched(family: Family):
    assert importlib.import_module(type(family.plain).__module__).scaled_dot_product_attention is not (
        base.scaled_dot_product_attention
    )
    assert not hasattr(base.scaled_dot_product_attention, "hands_over")
    untouched = importlib.import_module("mlx_lm.models.olmo2")  # loaded by no test
    assert untouched.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_second_target_of_a_family_does_not_wrap_attention_twice(tmp_path):
    model = load_plain(write_tiny_llama(tmp_path, num_hidden_layers=2))
    seams.install(model, seams.RowRope)
    first = llama.scaled_dot_product_attention
    seams.install(load_plain(tmp_path), seams.RowRope)
    assert llama.scaled_dot_product_attention is first


def test_attention_inherited_from_another_model_is_handed_over(tmp_path, monkeypatch):
    """The call is looked up in the module of the class that makes it."""

    class Attention(llama.Attention):
        """As a family defines it that takes another family's attention over."""

    Attention.__module__ = "mlx_lm.models.qwen3"
    monkeypatch.setattr(llama, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    model = load_plain(write_tiny_llama(tmp_path, num_hidden_layers=1))
    for module in model.modules():
        if isinstance(module, nn.Module) and type(module).__module__ == "mlx_lm.models.llama":
            own = type(module)
            heir = (
                Attention
                if own is llama.Attention
                else type(own.__name__, (own,), {"__module__": Attention.__module__})
            )
            module.__class__ = heir
    seams.install(model, seams.RowRope)
    assert llama.scaled_dot_product_attention.hands_over


def test_layers_that_rotate_alike_share_a_rope(tmp_path):
    model = load_plain(write_tiny_llama(tmp_path, num_hidden_layers=3))
    seams.install(model, cpu.rope_maker())
    ropes = {id(layer.self_attn.rope) for layer in model.layers}
    assert len(ropes) == 1


def test_ropes_with_other_settings_have_other_keys(tmp_path):
    def rope(**config):
        return load_plain(write_tiny_llama(tmp_path, num_hidden_layers=1, **config)).layers[0].self_attn.rope

    scaled = {"rope_type": "linear", "factor": 2.0}
    settings = [{}, {"rope_theta": 5e5}, {"rope_traditional": True}, {"rope_scaling": scaled}, {"head_dim": 16}]
    keys = [seams.rope_key(rope(**config)) for config in settings]
    assert len(set(keys)) == len(settings)
    assert seams.rope_key(rope()) == keys[0]


def test_model_without_a_decoder_is_refused(tmp_path):
    model = load_plain(write_tiny(tmp_path, MAMBA))
    with pytest.raises(AerieError, match=r"mlx_lm\.models\.mamba has no decoder") as caught:
        seams.install(model, seams.RowRope)
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED
