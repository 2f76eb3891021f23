"""``OrchestratorService``: generations for clients."""

from collections.abc import AsyncIterator
from typing import Any

from aerie.orchestrator.v1 import orchestrator_pb2 as pb
from aerie.orchestrator.v1 import orchestrator_pb2_grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.orchestrator.generation import Done
from services.orchestrator.routing import TreeOptions
from services.orchestrator.service import Orchestrator, Request
from services.speculation.errors import AerieError, Reason
from services.wire import orchestrator as wire

NAME = pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name

_CODES = {
    Reason.INVALID_ARGUMENT: code_pb2.INVALID_ARGUMENT,
    Reason.PROMPT_EMPTY: code_pb2.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: code_pb2.OUT_OF_RANGE,
    Reason.RESOURCE_EXHAUSTED: code_pb2.RESOURCE_EXHAUSTED,
    Reason.DRAFTER_UNAVAILABLE: code_pb2.FAILED_PRECONDITION,
    Reason.ENGINE_CLOSED: code_pb2.UNAVAILABLE,
}


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves one orchestrator."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            async for item in self._orchestrator.generate(self._request(wire.read_generate(request))):
                yield _write(item)
        except AerieError as error:
            await context.abort_with_status(rich_status(error))

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        info = self._orchestrator.info
        return pb.GetInfoResponse(
            model=info.name,
            weights_fingerprint=info.weights_fingerprint,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
        )

    def _request(self, asked: wire.Generate) -> Request:
        prompt, orchestrator = asked.prompt, self._orchestrator
        if isinstance(prompt, str):
            tokens = orchestrator.encode(prompt)
        elif isinstance(prompt, tuple):
            tokens = prompt
        else:
            tokens = orchestrator.encode_chat([dict(turn) for turn in prompt])
        room = max(orchestrator.info.context_length - len(tokens), 1)
        return Request(
            tokens=tokens,
            max_tokens=room if asked.max_tokens is None else asked.max_tokens,
            sampler=asked.sampler,
            seed=asked.seed,
            stop=asked.stop,
            ignore_eos=asked.ignore_eos,
            top_logprobs=asked.top_logprobs,
            drafter=asked.drafter,
            tree=TreeOptions(asked.nodes, asked.depth, asked.top_k),
        )


def _write(item: Any) -> pb.GenerateResponse:
    if isinstance(item, Done):
        usage, stats = item.stats.usage(), item.stats.report()
        return wire.write_done(wire.DoneMessage(item.finish_reason, item.seed, usage, stats, item.drafter_lost))
    return wire.write_chunk(item.text, item.tokens, item.depths, item.log_probs)


def rich_status(error: AerieError) -> Any:
    """The gRPC status of a refusal, its reason in ``google.rpc.ErrorInfo``."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="aerie"))
    code = _CODES.get(error.reason, code_pb2.INTERNAL)
    return rpc_status.to_status(status_pb2.Status(code=code, message=error.message, details=[detail]))
