import itertools

import mlx.core as mx
import numpy as np
import pytest

from services.targets.kv_rows import STEP, KVRows
from services.targets.loader import load_target
from services.targets.ragged import SessionRows
from tests.plain import keys_values, node_logits, relative_error
from tests.targets.conftest import Family
from tests.targets.test_ragged import LIMIT, SHAPES, prefilled, random_tokens, tree_rows
from tests.tiny import SHAPE, load_plain, write_tiny


def error_against_plain(kv: KVRows, plain_model, tokens: list[int]) -> float:
    """The committed rows against keys and values of plain decoding, relative to each tensor's largest magnitude."""
    assert kv.length == len(tokens)
    expected = keys_values(plain_model, tokens)
    committed = [np.array(array[..., : kv.length, :]) for array in kv.arrays()]
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(committed, expected, strict=True))


@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 3), (0, 1, 2), (0, 2, 3, 7, 13)])
def test_committed_path_equals_plainly_decoded_rows(family: Family, path: tuple[int, ...]):
    prompt, tokens = random_tokens(60, 20), random_tokens(61, 14)
    # Any increasing nodes can be a path: make it one, and hang the others on the root.
    parents = [-1] + [0] * 13
    for parent, node in itertools.pairwise(path):
        parents[node] = parent
    kv = prefilled(family.target, prompt)
    family.target.forward([tree_rows(kv, tokens, parents)])
    kv.commit(path)
    assert error_against_plain(kv, family.plain, prompt + [tokens[node] for node in path]) < LIMIT


def test_rounds_and_cuts_leave_plainly_decoded_rows(family: Family):
    """Twelve trees with random accepted paths and cuts between them, across the first growth of the cache."""
    rng = np.random.default_rng(62)
    committed = random_tokens(63, STEP - 20)
    kv = prefilled(family.target, committed)
    for _ in range(12):
        tokens, parents = rng.integers(0, 300, 14).tolist(), SHAPES["lopsided"]
        family.target.forward([tree_rows(kv, tokens, parents)])
        path = [int(rng.integers(14))]
        while path[0]:
            path.insert(0, parents[path[0]])
        kv.commit(path)
        committed += [tokens[node] for node in path]
        if rng.random() < 0.3:
            committed = committed[: -int(rng.integers(1, 6))]
            kv.truncate(len(committed))
    assert len(committed) > STEP
    assert error_against_plain(kv, family.plain, committed) < LIMIT


def test_truncated_cache_goes_on_as_if_the_tail_had_never_been(family: Family):
    prompt = random_tokens(64, 30)
    kv = prefilled(family.target, prompt)
    kv.truncate(11)
    assert kv.length == 11
    tokens, parents = random_tokens(65, 7), SHAPES["binary"]
    logits = np.array(family.target.forward([tree_rows(kv, tokens, parents)]).logits)
    assert relative_error(logits, node_logits(family.plain, prompt[:11], tokens, parents)) < LIMIT


def test_truncation_beyond_the_end_changes_nothing(family: Family):
    kv = prefilled(family.target, [1, 2, 3])
    kv.truncate(9)
    assert kv.length == 3


def test_layers_that_share_a_cache_commit_too(tmp_path):
    """The last two layers of this Gemma 4 have no keys of their own."""
    own = {"num_kv_shared_layers": 2, "sliding_window": 16, "hidden_size_per_layer_input": 0, "global_head_dim": 8}
    kinds = ["sliding_attention", "full_attention"] * 2
    shape = {**SHAPE, **own, "model_type": "gemma4_text", "num_hidden_layers": 4, "layer_types": kinds}
    folder = write_tiny(tmp_path, shape)
    plain, target = load_plain(folder), load_target(str(folder))
    prompt, tokens = random_tokens(66, 9), random_tokens(67, 4)
    kv = prefilled(target, prompt)
    target.forward([tree_rows(kv, tokens, [-1, 0, 0, 2])])
    kv.commit((0, 2, 3))
    following = np.array(target.forward([SessionRows.chunk(kv, [7], "all")]).logits)
    committed = [*prompt, tokens[0], tokens[2], tokens[3]]
    assert relative_error(following, node_logits(plain, committed, [7], [-1])) < LIMIT


def numbered_rows(first: int, count: int) -> mx.array:
    return mx.arange(first, first + count, dtype=mx.float32).reshape(1, 1, count, 1)


def test_rows_are_written_after_the_committed_ones_and_the_scratch():
    kv = KVRows(1)
    kv.write(0, numbered_rows(0, 3), numbered_rows(100, 3))
    kv.commit(range(3))
    kv.write(0, numbered_rows(10, 2), numbered_rows(110, 2))
    kv.write(0, numbered_rows(20, 2), numbered_rows(120, 2), scratch=2)
    keys, values = kv.read(0, 7)
    assert keys.flatten().tolist() == [0, 1, 2, 10, 11, 20, 21]
    assert values.flatten().tolist() == [100, 101, 102, 110, 111, 120, 121]


def test_growth_keeps_rows_and_rounds_capacity_up():
    kv = KVRows(1)
    kv.write(0, numbered_rows(0, STEP), numbered_rows(0, STEP))
    kv.commit(range(STEP))
    assert kv.nbytes == 2 * STEP * 4
    kv.write(0, numbered_rows(STEP, 1), numbered_rows(STEP, 1))
    assert kv.nbytes == 2 * 2 * STEP * 4
    assert kv.read(0, STEP + 1)[0].flatten().tolist() == list(range(STEP + 1))


def test_dropped_rows_close_the_gap():
    kv = KVRows(1)
    kv.write(0, numbered_rows(0, 8), numbered_rows(50, 8))
    kv.commit(range(8))
    kv.drop(2, 5)
    assert kv.length == 5
    assert kv.read(0, 5)[0].flatten().tolist() == [0, 1, 5, 6, 7]
    assert kv.read(0, 5)[1].flatten().tolist() == [50, 51, 55, 56, 57]
