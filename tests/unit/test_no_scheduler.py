"""`scheduler: {type: none}`: each configuration trains once, to its end, and a free slot takes the next one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.api.dashboard.experiment_texts import rungs_reached
from rubberband.errors import InfeasibleError, InputError
from rubberband.executor import Controller, Event, TrialReported, TrialsDrawn, summarise
from rubberband.executor.sampling import draw
from rubberband.planner.estimates import estimate
from rubberband.planner.problem import Problem
from rubberband.planning.candidates import candidates, sampler_notes
from rubberband.planning.feasible import size
from rubberband.spec.experiment import Experiment
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints, Stage
from rubberband.values.profile import Profile
from rubberband.values.schedulers import Ladder
from rubberband.views.report.page import render_html
from tests.builders.experiment_words import words
from tests.builders.plans import plan, plan_job
from tests.builders.virtual_runs import jct_s, run_virtual

PROFILE = Profile(seconds_per_iteration={1: 10.0, 2: 6.0}, trial_startup_s=2.0)
OFFER = Offer(
    instance_type="g4dn.12xlarge",
    gpus=4,
    price_usd_per_hour=3.6,
    max_instances=8,
    provision_delay_s=30.0,
    init_delay_s=30.0,
)
VIRTUAL = {"provider": "virtual", "gpus_per_instance": 4, "price_per_hour": 3.6, "max_instances": 8}


def experiment(num_samples: Any = 50, max_t: Any = 10, **changes: Any) -> Experiment:
    scheduler = {"type": "none", "num_samples": num_samples, "max_t": max_t}
    return Experiment(**words(search__scheduler=scheduler, **{"resources": VIRTUAL, **changes}))


def test_it_is_one_stage_of_one_rung() -> None:
    ladder = Ladder(totals=(10,), reduction_factor=1)
    assert experiment().brackets() == ((Stage(trials=50, iterations=10, ladder=ladder),),)
    assert Experiment(**experiment().to_words()) == experiment()


def test_a_grid_gives_the_number_of_trials() -> None:
    space = {"depth": {"type": "grid", "values": [2, 4, 8]}, "lr": {"type": "grid", "values": [0.1, 0.3]}}
    found = Experiment(**words(search__space=space, search__scheduler={"type": "none", "max_t": 1}))
    assert found.search.sampler.type == "grid"
    assert len(found.configurations()) == 6


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        ({"num_samples": 9}, "scheduler.max_t: is required: the most reports of a trial; write 1 if its code reports"),
        ({"max_t": 9}, "num_samples: is required"),
        ({"num_samples": 9, "max_t": 9, "grace_period": 3}, "grace_period"),
        ({"num_samples": 10_001, "max_t": 9}, "num_samples: 10001 must be at most 10000; lower it"),
        ({"num_samples": "auto", "max_t": "auto"}, "num_samples and max_t are both auto"),
    ],
)
def test_wrong_words_are_refused(scheduler: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Experiment(**words(search__scheduler={"type": "none", **scheduler}))


@settings(deadline=None)
@given(
    trials=st.integers(1, 40),
    max_t=st.integers(1, 5),
    gpus=st.sampled_from([1, 2, 4]),
    most=st.integers(1, 5),
    deadline_s=st.sampled_from([None, 400.0, 900.0]),
)
def test_a_run_takes_and_costs_what_its_plan_says(
    trials: int, max_t: int, gpus: int, most: int, deadline_s: float | None
) -> None:
    resources = {**VIRTUAL, "gpus_per_instance": gpus, "max_instances": most, "provision_delay": 30, "init_delay": 30}
    asked = experiment(trials, max_t, resources=resources, constraints={"deadline": deadline_s})
    try:
        job = plan_job(asked, PROFILE)
    except InfeasibleError:
        assert deadline_s is not None
        return
    state = run_virtual(job)[0].state
    result = summarise(state, {"configurations": asked.configurations()}, state.now)
    assert [trial.iterations for trial in result.trials] == [max_t] * trials
    assert jct_s(state) == pytest.approx(job.prediction.jct_s)
    assert result.actual_cost_usd == pytest.approx(job.prediction.cost_usd)
    assert deadline_s is None or result.actual_jct_s <= deadline_s


def test_instances_go_when_no_trial_is_left_for_them() -> None:
    """50 trials on 28 slots: the 22 of the second wave need 6 of 7 instances."""
    limits = PlanningConstraints(deadline_s=270.0)
    planned = plan(experiment().brackets()[0], PROFILE, OFFER, limits)
    assert planned.plan.stages[0].instances == 7
    assert planned.prediction.jct_s == 60.0 + 2 * 102.0
    held_s = 7 * (30.0 + 102.0) + 6 * 102.0
    assert planned.prediction.cost_usd == pytest.approx(held_s * 0.001)
    assert planned.prediction.jct is None, "nothing varies"
    assert planned.odds is None


def test_times_that_vary_have_odds() -> None:
    planned = plan(experiment().brackets()[0], replace(PROFILE, trial_cv=0.2), OFFER, PlanningConstraints())
    assert planned.prediction.jct is not None
    assert planned.prediction.jct.p90 > planned.prediction.jct.p10
    assert planned.odds is not None


@pytest.mark.parametrize("auto", ["num_samples", "max_t"])
def test_it_is_sized_to_the_limits(auto: str) -> None:
    asked = experiment(**{auto: "auto"}, constraints__deadline="12m")
    found, sized = size(asked, candidates(asked, PROFILE, 0.0))
    assert found.key == auto
    assert found.number is not None
    assert plan_job(sized, PROFILE).prediction.jct_s <= 720.0
    with pytest.raises(InfeasibleError):
        plan_job(asked.sized(found.key, found.number + 1), PROFILE)


def test_tpe_learns_from_each_trial_that_has_ended() -> None:
    one_slot = {**VIRTUAL, "gpus_per_instance": 1, "max_instances": 1}
    asked = experiment(20, 1, search__sampler={"type": "optuna", "seed": 3}, resources=one_slot)
    assert sampler_notes(asked, 1)[0].startswith("sampler: tpe draws at most 10 of the 20 trials")
    job, done, drawn_after = plan_job(asked, PROFILE), [0], list[int]()

    def count(event: Event, _controller: Controller) -> None:
        done[0] += isinstance(event, TrialReported)

    def by_tpe(*about: Any) -> TrialsDrawn:
        drawn_after.append(done[0])
        return draw(asked.search, *about)

    state = run_virtual(job, observers=[count], draw=by_tpe)[0].state
    assert drawn_after == list(range(20))
    assert len(state.sampled_configs) == 20


def test_its_views_name_no_rung_and_no_sync() -> None:
    asked = experiment(9, 3)
    state = run_virtual(plan_job(asked, PROFILE))[0].state
    result = summarise(state, {"configurations": asked.configurations()}, state.now)
    assert rungs_reached(result) == "Trials that began: 9; at their end: 9."
    page = render_html(result)
    assert "SYNC" not in page
    assert "reached each rung" not in page
    found = estimate(
        [Problem(brackets=asked.brackets(), offer=OFFER, profile=PROFILE, constraints=PlanningConstraints())],
        clock=time.perf_counter,
    )
    assert found.to_json()["scheduler"] == "none"
