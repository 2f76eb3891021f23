import pytest

from services.speculation.errors import AerieError, Reason
from services.speculation.trees import DraftTree
from services.targets.kv_rows import STEP, round_to_steps
from services.verifier.kv import KVBudget
from tests.plain import decode
from tests.verifier.client import Client, hosting, run
from tests.verifier.conftest import Tiny

PROMPT = [4, 8, 15, 16, 23, 42]
ROW = 3 * 2 * 2 * 8 * 4
"""Layers, keys and values, KV heads, head width, bytes of float32."""


def test_leases_are_whole_steps():
    budget = KVBudget(None, 10, round_to_steps)
    assert budget.lease(1) == STEP * 10
    assert budget.lease(STEP) == STEP * 10
    assert budget.lease(STEP + 1) == 2 * STEP * 10
    assert budget.leased == 4 * STEP * 10


def test_budget_is_used_to_the_last_byte_and_not_beyond():
    budget = KVBudget(3 * STEP, 1, round_to_steps)
    first = budget.lease(2 * STEP)
    budget.lease(STEP)
    with pytest.raises(AerieError, match=f"needs {STEP} bytes of KV cache; 0 of {3 * STEP} are free") as caught:
        budget.lease(1)
    assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
    assert budget.leased == 3 * STEP
    budget.release(first)
    assert budget.leased == STEP
    budget.lease(2 * STEP)


def test_session_leases_what_it_may_come_to_use(tiny: Tiny):
    """Tokens and the largest tree, in whole steps; the cache itself never outgrows it."""
    expected = decode(tiny.plain, PROMPT, 20).tokens

    async def play():
        async with hosting(tiny.target) as host:
            client = Client(host)
            await client.open(PROMPT, max_tokens=250)  # 256 tokens and 256 nodes
            assert host.budget.leased == 2 * STEP * ROW
            for token in expected[:19]:
                tree = DraftTree.build([token] + [1] * 255, [-1] + [0] * 255)
                await client.play(tree)
                assert host.sessions["s"].kv.nbytes <= host.budget.leased
            client.close()
            await client_gone(host)
            assert host.budget.leased == 0

    run(play())


async def client_gone(host) -> None:
    """Wait for what has been told to be handled: an unknown session's refusal comes after it."""
    probe = Client(host, "probe")
    probe.cut(1)
    await probe.refused()


def test_full_budget_refuses_until_somebody_leaves(tiny: Tiny):
    async def play():
        async with hosting(tiny.target, kv_bytes=5 * STEP * ROW) as host:
            clients = [Client(host, str(i)) for i in range(3)]
            for client in clients[:2]:
                await client.open(PROMPT, max_tokens=100)
            assert host.budget.leased == 4 * STEP * ROW
            clients[2].ask_open(PROMPT, max_tokens=100)
            error = await clients[2].refused()
            assert error.reason is Reason.RESOURCE_EXHAUSTED
            assert f"needs {2 * STEP * ROW} bytes" in error.message
            assert host.budget.leased == 4 * STEP * ROW
            assert "2" not in host.sessions
            clients[0].close()
            await clients[2].open(PROMPT, max_tokens=100)
            await clients[1].play(clients[1].root())
            for client in clients[1:]:
                client.close()
            await client_gone(host)
            assert (host.budget.leased, host.sessions) == (0, {})

    run(play())


def test_context_bounds_the_lease(short: Tiny):
    async def play():
        async with hosting(short.target) as host:
            await Client(host).open(PROMPT, max_tokens=10**9)
            assert host.budget.leased == 2 * STEP * host.budget.bytes_per_row

    run(play())
