"""``OrchestratorService``: generations for clients."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from aerie.orchestrator.v1 import orchestrator_pb2 as pb
from aerie.orchestrator.v1 import orchestrator_pb2_grpc

from services.orchestrator.generation import Done
from services.orchestrator.routing import TreeOptions
from services.orchestrator.service import Orchestrator, Request
from services.runtime.gate import Gate
from services.wire import orchestrator as wire

NAME = pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves one orchestrator.

    Args:
        orchestrator: Runs the sessions.
        gate: Refuses new ones once it is closed.
    """

    def __init__(self, orchestrator: Orchestrator, gate: Gate) -> None:
        self._orchestrator = orchestrator
        self._gate = gate

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async with self._gate.enter(context):
            # Beside the event loop: a long prompt takes its time.
            asked = await asyncio.to_thread(self._request, wire.read_generate(request))
            items = self._orchestrator.generate(asked, context.time_remaining())
            try:
                async for item in items:
                    yield _write(item)
            finally:
                await items.aclose()  # type: ignore[attr-defined]

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        info = self._orchestrator.info
        return pb.GetInfoResponse(
            model=info.name,
            weights_fingerprint=info.weights_fingerprint,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
        )

    async def ListDrafters(self, request: pb.ListDraftersRequest, context: Any) -> pb.ListDraftersResponse:
        directory = self._orchestrator.directory
        offers = [wire.DrafterLine(o.name, o.address, o.status, o.load) for o in directory.offers.values()]
        return wire.write_drafters(offers, directory.unfit)

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
