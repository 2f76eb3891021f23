import numpy as np
import pytest

from services.speculation.trees import DraftTree
from services.speculation.walk import walk
from tests.speculation.random_trees import ancestry, random_tree


class Target:
    """A function from the tokens after the root to the next one, drawn once and remembered; it records its calls."""

    def __init__(self, tree, seed, vocab_size):
        self.tree, self.calls = tree, []
        self._rng, self._vocab_size, self._next = np.random.default_rng(seed), vocab_size, {}

    def after(self, tokens):
        return self._next.setdefault(tuple(tokens), int(self._rng.integers(self._vocab_size)))

    def choose(self, path):
        self.calls.append(path)
        return self.after(int(self.tree.tokens[node]) for node in path[1:])


def longest_accepted(tokens, parents, target, eos_ids):
    """The longest root-to-node path that the target itself would have produced, by trying every node."""
    best = [0]
    for node in range(len(tokens)):
        path = ancestry(parents, node)
        drafted = [tokens[n] for n in path[1:]]
        told = all(target.after(drafted[:i]) == token and token not in eos_ids for i, token in enumerate(drafted))
        if told and len(path) > len(best):
            best = path
    return tuple(best), target.after([tokens[n] for n in best[1:]])


@pytest.mark.parametrize("eos_ids", [(), (1,)])
def test_walk_finds_the_longest_path_of_random_trees(eos_ids):
    rng = np.random.default_rng(0)
    lengths = []
    for seed in range(300):
        tokens, parents = random_tree(rng, int(rng.integers(1, 40)), vocab_size=3)
        tree = DraftTree.build(tokens, parents)
        target = Target(tree, seed, vocab_size=3)
        accepted = walk(tree, target.choose, eos_ids)
        assert (accepted.path, accepted.bonus) == longest_accepted(tokens, parents, target, eos_ids)
        # Each node of the path is asked about once, in order, and no other node ever.
        assert target.calls == [accepted.path[: i + 1] for i in range(len(accepted.path))]
        lengths.append(len(accepted.path))
    assert min(lengths) == 1
    assert max(lengths) >= 4


def test_walk_accepts_nothing_when_no_child_carries_the_token():
    accepted = walk(DraftTree.build([9, 1, 2], [-1, 0, 0]), lambda path: 3)
    assert (accepted.path, accepted.bonus) == ((0,), 3)


def test_walk_reaches_the_deepest_leaf():
    tree = DraftTree.build([9, 4, 5, 6, 7], [-1, 0, 1, 0, 2])
    accepted = walk(tree, lambda path: {0: 4, 1: 5, 2: 7, 4: 8}[path[-1]])
    assert (accepted.path, accepted.bonus) == ((0, 1, 2, 4), 8)


def test_walk_of_one_node_is_plain_decoding():
    accepted = walk(DraftTree.root(9), lambda path: 4)
    assert (accepted.path, accepted.bonus) == ((0,), 4)


def test_walk_tells_equal_tokens_under_different_parents_apart():
    #      9 -> 1 -> 5 -> 7
    #      9 -> 2 -> 5 -> 8
    tree = DraftTree.build([9, 1, 5, 7, 2, 5, 8], [-1, 0, 1, 2, 0, 4, 5])
    accepted = walk(tree, lambda path: {0: 2, 4: 5, 5: 8, 6: 3}[path[-1]])
    assert (accepted.path, accepted.bonus) == ((0, 4, 5, 6), 3)


def test_walk_emits_eos_and_does_not_descend_it():
    tree = DraftTree.build([9, 1, 2], [-1, 0, 1])
    accepted = walk(tree, lambda path: [1, 2, 3][len(path) - 1], eos_ids=frozenset({2}))
    assert (accepted.path, accepted.bonus) == ((0, 1), 2)


def test_walk_emits_the_targets_tokens_whatever_siblings_repeat():
    tree = DraftTree.build([9, 1, 1, 2], [-1, 0, 0, 2])
    accepted = walk(tree, lambda path: [1, 2, 3][len(path) - 1])
    emitted = [*(int(tree.tokens[node]) for node in accepted.path[1:]), accepted.bonus]
    assert emitted == [1, 2, 3][: len(emitted)]
