"""Damaged headers, byte by byte: MLX's own reader ends the process on many of them."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from services.speculation.errors import AerieError, Reason
from services.targets.gguf import load_gguf
from services.targets.gguf_header import read_header
from tests.targets.tiny_gguf import llama_metadata, write_gguf, write_llama
from tests.tiny import load_plain, write_tiny_llama

KEY, TENSOR = b"tokenizer.ggml.tokens", b"token_embd.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> nn.Module:
    return load_plain(write_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1))


@pytest.fixture(scope="module")
def sound(tmp_path_factory, plain: nn.Module) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write_llama(path, plain, "Q8_0")
    return path.read_bytes()


def refusal(path: Path, read: Callable = read_header) -> str:
    with pytest.raises(AerieError) as caught:
        read(path)
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED
    assert "\n" not in caught.value.message
    return caught.value.message


def test_header_gives_what_was_written(tmp_path):
    """Every type of value, and shapes rows first."""
    metadata = {**llama_metadata(1, 0), "a.true": True, "a.half": 0.5, "a.negative": [-1, 2**31 - 1], "a.text": "é"}
    tensors = {
        "one": ("F32", (3, 2), bytes(24)),
        "two": ("Q4_0", (5, 64), bytes(180)),
        "three": ("F16", (1,), bytes(2)),
    }
    write_gguf(tmp_path / "a.gguf", metadata, tensors)
    header = read_header(tmp_path / "a.gguf")
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    assert header.metadata.pop(epsilon) == pytest.approx(metadata.pop(epsilon))  # float32
    assert header.metadata == metadata
    assert header.shapes == {"one": (3, 2), "two": (5, 64), "three": (1,)}


def test_header_agrees_with_mlx(tmp_path, sound: bytes):
    (tmp_path / "a.gguf").write_bytes(sound)
    tensors, metadata = mx.load(str(tmp_path / "a.gguf"), format="gguf", return_metadata=True)
    header = read_header(tmp_path / "a.gguf")
    assert header.metadata.keys() == metadata.keys()
    for key, value in metadata.items():
        assert header.metadata[key] == (value.tolist() if isinstance(value, mx.array) else value)
    assert header.shapes.keys() == {name for name in tensors if name.endswith("weight")}
    assert header.shapes["output_norm.weight"] == tensors["output_norm.weight"].shape


# What to write, where (an offset, or bytes after the end of a name), and what the refusal says.
PATCHES = {
    "magic": (0, b"GGML", "does not begin with GGUF"),
    "version 1": (4, struct.pack("<I", 1), "version 1"),
    "big-endian": (4, struct.pack(">I", 3), "version 50331648"),
    "tensor count": (8, struct.pack("<Q", 2**60), "1152921504606846976 tensors"),
    "tensor count beyond": (8, struct.pack("<Q", 60_000), "GGUF"),
    "key count": (16, struct.pack("<Q", 2**60), "1152921504606846976 keys"),
    "key count beyond": (16, struct.pack("<Q", 60_000), "GGUF"),
    "key length": (24, struct.pack("<Q", 2**62), "ends within its header"),
    "key length wraps": (24, struct.pack("<Q", 2**64 - 8), "ends within its header"),
    "value type": ((KEY, 0), struct.pack("<I", 77), "value type 77"),
    "item type": ((KEY, 4), struct.pack("<I", 77), "value type 77"),
    "array of arrays": ((KEY, 4), struct.pack("<I", 9), "value type 9"),
    "item count": ((KEY, 8), struct.pack("<Q", 2**40), "1099511627776 items"),
    "item count beyond": ((KEY, 8), struct.pack("<Q", 2**21), "GGUF"),
    "no dimensions": ((TENSOR, 0), struct.pack("<I", 0), "0 dimensions"),
    "nine dimensions": ((TENSOR, 0), struct.pack("<I", 9), "9 dimensions"),
    "huge size": ((TENSOR, 4), struct.pack("<Q", 2**50), "past the end of the file"),
    "size wraps": ((TENSOR, 4), struct.pack("<QQ", 2**32, 2**32), "past the end of the file"),
    "size 0": ((TENSOR, 4), struct.pack("<QQ", 0, 0), "the sizes [0, 0]"),
    "half a block": ((TENSOR, 4), struct.pack("<Q", 16), "the sizes [16, 300]"),
    "tensor type": ((TENSOR, 20), struct.pack("<I", 99), "tensor type 99"),
    "K-quant": ((TENSOR, 20), struct.pack("<I", 14), "tensor type 14"),
    "offset": ((TENSOR, 24), struct.pack("<Q", 2**50), "past the end of the file"),
    "offset wraps": ((TENSOR, 24), struct.pack("<Q", 2**64 - 32), "past the end of the file"),
    "odd offset": ((TENSOR, 24), struct.pack("<Q", 7), "not at a multiple of 32"),
    "not UTF-8": ((KEY, -5), b"\xff", "utf-8"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_damage_is_refused_by_name(tmp_path, sound: bytes, name: str):
    place, written, words = PATCHES[name]
    at = place if isinstance(place, int) else sound.index(place[0]) + len(place[0]) + place[1]
    path = tmp_path / "a.gguf"
    path.write_bytes(sound[:at] + written + sound[at + len(written) :])
    assert words in refusal(path)


@pytest.mark.parametrize("repeated", [KEY, TENSOR])
def test_repeated_names_are_refused(tmp_path, sound: bytes, repeated: bytes):
    other = {KEY: b"tokenizer.ggml.merges", TENSOR: b"blk.0.attn_q.weight"}[repeated]
    path = tmp_path / "a.gguf"
    old, new = (struct.pack("<Q", len(name)) + name for name in (other, repeated))
    path.write_bytes(sound.replace(old, new))
    assert "repeats the" in refusal(path)


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 16, 24, 30, 100, 1000])
def test_header_that_is_cut_short_is_refused(tmp_path, sound: bytes, keep: int):
    (tmp_path / "a.gguf").write_bytes(sound[:keep])
    assert "a.gguf is not a GGUF file" in refusal(tmp_path / "a.gguf")


def test_folder_and_device_are_no_files(tmp_path):
    (tmp_path / "a.gguf").mkdir()
    (tmp_path / "b.gguf").symlink_to("/dev/zero")
    for name in ("a.gguf", "b.gguf"):
        assert "not a regular file" in refusal(tmp_path / name)


def test_random_damage_never_ends_the_process(tmp_path, sound: bytes):
    """One to three bytes of the header, the arrays of text apart: a model, or one line."""
    rng = random.Random(7)
    infos = sound.index(b"blk.0")
    spots = [*range(700), *range(infos - 100, infos + 800)]
    path, refused = tmp_path / "a.gguf", []
    for _ in range(300):
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.choice(spots)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            load_gguf(path, dequantize=True)
        except AerieError as error:
            refused.append((error.reason, "\n" in error.message))
    assert 0 < len(refused) < 300
    assert set(refused) == {(Reason.TARGET_UNSUPPORTED, False)}
