"""A drafter that comes late: what verdicts carry from then on, and the history before it."""

import asyncio

import numpy as np
import pytest

from services.speculation.errors import Reason
from services.speculation.messages import Attach, History, Verdict
from services.speculation.window import SINK_ROWS, WINDOW
from services.verifier import batching
from tests.plain import decode
from tests.verifier.client import Client, busy_device, chain, hosting, run
from tests.verifier.conftest import Tiny

PROMPT = [9, 81, 256, 33, 7, 120, 3]


def attach(client: Client, number: int, *taps, epoch: int = 0) -> None:
    client.tell(Attach(client.session, epoch, number, taps))


async def histories(client: Client, stop: int) -> list[History]:
    """Slices up to the row ``stop``; verdicts between them are kept."""
    got: list[History] = []
    while not got or got[-1].features.base + len(got[-1].tokens) < stop:
        message = await client.inbox.get()
        assert isinstance(message, History | Verdict), message
        if isinstance(message, History):
            got.append(message)
        else:
            client.verdicts.append(message)
    return got


def joined(slices: list[History], tap) -> np.ndarray:
    return np.concatenate([s.features.rows[tap] for s in slices])


def close_to(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())


def test_history_is_what_an_early_drafter_would_have_been_sent(tiny: Tiny):
    """The same rows as with taps from the start: the prompt's, then those of verdicts."""
    expected = decode(tiny.plain, PROMPT, 12).tokens

    async def play():
        async with hosting(tiny.target) as host:
            early, late = Client(host, "early"), Client(host, "late")
            for client, taps in ((early, (1, "final")), (late, ())):
                await client.open(PROMPT, taps=taps)
                for _ in range(3):
                    at = len(client.tokens) - len(PROMPT)
                    await client.play(chain(client.tokens[-1], expected[at : at + 2]))
            rows = len(late.tokens) - 1
            attach(late, 1, 1, "final")
            slices = await histories(late, rows)
            assert {s.number for s in slices} == {1}
            following = sum((s.tokens for s in slices), ())
            assert list(following) == late.tokens[1 : rows + 1]
            for tap in (1, "final"):
                first = [s.features.rows[tap] for s in early.history]
                own = [v.features.rows[tap] for v in early.verdicts]
                close_to(joined(slices, tap), np.concatenate([*first, *own]))
            # From here on both verdicts carry the same.
            verdicts = [await c.play(chain(expected[9], expected[10:11])) for c in (early, late)]
            assert verdicts[0].tokens == verdicts[1].tokens
            for tap in (1, "final"):
                close_to(verdicts[1].features.rows[tap], verdicts[0].features.rows[tap])

    run(play())


def test_rounds_go_on_beside_the_history(tiny: Tiny, monkeypatch):
    """A verify of the same session in the same batch: neither sees the other's rows."""
    monkeypatch.setattr(batching, "PREFILL_ROWS", 2)
    expected = decode(tiny.plain, PROMPT, 8).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            rows = len(client.tokens) - 1
            async with busy_device() as settle:
                attach(client, 1, 2)
                client.tell(client.verify(chain(expected[0], expected[1:4])))
                await settle()
            slices = await histories(client, rows)
            assert len(slices) > 2
            (verdict,) = client.verdicts
            assert verdict.tokens == tuple(expected[1:5])
            assert set(verdict.features.rows) == {2}
            client.tokens += verdict.tokens
            client.round += 1
            assert await client.play_to(expected[4:], np.random.default_rng(0)) == expected[4:]
            again = Client(host, "again")
            await again.open(PROMPT, taps=(2,))
            close_to(joined(slices, 2), joined(again.history, 2))

    run(play())


def test_other_taps_replace_the_first_and_none_ends_them(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, taps=(0,))
            attach(client, 1, 3)
            assert set((await histories(client, len(PROMPT)))[0].features.rows) == {3}
            assert set((await client.play(client.root())).features.rows) == {3}
            attach(client, 2)
            assert (await client.play(client.root())).features.rows == {}
            assert client.inbox.empty()

    run(play())


def test_a_history_that_nobody_waits_for_is_not_computed(tiny: Tiny):
    """A later attachment, and the end of the session."""

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            batched = host.batched_rows
            async with busy_device() as settle:
                attach(client, 1, 0)
                attach(client, 2, 1)
                await settle()
            slices = await histories(client, len(PROMPT))
            assert {s.number for s in slices} == {2}
            assert host.batched_rows - batched == len(PROMPT)
            async with busy_device() as settle:
                attach(client, 3, 0)
                client.close()
                await settle()
            await asyncio.sleep(0.05)
            assert host.batched_rows - batched == len(PROMPT)

    run(play())


def test_only_rows_that_a_drafter_keeps_are_sent(tiny: Tiny, monkeypatch):
    monkeypatch.setattr("services.speculation.window.WINDOW", 8)
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, 290, 30)]

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(prompt)
            attach(client, 1, 1)
            slices = await histories(client, len(prompt))
            ranges = [(s.features.base, s.features.base + len(s.tokens)) for s in slices]
            assert ranges == [(0, SINK_ROWS), (22, 30)]

    assert WINDOW > 8
    run(play())


@pytest.mark.parametrize(
    ("number", "taps", "epoch", "reason"),
    [
        (0, (0,), 0, Reason.STALE_ROUND),
        (1, (0,), 1, Reason.STALE_ROUND),
        (1, (99,), 0, Reason.INVALID_ARGUMENT),
        (1, (-1,), 0, Reason.INVALID_ARGUMENT),
        (1, (1, 1), 0, Reason.INVALID_ARGUMENT),
        (1, ("first",), 0, Reason.INVALID_ARGUMENT),
    ],
)
def test_attachments_that_make_no_sense_are_refused(tiny: Tiny, number, taps, epoch, reason):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            attach(client, number, *taps, epoch=epoch)
            assert (await client.refused()).reason is reason
            await client.play(client.root())

    run(play())


def test_an_attachment_comes_between_two_rounds(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            async with busy_device() as settle:
                client.ask_open(PROMPT)
                attach(client, 1, 0)
                await settle()
            assert (await client.refused()).reason is Reason.STALE_ROUND
            await client.prefilled()
            async with busy_device() as settle:
                client.tell(client.verify(client.root()))
                attach(client, 1, 0)
                await settle()
            assert (await client.refused()).reason is Reason.STALE_ROUND
            assert (await client.verdict()).features.rows == {}

    run(play())


def test_a_failing_history_costs_no_token(tiny: Tiny, monkeypatch):
    expected = decode(tiny.plain, PROMPT, 3).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)

            def broken(length):
                raise RuntimeError("secret")

            kv = host.sessions["s"].kv
            monkeypatch.setattr(kv, "prefix", broken)
            attach(client, 1, 0)
            assert await client.play_to(expected, np.random.default_rng(0)) == expected
            assert client.inbox.empty()

    run(play())
