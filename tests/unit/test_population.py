"""Population based training: which trials take over checkpoints, with which configurations, and that the plan holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.executor import (
    AttemptFaults,
    Controller,
    Event,
    Faults,
    Fork,
    TrialStatus,
    TrialStopRequested,
    VirtualBackend,
    bill_usd,
)
from rubberband.executor.result.rows import trial_at
from rubberband.executor.result.summary import summarise
from rubberband.executor.virtual.fleet import TrialEnd
from rubberband.spec.experiment import Experiment
from rubberband.spec.population import Pbt, scaled
from rubberband.spec.samplers import check_point
from rubberband.spec.space import DOMAINS, choice, lograndint, loguniform, qrandint, quniform, randint, randn, uniform
from rubberband.views.charts.search import comparable
from tests.builders.budget import examples
from tests.builders.memory import MemoryJournal
from tests.builders.populations import explorer, forks, job_of, population, random_population, run
from tests.builders.virtual_runs import jct_s, run_until_killed


def test_each_exchange_draws_anew() -> None:
    """With every parameter drawn anew, no two trials, and no two generations, have the same numbers."""
    journal = MemoryJournal()
    run(population(resample=1.0, generations=5), journal=journal)
    rates = [event.configuration["lr"] for event in forks(journal)]
    assert len(rates) == len(set(rates)) == 4 * 2


def test_each_of_the_best_ones_is_taken_over() -> None:
    journal = MemoryJournal()
    controller, _, _ = run(population(generations=9), journal=journal)
    at = [record for record in controller.state.stages[:-1] for _ in range(2)]
    places = [record.ranking.index(event.parent) for event, record in zip(forks(journal), at, strict=True)]
    assert set(places) == {0, 1}


@pytest.mark.parametrize("seed", range(8))
def test_it_takes_and_costs_what_was_planned(seed: int) -> None:
    experiment = random_population(Random(seed))
    job, (controller, _, finish) = job_of(experiment), run(experiment)
    assert finish.outcome == "done"
    assert jct_s(controller.state) == pytest.approx(job.prediction.jct_s, abs=5e-4)
    assert bill_usd(controller.state, controller.state.now) == pytest.approx(job.prediction.cost_usd, abs=5e-3)
    assert {len(record.trials) for record in controller.state.stages} == {job.num_trials}


def test_the_worst_ones_take_over_the_checkpoints_of_the_best_ones() -> None:
    journal = MemoryJournal()
    controller, _, _ = run(population(), journal=journal)
    state = controller.state
    assert all(trial.status is TrialStatus.COMPLETED for trial in state.trials)
    at = [record for record in state.stages[:-1] for _ in range(2)]
    for event, record in zip(forks(journal), at, strict=True):
        assert event.trial in record.ranking[-2:]
        assert event.parent in record.ranking[:2]
        assert event.iterations == 2 * (record.stage + 1)
    assert state.stages[-1].forked == ()


def test_a_configuration_stays_within_the_space_and_the_changes_are_named() -> None:
    journal, experiment = MemoryJournal(), population(generations=30, population=12)
    run(experiment, journal=journal)
    present = dict(enumerate(experiment.configurations()))
    for event in forks(journal):
        space, own = experiment.search.space, dict(event.configuration)
        assert check_point(space, own, complete=own["optimizer"] == "sgd") == own
        assert ("momentum" in own) == (own["optimizer"] == "sgd")
        before = present[event.parent]
        changed = {
            name: (before.get(name), own.get(name)) for name in {*before, *own} if before.get(name) != own.get(name)
        }
        assert dict(event.changes) == changed
        present[event.trial] = own
    assert len({tuple(sorted(event.changes)) for event in forks(journal)}) > 3


def test_only_the_parameters_of_mutate_change() -> None:
    journal = MemoryJournal()
    run(population(mutate=["lr"], generations=10), journal=journal)
    assert {name for event in forks(journal) for name in event.changes} == {"lr"}


def test_another_seed_changes_others() -> None:
    told = []
    for seed in (1, 1, 2):
        journal = MemoryJournal()
        run(population(seed=seed), journal=journal)
        told.append([(event.trial, event.parent, dict(event.configuration)) for event in forks(journal)])
    assert told[0] == told[1] != told[2]


@given(st.integers(1, 200), st.booleans(), st.sampled_from(["perturb", "gp"]))
@settings(deadline=None, max_examples=examples(40))
def test_a_driver_killed_after_any_event_decides_alike_once_resumed(
    events_before: int, replans: bool, explore: str
) -> None:
    experiment = population(generations=3, explore=explore)
    job = replace(job_of(experiment), replan=replans)
    unbroken, journal = MemoryJournal(), MemoryJournal()
    first = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    controller = Controller(job)
    run_until_killed(controller, first, unbroken, 10_000, explore=explorer(experiment, controller))
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    before = Controller(job)
    run_until_killed(before, backend, journal, events_before, explore=explorer(experiment, before))
    backend.forget()
    after = Controller(job)
    run_until_killed(after, backend, journal, 10_000, explore=explorer(experiment, after))
    assert after.state.outcome == controller.state.outcome == "done"
    decided = [[replace(event, occurred_at=0.0) for event in forks(one)] for one in (unbroken, journal)]
    assert decided[0] == decided[1]


class FailsOnce(Faults):
    """Trial 0 fails for good in its first stage."""

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        return AttemptFaults(failure="raised" if trial == 0 and attempt < 3 else None)


def test_a_trial_that_failed_goes_on_from_a_winners_checkpoint() -> None:
    journal = MemoryJournal()
    controller, _, finish = run(population(), FailsOnce(), journal)
    state = controller.state
    assert finish.outcome == "done"
    (first, *_) = [event for event in forks(journal) if event.trial == 0]
    assert first.reason == "it had failed after stage 0"
    assert 0 not in state.stages[0].ranking
    assert all(0 in record.trials for record in state.stages)
    assert state.trials[0].status is TrialStatus.COMPLETED
    assert len(forks(journal)) == 6  # it is one of the worst two


def test_a_trial_that_the_user_has_stopped_stays_so() -> None:
    journal, stopped = MemoryJournal(), [False]

    experiment = population()
    job = job_of(experiment)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)

    def stop(event: Event, controller: Controller) -> None:
        if controller.state.trials[7].iterations == 1 and not stopped[0]:
            stopped[0] = True
            asked = TrialStopRequested(occurred_at=event.occurred_at, request="s", trial=7)
            journal.append([asked])
            for command in controller.handle(asked):
                backend.execute(command)

    controller, _, _ = run(experiment, journal=journal, backend=backend, observers=[stop])
    assert controller.state.trials[7].status is TrialStatus.STOPPED
    assert 7 not in {event.trial for event in forks(journal)} | {event.parent for event in forks(journal)}
    assert len(forks(journal)) == 6


def test_a_trial_that_has_ended_by_itself_is_no_parent_and_goes_on_when_it_is_replaced() -> None:
    ends = {0: TrialEnd(iterations=1), 7: TrialEnd(iterations=1)}

    class Ending(Faults):
        def end(self, trial: int) -> TrialEnd | None:
            return ends.get(trial)

    journal = MemoryJournal()
    controller, _, finish = run(population(generations=3), Ending(), journal)
    assert finish.outcome == "done"
    assert {event.trial for event in forks(journal)[:2]} == {6, 7}
    assert 0 not in {event.parent for event in forks(journal)}
    assert 0 in controller.state.stages[0].ranking[:2]


def test_trials_without_checkpoints_are_not_taken_over() -> None:
    experiment = population()
    words = experiment.to_words()
    words["profile"] = {**words["profile"], "resumes": False}
    controller, _, finish = run(Experiment(**words))
    assert finish.outcome == "done"
    assert not controller.state.history.of(Fork)


def test_the_estimate_says_that_it_is_one_fleet() -> None:
    stage = population().brackets()[0][0]
    assert stage.exchange is not None
    assert stage.exchange.in_words(stage.trials) == (
        "One fleet trains all 8 trials in every stage. After each but the last, the worst 2 continue from the "
        "checkpoints of the best 2, with changed configurations."
    )


@pytest.mark.parametrize(
    ("trials", "quantile", "count"), [(8, 0.25, 2), (10, 0.25, 3), (3, 0.5, 1), (2, 0.1, 1), (20, 0.05, 1)]
)
def test_a_quantile_is_rounded_up_to_at_most_half(trials: int, quantile: float, count: int) -> None:
    stage = population(population=trials, quantile=quantile).brackets()[0][0]
    assert stage.exchange is not None
    assert stage.exchange.takers(trials) == count


REFUSED = [
    ({"population": 1}, "population: 1 must be at least 2"),
    ({"quantile": 0.6}, "quantile: 0.6 must be at most 0.5"),
    ({"perturb": []}, "perturb: is empty"),
    ({"perturb": [0.0, 1.2]}, "perturb.0: 0.0 must be more than 0"),
    ({"perturb": [1.0], "resample": 0.0}, "perturb=\\[1.0\\] with resample=0 changes nothing"),
    ({"resample": 1.5}, "resample: 1.5 must be at most 1"),
    ({"mutate": ["learning_rate"]}, "mutate: 'learning_rate' is no parameter with a domain"),
    ({"max_t": 9}, "max_t: is of other schedulers; write generations: 10 and iterations: 5"),
]


@pytest.mark.parametrize(("scheduler", "why"), REFUSED)
def test_words_that_make_no_population_are_refused(scheduler: Mapping[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        population(**scheduler)


@pytest.mark.parametrize("rule", ["patience", "median"])
def test_a_rule_that_ends_trials_is_refused(rule: str) -> None:
    words = population().to_words()
    words["search"]["stop"] = {rule: {"iterations": 2} if rule == "patience" else {}}
    with pytest.raises(InputError, match=f"search.stop.{rule}: ends trials, and a population replaces its worst ones"):
        Experiment(**words)


def test_a_target_ends_the_search() -> None:
    words = population().to_words()
    words["search"]["stop"] = {"target": 0.6}
    controller, _, finish = run(Experiment(**words))
    assert finish.outcome == "done"
    assert len(controller.state.stages) < 4


@pytest.mark.parametrize("sampler", ["grid", "optuna"])
def test_a_sampler_that_cannot_draw_a_population_is_refused(sampler: str) -> None:
    words = population().to_words()
    words["search"]["space"] = {"lr": {"type": "grid" if sampler == "grid" else "choice", "values": list(range(8))}}
    words["search"]["sampler"] = {"type": sampler}
    with pytest.raises(InputError, match=f"the {sampler} sampler draws no population"):
        Experiment(**words)


@pytest.mark.parametrize(
    ("domain", "value", "factor", "moved"),
    [
        (loguniform(1e-4, 1e-1), 0.01, 1.2, 0.012),
        (loguniform(1e-4, 1e-1), 0.09, 1.2, 0.1),
        (uniform(0.5, 0.99), 0.55, 0.8, 0.5),
        (uniform(-1.0, 1.0), -0.5, 1.2, -0.6),
        (randint(1, 9), 2, 1.2, 3),
        (randint(1, 9), 8, 1.2, 8),
        (randint(1, 9), 2, 0.8, 1),
        (lograndint(16, 1025), 1000, 1.2, 1024),
        (qrandint(16, 256, 16), 64, 1.2, 80),
        (qrandint(16, 256, 16), 16, 0.8, 16),
        (quniform(0.0, 0.5, 0.1), 0.3, 1.2, 0.4),
        (quniform(0.0, 0.5, 0.1), 0.3, 1.0, 0.3),
        (randn(0.0, 1.0), 2.0, 0.8, 1.6),
    ],
)
def test_a_number_is_scaled_within_its_domain(domain: Any, value: float, factor: float, moved: float) -> None:
    found = scaled(domain, value, factor)
    assert found == pytest.approx(moved)
    assert isinstance(found, int) == DOMAINS[domain.kind].whole


@pytest.mark.parametrize(("at", "u", "moved"), [("b", 0.1, "a"), ("b", 0.9, "c"), ("a", 0.1, "a"), ("c", 0.9, "c")])
def test_a_choice_moves_to_a_neighbour(at: str, u: float, moved: str) -> None:
    scheduler = Pbt(type="pbt", population=2, generations=2, resample=0.0)
    space = {"kind": choice(["a", "b", "c"])}
    assert scheduler.explored(space, {"kind": at}, lambda path, purpose: u) == {"kind": moved}


def test_a_metric_is_compared_by_the_configuration_that_reported_it() -> None:
    """Until a trial takes over a checkpoint, its reports are those of another configuration."""
    experiment = population()
    controller, _, _ = run(experiment)
    setup = {"experiment": experiment.to_words(), "configurations": experiment.configurations()}
    result = summarise(controller.state, setup, controller.state.now)
    moved = [trial for trial in result.trials if trial.schedule]
    assert moved
    for trial in moved:
        after = trial.schedule[-1].after
        assert [done for _, done, _ in trial.present_curve] == [done for _, done, _ in trial.curve if done > after]
        with pytest.raises(InputError, match=f"iteration {after}: its checkpoint was not kept"):
            trial_at(result, trial, after)
    compared = comparable(result)
    assert compared is not None
    began = {trial.trial: trial.schedule[-1].after for trial in moved}
    assert all(began.get(trial.trial, 0) < compared.iterations for trial in compared.trials)
