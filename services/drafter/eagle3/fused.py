"""The first layer in seven launches, for CUDA, where launching a drafter's layers costs more than running them."""

from typing import Any

import mlx.core as mx

from kernels.fused_linear import Weight, linear_add, norm_linear, norm_linear_add, norm_swiglu
from services.drafter.session import Rows
from services.targets.seams import swap_call

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def swap_first_layer(layer: Any) -> bool:
    """Replace a ``FirstLayer``'s forward over rows that can attend from one product; says whether it can be.

    Options with tensors inside the attention or biases keep the layer as it is.
    """
    attention, mlp = layer.self_attn, layer.mlp
    linears = [*(attention[name] for name in _LINEARS), *(mlp[name] for name in _MLP)]
    if "q_norm" in attention or any("bias" in part for part in linears):
        return False
    joint = mx.concatenate([attention[name].weight for name in _LINEARS[:3]])  # [N, 2H], embedding first
    half = joint.shape[1] // 2
    by_embedding, by_hidden = Weight(mx.contiguous(joint[:, :half])), Weight(mx.contiguous(joint[:, half:]))
    mx.eval(by_embedding.array, by_hidden.array)
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
