import mlx.core as mx
import numpy as np
import pytest

from services.targets.kv_rows import KVRows
from services.targets.ragged import SessionRows
from services.targets.target import Target
from tests.plain import node_logits, relative_error
from tests.targets.conftest import Family
from tests.tiny import VOCAB_SIZE, WINDOW

LIMIT = 1e-4


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()


def random_parents(seed: int, nodes: int) -> list[int]:
    """A lopsided tree: most nodes hang on one of the newest four."""
    rng = np.random.default_rng(seed)
    return [-1] + [
        int(rng.integers(max(0, i - 4), i)) if rng.random() < 0.7 else int(rng.integers(i)) for i in range(1, nodes)
    ]


SHAPES = {
    "chain": list(range(-1, 7)),
    "star": [-1] + [0] * 5,
    "square": [-1] + [0] * 3 + list(range(1, 7)),
    "binary": [-1] + [(i - 1) // 2 for i in range(1, 7)],
    "lopsided": random_parents(1, 14),
}


def prefilled(target: Target, tokens: list[int]) -> KVRows:
    kv = target.new_kv()
    target.forward([SessionRows.chunk(kv, tokens, "none")])
    kv.commit(range(len(tokens)))
    return kv


def tree_rows(kv: KVRows, tokens: list[int], parents: list[int]) -> SessionRows:
    return SessionRows(kv, np.array(tokens, np.int32), np.array(parents, np.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_equals_plain_decoding_along_its_path(family: Family, shape: str):
    prompt, parents = random_tokens(3, 9), SHAPES[shape]
    tokens = random_tokens(4, len(parents))
    logits = family.target.forward([tree_rows(prefilled(family.target, prompt), tokens, parents)]).logits
    assert relative_error(np.array(logits), node_logits(family.plain, prompt, tokens, parents)) < LIMIT


@pytest.mark.parametrize("length", [1, WINDOW - 3, WINDOW, 504])
def test_tree_stands_on_a_prefix_of_any_length(family: Family, length: int):
    """Gemma's sliding window of 16 moves through the prefix and through the tree itself."""
    prompt, parents = random_tokens(5, length), random_parents(6, 8) + list(range(7, 14))
    tokens = random_tokens(7, len(parents))
    logits = family.target.forward([tree_rows(prefilled(family.target, prompt), tokens, parents)]).logits
    assert relative_error(np.array(logits), node_logits(family.plain, prompt, tokens, parents)) < LIMIT


@pytest.mark.parametrize("sessions", [2, 8])
def test_sessions_side_by_side_do_not_see_each_other(family: Family, sessions: int):
    prompts = [random_tokens(10 + i, 2 + 7 * i) for i in range(sessions)]
    trees = [random_parents(20 + i, 1 + i) for i in range(sessions)]
    drafts = [random_tokens(30 + i, len(parents)) for i, parents in enumerate(trees)]
    batch = [tree_rows(prefilled(family.target, p), t, d) for p, t, d in zip(prompts, drafts, trees, strict=True)]
    logits = np.array(family.target.forward(batch).logits)
    expected = [node_logits(family.plain, *session) for session in zip(prompts, drafts, trees, strict=True)]
    assert relative_error(logits, np.concatenate(expected)) < LIMIT


@pytest.mark.parametrize("logits", ["none", "last", "all"])
def test_prefill_chunk_runs_beside_a_tree(family: Family, logits: str):
    prompt, chunks = random_tokens(40, 12), (random_tokens(41, 11), random_tokens(42, 7))
    parents, tokens = SHAPES["binary"], random_tokens(43, 7)
    filling = prefilled(family.target, chunks[0])
    rows = [SessionRows.chunk(filling, chunks[1], logits), tree_rows(prefilled(family.target, prompt), tokens, parents)]
    out = np.array(family.target.forward(rows).logits)
    expected = node_logits(family.plain, prompt, tokens, parents)
    assert relative_error(out[-len(tokens) :], expected) < LIMIT
    chain = node_logits(family.plain, chunks[0], chunks[1], range(-1, len(chunks[1]) - 1))
    asked = {"none": chain[:0], "last": chain[-1:], "all": chain}[logits]
    assert len(out) == len(asked) + len(tokens)
    if len(asked):
        assert relative_error(out[: len(asked)], asked) < LIMIT
    filling.commit(range(len(chunks[1])))
    following = family.target.forward([SessionRows.chunk(filling, [5], "all")]).logits
    assert relative_error(np.array(following), node_logits(family.plain, [*chunks[0], *chunks[1]], [5], [-1])) < LIMIT


def test_no_logits_are_computed_when_none_are_asked_for(family: Family):
    assert family.target.forward([SessionRows.chunk(family.target.new_kv(), [1, 2, 3], "none")]).logits is None


def test_same_rows_give_the_same_bits(family: Family):
    prompt, parents = random_tokens(50, 30), SHAPES["lopsided"]
    tokens = random_tokens(51, len(parents))
    runs = []
    for _ in range(3):
        rows = [tree_rows(prefilled(family.target, prompt), tokens, parents) for _ in range(2)]
        logits = family.target.forward(rows).logits
        mx.eval(logits)
        runs.append(np.array(logits))
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])
