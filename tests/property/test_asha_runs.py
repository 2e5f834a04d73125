"""Asha on a virtual clock: a run takes and costs what its simulation says, and never breaks an invariant."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.executor import Faults, Job, State, TrialStatus, VirtualBackend, bill_usd, jct_s
from rubberband.planner.noise.asha_runs import SimulatedRuns
from rubberband.spec.schedulers import asha, sha
from rubberband.values.offer import slots
from rubberband.values.plan import Plan, Prediction, StagePlan, StagePrediction, gang_sizes
from tests.builders.asha_runs import reached, steady_run
from tests.builders.budget import examples
from tests.builders.strategies import faults, offers, profiles, saving
from tests.builders.virtual_runs import run_virtual

CENT, MILLISECOND = 0.005, 0.0005


@st.composite
def asha_jobs(draw: st.DrawFn, most_trials: int = 30, repeated: tuple[int, ...] = (1,)) -> Job:
    """A job whose trials climb rungs, with a plan that fits; `repeated` are the repeats that it may have."""
    offer, profile = draw(offers()), draw(profiles())
    eta, grace = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    chain = sha(draw(st.integers(1, most_trials)), grace, grace + draw(st.integers(0, 30)), eta)
    instances = draw(st.integers(1, offer.max_instances))
    sizes = [size for size in gang_sizes(offer.gpus, profile.smallest_gpus, 16) if slots(instances, offer.gpus, size)]
    assume(sizes)
    choice = StagePlan(instances=instances, gpus_per_trial=draw(st.sampled_from(sizes)))
    repeats = draw(st.sampled_from(repeated))
    climb = asha(chain, eta)
    assert climb.ladder is not None
    climb = replace(climb, trials=repeats * climb.trials, ladder=replace(climb.ladder, repeats=repeats))
    stages, profile = draw(saving((climb,), profile))
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
        repeats=repeats,
    )


def simulated(job: Job, scores: list[list[float]]) -> SimulatedRuns:
    """Simulate a run in which trial `t` reports `scores[rung][t]` at the end of a rung: the highest is the best."""
    merits = [[-score for score in row] for row in scores]
    return steady_run(job.stages[0], job.plan.stages[0], job.profile, job.offer, merits)


def scores_of(job: Job, seed: int) -> list[list[float]]:
    """Return scores of every trial in every rung; those of a configuration's repeats are alike."""
    source, configurations = Random(seed), job.num_trials // job.repeats
    every = [
        [source.choice((0.1, 0.5, source.random())) for _ in range(configurations)] for _ in job.stages[0].rungs.totals
    ]
    return [[score for score in row for _ in range(job.repeats)] for row in every]


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


@given(asha_jobs(most_trials=12, repeated=(2, 3)), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(100))
def test_a_run_with_repeats_takes_what_its_simulation_says(job: Job, seed: int) -> None:
    scores = scores_of(job, seed)
    controller, _, finish = run_virtual(job, backend=backend_of(job, scores))
    state, expected = controller.state, simulated(job, scores)
    assert finish.outcome == "done"
    assert abs(jct_s(state, state.now) - expected.jct_s[0, 0]) < MILLISECOND
    assert abs(bill_usd(state, state.now) - expected.cost_usd[0, 0]) < 0.05 * max(1.0, expected.cost_usd[0, 0])
    rungs = [
        [trial.rung for trial in state.trials[at : at + job.repeats]] for at in range(0, job.num_trials, job.repeats)
    ]
    assert all(len(set(row)) == 1 for row in rungs)
    assert [row[0] for row in rungs] == list(expected.rungs[0, 0, :: job.repeats])


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
    numbers = range(0, job.num_trials, job.repeats)
    every = [state.trials[number : number + job.repeats] for number in numbers]
    left = [[one for one in repeats if one.status is not TrialStatus.FAILED] or repeats[:1] for repeats in every]
    for rung, total in enumerate(job.stages[0].rungs.totals[:-1]):
        ended = [repeats for repeats in left if all(trial.iterations >= total for trial in repeats)]
        ended.sort(key=lambda repeats: (-repeats[0].reports[total - 1].metrics[job.metric], repeats[0].trial))
        best = ended[: len(ended) // job.stages[0].rungs.reduction_factor]
        assert all(trial.rung > rung for repeats in best for trial in repeats)


@given(asha_jobs(repeated=(1, 1, 2, 3)), faults(), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(75))
def test_faults_are_survived_and_the_best_go_on(job: Job, faults: Faults, seed: int) -> None:
    controller, backend, finish = run_virtual(job, backend=backend_of(job, scores_of(job, seed), faults))
    state = controller.state
    assert all(status.state == "terminated" for status in backend.provider.describe())
    if finish.outcome == "done":
        assert any(trial.status is TrialStatus.COMPLETED for trial in state.trials)
        require_that_the_best_of_each_rung_went_on(job, state)
