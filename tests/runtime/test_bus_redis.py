"""The bus over Redis: its stream, what others put there, and Redis away, paused or new."""

import asyncio
import logging
import time
import uuid
from contextlib import asynccontextmanager
from itertools import chain

import pytest

from services.runtime.redis_bus import RedisBus
from services.runtime.redis_client import connect_redis
from tests.proxy import Proxy
from tests.redis_server import own_redis
from tests.runtime.test_bus_contract import collect, following, listening, until
from tests.runtime.test_registry_redis import cancelled_anytime


@pytest.fixture(scope="module")
def redis():
    with own_redis() as server:
        yield server


def run(scenario):
    async def limited():
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(limited())


@asynccontextmanager
async def started(client, **options):
    bus = RedisBus(client, stream=f"test:{uuid.uuid4().hex}", **options)
    bus.start()
    try:
        yield bus
    finally:
        await bus.stop()


@pytest.fixture
def lines(caplog):
    """What was logged, by level."""
    with caplog.at_level(logging.DEBUG, logger="services"):
        yield lambda: [record.levelname for record in caplog.records]


def publish(bus, numbers):
    """Publish at once; returns the seconds of the slowest."""
    slowest = 0.0
    for number in numbers:
        began = time.perf_counter()
        bus.publish("n", number=number)
        slowest = max(slowest, time.perf_counter() - began)
    return slowest


async def length(client, bus):
    return await client.xlen(bus._stream)


def test_events_go_from_process_to_process(redis):
    async def scenario():
        async with connect_redis(redis.url) as client, connect_redis(redis.url) as other, started(client) as bus:
            elsewhere = RedisBus(other, stream=bus._stream)
            events = await listening(bus, elsewhere.consume("group", "a"))
            bus.publish("n", number=1)
            assert (await following(events)).data == {"number": 1}

    run(scenario)


def test_the_stream_keeps_about_as_many_events_as_it_may(redis):
    async def scenario():
        async with connect_redis(redis.url) as client, started(client, maxlen=200, capacity=2000) as bus:
            publish(bus, range(2000))
            await bus.drain(5)
            assert 200 <= await length(client, bus) <= 400
            last = (await client.xrevrange(bus._stream, count=1))[0][1]
            assert b'"number": 1999' in last[b"event"]
            assert bus.dropped == 0

    run(scenario)


def test_what_is_published_before_the_start_is_sent_and_after_the_stop_is_dropped(redis):
    async def scenario():
        async with connect_redis(redis.url) as client:
            bus = RedisBus(client, stream=f"test:{uuid.uuid4().hex}", capacity=3)
            publish(bus, range(5))
            assert bus.dropped == 2
            bus.start()
            await bus.drain(5)
            assert await length(client, bus) == 3
            publish(bus, range(5))
            assert bus.dropped == 7
            assert await length(client, bus) == 3

    run(scenario)


def test_events_of_nobody_are_skipped_with_one_warning(redis, lines):
    async def scenario():
        async with connect_redis(redis.url) as client, started(client) as bus:
            events = await listening(bus, bus.consume("group", "a"))
            for fields in ({"event": b"\xff"}, {"event": "{}"}, {"other": "x"}):
                await client.xadd(bus._stream, fields)
            bus.publish("n", number=1)
            assert (await following(events)).data == {"number": 1}
            await asyncio.wait((task := asyncio.create_task(anext(events)),), timeout=0.05)
            task.cancel()
            await asyncio.wait((task,))
            assert (await client.xpending(bus._stream, "group"))["pending"] == 0

    run(scenario)
    assert lines() == ["WARNING"]


def test_a_paused_redis_does_not_delay_publishing(redis):
    async def scenario():
        async with connect_redis(redis.url) as client, started(client, capacity=50) as bus:
            events = await listening(bus, bus.consume("group", "a"))
            await until(lambda: not bus._waiting)
            redis.pause()
            try:
                slowest = publish(bus, range(200))
                await asyncio.sleep(0.7)
                slowest = max(slowest, publish(bus, range(200, 300)))
            finally:
                redis.resume()
            assert slowest < 0.2
            assert bus.dropped == 250
            assert [(await following(events)).data["number"] for _ in range(50)] == list(range(50))
            bus.publish("n", number=300)
            assert (await following(events)).data == {"number": 300}

    run(scenario)


def test_a_slow_redis_takes_batches(redis):
    async def scenario():
        async with Proxy(redis.address) as proxy, connect_redis(f"redis://127.0.0.1:{proxy.port}") as client:
            proxy.delay = 0.5
            async with started(client) as bus, connect_redis(redis.url) as near:
                began = time.monotonic()
                assert publish(bus, range(200)) < 0.2
                await bus.drain(10)
                assert 0.9 < time.monotonic() - began < 5  # one event a round trip would be 100 s
                assert await length(near, bus) == 200
                assert bus.dropped == 0

    run(scenario)


def test_a_redis_restarted_empty_is_served_again_soon_and_quietly(redis, lines):
    async def scenario():
        async with connect_redis(redis.url) as client, started(client, capacity=10) as bus:
            consumers = [await listening(bus, bus.consume("group", name)) for name in "ab"]
            tasks, seen = zip(*(collect(events) for events in consumers), strict=True)
            await until(lambda: not bus._waiting)
            await asyncio.to_thread(redis.stop)
            slowest = publish(bus, range(100))
            await asyncio.sleep(0.4)
            slowest = max(slowest, publish(bus, range(100, 200)))
            assert slowest < 0.2
            assert bus.dropped == 190
            await asyncio.to_thread(redis.start)
            began = time.monotonic()
            await until(lambda: sum(map(len, seen)) >= 10)
            assert time.monotonic() - began < 5
            assert sorted(chain(*seen)) == list(range(10))  # also those that came before the group
            bus.publish("n", number=200)
            await until(lambda: [200] in (numbers[-1:] for numbers in seen))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    run(scenario)
    assert lines().count("WARNING") == 3  # two consumers, one sender
    assert set(lines()) == {"WARNING", "INFO"}


def test_a_group_that_is_lost_while_redis_lives_is_made_again(redis, lines):
    async def scenario():
        async with connect_redis(redis.url) as client, started(client) as bus:
            task, seen = collect(await listening(bus, bus.consume("group", "a")))
            bus.publish("n", number=1)
            await until(lambda: seen == [1])
            await client.delete(bus._stream)
            bus.publish("n", number=2)
            await until(lambda: seen == [1, 2])
            task.cancel()
            await asyncio.wait((task,))

    run(scenario)
    assert lines() == ["WARNING", "INFO"]


def test_a_stream_that_is_none_is_tried_now_and_then(redis, lines):
    async def scenario():
        async with connect_redis(redis.url) as client, started(client) as bus:
            await client.set(bus._stream, "no stream")
            await client.config_resetstat()
            task, seen = collect(bus.consume("group", "a"))
            bus.publish("n", number=1)
            await asyncio.sleep(0.8)
            stats = await client.info("commandstats")
            assert 2 <= stats["cmdstat_xgroup|create"]["calls"] <= 5
            assert 2 <= stats["cmdstat_xadd"]["calls"] <= 5
            await client.delete(bus._stream)
            deadline = time.monotonic() + 5
            while not seen and time.monotonic() < deadline:
                bus.publish("n", number=2)
                await asyncio.sleep(0.05)
            assert seen
            task.cancel()
            await asyncio.wait((task,))

    run(scenario)
    assert lines() == ["WARNING", "WARNING", "INFO", "INFO"]


def test_draining_ends_at_its_deadline(redis, lines):
    async def scenario():
        async with connect_redis("redis://127.0.0.1:1/0") as client, started(client) as bus:
            publish(bus, range(3))
            began = time.monotonic()
            await bus.drain(0.2)
            assert time.monotonic() - began < 1
            assert bus.dropped == 3

    run(scenario)
    assert lines() == ["WARNING", "WARNING"]


def test_consumers_and_senders_can_be_cancelled(redis):
    async def scenario():
        async with connect_redis(redis.url) as client, started(client, claim_after=0.001) as bus:

            async def consume():
                async for _ in bus.consume("group", "a"):
                    bus.publish("n")

            async def send():
                sender = RedisBus(client, stream=bus._stream)
                sender.start()
                try:
                    while True:
                        sender.publish("n")
                        await asyncio.sleep(0)
                finally:
                    await sender.stop()

            for task in (consume, send):
                await cancelled_anytime(task)

    run(scenario)
