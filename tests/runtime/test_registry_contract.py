"""What every registry does, in memory and over Redis."""

import asyncio
import uuid
from contextlib import asynccontextmanager

import pytest

from services.runtime.redis_client import connect_redis
from services.runtime.redis_registry import RedisRegistry
from services.runtime.registry import Entry, MemoryRegistry
from tests.redis_server import redis_server

DEADLINE = 10.0


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def run(request):
    """Runs a coroutine function with an empty registry."""

    @asynccontextmanager
    async def registry():
        if request.param == "memory":
            yield MemoryRegistry()
            return
        async with connect_redis(request.getfixturevalue("redis").url) as client:
            yield RedisRegistry(client, prefix=f"test:{uuid.uuid4().hex}")

    def run(scenario):
        async def limited():
            async with asyncio.timeout(DEADLINE), registry() as made:
                await scenario(made)

        asyncio.run(limited())

    return run


def entry(name, kind="drafter", address="host:1", **data):
    return Entry(name, kind, address, data)


async def names(registry, kind=None):
    return [found.name for found in await registry.list(kind)]


async def gone(registry, name):
    while name in await names(registry):
        await asyncio.sleep(0.01)


def test_entries_are_listed_by_name_and_kind(run):
    async def scenario(registry):
        for name, kind in (("b", "drafter"), ("target", "verifier"), ("a", "drafter"), ("B", "orchestrator")):
            await registry.join(entry(name, kind))
        assert await names(registry) == ["B", "a", "b", "target"]
        assert await names(registry, "drafter") == ["a", "b"]
        assert await names(registry, "verifier") == ["target"]
        assert await names(registry, "other") == []
        assert await names(registry, "*") == []

    run(scenario)


def test_an_entry_is_given_back_as_it_was(run):
    async def scenario(registry):
        data = {"family": "eagle3", "target_fingerprint": None, "sizes": [1, 2.5], "more": {"ü": True}}
        await registry.join(Entry("a", "drafter", "unix:/run/a b", data))
        assert await registry.list() == [Entry("a", "drafter", "unix:/run/a b", data)]
        await registry.join(Entry("b", "drafter", "host:1"))
        assert (await registry.list())[1] == Entry("b", "drafter", "host:1", {})

    run(scenario)


def test_nobody_else_changes_what_is_listed(run):
    async def scenario(registry):
        data = {"sizes": [1]}
        await registry.join(Entry("a", "drafter", "", data))
        data["sizes"].append(2)
        assert [found.data for found in await registry.list()] == [{"sizes": [1]}]

    run(scenario)


def test_an_entry_without_a_lease_stays_until_it_leaves(run):
    async def scenario(registry):
        await registry.join(entry("a"))
        assert await registry.renew("a", lease=0.01)
        await asyncio.sleep(0.05)
        assert await names(registry) == ["a"]
        await registry.leave("a")
        await registry.leave("a")
        assert await names(registry) == []
        assert not await registry.renew("a", lease=1)

    run(scenario)


def test_a_lease_ends_by_itself(run):
    async def scenario(registry):
        await registry.join(entry("a"), lease=0.05)
        await registry.join(entry("b"), lease=60)
        await gone(registry, "a")
        assert await names(registry) == ["b"]
        assert not await registry.renew("a", lease=1)
        assert await names(registry) == ["b"]
        await registry.join(entry("a"), lease=60)
        assert await names(registry) == ["a", "b"]

    run(scenario)


def test_renewing_makes_a_lease_longer_or_shorter(run):
    async def scenario(registry):
        await registry.join(entry("longer"), lease=0.5)
        await registry.join(entry("shorter", "verifier"), lease=60)
        assert await registry.renew("longer", lease=60)
        assert await registry.renew("shorter", lease=0.01)
        await gone(registry, "shorter")
        await asyncio.sleep(0.55)
        assert await names(registry) == ["longer"]

    run(scenario)


def test_joining_again_replaces_everything(run):
    async def scenario(registry):
        await registry.join(entry("a", "drafter", "old", family="x"), lease=0.05)
        await registry.join(entry("a", "verifier", "new"), lease=60)
        await asyncio.sleep(0.1)
        assert await registry.list() == [entry("a", "verifier", "new")]
        assert await names(registry, "drafter") == []
        await registry.join(entry("a", "drafter"))
        assert await registry.list() == [entry("a")]
        await registry.leave("a")
        assert await names(registry) == []

    run(scenario)


def test_names_may_look_like_keys_and_patterns(run):
    async def scenario(registry):
        wanted = ["*", "a", "a:b", "eagle3@[::1]:50052", "x" * 256, "ü ?"]
        for name in wanted:
            await registry.join(entry(name), lease=60)
        assert await names(registry, "drafter") == wanted
        assert await registry.renew("*", lease=60)
        await registry.leave("*")
        assert await names(registry) == wanted[1:]

    run(scenario)


@pytest.mark.parametrize(
    "bad",
    [
        entry(""),
        entry("x" * 257),
        entry("a\nb"),
        entry("\ud800"),
        entry("a", "cook"),
        entry("a", "drafter:x"),
        entry("a", value=object()),
        entry("a", value=float("nan")),
        entry("a", value={1, 2}),
    ],
)
def test_entries_that_cannot_be_kept_are_refused(run, bad):
    async def scenario(registry):
        with pytest.raises(ValueError):  # noqa: PT011
            await registry.join(bad)
        assert await registry.list() == []

    run(scenario)
