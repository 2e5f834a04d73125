"""Stand-ins for Ray nodes: quick to start, so that tests of the local provider need no Ray."""

from __future__ import annotations

import sys

from rubberband.cloud.ray_head.instance import STARTED

# They live until they are ended; of a test that is killed, they end by themselves.
_JOINED = f"print({STARTED!r}, flush=True); "
_HEAD = f"import socket, time; server = socket.create_server(('{{host}}', {{port}})); {_JOINED}time.sleep(1000)"
_NODE = (
    f"import subprocess, time; subprocess.Popen(['sleep', '1000'], start_new_session=True); {_JOINED}time.sleep(1000)"
)


def head_command(port: int, temp_dir: str, host: str = "127.0.0.1") -> tuple[str, ...]:
    """Something that listens at the port."""
    return (sys.executable, "-c", _HEAD.format(port=port, host=host))


def instance_command(name: str, address: str, gpus: int, temp_dir: str) -> tuple[str, ...]:
    """A process with a child that left its session, as Ray's workers do."""
    return (sys.executable, "-c", _NODE)
