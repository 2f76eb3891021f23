"""The registry over Redis: its keys, what others put there, and Redis away, slow or new."""

import asyncio
import json
import logging
import time
import uuid

import pytest

from services.runtime.redis_client import connect_redis
from services.runtime.redis_registry import RedisRegistry
from services.runtime.registry import Entry
from tests.proxy import Proxy
from tests.redis_server import own_redis, redis_server

DRAFTER = Entry("a", "drafter", "host:1", {"family": "eagle3"})


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def own():
    with own_redis() as server:
        yield server


@pytest.fixture
def prefix():
    return f"test:{uuid.uuid4().hex}"


def run(scenario):
    async def limited():
        async with asyncio.timeout(15):
            await scenario()

    asyncio.run(limited())


def test_an_entry_is_one_key_that_expires(redis, prefix):
    async def scenario():
        async with connect_redis(redis.url) as client:
            registry = RedisRegistry(client, prefix)
            await registry.join(DRAFTER, lease=60)
            key = f"{prefix}:registry:drafter:a"
            assert json.loads(await client.get(key)) == {
                "name": "a",
                "kind": "drafter",
                "address": "host:1",
                "data": {"family": "eagle3"},
            }
            assert 55_000 < await client.pttl(key) <= 60_000
            await registry.join(DRAFTER)
            assert await client.pttl(key) == -1

    run(scenario)


def test_registries_with_a_prefix_of_their_own_do_not_meet(redis, prefix):
    async def scenario():
        async with connect_redis(redis.url) as client:
            one, other = RedisRegistry(client, f"{prefix}x"), RedisRegistry(client, f"{prefix}[a-z]")
            await one.join(DRAFTER, lease=60)
            assert await other.list() == []
            await other.join(DRAFTER, lease=60)
            assert await other.list() == [DRAFTER]

    run(scenario)


def test_damaged_and_foreign_keys_are_skipped_with_one_warning_each(redis, prefix, caplog):
    async def scenario():
        async with connect_redis(redis.url) as client:
            registry = RedisRegistry(client, prefix)
            await registry.join(DRAFTER)
            text = await client.get(f"{prefix}:registry:drafter:a")
            for name, value in (("b", b"\xff\x00"), ("c", b"{"), ("d", text)):
                await client.set(f"{prefix}:registry:drafter:{name}", value)
            await client.rpush(f"{prefix}:registry:drafter:e", "a list")
            await client.set(f"{prefix}:registry:drafter:".encode() + b"\xff", "no text")
            for _ in range(3):
                assert await registry.list() == [DRAFTER]
            await registry.join(Entry("e", "drafter", "host:2"))
            assert [found.name for found in await registry.list()] == ["a", "e"]

    with caplog.at_level(logging.DEBUG, logger="services"):
        run(scenario)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert {name for name in "bcd" if f":drafter:{name}'" in caplog.text} == set("bcd")


def test_many_entries_are_all_listed(redis, prefix):
    async def scenario():
        async with connect_redis(redis.url) as client:
            registry = RedisRegistry(client, prefix)
            async with client.pipeline(transaction=False) as pipe:
                for number in range(12_000):
                    pipe.set(f"{prefix}:other:{number}", "", px=1500)
                await pipe.execute()
            wanted = [f"{number:03}" for number in range(100)]
            await asyncio.gather(*(registry.join(Entry(name, "drafter", ""), lease=10) for name in wanted))
            assert [found.name for found in await registry.list("drafter")] == wanted

    run(scenario)


def calls(registry):
    return {
        "join": lambda: registry.join(DRAFTER, lease=1),
        "renew": lambda: registry.renew("a", lease=1),
        "leave": lambda: registry.leave("a"),
        "list": lambda: registry.list(),
    }


@pytest.mark.parametrize("call", ["join", "renew", "leave", "list"])
def test_with_redis_away_every_call_says_so_at_once(call):
    async def scenario():
        async with connect_redis("redis://127.0.0.1:1/0") as client:
            began = time.monotonic()
            with pytest.raises(ConnectionError, match="registry"):
                await calls(RedisRegistry(client))[call]()
            assert time.monotonic() - began < 1

    run(scenario)


def test_a_redis_that_does_not_answer_delays_nobody_for_long_and_leaves_no_mess(own, prefix):
    async def scenario():
        async with connect_redis(own.url, timeout=0.2) as client:
            registry = RedisRegistry(client, prefix)
            await registry.join(DRAFTER, lease=60)
            own.pause()
            try:
                for call in calls(registry).values():
                    began = time.monotonic()
                    with pytest.raises(ConnectionError):
                        await call()
                    assert time.monotonic() - began < 1.5
            finally:
                own.resume()
            # The answers that came too late are nobody's.
            await registry.join(DRAFTER, lease=60)
            assert await registry.list() == [DRAFTER]

    run(scenario)


def test_the_limit_of_a_call_holds_whatever_the_client_allows(own, prefix):
    async def scenario():
        async with connect_redis(own.url, timeout=30) as client:
            registry = RedisRegistry(client, prefix, timeout=0.2)
            await registry.join(DRAFTER, lease=60)
            own.pause()
            try:
                began = time.monotonic()
                with pytest.raises(ConnectionError, match="TimeoutError"):
                    await registry.list()
                assert 0.15 < time.monotonic() - began < 2
            finally:
                own.resume()
            assert await registry.list() == [DRAFTER]

    run(scenario)


def test_a_restarted_redis_is_empty_and_serves_the_same_client(own, prefix):
    async def scenario():
        async with connect_redis(own.url) as client:
            registry = RedisRegistry(client, prefix)
            await registry.join(DRAFTER, lease=60)
            own.stop()
            with pytest.raises(ConnectionError):
                await registry.list()
            own.start()
            assert await registry.list() == []
            assert not await registry.renew("a", lease=1)
            await registry.join(DRAFTER, lease=60)
            assert await registry.list() == [DRAFTER]

    run(scenario)


def test_a_slow_redis_is_waited_for(redis, prefix):
    async def scenario():
        async with Proxy(redis.address) as proxy, connect_redis(f"redis://127.0.0.1:{proxy.port}") as client:
            registry = RedisRegistry(client, prefix)
            proxy.delay = 0.3
            began = time.monotonic()
            await registry.join(DRAFTER, lease=60)
            assert 0.3 <= time.monotonic() - began < 2
            assert await registry.list() == [DRAFTER]
            proxy.delay = 60
            registry = RedisRegistry(client, prefix, timeout=0.2)
            with pytest.raises(ConnectionError):
                await registry.list()

    run(scenario)


async def cancelled_anytime(make):
    """A task that is cancelled ends, whatever it was at. Before Python 3.12 redis-py forgets most cancellations."""
    for steps in range(30):
        task = asyncio.create_task(make())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,), timeout=2)
        assert task.cancelled()


@pytest.mark.parametrize("call", ["join", "renew", "leave", "list"])
def test_calls_can_be_cancelled(redis, prefix, call):
    async def scenario():
        async with connect_redis(redis.url) as client:
            registry = RedisRegistry(client, prefix)

            async def for_ever():
                while True:
                    await calls(registry)[call]()

            await cancelled_anytime(for_ever)

    run(scenario)
