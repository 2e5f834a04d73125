"""Every command that rents nothing on EC2 works where boto3 is not installed, as after README's first command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("boto3", "botocore"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""
_MODULES = (
    "rubberband.executor.ray.backend",
    "rubberband.executor.ray.node_probe",
    "rubberband.cloud.local.provider",
    "rubberband.cloud.ray_cluster.provider",
    "rubberband.running.hosted",
)


@pytest.mark.parametrize(
    "program",
    [
        f"import {', '.join(_MODULES)}; print('nothing was left behind')",
        "sys.argv = ['rubberband', 'cleanup']; from rubberband.cli import main; main()",
    ],
    ids=["a run", "cleanup"],
)
def test_a_command_that_rents_nothing_needs_no_boto3(program: str, tmp_path: Path) -> None:
    environment = {"RUBBERBAND_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT + program], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("nothing was left behind", 0), done.stderr
