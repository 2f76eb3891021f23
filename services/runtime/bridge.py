"""The bridge from a gRPC stream to an actor, and back."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from services.runtime.actor import Actor, ActorStopped, MailboxFull, log_incident
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import PortError

log = logging.getLogger(__name__)

MESSAGE_BYTES = 16 * 2**20
"""Largest message, on both sides; features travel in slices far below it."""
FILE_BYTES = 128 * 2**20
"""Largest answer that is a file (a tokenizer), for those who ask on a channel with ``BULK_OPTIONS``."""
Reply = Callable[[Any], None]


@dataclass(frozen=True)
class Bridge:
    """How one kind of service turns a stream's messages into an actor's, and back.

    Attributes:
        read: Request -> message; raises AerieError.
        write: Message -> response, or None for what goes another way.
        envelope: (message, reply) -> what the actor is told.
        closing: (session, reply) -> what it is told at the end of the stream.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    envelope: Callable[[Any, Reply], Any]
    closing: Callable[[str, Reply], Any]

    async def run(self, host: Actor[Any], requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Responses of one stream, until its requests end or it is abandoned. Its end is the end of its sessions.

        Raises:
            ActorStopped: The actor has stopped.
        """
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        reply = inbox.put_nowait  # the stream's identity, too
        sessions: set[str] = set()

        async def listen() -> None:
            try:
                async for request in requests:
                    sessions.add(request.session)
                    try:
                        host.tell(self.envelope(self.read(request), reply))
                    except MailboxFull as error:
                        reply(PortError(request.session, Reason.RESOURCE_EXHAUSTED, str(error)))
                    except AerieError as error:
                        reply(PortError(request.session, error.reason, error.message))
                    except ActorStopped:
                        raise
                    except Exception as error:  # a fault of ours; the stream's other messages are not at fault
                        why = log_incident(log, f"a message to {host.name} could not be read", error)
                        reply(PortError(request.session, Reason.INTERNAL, why))
            except ActorStopped:
                pass  # the callback below says so
            finally:
                reply(None)

        unsubscribe = host.on_stop(lambda: reply(None))
        listener = asyncio.create_task(listen(), name=f"{host.name} listener")
        try:
            while (message := await inbox.get()) is not None:
                if (response := self.write(message)) is None:
                    continue
                if (size := response.ByteSize()) > MESSAGE_BYTES:  # sent, it would end the stream
                    why = f"an answer of {size} bytes; {MESSAGE_BYTES} are the most"
                    response = self.write(PortError(response.session, Reason.RESOURCE_EXHAUSTED, why))
                yield response
            if not host.alive:
                raise ActorStopped(f"{host.name} has stopped")
        finally:
            listener.cancel()
            unsubscribe()
            with contextlib.suppress(ActorStopped):
                for session in sessions:
                    host.post(self.closing(session, reply))
