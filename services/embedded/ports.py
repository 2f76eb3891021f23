"""Local ports: streams that tell actors of the same process."""

import asyncio
from typing import Any

from services.drafter import host as drafter_host
from services.drafter.host import DrafterHost
from services.runtime.actor import ActorStopped
from services.speculation.messages import (
    DrafterInfo,
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
        self._lease: tuple[str, int] | None = None
        host.on_stop(lambda: self._inbox.put_nowait(None))

    async def send(self, message: Any) -> None:
        if isinstance(message, Open | OpenDraft):
            self._lease = (message.session, message.epoch)
        self._host.tell(self._service.FromClient(message, self._inbox.put_nowait))

    async def receive(self) -> Any:
        message = await self._inbox.get()
        if message is None:
            raise ActorStopped(f"{self._host.name} has stopped")
        return message

    async def close(self) -> None:
        if self._lease:
            self._host.tell(self._service.Closed(*self._lease))
            self._lease = None


class LocalVerifierStream(_LocalStream):
    def __init__(self, host: VerifierHost) -> None:
        super().__init__(host, verifier_host)

    async def send(self, message: ToVerifier) -> None:
        await super().send(message)

    async def receive(self) -> FromVerifier:
        message: FromVerifier = await super().receive()
        return message


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

    def connect(self) -> LocalVerifierStream:
        return LocalVerifierStream(self._host)


class LocalDrafterPort:
    """A ``DrafterPort`` to a host actor of this process."""

    def __init__(self, host: DrafterHost) -> None:
        self._host = host

    async def info(self) -> DrafterInfo:
        return self._host.info

    def connect(self) -> LocalDrafterStream:
        return LocalDrafterStream(self._host)
