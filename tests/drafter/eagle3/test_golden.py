"""The shipped drafter on the real target, against an independent PyTorch run (tests/fixtures/golden.safetensors).

The golden run drafted from 16384 tokens; the shipped checkpoint keeps 8192 of them. The head is all that differs, so
states are compared everywhere, log-probabilities as differences among kept tokens, and ids where they are kept. Every
chain is fed the golden tokens, which are the drafter's own wherever the ids agree.
"""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from services.drafter.eagle3.model import Eagle3Drafter
from services.drafter.eagle3.weights import read_checkpoint
from services.drafter.family import Frontier
from services.drafter.loader import load_drafter, shipped_checkpoint
from services.drafter.session import CachedRows
from services.speculation.messages import Features
from services.targets.kv_rows import KVRows
from services.targets.loader import load_target
from services.targets.ragged import SessionRows

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden.safetensors"
TAPS = (2, 15, 27)
STEPS = 7
# Tolerances of the golden run's own description, for float32.
LOG_PROB, HIDDEN_HEAD, RMS = 2e-3, 5e-2, 1e-4
# (document, row, step) where the drafter's two best tokens are less than 1e-2 apart.
NEAR_TIES = {(0, 13, 5), (0, 17, 3), (0, 56, 1), (2, 17, 4), (3, 48, 5)}

pytestmark = pytest.mark.real


@dataclass
class Document:
    number: int
    golden: dict[str, NDArray]
    rows: dict[int | str, NDArray[np.float32]]  # per tap [T, 576]
    following: NDArray[np.int32]  # [T] token after each position


@dataclass
class Tally:
    """What was compared; raises at the first step that is out of tolerance."""

    kept: set[int]
    steps: int = 0
    ids: int = 0
    log_probs: int = 0
    free_running: int = 0  # steps whose earlier tokens were all kept: the drafter would have drawn them itself
    worst: float = 0.0

    def compare(self, drafter: Eagle3Drafter, doc: Document, rows: list[int], step: int, hidden: mx.array) -> None:
        """States [len(rows), 576] of one step of the chains that begin at ``rows``."""
        golden, states = doc.golden, np.array(hidden, np.float64)
        assert np.abs(states[:, :8] - golden["draft_hidden_head"][rows, step]).max() < HIDDEN_HEAD
        rms = np.sqrt((states**2).mean(-1)) / golden["draft_hidden_rms"][rows, step]
        assert np.abs(rms - 1).max() < RMS
        log_probs, found = (np.array(a) for a in drafter.top_children(hidden, 12))
        for row, values, ids in zip(rows, log_probs, found, strict=True):
            where = (doc.number, row, step)
            ours = dict(zip(ids.tolist(), values.tolist(), strict=True))
            theirs = zip(golden["draft_top8_ids"][row, step], golden["draft_top8_logp"][row, step], strict=True)
            both = [(ours[int(token)], value) for token, value in theirs if int(token) in self.kept]
            for mine, value in both[1:]:
                error = abs((mine - both[0][0]) - (value - both[0][1]))
                assert error < LOG_PROB, where
                self.worst = max(self.worst, error)
                self.log_probs += 1
            drawn = golden["draft_ids"][row, : step + 1].tolist()
            if drawn[-1] in self.kept and where not in NEAR_TIES:
                assert ids[0] == drawn[-1], where
                self.ids += 1
            self.free_running += self.kept.issuperset(drawn[:-1])
            self.steps += 1

    def __str__(self) -> str:
        return (
            f"compared {self.steps} steps ({self.free_running} of free-running chains), {self.ids} ids, "
            f"{self.log_probs} log-probabilities: worst difference {self.worst:.1e}"
        )


@pytest.fixture(scope="module")
def shipped() -> tuple[Eagle3Drafter, set[int], list[Document]]:
    """The shipped drafter, the tokens that it keeps, and the documents with the real target's features."""
    tensors = {name: np.array(tensor) for name, tensor in mx.load(str(GOLDEN)).items()}
    target = load_target()
    path = shipped_checkpoint("eagle3", target.info)
    assert path is not None
    drafter = load_drafter(path, target.info, target.tensor)
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.info.taps == TAPS
    documents = []
    for number in range(4):
        prefix = f"doc{number}."
        golden = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        chunk = SessionRows.chunk(target.new_kv(), golden["tokens"].tolist(), "none")
        rows = {tap: np.array(t) for tap, t in target.forward([chunk], frozenset(TAPS)).taps.items()}
        following = np.append(golden["tokens"][1:], golden["target_next"][-1]).astype(np.int32)
        documents.append(Document(number, golden, rows, following))
    return drafter, set(read_checkpoint(path).draft_to_target.tolist()), documents


def test_features_of_the_target_enter_the_drafter_as_in_the_golden_run(
    shipped: tuple[Eagle3Drafter, set[int], list[Document]],
) -> None:
    drafter, _, documents = shipped
    for doc in documents:
        fused = np.array(drafter._network.fuse([mx.array(doc.rows[tap]) for tap in TAPS]), np.float64)
        assert np.abs(fused[:, :8] - doc.golden["fc_head"]).max() < 2e-2
        assert np.abs(np.sqrt((fused**2).mean(-1)) / doc.golden["fc_rms"] - 1).max() < RMS


def test_all_chains_equal_the_golden_run(shipped: tuple[Eagle3Drafter, set[int], list[Document]]) -> None:
    """All 65 starts of a document side by side: each sees the true rows up to its own, and its own steps."""
    drafter, kept, documents = shipped
    tally = Tally(kept)
    for doc in documents:
        start, length = doc.golden["start"], len(doc.following)
        rows, kv = list(range(len(start))), KVRows(1)
        taps = [mx.array(doc.rows[tap]) for tap in TAPS]
        embedded = drafter._embed(mx.array(doc.following))
        out = drafter._network(embedded, drafter._network.fuse(taps), CachedRows(kv, 0, "causal", 0))
        kv.commit(range(length))
        hidden, mask = out[mx.array(start)], np.arange(length)[None] <= start[:, None]
        for step in range(STEPS):
            if step:
                mask = np.concatenate([mask, np.eye(len(start), dtype=np.bool_)], axis=1)
                own = CachedRows(kv, mx.array(start + step), mx.array(mask), len(start) * (step - 1))
                embedded = drafter._embed(mx.array(doc.golden["draft_ids"][:, step - 1]))
                hidden = drafter._network(embedded, hidden, own)
            tally.compare(drafter, doc, rows, step, hidden)
    print(f"\n{tally}")
    assert tally.steps == 4 * 65 * STEPS
    assert tally.free_running > 1500
    assert tally.ids > 1600
    assert tally.log_probs > 8000


def test_observing_and_expanding_equals_the_golden_run(
    shipped: tuple[Eagle3Drafter, set[int], list[Document]],
) -> None:
    """The same chains the way the product runs them, session by session, for every eighth start."""
    drafter, kept, documents = shipped
    tally = Tally(kept)
    for doc in documents:
        session, seen = drafter.new_session(), 0
        for row in range(0, 65, 8):
            stop = int(doc.golden["start"][row]) + 1
            rows = {tap: values[seen:stop] for tap, values in doc.rows.items()}
            drafter.observe(session, doc.following[seen:stop], Features(seen, rows))
            seen, hidden = stop, session.last
            assert hidden is not None
            for step in range(STEPS):
                if step:
                    token = mx.array(doc.golden["draft_ids"][row, step - 1 : step])
                    chain = mx.ones((1, step), mx.bool_)
                    hidden = drafter.expand(session, Frontier(token, hidden, chain, step, step - 1))
                tally.compare(drafter, doc, [row], step, hidden)
    print(f"\n{tally}")
    assert tally.steps == 4 * 9 * STEPS
