"""The orchestrator: turns requests into sessions on a verifier and, where one fits, a drafter."""

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from services.orchestrator.directory import Directory, Gone, Offer
from services.orchestrator.generation import Chunk, Done, Generation
from services.orchestrator.routing import TreeOptions, pick_drafter
from services.orchestrator.text import ChatTemplate, TextStream
from services.runtime.actor import ActorStopped
from services.runtime.bus import Bus
from services.speculation.errors import AerieError, Reason, check_integers, is_integer
from services.speculation.feed import Feed
from services.speculation.messages import Open, TargetInfo
from services.speculation.ports import VerifierPort
from services.speculation.session import State
from services.speculation.warpers import Sampler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Sessions that run at once, and those that wait for their turn; more are refused."""

    sessions: int = 256
    queue: int = 1024


MAX_TOP_LOGPROBS = 128
"""More alternatives would make a token's report larger than its round."""
DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        tokens: The prompt.
        max_tokens: Most tokens to generate.
        sampler: How the target samples.
        seed: Unsigned 64-bit; None draws one, which ``Done`` returns.
        stop: Strings that end the text.
        ignore_eos: Go on after EOS tokens.
        top_logprobs: Report log-probabilities and this many alternatives; None reports none.
        drafter: "auto", "off", a family or a drafter's name.
        tree: Overrides of the tree preset.
    """

    tokens: tuple[int, ...]
    max_tokens: int = 256
    sampler: Sampler = field(default_factory=Sampler)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    drafter: str = "auto"
    tree: TreeOptions = field(default_factory=TreeOptions)

    def check(self) -> None:
        """Refuse wrong types, and what the orchestrator itself uses; the verifier looks at the rest.

        Raises:
            AerieError: INVALID_ARGUMENT.
        """
        if not isinstance(self.tokens, tuple) or not all(is_integer(token) for token in self.tokens):
            raise AerieError(Reason.INVALID_ARGUMENT, "a prompt is a tuple of token ids")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise AerieError(Reason.INVALID_ARGUMENT, f"stop must be a tuple of strings, not {self.stop!r}")
        if "" in self.stop:
            raise AerieError(Reason.INVALID_ARGUMENT, "a stop string is empty")
        check_integers(max_tokens=self.max_tokens)
        if self.max_tokens < 1:
            raise AerieError(Reason.INVALID_ARGUMENT, f"max_tokens is {self.max_tokens}; it must be 1 or more")
        optional = {"seed": self.seed, "top_logprobs": self.top_logprobs}
        check_integers(**{name: value for name, value in optional.items() if value is not None})
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise AerieError(Reason.INVALID_ARGUMENT, f"top_logprobs is {self.top_logprobs}; 0..{MAX_TOP_LOGPROBS}")
        kinds = {"sampler": Sampler, "ignore_eos": bool, "drafter": str, "tree": TreeOptions}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise AerieError(Reason.INVALID_ARGUMENT, f"{name} must be a {kind.__name__}")


class Orchestrator:
    """Serves requests over ports.

    Args:
        verifier: Where targets run.
        info: What ``verifier.info()`` says.
        tokenizer: The target's, from ``tokenizer.json``.
        template: Its chat template, or None.
        directory: Knows the drafters.
        bus: Where events are published.
        limits: How many sessions run, and how many wait.
        unavailable: Why the verifier takes no requests now, or None.
    """

    def __init__(
        self,
        verifier: VerifierPort,
        info: TargetInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        directory: Directory,
        bus: Bus,
        limits: Limits = DEFAULT_LIMITS,
        unavailable: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._verifier = verifier
        self._template = template
        self.directory = directory
        self._bus = bus
        self._warned = False
        self._limits = limits
        self._unavailable = unavailable
        self._sessions: set[Generation] = set()
        self._cut_off: str | None = None
        self._turns = asyncio.Semaphore(limits.sessions)
        self.running = 0
        self.waiting = 0

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, special tokens recognised, as the tokenizer's own post-processor adds them."""
        # Not ``encode``, which keeps the GIL: a long prompt would hold up every session.
        return tuple(self.tokenizer.encode_batch_fast([text])[0].ids)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation in the target's chat template.

        Raises:
            AerieError: INVALID_ARGUMENT when the target has no template, or it refuses the messages.
        """
        if self._template is None:
            raise AerieError(Reason.INVALID_ARGUMENT, "the target has no chat template; send plain text")
        text = self._template.render(messages)
        return tuple(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    async def generate(self, request: Request, seconds: float | None = None) -> AsyncIterator[Chunk | Done]:
        """Chunks as rounds commit, then ``Done``. Leaving the iterator early cancels the session.

        Args:
            request: What to generate.
            seconds: Left to the caller: the session's streams end then, on every service. The caller itself leaves.

        Raises:
            AerieError: For what is refused or fails.
        """
        self._check(request)
        arrived = time.perf_counter()
        ends_at = None if seconds is None else time.monotonic() + seconds
        async with self._turn():
            self._check_going_on()
            session = self._session(request, ends_at, arrived)
            self._sessions.add(session)
            chunks = session.chunks()
            try:
                async for item in chunks:
                    yield item
            finally:
                self._sessions.discard(session)
                await chunks.aclose()  # type: ignore[attr-defined]

    def cut_off(self, why: str) -> None:
        """End every session, those that wait too, with an error (SERVICE_UNAVAILABLE) that their clients read."""
        self._cut_off = why
        for session in self._sessions:
            session.fail(AerieError(Reason.SERVICE_UNAVAILABLE, why))

    def _check_going_on(self) -> None:
        if self._cut_off:
            raise AerieError(Reason.SERVICE_UNAVAILABLE, self._cut_off)

    def _check(self, request: Request) -> None:
        try:
            if why := self._unavailable():
                raise AerieError(Reason.SERVICE_UNAVAILABLE, why)
            request.check()
            request.tree.budget(self.info)
            pick_drafter(self.directory, request.drafter)  # one that is named and not there is refused at once
        except AerieError as error:
            self._bus.publish("session.refused", reason=str(error.reason))
            raise

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._turns.locked() and self.waiting >= self._limits.queue:
            self._bus.publish("session.refused", reason=str(Reason.RESOURCE_EXHAUSTED))
            message = f"{self.running} sessions run and {self.waiting} wait: try again later"
            raise AerieError(Reason.RESOURCE_EXHAUSTED, message)
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._turns.release()

    def _session(self, request: Request, ends_at: float | None, arrived: float) -> Generation:
        offer = self._pick(request.drafter)
        seed = secrets.randbits(64) if request.seed is None else request.seed
        opened = Open(
            session=uuid.uuid4().hex,
            tokens=request.tokens,
            prompt_len=len(request.tokens),
            max_tokens=int(request.max_tokens),  # NumPy's would overflow where it is added to
            sampler=request.sampler,
            seed=int(seed),
            eos_ids=self.info.eos_ids,
            ignore_eos=request.ignore_eos,
            top_logprobs=None if request.top_logprobs is None else int(request.top_logprobs),
            taps=offer.info.taps if offer else (),
        )
        budget, feed = request.tree.budget(self.info), Feed.from_start(opened) if offer else None
        return Generation(
            State(opened, self.info.context_length, budget, feed),
            self._verifier.connect(None if ends_at is None else ends_at - time.monotonic()),
            offer,
            None if request.drafter == "off" else _Supply(self.directory, request.drafter),
            TextStream(self.tokenizer, request.stop),
            self._bus,
            ends_at,
            arrived,
        )

    def _pick(self, wanted: str) -> Offer | None:
        offer = pick_drafter(self.directory, wanted)
        if offer is None and wanted == "auto" and not self._warned:
            self._warned = True
            log.warning("no drafter fits the target: decoding plainly")
        return offer


@dataclass(frozen=True)
class _Supply:
    """The drafters that a request may have."""

    directory: Directory
    wanted: str

    def pick(self, without: Collection[Offer]) -> Offer | None:
        try:
            return pick_drafter(self.directory, self.wanted, without)
        except AerieError:
            return None

    def gone(self, offer: Offer) -> None:
        with contextlib.suppress(ActorStopped):
            self.directory.post(Gone(offer))

    def on_join(self, listener: Callable[[], None]) -> Callable[[], None]:
        return self.directory.on_join(listener)
