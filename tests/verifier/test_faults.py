"""Whatever goes wrong stays with its session: leases come back, neighbours and the host go on."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from services.speculation.errors import Reason
from services.speculation.trees import DraftTree
from services.verifier import host as host_module
from services.verifier.sessions import VerifierSession
from tests.plain import decode
from tests.verifier.client import Client, busy_device, chain, hosting, run
from tests.verifier.conftest import Tiny
from tests.verifier.test_kv import client_gone

PROMPT = [9, 81, 256, 33, 7]


def fail_once(monkeypatch, owner, name, after=False):
    """The next call of a method raises, before or after its work; then it is as before."""
    work = getattr(owner, name)

    def fail(*arguments):
        monkeypatch.setattr(owner, name, work)
        if after:
            work(*arguments)
        raise RuntimeError("secret detail")

    monkeypatch.setattr(owner, name, fail)


def test_the_end_of_a_refused_stream_leaves_the_living_one(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 8).tokens

    async def play():
        async with hosting(tiny.target) as host:
            living, late = Client(host), Client(host)
            await living.open(PROMPT)
            late.ask_open(PROMPT)
            assert (await late.refused()).reason is Reason.STALE_ROUND
            # Nor can it lead the session: same name, same epoch, same round.
            late.tell(living.verify(living.root()))
            assert (await late.refused()).expected == (0, 0, len(PROMPT) + 1)
            late.cut(len(PROMPT) + 1)
            assert (await late.refused()).reason is Reason.STALE_ROUND
            late.close()
            await client_gone(host)
            assert await living.play_to(expected, np.random.default_rng(0)) == expected
            living.close()
            await client_gone(host)
            assert (host.sessions, host.budget.leased) == ({}, 0)

    run(play())


def test_the_end_of_a_stream_passes_a_full_mailbox(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            host._capacity = 0
            client.close()
            host._capacity = 1024
            await client_gone(host)
            assert host.budget.leased == 0

    run(play())


def test_an_open_that_fails_leaves_no_lease(tiny: Tiny, monkeypatch):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            fail_once(monkeypatch, host_module, "open_session")
            client.ask_open(PROMPT)
            assert (await client.refused()).reason is Reason.INTERNAL
            assert (host.sessions, host.budget.leased) == ({}, 0)
            await client.open(PROMPT)

    run(play())


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_prefill_ends_its_session(tiny: Tiny, monkeypatch, after: bool):
    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            fail_once(monkeypatch, VerifierSession, "commit_tokens", after)
            client.ask_open(PROMPT)
            assert (await client.refused()).reason is Reason.INTERNAL
            assert (host.sessions, host.budget.leased) == ({}, 0)
            await client.open(PROMPT)

    run(play())


def test_a_failure_before_the_commit_can_be_tried_again(tiny: Tiny, monkeypatch):
    expected = decode(tiny.plain, PROMPT, 8).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, top_logprobs=1)
            fail_once(monkeypatch, VerifierSession, "log_probs")
            client.tell(client.verify(chain(expected[0], expected[1:3])))
            assert (await client.refused()).reason is Reason.INTERNAL
            assert await client.play_to(expected, np.random.default_rng(1)) == expected

    run(play())


def test_a_failure_between_the_commits_ends_the_session(tiny: Tiny, monkeypatch):
    """The cache holds rows of tokens that are not committed: every later answer would be wrong."""

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            fail_once(monkeypatch, VerifierSession, "commit_tokens")
            client.tell(client.verify(client.root()))
            error = await client.refused()
            assert (error.reason, "secret" in error.message) == (Reason.INTERNAL, False)
            client.tell(client.verify(client.root()))
            assert (await client.refused()).reason is Reason.SESSION_UNKNOWN
            assert host.budget.leased == 0

    run(play())


def test_rows_that_trip_the_forward_fail_alone(tiny: Tiny, monkeypatch):
    """The batch runs again session by session; SystemExit is no exception."""
    expected = decode(tiny.plain, PROMPT, 8).tokens
    forward = tiny.target.forward

    async def play():
        async with hosting(tiny.target) as host:
            bad, *good = clients = [Client(host, str(i)) for i in range(3)]
            for client in clients:
                await client.open(PROMPT)
            kv = host.sessions["0"].kv

            def trip(rows, taps):
                if any(r.kv is kv for r in rows):
                    raise SystemExit("secret detail")
                return forward(rows, taps)

            monkeypatch.setattr(tiny.target, "forward", trip)
            async with busy_device() as settle:
                for client in clients:
                    client.tell(client.verify(chain(expected[0], expected[1:4])))
                await settle()
            assert (await bad.refused()).reason is Reason.INTERNAL
            for client in good:
                assert (await client.verdict()).tokens == tuple(expected[1:5])
            monkeypatch.setattr(tiny.target, "forward", forward)
            assert await bad.play_to(expected, np.random.default_rng(2)) == expected

    run(play())


def test_a_lost_batch_fails_its_sessions_and_the_host_goes_on(tiny: Tiny, monkeypatch):
    expected = decode(tiny.plain, PROMPT, 6).tokens

    async def play():
        async with hosting(tiny.target) as host:
            clients = [Client(host, str(i)) for i in range(3)]
            for client in clients:
                await client.open(PROMPT)
            fail_once(monkeypatch, host_module, "take_batch")
            clients[0].tell(clients[0].verify(clients[0].root()))
            for client in clients:
                error = await client.refused()
                assert error.reason is Reason.INTERNAL
                assert error.message.startswith("incident ")
            assert (host.sessions, host.budget.leased) == ({}, 0)
            await clients[0].open(PROMPT)
            assert await clients[0].play_to(expected, np.random.default_rng(3)) == expected

    run(play())


def test_the_smaller_of_two_cuts_in_flight_holds(tiny: Tiny):
    expected = decode(tiny.plain, PROMPT, 12).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            await client.play(chain(expected[0], expected[1:6]))
            length = len(PROMPT) + 2
            async with busy_device() as settle:
                client.tell(client.verify(client.root()))
                for cut in (length + 2, length, length + 1):
                    client.cut(cut)
                await settle()
            await client.verdict()
            del client.tokens[length:]
            assert await client.play_to(expected[1:], np.random.default_rng(4)) == expected[1:]

    run(play())


@pytest.mark.parametrize(("kept", "answered"), [(2, False), (3, True)])
def test_a_repeat_never_brings_back_what_was_cut(tiny: Tiny, kept: int, answered: bool):
    """The round committed three tokens after the first."""
    expected = decode(tiny.plain, PROMPT, 6).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT)
            await client.play(chain(expected[0], expected[1:3]))
            length = len(PROMPT) + 1 + kept
            client.cut(length)
            client.tell(client.verify(DraftTree.root(expected[0]), round=0, base_len=len(PROMPT) + 1))
            answer = await client.inbox.get()
            if answered:
                assert answer.tokens == tuple(expected[1:4])
            else:
                assert (answer.reason, answer.expected) == (Reason.STALE_ROUND, (0, 1, length))

    run(play())


def test_nothing_is_verified_after_the_end(tiny: Tiny):
    """Unless the end is cut off."""
    expected = decode(tiny.plain, PROMPT, 6).tokens
    place = next(i for i in range(1, 6) if expected[i] not in expected[:i])

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, eos_ids=(expected[place],))
            while client.tokens[-1] != expected[place]:
                await client.play(client.root())
            client.tell(client.verify(client.root()))
            error = await client.refused()
            assert (error.reason, "ended" in error.message) == (Reason.INVALID_TREE, True)
            client.cut(len(client.tokens) - 1)
            del client.tokens[-1]
            assert (await client.play(client.root())).tokens == (expected[place],)

    run(play())


def test_a_takeover_tells_what_is_expected_now(tiny: Tiny):
    async def play():
        async with hosting(tiny.target) as host:
            old, new = Client(host), Client(host, epoch=3)
            await old.open(PROMPT)
            async with busy_device() as settle:
                new.ask_open(PROMPT)
                await settle()
                assert (await old.refused()).expected == (3, 0, len(PROMPT) + 1)
                new.tell(new.verify(DraftTree.root(1)))
                assert (await new.refused()).expected == (3, 0, len(PROMPT) + 1)
            assert await new.prefilled()

    run(play())


def ints(*values):
    return np.array(values, np.int32)


def floats(*values):
    return np.array(values, np.float32)


UNBUILT = {
    "none": None,
    "lists": DraftTree([1, 2], [-1, 0], [0.0, 0.0]),  # type: ignore[arg-type]
    "float tokens": DraftTree(floats(1, 2), ints(-1, 0), floats(0, 0)),  # type: ignore[arg-type]
    "wide tokens": DraftTree(np.array([1, 2]), ints(-1, 0), floats(0, 0)),
    "float parents": DraftTree(ints(1, 2), floats(-1, 0), floats(0, 0)),  # type: ignore[arg-type]
    "two dimensions": DraftTree(ints(1, 2)[None], ints(-1, 0)[None], floats(0, 0)[None]),
    "lengths": DraftTree(ints(1, 2, 3), ints(-1, 0), floats(0, 0, 0)),
    "empty": DraftTree(ints(), ints(), floats()),
    "no root": DraftTree(ints(1, 2), ints(0, 0), floats(0, 0)),
    "two roots": DraftTree(ints(1, 2), ints(-1, -1), floats(0, 0)),
    "own parent": DraftTree(ints(1, 2), ints(-1, 1), floats(0, 0)),
    "later parent": DraftTree(ints(1, 2, 3), ints(-1, 2, 1), floats(0, 0, 0)),
    "far parent": DraftTree(ints(1, 2), ints(-1, 900), floats(0, 0)),
    "another thing": SimpleNamespace(tokens="tokens", parents=3, log_probs=None),
}


@pytest.mark.parametrize("kind", UNBUILT)
def test_trees_that_were_never_built_are_refused_to_their_client_only(tiny: Tiny, kind: str):
    expected = decode(tiny.plain, PROMPT, 6).tokens

    async def play():
        async with hosting(tiny.target) as host:
            bad, good = Client(host, "bad"), Client(host, "good")
            for client in (bad, good):
                await client.open(PROMPT)
            async with busy_device() as settle:
                bad.tell(bad.verify(root_is(UNBUILT[kind], expected[0])))
                good.tell(good.verify(chain(expected[0], expected[1:4])))
                await settle()
            assert (await bad.refused()).reason is Reason.INVALID_TREE
            assert (await good.verdict()).tokens == tuple(expected[1:5])
            assert await bad.play_to(expected, np.random.default_rng(5)) == expected

    run(play())


def root_is(tree, token):
    """With the pending token as its root, where the tree has one: that is not what is wrong with it."""
    if isinstance(getattr(tree, "tokens", None), np.ndarray) and tree.tokens.size:
        tokens = tree.tokens.copy()
        tokens.flat[0] = token
        return replace(tree, tokens=tokens)
    return tree
