"""Programs without checkpoints: each start trains all earlier iterations again, in plans as in runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import Controller, Event, Job, VirtualBackend, bill_usd, forecast
from rubberband.planner.exact.model import run_s
from rubberband.planner.planning import plan as planned
from rubberband.planner.problem import JobPlan, Problem
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas
from rubberband.planning.prices_and_quotas import answer
from rubberband.running.first_file import TrialFindings, text_of
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import parse_experiment
from rubberband.spec.schedulers import asha, sha
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import PlanningConstraints, Stage, repeating
from rubberband.values.profile import Profile
from rubberband.views.estimate.tables import screen_tables
from tests.builders.budget import examples
from tests.builders.strategies import offers, profiles, stage_lists
from tests.builders.virtual_runs import jct_s, run_virtual

OFFER = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.6, max_instances=4)
SAVES = Profile(seconds_per_iteration={1: 10.0}, trial_startup_s=2.0)
BEGINS_AGAIN = replace(SAVES, resumes=False)
STAGES = sha(8, 1, 4, 2)


def problem(profile: Profile, stages: tuple[Stage, ...] = STAGES, offer: Offer = OFFER, **more: Any) -> Problem:
    limits = PlanningConstraints(max_gpus_per_trial=8, min_gpus_per_trial=profile.smallest_gpus)
    return Problem(brackets=(stages,), profile=profile, offer=offer, constraints=limits, **more)


def plan_of(asked: Problem) -> JobPlan:
    found = planned(asked)
    assert isinstance(found, JobPlan)
    return found


def job(profile: Profile, **changes: Any) -> Job:
    """The cheapest plan of the profile as a job."""
    asked = problem(profile)
    found = plan_of(asked)
    words = {"name": "again", "metric": "score", "mode": "max", "replan": False, "offer": OFFER, "profile": profile}
    stages, plan, prediction = found.lanes[0].stages, found.plan, found.prediction
    return Job(**{**words, "stages": stages, "plan": plan, "prediction": prediction, **changes})


def test_a_stage_has_the_iterations_of_all_before_it() -> None:
    assert [(stage.iterations, stage.work) for stage in STAGES] == [(1, 1), (2, 2), (1, 1)]
    again = repeating(STAGES)
    assert [(stage.iterations, stage.work) for stage in again] == [(1, 1), (2, 3), (1, 4)]
    assert repeating(again[1:]) == again[1:]
    (climb,) = repeating((asha(STAGES, 2),))
    assert (climb.rungs.gains, climb.rung_work) == ((1, 2, 1), (1, 3, 4))


def test_a_run_takes_and_costs_what_was_planned_and_its_forecast_is_exact_all_along() -> None:
    asked, seen = job(BEGINS_AGAIN), list[float]()

    def look(_event: Event, controller: Controller) -> None:
        if controller.state.stages:
            seen.append(forecast(controller.state, controller.state.now).jct_s)

    controller, _, finish = run_virtual(asked, observers=[look])
    assert finish.outcome == "done"
    assert jct_s(controller.state) == pytest.approx(asked.prediction.jct_s)
    assert bill_usd(controller.state, controller.state.now) == pytest.approx(asked.prediction.cost_usd)
    assert seen == pytest.approx([asked.prediction.jct_s] * len(seen))
    assert asked.prediction.cost_usd > 1.2 * job(SAVES).prediction.cost_usd


@pytest.mark.parametrize(("told", "is_so"), [(True, False), (False, True)])
def test_a_run_that_sees_otherwise_plans_its_rest_by_that_and_says_so(told: bool, is_so: bool) -> None:
    asked = job(replace(SAVES, resumes=told), replan=True)
    backend = VirtualBackend("again", OFFER, replace(SAVES, resumes=is_so), metric="score")
    controller, _, finish = run_virtual(asked, backend=backend)
    state, first = controller.state, controller.state.decisions[0]
    assert finish.outcome == "done"
    assert state.profile.resumes is is_so
    said = "trials go on from checkpoints" if is_so else "trials train 1 iteration again, without a checkpoint"
    assert said in first.reason
    assert first.jct_s == pytest.approx(jct_s(state))
    assert first.jct_s != pytest.approx(asked.prediction.jct_s)


def test_an_interruption_loses_all_of_a_stage() -> None:
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=2.0, checkpoint_iterations=1)
    one_stage, offer = (Stage(trials=4, iterations=8),), replace(OFFER, spot=spot)
    costs = [
        plan_of(problem(profile, stages, offer)).prediction.cost_usd
        for stages in (one_stage, (asha(one_stage, 2),))
        for profile in (SAVES, BEGINS_AGAIN)
    ]
    assert costs[1] > 1.005 * costs[0]
    assert costs[3] > 1.005 * costs[2]


def test_an_interruption_loses_as_much_as_of_a_trial_that_saves_at_its_end_alone() -> None:
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=2.0, checkpoint_iterations=1)
    rarely, often = (replace(OFFER, spot=replace(spot, checkpoint_iterations=every)) for every in (8, 1))
    stage = Stage(trials=4, iterations=8)
    saves_s = run_s(stage, 1, SAVES, rarely, "spot")
    assert run_s(replace(stage, repeats=0), 1, BEGINS_AGAIN, often, "spot") == pytest.approx(saves_s)
    assert run_s(stage, 1, SAVES, often, "spot") < saves_s


@given(offers(), profiles(), stage_lists(), st.booleans())
@settings(deadline=None, max_examples=examples(60))
def test_it_is_never_cheaper_nor_faster_and_the_same_in_one_stage(
    offer: Offer, profile: Profile, stages: tuple[Stage, ...], climbs: bool
) -> None:
    if offer.gpus * offer.max_instances < profile.smallest_gpus:
        return
    if climbs:
        stages = (asha(sha(stages[0].trials, 1, 9, 3), 3),)
    for objective in ("min_cost", "min_time"):
        saves, again = (
            plan_of(problem(replace(profile, resumes=resumes), stages, offer, objective=objective)).prediction
            for resumes in (True, False)
        )
        pair = (saves.cost_usd, again.cost_usd) if objective == "min_cost" else (saves.jct_s, again.jct_s)
        assert pair[0] <= pair[1] * (1 + 1e-9)
        if len(stages) == 1 and not climbs:
            assert pair[0] == pytest.approx(pair[1])


WORDS: dict[str, Any] = {
    "name": "again",
    "entrypoint": {"command": "python train.py --lr ${lr}", "metrics": "stdout"},
    "search": {
        "space": {"lr": {"type": "uniform", "lower": 0.1, "upper": 0.2}},
        "scheduler": {"type": "sha", "num_samples": 8, "max_t": 4, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "2h"},
    "resources": {"provider": "virtual", "gpus_per_instance": 1, "price_per_hour": 3.6, "max_instances": 4},
    "profile": {"seconds_per_iteration": {1: 10}, "resumes": False},
}


def notes_of(**changes: Any) -> list[str]:
    experiment = Experiment(**{**WORDS, **changes})
    assert experiment.profile is not None
    found = answer(experiment, experiment.profile.to_profile(), PricesAndQuotas(), PlanningOptions(now=0.0))
    shown = screen_tables(found.estimate, found.notes)[0].notes
    return [note for note in shown if note.startswith("checkpoints")]


def test_an_estimate_says_what_checkpoints_would_save() -> None:
    (note,) = notes_of()
    assert note == (
        "checkpoints: the trial saves none, so each stage repeats all earlier iterations. "
        "A few lines of checkpoint would save 0.10 of 0.28 USD; rubberband init --patch train.py shows them."
    )
    (fast,) = notes_of(constraints={"max_cost": 50, "objective": "min_time"})
    assert "would save 40s of 1m30s; " in fast
    (never,) = notes_of(constraints={"max_cost": 0.2})
    assert "would make a plan possible: " in never
    assert notes_of(profile={"seconds_per_iteration": {1: 10}}) == []
    once = {**WORDS["search"], "scheduler": {"type": "none", "num_samples": 8, "max_t": 4}}
    assert notes_of(search=once) == []


@pytest.mark.parametrize(("resumes", "written"), [(False, False), (True, True), (None, True)])
def test_init_writes_what_a_check_has_found(resumes: bool | None, written: bool) -> None:
    found = TrialFindings(
        name="x",
        command=("python", "train.py", "--lr", "${lr}"),
        metrics="stdout",
        space={"lr": ("{type: uniform, lower: 0, upper: 1}", "")},
        metric="loss",
        resumes=resumes,
    )
    profile = parse_experiment(text_of(found, Path("x.yaml")), source="x.yaml").profile
    assert profile.to_profile().resumes is written
