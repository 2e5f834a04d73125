"""What runs on an instance that is another machine: its lease, and what the cloud tells it of interruptions.

The machine's boot script arms the lease before anything else and names its file in the environment; a worker of the
driver's, on that machine, calls what is here. It imports only the standard library.
"""

from __future__ import annotations

import os

LEASE_VARIABLE = "RUBBERBAND_LEASE"
"""Environment variable: path of the lease file. Its modification time is the instant at which the machine ends."""
METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable: where the instance metadata service answers, if not at its usual address."""


def extend_lease(until: float) -> None:
    """Let this machine live until `until` (Unix time), and no longer; nothing where it has no lease file."""
    path = os.environ.get(LEASE_VARIABLE)
    if path:
        os.utime(path, (until, until))
