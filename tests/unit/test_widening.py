"""`spend: remaining`: how a search is widened by what is left, and what the user is told about it."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import pytest

from rubberband.api.dashboard.experiment_words import happenings
from rubberband.api.models import Decisions
from rubberband.app.cases import spending_notes
from rubberband.app.run import plan_job
from rubberband.errors import InputError
from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event, Tick, TrialReported
from rubberband.executor.core.state import Job, TrialStatus
from rubberband.executor.core.trials import best_trial
from rubberband.executor.driver import drive
from rubberband.executor.journal.inbox import DriverRequest
from rubberband.executor.result import Result, summarise
from rubberband.executor.sampling import Seeds, draw
from rubberband.executor.virtual.backend import VirtualBackend
from rubberband.spec.experiment import Experiment
from rubberband.spec.samplers import trial_seed
from rubberband.values.plan import PlanningConstraints, Policy
from rubberband.views.experiment import decisions
from rubberband.views.narration import Narrator
from rubberband.views.report_html import render_html
from rubberband.views.tables import comparison, stages
from tests.builders.memory import MemoryInbox, MemoryJournal
from tests.builders.virtual_runs import Killed, run_virtual

WORDS: dict[str, Any] = {
    "name": "wide",
    "search": {
        "space": {"lr": {"type": "loguniform", "lower": 0.0001, "upper": 0.1}},
        "scheduler": {"type": "sha", "num_samples": 6, "max_t": 9},
        "metric": "score",
        "mode": "max",
    },
    "constraints": {"deadline": "8m", "max_cost": 0.3, "spend": "remaining"},
    "resources": {
        "provider": "virtual",
        "instance_type": "p3.8xlarge",
        "max_instances": 4,
        "price_per_hour": 1.0,
        "provision_delay": "10s",
        "init_delay": "5s",
    },
    "profile": {"seconds_per_iteration": {1: 20.0, 2: 11.0, 4: 6.5}, "trial_startup": 2.0},
}


def experiment(**changes: dict[str, Any]) -> Experiment:
    """The experiment with other words in its parts."""
    return Experiment(
        **{key: {**word, **changes.get(key, {})} if isinstance(word, dict) else word for key, word in WORDS.items()}
    )


def job_of(asked: Experiment, policy: Policy = "optimal") -> Job:
    profile = asked.loaded_profile()
    assert profile is not None
    return plan_job(asked, profile, policy)


def run(asked: Experiment, lines: list[str] | None = None) -> Controller:
    """Run it on the virtual clock; what is told about it goes to `lines`."""
    job = job_of(asked)
    narrator = Narrator(job)
    told = [] if lines is None else lines
    observers = [lambda event, controller: told.extend(narrator.lines(event, controller))]
    return run_virtual(job, draw=partial(draw, asked.search), observers=observers)[0]


def result(asked: Experiment, controller: Controller) -> Result:
    """Its report."""
    setup = {"configurations": asked.configurations(), "seeds": (1, 2), "experiment": asked.to_words()}
    return summarise(controller.job, controller.state, setup, controller.state.now)


def trials_of(controller: Controller) -> int:
    return len(controller.state.trials)


def test_with_money_left_the_search_is_wider_and_without_it_is_not() -> None:
    wide = run(experiment())
    assert trials_of(wide) > 20
    assert bill_usd(wide.job, wide.state, wide.state.now) <= 0.3
    needed_usd = job_of(experiment()).prediction.cost_usd
    assert trials_of(run(experiment(constraints={"max_cost": 1.05 * needed_usd}))) == 6
    asked = experiment()
    kept = asked.constraints.model_copy(update={"spend": None})
    assert trials_of(run(asked.model_copy(update={"constraints": kept}))) == 6


def test_one_configuration_more_would_break_a_limit() -> None:
    """The next decision finds room for none, without anything having been slower than it was planned."""
    state = run(experiment(constraints={"deadline": "5m", "max_cost": 9.0})).state
    assert [bool(event.stages) for event in state.widened] == [True, False]
    assert state.widened[0].jct_s <= 300.0
    assert "do not fit" in state.widened[-1].reason


def test_the_configurations_are_those_that_a_larger_search_would_have() -> None:
    asked = experiment()
    controller = run(asked)
    count = trials_of(controller)
    larger = asked.sized("num_samples", count).configurations()
    assert [trial.configuration for trial in result(asked, controller).trials] == larger


def test_seeds_of_added_trials_follow_from_the_samplers() -> None:
    seeds = Seeds([5, 6], {"search": {"sampler": {"seed": 3}}})
    assert [seeds[0], seeds[1], seeds[2]] == [5, 6, trial_seed(3, 2)]
    assert Seeds((), {})[4] == 0


def test_a_quasi_sampler_goes_on_with_its_sequence() -> None:
    asked = experiment(search={"sampler": {"type": "quasi"}})
    controller = run(asked)
    larger = asked.sized("num_samples", trials_of(controller)).configurations()
    assert [trial.configuration for trial in result(asked, controller).trials] == larger


def test_a_sampler_that_learns_draws_when_the_bracket_begins() -> None:
    pytest.importorskip("optuna")
    asked = experiment(search={"sampler": {"type": "optuna"}})
    state = run(asked).state
    assert sorted(state.drawn) == list(range(len(state.trials)))


def test_every_bracket_has_a_winner_and_the_best_of_them_is_the_best() -> None:
    asked = experiment(search={"scheduler": {"type": "hyperband", "max_t": 9}}, constraints={"max_cost": 1.0})
    controller = run(asked)
    found = result(asked, controller)
    winners = {trial.bracket for trial in found.trials if trial.status == TrialStatus.COMPLETED.value}
    assert winners == set(range(4))
    assert found.best is not None
    assert found.best.metrics["score"] == max(trial.metrics["score"] for trial in found.trials if trial.metrics)


def test_progress_and_report_name_the_bracket_that_was_added() -> None:
    asked, lines = experiment(), list[str]()
    controller = run(asked, lines)
    found = result(asked, controller)
    added = found.widened[0].trials
    assert any(line.startswith(f"bracket 1 is added: {added} more configurations fit into") for line in lines)
    assert any(line.startswith("no bracket is added: 3 more configurations do not fit into") for line in lines)
    notes = comparison(found).notes
    assert any(f"bracket 1 was added: {added} more configurations fit" in note for note in notes)
    assert found.planned_jct_s == pytest.approx(found.actual_jct_s)
    assert found.planned_cost_usd == pytest.approx(found.actual_cost_usd)
    assert [row[0] for row in stages(found).rows][:4] == ["0.0", "0.1", "1.0", "1.1"]
    assert Result.from_json(found.to_json()) == found
    history = [(one.what, one.told) for one in happenings(found) if one.kind == "widened"]
    assert [what for what, _ in history] == ["search widened", "search not widened"]
    assert history[0][1].startswith(f"bracket 1 was added: {added} more configurations fit")
    answer = Decisions.model_validate(decisions(found))
    assert [one.trials for one in answer.widened] == [added, 0]
    assert "bracket 1 was added" in render_html(found)


def test_the_estimate_shows_what_the_plan_leaves() -> None:
    asked = experiment()
    job = job_of(asked)
    limits = PlanningConstraints(deadline_s=480.0, max_cost_usd=0.3)
    left_usd = 0.3 - job.prediction.cost_usd
    (note,) = spending_notes(asked, limits, job.prediction)
    assert note.startswith("spend: the plan leaves ")
    assert f"{left_usd:.2f} USD" in note
    kept = asked.constraints.model_copy(update={"spend": None})
    assert spending_notes(asked.model_copy(update={"constraints": kept}), limits, job.prediction) == []


def test_money_that_is_granted_later_is_spent_too() -> None:
    needed_usd = job_of(experiment()).prediction.cost_usd
    asked = experiment(constraints={"max_cost": 1.05 * needed_usd})
    job, inbox = job_of(asked), MemoryInbox()
    inbox.put(DriverRequest(id="more", kind="extend", asked_at=0.0, deadline_s=None, max_cost_usd=0.3))
    controller = Controller(job)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    drive(controller, backend, MemoryJournal(), requests=inbox, draw=partial(draw, asked.search))
    assert trials_of(controller) > 20
    assert bill_usd(controller.job, controller.state, controller.state.now) <= 0.3


@pytest.mark.parametrize("short_of", ["money", "time"])
def test_a_search_is_done_though_an_added_bracket_runs_out_of_money_or_time(short_of: str) -> None:
    asked = experiment()
    job = job_of(asked)
    controller = Controller(job)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)

    def stop_within_the_bracket(event: Event, controller: Controller) -> None:
        if isinstance(event, TrialReported) and event.trial >= job.num_trials:
            raise Killed

    with contextlib.suppress(Killed):
        drive(
            controller, backend, MemoryJournal(), observers=[stop_within_the_bracket], draw=partial(draw, asked.search)
        )
    state = controller.state
    limits: dict[str, Any] = {"deadline_s": state.now + 0.5 - state.started_at}
    if short_of == "money":
        limits = {"max_cost_usd": bill_usd(controller.job, state, state.now)}
    controller.job = dataclasses.replace(controller.job, **limits)
    state.fleet.rent_changed()
    controller.handle(Tick(occurred_at=state.now + 0.1))
    controller.handle(Tick(occurred_at=state.now + 1.0))
    assert state.outcome == "done"
    why = "the deadline is reached" if short_of == "time" else "max_cost="
    assert state.reason.startswith(f"the bracket that was added last did not finish: {why}")
    best = best_trial(state, "score", "max")
    assert best is not None
    assert best.status is TrialStatus.COMPLETED


def test_a_decision_for_a_run_that_has_ended_changes_nothing() -> None:
    controller = run(experiment())
    event = next(event for event in controller.state.widened if event.stages)
    count = trials_of(controller)
    assert controller.handle(event) == []
    assert trials_of(controller) == count


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"constraints": {"spend": "everything"}}, "constraints.spend: 'everything' is not"),
        ({"constraints": {"deadline": None, "max_cost": None}}, "there are no limits to spend"),
        ({"search": {"scheduler": {"type": "asha", "num_samples": 6, "max_t": 9}}}, "asha takes no further bracket"),
        (
            {"search": {"scheduler": {"type": "stages", "stages": [{"trials": 2, "iterations": 1}]}}},
            "stages takes no further bracket",
        ),
        (
            {
                "search": {
                    "space": {"lr": {"type": "grid", "values": [1, 2, 3]}},
                    "scheduler": {"type": "sha", "max_t": 9},
                }
            },
            "the grid has no further configurations",
        ),
        (
            {"constraints": {"deadline": None}, "resources": {"price_per_hour": 0.0}},
            "instances cost nothing here",
        ),
    ],
)
def test_where_nothing_can_be_spent_it_is_refused_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        experiment(**changes)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_that_is_held_fixed_is_refused() -> None:
    with pytest.raises(InputError, match="the policy static does not"):
        job_of(experiment(), "static")
