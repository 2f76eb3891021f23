"""Subscriptions, and events as text. ``test_bus_contract`` holds what consumer groups of every bus do."""

import asyncio
import time

import pytest

from services.runtime.bus import BusEvent, MemoryBus, read_event, write_event


def waiting(subscription):
    events = []
    while event := subscription.get_nowait():
        events.append(event)
    return events


def test_subscribers_receive_what_matches_their_prefix():
    bus = MemoryBus()
    everything, sessions = bus.subscribe(), bus.subscribe("session.")
    bus.publish("session.opened", session="a", tokens=3)
    bus.publish("round.committed", session="a")
    bus.publish("session.closed", session="a")
    opened = BusEvent("session.opened", {"session": "a", "tokens": 3})
    assert waiting(sessions) == [opened, BusEvent("session.closed", {"session": "a"})]
    assert [event.topic for event in waiting(everything)] == ["session.opened", "round.committed", "session.closed"]
    assert sessions.get_nowait() is None


def test_subscribers_hear_nothing_from_before_they_came_nor_after_they_left():
    bus = MemoryBus()
    bus.publish("a")
    subscription = bus.subscribe()
    bus.publish("b")
    bus.unsubscribe(subscription)
    bus.publish("c")
    assert waiting(subscription) == [BusEvent("b")]


def test_a_full_subscriber_drops_and_counts_without_harm_to_others():
    bus = MemoryBus()
    slow, fast = bus.subscribe(capacity=2), bus.subscribe(capacity=10)
    for number in range(5):
        bus.publish("n", number=number)
    assert [event.data["number"] for event in waiting(slow)] == [0, 1]
    assert (slow.dropped, fast.dropped, bus.dropped) == (3, 0, 3)
    assert len(waiting(fast)) == 5
    bus.publish("n", number=5)
    assert [event.data["number"] for event in waiting(slow)] == [5]
    assert slow.dropped == 3


def test_events_of_other_topics_neither_fill_nor_count():
    bus = MemoryBus()
    subscription = bus.subscribe("session.", capacity=1)
    for _ in range(5):
        bus.publish("round.committed")
    bus.publish("session.opened")
    assert (len(waiting(subscription)), subscription.dropped) == (1, 0)


def test_iteration_waits_for_events():
    async def scenario():
        bus = MemoryBus()
        subscription = bus.subscribe()
        bus.publish("first")
        events = aiter(subscription)
        assert (await anext(events)).topic == "first"
        following = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        assert not following.done()
        bus.publish("second")
        assert (await following).topic == "second"

    async def limited():
        async with asyncio.timeout(5):
            await scenario()

    asyncio.run(limited())


def test_events_cannot_be_renamed():
    with pytest.raises(AttributeError):
        BusEvent("a").topic = "b"


def test_a_group_that_nobody_serves_keeps_what_its_queue_takes():
    async def scenario():
        bus = MemoryBus(capacity=3)
        events = bus.consume("group", "consumer")
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        bus.publish("n", number=0)
        assert (await waiting).data == {"number": 0}
        for number in range(1, 6):
            bus.publish("n", number=number)
        assert bus.dropped == 2
        assert [(await anext(events)).data["number"] for _ in range(3)] == [1, 2, 3]

    asyncio.run(scenario())


def test_an_event_survives_its_text():
    before = time.time_ns() // 1_000_000
    text = write_event("session.opened", {"session": "ü\ud800", "tokens": [1, None, {"x": 0.5}]})
    event = read_event(text)
    assert event == BusEvent("session.opened", {"session": "ü\ud800", "tokens": [1, None, {"x": 0.5}]})
    assert before <= event.unix_ms <= time.time_ns() // 1_000_000
    assert read_event(text.encode()).unix_ms == event.unix_ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        b"\xff",
        "[]",
        "{}",
        '{"topic": 1, "data": {}, "unix_ms": 1}',
        '{"topic": "a", "data": [], "unix_ms": 1}',
        '{"topic": "a", "data": {}, "unix_ms": "now"}',
        "[" * 100_000,
    ],
)
def test_what_is_no_event_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011
        read_event(text)
