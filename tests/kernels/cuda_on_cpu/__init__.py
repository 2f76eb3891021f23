"""Runs the CUDA sources on the CPU: compiled as C++ with a shim, block by block, a block's threads as fibers.

Blocks that count each other's arrivals run side by side.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

AVAILABLE = shutil.which("g++") is not None
_SHIM = Path(__file__).with_name("shim.h")
_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.bool_: "bool",
}
_folder = tempfile.TemporaryDirectory(prefix="aerie-cuda-")
# Inline PTX is the one thing that a shim cannot stand for: the instruction is emulated.
_MMA = re.compile(
    r"asm volatile\(\s*\"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16).*?\"r\"\(b\[1\]\)\);", re.S
)


def build_cuda_kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, header: str = "", strided: bool = False
) -> Callable[..., Sequence[mx.array]]:
    """As ``kernels._cuda.build_cuda_kernel``. Outputs start as NaN, or another odd value: what is not written shows."""

    def call(
        inputs_: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
        init_value: int | None = None,
    ) -> list[mx.array]:
        code = _write_code(inputs, [a.dtype for a in inputs_], outputs, output_dtypes, source, header, template)
        arrays = [_expose(array, strided) for array in inputs_]
        outs = list(zip(output_shapes, output_dtypes, strict=True))
        assert init_value in (None, 0)
        start = 0xFF if init_value is None else 0
        results = [np.full(int(np.prod(shape)) * dtype.size, start, np.uint8) for shape, dtype in outs]
        pointers = (ctypes.c_void_p * (len(arrays) + len(results)))(*(a.ctypes.data for a in (*arrays, *results)))
        shapes, strides = np.zeros((len(arrays), 8), np.int32), np.zeros((len(arrays), 8), np.int64)
        for index, array in enumerate(arrays):
            shapes[index, : array.ndim] = array.shape
            strides[index, : array.ndim] = np.array(array.strides) // array.itemsize
        ndims = np.array([array.ndim for array in arrays], np.int32)
        blocks = np.array([-(-size // block) for size, block in zip(grid, threadgroup, strict=True)], np.int32)
        told = (shapes, strides, ndims, blocks, np.array(threadgroup, np.int32))
        assert _compile(name, code)(pointers, *(a.ctypes.data for a in told)), f"{name}: its threads diverge"
        return [mx.array(r).view(dtype).reshape(shape) for r, (shape, dtype) in zip(results, outs, strict=True)]

    return lambda inputs, **launch: call(inputs, **launch)


def _expose(array: mx.array, strided: bool) -> np.ndarray:
    """The array's memory as NumPy sees it, strides included; bfloat16 as its bits."""
    if not strided:
        array = mx.contiguous(array)
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _write_code(
    inputs: Sequence[str],
    input_dtypes: Sequence[mx.Dtype],
    outputs: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    source: str,
    header: str,
    template: Sequence[tuple[str, Any]],
) -> str:
    parameters, arguments = [], []
    for index, (name, dtype) in enumerate(zip(inputs, input_dtypes, strict=True)):
        parameters.append(f"const {_TYPES[dtype]}* {name}")
        arguments.append(f"static_cast<const {_TYPES[dtype]}*>(pointers[{index}])")
        for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if f"{name}_{suffix}" in source:
                parameters.append(f"const {kind} {name}_{suffix}")
                arguments.append(f"{suffix}s[{index}]" if suffix != "strides" else f"strides[{index}]")
    for index, (name, dtype) in enumerate(zip(outputs, output_dtypes, strict=True)):
        parameters.append(f"{_TYPES[dtype]}* {name}")
        arguments.append(f"static_cast<{_TYPES[dtype]}*>(pointers[{len(inputs) + index}])")
    constants = [
        f"using {name} = {_TYPES[value]};" if isinstance(value, mx.Dtype) else f"constexpr int {name} = {value};"
        for name, value in template
    ]
    types = {"f16": "__half", "bf16": "__nv_bfloat16"}
    header = _MMA.sub(lambda match: f"emulate_mma<{types[match[1]]}>(d, a, b);", header)
    return "\n".join(
        [
            '#include "shim.h"',
            header,
            f"static void kernel({', '.join(parameters)}) {{",
            *constants,
            source,
            "}",
            'extern "C" __attribute__((visibility("default")))',
            "bool run(void** pointers, const Shape* shapes, const Strides* strides, const int* ndims, const int* grid,",
            "         const int* block) {",
            f"  const bool together = {str('atomicAdd(' in source).lower()};",
            f"  return fibers::run_grid(grid, block, together, [&] {{ kernel({', '.join(arguments)}); }});",
            "}",
        ]
    )


_compiled: dict[str, Any] = {}


_FLAGS = ["-std=c++20", "-O1", "-w", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread"]


@cache
def _precompile_shim() -> Path:
    """Its folder: most of a kernel's compilation is the standard headers that the shim includes."""
    header = Path(_folder.name, _SHIM.name)
    shutil.copy(_SHIM, header)
    _run_compiler("-x", "c++-header", str(header), "-o", f"{header}.gch")
    return header.parent


def _run_compiler(*arguments: str) -> None:
    subprocess.run(["g++", *_FLAGS, *arguments], check=True, capture_output=True, text=True)


def _compile(name: str, code: str) -> Any:
    digest = hashlib.sha256(code.encode()).hexdigest()[:16]
    if digest not in _compiled:
        path = Path(_precompile_shim(), f"{name}-{digest}.cpp")
        path.write_text(code)
        library = path.with_suffix(".so")
        _run_compiler("-shared", str(path), "-o", str(library))
        run = ctypes.CDLL(str(library)).run
        run.restype = ctypes.c_bool
        run.argtypes = [ctypes.c_void_p] * 6
        _compiled[digest] = run
    return _compiled[digest]
