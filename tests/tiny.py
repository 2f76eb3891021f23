"""Tiny random checkpoints in the format that mlx-lm loads."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 300
CONTEXT_LENGTH = 1024
WINDOW = 16
EOS, BOS = "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    "the and ing ion of to in is you that it he was for on are with as his they at be this have from "
    "not but what all were when we there can an your which their said if do will each about how"
)

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_LENGTH,
}


def write_tiny_llama(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A Llama of six layers with grouped queries; ``config`` overrides fields of config.json."""
    return write_tiny(folder, {"model_type": "llama", "tie_word_embeddings": False, **SHAPE, **config}, seed)


def write_tiny_qwen3(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A Qwen3 (norms on queries and keys) whose head is its embedding."""
    return write_tiny(folder, {"model_type": "qwen3", "tie_word_embeddings": True, **SHAPE, **config}, seed)


def write_tiny_gemma3(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A Gemma 3 text model: two sliding layers (a window of 16), then a global one, twice."""
    own = {"sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8, "rope_theta": 1e6}
    return write_tiny(folder, {"model_type": "gemma3_text", **SHAPE, **own, **config}, seed)


def write_tiny(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write a random checkpoint of any family of mlx-lm; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"eos_token_id": VOCAB_SIZE - 1, "bos_token_id": VOCAB_SIZE - 2, **config}
    (folder / "config.json").write_text(json.dumps(config))
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), _random_weights(model, np.random.default_rng(seed)))
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    settings = {"eos_token": EOS, "bos_token": BOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load_plain(folder: Path) -> nn.Module:
    """mlx-lm's own model without any seam: the reference."""
    model, _ = load_model(folder)
    return model


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE over all 256 bytes with merges of common words: 300 tokens, EOS the last."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        piece = word[0]
        for letter in word[1:]:
            if piece + letter not in tokens and len(tokens) < VOCAB_SIZE - 2:
                merges.append((piece, letter))
                tokens.append(piece + letter)
            piece += letter
    assert len(tokens) == VOCAB_SIZE - 2
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS, EOS)])
    return tokenizer


def _random_weights(model: nn.Module, rng: np.random.Generator) -> dict[str, mx.array]:
    """Matrices of unit gain over small embeddings: signals keep their size and greedy answers wander."""
    gemma = getattr(model, "model_type", "").startswith("gemma")  # its norms multiply by 1 + weight
    weights = {}
    for name, parameter in tree_flatten(model.parameters()):
        values = rng.standard_normal(parameter.shape).astype(np.float32)
        if "norm" in name:
            values = 0.2 * values + (0 if gemma else 1)
        else:
            values *= (2 if "lm_head" in name else 1.5) / np.sqrt(parameter.shape[-1])
        weights[name] = mx.array(values)
    return weights
