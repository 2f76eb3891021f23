"""Refusals as gRPC statuses, with ``google.rpc`` details; and what may leave a process of any other failure."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.runtime.actor import log_incident
from services.speculation.errors import AerieError, Reason

log = logging.getLogger(__name__)

DOMAIN = "aerie"
RETRY_SECONDS = 1
"""When a client that was turned away for want of room, or of a service, should ask again."""
_CODES = {
    Reason.INVALID_ARGUMENT: code_pb2.INVALID_ARGUMENT,
    Reason.PROMPT_EMPTY: code_pb2.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: code_pb2.OUT_OF_RANGE,
    Reason.RESOURCE_EXHAUSTED: code_pb2.RESOURCE_EXHAUSTED,
    Reason.DRAFTER_UNAVAILABLE: code_pb2.FAILED_PRECONDITION,
    Reason.SERVICE_UNAVAILABLE: code_pb2.UNAVAILABLE,
    Reason.ENGINE_CLOSED: code_pb2.UNAVAILABLE,
    Reason.DEADLINE_EXCEEDED: code_pb2.DEADLINE_EXCEEDED,
    Reason.UNAUTHENTICATED: code_pb2.UNAUTHENTICATED,
}
_RETRIED = (code_pb2.RESOURCE_EXHAUSTED, code_pb2.UNAVAILABLE)


def rich_status(error: AerieError) -> Any:
    """The status of a refusal: its reason in ``ErrorInfo``, and ``RetryInfo`` where trying again helps."""
    code = _CODES.get(error.reason, code_pb2.INTERNAL)
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if code in _RETRIED:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_SECONDS)))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return rpc_status.to_status(status_pb2.Status(code=code, message=error.message, details=packed))


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses: refusals into rich ones, anything else into an incident's number."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.response_streaming:
            guarded = handler._replace(
                unary_stream=handler.unary_stream and _guard_stream(handler.unary_stream),
                stream_stream=handler.stream_stream and _guard_stream(handler.stream_stream),
            )
        else:
            guarded = handler._replace(
                unary_unary=handler.unary_unary and _guard_answer(handler.unary_unary),
                stream_unary=handler.stream_unary and _guard_answer(handler.stream_unary),
            )
        return guarded


def _guard_answer(handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await handler(request, context)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:
            await _abort(context, error)

    return guarded


def _guard_stream(handler: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        responses = handler(request, context)
        if not hasattr(responses, "aclose"):  # health's Watch writes by itself
            await responses  # type: ignore[misc]
            return
        try:
            async for response in responses:
                yield response
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:
            await _abort(context, error)
        finally:
            await responses.aclose()  # a client that leaves is the handler's end, too

    return guarded


async def _abort(context: Any, error: Exception) -> None:
    if isinstance(error, AerieError):
        await context.abort_with_status(rich_status(error))
    await context.abort(grpc.StatusCode.INTERNAL, log_incident(log, "a call failed", error))
