"""The actor that owns the target: whatever work has queued when the device is free forms the next batch."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from services.runtime.actor import Actor, log_incident
from services.runtime.bus import MemoryBus
from services.runtime.device import DeviceThread, Priority
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Attach,
    Features,
    FromVerifier,
    History,
    Open,
    PortError,
    Prefilled,
    Tap,
    ToVerifier,
    Truncate,
    Verdict,
    Verify,
)
from services.speculation.walk import walk
from services.speculation.window import kept_ranges
from services.targets.features import read_back
from services.targets.ragged import SessionRows
from services.targets.target import Target
from services.verifier.batching import take_batch
from services.verifier.judge import Judge
from services.verifier.kv import KVBudget
from services.verifier.sessions import (
    Reply,
    VerifierSession,
    check_attach,
    check_open,
    check_truncate,
    check_verify,
    expected_after,
    open_session,
)
from services.verifier.work import Delivery, Work, failure, features_of, history_of, rows_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FromClient:
    """A message of one stream; ``reply`` delivers answers to it and is the stream's identity."""

    message: ToVerifier
    reply: Reply


@dataclass(frozen=True)
class Closed:
    """The stream that ``reply`` answers to has ended. Another stream of the same session lives on."""

    session: str
    reply: Reply


class VerifierHost(Actor[FromClient | Closed]):
    """Opens sessions, batches their work, walks their trees.

    Args:
        target: Loaded on ``device``'s thread.
        device: Shared with the drafter host in embedded mode.
        kv_bytes: Budget of all sessions' caches; None is unlimited.
        bus: Receives ``lease.opened`` and ``lease.closed``.
    """

    def __init__(
        self, target: Target, device: DeviceThread, kv_bytes: int | None = None, bus: MemoryBus | None = None
    ) -> None:
        super().__init__("verifier")
        self.info = target.info
        self.tokenizer = target.tokenizer
        self.budget = KVBudget(kv_bytes, target.kv_bytes_per_row, target.kv_capacity)
        self.sessions: dict[str, VerifierSession] = {}
        self.batches = 0
        self.batched_rows = 0
        self.blocked: str | None = None  # why nothing can run now
        self._target = target
        self._device = device
        self.bus = bus or MemoryBus()
        self._ready: deque[Work] = deque()
        self._pumping: asyncio.Task[None] | None = None

    async def handle(self, message: FromClient | Closed) -> None:
        if isinstance(message, Closed):
            session = self.sessions.get(message.session)
            if session and session.reply == message.reply:
                self._close(session)
            return
        try:
            await self._accept(message)
        except AerieError as error:
            self._refuse(message, error)

    async def on_error(self, message: FromClient | Closed, error: Exception) -> None:
        """A message that trips us fails its own session, not the service."""
        incident = log_incident(log, f"{type(message).__name__} failed", error)
        if isinstance(message, FromClient):
            session = getattr(message.message, "session", "")
            message.reply(PortError(session, Reason.INTERNAL, incident))

    def fail_sessions(self, message: str, reason: Reason = Reason.INTERNAL) -> None:
        """End every session with an error; new ones may open."""
        for session in list(self.sessions.values()):
            self._close(session)
            session.reply(PortError(session.request.session, reason, message))

    async def shared_tensor(self, name: str) -> NDArray[np.uint16]:
        """A weight that drafters share, as bits of bfloat16: see ``Target.tensor``."""
        return await self._device.run(lambda: np.array(self._target.tensor(name).astype(mx.bfloat16).view(mx.uint16)))

    async def stopped(self) -> None:
        if self._pumping:
            self._pumping.cancel()

    def free(self) -> None:
        """Let go of target and caches, whoever still holds this host. On the device thread, after ``stop``."""
        self.sessions.clear()
        self._ready.clear()
        del self._target, self.budget  # the budget asks the target for capacities

    async def _accept(self, envelope: FromClient) -> None:
        match envelope.message:
            case Open() as request:
                self._open(request, envelope.reply)
            case Verify() as verify:
                session = self._session(verify.session, envelope.reply)
                if self._repeat(session, verify):
                    return
                check_verify(session, verify, self.info)
                session.in_flight, session.queued_at = verify, time.perf_counter()
                self._queue(Work.of(session, verify))
            case Attach() as attach:
                session = self._session(attach.session, envelope.reply)
                check_attach(session, attach, self.info)
                session.taps, session.attachment = attach.taps, attach.number
                rows = session.kv.length
                for past in kept_ranges(0, rows, rows) if attach.taps else ():
                    self._queue(Work.of(session, past=past))
            case Truncate() as cut:
                session = self._session(cut.session, envelope.reply)
                check_truncate(session, cut)
                if session.in_flight:
                    session.cut = min(cut.length, session.cut or cut.length)
                else:
                    session.truncate(cut.length)

    def _open(self, request: Open, reply: Reply) -> None:
        check_open(request, self.info)
        if self.blocked:
            raise AerieError(Reason.RESOURCE_EXHAUSTED, self.blocked)
        if older := self.sessions.get(request.session):
            if request.epoch <= older.request.epoch:
                raise AerieError(
                    Reason.STALE_ROUND, f"session {request.session} lives with epoch {older.request.epoch}"
                )
            taken = f"epoch {request.epoch} took over"
            older.reply(PortError(request.session, Reason.STALE_ROUND, taken, expected_after(request)))
            self._close(older)
        limit = min(request.prompt_len + request.max_tokens, self.info.context_length)
        lease = self.budget.lease(limit + self.info.max_tree_nodes)
        try:
            session = open_session(request, self.info, self._target.new_kv(), lease, reply)
        except BaseException:
            self.budget.release(lease)
            raise
        self.sessions[request.session] = session
        self.bus.publish("lease.opened", session=request.session, tokens=len(request.tokens))
        self._queue(Work.of(session))

    def _session(self, name: str, reply: Reply) -> VerifierSession:
        session = self.sessions.get(name)
        if session is None:
            raise AerieError(Reason.SESSION_UNKNOWN, f"no session {name}")
        if session.reply != reply:
            raise AerieError(Reason.STALE_ROUND, f"another stream leads session {name}")
        return session

    def _repeat(self, session: VerifierSession, verify: Verify) -> bool:
        """Answer the last committed round again, from memory, whatever tree it carries.

        The round in flight needs no second answer: its verdict is on its way.
        """
        asked = (verify.epoch, verify.round, verify.base_len)
        if (now := session.in_flight) is not None:
            return asked == (now.epoch, now.round, now.base_len)
        last = session.last
        if last is None or asked != (last.epoch, last.round, last.base_len):
            return False
        session.reply(last)
        return True

    def _refuse(self, envelope: FromClient, error: AerieError) -> None:
        message, expected = envelope.message, None
        session = self.sessions.get(message.session)
        if session and error.reason is Reason.STALE_ROUND:
            expected = session.expected
        envelope.reply(PortError(message.session, error.reason, error.message, expected))

    def _close(self, session: VerifierSession) -> None:
        name = session.request.session
        del self.sessions[name]
        session.closed = True
        self.budget.release(session.lease)
        self.bus.publish("lease.closed", session=name, tokens=len(session.tokens))

    def _queue(self, work: Work) -> None:
        self._ready.append(work)
        if self._pumping is None or self._pumping.done():
            self._pumping = asyncio.create_task(self._pump(), name="verifier-pump")

    async def _pump(self) -> None:
        """Run batches while there is work. A batch is formed when the device gets to it, not before."""
        while self._ready:
            urgent = any(work.verify for work in self._ready)
            try:
                deliveries = await self._device.run(self._step, Priority.VERIFY if urgent else Priority.SLICE)
                for session, message in deliveries:
                    self._deliver(session, message)
            except Exception as error:
                # Who lost work is not known. The next sessions find a host that goes on.
                self.fail_sessions(log_incident(log, "a batch was lost", error))

    def _deliver(self, session: VerifierSession, message: FromVerifier) -> None:
        if session.closed:
            return
        if isinstance(message, PortError) and not session.sound:
            self._close(session)
        elif not isinstance(message, History):
            session.settle()
        session.reply(message)

    def _step(self) -> list[Delivery]:
        """On the device thread: take a batch, run it, walk and commit."""
        batch = take_batch(self._ready, self.info.device)
        return self._run_batch(batch) if batch else []

    def _run_batch(self, batch: list[Work]) -> list[Delivery]:
        start = time.perf_counter()
        try:
            rows = [rows_of(work) for work in batch]
            choices, logits, taps = self._forward(batch, rows)
        except BaseException as error:
            if len(batch) == 1:
                return failure(batch[0], error)
            # One session's rows may be at fault, and nothing has been committed: each runs alone.
            return [delivery for work in batch for delivery in self._run_batch([work])]
        deliveries: list[Delivery] = []
        first_row = first_logit = 0
        for work, r in zip(batch, rows, strict=True):
            count = {"all": len(r.tokens), "last": 1, "none": 0}[r.logits]
            own = logits[first_logit : first_logit + count] if logits is not None and count else None
            judge = Judge(work.session, choices[first_logit : first_logit + count], own)
            features = features_of(work, taps, first_row, len(r.tokens))
            try:
                if work.verify:
                    deliveries += _finish_verify(work, judge, features, start)
                elif work.past:
                    deliveries += self._finish_past(work, features)
                else:
                    deliveries += self._finish_slice(work, judge, features)
            except BaseException as error:
                deliveries += failure(work, error)
            first_row, first_logit = first_row + len(r.tokens), first_logit + count
        return deliveries

    def _forward(
        self, batch: list[Work], rows: list[SessionRows]
    ) -> tuple[NDArray[np.int32], mx.array | None, dict[Tap, NDArray[Any]]]:
        """Argmax and logits of the rows that asked for them, taps of all; evaluated."""
        taps = frozenset(tap for work in batch for tap in work.taps)
        out = self._target.forward(rows, taps)
        best = None if out.logits is None else mx.argmax(out.logits, axis=-1)
        keep_logits = any(work.session.needs_logits and r.logits != "none" for work, r in zip(batch, rows, strict=True))
        if keep_logits:
            mx.async_eval(out.logits)
        choices, recorded = read_back(best, out.taps)
        self.batches += 1
        self.batched_rows += sum(len(r.tokens) for r in rows)
        return choices, out.logits if keep_logits else None, recorded

    def _finish_slice(self, work: Work, judge: Judge, features: Features) -> list[Delivery]:
        session, request = work.session, work.session.request
        done, prompt = session.kv.length + work.length, len(session.tokens)
        deliveries: list[Delivery] = []
        if done < prompt:
            _commit(session, range(work.length))
            self._ready.append(Work.of(session))
        else:
            token = judge.choose(0, done, ())
            log_probs = judge.log_probs((0,), (token,))
            _commit(session, range(work.length))
            finish = session.commit_tokens((token,))
            session.prefilled = True
            seconds = time.monotonic() - session.opened
            prefilled = Prefilled(request.session, request.epoch, token, finish, seconds, log_probs)
            deliveries = [(session, prefilled)]
        if not work.taps:
            return deliveries
        histories: list[Delivery] = []
        for start, stop in kept_ranges(features.base, done, prompt):
            rows = {tap: values[start - features.base : stop - features.base] for tap, values in features.rows.items()}
            histories.append(history_of(work, Features(start, rows)))
        return histories + deliveries

    def _finish_past(self, work: Work, features: Features) -> list[Delivery]:
        assert work.past
        start, stop = work.past
        if start + work.length < stop:
            self._ready.append(replace(work, past=(start + work.length, stop), length=0))
        return [history_of(work, features)]


def _finish_verify(work: Work, judge: Judge, features: Features, start: float) -> list[Delivery]:
    session, verify = work.session, work.verify
    assert verify is not None
    base, tree = len(session.tokens), verify.tree

    def choose(path: tuple[int, ...]) -> int:
        drafted = tuple(int(tree.tokens[node]) for node in path[1:])
        return judge.choose(path[-1], base + len(drafted), drafted)

    accepted = walk(tree, choose, session.eos_ids)
    tokens = (*(int(tree.tokens[node]) for node in accepted.path[1:]), accepted.bonus)
    # All that can fail comes before the commit, so that a failed round leaves the session as it was.
    log_probs = judge.log_probs(accepted.path, tokens)
    features = replace(features, rows={tap: r[list(accepted.path)] for tap, r in features.rows.items()})
    _commit(session, accepted.path)
    verdict = Verdict(
        session=verify.session,
        epoch=verify.epoch,
        round=verify.round,
        base_len=verify.base_len,
        path=accepted.path,
        tokens=tokens,
        finish=session.commit_tokens(tokens),
        features=features,
        seconds=time.perf_counter() - start,
        log_probs=log_probs,
        queue_seconds=start - session.queued_at,
    )
    session.round += 1
    session.last = verdict
    return [(session, verdict)]


def _commit(session: VerifierSession, path: Sequence[int]) -> None:
    session.kv.commit(path)
    mx.async_eval(session.kv.arrays())
