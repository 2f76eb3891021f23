"""The composition root of one process, and the Python API.

with Engine.load() as engine:
    print(engine.generate("Why is the sky blue?").text)
"""

import asyncio
import atexit
import concurrent.futures
import gc
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kernels import _blas
from services.drafter.eagle3.config import NO_OVERRIDES, Overrides
from services.drafter.family import DraftModel
from services.drafter.host import DrafterHost
from services.drafter.loader import load_chosen
from services.embedded.parts import Parts
from services.orchestrator.generation import Chunk, Done
from services.orchestrator.service import Orchestrator, Request
from services.orchestrator.stats import Stats
from services.runtime.device import device_thread
from services.speculation.errors import AerieError, Reason, is_integer
from services.speculation.messages import FinishReason, TargetInfo
from services.speculation.warpers import Sampler
from services.targets.loader import load_target
from services.targets.target import Target
from services.verifier.host import VerifierHost

T = TypeVar("T")
log = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0
"""``close`` waits no longer for each of the sessions, the loop and the device."""
_SAMPLING = frozenset(field.name for field in fields(Sampler))
_OPTIONS = frozenset(field.name for field in fields(Request)) - {"tokens"}


@dataclass(frozen=True)
class Result:
    """A finished generation."""

    text: str
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    stats: Stats
    drafter_lost: str | None = None  # why the drafter was given up, if it was


class Engine:
    """Verifier, drafter and orchestrator in this process. Thread-safe.

    Use ``Engine.load``; close it (or use it as a context manager) to free the models and stop its loop.
    """

    def __init__(self) -> None:
        self.device = device_thread()
        self.target: Target
        self._parts: Parts
        self._drafting = "auto"  # what a request gets that names no drafter
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[asyncio.Task[Any]] = set()
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
        for name, text in (("target", target), ("drafter", drafter)):
            if not isinstance(text, str) or not text.strip():
                raise AerieError(Reason.INVALID_ARGUMENT, f"{name} must be a name, not {text!r}")
        numbers = {"threads": threads, "kv_bytes": kv_bytes}
        for name, number in numbers.items():
            if number is not None and (not is_integer(number) or number < 1):
                raise AerieError(Reason.INVALID_ARGUMENT, f"{name} must be a positive integer, not {number!r}")
        if threads is not None:
            _blas.set_threads(threads)
        engine = cls()
        try:
            engine.target = engine.on_device(lambda: load_target(target))
            engine._drafting = "off" if drafter == "off" else "auto"
            info, shared = engine.target.info, engine.target.tensor
            model = engine.on_device(lambda: load_chosen(drafter, info, shared, overrides))
            engine._parts = engine._call(Parts.start(engine.target, model, engine.device, kv_bytes))
        except BaseException:
            engine.close()
            raise
        return engine

    def add_drafter(self, model: DraftModel) -> None:
        """Host one more drafter; requests name it by ``model.info.name`` or family.

        Raises:
            AerieError: CHECKPOINT_INCOMPATIBLE, its taps are not the target's; INVALID_ARGUMENT, its name is taken.
        """

        self._call(self._parts.add_drafter(model))
        self._drafting = "auto"

    @property
    def info(self) -> TargetInfo:
        return self.target.info

    @property
    def orchestrator(self) -> Orchestrator:
        return self._parts.orchestrator

    @property
    def verifier(self) -> VerifierHost:
        return self._parts.verifier

    @property
    def drafters(self) -> list[DrafterHost]:
        return self._parts.drafters

    def chat_tokens(self, messages: Sequence[dict[str, Any]] | str) -> tuple[int, ...]:
        """Prompt tokens of a conversation, or of one user turn, in the target's chat template.

        Raises:
            AerieError: INVALID_ARGUMENT for what is neither.
        """
        conversation = isinstance(messages, Sequence) and all(isinstance(message, dict) for message in messages)
        if not isinstance(messages, str) and not conversation:
            raise AerieError(Reason.INVALID_ARGUMENT, "a conversation is a list of messages with role and content")
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return self.orchestrator.encode_chat(turns)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        """Generate to the end.

        Args:
            prompt: Text (one user turn in the chat template) or token ids.
            options: Fields of ``orchestrator.service.Request``, and those of ``Sampler`` (``temperature=0.7``).

        Raises:
            AerieError: What is refused or fails; ENGINE_CLOSED when the engine is closed meanwhile.
        """
        return self.run_all([self.request(prompt, **options)])[0]

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Chunk | Done]:
        """Chunks as they come, then ``Done``. Closing the iterator cancels the generation."""
        request = self.request(prompt, **options)
        out: queue.Queue[Chunk | Done | None] = queue.Queue()

        async def pump() -> None:
            async for item in self.orchestrator.generate(request):
                out.put(item)

        future = self._submit(pump())
        future.add_done_callback(lambda _: out.put(None))
        try:
            while (item := out.get()) is not None:
                yield item
            _result(future)
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
        """A request for a user turn (text) or for token ids; ``options`` as for ``generate``.

        Raises:
            AerieError: INVALID_ARGUMENT for options that do not exist, or of the wrong type.
        """
        if unknown := sorted(options.keys() - _OPTIONS - _SAMPLING):
            raise AerieError(Reason.INVALID_ARGUMENT, f"there is no option {unknown[0]!r}")
        if sampling := {name: options.pop(name) for name in _SAMPLING & options.keys()}:
            if "sampler" in options:
                raise AerieError(Reason.INVALID_ARGUMENT, f"give a sampler or {', '.join(sorted(sampling))}, not both")
            if isinstance(bias := sampling.get("logit_bias"), dict):
                sampling["logit_bias"] = tuple(bias.items())
            options["sampler"] = Sampler(**sampling)
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        elif isinstance(options.get("stop"), list):
            options["stop"] = tuple(options["stop"])
        tokens = self.chat_tokens(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        request = Request(tokens=tokens, **{"drafter": self._drafting, **options})
        request.check()
        return request

    async def _collect(self, request: Request) -> Result:
        text = ""
        tokens: list[int] = []
        depths: list[int] = []
        async for item in self.orchestrator.generate(request):
            if isinstance(item, Done):
                end = (item.finish_reason, item.seed, item.stats, item.drafter_lost)
                return Result(text, tuple(tokens), tuple(depths), *end)
            text += item.text
            tokens += item.tokens
            depths += item.depths
        raise RuntimeError("a generation ended without Done")

    def on_device(self, function: Callable[[], T]) -> T:
        """Run a function on the device thread and wait for it."""
        return self.device.submit(function).result()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        try:
            return _result(future)
        finally:
            future.cancel()  # when the wait was interrupted

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop; ``close`` cancels it."""

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            try:
                return await coroutine
            finally:
                self._running.discard(task)

        with self._lock:
            if self._closed:
                coroutine.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        """Cancel what runs, stop the actors and free the models. A second time changes nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        parts: Parts | None = self.__dict__.get("_parts")
        hosts: list[Any] = [*parts.drafters, parts.verifier] if parts else []
        del parts
        _wait(asyncio.run_coroutine_threadsafe(self._stop(), self._loop), "the sessions")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self.__dict__.pop("_parts", None)

        def free() -> None:
            """Now and on the models' own thread, not whenever the garbage collector comes."""
            for host in hosts:
                host.free()
            self.__dict__.pop("target", None)
            gc.collect()

        _wait(self.device.submit(free), "the device")

    async def _stop(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if parts := self.__dict__.get("_parts"):
            await parts.stop()

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS:
            raise _closed()
        raise AttributeError(f"an engine has no {name!r}")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_PARTS = ("target", "_parts")
"""What an engine has between ``load`` and ``close``."""


def _closed() -> AerieError:
    return AerieError(Reason.ENGINE_CLOSED, "the engine is closed")


def _result(future: "Future[T]") -> T:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise _closed() from None


def _wait(future: "Future[Any]", what: str) -> None:
    try:
        future.result(CLOSE_SECONDS)
    except TimeoutError:
        log.warning("%s did not end within %g s: closing without", what, CLOSE_SECONDS)


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    if isinstance(prompt, Iterable):  # a caller's types are not to be trusted
        tokens = tuple(prompt)
        if all(is_integer(token) for token in tokens):
            return tuple(int(token) for token in tokens)
    raise AerieError(Reason.INVALID_ARGUMENT, "a prompt is text or token ids; chat_tokens() takes conversations")
