import mlx.core as mx
import numpy as np
import pytest

from kernels.tree_attention import TreeMask, prefix_tree_attention, rotary_tree_attention, tree_attention

HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = DIM**-0.5
CHAIN = [-1, 0, 1, 2, 3]
TREE = [-1, 0, 0, 1, 1, 2, 5, 6]


def sees(parents, prefix, window):
    """Key by key: all of the prefix, oneself and one's ancestors, less than ``window`` positions back."""
    depth = [0] * len(parents)
    mask = np.zeros((len(parents), prefix + len(parents)), bool)
    for row, parent in enumerate(parents):
        depth[row] = depth[parent] + 1 if row else 0
        node, keys = row, [*range(prefix)]
        while node >= 0:
            keys.append(prefix + node)
            node = parents[node]
        for key in keys:
            position = key if key < prefix else prefix + depth[key - prefix]
            mask[row, key] = window is None or prefix + depth[row] - position < window
    return mask, np.array(depth) + prefix


def tree_mask(parents, prefix, chain=False):
    """The product's mask of one session; ``chain`` leaves the ancestors out, as for consecutive rows."""
    allowed, positions = sees(parents, prefix, None)
    return TreeMask(prefix, None if chain else allowed[:, prefix:], positions.astype(np.int32))


def slow_attention(queries, keys, values, allowed, sinks):
    """Softmax attention in float64, head by head and row by row."""
    out = np.zeros(queries.shape)
    for head in range(HEADS):
        k, v = keys[0, head // (HEADS // KV_HEADS)], values[0, head // (HEADS // KV_HEADS)]
        for row, query in enumerate(queries[0, head]):
            seen = np.flatnonzero(allowed[row])
            scores = k[seen] @ query * queries.shape[3] ** -0.5
            extra = [] if sinks is None else [sinks[head]]
            weights = np.exp(np.append(scores, extra) - max([*scores, *extra]))
            out[0, head, row] = (weights / weights.sum())[: len(seen)] @ v[seen]
    return out


def as_array(mask, rows, keys):
    """The three spellings that MLX takes, spelled out."""
    if mask is None:
        return np.ones((rows, keys), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tri(rows, keys, keys - rows, dtype=bool)
    return np.array(mask)


CASES = [
    pytest.param(parents, prefix, window, id=f"{name}-{prefix}-{window}")
    for name, parents in {"chain": CHAIN, "tree": TREE, "one": [-1]}.items()
    for prefix in (0, 1, 37)
    for window in (None, 1, 4, 38, 500)
]

WIDTHS = [(DIM, mx.float32), (64, mx.float16), (128, mx.bfloat16)]


@pytest.mark.parametrize(("parents", "prefix", "window"), CASES)
def test_masks_hold_exactly_prefix_ancestors_and_self(parents, prefix, window):
    allowed, _ = sees(parents, prefix, window)
    for chain in {False, parents != TREE}:
        mask = tree_mask(parents, prefix, chain).array(window)
        np.testing.assert_array_equal(as_array(mask, len(parents), allowed.shape[1]), allowed)


@pytest.mark.parametrize(("parents", "mask"), [([-1], None), (CHAIN, "causal")])
def test_chains_take_the_fast_masks_while_no_window_slides(parents, mask):
    """The last row's position is 41: a window of 42 still holds all."""
    for window in (None, 42):
        assert tree_mask(parents, 37 + 5 - len(parents), chain=True).array(window) == mask
    assert isinstance(tree_mask(parents, 37 + 5 - len(parents), chain=True).array(41), mx.array)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("parents", "prefix", "window"), CASES)
def test_attention_matches_a_softmax_in_float64(parents, prefix, window, sinks):
    rng, rows = np.random.default_rng(prefix), len(parents)
    queries = rng.normal(0, 1, (1, HEADS, rows, DIM))
    keys, values = rng.normal(0, 1, (2, 1, KV_HEADS, prefix + rows, DIM))
    sink_logits = rng.normal(0, 1, HEADS) if sinks else None
    allowed, _ = sees(parents, prefix, window)
    expected = slow_attention(queries, keys, values, allowed, sink_logits)
    q, k, v = (mx.array(array.astype(np.float32)) for array in (queries, keys, values))
    s = mx.array(sink_logits.astype(np.float32)) if sinks else None
    for chain in {False, parents != TREE}:
        got = tree_attention(q, k, v, tree_mask(parents, prefix, chain).array(window), SCALE, s)
        np.testing.assert_allclose(np.array(got), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("dim", "dtype"), WIDTHS)
@pytest.mark.parametrize(("parents", "prefix", "window"), CASES)
def test_a_prefix_apart_matches_a_softmax_in_float64(parents, prefix, window, dim, dtype):
    """The cache has room to spare; inputs are the transposed views that models make. CUDA has its own kernel."""
    rng, rows, capacity = np.random.default_rng(prefix + dim), len(parents), 64
    queries = rng.normal(0, 1, (1, rows, HEADS, dim))
    new = rng.normal(0, 1, (2, 1, rows, KV_HEADS, dim))
    cached = rng.normal(0, 1, (2, 1, KV_HEADS, capacity, dim))
    q, *arrays = (mx.array(array.astype(np.float32)).astype(dtype) for array in (queries, *new, *cached))
    q, k, v = (array.transpose(0, 2, 1, 3) for array in (q, arrays[0], arrays[1]))
    rounded = [np.array(array.astype(mx.float32), np.float64) for array in (q, k, v, arrays[2], arrays[3])]
    allowed, _ = sees(parents, prefix, window)
    keys, values = (np.concatenate([rounded[i + 2][:, :, :prefix], rounded[i]], axis=2) for i in (1, 2))
    expected = slow_attention(rounded[0], keys, values, allowed, None)
    visible = np.zeros((rows, capacity), bool)
    visible[:, :prefix] = allowed[:, :prefix]
    got = prefix_tree_attention(
        q,
        (arrays[2], arrays[3]),
        (k, v),
        mx.array(visible),
        mx.array(allowed[:, prefix:]),
        mx.array([prefix]),
        dim**-0.5,
    )
    assert (got.shape, got.dtype) == (q.shape, dtype)
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("dim", "dtype"), WIDTHS)
@pytest.mark.parametrize("held", [1, 3, 40])
def test_rows_of_earlier_calls_are_seen_where_they_lie(held, dim, dtype):
    """Behind the prefix; each new row sees some of them, and one sees none."""
    rng, rows, prefix, capacity = np.random.default_rng(held + dim), 5, 9, 64
    queries, cached, new = (
        rng.normal(0, 1, shape)
        for shape in ((1, HEADS, rows, dim), (2, 1, KV_HEADS, capacity, dim), (2, 1, KV_HEADS, rows, dim))
    )
    q, *arrays = (mx.array(array.astype(np.float32)).astype(dtype) for array in (queries, *cached, *new))
    old_keys, old_values, own_keys, own_values = (np.array(a.astype(mx.float32), np.float64) for a in arrays)
    ancestors = np.concatenate([rng.random((rows, held)) < 0.5, np.eye(rows, dtype=bool)], axis=1)
    ancestors[2, :held] = False
    visible = np.broadcast_to(np.arange(capacity) < prefix, (rows, capacity))
    keys = np.concatenate([old_keys[:, :, : prefix + held], own_keys], axis=2)
    values = np.concatenate([old_values[:, :, : prefix + held], own_values], axis=2)
    allowed = np.concatenate([visible[:, :prefix], ancestors], axis=1)
    expected = slow_attention(np.array(q.astype(mx.float32), np.float64), keys, values, allowed, None)
    got = prefix_tree_attention(
        q,
        (arrays[0], arrays[1]),
        (arrays[2], arrays[3]),
        mx.array(visible),
        mx.array(ancestors),
        mx.array([prefix]),
        dim**-0.5,
    )
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), expected, atol=tolerance * np.abs(expected).max())


def rotate(x, positions, base=100.0):
    """Pairs (i, i + d / 2) of each head, as complex numbers, turned by position * base^(-2 i / d)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1), angles


@pytest.mark.parametrize(("dim", "dtype"), WIDTHS)
@pytest.mark.parametrize(("parents", "prefix", "window"), CASES)
def test_rotation_on_the_way_matches_a_softmax_in_float64(parents, prefix, window, dim, dtype):
    rng, rows, capacity = np.random.default_rng(prefix + dim), len(parents), 64
    joint = mx.array(rng.normal(0, 1, (rows, (HEADS + 2 * KV_HEADS) * dim)).astype(np.float32)).astype(dtype)
    cached = [mx.array(c.astype(np.float32)).astype(dtype) for c in rng.normal(0, 1, (2, 1, KV_HEADS, capacity, dim))]
    allowed, positions = sees(parents, prefix, window)
    by_head = np.array(joint.astype(mx.float32), np.float64).reshape(1, rows, -1, dim).transpose(0, 2, 1, 3)
    turned, angles = rotate(by_head[:, :-KV_HEADS], positions)
    old = [np.array(array.astype(mx.float32), np.float64)[:, :, :prefix] for array in cached]
    keys = np.concatenate([old[0], turned[:, HEADS:]], axis=2)
    values = np.concatenate([old[1], by_head[:, -KV_HEADS:]], axis=2)
    expected = slow_attention(turned[:, :HEADS], keys, values, allowed, None)
    visible = np.zeros((rows, capacity), bool)
    visible[:, :prefix] = allowed[:, :prefix]
    rotations = mx.array(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
    attended, new_keys, new_values = rotary_tree_attention(
        joint,
        (cached[0], cached[1]),
        rotations,
        mx.array(visible),
        mx.array(allowed[:, prefix:]),
        mx.array([prefix]),
        dim**-0.5,
    )
    tolerance = {mx.float32: 2e-5, mx.float16: 6e-3, mx.bfloat16: 5e-2}[dtype]
    flat = expected.transpose(0, 2, 1, 3).reshape(rows, -1)
    for got, right in ((attended, flat), (new_keys, turned[:, HEADS:]), (new_values, by_head[:, -KV_HEADS:])):
        assert (got.shape, got.dtype) == (right.shape, dtype)
        np.testing.assert_allclose(np.array(got.astype(mx.float32)), right, atol=tolerance * np.abs(right).max())
