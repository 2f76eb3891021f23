"""``AsyncClient``: speaks to an orchestrator from asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

import grpc
from aerie.orchestrator.v1 import orchestrator_pb2 as pb
from aerie.orchestrator.v1 import orchestrator_pb2_grpc

from services.client.failures import Attempts
from services.client.requests import Options, Prompt, check_deadline, write_request
from services.runtime.security import OPEN, ChannelSecurity
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import FinishReason, TokenLogProbs
from services.wire.orchestrator import ChunkMessage, DoneMessage, DrafterLine, read_drafters, read_generated

T = TypeVar("T")
Item = ChunkMessage | DoneMessage
"""What a stream gives: chunks, then the end."""
RETRIES = 3
"""A request that has not been answered with a token yet is tried again this often."""
ASK_SECONDS = 10.0
"""Questions other than generations have so long for their answer, retries included."""


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        text: The answer.
        token_ids, depths: Every token, and the tree depth at which it was accepted (0: the target's own).
        log_probs: Of each token, where ``top_logprobs`` asks for them.
        finish_reason: "stop", "length" or "cancelled".
        seed: The one that was used.
        usage: prompt_tokens and completion_tokens.
        stats: As the service measured them, in seconds.
        drafter_lost: Why the drafter was given up, if it was.
    """

    text: str
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...]
    finish_reason: FinishReason
    seed: int
    usage: dict[str, int]
    stats: dict[str, Any]
    drafter_lost: str | None = None


@dataclass(frozen=True)
class ServiceInfo:
    """The target that is served: its name, the digest of its weights, and sizes in tokens."""

    model: str
    weights_fingerprint: str
    context_length: int
    vocab_size: int


class AsyncClient:
    """Use as an async context manager, or ``close`` it; on one event loop, by any number of tasks.

    Args:
        address: ``host:port`` or ``unix:PATH`` of an orchestrator.
        security: The key and the certificates that the service asks for.
        retries: How often a request is tried again that failed before its first token, because the service was away
            or full.
    """

    def __init__(self, address: str, *, security: ChannelSecurity = OPEN, retries: int = RETRIES) -> None:
        self.address = address
        self._channel = security.open(address)
        self._retries = retries
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs; whoever waits for it gets ENGINE_CLOSED."""
        await self._channel.close()

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Item, None]:
        """Chunks as they come, then the end.

        Closing the iterator, or cancelling the task that waits for it, cancels the generation on every service. A
        loop that is left early closes it when the iterator is dropped; ``contextlib.aclosing`` says when that is.

        Args:
            prompt: A user's turn (with ``raw`` plain text), token ids, or a conversation of {"role", "content"}.
            options: See ``Options``.

        Raises:
            AerieError: What is refused or fails, with the service's reason; SERVICE_UNAVAILABLE when nobody answers,
                DEADLINE_EXCEEDED after ``deadline`` seconds.
        """
        request = write_request(prompt, options)
        attempts = self._attempts(options.get("deadline"))
        while True:
            begun = done = False
            call: Any = None
            try:
                call = self._stub.Generate(request, timeout=attempts.timeout())
                async for response in call:
                    begun = True
                    item = _read(read_generated, response)
                    done = isinstance(item, DoneMessage)
                    yield item
                if not done:
                    raise AerieError(Reason.INTERNAL, "the service ended the answer before its end")
                return
            except grpc.aio.AioRpcError as error:
                if done:  # all that there was to say has been said
                    return
                failure = error
            except grpc.aio.UsageError:
                raise closed() from None
            except asyncio.CancelledError:
                _check_own(call)
                raise
            finally:
                if call:
                    call.cancel()
            if begun:  # what a caller has seen cannot be taken back
                raise attempts.refusal(failure)
            await attempts.wait(failure)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Generate to the end; arguments and errors as for ``stream``."""
        chunks: list[ChunkMessage] = []
        end: DoneMessage | None = None
        async for item in self.stream(prompt, **options):
            if isinstance(item, DoneMessage):
                end = item
            else:
                chunks.append(item)
        assert end  # ``stream`` ends with it
        return Generation(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.tokens),
            depths=tuple(depth for chunk in chunks for depth in chunk.depths),
            log_probs=tuple(entry for chunk in chunks for entry in chunk.log_probs),
            finish_reason=end.finish_reason,
            seed=end.seed,
            usage=end.usage,
            stats=end.stats,
            drafter_lost=end.drafter_lost,
        )

    async def info(self, deadline: float = ASK_SECONDS) -> ServiceInfo:
        """What the orchestrator serves. Raises AerieError as ``stream`` does."""
        answer = await self._ask(self._stub.GetInfo, pb.GetInfoRequest(), deadline)
        return ServiceInfo(answer.model, answer.weights_fingerprint, answer.context_length, answer.vocab_size)

    async def drafters(self, deadline: float = ASK_SECONDS) -> list[DrafterLine]:
        """The drafters on offer, and those that are not with the reason. Raises AerieError as ``stream`` does."""
        return _read(read_drafters, await self._ask(self._stub.ListDrafters, pb.ListDraftersRequest(), deadline))

    async def _ask(self, method: Callable[..., Awaitable[Any]], request: Any, deadline: float) -> Any:
        attempts = self._attempts(deadline)
        while True:
            call: Any = None
            try:
                call = method(request, timeout=attempts.timeout())
                return await call
            except grpc.aio.AioRpcError as error:
                failure = error
            except grpc.aio.UsageError:
                raise closed() from None
            except asyncio.CancelledError:
                _check_own(call)
                raise
            await attempts.wait(failure)

    def _attempts(self, deadline: float | None) -> Attempts:
        return Attempts(self.address, self._retries, check_deadline(deadline))


def closed() -> AerieError:
    return AerieError(Reason.ENGINE_CLOSED, "the client is closed")


def _check_own(call: Any) -> None:
    """A channel that closes under a call looks like a cancellation of whoever waits for it: tell them apart."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling() and call.cancelled():
        raise closed() from None


def _read(read: Callable[[Any], T], response: Any) -> T:
    try:
        return read(response)
    except AerieError as error:  # it would blame the caller
        raise AerieError(Reason.INTERNAL, f"the service does not speak our language: {error.message}") from None
