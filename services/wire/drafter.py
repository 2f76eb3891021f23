"""What travels on ``DrafterService``: ``aerie.drafter.v1`` <-> ``services.speculation.messages``."""

from aerie.drafter.v1 import drafter_pb2 as pb
from aerie.types.v1 import types_pb2

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import (
    Draft,
    Drafted,
    DrafterInfo,
    DrafterStatus,
    FromDrafter,
    NeedFeatures,
    Observe,
    OpenDraft,
    PortError,
    ToDrafter,
)
from services.wire import values


def write_request(message: ToDrafter) -> pb.SessionRequest:
    match message:
        case OpenDraft():
            opened = pb.Open(epoch=message.epoch, sampler=values.write_sampler(message.sampler), seed=message.seed)
            return pb.SessionRequest(session=message.session, open=opened)
        case Observe():
            return pb.SessionRequest(session=message.session, observe=_write_observe(message))
        case Draft():
            round_ = values.write_round(message.epoch, message.round, message.base_len)
            observe = _write_observe(message.observe) if message.observe else None
            draft = pb.Draft(id=round_, budget=values.write_budget(message.budget), observe=observe)
            return pb.SessionRequest(session=message.session, draft=draft)


def _write_observe(observe: Observe) -> pb.Observe:
    features = values.write_features(observe.features)
    return pb.Observe(epoch=observe.epoch, features=features, tokens=observe.tokens)


def _read_observe(session: str, observe: pb.Observe) -> Observe:
    if not observe.tokens:
        raise AerieError(Reason.INVALID_ARGUMENT, "an observation without rows")
    if max(observe.tokens) >= 2**31:
        raise AerieError(Reason.INVALID_ARGUMENT, f"token {max(observe.tokens)} is outside of any vocabulary")
    return Observe(session, observe.epoch, values.read_features(observe.features), tuple(observe.tokens))


def read_request(request: pb.SessionRequest) -> ToDrafter:
    """Raises AerieError: INVALID_ARGUMENT."""
    session = request.session
    match request.WhichOneof("message"):
        case "open":
            opened = request.open
            return OpenDraft(session, opened.epoch, values.read_sampler(opened.sampler), opened.seed)
        case "observe":
            return _read_observe(session, request.observe)
        case "draft":
            d = request.draft
            observe = _read_observe(session, d.observe) if d.HasField("observe") else None
            return Draft(session, *values.read_round(d.id), values.read_budget(d.budget), observe)
    raise AerieError(Reason.INVALID_ARGUMENT, "a request without a message that this version knows")


def write_response(message: FromDrafter) -> pb.SessionResponse:
    session = message.session
    match message:
        case Drafted():
            round_ = values.write_round(message.epoch, message.round, message.base_len)
            drafted = pb.Drafted(
                id=round_,
                tree=values.write_tree(message.tree),
                seconds=message.seconds,
                queue_seconds=message.queue_seconds,
            )
            return pb.SessionResponse(session=session, drafted=drafted)
        case NeedFeatures():
            ranges = [types_pb2.Range(start=start, stop=stop) for start, stop in message.ranges]
            need = pb.NeedFeatures(id=values.write_round(message.epoch, message.round, 0), ranges=ranges)
            return pb.SessionResponse(session=session, need_features=need)
        case PortError():
            return pb.SessionResponse(session=session, error=values.write_error(message))


def read_response(response: pb.SessionResponse) -> FromDrafter:
    """Raises AerieError: INVALID_ARGUMENT or INVALID_TREE."""
    session = response.session
    match response.WhichOneof("message"):
        case "drafted":
            d = response.drafted
            tree = values.read_tree(d.tree)
            seconds, queued = values.read_seconds(d.seconds), values.read_seconds(d.queue_seconds)
            return Drafted(session, *values.read_round(d.id), tree=tree, seconds=seconds, queue_seconds=queued)
        case "need_features":
            n = response.need_features
            ranges = tuple((entry.start, entry.stop) for entry in n.ranges)
            return NeedFeatures(session, n.id.epoch, n.id.round, ranges)
        case "error":
            return values.read_error(session, response.error)
    raise AerieError(Reason.INVALID_ARGUMENT, "a response without a message that this version knows")


def write_status(status: DrafterStatus) -> pb.GetInfoResponse:
    info = status.info
    return pb.GetInfoResponse(
        name=info.name,
        family=info.family,
        taps=[values.write_tap(tap) for tap in info.taps],
        target_fingerprint=info.target_fingerprint,
        parameters=info.parameters,
        sessions=status.sessions,
        draft_seconds=status.draft_seconds,
    )


def read_status(response: pb.GetInfoResponse) -> DrafterStatus:
    """Raises AerieError: INVALID_ARGUMENT for a tap or a time that is none."""
    info = DrafterInfo(
        name=response.name,
        family=response.family,
        taps=tuple(values.read_tap(tap) for tap in response.taps),
        target_fingerprint=response.target_fingerprint if response.HasField("target_fingerprint") else None,
        parameters=response.parameters,
    )
    return DrafterStatus(info, response.sessions, values.read_seconds(response.draft_seconds))
