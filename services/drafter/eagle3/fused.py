"""A drafter's layer in seven launches, and its whole round in one: on CUDA launching costs more than running."""

from typing import Any

import mlx.core as mx

from kernels.draft_round import DraftLayer
from kernels.fused_linear import Weight, linear_add, norm_linear, norm_linear_add, norm_swiglu
from services.drafter.eagle3.config import Eagle3Spec
from services.drafter.session import Rows
from services.targets.seams import swap_call

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [*(attention[name] for name in _LINEARS), *(mlp[name] for name in _MLP)]
    return "q_norm" not in attention and not any("bias" in part for part in linears)


def split_joint(layer: Any) -> tuple[mx.array, mx.array]:
    """Queries', keys' and values' weights over each other [N, H]: what reads the embedding, what reads the state.

    Made once a layer, and kept with it.
    """
    if not hasattr(layer, "_halves"):
        joint = mx.concatenate([layer.self_attn[name].weight for name in _LINEARS[:3]])  # [N, 2H], embedding first
        half = joint.shape[1] // 2
        layer._halves = mx.contiguous(joint[:, :half]), mx.contiguous(joint[:, half:])
        mx.eval(layer._halves)
    halves: tuple[mx.array, mx.array] = layer._halves
    return halves


def make_draft_layer(
    spec: Eagle3Spec, network: Any, embedding: mx.array, head: mx.array, labels: mx.array
) -> DraftLayer | None:
    """The drafter for ``kernels.draft_round``, or None for one with more layers or other parts."""
    layer = network.layers[0]
    other_parts = "bias" in network.fc or "input_norm" in network or "fc_norm" in network
    if spec.layers > 1 or spec.recycle_post_norm or other_parts or not _is_plain(layer):
        return None
    by_embedding, by_state = split_joint(layer)
    return DraftLayer(
        embedding=embedding,
        fuse=network.fc.weight,
        by_embedding=by_embedding,
        by_state=by_state,
        output=layer.self_attn.o_proj.weight,
        gate=layer.mlp.gate_proj.weight,
        up=layer.mlp.up_proj.weight,
        down=layer.mlp.down_proj.weight,
        head=head,
        embedding_norm=layer.input_layernorm.weight,
        state_norm=layer.hidden_norm.weight,
        middle_norm=layer.post_attention_layernorm.weight,
        final_norm=network.norm.weight,
        labels=labels,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        eps=spec.rms_norm_eps,
        attention_scale=layer.self_attn.scale,
        logit_scale=spec.logit_scale,
        norm_residual=spec.norm_before_residual,
    )


def swap_first_layer(layer: Any) -> bool:
    """Replace a ``FirstLayer``'s forward over rows that can attend from one product; says whether it can be.

    Options with tensors inside the attention or biases keep the layer as it is.
    """
    if not _is_plain(layer):
        return False
    by_embedding, by_hidden = (Weight(half) for half in split_joint(layer))
    plain = type(layer).__call__

    def fused(self: Any, embedding: mx.array, hidden: mx.array, rows: Rows) -> mx.array:
        attend = getattr(rows, "attend_joint", None)
        if attend is None:
            out: mx.array = plain(self, embedding, hidden, rows)
            return out
        before, seen, after = self.input_layernorm, self.hidden_norm, self.post_attention_layernorm
        residual = seen(hidden) if self._norm_before_residual else hidden
        projected = norm_linear(embedding, before.weight, before.eps, by_embedding)
        projected = norm_linear_add(hidden, seen.weight, seen.eps, by_hidden, projected)
        attended = attend(0, projected, self.self_attn._rope, self.self_attn.scale)
        middle = linear_add(attended, Weight.of(self.self_attn.o_proj), residual)
        gate, up, down = (Weight.of(self.mlp[name]) for name in _MLP)
        return linear_add(norm_swiglu(middle, after.weight, after.eps, gate, up), down, middle)

    swap_call(layer, fused)
    return True
