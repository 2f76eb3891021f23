"""The routes: ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models`` and ``/health``."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.orchestrator.openai.answers import Answer
from services.orchestrator.openai.errors import HttpError, internal, json_response, refused
from services.orchestrator.openai.requests import Options, read_chat, read_completion, unknown_model
from services.orchestrator.openai.responses import CHAT, COMPLETION, Bodies, Endpoint
from services.orchestrator.service import Orchestrator
from services.runtime.actor import log_incident
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TargetInfo

T = TypeVar("T")

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 5.0
"""A stream that has nothing to say says so that often."""
BODY_BYTES = 16 * 2**20
"""Largest body of a request."""


def build_app(
    orchestrator: Orchestrator,
    keys: frozenset[str] = frozenset(),
    *,
    ready: Callable[[], bool] = lambda: True,
    routes: Sequence[BaseRoute] = (),
    keep_alive: float = KEEP_ALIVE_SECONDS,
) -> Starlette:
    """The gateway as an ASGI application. It runs on the loop of the orchestrator.

    Args:
        orchestrator: Whom it asks.
        keys: Bearer tokens, one of which every request under ``/v1`` must carry; none: everybody may ask.
        ready: What ``/health`` says; it is open to everybody.
        routes: More of them, such as ``/metrics``, as open as they make themselves.
        keep_alive: Seconds of silence in a stream.
    """
    gateway = _Gateway(orchestrator, keep_alive)

    async def health(request: HttpRequest) -> Response:
        well = ready()
        return json_response({"status": "ok" if well else "unavailable"}, 200 if well else 503)

    api = Router(
        [
            Route("/chat/completions", gateway.chat, methods=["POST"]),
            Route("/completions", gateway.completion, methods=["POST"]),
            Route("/models", gateway.models),
            Route("/models/{model:path}", gateway.model),
        ],
        redirect_slashes=False,
    )
    app = Starlette(
        routes=[Mount("/v1", app=_Guard(api, keys)), Route("/health", health), *routes],
        middleware=[Middleware(_Incidents)],
        exception_handlers={HttpError: _answer_error, HTTPException: _answer_status, ClientDisconnect: _answer_nobody},
    )
    app.router.redirect_slashes = False
    return app


class _Gateway:
    def __init__(self, orchestrator: Orchestrator, keep_alive: float) -> None:
        self._orchestrator = orchestrator
        self._keep_alive = keep_alive
        self._created = int(time.time())

    async def chat(self, request: HttpRequest) -> Answer:
        body = await _read(request, read_chat, self._orchestrator.info)
        tokens = await self._encoded(CHAT, self._orchestrator.encode_chat, body.messages)
        return self._answer(CHAT, [tokens], body.options)

    async def completion(self, request: HttpRequest) -> Answer:
        body = await _read(request, read_completion, self._orchestrator.info)
        prompts = []
        for prompt in body.prompts:
            text = isinstance(prompt, str)
            prompts.append(await self._encoded(COMPLETION, self._orchestrator.encode, prompt) if text else prompt)
        return self._answer(COMPLETION, prompts, body.options)

    async def models(self, request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["model"]
        if name != self._orchestrator.info.name:
            raise unknown_model(name)
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        info = self._orchestrator.info
        own = {"context_length": info.context_length, "weights_fingerprint": info.weights_fingerprint}
        return {"id": info.name, "object": "model", "created": self._created, "owned_by": "aerie", "x-aerie": own}

    async def _encoded(self, endpoint: Endpoint, encode: Callable[[Any], tuple[int, ...]], prompt: Any) -> Any:
        """Off the loop: a long prompt takes a while, and rounds of others must not wait."""
        try:
            return await asyncio.to_thread(encode, prompt)
        except AerieError as error:
            raise refused(error, endpoint.prompt) from None

    def _answer(self, endpoint: Endpoint, prompts: Sequence[Any], options: Options) -> Answer:
        info = self._orchestrator.info
        for tokens in prompts:
            _check_length(endpoint, len(tokens), info.context_length)
        return Answer(
            orchestrator=self._orchestrator,
            endpoint=endpoint,
            bodies=Bodies(endpoint, info, options.seed, options.metadata),
            requests=[r for tokens in prompts for r in options.requests(tokens, info.context_length)],
            prompt_tokens=sum(len(tokens) for tokens in prompts),
            stream=options.stream,
            include_usage=options.include_usage,
            keep_alive=self._keep_alive,
        )


def _check_length(endpoint: Endpoint, length: int, context_length: int) -> None:
    """As the verifier does, but before any of several choices has an answer under way."""
    if not length:
        raise refused(AerieError(Reason.PROMPT_EMPTY, "the prompt has no tokens"), endpoint.prompt)
    if length >= context_length:
        message = f"the prompt has {length} tokens; the context of {context_length} leaves no room"
        raise refused(AerieError(Reason.PROMPT_TOO_LONG, message), endpoint.prompt)


async def _read(request: HttpRequest, read: Callable[[dict[str, Any], TargetInfo], T], info: TargetInfo) -> T:
    """The body as ``read`` takes it, beside the event loop: millions of token ids take their time."""
    body = await _read_body(request)
    return await asyncio.to_thread(lambda: read(_parse(body), info))


async def _read_body(request: HttpRequest) -> bytes:
    """Raises HttpError (400 or 413)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(400, f"the content type must be application/json, not {kind!r}", "invalid_content_type")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_BYTES:
        _too_large()
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES:
            _too_large()
    return bytes(body)


def _parse(body: bytes) -> dict[str, Any]:
    """The body, an object. Raises HttpError (400)."""
    try:
        value = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise HttpError(400, "the body is not JSON", "invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object", "invalid_json")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _too_large() -> NoReturn:
    raise HttpError(413, f"the body is larger than {BODY_BYTES} bytes", "body_too_large")


async def _answer_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.response()


async def _answer_status(request: HttpRequest, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.scope['path']}"
    message, code = f"{where}: {error.detail}", error.detail.lower().replace(" ", "_")
    return HttpError(error.status_code, message, code, headers=error.headers).response()


async def _answer_nobody(request: HttpRequest, error: Exception) -> Response:
    """The client left while it sent its body."""
    return Response(status_code=400)


class _Guard:
    """Lets requests through that carry a key."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and not self._knows(HttpRequest(scope).headers.get("authorization", "")):
            headers = {"WWW-Authenticate": "Bearer"}
            error = HttpError(401, "the API key is missing or wrong", "invalid_api_key", headers=headers)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        key = given.strip().encode("latin-1")  # as the bytes came
        # All of them, in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class _Incidents:
    """Faults of ours: a number for the client, what happened for the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sender(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, sender)
        except Exception as error:
            failure = internal(log_incident(log, f"{scope.get('method')} {scope.get('path')} failed", error))
            if not started:  # else the server cuts the connection, and the client knows
                await failure.response()(scope, receive, send)
