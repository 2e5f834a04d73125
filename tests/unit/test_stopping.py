"""Rules of `search.stop`: trials and searches that end early, on the virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rubberband.executor import Controller, Job, VirtualBackend, best_trial
from rubberband.executor.core.history import SearchEnd, TrialCut
from rubberband.executor.journal.journal import decode_job, encode_job
from rubberband.planner.exact.model import predict
from rubberband.spec.search import asha, sha
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.stopping import Median, NoImprovement, Patience, StopRules
from tests.builders.jobs import JOB
from tests.builders.memory import MemoryJournal
from tests.builders.virtual_runs import run_virtual
from tests.harness.chaos_cases import asha_prediction


def job_of(*stages: Stage, instances: int = 2, stop: StopRules) -> Job:
    plan = Plan(stages=tuple(StagePlan(instances=instances, gpus_per_trial=1) for _ in stages))
    if stages[0].has_sync:
        prediction = predict(stages, plan, JOB.profile, JOB.offer)
    else:
        prediction = asha_prediction(stages[0], plan.stages[0], JOB.profile, JOB.offer)
    return replace(JOB, stages=stages, plan=plan, prediction=prediction, stop=stop)


def run(job: Job, curves: dict[int, list[float]]) -> Controller:
    backend = VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, metric_of=lambda trial, done: curves[trial][done - 1]
    )
    return run_virtual(job, backend=backend)[0]


def test_a_search_ends_at_the_report_that_reaches_the_target() -> None:
    curves = {trial: [0.1 * (trial + 1)] * 3 for trial in range(4)}
    curves[1] = [0.2, 0.95, 0.3]
    job = job_of(Stage(trials=4, iterations=3), Stage(trials=2, iterations=3), stop=StopRules(target=0.9))
    state = run(job, curves).state
    assert (state.outcome, state.stages[-1].stage) == ("done", 0)
    assert state.reason == "trial 1 reached the target: score=0.95 after 2 iterations (target 0.9)"
    best = best_trial(state)
    assert best is not None
    assert (best.trial, best.iterations, best.checkpoint_iterations) == (1, 2, 2)
    (end,) = state.history.of(SearchEnd)
    assert end.expected_jct_s == pytest.approx(job.prediction.jct_s)
    assert end.expected_cost_usd == pytest.approx(job.prediction.cost_usd)


def test_a_trial_without_an_improvement_ends_and_ranks_with_its_latest_report() -> None:
    curves = {0: [0.5] * 9, 1: [0.1 * i for i in range(1, 10)], 2: [0.3, 0.2, 0.4, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4]}
    job = job_of(Stage(trials=3, iterations=9), stop=StopRules(patience=Patience(iterations=2)))
    state = run(job, curves).state
    assert [(cut.trial, cut.iterations, cut.rule) for cut in state.history.of(TrialCut)] == [
        (0, 3, "patience"),
        (2, 5, "patience"),
    ]
    assert state.stages[0].ranking == (1, 0, 2)


def test_a_trial_that_is_worse_than_the_median_of_the_averages_ends() -> None:
    curves = {trial: [value] * 6 for trial, value in enumerate((0.9, 0.8, 0.7, 0.6))}
    job = job_of(Stage(trials=4, iterations=6), stop=StopRules(median=Median(after=2)))
    cuts = run(job, curves).state.history.of(TrialCut)
    assert {(cut.trial, cut.iterations) for cut in cuts} == {(3, 2)}


@pytest.mark.parametrize("rungs", [True, False])
def test_a_search_ends_after_trials_without_an_improvement(rungs: bool) -> None:
    curves = {trial: [0.9 if trial == 1 else 0.5] * 9 for trial in range(27)}
    stage = asha(sha(27, 1, 9, 3), 3) if rungs else asha((Stage(trials=27, iterations=1),), 2)
    job = job_of(stage, stop=StopRules(no_improvement=NoImprovement(trials=5)))
    state = run(job, curves).state
    assert (state.outcome, state.reason) == ("done", "no improvement by 5 trials in a row")
    best = best_trial(state)
    assert best is not None
    assert best.trial == 1


def test_an_older_journal_has_no_rules() -> None:
    job = replace(JOB, stop=StopRules(target=0.9, patience=Patience(iterations=2)))
    assert decode_job(encode_job(job)) == job
    words = json.loads(encode_job(job))
    del words["stop"]
    assert decode_job(json.dumps(words, separators=(",", ":"))) == JOB


def test_a_resume_decides_alike() -> None:
    curves = {trial: [0.1 * (trial + 1)] * 3 for trial in range(4)}
    job = job_of(Stage(trials=4, iterations=3), stop=StopRules(target=0.35, median=Median(after=1)))
    journal = MemoryJournal()
    backend = VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, metric_of=lambda trial, done: curves[trial][done - 1]
    )
    controller, _, _ = run_virtual(job, journal=journal, backend=backend)
    again = Controller(job)
    for _, event in journal.events():
        again.handle(event)
    assert again.state == controller.state
