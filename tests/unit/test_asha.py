"""Asynchronous halving: its words, its rungs, and its row in an estimate."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rubberband.api.dashboard.experiment_texts import rungs_reached, stage_rows
from rubberband.errors import InfeasibleError, InputError
from rubberband.executor import expected_iterations, summarise
from rubberband.planner import asha as planner
from rubberband.planner import asha_samples
from rubberband.planner.estimates import estimate
from rubberband.planner.noise.asha_draws import Draw, Launches
from rubberband.planner.noise.asha_runs import simulate, simulate_some
from rubberband.planner.problem import JobPlan, Problem
from rubberband.planning.candidates import candidates
from rubberband.planning.feasible import size
from rubberband.spec.experiment import Experiment
from rubberband.spec.schedulers import asha, sha
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile
from rubberband.values.schedulers import Ladder, Rungs
from rubberband.views.charts.allocation import allocation
from rubberband.views.estimate.page import render_estimate
from rubberband.views.report.page import render_html
from rubberband.views.story import story
from tests.builders.experiment_words import words
from tests.builders.plans import plan, plan_job
from tests.builders.virtual_runs import run_virtual

PROFILE = Profile(seconds_per_iteration={1: 40.0, 2: 22.0, 4: 13.0}, trial_startup_s=5.0)
OFFER = Offer(
    instance_type="p3.8xlarge",
    gpus=4,
    price_usd_per_hour=12.24,
    max_instances=8,
    provision_delay_s=30.0,
    init_delay_s=20.0,
)
CHAIN = sha(27, 1, 40, 3)
CLIMB = asha(CHAIN, 3)


def search_of(**scheduler: object) -> Experiment:
    return Experiment(**words(search__scheduler={"type": "asha", **scheduler}))


def test_the_rungs_are_those_of_sha() -> None:
    (only,) = search_of(num_samples=32, grace_period=1, max_t=50).brackets()
    assert only == (Stage(trials=32, iterations=50, ladder=Ladder(totals=(1, 4, 13, 50), reduction_factor=3)),)
    assert only[0].rungs.gains == (1, 3, 9, 37)
    assert only[0].rungs.fewest(32) == tuple(stage.trials for stage in sha(32, 1, 50, 3))


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        ({"num_samples": 9, "grace_period": 51, "max_t": 50}, "grace_period=51 is more than max_t=50; lower grace_per"),
        ({"num_samples": 10_001, "max_t": 50}, "num_samples: 10001 must be at most 10000; lower it"),
        ({"num_samples": "auto", "max_t": "auto"}, "num_samples and max_t are both auto, and one follows from the"),
        ({"num_samples": 9}, "max_t"),
        ({"num_samples": 9, "max_t": 50, "brackets": 3}, "brackets"),
    ],
)
def test_wrong_words(scheduler: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why):
        search_of(**scheduler)


def test_a_trial_is_promoted_once_it_is_among_the_best_of_its_rung() -> None:
    rungs = Rungs(Ladder(totals=(1, 4, 13), reduction_factor=3))
    for trial, loss in enumerate((0.5, 0.9)):
        rungs.record(0, loss, trial)
    assert rungs.promotable() is None
    rungs.record(0, 0.7, 2)
    assert rungs.promotable() == (0, 0)
    assert rungs.promote(0) == 0
    assert rungs.promotable() is None
    rungs.record(0, 0.1, 3)  # better than the promoted one, which still counts in its rung
    assert rungs.promotable() == (0, 3)


def test_the_highest_rung_goes_first() -> None:
    rungs = Rungs(Ladder(totals=(1, 4, 13), reduction_factor=2))
    for trial in range(4):
        rungs.record(0, trial, trial)
        rungs.record(1, -trial, trial)
    assert rungs.promotable() == (1, 3)


@pytest.mark.parametrize("deadline_s", [None, 1800.0, 3600.0])
def test_a_plan_keeps_the_deadline_with_the_confidence(deadline_s: float | None) -> None:
    constraints = PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=8)
    planned = plan((CLIMB,), PROFILE, OFFER, constraints)
    assert planned.odds is not None
    assert planned.odds.p_both >= 0.95
    assert planned.prediction.jct is not None
    assert planned.prediction.jct.p90 > planned.prediction.jct.p10


def test_a_tight_plan_keeps_its_promise_and_has_the_same_odds_at_every_door() -> None:
    noisy = replace(PROFILE, trial_cv=0.2, mean_cv=0.05)
    with pytest.raises(InfeasibleError) as error:
        plan((CLIMB,), noisy, OFFER, PlanningConstraints(deadline_s=700.0, max_gpus_per_trial=8, confidence=0.9))
    for deadline_s in (error.value.shortest_jct_s, 900.0, 1100.0, 1300.0, 1500.0):
        limits = PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=8, confidence=0.9)
        found = plan((CLIMB,), noisy, OFFER, limits)
        assert found.odds is not None
        assert found.odds.p_both >= 0.9
        problem = Problem(brackets=((CLIMB,),), profile=noisy, offer=OFFER, constraints=limits)
        assert planner.planned(problem, found.plan) == found
        others = planner.planned(replace(problem, seed=1), found.plan)  # samples that have not chosen it
        assert others.odds is not None
        assert others.odds.p_both == pytest.approx(found.odds.p_both, abs=0.03)
        assert others.prediction.cost_usd == pytest.approx(found.prediction.cost_usd, rel=0.02)


@pytest.mark.parametrize(
    ("choice", "lives_s", "jct_s", "billed_s"),
    [
        pytest.param((2, 1), None, 110.0, 2 * 80.0, id="on demand"),
        pytest.param((3, 2), None, 170.0, 2 * 140.0 + 80.0, id="one of three is idle, and held until all have begun"),
        pytest.param((2, 1), 100.0, 110.0, 2 * 80.0, id="not lost"),
        pytest.param((2, 1), 55.0, 185.0, 2 * (55.0 + 60.0), id="lost in its fourth iteration"),
        pytest.param((2, 1), 10.0, 170.0, 2 * (10.0 + 90.0), id="lost before it was ready"),
    ],
)
def test_a_lost_instance_is_replaced_and_its_trial_goes_on_from_its_checkpoint(
    choice: tuple[int, int], lives_s: float | None, jct_s: float, billed_s: float
) -> None:
    """Two trials of 6 x 10 s. Instances run after 30 s and are ready 20 s later; replacements after 40 s and 30 s."""
    stage = Stage(trials=2, iterations=6, ladder=Ladder(totals=(6,), reduction_factor=3))
    spot = Spot(price_usd_per_hour=3.6, interruptions_per_hour=1.0)
    offer = Offer(instance_type="x", gpus=1, price_usd_per_hour=3.6, max_instances=3, minimum_billed_s=0.0, spot=spot)
    lives = np.array([[lives_s or 1e9]] * 2 + [[1e9]] * 2)
    launches = Launches(
        provision_s=np.full((4, 1), 40.0), init_s=np.array([[20.0]] * 2 + [[30.0]] * 2), lives_s=lives, longer_s=0.0
    )
    draw = Draw(
        ranks=np.arange(2).reshape(1, 1, 2),
        provision_s=np.array([30.0]),
        init_s=np.array([20.0]),
        slow=np.array([0.5]),
        launches=None if lives_s is None else launches,
    )
    market = "on_demand" if lives_s is None else "spot"
    plan = StagePlan(instances=choice[0], gpus_per_trial=choice[1], market=market)
    runs = simulate(stage, [plan], Profile(seconds_per_iteration={1: 10.0, 2: 10.0}), offer, draw)
    assert runs.jct_s[0, 0] == pytest.approx(jct_s)
    assert runs.cost_usd[0, 0] == pytest.approx(0.001 * billed_s)


def test_equal_seeds_give_equal_plans_and_others_other_samples() -> None:
    constraints = PlanningConstraints(deadline_s=3600.0, max_gpus_per_trial=8)
    first, again, other = (plan((CLIMB,), PROFILE, OFFER, constraints, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.prediction.jct != other.prediction.jct


def test_no_plan_names_the_limit_and_the_nearest() -> None:
    with pytest.raises(InfeasibleError, match=r"deadline 1m cannot be met with confidence 0\.95: the shortest plan"):
        plan((CLIMB,), PROFILE, OFFER, PlanningConstraints(deadline_s=60.0, max_gpus_per_trial=8))
    with pytest.raises(InfeasibleError, match=r"max_cost 0\.10 USD cannot be kept with confidence 0\.95"):
        plan((CLIMB,), PROFILE, OFFER, PlanningConstraints(max_cost_usd=0.1, max_gpus_per_trial=8))


def test_spot_is_bought_where_it_is_cheaper() -> None:
    spot = Spot(price_usd_per_hour=4.0, interruptions_per_hour=0.05, restart_s=60.0)
    offer = Offer(instance_type="p3.8xlarge", gpus=4, price_usd_per_hour=12.24, max_instances=8, spot=spot)
    planned = plan((CLIMB,), PROFILE, offer, PlanningConstraints(max_gpus_per_trial=4))
    assert planned.plan.stages[0].market == "spot"


def test_spot_comes_first_where_the_objective_is_time() -> None:
    offer = replace(OFFER, spot=Spot(price_usd_per_hour=4.0, interruptions_per_hour=0.5, restart_s=60.0))
    found = plan((CLIMB,), PROFILE, offer, PlanningConstraints(max_gpus_per_trial=4), objective="min_time")
    assert found.plan.stages[0].market == "spot"


def test_estimates_show_the_other_scheduler_beside() -> None:
    limits = PlanningConstraints(deadline_s=7200.0, max_gpus_per_trial=4)
    problem = Problem(brackets=[CHAIN], offer=OFFER, profile=PROFILE, constraints=limits)
    with_sync = estimate([problem], clock=time.perf_counter, other_scheduler=("asha", (CLIMB,)))
    without = estimate([replace(problem, brackets=[(CLIMB,)])], clock=time.perf_counter, other_scheduler=("sha", CHAIN))
    (row,) = [one for one in with_sync.options if one.scheduler]
    assert (row.scheduler, row.job is not None) == ("asha", True)
    assert [one["scheduler"] for one in with_sync.to_json()["options"] if "scheduler" in one] == ["asha"]
    assert "static" in with_sync.baselines
    (other,) = without.options
    assert other.scheduler == "sha"
    assert other.job is not None
    assert with_sync.job is not None
    assert other.job.prediction == with_sync.job.prediction


def test_the_row_beside_is_the_same_whatever_was_asked_before() -> None:
    def row(deadline_s: float, profile: Profile = PROFILE) -> JobPlan | None:
        limits = PlanningConstraints(deadline_s=deadline_s, max_gpus_per_trial=4)
        other = ("asha", (CLIMB,))
        problem = Problem(brackets=[CHAIN], offer=OFFER, profile=profile, constraints=limits)
        return estimate([problem], clock=time.perf_counter, other_scheduler=other).options[-1].job

    slower = replace(PROFILE, trial_startup_s=30.0)
    asked = [row(7200.0), row(3000.0), row(3000.0, slower)]
    assert asked[1] != asked[2]
    limits = PlanningConstraints()
    for seed in range(1, 6):  # the samples of these take the place of what was asked
        other = Problem(brackets=((CLIMB,),), offer=OFFER, profile=PROFILE, constraints=limits, seed=seed)
        planner.simulations_of(other, planner.QUICK)
    assert [row(3000.0, slower), row(3000.0), row(7200.0)] == asked[::-1]


def test_runs_in_other_worlds_that_are_simulated_together_are_those_simulated_alone() -> None:
    choice = StagePlan(instances=2, gpus_per_trial=1)
    profiles = [replace(PROFILE, **{name: cv}) for name in ("trial_cv", "mean_cv") for cv in (0.0, 0.2)]
    delays = {"init_delay_s": 77.0, "provision_delay_s": 99.0, "price_usd_per_hour": 5.0}
    offers = [OFFER, *(replace(OFFER, **{name: value}) for name, value in delays.items())]
    worlds = [(PROFILE, offer) for offer in offers] + [(profile, OFFER) for profile in profiles]
    for world, found in zip(worlds, asha_samples.simulated_beside(CLIMB, choice, worlds, seed=3), strict=True):
        runs = asha_samples.Simulations(CLIMB, *world, 3)
        (alone,) = runs.figures([choice], runs.few)
        assert found.mean == pytest.approx(alone.mean)


def test_threads_that_ask_at_the_same_time_get_the_samples_that_one_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(brackets=((CLIMB,),), profile=PROFILE, offer=OFFER, constraints=PlanningConstraints())
    choice, meet = [StagePlan(instances=2, gpus_per_trial=1)], threading.Barrier(2)
    (alone,) = planner.simulations_of(problem).figures(choice, 40)

    def simulated(*job: Any) -> Any:
        with suppress(threading.BrokenBarrierError):  # one that waits for the other simulates alone
            meet.wait(0.2)
        return simulate_some(*job)

    monkeypatch.setattr(asha_samples, "simulate_some", simulated)
    runs = planner.simulations_of(problem)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: runs.figures(choice, 20), range(2)))
    (found,) = runs.figures(choice, 40)
    assert found.jct_s.tolist() == alone.jct_s.tolist()


def test_a_given_plan_is_predicted() -> None:
    problem = Problem(brackets=((CLIMB,),), profile=PROFILE, offer=OFFER, constraints=PlanningConstraints())
    best = plan((CLIMB,), PROFILE, OFFER, PlanningConstraints(max_gpus_per_trial=4))
    assert planner.planned(problem, best.plan).prediction.cost_usd == best.prediction.cost_usd


@pytest.mark.parametrize("auto", ["num_samples", "max_t"])
def test_it_is_sized_to_the_limits(auto: str) -> None:
    scheduler = {"type": "asha", "num_samples": 9, "max_t": 9, auto: "auto"}
    resources = {"provider": "virtual", "instance_type": "p3.8xlarge", "max_instances": 2}
    asked = Experiment(**words(search__scheduler=scheduler, constraints__deadline="12m", resources=resources))
    found, sized = size(asked, candidates(asked, PROFILE, 0.0))
    assert found.key == auto
    assert found.number is not None
    job = plan_job(sized, PROFILE)
    assert job.deadline_s == 720.0
    with pytest.raises(InfeasibleError):
        plan_job(asked.sized(found.key, found.number + 1), PROFILE)


def test_its_views_have_rungs_and_no_sync() -> None:
    experiment = search_of(num_samples=9, max_t=9)
    job = plan_job(experiment, PROFILE)
    state = run_virtual(job)[0].state
    result = summarise(state, {"configurations": experiment.configurations()}, state.now)
    drawn = allocation(result)
    assert drawn is not None
    names = [bar["name"] for bar in drawn["data"]]
    assert [f"rung {rung}" for rung in range(3)] == [name for name in names if name.startswith("rung")]
    (row,) = stage_rows(result, expected_iterations(state))
    assert row.share == 1.0
    assert row.iterations == f"{sum(trial.iterations for trial in result.trials)} of {expected_iterations(state)}"
    assert [entry.what for entry in story(result)] == ["end of the search"]
    assert rungs_reached(result).startswith("Trials that reached each rung: 9 > ")
    assert "SYNC" not in render_html(result)


def test_a_page_of_its_estimate_names_no_stage_and_no_elasticity() -> None:
    limits = PlanningConstraints(deadline_s=7200.0, max_gpus_per_trial=4)
    problem = Problem(brackets=[(CLIMB,)], offer=OFFER, profile=PROFILE, constraints=limits)
    found = estimate([problem], clock=time.perf_counter, with_frontier=True)
    assert found.to_json()["scheduler"] == "asha"
    page = render_estimate(found, ["x"], [])
    assert "elastic" not in page.split("</script>", 1)[1]
    assert "from stage to stage" not in page


def test_limits_that_allow_more_than_asha_may_have_are_refused() -> None:
    scheduler = {"type": "asha", "num_samples": "auto", "max_t": 1}
    resources = {"provider": "virtual", "instance_type": "p3.8xlarge", "max_instances": 100}
    asked = Experiment(**words(search__scheduler=scheduler, constraints__deadline="100d", resources=resources))
    with pytest.raises(InputError, match="the limits allow more than 10,000"):
        size(asked, candidates(asked, Profile(seconds_per_iteration={1: 0.01}), 0.0))
