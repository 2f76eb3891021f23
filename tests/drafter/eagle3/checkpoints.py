"""Tiny EAGLE-3 checkpoints in the spellings that are published, all from one ``Design``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from services.drafter.eagle3.config import NO_OVERRIDES, Overrides
from services.drafter.eagle3.model import Eagle3Drafter
from services.drafter.eagle3.weights import check_fit, read_checkpoint
from services.speculation.messages import Features, TargetInfo
from services.speculation.window import WINDOW
from tests.drafter.eagle3.reference import Design, Weights

TARGET_LAYERS = 8
Tensors = dict[str, mx.array]


def tensors_of(weights: Weights, first: str = "midlayer.", prefix: str = "", dtype: mx.Dtype = mx.float32) -> Tensors:
    """Named as in a file. ``first`` names the first layer; ``prefix`` goes before all but the vocabulary's parts."""
    named: Tensors = {}
    for name, tensor in weights.own.items():
        layer, _, rest = name.partition(".")
        if layer == "0":
            name = first + rest
        elif layer.isdigit():
            name = f"layers.{name}"
        named[name if name.startswith("lm_head") else prefix + name] = mx.array(tensor).astype(dtype)
    return named | vocabulary_of(weights)


def vocabulary_of(weights: Weights) -> Tensors:
    ids = weights.target_ids
    known = np.zeros(len(weights.embed_tokens), np.bool_)
    known[ids] = True
    return {"d2t": mx.array(ids - np.arange(len(ids))), "t2d": mx.array(known)}


def _sizes(design: Design) -> dict[str, Any]:
    return {
        "hidden_size": design.hidden,
        "num_hidden_layers": design.layers,
        "num_attention_heads": design.heads,
        "num_key_value_heads": design.kv_heads,
        "intermediate_size": design.inner,
        "rms_norm_eps": design.eps,
        "vocab_size": design.vocab,
        "hidden_act": "silu",
        "attention_bias": design.attention_bias,
        "mlp_bias": design.mlp_bias,
    }


def _flags(design: Design) -> dict[str, Any]:
    flags: dict[str, Any] = {"target_hidden_size": design.target_hidden}
    flags |= {"norm_before_residual": True} if design.norm_before_residual else {}
    flags |= {"norm_before_fc": True} if design.norm_before_fc else {}
    flags |= {"fc_norm": True} if design.fc_norm else {}
    flags |= {"norm_output": True} if design.recycle_post_norm else {}
    flags |= {"bias": True} if design.fc_bias else {}
    flags |= {"tie_word_embeddings": True} if design.head == "embedding" else {}
    flags |= {"logit_scale": design.logit_scale} if design.logit_scale != 1 else {}
    return flags


def official(design: Design) -> dict[str, Any]:
    """yuhuili/EAGLE3-*: no tap ids, no rope_theta, no head_dim; a target of 8 layers has taps (2, 4, 5)."""
    assert design.taps == (2, 4, 5)
    assert design.heads * design.head_dim == design.hidden
    wide = {"target_hidden_size": design.target_hidden} if design.target_hidden != design.hidden else {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "max_position_embeddings": 2048,
        "draft_vocab_size": design.draft_vocab,
        **_sizes(design),
        **wide,
    }


def specforge(design: Design) -> dict[str, Any]:
    """Tap ids are the layers whose outputs are read; RoPE in transformers 4's spelling."""
    assert design.taps[0] == 2
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": design.draft_vocab,
        "head_dim": design.head_dim,
        "rope_theta": design.theta,
        "rope_scaling": design.scaling,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in design.taps],
            "use_aux_hidden_state": True,
        },
        **_sizes(design),
        **_flags(design),
    }


def nvidia(design: Design) -> dict[str, Any]:
    """Tap ids are boundaries, the last may be the number of layers; options sit in ``eagle_config``."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": design.draft_vocab,
        "head_dim": design.head_dim,
        "rope_theta": design.theta,
        "rope_scaling": design.scaling,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(design.taps),
            "use_aux_hidden_state": True,
            "next_layer_regular": True,
            "norm_before_fc": design.norm_before_fc,
            "return_hidden_post_norm": design.recycle_post_norm,
        },
        **_sizes(design),
        "target_hidden_size": design.target_hidden,
    }


def speculators(design: Design) -> dict[str, Any]:
    """The envelope of vllm-project/speculators; ``norm_before_residual`` is left out when it is true."""
    flags = {"norm_before_residual": False, **_flags(design)}
    if design.norm_before_residual:
        del flags["norm_before_residual"]
    sliding = {}
    if design.window is not None:
        sliding = {"sliding_window": design.window, "layer_types": ["sliding_attention"] * design.layers}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "draft_vocab_size": design.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(design.taps),
        "embed_requires_grad": False,
        "transformer_layer_config": {
            "model_type": "qwen3" if design.qk_norm else "llama",
            "head_dim": design.head_dim,
            "rope_parameters": {"rope_theta": design.theta, **(design.scaling or {"rope_type": "default"})},
            **sliding,
            **_sizes(design),
        },
        **flags,
    }


def nebius(design: Design) -> dict[str, Any]:
    """Spells the draft vocabulary its own way."""
    config = specforge(design)
    config["truncated_vocab_size"] = config.pop("draft_vocab_size")
    return {**config, "architectures": ["LlamaForCausalLM"]}


def write(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mx.save_safetensors(str(folder / file), part)
    return folder


def target_info(design: Design, **changes: Any) -> TargetInfo:
    values: dict[str, Any] = {
        "name": "tiny",
        "weights_fingerprint": "f" * 64,
        "tokenizer_fingerprint": "t",
        "layers": TARGET_LAYERS,
        "hidden_size": design.target_hidden,
        "vocab_size": design.vocab,
        "context_length": 4096,
        "eos_ids": (0,),
        "feature_dtype": "float32",
        "device": "cpu",
        "max_tree_nodes": 64,
    }
    return TargetInfo(**values | changes)


def shared_by(weights: Weights) -> Callable[[str], mx.array]:
    """The target's tensors by name."""
    return {"embed_tokens": mx.array(weights.embed_tokens), "lm_head": mx.array(weights.lm_head)}.__getitem__


def load(
    folder: Path, design: Design, weights: Weights, overrides: Overrides = NO_OVERRIDES, window: int = WINDOW
) -> Eagle3Drafter:
    checkpoint = read_checkpoint(folder, overrides)
    spec = check_fit(checkpoint, target_info(design))
    return Eagle3Drafter(checkpoint, spec, shared_by(weights), "tiny", window)


def random_rows(design: Design, n: int, seed: int = 1) -> tuple[Features, list[int]]:
    """Features of positions 0 .. n - 1 and the tokens at positions 1 .. n."""
    rng = np.random.default_rng(seed)
    rows = {tap: rng.standard_normal((n, design.target_hidden)).astype(np.float32) for tap in design.taps}
    return Features(0, dict(rows)), rng.integers(0, design.vocab, n).tolist()


def cut(features: Features, start: int, stop: int) -> Features:
    return Features(start, {tap: rows[start:stop] for tap, rows in features.rows.items()})
