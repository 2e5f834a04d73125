"""The driver's connection to its head."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.ray
def test_a_driver_outlives_its_head_and_finds_another(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "driver_outlives_head.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "it went on\n"), done.stderr[-2000:]
