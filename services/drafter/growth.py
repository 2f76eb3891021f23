"""Growth of a draft tree on the device; ``speculation.growth`` holds the exact form.

Each depth expands at most ``top_k`` frontier nodes in one forward. Without a stop rule nothing is read back
until the last depth: one synchronisation a tree.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.frontier import choose_frontier
from services.drafter.family import DraftModel, Frontier, TreeSession
from services.drafter.session import DraftSession
from services.speculation.growth import Budget, Candidates, rerank, score_candidates
from services.speculation.trees import DraftTree

Levels = list[tuple[mx.array, mx.array]]
"""For each depth, log-probabilities and tokens [f, k] of the children of its frontier."""
Picks = list[mx.array]
"""For each depth but the last, flat indices into its level: the nodes that were expanded."""


def grow(model: DraftModel, session: DraftSession, root_token: int, budget: Budget) -> DraftTree:
    """Propose a tree below the pending token.

    Args:
        model: The drafter.
        session: With every committed position but the pending one's observed.
        root_token: The pending token.
        budget: Limits and the stop rule.
    """
    if session.last is None or budget.max_depth < 1 or budget.max_nodes < 2:
        return DraftTree.root(root_token)
    levels, picks = propose(model, session, session.last, budget, partial(_frontier_width, budget))
    mx.eval(levels, picks)
    return rerank(root_token, collect(levels, picks), budget)


def propose(
    model: DraftModel,
    session: TreeSession,
    last: mx.array,
    budget: Budget,
    width: Callable[[Levels, Picks], int],
) -> tuple[Levels, Picks]:
    """Expand a frontier at each depth, lazily.

    Args:
        model: The drafter.
        session: Where tree rows go.
        last: [1, hidden] state that predicts the root's children.
        budget: Depth and children of a node.
        width: Most nodes to expand at the newest of the levels so far.
    """
    hidden, scores = last, mx.array([0.0])
    ancestors = mx.zeros((1, 0), mx.bool_)
    levels: Levels = []
    picks: Picks = []
    scratch = 0
    for depth in range(1, budget.max_depth + 1):
        log_probs, tokens = model.top_children(hidden, budget.top_k)
        levels.append((log_probs, tokens))
        if depth == budget.max_depth:
            break
        count = min(width(levels, picks), log_probs.size)
        if count == 0:
            break
        chosen = choose_frontier(log_probs, tokens, scores, ancestors, count)
        picks.append(chosen.pick)
        scores, ancestors = chosen.scores, chosen.ancestors
        frontier = Frontier(chosen.tokens, hidden[chosen.parents], ancestors, depth, scratch)
        hidden = model.expand(session, frontier)
        scratch += count
    return levels, picks


def _frontier_width(budget: Budget, levels: Levels, picks: Picks) -> int:
    """How many of the best new nodes to expand: top_k, or fewer under a stop rule, which reads scores back.

    A node below the rule's floor has no children in the tree, and neither has one that is worse than the best
    ``max_nodes - 1`` candidates so far: its children are worse still. A child at depth d + 1 needs d ancestors
    and follows every better node of its parent's depth, so only the ``max_nodes - 1 - d`` best have one.
    """
    room = budget.max_nodes - 1
    widest = min(budget.top_k, room - len(levels))
    if budget.min_log_prob == -np.inf or not widest:
        return widest
    mx.eval(levels, picks)
    scores = np.array(score_candidates(collect(levels, picks))[0])
    scores[np.isnan(scores)] = -np.inf
    rivals = np.sort(scores)[::-1]
    floor = max(budget.min_log_prob, rivals[room - 1] if len(rivals) >= room else -np.inf)
    return min(widest, int((scores[-levels[-1][0].size :] >= floor).sum()))


Values = mx.array | NDArray[Any]


def collect(levels: Sequence[tuple[Values, Values]], picks: Sequence[Values]) -> Candidates:
    """Number all children of all expanded nodes, level by level."""
    tokens, parents, log_probs = [], [], []
    frontier: NDArray[np.int64] = np.array([-1])
    base = 0
    for index, (values, ids) in enumerate(levels):
        tokens.append(np.array(ids).reshape(-1))
        log_probs.append(np.array(values, np.float64).reshape(-1))
        parents.append(np.repeat(frontier, values.shape[1]))
        if index < len(picks):
            frontier = base + np.array(picks[index], np.int64)
        base += values.size
    return Candidates(np.concatenate(tokens).astype(np.int64), np.concatenate(parents), np.concatenate(log_probs))


def unpack(flat: NDArray[np.int32], shapes: Sequence[tuple[int, int]]) -> tuple[list[Any], list[NDArray[np.int32]]]:
    """Levels and picks from one array: bits of all log-probabilities, tokens, picks of all depths but the last.

    Args:
        flat: Of exactly that size.
        shapes: Of each depth's children.
    """
    ends = list(accumulate(rows * columns for rows, columns in shapes))
    log_probs = np.split(flat[: ends[-1]].view(np.float32), ends[:-1])
    tokens = np.split(flat[ends[-1] : 2 * ends[-1]], ends[:-1])
    levels = [(a.reshape(shape), b.reshape(shape)) for a, b, shape in zip(log_probs, tokens, shapes, strict=True)]
    counts = [rows for rows, _ in shapes[1:]]
    picks = np.split(flat[2 * ends[-1] :], list(accumulate(counts))[:-1]) if counts else []
    return levels, picks
