"""From an experiment to its backend: what measuring may cost, and what is said before a run. Nothing real is rented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rubberband.adaptive import BatchLimits, GoodputProfile, Throughput
from rubberband.batch import Batch
from rubberband.cloud.local import ray_node
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.folder import ExperimentFolder
from rubberband.executor.session import Setup, local_devices
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.virtual import Faults, VirtualBackend
from rubberband.experiment import Experiment
from rubberband.measuring import MeasuredProfile, measure_profile
from rubberband.offer import Offer
from rubberband.profile import Profile
from rubberband.profile_file import load_profile
from rubberband.tuning import announce_device, plan_job
from tests.adaptive_backend import AdaptiveBackend

PROFILE = Profile(seconds_per_iteration={1: 4.0, 2: 2.5}, trial_startup_s=3.0)


def experiment(constraints: dict[str, Any] | None = None, **resources: Any) -> Experiment:
    """Eight trials; an instance of two GPUs costs 1 USD per 100 s, and is there after no time."""
    return Experiment(
        name="test",
        entrypoint="nosuch:Trial",
        search={
            "space": {"x": {"type": "uniform", "lower": 0, "upper": 1}},
            "scheduler": {"type": "stages", "stages": [{"trials": 8, "iterations": 4}]},
            "metric": "loss",
            "mode": "min",
        },
        constraints=constraints or {},
        resources={
            "provider": "local",
            "gpus_per_instance": 2,
            "gpus_per_trial": {"min": 1, "max": 2},
            "price_per_hour": 36,
            "max_instances": 2,
            "minimum_billed": "0s",
            **resources,
        },
    )


MODEL = GoodputProfile(
    throughput=Throughput(alpha_grad_s=0.02, beta_grad_s=0.001, alpha_local_s=0.01, gamma=2.0),
    noise_scale=300.0,
    samples_per_iteration=640.0,
    limits=BatchLimits(initial=64, max=1024),
)


def measured(
    asked: Experiment, home: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults | None = None
) -> MeasuredProfile:
    """What is measured on a virtual clock in place of the local provider."""

    def make_backend(_folder: object, setup: Setup, offer: Offer, metric: str) -> VirtualBackend:
        if setup.batch is not None:
            return AdaptiveBackend("test", offer, PROFILE, metric=metric).told_by(MODEL, 500.0)
        return VirtualBackend("test", offer, PROFILE, metric=metric, faults=faults)

    monkeypatch.setattr("rubberband.measuring.make_ray_backend", make_backend)
    entrypoint = Entrypoint.parse("nosuch:Trial", search_path=(home,))
    return measure_profile(asked, entrypoint, ExperimentFolder(home=home, name="test"))


ONE_GPU_S = 3.0 + 4.0 + 3.0 + 3 * 4.0
ALL_S = ONE_GPU_S + 3.0 + 2.5 + 3.0 + 3 * 2.5


def test_without_limits_all_is_measured_and_its_price_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(experiment(provision_delay="1s", init_delay="0s"), tmp_path, monkeypatch)
    assert [point.gpus for point in found.points] == [1, 2]
    assert found.cost_usd == pytest.approx(2 * 0.01 * ALL_S)
    assert not found.stopped_by


def test_a_function_is_billed_for_its_gpus_while_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(experiment(billing="per_function", init_delay="0s"), tmp_path, monkeypatch)
    assert found.cost_usd == pytest.approx(2 * 0.01 * ALL_S)


def test_a_batch_that_adapts_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapting = experiment().model_copy(update={"batch": Batch(policy="goodput")})
    found = measured(adapting, tmp_path, monkeypatch)
    lines = found.lines()
    assert re.fullmatch(
        r"1 GPU: 4\.000 s per iteration \(.*side by side\); a step of 64 in 84 ms, .*1024 in .*", lines[0]
    )
    assert lines[2].startswith("batches of 64 to 1024: noise scale 500, ")
    assert re.fullmatch(
        r"a trial scales to about \d+ GPUs( or more)?, which is extrapolated: 2 were measured", lines[3]
    )
    found.save(tmp_path / "test.profile.json")
    assert load_profile(tmp_path / "test.profile.json").goodput == found.profile.goodput
    job = plan_job(adapting, found.profile)
    assert job.profile.iteration_s(1) < 4.0
    assert plan_job(experiment(), found.profile).profile.iteration_s(1) == pytest.approx(4.0)


@pytest.mark.parametrize("billing", ["per_instance", "per_function"])
def test_measuring_keeps_to_max_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, billing: str) -> None:
    asked = experiment({"max_cost": 1.2}, billing=billing, init_delay="30s")
    found = measured(asked, tmp_path, monkeypatch)
    assert [point.gpus for point in found.points] == [1]
    assert found.cost_usd <= 1.2
    assert "beyond 1 GPU nothing was measured: max_cost=1.20 USD is reached; raise it" in found.lines()[-1]
    found.save(tmp_path / "test.profile.json")
    assert list(json.loads((tmp_path / "test.profile.json").read_text())["seconds_per_iteration"]) == ["1"]


def test_measuring_keeps_to_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RubberbandError, match=r"before its first point: deadline \(20s from now\) is reached"):
        measured(experiment({"deadline": "20s"}), tmp_path, monkeypatch)


def test_a_max_cost_that_covers_no_minute_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"max_cost=1\.00 USD does not cover measuring .*at least 1\.20 USD"):
        measured(experiment({"max_cost": 1.0}), tmp_path, monkeypatch)


def test_iteration_timeout_is_the_longest_silence_while_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(failures={(trial, 1): "hung" for trial in range(8)})
    with pytest.raises(RubberbandError, match="took more than 7 s"):
        measured(experiment({"iteration_timeout": "7s"}), tmp_path, monkeypatch, faults)


@pytest.mark.parametrize(("gpus", "shared_out"), [(0, 0), (1, 0), (3, 0), (4, 4), (8, 8)])
def test_gpus_that_are_not_used_are_told(monkeypatch: pytest.MonkeyPatch, gpus: int, shared_out: int) -> None:
    devices = tuple(str(gpu) for gpu in range(gpus))
    monkeypatch.setattr(ray_node, "real_gpus", lambda: devices)
    offer = Offer(instance_type="local", gpus=2, price_usd_per_hour=1.0, max_instances=2)
    assert local_devices(offer)[0] == devices[:shared_out]
    lines: list[str] = []
    announce_device(experiment(), lines.append)
    if 0 < gpus < 4:
        assert f"are 4 GPUs and this machine has {gpus}; lower resources.max_instances" in lines[0]
    else:
        assert lines == []
