"""Text on a terminal: streaming, and colours for how each token came."""

import sys
from typing import TextIO

from services.embedded import Engine
from services.orchestrator.generation import Chunk
from services.orchestrator.text import Detokenizer

# Depths 1, 2, 3, ... get greener; a bonus token keeps the terminal's own colour.
_DEPTH_COLOURS = (75, 80, 79, 78, 77, 76, 82, 118)
_RESET = "\033[0m"


class Printer:
    """Writes chunks as they come.

    Args:
        engine: Its tokenizer splits traced text.
        trace: Colour tokens by the depth they were accepted at.
        out: Where to.
    """

    def __init__(self, engine: Engine, trace: bool, out: TextIO = sys.stdout) -> None:
        self._trace = trace
        self._out = out
        self._detokenizer = Detokenizer(engine.orchestrator.tokenizer)

    def write(self, chunk: Chunk) -> None:
        if not self._trace:
            self._out.write(chunk.text)
        for token, depth in zip(chunk.tokens, chunk.depths, strict=True) if self._trace else ():
            self._out.write(paint(self._detokenizer.push(token), depth))
        self._out.flush()

    def finish(self) -> None:
        self._out.write("\n")
        if self._trace:
            shades = " ".join(paint(f"depth {d}", d) for d in range(1, len(_DEPTH_COLOURS) + 1))
            self._out.write(f"[bonus, {shades}]\n")
        self._out.flush()


def paint(text: str, depth: int) -> str:
    """Colour text by tree depth; depth 0 (bonus) stays plain."""
    if not depth or not text:
        return text
    return f"\033[38;5;{_DEPTH_COLOURS[min(depth, len(_DEPTH_COLOURS)) - 1]}m{text}{_RESET}"
