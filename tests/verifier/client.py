"""One client of a verifier host, and trees that are partly right."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from services.runtime.bus import MemoryBus
from services.runtime.device import Priority, device_thread
from services.speculation.messages import History, Open, PortError, Prefilled, Truncate, Verdict, Verify
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from services.targets.target import Target
from services.verifier.host import Closed, FromClient, VerifierHost
from tests.plain import GREEDY

DEADLINE = 30.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; a host that does not answer fails it."""
    asyncio.run(asyncio.wait_for(coroutine, DEADLINE))


@asynccontextmanager
async def hosting(
    target: Target, kv_bytes: int | None = None, bus: MemoryBus | None = None
) -> AsyncIterator[VerifierHost]:
    host = await device_thread().run(lambda: VerifierHost(target, device_thread(), kv_bytes, bus))
    host.start()
    try:
        yield host
    finally:
        await host.stop()


@asynccontextmanager
async def busy_device() -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Keep the device away until the block ends, so that what is sent meanwhile waits together.

    Yields a coroutine function that lets the host take in what it has been told.
    """
    loop, started, release = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def hold() -> None:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(DEADLINE)

    held = asyncio.ensure_future(device_thread().run(hold, Priority.DRAFT))
    await started.wait()

    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    try:
        yield settle
        await settle()
    finally:
        release.set()
        await held


class Client:
    """Speaks for one session and keeps account of it, as an orchestrator does."""

    def __init__(self, host: VerifierHost, session: str = "s", epoch: int = 0) -> None:
        self.host, self.session, self.epoch = host, session, epoch
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.reply = self.inbox.put_nowait
        self.tokens: list[int] = []
        self.round = 0
        self.history: list[History] = []
        self.first: Prefilled | None = None
        self.verdicts: list[Verdict] = []

    def tell(self, message: Any) -> None:
        self.host.tell(FromClient(message, self.reply))

    def ask_open(self, prompt: Sequence[int], max_tokens: int = 100, sampler: Sampler = GREEDY, **fields: Any) -> None:
        self.tokens = list(prompt)
        opening = {"prompt_len": len(prompt), "seed": 7, "epoch": self.epoch, **fields}
        self.tell(Open(self.session, tuple(prompt), max_tokens=max_tokens, sampler=sampler, **opening))

    async def open(self, prompt: Sequence[int], **options: Any) -> Prefilled:
        self.ask_open(prompt, **options)
        return await self.prefilled()

    async def prefilled(self) -> Prefilled:
        while isinstance(message := await self.inbox.get(), History):
            self.history.append(message)
        assert isinstance(message, Prefilled), message
        self.first = message
        self.tokens.append(message.token)
        return message

    async def refused(self) -> PortError:
        error = await self.inbox.get()
        assert isinstance(error, PortError), error
        return error

    def verify(self, tree: DraftTree, **fields: Any) -> Verify:
        place = {"epoch": self.epoch, "round": self.round, "base_len": len(self.tokens), **fields}
        return Verify(self.session, tree=tree, **place)

    async def play(self, tree: DraftTree) -> Verdict:
        self.tell(self.verify(tree))
        return await self.verdict()

    async def verdict(self) -> Verdict:
        verdict = await self.inbox.get()
        assert isinstance(verdict, Verdict), verdict
        self.verdicts.append(verdict)
        self.tokens += verdict.tokens
        self.round += 1
        return verdict

    def cut(self, length: int, **fields: Any) -> None:
        self.tell(Truncate(self.session, **{"epoch": self.epoch, "length": length, **fields}))

    def close(self) -> None:
        self.host.post(Closed(self.session, self.reply))

    def root(self) -> DraftTree:
        return DraftTree.root(self.tokens[-1])

    async def play_to(self, expected: Sequence[int], rng: np.random.Generator, nodes: int = 12) -> list[int]:
        """Play partly right trees until ``expected``, the pending token first, is out or the sequence ends.

        Returns:
            What came out in its place.
        """
        assert self.first is not None
        start, finish = len(self.tokens) - 1, self.first.finish
        while len(self.tokens) - start < len(expected) and finish is None:
            following = expected[len(self.tokens) - start :]
            finish = (await self.play(partly_right(rng, self.tokens[-1], following, nodes))).finish
        return self.tokens[start:]


def partly_right(rng: np.random.Generator, root: int, following: Sequence[int], nodes: int) -> DraftTree:
    """A tree with a random length of the right continuation among random other nodes, nowhere too deep."""
    deepest = len(following) - 1
    right = int(rng.integers(0, min(6, deepest) + 1))
    tokens, parents, depths = [root], [-1], [0]
    path = 0  # the last node of the right continuation
    for _ in range(int(rng.integers(0, nodes))):
        if depths[path] < right and rng.random() < 0.7:
            parent, token = path, int(following[depths[path]])
        else:
            parent, token = int(rng.integers(len(tokens))), int(rng.integers(300))
        if depths[parent] == deepest or (token, parent) in zip(tokens, parents, strict=True):
            continue
        if parent == path and token == following[depths[path]]:
            path = len(tokens)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return DraftTree.build(tokens, parents)


def chain(root: int, following: Sequence[int]) -> DraftTree:
    return DraftTree.build([root, *following], range(-1, len(following)))
