"""The header of a GGUF file, read with every bound checked: MLX's own reader trusts counts and lengths.

What passes here, ``mx.load`` reads without leaving the file.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.speculation.errors import AerieError, Reason
from services.targets.files import one_line

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Type number: name, values a block, bytes a block. MLX widens K-quants itself, and wrongly for some blocks.
_TENSOR_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
# Far above any real file: a wrong count must not keep a reader busy.
_MOST_KEYS = _MOST_TENSORS = 2**16
_MOST_ITEMS = 2**22
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFHeader:
    """What a file says before its data.

    Attributes:
        metadata: By key: int, float, bool, str, or a list of one of them.
        shapes: By tensor name, rows first as in NumPy.
    """

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


class _Damaged(Exception):
    pass


def read_header(path: Path) -> GGUFHeader:
    """Read a GGUF file of version 2 or 3, little-endian.

    Raises:
        AerieError: TARGET_UNSUPPORTED when it is no such file, is damaged or cut short, or holds a tensor of a type
            that MLX does not read exactly.
    """
    try:
        if not path.is_file():
            raise _Damaged("not a regular file")
        if not path.stat().st_size:
            raise _Damaged("it is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (_Damaged, OSError, UnicodeDecodeError) as error:
        message = f"{path} is not a GGUF file that can be read: {one_line(error)}"  # which may name a key of the file
        raise AerieError(Reason.TARGET_UNSUPPORTED, message) from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._size = data, 0, len(data)

    def header(self) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise _Damaged("it does not begin with GGUF")
        version, tensors, keys = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            raise _Damaged(f"version {version}, not 2 or 3")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise _Damaged(f"{tensors} tensors and {keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            value = self._value(self._number("I"), key)
            if key in metadata:
                raise _Damaged(f"it repeats the key {key}")
            metadata[key] = value
        alignment = metadata.get("general.alignment", 32)
        # MLX divides by it.
        if type(alignment) is not int or not 0 < alignment <= 2**16 or alignment % 8:
            raise _Damaged(f"general.alignment is {alignment!r}")
        return GGUFHeader(metadata, self._tensors(tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        ends = []
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if name in shapes:
                raise _Damaged(f"it repeats the tensor {name}")
            if not 0 < dimensions <= _MOST_DIMENSIONS:
                raise _Damaged(f"{name} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))
            kind, offset = self._number("I"), self._number("Q")
            if kind not in _TENSOR_TYPES:
                names = ", ".join(kind_name for kind_name, _, _ in _TENSOR_TYPES.values())
                raise _Damaged(f"{name} has tensor type {kind}; built for {names}")
            kind_name, values, size = _TENSOR_TYPES[kind]
            if not all(shape) or shape[0] % values:
                raise _Damaged(f"{name} of type {kind_name} has the sizes {list(shape)}")
            if offset % alignment:
                raise _Damaged(f"{name} begins at {offset}, not at a multiple of {alignment}")
            shapes[name] = shape[::-1]
            ends.append((offset + math.prod(shape) // values * size, name))
        start = -(-self._at // alignment) * alignment
        for end, name in ends:
            if start + end > self._size:
                raise _Damaged(f"{name} reaches past the end of the file; is it cut short?")
        return shapes

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._format(kind, key))
        kind, count = self._number("I"), self._number("Q")
        if count > _MOST_ITEMS:
            raise _Damaged(f"{key} has {count} items")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        layout = struct.Struct(f"<{count}{self._format(kind, key)}")
        return list(layout.unpack(self._take(layout.size)))

    def _format(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise _Damaged(f"{key} has value type {kind}")
        return _SCALARS[kind]

    def _number(self, kind: str) -> Any:
        layout = struct.Struct(f"<{kind}")
        return layout.unpack(self._take(layout.size))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise _Damaged(f"it ends within its header, at byte {self._size}")
        self._at += count
        return self._data[self._at - count : self._at]
