"""Files that a run ends with are checked before it starts."""

import json
import os
from pathlib import Path
from typing import Any

from services.speculation.errors import AerieError, Reason


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written (INVALID_ARGUMENT); what it holds stays until it is replaced."""
    existed, made = path.exists(), Path(os.path.realpath(path))  # what a dangling link points to, not the link
    try:
        path.open("a").close()
    except OSError as error:
        raise AerieError(Reason.INVALID_ARGUMENT, f"cannot write {path}: {error.strerror}") from None
    if not existed:
        made.unlink()


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON.

    Raises:
        OSError: It cannot be written; it names the file.
    """
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:  # a full disk does not say which
        raise OSError(error.errno, error.strerror, str(path)) from None
