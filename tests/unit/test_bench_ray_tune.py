"""The benchmark that compares this package with Ray Tune."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rubberband.cloud.ray_head.instance import Record, save
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from tests.bench.bench_ray_tune import Iteration, Run, held_s, kept, metered, planned, reported, table

OFFER = Offer(instance_type="big", gpus=4, price_usd_per_hour=3600.0, max_instances=2, minimum_billed_s=10.0)
PROFILE = Profile(seconds_per_iteration={1: 6.0, 2: 3.0})


def iteration(trial: int, number: int, gpus: int = 1, loss: float = 1.0) -> Iteration:
    return Iteration(trial=trial, iteration=number, gpus=gpus, loss=loss)


def measured(contender: str = "asha", outcome: str = "done", time_s: float = 25.0, done: int = 2) -> Run:
    iterations = [iteration(0, number + 1, loss=1.0 / (number + 1)) for number in range(done)]
    return metered(contender, outcome, time_s, [20.0, 5.0], iterations, offer=OFFER, profile=PROFILE)


def test_the_bill_has_the_minimum_and_the_trained_share_is_of_what_was_paid() -> None:
    run = measured()
    assert run.cost_usd == pytest.approx(20.0 + 10.0)
    assert run.training_share == pytest.approx(2 * 6.0 / (4 * 30.0))
    assert (run.iterations, run.best_loss) == (2, 0.5)


def test_an_iteration_that_is_done_again_counts_once() -> None:
    done = [iteration(0, 1), iteration(0, 2, gpus=2), iteration(0, 2, gpus=1)]
    run = metered("asha", "done", 1.0, [30.0], done, offer=OFFER, profile=PROFILE)
    assert run.iterations == 2
    assert run.training_share == pytest.approx((6.0 + 2 * 3.0) / 120.0)


def test_a_run_without_an_instance_costs_nothing() -> None:
    run = metered("asha", "not finished within 5 s", 5.0, [], [], offer=OFFER, profile=PROFILE)
    assert (run.cost_usd, run.training_share, run.iterations, run.best_loss) == (0.0, 0.0, 0, None)


def test_only_instances_that_ran_are_held(tmp_path: Path) -> None:
    folder = tmp_path / "instances"
    folder.mkdir()
    for name, running_at in (("i-001", 12.0), ("i-002", None)):
        record = Record(
            name=name,
            experiment="e",
            directory=str(tmp_path),
            command=("true",),
            temp_dir="",
            devices=(),
            address="",
            requested_at=10.0,
            running_at=running_at,
            ended_at=15.0,
        )
        save(folder / f"{name}.json", record, 15.0)
    assert held_s(tmp_path) == [3.0]


def test_a_report_says_on_how_many_gpus_each_iteration_was() -> None:
    def busy(start_s: float, end_s: float, gpus: int) -> list[dict[str, float]]:
        return [{"trial": 3, "start_s": start_s, "end_s": end_s, "gpu": gpu} for gpu in range(gpus)]

    report = {
        "metric": "loss",
        "busy": busy(0.0, 10.0, 1) + busy(10.0, 30.0, 2),
        "trials": [{"trial": 3, "curve": [[10.0, 1, {"loss": 0.9}], [20.0, 2, {"loss": 0.8}]]}],
    }
    assert reported(report) == [iteration(3, 1, loss=0.9), iteration(3, 2, gpus=2, loss=0.8)]


def test_the_table_has_medians_with_their_extremes_and_says_what_did_not_finish(tmp_path: Path) -> None:
    runs = [measured(time_s=time_s) for time_s in (20.0, 30.0, 22.0)]
    runs.append(measured("resource-changing", "not finished within 60 s", 60.0, done=0))
    file = tmp_path / "runs"
    file.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
    assert kept(file) == runs
    *_, asha, changing = table(kept(file)).splitlines()
    assert [cell.strip() for cell in asha.split("|")[1:-1]] == [
        "ASHAScheduler, 1 GPU per trial",
        "3",
        "22.0 (20.0 to 30.0)",
        "30.00",
        "10 %",
        "2",
        "0.500",
    ]
    assert "(not finished within 60 s in 1 of 1)" in changing
    assert changing.endswith(" - |")


def test_the_peers_get_a_cluster_as_wide_as_the_plan() -> None:
    experiment, job = planned()
    assert len(experiment.configurations()) == job.stages[0].trials
    assert 1 <= max(stage.instances for stage in job.plan.stages) <= job.offer.max_instances
