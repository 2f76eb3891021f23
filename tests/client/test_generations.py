"""Generations through a client are those of the orchestrator, and end on every tier when the client leaves."""

import asyncio
import contextlib
import threading
from dataclasses import asdict

import numpy as np
import pytest

from services.client import (
    AerieError,
    AsyncClient,
    ChannelSecurity,
    ChunkMessage,
    Client,
    DoneMessage,
    Key,
    Reason,
    Sampler,
)
from services.orchestrator.routing import TreeOptions
from services.orchestrator.service import Request
from services.runtime.security import OPEN
from tests.client.conftest import until

IDLE = {"orchestrator": 0, "verifier": 0, "drafter": 0}
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def client(served):
    with Client(served.address) as client:
        yield client


def play(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 60))


def same(found, reference):
    """Whether a ``Generation`` is what the orchestrator said itself."""
    chunks, done = reference
    assert found.text == "".join(chunk.text for chunk in chunks)
    assert found.token_ids == tuple(token for chunk in chunks for token in chunk.tokens)
    log_probs = [entry for chunk in chunks for entry in chunk.log_probs]
    assert [entry.token for entry in found.log_probs] == [entry.token for entry in log_probs]
    for mine, other in zip(found.log_probs, log_probs, strict=True):
        assert np.allclose(
            [mine.log_prob, *dict(mine.top).values()], [other.log_prob, *dict(other.top).values()], 0, 1e-4
        )
    assert (found.finish_reason, found.seed) == (done.finish_reason, done.seed)
    assert found.usage == done.stats.usage()
    assert found.stats.keys() == done.stats.report().keys()
    assert len(found.depths) == len(found.token_ids)
    assert found.drafter_lost is None


CASES = [
    ({"max_tokens": 12}, {"max_tokens": 12}),
    ({"max_tokens": 12, "drafter": "off", "seed": 2**64 - 1}, {"max_tokens": 12, "drafter": "off", "seed": 2**64 - 1}),
    (
        {"max_tokens": 9, "temperature": 0.8, "top_p": 0.9, "logit_bias": {64: 2.0}, "seed": 3},
        {"max_tokens": 9, "sampler": Sampler(temperature=0.8, top_p=0.9, logit_bias=((64, 2.0),)), "seed": 3},
    ),
    (
        {"max_tokens": 9, "sampler": Sampler(temperature=1.0, top_k=5, repetition_penalty=1.2), "seed": 4},
        {"max_tokens": 9, "sampler": Sampler(temperature=1.0, top_k=5, repetition_penalty=1.2), "seed": 4},
    ),
    (
        {"max_tokens": 9, "tree_nodes": 3, "tree_depth": 2, "tree_top_k": 1, "top_logprobs": 2},
        {"max_tokens": 9, "tree": TreeOptions(3, 2, 1), "top_logprobs": 2},
    ),
    ({**LONG, "max_tokens": 40, "stop": "e"}, {**LONG, "max_tokens": 40, "stop": ("e",)}),
]


@pytest.mark.parametrize(("options", "request_options"), CASES)
def test_a_generation_is_what_the_orchestrator_generates(served, client, options, request_options):
    tokens = served.chat_tokens(("user", "hi"))
    seed = {"seed": 7} if "seed" not in options else {}
    reference = served.reference(Request(tokens, **request_options, **seed))
    same(client.generate("hi", **options, **seed), reference)

    async def scenario():
        async with AsyncClient(served.address) as other:
            same(await other.generate("hi", **options, **seed), reference)

    play(scenario())


@pytest.mark.parametrize(
    ("prompt", "raw", "turns"),
    [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False, 2),
        ((65, np.int64(66), 67), False, None),
        ("plain text", True, None),
    ],
)
def test_prompts_of_every_kind(served, client, prompt, raw, turns):
    orchestrator = served.parts.orchestrator
    if turns:
        tokens = served.chat_tokens(*((turn["role"], turn["content"]) for turn in prompt))
    else:
        tokens = orchestrator.encode(prompt) if raw else tuple(map(int, prompt))
    found = client.generate(prompt, raw=raw, max_tokens=5, seed=1)
    same(found, served.reference(Request(tokens, max_tokens=5, seed=1)))
    assert found.usage["prompt_tokens"] == len(tokens)


def test_without_max_tokens_the_context_is_the_end(served, client):
    length = served.target.info.context_length
    found = client.generate([token % 250 for token in range(length - 20)], ignore_eos=True)
    assert len(found.token_ids) == 20


def test_a_stream_gives_chunks_and_then_the_end(served, client):
    chunks, done = served.reference(Request(served.chat_tokens(("user", "hi")), max_tokens=10, seed=1))
    *found, end = client.stream("hi", max_tokens=10, seed=1)
    assert all(isinstance(chunk, ChunkMessage) for chunk in found)
    assert isinstance(end, DoneMessage)
    assert [token for chunk in found for token in chunk.tokens] == [token for chunk in chunks for token in chunk.tokens]
    assert (end.finish_reason, end.usage) == (done.finish_reason, done.stats.usage())


def test_what_the_service_says_of_itself(served, client):
    info = served.target.info
    assert asdict(client.info()) == {
        "model": info.name,
        "weights_fingerprint": info.weights_fingerprint,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
    }
    (line,) = client.drafters()
    offer = served.parts.directory.offers["random"]
    assert (line.name, line.status.info, line.sessions) == ("random", offer.info, 0)


# Calls that show a key pass interceptors: they are other objects, and end otherwise.
KEYED = pytest.mark.parametrize("security", [OPEN, ChannelSecurity(Key("k"))], ids=["open", "keyed"])


# Leaving ----------------------------------------------------------------------------------------------------


def started(served):
    return lambda: served.sessions() == {"orchestrator": 1, "verifier": 1, "drafter": 1}


def freed(served):
    return lambda: served.sessions() == IDLE


def test_closing_a_stream_frees_every_tier(served, client):
    stream = client.stream("hi", **LONG)
    next(stream)
    until(started(served))
    stream.close()
    until(freed(served))
    assert list(stream) == []
    stream.close()


def test_leaving_a_loop_frees_every_tier(served, client):
    for _ in client.stream("hi", **LONG):
        break
    until(freed(served))

    async def scenario():
        async with AsyncClient(served.address) as other:
            async for _ in other.stream("hi", **LONG):
                break
            await asyncio.to_thread(until, freed(served))
            async with contextlib.aclosing(other.stream("hi", **LONG)) as items:
                await anext(items)
            await asyncio.to_thread(until, freed(served))

    play(scenario())


def test_another_thread_closes_a_stream_whose_reader_waits(served, client):
    stream = client.stream("hi", **LONG)
    read = []
    reader = threading.Thread(target=lambda: read.extend(stream))
    reader.start()
    until(started(served))
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    assert not any(isinstance(item, DoneMessage) for item in read)
    until(freed(served))


@KEYED
def test_cancelling_a_task_frees_every_tier(served, security):
    async def scenario():
        async with AsyncClient(served.address, security=security) as client:
            task = asyncio.create_task(client.generate("hi", **LONG))
            await asyncio.to_thread(until, started(served))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(until, freed(served))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.generate("hi", **LONG)
            await asyncio.to_thread(until, freed(served))
            assert (await client.generate("hi", max_tokens=3)).usage["completion_tokens"] == 3

    play(scenario())


def test_a_deadline_ends_the_answer_and_frees_every_tier(served, client):
    with pytest.raises(AerieError) as caught:
        client.generate("hi", **LONG, deadline=0.1)
    assert caught.value.reason == Reason.DEADLINE_EXCEEDED
    until(freed(served))
    assert client.generate("hi", max_tokens=3, deadline=60).usage["completion_tokens"] == 3


@KEYED
@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_closing_the_client_ends_what_runs(served, kind, security):
    client = Client(served.address, security=security)
    failures = []

    def work():
        try:
            client.generate("hi", **LONG) if kind == "generate" else list(client.stream("hi", **LONG))
        except AerieError as error:
            failures.append(error.reason)

    worker = threading.Thread(target=work)
    worker.start()
    until(started(served))
    client.close()
    worker.join(10)
    assert failures == [Reason.ENGINE_CLOSED]
    until(freed(served))
    client.close()
    for use in (lambda: client.generate("hi"), lambda: list(client.stream("hi")), client.info):
        with pytest.raises(AerieError) as caught:
            use()
        assert caught.value.reason == Reason.ENGINE_CLOSED


@KEYED
def test_closing_an_async_client_ends_what_runs(served, security):
    async def scenario():
        client = AsyncClient(served.address, security=security)
        task = asyncio.create_task(client.generate("hi", **LONG))
        await asyncio.to_thread(until, started(served))
        await client.close()
        with pytest.raises(AerieError) as caught:
            await task
        assert caught.value.reason == Reason.ENGINE_CLOSED
        with pytest.raises(AerieError) as caught:
            await client.info()
        assert caught.value.reason == Reason.ENGINE_CLOSED
        await asyncio.to_thread(until, freed(served))

    play(scenario())


# Threads and loops ------------------------------------------------------------------------------------------


def test_a_client_works_where_a_loop_runs_already(served):
    async def notebook():
        with Client(served.address) as client:
            assert [type(item) for item in client.stream("hi", max_tokens=1)][-1] is DoneMessage
            return client.generate("hi", max_tokens=4).token_ids

    reference, _ = served.reference(Request(served.chat_tokens(("user", "hi")), max_tokens=4))
    assert play(notebook()) == tuple(token for chunk in reference for token in chunk.tokens)


def test_threads_share_a_client(served, client):
    seeds = range(8)
    expected = {
        seed: served.reference(
            Request(served.chat_tokens(("user", "hi")), max_tokens=8, sampler=Sampler(temperature=1.0), seed=seed)
        )
        for seed in seeds
    }
    found = {}

    def work(seed):
        found[seed] = client.generate("hi", max_tokens=8, temperature=1.0, seed=seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for seed in seeds:
        same(found[seed], expected[seed])


def test_dropped_clients_end_their_threads(served):
    before = threading.active_count()
    stream = Client(served.address).stream("hi", max_tokens=3)
    assert isinstance(list(stream)[-1], DoneMessage)  # the stream keeps its client
    del stream
    until(lambda: threading.active_count() == before)
