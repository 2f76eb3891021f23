"""Bodies of answers: the two shapes that a choice has, and what stands around the choices."""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from services.orchestrator.generation import Chunk, Done
from services.orchestrator.openai.tokens import TokenBytes
from services.orchestrator.stats import Stats
from services.orchestrator.text import Detokenizer
from services.speculation.messages import TargetInfo, TokenLogProbs

LEAST_LOG_PROB = -9999.0
"""What OpenAI says of a token that cannot come; JSON has no infinity."""


class Shape(Protocol):
    """One choice's parts, but for ``index`` and ``finish_reason``; it sees the choice's tokens in order."""

    def opening(self) -> dict[str, Any] | None:
        """What a stream says first."""
        ...

    def part(self, text: str, log_probs: Sequence[TokenLogProbs] | None) -> dict[str, Any]:
        """Some more of a stream."""
        ...

    def ending(self) -> dict[str, Any]:
        """What stands beside the finish reason of a stream."""
        ...

    def whole(self, text: str, log_probs: Sequence[TokenLogProbs] | None) -> dict[str, Any]:
        """All of it, for an answer in one body."""
        ...


class ChatShape:
    """A choice of a chat."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._bytes = tokens

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, text: str, log_probs: Sequence[TokenLogProbs] | None) -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": self._log_probs(log_probs)}

    def ending(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def whole(self, text: str, log_probs: Sequence[TokenLogProbs] | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._log_probs(log_probs)}

    def _log_probs(self, values: Sequence[TokenLogProbs] | None) -> dict[str, Any] | None:
        if values is None:
            return None
        content = [
            {
                **self._token(value.token, value.log_prob),
                "top_logprobs": [self._token(token, log_prob) for token, log_prob in value.top],
            }
            for value in values
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, log_prob: float) -> dict[str, Any]:
        data = self._bytes.of(token)
        return {
            "token": self._bytes.text(token),
            "logprob": _finite(log_prob),
            "bytes": None if data is None else list(data),
        }


class CompletionShape:
    """A choice of a completion.

    ``text_offset`` counts characters of the choice's text; tokens of a stop string lie at or behind its end.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._bytes = tokens
        self._detokenizer = Detokenizer(tokens.tokenizer)
        self._offset = 0

    def opening(self) -> None:
        return None

    def part(self, text: str, log_probs: Sequence[TokenLogProbs] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": None if log_probs is None else self._log_probs(log_probs)}

    def ending(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def whole(self, text: str, log_probs: Sequence[TokenLogProbs] | None) -> dict[str, Any]:
        return self.part(text, log_probs)

    def _log_probs(self, values: Sequence[TokenLogProbs]) -> dict[str, Any]:
        offsets = [self._begin(value.token) for value in values]
        return {
            "tokens": [self._name(value.token) for value in values],
            "token_logprobs": [_finite(value.log_prob) for value in values],
            "top_logprobs": [self._top(value) for value in values],
            "text_offset": offsets,
        }

    def _begin(self, token: int) -> int:
        """Where the token's text begins; halves of a character all begin where it does."""
        before, piece, own = self._offset, self._detokenizer.push(token), self._bytes.text(token)
        self._offset += len(piece)
        # Halves that never became a character come out with the token behind them.
        return self._offset - len(own) if piece.endswith(own) else before

    def _top(self, value: TokenLogProbs) -> dict[str, float]:
        """The alternatives and the token itself. Of two tokens that look the same, the likelier one."""
        names: dict[str, float] = {}
        for token, log_prob in (*value.top, (value.token, value.log_prob)):
            names.setdefault(self._name(token), _finite(log_prob))
        return names

    def _name(self, token: int) -> str:
        data = self._bytes.of(token) or b""
        try:
            return data.decode()
        except UnicodeDecodeError:
            return f"bytes:{self._bytes.text(token)}"


def _finite(log_prob: float) -> float:
    return max(log_prob, LEAST_LOG_PROB) if not math.isnan(log_prob) else LEAST_LOG_PROB


@dataclass(frozen=True)
class Endpoint:
    """What differs between chats and completions."""

    shape: type[ChatShape] | type[CompletionShape]
    id_prefix: str
    whole: str
    part: str
    prompt: str


CHAT = Endpoint(ChatShape, "chatcmpl-", "chat.completion", "chat.completion.chunk", "messages")
COMPLETION = Endpoint(CompletionShape, "cmpl-", "text_completion", "text_completion", "prompt")


@dataclass
class Outcome:
    """What one choice has come to; ``tokens`` counts those that were emitted."""

    text: list[str] = field(default_factory=list)
    tokens: int = 0
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    done: Done | None = None

    def add(self, item: Chunk | Done) -> None:
        if isinstance(item, Done):
            self.done = item
            return
        self.text.append(item.text)
        self.tokens += len(item.tokens)
        self.log_probs += item.log_probs


class Bodies:
    """Bodies of one answer.

    Args:
        endpoint: Chat or completion.
        info: The target that answers.
        seed: Of the request, under ``x-aerie``.
        metadata: Labels to carry back.
    """

    def __init__(self, endpoint: Endpoint, info: TargetInfo, seed: int, metadata: dict[str, str] | None) -> None:
        self._endpoint = endpoint
        self._head: dict[str, Any] = {
            "id": f"{endpoint.id_prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": f"fp_{info.weights_fingerprint}",
            "x-aerie": {"seed": seed},
        }
        self._labels = {} if metadata is None else {"metadata": metadata}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {"object": self._endpoint.whole, **self._head, **self._labels, "choices": choices, "usage": usage}

    def part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": self._endpoint.part, **self._head, "choices": choices}


def closing(done: Done) -> dict[str, Any]:
    """How a choice ended: its reason, its own seed, and why its drafter was given up, if it was."""
    own: dict[str, Any] = {"seed": done.seed}
    if done.drafter_lost is not None:
        own["drafter_lost"] = done.drafter_lost
    return {"finish_reason": done.finish_reason, "x-aerie": own}


def usage(prompt_tokens: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Tokens of the whole answer, each prompt counted once, and how speculation went, all choices together."""
    completion = sum(outcome.tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "x-aerie": _together([outcome.done.stats for outcome in outcomes if outcome.done]).report(),
    }


def _together(stats: Sequence[Stats]) -> Stats:
    """Sums over choices that ran side by side; the clock runs from the first one's first token to the last of all."""
    first = [s.first_token for s in stats if s.first_token is not None]
    last = [s.last_token for s in stats if s.last_token is not None]
    marks: dict[str, Any] = {
        "started": min(s.started for s in stats),
        "first_token": min(first),
        "last_token": max(last),
    }
    counted = [f.name for f in fields(Stats) if f.name not in marks]
    sums: dict[str, Any] = {
        name: sum((getattr(s, name) for s in stats[1:]), start=getattr(stats[0], name)) for name in counted
    }
    return replace(stats[0], **marks, **sums)
