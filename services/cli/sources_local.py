"""Answers of models in this process."""

import argparse
from collections.abc import Callable, Generator, Sequence
from typing import Any

from kernels import _blas
from services.bench.prompts import Prompt as BenchPrompt
from services.bench.results import Options as BenchOptions
from services.bench.results import PromptResult
from services.bench.runner import machine, run_benchmark
from services.cli.options import overrides
from services.cli.report import UsageError, complain
from services.cli.sources import Answer, Prompt
from services.cli.terminal import Printer, make_printer
from services.embedded import Engine
from services.orchestrator.generation import Chunk, Done


def load_engine(options: argparse.Namespace) -> Engine:
    """The engine that ``--target``, ``--drafter`` and ``--threads`` ask for."""
    if options.threads is not None and not _blas.loaded:
        complain("--threads changes nothing here: MLX runs without the OpenBLAS whose threads it sets")
    return Engine.load(options.target, options.drafter, options.threads, overrides=overrides(options))


def check_template(engine: Engine, otherwise: str) -> None:
    """Refuse a target without a chat template (UsageError), and say what to do."""
    if engine.target.tokenizer.chat_template is None:
        raise UsageError(f"the target {engine.info.name} has no chat template: {otherwise}")


def prompt_tokens(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of plain text, or of a conversation in the chat template."""
    return engine.orchestrator.encode(prompt) if isinstance(prompt, str) else engine.chat_tokens(prompt)


class LocalSource:
    """An engine of our own (implements ``Source``)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._name = options.target
        self._engine = load_engine(options)
        self.target = self._engine.info.name
        self.drafters = [host.info.name for host in self._engine.drafters]

    def __enter__(self) -> "LocalSource":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def need_template(self, otherwise: str) -> None:
        check_template(self._engine, otherwise)

    def stream(self, prompt: Prompt, options: dict[str, Any]) -> Generator[Chunk, None, None]:
        for item in self._engine.stream(prompt_tokens(self._engine, prompt), **options):
            if not isinstance(item, Done):
                yield item

    def answer(self, prompt: Prompt, options: dict[str, Any]) -> Answer:
        result = self._engine.generate(prompt_tokens(self._engine, prompt), **options)
        return Answer(
            text=result.text,
            token_ids=result.token_ids,
            depths=result.depths,
            finish_reason=result.finish_reason,
            seed=result.seed,
            usage=result.stats.usage(),
            stats=result.stats.report(),
        )

    def printer(self, trace: bool) -> Printer:
        return make_printer(self._engine.orchestrator.tokenizer, trace)

    def place(self) -> str:
        where = self.machine()
        return f"({where['target_dtype']}) on {where['device_name']}"

    def machine(self) -> dict[str, Any]:
        return machine(self._engine)

    def benchmark(
        self, prompts: Sequence[BenchPrompt], settings: BenchOptions, tell: Callable[[PromptResult], None]
    ) -> list[PromptResult]:
        return run_benchmark(self._engine, self._name, prompts, settings, tell)
