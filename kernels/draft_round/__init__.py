"""A drafter's round in one launch. There is no plain form: ``services.drafter.compiled`` is it, step by step."""

import mlx.core as mx

from kernels._cuda import count_multiprocessors, on_cuda
from kernels.draft_round import cuda
from kernels.draft_round.cuda import MOST_DEPTH, MOST_ROWS, MOST_WIDTH, TOLD, DraftLayer, Round, count_answer

__all__ = [
    "MOST_DEPTH",
    "MOST_ROWS",
    "MOST_WIDTH",
    "TOLD",
    "DraftLayer",
    "Round",
    "can_run",
    "count_answer",
    "run_round",
]


def can_run(layer: DraftLayer, depth: int, width: int) -> bool:
    """Whether ``run_round`` takes this drafter and tree here."""
    return on_cuda() and cuda.supports(layer, depth, width, count_multiprocessors())


def run_round(
    layer: DraftLayer,
    mailbox: mx.array,
    feature_dtype: mx.Dtype,
    last: mx.array,
    cache: tuple[mx.array, mx.array],
    rotations: mx.array,
    width: int,
    sinks: int,
) -> Round:
    """See ``kernels.draft_round.cuda.run_round``."""
    blocks = count_multiprocessors()
    return cuda.run_round(layer, mailbox, feature_dtype, last, cache, rotations, width, sinks, blocks)
