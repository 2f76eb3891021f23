"""Tokens to text: never half a character, stop strings across token boundaries, chat templates."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from services.speculation.errors import AerieError, Reason

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding: text comes out once its characters are complete.

    Args:
        tokenizer: Of the target. Special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, so that a token's spacing sees what came before
        self._read = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        """Text that this token completes, possibly empty."""
        self._ids.append(token)
        before, now = self._decode(self._read), self._decode(len(self._ids))
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        text = self._decode(len(self._ids))[len(self._decode(self._read)) :]
        self._context = self._read = len(self._ids)
        return text

    def _decode(self, stop: int) -> str:
        return self._tokenizer.decode(self._ids[self._context : stop], skip_special_tokens=True)


@dataclass(frozen=True)
class TextDelta:
    """New text, and the index of the pushed token that completed a stop string (None: none did)."""

    text: str
    stopped_at: int | None = None


class TextStream:
    """Text of one generation up to its first stop string.

    Args:
        tokenizer: Of the target.
        stop: Strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._held = ""  # could be the beginning of a stop string

    def push(self, tokens: Sequence[int]) -> TextDelta:
        out = ""
        for index, token in enumerate(tokens):
            self._held += self._detokenizer.push(token)
            if (cut := self._find()) is not None:
                out, self._held = out + self._held[:cut], ""
                return TextDelta(out, index)
            safe = len(self._held) - self._possible_stop()
            out, self._held = out + self._held[:safe], self._held[safe:]
        return TextDelta(out)

    def flush(self) -> str:
        """What is held back when the generation ends otherwise."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text

    def _find(self) -> int | None:
        return min((at for s in self._stop if (at := self._held.find(s)) >= 0), default=None)

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        lengths = (n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n]))
        return max(lengths, default=0)


class ChatTemplate:
    """A checkpoint's chat template, run in a sandbox: it is code from a stranger.

    Args:
        source: Jinja source.
        special_tokens: ``bos_token`` and others that it may name.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
        self._special = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise AerieError(Reason.TARGET_UNSUPPORTED, f"the chat template does not compile: {error}") from None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt text of a conversation, up to where the assistant speaks.

        Raises:
            AerieError: INVALID_ARGUMENT when the template refuses the messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            raise AerieError(Reason.INVALID_ARGUMENT, f"the chat template refused the messages: {error}") from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
