"""EAGLE-3 in plain NumPy, float64, one whole path at a time and without a cache.

Written from the published description of the drafter, not from ``services/drafter/eagle3/model.py``: slow, and
free of everything that makes the product fast (caches, masks of trees, tables, fused kernels).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SINK_ROWS = 4


@dataclass(frozen=True)
class Design:
    """What a drafter computes, free of any spelling. Sizes are odd on purpose: heads * head_dim is not ``hidden``."""

    hidden: int = 24
    target_hidden: int = 24
    vocab: int = 53
    draft_vocab: int = 37
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 40
    layers: int = 1
    taps: tuple[int, ...] = (2, 4, 5)  # the default boundaries of a target with 8 layers
    eps: float = 1e-5
    theta: float = 10000.0
    scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    output_bias: bool = True  # only with attention_bias: Qwen-style layers have none on o_proj
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    recycle_post_norm: bool = False
    own_embedding: bool = False
    head: str = "own"  # or "embedding", "target"
    logit_scale: float = 1.0
    window: int | None = None


@dataclass(frozen=True)
class Weights:
    """Tensors of one drafter in float32 under the official names without ``midlayer.``, and the target's two."""

    own: dict[str, NDArray[np.float32]]
    target_ids: NDArray[np.int64]
    embed_tokens: NDArray[np.float32]
    lm_head: NDArray[np.float32]


def draw_weights(design: Design, seed: int = 0) -> Weights:
    """Random weights at which every option of a design changes the output."""
    rng = np.random.default_rng(seed)
    h, ht, count = design.hidden, design.target_hidden, len(design.taps)
    q, kv = design.heads * design.head_dim, design.kv_heads * design.head_dim
    own: dict[str, NDArray[np.float32]] = {}

    def linear(name: str, out: int, fan_in: int, bias: bool = False) -> None:
        own[f"{name}.weight"] = (rng.standard_normal((out, fan_in)) * 1.5 / np.sqrt(fan_in)).astype(np.float32)
        if bias:
            own[f"{name}.bias"] = (rng.standard_normal(out) * 0.5).astype(np.float32)

    def norm(name: str, width: int) -> None:
        own[f"{name}.weight"] = (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)

    linear("fc", h, count * ht, design.fc_bias)
    if design.norm_before_fc:
        norm("input_norm", count * ht)
    if design.fc_norm:
        for tap in range(count):
            norm(f"fc_norm.{tap}", ht)
    for layer in range(design.layers):
        fan_in, attn, mlp = (2 * h if layer == 0 else h), f"{layer}.self_attn", f"{layer}.mlp"
        for name in ("input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if layer == 0 else [])):
            norm(f"{layer}.{name}", h)
        linear(f"{attn}.q_proj", q, fan_in, design.attention_bias)
        linear(f"{attn}.k_proj", kv, fan_in, design.attention_bias)
        linear(f"{attn}.v_proj", kv, fan_in, design.attention_bias)
        linear(f"{attn}.o_proj", h, q, design.attention_bias and design.output_bias)
        if design.qk_norm:
            norm(f"{attn}.q_norm", design.head_dim)
            norm(f"{attn}.k_norm", design.head_dim)
        linear(f"{mlp}.gate_proj", design.inner, h, design.mlp_bias)
        linear(f"{mlp}.up_proj", design.inner, h, design.mlp_bias)
        linear(f"{mlp}.down_proj", h, design.inner, design.mlp_bias)
    norm("norm", h)
    if design.own_embedding:
        own["embed_tokens.weight"] = rng.standard_normal((design.vocab, h)).astype(np.float32)
    if design.head == "own":
        linear("lm_head", design.draft_vocab, h)
    # In no order: a loader that sorts must sort the head's rows too.
    target_ids = rng.permutation(design.vocab)[: design.draft_vocab]
    if design.draft_vocab == design.vocab:
        target_ids = np.arange(design.vocab)
    shared = [rng.standard_normal((design.vocab, ht)).astype(np.float32) for _ in range(2)]
    return Weights(own, target_ids.astype(np.int64), *shared)


def rms_norm(x: Array, weight: NDArray[Any], eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def rope_frequencies(design: Design) -> tuple[Array, float]:
    """Angle per position of each pair of components, and the factor on rotated queries and keys."""
    d, base, scaling = design.head_dim, design.theta, design.scaling or {}
    pairs = np.arange(0, d, 2)
    frequencies = 1.0 / base ** (pairs / d)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return frequencies / factor, 1.0
    trained = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = trained * frequencies / (2 * np.pi)  # full turns over the trained context
        blend = np.clip((turns - low) / (high - low), 0, 1)
        return blend * frequencies + (1 - blend) * frequencies / factor, 1.0
    assert kind == "yarn"

    def pair_with_turns(turns: float) -> float:
        return d * np.log(trained / (turns * 2 * np.pi)) / (2 * np.log(base))

    first = max(np.floor(pair_with_turns(scaling.get("beta_fast", 32))), 0)
    last = min(np.ceil(pair_with_turns(scaling.get("beta_slow", 1))), d - 1)
    stretched = np.clip((np.arange(d // 2) - first) / max(last - first, 0.001), 0, 1)
    frequencies = frequencies * (1 - stretched) + frequencies / factor * stretched
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        own, all_dims = (0.1 * scaling[key] * np.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
        return frequencies, own / all_dims
    return frequencies, 0.1 * np.log(factor) + 1


def rotate(x: Array, position: int, frequencies: Array, scale: float) -> Array:
    """One vector [d]: component j pairs with component j + d / 2."""
    half = len(x) // 2
    cosine, sine = np.cos(position * frequencies), np.sin(position * frequencies)
    a, b = x[:half], x[half:]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine]) * scale


class Reference:
    """Whole-path forward of one design.

    Args:
        design: What to compute.
        weights: From ``draw_weights``.
    """

    def __init__(self, design: Design, weights: Weights) -> None:
        self.design, self.weights = design, weights
        self._w = {name: tensor.astype(np.float64) for name, tensor in weights.own.items()}
        self._embedding = self._w.get("embed_tokens.weight", weights.embed_tokens.astype(np.float64))
        self.keys: list[Array] = []  # per layer [rows, kv_heads, d] of the last forward, rotated

    def fuse(self, features: dict[int, NDArray[Any]]) -> Array:
        taps = [features[tap].astype(np.float64) for tap in self.design.taps]
        if self.design.fc_norm:
            taps = [rms_norm(t, self._w[f"fc_norm.{i}.weight"], self.design.eps) for i, t in enumerate(taps)]
        joined = np.concatenate(taps, axis=-1)
        if self.design.norm_before_fc:
            joined = rms_norm(joined, self._w["input_norm.weight"], self.design.eps)
        return self._linear("fc", joined)

    def outputs(self, features: dict[int, NDArray[Any]], tokens: list[int], path: list[int]) -> Array:
        """States handed on by every row: true rows 0 .. n - 1, then one row for each token of a draft path.

        Args:
            features: Per tap [n, Ht], positions 0 .. n - 1.
            tokens: [n] tokens at positions 1 .. n.
            path: Draft tokens at positions n + 1 ..
        """
        hidden = self.fuse(features)
        outputs = self.run(hidden, tokens)
        for step in range(len(path)):
            hidden = np.concatenate([hidden, outputs[-1:]])
            outputs = self.run(hidden, [*tokens, *path[: step + 1]])
        return outputs

    def run(self, hidden: Array, tokens: list[int]) -> Array:
        """All rows at once, from hidden states [n, H] and the tokens embedded beside them."""
        d, eps = self.design, self.design.eps
        self.keys = []
        embedded = rms_norm(self._embedding[np.asarray(tokens)], self._w["0.input_layernorm.weight"], eps)
        normed = rms_norm(hidden, self._w["0.hidden_norm.weight"], eps)
        x = self._attend(0, np.concatenate([embedded, normed], axis=-1))
        x = x + (normed if d.norm_before_residual else hidden)
        x = x + self._mlp(0, x)
        for layer in range(1, d.layers):
            x = x + self._attend(layer, rms_norm(x, self._w[f"{layer}.input_layernorm.weight"], eps))
            x = x + self._mlp(layer, x)
        return rms_norm(x, self._w["norm.weight"], eps) if d.recycle_post_norm else x

    def log_probs(self, states: Array) -> Array:
        """States [n, H] as ``outputs`` gives them -> log-probabilities [n, V] by target id (-inf: not drafted)."""
        normed = states
        if not self.design.recycle_post_norm:
            normed = rms_norm(states, self._w["norm.weight"], self.design.eps)
        head = {
            "own": self._w.get("lm_head.weight"),
            "embedding": self._embedding,
            "target": self.weights.lm_head.astype(np.float64),
        }[self.design.head]
        assert head is not None
        logits = normed @ head.T * self.design.logit_scale
        logits = logits - logits.max(-1, keepdims=True)
        out = np.full((len(states), self.design.vocab), -np.inf)
        out[:, self.weights.target_ids] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return out

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self._w[f"{name}.weight"].T + self._w.get(f"{name}.bias", np.zeros(1))

    def _mlp(self, layer: int, x: Array) -> Array:
        x = rms_norm(x, self._w[f"{layer}.post_attention_layernorm.weight"], self.design.eps)
        gate, up = self._linear(f"{layer}.mlp.gate_proj", x), self._linear(f"{layer}.mlp.up_proj", x)
        return self._linear(f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _attend(self, layer: int, x: Array) -> Array:
        d, n = self.design, len(x)
        name = f"{layer}.self_attn"
        queries = self._linear(f"{name}.q_proj", x).reshape(n, d.heads, d.head_dim)
        keys = self._linear(f"{name}.k_proj", x).reshape(n, d.kv_heads, d.head_dim)
        values = self._linear(f"{name}.v_proj", x).reshape(n, d.kv_heads, d.head_dim)
        if d.qk_norm:
            queries = rms_norm(queries, self._w[f"{name}.q_norm.weight"], d.eps)
            keys = rms_norm(keys, self._w[f"{name}.k_norm.weight"], d.eps)
        frequencies, scale = rope_frequencies(d)
        queries, keys = (
            np.array([[rotate(head, i, frequencies, scale) for head in row] for i, row in enumerate(rows)])
            for rows in (queries, keys)
        )
        self.keys.append(keys)
        rows = np.arange(n)
        sees = rows[None] <= rows[:, None]
        if d.window is not None:
            sees &= (rows[None] < SINK_ROWS) | (rows[None] > rows[:, None] - d.window)
        out = np.zeros((n, d.heads, d.head_dim))
        for head in range(d.heads):
            group = head // (d.heads // d.kv_heads)
            scores = queries[:, head] @ keys[:, group].T / np.sqrt(d.head_dim)
            scores = np.where(sees, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ values[:, group]
        return self._linear(f"{name}.o_proj", out.reshape(n, -1))
