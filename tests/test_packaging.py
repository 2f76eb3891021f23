"""The project beside others: names, versions and files that ship."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from services import __version__

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
    code = "import sys; from services.cli.main import build_parser; build_parser(); print('mlx.core' in sys.modules)"
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


def test_prompt_set_is_fixed():
    import hashlib

    from services.bench.prompts import DEFAULT, read_prompts

    prompts = read_prompts()
    assert len(prompts) == 24
    assert len({p.kind for p in prompts}) == 4
    assert hashlib.sha256(DEFAULT.read_bytes()).hexdigest() == PROMPTS_SHA256


PROMPTS_SHA256 = "97ebc7009e548480f3bb306678dd417a61fba5f175a2df3eba57ea2e7db131e4"
