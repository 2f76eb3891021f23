"""The project beside others: names, versions and files that ship."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from services import __version__
from services.orchestrator.text import MAX_STOP_LENGTH, MAX_STOPS
from services.speculation.errors import Reason
from services.speculation.growth import MAX_TREE_NODES

ROOT = Path(__file__).parent.parent


def test_version_is_one_and_below_what_transformers_looks_for():
    assert version("aerie") == __version__
    # transformers compares the version of a package named kernels, which is also the name of one of ours.
    assert tuple(int(part) for part in __version__.split(".")[:2]) < (0, 18)


def test_transformers_and_mlx_lm_import_beside_ours_from_another_directory(tmp_path):
    code = "import kernels, services, transformers, mlx_lm; print(kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "aerie" not in done.stderr


def test_help_and_version_do_not_load_mlx():
    code = "import sys; from services.cli import main; main.build_parser(); print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_constraints_hold_no_addresses():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines
    assert all("@" not in line and "/" not in line for line in lines)


def test_shipped_drafter_is_at_most_20_megabytes():
    folder = ROOT / "services/drafter/checkpoints/smollm2-135m-instruct/eagle3"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 20_000_000
    assert (folder / "README.md").exists()


def test_every_reason_and_no_other_is_documented():
    text = (ROOT / "docs/errors.md").read_text()
    assert re.findall(r"^\| `([A-Z_]+)` \| \w", text, re.MULTILINE) == [reason.value for reason in Reason]


def test_documented_limits_are_those_that_hold():
    text = (ROOT / "docs/errors.md").read_text()
    assert f"at most {MAX_STOPS}, of at most {MAX_STOP_LENGTH} characters" in text
    assert f"at most {MAX_TREE_NODES} nodes" in text


def test_links_of_the_documentation_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/errors.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page} links to {link}"
