"""The next frontier in plain MLX."""

import mlx.core as mx


def choose_frontier(
    log_probs: mx.array, tokens: mx.array, scores: mx.array, ancestors: mx.array, width: int
) -> tuple[mx.array, ...]:
    """See ``kernels.frontier.choose_frontier``."""
    totals = (scores[:, None] + log_probs).reshape(-1)
    pick = mx.argsort(-totals)[:width].astype(mx.int32)
    parents = pick // log_probs.shape[1]
    own = mx.eye(width, dtype=mx.bool_)
    return pick, parents, tokens.reshape(-1)[pick], totals[pick], mx.concatenate([ancestors[parents], own], axis=1)
