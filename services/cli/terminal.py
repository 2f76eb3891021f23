"""Text on a terminal: streaming, and colours for how each token came."""

import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol, TextIO

from tokenizers import Tokenizer

from services.orchestrator.text import Detokenizer

# Depths 1, 2, 3, ... get greener; a bonus token keeps the terminal's own colour.
_DEPTH_COLOURS = (75, 80, 79, 78, 77, 76, 82, 118)
_RESET = "\033[0m"


class Piece(Protocol):
    """A chunk of an answer, of this process or of a service."""

    @property
    def text(self) -> str: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def depths(self) -> Sequence[int]: ...


class Printer:
    """Writes chunks as they come.

    Args:
        out: Where to; standard output when None.

    Attributes:
        text: What has been written.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self.text = ""

    def write(self, chunk: Piece) -> None:
        self.text += chunk.text
        self._write_text(chunk)
        self._out.flush()

    def finish(self) -> None:
        """End the line."""
        print(file=self._out, flush=True)

    def _write_text(self, chunk: Piece) -> None:
        self._out.write(chunk.text)


class _Tracer(Printer):
    """Counts tokens by the depth at which they were accepted, and ends with the counts."""

    note = ""

    def __init__(self, out: TextIO | None = None) -> None:
        super().__init__(out)
        self._colours = wants_colours(self._out)
        self._depth = 0
        self._counts: Counter[int] = Counter()

    def finish(self) -> None:
        names = {depth: f"depth {depth}" if depth else "the target's own" for depth in sorted(self._counts)}
        legend = ", ".join(f"{self._paint(name, depth)}: {self._counts[depth]}" for depth, name in names.items())
        note = self.note if self._colours else ""
        print(f"\n[tokens by origin: {legend or 'none'}{note}]", file=self._out, flush=True)

    def _paint(self, text: str, depth: int) -> str:
        if not self._colours or not depth or not text:
            return text
        return f"\033[38;5;{_DEPTH_COLOURS[min(depth, len(_DEPTH_COLOURS)) - 1]}m{text}{_RESET}"


class TracePrinter(_Tracer):
    """Colours text by the depth at which its token was accepted.

    Args:
        tokenizer: Says which text is which token's.
        out: Where to; standard output when None.
    """

    def __init__(self, tokenizer: Tokenizer, out: TextIO | None = None) -> None:
        super().__init__(out)
        self._detokenizer = Detokenizer(tokenizer)
        self._pieces: deque[tuple[int, int]] = deque()  # characters and depth of tokens whose text is not out yet

    def _write_text(self, chunk: Piece) -> None:
        for token, depth in zip(chunk.tokens, chunk.depths, strict=True):
            self._counts[depth] += 1
            self._pieces.append((len(self._detokenizer.push(token)), depth))
        # The chunk's text decides what is written: it lags behind its tokens, and ends before a stop string.
        text = chunk.text
        while text and self._pieces:
            length, self._depth = self._pieces.popleft()
            self._out.write(self._paint(text[:length], self._depth))
            if length > len(text):
                self._pieces.appendleft((length - len(text), self._depth))
            text = text[length:]
        self._out.write(self._paint(text, self._depth))


class RoundPrinter(_Tracer):
    """Colours the text of each round as a whole, by the depth that the round reached.

    For answers of a service: which text is which token's, its tokenizer alone would say.
    """

    note = "; the colour of a text is the depth that its round reached"

    def _write_text(self, chunk: Piece) -> None:
        self._counts.update(chunk.depths)
        self._depth = max(chunk.depths, default=self._depth)
        self._out.write(self._paint(chunk.text, self._depth))


def make_printer(tokenizer: Tokenizer, trace: bool) -> Printer:
    return TracePrinter(tokenizer) if trace else Printer()


def wants_colours(out: TextIO) -> bool:
    """Colours on a terminal; NO_COLOR and FORCE_COLOR (not empty) decide otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or out.isatty()
