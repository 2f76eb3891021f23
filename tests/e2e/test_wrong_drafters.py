"""Drafters that answer nonsense over gRPC, and those that fit another target: no token changes, and counters tell."""

from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
from aerie.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from aerie.orchestrator.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from aerie.types.v1 import types_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.embedded import Engine
from services.wire.orchestrator import read_drafters
from tests.e2e.test_services import PROMPT, stream, until, wait_for_drafters
from tests.processes import Services

SERVICE = "aerie.drafter.v1.DrafterService"
COUNT = 60
Answer = Callable[[drafter_pb2.Draft, str, int], bytes]
"""(draft, session, pending token) -> a response."""
Tree = Callable[[int], types_pb2.DraftTree]


def tree(tokens: list[int], parents: list[int], log_probs: list[float]) -> Tree:
    """The pending token as root, and ``tokens`` after it."""
    packed = np.array([0.0, *log_probs], np.float32).tobytes()
    return lambda pending: types_pb2.DraftTree(tokens=[pending, *tokens], parents=[-1, *parents], log_probs=packed)


ROOT = tree([], [], [])


def drafted(tree: Tree = ROOT, **fields: object) -> Answer:
    """The tree of one node, but for what is said."""

    def answer(draft: drafter_pb2.Draft, session: str, pending: int) -> bytes:
        values: dict[str, object] = {"id": draft.id, "seconds": 0.001, **fields}
        response = drafter_pb2.Drafted(tree=tree(pending), **values)
        return drafter_pb2.SessionResponse(session=session, drafted=response).SerializeToString()

    return answer


def as_another(draft: drafter_pb2.Draft, session: str, pending: int) -> bytes:
    return drafted()(draft, "another", pending)


def need_others(draft: drafter_pb2.Draft, session: str, pending: int) -> bytes:
    need = drafter_pb2.NeedFeatures(id=types_pb2.RoundId(epoch=0, round=2**31))
    return drafter_pb2.SessionResponse(session=session, need_features=need).SerializeToString()


def half_a_float(pending: int) -> types_pb2.DraftTree:
    return types_pb2.DraftTree(tokens=[pending], parents=[-1], log_probs=b"\0\0")


NONSENSE: dict[str, Answer] = {
    "no protobuf": lambda *_: b"\xff\xff\xff nonsense",
    "nothing in it": lambda *_: b"",
    "no tree": drafted(lambda _: types_pb2.DraftTree()),
    "another root": drafted(lambda pending: ROOT(pending ^ 1)),
    "a parent to come": drafted(tree([6, 7], [2, 0], [-1.0, -1.0])),
    "no vocabulary has it": drafted(tree([2**31 - 1], [0], [-1.0])),
    "a NaN": drafted(tree([6], [0], [float("nan")])),
    "half a float": drafted(half_a_float),
    "more nodes than any verifier takes": drafted(tree([5] * 5000, [0] * 5000, [0.0] * 5000)),
    "no time": drafted(seconds=float("nan")),
    "less than no time": drafted(queue_seconds=-1.0),
    "another session": as_another,
    "another round": drafted(id=types_pb2.RoundId(epoch=0, round=2**31, base_len=1)),
    "another epoch": drafted(id=types_pb2.RoundId(epoch=7, round=0, base_len=1)),
    "lacks rows of another round": need_others,
}


@dataclass
class Impostor:
    """A gRPC service that shows a drafter's info, or another one, and answers drafts as it likes."""

    address: str
    info: drafter_pb2.GetInfoResponse
    answer: Answer
    drafts: int = 0
    _server: grpc.Server = field(init=False)

    def __enter__(self) -> "Impostor":
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        session = grpc.stream_stream_rpc_method_handler(self._session)
        info = grpc.unary_unary_rpc_method_handler(lambda request, context: self.info.SerializeToString())
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Session": session, "GetInfo": info})
        self._server.add_generic_rpc_handlers((handlers,))
        checks = health.HealthServicer()
        checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def _session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        draft, position, pending = drafter_pb2.Draft(), -1, -1
        for data in requests:
            request = drafter_pb2.SessionRequest.FromString(data)
            if request.WhichOneof("message") == "draft":
                draft = request.draft
            for observe in (request.observe, request.draft.observe):
                if observe.tokens:
                    position, pending = observe.features.base + len(observe.tokens), observe.tokens[-1]
            if position == draft.id.base_len - 1:  # the pending token is known
                self.drafts += 1
                yield self.answer(draft, request.session, pending)
                draft = drafter_pb2.Draft()


@pytest.fixture(scope="module")
def plain(tiny: str) -> tuple[int, ...]:
    with Engine.load(tiny, "off") as engine:
        return engine.generate(PROMPT, max_tokens=COUNT, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def services(tiny: str, drafter: str) -> Iterator[Services]:
    with Services(tiny, drafter) as services:
        for service in (services.verifier(), services.orchestrator(drafters=("x",)), services.drafter(name="real")):
            service.wait_ready()
        yield services


@pytest.fixture(scope="module")
def info(services: Services) -> drafter_pb2.GetInfoResponse:
    with grpc.insecure_channel(services.socket("real")) as channel:
        return drafter_pb2_grpc.DrafterServiceStub(channel).GetInfo(drafter_pb2.GetInfoRequest(), timeout=10)


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_drafter_that_answers_nonsense_changes_no_token(services, info, plain, answer):
    with Impostor(services.socket("x"), info, answer) as impostor:
        wait_for_drafters(services.socket("o"), 1)
        tokens, done = stream(services.socket("o"), COUNT)
    assert impostor.drafts > 0
    assert tokens == plain
    assert done.drafter_lost
    assert done.usage["completion_tokens"] == COUNT
    assert all(value == value for value in done.stats.values())  # no NaN of a stranger gets into them
    wait_for_drafters(services.socket("o"), 0)


def test_a_drafter_of_another_target_is_never_paired(services, info, plain):
    other = drafter_pb2.GetInfoResponse()
    other.CopyFrom(info)
    other.target_fingerprint = "0" * 64
    with Impostor(services.socket("x"), other, drafted()) as impostor:

        def refused() -> list[str]:
            with grpc.insecure_channel(services.socket("o")) as channel:
                stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                lines = read_drafters(stub.ListDrafters(orchestrator_pb2.ListDraftersRequest(), timeout=5))
            return [line.detail for line in lines if line.status is None]

        until(lambda: any("target" in why for why in refused()))
        tokens, done = stream(services.socket("o"), COUNT)
    assert (tokens, impostor.drafts, done.stats["fallback_rounds"]) == (plain, 0, 0)
