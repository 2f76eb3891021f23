"""The seams through which mlx-lm's own forward, unforked, verifies trees.

The attention call hands over to the cache (``ragged``), ropes take one offset a row, and class swaps tap the
residual stream and pick the rows that get logits. Models keep their parameters, names and types.
"""

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Tap
from services.targets.ragged import WindowMask

_ROPES = tuple(
    kind
    for kind in (nn.RoPE, *(value for value in vars(rope_utils).values() if isinstance(value, type)))
    if issubclass(kind, nn.Module)
)


class Recorder:
    """What one forward records: residual streams at the wanted taps, and which rows go to the head."""

    def __init__(self) -> None:
        self.wanted: frozenset[Tap] = frozenset()
        self.rows: mx.array | None = None
        self.taps: dict[Tap, mx.array] = {}

    def begin(self, wanted: frozenset[Tap], rows: mx.array | None) -> None:
        self.wanted, self.rows, self.taps = wanted, rows, {}

    def note(self, tap: Tap, value: mx.array) -> None:
        if tap in self.wanted:
            self.taps[tap] = value[0]


def swap_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Give one instance another ``__call__``; its type still derives from its own class."""
    base = type(module)
    module.__class__ = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def install(model: nn.Module, make_rope: Callable[[nn.Module], nn.Module]) -> Recorder:
    """Open all seams of a loaded mlx-lm model.

    Args:
        model: From mlx-lm; changed in place. With mlx-lm's own caches it computes what it did before.
        make_rope: Wraps a rope module so that it takes one offset a row.

    Raises:
        AerieError: TARGET_UNSUPPORTED when the model has no decoder with ``layers`` and ``norm``.
    """
    recorder = Recorder()
    decoder = _find_decoder(model)
    for index, layer in enumerate(decoder.layers):
        _tap_layer(layer, index, recorder)
    _tap_norm(decoder.norm, recorder)
    # A model's attention may be inherited from another model's module: that is the one whose call it makes.
    classes = {base for module in model.modules() for base in type(module).__mro__}
    for module_name in {base.__module__ for base in classes if base.__module__.startswith("mlx_lm.")}:
        _hand_over_attention(module_name)
    for parent in list(model.modules()):
        for name, child in list(parent.items()):
            if isinstance(child, _ROPES):
                parent[name] = make_rope(child)
    return recorder


def _find_decoder(model: nn.Module) -> Any:
    for module in model.modules():
        layers = module.get("layers")
        if isinstance(layers, list) and len(layers) == len(model.layers) and "norm" in module:
            return module
    raise AerieError(Reason.TARGET_UNSUPPORTED, f"{type(model).__module__} has no decoder with layers and a norm")


def _tap_layer(layer: nn.Module, index: int, recorder: Recorder) -> None:
    base = type(layer)

    def tapped(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        if index == 0:
            recorder.note(0, x)
        out = base.__call__(self, x, *args, **kwargs)
        recorder.note(index + 1, out[0] if isinstance(out, tuple) else out)
        return out

    swap_call(layer, tapped)


def _tap_norm(norm: nn.Module, recorder: Recorder) -> None:
    base = type(norm)

    def tapped(self: Any, x: mx.array) -> mx.array:
        out = base.__call__(self, x)
        recorder.note("final", out)
        return out if recorder.rows is None else out[:, recorder.rows]

    swap_call(norm, tapped)


def _hand_over_attention(module_name: str) -> None:
    """Make a model module's attention call ask the cache first; caches that do not attend go the usual way."""
    module = sys.modules[module_name]
    original = vars(module).get("scaled_dot_product_attention")
    if original is None or getattr(original, "hands_over", False):
        return

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if attend := getattr(cache, "attend", None):
            own: mx.array = attend(queries, scale, mask if isinstance(mask, WindowMask) else WindowMask(None), sinks)
            return own
        result: mx.array = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return result

    attention.hands_over = True  # type: ignore[attr-defined]
    module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]


class RowRope(nn.Module):
    """A rope that also takes an array of offsets, one a row: rows become the batch of ``mx.fast.rope``."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._base = base
        self.key = rope_key(base)
        """Equal for ropes that rotate alike; made here since arrays cannot be looked at while a forward is traced."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """[1, heads, rows, d] at positions ``offset`` (int: consecutive; [rows]: each its own)."""
        if isinstance(offset, int) or offset.size != x.shape[2] or x.shape[0] != 1:
            return self._base(x, offset=offset)
        if x.shape[2] == 1:
            return self._base(x, offset=offset)
        rows = self._base(x.transpose(2, 1, 0, 3), offset=offset)
        return rows.transpose(2, 1, 0, 3)


def rotation_table(rope: nn.Module, positions: mx.array, width: int) -> mx.array:
    """[n, width]: cosines, then sines by which a rope of halves turns the pairs (i, i + width / 2), scaling included.

    Args:
        rope: Takes one offset a row (``RowRope``).
        positions: [n].
        width: Dimensions that turn.
    """
    positions = positions.reshape(-1)  # a lone row's may have no dimension
    # A rotated unit vector of the first half is (cos, sin) of each pair. A constant to a traced forward, not a launch;
    # and not a broadcast: MLX's CUDA rope (0.32.4) turns rows of stride 0 wrongly.
    units = np.zeros((1, 1, len(positions), width), np.float32)
    units[..., : width // 2] = 1
    return rope(mx.array(units), offset=positions)[0, 0]


def rope_key(rope: nn.Module) -> tuple[Any, ...]:
    """Equal for ropes that rotate alike, so that layers can share tables."""
    state = {**rope.__dict__, **rope}
    parts = []
    for name in sorted(state):
        value = state[name]
        parts.append((name, np.array(value).tobytes() if isinstance(value, mx.array) else repr(value)))
    return (type(rope).__qualname__, *parts)
