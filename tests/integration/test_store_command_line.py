"""The command line with RUBBERBAND_STORE: an experiment is run, listed and reported from a PostgreSQL database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENT = """
version: 1
name: small
search:
  space: {lr: {type: loguniform, lower: 1e-4, upper: 1e-1}}
  scheduler: {type: sha, num_samples: 8, max_t: 9}
  metric: loss
  mode: min
constraints: {deadline: 20m}
resources: {provider: virtual, instance_type: p3.8xlarge, gpus_per_instance: 4, price_per_hour: 3.6, max_instances: 4}
profile: {seconds_per_iteration: {1: 10, 2: 6}}
"""


def rubberband(*arguments: str, home: Path, store: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RUBBERBAND_HOME": str(home), "RUBBERBAND_STORE": store}
    command = [sys.executable, "-m", "rubberband.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_an_experiment_is_run_in_a_database_and_read_from_anywhere(postgresql_url: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    ran = rubberband("run", str(tmp_path / "small.yaml"), home=home, store=postgresql_url)
    assert (ran.returncode, ran.stdout[:11]) == (0, "small: done"), ran.stderr
    assert not list(home.rglob("*.db"))
    assert rubberband("report", "small", home=elsewhere, store=postgresql_url).stdout == ran.stdout
    listed = rubberband("ps", home=elsewhere, store=postgresql_url).stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [["NAME", "STATE"], ["small", "done"]]
    assert "s3cret" not in ran.stderr
