"""What a caller asks for -> ``GenerateRequest``; everything that needs no service is checked here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any, TypedDict

from aerie.orchestrator.v1 import orchestrator_pb2 as pb

from services.speculation.errors import AerieError, Reason, check_integers, is_integer
from services.speculation.warpers import Sampler
from services.wire.orchestrator import Generate, write_generate

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A user's turn, token ids, or a conversation of {"role", "content"}."""


class Options(TypedDict, total=False):
    """Options of a generation. What is left out is the service's choice, or off.

    Attributes:
        raw: A prompt of text goes to the target as it is, without the chat template.
        max_tokens: Most tokens to generate; by default up to the end of the context.
        seed: Unsigned 64-bit; by default one is drawn, which the answer reports.
        stop: Strings that end the text.
        ignore_eos: Go on after EOS tokens.
        top_logprobs: Report log-probabilities and this many alternatives.
        drafter: "auto" (the default), "off", a family, a drafter's or an instance's name.
        tree_nodes, tree_depth, tree_top_k: Overrides of the tree preset.
        deadline: Seconds for the whole answer, retries included.
        sampler: How the target samples; or its fields one by one: temperature ... logit_bias.
        logit_bias: {token id: bias}, or pairs of them.
    """

    raw: bool
    max_tokens: int
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    top_logprobs: int | None
    drafter: str
    tree_nodes: int | None
    tree_depth: int | None
    tree_top_k: int | None
    deadline: float | None
    sampler: Sampler
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]


_SAMPLING = frozenset(field.name for field in fields(Sampler))
_TREE = {"tree_nodes": "nodes", "tree_depth": "depth", "tree_top_k": "top_k"}
_BITS = {"max_tokens": 32, "seed": 64, "top_logprobs": 32, **dict.fromkeys(_TREE, 32)}
_KINDS = {"raw": bool, "ignore_eos": bool, "drafter": str, "sampler": Sampler}


def write_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The message for a prompt and options.

    Raises:
        AerieError: INVALID_ARGUMENT for what no service takes.
    """
    if unknown := sorted(options.keys() - Options.__optional_keys__):
        raise _invalid(f"there is no option {unknown[0]!r}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.pop("deadline", None)
    for name, bits in _BITS.items():
        if name in given:
            check_integers(**{name: given[name]})
            if not 0 <= given[name] < 2**bits:
                raise _invalid(f"{name} must be an unsigned {bits}-bit integer, not {given[name]}")
            given[name] = int(given[name])
    for name, kind in _KINDS.items():
        if name in given and not isinstance(given[name], kind):
            raise _invalid(f"{name} must be a {kind.__name__}, not {given[name]!r}")
    if sampling := {name: given.pop(name) for name in _SAMPLING & given.keys()}:
        if "sampler" in given:
            raise _invalid(f"give a sampler or {', '.join(sorted(sampling))}, not both")
        given["sampler"] = _sampler(sampling)
    raw = given.pop("raw", False)
    fields_ = {_TREE.get(name, name): value for name, value in given.items()}
    fields_["stop"] = _texts(given.get("stop", ()))
    try:
        return write_generate(Generate(prompt=_prompt(prompt, raw), **fields_))
    except ValueError as error:  # token ids and biases that their fields do not hold; lone surrogates
        raise _invalid(f"the request cannot be sent: {error}") from None


def check_deadline(deadline: Any) -> float | None:
    """Raises AerieError: INVALID_ARGUMENT when it is not a positive number of seconds."""
    if deadline is None:
        return None
    if not isinstance(deadline, bool) and isinstance(deadline, Real) and 0 < float(deadline) < float("inf"):
        return float(deadline)
    raise _invalid(f"deadline must be a positive number of seconds, not {deadline!r}")


def _sampler(sampling: dict[str, Any]) -> Sampler:
    if isinstance(bias := sampling.get("logit_bias"), Mapping):
        sampling["logit_bias"] = tuple(bias.items())
    elif bias is not None and not isinstance(bias, str) and isinstance(bias, Iterable):
        sampling["logit_bias"] = tuple(bias)
    return Sampler(**sampling)


def _texts(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, Iterable):
        texts = tuple(stop)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise _invalid(f"stop must be strings, not {stop!r}")


def _prompt(prompt: Any, raw: bool) -> Any:
    if isinstance(prompt, str):
        return prompt if raw else [{"role": "user", "content": prompt}]
    if raw:
        raise _invalid("raw is for a prompt of text")
    if isinstance(prompt, Iterable):
        entries = tuple(prompt)
        if all(is_integer(entry) for entry in entries):
            return tuple(int(entry) for entry in entries)
        if all(_is_turn(entry) for entry in entries):
            return entries
    raise _invalid("a prompt is text, token ids or a list of {role, content} with text in both")


def _is_turn(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(name), str) for name in ("role", "content"))


def _invalid(message: str) -> AerieError:
    return AerieError(Reason.INVALID_ARGUMENT, message)
