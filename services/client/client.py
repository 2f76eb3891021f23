"""``AsyncClient`` speaks to an orchestrator; ``Client`` is the same for code without an event loop."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from aerie.orchestrator.v1 import orchestrator_pb2_grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import FinishReason, TokenLogProbs
from services.speculation.warpers import Sampler
from services.wire.orchestrator import ChunkMessage, DoneMessage, Generate, read_generated, write_generate

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
RETRIES = 3
"""A request that has not answered with a token yet is tried again this often."""
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_OPTIONS = (("grpc.keepalive_time_ms", 30_000), ("grpc.http2.max_pings_without_data", 0))


@dataclass(frozen=True)
class Generation:
    """A finished generation."""

    text: str
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...]
    finish_reason: FinishReason
    seed: int
    usage: dict[str, int]
    stats: dict[str, Any]
    drafter_lost: str | None = None


class AsyncClient:
    """Use as an async context manager.

    Args:
        address: ``host:port`` or ``unix:PATH`` of an orchestrator.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncIterator[ChunkMessage | DoneMessage]:
        """Chunks as they come, then the end. Leaving the iterator cancels the generation.

        Args:
            prompt: A user's turn (str), token ids, or a conversation of {"role", "content"}.
            options: Fields of ``wire.orchestrator.Generate``, and those of ``Sampler`` one by one.

        Raises:
            AerieError: What is refused or fails; SERVICE_UNAVAILABLE when nobody answers.
        """
        request = write_generate(_request(prompt, options))
        for attempt in range(RETRIES + 1):
            call, begun = self._stub.Generate(request), False
            try:
                async for response in call:
                    begun = True
                    yield read_generated(response)
                return
            except grpc.aio.AioRpcError as error:
                # What a client has seen cannot be taken back: only a request without a token yet is tried again.
                if begun or attempt == RETRIES or error.code() not in _RETRIED:
                    raise _refusal(error) from None
                await asyncio.sleep(0.1 * 2**attempt * random.uniform(0.5, 1.5))
            finally:
                call.cancel()

    async def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Generate to the end; arguments and errors as for ``stream``."""
        chunks: list[ChunkMessage] = []
        async for item in self.stream(prompt, **options):
            if isinstance(item, DoneMessage):
                return Generation(
                    text="".join(chunk.text for chunk in chunks),
                    token_ids=tuple(token for chunk in chunks for token in chunk.tokens),
                    depths=tuple(depth for chunk in chunks for depth in chunk.depths),
                    log_probs=tuple(entry for chunk in chunks for entry in chunk.log_probs),
                    finish_reason=item.finish_reason,
                    seed=item.seed,
                    usage=item.usage,
                    stats=item.stats,
                    drafter_lost=item.drafter_lost,
                )
            chunks.append(item)
        raise AerieError(Reason.INTERNAL, "the generation ended without its end")


class Client:
    """``AsyncClient`` with a loop of its own. Use as a context manager, in one thread."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._client = self._run(_make(address))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._client.__aexit__())
        self._runner.close()

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """See ``AsyncClient.generate``."""
        return self._run(self._client.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[ChunkMessage | DoneMessage]:
        """See ``AsyncClient.stream``. Closing the iterator cancels the generation."""
        items = self._client.stream(prompt, **options)
        try:
            while (item := self._run(_next(items))) is not None:
                yield item
        finally:
            self._run(items.aclose())  # type: ignore[attr-defined]

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)


async def _make(address: str) -> AsyncClient:
    return AsyncClient(address)


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)


def _request(prompt: Prompt, options: dict[str, Any]) -> Generate:
    fields = {name: options.pop(name) for name in Sampler.__dataclass_fields__.keys() & options.keys()}
    if fields and "sampler" in options:
        raise AerieError(Reason.INVALID_ARGUMENT, f"give a sampler or {', '.join(sorted(fields))}, not both")
    if unknown := sorted(options.keys() - Generate.__dataclass_fields__.keys()):
        raise AerieError(Reason.INVALID_ARGUMENT, f"there is no option {unknown[0]!r}")
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    if fields:
        options["sampler"] = Sampler(**fields)
    if isinstance(prompt, str):
        turns: Any = [{"role": "user", "content": prompt}]
    else:
        turns = tuple(prompt)
    return Generate(prompt=turns, **options)


def _refusal(error: grpc.aio.AioRpcError) -> AerieError:
    """The reason that the service gives, or what the status means."""
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.reason in Reason.__members__:
            return AerieError(Reason(info.reason), error.details() or "")
    known = {grpc.StatusCode.UNAVAILABLE: Reason.SERVICE_UNAVAILABLE}
    return AerieError(known.get(error.code(), Reason.INTERNAL), error.details() or str(error.code()))
