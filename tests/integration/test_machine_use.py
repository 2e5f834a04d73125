"""The use of machines by trials of a real run: busy and sleeping ones, and the mean over a gang."""

from __future__ import annotations

import pytest

from rubberband.executor import Result
from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

TRIALS = """
import subprocess, sys, time
import rubberband

SPIN = "import time; until = time.process_time() + {0}\\nwhile time.process_time() < until: pass"

class Uses(rubberband.Trial):
    def setup(self, config, context):
        self.kind = config["kind"] if context.rank == 0 else "sleeps"

    def iterate(self):
        until = time.process_time() + 1.5
        if self.kind == "sleeps":
            time.sleep(1.5)
        elif self.kind == "child":
            subprocess.run([sys.executable, "-c", SPIN.format(1.5)], check=True)
        while self.kind == "busy" and time.process_time() < until:
            pass
        return {"loss": 1.0}

    def save(self):
        return {}

    def load(self, state):
        pass
"""
FILE = """
name: uses
entrypoint: trials:Uses
search:
  metric: loss
  mode: min
  space: {kind: {type: choice, values: [busy, sleeps, child]}}
  sampler: {type: grid}
  scheduler: {type: stages, stages: [{trials: 3, iterations: 2}]}
resources: {provider: local, max_instances: 1, gpus_per_instance: 1, gpus_per_trial: {min: 1, max: 1}}
profile: {seconds_per_iteration: {1: 2}}
constraints: {deadline: 10m}
"""


@pytest.fixture
def folder(command_line: CommandLine) -> CommandLine:
    (command_line.folder / "trials.py").write_text(TRIALS)
    (command_line.folder / "uses.yaml").write_text(FILE)
    return command_line


def run(folder: CommandLine, *words: str) -> Result:
    folder("run", "uses.yaml", "--no-check", *words)
    return folder.result("uses")


def test_a_busy_trial_uses_a_cpu_a_sleeping_one_none_and_children_count(folder: CommandLine) -> None:
    used = {trial.configuration["kind"]: trial.use for trial in run(folder).trials}
    assert {kind: len(stretches) for kind, stretches in used.items()} == {"busy": 1, "sleeps": 1, "child": 1}
    cpu_s = {kind: stretches[0].cpu * stretches[0].seconds for kind, stretches in used.items()}
    assert cpu_s["busy"] == pytest.approx(3.0, abs=0.6)
    assert cpu_s["child"] == pytest.approx(3.0, abs=0.6)
    assert used["sleeps"][0].cpu < 0.15
    assert all(stretches[0].memory_bytes > 10**7 for stretches in used.values())
    assert all(stretches[0].gpu is None for stretches in used.values())


def test_a_gang_of_a_busy_and_a_sleeping_worker_has_the_mean_of_both(folder: CommandLine) -> None:
    two = ("resources.gpus_per_instance=2", "resources.gpus_per_trial={min: 2, max: 2}")
    words = (*two, "profile={seconds_per_iteration: {2: 2}}", "search.space.kind.values=[busy]")
    stages = "search.scheduler.stages=[{trials: 1, iterations: 2}]"
    (trial,) = run(folder, *(word for each in (*words, stages) for word in ("-s", each))).trials
    (stretch,) = trial.use
    assert 2 * stretch.cpu * stretch.seconds == pytest.approx(3.0, abs=0.6), "CPU seconds of both"
