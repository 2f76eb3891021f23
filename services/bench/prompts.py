"""Prompt sets: JSONL of {"kind", "prompt"}."""

import json
from dataclasses import dataclass
from pathlib import Path

from services.speculation.errors import AerieError, Reason

DEFAULT = Path(__file__).parent / "prompts.jsonl"
"""24 prompts of four kinds, fixed: none is dropped or changed between versions."""


@dataclass(frozen=True)
class Prompt:
    kind: str
    text: str


def read_prompts(path: Path = DEFAULT) -> list[Prompt]:
    """Read a prompt set.

    Raises:
        AerieError: INVALID_ARGUMENT for a missing file or a line that is not {"kind", "prompt"}.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise AerieError(Reason.INVALID_ARGUMENT, f"cannot read {path}: {error.strerror}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompts.append(Prompt(str(entry.get("kind", "all")), entry["prompt"]))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise AerieError(Reason.INVALID_ARGUMENT, f'{path}:{number} is not {{"kind", "prompt"}}') from None
    if not prompts:
        raise AerieError(Reason.INVALID_ARGUMENT, f"{path} holds no prompts")
    return prompts
