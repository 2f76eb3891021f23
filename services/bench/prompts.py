"""Prompt sets: JSONL of {"kind", "prompt"}."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

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
        AerieError: INVALID_ARGUMENT for a file that cannot be read or is not UTF-8, for a line that is not
            {"kind", "prompt"} with text in both (the kind may be absent), and for no prompts at all.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise AerieError(Reason.INVALID_ARGUMENT, f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise AerieError(Reason.INVALID_ARGUMENT, f"{path} is not UTF-8") from None
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut inside of strings
        if line.strip():
            if (prompt := _parse(line)) is None:
                raise AerieError(Reason.INVALID_ARGUMENT, f'{path}:{number} is not {{"kind", "prompt"}} with text')
            prompts.append(prompt)
    if not prompts:
        raise AerieError(Reason.INVALID_ARGUMENT, f"{path} holds no prompts")
    return prompts


def _parse(line: str) -> Prompt | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    kind, prompt = entry.get("kind", "all"), entry.get("prompt")
    return Prompt(kind, prompt) if _is_text(kind) and _is_text(prompt) else None


def _is_text(value: Any) -> TypeGuard[str]:
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return isinstance(value, str) and bool(value.strip()) and value.encode(errors="replace").decode() == value
