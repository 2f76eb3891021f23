"""The drafter's forward, cached and in trees, against the float64 reference over whole paths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from services.drafter import session as session_module
from services.drafter.eagle3.model import Eagle3Drafter
from services.drafter.family import Frontier
from services.drafter.session import DraftSession
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Features
from services.speculation.trees import node_depths, path_to
from services.speculation.window import WINDOW
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design, Reference, Weights, draw_weights

PLAIN = Design()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "recycle_post_norm": {"recycle_post_norm": True},
    "qk_norm": {"qk_norm": True},
    "attention_bias": {"attention_bias": True},
    "attention_bias_but_no_output_bias": {"attention_bias": True, "output_bias": False},
    "mlp_bias": {"mlp_bias": True},
    "fc_bias": {"fc_bias": True},
    "logit_scale": {"logit_scale": 0.25},
    "own_embedding": {"own_embedding": True},
    "tied_head": {"own_embedding": True, "head": "embedding", "draft_vocab": PLAIN.vocab},
    "target_head": {"head": "target", "draft_vocab": PLAIN.vocab},
    "wider_target": {"target_hidden": 40, "own_embedding": True},
    "two_layers": {"layers": 2},
    "two_layers_with_everything": {
        "layers": 2,
        "norm_before_residual": True,
        "fc_norm": True,
        "recycle_post_norm": True,
        "qk_norm": True,
        "attention_bias": True,
        "mlp_bias": True,
        "fc_bias": True,
        "own_embedding": True,
        "target_hidden": 40,
        "scaling": LLAMA3,
    },
    "rope_base": {"theta": 500000.0},
    "rope_linear": {"scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope_llama3": {"scaling": LLAMA3},
    "rope_yarn": {"scaling": YARN},
    "rope_yarn_mscale": {"scaling": {**YARN, "beta_fast": 8.0, "mscale": 2.0, "mscale_all_dim": 0.5}},
    "rope_yarn_lone_mscale": {"scaling": {**YARN, "mscale": 2.0}},  # transformers: one alone means nothing
    "five_taps": {"taps": (2, 3, 5, 6, 8)},
}


def build(tmp_path: Path, design: Design, window: int = WINDOW) -> tuple[Eagle3Drafter, Reference, Weights]:
    weights = draw_weights(design)
    folder = checkpoints.write(tmp_path / "drafter", checkpoints.specforge(design), checkpoints.tensors_of(weights))
    return checkpoints.load(folder, design, weights, window=window), Reference(design, weights), weights


def assert_close(actual: ArrayLike, expected: NDArray[Any], tolerance: float = 1e-4) -> None:
    """Relative to the largest magnitude of the expected tensor."""
    actual = np.array(actual, np.float64)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def assert_same_session(a: DraftSession, b: DraftSession) -> None:
    assert a.length == b.length
    assert a.kept.tolist() == b.kept.tolist()
    assert a.last is not None
    assert b.last is not None
    assert_close(a.last, np.array(b.last), 1e-5)
    for layer in range(len(a.kv.keys)):
        for own, other in zip(a.kv.read(layer, a.kv.length), b.kv.read(layer, b.kv.length), strict=True):
            assert_close(own, np.array(other), 1e-5)


def expand_tree(
    drafter: Eagle3Drafter, session: DraftSession, tokens: list[int], parents: list[int]
) -> NDArray[np.float32]:
    """States of all nodes but the root, expanded depth by depth. Node 0 is the pending token."""
    depths = node_depths(np.array(parents, np.int32))
    states: dict[int, mx.array] = {0: session.last[0]}
    order: list[int] = []
    for depth in range(1, int(depths.max()) + 1):
        nodes = [n for n in range(len(tokens)) if depths[n] == depth]
        seen = order + nodes
        paths = [set(path_to(np.array(parents, np.int32), n)) for n in nodes]
        frontier = Frontier(
            tokens=mx.array([tokens[n] for n in nodes]),
            hidden=mx.stack([states[parents[n]] for n in nodes]),
            ancestors=mx.array([[other in path for other in seen] for path in paths]),
            depth=depth,
            scratch=len(order),
        )
        out = drafter.expand(session, frontier)
        states |= {n: out[i] for i, n in enumerate(nodes)}
        order = seen
    return np.array(mx.stack([states[n] for n in range(1, len(tokens))]))


def random_tree(seed: int, nodes: int, depth: int, vocab: int) -> tuple[list[int], list[int]]:
    """A chain of ``depth`` first, then nodes below random earlier ones, none deeper."""
    rng = np.random.default_rng(seed)
    parents = [-1, *range(depth)]
    while len(parents) < nodes:
        depths = node_depths(np.array(parents, np.int32))
        parents.append(int(rng.choice(np.flatnonzero(depths < depth))))
    return rng.integers(0, vocab, nodes).tolist(), parents


def assert_tree_equals_paths(
    drafter: Eagle3Drafter,
    reference: Reference,
    session: DraftSession,
    features: Features,
    tokens: list[int],
    tree: tuple[list[int], list[int]],
) -> None:
    nodes, parents = tree
    states = expand_tree(drafter, session, nodes, parents)
    for node in range(1, len(nodes)):
        path = path_to(np.array(parents, np.int32), node)[1:]
        expected = reference.outputs(features.rows, tokens, [nodes[n] for n in path])[-1]
        assert_close(states[node - 1], expected)


@pytest.mark.parametrize("option", OPTIONS)
def test_forward_equals_reference(option: str, tmp_path: Path) -> None:
    design = replace(PLAIN, **OPTIONS[option])
    drafter, reference, _ = build(tmp_path, design)
    features, tokens = checkpoints.random_rows(design, 9)
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), features)
    path = [3, 17, 8]
    states = expand_tree(drafter, session, [0, *path], [-1, 0, 1, 2])
    expected = reference.outputs(features.rows, tokens, path)
    assert_close(session.last, expected[8:9])
    assert_close(states, expected[9:])
    for layer, keys in enumerate(reference.keys):
        assert_close(session.kv.read(layer, 9)[0][0].transpose(1, 0, 2), keys[:9])
    log_probs, ids = drafter.top_children(mx.array(states), design.draft_vocab)
    by_id = reference.log_probs(expected[9:])
    for row in range(len(path)):
        assert sorted(np.array(ids[row]).tolist()) == sorted(reference.weights.target_ids.tolist())
        assert_close(log_probs[row], by_id[row][np.array(ids[row])])


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "recycle_post_norm", "theta", "scaling", "logit_scale", "window"]
)
def test_options_without_tensors_change_the_reference(flag: str) -> None:
    """An option that changed nothing would make its comparison above an empty one."""
    other = {"theta": 500000.0, "scaling": YARN, "logit_scale": 0.5, "window": 3}.get(flag, True)
    changed = replace(PLAIN, **{flag: other})
    weights = draw_weights(PLAIN)
    features, tokens = checkpoints.random_rows(PLAIN, 9)
    a, b = Reference(PLAIN, weights), Reference(changed, weights)
    one, two = (r.log_probs(r.outputs(features.rows, tokens, [3]))[-1] for r in (a, b))
    drafted = np.isfinite(one)
    assert np.abs(one[drafted] - two[drafted]).max() > 1e-2


def test_top_children_come_best_first(tmp_path: Path) -> None:
    drafter, reference, _ = build(tmp_path, PLAIN)
    features, tokens = checkpoints.random_rows(PLAIN, 4)
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), features)
    expected = reference.log_probs(reference.outputs(features.rows, tokens, []))[-1]
    _, ids = drafter.top_children(session.last, 5)
    assert np.array(ids[0]).tolist() == np.argsort(-expected)[:5].tolist()
    _, ids = drafter.top_children(session.last, 1000)
    assert ids.shape == (1, PLAIN.draft_vocab)


@pytest.mark.parametrize("seed", range(3))
def test_observing_in_chunks_and_branches_equals_whole_paths(seed: int, tmp_path: Path) -> None:
    design = replace(PLAIN, layers=2) if seed == 2 else PLAIN
    drafter, reference, _ = build(tmp_path, design)
    features, tokens = checkpoints.random_rows(design, 11, seed)
    session = drafter.new_session()
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        drafter.observe(session, np.array(tokens[start:stop], np.int32), checkpoints.cut(features, start, stop))
    tree = random_tree(seed, 12, 5, design.vocab)
    assert_tree_equals_paths(drafter, reference, session, features, tokens, tree)
    # A second tree over the same rows: nothing of the first one is left.
    tree = random_tree(seed + 10, 9, 4, design.vocab)
    assert_tree_equals_paths(drafter, reference, session, features, tokens, tree)


@pytest.mark.parametrize("split", range(1, 10))
def test_prompt_splits_give_one_cache(split: int, tmp_path: Path) -> None:
    drafter, _, _ = build(tmp_path, replace(PLAIN, layers=2))
    features, tokens = checkpoints.random_rows(PLAIN, 10)
    ids = np.array(tokens, np.int32)
    whole, parts = drafter.new_session(), drafter.new_session()
    drafter.observe(whole, ids, features)
    drafter.observe(parts, ids[:split], checkpoints.cut(features, 0, split))
    drafter.observe(parts, ids[split:], checkpoints.cut(features, split, 10))
    assert_same_session(parts, whole)


@pytest.mark.parametrize("accepted", range(6))
def test_accepting_any_part_of_a_draft_leaves_a_fresh_prefill(accepted: int, tmp_path: Path) -> None:
    """Tree rows are dropped at the verdict; the accepted ones come back with true features."""
    drafter, reference, _ = build(tmp_path, replace(PLAIN, layers=2))
    features, tokens = checkpoints.random_rows(PLAIN, 16)
    ids = np.array(tokens, np.int32)
    session, fresh = drafter.new_session(), drafter.new_session()
    drafter.observe(session, ids[:7], checkpoints.cut(features, 0, 7))
    nodes, parents = random_tree(accepted, 14, 5, PLAIN.vocab)
    expand_tree(drafter, session, nodes, parents)
    stop = 7 + accepted + 1
    drafter.observe(session, ids[7:stop], checkpoints.cut(features, 7, stop))
    drafter.observe(fresh, ids[:stop], checkpoints.cut(features, 0, stop))
    assert_same_session(session, fresh)
    seen = checkpoints.cut(features, 0, stop)
    assert_close(session.last, reference.outputs(seen.rows, tokens[:stop], [])[-1:])
    tree = random_tree(accepted + 20, 8, 4, PLAIN.vocab)
    assert_tree_equals_paths(drafter, reference, session, seen, tokens[:stop], tree)


def test_accepts_bfloat16_features(tmp_path: Path) -> None:
    drafter, reference, _ = build(tmp_path, PLAIN)
    features, tokens = checkpoints.random_rows(PLAIN, 6)
    bits = {tap: (rows.view(np.uint32) >> 16).astype(np.uint16) for tap, rows in features.rows.items()}
    widened = {tap: (rows.astype(np.uint32) << 16).view(np.float32) for tap, rows in bits.items()}
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), Features(0, dict(bits)))
    assert_close(session.last, reference.outputs(widened, tokens, [])[-1:])


def test_refuses_gaps_and_other_taps(tmp_path: Path) -> None:
    drafter, _, _ = build(tmp_path, PLAIN)
    features, tokens = checkpoints.random_rows(PLAIN, 6)
    ids = np.array(tokens, np.int32)
    session = drafter.new_session()
    drafter.observe(session, ids[:2], checkpoints.cut(features, 0, 2))
    rows = checkpoints.cut(features, 2, 4).rows
    wrong = {
        "a gap": (Features(3, rows), ids[2:4], Reason.FEATURE_GAP),
        "a repeat": (Features(1, rows), ids[2:4], Reason.FEATURE_GAP),
        "another tap": (Features(2, {2: rows[2], 4: rows[4], 6: rows[5]}), ids[2:4], Reason.INVALID_ARGUMENT),
        "a missing tap": (Features(2, {2: rows[2], 4: rows[4]}), ids[2:4], Reason.INVALID_ARGUMENT),
        "one tap more": (Features(2, {**rows, 6: rows[5]}), ids[2:4], Reason.INVALID_ARGUMENT),
        "fewer tokens": (Features(2, rows), ids[2:3], Reason.INVALID_ARGUMENT),
        "a shorter tap": (Features(2, {**rows, 4: rows[4][:1]}), ids[2:4], Reason.INVALID_ARGUMENT),
        "another width": (Features(2, {t: r[:, :-1] for t, r in rows.items()}), ids[2:4], Reason.INVALID_ARGUMENT),
    }
    for what, (given, given_tokens, reason) in wrong.items():
        with pytest.raises(AerieError) as caught:
            drafter.observe(session, given_tokens, given)
        assert caught.value.reason == reason, what
    assert session.length == 2  # a refusal leaves the session as it was
    drafter.observe(session, ids[2:], checkpoints.cut(features, 2, 6))
    fresh = drafter.new_session()
    drafter.observe(fresh, ids, features)
    assert_same_session(session, fresh)


@pytest.mark.parametrize("resume", [9, 30, 32])
def test_rows_that_the_end_does_not_see_may_be_left_out(tmp_path: Path, resume: int) -> None:
    """Of 40 rows only the sinks and those from ``resume``: with a window of 8 the last row sees no others."""
    drafter, _, _ = build(tmp_path, PLAIN, window=8)
    features, tokens = checkpoints.random_rows(PLAIN, 40)
    ids = np.array(tokens, np.int32)
    whole, parts = drafter.new_session(), drafter.new_session()
    drafter.observe(whole, ids, features)
    drafter.observe(parts, ids[:4], checkpoints.cut(features, 0, 4))
    drafter.observe(parts, ids[resume:], checkpoints.cut(features, resume, 40))
    assert (parts.length, parts.kept.tolist()) == (40, [0, 1, 2, 3, *range(resume, 40)])
    assert_close(parts.last, np.array(whole.last), 1e-5)
    tree = random_tree(3, 12, 4, PLAIN.vocab)
    assert_close(expand_tree(drafter, parts, *tree), expand_tree(drafter, whole, *tree), 1e-5)
    with pytest.raises(AerieError) as caught:
        drafter.observe(parts, ids[:2], checkpoints.cut(features, 38, 40))
    assert caught.value.reason == Reason.FEATURE_GAP


@pytest.mark.parametrize("window", [5, 8])
@pytest.mark.parametrize("chunks", [(40,), (3, 3, 9, 1, 1, 1, 22), (1,) * 40])
def test_window_and_sink_equal_reference(
    window: int, chunks: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_DROP_STEP", 4)
    design = replace(PLAIN, window=window)
    drafter, reference, _ = build(tmp_path, design, window)
    features, tokens = checkpoints.random_rows(design, 40)
    session = drafter.new_session()
    expected = reference.outputs(features.rows, tokens, [])
    stop = 0
    for size in chunks:
        start, stop = stop, stop + size
        drafter.observe(session, np.array(tokens[start:stop], np.int32), checkpoints.cut(features, start, stop))
        assert_close(session.last, expected[stop - 1 : stop])
    # Rows that no later row can see are gone: the sink, the window and less than a drop step are left.
    assert session.kept[:4].tolist() == [0, 1, 2, 3]
    assert 4 + window - 1 <= len(session.kept) < 4 + window + 4
    assert session.kept[4:].tolist() == list(range(40 - len(session.kept) + 4, 40))
    assert session.kv.length == len(session.kept)
    # Depth 4 in a window of 5: a node still sees all its ancestors.
    tree = random_tree(window, 10, 4, design.vocab)
    assert_tree_equals_paths(drafter, reference, session, features, tokens, tree)


def test_dropped_rows_leave_the_cache_of_a_long_session(tmp_path: Path) -> None:
    """With the product's own drop step: 600 rows through a window of 16."""
    drafter, reference, _ = build(tmp_path, replace(PLAIN, window=16), 16)
    features, tokens = checkpoints.random_rows(PLAIN, 600)
    session = drafter.new_session()
    ids = np.array(tokens, np.int32)
    for start, stop in ((0, 300), (300, 301), (301, 600)):
        drafter.observe(session, ids[start:stop], checkpoints.cut(features, start, stop))
    assert len(session.kept) < 300
    assert session.kv.nbytes < 600 * 2 * PLAIN.kv_heads * PLAIN.head_dim * 4
    outputs = reference.outputs(features.rows, tokens, [7])
    assert_close(session.last, outputs[599:600])
    states = expand_tree(drafter, session, [0, 7], [-1, 0])
    assert_close(states, outputs[600:])


def test_positions_have_no_limit(tmp_path: Path) -> None:
    """Official checkpoints say max_position_embeddings 2048; a rope table of that size would end here."""
    config = {**checkpoints.specforge(PLAIN), "max_position_embeddings": 2048}
    weights = draw_weights(PLAIN)
    folder = checkpoints.write(tmp_path, config, checkpoints.tensors_of(weights))
    drafter = checkpoints.load(folder, PLAIN, weights, window=64)
    reference = Reference(replace(PLAIN, window=64), weights)
    n = 2060
    features, tokens = checkpoints.random_rows(PLAIN, n)
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), features)
    assert session.length == n
    states = expand_tree(drafter, session, [0, 5, 6, 7], [-1, 0, 1, 1])
    expected = reference.outputs(features.rows, tokens, [5])
    assert_close(session.last, expected[n - 1 : n], 3e-4)
    assert_close(states[:1], expected[n:], 3e-4)


def test_window_of_the_checkpoint_narrows_ours(tmp_path: Path) -> None:
    """speculators trains draft layers with sliding attention; a longer look back is nothing they have seen."""
    design = replace(PLAIN, window=5)
    weights = draw_weights(design)
    folder = checkpoints.write(tmp_path, checkpoints.speculators(design), checkpoints.tensors_of(weights, "layers.0."))
    drafter = checkpoints.load(folder, design, weights)
    features, tokens = checkpoints.random_rows(design, 20)
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), features)
    assert_close(session.last, Reference(design, weights).outputs(features.rows, tokens, [])[-1:])


def test_refuses_a_target_whose_tensors_do_not_fit(tmp_path: Path) -> None:
    weights = draw_weights(PLAIN)
    folder = checkpoints.write(tmp_path, checkpoints.specforge(PLAIN), checkpoints.tensors_of(weights))
    narrow = replace(weights, embed_tokens=weights.embed_tokens[:, :-1])
    with pytest.raises(AerieError, match="embed_tokens") as caught:
        checkpoints.load(folder, PLAIN, narrow)
    assert caught.value.reason == Reason.CHECKPOINT_INCOMPATIBLE
