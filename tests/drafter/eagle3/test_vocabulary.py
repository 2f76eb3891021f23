"""A cut vocabulary drafts the kept tokens with the same relative probabilities."""

from pathlib import Path

import numpy as np

from services.drafter.eagle3.vocabulary import cut_vocabulary
from tests.drafter.eagle3 import checkpoints
from tests.drafter.eagle3.reference import Design, Reference, draw_weights

DESIGN = Design()


def test_keeps_the_most_frequent_tokens(tmp_path: Path) -> None:
    weights = draw_weights(DESIGN)
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 1000, DESIGN.vocab)
    cut, covered = cut_vocabulary(checkpoints.tensors_of(weights), counts, 11)
    best = sorted(weights.target_ids.tolist(), key=lambda token: (-counts[token], token))[:11]
    assert covered == sum(counts[token] for token in best) / counts.sum()
    assert np.array(cut["d2t"]).tolist() == [token - i for i, token in enumerate(sorted(best))]

    config = {**checkpoints.specforge(DESIGN), "draft_vocab_size": 11}
    drafter = checkpoints.load(checkpoints.write(tmp_path, config, cut), DESIGN, weights)
    features, tokens = checkpoints.random_rows(DESIGN, 5)
    session = drafter.new_session()
    drafter.observe(session, np.array(tokens, np.int32), features)
    reference = Reference(DESIGN, weights)
    whole = reference.log_probs(reference.outputs(features.rows, tokens, [])[-1:])[0][sorted(best)]
    expected = dict(zip(sorted(best), whole - np.log(np.exp(whole).sum()), strict=True))
    log_probs, ids = drafter.top_children(session.last, 11)
    assert sorted(np.array(ids[0]).tolist()) == sorted(best)
    for token, log_prob in zip(np.array(ids[0]).tolist(), np.array(log_probs[0]).tolist(), strict=True):
        assert abs(log_prob - expected[token]) < 1e-3


def test_equal_counts_keep_the_smaller_id() -> None:
    weights = draw_weights(DESIGN)
    cut, _ = cut_vocabulary(checkpoints.tensors_of(weights), np.ones(DESIGN.vocab, np.int64), 6)
    kept = np.array(cut["d2t"]) + np.arange(6)
    assert kept.tolist() == sorted(weights.target_ids.tolist())[:6]
    assert np.flatnonzero(np.array(cut["t2d"])).tolist() == kept.tolist()
