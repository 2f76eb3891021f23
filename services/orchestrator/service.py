"""The orchestrator: turns requests into sessions on a verifier and, where one fits, a drafter."""

import secrets
import uuid
import warnings
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from services.orchestrator.generation import Chunk, Done, Generation
from services.orchestrator.routing import TreeOptions, pick_drafter
from services.orchestrator.text import ChatTemplate, TextStream
from services.runtime.bus import MemoryBus
from services.runtime.registry import MemoryRegistry
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Open, TargetInfo
from services.speculation.ports import VerifierPort
from services.speculation.session import State
from services.speculation.warpers import Sampler


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


class Orchestrator:
    """Serves requests over ports.

    Args:
        verifier: Where targets run.
        info: What ``verifier.info()`` says.
        tokenizer: The target's, from ``tokenizer.json``.
        template: Its chat template, or None.
        registry: Where drafters join and leave.
        bus: Where rounds are published.
    """

    def __init__(
        self,
        verifier: VerifierPort,
        info: TargetInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        registry: MemoryRegistry,
        bus: MemoryBus,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._verifier = verifier
        self._template = template
        self._registry = registry
        self._bus = bus
        self._warned = False

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, special tokens recognised, as the tokenizer's own post-processor adds them."""
        return tuple(self.tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation in the target's chat template.

        Raises:
            AerieError: INVALID_ARGUMENT when the target has no template, or it refuses the messages.
        """
        if self._template is None:
            raise AerieError(Reason.INVALID_ARGUMENT, "the target has no chat template; send plain text")
        return tuple(self.tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids)

    async def generate(self, request: Request) -> AsyncIterator[Chunk | Done]:
        """Chunks as rounds commit, then ``Done``. Leaving the iterator early cancels the session.

        Raises:
            AerieError: For what is refused or fails.
        """
        if any(not s for s in request.stop):
            raise AerieError(Reason.INVALID_ARGUMENT, "a stop string is empty")
        if request.max_tokens < 1:
            raise AerieError(Reason.INVALID_ARGUMENT, f"max_tokens is {request.max_tokens}; it must be 1 or more")
        budget = request.tree.budget(self.info)
        entry = pick_drafter(self._registry, request.drafter, self.info)
        if entry is None and request.drafter == "auto" and not self._warned:
            self._warned = True
            warnings.warn("no drafter fits the target: decoding plainly", stacklevel=2)
        seed = secrets.randbits(64) if request.seed is None else request.seed
        opened = Open(
            session=uuid.uuid4().hex,
            tokens=request.tokens,
            prompt_len=len(request.tokens),
            max_tokens=request.max_tokens,
            sampler=request.sampler,
            seed=seed,
            eos_ids=self.info.eos_ids,
            ignore_eos=request.ignore_eos,
            top_logprobs=request.top_logprobs,
            taps=entry.data["taps"] if entry else (),
        )
        state = State(opened, self.info.context_length, budget, drafting=entry is not None)
        generation = Generation(
            state,
            self._verifier.connect(),
            entry.port.connect() if entry else None,
            TextStream(self.tokenizer, request.stop),
            self._bus,
        )
        chunks = generation.chunks()
        try:
            async for item in chunks:
                yield item
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]
