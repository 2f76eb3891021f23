"""Tiny GGUF files, written and dequantised in NumPy after the format's specification."""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from tests.tiny import SHAPE, VOCAB_SIZE, tiny_tokenizer

Tensor = tuple[str, tuple[int, ...], bytes]
"""Kind, shape and bytes."""
TENSOR_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def quantise(kind: str, values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The bytes of a tensor, and the float32 values that they stand for."""
    if kind in ("F32", "F16"):
        stored = values.astype(np.float32 if kind == "F32" else np.float16)
        return stored.tobytes(), stored.astype(np.float32)
    blocks = values.reshape(-1, 32)
    if kind == "Q8_0":
        d = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        q = np.clip(np.round(blocks / d), -127, 127).astype(np.int8)
        return b"".join(a.tobytes() + b.tobytes() for a, b in zip(d, q, strict=True)), decoded(values, q, d)
    low = blocks.min(1, keepdims=True) if kind == "Q4_1" else -np.abs(blocks).max(1, keepdims=True)
    d = ((blocks.max(1, keepdims=True) - low) / 15 if kind == "Q4_1" else -low / 8).astype(np.float16)
    m = low.astype(np.float16) if kind == "Q4_1" else (-8 * d)
    q = np.clip(np.round((blocks - m) / d), 0, 15).astype(np.uint8)
    packed = q[:, :16] | q[:, 16:] << 4
    heads = np.concatenate([d, m], axis=1) if kind == "Q4_1" else d
    return b"".join(a.tobytes() + b.tobytes() for a, b in zip(heads, packed, strict=True)), decoded(values, q, d, m)


def decoded(values: np.ndarray, q: np.ndarray, d: np.ndarray, m: np.ndarray | float = 0.0) -> np.ndarray:
    """Widen first, multiply then."""
    wide = q.astype(np.float32) * d.astype(np.float32) + np.asarray(m).astype(np.float32)
    return wide.reshape(values.shape)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k: the halves of each head, taken in turns."""
    rows = np.arange(len(weight)).reshape(heads, 2, -1)
    return weight[np.stack([rows[:, 0], rows[:, 1]], axis=-1).ravel()]


def write_llama(
    path: Path, plain: nn.Module, kind: str, extra: Mapping[str, Tensor] = MappingProxyType({}), **changes: Any
) -> dict[str, np.ndarray]:
    """Write mlx-lm's Llama as GGUF, matrices as ``kind``; returns the values that a loader must come to.

    Args:
        path: The file.
        plain: A tiny Llama of mlx-lm.
        kind: Tensor type of the matrices; norms are F32.
        extra: More tensors.
        changes: Metadata to change (dots as double underscores); None removes.
    """
    tensors, expected = dict(extra), {}
    for name, parameter in tree_flatten(plain.parameters()):
        layer, own = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.weight", name).groups()
        block, stem = f"blk.{layer}." if layer else "", NAMES[own]
        values = np.array(parameter)
        own_kind = kind if values.ndim == 2 else "F32"
        heads = {"attn_q": 4, "attn_k": 2}.get(stem)
        stored = interleave(values, heads) if heads else values
        data, meant = quantise(own_kind, stored)
        # Back to the order of the checkpoint: row r of it is stored in place[r].
        place = np.argsort(interleave(np.arange(len(values)), heads)) if heads else slice(None)
        expected[name] = meant[place]
        tensors[f"{block}{stem}.weight"] = (own_kind, values.shape, data)
    metadata = llama_metadata(len(plain.layers), FILE_TYPES[kind])
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)
    return expected


def llama_metadata(layers: int, file_type: int) -> dict[str, Any]:
    bpe = json.loads(tiny_tokenizer().to_str())["model"]
    return {
        "general.architecture": "llama",
        "general.file_type": file_type,
        "llama.embedding_length": SHAPE["hidden_size"],
        "llama.block_count": layers,
        "llama.feed_forward_length": SHAPE["intermediate_size"],
        "llama.attention.head_count": SHAPE["num_attention_heads"],
        "llama.attention.head_count_kv": SHAPE["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": SHAPE["rms_norm_eps"],
        "llama.rope.freq_base": SHAPE["rope_theta"],
        "llama.rope.dimension_count": SHAPE["head_dim"],
        "llama.context_length": 1024,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(tiny_tokenizer().get_vocab(), key=tiny_tokenizer().get_vocab().get),
        "tokenizer.ggml.token_type": [1] * (VOCAB_SIZE - 2) + [3, 3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": VOCAB_SIZE - 2,
        "tokenizer.ggml.eos_token_id": VOCAB_SIZE - 1,
    }


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """GGUF version 3, little-endian, tensors aligned to 32 bytes."""
    infos, data = b"", b""
    for name, (kind, shape, content) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        infos += text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", TENSOR_TYPES[kind], len(data))
        data += content + b"\0" * (-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items()) + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_of(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
