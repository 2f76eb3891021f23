"""The local ports keep the contract of ports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from services.bench.drafters import RandomDrafter
from services.drafter.host import DrafterHost
from services.embedded.ports import LocalDrafterPort, LocalVerifierPort
from services.runtime.device import device_thread
from services.speculation.growth import Budget
from services.speculation.messages import Draft, Drafted, Features, Observe, Open, OpenDraft, Prefilled
from services.speculation.warpers import Sampler
from services.targets.loader import load_target
from services.targets.target import Target
from services.verifier.host import VerifierHost
from tests import drafter_contract, port_contract, verifier_contract
from tests.plain import decode
from tests.port_contract import Service
from tests.tiny import load_plain

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def target(tiny_folder) -> Target:
    return device_thread().submit(lambda: load_target(str(tiny_folder))).result()


def contract(host, port, open_, ask, answered) -> Service:
    return Service(
        port, open_, ask, answered, lambda: set(host.sessions), host.stop, lambda: setattr(host, "_capacity", 0)
    )


@asynccontextmanager
async def verifier(target: Target) -> AsyncIterator[Service]:
    host = await device_thread().run(lambda: VerifierHost(target, device_thread()))
    host.start()

    def open_(session: str, epoch: int) -> Open:
        return Open(session, PROMPT, len(PROMPT), 4, Sampler(), 0, epoch=epoch)

    yield contract(host, LocalVerifierPort(host), open_, lambda session: [], Prefilled)
    leased = host.budget.leased
    await host.stop()
    assert leased == sum(session.lease for session in host.sessions.values())


@asynccontextmanager
async def drafter(target: Target) -> AsyncIterator[Service]:
    host = DrafterHost(RandomDrafter(300), device_thread())
    host.start()

    def ask(session: str) -> list:
        rows = Features(0, {0: np.zeros((2, 4), np.float32)})
        return [Observe(session, 0, rows, (8, 9)), Draft(session, 0, 0, 3, Budget(4, 2, 2))]

    def open_(session: str, epoch: int) -> OpenDraft:
        return OpenDraft(session, epoch, Sampler(), 0)

    yield contract(host, LocalDrafterPort(host), open_, ask, Drafted)
    await host.stop()


@pytest.mark.parametrize("check", port_contract.CHECKS)
@pytest.mark.parametrize("serve", [verifier, drafter])
def test_local_ports_keep_the_contract(target, serve, check):
    async def play():
        async with serve(target) as service:
            await check(service)

    asyncio.run(asyncio.wait_for(play(), 60))


@pytest.fixture(scope="session")
def plain_tokens(tiny_folder) -> list[int]:
    """What the target itself writes after the contract's prompt."""
    return decode(load_plain(tiny_folder), verifier_contract.PROMPT, 12).tokens


@pytest.mark.parametrize("check", verifier_contract.CHECKS)
def test_local_verifiers_keep_the_contract(target, plain_tokens, check):
    async def play():
        async with verifier(target) as service:
            await check(service, plain_tokens)

    asyncio.run(asyncio.wait_for(play(), 60))


@pytest.mark.parametrize("check", drafter_contract.CHECKS)
def test_local_drafters_keep_the_contract(target, check):
    async def play():
        async with drafter(target) as service:
            await check(service)

    asyncio.run(asyncio.wait_for(play(), 60))
