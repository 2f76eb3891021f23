"""The actor of one generation, between streams that play a script."""

import asyncio
from dataclasses import replace

import pytest

from services.orchestrator.generation import Chunk, Done
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Draft,
    Drafted,
    Observe,
    Open,
    OpenDraft,
    PortError,
    Prefilled,
    Truncate,
    Verdict,
    Verify,
)
from services.speculation.trees import DraftTree
from tests.orchestrator.ports import (
    FIRST,
    NO_ROWS,
    PROMPT,
    Script,
    SendFails,
    Target,
    chain_of,
    generation,
    offer_of,
    right_drafter,
)

ALL = list(range(FIRST, FIRST + 12))


def run(made):
    """Items of a generation; ``made`` builds it inside the loop."""

    async def play():
        return [item async for item in made().chunks()]

    return asyncio.run(asyncio.wait_for(play(), 10))


def outcome(verifier, drafter=None, stop=()):
    *chunks, done = run(lambda: generation(verifier, drafter, stop))
    assert isinstance(done, Done)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    return [token for chunk in chunks for token in chunk.tokens], done, chunks


def test_rounds_bring_tokens_depths_and_final_stats():
    verifier, drafter = Script(Target()), Script(right_drafter())
    tokens, done, chunks = outcome(verifier, drafter)
    assert tokens == ALL
    assert [chunk.depths for chunk in chunks] == [(0,), (1, 2, 0), (1, 2, 0), (1, 2, 0), (1, 0)]
    assert (done.finish_reason, done.seed, done.drafter_lost) == ("length", 5, None)
    assert (done.stats.accepted, done.stats.completion_tokens) == ([2, 2, 2, 1], 12)
    assert (verifier.closed, drafter.closed) == (1, 1)


def after(kind, *answers, then=lambda message: []):
    """Answers the first message of a kind in its own way, all others as ``then`` does."""
    waiting = list(answers)

    def answer(message):
        if isinstance(message, kind) and waiting:
            given = waiting[:]
            waiting.clear()
            return given
        return then(message)

    return answer


TREE = chain_of(FIRST, FIRST + 1)
LOST = {
    "send of open": after(OpenDraft, SendFails(ConnectionError("gone"))),
    "full at open": after(OpenDraft, SendFails(AerieError(Reason.RESOURCE_EXHAUSTED, "full"))),
    "error of open": after(OpenDraft, PortError("s", Reason.INTERNAL, "incident 1")),
    "send of draft": after(Draft, SendFails(ConnectionError("gone"))),
    "full at draft": after(Draft, SendFails(AerieError(Reason.RESOURCE_EXHAUSTED, "full"))),
    "send of observe": after(Observe, SendFails(ConnectionError("gone")), then=right_drafter()),
    "end of stream": after(Draft, ConnectionError("gone")),
    "stream of ours fails": after(Draft, RuntimeError("secret")),
    "error": after(Draft, PortError("s", Reason.STALE_ROUND, "stale")),
    "no tree": after(Draft, Drafted("s", 0, 0, 4, None, 0.1)),
    "a bad tree": after(Draft, Drafted("s", 0, 0, 4, DraftTree(TREE.tokens, TREE.parents + 5, TREE.log_probs), 0.1)),
    "a verdict": after(Draft, Verdict("s", 0, 0, 4, (0,), (66,), None, NO_ROWS, 0.0)),
    "a verdict while the verifier works": after(
        OpenDraft, Verdict("s", 0, 0, 4, (0,), (66,), None, NO_ROWS, 0.0), Prefilled("s", 0, 66, None, 0.0)
    ),
    "nonsense": after(Draft, "hello"),
}


@pytest.mark.parametrize("how", LOST)
def test_whatever_a_drafter_does_the_tokens_are_the_targets(how):
    verifier, drafter = Script(Target()), Script(LOST[how])
    tokens, done, _ = outcome(verifier, drafter)
    assert tokens == ALL
    assert done.drafter_lost
    assert "secret" not in done.drafter_lost
    assert [type(m) for m in drafter.sent].count(Draft) <= 2
    assert drafter.closed == 1


def test_a_tree_with_a_wrong_root_is_not_verified_and_its_drafter_primed_again():
    def answer(message):
        if isinstance(message, Draft):
            return [Drafted("s", 0, message.round, message.base_len, chain_of(42, 65), 0.125)]
        return []

    verifier, first, second = Script(Target()), Script(answer), Script(right_drafter())
    tokens, done, _ = outcome(verifier, offer_of(first, second))
    assert tokens == ALL
    assert done.drafter_lost is None
    assert (first.closed, second.closed) == (1, 1)
    first_tree = next(m for m in verifier.sent if isinstance(m, Verify) and len(m.tree) > 1)
    assert first_tree.tree.tokens[0] == FIRST + first_tree.base_len - len(PROMPT) - 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: after(Open, SendFails(ConnectionError("gone"))), Reason.SERVICE_UNAVAILABLE),
        (lambda: after(Open, SendFails(AerieError(Reason.RESOURCE_EXHAUSTED, "full"))), Reason.RESOURCE_EXHAUSTED),
        (lambda: after(Open, PortError("s", Reason.PROMPT_TOO_LONG, "long")), Reason.PROMPT_TOO_LONG),
        (lambda: after(Verify, SendFails(ConnectionError("gone")), then=Target()), Reason.SERVICE_UNAVAILABLE),
        (lambda: after(Verify, ConnectionError("gone"), then=Target()), Reason.SERVICE_UNAVAILABLE),
        (lambda: after(Verify, RuntimeError("secret"), then=Target()), Reason.SERVICE_UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("drafting", [False, True])
def test_a_verifier_that_is_lost_ends_the_session_clearly(answer, reason, drafting):
    verifier, drafter = Script(answer()), Script(right_drafter()) if drafting else None
    with pytest.raises(AerieError) as caught:
        run(lambda: generation(verifier, drafter))
    assert caught.value.reason is reason
    assert "secret" not in caught.value.message
    assert verifier.closed == 1
    assert drafter is None or drafter.closed == 1


def test_our_own_failure_is_an_incident(monkeypatch):
    """Also in the last round, when the machine has finished and only the client does not know."""
    for failing in (1, 5):
        made = {}

        def make(failing=failing, made=made):
            made["g"] = generation(Script(Target()), Script(right_drafter()))
            calls = iter(range(100))
            push = made["g"]._text.push

            def fail(tokens):
                if next(calls) == failing - 1:
                    raise RuntimeError("secret")
                return push(tokens)

            made["g"]._text.push = fail
            return made["g"]

        with pytest.raises(AerieError, match="incident") as caught:
            run(make)
        assert caught.value.reason is Reason.INTERNAL


def test_a_verdict_after_a_stop_counts_for_nothing():
    """Plain decoding asks for the next round before it emits: its verdict comes after the stop string."""
    verifier = Script(Target())
    tokens, done, chunks = outcome(verifier, stop=("c",))
    assert done.finish_reason == "stop"
    assert (tokens, "".join(chunk.text for chunk in chunks)) == (ALL[:3], "ab")
    assert (done.stats.completion_tokens, done.stats.rounds, done.stats.accepted) == (3, 2, [0, 0])
    assert verifier.sent[-1] == Truncate("s", 0, len(PROMPT) + 3)


def test_stats_of_done_do_not_change_any_more():
    async def play():
        made = generation(Script(Target()), Script(right_drafter()))
        items = [item async for item in made.chunks()]
        done = items[-1]
        made._stats.on_verdict(Verdict("s", 0, 9, 9, (0, 1), (1, 2), None, NO_ROWS, 1.0), 1.0)
        return done

    done = asyncio.run(asyncio.wait_for(play(), 10))
    assert (done.stats.completion_tokens, done.stats.accepted) == (12, [2, 2, 2, 1])


def test_repeated_and_stale_messages_are_counted_once():
    target = Target()

    def twice(message):
        return [answer for answer in target(message) for _ in range(2)]

    right = right_drafter()

    def drafts_twice(message):
        return [answer for answer in right(message) for _ in range(2)]

    tokens, done, _ = outcome(Script(twice), Script(drafts_twice))
    assert tokens == ALL
    assert (done.stats.rounds, done.stats.drafted_rounds) == (4, 4)
    assert done.stats.verify_seconds == 4 * 0.25


def test_many_messages_do_not_end_a_reader():
    """More than an actor's mailbox holds, at once."""
    target = Target()

    def flood(message):
        answers = target(message)
        if isinstance(message, Open):
            answers += [replace(answers[0], token=5)] * 3000
        return answers

    tokens, _, _ = outcome(Script(flood))
    assert tokens == ALL


@pytest.mark.parametrize("early", [True, False])
def test_leaving_early_closes_both_streams(early):
    async def play():
        verifier, drafter = Script(Target()), Script(right_drafter())
        chunks = generation(verifier, drafter).chunks()
        if early:
            task = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
        else:
            await anext(chunks)
        await chunks.aclose()
        return verifier.closed, drafter.closed

    assert asyncio.run(asyncio.wait_for(play(), 10)) == (1, 1)
