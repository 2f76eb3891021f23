"""Who may import whom, and packages that must work without MLX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOWER = {"speculation"}
ALLOWED: dict[str, set[str]] = {
    "speculation": set(),
    "runtime": LOWER,
    "wire": LOWER,
    "targets": LOWER | {"kernels"},
    "verifier": LOWER | {"runtime", "wire", "targets", "kernels"},
    "drafter": LOWER | {"runtime", "wire", "targets", "kernels"},
    "orchestrator": LOWER | {"runtime", "wire"},
    "client": LOWER | {"runtime", "wire"},
}
ANYTHING = {"embedded", "training", "bench", "cli"}
NO_MLX = {"speculation", "runtime", "wire", "orchestrator", "client"}
THIRD_PARTY = {"speculation": {"numpy"}}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names.add(node.module or "")
    return names


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / "services" / package).rglob("*.py"))


@pytest.mark.parametrize("package", [p for p in ALLOWED if (ROOT / "services" / p).exists()])
def test_packages_import_only_what_the_architecture_allows(package):
    for path in modules_of(package):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "services" and len(parts) > 1:
                assert parts[1] == package or parts[1] in ALLOWED[package], f"{path} imports {name}"
            if parts[0] == "kernels":
                assert "kernels" in ALLOWED[package], f"{path} imports {name}"
            if package in NO_MLX:
                assert parts[0] not in ("mlx", "mlx_lm"), f"{path} imports {name}"
            if package in THIRD_PARTY and parts[0] not in ("services", *sys.stdlib_module_names):
                assert parts[0] in THIRD_PARTY[package], f"{path} imports {name}"


def test_kernels_import_values_of_speculation_only():
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for name in imports_of(path):
            if name.startswith("services"):
                assert name.startswith("services.speculation"), f"{path} imports {name}"


def test_every_services_package_has_a_rule():
    packages = {p.parent.name for p in (ROOT / "services").glob("*/__init__.py")}
    assert packages <= set(ALLOWED) | ANYTHING


def test_every_folder_of_code_is_a_package():
    for top in ("services", "kernels", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_mlx_free_packages_import_with_mlx_blocked():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in sorted(NO_MLX)
        for path in modules_of(package)
    ]
    code = (
        "import importlib, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers'):\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
