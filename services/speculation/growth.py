"""Growth of dynamic draft trees: the exact best-first oracle, and the rerank of device candidates.

One order holds everywhere: score descending, depth ascending, then the parent that comes first in this same
order, then the target's token id. Scores are cumulative log-probabilities in float64.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.speculation.trees import DraftTree

_LOWEST = float(np.finfo(np.float32).min)  # trees carry float32: sums below it would turn into -inf


MAX_TREE_NODES = 256
"""No target verifies larger trees, and no drafter grows them."""


@dataclass(frozen=True)
class Budget:
    """What the orchestrator allows one draft.

    Attributes:
        max_nodes: Nodes of the tree, the root included.
        max_depth: Depth of the deepest node (the root's is 0); cut to ``max_nodes - 1``.
        top_k: Children of one node and nodes of one depth that are expanded; cut to ``max_nodes - 1``.
        min_log_prob: The stop rule: nodes whose cumulative log-probability is below it are not proposed.
    """

    max_nodes: int
    max_depth: int
    top_k: int
    min_log_prob: float = -np.inf

    def __post_init__(self) -> None:
        # A tree of n nodes is at most n - 1 deep and wide: what is asked for beyond would be computed and dropped.
        room = max(self.max_nodes - 1, 0)
        object.__setattr__(self, "max_depth", min(self.max_depth, room))
        object.__setattr__(self, "top_k", min(self.top_k, max(room, 1)))


@dataclass(frozen=True)
class Candidates:
    """Nodes that a drafter looked at, parents before children.

    Attributes:
        tokens: [c] target token ids.
        parents: [c] index of the parent candidate, or -1 for a child of the root.
        log_probs: [c] the node's own log-probability given its parent.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    log_probs: NDArray[np.float64]


def grow_exact(
    root_token: int,
    expand: Callable[[tuple[int, ...]], NDArray[np.float64]],
    budget: Budget,
) -> DraftTree:
    """Best-first growth: pop the globally best candidate, expand it, push its children.

    Args:
        root_token: The pending token.
        expand: Maps a path of tokens (the root's excluded) to log-probabilities [V] of the next token.
        budget: ``top_k`` is ignored: the oracle looks at every child.
    """
    # Heap entries follow the one order: (-score, depth, rank of the parent, token).
    heap: list[tuple[float, int, int, int]] = []
    paths: list[tuple[int, ...]] = [()]
    parents, scores = [-1], [0.0]

    def push_children(rank: int, depth: int) -> None:
        if depth >= budget.max_depth or len(paths) >= budget.max_nodes:
            return
        totals = scores[rank] + np.asarray(expand(paths[rank]), np.float64)
        for token in _best(totals, budget.max_nodes - 1):
            if totals[token] >= budget.min_log_prob:
                heapq.heappush(heap, (-float(totals[token]), depth + 1, rank, int(token)))

    push_children(0, 0)
    while heap and len(paths) < budget.max_nodes:
        score, depth, parent, token = heapq.heappop(heap)
        paths.append((*paths[parent], token))
        parents.append(parent)
        scores.append(-score)
        push_children(len(paths) - 1, depth)
    tokens = [root_token, *(path[-1] for path in paths[1:])]
    return _preorder(tokens, parents, scores)


def _best(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices of the ``count`` best finite scores, best first, ties to the smaller index."""
    usable = np.flatnonzero(np.isfinite(scores))
    if len(usable) > count:
        cut = np.partition(scores[usable], -count)[-count] if count else np.inf
        usable = usable[scores[usable] >= cut]
    return usable[np.lexsort((usable, -scores[usable]))][:count]


def score_candidates(candidates: Candidates) -> tuple[list[float], list[int]]:
    """Cumulative score and depth of each candidate; a score is -inf or NaN below a node whose own is."""
    # Python's own lists and floats: indexing NumPy arrays one by one takes several times as long.
    totals, depths = [0.0] * (len(candidates.tokens) + 1), [0] * (len(candidates.tokens) + 1)
    # Rounding can lift a log-probability above 0 by a bit, which would put a child before its parent.
    steps = np.minimum(candidates.log_probs, 0.0).tolist()
    for node, parent in enumerate(candidates.parents.tolist()):  # the root is the last, index -1
        totals[node] = totals[parent] + steps[node]
        depths[node] = depths[parent] + 1
    return totals[:-1], depths[:-1]


def rerank(root_token: int, candidates: Candidates, budget: Budget) -> DraftTree:
    """Pick the best ``max_nodes - 1`` candidates by cumulative score, in the one order.

    A candidate is never better than its parent (log-probabilities are at most 0), so taking the best keeps
    every chosen node's parent. Candidates with -inf or NaN anywhere on their path are dropped.
    """
    totals, all_depths = score_candidates(candidates)
    room = budget.max_nodes - 1
    scores, depths = np.array(totals, np.float64), np.array(all_depths, np.int64)
    usable = np.isfinite(scores) & (scores >= budget.min_log_prob) & (depths <= budget.max_depth)
    if 0 < room < usable.sum():  # what is worse than the last that fits is never chosen
        usable &= scores >= np.partition(scores[usable], -room)[-room]
    order = _in_order(np.flatnonzero(usable), candidates, scores, depths)[:room].tolist()
    rank = {-1: 0} | {node: place for place, node in enumerate(order, 1)}
    tokens, parents = candidates.tokens[order].tolist(), candidates.parents[order].tolist()
    return _preorder([root_token, *tokens], [-1, *map(rank.__getitem__, parents)], [0.0, *scores[order].tolist()])


def _in_order(
    nodes: NDArray[np.int64], candidates: Candidates, scores: NDArray[np.float64], depths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Candidates, with the parents of each among them, sorted by the one order."""
    tokens, parents = candidates.tokens, candidates.parents
    order = nodes[np.lexsort((tokens[nodes], depths[nodes], -scores[nodes]))]
    first, second = order[:-1], order[1:]
    tied = (scores[first] == scores[second]) & (depths[first] == depths[second])
    if not tied.any():
        return order
    # Of nodes that tie, the one whose parent comes first: parents have their places by then, being shallower.
    place = np.full(len(scores) + 1, -1)  # the root's is the last, index -1
    starts = np.flatnonzero(np.concatenate([[True], ~tied]))
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        run = order[start:stop]
        order[start:stop] = run[np.lexsort((tokens[run], place[parents[run]]))]
        place[order[start:stop]] = np.arange(start, stop)
    return order


def _preorder(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> DraftTree:
    """Number nodes in preorder, children in the one order: the likeliest chain comes first.

    Nodes come in the one order, so among siblings the earlier index is the better one.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        children[parents[node]].append(node)
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    position = {node: index for index, node in enumerate(order)}
    return DraftTree.build(
        [tokens[n] for n in order],
        [position[parents[n]] if n else -1 for n in order],
        [max(scores[n], _LOWEST) for n in order],
    )
