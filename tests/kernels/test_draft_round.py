"""A drafter's round in one launch against the same drafter in NumPy, float64, one row at a time.

Without a GPU the CUDA source runs on the CPU, its blocks as threads. The reference follows the choices of the
device, which rounding may decide, and checks each of them.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

import kernels.draft_round.cuda as cuda
from kernels._cuda import allocate_pinned, count_multiprocessors, on_cuda
from tests.kernels import cuda_on_cpu

pytestmark = pytest.mark.skipif(not (on_cuda() or cuda_on_cpu.AVAILABLE), reason="needs a CUDA GPU or g++")
SINKS = 4


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    if not on_cuda():
        monkeypatch.setattr(cuda, "build_cuda_kernel", cuda_on_cpu.build_cuda_kernel)


@dataclass(frozen=True)
class Case:
    """Sizes of a drafter, a session and a tree."""

    hidden: int = 64
    features: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 96
    vocab: int = 112
    target_vocab: int = 131
    norm_residual: bool = False
    logit_scale: float = 1.0
    dtype: mx.Dtype = mx.float16
    feature_dtype: mx.Dtype = mx.float16
    start: int = 40
    dropped: int = 0
    window: int = 2048
    new: int = 3
    depth: int = 3
    width: int = 5
    blocks: int = 3


LARGE = Case(
    # Every loop goes round more than once: 19 chunks of the state, 36 of the features, two tiles of rows, four passes
    # over the head's tiles, more keys than lanes hold at once.
    hidden=608,
    features=1152,
    heads=6,
    kv_heads=2,
    head_dim=64,
    inner=416,
    vocab=592,
    target_vocab=640,
    start=420,
    dropped=37,
    window=200,
    new=9,
    depth=3,
    width=10,
    norm_residual=True,
    logit_scale=1.5,
)


def draw_layer(case: Case, rng: np.random.Generator) -> cuda.DraftLayer:
    joint = (case.heads + 2 * case.kv_heads) * case.head_dim
    queries = case.heads * case.head_dim
    shapes = {
        "embedding": (case.target_vocab, case.hidden),
        "fuse": (case.hidden, case.features),
        "by_embedding": (joint, case.hidden),
        "by_state": (joint, case.hidden),
        "output": (case.hidden, queries),
        "gate": (case.inner, case.hidden),
        "up": (case.inner, case.hidden),
        "down": (case.hidden, case.inner),
        "head": (case.vocab, case.hidden),
    }
    drawn = {name: rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
    drawn["embedding"] *= case.hidden**0.5
    drawn["head"] *= 2  # likely and unlikely children
    norms = ("embedding_norm", "state_norm", "middle_norm", "final_norm")
    drawn |= {name: rng.normal(1, 0.2, case.hidden) for name in norms}
    arrays = {name: mx.array(value.astype(np.float32)).astype(case.dtype) for name, value in drawn.items()}
    labels = mx.array(np.sort(rng.permutation(case.target_vocab)[: case.vocab]).astype(np.int32))
    scale = case.head_dim**-0.5
    return cuda.DraftLayer(
        **arrays,
        labels=labels,
        heads=case.heads,
        kv_heads=case.kv_heads,
        eps=1e-5,
        attention_scale=scale,
        logit_scale=case.logit_scale,
        norm_residual=case.norm_residual,
    )


class Reference:
    """The drafter in float64. Rows are (position, keys [kv_heads, d], values [kv_heads, d])."""

    def __init__(self, layer: cuda.DraftLayer, rotations: np.ndarray, window: int) -> None:
        self.w = {name: widen(value) for name, value in vars(layer).items() if isinstance(value, mx.array)}
        self.layer, self.rotations, self.window = layer, rotations, window

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean() + self.layer.eps) * self.w[name]

    def turn(self, heads, position):
        half = heads.shape[-1] // 2
        cosines, sines = self.rotations[position, :half], self.rotations[position, half:]
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1)

    def run(self, token, state, position, rows, ancestors=()):
        """What a row hands on, and the row itself."""
        layer, d = self.layer, self.layer.head_dim
        seen_state = self.norm(state, "state_norm")
        joint = self.w["by_embedding"] @ self.norm(self.w["embedding"][token], "embedding_norm")
        joint = (joint + self.w["by_state"] @ seen_state).reshape(-1, d)
        queries = self.turn(joint[: layer.heads], position)
        keys = self.turn(joint[layer.heads : layer.heads + layer.kv_heads], position)
        own = position, keys, joint[layer.heads + layer.kv_heads :]
        near = [row for row in rows if row[0] < SINKS or position - row[0] < self.window]
        seen = [*near, *ancestors, own]
        group = layer.heads // layer.kv_heads
        out = []
        for head, query in enumerate(queries):
            scores = np.array([query @ row[1][head // group] for row in seen]) * layer.attention_scale
            weights = np.exp(scores - scores.max())
            out.append(weights @ np.array([row[2][head // group] for row in seen]) / weights.sum())
        middle = (seen_state if layer.norm_residual else state) + self.w["output"] @ np.concatenate(out)
        y = self.norm(middle, "middle_norm")
        gate = self.w["gate"] @ y
        return middle + self.w["down"] @ (gate / (1 + np.exp(-gate)) * (self.w["up"] @ y)), own

    def log_probs(self, state):
        """By the target's token id."""
        logits = self.w["head"] @ self.norm(state, "final_norm") * self.layer.logit_scale
        logits -= logits.max()
        return dict(zip(self.w["labels"].astype(int).tolist(), logits - np.log(np.exp(logits).sum()), strict=True))


def widen(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def draw(rng: np.random.Generator, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.array(rng.normal(0, 1, shape).astype(np.float32)).astype(dtype)


CASES = {
    "small": Case(),
    "loops go round, rows dropped and out of the window": LARGE,
    "bfloat16": Case(dtype=mx.bfloat16, feature_dtype=mx.bfloat16),
    "no new rows, as wide as can be": Case(new=0, width=16, depth=2),
    "a window shorter than the new rows": Case(window=4, new=7, head_dim=128),
    "one depth, one child, float32 features": Case(depth=1, width=1, new=16, feature_dtype=mx.float32),
    "the first rows": Case(start=1, new=1, depth=2, width=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_draft_round(case):
    rng = np.random.default_rng(0)
    layer = draw_layer(case, rng)
    blocks = count_multiprocessors() if on_cuda() else case.blocks
    assert cuda.supports(layer, case.depth, case.width, blocks)
    length = case.start + case.dropped
    angles = np.arange(length + case.new + case.depth)[:, None] * 0.7 ** np.arange(case.head_dim // 2)
    rotations = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    capacity = 64 * (case.start // 64 + 1)
    cache = [draw(rng, case.dtype, 1, case.kv_heads, capacity, case.head_dim) for _ in range(2)]
    last, features = draw(rng, case.dtype, 1, case.hidden), draw(rng, case.feature_dtype, case.new, case.features)
    tokens = rng.integers(0, case.target_vocab, case.new)

    words = cuda.TOLD + cuda.MOST_ROWS * case.features
    allocate = allocate_pinned if on_cuda() else lambda count: np.zeros(count, np.int32)
    told, answer = allocate(words), allocate(cuda.count_answer(case.depth, case.width))
    told[:5] = case.start, case.dropped, case.window, case.new, case.depth
    told[cuda.TOLD - cuda.MOST_ROWS :][: case.new] = tokens
    if case.new:
        bits = np.array(features.reshape(-1).view(mx.int32))
        told[cuda.TOLD :][: len(bits)] = bits
    answer[-1] = 1
    mailbox = mx.array(np.array([told.ctypes.data, answer.ctypes.data], np.int64))
    table = mx.array(rotations)
    done = cuda.run_round(layer, mailbox, case.feature_dtype, last, tuple(cache), table, case.width, SINKS, blocks)
    mx.eval(done)
    assert answer[-1] == 0

    tolerance = 2e-2 if case.dtype == mx.float16 else 1.5e-1
    reference = Reference(layer, rotations.astype(np.float64), case.window)
    slots = np.arange(case.start)
    positions = np.where(slots < SINKS, slots, slots + case.dropped).tolist()
    wide = [widen(array)[0] for array in cache]
    rows = [(position, wide[0][:, slot], wide[1][:, slot]) for slot, position in enumerate(positions)]
    state = widen(last)[0]
    for index in range(case.new):
        fused = reference.w["fuse"] @ widen(features.astype(case.dtype))[index]
        state, own = reference.run(tokens[index], fused, length + index, rows)
        rows.append(own)
        for got, right in zip(done.rows, own[1:], strict=True):
            assert_close(got[0, :, index], right, tolerance)
    if case.new:
        assert_close(done.newest[0], state, tolerance)
        assert done.commit.tolist()[: case.new + 1] == [case.start, *range(case.new)]
        assert set(done.commit.tolist()[case.new + 1 :]) <= {-1}
    check_tree(case, reference, answer, state, rows, length + case.new, tolerance)


def check_tree(case, reference, answer, state, rows, position, tolerance):
    """Follow the tree that the device grew: its children are the likeliest, its frontiers the best."""
    width, depth = case.width, case.depth
    total = width + (depth - 1) * width * width
    log_probs, tokens = answer[:total].view(np.float32).astype(np.float64), answer[total : 2 * total]
    picks = answer[2 * total : -1].reshape(depth - 1, width)
    frontier, base = [(state, 0.0, ())], 0  # states that predict children, scores of their nodes, rows on the way there
    for level in range(depth):
        scores, children = [], []
        for at, (hidden, score, path) in enumerate(frontier):
            own = slice(base + at * width, base + (at + 1) * width)
            right = reference.log_probs(hidden)
            assert len(set(tokens[own].tolist())) == width
            for token, got in zip(tokens[own].tolist(), log_probs[own], strict=True):
                assert abs(got - right[token]) < 5 * tolerance
            best = sorted(right.values(), reverse=True)[:width]
            assert np.abs(np.sort(log_probs[own])[::-1] - best).max() < 5 * tolerance
            assert (np.diff(log_probs[own]) <= 0).all()
            scores += [score + value for value in log_probs[own]]
            children += [(int(token), hidden, path) for token in tokens[own]]
        base += len(children)
        if level == depth - 1:
            break
        pick = picks[level].tolist()
        # The scores are those of the device, so that its order is exact but for float32 sums.
        expected = sorted(range(len(scores)), key=lambda child: -scores[child])[:width]
        np.testing.assert_allclose([scores[i] for i in pick], [scores[i] for i in expected], atol=1e-4)
        assert len(set(pick)) == width
        following = []
        for child in pick:
            token, hidden, path = children[child]
            handed_on, own = reference.run(token, hidden, position + level, rows, path)
            following.append((handed_on, scores[child], (*path, own)))
        frontier = following


def assert_close(got: mx.array, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(widen(got) - expected).max() < tolerance * np.abs(expected).max()


def test_blocks_that_miss_each_other_are_told(monkeypatch):
    case = Case()
    layer = draw_layer(case, np.random.default_rng(0))
    monkeypatch.setattr(cuda, "_PATIENCE", 0)
    allocate = allocate_pinned if on_cuda() else lambda count: np.zeros(count, np.int32)
    told, answer = allocate(cuda.TOLD), allocate(cuda.count_answer(case.depth, case.width))
    told[:5], answer[-1] = (case.start, 0, case.window, 0, case.depth), 1
    mailbox = mx.array(np.array([told.ctypes.data, answer.ctypes.data], np.int64))
    cache = tuple(mx.zeros((1, case.kv_heads, 64, case.head_dim), case.dtype) for _ in range(2))
    table, last = mx.zeros((64, case.head_dim)), mx.zeros((1, case.hidden), case.dtype)
    mx.eval(cuda.run_round(layer, mailbox, mx.float16, last, cache, table, case.width, SINKS, case.blocks))
    assert answer[-1] == 1


@pytest.mark.parametrize(
    "change",
    [{"vocab": 100}, {"inner": 72}, {"head_dim": 16}, {"hidden": 72}, {"features": 72}, {"dtype": mx.float32}],
    ids=str,
)
def test_other_sizes_and_types_are_refused(change):
    layer = draw_layer(replace(Case(), **change), np.random.default_rng(0))
    assert not cuda.supports(layer, 3, 5, 132)


def test_trees_that_a_block_can_hold():
    layer = draw_layer(Case(), np.random.default_rng(0))
    assert cuda.supports(layer, 16, 16, 132)
    assert not cuda.supports(layer, 17, 16, 132)
    assert not cuda.supports(layer, 16, 17, 132)
    assert not cuda.supports(layer, 0, 16, 132)
