"""One line a record, as JSON or as text, with the session that it is about."""

import asyncio
import io
import json
import logging

import pytest
from structlog.contextvars import bound_contextvars

from services.runtime.logs import configure_logging


@pytest.fixture
def captured():
    """A stream that ``configure_logging`` writes to; what it sets is put back."""
    root, ours = logging.getLogger(), logging.getLogger("services")
    before = (list(root.handlers), root.level, list(ours.handlers), ours.level)
    yield io.StringIO()
    root.handlers[:], root.level, ours.handlers[:] = before[0], before[1], before[2]
    ours.setLevel(before[3])


def test_json_lines_have_their_fields(captured):
    configure_logging("verifier", "json", "info", captured)
    log = logging.getLogger("services.somewhere")

    async def session(name):
        with bound_contextvars(session=name):
            await asyncio.sleep(0)
            log.info("round %d\nof many", 3)

    async def both():
        await asyncio.gather(session("a"), session("b"))

    asyncio.run(both())
    log.debug("too small")
    logging.getLogger("elsewhere").info("not ours")
    logging.getLogger("elsewhere").warning("not ours, but a warning")
    try:
        raise ValueError("secret")
    except ValueError:
        log.exception("it failed")
    lines = [json.loads(line) for line in captured.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["round 3\nof many"] * 2 + ["not ours, but a warning", "it failed"]
    assert {line.get("session") for line in lines[:2]} == {"a", "b"}
    assert "session" not in lines[2]
    assert {line["service"] for line in lines} == {"verifier"}
    assert lines[0]["level"], lines[0]["logger"] == ("info", "services.somewhere")
    assert "ValueError: secret" in lines[3]["exception"]
    assert lines[0]["timestamp"].endswith("Z")


def test_text_is_for_people(captured):
    configure_logging("drafter", "text", "warning", captured)
    logging.getLogger("services.x").info("quiet")
    with bound_contextvars(session="s1"):
        logging.getLogger("services.x").warning("plain decoding goes on")
    (line,) = captured.getvalue().splitlines()
    for part in ("warning", "plain decoding goes on", "session=s1", "service=drafter"):
        assert part in line
