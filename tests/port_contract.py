"""What every implementation of a port must do, local or remote. A test module gives a port and runs ``CHECKS``."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import PortError

DEADLINE = 20.0


@dataclass(frozen=True)
class Service:
    """One service behind a port.

    Attributes:
        port: The port.
        open: (session, epoch) -> the message that begins a session.
        ask: session -> messages that one answer comes to, once the session is open.
        answered: The type of that answer.
        sessions: Names of the sessions that the service holds.
        stop: Ends the service.
        fill: Fills the service's queue, so that it takes nothing more.
    """

    port: Any
    open: Callable[[str, int], Any]
    ask: Callable[[str], list[Any]]
    answered: type
    sessions: Callable[[], set[str]]
    stop: Callable[[], Awaitable[None]]
    fill: Callable[[], None]


def replace_port(service: Service, port: Any) -> Service:
    """The same service behind another port."""
    return replace(service, port=port)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.002)


async def opened(service: Service, session: str = "s", epoch: int = 0) -> Any:
    stream = service.port.connect()
    await stream.send(service.open(session, epoch))
    await until(lambda: session in service.sessions())
    return stream


async def answer(service: Service, stream: Any, session: str = "s") -> Any:
    for message in service.ask(session):
        await stream.send(message)
    async with asyncio.timeout(DEADLINE):
        while not isinstance(received := await stream.receive(), service.answered | PortError):
            pass
    return received


async def check_a_session_lives_as_long_as_its_stream(service: Service) -> None:
    stream = await opened(service)
    assert isinstance(await answer(service, stream), service.answered)
    await stream.close()
    await stream.close()
    await until(lambda: not service.sessions())


async def check_a_refused_stream_leaves_the_living_one(service: Service) -> None:
    """Same session, same epoch: its end is not the other's."""
    living, late = await opened(service), service.port.connect()
    await late.send(service.open("s", 0))
    refused = await late.receive()
    assert isinstance(refused, PortError)
    assert refused.reason is Reason.STALE_ROUND
    await late.close()
    assert isinstance(await answer(service, living), service.answered)
    await living.close()
    await until(lambda: not service.sessions())


async def check_a_stream_that_was_taken_over_ends_alone(service: Service) -> None:
    old = await opened(service)
    new = service.port.connect()
    await new.send(service.open("s", 1))
    await old.close()
    await asyncio.sleep(0.05)
    assert service.sessions() == {"s"}
    await new.close()
    await until(lambda: not service.sessions())


async def check_a_closed_stream_says_so(service: Service) -> None:
    stream = await opened(service)
    waiting = asyncio.create_task(drained(stream))
    await asyncio.sleep(0)
    await stream.close()
    await waiting
    await drained(stream)
    with pytest.raises(ConnectionError):
        await stream.send(service.open("t", 0))


async def check_the_end_of_a_service_reaches_every_stream(service: Service) -> None:
    waiting, idle = await opened(service, "a"), await opened(service, "b")
    task = asyncio.create_task(drained(waiting))
    await service.stop()
    await task
    for _ in range(2):
        await drained(idle)
    with pytest.raises(ConnectionError):
        await idle.send(service.open("c", 0))
    for stream in (waiting, idle):
        await stream.close()
    await drained(service.port.connect())


async def drained(stream: Any) -> None:
    """Whatever is there is read; then the stream says that it is over."""

    async def read() -> None:
        while True:
            await stream.receive()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(read(), DEADLINE)


async def refused(stream: Any, message: Any) -> AerieError | PortError:
    try:
        await stream.send(message)
    except AerieError as error:
        return error
    async with asyncio.timeout(DEADLINE):
        while not isinstance(received := await stream.receive(), PortError):
            pass
    return received


async def check_a_full_service_refuses_but_hears_the_end(service: Service) -> None:
    """The refusal comes at once, or in-band from afar."""
    stream = await opened(service)
    service.fill()
    refusal = await refused(stream, service.open("t", 0))
    assert refusal.reason is Reason.RESOURCE_EXHAUSTED
    await stream.close()
    await until(lambda: not service.sessions())


async def check_streams_leave_nothing_behind(service: Service) -> None:
    kept = []
    for number in range(150):
        stream = await opened(service, str(number))
        kept.append(weakref.ref(stream))
        await stream.close()
        never_used = service.port.connect()
        kept.append(weakref.ref(never_used))
        await never_used.close()
    await until(lambda: not service.sessions())
    del stream, never_used
    await asyncio.sleep(0.05)
    gc.collect()
    assert sum(stream() is not None for stream in kept) == 0


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
