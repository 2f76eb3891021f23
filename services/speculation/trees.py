"""Draft trees: tokens, parents and log-probabilities; node 0 is the pending token."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.speculation.errors import AerieError, Reason

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Proposed continuations of the pending token.

    Attributes:
        tokens: [n] int32, the target's token ids; ``tokens[0]`` is the pending token.
        parents: [n] int32, ``parents[0] == -1`` and ``parents[i] < i``.
        log_probs: [n] float32, cumulative drafter log-probability of the path to each node (root: 0).
    """

    tokens: IntArray
    parents: IntArray
    log_probs: NDArray[np.float32]

    @staticmethod
    def build(tokens: ArrayLike, parents: ArrayLike, log_probs: ArrayLike | None = None) -> "DraftTree":
        """Check and freeze a tree.

        Raises:
            AerieError: INVALID_TREE when the shapes differ, the tree is empty, or a parent is out of order.
        """
        token_ids = np.asarray(tokens, dtype=np.int32)
        parent_ids = np.asarray(parents, dtype=np.int32)
        scores = np.zeros(token_ids.shape, np.float32) if log_probs is None else np.asarray(log_probs, np.float32)
        if token_ids.ndim != 1 or not len(token_ids) or not token_ids.shape == parent_ids.shape == scores.shape:
            raise AerieError(Reason.INVALID_TREE, "tokens, parents and log_probs must be equally long and not empty")
        if parent_ids[0] != -1 or (parent_ids[1:] < 0).any() or (parent_ids >= np.arange(len(parent_ids))).any():
            raise AerieError(Reason.INVALID_TREE, "parents[0] must be -1 and 0 <= parents[i] < i")
        return DraftTree(token_ids, parent_ids, scores)

    @staticmethod
    def root(token: int) -> "DraftTree":
        """The tree of one node: plain decoding."""
        return DraftTree.build([token], [-1])

    def __len__(self) -> int:
        return len(self.tokens)


def check_tree(tree: DraftTree) -> None:
    """Refuse what did not pass ``DraftTree.build``: a tree that came from elsewhere is never trusted.

    Raises:
        AerieError: INVALID_TREE.
    """
    arrays = [getattr(tree, name, None) for name in ("tokens", "parents", "log_probs")]
    if [getattr(array, "dtype", None) for array in arrays] != [np.int32, np.int32, np.float32]:
        raise AerieError(Reason.INVALID_TREE, "tokens and parents must be int32 arrays, log_probs float32")
    DraftTree.build(tree.tokens, tree.parents, tree.log_probs)


def node_depths(parents: IntArray) -> IntArray:
    """Depth of each node, the root's is 0. [n] -> [n]."""
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:].tolist(), 1):  # lists: NumPy's indexing takes several times as long
        depths[node] = depths[parent] + 1
    return np.array(depths, np.int32)


def ancestor_bits(parents: IntArray) -> list[int]:
    """[n] -> n numbers: bit j of number i is set when j is i or an ancestor of i."""
    bits = [1] * len(parents)
    for node, parent in enumerate(parents[1:].tolist(), 1):
        bits[node] = bits[parent] | 1 << node
    return bits


def ancestor_mask(parents: IntArray) -> BoolArray:
    """[n] -> [n, n]: entry (i, j) is true when j is i or an ancestor of i."""
    count, size = len(parents), -(-len(parents) // 8)
    rows = b"".join(row.to_bytes(size, "little") for row in ancestor_bits(parents))
    packed = np.frombuffer(rows, np.uint8).reshape(count, size)
    return np.unpackbits(packed, axis=1, count=count, bitorder="little").view(np.bool_)


def children_of(parents: IntArray) -> list[list[int]]:
    """Child nodes of every node, in node order."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    return children


def path_to(parents: IntArray, node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def is_chain(parents: IntArray) -> bool:
    """True when every node's parent is the node before it: its rows are plain consecutive positions."""
    return bool((parents == np.arange(-1, len(parents) - 1)).all())


def clip_depth(tree: DraftTree, max_depth: int) -> DraftTree:
    """Drop the nodes deeper than ``max_depth`` (the root's depth is 0)."""
    keep = np.flatnonzero(node_depths(tree.parents) <= max_depth)
    if len(keep) == len(tree):
        return tree
    renumber = np.full(len(tree) + 1, -1, np.int32)  # the last slot maps the root's parent, -1, to itself
    renumber[keep] = np.arange(len(keep))
    return DraftTree(tree.tokens[keep], renumber[tree.parents[keep]], tree.log_probs[keep])
