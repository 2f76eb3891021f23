"""Drafters that are late, hang, break, lack rows or come later: the tokens stay, and another drafter takes over."""

import asyncio
from dataclasses import replace

import pytest

from services.orchestrator import drafter_link
from services.orchestrator.generation import Done
from services.orchestrator.pace import DraftPace
from services.runtime.bus import MemoryBus
from services.speculation.errors import Reason
from services.speculation.messages import Attach, Draft, NeedFeatures, Observe, OpenDraft, PortError, Verify
from tests.orchestrator.ports import FIRST, Script, Target, generation, offer_of, right_drafter

LAST = FIRST + 60
ALL = list(range(FIRST, LAST + 1))


class SlowTarget(Script):
    """A verifier that takes 4 ms a round, so that clocks have a say."""

    async def send(self, message):
        if isinstance(message, Verify):
            await asyncio.sleep(0.004)
        await super().send(message)


class Supply:
    """Gives offers in turn; remembers which were said to be gone."""

    def __init__(self, *offers):
        self.offers, self.gone_ones, self.listeners = list(offers), [], set()

    def pick(self, without):
        return next((offer for offer in self.offers if offer not in without), None)

    def gone(self, offer):
        self.gone_ones.append(offer.name)

    def on_join(self, listener):
        self.listeners.add(listener)
        return lambda: self.listeners.discard(listener)

    def join(self, offer):
        self.offers.append(offer)
        for listener in tuple(self.listeners):
            listener()


def quick_pace():
    """Answers are expected within 10 ms."""
    pace = DraftPace()
    pace.observe(0.001)
    return pace


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("services.orchestrator.pace.LEAST_SECONDS", 0.01)
    monkeypatch.setattr(drafter_link, "LOST_SECONDS", 0.03)
    monkeypatch.setattr(drafter_link, "PRIMING_SECONDS", 0.03)


def play(offer, supply=None, during=None, last=LAST):
    """Tokens, the end and the events of one generation."""

    async def scenario():
        bus = MemoryBus()
        events = bus.subscribe(capacity=10_000)
        verifier = SlowTarget(Target(last))
        made = generation(verifier, offer, supply=supply, bus=bus, max_tokens=100)
        tokens, done = [], None
        async for item in made.chunks():
            if isinstance(item, Done):
                done = item
            else:
                tokens += item.tokens
                if during:
                    during(len(tokens), supply)
        seen = []
        while event := events.get_nowait():
            seen.append((event.topic, event.data))
        return tokens, done, seen, verifier

    return asyncio.run(asyncio.wait_for(scenario(), 20))


def topics(events, prefix="drafter."):
    return [(topic, data["drafter"]) for topic, data in events if topic.startswith(prefix)]


def silent_after(drafts):
    """Answers rightly so often, then never again."""
    right, left = right_drafter(), [drafts]

    def answer(message):
        if isinstance(message, Draft):
            left[0] -= 1
            if left[0] < 0:
                return []
        return right(message)

    return answer


def test_a_drafter_that_hangs_is_given_up_and_another_takes_over():
    hung, good = offer_of(Script(silent_after(3)), name="hung", pace=quick_pace()), offer_of(Script(right_drafter()))
    tokens, done, events, verifier = play(hung, Supply(good))
    assert tokens == ALL
    assert topics(events) == [("drafter.lost", "hung"), ("drafter.attached", "d")]
    assert "did not answer" in done.drafter_lost
    assert done.stats.late_rounds == 1
    assert done.stats.fallback_rounds >= 2
    assert done.stats.drafted_rounds > 8
    # A round may begin between the loss and the other one's coming: then nobody's taps are attached meanwhile.
    assert [bool(m.taps) for m in verifier.sent if isinstance(m, Attach)] in ([True], [False, True])


@pytest.mark.parametrize("field", ["round", "epoch", "session"])
@pytest.mark.parametrize("lacking", [False, True])
def test_an_answer_to_what_was_not_asked_costs_the_drafter(field, lacking):
    """The machine takes no notice of it; waiting on, it would wait for ever."""

    def wrong(message):
        if not isinstance(message, Draft) or message.round < 3:
            return right_drafter()(message)
        answer = NeedFeatures(message.session, 0, message.round, ((0, 1),)) if lacking else right_drafter()(message)[0]
        return [replace(answer, **{field: "another" if field == "session" else 77})]

    tokens, done, _, _ = play(offer_of(Script(wrong), pace=quick_pace()), Supply())
    assert tokens == ALL
    assert "not asked" in done.drafter_lost


def test_a_late_draft_costs_rounds_and_not_the_drafter():
    """It answers after the deadline, long before it counts as lost: from then on it drafts again."""

    class Late(Script):
        async def send(self, message):
            if isinstance(message, Draft) and message.round in (2, 9):
                asyncio.get_running_loop().call_later(0.018, lambda: self.sent_late(message))
                self.sent.append(message)
                return
            await super().send(message)

        def sent_late(self, message):
            for answer in right_drafter()(message):
                self.inbox.put_nowait(answer)

    late = Late(right_drafter())
    tokens, done, events, _ = play(offer_of(late, pace=quick_pace()), Supply())
    assert tokens == ALL
    assert done.drafter_lost is None
    assert done.stats.fallback_rounds >= done.stats.late_rounds >= 2
    late_rounds = [data["round"] for topic, data in events if topic == "round.committed" and data["late"]]
    assert {2, 9} <= set(late_rounds)  # and those that a busy machine delays
    assert len(late_rounds) == done.stats.late_rounds
    # Every row came, once and in order.
    read = [m.observe if isinstance(m, Draft) else m for m in late.sent]
    observes = [m for m in read if isinstance(m, Observe)]
    bases, lengths = [m.features.base for m in observes], [len(m.tokens) for m in observes]
    assert bases == [sum(lengths[:i]) for i in range(len(bases))]


@pytest.mark.parametrize("with_another", [True, False])
def test_a_drafter_whose_stream_breaks_is_reported_and_replaced(with_another):
    def breaks(message):
        if isinstance(message, Draft) and message.round == 4:
            return [ConnectionError("gone")]
        return right_drafter()(message)

    others = [offer_of(Script(right_drafter()), name="other")] if with_another else []
    supply = Supply(*others)
    tokens, done, events, _ = play(offer_of(Script(breaks), pace=quick_pace()), supply)
    assert tokens == ALL
    assert supply.gone_ones == ["d"]
    assert topics(events) == [("drafter.lost", "d"), *([("drafter.attached", "other")] if with_another else [])]
    assert done.drafter_lost == "gone"
    assert (done.stats.drafted_rounds > 6) == with_another


def test_a_drafter_that_errs_is_lost_to_this_session_alone():
    def errs(message):
        return [PortError("s", Reason.INTERNAL, "incident 7")] if isinstance(message, Draft) else []

    bad = offer_of(Script(errs), name="bad")
    supply = Supply(bad)
    tokens, done, events, _ = play(bad, supply)
    assert tokens == ALL
    assert supply.gone_ones == []
    assert topics(events) == [("drafter.lost", "bad")]  # not taken again
    assert bad.sessions == 0
    assert "incident 7" in done.drafter_lost


def test_a_drafter_that_comes_late_is_attached():
    fresh = Script(right_drafter())

    def during(count, supply):
        if count == 10:
            supply.join(offer_of(fresh, name="fresh", pace=quick_pace()))

    tokens, done, events, verifier = play(None, Supply(), during)
    assert tokens == ALL
    assert topics(events) == [("drafter.attached", "fresh")]
    assert done.stats.drafted_rounds > 8
    opened = next(m for m in fresh.sent if isinstance(m, OpenDraft))
    assert opened.session == "s#1"
    attach = next(m for m in verifier.sent if isinstance(m, Attach))
    assert (attach.number, attach.taps) == (1, (1,))
    # All history that came has gone on to it: four bytes a row.
    history = next(m for m in fresh.sent if isinstance(m, Observe))
    assert verifier.acknowledged == 4 * len(history.tokens)


def test_a_drafter_that_lacks_rows_is_primed_again():
    def lacks(message):
        if isinstance(message, Draft) and message.round == 3:
            return [NeedFeatures("s", 0, 3, ((1, 5),))]
        return right_drafter()(message)

    def gap(message):
        if isinstance(message, Draft) and message.session == "s#1" and message.round > 6:
            return [PortError("s", Reason.FEATURE_GAP, "a gap")]
        return right_drafter()(message)

    first, second, third = Script(lacks), Script(gap), Script(right_drafter())
    tokens, done, events, _ = play(offer_of(first, second, third), Supply())
    assert tokens == ALL
    assert done.drafter_lost is None
    assert topics(events) == [("drafter.resynced", "d")] * 2
    assert [script.closed for script in (first, second, third)] == [1, 1, 1]
    assert next(m for m in third.sent if isinstance(m, OpenDraft)).session == "s#2"


def test_a_drafter_that_cannot_be_written_to_holds_nothing_up():
    """Its transport takes nothing: rounds go on, and the session ends at once when it is cancelled."""

    class Stuck(Script):
        async def send(self, message):
            await asyncio.Event().wait()

    tokens, done, events, verifier = play(offer_of(Stuck(right_drafter()), pace=quick_pace()), Supply())
    assert tokens == ALL
    assert topics(events) == [("drafter.lost", "d")]
    assert verifier.acknowledged == 12  # the prompt's three rows, which nobody reads any more
    assert done.stats.drafted_rounds == 0


def test_rounds_say_where_their_time_went():
    _, done, events, _ = play(offer_of(Script(right_drafter())))
    rounds = [data for topic, data in events if topic == "round.committed"]
    assert len(rounds) == done.stats.rounds
    assert sum(data["tokens"] for data in rounds) == len(ALL) - 1
    for data in rounds:
        # What both sides claim: 0.125 and 0.25 s. (Scripts claim more than passes, so nothing is left for the rest.)
        assert (data["draft_seconds"], data["verify_seconds"], data["network_seconds"]) in {
            (0.125, 0.25, 0.0),
            (0.0, 0.25, 0.0),
        }
        assert data["accepted"] == data["tokens"] - 1 <= data["nodes"] - 1
        assert 0.004 <= data["round_seconds"] < 5
    (opened,) = [data for topic, data in events if topic == "session.opened"]
    assert (opened["prompt_tokens"], opened["drafter"]) == (3, "d")
    (finished,) = [data for topic, data in events if topic == "session.finished"]
    assert (finished["reason"], finished["completion_tokens"]) == ("length", len(ALL))
