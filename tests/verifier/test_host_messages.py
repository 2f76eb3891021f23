"""Repeats, stale rounds, epochs, ends of streams and failures: one session's trouble is its own."""

import asyncio
import logging

import numpy as np
import pytest

from services.runtime.bus import MemoryBus
from services.speculation import warpers
from services.speculation.errors import Reason
from services.speculation.messages import Open
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from tests.plain import GREEDY, decode
from tests.verifier.client import Client, busy_device, chain, hosting, run
from tests.verifier.conftest import Tiny
from tests.verifier.test_kv import client_gone

PROMPT = [9, 81, 256, 33, 7]
SAMPLED = Sampler(temperature=0.9, presence_penalty=0.5)


def test_repeat_of_the_last_round_is_answered_from_memory(tiny: Tiny):
    """Whatever tree it carries, even one that would be refused."""
    expected = decode(tiny.plain, PROMPT, 9, SAMPLED, seed=7).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, sampler=SAMPLED)
            await client.play(chain(expected[0], expected[1:3]))
            place = {"round": 0, "base_len": len(PROMPT) + 1}
            batches = host.batches
            for tree in (chain(expected[0], expected[1:3]), DraftTree.root(expected[0]), chain(123, [-5, 999])):
                client.tell(client.verify(tree, **place))
                again = await client.inbox.get()
                assert (again.tokens, again.path, again.round) == (tuple(expected[1:4]), (0, 1, 2), 0)
            assert host.batches == batches
            assert await client.play_to(expected[3:], np.random.default_rng(0)) == expected[3:]

    run(play())


def test_repeat_of_a_round_in_flight_gets_one_verdict(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 8).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            async with busy_device() as settle:
                for tree in (chain(expected[0], expected[1:3]), client.root(), chain(expected[0], [1])):
                    client.tell(client.verify(tree))
                    await settle()
            assert (await client.verdict()).tokens == tuple(expected[1:4])
            assert (host.batches, host.batched_rows) == (2, len(PROMPT) + 3)
            assert await client.play_to(expected[3:], np.random.default_rng(1)) == expected[3:]
            assert client.inbox.empty()

    run(play())


def test_next_round_cannot_pass_the_one_in_flight(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            async with busy_device() as settle:
                client.tell(client.verify(client.root()))
                client.tell(client.verify(client.root(), round=1, base_len=len(client.tokens) + 1))
                await settle()
            error = await client.refused()
            assert (error.reason, error.expected) == (Reason.STALE_ROUND, (0, 0, len(PROMPT) + 1))
            await client.verdict()

    run(play())


@pytest.mark.parametrize(
    "wrong", [{"round": 0}, {"round": 1}, {"round": 3}, {"base_len": 9}, {"epoch": 1}, {"epoch": -1}]
)
def test_stale_round_is_told_what_is_expected(tiny: Tiny, wrong: dict):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            for _ in range(2):
                await client.play(client.root())
            client.tell(client.verify(client.root(), **wrong))
            error = await client.refused()
            assert error.reason is Reason.STALE_ROUND
            assert error.expected == (0, 2, len(PROMPT) + 3)
            await client.play(client.root())

    run(play())


def test_round_before_the_prompt_is_in_is_stale(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            async with busy_device() as settle:
                client.ask_open(PROMPT)
                client.tell(client.verify(client.root()))
                await settle()
            assert (await client.refused()).reason is Reason.STALE_ROUND
            await client.prefilled()

    run(play())


def test_cut_waits_for_the_round_in_flight(tiny: Tiny):
    """The stop string is found while the next round already runs: its verdict still comes, then the cut holds."""
    expected = decode(tiny.plain, PROMPT, 16, SAMPLED, seed=7).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=16, sampler=SAMPLED)
            await client.play(chain(expected[0], expected[1:6]))
            length = len(PROMPT) + 3
            async with busy_device() as settle:
                client.tell(client.verify(chain(client.tokens[-1], expected[7:9])))
                client.cut(length)
                await settle()
            assert (await client.verdict()).tokens == tuple(expected[7:10])
            del client.tokens[length:]
            assert await client.play_to(expected[2:], np.random.default_rng(2)) == expected[2:]

    run(play())


def test_higher_epoch_takes_over(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 14, SAMPLED, seed=7).tokens

    async def play():
        async with hosting(tiny.target) as host:
            old, new = Client(host), Client(host, epoch=3)
            await old.open(PROMPT, max_tokens=14, sampler=SAMPLED)
            await old.play_to(expected[:5], np.random.default_rng(3))
            leased = host.budget.leased
            done = len(old.tokens) - len(PROMPT)
            new.ask_open(old.tokens, prompt_len=len(PROMPT), max_tokens=14, sampler=SAMPLED)
            error = await old.refused()
            assert (error.reason, error.message) == (Reason.STALE_ROUND, "epoch 3 took over")
            await new.prefilled()
            assert host.budget.leased == leased
            old.tell(old.verify(old.root()))
            assert (await old.refused()).expected == (3, 0, len(PROMPT) + done + 1)
            old.close()  # its stream ends late: no business of the new one
            assert await new.play_to(expected[done:], np.random.default_rng(4)) == expected[done:]
            new.close()
            await client_gone(host)
            assert host.budget.leased == 0

    run(play())


@pytest.mark.parametrize("epoch", [2, 1, 0])
def test_lower_or_equal_epoch_is_refused_while_one_lives(tiny: Tiny, epoch: int):
    async def play():
        async with hosting(tiny.target) as host:
            living, late = Client(host, epoch=2), Client(host, epoch=epoch)
            await living.open(PROMPT)
            leased = host.budget.leased
            late.ask_open(PROMPT)
            error = await late.refused()
            assert (error.reason, error.expected) == (Reason.STALE_ROUND, (2, 0, len(PROMPT) + 1))
            assert host.budget.leased == leased
            await living.play(living.root())
            living.close()
            await late.open(PROMPT)

    run(play())


def test_unknown_session_is_told_so(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host, "nobody")
            client.tokens = [1]
            client.tell(client.verify(client.root()))
            error = await client.refused()
            assert (error.session, error.reason) == ("nobody", Reason.SESSION_UNKNOWN)
            client.close()  # harmless
            await client.open(PROMPT)

    run(play())


@pytest.mark.parametrize("phase", ["prefill", "verify"])
def test_stream_that_ends_in_flight_gets_nothing_more(tiny: Tiny, phase: str):
    async def play():
        async with hosting(tiny.target) as host:
            leaver, stayer = Client(host, "leaver"), Client(host, "stayer")
            await stayer.open(PROMPT)
            if phase == "verify":
                await leaver.open(PROMPT)
            async with busy_device() as settle:
                if phase == "verify":
                    leaver.tell(leaver.verify(leaver.root()))
                else:
                    leaver.ask_open(PROMPT, taps=(1,))
                stayer.tell(stayer.verify(stayer.root()))
                await settle()
                leaver.close()
                await settle()
            await stayer.verdict()
            await client_gone(host)
            assert leaver.inbox.empty()
            assert list(host.sessions) == ["stayer"]

    run(play())


def test_stream_that_ends_while_its_batch_runs_gets_nothing_more(tiny: Tiny, monkeypatch):
    forward = tiny.target.forward

    async def play():
        loop = asyncio.get_running_loop()
        async with hosting(tiny.target) as host:
            leaver, stayer = Client(host, "leaver"), Client(host, "stayer")
            for client in (leaver, stayer):
                await client.open(PROMPT)

            async def leave() -> None:
                leaver.close()
                await client_gone(host)

            def forward_while_one_leaves(rows, taps):
                asyncio.run_coroutine_threadsafe(leave(), loop).result(10)
                return forward(rows, taps)

            monkeypatch.setattr(tiny.target, "forward", forward_while_one_leaves)
            async with busy_device() as settle:
                for client in (leaver, stayer):
                    client.tell(client.verify(client.root()))
                await settle()
            await stayer.verdict()
            assert leaver.inbox.empty()
            assert list(host.sessions) == ["stayer"]

    run(play())


def test_lifecycle_is_published(tiny: Tiny):
    async def play():
        bus = MemoryBus()
        events = bus.subscribe("lease.")
        async with hosting(tiny.target, bus=bus) as host:
            client = Client(host)
            await client.open(PROMPT)
            await client.play(client.root())
            client.close()
            client.close()
            await client_gone(host)
        seen = [events.get_nowait() for _ in range(3)]
        assert [(event.topic, dict(event.data)) for event in seen if event] == [
            ("lease.opened", {"session": "s", "tokens": len(PROMPT)}),
            ("lease.closed", {"session": "s", "tokens": len(PROMPT) + 2}),
        ]

    run(play())


def test_session_that_trips_the_sampler_fails_alone(tiny: Tiny, monkeypatch, caplog):
    """Its neighbours in the batch get their verdicts; the client gets a number, not the exception's text."""
    expected = decode(tiny.plain, PROMPT, 9).tokens
    choose = warpers.choose

    def trip(logits, sampler, noise, counts):
        if sampler.top_k == 13:
            raise RuntimeError("secret detail")
        return choose(logits, sampler, noise, counts)

    async def play():
        async with hosting(tiny.target) as host:
            bad, good = Client(host, "bad"), Client(host, "good")
            await bad.open(PROMPT, sampler=Sampler(temperature=1.0, top_k=13))
            await good.open(PROMPT)
            monkeypatch.setattr(warpers, "choose", trip)
            async with busy_device() as settle:
                bad.tell(bad.verify(bad.root()))
                good.tell(good.verify(chain(expected[0], expected[1:4])))
                await settle()
            error = await bad.refused()
            assert error.reason is Reason.INTERNAL
            assert "secret" not in error.message
            assert (await good.verdict()).tokens == tuple(expected[1:5])
            assert error.message.removeprefix("incident ") in caplog.text
            assert "secret detail" in caplog.text
            # Nothing was committed: the round can be tried again.
            monkeypatch.setattr(warpers, "choose", choose)
            await bad.play(bad.root())

    with caplog.at_level(logging.ERROR):
        run(play())


def test_forward_that_fails_fails_its_batch_only(tiny: Tiny, monkeypatch):
    expected = decode(tiny.plain, PROMPT, 6).tokens

    def fail(rows, taps):
        raise MemoryError("no room")

    async def play():
        async with hosting(tiny.target) as host:
            clients = [Client(host, str(i)) for i in range(2)]
            for client in clients:
                await client.open(PROMPT)
            with monkeypatch.context() as patch:
                patch.setattr(tiny.target, "forward", fail)
                async with busy_device() as settle:
                    for client in clients:
                        client.tell(client.verify(client.root()))
                    await settle()
                for client in clients:
                    error = await client.refused()
                    assert error.reason is Reason.INTERNAL
                    assert "room" not in error.message
            for client in clients:
                assert await client.play_to(expected, np.random.default_rng(5)) == expected

    run(play())


def test_malformed_message_does_not_end_the_service(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            client, other = Client(host), Client(host, "other")
            await other.open(PROMPT)
            client.tell(Open([], (1, 2), 2, 5, GREEDY, 0))  # type: ignore[arg-type]
            assert (await client.refused()).reason is Reason.INTERNAL
            client.tell(None)
            assert host.alive
            await other.play(other.root())

    run(play())
