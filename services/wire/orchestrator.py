"""What travels on ``OrchestratorService``: ``aerie.orchestrator.v1`` <-> plain values of services and clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie.orchestrator.v1 import orchestrator_pb2 as pb

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import DrafterInfo, DrafterStatus, FinishReason, TokenLogProbs
from services.speculation.warpers import Sampler
from services.wire import values

Prompt = str | tuple[int, ...] | tuple[tuple[str, str], ...]
"""Plain text, token ids, or a conversation of (role, content)."""


@dataclass(frozen=True)
class Generate:
    """A request as a client makes it. None leaves a choice to the service."""

    prompt: str | tuple[int, ...] | Sequence[Mapping[str, Any]]
    max_tokens: int | None = None
    sampler: Sampler = field(default_factory=Sampler)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    drafter: str = "auto"
    nodes: int | None = None
    depth: int | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class ChunkMessage:
    """As ``orchestrator.generation.Chunk``."""

    text: str
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...]


@dataclass(frozen=True)
class DoneMessage:
    """The end of a generation; ``stats`` are those of ``--json``."""

    finish_reason: FinishReason
    seed: int
    usage: dict[str, int]
    stats: dict[str, Any]
    drafter_lost: str | None


_NUMBERS = ("tokens_per_second", "prefill_seconds", "decode_seconds", "draft_seconds", "verify_seconds")
_STATS = (
    "rounds",
    "acceptance_length",
    *_NUMBERS,
    "overhead_seconds",
    "queue_seconds",
    "network_seconds",
    "fallback_rounds",
    "late_rounds",
)


@dataclass(frozen=True)
class DrafterLine:
    """A drafter instance as ``ListDrafters`` shows it; ``status`` is None for one that is not offered."""

    name: str
    address: str
    status: DrafterStatus | None
    sessions: int = 0
    detail: str = ""


def write_drafters(offered: Sequence[DrafterLine], unfit: Mapping[str, str]) -> pb.ListDraftersResponse:
    """Those that are offered, then the names of the others and why they are not."""
    lines = []
    for line in offered:
        assert line.status
        info = line.status.info
        lines.append(
            pb.DrafterSummary(
                instance=line.name,
                name=info.name,
                family=info.family,
                target_fingerprint=info.target_fingerprint,
                taps=[values.write_tap(tap) for tap in info.taps],
                parameters=info.parameters,
                sessions=line.sessions,
                draft_seconds=line.status.draft_seconds,
                address=line.address,
                ready=True,
            )
        )
    lines += [pb.DrafterSummary(instance=name, detail=why) for name, why in sorted(unfit.items())]
    return pb.ListDraftersResponse(drafters=lines)


def read_drafters(response: pb.ListDraftersResponse) -> list[DrafterLine]:
    """Raises AerieError: INVALID_ARGUMENT for a tap that is none."""
    lines = []
    for d in response.drafters:
        if not d.ready:
            lines.append(DrafterLine(d.instance, d.address, None, detail=d.detail))
            continue
        fingerprint = d.target_fingerprint if d.HasField("target_fingerprint") else None
        taps = tuple(values.read_tap(tap) for tap in d.taps)
        info = DrafterInfo(d.name, d.family, taps, fingerprint, d.parameters)
        status = DrafterStatus(info, d.sessions, values.read_seconds(d.draft_seconds))
        lines.append(DrafterLine(d.instance, d.address, status, d.sessions))
    return lines


def write_generate(request: Generate) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        max_tokens=request.max_tokens,
        sampler=values.write_sampler(request.sampler),
        seed=request.seed,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        top_logprobs=request.top_logprobs,
        drafter=request.drafter,
        tree=pb.TreeOptions(nodes=request.nodes, depth=request.depth, top_k=request.top_k),
    )
    prompt = request.prompt
    if isinstance(prompt, str):
        message.text = prompt
    elif all(isinstance(token, int) for token in prompt):
        message.tokens.ids.extend(prompt)  # type: ignore[arg-type]
        message.tokens.SetInParent()
    else:
        message.conversation.messages.extend(
            pb.ChatMessage(role=turn["role"], content=turn["content"])  # type: ignore[index]
            for turn in prompt
        )
    return message


def read_generate(request: pb.GenerateRequest) -> Generate:
    """Raises AerieError: INVALID_ARGUMENT."""
    prompt: Any
    match request.WhichOneof("prompt"):
        case "conversation":
            prompt = [{"role": turn.role, "content": turn.content} for turn in request.conversation.messages]
            if not prompt:
                raise AerieError(Reason.PROMPT_EMPTY, "the conversation has no message")
            if not all(turn["role"] for turn in prompt):
                raise AerieError(Reason.INVALID_ARGUMENT, "a message of the conversation has no role")
        case "text":
            prompt = request.text
        case "tokens":
            prompt = tuple(request.tokens.ids)
        case _:
            raise AerieError(Reason.PROMPT_EMPTY, "the request has no prompt")

    def given(message: Any, name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return Generate(
        prompt=prompt,
        max_tokens=given(request, "max_tokens"),
        sampler=values.read_sampler(request.sampler),
        seed=given(request, "seed"),
        stop=tuple(request.stop),
        ignore_eos=request.ignore_eos,
        top_logprobs=given(request, "top_logprobs"),
        drafter=request.drafter or "auto",
        nodes=given(request.tree, "nodes"),
        depth=given(request.tree, "depth"),
        top_k=given(request.tree, "top_k"),
    )


def write_chunk(
    text: str, tokens: Sequence[int], depths: Sequence[int], log_probs: Sequence[TokenLogProbs]
) -> pb.GenerateResponse:
    chunk = pb.Chunk(text=text, tokens=tokens, depths=depths, log_probs=values.write_log_probs(log_probs))
    return pb.GenerateResponse(chunk=chunk)


def write_done(done: DoneMessage) -> pb.GenerateResponse:
    stats = pb.Stats(
        prompt_tokens=done.usage["prompt_tokens"],
        completion_tokens=done.usage["completion_tokens"],
        acceptance_by_depth=done.stats["acceptance_by_depth"],
        **{name: done.stats[name] for name in _STATS},
    )
    message = pb.Done(
        finish_reason=values.write_finish(done.finish_reason),
        seed=done.seed,
        stats=stats,
        drafter_lost=done.drafter_lost,
    )
    return pb.GenerateResponse(done=message)


def read_generated(response: pb.GenerateResponse) -> ChunkMessage | DoneMessage:
    """Raises AerieError: INVALID_ARGUMENT for what this version does not know."""
    match response.WhichOneof("event"):
        case "chunk":
            c = response.chunk
            return ChunkMessage(c.text, tuple(c.tokens), tuple(c.depths), values.read_log_probs(c.log_probs))
        case "done":
            d = response.done
            finish = values.read_finish(d.finish_reason)
            if finish is not None:
                usage = {"prompt_tokens": d.stats.prompt_tokens, "completion_tokens": d.stats.completion_tokens}
                stats = {name: getattr(d.stats, name) for name in _STATS}
                stats["acceptance_by_depth"] = list(d.stats.acceptance_by_depth)
                lost = d.drafter_lost if d.HasField("drafter_lost") else None
                return DoneMessage(finish, d.seed, usage, stats, lost)
    raise AerieError(Reason.INVALID_ARGUMENT, "a response without an event that this version knows")
