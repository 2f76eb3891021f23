"""Membership: in the registry while it runs, whatever becomes of the registry, and at nobody's cost."""

import asyncio
import logging
import subprocess
import sys
import time
import uuid
from contextlib import asynccontextmanager

import pytest

from services.runtime.actor import ActorStopped
from services.runtime.membership import Membership
from services.runtime.redis_client import connect_redis
from services.runtime.redis_registry import RedisRegistry
from services.runtime.registry import HEARTBEAT_SECONDS, LEASE_SECONDS, Entry, MemoryRegistry
from tests.redis_server import own_redis

DRAFTER = Entry("a", "drafter", "host:1", {"family": "eagle3"})
BEAT = 0.02


@pytest.fixture(scope="module")
def redis():
    with own_redis() as server:
        yield server


class Flaky(MemoryRegistry):
    """Notes the calls; away, it raises; hanging, it never answers."""

    def __init__(self):
        super().__init__()
        self.calls, self.away, self.hanging = [], False, False

    async def note(self, call):
        self.calls.append(call)
        if self.hanging:
            await asyncio.Event().wait()
        if self.away:
            raise ConnectionError("away")

    async def join(self, entry, lease=None):
        await self.note("join")
        await super().join(entry, lease)

    async def renew(self, name, lease):
        await self.note("renew")
        return await super().renew(name, lease)

    async def leave(self, name):
        await self.note("leave")
        await super().leave(name)


def run(scenario):
    async def limited():
        async with asyncio.timeout(15):
            await scenario()

    asyncio.run(limited())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


async def listed(registry, *wanted):
    """Wait until the registry lists exactly these."""
    while await registry.list() != list(wanted):
        await asyncio.sleep(0.005)


@asynccontextmanager
async def member(registry, heartbeat=BEAT, lease=60.0):
    membership = Membership(registry, DRAFTER, heartbeat, lease)
    membership.start()
    try:
        yield membership
    finally:
        await membership.stop()


def test_it_joins_renews_and_leaves():
    async def scenario():
        registry = Flaky()
        async with member(registry) as membership:
            await listed(registry, DRAFTER)
            await until(lambda: registry.calls.count("renew") >= 5)
            assert membership.joined
        assert not membership.joined
        assert await registry.list() == []
        assert registry.calls[0] == "join"
        assert registry.calls[-1] == "leave"
        assert set(registry.calls[1:-1]) == {"renew"}

    run(scenario)


def test_renewing_keeps_a_short_lease_alive():
    async def scenario():
        registry = MemoryRegistry()
        async with member(registry, heartbeat=0.05, lease=0.4):
            await listed(registry, DRAFTER)
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                assert await registry.list() == [DRAFTER]
                await asyncio.sleep(0.01)

    run(scenario)


def test_by_default_it_beats_three_times_a_lease():
    membership = Membership(MemoryRegistry(), DRAFTER)
    assert (membership._heartbeat, membership._lease) == (HEARTBEAT_SECONDS, LEASE_SECONDS)


def test_it_joins_again_when_the_registry_has_forgotten_it():
    async def scenario():
        registry = Flaky()
        async with member(registry):
            await listed(registry, DRAFTER)
            await MemoryRegistry.leave(registry, "a")
            await listed(registry, DRAFTER)
            assert registry.calls.count("join") == 2

    run(scenario)


def test_updates_replace_the_entry_at_once():
    async def scenario():
        registry = Flaky()
        async with member(registry, heartbeat=60) as membership:
            await listed(registry, DRAFTER)
            busy = Entry("a", "drafter", "host:2", {"sessions": 3})
            membership.tell(busy)
            await listed(registry, busy)
            # What is told last is what a later join says.
            await MemoryRegistry.leave(registry, "a")
            membership.tell(None)
            await listed(registry, busy)
        assert "renew" in registry.calls

    run(scenario)


def test_updates_that_no_registry_takes_are_refused_and_harm_nothing():
    async def scenario():
        registry = MemoryRegistry()
        async with member(registry) as membership:
            await listed(registry, DRAFTER)
            with pytest.raises(ValueError, match="keeps its name"):
                membership.tell(Entry("b", "drafter", "host:1"))
            with pytest.raises(ValueError, match="JSON"):
                membership.tell(Entry("a", "drafter", "host:1", {"port": object()}))
            await asyncio.sleep(3 * BEAT)
            assert await registry.list() == [DRAFTER]
            assert membership.alive
        with pytest.raises(ActorStopped):
            membership.tell(DRAFTER)

    with pytest.raises(ValueError, match="name"):
        Membership(MemoryRegistry(), Entry("", "drafter", "host:1"))
    run(scenario)


@pytest.mark.parametrize("away", [False, True], ids=["here", "away"])
def test_it_leaves_when_it_drains(away):
    async def scenario():
        registry = Flaky()
        async with member(registry) as membership:
            await listed(registry, DRAFTER)
            registry.away = away
            await asyncio.sleep(3 * BEAT)
            await membership.drain(deadline=5)
            assert not membership.alive
            assert registry.calls[-1] == "leave"
            count = len(registry.calls)
            await asyncio.sleep(3 * BEAT)
            assert len(registry.calls) == count

    run(scenario)


def test_an_outage_is_two_lines_and_no_hot_loop(caplog):
    async def scenario():
        registry = Flaky()
        async with member(registry, heartbeat=0.2) as membership:
            await listed(registry, DRAFTER)
            registry.away = True
            await MemoryRegistry.leave(registry, "a")
            registry.calls.clear()
            await asyncio.sleep(1.0)
            assert 2 <= len(registry.calls) <= 8
            registry.away = False
            await listed(registry, DRAFTER)
            await until(lambda: membership.joined)

    with caplog.at_level(logging.DEBUG, logger="services"):
        run(scenario)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "membership of a" in caplog.text


def test_it_starts_without_a_registry_and_joins_once_there_is_one():
    async def scenario():
        registry = Flaky()
        registry.away = True
        async with member(registry) as membership:
            await until(lambda: len(registry.calls) >= 3)
            assert not membership.joined
            registry.away = False
            await listed(registry, DRAFTER)

    run(scenario)


def test_a_registry_that_never_answers_holds_up_nobody():
    async def scenario():
        registry = Flaky()
        async with member(registry) as membership:
            await listed(registry, DRAFTER)
            registry.hanging = True
            await asyncio.sleep(3 * BEAT)
            began = time.monotonic()
            for _ in range(100):
                membership.tell(DRAFTER)
            assert time.monotonic() - began < 0.1
            await membership.stop()
            assert time.monotonic() - began < 2

    run(scenario)


def test_a_redis_restarted_empty_lists_it_again_soon_and_quietly(redis, caplog):
    async def scenario():
        async with connect_redis(redis.url) as client:
            registry = RedisRegistry(client, f"test:{uuid.uuid4().hex}")
            async with member(registry, 0.2, 60):
                await listed(registry, DRAFTER)
                await client.set("marker", "data")
                await asyncio.to_thread(redis.stop)
                await asyncio.sleep(0.7)
                await asyncio.to_thread(redis.start)
                assert await client.get("marker") is None
                began = time.monotonic()
                await listed(registry, DRAFTER)
                assert time.monotonic() - began < 5
            assert await registry.list() == []

    with caplog.at_level(logging.DEBUG, logger="services"):
        run(scenario)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


CHILD = """
import asyncio, sys
from services.runtime.membership import Membership
from services.runtime.redis_client import connect_redis
from services.runtime.redis_registry import RedisRegistry
from services.runtime.registry import Entry

async def main(url, prefix):
    async with connect_redis(url) as client:
        membership = Membership(RedisRegistry(client, prefix), Entry("a", "drafter", "host:1"), 0.2, 0.6)
        membership.start()
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def test_the_entry_of_a_killed_process_is_gone_after_three_missed_beats(redis):
    async def scenario():
        prefix = f"test:{uuid.uuid4().hex}"
        process = subprocess.Popen([sys.executable, "-c", CHILD, redis.url, prefix])
        try:
            async with connect_redis(redis.url) as client:
                registry = RedisRegistry(client, prefix)
                entry = Entry("a", "drafter", "host:1")
                await listed(registry, entry)
                await asyncio.sleep(0.8)  # it lives longer than one lease
                assert await registry.list() == [entry]
                process.kill()
                killed = time.monotonic()
                process.wait()
                await listed(registry)
                assert 0.2 < time.monotonic() - killed < 1.5
        finally:
            process.kill()
            process.wait()

    run(scenario)
