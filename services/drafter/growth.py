"""Growth of a draft tree on the device; ``speculation.growth`` holds the exact form.

Each depth expands at most ``top_k`` frontier nodes in one forward. Without a stop rule nothing is read back
until the last depth: one synchronisation a tree.
"""

from collections.abc import Callable
from functools import cache, partial

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


def collect(levels: Levels, picks: Picks) -> Candidates:
    """Number all children of all expanded nodes, level by level."""
    log_probs = np.concatenate([np.array(values, np.float64).reshape(-1) for values, _ in levels])
    tokens = np.concatenate([np.array(ids).reshape(-1) for _, ids in levels])
    flat_picks = np.concatenate([np.zeros(0, np.int32), *(np.array(pick) for pick in picks)])
    return _number_children(log_probs, tokens, flat_picks, tuple((ids.shape[0], ids.shape[1]) for _, ids in levels))


def unpack(words: NDArray[np.int32], shapes: tuple[tuple[int, int], ...]) -> Candidates:
    """The candidates of a growth that came as one array.

    Args:
        words: Bits of all depths' log-probabilities (float32), their tokens, the picks of all depths but the last.
        shapes: Of each depth's children [f, k].
    """
    count = sum(rows * columns for rows, columns in shapes)
    picked = sum(rows for rows, _ in shapes[1:])
    log_probs = words[:count].view(np.float32).astype(np.float64)
    return _number_children(log_probs, words[count : 2 * count], words[2 * count : 2 * count + picked], shapes)


def _number_children(
    log_probs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    picks: NDArray[np.int32],
    shapes: tuple[tuple[int, int], ...],
) -> Candidates:
    firsts, children = _layout(shapes)
    parents = np.concatenate([np.full(shapes[0][0] * shapes[0][1], -1), np.repeat(firsts + picks, children)])
    return Candidates(tokens.astype(np.int64), parents, log_probs)


@cache
def _layout(shapes: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each expanded node, in order: the first child of the depth that it is one of, and how many it has."""
    firsts = np.cumsum([0, *(rows * columns for rows, columns in shapes)])
    expanded, columns = [rows for rows, _ in shapes[1:]], [columns for _, columns in shapes[1:]]
    return np.repeat(firsts[: len(expanded)], expanded), np.repeat(np.array(columns, np.int64), expanded)
