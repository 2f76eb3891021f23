"""What waits for the device: a tree, a slice of a prompt, or past rows whose features a new drafter wants."""

import logging
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from services.runtime.actor import log_incident
from services.speculation.errors import Reason
from services.speculation.messages import Features, FromVerifier, History, PortError, Tap, Verify
from services.targets.ragged import SessionRows
from services.verifier.sessions import VerifierSession

log = logging.getLogger(__name__)

Delivery = tuple[VerifierSession, FromVerifier]


@dataclass(frozen=True, eq=False)
class Work:
    """One session's rows of a batch: a verify, the next rows of its prompt, or rows of its past once more.

    Attributes:
        verify: The tree; without one the rows are a slice.
        past: [start, stop) of committed rows whose features are wanted; None is a slice of the prompt.
        length: Rows of the slice in this batch.
        taps, attachment: What is recorded, and for which ``Attach``.
    """

    session: VerifierSession
    taps: tuple[Tap, ...]
    attachment: int
    verify: Verify | None = None
    past: tuple[int, int] | None = None
    length: int = 0

    @staticmethod
    def of(session: VerifierSession, verify: Verify | None = None, past: tuple[int, int] | None = None) -> "Work":
        return Work(session, session.taps, session.attachment, verify, past)

    @property
    def base(self) -> int:
        """Positions before its first row."""
        return self.past[0] if self.past else self.session.kv.length

    @property
    def rows_left(self) -> int:
        """Of a slice that may be cut."""
        return (self.past[1] if self.past else len(self.session.tokens)) - self.base

    @property
    def stale(self) -> bool:
        """Nobody waits for it any longer."""
        session, past = self.session, self.past
        if past is None:
            return session.closed
        return session.closed or self.attachment != session.attachment or past[1] > session.kv.length


def history_of(work: Work, features: Features) -> Delivery:
    """Features of committed rows and the tokens after each."""
    session, start = work.session, features.base
    following = tuple(session.tokens[start + 1 : start + 1 + len(features)])
    request = session.request
    return session, History(request.session, request.epoch, features, following, work.attachment)


def failure(work: Work, error: BaseException) -> list[Delivery]:
    """What a client learns of a failure of ours: a number to find it by in the log."""
    name = work.session.request.session
    incident = log_incident(log, f"session {name} failed", error)
    if work.past:
        return []  # a drafter that joins is not primed: that costs speed alone
    return [(work.session, PortError(name, Reason.INTERNAL, incident))]


def rows_of(work: Work) -> SessionRows:
    session = work.session
    if work.verify:
        return SessionRows(session.kv, work.verify.tree.tokens, work.verify.tree.parents)
    start, prompt = work.base, len(session.tokens)
    stop = start + work.length
    tokens = session.tokens[start:stop]
    if work.past:  # beside the session's own rows: over a copy of what comes before
        return SessionRows.chunk(session.kv.prefix(start), tokens, "none")
    return SessionRows.chunk(session.kv, tokens, "last" if stop == prompt else "none")


def features_of(work: Work, taps: dict[Tap, NDArray[Any]], start: int, count: int) -> Features:
    rows = {tap: taps[tap][start : start + count].copy() for tap in work.taps}
    return Features(work.base, rows)
