"""Refusals and failures in OpenAI's error body."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from services.speculation.errors import AerieError, Reason

MESSAGE_LENGTH = 500
"""Characters of an error's message: it may quote what a client sent."""
RETRY_SECONDS = 1
"""``Retry-After`` of what passes by itself."""

_STATUS = {
    Reason.INVALID_ARGUMENT: 400,
    Reason.PROMPT_EMPTY: 400,
    Reason.PROMPT_TOO_LONG: 400,
    Reason.DRAFTER_UNAVAILABLE: 400,
    Reason.RESOURCE_EXHAUSTED: 429,
    Reason.SERVICE_UNAVAILABLE: 503,
    Reason.ENGINE_CLOSED: 503,
    Reason.DEADLINE_EXCEEDED: 504,
}
_CODE = {Reason.INVALID_ARGUMENT: "invalid_value", Reason.PROMPT_TOO_LONG: "context_length_exceeded"}


class HttpError(Exception):
    """A request that gets no answer.

    Args:
        status: Of HTTP.
        message: One sentence for a person.
        code: What a program branches on.
        param: The field that is at fault.
        headers: Of the response.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MESSAGE_LENGTH else message[: MESSAGE_LENGTH - 1] + "…"
        self.code = code
        self.param = param if param is None else param[:MESSAGE_LENGTH]
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def refused(error: AerieError, param: str | None = None) -> HttpError:
    """What a reason of ours is in HTTP; all that are no client's fault are 500."""
    status = _STATUS.get(error.reason, 500)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    code = _CODE.get(error.reason, error.reason.lower())
    return HttpError(status, error.message, code, param if status == 400 else None, headers)


def internal(incident: str) -> HttpError:
    """A fault of ours; ``incident`` is all that is said of it."""
    return HttpError(500, f"the server failed: {incident}", "internal")


def to_json(value: Any) -> bytes:
    """JSON in ASCII, so that neither half a character nor a line separator of Unicode breaks a reader."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, dict(headers or {}), "application/json")
