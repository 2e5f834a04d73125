"""The level of a profile in the file, as the check before a run has measured it on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import Entrypoint, ExperimentFolder
from rubberband.executor.core.job import Job
from rubberband.executor.training.check_findings import TrialCheck
from rubberband.planning.feasible import PricesAndQuotas
from rubberband.running import pace as pacing
from rubberband.running import starting
from rubberband.running.laps import Laps
from rubberband.running.pace import OtherLoad, Pace, paced
from rubberband.running.starting import RunOptions, Start
from rubberband.spec.experiment import Experiment
from rubberband.units import format_instant
from rubberband.values.profile import Profile
from tests.builders.plans import plan_job

PROFILE = Profile(seconds_per_iteration={1: 0.4, 2: 0.25})
ALONE = Pace(iteration_s=0.4, cores=1.0, startup_s=0.0)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "cores", lambda: 2)
    monkeypatch.setattr(pacing, "processors", lambda: 2)
    monkeypatch.setattr(pacing, "_RUN_CORES", 0.0)


def experiment(trials: int = 64, **resources: object) -> Experiment:
    scheduler = {"type": "sha", "num_samples": trials, "grace_period": 1, "max_t": 85, "reduction_factor": 4}
    search = {"space": {"lr": [0.1]}, "scheduler": scheduler, "metric": "loss", "mode": "min"}
    given = {"provider": "local", "max_instances": 2, "gpus_per_trial": {"min": 1, "max": 1}, **resources}
    return Experiment(
        name="paced",
        entrypoint="code:train",
        search=search,
        constraints={"deadline": "10m", "objective": "min_time"},
        resources=given,
        profile={"seconds_per_iteration": {1: 0.4}},
    )


def job(profile: Profile = PROFILE) -> Job:
    return plan_job(experiment(), profile)


@pytest.mark.parametrize(
    ("changes", "others", "expected"),
    [
        ({}, 0.0, None),
        ({"iteration_s": 0.45}, 0.0, None),
        ({"iteration_s": 0.28}, 0.0, "this machine: 0.28 s an iteration, profile 0.4 s; planned as measured here"),
        ({"startup_s": 0.04}, 0.0, None),
        ({"startup_s": 0.2}, 0.0, "this machine: 0.2 s to start a trial, profile 0 s; planned as measured here"),
        ({"iteration_s": 0.28, "cores": 0.0, "startup_s": None}, 9.0, "0.28 s an iteration, profile"),
        ({"iteration_s": 0.2}, 2.0, None),
        ({}, 2.0, r"0.7\d s an iteration \(0.4 s on a core of its own\), profile 0.4 s"),
    ],
)
def test_another_level_is_planned_with_and_said(changes: dict[str, float], others: float, expected: str | None) -> None:
    found = paced(PROFILE, replace(ALONE, **changes), job(), others)
    if expected is None:
        assert found is None
        return
    assert found is not None
    profile, line = found

    assert re.search(expected, line), line
    assert profile.iteration_s(2) / profile.iteration_s(1) == pytest.approx(0.25 / 0.4), "the shape stays"


def test_workers_share_cores_as_far_as_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALONE.beside(2, 0.0) == ALONE.beside(1, 1.0) == 1.0
    assert (ALONE.beside(2, 2.0), ALONE.beside(1, 2.0)) == (2.0, 1.5)
    assert replace(ALONE, cores=0.5).beside(2, 3.0) == 1.5, "half of its time it waits for something else"
    assert replace(ALONE, cores=2.0).beside(2, 0.0) == 2.0, "its own threads share them as well"
    monkeypatch.setattr(pacing, "processors", lambda: 64)
    assert (ALONE.beside(4, 0.0), ALONE.beside(2, 30.0)) == (2.0, 1.0), "a container's quota is its own"
    monkeypatch.setattr(pacing, "cores", lambda: 1)
    assert (ALONE.beside(1, 0.0), ALONE.beside(2, 0.0)) == (1.0, 2.0)


def test_the_driver_and_ray_take_their_share_where_workers_take_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_RUN_CORES", 0.1)
    assert (ALONE.beside(1, 0.0), ALONE.beside(2, 0.0)) == (1.0, pytest.approx(1.05))
    monkeypatch.setattr(pacing, "cores", lambda: 1)
    assert ALONE.beside(1, 0.0) == pytest.approx(1.1)


@given(st.floats(0.01, 100.0), st.floats(0.0, 4.0), st.floats(0.0, 8.0))
def test_the_planned_training_time_is_that_of_the_cores(iteration_s: float, cores: float, others: float) -> None:
    """Each stage of a plan takes as long as its workers need beside each other."""
    pace = Pace(iteration_s=iteration_s, cores=cores, startup_s=None)
    before = job()
    found = paced(PROFILE, pace, before, others)
    if found is None:
        return
    stages = before.prediction.stages
    workers = [min(each.slots, stage.trials) for each, stage in zip(stages, before.stages, strict=True)]
    train_s = [each.duration_s for each in stages]
    longer = [pace.beside(number, others) for number in workers]
    exact_s = sum(each_s / 0.4 * iteration_s * factor for each_s, factor in zip(train_s, longer, strict=True))
    assert sum(train_s) / 0.4 * found[0].iteration_s(1) == pytest.approx(exact_s)


def test_a_measured_profile_and_one_without_single_gpus_stay() -> None:
    fast = replace(ALONE, iteration_s=0.1)
    assert paced(replace(PROFILE, source="file"), fast, job(), 0.0) is None
    assert paced(Profile(seconds_per_iteration={2: 0.4}), fast, job(), 0.0) is None


def test_a_start_that_is_shorter_here_stays_as_it_is_written() -> None:
    assert paced(replace(PROFILE, trial_startup_s=10.0), replace(ALONE, startup_s=0.1), job(), 0.0) is None


def test_times_that_a_model_gives_are_not_corrected() -> None:
    model: Any = object()
    assert paced(replace(PROFILE, goodput=model), replace(ALONE, iteration_s=0.1), job(), 0.0) is None
    assert paced(replace(PROFILE, asynchronous=model), replace(ALONE, iteration_s=0.1), job(), 0.0) is None


def test_the_pace_is_that_of_an_iteration_after_the_first() -> None:
    own = {"iteration": (2.0, 2.0), "restore": (0.1, 0.1), "continue": (0.5, 0.25)}
    assert Pace.of(TrialCheck(kind="TorchTrial", own=own)) == Pace(iteration_s=0.5, cores=0.5, startup_s=0.1)
    assert Pace.of(TrialCheck(kind="function", own=own)) == Pace(iteration_s=0.5, cores=0.5, startup_s=None)
    assert Pace.of(TrialCheck(kind="program", own=own)) is None, "it computes in another process"
    assert Pace.of(TrialCheck(kind="function", own=own, first_extra_s=6.0)) is None, "so does a distributed function"
    del own["continue"]
    assert Pace.of(TrialCheck(kind="TorchTrial", own=own)) is None


def test_programs_of_equal_priority_count_as_load() -> None:
    load = OtherLoad()
    time.sleep(0.3)
    before = load.cores()
    load = OtherLoad()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.0)
        with_one = load.cores()
        busy.kill()
    cores = os.cpu_count()
    assert cores is None or 0.0 < with_one < cores + 1.0, "cores, and no ticks of a clock"
    assert before >= 0.0


BESIDE = """
import os, subprocess, sys, time
from rubberband.executor.training.own_time import own_time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
    try:
        began = time.perf_counter(), time.thread_time(), own_time()
        while time.perf_counter() - began[0] < 1.5: pass
        ended = time.perf_counter(), time.thread_time(), own_time()
    finally:
        other.kill()
began_s = own_time()
time.sleep(0.2)
print(*(after - before for before, after in zip(began, ended)), own_time() - began_s)
"""


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system counts no time in the queue")
def test_a_trial_is_timed_without_the_share_of_another_process_on_its_core() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True, check=True, timeout=60.0)
    wall_s, cpu_s, own_s, asleep_s = map(float, done.stdout.split())
    assert cpu_s < 0.8 * wall_s
    assert cpu_s - 0.05 <= own_s < 0.5 * (cpu_s + wall_s)
    assert asleep_s == pytest.approx(0.2, abs=0.15), "a wait for data is a cost of the trial"


def created(
    asked: Experiment, pace: Pace | None, home: Path, monkeypatch: pytest.MonkeyPatch, check_s: float = 600.0
) -> Job:
    """The job that is run after a check of so long found that pace."""
    now, jobs, entrypoint = [1_800_000_000.0], list[Job](), Entrypoint.parse("code:train")

    def check(*_: Any, **__: Any) -> Pace | None:
        now[0] += check_s
        return pace

    monkeypatch.setattr(starting, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(starting, "check_first", check)
    monkeypatch.setattr(starting, "early_start", lambda *_: nullcontext())
    monkeypatch.setattr(starting, "create", lambda _folder, made, _spec: jobs.append(made))
    folder, prices = ExperimentFolder(home=home, name="paced"), PricesAndQuotas()
    start = Start(asked, entrypoint, folder, RunOptions(), prices, lambda: False, Laps())
    idle: Any = SimpleNamespace(cores=lambda: 0.0)
    with ExitStack() as ending:
        start.create(start.tried(idle, ending))
    return jobs[0]


def test_a_run_is_planned_with_the_level_that_its_check_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual_s = created(experiment(), ALONE, tmp_path, monkeypatch).prediction.jct_s
    slower = created(experiment(), replace(ALONE, iteration_s=0.8), tmp_path, monkeypatch)
    assert slower.profile.iteration_s(1) == pytest.approx(0.8)
    assert slower.prediction.jct_s == pytest.approx(2.0 * usual_s, rel=0.1)


def test_a_check_brings_a_deadline_nearer_that_is_an_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = experiment().model_dump(exclude_unset=True, by_alias=True)
    at = format_instant(datetime.fromtimestamp(1_800_003_600, UTC))
    asked = Experiment(**{**words, "constraints": {"deadline": at, "objective": "min_time"}})
    assert created(asked, None, tmp_path, monkeypatch).deadline_s == pytest.approx(3000.0)
