"""JSON objects as entries and events travel: whatever is none is a ValueError, also what json reports otherwise."""

import json
from collections.abc import Mapping
from typing import Any


def write_object(values: Mapping[str, Any]) -> str:
    """Raises ValueError: The values are not JSON."""
    try:
        return json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


def read_object(text: str | bytes) -> dict[str, Any]:
    """Raises ValueError: The text is no JSON object."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("not an object")
    return values
