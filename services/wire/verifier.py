"""What travels on ``VerifierService``: ``aerie.verifier.v1`` <-> ``services.speculation.messages``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aerie.types.v1 import types_pb2
from aerie.verifier.v1 import verifier_pb2 as pb
from numpy.typing import NDArray

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Attach,
    Features,
    FromVerifier,
    History,
    Open,
    PortError,
    Prefilled,
    SessionSummary,
    TargetInfo,
    ToVerifier,
    Truncate,
    Verdict,
    Verify,
)
from services.wire import values

CHUNK_BYTES = 2**20
"""Largest piece of a tensor."""
_FEATURE_TYPES = {
    "float32": types_pb2.ELEMENT_TYPE_FLOAT32,
    "float16": types_pb2.ELEMENT_TYPE_FLOAT16,
    "bfloat16": types_pb2.ELEMENT_TYPE_BFLOAT16,
}
_FEATURE_NAMES = {value: name for name, value in _FEATURE_TYPES.items()}


def write_request(message: ToVerifier) -> pb.SessionRequest:
    match message:
        case Open():
            return pb.SessionRequest(session=message.session, open=_write_open(message))
        case Verify():
            round_ = values.write_round(message.epoch, message.round, message.base_len)
            verify = pb.Verify(id=round_, tree=values.write_tree(message.tree))
            return pb.SessionRequest(session=message.session, verify=verify)
        case Truncate():
            truncate = pb.Truncate(epoch=message.epoch, length=message.length)
            return pb.SessionRequest(session=message.session, truncate=truncate)
        case Attach():
            taps = [values.write_tap(tap) for tap in message.taps]
            attach = pb.Attach(epoch=message.epoch, number=message.number, taps=taps)
            return pb.SessionRequest(session=message.session, attach=attach)


def read_request(request: pb.SessionRequest) -> ToVerifier:
    """Raises AerieError: INVALID_ARGUMENT or INVALID_TREE."""
    session = request.session
    match request.WhichOneof("message"):
        case "open":
            return _read_open(session, request.open)
        case "verify":
            epoch, round_, base_len = values.read_round(request.verify.id)
            return Verify(session, epoch, round_, base_len, values.read_tree(request.verify.tree))
        case "truncate":
            return Truncate(session, request.truncate.epoch, request.truncate.length)
        case "attach":
            taps = tuple(values.read_tap(tap) for tap in request.attach.taps)
            return Attach(session, request.attach.epoch, request.attach.number, taps)
    raise AerieError(Reason.INVALID_ARGUMENT, "a request without a message that this version knows")


def write_response(message: Prefilled | Verdict | PortError) -> pb.SessionResponse:
    session = message.session
    match message:
        case Prefilled():
            prefilled = pb.Prefilled(
                epoch=message.epoch,
                token=message.token,
                finish=values.write_finish(message.finish),
                seconds=message.seconds,
                log_probs=values.write_log_probs(message.log_probs),
            )
            return pb.SessionResponse(session=session, prefilled=prefilled)
        case Verdict():
            verdict = pb.Verdict(
                id=values.write_round(message.epoch, message.round, message.base_len),
                path=message.path,
                tokens=message.tokens,
                finish=values.write_finish(message.finish),
                features=values.write_features(message.features),
                seconds=message.seconds,
                queue_seconds=message.queue_seconds,
                log_probs=values.write_log_probs(message.log_probs),
            )
            return pb.SessionResponse(session=session, verdict=verdict)
        case PortError():
            return pb.SessionResponse(session=session, error=values.write_error(message))


def read_response(response: pb.SessionResponse) -> FromVerifier:
    """Raises AerieError: INVALID_ARGUMENT."""
    session = response.session
    match response.WhichOneof("message"):
        case "prefilled":
            p = response.prefilled
            finish, log_probs = values.read_finish(p.finish), values.read_log_probs(p.log_probs)
            return Prefilled(session, p.epoch, p.token, finish, values.read_seconds(p.seconds), log_probs)
        case "verdict":
            v = response.verdict
            return Verdict(
                session,
                *values.read_round(v.id),
                path=tuple(v.path),
                tokens=tuple(v.tokens),
                finish=values.read_finish(v.finish),
                features=values.read_features(v.features),
                seconds=values.read_seconds(v.seconds),
                log_probs=values.read_log_probs(v.log_probs),
                queue_seconds=values.read_seconds(v.queue_seconds),
            )
        case "error":
            return values.read_error(session, response.error)
    raise AerieError(Reason.INVALID_ARGUMENT, "a response without a message that this version knows")


FEATURE_BYTES = 256 * 2**10
"""Largest slice of history, unless a single row is larger."""
CREDIT_BYTES = 4 * 2**20
"""History that may be under way without being acknowledged."""


def write_subscribe(session: str, epoch: int) -> pb.FeaturesRequest:
    return pb.FeaturesRequest(subscribe=pb.Subscribe(session=session, epoch=epoch))


def write_acknowledge(size: int) -> pb.FeaturesRequest:
    return pb.FeaturesRequest(acknowledge=pb.Acknowledge(bytes=size))


def read_features_request(request: pb.FeaturesRequest) -> tuple[str, int] | int:
    """(session, epoch) of a subscription, or the bytes of an acknowledgement. Raises AerieError: INVALID_ARGUMENT."""
    match request.WhichOneof("message"):
        case "subscribe":
            return request.subscribe.session, request.subscribe.epoch
        case "acknowledge":
            return request.acknowledge.bytes
    raise AerieError(Reason.INVALID_ARGUMENT, "a request without a message that this version knows")


def split_history(history: History) -> Iterator[History]:
    """Slices of at most FEATURE_BYTES as they travel, or of one row."""
    features = history.features
    rows = max(1, FEATURE_BYTES * len(features) // max(1, values.wire_bytes(features)))
    for start in range(0, len(features), rows):
        part = {tap: array[start : start + rows] for tap, array in features.rows.items()}
        tokens = history.tokens[start : start + rows]
        yield replace(history, features=Features(features.base + start, part), tokens=tokens)


def write_history(history: History) -> pb.FeaturesResponse:
    features = values.write_features(history.features)
    return pb.FeaturesResponse(history=pb.History(number=history.number, features=features, tokens=history.tokens))


def read_history(session: str, epoch: int, response: pb.FeaturesResponse) -> History:
    """Raises AerieError: INVALID_ARGUMENT."""
    h = response.history
    return History(session, epoch, values.read_features(h.features), tuple(h.tokens), h.number)


def _write_open(message: Open) -> pb.Open:
    return pb.Open(
        tokens=message.tokens,
        prompt_len=message.prompt_len,
        max_tokens=message.max_tokens,
        sampler=values.write_sampler(message.sampler),
        seed=message.seed,
        epoch=message.epoch,
        eos_ids=message.eos_ids,
        ignore_eos=message.ignore_eos,
        top_logprobs=message.top_logprobs,
        taps=[values.write_tap(tap) for tap in message.taps],
    )


def _read_open(session: str, message: pb.Open) -> Open:
    return Open(
        session=session,
        tokens=tuple(message.tokens),
        prompt_len=message.prompt_len,
        max_tokens=message.max_tokens,
        sampler=values.read_sampler(message.sampler),
        seed=message.seed,
        epoch=message.epoch,
        eos_ids=tuple(message.eos_ids),
        ignore_eos=message.ignore_eos,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        taps=tuple(values.read_tap(tap) for tap in message.taps),
    )


def write_info(info: TargetInfo) -> pb.GetInfoResponse:
    return pb.GetInfoResponse(
        name=info.name,
        weights_fingerprint=info.weights_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        layers=info.layers,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_ids=info.eos_ids,
        feature_type=_FEATURE_TYPES[info.feature_dtype],
        device=info.device,
        max_tree_nodes=info.max_tree_nodes,
    )


def read_info(info: pb.GetInfoResponse) -> TargetInfo:
    """Raises AerieError: INVALID_ARGUMENT for a feature type that this version does not know."""
    if info.feature_type not in _FEATURE_NAMES:
        raise AerieError(Reason.INVALID_ARGUMENT, f"the verifier's features are of type {info.feature_type}")
    return TargetInfo(
        name=info.name,
        weights_fingerprint=info.weights_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        layers=info.layers,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_ids=tuple(info.eos_ids),
        feature_dtype=_FEATURE_NAMES[info.feature_type],
        device=info.device,
        max_tree_nodes=info.max_tree_nodes,
    )


@dataclass(frozen=True)
class TokenizerData:
    """The target's tokenizer as text: in the ``tokenizers`` format, with its chat template and special tokens."""

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]


def write_tokenizer(tokenizer: TokenizerData) -> pb.GetTokenizerResponse:
    return pb.GetTokenizerResponse(
        tokenizer_json=tokenizer.tokenizer_json,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
    )


def read_tokenizer(response: pb.GetTokenizerResponse) -> TokenizerData:
    template = response.chat_template if response.HasField("chat_template") else None
    return TokenizerData(response.tokenizer_json, template, dict(response.special_tokens))


def write_tensor_chunks(name: str, array: NDArray[Any]) -> Iterator[pb.GetTensorsResponse]:
    """One tensor in chunks of at most ``CHUNK_BYTES``: type and shape are in the first."""
    tensor = values.write_tensor(array)
    for start in range(0, max(len(tensor.data), 1), CHUNK_BYTES):
        chunk = pb.GetTensorsResponse(name=name, data=tensor.data[start : start + CHUNK_BYTES])
        if not start:
            chunk.element_type = tensor.element_type
            chunk.shape.extend(tensor.shape)
        yield chunk


def read_tensor_chunks(chunks: Sequence[pb.GetTensorsResponse]) -> NDArray[Any]:
    """All chunks of one tensor. Raises AerieError: INVALID_ARGUMENT when they do not make one."""
    first = chunks[0]
    data = b"".join(chunk.data for chunk in chunks)
    return values.read_tensor(types_pb2.Tensor(element_type=first.element_type, shape=first.shape, data=data))


_STATES: dict[Any, pb.SessionState.ValueType] = {
    "prefill": pb.SESSION_STATE_PREFILL,
    "idle": pb.SESSION_STATE_IDLE,
    "verifying": pb.SESSION_STATE_VERIFYING,
}
_STATE_NAMES = {value: name for name, value in _STATES.items()}


def write_sessions(sessions: Sequence[SessionSummary]) -> pb.ListSessionsResponse:
    return pb.ListSessionsResponse(
        sessions=[pb.SessionSummary(**{**vars(s), "state": _STATES[s.state]}) for s in sessions]
    )


def read_sessions(response: pb.ListSessionsResponse) -> list[SessionSummary]:
    return [
        SessionSummary(
            session=s.session,
            epoch=s.epoch,
            round=s.round,
            committed=s.committed,
            kv_bytes=s.kv_bytes,
            feature_bytes=s.feature_bytes,
            age_seconds=values.read_seconds(s.age_seconds),
            state=_STATE_NAMES.get(s.state, "idle"),
        )
        for s in response.sessions
    ]
