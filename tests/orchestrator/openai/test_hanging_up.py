"""Clients that hang up: their sessions end at once, and nobody else notices."""

import socket
import struct

import pytest

from services.orchestrator.service import Request
from tests.orchestrator.openai.conftest import wait_until
from tests.orchestrator.openai.test_streaming import Reader

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "the rivers of the north"
LONG = 1000


def body(tiny, **fields):
    options = {"max_tokens": LONG, "x-aerie-ignore-eos": True, "temperature": 0}
    return {"model": tiny.info.name, "prompt": PROMPT, **options, **fields}


def sessions_of(tiny):
    return list(tiny.engine.verifier.sessions.values())


def connections_of(gateway):
    return gateway.server._server.server_state.connections


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_frees_the_sessions_within_a_round(gateway, tiny, stream, n):
    """Fault 1: also an answer in one body, which has nothing to write before its end."""
    connection = gateway.open(COMPLETION, body(tiny, stream=stream, n=n))
    wait_until(lambda: [s.round > 2 for s in sessions_of(tiny)] == [True] * n, "rounds run")
    sessions = sessions_of(tiny)
    with tiny.busy_device():
        rounds = [session.round for session in sessions]
        connection.close()
        wait_until(lambda: not tiny.engine.verifier.sessions, "the verifier has let go")
    wait_until(lambda: not tiny.sessions(), "both services have let go")
    assert all(session.closed for session in sessions)
    assert all(session.round <= before + 1 for session, before in zip(sessions, rounds, strict=True))
    assert all(len(session.tokens) < LONG / 2 for session in sessions)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_during_the_prefill(gateway, tiny, stream):
    with tiny.busy_device():
        connection = gateway.open(COMPLETION, body(tiny, stream=stream))
        wait_until(lambda: sessions_of(tiny), "the session is open")
        connection.close()
        wait_until(lambda: not tiny.engine.verifier.sessions, "the verifier has let go")


def test_hanging_up_before_the_body_is_there(gateway, tiny, caplog):
    connection = socket.create_connection(gateway.place)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    connection.sendall(head.encode())
    wait_until(lambda: any(c.cycle for c in connections_of(gateway)), "the request is known")
    connection.close()
    wait_until(lambda: not gateway.server._server.server_state.tasks, "the request is over")
    assert not caplog.records


def test_the_official_client_leaves_a_stream(gateway, tiny):
    with gateway.client.completions.create(
        model=tiny.info.name, prompt=PROMPT, max_tokens=LONG, stream=True, extra_body={"x-aerie-ignore-eos": True}
    ) as stream:
        next(iter(stream))
        (session,) = sessions_of(tiny)
    wait_until(lambda: not tiny.sessions(), "the session is freed")
    assert len(session.tokens) < LONG


def test_fifty_clients_are_killed_and_the_others_do_not_notice(gateway, tiny, caplog):
    """Fault 6."""
    tokens = tiny.orchestrator.encode(PROMPT)
    want = tiny.straight(Request(tokens, 100, ignore_eos=True, drafter="off"))
    neighbour = gateway.client.completions.create(
        model=tiny.info.name,
        prompt=PROMPT,
        max_tokens=100,
        temperature=0,
        stream=True,
        extra_body={"x-aerie-ignore-eos": True, "x-aerie-drafter": "off"},
    )
    pieces = [next(iter(neighbour)).choices[0].text]
    options = {"stream": True, "x-aerie-drafter": "off"}
    victims = [gateway.open(COMPLETION, body(tiny, **options)) for _ in range(50)]
    for victim in victims:
        Reader(victim).until("data: {")
    for victim in victims:
        # No goodbye: the connection is reset.
        victim.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        victim.close()
    pieces += [part.choices[0].text for part in neighbour]
    assert "".join(pieces) == want.text
    wait_until(lambda: not tiny.sessions(), "all sessions are freed")
    assert gateway.ask("GET", "/health")[:2] == (200, {"status": "ok"})
    answer = gateway.client.completions.create(model=tiny.info.name, prompt=PROMPT, max_tokens=4, temperature=0)
    assert answer.usage.completion_tokens == 4
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
