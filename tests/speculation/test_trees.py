import numpy as np
import pytest

from services.speculation.errors import AerieError, Reason
from services.speculation.trees import (
    DraftTree,
    ancestor_mask,
    children_of,
    clip_depth,
    is_chain,
    node_depths,
    path_to,
)
from tests.speculation.random_trees import ancestry, random_parents

SEEDS = range(40)


def random_case(seed):
    rng = np.random.default_rng(seed)
    return random_parents(rng, int(rng.integers(1, 40)), None if seed % 2 else 3)


@pytest.mark.parametrize(
    ("tokens", "parents", "log_probs"),
    [
        ([], [], None),
        (5, -1, None),
        ([[5]], [[-1]], None),
        ([5, 6], [-1], None),
        ([5], [-1, 0], None),
        ([5, 6], [-1, 0], [0.0]),
        ([5], [0], None),
        ([5], [-2], None),
        ([5, 6], [-1, -1], None),
        ([5, 6], [-1, 1], None),
        ([5, 6, 7], [-1, 2, 0], None),
        ([5, 6, 7], [-1, 0, -3], None),
    ],
)
def test_build_refuses_what_is_no_tree(tokens, parents, log_probs):
    with pytest.raises(AerieError) as refusal:
        DraftTree.build(tokens, parents, log_probs)
    assert refusal.value.reason is Reason.INVALID_TREE


def test_build_keeps_what_it_is_given():
    tree = DraftTree.build([5, 6, 6, 9], [-1, 0, 0, 1], [0, -0.5, -1.5, -0.75])
    assert len(tree) == 4
    assert tree.tokens.tolist() == [5, 6, 6, 9]
    assert tree.parents.tolist() == [-1, 0, 0, 1]
    assert tree.log_probs.tolist() == [0, -0.5, -1.5, -0.75]
    assert (tree.tokens.dtype, tree.parents.dtype, tree.log_probs.dtype) == (np.int32, np.int32, np.float32)


def test_root_is_a_tree_of_one_node():
    tree = DraftTree.root(7)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.tolist()) == ([7], [-1], [0.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_relations_match_a_walk_from_every_node(seed):
    parents = random_case(seed)
    paths = [ancestry(parents, node) for node in range(len(parents))]
    assert node_depths(parents).tolist() == [len(path) - 1 for path in paths]
    assert [path_to(parents, node) for node in range(len(parents))] == paths
    expected = [[other in path for other in range(len(parents))] for path in paths]
    assert ancestor_mask(parents).tolist() == expected
    assert children_of(parents) == [
        [child for child in range(len(parents)) if parents[child] == node] for node in range(len(parents))
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("max_depth", [0, 1, 2, 5, 50])
def test_clip_depth_drops_exactly_the_deeper_nodes(seed, max_depth):
    parents = random_case(seed)
    nodes = len(parents)
    tree = DraftTree.build(np.arange(100, 100 + nodes), parents, -np.arange(nodes) / 8)
    clipped = clip_depth(tree, max_depth)
    kept = [node for node in range(nodes) if len(ancestry(parents, node)) - 1 <= max_depth]
    assert clipped.tokens.tolist() == [100 + node for node in kept]
    assert clipped.log_probs.tolist() == [-node / 8 for node in kept]
    # Tokens are unique here, so they name each kept node's parent.
    assert [100 + parents[node] if node else None for node in kept] == [
        int(clipped.tokens[parent]) if parent >= 0 else None for parent in clipped.parents
    ]
    DraftTree.build(clipped.tokens, clipped.parents, clipped.log_probs)


@pytest.mark.parametrize(
    ("parents", "chain"),
    [([-1], True), ([-1, 0], True), ([-1, 0, 1, 2], True), ([-1, 0, 0], False), ([-1, 0, 1, 1], False)],
)
def test_is_chain_holds_when_each_node_follows_the_one_before(parents, chain):
    assert is_chain(np.array(parents, np.int32)) is chain
