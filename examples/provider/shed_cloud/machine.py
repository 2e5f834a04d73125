"""A machine: it boots, arms its lease, joins the head, and ends itself with its lease or its Ray node.

In a real cloud, each machine runs this script when it boots. The driver's worker there renews the lease: it sets the
time of the file that RUBBERBAND_LEASE names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rubberband.cloud.ray_head.instance import end_tagged, lock
from rubberband.files import write_atomically


def main(folder: Path) -> None:
    """Live as the order in the folder says, and note when it ran and why it ended."""
    with lock(folder / "machine") as mine:
        if not mine:
            return
        order = json.loads((folder / "order.json").read_text())
        time.sleep(order["boot_s"])
        running_at, lease = time.time(), folder / "lease"
        lease.touch()
        os.utime(lease, (running_at, running_at + order["lease_s"]))
        _note(folder, running_at=running_at)
        with open(folder / "console.log", "ab") as log:
            node = subprocess.Popen(order["command"], stdout=log, stderr=log)
        while True:
            if time.time() > lease.stat().st_mtime:
                reason = "lease expired"
                break
            if node.poll() is not None:
                reason = f"its Ray node ended (exit status {node.returncode})"
                break
            time.sleep(0.05)
        end_tagged(str(folder.parent), folder.name)
        _note(folder, running_at=running_at, ended_at=time.time(), reason=reason)


def _note(folder: Path, **state: object) -> None:
    write_atomically(folder / "state.json", json.dumps(state).encode(), durable=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
