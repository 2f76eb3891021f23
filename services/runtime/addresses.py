"""Where services listen and what they dial: ``host:port`` or ``unix:PATH``."""

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Collection
from dataclasses import dataclass

from services.speculation.errors import AerieError, Reason

MOST_PATH = 100
"""Bytes of a socket's path: systems take 104 to 108."""
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]")


@dataclass(frozen=True)
class Address:
    """``text`` is what gRPC takes; ``host`` is empty for a unix socket."""

    text: str
    host: str = ""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        """Only this machine reaches it."""
        return not self.host or _LOOPBACK.fullmatch(self.host) is not None


def parse_address(text: str, name: str = "address") -> Address:
    """Read an address; ``name`` is what the error calls it.

    Raises:
        AerieError: INVALID_ARGUMENT.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or "\0" in path:
            raise _invalid(name, text, "a unix socket needs a path")
        if len(path.encode()) > MOST_PATH:
            raise _invalid(name, text[:60] + "...", f"a unix socket's path has at most {MOST_PATH} bytes")
        return Address(text)
    host, separator, port = text.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise _invalid(name, text, "it must be host:port or unix:PATH")
    if "/" in host:
        raise _invalid(name, text, "it must be host:port or unix:PATH, without a scheme or a path")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")) or " " in host:
        raise _invalid(name, text, "an IPv6 host stands in brackets")
    return Address(text, host, int(port))


def check_exposure(address: Address, keys: Collection[object], insecure: bool) -> None:
    """Refuse to listen beyond this machine without a key.

    Raises:
        AerieError: INVALID_ARGUMENT.
    """
    if address.is_loopback or keys or insecure:
        return
    raise AerieError(
        Reason.INVALID_ARGUMENT,
        f"{address.text} is open to other machines: give a key, where it takes one (AERIE_API_KEY, "
        "AERIE_WORKER_KEY or a key file), or say --insecure",
    )


def _invalid(name: str, text: str, why: str) -> AerieError:
    return AerieError(Reason.INVALID_ARGUMENT, f"{name} is {text!r}: {why}")


def make_way(path: str) -> None:
    """Remove the file of a unix socket that nobody listens on any more.

    Raises:
        OSError: Somebody does.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
                probe.connect(path)
                raise OSError(errno.EADDRINUSE, "a server listens there already")
            os.unlink(path)


def check_free(address: Address) -> None:
    """Refuse an address that cannot be listened at, before anything is built for it.

    Raises:
        AerieError: INVALID_ARGUMENT.
    """
    try:
        if not address.host:
            make_way(address.text.removeprefix("unix:").removeprefix("//"))
            return
        name = address.host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        socket.create_server((name, address.port), family=family).close()
    except OSError as error:
        raise AerieError(Reason.INVALID_ARGUMENT, f"cannot listen at {address.text}: {error.strerror}") from None
