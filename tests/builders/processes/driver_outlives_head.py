"""A process whose head is killed while it is connected: it must go on, and can then connect to another head."""

import sys
import threading
import time
from pathlib import Path

from rubberband.cloud.local.provider import LocalProvider
from rubberband.executor import Connection, ray_nodes

SECONDS = 75.0
"""Longer than the 60 s after which Ray ends such a process if it is left to."""


def main(directory: Path) -> None:
    """Kill one head, wait, and be let in by another."""
    connection = Connection()
    first = LocalProvider("first", directory / "first", 2)
    connection.open(first.ensure_head())
    ray_nodes()
    first.close()
    threading.Thread(target=ray_nodes, daemon=True).start()
    time.sleep(SECONDS)
    connection.leave()
    second = LocalProvider("second", directory / "second", 2)
    try:
        connection.open(second.ensure_head())
        assert ray_nodes() == {}
    finally:
        connection.close()
        second.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("it went on")
