"""The actor that owns the drafters of one process: observes, drafts, forgets."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from services.drafter.compiled import CompiledDrafting
from services.drafter.family import DraftModel
from services.drafter.growth import grow
from services.drafter.session import DraftSession
from services.runtime.actor import Actor
from services.runtime.device import DeviceThread, Priority
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Draft,
    Drafted,
    DrafterInfo,
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


@dataclass(frozen=True, eq=False)
class FromClient:
    """A message of one stream; ``reply`` delivers answers to it."""

    message: ToDrafter
    reply: Reply


@dataclass(frozen=True)
class Closed:
    """A stream has ended."""

    session: str
    epoch: int


@dataclass(eq=False)
class _Hosted:
    epoch: int
    state: DraftSession
    queued: list[Observe] = field(default_factory=list)
    pending: int = -1  # token after the last observed row: the root of the next tree
    seconds: float = 0.0  # spent on rows since the last tree


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
        self._model = model
        self._observe_rows = compiled.observe if compiled else model.observe
        self._grow = compiled.grow if compiled else partial(grow, model)
        self._device = device

    @property
    def info(self) -> DrafterInfo:
        return self._model.info

    async def handle(self, message: FromClient | Closed) -> None:
        if isinstance(message, Closed):
            hosted = self.sessions.get(message.session)
            if hosted and hosted.epoch == message.epoch:
                del self.sessions[message.session]
            return
        try:
            self._accept(message)
        except AerieError as error:
            message.reply(PortError(message.message.session, error.reason, error.message))

    def _accept(self, envelope: FromClient) -> None:
        message = envelope.message
        if isinstance(message, OpenDraft):
            older = self.sessions.get(message.session)
            if older and message.epoch <= older.epoch:
                raise AerieError(Reason.STALE_ROUND, f"session {message.session} lives with epoch {older.epoch}")
            self.sessions[message.session] = _Hosted(message.epoch, self._model.new_session())
            return
        hosted = self.sessions.get(message.session)
        if hosted is None or hosted.epoch != message.epoch:
            raise AerieError(Reason.SESSION_UNKNOWN, f"no session {message.session} with epoch {message.epoch}")
        match message:
            case Observe():
                hosted.queued.append(message)
                if len(message.tokens) >= _SLICE_ROWS:
                    self._submit(envelope, lambda: self._observe(hosted), Priority.SLICE)
            case Draft() as draft:
                self._submit(envelope, lambda: self._draft(hosted, draft), Priority.DRAFT)

    def _submit(self, envelope: FromClient, job: Callable[[], FromDrafter | None], priority: Priority) -> None:
        """Queue a job for the device; its answer goes to the stream from the event loop."""
        loop = asyncio.get_running_loop()

        def guarded() -> None:
            try:
                answer = job()
            except AerieError as error:
                answer = PortError(envelope.message.session, error.reason, error.message)
            except Exception:
                incident = uuid.uuid4().hex[:8]
                log.exception("draft failed, incident %s", incident)
                answer = PortError(envelope.message.session, Reason.INTERNAL, f"incident {incident}")
            if answer is not None:
                loop.call_soon_threadsafe(envelope.reply, answer)

        self._device.submit(guarded, priority)

    def _observe(self, hosted: _Hosted) -> None:
        """On the device thread: read all queued rows, in order."""
        start = time.perf_counter()
        queued, hosted.queued = hosted.queued, []
        for observe in queued:
            self._observe_rows(hosted.state, np.asarray(observe.tokens, np.int32), observe.features)
            if observe.tokens:
                hosted.pending = observe.tokens[-1]
        hosted.seconds += time.perf_counter() - start

    def _draft(self, hosted: _Hosted, draft: Draft) -> FromDrafter:
        """On the device thread: catch up, then grow a tree for the newest round."""
        self._observe(hosted)
        start = time.perf_counter()
        rows = draft.base_len - 1
        if hosted.state.length > rows:
            raise AerieError(
                Reason.STALE_ROUND, f"a draft after {rows} rows, but {hosted.state.length} have been observed"
            )
        if hosted.state.length < rows:
            missing = ((hosted.state.length, rows),)
            return NeedFeatures(draft.session, draft.epoch, draft.round, missing)
        tree = self._grow(hosted.state, hosted.pending, draft.budget)
        seconds, hosted.seconds = hosted.seconds + time.perf_counter() - start, 0.0
        return Drafted(draft.session, draft.epoch, draft.round, draft.base_len, tree, seconds)
