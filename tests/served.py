"""A tiny target behind an orchestrator's port, in this process, on an event loop of a thread of its own."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from typing import Any

from aerie.orchestrator.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from aerie.verifier.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server

from services.embedded.parts import Parts
from services.orchestrator.generation import Chunk, Done
from services.orchestrator.service import DEFAULT_LIMITS, Limits, Request
from services.orchestrator.servicer import NAME, OrchestratorServicer
from services.runtime.device import device_thread
from services.runtime.gate import Gate
from services.runtime.grpc_server import NO_SECURITY, start_server
from services.runtime.security import ServerSecurity
from services.targets.target import Target
from services.verifier.servicer import VerifierServicer


class Served:
    """Use as a context manager.

    Args:
        target: What is served.
        model: Its drafter, or None.
        limits: Of the orchestrator.
        security: What its port demands.

    Attributes:
        address: Where it listens while it does.
        parts: The actors.
        gate: Of the service.
    """

    def __init__(
        self, target: Target, model: Any = None, limits: Limits = DEFAULT_LIMITS, security: ServerSecurity = NO_SECURITY
    ) -> None:
        self.target = target
        self.gate = Gate()
        self._model, self._limits, self._security = model, limits, security
        self._folder = tempfile.mkdtemp(prefix="aerie-")  # short: a unix socket's path has 104 bytes on macOS
        self.address = f"unix:{self._folder}/s"
        self._server: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Served":
        self._thread.start()
        self.parts = self.run(Parts.start(self.target, self._model, device_thread(), limits=self._limits))
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self.run(self.parts.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def listen(self) -> None:
        orchestrator = OrchestratorServicer(self.parts.orchestrator, self.gate)
        verifier = VerifierServicer(self.parts.verifier, Gate())

        def add(server: Any) -> None:
            add_OrchestratorServiceServicer_to_server(orchestrator, server)
            add_VerifierServiceServicer_to_server(verifier, server)

        self._server, _, _ = self.run(start_server(self.address, add, [NAME], self._security))

    def hang_up(self) -> None:
        """Stop listening, and cut off who is connected."""
        if self._server:
            self.run(self._server.stop(0))
            self._server = None

    def reference(self, request: Request) -> tuple[list[Chunk], Done]:
        """What the orchestrator answers without any network."""

        async def collect() -> list[Chunk | Done]:
            return [item async for item in self.parts.orchestrator.generate(request)]

        *chunks, done = self.run(collect())
        return chunks, done

    def chat_tokens(self, *turns: tuple[str, str]) -> tuple[int, ...]:
        return self.parts.orchestrator.encode_chat([{"role": role, "content": text} for role, text in turns])

    def sessions(self) -> dict[str, int]:
        """How many each tier holds."""
        parts = self.parts

        async def count() -> dict[str, int]:
            drafts = sum(len(drafter.sessions) for drafter in parts.drafters)
            return {
                "orchestrator": parts.orchestrator.running,
                "verifier": len(parts.verifier.sessions),
                "drafter": drafts,
            }

        return self.run(count())
