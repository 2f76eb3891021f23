"""What a session on a drafter must be like behind any port. A test module gives a port and runs ``CHECKS``."""

import asyncio
from typing import Any

import numpy as np

from services.speculation.errors import Reason
from services.speculation.growth import Budget
from services.speculation.messages import Draft, Drafted, Features, NeedFeatures, Observe, OpenDraft, PortError
from services.speculation.warpers import Sampler
from tests.port_contract import DEADLINE, Service, until

BUDGET = Budget(6, 2, 3)


async def opened(service: Service, session: str = "s") -> Any:
    stream = service.port.connect()
    await stream.send(OpenDraft(session, 0, Sampler(), 0))
    return stream


def observe(base: int, *tokens: int, session: str = "s", epoch: int = 0) -> Observe:
    return Observe(session, epoch, Features(base, {0: np.zeros((len(tokens), 4), np.float32)}), tokens)


async def answer(stream: Any) -> Any:
    async with asyncio.timeout(DEADLINE):
        return await stream.receive()


async def check_a_draft_starts_from_the_newest_token(service: Service) -> None:
    stream = await opened(service)
    await stream.send(observe(0, 8, 9))
    await stream.send(observe(2, 10))
    await stream.send(Draft("s", 0, 4, 4, BUDGET))
    drafted = await answer(stream)
    assert isinstance(drafted, Drafted)
    assert (drafted.round, drafted.base_len, int(drafted.tree.tokens[0])) == (4, 4, 10)
    assert 1 <= len(drafted.tree) <= 6
    assert min(drafted.seconds, drafted.queue_seconds) >= 0
    await stream.close()


async def check_a_gap_is_refused_and_costs_the_session(service: Service) -> None:
    stream = await opened(service)
    await stream.send(observe(0, 8, 9))
    await stream.send(observe(7, 10))
    await stream.send(Draft("s", 0, 0, 9, BUDGET))
    error = await answer(stream)
    assert isinstance(error, PortError)
    assert error.reason is Reason.FEATURE_GAP
    await stream.close()


async def check_a_draft_waits_for_rows_that_come_later_and_brings_its_own(service: Service) -> None:
    stream = await opened(service)
    await stream.send(Draft("s", 0, 0, 4, BUDGET))
    await stream.send(observe(0, 8, 9))
    await stream.send(observe(2, 10))
    drafted = await answer(stream)
    assert isinstance(drafted, Drafted)
    assert (drafted.round, int(drafted.tree.tokens[0])) == (0, 10)
    await stream.send(Draft("s", 0, 1, 5, BUDGET, observe(3, 11)))
    drafted = await answer(stream)
    assert (drafted.round, int(drafted.tree.tokens[0])) == (1, 11)
    await stream.close()


async def check_missing_rows_are_asked_for(service: Service) -> None:
    stream = await opened(service)
    await stream.send(observe(0, 8, 9))
    await stream.send(Draft("s", 0, 3, 6, BUDGET))
    needed = await answer(stream)
    assert isinstance(needed, NeedFeatures)
    assert (needed.round, needed.ranges) == (3, ((2, 5),))
    await stream.close()


async def check_other_epochs_and_older_drafts_are_refused(service: Service) -> None:
    stream = await opened(service)
    await stream.send(observe(0, 8, epoch=1))
    assert (await answer(stream)).reason is Reason.SESSION_UNKNOWN
    await stream.send(observe(0, 8, 9, 10))
    await stream.send(Draft("s", 0, 0, 2, BUDGET))
    stale = await answer(stream)
    assert (stale.reason, stale.expected) == (Reason.STALE_ROUND, (0, 0, 4))
    await stream.send(Draft("s", 0, 1, 4, BUDGET))
    assert isinstance(await answer(stream), Drafted)
    await stream.close()


async def check_cancelling_frees_the_session_in_every_state(service: Service) -> None:
    for number, messages in enumerate(
        ([], [observe(0, 8, session="c1")], [observe(0, 8, session="c2"), Draft("c2", 0, 0, 2, BUDGET)])
    ):
        stream = await opened(service, f"c{number}")
        for message in messages:
            await stream.send(message)
        await stream.close()
        await until(lambda: not service.sessions())


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
