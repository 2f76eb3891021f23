"""One process that serves: listen, be found, be healthy, and leave in order when it is told to."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from services.cli.serving.process import Process
from services.runtime.addresses import check_exposure, check_free, parse_address
from services.runtime.grpc_server import start_server
from services.runtime.logs import configure_logging
from services.runtime.membership import Membership
from services.runtime.readiness import Readiness
from services.runtime.registry import Entry
from services.runtime.supervisor import Supervisor
from services.speculation.errors import AerieError, Reason

log = logging.getLogger(__name__)
T = TypeVar("T")

Start = Callable[[Process, argparse.Namespace], Awaitable[None]]
"""Builds what a process serves."""
WAIT_SECONDS = 120.0
"""A service waits no longer for the services that it needs to start."""
CUT_SECONDS = 1.0
"""What is cut off at the end of a drain has that long to tell its clients."""
FATAL_SECONDS = 1.0
"""How often a process looks whether it can still serve."""


def run_process(kind: str, options: argparse.Namespace, start: Start) -> int:
    """Build and serve until SIGTERM or SIGINT.

    Returns:
        The exit code: 0, also when told to end while still building; 1 when the process can serve no longer.

    Raises:
        AerieError: It cannot start.
    """
    configure_logging(kind, options.log_format, options.log_level)
    code = asyncio.run(_run(kind, options, start))
    sys.stdout.flush()
    if code is None:
        os._exit(0)  # the device thread may be in the middle of loading: an interpreter that shuts down would abort
    return code


async def _run(kind: str, options: argparse.Namespace, start: Start) -> int | None:
    """The exit code; None when what was cut off leaves work on the device thread."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told.set)
    ending = asyncio.create_task(told.wait())
    async with Process(kind, options) as process:
        _check_listening(process, options)
        building = asyncio.ensure_future(start(process, options))
        await asyncio.wait((building, ending), return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            return None
        building.result()
        return await _serve(process, options, ending)


def _check_listening(process: Process, options: argparse.Namespace) -> None:
    """Refuse what would be open to other machines, before anything loads."""
    # Metrics are shown to whoever asks: no key guards them.
    for flag, keys in (("listen", process.security.keys), ("http", process.api_keys), ("metrics", ())):
        if text := getattr(options, flag, None):
            address = parse_address(text, f"--{flag}")
            check_exposure(address, keys, options.insecure)
            check_free(address)
    process.security.credentials()


async def _serve(process: Process, options: argparse.Namespace, told: "asyncio.Task[bool]") -> int:
    names = [hosted.name for hosted in process.hosted]

    def add(server: object) -> None:
        for hosted in process.hosted:
            hosted.add(server)

    server, address, health = await start_server(options.listen, add, names, process.security)
    process.on_end(lambda: server.stop(0.5))  # also when what follows cannot start
    readiness = Supervisor(lambda: Readiness(health, names, process.checks))
    process.readiness = readiness
    process.supervise("readiness", readiness)
    if process.http:
        await process.http.start(options.http)
    if options.metrics:
        process.on_end(_in_thread(process.metrics.serve(options.metrics)))
    memberships = _join(process, options, address)
    for line in (f"{process.kind}: {address}", *([f"http: {process.http.address}"] if process.http else [])):
        print(line, flush=True)
    failure = asyncio.create_task(_fatal(process), name="watch over the process")
    await asyncio.wait((told, failure), return_when=asyncio.FIRST_COMPLETED)
    failed = failure.done()
    if failed:
        log.error("this process can serve no longer: %s", failure.result())
    failure.cancel()
    # In this order: nobody is sent here any more, nothing new begins, what runs finishes.
    await readiness.actor.withdraw()
    process.gate.close()
    for membership in memberships:
        await membership.stop()
    await _drain(process, 0.0 if failed else options.drain)
    await readiness.stop()
    return 1 if failed else 0


async def _drain(process: Process, seconds: float) -> None:
    log.info("draining: %d sessions run", process.gate.running)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds

    def cut_off() -> None:
        why = f"the {process.kind} shuts down"
        for end in process.cut_off:
            end(why)

    if process.http:
        await process.http.drain(seconds, cut_off)
    if not await process.gate.emptied(max(0.0, deadline - loop.time())):
        log.warning("%d sessions are cut off after %g s", process.gate.running, seconds)
        cut_off()
        await process.gate.emptied(CUT_SECONDS)


async def _fatal(process: Process) -> str:
    """Why the process cannot serve any more, once that is so."""
    while True:
        await asyncio.sleep(FATAL_SECONDS)
        for check in process.fatal:
            if why := check():
                return why


def _in_thread(end: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def ending() -> None:
        await asyncio.to_thread(end)

    return ending


def _join(process: Process, options: argparse.Namespace, address: str) -> list[Supervisor[Membership]]:
    """List what this process serves in the registry, if there is one."""
    if process.registry is None:
        return []
    reached = options.advertise or _reachable(address)
    memberships = []
    for kind in (hosted.kind for hosted in process.hosted):
        entry = Entry(f"{kind}@{reached}", kind, reached, process.entry_data)
        memberships.append(Supervisor(partial(Membership, process.registry, entry)))
        process.supervise(f"membership of the {kind}", memberships[-1])
    return memberships


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
        try:
            return await ask()
        except ConnectionError as error:
            if loop.time() > deadline:
                raise AerieError(Reason.SERVICE_UNAVAILABLE, f"{what} does not answer: {error}") from None
            if not said:
                log.info("waiting for %s: %s", what, error)
                said = True
            await asyncio.sleep(0.2)
