"""Local ports: streams that tell actors of the same process."""

import asyncio
import contextlib
from typing import Any

from services.drafter import host as drafter_host
from services.drafter.host import DrafterHost
from services.runtime.actor import ActorStopped, MailboxFull
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    DrafterStatus,
    FromDrafter,
    FromVerifier,
    Open,
    OpenDraft,
    TargetInfo,
    ToDrafter,
    ToVerifier,
)
from services.verifier import host as verifier_host
from services.verifier.host import VerifierHost


class _LocalStream:
    """One session's stream to a host actor. ``service`` is the module whose envelope and closing note it takes."""

    def __init__(self, host: VerifierHost | DrafterHost, service: Any) -> None:
        self._host: Any = host
        self._service = service
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._reply = self._inbox.put_nowait
        self._sessions: set[str] = set()
        self._closed = False
        self._unsubscribe = host.on_stop(self._end)

    async def send(self, message: Any) -> None:
        if self._closed:
            raise ActorStopped("the stream is closed")
        if isinstance(message, Open | OpenDraft):
            self._sessions.add(message.session)
        try:
            self._host.tell(self._service.FromClient(message, self._reply))
        except MailboxFull as error:
            raise AerieError(Reason.RESOURCE_EXHAUSTED, str(error)) from None

    async def receive(self) -> Any:
        message = await self._inbox.get()
        if message is None:
            self._end()  # for whoever asks again
            raise ActorStopped("the stream is closed" if self._closed else f"{self._host.name} has stopped")
        return message

    async def close(self) -> None:
        self._closed = True
        self._unsubscribe()
        with contextlib.suppress(ActorStopped):
            while self._sessions:
                self._host.post(self._service.Closed(self._sessions.pop(), self._reply))
        self._end()

    def _end(self) -> None:
        self._reply(None)


class LocalVerifierStream(_LocalStream):
    def __init__(self, host: VerifierHost) -> None:
        super().__init__(host, verifier_host)

    async def send(self, message: ToVerifier) -> None:
        await super().send(message)

    async def receive(self) -> FromVerifier:
        message: FromVerifier = await super().receive()
        return message

    def acknowledge(self, size: int) -> None:
        """Within a process history needs no credit: it is there already."""


class LocalDrafterStream(_LocalStream):
    def __init__(self, host: DrafterHost) -> None:
        super().__init__(host, drafter_host)

    async def send(self, message: ToDrafter) -> None:
        await super().send(message)

    async def receive(self) -> FromDrafter:
        message: FromDrafter = await super().receive()
        return message


class LocalVerifierPort:
    """A ``VerifierPort`` to a host actor of this process."""

    def __init__(self, host: VerifierHost) -> None:
        self._host = host

    async def info(self) -> TargetInfo:
        return self._host.info

    def connect(self, seconds: float | None = None) -> LocalVerifierStream:
        """Within a process the session's own end is enough: ``seconds`` changes nothing."""
        return LocalVerifierStream(self._host)


class LocalDrafterPort:
    """A ``DrafterPort`` to a host actor of this process."""

    def __init__(self, host: DrafterHost) -> None:
        self._host = host

    async def status(self) -> DrafterStatus:
        if not self._host.alive:
            raise ActorStopped(f"{self._host.name} has stopped")
        return self._host.status

    def connect(self, seconds: float | None = None) -> LocalDrafterStream:
        """Within a process the session's own end is enough: ``seconds`` changes nothing."""
        return LocalDrafterStream(self._host)
