"""Where a command's answers come from: models in this process, or a running orchestrator."""

import argparse
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

from services.bench.prompts import Prompt as BenchPrompt
from services.bench.results import Options as BenchOptions
from services.bench.results import PromptResult
from services.cli.terminal import Piece, Printer
from services.speculation.messages import FinishReason

Prompt = str | list[dict[str, str]]
"""Plain text, or a conversation that goes through the target's chat template."""
S = TypeVar("S", bound="Source")


@dataclass(frozen=True)
class Answer:
    """What ``generate --json`` prints."""

    text: str
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    usage: dict[str, int]
    stats: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Source(Protocol):
    """Use as a context manager. ``options`` are those of ``request_options``."""

    @property
    def target(self) -> str:
        """The target's name."""
        ...

    @property
    def drafters(self) -> list[str]:
        """Names of those that may serve a request."""
        ...

    def __enter__(self: S) -> S: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def need_template(self, otherwise: str) -> None:
        """Refuse a target that is known to have no chat template (UsageError), and say what to do."""

    def stream(self, prompt: Prompt, options: dict[str, Any]) -> Generator[Piece, None, None]:
        """Chunks as they come. Closing the iterator cancels the generation."""
        ...

    def answer(self, prompt: Prompt, options: dict[str, Any]) -> Answer:
        """Generate to the end."""
        ...

    def printer(self, trace: bool) -> Printer:
        """What writes the chunks."""
        ...

    def place(self) -> str:
        """Where the target runs, for a headline."""
        ...

    def machine(self) -> dict[str, Any]:
        """Where and with what it runs, for a report."""
        ...

    def benchmark(
        self, prompts: Sequence[BenchPrompt], settings: BenchOptions, tell: Callable[[PromptResult], None]
    ) -> list[PromptResult]:
        """Run every arm over all prompts."""
        ...


def open_source(options: argparse.Namespace) -> Source:
    """What ``check_source`` has found usable. MLX is imported for models in this process alone."""
    if options.connect is None:
        from services.cli.sources_local import LocalSource

        return LocalSource(options)
    from services.cli.sources_remote import RemoteSource

    return RemoteSource(options)


def turn(text: str, raw: bool) -> Prompt:
    """A prompt of plain text, or of one user turn."""
    return text if raw else [{"role": "user", "content": text}]
