"""Llama targets from GGUF files, with the tensor types that ``mx.load`` reads exactly."""

import math
import re
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from services.speculation.errors import AerieError, Reason
from services.targets.files import one_line
from services.targets.gguf_header import read_header

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<kind>\w+)")
_GROUP = 32
# Of the whole file; single tensors of other types are refused with the header.
_FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0"}
_MOST = 2**24
"""Far above any real size: what is larger is damage."""


def load_gguf(path: Path, dequantize: bool) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Load a GGUF file into mlx-lm's Llama.

    Args:
        path: The file.
        dequantize: Widen the weights to float32 (scales first); else keep them packed with float16 scales.

    Returns:
        The model, its mlx-lm config and the file's metadata.

    Raises:
        AerieError: TARGET_UNSUPPORTED for other architectures, tensor types or settings, and for damaged files.
    """
    header = read_header(path)
    metadata = header.metadata
    architecture, file_type = metadata.get("general.architecture"), metadata.get("general.file_type")
    if architecture != "llama" or type(file_type) is not int or file_type not in _FILE_TYPES:
        _refuse(
            f"{path.name}: architecture {one_line(repr(architecture), 40)} with file type "
            f"{one_line(repr(file_type), 40)}; built for llama with {', '.join(_FILE_TYPES.values())}"
        )
    config = _config(metadata, tied="output.weight" not in header.shapes)
    if config["num_hidden_layers"] > len(header.shapes):  # before mlx-lm builds that many
        _refuse(f"{path.name}: {config['num_hidden_layers']} layers, but {len(header.shapes)} tensors")
    try:
        tensors: Any = mx.load(str(path), format="gguf")
        model = llama.Model(llama.ModelArgs.from_dict(config))
        weights = _rename(tensors, config)
        if dequantize:
            weights = _widen(weights)
        else:
            nn.quantize(model, group_size=_GROUP, class_predicate=lambda name, _: _packing(name, weights))
            weights = {name: w.astype(mx.float16) if w.dtype == mx.float32 else w for name, w in weights.items()}
        model.load_weights(list(weights.items()))
    except (RuntimeError, ValueError) as error:
        _refuse(f"{path.name}: {one_line(error)}")
    mx.eval(model.parameters())
    return model, config, metadata


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    def size(key: str, default: int | None = None) -> int:
        value = metadata.get(f"llama.{key}", default)
        if type(value) is not int or not 0 < value <= _MOST:
            _refuse(f"llama.{key} is {one_line(repr(value), 40)}, not a number from 1 to {_MOST}")
        return value

    def real(key: str, default: float | None = None) -> float:
        value = metadata.get(f"llama.{key}", default)
        if type(value) is not float or not 0 < value < math.inf:
            _refuse(f"llama.{key} is {one_line(repr(value), 40)}, not a number above 0")
        return value

    hidden, heads = size("embedding_length"), size("attention.head_count")
    kv_heads = size("attention.head_count_kv", heads)
    if heads % kv_heads:
        _refuse(f"llama.attention.head_count {heads} does not divide into {kv_heads} KV heads")
    head_dim = size("attention.key_length", max(hidden // heads, 1))
    if heads * head_dim > _MOST:
        _refuse(f"llama.attention.head_count {heads} of {head_dim} is not a real size")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or size("rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        _refuse(f"GGUF rope scaling {one_line(repr(scaling), 40)} or partial rotation is not built")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        _refuse("tokenizer.ggml.tokens is not a list of tokens")
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": size("block_count"),
        "intermediate_size": size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(tokens),
        "rope_theta": real("rope.freq_base", 10000.0),
        "max_position_embeddings": size("context_length"),
        "tie_word_embeddings": tied,
    }


def _refuse(message: str) -> NoReturn:
    raise AerieError(Reason.TARGET_UNSUPPORTED, one_line(message, 500))


def _rename(tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    renamed = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        known = part in ("weight", "scales", "biases")
        if known and stem in outer:
            renamed[f"{outer[stem]}.{part}"] = tensor
        elif known and (block := _BLOCK.fullmatch(stem)) and block["kind"] in _NAMES:
            kind = block["kind"]
            if kind in heads:
                tensor = _half_split(tensor, heads[kind])
            renamed[f"model.layers.{block['layer']}.{_NAMES[kind]}.{part}"] = tensor
        elif stem == "rope_freqs":
            _refuse("GGUF rope frequency factors are not built")
        else:  # a linear layer's bias, for one
            _refuse(f"unknown tensor {name} in a llama GGUF file")
    return renamed


def _half_split(tensor: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's row order of q and k: interleaved pairs back to halves (packed rows alike)."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _bits(name: str, weights: dict[str, mx.array]) -> int:
    packed, scales = weights[f"{name}.weight"], weights[f"{name}.scales"]
    return packed.shape[-1] * 32 // (scales.shape[-1] * _GROUP)


def _packing(name: str, weights: dict[str, mx.array]) -> bool | dict[str, int]:
    if f"{name}.scales" not in weights:
        return False
    return {"group_size": _GROUP, "bits": _bits(name, weights)}


def _widen(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Dequantise with the scales widened to float32 first: the products are then exact to float32."""
    wide = {}
    for name, tensor in weights.items():
        stem, part = name.rsplit(".", 1)
        if part != "weight":
            continue
        if f"{stem}.scales" in weights:
            scales, biases = (weights[f"{stem}.{kind}"].astype(mx.float32) for kind in ("scales", "biases"))
            tensor = mx.dequantize(tensor, scales, biases, group_size=_GROUP, bits=_bits(stem, weights))
        wide[name] = tensor.astype(mx.float32)
    return wide
