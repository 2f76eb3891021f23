import asyncio
import logging

import pytest

from services.runtime.actor import Actor, ActorStopped, MailboxFull, log_incident


class Recorder(Actor):
    """Records messages; a callable is run instead, a future answered with the number of messages so far."""

    def __init__(self, capacity=1024):
        super().__init__("recorder", capacity)
        self.got, self.errors, self.log = [], [], []

    async def started(self):
        self.log.append("started")

    async def stopped(self):
        self.log.append("stopped")

    async def handle(self, message):
        if isinstance(message, asyncio.Future):
            message.set_result(len(self.got))
        elif callable(message):
            await message()
        else:
            self.got.append(message)


class Tolerant(Recorder):
    async def on_error(self, message, error):
        self.errors.append(error)


def run(scenario):
    """Run a coroutine function with a time limit: a hang is a failure."""

    async def limited():
        async with asyncio.timeout(10):
            return await scenario()

    return asyncio.run(limited())


async def fail():
    raise RuntimeError("broken")


async def hang():
    await asyncio.Event().wait()


async def settle(actor):
    """Wait until the actor's task has ended."""
    await asyncio.wait((actor._task,))


def test_messages_are_handled_one_at_a_time_in_order():
    async def scenario():
        actor, gate, events = Recorder(), asyncio.Event(), []

        async def slow():
            events.append("in")
            await gate.wait()
            events.append("out")

        actor.start()
        for message in (slow, 1, slow, 2):
            actor.tell(message)
        await asyncio.sleep(0.01)
        assert (actor.got, events) == ([], ["in"])
        gate.set()
        await actor.drain()
        assert (actor.got, events) == ([1, 2], ["in", "out"] * 2)
        assert actor.log == ["started", "stopped"]

    run(scenario)


def test_a_full_mailbox_refuses():
    async def scenario():
        actor, gate = Recorder(capacity=2), asyncio.Event()
        actor.start()
        actor.tell(gate.wait)
        await asyncio.sleep(0)
        actor.tell(1)
        actor.tell(2)
        with pytest.raises(MailboxFull, match="2 messages"):
            actor.tell(3)
        gate.set()
        await actor.drain()
        assert actor.got == [1, 2]

    run(scenario)


def test_what_must_not_be_lost_passes_a_full_mailbox():
    async def scenario():
        actor, gate = Recorder(capacity=1), asyncio.Event()
        actor.start()
        actor.tell(gate.wait)
        await asyncio.sleep(0)
        for message in (1, 2, 3):
            actor.post(message)
        with pytest.raises(MailboxFull):
            actor.tell(4)
        gate.set()
        await actor.drain()
        assert actor.got == [1, 2, 3]
        for message in (actor.post, actor.tell):
            with pytest.raises(ActorStopped):
                message(5)

    run(scenario)


def test_a_full_actor_that_drains_has_stopped():
    async def scenario():
        actor, gate = Recorder(capacity=1), asyncio.Event()
        actor.start()
        actor.tell(gate.wait)
        draining = asyncio.create_task(actor.drain())
        await asyncio.sleep(0)
        with pytest.raises(ActorStopped):
            actor.tell(1)
        gate.set()
        await draining

    run(scenario)


def test_who_takes_a_callback_back_is_not_called():
    async def scenario():
        actor, called = Recorder(), []
        actor.start()
        stay = actor.on_stop(lambda: called.append("stay"))
        take_back = actor.on_stop(lambda: called.append("gone"))
        take_back()
        take_back()
        await actor.stop()
        await asyncio.sleep(0)
        stay()  # too late, and harmless
        assert called == ["stay"]

    run(scenario)


def test_incidents_leave_a_number_and_the_log_has_the_rest(caplog):
    log = logging.getLogger("test")
    with caplog.at_level(logging.ERROR):
        number = log_incident(log, "a thing failed", RuntimeError("secret"))
    assert number.startswith("incident ")
    assert "secret" not in number
    (record,) = caplog.records
    assert record.getMessage() == f"a thing failed, {number}"
    assert "secret" in caplog.text


def test_ask_gives_the_reply():
    async def scenario():
        actor = Recorder()
        actor.start()
        actor.tell(1)
        assert await actor.ask(lambda reply: reply, deadline=5) == 1
        await actor.stop()

    run(scenario)


def test_ask_gives_the_replys_exception():
    async def scenario():
        actor = Recorder()
        actor.start()

        def refuse(reply):
            async def answer():
                reply.set_exception(KeyError("no"))

            return answer

        with pytest.raises(KeyError):
            await actor.ask(refuse)
        assert actor.alive
        await actor.stop()

    run(scenario)


def test_ask_ends_at_its_deadline_and_a_late_reply_harms_nobody():
    async def scenario():
        actor, gate = Recorder(), asyncio.Event()
        actor.start()
        actor.tell(gate.wait)
        with pytest.raises(TimeoutError):
            await actor.ask(lambda reply: reply, deadline=0.01)
        gate.set()
        assert await actor.ask(lambda reply: reply, deadline=5) == 0
        await actor.stop()

    run(scenario)


@pytest.mark.parametrize("end", ["failure", "stop"])
def test_ask_ends_when_the_actor_does(end):
    async def scenario():
        actor, gate = Recorder(), asyncio.Event()
        actor.start()
        actor.tell(gate.wait)
        actor.tell(fail)
        asked = asyncio.create_task(actor.ask(lambda reply: reply))
        await asyncio.sleep(0)
        if end == "stop":
            await actor.stop()
        gate.set()
        with pytest.raises(ActorStopped):
            await asked

    run(scenario)


def test_what_does_not_run_takes_no_messages():
    async def scenario():
        actor = Recorder()
        with pytest.raises(ActorStopped):
            actor.tell(1)
        with pytest.raises(ActorStopped):
            actor.on_stop(lambda: None)
        await actor.stop()
        actor.start()
        assert actor.alive
        await actor.stop()
        assert not actor.alive
        with pytest.raises(ActorStopped):
            await actor.ask(lambda reply: reply)
        # A caller of a stopped actor sees what a caller of a lost service sees.
        assert issubclass(ActorStopped, ConnectionError)

    run(scenario)


def test_an_error_ends_the_actor_unless_it_is_handled():
    async def scenario():
        actor = Recorder()
        actor.start()
        actor.tell(fail)
        actor.tell(1)
        await settle(actor)
        assert (actor.got, actor.log) == ([], ["started", "stopped"])
        await actor.stop()

        tolerant = Tolerant()
        tolerant.start()
        tolerant.tell(fail)
        tolerant.tell(1)
        await tolerant.drain()
        assert tolerant.got == [1]
        assert [str(error) for error in tolerant.errors] == ["broken"]

    run(scenario)


@pytest.mark.parametrize("end", [Recorder.stop, Recorder.drain, lambda actor: actor.tell(fail)])
def test_on_stop_is_called_once_however_the_actor_ends(end):
    async def scenario():
        actor, called = Recorder(), []
        actor.start()
        actor.on_stop(lambda: called.append(actor.alive))
        await asyncio.sleep(0)
        assert called == []
        if ending := end(actor):
            await ending
        await settle(actor)
        await asyncio.sleep(0)
        assert called == [False]
        await actor.stop()
        assert called == [False]

    run(scenario)


def test_drain_handles_what_was_told_and_takes_no_more():
    async def scenario():
        actor, gate = Recorder(), asyncio.Event()
        actor.start()
        for message in (gate.wait, 1, 2):
            actor.tell(message)
        draining = asyncio.create_task(actor.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(ActorStopped):
            actor.tell(3)
        gate.set()
        await draining
        assert (actor.got, actor.alive) == ([1, 2], False)

    run(scenario)


def test_drain_cancels_at_its_deadline():
    async def scenario():
        actor = Recorder()
        actor.start()
        actor.tell(hang)
        actor.tell(1)
        await actor.drain(deadline=0.01)
        assert (actor.got, actor.log, actor.alive) == ([], ["started", "stopped"], False)

    run(scenario)


@pytest.mark.parametrize("already", [True, False])
def test_drain_returns_when_the_actor_fails_with_messages_waiting(already):
    async def scenario():
        actor, gate = Recorder(), asyncio.Event()
        actor.start()
        for message in (gate.wait, fail, 1):
            actor.tell(message)
        if already:
            gate.set()
            await settle(actor)
        draining = asyncio.create_task(actor.drain())
        await asyncio.sleep(0.01)
        gate.set()
        await draining
        assert actor.got == []

    run(scenario)


def test_drain_before_start_has_nothing_to_do():
    run(lambda: Recorder().drain())


def test_stopping_can_itself_be_cancelled():
    """A caller with a time limit gets its TimeoutError, even when the actor is slow to end."""

    class Slow(Recorder):
        async def stopped(self):
            await asyncio.shield(asyncio.sleep(0.2))

    async def scenario():
        actor = Slow()
        actor.start()
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await actor.stop()
        await actor.stop()

    run(scenario)


def test_an_actor_can_stop_itself():
    async def scenario():
        actor = Recorder()
        actor.start()
        actor.tell(actor.stop)
        await settle(actor)
        assert actor.log == ["started", "stopped"]

    run(scenario)
