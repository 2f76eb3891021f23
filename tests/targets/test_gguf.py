import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from services.speculation.errors import AerieError, Reason
from services.targets.gguf import load_gguf
from services.targets.loader import load_target
from services.targets.target import dense_weight
from tests.plain import node_logits, relative_error
from tests.targets.test_ragged import LIMIT, SHAPES, prefilled, random_tokens, tree_rows
from tests.targets.tiny_gguf import TENSOR_TYPES, interleave, write_llama
from tests.tiny import load_plain, write_tiny_llama


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> nn.Module:
    return load_plain(write_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=2))


def refusal(path) -> str:
    with pytest.raises(AerieError) as caught:
        load_target(str(path))
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED
    return caught.value.message


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_widened_weights_equal_numpy_s(tmp_path, plain: nn.Module, kind: str):
    expected = write_llama(tmp_path / "a.gguf", plain, kind)
    model, _, _ = load_gguf(tmp_path / "a.gguf", dequantize=True)
    weights = dict(tree_flatten(model.parameters()))
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert weights[name].dtype == mx.float32
        np.testing.assert_allclose(np.array(weights[name]), values, rtol=1e-6, atol=1e-7, err_msg=name)


def test_row_order_is_undone_pair_by_pair():
    """The writer's own order, once by hand: two heads of four rows."""
    assert interleave(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_stand_for_the_same_values(tmp_path, plain: nn.Module, kind: str):
    """As GPUs get them: packed, scales in float16."""
    expected = write_llama(tmp_path / "a.gguf", plain, kind)
    model, _, _ = load_gguf(tmp_path / "a.gguf", dequantize=False)
    attention = model.layers[1].self_attn
    assert isinstance(attention.q_proj, nn.QuantizedLinear)
    assert isinstance(model.model.embed_tokens, nn.QuantizedEmbedding)
    for name in ("q_proj", "k_proj", "o_proj"):
        values = expected[f"model.layers.1.self_attn.{name}.weight"]
        got = np.array(dense_weight(attention[name]).astype(mx.float32))
        assert relative_error(got, values) < 2e-3  # float16
    assert model.model.norm.weight.dtype == mx.float16


def test_file_decodes_as_the_checkpoint_that_it_came_from(tmp_path, plain: nn.Module):
    """End to end against mlx-lm on the same weights: rotary layout, norms, head, positions."""
    write_llama(tmp_path / "a.gguf", plain, "F32")
    target = load_target(str(tmp_path / "a.gguf"))
    prompt, tokens, parents = random_tokens(95, 12), random_tokens(96, 7), SHAPES["binary"]
    logits = np.array(target.forward([tree_rows(prefilled(target, prompt), tokens, parents)]).logits)
    assert relative_error(logits, node_logits(plain, prompt, tokens, parents)) < LIMIT
    assert (target.info.vocab_size, target.info.context_length, target.info.eos_ids) == (300, 1024, (299,))


def test_head_that_is_the_embedding_has_no_tensor(tmp_path):
    tied = load_plain(write_tiny_llama(tmp_path, num_hidden_layers=1, tie_word_embeddings=True))
    write_llama(tmp_path / "a.gguf", tied, "F16")
    target = load_target(str(tmp_path / "a.gguf"))
    embedding = np.array(tied.model.embed_tokens.weight).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(np.array(target.tensor("lm_head")), embedding)


def test_defaults_of_the_format_hold(tmp_path):
    """Without a rope base or a count of KV heads, llama.cpp takes 10000 and the count of heads."""
    full = load_plain(write_tiny_llama(tmp_path, num_hidden_layers=1, num_key_value_heads=4))
    changes = {"llama__rope__freq_base": None, "llama__attention__head_count_kv": None}
    expected = write_llama(tmp_path / "a.gguf", full, "F32", **changes, llama__rope__dimension_count=None)
    model, config, _ = load_gguf(tmp_path / "a.gguf", dequantize=True)
    assert config["rope_theta"] == 10000
    assert config["num_key_value_heads"] == 4
    name = "model.layers.0.self_attn.v_proj.weight"
    np.testing.assert_array_equal(np.array(model.layers[0].self_attn.v_proj.weight), expected[name])


def test_head_width_of_its_own_is_read(tmp_path):
    wide = load_plain(write_tiny_llama(tmp_path, num_hidden_layers=1, head_dim=16))
    changes = {"llama__attention__key_length": 16, "llama__rope__dimension_count": 16}
    write_llama(tmp_path / "a.gguf", wide, "F32", **changes)
    target = load_target(str(tmp_path / "a.gguf"))
    logits = np.array(target.model(mx.array([[5, 6, 7]]))[0])
    assert relative_error(logits, np.array(wide(mx.array([[5, 6, 7]]))[0])) < 1e-5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "qwen2"}, "'qwen2'"),
        ({"general__file_type": 15}, "file type 15"),
        ({"general__file_type": None}, "file type None"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"llama__context_length": None}, "llama.context_length"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama__rope__dimension_count": 4}, "partial rotation"),
        ({"llama__block_count": 3}, "model.layers.2"),
        ({"llama__block_count": 1}, "model.layers.1"),
        ({"llama__feed_forward_length": 96}, "shape"),
        ({"llama__attention__head_count_kv": 3}, "3 KV heads"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__model": "llama"}, "'llama'"),
        ({"tokenizer__ggml__pre": "qwen2"}, "'qwen2'"),
        # Of another type, or of a size that no file has.
        ({"general__architecture": 5}, "architecture 5"),
        ({"general__file_type": "abc"}, "'abc'"),
        ({"general__file_type": [1, 2]}, "[1, 2]"),
        ({"llama__attention__head_count": 0}, "head_count is 0"),
        ({"llama__attention__head_count": "x"}, "head_count is 'x'"),
        ({"llama__attention__head_count": [4, 4]}, "head_count is [4, 4]"),
        ({"llama__attention__head_count": 2**20, "llama__attention__key_length": 2**20}, "is not a real size"),
        ({"llama__attention__head_count_kv": 0}, "head_count_kv is 0"),
        ({"llama__attention__layer_norm_rms_epsilon": "x"}, "epsilon is 'x'"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"llama__block_count": 0}, "block_count is 0"),
        ({"llama__block_count": 20000}, "20000 layers, but 21 tensors"),
        ({"llama__block_count": 2**31}, "block_count is 2147483648"),
        ({"llama__embedding_length": 0}, "embedding_length is 0"),
        ({"llama__embedding_length": 2**31}, "embedding_length is 2147483648"),
        ({"llama__feed_forward_length": 2**31}, "feed_forward_length is 2147483648"),
        ({"llama__context_length": 0}, "context_length is 0"),
        ({"llama__rope__freq_base": 0.0}, "freq_base is 0.0"),
        ({"llama__rope__freq_base": "x"}, "freq_base is 'x'"),
        ({"llama__rope__scaling__type": 5}, "rope scaling 5"),
        ({"tokenizer__ggml__tokens": 5}, "tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": "abc"}, "tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": ["a"]}, "shape"),
        ({"general__alignment": 0}, "general.alignment is 0"),
        ({"general__alignment": 4}, "general.alignment is 4"),
        ({"general__alignment": "x"}, "general.alignment is 'x'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, plain: nn.Module, changes: dict, named: str):
    write_llama(tmp_path / "a.gguf", plain, "F16", **changes)
    assert named in refusal(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "blk.0", "other"]
)
def test_tensors_that_would_be_ignored_are_refused(tmp_path, plain: nn.Module, name: str):
    """A bias or a frequency table that nobody applies gives fluent nonsense, which no self-check can see."""
    write_llama(tmp_path / "a.gguf", plain, "F16", {name: ("F32", (4,), bytes(16))})
    assert ("frequency factors" if name.startswith("rope") else name) in refusal(tmp_path / "a.gguf")


@pytest.mark.parametrize("keep", [0, 4, 30, 5000, -64])
def test_truncated_file_is_refused(tmp_path, plain: nn.Module, keep: int):
    path = tmp_path / "a.gguf"
    write_llama(path, plain, "F16")
    path.write_bytes(path.read_bytes()[:keep])
    assert "a.gguf" in refusal(path)


def test_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_text("<html>not found</html>" * 100)
    assert "not a GGUF file" in refusal(tmp_path / "a.gguf")
