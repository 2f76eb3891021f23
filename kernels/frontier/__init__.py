"""The next frontier of a growing tree: the best children of the one before."""

from typing import NamedTuple

import mlx.core as mx

from kernels._cuda import on_cuda
from kernels.frontier import cuda, reference


class Chosen(NamedTuple):
    """The ``w`` nodes to expand next, best first.

    Attributes:
        pick: [w] int32, flat indices into the children.
        parents: [w] int32, rows of the frontier before.
        tokens: [w] int32.
        scores: [w] float32, cumulative log-probabilities.
        ancestors: [w, s + w] bool, the parents' rows, then each node itself.
    """

    pick: mx.array
    parents: mx.array
    tokens: mx.array
    scores: mx.array
    ancestors: mx.array


def choose_frontier(log_probs: mx.array, tokens: mx.array, scores: mx.array, ancestors: mx.array, width: int) -> Chosen:
    """Sort all children by their parent's score plus their own log-probability; NaN comes last.

    Args:
        log_probs, tokens: [f, k], the children of each frontier node.
        scores: [f] float32.
        ancestors: [f, s] bool over the tree rows so far.
        width: At most f * k.
    """
    if on_cuda() and cuda.supports(log_probs):
        return Chosen(*cuda.choose_frontier(log_probs, tokens, scores, ancestors, width))
    return Chosen(*reference.choose_frontier(log_probs, tokens, scores, ancestors, width))
