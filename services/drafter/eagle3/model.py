"""The EAGLE-3 forward pass over true rows and tree rows.

Row i reads (target features at position i, embedding of the token at i + 1), sits at position i and predicts
the token at i + 2. Tree rows recycle their parent's output in place of target features.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from kernels._cuda import on_cuda
from kernels.draft_round import DraftLayer
from kernels.fused_linear import Weight, linear, norm_linear
from kernels.top_k import top_log_probs
from services.drafter.eagle3.config import Eagle3Spec
from services.drafter.eagle3.fused import make_draft_layer, swap_first_layer
from services.drafter.eagle3.weights import Eagle3Checkpoint
from services.drafter.family import Frontier, TreeSession
from services.drafter.session import DraftSession, Rows
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import DrafterInfo, Features
from services.speculation.trees import IntArray
from services.speculation.window import WINDOW
from services.targets import cpu, cuda, seams
from services.targets.features import to_mlx
from services.targets.kv_rows import KVRows, round_to_doubles

_CHUNK = 512


class Attention(nn.Module):
    """Grouped-query attention with the drafter's own RoPE. ``fan_in`` is 2H in the first layer."""

    def __init__(self, spec: Eagle3Spec, fan_in: int, rope: nn.Module) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.scale = spec.heads, spec.kv_heads, spec.head_dim**-0.5
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(fan_in, queries, bias=spec.attention_bias)
        self.k_proj = nn.Linear(fan_in, keys, bias=spec.attention_bias)
        self.v_proj = nn.Linear(fan_in, keys, bias=spec.attention_bias)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=spec.attention_bias)
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_dim, spec.rms_norm_eps)
            self.k_norm = nn.RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self._rope = rope

    def __call__(self, x: mx.array, rows: Rows, layer: int) -> mx.array:
        """[n, fan_in] -> [n, H]; writes the rows' keys and values."""
        n = x.shape[0]
        queries, keys, values = (
            project(x).reshape(1, n, heads, -1)
            for project, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.kv_heads),
                (self.v_proj, self.kv_heads),
            )
        )
        if "q_norm" in self:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys, values = (t.transpose(0, 2, 1, 3) for t in (queries, keys, values))
        queries, keys = self._rope(queries, offset=rows.positions), self._rope(keys, offset=rows.positions)
        out = rows.attend(layer, queries, keys, values, self.scale)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(n, -1))


class MLP(nn.Module):
    def __init__(self, spec: Eagle3Spec, swiglu: Callable[[mx.array, mx.array], mx.array]) -> None:
        super().__init__()
        h, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj = nn.Linear(h, inner, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(h, inner, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(inner, h, bias=spec.mlp_bias)
        self._swiglu = swiglu

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._swiglu(self.gate_proj(x), self.up_proj(x)))


class FirstLayer(nn.Module):
    """Reads the embedding and the hidden state side by side, each with a norm of its own."""

    def __init__(self, spec: Eagle3Spec, rope: nn.Module, swiglu: Callable[..., mx.array]) -> None:
        super().__init__()
        h, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(h, eps), nn.RMSNorm(h, eps)
        self.post_attention_layernorm = nn.RMSNorm(h, eps)
        self.self_attn = Attention(spec, 2 * h, rope)
        self.mlp = MLP(spec, swiglu)
        self._norm_before_residual = spec.norm_before_residual

    def __call__(self, embedding: mx.array, hidden: mx.array, rows: Rows) -> mx.array:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        x = mx.concatenate([self.input_layernorm(embedding), normed], axis=-1)  # [n, 2H], embedding first
        attended = residual + self.self_attn(x, rows, 0)
        return attended + self.mlp(self.post_attention_layernorm(attended))


class LaterLayer(nn.Module):
    """An ordinary pre-norm decoder layer (vLLM's and speculators' reading of deeper drafters)."""

    def __init__(self, spec: Eagle3Spec, rope: nn.Module, swiglu: Callable[..., mx.array], index: int) -> None:
        super().__init__()
        h, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(h, eps), nn.RMSNorm(h, eps)
        self.self_attn = Attention(spec, h, rope)
        self.mlp = MLP(spec, swiglu)
        self._index = index

    def __call__(self, hidden: mx.array, rows: Rows) -> mx.array:
        attended = hidden + self.self_attn(self.input_layernorm(hidden), rows, self._index)
        return attended + self.mlp(self.post_attention_layernorm(attended))


class Eagle3Network(nn.Module):
    """The trained part, in the canonical tensor names."""

    def __init__(self, spec: Eagle3Spec, on_cpu: bool) -> None:
        super().__init__()
        h, width = spec.hidden_size, spec.tap_count * spec.target_hidden_size
        rope = initialize_rope(spec.head_dim, spec.rope_theta, False, spec.rope_scaling, 2**31 - 1)
        rope = cpu.rope_maker()(rope) if on_cpu else seams.RowRope(rope)
        swiglu = cpu.best_swiglu() if on_cpu else plain_swiglu
        self.fc = nn.Linear(width, h, bias=spec.fc_bias)
        if spec.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, spec.rms_norm_eps)
        if spec.fc_norm:
            self.fc_norm = [nn.RMSNorm(spec.target_hidden_size, spec.rms_norm_eps) for _ in range(spec.tap_count)]
        self.layers: list[Any] = [
            FirstLayer(spec, rope, swiglu),
            *(LaterLayer(spec, rope, swiglu, i) for i in range(1, spec.layers)),
        ]
        self.norm = nn.RMSNorm(h, spec.rms_norm_eps)
        if spec.own_embedding:
            self.embed_tokens = nn.Embedding(spec.target_vocab_size, h)
        if spec.head == "own":
            self.lm_head = nn.Linear(h, spec.draft_vocab_size, bias=False)

    def fuse(self, taps: list[mx.array]) -> mx.array:
        """Target features, one [n, Ht] for each tap in order, to [n, H]. Never applied to recycled states."""
        if "fc_norm" in self:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = mx.concatenate(taps, axis=-1)
        return self.fc(self.input_norm(joined) if "input_norm" in self else joined)

    def __call__(self, embedding: mx.array, hidden: mx.array, rows: Rows) -> mx.array:
        """[n, H], [n, H] -> output of the last layer before ``norm`` [n, H]."""
        hidden = self.layers[0](embedding, hidden, rows)
        for layer in self.layers[1:]:
            hidden = layer(hidden, rows)
        return hidden


def plain_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


class Eagle3Drafter:
    """A loaded EAGLE-3 drafter (implements ``family.DraftModel``). Use on the device thread only.

    Args:
        checkpoint: From ``weights.read_checkpoint``.
        spec: Its spec with taps resolved (``weights.check_fit``).
        shared: Gives the target's "embed_tokens" or "lm_head" [V, H]; called for what the checkpoint lacks.
        name: Shown to users.
        window: Rows that attention looks back at most, besides the first SINK_ROWS.
    """

    def __init__(
        self,
        checkpoint: Eagle3Checkpoint,
        spec: Eagle3Spec,
        shared: Callable[[str], mx.array],
        name: str,
        window: int = WINDOW,
    ) -> None:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self._spec, self._window = spec, min(window, spec.sliding_window or window)
        self._dtype = mx.float32 if on_cpu else mx.bfloat16
        self._network = Eagle3Network(spec, on_cpu)
        weights = {name: w.astype(self._dtype) for name, w in checkpoint.weights.items()}
        self._network.load_weights(list(_fill_biases(spec, weights).items()))
        self._embedding = weights["embed_tokens.weight"] if spec.own_embedding else _fetch(shared, "embed_tokens", spec)
        self._head = {
            "own": lambda: weights["lm_head.weight"],
            "embedding": lambda: self._embedding,
            "target": lambda: _fetch(shared, "lm_head", spec),
        }[spec.head]()
        self._embedding, self._head = self._embedding.astype(self._dtype), self._head.astype(self._dtype)
        self._target_ids = mx.array(checkpoint.draft_to_target).astype(mx.int32)
        mx.eval(self._network.parameters(), self._embedding, self._head, self._target_ids)
        self.draft_layer: DraftLayer | None = None
        if on_cuda():
            cuda.swap_linears(self._network)
            swap_first_layer(self._network.layers[0])
            parts = self._embedding, self._head, self._target_ids
            self.draft_layer = make_draft_layer(spec, self._network, *parts)
        assert spec.taps is not None
        self.info = DrafterInfo(name, "eagle3", spec.taps, checkpoint.target_fingerprint, checkpoint.parameters)

    def new_session(self) -> DraftSession:
        return DraftSession(KVRows(self._spec.layers, round_to_doubles), self._window)

    def observe(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        """Append true rows: tokens [n] at positions base + 1 .., features of positions base ..

        Raises:
            AerieError: As ``check_features``.
        """
        self.check_features(session, tokens, features)
        session.length = features.base
        for start in range(0, len(tokens), _CHUNK):
            stop = min(start + _CHUNK, len(tokens))
            taps = [to_mlx(features.rows[tap][start:stop]) for tap in self.info.taps]
            states = self.read(mx.array(tokens[start:stop]), taps, session.true_rows(stop - start))
            session.keep(stop - start, mx.contiguous(states[-1:]))

    def check_features(self, session: DraftSession, tokens: IntArray, features: Features) -> None:
        """Refuse rows that do not follow the observed ones, or are of other taps.

        Raises:
            AerieError: FEATURE_GAP as ``DraftSession.check_base``; INVALID_ARGUMENT when the
                taps are not this drafter's.
        """
        session.check_base(features.base)
        shape = (len(tokens), self._spec.target_hidden_size)
        if set(features.rows) != set(self.info.taps) or any(rows.shape != shape for rows in features.rows.values()):
            raise AerieError(Reason.INVALID_ARGUMENT, "features do not match the drafter's taps or the tokens")

    def read(self, tokens: mx.array, taps: Sequence[mx.array], rows: Rows) -> mx.array:
        """See ``family.TraceableDraftModel``."""
        fused = self._network.fuse([tap.astype(self._dtype) for tap in taps])
        return self._recycle(self._network(self._embed(tokens), fused, rows))

    def expand(self, session: TreeSession, frontier: Frontier) -> mx.array:
        rows = session.tree_rows(frontier.depth, frontier.ancestors, frontier.scratch)
        return self._recycle(self._network(self._embed(frontier.tokens), frontier.hidden, rows))

    def top_children(self, hidden: mx.array, k: int) -> tuple[mx.array, mx.array]:
        head, norm = Weight(self._head), self._network.norm
        post = self._spec.recycle_post_norm
        logits = linear(hidden, head) if post else norm_linear(hidden, norm.weight, norm.eps, head)
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        return top_log_probs(logits, min(k, self._spec.draft_vocab_size), self._target_ids)

    def rotations(self, count: int) -> mx.array:
        """See ``family.TraceableDraftModel``."""
        rope = self._network.layers[0].self_attn._rope
        return seams.rotation_table(rope, mx.arange(count), self._spec.head_dim)

    def _embed(self, tokens: mx.array) -> mx.array:
        return self._embedding[tokens]

    def _recycle(self, out: mx.array) -> mx.array:
        return self._network.norm(out) if self._spec.recycle_post_norm else out


def _fetch(shared: Callable[[str], mx.array], name: str, spec: Eagle3Spec) -> mx.array:
    tensor, shape = shared(name), (spec.target_vocab_size, spec.hidden_size)
    if tensor.shape != shape:
        raise AerieError(
            Reason.CHECKPOINT_INCOMPATIBLE, f"the target's {name} is {list(tensor.shape)}, not {list(shape)}"
        )
    return tensor


def _fill_biases(spec: Eagle3Spec, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Attention biases may leave out the output's: zero then."""
    filled = dict(weights)
    if spec.attention_bias:
        for layer in range(spec.layers):
            name = f"layers.{layer}.self_attn.o_proj.bias"
            filled.setdefault(name, mx.zeros((spec.hidden_size,), next(iter(weights.values())).dtype))
    return filled
