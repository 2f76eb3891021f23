"""The BLAS preload happens once a process, at import: each case gets a process of its own."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the BLAS that MLX links")

# Prints the library of the loaded BLAS, and whether the whole process resolves cblas_sgemm to it.
REPORT = """
import ctypes
def address(library):
    try:
        return ctypes.cast(ctypes.CDLL(library).cblas_sgemm, ctypes.c_void_p).value
    except AttributeError:
        return None
from kernels import _blas
print(_blas.loaded, _blas.loaded and address(None) == address(_blas.loaded), address(None) is not None)
"""


# Hides every library that could serve.
WITHOUT_BLAS = """
import ctypes, importlib.util
find, load = importlib.util.find_spec, ctypes.CDLL
importlib.util.find_spec = lambda name, *rest: None if name == "scipy_openblas32" else find(name, *rest)
def refuse(name, *rest, **named):
    if name and "openblas" in str(name):
        raise OSError(name)
    return load(name, *rest, **named)
ctypes.CDLL = refuse
import kernels
"""


def python(code, **environment):
    env = {key: value for key, value in os.environ.items() if key != "AERIE_BLAS"} | environment
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, env=env, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split(), result.stderr


@pytest.fixture(scope="module")
def shipped():
    """The library that is loaded when nothing is said."""
    (path, *found), warned = python("import kernels" + REPORT)
    assert warned == ""
    assert found == ["True", "True"]
    return path


def test_importing_kernels_puts_a_blas_before_all_others(shipped):
    assert "openblas" in os.path.basename(shipped)


def test_importing_services_does_the_same(shipped):
    assert python("import services" + REPORT) == ([shipped, "True", "True"], "")


def test_the_preload_brings_no_mlx(shipped):
    out, _ = python("import kernels, services, sys; print(any(name.split('.')[0] == 'mlx' for name in sys.modules))")
    assert out == ["False"]


def test_mlx_multiplies_through_it(shipped):
    """MLX resolves cblas_sgemm in the global table: the preloaded library is there and the product is right."""
    code = """
import kernels, numpy as np, mlx.core as mx
a, b = np.random.default_rng(0).normal(0, 1, (2, 64, 64)).astype(np.float32)
print(np.abs(np.array(mx.array(a) @ mx.array(b), np.float64) - a.astype(np.float64) @ b).max() < 1e-4)
from kernels import _blas
print(_blas.set_threads(1))
"""
    assert python(code) == (["True", "True"], "")


# Prints the right product before and after, and whether the idle worker sleeps soon after the last product.
TURNS = """
import kernels, time, numpy as np, mlx.core as mx
from kernels import _blas
def product():
    a, b = np.random.default_rng(0).normal(0, 1, (2, 512, 512)).astype(np.float32)
    found = mx.array(a) @ mx.array(b)
    mx.eval(found)
    exact = np.einsum("ij,jk->ik", a.astype(np.float64), b)  # not through the BLAS that NumPy brings: it spins, too
    return bool(np.abs(np.array(found, np.float64) - exact).max() < 1e-3)
def spun():
    product()
    used = time.process_time()
    time.sleep(0.2)
    return time.process_time() - used
_blas.set_threads(2)
print(product())
spinning = spun()
print(_blas.yield_cores(), product(), spun() < max(spinning / 2, 0.004))
"""


def test_idle_threads_that_yield_cores_sleep_soon(shipped):
    """Counted in CPU time: a sleeping thread uses none, whatever else runs on the machine."""
    assert python(TURNS, OPENBLAS_NUM_THREADS="2") == (["True", "True", "True", "True"], "")


def test_off_loads_nothing():
    assert python("import kernels" + REPORT, AERIE_BLAS="off") == (["None", "None", "False"], "")
    calls = "from kernels import _blas; print(_blas.set_threads(1), _blas.yield_cores())"
    assert python(calls, AERIE_BLAS="off") == (["False", "False"], "")


def test_a_named_library_is_the_one_that_is_loaded(shipped):
    folder, name = os.path.split(shipped)
    spelled_otherwise = os.path.join(folder, "..", os.path.basename(folder), name)
    assert python("import kernels" + REPORT, AERIE_BLAS=spelled_otherwise) == ([spelled_otherwise, "True", "True"], "")


@pytest.mark.parametrize("named", ["/nowhere/libblas.so", "libm.so.6"], ids=["missing", "without BLAS"])
def test_a_named_library_that_does_not_serve_is_warned_about(named):
    (path, *_), warned = python("import kernels" + REPORT, AERIE_BLAS=named)
    assert path == "None"
    assert f"AERIE_BLAS={named} is no BLAS that loads" in warned


def test_without_any_blas_the_warning_says_what_to_install():
    (path, *_), warned = python("import sys; sys.path[:] = [p for p in sys.path if p]" + WITHOUT_BLAS + REPORT)
    assert path == "None"
    assert "pip install scipy-openblas32==" in warned


@pytest.mark.parametrize("build", ["mlx_cuda_12", "mlx_cuda_13"])
@pytest.mark.parametrize("first", ["import kernels", "import mlx.core; import kernels"])
def test_the_cuda_build_of_mlx_is_left_alone(tmp_path, build, first):
    """Nothing is loaded and nothing said, also when ours comes after mlx."""
    info = tmp_path / f"{build}-0.32.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {build.replace('_', '-')}\nVersion: 0.32.4\n")
    (path, *_), warned = python(f"import sys; sys.path.append({str(tmp_path)!r}); {first}{REPORT}")
    assert (path, warned) == ("None", "")


def test_importing_too_late_warns_and_loads_nothing():
    (path, *_), warned = python("import mlx.core; import kernels" + REPORT)
    assert path == "None"
    assert "import aerie's packages before mlx.core" in warned
