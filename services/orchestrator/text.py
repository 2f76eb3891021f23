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
_MOST_WAITING = 64
"""Tokens that may wait for one character: more is garbage, and decoding them again for each token would not end."""

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
"""Limits of stop strings: how many, and characters of each."""


def is_text(text: str) -> bool:
    """JSON and Python can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_stops(stop: Sequence[str]) -> None:
    """Refuse stop strings that no generation takes.

    Raises:
        AerieError: INVALID_ARGUMENT for more than MAX_STOPS, or one that is empty, too long or no string.
    """
    if isinstance(stop, str) or not all(isinstance(s, str) for s in stop):
        raise AerieError(Reason.INVALID_ARGUMENT, "stop must be a sequence of strings")
    if len(stop) > MAX_STOPS:
        raise AerieError(Reason.INVALID_ARGUMENT, f"{len(stop)} stop strings; {MAX_STOPS} are the most")
    for s in stop:
        if not s:
            raise AerieError(Reason.INVALID_ARGUMENT, "a stop string is empty")
        if not is_text(s):
            raise AerieError(Reason.INVALID_ARGUMENT, "a stop string holds half a character (a lone surrogate)")
        if len(s) > MAX_STOP_LENGTH:
            message = f"a stop string of {len(s)} characters; {MAX_STOP_LENGTH} are the most"
            raise AerieError(Reason.INVALID_ARGUMENT, message)


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
        self._silent = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)

    def push(self, token: int) -> str:
        """Text that this token completes, possibly empty."""
        if token in self._silent:
            return ""  # kept, a run of them would be decoded again for each token
        self._ids.append(token)
        before, now = self._decode(self._read), self._decode(len(self._ids))
        waits = now.endswith(_REPLACEMENT) and len(self._ids) - self._read <= _MOST_WAITING
        if len(now) <= len(before) or waits:
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


class _Matcher:
    """Finds one string in a stream of characters (Knuth-Morris-Pratt): constant time a character.

    Attributes:
        matched: Length of the longest end of what was fed that begins the string.
    """

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self.matched = 0
        self._shorter = [0]  # entry n - 1: the next shorter beginning that also ends the first n characters
        for character in wanted[1:]:
            self._shorter.append(self._after(self._shorter[-1], character))

    def feed(self, text: str) -> int | None:
        """Index in ``text`` at which the string ends for the first time, or None."""
        for index, character in enumerate(text):
            self.matched = self._after(self.matched, character)
            if self.matched == len(self.wanted):
                return index + 1
        return None

    def _after(self, matched: int, character: str) -> int:
        while matched and self.wanted[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.wanted[matched] == character)


class TextStream:
    """Text of one generation up to its first stop string.

    Args:
        tokenizer: Of the target.
        stop: Strings that end the text; they are not part of it.

    Raises:
        AerieError: INVALID_ARGUMENT for stop strings beyond the limits.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        check_stops(stop)
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = [_Matcher(wanted) for wanted in stop]
        self._held = ""  # could be the beginning of a stop string

    def push(self, tokens: Sequence[int]) -> TextDelta:
        out = ""
        for index, token in enumerate(tokens):
            piece = self._detokenizer.push(token)
            ends = [(end, stop) for stop in self._stops if (end := stop.feed(piece)) is not None]
            before, self._held = len(self._held), self._held + piece
            if ends:
                cut = min(before + end - len(stop.wanted) for end, stop in ends)
                out, self._held = out + self._held[:cut], ""
                return TextDelta(out, index)
            safe = len(self._held) - max((stop.matched for stop in self._stops), default=0)
            out, self._held = out + self._held[:safe], self._held[safe:]
        return TextDelta(out)

    def flush(self) -> str:
        """What is held back when the generation ends otherwise."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text


_MOST_TEXT = 2**24
"""Characters of a conversation in its template: more than any context holds."""


class ChatTemplate:
    """A checkpoint's chat template, run in a sandbox: it is code from a stranger.

    Args:
        source: Jinja source.
        special_tokens: ``bos_token`` and others that it may name.

    Raises:
        AerieError: TARGET_UNSUPPORTED when it is no text or does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        if not isinstance(source, str):
            raise AerieError(Reason.TARGET_UNSUPPORTED, f"the chat template is {type(source).__name__}, not text")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
        self._special = special_tokens
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # whatever a stranger's source makes the compiler raise
            message = f"the chat template does not compile: {_describe(error)}"
            raise AerieError(Reason.TARGET_UNSUPPORTED, message) from None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt text of a conversation, up to where the assistant speaks.

        Raises:
            AerieError: INVALID_ARGUMENT for messages without text, or that the template refuses.
        """
        for index, message in enumerate(messages):
            _check_message(index, message)
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
            if len(text) > _MOST_TEXT:  # tokenizing takes many times its memory
                raise jinja2.TemplateError(f"they make {len(text)} characters, more than {_MOST_TEXT}")
            text.encode()
        except UnicodeEncodeError:
            raise AerieError(Reason.INVALID_ARGUMENT, "the messages hold half a character (a lone surrogate)") from None
        except Exception as error:  # whatever a stranger's code raises
            message_text = f"the chat template refused the messages: {_describe(error)}"
            raise AerieError(Reason.INVALID_ARGUMENT, message_text) from None
        return text


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise AerieError(Reason.INVALID_ARGUMENT, f"message {index} has no role")
    # Lists are parts of text and images, which some templates take.
    if not isinstance(content := message.get("content"), str | list):
        kind = "no content" if content is None else f"content of type {type(content).__name__}"
        raise AerieError(Reason.INVALID_ARGUMENT, f"message {index} has {kind}; it must be text")


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
