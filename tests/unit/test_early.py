"""What starts on this machine beside the check of a trial: its leases, its order, and that nothing of it stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.provider import InstanceDescription, InstanceState
from rubberband.cloud.ray_head.instance import lock
from rubberband.errors import ProviderError
from rubberband.executor import ExperimentFolder
from rubberband.executor.run import early
from rubberband.values.plan import Distribution, Prediction, StagePrediction
from tests.builders.jobs import JOB
from tests.builders.sessions import run_spec
from tests.builders.waiting import eventually


@dataclass
class Machine:
    """A provider and a fork server that note what they are asked for."""

    device: str = "cpu"
    breaks: bool = False
    asked: list[str] = field(default_factory=list)
    states: tuple[InstanceState, ...] = ()
    """Of its instances."""
    leases: list[tuple[float, float]] = field(default_factory=list)
    """Instant and length of each lease."""
    is_forking: bool = True
    forks: bool = True
    """Whether the trial is imported, and workers can be forked."""
    clock: Callable[[], float] = time.monotonic

    def ensure_head(self) -> None:
        self.asked.append("head")

    def launch_early(self, instance: str) -> None:
        self.asked.append(instance)

    def renew_lease(self, until: float) -> None:
        now = self.clock()
        self.leases.append((now, until - now))

    def describe(self) -> list[InstanceDescription]:
        return [
            InstanceDescription(instance=f"i-{number}", experiment="test", state=state, requested_at=0.0)
            for number, state in enumerate(self.states)
        ]

    def close(self) -> None:
        if self.breaks:
            raise ProviderError("the disk is full")

    def end_forks(self) -> None:
        self.is_forking = False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(early, "open_provider", lambda request: made)
    server = type("Server", (), {"close": lambda self: made.end_forks(), "forks": lambda self: made.forks})
    monkeypatch.setattr(early, "fork_server_of", lambda *_: server())
    monkeypatch.setattr(early, "_import", lambda: None)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> ExperimentFolder:
    return ExperimentFolder(home=tmp_path, name="test")


def test_the_fork_server_ends_with_a_start_that_no_run_takes_over(machine: Machine, folder: ExperimentFolder) -> None:
    def refused() -> None:
        with early.early_start(folder, run_spec(), JOB):
            assert machine.is_forking
            raise ValueError("the trial does not pass its check")

    with pytest.raises(ValueError, match="does not pass"):
        refused()
    assert not machine.is_forking
    machine.breaks = machine.is_forking = True
    with pytest.raises(ProviderError, match="disk is full"):
        refused()
    assert not machine.is_forking, "also where its instances cannot be ended"


def test_leases_are_renewed_well_before_they_end(
    machine: Machine, folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "_LEASE_S", 5.0)
    with early.early_start(folder, run_spec(), JOB):
        eventually(lambda: len(machine.leases) >= 3, "leases that are renewed")
    (first_at, first_s), *_, (last_at, _) = machine.leases[:3]
    assert first_s == pytest.approx(5.0, abs=0.5)
    assert last_at < first_at + first_s, "one renewal may fail"


@pytest.mark.parametrize(("device", "expected"), [("cpu", ["i-001", "i-002"]), ("cuda", ["head"])])
def test_real_gpus_are_left_to_the_check(
    machine: Machine, folder: ExperimentFolder, device: str, expected: list[str]
) -> None:
    machine.device = device
    with early.early_start(folder, run_spec(), JOB):
        eventually(lambda: len(machine.asked) == len(expected), "what starts")
    assert sorted(machine.asked) == expected


@pytest.mark.parametrize(
    ("states", "forks", "left_s"),
    [
        (("running", "running"), True, 0.0),
        (("running", "running"), False, 30.0),
        (("running", "pending"), True, 26.0),
        (("running", "pending"), False, 30.0),
        ((), True, 30.0),
    ],
)
def test_a_prediction_leaves_out_what_has_passed_of_the_launch(
    machine: Machine, folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch, states: Any, forks: bool, left_s: float
) -> None:
    stage = StagePrediction(start_s=0.0, provisioning_s=30.0, duration_s=100.0, cost_usd=1.0, slots=1)
    job = replace(JOB, prediction=Prediction(jct_s=130.0, cost_usd=1.0, stages=(stage,)))
    machine.states, machine.forks = states, forks
    with early.early_start(folder, run_spec(), JOB) as begun:
        assert begun is not None
        monkeypatch.setattr(early, "elapsed_s", lambda: begun.begun_s + 4.0)
        found = begun.ahead(job)
    assert found.prediction.stages[0].provisioning_s == pytest.approx(left_s)
    assert found.prediction.jct_s == pytest.approx(left_s + 100.0)
    assert found.plan == job.plan


def test_a_killed_start_is_removed_and_a_living_one_stays(folder: ExperimentFolder) -> None:
    folder.instances.mkdir(parents=True)
    with lock(folder.instances / "driver"):
        early.clear(folder)
        assert folder.instances.exists()
    early.clear(folder)
    assert not folder.path.exists()


def test_the_passed_part_of_the_first_launch_brings_all_later_times_nearer() -> None:
    launch = StagePrediction(start_s=0.0, provisioning_s=30.0, duration_s=100.0, cost_usd=1.0, slots=1)
    later = replace(launch, start_s=130.0, provisioning_s=20.0)
    before = Prediction(
        jct_s=250.0, cost_usd=2.0, stages=(launch, later), jct=Distribution.point(250.0), cost=Distribution.point(2.0)
    )

    def seen(prediction: Prediction) -> list[Any]:
        assert prediction.jct is not None
        stages = [(stage.start_s, stage.provisioning_s) for stage in prediction.stages]
        return [prediction.jct_s, *prediction.jct.to_json().values(), *stages]

    assert seen(before.ahead(10.0)) == [*[240.0] * 6, (0.0, 20.0), (120.0, 20.0)]
    whole = before.ahead(float("inf"))
    assert seen(whole) == [*[220.0] * 6, (0.0, 0.0), (100.0, 20.0)], "no more than the launch takes"
    assert (whole.cost_usd, whole.cost) == (2.0, before.cost)
