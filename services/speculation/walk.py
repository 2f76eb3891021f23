"""The accept walk: one rule for greedy and sampled decoding.

The target's token at a node is decided before any child is looked at (argmax, or Gumbel-max with noise that
depends on seed and position alone). Descending while a child carries that token makes each emitted token one
exact draw from the target's distribution, whatever the tree.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

from services.speculation.trees import DraftTree, children_of


@dataclass(frozen=True)
class Accepted:
    """Outcome of a walk.

    Attributes:
        path: Accepted nodes, root first; never empty.
        bonus: The target's token after the last accepted node.
    """

    path: tuple[int, ...]
    bonus: int


def walk(tree: DraftTree, choose: Callable[[tuple[int, ...]], int], eos_ids: Container[int] = ()) -> Accepted:
    """Follow the target's choices down the tree.

    Args:
        tree: The draft tree.
        choose: Maps a path (nodes, root first) to the target's token after its last node. Called once a node,
            in path order, only for nodes on the accepted path.
        eos_ids: Tokens that end the sequence: emitted as the bonus, never descended.
    """
    children = children_of(tree.parents)
    path: tuple[int, ...] = (0,)
    while True:
        token = choose(path)
        following = next((child for child in children[path[-1]] if tree.tokens[child] == token), None)
        if following is None or token in eos_ids:
            return Accepted(path, token)
        path = (*path, following)
