"""What the consumer groups of every bus do, in memory and over Redis."""

import asyncio
import logging
import time
import uuid
from contextlib import asynccontextmanager
from itertools import chain

import pytest

from services.runtime.bus import BusEvent, MemoryBus
from services.runtime.redis_bus import RedisBus
from services.runtime.redis_client import connect_redis
from tests.redis_server import redis_server

CLAIM_AFTER = 0.2
PROBE = "probe"


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def run(request):
    """Runs a coroutine function with a bus; ``claim_after`` in seconds, long unless a test waits for it."""

    @asynccontextmanager
    async def bus(claim_after):
        if request.param == "memory":
            yield MemoryBus(claim_after=claim_after)
            return
        async with connect_redis(request.getfixturevalue("redis").url) as client:
            made = RedisBus(client, stream=f"test:{uuid.uuid4().hex}", claim_after=claim_after)
            made.start()
            try:
                yield made
            finally:
                await made.stop()

    def run(scenario, claim_after=60.0):
        async def limited():
            async with asyncio.timeout(15), bus(claim_after) as made:
                await scenario(made)

        asyncio.run(limited())

    return run


async def following(events):
    """The next event that is no probe."""
    while (event := await anext(events)).topic == PROBE:
        pass
    return event


async def listening(bus, events):
    """Wait until the group of this consumer exists: then it hears a probe. The last one is not done yet."""
    heard = asyncio.create_task(anext(events))
    while not heard.done():
        bus.publish(PROBE)
        await asyncio.wait((heard,), timeout=0.02)
    return events


def collect(events):
    """A task that consumes, and the numbers it has seen so far."""
    numbers = []

    async def consume():
        while True:
            numbers.append((await following(events)).data["number"])

    return asyncio.create_task(consume()), numbers


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_every_group_hears_every_event_in_order(run):
    async def scenario(bus):
        groups = [await listening(bus, bus.consume(group, "only")) for group in ("metrics", "traces")]
        for number in range(200):
            bus.publish("n", number=number)
        for events in groups:
            assert [(await following(events)).data["number"] for _ in range(200)] == list(range(200))
        assert bus.dropped == 0

    run(scenario)


def test_the_consumers_of_a_group_share_its_events(run):
    async def scenario(bus):
        consumers = [await listening(bus, bus.consume("group", name)) for name in "abc"]
        tasks, seen = zip(*(collect(events) for events in consumers), strict=True)
        for number in range(60):
            bus.publish("n", number=number)
            await asyncio.sleep(0.001)
        await until(lambda: sum(map(len, seen)) >= 60)
        await asyncio.sleep(0.05)
        assert sorted(chain(*seen)) == list(range(60))
        assert all(seen)
        for task in tasks:
            task.cancel()

    run(scenario)


def test_a_group_starts_with_what_comes_after_its_first_consumer(run):
    async def scenario(bus):
        early = await listening(bus, bus.consume("early", "a"))
        bus.publish("n", number=1)
        assert (await following(early)).data == {"number": 1}
        late = await listening(bus, bus.consume("late", "a"))
        bus.publish("n", number=2)
        assert (await following(late)).data == {"number": 2}
        assert (await following(early)).data == {"number": 2}

    run(scenario)


def test_a_consumer_that_comes_later_finds_what_its_group_has_not_done(run):
    async def scenario(bus):
        await listening(bus, bus.consume("group", "a"))
        bus.publish("n", number=1)
        assert (await following(bus.consume("group", "b"))).data == {"number": 1}

    run(scenario)


def test_consumers_receive_what_matches_their_prefix(run):
    async def scenario(bus):
        everything = await listening(bus, bus.consume("all", "a"))
        sessions = bus.consume("sessions", "a", "session.")
        first = asyncio.create_task(anext(sessions))
        while not first.done():
            bus.publish("session.ready")
            await asyncio.wait((first,), timeout=0.02)
        bus.publish("round.committed")
        bus.publish("sessions.other")
        bus.publish("session.closed", session="s")
        while (event := await anext(sessions)).topic == "session.ready":
            pass
        assert event == BusEvent("session.closed", {"session": "s"})
        topics = []
        while not topics or topics[-1] != "session.closed":
            topics.append((await following(everything)).topic)
        assert topics[-3:] == ["round.committed", "sessions.other", "session.closed"]

    run(scenario)


def test_events_of_a_dead_consumer_go_to_another_and_done_ones_to_nobody(run):
    async def scenario(bus):
        dying = await listening(bus, bus.consume("group", "dying"))
        bus.publish("n", number=1)
        bus.publish("n", number=2)
        assert (await following(dying)).data == {"number": 1}
        assert (await following(dying)).data == {"number": 2}  # it never asks again
        taken = time.monotonic()
        other = bus.consume("group", "other")
        assert (await following(other)).data == {"number": 2}
        assert CLAIM_AFTER * 0.9 < time.monotonic() - taken < 10 * CLAIM_AFTER
        bus.publish("n", number=3)
        assert (await following(other)).data == {"number": 3}
        # Done by asking for another one, it does not come again.
        asking = asyncio.create_task(anext(other))
        await asyncio.sleep(3 * CLAIM_AFTER)
        assert not asking.done()
        asking.cancel()

    run(scenario, CLAIM_AFTER)


def test_several_dead_consumers_are_all_outlived(run):
    async def scenario(bus):
        dying = [await listening(bus, bus.consume("group", str(name))) for name in range(4)]
        for number in range(4):
            bus.publish("n", number=number)
        seen = [(await following(events)).data["number"] for events in dying]
        task, numbers = collect(bus.consume("group", "other"))
        await until(lambda: len(numbers) == 4)
        assert sorted(numbers) == sorted(seen) == [0, 1, 2, 3]
        task.cancel()

    run(scenario, CLAIM_AFTER)


def test_a_consumer_that_is_interrupted_while_it_waits_goes_on(run):
    async def scenario(bus):
        events = await listening(bus, bus.consume("group", "a"))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(following(events), 0.05)
        bus.publish("n", number=1)
        # Redis may have given it to a reader that had just gone: then it is claimed.
        assert (await following(events)).data == {"number": 1}

    run(scenario, CLAIM_AFTER)


def test_data_arrives_as_json_and_as_it_was_when_published(run):
    async def scenario(bus):
        events = await listening(bus, bus.consume("group", "a"))
        sizes = [1, 2]
        bus.publish("n", sizes=sizes, pair=(1, None), topic="data may be called so", self={"ü": 0.5})
        sizes.append(3)
        event = await following(events)
        expected = {"sizes": [1, 2], "pair": [1, None], "topic": "data may be called so", "self": {"ü": 0.5}}
        assert event == BusEvent("n", expected)
        assert abs(event.unix_ms - 1000 * time.time()) < 10_000

    run(scenario)


def test_what_no_bus_can_carry_is_dropped_and_counted_and_raises_nothing(run, caplog):
    async def scenario(bus):
        events = await listening(bus, bus.consume("group", "a"))
        loop = []
        loop.append(loop)
        for bad in (object(), float("nan"), {1}, loop, {(1,): 2}, b"bytes"):
            bus.publish("bad", value=bad)
        assert bus.dropped == 6
        bus.publish("n", number=1)
        assert (await following(events)).data == {"number": 1}

    with caplog.at_level(logging.DEBUG, logger="services"):
        run(scenario)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
