"""GPUs that are idle within a stage are put to use: nothing that is promised breaks, and no run is worse for it."""

from __future__ import annotations

import dataclasses
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import (
    Controller,
    Event,
    Faults,
    Job,
    Noise,
    Regrouped,
    State,
    TrialEnd,
    VirtualBackend,
    bill_usd,
    drive,
)
from rubberband.planner.exact.model import predict
from rubberband.values.offer import slots
from rubberband.values.plan import Plan
from tests.builders.budget import examples
from tests.builders.memory import MemoryJournal
from tests.builders.planned_jobs import planned_jobs
from tests.builders.populations import forks, job_of, random_population, run
from tests.builders.strategies import faults, jobs
from tests.builders.virtual_runs import jct_s, killed_and_resumed, run_virtual

ENDS = st.dictionaries(
    st.integers(0, 11), st.builds(TrialEnd, iterations=st.integers(1, 8), returns=st.booleans()), max_size=8
)
GAINS_USD, GAINS_S = 1e-6, 1e-6


def asked(job: Job, on: bool) -> Job:
    return dataclasses.replace(job, resize_in_stage=on)


def full(job: Job, waves: int) -> Job:
    """The first stage of a job alone, with a trial for each slot in each wave: none is idle while others train."""
    choice, stage = job.plan.stages[0], job.stages[0]
    at_once = slots(choice.instances, job.offer.slots, choice.gpus_per_trial)
    assume(at_once * choice.gpus_per_trial == choice.instances * job.offer.slots)
    stages, plan = (dataclasses.replace(stage, trials=waves * at_once),), Plan(stages=(choice,))
    return dataclasses.replace(
        job, stages=stages, plan=plan, prediction=predict(stages, plan, job.profile, job.offer), replan=False
    )


def trained(state: State) -> list[tuple[int, list[float]]]:
    """Return the iterations and the learning curve of each trial."""
    return [(trial.iterations, [report.metrics["score"] for report in trial.reports]) for trial in state.trials]


@given(jobs(), st.integers(1, 3))
@settings(deadline=None, max_examples=examples(500))
def test_a_run_without_idle_gpus_is_the_same_event_by_event(job: Job, waves: int) -> None:
    job, stories = full(job, waves), []
    for on in (False, True):
        log = MemoryJournal()
        run_virtual(asked(job, on), journal=log)
        stories.append([event for _, event in log.events()])
    assert stories[0] == stories[1]


@given(jobs() | planned_jobs(st.none(), st.none()), ENDS)
@settings(deadline=None, max_examples=examples(300))
def test_every_trial_trains_the_same_and_no_run_costs_and_takes_more(job: Job, ends: dict[int, TrialEnd]) -> None:
    job = dataclasses.replace(job, replan=False)
    found = []
    for on in (False, True):
        controller, _, finish = run_virtual(asked(job, on), Faults(ends=ends))
        assert finish.outcome == "done"
        found.append(controller.state)
    without, with_it = found
    assert trained(with_it) == trained(without)
    dearer = bill_usd(with_it, with_it.now) > bill_usd(without, without.now) + GAINS_USD
    later = jct_s(with_it) > jct_s(without) + GAINS_S
    assert not (dearer and later)
    assert not dearer, "the objective is cost, and nothing varies"


@given(
    planned_jobs(st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.sampled_from([1.01, 1.05, 1.5, 3.0])), ENDS, st.booleans()
)
@settings(deadline=None, max_examples=examples(300))
def test_deadline_and_budget_are_kept_that_would_be_kept_without(
    job: Job, ends: dict[int, TrialEnd], fast: bool
) -> None:
    if fast:
        job = dataclasses.replace(job, objective="min_time")
    assert job.deadline_s is not None
    assert job.max_cost_usd is not None
    without = run_virtual(asked(job, False), Faults(ends=ends))[0].state
    with_it = run_virtual(asked(job, True), Faults(ends=ends))[0].state
    assert bill_usd(with_it, with_it.now) <= job.max_cost_usd + 1e-6
    if without.outcome == "done":
        assert with_it.outcome == "done"
        assert jct_s(without) > job.deadline_s + 1e-6 or jct_s(with_it) <= job.deadline_s + 1e-6


@given(jobs(), faults(), ENDS, st.integers(0, 60), st.sampled_from([1, 1, 2]))
@settings(deadline=None, max_examples=examples(500))
def test_a_resume_decides_alike(
    job: Job, faults: Faults, ends: dict[int, TrialEnd], events_before: int, checkpoint_every: int
) -> None:
    killed_and_resumed(asked(job, True), dataclasses.replace(faults, ends=ends), events_before, checkpoint_every)


@given(
    planned_jobs(st.none() | st.sampled_from([0.5, 1.5]), st.none()),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.02, 0.1, 0.3]),
)
@settings(deadline=None, max_examples=examples(500))
def test_all_trials_end_and_gangs_have_measured_widths(job: Job, seed: int, end_chance: float) -> None:
    profile = dataclasses.replace(job.profile, trial_cv=0.3, iteration_cv=0.2, end_chance=end_chance)
    job = asked(dataclasses.replace(job, profile=profile), True)
    clock = VirtualClock()
    noise = Noise(profile, job.offer, seed=seed, now=clock.now, end_chance=end_chance)
    backend = VirtualBackend(job.name, job.offer, profile, metric=job.metric, faults=noise, clock=clock)
    widest: list[int] = []

    def look(_event: Event, controller: Controller) -> None:
        widest.extend(len(trial.gang) for trial in controller.state.running())

    controller = Controller(job)
    finish = drive(controller, backend, MemoryJournal(), observers=[look])
    assert finish.outcome == "done"
    assert max(widest) <= job.largest_gang
    assert {record.gpus for record in controller.state.history.of(Regrouped)} <= set(profile.seconds_per_iteration)


@given(st.integers(0, 10**6), ENDS)
@settings(deadline=None, max_examples=examples(100))
def test_a_population_takes_and_costs_no_more_and_each_generation_trains_alike(
    seed: int, ends: dict[int, TrialEnd]
) -> None:
    experiment = random_population(Random(seed))
    job, found = dataclasses.replace(job_of(experiment), replan=False), []
    for on in (False, True):
        journal = MemoryJournal()
        controller, _, finish = run(experiment, Faults(ends=ends), journal, asked(job, on))
        assert finish.outcome == "done"
        found.append((controller.state, [(one.trial, one.parent, one.configuration) for one in forks(journal)]))
    (without, exchanged), (with_it, again) = found
    assert again == exchanged
    assert bill_usd(with_it, with_it.now) <= bill_usd(without, without.now) + GAINS_USD
    if not ends:
        assert jct_s(with_it) <= job.prediction.jct_s + GAINS_S
        assert bill_usd(with_it, with_it.now) <= job.prediction.cost_usd + GAINS_USD
