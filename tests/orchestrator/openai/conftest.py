"""A tiny target behind the real gateway, on a real socket; the official client and plain sockets ask it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest

from services.bench.drafters import RandomDrafter
from services.embedded import Engine
from services.orchestrator.generation import Chunk, Done
from services.orchestrator.openai.app import build_app
from services.orchestrator.openai.server import HttpServer
from services.orchestrator.service import Request
from services.speculation.messages import DrafterInfo, TokenLogProbs
from tests.tiny import VOCAB_SIZE, write_tiny_llama

WAIT_SECONDS = 10.0
Answered = tuple[int, Any, http.client.HTTPMessage]


class KnownDrafter(RandomDrafter):
    """Proposes a chain of a sequence that the test knows: rounds accept several tokens at once.

    Attributes:
        known: Prompt and continuation.
    """

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.info = DrafterInfo("known", "known", (0,), None, 0)
        self.known: tuple[int, ...] = ()

    def observe(self, session, tokens, features) -> None:
        super().observe(session, tokens, features)
        session.last = mx.array([[float(session.length + 1)]])  # the position that comes next

    def expand(self, session, frontier) -> mx.array:
        return frontier.hidden + 1

    def top_children(self, hidden: mx.array, k: int) -> tuple[mx.array, mx.array]:
        positions = np.array(hidden).reshape(-1).astype(int)
        right = [self.known[p] if p < len(self.known) else 0 for p in positions]
        ids = [[token, *(t for t in range(k) if t != token)][:k] for token in right]
        scores = np.tile(np.array([-0.01, *(-20.0 - i for i in range(k - 1))], np.float32), (len(right), 1))
        return mx.array(scores), mx.array(np.array(ids, np.int32))


@dataclass
class Straight:
    """What a request gives without HTTP."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    done: Done | None = None

    @property
    def reason(self) -> str:
        assert self.done
        return self.done.finish_reason


class Tiny:
    """The engine, and the two drafters that it hosts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.orchestrator = engine.orchestrator
        self.info = engine.info
        self.known = KnownDrafter()
        engine.add_drafter(RandomDrafter(engine.info.vocab_size))
        engine.add_drafter(self.known)

    def call(self, coroutine: Any) -> Any:
        """Run on the engine's loop, where the server lives too."""
        return self.engine._call(coroutine)

    def straight(self, request: Request) -> Straight:
        async def collect() -> Straight:
            out = Straight()
            async for item in self.orchestrator.generate(request):
                if isinstance(item, Chunk):
                    out.text += item.text
                    out.tokens += item.tokens
                    out.log_probs += item.log_probs
                    out.rounds.append(len(item.tokens))
                else:
                    out.done = item
            return out

        return self.call(collect())

    def sessions(self) -> int:
        """Sessions that hold something, on all services."""
        engine = self.engine
        return len(engine.verifier.sessions) + sum(len(drafter.sessions) for drafter in engine.drafters)

    @contextlib.contextmanager
    def busy_device(self) -> Iterator[None]:
        """Nothing runs on the device inside: what is asked of it waits."""
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            leave.wait(WAIT_SECONDS)

        held = self.engine.device.submit(hold)
        assert entered.wait(WAIT_SECONDS)
        try:
            yield
        finally:
            leave.set()
            held.result()


def wait_until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.002)


class Gateway:
    """A running server, and ways to ask it."""

    def __init__(self, server: HttpServer, key: str | None) -> None:
        self.server = server
        host, _, port = server.address.rpartition(":")
        self.place = (host, int(port))
        self.client = openai.OpenAI(base_url=f"http://{server.address}/v1", api_key=key or "-", max_retries=0)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answered:
        """Status, JSON and headers of a POST; ``body`` is JSON unless it is bytes."""
        return self.ask("POST", path, body, {"Content-Type": "application/json", **(headers or {})})

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answered:
        connection = http.client.HTTPConnection(*self.place, timeout=WAIT_SECONDS)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), answer.headers
        finally:
            connection.close()

    def chunked(self, path: str, pieces: list[bytes]) -> Answered:
        """POST a body whose length is not known beforehand."""
        connection = http.client.HTTPConnection(*self.place, timeout=WAIT_SECONDS)
        try:
            headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
            connection.request("POST", path, iter(pieces), headers, encode_chunked=True)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), answer.headers
        finally:
            connection.close()

    def open(self, path: str, body: Any) -> socket.socket:
        """Send a POST and leave the answer to be read."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(self.place, WAIT_SECONDS)
        connection.sendall(head.encode() + data)
        return connection

    def events(self, path: str, body: Any) -> list[str]:
        """Lines of an event stream, as they come over the wire."""
        connection = http.client.HTTPConnection(*self.place, timeout=WAIT_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            return [block for block in answer.read().decode().split("\n\n") if block]
        finally:
            connection.close()


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("openai"), num_hidden_layers=2)
    with Engine.load(str(folder), "off") as engine:
        yield Tiny(engine)


@pytest.fixture(scope="package")
def serve(tiny: Tiny) -> Iterator[Callable[..., Gateway]]:
    """Starts servers in front of the tiny target; arguments are ``build_app``'s."""
    servers = []

    def start(address: str = "127.0.0.1:0", **options: Any) -> Gateway:
        async def begin() -> HttpServer:
            server = HttpServer(build_app(tiny.orchestrator, **options))
            await server.start(address)
            return server

        servers.append(tiny.call(begin()))
        return Gateway(servers[-1], next(iter(options.get("keys", ())), None))

    yield start
    for server in servers:
        tiny.call(server.drain(0))


@pytest.fixture(scope="package")
def gateway(serve: Callable[..., Gateway]) -> Gateway:
    return serve()


@pytest.fixture(autouse=True)
def _nothing_is_left(tiny: Tiny) -> Iterator[None]:
    """Whatever a test does, its sessions are freed."""
    yield
    wait_until(lambda: not tiny.sessions(), "all sessions are freed")
