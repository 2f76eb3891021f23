"""Fast class swaps for MLX's CUDA backend, where a forward of few rows is bound by the number of its launches.

The load-time self-check holds them, as everything else, to what mlx-lm's own classes computed before.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.llama import TransformerBlock

from kernels.fused_linear import Weight, linear, linear_add, norm_linear, norm_swiglu
from services.targets.seams import swap_call

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def swap_linears(model: nn.Module) -> None:
    """Give linear layers the products for few rows; other row counts and types keep MLX's own."""
    for module in model.modules():
        if _is_linear(module):
            swap_call(module, _linear)


def swap_blocks(model: nn.Module) -> int:
    """Give Llama's decoder layers a forward of five launches over a compiled forward's rows; returns how many.

    Call before ``seams.install``. Over any other cache a layer goes its own way.
    """
    layers = [layer for layer in model.layers if type(layer) is TransformerBlock and _can_fuse(layer)]
    for layer in layers:
        attention = layer.self_attn
        parts = [attention[name] for name in _LINEARS[:3]]
        joint = Weight.stack([Weight.of(part) for part in parts])
        mx.eval(joint.arrays())
        start = 0
        for part in parts:  # views of the stack: the weights are not held twice
            stop = start + part.weight.shape[0]
            for name, array in zip(("weight", "scales", "biases"), joint.arrays(), strict=False):
                part[name] = array[start:stop]
            start = stop
        layer.joint = joint
        swap_call(layer, _block)
    return len(layers)


def _block(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    attend = getattr(cache, "attend_joint", None)
    if attend is None:
        plain: mx.array = TransformerBlock.__call__(self, x, mask, cache)
        return plain
    before, after = self.input_layernorm, self.post_attention_layernorm
    joint = norm_linear(x, before.weight, before.eps, self.joint)
    attended = attend(joint, self.self_attn.rope, self.self_attn.scale, mask)
    hidden = linear_add(attended, Weight.of(self.self_attn.o_proj), x)
    gate, up, down = (Weight.of(self.mlp[name]) for name in _MLP)
    return linear_add(norm_swiglu(hidden, after.weight, after.eps, gate, up), down, hidden)


def _can_fuse(layer: Any) -> bool:
    linears = [*(layer.self_attn[name] for name in _LINEARS), *(layer.mlp[name] for name in _MLP)]
    if not all(_is_linear(part) and "bias" not in part for part in linears):
        return False
    kinds = {Weight.of(part).kind for part in linears[:3]}
    rope = layer.self_attn.rope
    halves = getattr(rope, "dims", None) == layer.self_attn.head_dim and not getattr(rope, "traditional", False)
    return len(kinds) == 1 and halves


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (type(module) is nn.QuantizedLinear and module.mode == "affine")


def _linear(self: Any, x: mx.array) -> mx.array:
    out = linear(x, Weight.of(self))
    return out + self.bias if "bias" in self else out
