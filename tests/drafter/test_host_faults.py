"""Streams, long prompts and failures of the drafter host."""

import asyncio
import threading
from typing import Any

import pytest

from services.drafter.eagle3.model import Eagle3Drafter
from services.drafter.host import Closed, DrafterHost
from services.runtime.device import Priority, device_thread
from services.speculation.errors import Reason
from services.speculation.messages import Drafted, FromDrafter, OpenDraft, PortError
from tests.drafter.eagle3 import checkpoints
from tests.drafter.test_host import (
    DESIGN,
    Stream,
    assert_is_oracle_tree,
    draft,
    drafter,
    observed,
    opened,
    run,
    settle,
)

__all__ = ["drafter"]


def refused(answer: FromDrafter) -> PortError:
    assert isinstance(answer, PortError)
    return answer


class BusyDevice:
    """Keeps the device until ``release``, so that what is sent meanwhile waits together."""

    def __init__(self) -> None:
        event = threading.Event()
        self.release = event.set
        device_thread().submit(lambda: event.wait(20), Priority.DRAFT)


def test_the_end_of_a_refused_stream_leaves_the_living_one(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 6)

    async def scenario(host: DrafterHost) -> None:
        living, late = Stream(host), Stream(host)
        living.send(opened(), observed(features, tokens, 0, 6))
        assert isinstance(await living.ask(draft(6)), Drafted)
        error = refused(await late.ask(opened()))
        assert (error.reason, error.expected) == (Reason.STALE_ROUND, (0, 0, 7))
        assert refused(await late.ask(draft(6))).reason is Reason.SESSION_UNKNOWN
        host.post(Closed("s", late.reply))
        assert_is_oracle_tree(await living.ask(draft(6, 1)), features, tokens, 6)
        host.post(Closed("s", living.reply))
        await settle(host)
        assert host.sessions == {}

    run(drafter, scenario)


def test_a_stale_draft_is_told_what_is_expected(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 6)

    async def scenario(host: DrafterHost) -> None:
        stream = Stream(host)
        stream.send(opened(), observed(features, tokens, 0, 6))
        await stream.ask(draft(6, round=4))
        error = refused(await stream.ask(draft(3, round=2)))
        assert (error.reason, error.expected) == (Reason.STALE_ROUND, (0, 4, 7))

    run(drafter, scenario)


def test_a_long_prompt_is_read_in_slices_behind_the_verifier_and_then_drafted_for(
    drafter: Eagle3Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 150)
    order: list[Any] = []

    async def scenario(host: DrafterHost) -> None:
        observe, grow = host._observe_rows, host._grow

        def spy_observe(state: Any, ids: Any, rows: Any) -> None:
            order.append(len(ids))
            device_thread().submit(lambda: order.append("verify"), Priority.VERIFY)
            observe(state, ids, rows)

        def spy_grow(*arguments: Any) -> Any:
            order.append("grow")
            return grow(*arguments)

        monkeypatch.setattr(host, "_observe_rows", spy_observe)
        monkeypatch.setattr(host, "_grow", spy_grow)
        stream, device = Stream(host), BusyDevice()
        stream.send(opened(), observed(features, tokens, 0, 70), observed(features, tokens, 70, 140))
        stream.send(observed(features, tokens, 140, 150), draft(150))
        await host._mailbox.join()
        device_thread().submit(lambda: order.append("verify"), Priority.VERIFY)
        device.release()
        answer = await stream.answers.get()
        assert_is_oracle_tree(answer, features, tokens, 150)
        await settle(host)
        # Each slice lets the verifier in; only the few rows after the last one are read together with the draft.
        assert order[:4] == ["verify", 70, "verify", 70]
        assert [step for step in order if step != "verify"] == [70, 70, 10, "grow"]

    run(drafter, scenario)


def test_a_failing_slice_answers_the_draft_that_waits_for_it(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 80)

    async def scenario(host: DrafterHost) -> None:
        stream, device = Stream(host), BusyDevice()
        stream.send(opened(), observed(features, tokens, 5, 80), draft(80))
        await host._mailbox.join()
        device.release()
        assert refused(await stream.answers.get()).reason is Reason.FEATURE_GAP
        await settle(host)
        assert stream.answers.empty()

    run(drafter, scenario)


def test_what_a_closed_session_asked_for_is_not_done(drafter: Eagle3Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 80)

    async def scenario(host: DrafterHost) -> None:
        monkeypatch.setattr(host, "_observe_rows", lambda *arguments: pytest.fail("was run"))
        stream, device = Stream(host), BusyDevice()
        stream.send(opened(), observed(features, tokens, 0, 80), draft(80))
        host.post(Closed("s", stream.reply))
        await host._mailbox.join()
        device.release()
        await settle(host)
        assert stream.answers.empty()

    run(drafter, scenario)


def test_a_malformed_message_does_not_end_the_host(drafter: Eagle3Drafter) -> None:
    features, tokens = checkpoints.random_rows(DESIGN, 6)

    async def scenario(host: DrafterHost) -> None:
        good, bad = Stream(host), Stream(host)
        good.send(opened(), observed(features, tokens, 0, 6))
        assert refused(await bad.ask(OpenDraft([], 0, None, 0))).reason is Reason.INTERNAL  # type: ignore[arg-type]
        assert refused(await bad.ask(None)).reason is Reason.INTERNAL  # type: ignore[arg-type]
        host.post(Closed([], bad.reply))  # type: ignore[arg-type]
        assert_is_oracle_tree(await good.ask(draft(6)), features, tokens, 6)

    run(drafter, scenario)


def test_sessions_end_with_their_host(drafter: Eagle3Drafter) -> None:
    async def scenario(host: DrafterHost) -> None:
        stream = Stream(host)
        stream.send(opened())
        await settle(host)
        await host.stop()
        await asyncio.sleep(0)
        assert host.sessions == {}

    run(drafter, scenario)
