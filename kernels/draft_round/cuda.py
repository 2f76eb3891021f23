"""A drafter's whole round in one CUDA launch: all blocks stay, and meet between the steps.

Launched step by step the newest rows and each depth are some twenty kernels, which cost more than their work. A
meeting of 132 blocks takes 1 us on an H200.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from kernels._cuda import build_cuda_kernel, write_float
from kernels.draft_round.product import HEADER
from kernels.draft_round.source import SOURCE

_THREADS, _WARPS = 384, 12
_HEAD_TILES = 4
MOST_ROWS = 16
"""New rows that a round can read."""
TOLD = 8 + MOST_ROWS
"""Words before the features in what the host tells: see ``run_round``."""
MOST_WIDTH, MOST_DEPTH = 16, 16
_SHARED_BYTES = 46 * 1024
_PATIENCE = 1 << 22
"""Looks at the counter before a block gives up: seconds."""


@dataclass(frozen=True, eq=False)
class DraftLayer:
    """A drafter of one layer over (embedding, state), as the kernel takes it. All of one half-precision type.

    Attributes:
        embedding: [V, H].
        fuse: [H, taps Ht], from features to a state.
        by_embedding, by_state: [(heads + 2 kv_heads) d, H], queries, then keys, then values.
        output: [H, heads d].
        gate, up: [I, H].
        down: [H, I].
        head: [draft V, H].
        embedding_norm, state_norm, middle_norm, final_norm: [H].
        labels: [draft V] int32, the target's token ids.
        heads, kv_heads: Of the attention.
        eps: Of the norms.
        attention_scale, logit_scale: Factors.
        norm_residual: The residual is the normed state.
    """

    embedding: mx.array
    fuse: mx.array
    by_embedding: mx.array
    by_state: mx.array
    output: mx.array
    gate: mx.array
    up: mx.array
    down: mx.array
    head: mx.array
    embedding_norm: mx.array
    state_norm: mx.array
    middle_norm: mx.array
    final_norm: mx.array
    labels: mx.array
    heads: int
    kv_heads: int
    eps: float
    attention_scale: float
    logit_scale: float
    norm_residual: bool

    @property
    def head_dim(self) -> int:
        return self.by_embedding.shape[0] // (self.heads + 2 * self.kv_heads)


class Round(NamedTuple):
    """What stays on the device.

    Attributes:
        newest: [1, H], the state that the newest row hands on.
        rows: Keys and values [1, kv_heads, MOST_ROWS, d] of the new rows.
        commit: [1 + MOST_ROWS] int32, the slot of the first new row and their order, -1 beyond the last.
    """

    newest: mx.array
    rows: tuple[mx.array, mx.array]
    commit: mx.array


_ARRAYS = (
    "embedding",
    "fuse",
    "by_embedding",
    "by_state",
    "output_weight",
    "gate",
    "up",
    "down",
    "head",
    "embedding_norm",
    "state_norm",
    "middle_norm",
    "final_norm",
    "labels",
)
_INPUTS = ("mailbox", "last", "keys", "values", "rotations", *_ARRAYS)


def supports(layer: DraftLayer, depth: int, width: int, blocks: int) -> bool:
    """Half precision, sizes in whole tiles, trees whose rows are a product's, and what a block can share."""
    (hidden, features), queries, vocab = layer.fuse.shape, layer.output.shape[1], layer.head.shape[0]
    columns = -(-vocab // (16 * blocks * _HEAD_TILES)) * _HEAD_TILES * 16
    rows = -(-max(width, MOST_ROWS) // 8) * 8
    shared = _WARPS * (2 * rows * 17 + 16) + width * (columns + width + 1 + MOST_DEPTH) + rows + MOST_ROWS + 8
    return (
        layer.embedding.dtype in (mx.float16, mx.bfloat16)
        and layer.head_dim in (32, 64, 128)
        and not any(size % 32 for size in (hidden, features, queries, layer.gate.shape[0]))
        and not any(size % 16 for size in (layer.by_embedding.shape[0], vocab))
        and 0 < width <= min(MOST_WIDTH, vocab)
        and 0 < depth <= MOST_DEPTH
        and 4 * shared <= _SHARED_BYTES
    )


def count_answer(depth: int, width: int) -> int:
    """Words of a round's answer."""
    return 2 * (width + (depth - 1) * width * width) + (depth - 1) * width + 1


def run_round(
    layer: DraftLayer,
    mailbox: mx.array,
    feature_dtype: mx.Dtype,
    last: mx.array,
    cache: tuple[mx.array, mx.array],
    rotations: mx.array,
    width: int,
    sinks: int,
    blocks: int,
) -> Round:
    """Read the newest rows, then expand the ``width`` best nodes of every depth but the last.

    As ``read`` and ``services.drafter.growth.propose`` do with the same drafter. The host tells, in memory that the
    device reads: rows in the cache (at least one), rows dropped from it, the window, the number of new rows and the
    depth, as TOLD - MOST_ROWS words, MOST_ROWS tokens, then the new rows' features [new, taps Ht]. The device answers
    ``count_answer`` words: bits of all children's log-probabilities, depth by depth, their tokens, the picks of each
    depth but the last, and 0; that last word stays as it was when blocks waited in vain for each other.

    Args:
        layer: The drafter.
        mailbox: [2] int64, the addresses of what is told and of the answer.
        feature_dtype: Of the features.
        last: [1, H], the state that predicts the root's children; not read when there are new rows.
        cache: Keys and values [1, kv_heads, capacity, d] of the true rows.
        rotations: [positions, d] float32, ``rotation_table`` of 0, 1, ..., beyond the deepest row's position.
        width: Of the tree. Every other size that changes from round to round is told: each would be a build.
        sinks: First positions, which every row sees.
        blocks: At most what the GPU runs at the same time.
    """
    (hidden, features), inner, head_dim = layer.fuse.shape, layer.gate.shape[0], layer.head_dim
    queries, joint, kv_heads = layer.output.shape[1], layer.by_embedding.shape[0], layer.kv_heads
    held = 2 * kv_heads * MOST_ROWS * head_dim
    halves = held + width * (queries + hidden + inner + MOST_DEPTH * hidden) + MOST_ROWS * (features + hidden)
    words = 32 + halves // 2 + (MOST_ROWS + MOST_DEPTH * width) * joint + max(width, MOST_ROWS) + 8
    words += 2 * width * blocks * (width + 1) + count_answer(MOST_DEPTH, width)
    literals = {
        "ATTENTION_SCALE": write_float(layer.attention_scale),
        "SCALE": write_float(layer.logit_scale),
        "EPS": write_float(layer.eps),
    }
    source = SOURCE
    for name, value in literals.items():
        source = source.replace(name, value)
    kernel = build_cuda_kernel("draft_round", _INPUTS, ("newest", "scratch"), source, HEADER)
    arrays = [getattr(layer, name.removesuffix("_weight")) for name in _ARRAYS]
    newest, scratch = kernel(
        inputs=[mailbox, last, *cache, rotations, *arrays],
        template=[
            ("T", layer.embedding.dtype),
            ("U", feature_dtype),
            ("H", hidden),
            ("FEATURES", features),
            ("HEADS", layer.heads),
            ("KV_HEADS", kv_heads),
            ("D", head_dim),
            ("INNER", inner),
            ("VOCAB", layer.head.shape[0]),
            ("NEW", MOST_ROWS),
            ("TOLD", TOLD),
            ("MOST_DEPTH", MOST_DEPTH),
            ("WIDTH", width),
            ("SINKS", sinks),
            ("BLOCKS", blocks),
            ("THREADS", _THREADS),
            ("WARPS", _WARPS),
            ("HEAD_TILES", _HEAD_TILES),
            ("NORM_RESIDUAL", int(layer.norm_residual)),
            ("PATIENCE", _PATIENCE),
        ],
        grid=(blocks * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        # What a session keeps is an array of its own: a slice would keep all the scratch alive.
        output_shapes=[(1, hidden), (words,)],
        output_dtypes=[layer.embedding.dtype, mx.float32],
        init_value=0,
    )
    rows = scratch[32 : 32 + held // 2].view(layer.embedding.dtype).reshape(2, 1, kv_heads, MOST_ROWS, head_dim)
    return Round(newest, (rows[0], rows[1]), scratch[4 : 5 + MOST_ROWS].view(mx.int32))
