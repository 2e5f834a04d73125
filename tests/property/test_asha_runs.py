"""Asha on a virtual clock: a run takes and costs what its simulation says, and never breaks an invariant."""

from __future__ import annotations

from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.executor import Faults, Job, State, TrialStatus, VirtualBackend, bill_usd, jct_s
from rubberband.planner.noise.asha_runs import SimulatedRuns
from rubberband.spec.search import asha, sha
from rubberband.values.offer import slots
from rubberband.values.plan import Plan, Prediction, StagePlan, StagePrediction, gang_sizes
from tests.builders.asha_runs import reached, steady_run
from tests.builders.budget import examples
from tests.builders.strategies import faults, offers, profiles, saving
from tests.builders.virtual_runs import run_virtual

CENT, MILLISECOND = 0.005, 0.0005


@st.composite
def asha_jobs(draw: st.DrawFn, most_trials: int = 30) -> Job:
    """A job whose trials climb rungs, with a plan that fits."""
    offer, profile = draw(offers()), draw(profiles())
    eta, grace = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    chain = sha(draw(st.integers(1, most_trials)), grace, grace + draw(st.integers(0, 30)), eta)
    instances = draw(st.integers(1, offer.max_instances))
    sizes = [size for size in gang_sizes(offer.gpus, profile.smallest_gpus, 16) if slots(instances, offer.gpus, size)]
    assume(sizes)
    choice = StagePlan(instances=instances, gpus_per_trial=draw(st.sampled_from(sizes)))
    stages, profile = draw(saving((asha(chain, eta),), profile))
    nothing = StagePrediction(start_s=0.0, provisioning_s=0.0, duration_s=0.0, cost_usd=0.0, slots=1)
    return Job(
        name="climb",
        stages=stages,
        plan=Plan(stages=(choice,)),
        prediction=Prediction(jct_s=0.0, cost_usd=0.0, stages=(nothing,)),
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        replan=False,
    )


def simulated(job: Job, scores: list[list[float]]) -> SimulatedRuns:
    """Simulate a run in which trial `t` reports `scores[rung][t]` at the end of a rung: the highest is the best."""
    merits = [[-score for score in row] for row in scores]
    return steady_run(job.stages[0], job.plan.stages[0], job.profile, job.offer, merits)


def scores_of(job: Job, seed: int) -> list[list[float]]:
    source = Random(seed)
    return [
        [source.choice((0.1, 0.5, source.random())) for _ in range(job.num_trials)] for _ in job.stages[0].rungs.totals
    ]


def backend_of(job: Job, scores: list[list[float]], faults: Faults | None = None) -> VirtualBackend:
    ends = {total: rung for rung, total in enumerate(job.stages[0].rungs.totals)}
    return VirtualBackend(
        job.name,
        job.offer,
        job.profile,
        metric=job.metric,
        faults=faults,
        metric_of=lambda trial, iterations: scores[ends[iterations]][trial] if iterations in ends else 0.0,
    )


@given(asha_jobs(), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(200))
def test_a_run_takes_and_costs_what_its_simulation_says(job: Job, seed: int) -> None:
    scores = scores_of(job, seed)
    controller, _, finish = run_virtual(job, backend=backend_of(job, scores))
    state, expected = controller.state, simulated(job, scores)
    assert finish.outcome == "done"
    assert abs(jct_s(state, state.now) - expected.jct_s[0, 0]) < MILLISECOND
    assert abs(bill_usd(state, state.now) - expected.cost_usd[0, 0]) < CENT
    found = tuple(sum(trial.rung >= rung for trial in state.trials) for rung in range(len(job.stages[0].rungs.totals)))
    assert found == reached(expected, len(job.stages[0].rungs.totals))
    assert any(trial.status is TrialStatus.COMPLETED for trial in state.trials)


def require_that_the_best_of_each_rung_went_on(job: Job, state: State) -> None:
    """What waiting for all of a rung would have promoted was promoted, unless trials failed."""
    for rung, total in enumerate(job.stages[0].rungs.totals[:-1]):
        ended = [trial for trial in state.trials if trial.iterations >= total]
        ended.sort(key=lambda trial: (-trial.reports[total - 1].metrics[job.metric], trial.trial))
        best = ended[: len(ended) // job.stages[0].rungs.reduction_factor]
        assert all(trial.rung > rung for trial in best)


@given(asha_jobs(), faults(), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(75))
def test_faults_are_survived_and_the_best_go_on(job: Job, faults: Faults, seed: int) -> None:
    controller, backend, finish = run_virtual(job, backend=backend_of(job, scores_of(job, seed), faults))
    state = controller.state
    assert all(status.state == "terminated" for status in backend.provider.describe())
    if finish.outcome == "done":
        assert any(trial.status is TrialStatus.COMPLETED for trial in state.trials)
        require_that_the_best_of_each_rung_went_on(job, state)
