"""The simulation agrees with the executor's virtual runs, and what the planner tells agrees with the simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rubberband.executor import Job, brackets_of
from rubberband.planner.exact.model import predict
from rubberband.spec.schedulers import sha
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.judge.jobs import KINDS, planned_job
from tests.judge.simulation import simulate
from tests.judge.verdict import agreement_of, both, verdict_of
from tests.judge.virtual import plain, virtual_runs

PROFILE = Profile(seconds_per_iteration={1: 40.0, 2: 22.0, 4: 12.0, 8: 7.0}, trial_startup_s=3.0)
OFFER = Offer(
    instance_type="judged",
    gpus=4,
    price_usd_per_hour=12.0,
    max_instances=8,
    provision_delay_s=30.0,
    init_delay_s=20.0,
    minimum_billed_s=60.0,
    data_usd_per_instance=0.1,
    head_price_usd_per_hour=0.5,
)


def job_of(stages: tuple[Stage, ...], *choices: tuple[int, int], offer: Offer = OFFER) -> Job:
    """A job without noise; `choices` are instances and GPUs per trial of each stage."""
    plan = Plan(stages=tuple(StagePlan(instances=count, gpus_per_trial=gpus) for count, gpus in choices))
    return Job(
        name="judged",
        stages=stages,
        plan=plan,
        prediction=predict(stages, plan, PROFILE, offer),
        offer=offer,
        profile=PROFILE,
        metric="score",
        mode="max",
        replan=False,
    )


def lanes_of(offer: Offer = OFFER, wide: int = 3) -> Job:
    """Three brackets in two lanes: when the second lane ends, the first one waits for instances, and takes its two."""
    brackets = [sha(8, 1, 4, 2), sha(12, 1, 3, 3), (Stage(trials=3, iterations=7),)]
    choices = [(2, 1), (1, 1), (1, 2), (wide, 1), (1, 1), (2, 4)]
    job = job_of((*brackets[0], *brackets[1], *brackets[2]), *choices, offer=offer)
    return replace(job, brackets=brackets_of(brackets, [(0, 1), (2,)]), lane_instances=(4, 2))


CERTAIN = {
    "waves, shrinking": job_of(sha(9, 1, 9, 3), (1, 1), (1, 1), (1, 4)),
    "growing, and wide gangs": job_of(sha(4, 1, 4, 2), (1, 1), (3, 4), (2, 8)),
    "released before the minimum": job_of(
        sha(8, 1, 2, 4), (2, 1), (1, 4), offer=replace(OFFER, minimum_billed_s=900.0)
    ),
    "functions": job_of(sha(9, 1, 9, 3), (1, 1), (1, 1), (1, 4), offer=replace(OFFER, billing="per_function")),
    "lanes": lanes_of(),
    "a lane that lacks more than another one gives back": lanes_of(wide=4),
    "and for which waiting with it is too dear": lanes_of(replace(OFFER, data_usd_per_instance=0.01), wide=4),
    "lanes of functions": lanes_of(replace(OFFER, billing="per_function")),
}


@pytest.mark.parametrize("job", CERTAIN.values(), ids=CERTAIN.keys())
def test_it_takes_and_costs_what_the_executor_does(job: Job) -> None:
    found, seen = both(job, 1, 1, "certain")
    assert found.time_s == pytest.approx(seen.time_s)
    assert found.cost_usd == pytest.approx(seen.cost_usd)


@pytest.mark.parametrize("name", [name for name, job in CERTAIN.items() if not job.is_divided])
def test_predictions_without_noise_are_exact(name: str) -> None:
    predicted, found = CERTAIN[name].prediction, simulate(*plain(CERTAIN[name]), draws=1)
    assert found.time_s == pytest.approx(predicted.jct_s)
    assert found.cost_usd == pytest.approx(predicted.cost_usd)


@pytest.mark.parametrize("margin_s", [0.0, 60.0])
@pytest.mark.parametrize(
    "name", ["waves, shrinking", "growing, and wide gangs", "functions", "released before the minimum"]
)
def test_it_needs_the_money_that_the_executor_keeps_back(name: str, margin_s: float) -> None:
    job = replace(CERTAIN[name], release_margin_s=margin_s)
    needed_usd = simulate(*plain(job), draws=1, money=True).needed_usd[0]
    caps_usd = None, needed_usd + 1e-6, needed_usd - 0.01
    free, enough, short = (virtual_runs(replace(job, max_cost_usd=cap_usd), 1) for cap_usd in caps_usd)
    assert enough.is_done
    assert enough.time_s == pytest.approx(free.time_s)
    assert not short.is_done or short.time_s > free.time_s + 1.0


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("kind", "seed", "runs"), [("asha", 6, 60), ("spot", 4, 80), ("hyperband", 0, 80)])
def test_it_agrees_with_the_executor_where_times_vary(kind: str, seed: int, runs: int) -> None:
    assert agreement_of(planned_job(kind, seed), runs, draws=2000).worst < 4.0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_the_executor_on_random_jobs(kind: str) -> None:
    """Three figures of 12 jobs each: the largest of 36 differences is within 4 standard errors."""
    found = [agreement_of(planned_job(kind, seed), 500) for seed in range(12)]
    uninterrupted = [each for each in found if each.left_spot == 0.0]
    assert max(each.worst for each in uninterrupted) < 4.0
    assert np.sqrt(np.mean([each.time_z**2 for each in uninterrupted])) < 1.8


def test_queued_trials_are_as_slow_in_the_next_stage_as_those_that_started_first() -> None:
    """SHA(16,31,2) in waves: .915 of 400,000 independent draws were in time, and .911 of 6,396 virtual runs."""
    job = job_of(sha(16, 1, 31, 2), (2, 1), (1, 1), (1, 1), (1, 2), (1, 4))
    work, terms, noise = plain(replace(job, profile=replace(PROFILE, trial_cv=0.3, iteration_cv=0.1)))
    found = simulate(work, terms, noise, draws=2000)
    assert np.std(found.time_s) / np.mean(found.time_s) > 0.1


SEEDS = [
    ("waves", 1),
    ("waves", 5),
    ("waves", 8),
    ("types", 2),
    ("function", 1),
    ("spot", 0),
    ("spot", 5),
    ("hyperband", 0),
    ("capped", 4),
    ("capped", 8),
    ("asha", 2),
    ("again", 0),
    ("again", 2),
]


@pytest.mark.by_default(4)
@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_predictions_are_what_happens(kind: str, seed: int) -> None:
    """Odds within a point, mean time and cost within 1 %, beyond what sampling explains."""
    verdict = verdict_of(planned_job(kind, seed), 8000)
    assert not verdict.beyond, verdict


@pytest.mark.long
@pytest.mark.parametrize("kind", ["waves", "hyperband", "function", "types"])
def test_predictions_are_what_happens_on_random_jobs(kind: str) -> None:
    """`bench_judge` has the figures of asha, busy spot markets and budgets on them: some are off by more."""
    beyond = [verdict for verdict in (verdict_of(planned_job(kind, seed)) for seed in range(40)) if verdict.beyond]
    assert not beyond
