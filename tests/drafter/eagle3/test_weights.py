"""Checkpoints in every published spelling load and compute the same; broken ones are refused by name."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.drafter.eagle3.config import NO_OVERRIDES, Overrides
from services.drafter.eagle3.weights import check_fit, read_checkpoint
from services.speculation.errors import AerieError, Reason
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.checkpoints import Tensors
from tests.drafter.eagle3.reference import Design, Reference, draw_weights

DESIGN = Design()
SQUARE = Design(hidden=32, target_hidden=32)  # heads * head_dim, for configs without head_dim
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
Config = Callable[[Design], dict[str, Any]]

# A design, its config, what its file calls the first layer, the prefix of all names, number of files.
SPELLINGS: dict[str, tuple[Design, Config, str, str, int]] = {
    "official": (SQUARE, checkpoints.official, "midlayer.", "", 1),
    "official_70b": (
        replace(SQUARE, target_hidden=64, own_embedding=True),
        checkpoints.official,
        "midlayer.",
        "",
        1,
    ),
    "official_vicuna": (replace(SQUARE, draft_vocab=SQUARE.vocab), checkpoints.official, "midlayer.", "", 1),
    "specforge": (replace(DESIGN, scaling=LLAMA3, theta=500000.0), checkpoints.specforge, "midlayer.", "", 1),
    "specforge_3.1": (replace(DESIGN, fc_norm=True), checkpoints.specforge, "midlayer.", "model.", 2),
    "specforge_tied": (
        replace(DESIGN, own_embedding=True, head="embedding", draft_vocab=DESIGN.vocab),
        checkpoints.specforge,
        "midlayer.",
        "model.",
        1,
    ),
    "nebius": (DESIGN, checkpoints.nebius, "midlayer.", "", 1),
    "nvidia": (
        replace(DESIGN, taps=(4, 6, 8), norm_before_fc=True, recycle_post_norm=True),
        checkpoints.nvidia,
        "layers.0.",
        "model.",
        1,
    ),
    "speculators_llama": (
        replace(DESIGN, norm_before_residual=True, own_embedding=True, norm_before_fc=True),
        checkpoints.speculators,
        "layers.0.",
        "",
        1,
    ),
    "speculators_qwen3": (
        replace(DESIGN, taps=(1, 4, 7), qk_norm=True, layers=2, theta=1e6, recycle_post_norm=True, fc_norm=True),
        checkpoints.speculators,
        "layers.0.",
        "",
        3,
    ),
}


def refusal(folder: Path) -> AerieError:
    with pytest.raises(AerieError) as caught:
        read_checkpoint(folder)
    return caught.value


def write_changed(
    folder: Path, tensors: dict[str, mx.array | None] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A plain checkpoint with some tensors replaced, added or (None) removed."""
    named: dict[str, mx.array | None] = {**checkpoints.tensors_of(draw_weights(DESIGN)), **(tensors or {})}
    kept = {name: tensor for name, tensor in named.items() if tensor is not None}
    return checkpoints.write(folder, {**checkpoints.specforge(DESIGN), **(config or {})}, kept)


def assert_equals_reference(folder: Path, design: Design, overrides: Overrides = NO_OVERRIDES) -> None:
    weights = draw_weights(design)
    drafter = checkpoints.load(folder, design, weights, overrides)
    reference = Reference(design, weights)
    features, tokens = checkpoints.random_rows(design, 7)
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), features)
    expected = reference.outputs(features.rows, tokens, [])[-1:]
    assert drafter.info.taps == design.taps
    assert np.abs(np.array(session.last) - expected).max() <= 1e-4 * np.abs(expected).max()
    log_probs, ids = drafter.top_children(session.last, design.draft_vocab)
    by_id = reference.log_probs(expected)[0]
    assert set(np.array(ids[0]).tolist()) == set(np.flatnonzero(np.isfinite(by_id)).tolist())
    assert np.abs(np.array(log_probs[0]) - by_id[np.array(ids[0])]).max() <= 1e-4 * np.abs(by_id[np.array(ids)]).max()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_computes_the_reference(spelling: str, tmp_path: Path) -> None:
    design, config, first, prefix, shards = SPELLINGS[spelling]
    tensors = checkpoints.tensors_of(draw_weights(design), first, prefix)
    if spelling.startswith("speculators"):
        tensors |= {"verifier_norm.weight": mx.zeros(4), "verifier_lm_head.weight": mx.zeros((4, 4))}
    if spelling == "official_vicuna":
        tensors |= {"d2t": mx.zeros(design.vocab, mx.int64), "t2d": mx.zeros(design.vocab, mx.bool_)}
    if spelling == "specforge_tied":
        del tensors["d2t"], tensors["t2d"]
    folder = checkpoints.write(tmp_path, config(design), tensors, shards)
    assert_equals_reference(folder, design)


def test_overrides_reach_the_forward(tmp_path: Path) -> None:
    """A config that misleads about everything ambiguous, put right by force."""
    truth = replace(DESIGN, taps=(3, 4, 6), norm_before_residual=True, recycle_post_norm=True)
    config = {**checkpoints.nvidia(truth), "norm_before_residual": False}
    config["eagle_config"] |= {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "return_hidden_post_norm": False}
    folder = checkpoints.write(tmp_path, config, checkpoints.tensors_of(draw_weights(truth)))
    forced = Overrides(tap_convention="layer-output", recycle_post_norm=True, norm_before_residual=True)
    assert_equals_reference(folder, truth, forced)
    assert_equals_reference(folder, truth, replace(forced, taps=(3, 4, 6), tap_convention=None))


def test_sorts_the_draft_vocabulary(tmp_path: Path) -> None:
    weights = draw_weights(DESIGN)
    assert (np.diff(weights.target_ids) < 0).any()
    checkpoint = read_checkpoint(write_changed(tmp_path))
    assert checkpoint.draft_to_target.tolist() == sorted(weights.target_ids.tolist())
    head = np.array(checkpoint.weights["lm_head.weight"])
    for draft, target in enumerate(weights.target_ids):
        row = checkpoint.draft_to_target.tolist().index(target)
        assert (head[row] == weights.own["lm_head.weight"][draft]).all()


def test_accepts_half_precision_and_counts_parameters(tmp_path: Path) -> None:
    tensors = checkpoints.tensors_of(draw_weights(DESIGN), dtype=mx.bfloat16)
    checkpoint = read_checkpoint(checkpoints.write(tmp_path, checkpoints.specforge(DESIGN), tensors))
    assert {tensor.dtype for tensor in checkpoint.weights.values()} == {mx.bfloat16}
    vocabulary = {"d2t", "t2d"}
    assert checkpoint.parameters == sum(t.size for n, t in tensors.items() if n not in vocabulary)


def test_biases_that_the_config_does_not_announce_are_used(tmp_path: Path) -> None:
    """Qwen-style layers carry biases on q, k and v, and say nothing of them."""
    design = replace(DESIGN, attention_bias=True, output_bias=False, mlp_bias=True, fc_bias=True)
    config = checkpoints.specforge(DESIGN)
    assert not config["attention_bias"]
    folder = checkpoints.write(tmp_path, config, checkpoints.tensors_of(draw_weights(design)))
    assert_equals_reference(folder, design)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"midlayer.self_attn.sinks": mx.zeros(4)}, ["has layers.0.self_attn.sinks [4]", "nothing uses"]),
        ({"midlayer.hidden_norm.weight": None}, ["lacks layers.0.hidden_norm.weight [24]"]),
        ({"fc.weight": None}, ["lacks fc.weight [24, 72]"]),
        ({"norm.weight": mx.ones(25)}, ["norm.weight is [25], not [24]"]),
        ({"midlayer.self_attn.q_proj.weight": mx.zeros((32, 24))}, ["q_proj.weight is [32, 24], not [32, 48]"]),
        ({"embed_tokens.weight": mx.zeros((52, 24))}, ["embed_tokens.weight is [52, 24], not [53, 24]"]),
        ({"fc.scales": mx.zeros((24, 2)), "fc.biases": mx.zeros((24, 2))}, ["fc.scales", "fc.biases"]),
        ({"norm.weight": mx.ones(24, mx.int32)}, ["norm.weight is", "int32"]),
        ({"norm.weight": mx.full(24, float("nan"))}, ["norm.weight", "NaN"]),
        ({"fc.weight": mx.full((24, 72), float("inf"), mx.bfloat16)}, ["fc.weight", "infinite"]),
        ({"midlayer.self_attn.q_norm.weight": mx.ones(8)}, ["lacks layers.0.self_attn.k_norm.weight [8]"]),
        ({"lm_head.weight": None}, ["lm_head is missing"]),
        ({"layers.0.mlp.up_proj.weight": mx.zeros((40, 24))}, ["repeats layers.0.mlp.up_proj.weight"]),
    ],
)
def test_refuses_tensors_that_do_not_fit(tensors: dict[str, mx.array | None], words: list[str], tmp_path: Path) -> None:
    error = refusal(write_changed(tmp_path, tensors))
    assert error.reason == Reason.CHECKPOINT_INVALID
    for word in words:
        assert word in error.message


def test_names_several_problems_at_once(tmp_path: Path) -> None:
    error = refusal(write_changed(tmp_path, {"extra": mx.zeros(1), "norm.weight": None, "fc.weight": mx.ones((2, 72))}))
    for word in ("extra", "lacks norm.weight", "fc.weight is [2, 72]"):
        assert word in error.message
    # A config of another shape breaks nearly every tensor; the message stays readable.
    error = refusal(write_changed(tmp_path, config={"num_hidden_layers": 3}))
    assert "+13 more" in error.message


_IDS = draw_weights(DESIGN).target_ids
_OFFSETS = _IDS - np.arange(len(_IDS))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"d2t": mx.array(np.sort(_IDS))}, "absolute"),
        ({"d2t": mx.array(np.r_[_OFFSETS[:-1], _IDS[0] - 36])}, "two draft tokens"),
        ({"d2t": mx.array(np.r_[-1, _OFFSETS[1:]])}, "outside"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": mx.array(_OFFSETS[:-1])}, r"d2t is \[36\], not \[37\]"),
        ({"d2t": mx.array(_OFFSETS).astype(mx.float32)}, "not integers"),
        ({"d2t": mx.zeros(37, mx.int64)}, "t2d"),  # never filled: would draft the first 37 words only
    ],
)
def test_refuses_broken_vocabulary_maps(tensors: dict[str, mx.array | None], words: str, tmp_path: Path) -> None:
    with pytest.raises(AerieError, match=words) as caught:
        read_checkpoint(write_changed(tmp_path, tensors))
    assert caught.value.reason == Reason.CHECKPOINT_INVALID


def test_the_mask_over_the_target_vocabulary_is_optional(tmp_path: Path) -> None:
    assert_equals_reference(write_changed(tmp_path, {"t2d": None}), DESIGN)


def test_refuses_folders_without_readable_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(empty).reason == Reason.CHECKPOINT_NOT_FOUND

    folder = write_changed(tmp_path / "json")
    for text in ("{", "[1, 2]", '"x"', "\xff"):
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        error = refusal(folder)
        assert error.reason == Reason.CHECKPOINT_INVALID
        assert "config.json" in error.message

    folder = write_changed(tmp_path / "values", config={"hidden_size": "wide"})
    assert refusal(folder).reason == Reason.CHECKPOINT_INVALID
    folder = write_changed(tmp_path / "zero", config={"num_key_value_heads": 0})
    assert refusal(folder).reason == Reason.CHECKPOINT_INVALID

    folder = write_changed(tmp_path / "torn")
    whole = (folder / "model.safetensors").read_bytes()
    for broken in (b"", b"not a safetensors file", whole[:1000], whole[:-100]):
        (folder / "model.safetensors").write_bytes(broken)
        error = refusal(folder)
        assert error.reason == Reason.CHECKPOINT_INVALID
        assert "model.safetensors" in error.message


def test_never_opens_a_pickle(tmp_path: Path) -> None:
    """A pickle runs code when it is read: this one would leave a file behind."""
    trace = tmp_path / "trace"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (trace,))

    (tmp_path / "config.json").write_text(json.dumps(checkpoints.official(SQUARE)))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    error = refusal(tmp_path)
    assert error.reason == Reason.CHECKPOINT_INVALID
    assert "pytorch_model.bin" in error.message
    assert "safetensors" in error.message
    assert not trace.exists()


def test_names_every_reason_that_a_target_does_not_fit(tmp_path: Path) -> None:
    made_for = {"aerie": {"target_fingerprint": "a" * 64}}
    checkpoint = read_checkpoint(write_changed(tmp_path, config=made_for))
    fits = checkpoints.target_info(DESIGN, weights_fingerprint="a" * 64)
    assert check_fit(checkpoint, fits).taps == DESIGN.taps

    wrong: dict[str, tuple[Any, str]] = {
        "hidden_size": (48, "24 wide, the target 48"),
        "vocab_size": (54, "vocabulary of 53, the target has 54"),
        "layers": (4, "(2, 4, 5) outside the target's 0..4"),
        "weights_fingerprint": ("b" * 64, "aaaaaaaaaaaa, this one is bbbbbbbbbbbb"),
    }
    for name, (value, words) in wrong.items():
        with pytest.raises(AerieError) as caught:
            check_fit(checkpoint, replace(fits, **{name: value}))
        assert caught.value.reason == Reason.CHECKPOINT_INCOMPATIBLE
        assert words in caught.value.message
        assert not any(other in caught.value.message for key, (_, other) in wrong.items() if key != name)
    with pytest.raises(AerieError) as caught:
        check_fit(checkpoint, replace(fits, **{name: value for name, (value, _) in wrong.items()}))
    assert all(words in caught.value.message for _, words in wrong.values())


def test_a_checkpoint_without_a_fingerprint_fits_any_target_of_its_shape(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_changed(tmp_path))
    assert checkpoint.target_fingerprint is None
    check_fit(checkpoint, checkpoints.target_info(DESIGN, weights_fingerprint="anything"))


def test_names_other_families_from_their_files(tmp_path: Path) -> None:
    tensors: Tensors = {
        "fc.weight": mx.zeros((24, 48)),
        "layers.0.self_attn.q_proj.weight": mx.zeros((32, 24)),
        "embed_tokens.weight": mx.zeros((53, 24)),
    }
    folder = checkpoints.write(tmp_path, checkpoints.specforge(DESIGN), tensors)
    assert refusal(folder).reason == Reason.FAMILY_NOT_BUILT
    assert refusal(write_changed(tmp_path / "p", {"mask_hidden": mx.zeros((1, 1, 72))})).reason == (
        Reason.FAMILY_NOT_BUILT
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 200_000, "not JSON"),
        (b'{"a": ' * 100_000, "not JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"\xff", "not text"),
        (b"[]", "not a JSON object"),
        (b'{"eagle_config": [1]}', "config.json"),
        (b'{"transformer_layer_config": "abc"}', "config.json"),
        (b'{"aerie": {"target_fingerprint": 5}}', "target_fingerprint is 5"),
        (b'{"aerie": {"target_fingerprint": ["x"]}}', "target_fingerprint"),
        (b'{"aerie": 5}', "target_fingerprint"),
        ("folder", "not a regular file"),
        ("pipe", "not a regular file"),
    ],
)
def test_refuses_configs_that_cannot_be_read(content: bytes | str, words: str, tmp_path: Path) -> None:
    folder = write_changed(tmp_path)
    config = folder / "config.json"
    config.unlink()
    if isinstance(content, bytes):
        config.write_bytes(content)
    else:
        {"folder": config.mkdir, "pipe": lambda: os.mkfifo(config)}[content]()
    with pytest.raises(AerieError, match=words) as caught:
        read_checkpoint(folder)
    assert caught.value.reason == Reason.CHECKPOINT_INVALID
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling"])
def test_refuses_weights_that_are_no_files(kind: str, tmp_path: Path) -> None:
    folder = write_changed(tmp_path)
    extra = folder / "more.safetensors"
    make = {"folder": extra.mkdir, "pipe": lambda: os.mkfifo(extra), "dangling": lambda: extra.symlink_to("/nowhere")}
    make[kind]()
    with pytest.raises(AerieError, match=r"more\.safetensors is not a regular file") as caught:
        read_checkpoint(folder)
    assert caught.value.reason == Reason.CHECKPOINT_INVALID
