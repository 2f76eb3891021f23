"""Errors that cross a port: a documented reason and one sentence for a person."""

from enum import StrEnum
from numbers import Integral


class Reason(StrEnum):
    """Why a request was refused. The value travels in ``google.rpc.ErrorInfo.reason``."""

    TARGET_NOT_FOUND = "TARGET_NOT_FOUND"
    TARGET_UNSUPPORTED = "TARGET_UNSUPPORTED"
    TARGET_NOT_TREE_EXACT = "TARGET_NOT_TREE_EXACT"
    CHECKPOINT_NOT_FOUND = "CHECKPOINT_NOT_FOUND"
    CHECKPOINT_INVALID = "CHECKPOINT_INVALID"
    CHECKPOINT_INCOMPATIBLE = "CHECKPOINT_INCOMPATIBLE"
    FAMILY_NOT_BUILT = "FAMILY_NOT_BUILT"
    DRAFTER_UNAVAILABLE = "DRAFTER_UNAVAILABLE"
    SERVICE_UNAVAILABLE = "SERVICE_UNAVAILABLE"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    INVALID_TREE = "INVALID_TREE"
    PROMPT_EMPTY = "PROMPT_EMPTY"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    STALE_ROUND = "STALE_ROUND"
    FEATURE_GAP = "FEATURE_GAP"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    ENGINE_CLOSED = "ENGINE_CLOSED"
    INTERNAL = "INTERNAL"


class AerieError(Exception):
    """A refusal with a documented reason.

    Args:
        reason: The constant that a program branches on.
        message: One sentence that names the offending value.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def is_integer(value: object) -> bool:
    """Python's and NumPy's integers; a bool counts nothing."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integers(**named: object) -> None:
    """Refuse values that are not integers.

    Raises:
        AerieError: INVALID_ARGUMENT, with the first one's name.
    """
    for name, value in named.items():
        if not is_integer(value):
            raise AerieError(Reason.INVALID_ARGUMENT, f"{name} must be an integer, not {value!r}")
