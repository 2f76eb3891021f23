"""Fast class swaps for MLX's CPU backend, each checked against what it replaces before it is used.

MLX 0.32 computes ``exp`` one scalar at a time on x86 (28 ns an element) and rebuilds rope tables in every
layer; both cost more than the matrix products of a small tree.
"""

import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from services.targets.seams import RowRope, rope_key, rotation_table, swap_call

_TOLERANCE = 2e-6


class TableRope(RowRope):
    """A rope over precomputed cosines and sines, shared by all layers that rotate alike.

    The table comes from the wrapped rope itself, applied to unit vectors, so any scaling is in it.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self._dims: int = base.dims
        self._positions: int | mx.array | None = None
        self._rows = 0
        self._tables: tuple[mx.array, mx.array] | None = None

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rows, width, half = x.shape[2], x.shape[3], self._dims // 2
        if x.shape[0] != 1 or (not isinstance(offset, int) and offset.size != rows):
            return self._base(x, offset=offset)
        last = self._positions
        same = offset is last or (isinstance(offset, int) and isinstance(last, int) and offset == last)
        if not (same and self._rows == rows) or self._tables is None:
            self._tables = self._build(offset, rows)
            self._positions, self._rows = offset, rows
        cosines, sines = self._tables
        turned = x if width == self._dims else x[..., : self._dims]
        swapped = mx.concatenate([x[..., half : self._dims], x[..., :half]], axis=-1)
        turned = turned * cosines + swapped * sines
        return turned if width == self._dims else mx.concatenate([turned, x[..., self._dims :]], axis=-1)

    def _build(self, offset: int | mx.array, rows: int) -> tuple[mx.array, mx.array]:
        positions = mx.arange(offset, offset + rows) if isinstance(offset, int) else offset
        cosine, sine = mx.split(rotation_table(RowRope(self._base), positions, self._dims), 2, axis=1)
        return mx.concatenate([cosine, cosine], axis=-1), mx.concatenate([-sine, sine], axis=-1)


def rope_maker() -> Callable[[nn.Module], nn.Module]:
    """Wrap ropes in shared tables where that gives the same values, else row by row."""
    shared: dict[tuple[Any, ...], nn.Module] = {}

    def make(base: nn.Module) -> nn.Module:
        key = rope_key(base)
        if key not in shared:
            shared[key] = TableRope(base) if _table_matches(base) else RowRope(base)
        return shared[key]

    return make


def _table_matches(base: nn.Module) -> bool:
    width = getattr(base, "dims", 0)
    if width < 2 or width % 2:
        return False
    x = mx.random.normal((1, 2, 3, width + 2), key=mx.random.key(0))  # heads may be wider than what turns
    positions = mx.array([0, 3, 1001])
    try:
        reference, table = RowRope(base)(x, positions), TableRope(base)(x, positions)
    except (ValueError, TypeError):
        return False
    return bool(mx.allclose(reference, table, rtol=1e-5, atol=1e-5))


def swap_swiglu(model: nn.Module) -> int:
    """Give SwiGLU blocks a vectorised sigmoid; returns how many. Needs a C++ compiler, as ``mx.compile`` does."""
    if not shutil.which("g++"):
        return 0
    swapped = 0
    for module in model.modules():
        parts = (module.get(name) for name in ("gate_proj", "up_proj", "down_proj"))
        if all(isinstance(part, nn.Linear) for part in parts) and _is_swiglu(module):
            swap_call(module, _fast_swiglu_block)
            swapped += 1
    return swapped


def best_swiglu() -> Callable[[mx.array, mx.array], mx.array]:
    """The fast ``swiglu`` where ``mx.compile`` works, else MLX's."""
    return swiglu if shutil.which("g++") else lambda gate, up: nn.silu(gate) * up


def _fast_swiglu_block(self: Any, x: mx.array) -> mx.array:
    out: mx.array = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    return out


def _is_swiglu(block: Any) -> bool:
    width = block.gate_proj.weight.shape[-1]
    x = mx.random.normal((1, 3, width), key=mx.random.key(0))
    reference, fast = block(x), _fast_swiglu_block(block, x)
    return float(mx.abs(reference - fast).max()) <= _TOLERANCE * float(mx.abs(reference).max())


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up`` in float32. Relative error below 1e-6; 5e-6 at gates below -16, where silu vanishes."""
    return _compiled_swiglu()(gate, up)


@cache
def _compiled_swiglu() -> Callable[[mx.array, mx.array], mx.array]:
    # Not shapeless: a view has no shape rule. A new row count retraces; the C++ kernel is built once.
    return mx.compile(lambda gate, up: gate / (1 + _exp(-gate)) * up)


def _exp(x: mx.array) -> mx.array:
    """``exp`` by powers of two and a polynomial: only operations that the C++ compiler vectorises.

    2^f on [-1/2, 1/2] is a degree-6 polynomial (least squares of the relative error at 2000 Chebyshev nodes,
    2e-9); adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    """
    scaled = mx.minimum(mx.maximum(x, -80.0), 80.0) * 1.4426950408889634
    whole = (scaled + 12582912.0) - 12582912.0
    part = scaled - whole
    power = part * 1.5370704932e-4 + 1.3399848249e-3
    for coefficient in (9.6183735877e-3, 5.5503290147e-2, 2.4022647738e-1, 6.9314718246e-1, 1.0):
        power = power * part + coefficient
    exponent: mx.array = ((whole + 127.0).astype(mx.int32) * 8388608).view(mx.float32)
    return exponent * power
