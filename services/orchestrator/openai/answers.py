"""Answers: generations side by side, as one body or as events, for as long as the client is there."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from services.orchestrator.generation import Chunk, Done
from services.orchestrator.openai.errors import HttpError, internal, json_response, refused, to_json
from services.orchestrator.openai.responses import Bodies, Endpoint, Outcome, Shape, closing, usage
from services.orchestrator.openai.tokens import TokenBytes
from services.orchestrator.service import Orchestrator, Request
from services.runtime.actor import log_incident
from services.speculation.errors import AerieError, Reason

log = logging.getLogger(__name__)

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
_PARAMS = {Reason.DRAFTER_UNAVAILABLE: "x-aerie-drafter"}


@contextlib.asynccontextmanager
async def side_by_side(
    orchestrator: Orchestrator, requests: Sequence[Request]
) -> AsyncIterator["asyncio.Queue[tuple[int, Chunk | Done | Exception]]"]:
    """Run requests; the queue brings what each gives, or why it failed. Leaving frees them all."""
    arrivals: asyncio.Queue[tuple[int, Chunk | Done | Exception]] = asyncio.Queue()

    async def pump(index: int, request: Request) -> None:
        end: Exception | None = RuntimeError("a generation ended without Done")
        try:
            items: Any = orchestrator.generate(request)
            async with contextlib.aclosing(items):
                async for item in items:
                    arrivals.put_nowait((index, item))
                    if isinstance(item, Done):
                        end = None
        except Exception as error:
            if end is None:
                log_incident(log, "a session did not close", error)
            else:
                end = error
        finally:  # whatever happened: whoever waits must hear of it
            if end:
                arrivals.put_nowait((index, end))

    tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    try:
        yield arrivals
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work; a client that hangs up cancels it."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()


@dataclass(frozen=True)
class Answer:
    """An ASGI application that answers one request.

    Attributes:
        requests: The choices, in order.
        prompt_tokens: Of the prompts, each counted once.
        stream, include_usage: Events instead of one body, and whether they end with the usage.
        keep_alive: Seconds without an event after which a stream shows that it lives.
    """

    orchestrator: Orchestrator
    endpoint: Endpoint
    bodies: Bodies
    requests: Sequence[Request]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    keep_alive: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HttpError as long as nothing has been sent."""
        work = self._events(Events(send)) if self.stream else self._body(scope, receive, send)
        await while_connected(work, receive)

    async def _body(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcomes = self._outcomes()
        async with side_by_side(self.orchestrator, self.requests) as arrivals:
            while not all(outcome.done for outcome in outcomes):
                index, item = await arrivals.get()
                outcomes[index].add(self._sound(item))
        choices = []
        for index, (outcome, shape) in enumerate(zip(outcomes, self._shapes(), strict=True)):
            assert outcome.done
            parts = shape.whole("".join(outcome.text), self._shown(index, outcome.log_probs))
            choices.append({"index": index, **parts, **closing(outcome.done)})
        body = self.bodies.whole(choices, usage(self.prompt_tokens, outcomes))
        await json_response(body)(scope, receive, send)

    async def _events(self, events: "Events") -> None:
        outcomes, shapes = self._outcomes(), self._shapes()
        async with side_by_side(self.orchestrator, self.requests) as arrivals:
            while not all(outcome.done for outcome in outcomes):
                try:
                    async with asyncio.timeout(self.keep_alive):
                        index, item = await arrivals.get()
                except TimeoutError:
                    await events.keep_alive()
                    continue
                try:
                    sound = self._sound(item)
                except HttpError as error:
                    if not events.started:
                        raise
                    await events.fail(error)
                    return
                for choice in self._told(index, sound, outcomes[index], shapes[index]):
                    await events.send(self._part([choice]))
        if self.include_usage:
            await events.send({**self._part([]), "usage": usage(self.prompt_tokens, outcomes)})
        await events.end()

    def _told(self, index: int, item: Chunk | Done, outcome: Outcome, shape: Shape) -> list[dict[str, Any]]:
        """What a stream says of one item, as choices."""
        first = not outcome.text and outcome.done is None
        outcome.add(item)
        choices: list[dict[str, Any]] = []
        if first and (opening := shape.opening()) is not None:
            choices.append({"index": index, **opening, "finish_reason": None})
        if isinstance(item, Done):
            choices.append({"index": index, **shape.ending(), **closing(item)})
        elif item.text or item.log_probs:
            parts = shape.part(item.text, self._shown(index, item.log_probs))
            choices.append({"index": index, **parts, "finish_reason": None})
        return choices

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.bodies.part(choices)
        return {**body, "usage": None} if self.include_usage else body

    def _sound(self, item: Chunk | Done | Exception) -> Chunk | Done:
        if isinstance(item, AerieError):
            raise refused(item, _PARAMS.get(item.reason))
        if isinstance(item, Exception):
            raise internal(log_incident(log, "a generation failed", item))
        return item

    def _shown(self, index: int, log_probs: Sequence[Any]) -> Sequence[Any] | None:
        return None if self.requests[index].top_logprobs is None else log_probs

    def _outcomes(self) -> list[Outcome]:
        return [Outcome() for _ in self.requests]

    def _shapes(self) -> list[Shape]:
        tokens = TokenBytes(self.orchestrator.tokenizer)
        return [self.endpoint.shape(tokens) for _ in self.requests]


class Events:
    """Server-sent events. The first of them, or the first sign of life, starts the response.

    Attributes:
        started: The status is out; an error can only be an event now.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, body: dict[str, Any]) -> None:
        await self._write(b"data: " + to_json(body) + b"\n\n")

    async def keep_alive(self) -> None:
        await self._write(b": keep-alive\n\n")

    async def fail(self, error: HttpError) -> None:
        """The last event of a stream that broke: no ``[DONE]`` follows."""
        await self.send(error.body)
        await self._write(b"", more=False)

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
