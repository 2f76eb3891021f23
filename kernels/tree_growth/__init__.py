"""Growing a whole draft tree in one launch. There is no plain form: ``services.drafter.growth.propose`` is it."""

import mlx.core as mx

from kernels._cuda import count_multiprocessors, on_cuda
from kernels.tree_growth import cuda
from kernels.tree_growth.cuda import GrowthLayer

__all__ = ["GrowthLayer", "can_grow", "grow_tree"]


def can_grow(layer: GrowthLayer, depth: int, width: int) -> bool:
    """Whether ``grow_tree`` takes this drafter and tree here."""
    return on_cuda() and cuda.supports(layer, depth, width, count_multiprocessors())


def grow_tree(
    layer: GrowthLayer,
    last: mx.array,
    place: mx.array,
    cache: tuple[mx.array, mx.array],
    rotations: mx.array,
    depth: int,
    width: int,
    sinks: int,
) -> mx.array:
    """See ``kernels.tree_growth.cuda.grow_tree``."""
    return cuda.grow_tree(layer, last, place, cache, rotations, depth, width, sinks, count_multiprocessors())
