"""An orchestrator service that answers by a script: what no real one does when a test wants it."""

import asyncio
from collections.abc import Callable
from typing import Any

from aerie.orchestrator.v1 import orchestrator_pb2 as pb
from aerie.orchestrator.v1 import orchestrator_pb2_grpc

from services.runtime.grpc_server import start_server
from services.wire.orchestrator import _STATS, DoneMessage, write_chunk, write_done

STATS = {**dict.fromkeys(_STATS, 0), "acceptance_by_depth": []}
CHUNK = write_chunk("a", (64,), (0,), ())
DONE = write_done(DoneMessage("length", 5, {"prompt_tokens": 3, "completion_tokens": 1}, STATS, None))


class Scripted(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Answers call after call with what the script says; the last answer is that of all further calls.

    Args:
        script: For each call the responses; an exception or a function of the context among them is raised or called.

    Attributes:
        times: When calls came, in seconds of the loop.
        remaining: Of each call, the seconds that its client gave it (None: no limit).
        cancelled: Calls that ended because their client left.
    """

    def __init__(self, *script: list[Any]) -> None:
        self._script = list(script)
        self.times: list[float] = []
        self.remaining: list[float | None] = []
        self.cancelled = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:
        answers = self._script[min(len(self.times), len(self._script) - 1)]
        self.times.append(asyncio.get_running_loop().time())
        self.remaining.append(context.time_remaining())
        try:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, Callable):  # type: ignore[arg-type]
                    await answer(context)
                else:
                    yield answer
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        async for answer in self.Generate(request, context):  # type: ignore[arg-type]
            return answer
        raise AssertionError

    async def listen(self, address: str) -> Any:
        """Start a server; stop what is returned."""
        add = orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server
        server, _, _ = await start_server(address, lambda server: add(self, server), [])
        return server


async def hang(_: Any) -> None:
    await asyncio.Event().wait()


def abort(code: Any, details: str) -> Callable[[Any], Any]:
    return lambda context: context.abort(code, details)
