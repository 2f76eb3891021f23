"""Only what has not been answered is tried again, when trying again helps, and as late as the service wishes."""

import asyncio
import itertools

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.client import AerieError, AsyncClient, Client, DoneMessage, Reason, failures
from services.orchestrator.service import Limits, Request
from tests.client.conftest import until
from tests.client.fakes import CHUNK, DONE, Scripted, abort, hang
from tests.proxy import Proxy
from tests.served import Served

AWAY = abort(grpc.StatusCode.UNAVAILABLE, "away")
FULL = AerieError(Reason.RESOURCE_EXHAUSTED, "full")


def later(seconds, code=grpc.StatusCode.RESOURCE_EXHAUSTED):
    """A refusal that asks to come back in so many seconds."""
    retry = any_pb2.Any()
    retry.Pack(
        error_details_pb2.RetryInfo(
            retry_delay=duration_pb2.Duration(nanos=int(seconds * 1e9) % 10**9, seconds=int(seconds))
        )
    )
    status = status_pb2.Status(code=code.value[0], message="later", details=[retry])
    return lambda context: context.abort_with_status(rpc_status.to_status(status))


def play(tmp_path, service, scenario, **options):
    """Run ``scenario(client)`` against a scripted service."""

    async def run():
        server = await service.listen(f"unix:{tmp_path}/s")
        try:
            async with AsyncClient(f"unix:{tmp_path}/s", **options) as client:
                return await scenario(client)
        finally:
            await server.stop(0)

    return asyncio.run(asyncio.wait_for(run(), 30))


async def answered(client):
    found = await client.generate("hi")
    assert (found.text, found.token_ids, found.seed) == ("a", (64,), 5)


def refused(reason, *says, **options):
    async def scenario(client):
        with pytest.raises(AerieError) as caught:
            await client.generate("hi", **options)
        assert caught.value.reason == reason
        assert all(word in caught.value.message for word in says)

    return scenario


@pytest.mark.parametrize("failure", [AWAY, FULL, later(0.01)])
def test_a_request_without_a_token_yet_is_tried_again(tmp_path, monkeypatch, failure):
    monkeypatch.setattr("services.runtime.rich_status.RETRY_SECONDS", 0)
    service = Scripted([failure], [failure], [CHUNK, DONE])
    play(tmp_path, service, answered)
    assert len(service.times) == 3


@pytest.mark.parametrize("failure", [AWAY, FULL, later(0.01)])
def test_what_a_caller_has_seen_is_never_generated_again(tmp_path, failure):
    service = Scripted([CHUNK, failure])
    play(tmp_path, service, refused(Reason.SERVICE_UNAVAILABLE if failure is AWAY else Reason.RESOURCE_EXHAUSTED))
    assert len(service.times) == 1


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (AerieError(Reason.INVALID_ARGUMENT, "bad"), Reason.INVALID_ARGUMENT),
        (AerieError(Reason.DRAFTER_UNAVAILABLE, "none"), Reason.DRAFTER_UNAVAILABLE),
        (AerieError(Reason.PROMPT_TOO_LONG, "long"), Reason.PROMPT_TOO_LONG),
        (ZeroDivisionError("secret"), Reason.INTERNAL),
        (abort(grpc.StatusCode.INTERNAL, "no reason of ours"), Reason.INTERNAL),
        (abort(grpc.StatusCode.UNKNOWN, "x"), Reason.INTERNAL),
        (abort(grpc.StatusCode.CANCELLED, "x"), Reason.INTERNAL),
        (abort(grpc.StatusCode.DEADLINE_EXCEEDED, "x"), Reason.DEADLINE_EXCEEDED),
    ],
)
def test_other_failures_are_final_and_keep_their_reason(tmp_path, failure, reason):
    service = Scripted([failure])
    play(tmp_path, service, refused(reason))
    assert len(service.times) == 1


@pytest.mark.parametrize("retries", [0, 2])
def test_tries_are_counted_and_the_last_refusal_is_told(tmp_path, retries):
    service = Scripted([AWAY])
    play(tmp_path, service, refused(Reason.SERVICE_UNAVAILABLE, "away", f"{tmp_path}/s"), retries=retries)
    assert len(service.times) == retries + 1


def test_pauses_double_with_jitter(tmp_path):
    service = Scripted([AWAY])
    play(tmp_path, service, refused(Reason.SERVICE_UNAVAILABLE), retries=3)
    pauses = [b - a for a, b in itertools.pairwise(service.times)]
    for number, pause in enumerate(pauses):
        backoff = failures.FIRST_BACKOFF * 2**number
        assert 0.5 * backoff <= pause <= 1.5 * backoff + 0.1  # and the call itself


def test_the_pause_that_the_service_asks_for_is_the_least(tmp_path):
    service = Scripted([later(0.4)], [CHUNK, DONE])
    play(tmp_path, service, answered)
    assert 0.45 <= service.times[1] - service.times[0] <= 0.4 + 0.15 + 0.2


def test_a_service_that_asks_for_too_long_a_pause_is_not_asked_again(tmp_path):
    service = Scripted([later(3600)])
    play(tmp_path, service, refused(Reason.RESOURCE_EXHAUSTED, "later"))
    assert len(service.times) == 1


def test_a_deadline_holds_for_all_tries_together(tmp_path):
    service = Scripted([later(0.1)], [hang])
    play(tmp_path, service, refused(Reason.DEADLINE_EXCEEDED, deadline=0.6))
    first, second = service.remaining
    assert 0.4 < first < 0.65  # the header that carries it is rounded up
    assert second < first - 0.1
    assert service.cancelled == 1


def test_a_pause_beyond_the_deadline_is_not_waited_for(tmp_path):
    service = Scripted([later(5)])
    play(tmp_path, service, refused(Reason.RESOURCE_EXHAUSTED, "later", deadline=3))
    assert len(service.times) == 1


def test_cancelling_the_pause_cancels_the_request(tmp_path):
    service = Scripted([later(10)])

    async def scenario(client):
        task = asyncio.create_task(client.generate("hi"))
        while not service.times:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play(tmp_path, service, scenario)


def test_questions_are_tried_again_too(tmp_path):
    from aerie.orchestrator.v1 import orchestrator_pb2 as pb

    service = Scripted([AWAY], [pb.GetInfoResponse(model="m", context_length=7)])

    async def scenario(client):
        assert (await client.info()).context_length == 7

    play(tmp_path, service, scenario)


@pytest.mark.parametrize(
    ("answers", "says"),
    [([CHUNK], "before its end"), ([], "before its end"), ([type(CHUNK)()], "language")],
)
def test_a_service_that_makes_no_sense_is_a_failure(tmp_path, answers, says):
    play(tmp_path, Scripted(answers), refused(Reason.INTERNAL, says))


def test_a_failure_after_the_end_takes_nothing_back(tmp_path):
    play(tmp_path, Scripted([CHUNK, DONE, AWAY]), answered)


# Real services ----------------------------------------------------------------------------------------------


def test_nobody_listens(tmp_path):
    address = f"unix:{tmp_path}/none"
    with Client(address, retries=1) as client:
        for use in (lambda: client.generate("hi"), lambda: list(client.stream("hi")), client.info, client.drafters):
            with pytest.raises(AerieError) as caught:
                use()
            assert caught.value.reason == Reason.SERVICE_UNAVAILABLE
            assert address in caught.value.message
            assert "\n" not in caught.value.message


def test_a_server_that_comes_up_late_is_found(tmp_path):
    async def scenario():
        service = Scripted([CHUNK, DONE])
        async with AsyncClient(f"unix:{tmp_path}/s") as client:
            asking = asyncio.create_task(answered(client))
            await asyncio.sleep(0.15)
            assert not asking.done()
            server = await service.listen(f"unix:{tmp_path}/s")
            await asking
            await server.stop(0)
        assert len(service.times) == 1

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_service_that_drains_is_tried_again_and_one_that_is_full_refuses(target):
    with Served(target, limits=Limits(1, 0)) as served, Client(served.address, retries=0) as client:
        with client.stream("hi", max_tokens=900, ignore_eos=True) as stream:
            next(stream)
            with pytest.raises(AerieError) as caught:
                client.generate("hi")
            assert caught.value.reason == Reason.RESOURCE_EXHAUSTED
        until(lambda: served.sessions()["orchestrator"] == 0)
        served.gate.close()
        with pytest.raises(AerieError) as caught:
            client.generate("hi")
        assert caught.value.reason == Reason.SERVICE_UNAVAILABLE
        served.gate.closed = False
        assert client.generate("hi", max_tokens=2).usage["completion_tokens"] == 2


@pytest.mark.parametrize("cut", ["server", "connection"])
def test_a_stream_that_breaks_is_not_begun_again(target, cut):
    """Whether the service dies or the network does: what came is what the target says, and then comes the error."""
    tokens = []

    async def read(served):
        async with Proxy(served.address) as proxy, AsyncClient(f"127.0.0.1:{proxy.port}") as client:
            async for item in client.stream("hi", max_tokens=900, ignore_eos=True):
                assert not isinstance(item, DoneMessage)
                tokens.extend(item.tokens)
                if len(tokens) == 5:
                    if cut == "server":
                        await asyncio.to_thread(served.hang_up)
                    proxy.cut()

    with Served(target) as served:
        request = Request(served.chat_tokens(("user", "hi")), max_tokens=200, ignore_eos=True)
        expected = [token for chunk in served.reference(request)[0] for token in chunk.tokens]
        with pytest.raises(AerieError) as caught:
            asyncio.run(asyncio.wait_for(read(served), 30))
        assert caught.value.reason == Reason.SERVICE_UNAVAILABLE
        seen = tokens[:200]
        assert len(seen) >= 5
        assert seen == expected[: len(seen)]
        until(lambda: served.sessions() == {"orchestrator": 0, "verifier": 0, "drafter": 0})
        if cut == "server":
            served.listen()
        with Client(served.address) as client:
            assert list(client.generate("hi", max_tokens=9, ignore_eos=True).token_ids) == expected[:9]
