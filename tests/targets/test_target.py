import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

from services.speculation.errors import AerieError, Reason
from services.targets.ragged import SessionRows
from services.targets.target import dense_weight
from tests.plain import relative_error
from tests.targets.conftest import Family
from tests.targets.test_ragged import LIMIT, SHAPES, prefilled, random_tokens, tree_rows
from tests.tiny import WINDOW

TAPS = frozenset([0, 1, 2, 3, 4, "final"])


def hidden_states(plain: nn.Module, tokens: list[int]) -> dict:
    """The residual stream after each of mlx-lm's own layers, called one by one, and after the final norm."""
    decoder = plain.model
    h = decoder.embed_tokens(mx.array(tokens)[None])
    if plain.model_type == "gemma3_text":
        h = h * 5.65625  # sqrt(32) in bfloat16
    states = {0: h}
    for index, layer in enumerate(decoder.layers):
        window = WINDOW if getattr(layer.self_attn, "is_sliding", False) else None
        h = layer(h, create_causal_mask(len(tokens), window_size=window), None)
        states[index + 1] = h
    states["final"] = decoder.norm(h)
    return {tap: np.array(state[0]) for tap, state in states.items()}


def test_taps_equal_hidden_states_layer_by_layer(family: Family):
    tokens = random_tokens(70, 40)
    taps = family.target.forward([SessionRows.chunk(family.target.new_kv(), tokens, "last")], TAPS).taps
    expected = hidden_states(family.plain, tokens)
    assert taps.keys() == expected.keys()
    for tap, states in expected.items():
        assert relative_error(np.array(taps[tap]), states) < LIMIT, tap


def test_taps_of_a_tree_follow_each_path(family: Family):
    prompt, tokens, parents = random_tokens(71, 20), random_tokens(72, 10), SHAPES["square"]
    taps = family.target.forward([tree_rows(prefilled(family.target, prompt), tokens, parents)], TAPS).taps
    for leaf in (7, 8, 9):
        path = [0, parents[parents[leaf]], parents[leaf], leaf]
        assert parents[path[1]] == 0
        expected = hidden_states(family.plain, prompt + [tokens[node] for node in path])
        for tap in TAPS:
            assert relative_error(np.array(taps[tap])[path], expected[tap][-4:]) < LIMIT, tap


def test_taps_are_bit_identical_over_runs(family: Family):
    prompt, tokens, parents = random_tokens(73, 20), random_tokens(74, 14), SHAPES["lopsided"]
    runs = []
    for _ in range(3):
        kv = prefilled(family.target, prompt)
        taps = family.target.forward([tree_rows(kv, tokens, parents)], TAPS).taps
        runs.append({tap: np.array(rows) for tap, rows in taps.items()})
    for tap in TAPS:
        np.testing.assert_array_equal(runs[0][tap], runs[1][tap])
        np.testing.assert_array_equal(runs[0][tap], runs[2][tap])


def test_only_wanted_taps_are_kept(family: Family):
    forward = family.target.forward([SessionRows.chunk(family.target.new_kv(), [1, 2], "all")], frozenset([2]))
    assert list(forward.taps) == [2]
    assert forward.taps[2].shape == (2, 32)


def test_row_selection_picks_rows_of_the_head_alone(family: Family):
    """Rows that ask for no logits still run, and still give taps."""
    first, second, third = random_tokens(75, 5), random_tokens(76, 6), random_tokens(77, 4)

    def forward(*kinds):
        kvs = [family.target.new_kv() for _ in kinds]
        rows = [SessionRows.chunk(kv, t, k) for kv, t, k in zip(kvs, (first, second, third), kinds, strict=True)]
        return family.target.forward(rows, TAPS)

    everything, some = forward("all", "all", "all"), forward("last", "none", "all")
    assert everything.logits.shape[0] == 15
    assert relative_error(np.array(some.logits), np.array(everything.logits)[[4, 11, 12, 13, 14]]) < LIMIT
    for tap in TAPS:
        np.testing.assert_array_equal(np.array(some.taps[tap]), np.array(everything.taps[tap]))


def test_shared_tensors_are_the_checkpoint_s(family: Family):
    embedding = np.array(family.plain.model.embed_tokens.weight)
    head = embedding if family.name == "qwen3" else np.array(family.plain.lm_head.weight)
    np.testing.assert_array_equal(np.array(family.target.tensor("embed_tokens")), embedding)
    np.testing.assert_array_equal(np.array(family.target.tensor("lm_head")), head)


def test_unknown_shared_tensor_is_refused(family: Family):
    with pytest.raises(AerieError, match="q_proj") as caught:
        family.target.tensor("q_proj")
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_kv_bytes_of_a_row_are_those_of_its_keys_and_values(family: Family):
    layers, kv_heads, head_dim, float32 = 4, 2, 8, 4
    assert family.target.kv_bytes_per_row == layers * 2 * kv_heads * head_dim * float32


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_unpacked(bits: int):
    packed = nn.QuantizedLinear.from_linear(nn.Linear(64, 6, bias=False), group_size=32, bits=bits)
    words, scales, biases = (np.array(packed[name]) for name in ("weight", "scales", "biases"))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = ((words[..., None] >> shifts) & (2**bits - 1)).reshape(6, 2, 32)
    expected = (values * scales[..., None] + biases[..., None]).reshape(6, 64)
    np.testing.assert_allclose(np.array(dense_weight(packed)), expected, atol=1e-6)


def test_dense_weight_of_a_plain_layer_is_its_own():
    layer = nn.Linear(4, 3)
    assert dense_weight(layer) is layer.weight
