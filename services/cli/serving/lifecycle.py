"""One process that serves: listen, be found, be healthy, and leave in order when it is told to."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.cli.serving.process import Process
from services.runtime.grpc_server import start_server
from services.runtime.membership import Membership
from services.runtime.registry import Entry
from services.speculation.errors import AerieError, Reason

log = logging.getLogger(__name__)
T = TypeVar("T")

Start = Callable[[Process, argparse.Namespace], Awaitable[None]]
"""Builds what a process serves."""
WAIT_SECONDS = 120.0
"""A service waits no longer for the services that it needs to start."""


def run_process(kind: str, options: argparse.Namespace, start: Start) -> int:
    """Build and serve until SIGTERM or SIGINT; returns the exit code, 0 also when told to end while still building.

    Raises:
        AerieError: It cannot start.
    """
    finished = asyncio.run(_run(kind, options, start))
    sys.stdout.flush()
    if not finished:
        os._exit(0)  # the device thread may be in the middle of loading: an interpreter that shuts down would abort
    return 0


async def _run(kind: str, options: argparse.Namespace, start: Start) -> bool:
    """Whether it ended in order: what was cut off leaves work on the device thread."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told.set)
    ending = asyncio.create_task(told.wait())
    async with Process(kind, options) as process:
        building = asyncio.ensure_future(start(process, options))
        await asyncio.wait((building, ending), return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            return False
        building.result()
        await _serve(process, options, ending)
    return True


async def _serve(process: Process, options: argparse.Namespace, told: "asyncio.Task[bool]") -> None:
    names = [hosted.name for hosted in process.hosted]

    def add(server: object) -> None:
        for hosted in process.hosted:
            hosted.add(server)

    server, address, health = await start_server(options.listen, add, names)
    if process.http:
        await process.http.start(options.http)
    membership = await _join(process, options, address)
    for line in (f"{process.kind}: {address}", *([f"http: {process.http.address}"] if process.http else [])):
        print(line, flush=True)
    await told
    # In this order: nobody is sent here any more, nothing new begins, what runs finishes.
    if membership:
        await membership.stop()
    await health.enter_graceful_shutdown()
    process.gate.close()
    log.info("draining: %d sessions run", process.gate.running)
    deadline = asyncio.get_running_loop().time() + options.drain
    if process.http:
        await process.http.drain(options.drain)
    if not await process.gate.emptied(deadline - asyncio.get_running_loop().time()):
        log.warning("%d sessions are cut off after %g s", process.gate.running, options.drain)
    await server.stop(0.5)


async def _join(process: Process, options: argparse.Namespace, address: str) -> Membership | None:
    """List this process in the registry, if there is one."""
    if process.registry is None:
        return None
    reached = options.advertise or _reachable(address)
    entry = Entry(f"{process.kind}@{reached}", process.kind, reached, process.entry_data)
    membership = Membership(process.registry, entry)
    membership.start()
    return membership


def _reachable(address: str) -> str:
    """What others dial: a wildcard is this host's own name."""
    host, separator, port = address.rpartition(":")
    if separator and host in ("0.0.0.0", "[::]"):
        return f"{os.uname().nodename}:{port}"
    return address


async def patiently(ask: Callable[[], Awaitable[T]], what: str, seconds: float = WAIT_SECONDS) -> T:
    """Ask until there is an answer.

    Raises:
        AerieError: SERVICE_UNAVAILABLE after ``seconds``.
    """
    loop = asyncio.get_running_loop()
    deadline, said = loop.time() + seconds, False
    while True:
        with contextlib.suppress(asyncio.InvalidStateError):
            try:
                return await ask()
            except ConnectionError as error:
                if loop.time() > deadline:
                    raise AerieError(Reason.SERVICE_UNAVAILABLE, f"{what} does not answer: {error}") from None
                if not said:
                    log.warning("waiting for %s", what)
                    said = True
        await asyncio.sleep(0.2)
