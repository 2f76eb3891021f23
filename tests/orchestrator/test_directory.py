"""Which drafters are offered: as they answer, fit, hang, move, leave and come back."""

import asyncio
import logging

import pytest

from services.orchestrator import directory as directory_module
from services.orchestrator.directory import Directory, Gone
from services.runtime.bus import MemoryBus
from services.runtime.registry import Entry, MemoryRegistry
from services.speculation.messages import DrafterInfo, DrafterStatus, TargetInfo

TARGET = TargetInfo("t", "abc", "tok", 30, 576, 1000, 8192, (2,), "float32", "cpu", 64)
INFO = DrafterInfo("d", "eagle3", (2, 15), "abc", 0)


class Drafter:
    """Says how it is, or does not."""

    def __init__(self, info=INFO):
        self.status_now, self.answers, self.asked = DrafterStatus(info), "at once", 0

    async def status(self):
        self.asked += 1
        if self.answers == "never":
            await asyncio.Event().wait()
        if self.answers == "refuses":
            raise ConnectionError("it is not ready")
        return self.status_now


class World:
    """A registry with drafters at addresses, and the directory over it."""

    def __init__(self, local=False):
        self.registry, self.bus, self.at = MemoryRegistry(), MemoryBus(), {}
        self.events = self.bus.subscribe("drafter.")
        self.directory = Directory(self.registry, self.dial, TARGET, self.bus, local)

    def dial(self, address):
        if address not in self.at:
            raise ConnectionError("nobody listens")
        return self.at[address]

    async def add(self, name, info=INFO):
        self.at[name] = Drafter(info)
        await self.registry.join(Entry(name, "drafter", name))
        return self.at[name]

    async def offers(self):
        await self.directory.refresh()
        return sorted(self.directory.offers)

    def topics(self):
        seen = []
        while event := self.events.get_nowait():
            seen.append((event.topic, event.data["drafter"]))
        return seen


def play(scenario, **options):
    async def run():
        world = World(**options)
        world.directory.start()
        try:
            await asyncio.wait_for(scenario(world), 10)
        finally:
            await world.directory.stop()

    asyncio.run(run())


def test_whoever_answers_and_fits_is_offered():
    async def scenario(world):
        await world.add("a")
        await world.add("b", DrafterInfo("d", "eagle3", (2,), None, 0))
        assert await world.offers() == ["a", "b"]
        assert world.topics() == [("drafter.joined", "a"), ("drafter.joined", "b")]
        assert await world.offers() == ["a", "b"]
        assert world.topics() == []

    play(scenario)


def test_a_drafter_of_another_target_is_never_offered(caplog):
    async def scenario(world):
        drafter = await world.add("a", DrafterInfo("d", "eagle3", (2,), "xyz", 0))
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert await world.offers() == []
        assert "xyz" in world.directory.unfit["a"]
        assert len(caplog.records) == 1
        # One that turns out to be another one, too.
        drafter.status_now = DrafterStatus(INFO)
        assert await world.offers() == ["a"]
        assert world.directory.unfit == {}
        drafter.status_now = DrafterStatus(DrafterInfo("d", "eagle3", (2,), "xyz", 0))
        assert await world.offers() == []
        assert world.topics() == [("drafter.joined", "a"), ("drafter.left", "a")]

    play(scenario)


@pytest.mark.parametrize("taps", [(), (2, 2), (2, 31), (-1,)])
def test_a_drafter_whose_taps_the_verifier_would_refuse_is_never_offered(taps):
    async def scenario(world):
        await world.add("a", DrafterInfo("d", "eagle3", taps, "abc", 0))
        assert await world.offers() == []
        assert "tap" in world.directory.unfit["a"]

    play(scenario)


def test_one_that_hangs_is_offered_until_it_has_missed_three_beats(monkeypatch):
    monkeypatch.setattr(directory_module, "PROBE_SECONDS", 0.01)

    async def scenario(world):
        drafter = await world.add("a")
        assert await world.offers() == ["a"]
        drafter.answers = "never"
        assert [len(await world.offers()) for _ in range(3)] == [1, 1, 0]
        first = world.topics()
        drafter.answers = "at once"
        assert await world.offers() == ["a"]
        assert first + world.topics() == [("drafter.joined", "a"), ("drafter.left", "a"), ("drafter.joined", "a")]
        drafter.answers = "never"
        await world.offers()
        drafter.answers = "at once"
        await world.offers()
        assert world.directory.offers["a"].missed == 0

    play(scenario)


def test_one_that_refuses_or_is_gone_leaves_at_once_and_may_come_back_as_another():
    async def scenario(world):
        drafter = await world.add("a")
        await world.offers()
        before = world.directory.offers["a"]
        drafter.answers = "refuses"
        assert await world.offers() == []
        assert world.directory.unfit["a"] == "it is not ready"
        drafter.answers = "at once"
        assert await world.offers() == ["a"]
        assert world.directory.offers["a"] is not before
        del world.at["a"]
        assert await world.offers() == []

    play(scenario)


def test_a_session_that_loses_its_stream_takes_the_offer_back():
    async def scenario(world):
        await world.add("a")
        await world.offers()
        lost = world.directory.offers["a"]
        joined = []
        unsubscribe = world.directory.on_join(lambda: joined.append(world.directory.offers["a"]))
        world.directory.post(Gone(lost))
        assert await world.offers() == ["a"]
        assert joined == [world.directory.offers["a"]] != [lost]
        world.directory.post(Gone(lost))  # an old one's end is not the new one's
        await world.offers()
        assert joined == [world.directory.offers["a"]]
        unsubscribe()
        world.directory.post(Gone(joined[0]))
        await world.offers()
        assert len(joined) == 1

    play(scenario)


def test_the_registry_decides_who_is_asked_and_its_absence_changes_nothing():
    async def scenario(world):
        await world.add("a")
        await world.add("b")
        await world.offers()
        await world.registry.leave("a")
        assert await world.offers() == ["b"]

        async def away(kind):
            raise ConnectionError("Redis is away")

        there, world.registry.list = world.registry.list, away
        assert await world.offers() == ["b"]
        world.at["b"].answers = "refuses"
        assert await world.offers() == []
        world.registry.list = there
        world.at["b"].answers = "at once"
        assert await world.offers() == ["b"]

    play(scenario)


def test_one_that_moves_is_asked_at_its_new_place():
    async def scenario(world):
        await world.add("a")
        await world.offers()
        world.at["elsewhere"] = Drafter()
        await world.registry.join(Entry("a", "drafter", "elsewhere"))
        assert await world.offers() == ["a"]
        assert world.directory.offers["a"].address == "elsewhere"

    play(scenario)


def test_drafters_are_asked_by_themselves_unless_they_are_of_this_process(monkeypatch):
    monkeypatch.setattr(directory_module, "HEARTBEAT_SECONDS", 0.01)

    async def scenario(world):
        drafter = await world.add("a")
        await asyncio.sleep(0.1)
        assert (drafter.asked > 2) == (not world.directory._local)
        if not world.directory._local:
            assert world.directory.offers["a"].pace is not None

    play(scenario)
    play(scenario, local=True)


def test_a_failure_of_ours_fails_one_refresh():
    async def scenario(world):
        await world.add("a")

        async def fails():
            raise RuntimeError("a bug")

        world.at["a"].status = fails
        with pytest.raises(RuntimeError):
            await world.directory.refresh()
        world.at["a"] = Drafter()
        assert await world.offers() == ["a"]

    play(scenario)
