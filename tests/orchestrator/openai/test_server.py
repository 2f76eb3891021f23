"""The server around the routes: keys, health, addresses, TLS, logs and draining."""

import asyncio
import http.client
import json
import logging
import signal
import socket
import ssl
import threading

import httpx2 as httpx
import openai
import pytest
import trustme
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.orchestrator.openai.app import build_app
from services.orchestrator.openai.server import HttpServer
from services.speculation.errors import AerieError, Reason
from tests.orchestrator.openai.conftest import WAIT_SECONDS, wait_until
from tests.orchestrator.openai.test_streaming import Reader

COMPLETION = "/v1/completions"


def body(tiny, **fields):
    return {"model": tiny.info.name, "prompt": "the north", "temperature": 0, "max_tokens": 4, **fields}


def test_keys_guard_everything_under_v1(serve, tiny):
    async def metrics(request):
        return PlainTextResponse("{}")

    guarded = serve(keys=frozenset({"first", "sécond"}), routes=[Route("/metrics", metrics)])
    for key in ("Bearer first", "bearer first", "Bearer sécond"):
        headers = {"Authorization": key.encode("utf-8").decode("latin-1")}
        assert guarded.post(COMPLETION, body(tiny), headers)[0] == 200
    wrong = [{}, *({"Authorization": a} for a in ("Bearer", "Bearer ", "Bearer firs", "first", "Basic first"))]
    for headers in wrong:
        for method, path in (("POST", COMPLETION), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
            status, answer, got = guarded.ask(method, path, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert got["www-authenticate"] == "Bearer"
    assert guarded.ask("GET", "/health")[0] == 200
    assert guarded.ask("GET", "/metrics")[0] == 200
    with pytest.raises(openai.AuthenticationError):
        guarded.client.with_options(api_key="other").models.list()


def test_health_says_whether_the_service_is_ready(serve):
    ready = threading.Event()
    gateway = serve(ready=ready.is_set)
    assert gateway.ask("GET", "/health")[:2] == (503, {"status": "unavailable"})
    ready.set()
    assert gateway.ask("GET", "/health")[:2] == (200, {"status": "ok"})


def test_routes_that_are_not_there(gateway):
    for method, path, status, code in (
        ("GET", "/v1/embeddings", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ):
        got, answer, headers = gateway.ask(method, path)
        assert (got, answer["error"]["code"]) == (status, code)
        assert answer["error"]["type"] == "invalid_request_error"
        if status == 405:
            assert headers["allow"]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_SECONDS))


async def plain(request):
    return PlainTextResponse('"here"')


PLAIN = Starlette(routes=[Route("/", plain)])


def test_a_unix_socket_is_served_and_removed(tmp_path):
    path = tmp_path / "s"

    async def play():
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(path))
        stale.close()
        server = HttpServer(PLAIN)
        await server.start(f"unix:{path}")
        assert server.address == f"unix:{path}"
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.get("http://x/")).json() == "here"
        with pytest.raises(AerieError, match="a server listens there already") as error:
            await HttpServer(PLAIN).start(f"unix:{path}")
        assert error.value.reason == Reason.INVALID_ARGUMENT
        await server.drain(5)
        assert not path.exists()

    run(play())


def test_addresses_that_are_none(tmp_path):
    async def play():
        first = HttpServer(PLAIN)
        await first.start("localhost:0")
        host, _, port = first.address.rpartition(":")
        assert host == "localhost"
        assert int(port) > 0
        for address in (first.address, "localhost", "localhost:x", "localhost:99999", f"unix:{tmp_path}/no/s"):
            with pytest.raises(AerieError) as error:
                await HttpServer(PLAIN).start(address)
            assert error.value.reason == Reason.INVALID_ARGUMENT
        await first.drain(5)
        await first.drain(5)  # a second time changes nothing

    run(play())


def test_signals_stay_the_callers():
    async def play():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        server = HttpServer(PLAIN)
        await server.start("127.0.0.1:0")
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        await server.drain(5)

    run(play())


def test_tls(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)

    async def play():
        server = HttpServer(PLAIN, certificate, key)
        await server.start("localhost:0")
        async with httpx.AsyncClient(verify=trusted) as client:
            assert (await client.get(f"https://{server.address}/")).json() == "here"
        await server.drain(5)
        # One that demands certificates of its clients answers none who has none.
        ca = tmp_path / "ca.pem"
        authority.cert_pem.write_to_path(ca)
        server = HttpServer(PLAIN, certificate, key, ca)
        await server.start("localhost:0")
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(verify=trusted) as client:
                await client.get(f"https://{server.address}/")
        known = ssl.create_default_context()
        authority.configure_trust(known)
        authority.issue_cert("client.example").configure_cert(known)
        async with httpx.AsyncClient(verify=known) as client:
            assert (await client.get(f"https://{server.address}/")).json() == "here"
        await server.drain(5)
        (tmp_path / "bad").write_text("no key")
        with pytest.raises(AerieError, match="certificate"):
            await HttpServer(PLAIN, certificate, tmp_path / "bad").start("localhost:0")
        with pytest.raises(AerieError, match="certificate"):
            await HttpServer(PLAIN, tmp_path / "none", key).start("localhost:0")

    run(play())


class Kept(logging.Handler):
    """Where a logger's records arrive; caplog would also take those that do not go on to the root."""

    def __init__(self, name):
        super().__init__()
        self.records = []
        self._logger = logging.getLogger(name)

    def emit(self, record):
        self.records.append((record.name, record.getMessage()))

    def __enter__(self):
        self._logger.addHandler(self)
        return self.records

    def __exit__(self, *_):
        self._logger.removeHandler(self)


def test_the_servers_own_words_are_logged_as_ours(gateway, caplog, capfd):
    with caplog.at_level(logging.INFO), Kept(None) as everywhere, Kept("services") as ours:
        with socket.create_connection(gateway.place, WAIT_SECONDS) as connection:
            connection.sendall(b"what is this\r\n\r\n")
            assert b" 400 " in connection.recv(1000)
        gateway.ask("GET", "/health")  # no line for each request
    assert everywhere == ours == [("services.orchestrator.openai.server", "Invalid HTTP request received.")]
    assert capfd.readouterr() == ("", "")


def drained(tiny, server, deadline, cut_off=lambda: None):
    """Start to drain; returns what to wait with."""
    done = threading.Event()

    async def drain():
        await server.drain(deadline, cut_off)
        done.set()

    threading.Thread(target=lambda: tiny.call(drain()), daemon=True).start()
    return done


def refuses(place):
    try:
        socket.create_connection(place, 1).close()
    except OSError:
        return True
    return False


def test_draining_lets_what_runs_finish(serve, tiny):
    gateway = serve()
    idle = http.client.HTTPConnection(*gateway.place)
    idle.request("GET", "/health")
    assert idle.getresponse().read()
    with tiny.busy_device():
        running = gateway.open(COMPLETION, body(tiny))
        wait_until(lambda: tiny.engine.verifier.sessions, "the session is open")
        done = drained(tiny, gateway.server, WAIT_SECONDS)
        wait_until(lambda: refuses(gateway.place), "nobody is let in")
        assert idle.sock.recv(1) == b""  # connections without a request are closed
        assert not done.is_set()
    with running:
        answer = Reader(running).rest()  # to its end: the server closes the connection
    assert json.loads(answer.partition("\r\n\r\n")[2])["usage"]["completion_tokens"] == 4
    assert done.wait(WAIT_SECONDS)
    idle.close()


def test_draining_cuts_what_does_not_finish(serve, tiny, caplog):
    gateway = serve()
    with tiny.busy_device():
        running = [gateway.open(COMPLETION, body(tiny, stream=stream)) for stream in (True, False)]
        wait_until(lambda: len(tiny.engine.verifier.sessions) == 2, "the sessions are open")
        assert drained(tiny, gateway.server, 0.05).wait(WAIT_SECONDS)
        assert not tiny.engine.verifier.sessions
    for connection in running:
        with connection, pytest.raises((ConnectionError, AssertionError)):
            Reader(connection).until("data")
    assert not caplog.records


def test_what_draining_cuts_off_is_told(serve, tiny, monkeypatch):
    """An error event ends a stream that has begun; a request without an answer gets 503."""
    monkeypatch.setattr(tiny.orchestrator, "_cut_off", None)  # others use it afterwards
    gateway = serve(keep_alive=0.1)
    with tiny.busy_device():
        streaming, whole = (gateway.open(COMPLETION, body(tiny, stream=stream)) for stream in (True, False))
        events = Reader(streaming)
        events.until(": keep-alive")
        wait_until(lambda: len(tiny.engine.verifier.sessions) == 2, "the sessions are open")
        assert drained(tiny, gateway.server, 0.05, lambda: tiny.orchestrator.cut_off("no more")).wait(WAIT_SECONDS)
    with streaming, whole:
        answers = events.rest(), Reader(whole).rest()
    assert '"message":"no more","type":"server_error"' in answers[0]
    assert "[DONE]" not in answers[0]
    assert answers[1].startswith("HTTP/1.1 503 ")
    assert '"message":"no more"' in answers[1]


def test_the_apps_of_two_gateways_share_an_orchestrator(tiny):
    """Nothing is global: an app can be built again."""
    assert build_app(tiny.orchestrator) is not build_app(tiny.orchestrator)
