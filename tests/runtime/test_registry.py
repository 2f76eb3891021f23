"""The registry in memory, on a clock of the test's. ``test_registry_contract`` holds what every registry does."""

import asyncio
from dataclasses import FrozenInstanceError

import pytest

from services.runtime.registry import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    Entry,
    MemoryRegistry,
    read_entry,
    write_entry,
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def entry(name):
    return Entry(name, "drafter", f"host:{name}")


async def names(registry):
    return [found.name for found in await registry.list()]


def test_a_lease_ends_unless_it_is_renewed():
    async def scenario():
        clock = Clock()
        registry = MemoryRegistry(now=clock)
        await registry.join(entry("a"), lease=3)
        await registry.join(entry("b"))
        clock.now += 2.9
        assert await registry.renew("a", 3)
        clock.now += 2.9
        assert await names(registry) == ["a", "b"]
        assert await registry.renew("a", 10)
        clock.now += 9.9
        assert await names(registry) == ["a", "b"]
        clock.now += 0.1
        assert await names(registry) == ["b"]
        assert not await registry.renew("a", 3)
        assert await names(registry) == ["b"]

    asyncio.run(scenario())


def test_leases_end_one_by_one():
    async def scenario():
        clock = Clock()
        registry = MemoryRegistry(now=clock)
        for name, lease in (("a", 1), ("b", 3), ("c", 2), ("d", None)):
            await registry.join(entry(name), lease)
        seen = []
        for _ in range(4):
            seen.append(await names(registry))
            clock.now += 1
        assert seen == [["a", "b", "c", "d"], ["b", "c", "d"], ["b", "d"], ["d"]]

    asyncio.run(scenario())


def test_an_instance_is_gone_after_three_missed_beats():
    assert LEASE_SECONDS == 3 * HEARTBEAT_SECONDS


def test_entries_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        entry("a").address = "elsewhere"


def test_an_entry_survives_its_text():
    original = Entry("verifier:1 ü", "verifier", "unix:/run/a", {"family": "eagle3", "n": [1, None, {"x": 0.5}]})
    assert read_entry(write_entry(original)) == original
    assert read_entry(write_entry(original).encode()) == original


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        b"\xff\xfe\x00",
        "{}",
        '{"name": 1, "kind": "drafter", "address": "", "data": {}}',
        '{"name": "a", "kind": "cook", "address": "", "data": {}}',
        '{"name": "a", "kind": ["drafter"], "address": "", "data": {}}',
        '{"name": "a", "kind": "drafter", "data": {}}',
        '{"name": "a", "kind": "drafter", "address": "", "data": []}',
        "[" * 100_000,
    ],
)
def test_what_is_no_entry_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011
        read_entry(text)
