"""The actor that owns the drafters of one process: observes, drafts, forgets."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from services.drafter.compiled import CompiledDrafting
from services.drafter.family import DraftModel
from services.drafter.growth import grow
from services.drafter.session import DraftSession
from services.runtime.actor import Actor, log_incident
from services.runtime.device import DeviceThread, Priority
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Draft,
    Drafted,
    DrafterInfo,
    DrafterStatus,
    FromDrafter,
    NeedFeatures,
    Observe,
    OpenDraft,
    PortError,
    ToDrafter,
)

log = logging.getLogger(__name__)

Reply = Callable[[FromDrafter], None]
_SLICE_ROWS = 64
"""Observed rows that are worth a slice of their own; fewer are read together with the next draft."""
ROWS_SECONDS = 0.5
"""A draft waits no longer for rows that come on another stream."""
HANG_SECONDS = 30.0
"""A job that holds the device longer is a fault: the drafter is given up."""


@dataclass(frozen=True, eq=False)
class FromClient:
    """A message of one stream; ``reply`` delivers answers to it and is the stream's identity."""

    message: ToDrafter
    reply: Reply


@dataclass(frozen=True)
class Closed:
    """The stream that ``reply`` answers to has ended. Another stream of the same session lives on."""

    session: str
    reply: Reply


@dataclass(eq=False)
class _Hosted:
    """One session. What is below ``closed`` belongs to the device thread; ``queued`` is shared."""

    epoch: int
    reply: Reply
    queued: deque[Observe] = field(default_factory=deque)
    slices: int = 0  # long observes that are not read yet
    waiting: Draft | None = None  # asked for, and not begun
    timer: asyncio.TimerHandle | None = None  # of the draft that waits
    stop: int = 0  # position after the newest row that has come
    asked_at: float = 0.0  # when the newest draft was asked for
    round: int = 0  # the newest that a draft was asked for
    closed: bool = False
    state: DraftSession | None = None
    pending: int = -1  # token after the last observed row: the root of the next tree
    seconds: float = 0.0  # spent on rows since the last tree

    def stop_waiting(self) -> None:
        self.waiting = None
        if self.timer:
            self.timer.cancel()
            self.timer = None

    @property
    def rows(self) -> int:
        return self.state.length if self.state else 0

    @property
    def expected(self) -> tuple[int, int, int]:
        """Epoch, newest round and base length of a draft that could be answered now."""
        return self.epoch, self.round, self.rows + 1


class DrafterHost(Actor[FromClient | Closed]):
    """Keeps one drafter's sessions and grows their trees.

    Args:
        model: Loaded on ``device``'s thread.
        device: Shared with the verifier host in embedded mode.
        compiled: Runs the model, where compiling pays.
    """

    def __init__(self, model: DraftModel, device: DeviceThread, compiled: CompiledDrafting | None = None) -> None:
        super().__init__(f"drafter {model.info.name}")
        self.sessions: dict[str, _Hosted] = {}
        self.hung = False
        self.draft_seconds = 0.0  # running mean of T_draft
        self.info: DrafterInfo = model.info
        self._model = model
        self._observe_rows = compiled.observe if compiled else model.observe
        self._grow = compiled.grow if compiled else partial(grow, model)
        self._device = device
        self._busy_since: float | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def status(self) -> DrafterStatus:
        return DrafterStatus(self.info, len(self.sessions), self.draft_seconds)

    async def started(self) -> None:
        self._watcher = asyncio.create_task(self._watch(), name=f"{self.name}-watch")

    async def stopped(self) -> None:
        if self._watcher:
            self._watcher.cancel()
        for session in list(self.sessions):
            self._forget(session)

    def free(self) -> None:
        """Let go of the model, whoever still holds this host. On the device thread, after ``stop``."""
        del self._model, self._observe_rows, self._grow

    async def handle(self, message: FromClient | Closed) -> None:
        if isinstance(message, Closed):
            hosted = self.sessions.get(message.session)
            if hosted and hosted.reply == message.reply:
                self._forget(message.session)
            return
        try:
            self._accept(message)
        except AerieError as error:
            message.reply(self._refusal(message.message.session, error))

    async def on_error(self, message: FromClient | Closed, error: Exception) -> None:
        """A message that trips us fails its own session, not the service."""
        incident = log_incident(log, f"{type(message).__name__} failed", error)
        if isinstance(message, FromClient):
            message.reply(PortError(getattr(message.message, "session", ""), Reason.INTERNAL, incident))

    async def _watch(self) -> None:
        """Stop when a job hangs: its sessions then lose their drafter, and later ones do not find it."""
        while not self.hung:
            await asyncio.sleep(HANG_SECONDS / 8)
            since = self._busy_since
            self.hung = since is not None and time.monotonic() - since > HANG_SECONDS
        log.error("%s has held the device for %g s: it is given up", self.name, HANG_SECONDS)
        await self.stop()

    def _accept(self, envelope: FromClient) -> None:
        message = envelope.message
        older = self.sessions.get(message.session)
        if isinstance(message, OpenDraft):
            if older and message.epoch <= older.epoch:
                raise AerieError(Reason.STALE_ROUND, f"session {message.session} lives with epoch {older.epoch}")
            if older:
                self._forget(message.session)
            self.sessions[message.session] = _Hosted(message.epoch, envelope.reply)
            return
        if older is None or (older.epoch, older.reply) != (message.epoch, envelope.reply):
            raise AerieError(Reason.SESSION_UNKNOWN, f"no session {message.session} with epoch {message.epoch}")
        match message:
            case Observe():
                self._take_rows(older, message)
                self._draft_if_ready(older, message.session)
            case Draft() as draft:
                if draft.observe:
                    self._take_rows(older, draft.observe)
                older.round = max(older.round, draft.round)
                older.asked_at = time.perf_counter()
                older.waiting = draft
                self._draft_if_ready(older, message.session)
                if older.waiting:
                    loop = asyncio.get_running_loop()
                    older.timer = loop.call_later(ROWS_SECONDS, self._stop_waiting, older, draft)

    def _take_rows(self, hosted: _Hosted, observe: Observe) -> None:
        hosted.queued.append(observe)
        hosted.stop = observe.features.base + len(observe.tokens)
        if len(observe.tokens) >= _SLICE_ROWS:
            hosted.slices += 1
            self._submit(hosted, observe.session, lambda: self._observe_slice(hosted), Priority.SLICE)

    def _draft_if_ready(self, hosted: _Hosted, session: str, come: bool = False) -> None:
        """Grow the tree that waits, once its rows have come and the long ones among them are read.

        In the class of drafts a long prompt would be dragged past the verifier's work.
        """
        draft = hosted.waiting
        if draft is None or hosted.slices or not (come or hosted.stop >= draft.base_len - 1):
            return
        hosted.stop_waiting()
        self._submit(hosted, session, lambda: self._draft(hosted, draft), Priority.DRAFT)

    def _stop_waiting(self, hosted: _Hosted, draft: Draft) -> None:
        """Rows that are on another stream have not come: the answer says which."""
        if hosted.waiting is draft:
            self._draft_if_ready(hosted, draft.session, come=True)

    def _forget(self, session: str) -> None:
        hosted = self.sessions.pop(session)
        hosted.closed = True
        hosted.stop_waiting()

    def _refusal(self, session: str, error: AerieError) -> PortError:
        hosted = self.sessions.get(session)
        expected = hosted.expected if hosted and error.reason is Reason.STALE_ROUND else None
        return PortError(session, error.reason, error.message, expected)

    def _submit(self, hosted: _Hosted, session: str, job: Callable[[], FromDrafter | None], priority: Priority) -> None:
        """Queue a job for the device; its answer is delivered by the event loop."""
        loop = asyncio.get_running_loop()

        def guarded() -> None:
            if hosted.closed:
                return
            self._busy_since = time.monotonic()
            try:
                answer = job()
            except AerieError as error:
                answer = self._refusal(session, error)
            except BaseException as error:  # whatever a drafter raises: somebody waits for an answer
                answer = PortError(session, Reason.INTERNAL, log_incident(log, f"{self.name} failed", error))
            self._busy_since = None
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(self._done, hosted, session, answer, priority)

        self._device.submit(guarded, priority)

    def _done(self, hosted: _Hosted, session: str, answer: FromDrafter | None, priority: Priority) -> None:
        if hosted.closed:
            return
        if priority is Priority.SLICE:
            hosted.slices -= 1
            if answer is not None:
                hosted.stop_waiting()  # the failure answers the draft, too
            self._draft_if_ready(hosted, session)
        if answer is not None:
            hosted.reply(answer)

    def _observe_slice(self, hosted: _Hosted) -> None:
        """On the device thread: read up to the next long observe."""
        while hosted.queued:
            if len(self._observe_next(hosted).tokens) >= _SLICE_ROWS:
                return

    def _observe_next(self, hosted: _Hosted) -> Observe:
        start = time.perf_counter()
        observe = hosted.queued.popleft()
        self._observe_rows(self._state(hosted), np.asarray(observe.tokens, np.int32), observe.features)
        if observe.tokens:
            hosted.pending = observe.tokens[-1]
        hosted.seconds += time.perf_counter() - start
        return observe

    def _state(self, hosted: _Hosted) -> DraftSession:
        """Made by the first job: whatever runs the model is guarded, on the device thread."""
        if hosted.state is None:
            hosted.state = self._model.new_session()
        return hosted.state

    def _draft(self, hosted: _Hosted, draft: Draft) -> FromDrafter:
        """On the device thread: catch up, then grow a tree for the newest round."""
        queued = time.perf_counter() - hosted.asked_at
        while hosted.queued:
            self._observe_next(hosted)
        start = time.perf_counter()
        state, rows = self._state(hosted), draft.base_len - 1
        if state.length > rows:
            raise AerieError(Reason.STALE_ROUND, f"a draft after {rows} rows, but {state.length} have been observed")
        if state.length < rows:
            return NeedFeatures(draft.session, draft.epoch, draft.round, ((state.length, rows),))
        tree = self._grow(state, hosted.pending, draft.budget)
        seconds, hosted.seconds = hosted.seconds + time.perf_counter() - start, 0.0
        self.draft_seconds += (seconds - self.draft_seconds) / 8 if self.draft_seconds else seconds
        return Drafted(draft.session, draft.epoch, draft.round, draft.base_len, tree, seconds, queued)
