"""Llama targets from GGUF files, with the tensor types that ``mx.load`` reads exactly."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from services.speculation.errors import AerieError, Reason

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
# mx.load widens K-quants itself, and wrongly for some blocks: only these file types are known to be exact.
_FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0"}


def load_gguf(path: Path, dequantize: bool) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Load a GGUF file into mlx-lm's Llama.

    Args:
        path: The file.
        dequantize: Widen the weights to float32 (scales first); else keep them packed with float16 scales.

    Returns:
        The model, its mlx-lm config and the file's metadata.

    Raises:
        AerieError: TARGET_UNSUPPORTED for other architectures, tensor types or settings.
    """
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{path} is not a GGUF file that MLX reads: {error}") from None
    tensors, metadata = loaded
    architecture = metadata.get("general.architecture")
    file_type = int(metadata.get("general.file_type", -1))
    if architecture != "llama" or file_type not in _FILE_TYPES:
        raise AerieError(
            Reason.TARGET_UNSUPPORTED,
            f"{path.name}: architecture {architecture!r} with file type {file_type}; "
            f"built for llama with {', '.join(_FILE_TYPES.values())}",
        )
    try:
        config = _config(metadata, tied="output.weight" not in tensors)
    except KeyError as missing:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{path.name} lacks {missing}") from None
    model = llama.Model(llama.ModelArgs.from_dict(config))
    try:
        weights = _rename(tensors, config)
        if dequantize:
            weights = _widen(weights)
        else:
            nn.quantize(model, group_size=_GROUP, class_predicate=lambda name, _: _packing(name, weights))
            weights = {name: w.astype(mx.float16) if w.dtype == mx.float32 else w for name, w in weights.items()}
        model.load_weights(list(weights.items()))
    except ValueError as error:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{path.name}: {error}") from None
    mx.eval(model.parameters())
    return model, config, metadata


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    def number(key: str, default: Any = None) -> Any:
        name = f"llama.{key}"
        return default if default is not None and name not in metadata else metadata[name].item()

    heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // heads)
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or number("rope.dimension_count", head_dim) != head_dim:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"GGUF rope scaling {scaling!r} or partial rotation is not built")
    return {
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rope_theta": number("rope.freq_base", 10000.0),
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": tied,
    }


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
            raise AerieError(Reason.TARGET_UNSUPPORTED, "GGUF rope frequency factors are not built")
        else:  # a linear layer's bias, for one
            raise AerieError(Reason.TARGET_UNSUPPORTED, f"unknown tensor {name} in a llama GGUF file")
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
