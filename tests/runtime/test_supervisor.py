import asyncio
import logging

from services.runtime import supervisor as module
from services.runtime.actor import Actor
from services.runtime.supervisor import Supervisor


class Counter(Actor):
    """Counts messages; "fail" fails."""

    def __init__(self):
        super().__init__("counter")
        self.count, self.ended_well = 0, False

    async def handle(self, message):
        if message == "fail":
            raise RuntimeError("broken")
        self.count += 1
        if isinstance(message, asyncio.Future):
            message.set_result(self.count)

    async def stopped(self):
        self.ended_well = True


def run(scenario):
    async def limited():
        async with asyncio.timeout(10):
            return await scenario()

    return asyncio.run(limited())


async def next_actor(supervisor, before):
    while supervisor.actor is before or not supervisor.actor.alive:
        await asyncio.sleep(0)


def test_a_failed_actor_is_made_anew(caplog):
    async def scenario():
        supervisor = Supervisor(Counter, backoff=(0.0, 0.0))
        supervisor.start()
        first = supervisor.actor
        assert await first.ask(lambda reply: reply) == 1
        first.tell("fail")
        await next_actor(supervisor, first)
        assert first.ended_well
        assert supervisor.waiting == 0
        assert await supervisor.actor.ask(lambda reply: reply) == 1  # with a state of its own
        assert supervisor.failure is None
        await supervisor.stop()

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "counter failed" in caplog.text
    assert "RuntimeError: broken" in caplog.text
    assert "counter restarts in 0 s" in caplog.text


def test_it_waits_longer_each_time_then_gives_up_and_says_why(monkeypatch):
    async def scenario():
        slept, made, sleep = [], [], asyncio.sleep

        async def record(delay):
            slept.append(delay)
            await sleep(0)

        monkeypatch.setattr(asyncio, "sleep", record)

        class Failing(Counter):
            async def started(self):
                made.append(self)
                raise RuntimeError("no use")

        supervisor = Supervisor(Failing)
        supervisor.start()
        await supervisor._task
        assert slept == [0.1, 0.5, 2.0]
        assert len(made) == 4
        assert not any(actor.alive for actor in made)
        assert supervisor.failure == "counter failed 4 times: no use"
        await supervisor.stop()

    run(scenario)


def test_failures_far_apart_do_not_add_up(monkeypatch):
    monkeypatch.setattr(module, "STEADY_SECONDS", -1.0)  # every actor has run for long

    async def scenario():
        supervisor = Supervisor(Counter, backoff=(0.0,))
        supervisor.start()
        for _ in range(5):
            before = supervisor.actor
            before.tell("fail")
            await next_actor(supervisor, before)
        assert supervisor.failure is None
        await supervisor.stop()

    run(scenario)


def test_stopping_it_stops_its_actor_for_good():
    async def scenario():
        supervisor = Supervisor(Counter, backoff=(0.0,))
        supervisor.start()
        await asyncio.sleep(0)
        actor = supervisor.actor
        await supervisor.stop()
        await asyncio.sleep(0.01)
        assert actor.ended_well
        assert supervisor.actor is actor
        assert not actor.alive

    run(scenario)


def test_an_actor_that_was_stopped_is_not_made_anew():
    async def scenario():
        supervisor = Supervisor(Counter, backoff=(0.0,))
        supervisor.start()
        await supervisor.actor.stop()
        await asyncio.sleep(0.01)
        assert not supervisor.actor.alive
        assert supervisor.failure is None
        await supervisor.stop()

    run(scenario)
