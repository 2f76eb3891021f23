"""Reading files that strangers wrote: whatever is wrong with one is refused in one line."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.speculation.errors import AerieError, Reason


def expand_path(name: str) -> Path:
    """``~`` spelled out; a home that does not exist stays as it is (``Path.expanduser`` raises)."""
    return Path(os.path.expanduser(name))


def exists(path: Path) -> bool:
    """False also for names that no file can have (``Path.exists`` raises for long ones)."""
    return os.path.exists(path)


def one_line(error: object, limit: int = 300) -> str:
    """An error's text, or any other, on one line of at most ``limit`` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[:limit]}..."


def read_text(path: Path, reason: Reason) -> str:
    """A text file in UTF-8.

    Raises:
        AerieError: ``reason``, when it is no regular file (a pipe would block for ever) or not text.
    """
    try:
        if not path.is_file():
            raise AerieError(reason, f"{path} is not a regular file")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AerieError(reason, f"{path} is not text that can be read: {one_line(error)}") from None


def read_json(path: Path, reason: Reason) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        AerieError: ``reason``, when it cannot be read or holds something else.
    """
    text = read_text(path, reason)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AerieError(reason, f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise AerieError(reason, f"{path} is not a JSON object")
    return content


def check_regular(paths: Iterable[Path], reason: Reason) -> None:
    """Refuse folders, pipes and links to nowhere before a library opens them."""
    for path in paths:
        if not path.is_file():
            raise AerieError(reason, f"{path} is not a regular file")
