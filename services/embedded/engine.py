"""The composition root of one process, and the Python API.

with Engine.load() as engine:
    print(engine.generate("Why is the sky blue?").text)
"""

import asyncio
import atexit
import gc
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from kernels import _blas
from services.drafter.compiled import CompiledDrafting
from services.drafter.eagle3.config import NO_OVERRIDES, Overrides
from services.drafter.family import DraftModel, TraceableDraftModel
from services.drafter.host import DrafterHost
from services.drafter.loader import choose_checkpoint, load_drafter
from services.embedded.ports import LocalDrafterPort, LocalVerifierPort
from services.orchestrator.generation import Chunk, Done
from services.orchestrator.service import Orchestrator, Request
from services.orchestrator.stats import Stats
from services.orchestrator.text import ChatTemplate
from services.runtime.bus import MemoryBus
from services.runtime.device import device_thread
from services.runtime.registry import Entry, MemoryRegistry
from services.speculation.messages import DrafterInfo, FinishReason, TargetInfo
from services.targets.loader import load_target
from services.targets.target import Target
from services.verifier.host import VerifierHost

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A finished generation."""

    text: str
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    stats: Stats


class Engine:
    """Verifier, drafter and orchestrator in this process. Thread-safe.

    Use ``Engine.load``; close it (or use it as a context manager) to free the models and stop its loop.
    """

    def __init__(self) -> None:
        self.device = device_thread()
        self.registry = MemoryRegistry()
        self.bus = MemoryBus()
        self.target: Target
        self.orchestrator: Orchestrator
        self.verifier: VerifierHost
        self.drafters: list[DrafterHost] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aerie-loop", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # daemon threads must not outlive the interpreter's shutdown

    @classmethod
    def load(
        cls,
        target: str = "smollm2",
        drafter: str = "auto",
        threads: int | None = None,
        kv_bytes: int | None = None,
        overrides: Overrides = NO_OVERRIDES,
    ) -> "Engine":
        """Load a target and a drafter.

        Args:
            target: "smollm2", a Hub id, a folder or a GGUF file.
            drafter: "auto" (the shipped one that fits, else plain decoding), "eagle3", "off" or a folder.
            threads: CPU threads of the matrix products; None keeps the default.
            kv_bytes: Budget of all sessions' KV caches.
            overrides: Forced readings of ambiguous drafter configs.

        Raises:
            AerieError: What does not load, and why.
        """
        if threads is not None:
            _blas.set_threads(threads)
        engine = cls()
        try:
            engine.target = engine.on_device(lambda: load_target(target))
            path = choose_checkpoint(drafter, engine.target.info)
            model = engine._load_drafter(path, overrides) if path else None
            engine._call(engine._start(model, kv_bytes))
        except BaseException:
            engine.close()
            raise
        return engine

    def _load_drafter(self, path: Path, overrides: Overrides) -> TraceableDraftModel:
        return self.on_device(lambda: load_drafter(path, self.target.info, self.target.tensor, overrides))

    async def _start(self, model: TraceableDraftModel | None, kv_bytes: int | None) -> None:
        target, files = self.target, self.target.tokenizer
        self.verifier = await self.device.run(lambda: VerifierHost(target, self.device, kv_bytes, self.bus))
        self.verifier.start()
        template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self.orchestrator = Orchestrator(
            LocalVerifierPort(self.verifier),
            target.info,
            Tokenizer.from_str(files.tokenizer_json),
            template,
            self.registry,
            self.bus,
        )
        if model:
            self._add_drafter(model, CompiledDrafting(model) if target.info.device == "gpu" else None)

    def _add_drafter(self, model: DraftModel, compiled: CompiledDrafting | None = None) -> None:
        host = DrafterHost(model, self.device, compiled)
        host.start()
        self.drafters.append(host)
        info: DrafterInfo = model.info
        data = {"family": info.family, "taps": info.taps, "target_fingerprint": info.target_fingerprint}
        self.registry.join(Entry(info.name, "drafter", LocalDrafterPort(host), data))

    def add_drafter(self, model: DraftModel) -> None:
        """Host one more drafter; requests name it by ``model.info.name`` or family."""

        async def add() -> None:
            self._add_drafter(model)

        self._call(add())

    @property
    def info(self) -> TargetInfo:
        return self.target.info

    def chat_tokens(self, messages: Sequence[dict[str, Any]] | str) -> tuple[int, ...]:
        """Prompt tokens of a conversation, or of one user turn, in the target's chat template."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self.orchestrator.encode_chat(turns)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        """Generate to the end.

        Args:
            prompt: Text (one user turn in the chat template) or token ids.
            options: Fields of ``orchestrator.service.Request``.
        """
        return self.run_all([self.request(prompt, **options)])[0]

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Chunk | Done]:
        """Chunks as they come, then ``Done``. Closing the iterator cancels the generation."""
        request = self.request(prompt, **options)
        out: queue.Queue[Chunk | Done | BaseException] = queue.Queue()

        async def pump() -> None:
            try:
                async for item in self.orchestrator.generate(request):
                    out.put(item)
            except BaseException as error:
                out.put(error)
                raise

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while True:
                item = out.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Done):
                    return
        finally:
            future.cancel()

    def run_all(self, requests: Sequence[Request]) -> list[Result]:
        """Run several generations side by side: their rows share verify batches."""

        async def gather() -> list[Result]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._collect(request)) for request in requests]
            return [task.result() for task in tasks]

        try:
            return self._call(gather())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def request(self, prompt: str | Sequence[int], **options: Any) -> Request:
        """A request for a user turn (text) or for token ids."""
        tokens = self.chat_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)
        return Request(tokens=tokens, **options)

    async def _collect(self, request: Request) -> Result:
        text = ""
        tokens: list[int] = []
        depths: list[int] = []
        async for item in self.orchestrator.generate(request):
            if isinstance(item, Done):
                return Result(text, tuple(tokens), tuple(depths), item.finish_reason, item.seed, item.stats)
            text += item.text
            tokens += item.tokens
            depths += item.depths
        raise RuntimeError("a generation ended without Done")

    def on_device(self, function: Callable[[], T]) -> T:
        """Run a function on the device thread and wait for it."""
        return self.device.submit(function).result()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Stop the actors and free the models."""
        if self._loop.is_closed():
            return

        async def stop() -> None:
            hosts: list[Any] = [*self.drafters, *([self.verifier] if hasattr(self, "verifier") else [])]
            for host in hosts:
                await host.stop()

        atexit.unregister(self.close)
        self._call(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        # Free the model now and on its own thread, not whenever the garbage collector comes.
        self.drafters.clear()
        for name in ("target", "orchestrator", "verifier"):
            self.__dict__.pop(name, None)
        self.on_device(gc.collect)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
