import numpy as np
import pytest

from services.speculation.growth import Budget, Candidates, grow_exact, rerank, score_candidates
from tests.speculation.slow_growth import (
    all_paths,
    assert_is_tree_of,
    best_paths,
    random_table,
    tied_table,
)

VOCAB, DEPTH, ROOT = 4, 4, 99
TABLES = {"random": random_table, "tied": tied_table}


def every_candidate(table, max_depth, rng):
    """All nodes as a drafter may list them: in any order that has parents before their children."""
    index, tokens, parents, log_probs = {(): -1}, [], [], []
    waiting = [(token,) for token in range(VOCAB)]
    while waiting:
        path = waiting.pop(int(rng.integers(len(waiting))))
        index[path] = len(tokens)
        tokens.append(path[-1])
        parents.append(index[path[:-1]])
        log_probs.append(table(path[:-1])[path[-1]])
        waiting += [(*path, token) for token in range(VOCAB) if len(path) < max_depth]
    return Candidates(np.array(tokens), np.array(parents), np.array(log_probs, np.float64))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("nodes", "depth"), [(1, 4), (2, 4), (9, 1), (9, 4), (30, 4), (30, 2), (400, 3)])
def test_oracle_and_rerank_match_brute_force(kind, seed, nodes, depth):
    table = TABLES[kind](seed, VOCAB)
    chosen = best_paths(table, all_paths(VOCAB, depth), nodes - 1)
    budget = Budget(nodes, depth, top_k=nodes)
    assert_is_tree_of(grow_exact(ROOT, table, budget), ROOT, table, chosen)
    candidates = every_candidate(table, depth, np.random.default_rng(seed))
    assert_is_tree_of(rerank(ROOT, candidates, budget), ROOT, table, chosen)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("floor", [0.0, -1.0, -2.5])
def test_min_log_prob_drops_nodes_below_it(kind, floor):
    table = TABLES[kind](3, VOCAB)
    chosen = best_paths(table, all_paths(VOCAB, DEPTH), 19, floor)
    assert len(chosen) < 19 or kind == "tied"
    budget = Budget(20, DEPTH, 20, min_log_prob=floor)
    assert_is_tree_of(grow_exact(ROOT, table, budget), ROOT, table, chosen)
    candidates = every_candidate(table, DEPTH, np.random.default_rng(0))
    assert_is_tree_of(rerank(ROOT, candidates, budget), ROOT, table, chosen)


def test_rerank_obeys_max_depth_when_candidates_go_deeper():
    table = random_table(1, VOCAB, spread=4.0)
    candidates = every_candidate(table, DEPTH, np.random.default_rng(0))
    chosen = best_paths(table, all_paths(VOCAB, 2), 11)
    assert_is_tree_of(rerank(ROOT, candidates, Budget(12, 2, 12)), ROOT, table, chosen)


def grow_both(rows, budget, vocab_size):
    """Trees of the oracle and of rerank over the table ``rows``: {path: log-probabilities}."""

    def table(path):
        return np.array(rows.get(path, [-np.inf] * vocab_size), np.float64)

    paths = sorted((path for path in all_paths(vocab_size, budget.max_depth) if path[:-1] in rows), key=len)
    index = {path: i for i, path in enumerate(paths)}
    candidates = Candidates(
        np.array([path[-1] for path in paths]),
        np.array([index.get(path[:-1], -1) for path in paths]),
        np.array([rows[path[:-1]][path[-1]] for path in paths], np.float64),
    )
    trees = grow_exact(ROOT, table, budget), rerank(ROOT, candidates, budget)
    for name in ("tokens", "parents", "log_probs"):
        assert getattr(trees[0], name).tolist() == getattr(trees[1], name).tolist()
    return trees[0]


def test_a_grandchild_of_a_beats_a_sibling_of_a():
    rows = {(): [-0.1, -2.0], (0,): [-0.2, -3.0], (0, 0): [-0.5, -0.6]}
    tree = grow_both(rows, Budget(4, 3, 4), 2)
    assert tree.tokens.tolist() == [ROOT, 0, 0, 0]
    assert tree.parents.tolist() == [-1, 0, 1, 2]


def test_nodes_come_in_preorder_with_the_likeliest_chain_first():
    rows = {(): [-1.0, -0.5, -4.0], (1,): [-0.1, -3.0, -0.75], (0,): [-9.0, -9.0, -0.5]}
    tree = grow_both(rows, Budget(7, 2, 7), 3)
    #           root     1  10  12  0  02  11 is -3.5, 2 is -4
    assert tree.tokens.tolist() == [ROOT, 1, 0, 2, 1, 0, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 1, 0, 5]
    np.testing.assert_array_equal(tree.log_probs, np.float32([0, -0.5, -0.6, -1.25, -3.5, -1.0, -1.5]))


def test_certain_children_stay_behind_their_parents():
    """At p = 1 every node of a path has one score: shallow ones come first, then the smaller token."""
    rows = {(): [-1.0, -1.0], (0,): [0.0, 0.0], (1,): [0.0, -np.inf]}
    chosen = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    for nodes in range(1, 7):
        tree = grow_both(rows, Budget(nodes, 2, 8), 2)
        table = {path: np.array(row) for path, row in rows.items()}
        assert_is_tree_of(tree, ROOT, table.__getitem__, chosen[: nodes - 1])


def test_huge_logits_keep_their_order_at_any_depth():
    """Sums beyond float32 are still finite scores; they travel as the lowest float32."""
    rows = {(): [0.0, -3e38, -2e38], (2,): [0.0, -3e38, -2e38]}
    with np.errstate(over="raise"):
        tree = grow_both(rows, Budget(7, 2, 7), 3)
    assert tree.tokens.tolist() == [ROOT, 0, 2, 0, 2, 1, 1]
    assert tree.parents.tolist() == [-1, 0, 0, 2, 2, 2, 0]
    assert np.isfinite(tree.log_probs).all()


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_impossible_and_broken_tokens_never_become_nodes_nor_parents(bad):
    tree = grow_both({(): [bad, -1.0, bad], (0,): [0.0, 0.0, 0.0], (1,): [bad, bad, bad]}, Budget(9, 2, 9), 3)
    assert tree.tokens.tolist() == [ROOT, 1]


def test_rounding_above_zero_does_not_lift_a_child_over_its_parent():
    candidates = Candidates(np.array([5, 6, 7]), np.array([-1, 0, -1]), np.array([-1.0, 1e-7, -1.0]))
    tree = rerank(ROOT, candidates, Budget(3, 2, 4))
    assert tree.tokens.tolist() == [ROOT, 5, 7]
    assert tree.log_probs.tolist() == [0.0, -1.0, -1.0]


def test_no_candidates_leave_the_root():
    empty = Candidates(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    assert rerank(ROOT, empty, Budget(9, 3, 9)).tokens.tolist() == [ROOT]


def test_oracle_asks_only_for_nodes_that_can_have_children():
    asked = []
    table = random_table(0, VOCAB)

    def expand(path):
        asked.append(path)
        return table(path)

    tree = grow_exact(ROOT, expand, Budget(12, 3, 12))
    assert len(asked) == len(set(asked)) < len(tree)
    assert max(map(len, asked)) == 2


def test_a_budget_is_no_deeper_or_wider_than_its_nodes():
    assert Budget(3, 50, 40) == Budget(3, 2, 2)
    assert Budget(1, 6, 4) == Budget(1, 0, 1)
    assert (Budget(9, 4, 3).max_depth, Budget(9, 4, 3).top_k) == (4, 3)


def test_scores_add_up_along_paths_and_spoil_what_is_below():
    log_probs = np.array([-1.0, 1e-7, np.nan, -2.0, -np.inf, -1.0])
    scores, depths = score_candidates(Candidates(np.arange(6), np.array([-1, 0, 0, 2, 1, 4]), log_probs))
    np.testing.assert_array_equal(scores, [-1.0, -1.0, np.nan, np.nan, -np.inf, -np.inf])
    assert depths == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("nodes", [2, 3, 7, 20])
def test_ties_at_the_last_place_are_settled_by_the_order(nodes):
    """All scores are equal: what fits is what comes first."""
    table = {path: [0.0, 0.0, 0.0] for path in [(), *all_paths(3, 2)]}
    grow_both(table, Budget(nodes, 3, 20), 3)
