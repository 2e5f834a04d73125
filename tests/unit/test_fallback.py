"""On demand instead of spot within a stage: when, how many, and in which words."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor import Controller, Event, Faults, InstanceRefused, Job, Phase, summarise
from rubberband.executor import held_instances as held
from rubberband.values.plan import Market, Plan
from rubberband.views.live.narration import Narrator
from rubberband.views.report.page import render_html
from rubberband.views.report.tables import purchases
from tests.builders.invariants import validate
from tests.builders.virtual_runs import run_virtual
from tests.harness.crash_cases import job_of

JOB = dataclasses.replace(job_of("spot", "roomy"), release_margin_s=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dry(Faults):
    """No spot from the instance number `dry_from` on."""

    dry_from: int = 1
    sold_out: bool = True

    def instance(self, instance: str, market: Market) -> InstanceFaults:
        """Refused where it is spot."""
        if market == "spot" and int(instance.removeprefix("i-")) >= self.dry_from:
            return InstanceFaults(refused="no spot capacity in us-east-1a", sold_out=self.sold_out)
        return InstanceFaults()


def run(job: Job, faults: Faults) -> tuple[Controller, list[str]]:
    """To its end, with what is told of it."""
    narrator, said = Narrator(job), list[str]()

    def observe(event: Event, controller: Controller) -> None:
        validate(controller)
        said.extend(narrator.lines(event, controller))

    controller, _, _ = run_virtual(job, faults, observers=[observe])
    return controller, said


def test_a_dry_pool_is_left_for_on_demand_within_the_stage() -> None:
    controller, said = run(JOB, Dry())
    state = controller.state
    assert state.outcome == "done"
    markets = [record.market for record in state.instances.values() if record.running_at is not None]
    assert markets == ["on_demand"] * 3
    assert any("on demand instead of spot (no spot capacity in us-east-1a)" in line for line in said)
    result = summarise(state, {"configurations": [{}] * 3}, state.now)
    sentence = "3 instances on demand instead of spot: no spot capacity in us-east-1a"
    assert result.instead_of_spot == sentence
    assert f"{sentence}." in purchases(result).notes
    assert f"{sentence}." in render_html(result)


def test_a_refusal_that_is_not_for_want_of_capacity_changes_no_market() -> None:
    controller, _ = run(JOB, Dry(sold_out=False))
    assert {record.market for record in controller.state.instances.values()} == {"spot"}


def test_a_stage_that_is_planned_on_demand_keeps_what_was_bought_instead_of_spot() -> None:
    first, last = JOB.plan.stages
    wider = dataclasses.replace(last, instances=first.instances + 1, market="on_demand")
    kept = list[int]()

    def observe(event: Event, controller: Controller) -> None:
        validate(controller)
        state = controller.state
        if state.stages and state.lanes[0].chosen.market == "on_demand" and state.phase is Phase.TRAINING:
            kept.append(sum(cohort.instances for cohort in held(state.lanes[0], state.now)))

    job = dataclasses.replace(JOB, plan=Plan(stages=(first, wider)), resize_in_stage=False)
    controller, _, _ = run_virtual(job, Dry(), observers=[observe])
    assert controller.state.outcome == "done"
    bought = [record.instead_of_spot for record in controller.state.instances.values() if record.market == "on_demand"]
    assert bought == [True] * first.instances + [False]
    assert set(kept) == {wider.instances}


@pytest.mark.parametrize(("deadline_s", "falls_back"), [(None, False), (1e5, False), (110.0, True)])
def test_with_some_spot_on_demand_is_bought_only_for_the_deadline(deadline_s: float | None, falls_back: bool) -> None:
    controller, _ = run(dataclasses.replace(JOB, deadline_s=deadline_s), Dry(dry_from=2))
    assert controller.state.outcome == "done"
    first_stage = [r for r in controller.state.instances.values() if r.requested_at < 200.0]
    assert any(record.instead_of_spot for record in first_stage) == falls_back


def test_the_cap_forbids_it_and_the_end_names_the_cap_that_would_do() -> None:
    job = dataclasses.replace(JOB, max_cost_usd=JOB.prediction.cost_usd * 1.05)
    controller, _ = run(job, Dry())
    assert all(record.market == "spot" for record in controller.state.instances.values())
    assert "would buy one on demand instead of spot" in controller.state.reason


def test_a_journal_of_a_former_version_falls_back_to_nothing() -> None:
    assert not InstanceRefused(occurred_at=0.0, instance="i-001", reason="").sold_out
