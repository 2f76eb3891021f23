"""The services as processes: the same tokens as in one process, whatever happens to a drafter, a client, a service."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from aerie.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from aerie.orchestrator.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from aerie.verifier.v1 import verifier_pb2, verifier_pb2_grpc

from services.client import Client
from services.embedded import Engine
from services.speculation.errors import AerieError, Reason
from services.wire.orchestrator import DoneMessage, read_drafters
from tests.processes import Services
from tests.tiny import write_tiny_llama

PROMPT = tuple(range(5, 25))
LONG = 500
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.3}


@pytest.fixture(scope="module")
def plain(tiny: str) -> Callable[..., tuple[int, ...]]:
    """What one process writes without a drafter."""
    known: dict[str, tuple[int, ...]] = {}
    with Engine.load(tiny, "off") as engine:

        def tokens(count: int, **options: object) -> tuple[int, ...]:
            key = f"{count} {options}"
            if key not in known:
                known[key] = engine.generate(PROMPT, max_tokens=count, ignore_eos=True, **options).token_ids
            return known[key]

        yield tokens


@pytest.fixture(scope="module")
def three(tiny: str, drafter: str) -> Iterator[Services]:
    """A verifier, a drafter and an orchestrator that nobody harms."""
    with Services(tiny, drafter) as services:
        started = [services.verifier(), services.drafter(), services.orchestrator()]
        for service in started:
            service.wait_ready()
        wait_for_drafters(services.socket("o"), 1)
        yield services


def wait_for_drafters(address: str, count: int, seconds: float = 30.0) -> None:
    until(lambda: sum(line.status is not None for line in drafters(address)) == count, seconds)


def drafters(address: str) -> list:
    with grpc.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        return read_drafters(stub.ListDrafters(orchestrator_pb2.ListDraftersRequest(), timeout=5))


def verifier_sessions(address: str) -> list:
    with grpc.insecure_channel(address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        return list(stub.ListSessions(verifier_pb2.ListSessionsRequest(), timeout=5).sessions)


def drafter_sessions(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        return stub.GetInfo(drafter_pb2.GetInfoRequest(), timeout=5).sessions


def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def stream(address: str, count: int = LONG, at: int = -1, act: Callable[[], None] = lambda: None, **options):
    """Tokens and the end of one generation; ``act`` is called once ``at`` tokens are there."""
    tokens: list[int] = []
    with Client(address) as client:
        for item in client.stream(PROMPT, max_tokens=count, ignore_eos=True, **options):
            if isinstance(item, DoneMessage):
                return tuple(tokens), item
            tokens += item.tokens
            if 0 <= at <= len(tokens):
                act()
                at = -1
    raise AssertionError("no end")


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_three_processes_write_what_one_does(three, plain, options):
    tokens, done = stream(three.socket("o"), 120, **options)
    assert tokens == plain(120, **options)
    assert done.drafter_lost is None
    assert done.stats["fallback_rounds"] <= 3  # until it is primed
    assert stream(three.socket("o"), 120, drafter="off", **options)[0] == tokens


def test_sessions_side_by_side_keep_apart(three, plain):
    results = {}

    def one(number: int) -> None:
        options = {"temperature": 0.8, "seed": number} if number % 2 else {}
        results[number] = stream(three.socket("o"), 60, **options)[0]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: plain(60, **({"temperature": 0.8, "seed": n} if n % 2 else {})) for n in range(8)}


def test_a_client_that_leaves_frees_every_tier(three):
    """By closing the stream, and by hanging up: fifty at once."""

    async def leave_all() -> None:
        async with grpc.aio.insecure_channel(three.socket("o")) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            request = orchestrator_pb2.GenerateRequest(
                tokens=orchestrator_pb2.TokenIds(ids=PROMPT), max_tokens=LONG, ignore_eos=True
            )
            calls = [stub.Generate(request) for _ in range(50)]
            await asyncio.gather(*(call.read() for call in calls))
            assert len(verifier_sessions(three.socket("v"))) == 50
            for call in calls[:25]:
                call.cancel()
            until(lambda: len(verifier_sessions(three.socket("v"))) <= 25)

    asyncio.run(leave_all())
    until(lambda: not verifier_sessions(three.socket("v")))
    until(lambda: not drafter_sessions(three.socket("d")))
    until(lambda: [line.sessions for line in drafters(three.socket("o"))] == [0])
    assert len(stream(three.socket("o"), 10)[0]) == 10


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drafter": "hass"}, Reason.DRAFTER_UNAVAILABLE),
        ({"max_tokens": 0}, Reason.INVALID_ARGUMENT),
        ({"temperature": -1.0}, Reason.INVALID_ARGUMENT),
        ({"tree_nodes": 1000}, Reason.INVALID_ARGUMENT),
        ({"stop": ("",)}, Reason.INVALID_ARGUMENT),
    ],
)
def test_refusals_have_their_reason_far_away_too(three, options, reason):
    with Client(three.socket("o")) as client, pytest.raises(AerieError) as refused:
        client.generate(PROMPT, **{"max_tokens": 4, **options})
    assert refused.value.reason is reason


def test_prompts_that_cannot_be_served_are_refused(three):
    with Client(three.socket("o")) as client:
        for prompt, reason in (
            ((), Reason.PROMPT_EMPTY),
            (tuple([7] * 1024), Reason.PROMPT_TOO_LONG),
            ((7, 10**6), Reason.INVALID_ARGUMENT),
        ):
            with pytest.raises(AerieError) as refused:
                client.generate(prompt, max_tokens=4)
            assert refused.value.reason is reason
        # Up to exactly the end of the context.
        result = client.generate(tuple([7] * 1000), max_tokens=500, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (24, "length")


def test_a_deadline_reaches_every_tier(three):
    with Client(three.socket("o")) as client, pytest.raises(AerieError) as late:
        client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, deadline=0.4)
    assert late.value.reason is Reason.DEADLINE_EXCEEDED
    until(lambda: not verifier_sessions(three.socket("v")) and not drafter_sessions(three.socket("d")))


@pytest.fixture(scope="module")
def faulty(tiny: str, drafter: str) -> Iterator[Services]:
    """A verifier and an orchestrator; each test brings its own drafters."""
    with Services(tiny, drafter) as services:
        started = [services.verifier(), services.orchestrator(drafters=("d0", "d1"))]
        for service in started:
            service.wait_ready()
        yield services


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_drafter_that_dies_or_hangs_changes_no_token(faulty, plain, fault):
    """Another one takes over; when it comes back, it is offered again."""
    first, second = faulty.drafter(name="d0"), faulty.drafter(name="d1")
    for service in (first, second):
        service.wait_ready()
    wait_for_drafters(faulty.socket("o"), 2)

    def act() -> None:
        assert (drafter_sessions(first.address), drafter_sessions(second.address)) == (1, 0)
        first.send(fault)
        if fault == signal.SIGKILL:  # one that hangs is lost after seconds: this stream may be over by then
            until(lambda: drafter_sessions(second.address) == 1)

    tokens, done = stream(faulty.socket("o"), act=act, at=20)
    assert tokens == plain(LONG)
    assert done.drafter_lost
    assert done.stats["fallback_rounds"] > 0
    wait_for_drafters(faulty.socket("o"), 1)
    # The other one serves now.
    tokens, done = stream(faulty.socket("o"), 60)
    assert tokens == plain(60)
    assert done.drafter_lost is None
    if fault == signal.SIGSTOP:
        first.send(signal.SIGCONT)
        wait_for_drafters(faulty.socket("o"), 2)
    for service in (first, second):
        service.close()
    wait_for_drafters(faulty.socket("o"), 0)


def test_a_drafter_that_comes_during_a_stream_joins_it(faulty, plain):
    late = []

    def act() -> None:
        orchestrator = faulty.started[1]
        orchestrator.send(signal.SIGSTOP)  # the stream would be over before a drafter has started
        late.append(faulty.drafter(name="d0").wait_ready())
        orchestrator.send(signal.SIGCONT)

    tokens, done = stream(faulty.socket("o"), act=act, at=5, count=LONG)
    assert tokens == plain(LONG)
    assert done.drafter_lost is None
    assert done.stats["draft_seconds"] > 0  # there was none at its start
    late[0].close()
    wait_for_drafters(faulty.socket("o"), 0)


def test_a_lost_verifier_ends_its_sessions_and_comes_back(tiny, drafter, plain):
    with Services(tiny, drafter) as services:
        verifier = services.verifier()
        orchestrator = services.orchestrator(drafters=())
        for service in (verifier, orchestrator):
            service.wait_ready()
        with pytest.raises(AerieError) as lost:
            stream(services.socket("o"), at=20, act=lambda: verifier.send(signal.SIGKILL))
        assert lost.value.reason is Reason.SERVICE_UNAVAILABLE
        verifier.close()
        services.verifier().wait_ready()

        def answers() -> bool:
            try:
                return stream(services.socket("o"), 20)[0] == plain(20)
            except AerieError:  # not yet
                return False

        until(answers, 30)


def test_a_frozen_verifier_gets_no_more_requests(tiny, drafter, plain):
    """They would hang until a keepalive notices; its sessions go on when it does."""
    with Services(tiny, drafter) as services:
        verifier = services.verifier().wait_ready()
        services.orchestrator(drafters=()).wait_ready()

        def refused() -> bool:
            try:
                with Client(services.socket("o"), retries=0) as client:
                    client.generate(PROMPT, max_tokens=3, deadline=0.5)
            except AerieError as error:
                return error.reason is Reason.SERVICE_UNAVAILABLE
            return False

        def freeze() -> None:
            verifier.send(signal.SIGSTOP)
            until(refused, 10)
            verifier.send(signal.SIGCONT)

        tokens, _ = stream(services.socket("o"), at=20, act=freeze)
        assert tokens == plain(LONG)
        until(lambda: not refused(), 10)


def test_what_a_drain_cuts_off_says_so(tiny, drafter):
    with Services(tiny, drafter) as services:
        services.verifier().wait_ready()
        orchestrator = services.orchestrator("--drain", "0", drafters=()).wait_ready()
        with pytest.raises(AerieError) as cut:
            stream(services.socket("o"), at=20, act=lambda: orchestrator.send(signal.SIGTERM))
        assert (cut.value.reason, cut.value.message) == (Reason.SERVICE_UNAVAILABLE, "the orchestrator shuts down")
        assert orchestrator.process.wait(20) == 0
        assert "Traceback" not in orchestrator.log.read_text()


def test_what_a_verifier_that_drains_cuts_off_says_so(tiny, drafter):
    with Services(tiny, drafter) as services:
        verifier = services.verifier("--drain", "0").wait_ready()
        services.orchestrator(drafters=()).wait_ready()
        with pytest.raises(AerieError) as cut:
            stream(services.socket("o"), at=20, act=lambda: verifier.send(signal.SIGTERM))
        assert (cut.value.reason, cut.value.message) == (Reason.SERVICE_UNAVAILABLE, "the verifier shuts down")
        assert verifier.process.wait(20) == 0
        assert "Traceback" not in verifier.log.read_text()


def test_a_verifier_that_returns_with_another_target_ends_the_orchestrator(tiny, drafter, tmp_path):
    """Its tokenizer, its limits and its drafters are those of the first target: a supervisor starts it again."""
    other = str(write_tiny_llama(tmp_path / "other", seed=1))
    with Services(tiny, drafter) as services:
        verifier = services.verifier().wait_ready()
        front = services.orchestrator(drafters=()).wait_ready()
        verifier.end()
        services.start("v", "verifier", "--target", other).wait_ready()
        assert front.process.wait(20) == 1
        assert "serves another target now" in front.log.read_text()


def test_the_end_waits_for_running_sessions_and_takes_no_new_ones(tiny, drafter, plain):
    """SIGTERM to every service during a stream, in the order in which a deployment goes down."""
    with Services(tiny, drafter) as services:
        started = [services.verifier(), services.drafter(), services.orchestrator()]
        for service in started:
            service.wait_ready()
        wait_for_drafters(services.socket("o"), 1)

        def end() -> None:
            for service in reversed(started):
                service.send(signal.SIGTERM)
            time.sleep(0.3)
            with Client(services.socket("o")) as client, pytest.raises(AerieError) as refused:
                client.generate(PROMPT, max_tokens=3)
            assert refused.value.reason is Reason.SERVICE_UNAVAILABLE

        tokens, _ = stream(services.socket("o"), at=20, act=end)
        assert tokens == plain(LONG)
        assert [service.process.wait(20) for service in started] == [0, 0, 0]


def test_a_service_that_is_told_to_end_while_it_waits_ends(tiny, drafter):
    with Services(tiny, drafter) as services:
        waiting = services.orchestrator(drafters=())
        time.sleep(1.5)
        assert waiting.end(seconds=5) == 0
