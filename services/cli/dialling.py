"""Channels to services, as the options of ``add_dialling`` say."""

import argparse

import grpc

from services.cli.report import UsageError
from services.client.channel import open_channel


def channel_of(options: argparse.Namespace, address: str) -> grpc.aio.Channel:
    """A channel to ``address``. Call it on the event loop that uses the channel."""
    for name in ("ca", "cert", "cert_key", "key_file"):
        if getattr(options, name) is not None:  # silence would send in the clear what was to be protected
            raise UsageError(f"--{name.replace('_', '-')}: TLS and keys are not built yet")
    return open_channel(address)
