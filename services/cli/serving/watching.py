"""What a process looks at to say how it is: health checks and metrics of its services."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from services.cli.serving.process import Process
from services.orchestrator.metrics import RoundMetrics
from services.orchestrator.service import Orchestrator
from services.runtime.actor import Actor, log_incident
from services.runtime.device import device_thread
from services.speculation.errors import AerieError

log = logging.getLogger(__name__)

DEPENDENCY_SECONDS = 0.5
"""How often a service that is needed is asked whether it is ready."""


def watch_actor(process: Process, name: str, actor: Actor[Any]) -> None:
    """A service whose actor has stopped is not ready, and the process must be started again."""

    def check() -> str | None:
        return None if actor.alive else f"{actor.name} has stopped"

    process.checks[name] = check
    process.fatal.append(check)
    process.metrics.watch({name: actor})


def watch_device(process: Process) -> None:
    """Ready while the device thread makes progress; dead, it does not come back."""
    device = device_thread()
    process.checks["device"] = device.stalled
    process.fatal.append(lambda: None if device.alive else "the device thread has died")


def watch_rounds(process: Process, orchestrator: Orchestrator) -> None:
    """Count rounds and sessions."""
    metrics = RoundMetrics(orchestrator, process.metrics.registry)
    events = process.bus.subscribe(capacity=4096)
    counting = asyncio.create_task(metrics.consume(events), name="metrics")
    process.metrics.watch({"directory": orchestrator.directory})

    async def end() -> None:
        counting.cancel()
        process.bus.unsubscribe(events)

    process.on_end(end)


def watch_dependency(process: Process, name: str, ask: Callable[[], Awaitable[None]]) -> None:
    """Ready while another service is; ``ask`` raises ConnectionError when it is not."""
    state: list[str | None] = [None]

    async def watch() -> None:
        while True:
            try:
                async with asyncio.timeout(2 * DEPENDENCY_SECONDS):
                    await ask()
                state[0] = None
            except TimeoutError:
                state[0] = "it does not answer"
            except (ConnectionError, AerieError) as error:
                state[0] = str(error)
            except Exception as error:  # a fault of ours: who watches must not end
                state[0] = log_incident(log, f"watching the {name} failed", error)
            await asyncio.sleep(DEPENDENCY_SECONDS)

    watching = asyncio.create_task(watch(), name=f"watch of the {name}")
    process.checks[name] = lambda: state[0]

    async def end() -> None:
        watching.cancel()

    process.on_end(end)
