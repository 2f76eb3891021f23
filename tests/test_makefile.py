"""What ``make setup`` says on a Python that cannot make environments."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_python_without_ensurepip_and_pip_names_the_package(tmp_path):
    """Debian splits ensurepip off; ``false`` stands for a Python that has neither."""
    command = ["make", "venv", "PYTHON=false", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr.splitlines()[0]
    assert not (tmp_path / "venv").exists()
