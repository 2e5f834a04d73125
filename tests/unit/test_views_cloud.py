"""What a run on spot instances tells: what was bought, what was taken away, and what that cost."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor.core.state import Job
from rubberband.executor.result.result import Result
from rubberband.executor.virtual.backend import Faults
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Spot
from rubberband.values.plan import Plan, StagePlan
from rubberband.views.live.view import summary
from rubberband.views.report.page import render_html
from rubberband.views.report.tables import incidents, purchases
from tests.builders.results import a_job, a_result, render
from tests.builders.watching import pictures, told


def spot_job() -> Job:
    job = a_job()
    offer = dataclasses.replace(job.offer, spot=Spot(price_usd_per_hour=0.12, interruptions_per_hour=0.05))
    chosen = (
        StagePlan(instances=3, gpus_per_trial=1, market="spot"),
        StagePlan(instances=2, gpus_per_trial=1, market="spot"),
        StagePlan(instances=1, gpus_per_trial=2),
    )
    plan = Plan(stages=chosen)
    prediction = predict(job.stages, plan, job.profile, offer)
    return dataclasses.replace(job, offer=offer, plan=plan, prediction=prediction)


TAKEN = Faults(
    fates={
        "i-001": InstanceFaults(price_usd_per_hour=0.13),
        "i-002": InstanceFaults(ends_after_s=20.0, preempted=True),
        "i-003": InstanceFaults(ends_after_s=31.0, preempted=True, notice_s=1.0),
    }
)


def result(faults: Faults = TAKEN) -> Result:
    return a_result(spot_job(), faults)


def test_the_lines_name_market_price_and_what_is_taken_away() -> None:
    text = told(spot_job(), TAKEN)
    assert "launching 3 on spot: 0 -> 3 instances" in text
    assert "i-001 ready after 47s (1 of 3 instances): spot at 0.13 USD/h" in text
    assert "i-002 PREEMPTED (taken away by the provider): 3 -> 2 instances; trials 2, 3 will resume" in text
    assert "i-003 will be taken away soon; trials 6, 7 will move" in text
    assert "i-003 PREEMPTED (taken away by the provider); trials 6, 7 will resume from the last checkpoint" in text
    assert "stage 2: 1 trial x 4 iterations; releasing " in text


def test_the_live_view_counts_what_is_on_spot_and_what_was_taken_away() -> None:
    lines = [str(line) for at, progress in pictures(spot_job(), TAKEN) for line in summary(progress, at)]
    clouds = list(dict.fromkeys(line for line in lines if line.startswith("cloud")))
    assert clouds[0] == "cloud    3 on spot"
    assert "cloud    2 on spot; interrupted 2 times" in clouds
    assert clouds[-1] == "cloud    interrupted 2 times"
    assert not any(line.startswith("cloud") for at, p in pictures(a_job()) for line in map(str, summary(p, at)))


def test_the_report_lists_what_was_bought_and_what_interruptions_cost() -> None:
    found = result()
    table = purchases(found)
    assert {(row[1], row[4]) for row in table.rows} == {("spot", "0.1200 - 0.1300"), ("on demand", "0.3600")}
    assert sum(int(row[0]) for row in table.rows) == sum(i.running_s is not None for i in found.instances)
    assert [(row[0], row[1]) for row in incidents(found).rows] == [("i-002", "PREEMPTED"), ("i-003", "PREEMPTED")]
    note = "Interrupted 2 times, 4 iterations done again; that is no failure of a trial."
    assert note in incidents(found).notes
    assert note in render(found)
    assert "PREEMPTED" in render_html(found)
    assert all(trial.failures == 0 for trial in found.trials)


def test_the_bill_beside_instances_is_the_heads_machine() -> None:
    job = spot_job()
    job = dataclasses.replace(job, offer=dataclasses.replace(job.offer, head_price_usd_per_hour=36.0))
    found = a_result(job, Faults())
    assert found.head_cost_usd > 0.0
    assert sum(one.cost_usd for one in found.instances) + found.head_cost_usd == pytest.approx(found.actual_cost_usd)
    assert [line.line for line in found.bill] == ["instances", "head node"]
    assert sum(line.usd for line in found.bill) == pytest.approx(found.actual_cost_usd)
    assert "head node" in render(found)
    assert "The bill" not in render(result())


def test_a_run_of_one_kind_of_instance_on_demand_says_nothing_of_purchases() -> None:
    assert purchases(a_result(a_job(), Faults())).rows == ()
