"""Prompt sets: what ships is fixed, and what a stranger writes is refused by its line."""

import hashlib
from pathlib import Path

import pytest

from services.bench.prompts import DEFAULT, Prompt, read_prompts
from services.speculation.errors import AerieError, Reason

FIXTURE = Path(__file__).parents[1] / "fixtures" / "prompts.jsonl"
SHA256 = "97ebc7009e548480f3bb306678dd417a61fba5f175a2df3eba57ea2e7db131e4"


def test_the_shipped_prompts_are_the_fixed_ones():
    assert DEFAULT.read_bytes() == FIXTURE.read_bytes()
    assert hashlib.sha256(FIXTURE.read_bytes()).hexdigest() == SHA256
    prompts = read_prompts()
    assert len(prompts) == 24
    assert len({p.kind for p in prompts}) == 4


def test_kinds_may_be_absent_and_lines_blank(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\n{"kind": "code", "prompt": "é", "more": 1}'.encode())
    assert read_prompts(path) == [Prompt("all", "a\u2028b"), Prompt("code", "é")]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"3",
        b"[]",
        b'"prompt"',
        b"{}",
        b'{"prompt": 3}',
        b'{"prompt": null}',
        b'{"prompt": ["a"]}',
        b'{"prompt": ""}',
        b'{"prompt": " \\n"}',
        b'{"prompt": "\\ud800"}',
        b'{"kind": 3, "prompt": "a"}',
        b'{"kind": "", "prompt": "a"}',
        b"[" * 100_000,
    ],
)
def test_other_lines_are_refused_by_their_number(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line)
    with pytest.raises(AerieError, match=r"p\.jsonl:2 is not") as caught:
        read_prompts(path)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(("content", "match"), [(b"", "no prompts"), (b"\n\n", "no prompts"), (b"\xff", "UTF-8")])
def test_other_files_are_refused(tmp_path, content, match):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(AerieError, match=match):
        read_prompts(path)
    with pytest.raises(AerieError, match="cannot read"):
        read_prompts(tmp_path)
