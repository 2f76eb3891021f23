"""Answers of a running orchestrator: no model is loaded, and MLX is not imported."""

import argparse
from collections.abc import Callable, Generator, Sequence
from typing import Any

from services.bench.prompts import Prompt as BenchPrompt
from services.bench.remote import RemoteBenchmark, tree_options
from services.bench.results import Options as BenchOptions
from services.bench.results import PromptResult
from services.cli.dialling import security_of
from services.cli.report import complain
from services.cli.sources import Answer, Prompt
from services.cli.terminal import Printer, RoundPrinter
from services.client import ChunkMessage, Client, DoneMessage


class RemoteSource:
    """A client of the orchestrator at ``--connect`` (implements ``Source``)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._address = options.connect
        self._drafter = options.drafter
        self._client = Client(options.connect, security=security_of(options))

    def __enter__(self) -> "RemoteSource":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def target(self) -> str:
        return self._client.info().model

    @property
    def drafters(self) -> list[str]:
        """Of those on offer the ones that ``--drafter`` means."""
        infos = {line.name: line.status.info for line in self._client.drafters() if line.status}
        fitting = {info.name for name, info in infos.items() if self._drafter in ("auto", name, info.name, info.family)}
        return sorted(fitting)

    def need_template(self, otherwise: str) -> None:
        """The service refuses what it has no template for."""

    def stream(self, prompt: Prompt, options: dict[str, Any]) -> Generator[ChunkMessage, None, None]:
        with self._client.stream(prompt, **self._options(prompt, options)) as items:
            for item in items:
                if not isinstance(item, DoneMessage):
                    yield item
                elif item.drafter_lost:
                    complain(f"plain decoding went on: {item.drafter_lost}")

    def answer(self, prompt: Prompt, options: dict[str, Any]) -> Answer:
        result = self._client.generate(prompt, **self._options(prompt, options))
        if result.drafter_lost:
            complain(f"plain decoding went on: {result.drafter_lost}")
        return Answer(
            text=result.text,
            token_ids=result.token_ids,
            depths=result.depths,
            finish_reason=result.finish_reason,
            seed=result.seed,
            usage=result.usage,
            stats=result.stats,
        )

    def printer(self, trace: bool) -> Printer:
        return RoundPrinter() if trace else Printer()

    def place(self) -> str:
        return f"at {self._address}"

    def machine(self) -> dict[str, Any]:
        info = self._client.info()
        return {
            "address": self._address,
            "target": info.model,
            "weights_fingerprint": info.weights_fingerprint,
            "context_length": info.context_length,
            "vocab_size": info.vocab_size,
            "drafters": self.drafters,
        }

    def benchmark(
        self, prompts: Sequence[BenchPrompt], settings: BenchOptions, tell: Callable[[PromptResult], None]
    ) -> list[PromptResult]:
        # A drafter that was asked for by name and is not there is refused, and not left out.
        drafts = self._drafter != "off" and (self._drafter != "auto" or bool(self.drafters))
        return RemoteBenchmark(self._client, self._drafter if drafts else None, settings).run(prompts, tell)

    def _options(self, prompt: Prompt, options: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in options.items() if name != "tree"}
        return {**own, **tree_options(options["tree"]), "drafter": self._drafter, "raw": isinstance(prompt, str)}
