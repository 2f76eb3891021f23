"""Growth on the device against brute force, over a drafter that is a table of next-token log-probabilities."""

import mlx.core as mx
import numpy as np
import pytest

from services.drafter.growth import grow
from services.drafter.session import DraftSession
from services.speculation.growth import Budget, grow_exact
from services.targets.kv_rows import KVRows
from tests.speculation.slow_growth import all_paths, assert_is_tree_of, best_paths, random_table, score, tied_table

ROOT, VOCAB = 99, 5


class TableDrafter:
    """Its hidden state is the number of a path. It checks every frontier against the paths that it stands for."""

    def __init__(self, table, vocab_size=VOCAB):
        self._table, self._vocab_size = table, vocab_size
        self._paths, self._scratch = [()], []
        self.expanded = []

    def new_session(self):
        return DraftSession(KVRows(1), last=mx.zeros((1, 1)))

    def top_children(self, hidden, k):
        rows = [self._table(self._paths[int(state)]) for state in np.array(hidden)[:, 0]]
        rows = [np.where(np.isnan(row), -np.inf, row).astype(np.float32) for row in rows]
        ids = [np.lexsort((np.arange(len(row)), -row))[:k] for row in rows]
        return mx.array(np.stack([row[i] for row, i in zip(rows, ids, strict=True)])), mx.array(np.stack(ids))

    def expand(self, session, frontier):
        parents = [self._paths[int(state)] for state in np.array(frontier.hidden)[:, 0]]
        paths = [(*parent, int(token)) for parent, token in zip(parents, np.array(frontier.tokens), strict=True)]
        assert {len(path) for path in paths} == {frontier.depth}
        assert frontier.scratch == len(self._scratch)
        self._scratch += paths
        sees = [[path[: len(other)] == other for other in self._scratch] for path in paths]
        assert np.array(frontier.ancestors).tolist() == sees
        self.expanded += paths
        self._paths += paths
        return mx.arange(len(self._paths) - len(paths), len(self._paths)).astype(mx.float32)[:, None]


def grow_over(table, budget, vocab_size=VOCAB):
    drafter = TableDrafter(table, vocab_size)
    return grow(drafter, drafter.new_session(), ROOT, budget), drafter


@pytest.mark.parametrize("kind", [random_table, tied_table])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("nodes", "depth"), [(2, 3), (6, 3), (14, 4), (40, 2)])
def test_growth_equals_the_oracle_when_it_may_expand_every_node(kind, seed, nodes, depth):
    table = kind(seed, VOCAB)
    budget = Budget(nodes, depth, top_k=nodes)
    tree, _ = grow_over(table, budget)
    assert_is_tree_of(tree, ROOT, table, best_paths(table, all_paths(VOCAB, depth), nodes - 1))
    oracle = grow_exact(ROOT, table, budget)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == (oracle.tokens.tolist(), oracle.parents.tolist())
    assert tree.log_probs.tolist() == oracle.log_probs.tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_growth_takes_the_best_of_what_a_narrow_frontier_reaches(seed, top_k):
    table, depth, nodes = random_table(seed, VOCAB), 4, 12
    reached, frontier = [], [()]
    for _ in range(depth):
        level = [(*path, int(t)) for path in frontier for t in np.argsort(-table(path))[:top_k]]
        reached += level
        frontier = sorted(level, key=lambda path: -score(table, path))[:top_k]
    tree, drafter = grow_over(table, Budget(nodes, depth, top_k))
    assert_is_tree_of(tree, ROOT, table, best_paths(table, reached, nodes - 1))
    assert all(sum(len(path) == d for path in drafter.expanded) <= top_k for d in range(1, depth))


@pytest.mark.parametrize("kind", [random_table, tied_table])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("floor", [-0.5, -2.0, -4.0, -50.0])
@pytest.mark.parametrize("nodes", [4, 10])
def test_the_stop_rule_prunes_the_tree_and_saves_work(kind, seed, floor, nodes):
    """Stopping early loses no node that the rule keeps, and expands none that it drops."""
    table, depth = kind(seed, VOCAB), 4
    tree, drafter = grow_over(table, Budget(nodes, depth, top_k=nodes, min_log_prob=floor))
    whole = best_paths(table, all_paths(VOCAB, depth), nodes - 1)
    assert_is_tree_of(tree, ROOT, table, [path for path in whole if score(table, path) >= floor])
    assert all(score(table, path) >= floor for path in drafter.expanded)
    _, unhurried = grow_over(table, Budget(nodes, depth, top_k=nodes))
    # Four nodes leave no depth room for work to save.
    assert len(drafter.expanded) < len(unhurried.expanded) or (nodes == 4 and len(unhurried.expanded) <= 3)


def test_the_stop_rule_keeps_a_narrow_frontiers_tree():
    for seed in range(10):
        table = random_table(seed, VOCAB)
        tree, _ = grow_over(table, Budget(9, 4, top_k=2, min_log_prob=-50.0))
        free, _ = grow_over(table, Budget(9, 4, top_k=2))
        assert (tree.tokens.tolist(), tree.parents.tolist()) == (free.tokens.tolist(), free.parents.tolist())


def test_nothing_is_expanded_below_the_last_depth():
    _, drafter = grow_over(random_table(0, VOCAB), Budget(30, 3, top_k=8))
    assert {len(path) for path in drafter.expanded} == {1, 2}


@pytest.mark.parametrize(("nodes", "expanded"), [(2, 0), (3, 1), (4, 3), (6, 10)])
def test_no_more_is_expanded_than_a_tree_of_that_size_can_use(nodes, expanded):
    """Its depth and width end with its nodes: at depth d the ``nodes - 1 - d`` best have children in it."""
    table = random_table(4, VOCAB)
    tree, drafter = grow_over(table, Budget(nodes, 50, top_k=50))
    assert len(drafter.expanded) <= expanded
    assert_is_tree_of(tree, ROOT, table, best_paths(table, all_paths(VOCAB, nodes - 1), nodes - 1))


@pytest.mark.parametrize("kind", [random_table, tied_table])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 7])
def test_small_trees_equal_the_oracle_s_at_any_depth(kind, seed, nodes):
    table = kind(seed, VOCAB)
    tree, _ = grow_over(table, Budget(nodes, 50, top_k=50))
    oracle = grow_exact(ROOT, table, Budget(nodes, 50, top_k=50))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == (oracle.tokens.tolist(), oracle.parents.tolist())


@pytest.mark.parametrize("budget", [Budget(1, 4, 4), Budget(9, 0, 4)])
def test_a_budget_without_room_is_the_root_alone(budget):
    tree, drafter = grow_over(random_table(0, VOCAB), budget)
    assert tree.tokens.tolist() == [ROOT]
    assert drafter.expanded == []


def test_an_unprimed_session_is_the_root_alone():
    drafter = TableDrafter(random_table(0, VOCAB))
    assert grow(drafter, DraftSession(KVRows(1)), ROOT, Budget(9, 4, 4)).tokens.tolist() == [ROOT]


@pytest.mark.parametrize("floor", [-np.inf, -1e300])
def test_huge_logits_keep_their_order(floor):
    row = np.array([0.0, -3e38, -2e38], np.float32)
    tree, _ = grow_over(lambda path: row, Budget(4, 1, top_k=4, min_log_prob=floor), vocab_size=3)
    assert tree.tokens.tolist() == [ROOT, 0, 2, 1]
    tree, _ = grow_over(lambda path: row, Budget(6, 2, top_k=8, min_log_prob=floor), vocab_size=3)
    assert tree.tokens.tolist() == [ROOT, 0, 0, 2, 2, 0]


@pytest.mark.parametrize("floor", [-np.inf, -5.0])
@pytest.mark.parametrize(("top_k", "nodes"), [(2, 6), (3, 5)])
def test_states_that_turn_to_nan_end_their_branch(top_k, nodes, floor):
    """Log-probabilities of a row of -inf are NaN: they take no place of others, in the frontier or in the budget."""
    rows = {True: np.array([0.0, -0.5, -1.0], np.float32), False: np.array([-1.0, -1.5, -2.0], np.float32)}
    drafter = TableDrafter(lambda path: rows[len(path) > 0], 3)
    sound = drafter.top_children

    def top_children(hidden, k):
        values, ids = sound(hidden, k)
        ends = mx.array([[drafter._paths[int(state)][:1] == (0,)] for state in np.array(hidden)[:, 0]])
        return mx.where(ends, mx.nan, values), ids

    drafter.top_children = top_children
    tree = grow(drafter, drafter.new_session(), ROOT, Budget(nodes, 3, top_k, min_log_prob=floor))
    # Node 0 has no children; 1 has a chain of certain ones, then its second.
    assert tree.tokens.tolist() == [ROOT, 0, 1, 0, 0, 1][:nodes]
    assert tree.parents.tolist() == [-1, 0, 0, 2, 3, 2][:nodes]
