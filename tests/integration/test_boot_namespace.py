"""The boot script of a worker as root of a namespace: its own paths, and nothing of this computer's is changed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rubberband.cloud.aws.boot import Boot, worker_script
from rubberband.cloud.aws.calls import NodeStart
from rubberband.cloud.aws.installing import Installation

UNSHARED = ["unshare", "--map-root-user", "--mount", "--"]
INSIDE = """
set -euo pipefail
mount -t tmpfs none /var/lib
mkdir -p "$1/apt" && mount --bind "$1/apt" /etc/apt/apt.conf.d
export PATH="$1/bin:$PATH"
bash "$1/user-data"
bash /var/lib/rubberband/worker || echo "worker: $?"
date -u -d "@$(stat -c %Y /var/lib/rubberband/lease)" +"lease %s"
echo "booted $(($(date +%s) - $(cut -d. -f1 /proc/uptime)))"
ls /var/lib/cloud/scripts/per-boot /etc/apt/apt.conf.d
"""


def _may_unshare() -> bool:
    if shutil.which("unshare") is None or not Path("/etc/apt/apt.conf.d").is_dir():
        return False
    return subprocess.run([*UNSHARED, "mount", "-t", "tmpfs", "none", "/var/lib"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_unshare(), reason="namespaces cannot be made here")
def test_the_script_of_a_worker_runs_as_root_of_its_own_files(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemd-run", "shutdown", "python3", "nvidia-smi"):
        (programs / name).write_text(f'#!/bin/bash\necho {name} "$@"\n')
        (programs / name).chmod(0o755)
    boot = Boot(
        region="us-east-1",
        token_parameter="/rubberband/me/ray-token",
        installation=Installation(python="3.11"),
        setup=("echo set up as $(id -un)",),
        ray_settings={},
        device="cuda",
    )
    start = NodeStart(
        instances=("i-001",), head_address="10.0.0.5:6379", gpus=1, lease_s=510.0, boot_s=900.0, lifetime_s=7200.0
    )
    (tmp_path / "user-data").write_text(worker_script(boot, start))

    ran = subprocess.run(
        [*UNSHARED, "bash", "-c", INSIDE, "inside", str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("systemd-run")] == [
        "--unit=rubberband-lease",
        "--unit=rubberband-stop",
        "--unit=rubberband-worker",
    ]
    assert "set up as root" in lines
    steps = [line.split(" ", 2)[2] for line in lines if line.startswith("rubberband: ")]
    assert [step.split()[0] for step in steps] == ["i-001", "setup:", "checking", "reading", "joining", "ending"]
    assert not any(line.startswith("worker:") for line in lines)
    lease, booted = (int(line.split()[1]) for word in ("lease", "booted") for line in lines if line.startswith(word))
    assert booted + 508 <= lease <= booted + 902, "it counts from the start of the machine, and has the bound of a boot"
    assert {"rubberband-end", "99rubberband", "99rubberband-lock"} <= {*lines}
    assert not Path("/var/lib/rubberband").exists()
