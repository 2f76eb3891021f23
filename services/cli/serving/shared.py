"""Weights that a drafter shares with the target: asked of the verifier once, then from this machine's disk."""

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from services.orchestrator.grpc_ports import GrpcVerifierPort
from services.speculation.errors import AerieError, Reason
from services.speculation.messages import TargetInfo
from services.targets.features import to_mlx

FETCH_SECONDS = 600.0


def default_cache() -> Path:
    """``AERIE_CACHE``, else a folder of the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("AERIE_CACHE") or Path(home) / "aerie")


class SharedTensors:
    """Reads tensors on the device thread; the verifier is asked on the event loop.

    Args:
        port: Of the verifier.
        target: What it serves: files are kept by its fingerprint.
        folder: Of the cache.
    """

    def __init__(self, port: GrpcVerifierPort, target: TargetInfo, folder: Path) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._folder = folder / "tensors" / target.weights_fingerprint

    def get(self, name: str) -> mx.array:
        """One tensor, bfloat16. Call on the device thread.

        Raises:
            AerieError: SERVICE_UNAVAILABLE, the verifier does not give it.
        """
        file = self._folder / f"{name}.npy"
        array = _read(file)
        if array is None:
            fetch = asyncio.run_coroutine_threadsafe(self._port.tensor(name), self._loop)
            try:
                array = fetch.result(FETCH_SECONDS)
            except (ConnectionError, TimeoutError) as error:
                message = f"the verifier does not give {name}: {error or 'it takes too long'}"
                raise AerieError(Reason.SERVICE_UNAVAILABLE, message) from None
            with contextlib.suppress(OSError):  # a disk that is full, or not ours: the next start asks again
                _write(file, array)
        return to_mlx(array)


def _read(file: Path) -> NDArray[np.uint16] | None:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return array if array.dtype == np.uint16 and array.ndim in (1, 2) else None


def _write(file: Path, array: NDArray[np.uint16]) -> None:
    """Whole or not at all: several drafters of a machine may start at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
        try:
            np.save(part, array)
            part.close()
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise
