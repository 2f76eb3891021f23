"""Requests: what is refused before work starts, which drafter serves, how many run at once."""

import asyncio
import logging

import numpy as np
import pytest

from services.orchestrator.directory import Directory
from services.orchestrator.generation import Done
from services.orchestrator.routing import TreeOptions
from services.orchestrator.service import DEFAULT_LIMITS, Limits, Orchestrator, Request
from services.runtime.bus import MemoryBus
from services.runtime.registry import Entry, MemoryRegistry
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import DrafterInfo, DrafterStatus, Open, OpenDraft, TargetInfo
from services.speculation.warpers import Sampler
from tests.orchestrator.ports import FIRST, PROMPT, Script, Target, right_drafter
from tests.tiny import tiny_tokenizer

INFO = TargetInfo("t", "abc", "tok", 3, 32, 300, 1000, (2,), "float32", "cpu", 64)


class Port:
    """Every stream plays its own script."""

    def __init__(self, make):
        self._make, self.streams = make, []

    async def status(self):
        return DrafterStatus(DrafterInfo("d", "f", (1,), None, 0))

    def connect(self, seconds=None):
        self.streams.append(Script(self._make()))
        return self.streams[-1]


@pytest.fixture
def verifier():
    return Port(Target)


@pytest.fixture
def drafter():
    return Port(right_drafter)


async def orchestrator(verifier, drafter=None, limits=DEFAULT_LIMITS):
    registry, bus = MemoryRegistry(), MemoryBus()
    if drafter:
        await registry.join(Entry("d", "drafter", "here"))
    directory = Directory(registry, lambda address: drafter, INFO, bus, local=True)
    directory.start()
    await directory.refresh()
    return Orchestrator(verifier, INFO, tiny_tokenizer(), None, directory, bus, limits)


async def collect(served, request):
    served = await served if asyncio.iscoroutine(served) else served
    *chunks, done = [item async for item in served.generate(request)]
    assert isinstance(done, Done)
    return [token for chunk in chunks for token in chunk.tokens], done


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


BAD = [
    {"tokens": [1, 2]},
    {"tokens": ("a",)},
    {"tokens": ({"role": "user", "content": "hi"},)},
    {"tokens": (1.0,)},
    {"stop": "END"},
    {"stop": ("END", 5)},
    {"stop": ["END"]},
    {"stop": ("",)},
    {"stop": None},
    {"max_tokens": 0},
    {"max_tokens": 2.5},
    {"max_tokens": None},
    {"max_tokens": True},
    {"seed": 1.5},
    {"seed": "1"},
    {"top_logprobs": 1.5},
    {"sampler": None},
    {"sampler": {"temperature": 1}},
    {"ignore_eos": 1},
    {"drafter": None},
    {"tree": None},
    {"tree": TreeOptions(nodes=2.5)},
    {"tree": TreeOptions(depth="3")},
    {"tree": TreeOptions(top_k=0)},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_bad_requests_are_refused_before_a_stream_opens(verifier, fields):
    with pytest.raises(AerieError) as caught:
        run(collect(orchestrator(verifier), Request(**{"tokens": PROMPT, **fields})))
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert verifier.streams == []


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1.5},
        {"top_k": True},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": "1"},
        {"repetition_penalty": None},
        {"logit_bias": {5: 1.0}},
        {"logit_bias": ((5,),)},
        {"logit_bias": ((5.0, 1.0),)},
        {"logit_bias": ((5, "up"),)},
    ],
    ids=str,
)
def test_samplers_refuse_wrong_types(fields):
    with pytest.raises(AerieError) as caught:
        Sampler(**fields)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_numpy_numbers_are_numbers():
    Request(tokens=(np.int64(5),), max_tokens=np.int32(3), seed=np.uint64(2**64 - 1)).check()
    Sampler(np.float32(0.5), np.int64(5), logit_bias=((np.int32(4), np.float64(1.0)),))


def test_what_is_asked_for_reaches_both_sides(verifier, drafter):
    sampler = Sampler(temperature=0.5)
    request = Request(PROMPT, max_tokens=12, sampler=sampler, seed=9, ignore_eos=True, top_logprobs=3, drafter="f")
    _, done = run(collect(orchestrator(verifier, drafter), request))
    opened, open_draft = verifier.streams[0].sent[0], drafter.streams[0].sent[0]
    expected = Open(opened.session, PROMPT, 3, 12, sampler, 9, 0, (2,), True, 3, (1,))
    assert opened == expected
    assert open_draft == OpenDraft(opened.session, 0, sampler, 9)
    assert done.seed == 9


def test_without_a_seed_one_is_drawn_and_returned(verifier):
    async def play():
        served = await orchestrator(verifier)
        return {(await collect(served, Request(PROMPT)))[1].seed for _ in range(3)}

    seeds = run(play())
    assert len(seeds) == 3
    assert seeds == {stream.sent[0].seed for stream in verifier.streams}


def test_auto_takes_what_fits_and_warns_once_when_nothing_does(verifier, drafter, caplog):
    async def play(served, *wanted):
        served = await served
        return [(await collect(served, Request(PROMPT, drafter=name)))[1].stats.drafted_rounds for name in wanted]

    with caplog.at_level(logging.WARNING):
        assert run(play(orchestrator(verifier, drafter), "auto", "off", "d")) == [4, 0, 4]
        assert run(play(orchestrator(verifier), "off")) == [0]
        assert not caplog.records
        assert run(play(orchestrator(verifier), "auto", "auto")) == [0, 0]
    assert [record.getMessage() for record in caplog.records] == ["no drafter fits the target: decoding plainly"]


def test_a_drafter_that_is_not_there_is_an_error_when_named(verifier):
    with pytest.raises(AerieError) as caught:
        run(collect(orchestrator(verifier), Request(PROMPT, drafter="d")))
    assert caught.value.reason is Reason.DRAFTER_UNAVAILABLE
    assert verifier.streams == []


def test_sessions_beyond_the_most_wait_for_their_turn(verifier):
    running = []

    async def play():
        served = await orchestrator(verifier, limits=Limits(sessions=3))

        async def one():
            tokens, _ = await collect(served, Request(PROMPT))
            assert tokens == list(range(FIRST, FIRST + 12))

        tasks = [asyncio.create_task(one()) for _ in range(10)]
        while not all(task.done() for task in tasks):
            running.append(sum(not stream.closed for stream in verifier.streams))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    run(play())
    assert max(running) == 3
    assert [stream.closed for stream in verifier.streams] == [1] * 10


def test_whoever_leaves_while_waiting_takes_no_turn(verifier):

    async def play():
        served = await orchestrator(verifier, limits=Limits(sessions=1, queue=1))
        first = served.generate(Request(PROMPT))
        await anext(first)
        waiting = asyncio.create_task(collect(served, Request(PROMPT)))
        await asyncio.sleep(0.01)
        with pytest.raises(AerieError) as caught:  # the queue is full, too
            await collect(served, Request(PROMPT))
        assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
        waiting.cancel()
        await asyncio.wait((waiting,))
        await first.aclose()
        await collect(served, Request(PROMPT))

    run(play())
    assert [stream.closed for stream in verifier.streams] == [1, 1]


def test_text_is_encoded_and_chats_need_a_template(verifier):
    async def play():
        served = await orchestrator(verifier)
        assert served.encode("abc") == (FIRST, FIRST + 1, FIRST + 2)
        with pytest.raises(AerieError, match="no chat template"):
            served.encode_chat([{"role": "user", "content": "hi"}])

    run(play())
