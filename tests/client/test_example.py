"""The example of the documentation runs against a served target, and so do the commands with ``--connect``."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Services

ROOT = Path(__file__).parents[2]
# An importer that refuses MLX: neither the client nor a connected command may load it.
WITHOUT_MLX = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlx", "mlx_lm", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
sys.argv = sys.argv[1:]
"""


@pytest.fixture(scope="module")
def address(tiny: str, drafter: str) -> Iterator[str]:
    with Services(tiny, drafter) as services:
        served = services.start("all", "all", "--target", tiny, "--drafter", drafter)
        yield served.wait_ready().address


def run(code: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_MLX + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, input=stdin)


def aerie(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run('runpy.run_module("services.cli.main", run_name="__main__")', "aerie", *arguments, stdin=stdin)


def test_the_example_of_the_documentation_runs(address):
    done = run('runpy.run_path("docs/examples/client.py", run_name="__main__")', "client.py", address)
    assert done.returncode == 0, done.stderr
    assert "DRAFTER_UNAVAILABLE" in done.stdout
    assert "tokens a round" in done.stdout


def test_generate_over_a_connection_prints_the_keys_of_a_local_one(address, tiny, drafter):
    common = ["generate", "hello there", "--json", "--max-tokens", "12", "--temperature", "0.8", "--seed", "5"]
    far = aerie(*common, "--connect", address)
    assert far.returncode == 0, far.stderr
    command = [sys.executable, "-m", "services.cli.main", *common, "--target", tiny, "--drafter", drafter]
    near = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    answers = [json.loads(done.stdout) for done in (far, near)]
    assert answers[0].keys() == answers[1].keys()
    assert answers[0]["stats"].keys() == answers[1]["stats"].keys()
    for key in ("text", "token_ids", "finish_reason", "seed", "usage"):
        assert answers[0][key] == answers[1][key]


def test_chat_keeps_the_conversation(address):
    done = aerie("chat", "--connect", address, "--max-tokens", "4", stdin="hello\nand again\n/reset\nhello\n/exit\n")
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()[:3]
    assert first == third
    assert second != first


def test_bench_compares_both_arms(address, tmp_path):
    out = tmp_path / "bench.json"
    options = ["--limit", "1", "--max-tokens", "12", "--json", str(out)]
    done = aerie("bench", "--connect", address, *options)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(out.read_text())
    assert set(report["prompts"][0]["arms"]) == {"plain", "speculative"}
    assert report["prompts"][0]["agrees"]


@pytest.mark.parametrize("extra", [("--target", "x"), ("--threads", "2"), ("--trace",), ("--key-file", "/none")])
def test_what_makes_no_sense_over_a_connection_is_wrong_usage(address, extra):
    done = aerie("generate", "hi", "--connect", address, "--max-tokens", "2", *extra)
    if extra == ("--trace",):  # the text of whole rounds is coloured: a client has no tokenizer
        assert done.returncode == 0, done.stderr
        return
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_nobody_answers():
    for command in (("generate", "hi", "--connect"), ("drafters",), ("sessions",)):
        done = aerie(*command, "unix:/tmp/aerie-nobody")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("aerie: SERVICE_UNAVAILABLE: ")
        assert done.stderr.count("\n") == 1


def test_drafters_sessions_and_health_are_listed(address):
    drafters = aerie("drafters", address)
    assert drafters.returncode == 0, drafters.stderr
    assert "eagle3" in drafters.stdout
    (line,) = json.loads(aerie("drafters", address, "--json").stdout)
    assert (line["family"], line["sessions"]) == ("eagle3", 0)
    sessions = aerie("sessions", address, "--json")
    assert json.loads(sessions.stdout) == []
    assert "committed" in aerie("sessions", address).stdout
    health = aerie("health", address)
    assert health.returncode == 0
    names = {text.split()[1] for text in health.stdout.splitlines()}
    assert {f"aerie.{n}.v1.{n.title()}Service" for n in ("verifier", "drafter", "orchestrator")} <= names
