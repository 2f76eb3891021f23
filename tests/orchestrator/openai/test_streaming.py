"""Event streams as they come over the wire: signs of life, errors before and after the first byte."""

import json
import socket

import openai
import pytest

from services.orchestrator.openai.errors import refused
from services.orchestrator.service import Request
from services.speculation.errors import AerieError, Reason
from tests.orchestrator.openai.conftest import wait_until

COMPLETION = "/v1/completions"
PROMPT = "the rivers of the north"


def body(tiny, **fields):
    return {"model": tiny.info.name, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "stream": True, **fields}


@pytest.fixture(scope="module")
def impatient(serve):
    """A gateway whose streams show every 20 ms that they live."""
    return serve(keep_alive=0.02)


class Reader:
    """Lines of a response on a plain socket, chunk sizes included."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def until(self, text: str) -> str:
        """What comes up to the first line with ``text``."""
        seen = ""
        while line := self._file.readline().decode():
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"the response ended without {text!r}: {seen}")

    def rest(self) -> str:
        return self._file.read().decode()


def test_the_wire_has_one_json_an_event_and_ends_with_done(gateway, tiny):
    want = tiny.straight(Request(tiny.orchestrator.encode(PROMPT), 8))
    events = gateway.events(COMPLETION, body(tiny))
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-1])
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(part["choices"][0]["text"] for part in parts) == want.text
    assert "usage" not in parts[0]


def test_a_long_prefill_is_bridged_by_comments(impatient, tiny):
    want = tiny.straight(Request(tiny.orchestrator.encode(PROMPT), 8))
    with tiny.busy_device(), impatient.open(COMPLETION, body(tiny)) as connection:
        reader = Reader(connection)
        seen = reader.until(": keep-alive") + reader.until(": keep-alive")
        assert "HTTP/1.1 200" in seen
        assert "data:" not in seen
    # The official client passes over them.
    with tiny.busy_device():
        stream = impatient.client.completions.create(**body(tiny))
    assert "".join(part.choices[0].text for part in stream) == want.text


def test_errors_before_the_first_byte_are_statuses(gateway, tiny, monkeypatch):
    verifier = tiny.engine.verifier
    monkeypatch.setattr(verifier.budget, "limit", verifier.budget.leased)
    for stream in (True, False):
        status, answer, headers = gateway.post(COMPLETION, body(tiny, stream=stream))
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (
            429,
            "rate_limit_error",
            "resource_exhausted",
        )
        assert headers["retry-after"] == "1"


def test_errors_after_the_first_byte_are_events(gateway, impatient, tiny):
    asked = {"max_tokens": 900, "x-aerie-ignore-eos": True}
    with gateway.open(COMPLETION, body(tiny, **asked)) as connection:
        reader = Reader(connection)
        reader.until("data: {")
        with tiny.busy_device():
            tiny.call(fail(tiny))
        rest = reader.until("0\r\n")
    events = [line.removeprefix("data: ") for line in rest.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    assert "[DONE]" not in rest
    # A sign of life is a first byte, too; the official client raises what the event says.
    with tiny.busy_device():
        stream = impatient.client.completions.create(**body(tiny))
        tiny.call(fail(tiny))
    with pytest.raises(openai.APIError, match="the test says so"):
        list(stream)


async def fail(tiny):
    tiny.engine.verifier.fail_sessions("the test says so")


def test_one_choice_that_fails_ends_them_all(gateway, tiny):
    with tiny.busy_device():
        asked = {"n": 3, "stream": False, "x-aerie-ignore-eos": True}
        with gateway.open(COMPLETION, body(tiny, **asked)) as connection:
            wait_until(lambda: len(tiny.engine.verifier.sessions) == 3, "three sessions are open")
            tiny.call(fail_one(tiny))
            head = Reader(connection).until("\r\n")
    assert " 500 " in head


async def fail_one(tiny):
    sessions = tiny.engine.verifier.sessions
    kept = dict(list(sessions.items())[1:])
    for name in kept:
        del sessions[name]
    tiny.engine.verifier.fail_sessions("the test says so")
    sessions.update(kept)


@pytest.mark.parametrize("where", ["encode", "generate"])
@pytest.mark.parametrize("stream", [True, False])
def test_faults_of_ours_are_a_number_for_the_client(gateway, tiny, monkeypatch, caplog, where, stream):
    def fault(_):
        raise RuntimeError("a secret of ours")

    monkeypatch.setattr(tiny.orchestrator, where, fault)
    status, answer, _ = gateway.post(COMPLETION, body(tiny, stream=stream))
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal")
    incident = error["message"].removeprefix("the server failed: ")
    assert incident.startswith("incident ")
    assert "secret" not in json.dumps(answer)
    assert incident in caplog.text
    assert "a secret of ours" in caplog.text


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.INVALID_ARGUMENT, 400),
        (Reason.PROMPT_EMPTY, 400),
        (Reason.PROMPT_TOO_LONG, 400),
        (Reason.DRAFTER_UNAVAILABLE, 400),
        (Reason.RESOURCE_EXHAUSTED, 429),
        (Reason.SERVICE_UNAVAILABLE, 503),
        (Reason.ENGINE_CLOSED, 503),
        (Reason.INTERNAL, 500),
        (Reason.STALE_ROUND, 500),
    ],
)
def test_reasons_and_statuses(reason, status):
    error = refused(AerieError(reason, "a sentence"), "field")
    assert error.status == status
    assert error.body["error"]["message"] == "a sentence"
    assert error.body["error"]["param"] == ("field" if status == 400 else None)
    assert ("Retry-After" in error.headers) == (status in (429, 503))
