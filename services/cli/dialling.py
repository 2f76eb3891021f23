"""What commands show to the services that they reach."""

import argparse

from services.runtime.security import ChannelSecurity, read_keys


def security_of(options: argparse.Namespace) -> ChannelSecurity:
    """As ``--ca``, ``--cert``, ``--cert-key`` and ``--key-file`` or AERIE_KEY say.

    Raises:
        AerieError: INVALID_ARGUMENT, a key file cannot be read or holds no key.
    """
    keys = read_keys("AERIE_KEY", options.key_file)
    return ChannelSecurity(keys[0] if keys else None, options.ca, options.cert, options.cert_key)
