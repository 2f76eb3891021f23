"""Lost, full, failing and hanging drafters: never another token, never a failed session without a clear error."""

import threading
import time

import pytest

from services.bench.drafters import RandomDrafter
from services.drafter import host as drafter_host
from services.embedded import AerieError, Done, Reason
from services.orchestrator.service import DEFAULT_LIMITS
from services.speculation.messages import DrafterInfo

PROMPT = (11, 42, 7, 199, 250, 3)


def both_sides(engine):
    return len(engine.verifier.sessions) + sum(len(host.sessions) for host in engine.drafters)


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def plain_tokens(engine, count=12):
    return engine.generate(PROMPT, max_tokens=count, drafter="off").token_ids


class Faulty(RandomDrafter):
    """Calls ``fault`` at one of its methods, from the n-th call on."""

    def __init__(self, vocab_size, method, fault, good_calls=0):
        super().__init__(vocab_size)
        self.info = self.info.__class__("faulty", "faulty", (0,), None, 0)
        work = getattr(self, method)
        calls = iter(range(10**9))

        def call(*arguments):
            if next(calls) >= good_calls:
                fault()
            return work(*arguments)

        setattr(self, method, call)


def raise_error():
    raise RuntimeError("secret detail")


def raise_exit():
    raise SystemExit("secret detail")


@pytest.mark.parametrize("fault", [raise_error, raise_exit])
@pytest.mark.parametrize("method", ["new_session", "observe", "expand", "top_children"])
def test_whatever_a_drafter_raises_the_session_decodes_plainly(tiny_engine, method, fault):
    plain = plain_tokens(tiny_engine)
    tiny_engine.add_drafter(Faulty(tiny_engine.info.vocab_size, method, fault))
    result = tiny_engine.generate(PROMPT, max_tokens=12, drafter="faulty")
    assert result.token_ids == plain
    assert "INTERNAL: incident" in result.drafter_lost
    assert "secret" not in result.drafter_lost
    # The host lives, and so do its other sessions.
    assert {host.info.name for host in tiny_engine.drafters} == {"faulty", "random"}
    wait_until(lambda: both_sides(tiny_engine) == 0)


def test_a_drafter_without_room_is_lost_and_a_verifier_without_room_refuses(tiny_engine):
    plain = plain_tokens(tiny_engine)
    (host,) = tiny_engine.drafters
    host._capacity = 0
    result = tiny_engine.generate(PROMPT, max_tokens=12, drafter="random")
    assert (result.token_ids, result.stats.drafted_rounds) == (plain, 0)
    assert "waiting" in result.drafter_lost
    tiny_engine.verifier._capacity = 0
    with pytest.raises(AerieError, match="0 messages waiting") as caught:
        tiny_engine.generate(PROMPT, max_tokens=12)
    assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
    tiny_engine.verifier._capacity = 1024
    assert plain_tokens(tiny_engine) == plain
    wait_until(lambda: both_sides(tiny_engine) == 0)


def test_a_full_mailbox_cannot_keep_a_lease(tiny_engine):
    """The end of a stream comes through when nothing else does."""
    stream = tiny_engine.stream(PROMPT, max_tokens=900, ignore_eos=True, drafter="random")
    next(stream)
    for host in (tiny_engine.verifier, *tiny_engine.drafters):
        host._capacity = 0
    stream.close()
    wait_until(lambda: both_sides(tiny_engine) == 0)
    assert tiny_engine.verifier.budget.leased == 0


def test_more_sessions_than_a_mailbox_holds_all_run(tiny_engine):
    tiny_engine.verifier._capacity = DEFAULT_LIMITS.sessions
    first = plain_tokens(tiny_engine, 1)
    requests = [
        tiny_engine.request(PROMPT, max_tokens=1, drafter="off") for _ in range(4 * DEFAULT_LIMITS.sessions + 100)
    ]
    assert {result.token_ids for result in tiny_engine.run_all(requests)} == {first}


def test_a_dead_drafter_is_not_offered(tiny_engine):
    plain = plain_tokens(tiny_engine, 60)
    (host,) = tiny_engine.drafters
    stream = tiny_engine.stream(PROMPT, max_tokens=60, drafter="random")
    chunks = [next(stream)]
    tiny_engine._call(host.stop())
    *rest, done = stream
    assert isinstance(done, Done)
    assert tuple(t for chunk in (*chunks, *rest) for t in chunk.tokens) == plain
    assert "drafter random has stopped" in done.drafter_lost
    assert tiny_engine.generate(PROMPT, max_tokens=60).token_ids == plain  # auto
    with pytest.raises(AerieError) as caught:
        tiny_engine.generate(PROMPT, drafter="random")
    assert caught.value.reason is Reason.DRAFTER_UNAVAILABLE
    tiny_engine.add_drafter(RandomDrafter(tiny_engine.info.vocab_size))
    assert tiny_engine.generate(PROMPT, max_tokens=60, drafter="random").drafter_lost is None


def test_a_hanging_drafter_ends_sessions_clearly_until_the_device_is_back(tiny_engine, monkeypatch):
    plain = plain_tokens(tiny_engine)
    monkeypatch.setattr(drafter_host, "HANG_SECONDS", 0.2)
    release = threading.Event()
    tiny_engine.add_drafter(Faulty(tiny_engine.info.vocab_size, "top_children", lambda: release.wait(20), 1))
    try:
        began = time.monotonic()
        bystander = tiny_engine.stream(PROMPT, max_tokens=900, ignore_eos=True, drafter="off")
        next(bystander)
        for attempt in (lambda: tiny_engine.generate(PROMPT, drafter="faulty"), lambda: list(bystander)):
            with pytest.raises(AerieError, match="drafter faulty does not answer") as caught:
                attempt()
            assert caught.value.reason is Reason.INTERNAL
        with pytest.raises(AerieError, match="drafter faulty does not answer") as caught:
            tiny_engine.generate(PROMPT, drafter="off")
        assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
        assert time.monotonic() - began < 5
        assert [host.info.name for host in tiny_engine.drafters] == ["random"]
    finally:
        release.set()
    wait_until(lambda: tiny_engine.verifier.blocked is None)
    assert plain_tokens(tiny_engine) == plain
    wait_until(lambda: both_sides(tiny_engine) == 0)


def test_a_slow_but_finite_job_is_no_hang(tiny_engine, monkeypatch):
    monkeypatch.setattr(drafter_host, "HANG_SECONDS", 5.0)
    tiny_engine.add_drafter(Faulty(tiny_engine.info.vocab_size, "observe", lambda: time.sleep(0.05)))
    assert tiny_engine.generate(PROMPT, max_tokens=8, drafter="faulty").drafter_lost is None


@pytest.mark.parametrize("taps", [(3,), (-1,), ("last",), (1.0,)])
def test_drafters_that_do_not_fit_or_whose_name_is_taken_are_refused(tiny_engine, taps):
    drafter = RandomDrafter(tiny_engine.info.vocab_size)
    with pytest.raises(AerieError, match="'random' already") as caught:
        tiny_engine.add_drafter(drafter)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    drafter.info = drafter.info.__class__("other", "other", taps, None, 0)
    with pytest.raises(AerieError, match="'other' reads tap") as caught:
        tiny_engine.add_drafter(drafter)
    assert caught.value.reason is Reason.CHECKPOINT_INCOMPATIBLE
    assert len(tiny_engine.drafters) == 1


@pytest.mark.parametrize(
    "info",
    [
        DrafterInfo(5, "t", (0,), None, 0),
        DrafterInfo("t", None, (0,), None, 0),
        DrafterInfo("t", "t", [0], None, 0),
        DrafterInfo("t", "t", None, None, 0),
        DrafterInfo("t", "t", (0,), b"f", 0),
        DrafterInfo("off", "t", (0,), None, 0),
        DrafterInfo("auto", "t", (0,), None, 0),
        DrafterInfo("", "t", (0,), None, 0),
    ],
    ids=str,
)
def test_drafters_that_say_nonsense_of_themselves_are_refused(tiny_engine, info):
    drafter = RandomDrafter(tiny_engine.info.vocab_size)
    drafter.info = info
    with pytest.raises(AerieError) as caught:
        tiny_engine.add_drafter(drafter)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert tiny_engine.generate(PROMPT, max_tokens=4).drafter_lost is None
