"""Bodies of ``/v1/chat/completions`` and ``/v1/completions`` into what the orchestrator takes.

Every field is honoured or refused by name. Three only label a request, and no answer depends on them: ``user``,
``safety_identifier``, and ``metadata``, which a chat answer carries back. Fields that are not supported are taken
with the one value that asks for nothing: ``echo: false``, ``store: false``, ``best_of: 1``, ``suffix: ""``,
``response_format: {"type": "text"}``, ``modalities: ["text"]``, ``service_tier: "auto"`` or no tools at all.
``null`` is a field that is not there.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.orchestrator.openai.errors import HttpError
from services.orchestrator.openai.fields import Fields
from services.orchestrator.routing import TreeOptions
from services.orchestrator.service import Request
from services.orchestrator.text import check_stops, is_text
from services.speculation.errors import is_integer
from services.speculation.messages import TargetInfo
from services.speculation.noise import choice_seed
from services.speculation.warpers import Sampler

MAX_CHOICES = 128
"""Generations of one request: prompts times ``n``."""
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as OpenAI has it; a chat's answer may fill the context."""
_INT32 = 2**31 - 1
_DRAWN_BITS = 53
"""Seeds that we draw go through JSON readers that know no integers but doubles."""

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "x-aerie-top-k": "top_k",
    "x-aerie-min-p": "min_p",
    "x-aerie-repetition-penalty": "repetition_penalty",
}
_TREE = {"x-aerie-tree-nodes": "nodes", "x-aerie-tree-depth": "depth", "x-aerie-tree-top-k": "top_k"}
_NOT_BUILT = {"store": False, "service_tier": "auto"}
_NO_CHAT: dict[str, Any] = {
    **_NOT_BUILT,
    "audio": None,
    "function_call": None,
    "functions": [],
    "modalities": ["text"],
    "moderation": None,
    "parallel_tool_calls": None,
    "prediction": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "reasoning_effort": None,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "tools": [],
    "verbosity": None,
    "web_search_options": None,
}
_NO_COMPLETION = {**_NOT_BUILT, "best_of": 1, "echo": False, "suffix": ""}
_NO_MESSAGE: dict[str, Any] = {
    "name": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "refusal": None,
    "tool_calls": [],
    "tool_call_id": None,
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI's roles and the templates'; newer models of OpenAI call the system the developer."""


@dataclass(frozen=True)
class Options:
    """What a body asks for, but for its prompts.

    Attributes:
        n: Choices for each prompt.
        seed: Of the request; drawn where the body names none.
        max_tokens: None fills the context.
        top_logprobs: As in ``Request``.
        stream, include_usage: Events instead of one body, and whether they end with the usage.
        metadata: Labels that the answer carries back.
    """

    n: int
    seed: int
    max_tokens: int | None
    sampler: Sampler
    stop: tuple[str, ...]
    top_logprobs: int | None
    ignore_eos: bool
    drafter: str
    tree: TreeOptions
    stream: bool
    include_usage: bool
    metadata: dict[str, str] | None = None

    def requests(self, tokens: tuple[int, ...], context_length: int) -> list[Request]:
        """One request for each choice of a prompt. A prompt gets the same ones whatever stands beside it."""
        room = max(context_length - len(tokens), 1)
        seeds = [self.seed] if self.n == 1 else [choice_seed(self.seed, choice) for choice in range(self.n)]
        return [
            Request(
                tokens=tokens,
                max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
                sampler=self.sampler,
                seed=seed,
                stop=self.stop,
                ignore_eos=self.ignore_eos,
                top_logprobs=self.top_logprobs,
                drafter=self.drafter,
                tree=self.tree,
            )
            for seed in seeds
        ]


@dataclass(frozen=True)
class ChatBody:
    """A conversation: turns of ``role`` and ``content``."""

    messages: tuple[dict[str, Any], ...]
    options: Options


@dataclass(frozen=True)
class CompletionBody:
    """Prompts: text, or token ids of the target."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: Options


def read_chat(body: Mapping[str, Any], info: TargetInfo) -> ChatBody:
    """Read a chat body.

    Raises:
        HttpError: 404 for another model; 400 for what is wrong, unknown or not supported, with its name.
    """
    fields = Fields(body)
    _check_model(fields, info)
    messages = _messages(fields)
    most = fields.integer("max_tokens", 1, _INT32)
    newer = fields.integer("max_completion_tokens", 1, _INT32)
    if most is not None and newer is not None:
        fields.refuse("max_tokens", "give max_tokens or max_completion_tokens, not both")
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        fields.refuse("top_logprobs", "top_logprobs needs logprobs to be true")
    metadata = _metadata(fields)
    options = _options(fields, info, newer if most is None else most, (top or 0) if wanted else None, metadata)
    fields.end(_NO_CHAT)
    return ChatBody(messages, options)


def read_completion(body: Mapping[str, Any], info: TargetInfo) -> CompletionBody:
    """Read a completion body; raises as ``read_chat``."""
    fields = Fields(body)
    _check_model(fields, info)
    prompts = _prompts(fields, info.vocab_size)
    most = fields.integer("max_tokens", 1, _INT32)
    top = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    options = _options(fields, info, COMPLETION_TOKENS if most is None else most, top, None)
    if len(prompts) * options.n > MAX_CHOICES:
        fields.refuse("n", f"{len(prompts)} prompts times n = {options.n}: {MAX_CHOICES} choices are the most")
    fields.end(_NO_COMPLETION)
    return CompletionBody(prompts, options)


def _options(
    fields: Fields, info: TargetInfo, max_tokens: int | None, top: int | None, metadata: dict[str, str] | None
) -> Options:
    for label in ("user", "safety_identifier"):
        fields.string(label)
    stream = fields.boolean("stream", False)
    n = fields.integer("n", 1, MAX_CHOICES)
    # OpenAI's seeds are signed; the same 64 bits are ours.
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    drafter = fields.string("x-aerie-drafter")
    return Options(
        n=1 if n is None else n,
        seed=secrets.randbits(_DRAWN_BITS) if seed is None else seed % 2**64,
        max_tokens=max_tokens,
        sampler=_sampler(fields, info.vocab_size),
        stop=_stop(fields),
        top_logprobs=top,
        ignore_eos=fields.boolean("x-aerie-ignore-eos", False),
        drafter="auto" if drafter is None else drafter,
        tree=_tree(fields, info),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        metadata=metadata,
    )


def _check_model(fields: Fields, info: TargetInfo) -> None:
    model = fields.string("model")
    if model is None:
        fields.need("model")
    if model != info.name:
        raise unknown_model(model)


def unknown_model(model: str) -> HttpError:
    return HttpError(404, f"there is no model {model!r} here", "model_not_found", "model")


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    messages = fields.array("messages")
    if messages is None:
        fields.need("messages")
    if not messages:
        fields.refuse("messages", "messages is empty")
    return tuple(_message(fields, f"messages[{index}]", message) for index, message in enumerate(messages))


def _message(fields: Fields, where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        fields.refuse(where, f"{where} must be an object")
    own = Fields(message, f"{where}.")
    role, content = own.string("role"), own.take("content")
    if role is None:
        own.need("role")
    if role not in _ROLES:
        own.refuse("role", f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}")
    own.end(_NO_MESSAGE)
    if content is None:
        own.need("content")
    if isinstance(content, list):
        content = "".join(_part(own, f"{where}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        own.refuse("content", f"{where}.content must be text or a list of text parts")
    return {"role": _ROLES[role], "content": content}


def _part(fields: Fields, where: str, part: Any) -> str:
    if not isinstance(part, dict):
        fields.refuse("content", f"{where} must be an object")
    own = Fields(part, f"{where}.")
    kind = own.string("type")
    if kind != "text":
        own.refuse("type", f"{where} is of type {kind!r}; only text parts are supported")
    text = own.string("text")
    if text is None:
        own.need("text")
    own.end({})
    return text


def _prompts(fields: Fields, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    prompt = fields.take("prompt")
    if prompt is None:
        fields.need("prompt")
    # A list of numbers is one prompt, any other list is several.
    several = isinstance(prompt, list) and not (prompt and all(is_integer(token) for token in prompt))
    prompts = prompt if several else [prompt]
    if not prompts:
        fields.refuse("prompt", "prompt is an empty list")
    if len(prompts) > MAX_CHOICES:
        fields.refuse("prompt", f"{len(prompts)} prompts; {MAX_CHOICES} are the most")
    return tuple(_prompt(fields, prompt, vocab_size) for prompt in prompts)


def _prompt(fields: Fields, prompt: Any, vocab_size: int) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        if not is_text(prompt):
            fields.refuse("prompt", "prompt holds half a character (a lone surrogate)")
        return prompt
    if not isinstance(prompt, list) or not all(is_integer(token) for token in prompt):
        fields.refuse("prompt", "prompt must be text, a list of token ids, or a list of such prompts")
    for token in prompt:
        if not 0 <= token < vocab_size:
            fields.refuse("prompt", f"prompt token {token} is outside the vocabulary of {vocab_size}")
    return tuple(prompt)


def _metadata(fields: Fields) -> dict[str, str] | None:
    metadata = fields.mapping("metadata")
    if metadata and (len(metadata) > 16 or not all(isinstance(value, str) for value in metadata.values())):
        fields.refuse("metadata", "metadata must be an object of at most 16 strings")
    return metadata


def _sampler(fields: Fields, vocab_size: int) -> Sampler:
    values: dict[str, Any] = {"temperature": 1.0}  # OpenAI's default; ours is greedy
    for name, option in _SAMPLING.items():
        if option == "top_k":
            value: Any = fields.integer(name, 0, _INT32)
        else:
            value = fields.take(name)
        if value is not None:
            with fields.blamed(name):
                Sampler(**{option: value})  # alone, to know whose fault it is
            values[option] = value
    bias = _logit_bias(fields)
    with fields.blamed("logit_bias"):
        Sampler(logit_bias=bias).check_vocabulary(vocab_size)
    return Sampler(**values, logit_bias=bias)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    pairs = []
    for name, bias in (fields.mapping("logit_bias") or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 11 and str(int(name)) == name):
            fields.refuse("logit_bias", f"logit_bias names {name[:20]!r}, which is not a token id")
        if type(bias) not in (int, float):
            fields.refuse("logit_bias", f"logit_bias of token {name} must be a number")
        pairs.append((int(name), bias))
    return tuple(pairs)


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop")
    stops: Sequence[str] = () if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple):
        fields.refuse("stop", "stop must be a string or a list of strings")
    with fields.blamed("stop"):
        check_stops(stops)
    return tuple(stops)


def _tree(fields: Fields, info: TargetInfo) -> TreeOptions:
    values = {}
    for name, option in _TREE.items():
        values[option] = fields.integer(name, 0, _INT32)
        with fields.blamed(name):
            TreeOptions(**{option: values[option]}).budget(info)
    return TreeOptions(**values)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not stream:
        fields.refuse("stream_options", "stream_options needs stream to be true")
    own = Fields(options, "stream_options.")
    wanted = own.boolean("include_usage", False)
    own.end({"include_obfuscation": False})
    return wanted
