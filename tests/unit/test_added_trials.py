"""Trials that join a search: by number, by values, or as a changed copy of another; while it runs and after its end."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.executor import (
    Controller,
    DriverRequest,
    ExperimentFolder,
    Extension,
    InstanceRefused,
    Started,
    State,
    Tick,
    TrialsAdded,
    TrialsJoined,
    TrialStatus,
    VirtualBackend,
    best_trial,
    drive,
    extension,
    sampling,
)
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.journal.inbox import Inbox, NewTrials
from rubberband.executor.result.summary import jct_s
from rubberband.executor.run.follower import JournalFollower
from rubberband.executor.sampling import Additions
from rubberband.spec.experiment import Experiment
from rubberband.values.plan import Plan, StagePlan
from tests.builders.cli_runs import CommandLine, rubberband
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan_job
from tests.builders.sampled_runs import SPACE, an_experiment, branin
from tests.builders.stories import Story, kinds
from tests.builders.timed_requests import TimedInbox
from tests.builders.virtual_runs import check

__all__ = ["rubberband"]

SHA = {"type": "sha", "num_samples": 9, "max_t": 9}


def asked(at: float, id: str = "a-1", **trials: Any) -> DriverRequest:
    return DriverRequest(id=id, kind="add", asked_at=at, trials=NewTrials(**trials))


class Added:
    """A virtual run to which trials are added."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        profile = experiment.loaded_profile()
        assert profile is not None
        self.job, self.journal = plan_job(experiment, profile), MemoryJournal()
        learns = experiment.search.sampler.learns
        self.setup = {
            "experiment": experiment.to_words(),
            "configurations": [] if learns else experiment.configurations(),
        }
        self.controller = Controller(self.job)
        self.backend = VirtualBackend(
            self.job.name, self.job.offer, self.job.profile, metric=self.job.metric, metric_of=self._metric
        )

    @property
    def state(self) -> State:
        return self.controller.state

    def configurations(self) -> list[dict[str, Any]]:
        known = sampling.configurations(self.state, self.setup)
        return [dict(known[trial.trial]) for trial in self.state.trials]

    def _metric(self, trial: int, iterations: int) -> float:
        return branin(sampling.configurations(self.state, self.setup)[trial], iterations)

    def drive(self, *requests: DriverRequest, told: list[Extension] | None = None) -> Added:
        """Drive it to its end; `told` gets the forecast that answers each request."""
        self.controller = Controller(self.job)
        draw = partial(sampling.draw, self.experiment.search) if self.job.draws else None
        inbox = TimedInbox(self.backend.now, *requests)

        def add(state: State, request: DriverRequest, now: float) -> TrialsAdded:
            event = Additions(self.setup)(state, request, now)
            if told is not None:
                told.append(extension(copy.deepcopy(state), now, added=event))
            return event

        drive(self.controller, self.backend, self.journal, observers=[check], requests=inbox, draw=draw, add=add)
        return self

    def preview(self, now: float, *, previews: bool = True, **trials: Any) -> Any:
        event = Additions(self.setup, previews=previews)(self.state, asked(now, **trials), now)
        return extension(self.state, now, added=event)


def a_search(sampler: str = "random", scheduler: Any = SHA, **search: Any) -> Experiment:
    return an_experiment(7, sampler={"type": sampler, "seed": 7}, scheduler=scheduler, **search)


def stages(state: State) -> list[tuple[int, int]]:
    return [(stage.trials, stage.iterations) for stage in state.job.stages]


@pytest.mark.parametrize("sampler", ["random", "quasi"])
def test_trials_by_number_are_those_of_a_search_of_that_size(sampler: str) -> None:
    given = {"x": 1.0, "y": 2.0}
    run = Added(a_search(sampler)).drive(
        asked(1.0, "a-1", configuration=given), asked(2.0, "a-2", count=4), asked(3.0, "a-3", count=3)
    )
    whole = a_search(sampler, SHA | {"num_samples": 16}).configurations()
    assert run.configurations() == [*whole[:9], given, *whole[9:]]
    assert (
        len({run.experiment.trial_seeds()[0], *(sampling.Seeds([], run.setup["experiment"])[n] for n in range(17))}) > 9
    )


def test_seeds_of_trials_by_number_are_those_of_a_search_of_that_size() -> None:
    few, many = a_search(), a_search(scheduler=SHA | {"num_samples": 16})
    seeds = sampling.Seeds(few.trial_seeds(), few.to_words())
    assert [seeds[number] for number in range(16)] == list(many.trial_seeds())


def test_a_search_with_more_trials_has_at_most_as_many_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_TRIALS", 12)
    run = Added(a_search())
    assert len(run.preview(1.0, count=3).trials) == 3
    with pytest.raises(InputError, match="a search has at most 12 trials; add fewer"):
        run.preview(1.0, count=4)


def test_trials_by_number_join_the_first_stage_and_the_later_ones_train_more() -> None:
    run = Added(a_search()).drive(asked(1.0, count=18))
    assert stages(run.state) == [(27, 1), (9, 3), (3, 5)]
    assert [len(record.trials) for record in run.state.stages] == [27, 9, 3]
    assert sum(trial.iterations == 9 for trial in run.state.trials) == 3


def test_a_bracket_of_one_trial_does_not_shrink_to_none_as_trials_join_it() -> None:
    """Two trials by a factor of three are none; its last stage has one."""
    scheduler = {"type": "hyperband", "max_t": 9, "reduction_factor": 3, "num_samples": 4}
    run = Added(a_search(scheduler=scheduler)).drive(asked(1.0, count=1))
    assert sorted(stages(run.state)) == [(1, 6), (2, 3), (3, 9)]
    assert run.state.outcome == "done"


def test_instances_that_were_given_up_are_asked_for_again_for_trials_that_are_added() -> None:
    run = Added(a_search(scheduler={"type": "asha", "num_samples": 4, "max_t": 9}))
    plan = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1),))
    story = Story(dataclasses.replace(run.job, plan=plan, launch_attempts=1))
    assert kinds(story.tell(Started)) == ["LaunchInstance"] * 2
    story.ready("i-001")
    story.tell(InstanceRefused, instance="i-002", reason="no capacity")
    story.at += 1000.0
    assert story.tell(Tick) == []
    facts = Additions(run.setup)(story.state, asked(0.0, count=4), story.at)
    story.tell(TrialsAdded, **{one.name: getattr(facts, one.name) for one in dataclasses.fields(facts)[1:]})
    assert "LaunchInstance" in kinds(story.tell(Tick))


def test_after_the_first_stage_they_are_a_bracket_of_their_own() -> None:
    before = Added(a_search()).drive()
    second_at = before.state.stages[1].started_at + 1.0
    run = Added(a_search()).drive(asked(second_at, count=9))
    assert stages(run.state) == [(9, 1), (3, 3), (1, 5)] * 2
    assert [trial.iterations for trial in run.state.trials].count(9) == 2
    assert run.state.stages[3].started_at >= (run.state.stages[2].ended_at or 0.0)


def test_a_bracket_of_its_own_is_known_to_take_time_and_money_before_it_is_planned() -> None:
    run = Added(a_search()).drive()
    run.controller.handle(Additions(run.setup)(run.state, asked(0.0, count=9), run.state.now))
    assert [one.duration_s > 0.0 < one.cost_usd for one in run.state.predicted[3:]] == [True] * 3


def test_a_configuration_joins_the_current_stage_from_zero_and_is_ranked_with_the_others() -> None:
    before = Added(a_search()).drive()
    second_at = before.state.stages[1].started_at + 1.0
    run = Added(a_search()).drive(asked(second_at, configuration={"x": 3.14159, "y": 2.275}))
    assert stages(run.state) == [(9, 1), (4, 3), (1, 5)]
    added = run.state.trials[9]
    assert (added.joined_stage, added.iterations, added.status) == (1, 9, TrialStatus.COMPLETED)
    assert run.state.stages[1].ranking[0] == 9, "it is at the minimum of the function"
    best = best_trial(run.state)
    assert best is added


def test_a_configuration_joins_the_bracket_whose_stage_ends_after_the_fewest_iterations() -> None:
    given = {"x": 3.14159, "y": 2.275}
    scheduler = {"type": "hyperband", "max_t": 9, "reduction_factor": 3}
    run = Added(a_search(scheduler=scheduler)).drive(asked(1.0, configuration=given))
    firsts = [run.job.iterations_by(bracket.first_stage) for bracket in run.job.all_brackets()]
    assert firsts == [1, 3, 9]
    (joined,) = run.state.history.of(TrialsJoined)
    assert run.job.iterations_by(joined.stage) == 1


def test_a_clone_from_the_end_of_a_rung_goes_on_to_the_next_one() -> None:
    scheduler = {"type": "asha", "num_samples": 9, "max_t": 9, "reduction_factor": 3}
    run = Added(a_search(scheduler=scheduler)).drive()
    parent = next(trial for trial in run.state.trials if trial.checkpoint_iterations == run.job.rung_ends(0)[0])
    first = run.state.lanes[0].rungs.counts()[0]
    run.drive(asked(0.0, clone_of=parent.trial, configuration={"x": 3.14159, "y": 2.275}, from_checkpoint=True))
    clone = run.state.trials[-1]
    assert (clone.inherited, clone.rung > 0, clone.iterations > clone.inherited) == (parent.iterations, True, True)
    assert run.state.lanes[0].rungs.counts()[0] == first + 1, "it has a result there"


def test_parameters_that_are_left_out_are_drawn_and_no_sampler_draws_the_same() -> None:
    run = Added(a_search()).drive(asked(1.0, configuration={"x": 1.0}), asked(2.0, "a-2", count=1))
    *_, given, drawn = run.configurations()
    assert given["x"] == 1.0
    assert 0.0 <= given["y"] <= 15.0
    assert given["y"] != drawn["y"]


@pytest.mark.parametrize("scheduler", ["asha", "none"])
def test_on_rungs_trials_start_as_the_others_did_also_after_the_end(scheduler: str) -> None:
    run = Added(a_search(scheduler={"type": scheduler, "num_samples": 5, "max_t": 4})).drive(asked(1.0, count=4))
    assert len(run.state.trials) == 9
    completed = [trial.trial for trial in run.state.trials if trial.status is TrialStatus.COMPLETED]
    run.drive(asked(0.0, "a-2", count=9))
    assert len(run.state.trials) == 18
    assert len(run.state.stages) == 1
    later = [trial.trial for trial in run.state.trials if trial.status is TrialStatus.COMPLETED]
    assert set(completed) <= set(later)
    assert len(later) > len(completed)
    assert scheduler == "asha" or len(later) == 18


def test_the_search_goes_on_after_its_end_and_the_best_of_all_counts() -> None:
    run = Added(a_search()).drive()
    first = best_trial(run.state)
    assert run.controller.is_over
    run.drive(asked(0.0, configuration={"x": 3.14159, "y": 2.275}))
    assert run.state.outcome == "done"
    assert stages(run.state)[3:] == [(1, 9)], "one trial is not halved"
    best = best_trial(run.state)
    assert best is not None
    assert best is not first
    assert best.trial == 9


def test_a_sampler_that_learns_draws_from_the_results_so_far() -> None:
    hyperband = {"type": "hyperband", "max_t": 9, "reduction_factor": 3}
    run = Added(an_experiment(7, scheduler=hyperband)).drive()
    had = len(run.state.trials)
    run.drive(asked(0.0, count=3))
    (joined,) = run.state.history.of(TrialsJoined)
    assert joined.reason.startswith("by tpe from ")
    assert all(-5.0 <= config["x"] <= 10.0 for config in run.configurations()[had:])


def test_with_asha_a_sampler_that_learns_draws_each_as_it_starts() -> None:
    asha = {"type": "asha", "num_samples": 5, "max_t": 4}
    given = {"x": 0.0, "y": 0.0}
    run = Added(an_experiment(7, scheduler=asha)).drive(
        asked(1.0, count=3), asked(1.0, "a-2", configuration=given), asked(1.0, "a-3", count=2)
    )
    assert len(run.configurations()) == 11
    assert run.configurations()[8] == given


def test_a_request_that_is_asked_twice_is_asked_once() -> None:
    run = Added(a_search()).drive(asked(1.0, count=3))
    events = [event for _, event in run.journal.events() if isinstance(event, TrialsAdded)]
    (event,) = events
    run.controller.handle(dataclasses.replace(event, occurred_at=run.state.now))
    assert len(run.state.trials) == 12


def test_a_clone_has_the_values_of_its_trial_but_for_a_change() -> None:
    run = Added(a_search()).drive(asked(1.0, configuration={"y": 3.0}, clone_of=2))
    *_, clone = run.configurations()
    assert clone == {**run.configurations()[2], "y": 3.0}
    assert run.state.trials[9].clone_of == 2


def test_a_clone_may_go_on_from_the_checkpoint_of_its_trial() -> None:
    run = Added(a_search()).drive()
    stopped = next(trial for trial in run.state.trials if trial.iterations == 4)
    run.drive(asked(0.0, configuration={"y": 3.0}, clone_of=stopped.trial, from_checkpoint=True))
    clone = run.state.trials[9]
    assert (clone.iterations, clone.inherited, clone.status) == (9, 4, TrialStatus.COMPLETED)
    assert [report.metrics for report in clone.reports[:4]] == [report.metrics for report in stopped.reports]
    gangs = [use for use in run.state.allocations if use.trial == 9]
    assert len(gangs) == 1


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("scheduler", [SHA, {"type": "hyperband", "max_t": 9}])
def test_a_preview_of_a_clone_counts_what_it_lacks(scheduler: dict[str, Any], at: float) -> None:
    ends_at, told = Added(a_search(scheduler=scheduler)).drive().state.now, list[Extension]()
    clone = asked(at * ends_at, configuration={"y": 3.0}, clone_of=0, from_checkpoint=True)
    run = Added(a_search(scheduler=scheduler)).drive(clone, told=told)
    assert run.state.trials[-1].inherited > 0
    assert told[0].after.jct_s == pytest.approx(jct_s(run.state, run.state.now))
    assert told[0].after.cost_usd == pytest.approx(bill_usd(run.state, run.state.now))


@pytest.mark.parametrize("count", [1, 9, 27])
def test_a_preview_without_a_scheduler_knows_which_instances_are_given_back(count: int) -> None:
    scheduler = {"type": "none", "num_samples": 9, "max_t": 9}
    ends_at, told = Added(a_search(scheduler=scheduler)).drive().state.now, list[Extension]()
    run = Added(a_search(scheduler=scheduler)).drive(asked(0.6 * ends_at, count=count), told=told)
    assert told[0].after.jct_s == pytest.approx(jct_s(run.state, run.state.now))
    assert told[0].after.cost_usd == pytest.approx(bill_usd(run.state, run.state.now))


def test_previews_with_asha_are_right_on_average() -> None:
    found = list[tuple[float, float]]()
    for seed in range(6):
        scheduler, told = {"type": "asha", "num_samples": 18, "max_t": 9}, list[Extension]()
        search = an_experiment(7, sampler={"type": "random", "seed": seed}, scheduler=scheduler)
        run = Added(search).drive(asked(300.0, count=18), told=told)
        after, end = told[0].after, run.state.now
        found.append((after.jct_s / jct_s(run.state, end), after.cost_usd / bill_usd(run.state, end)))
    assert [sum(ratios) / len(found) for ratios in zip(*found, strict=True)] == pytest.approx([1.0, 1.0], abs=0.07)


BRANCHES = {
    "lr": {"type": "uniform", "lower": 0.0, "upper": 1.0},
    "optimizer": {
        "type": "choice",
        "values": ["adam", {"name": "sgd", "space": {"momentum": {"type": "uniform", "lower": 0.0, "upper": 1.0}}}],
    },
    "epochs": 3,
}


def test_a_clone_of_another_branch_has_the_parameters_of_that() -> None:
    experiment = Experiment(
        **{**a_search().to_words(), "search": {**a_search().to_words()["search"], "space": BRANCHES}}
    )
    additions = Additions(
        {
            "experiment": experiment.to_words(),
            "configurations": [
                {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9, "epochs": 3},
                {"lr": 0.1, "optimizer": "adam", "epochs": 3},
            ],
        }
    )
    profile = experiment.loaded_profile()
    assert profile is not None
    state = Controller(plan_job(experiment, profile)).state

    def cloned(trial: int, **values: Any) -> Any:
        request = asked(0.0, configuration=values, clone_of=trial)
        return additions(state, request, 0.0).configurations[0]

    assert cloned(0, optimizer="adam") == {"lr": 0.1, "optimizer": "adam", "epochs": 3}
    assert cloned(0, momentum=0.5) == {"lr": 0.1, "optimizer": "sgd", "momentum": 0.5, "epochs": 3}
    assert 0.0 <= cloned(1, optimizer="sgd")["momentum"] <= 1.0
    with pytest.raises(InputError, match="only trials with optimizer=sgd have it"):
        cloned(1, momentum=0.5)
    with pytest.raises(InputError, match="4 is not the constant 3"):
        cloned(1, epochs=4)


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        ({"configuration": {"x": 99.0}}, "x: 99"),
        ({"configuration": {"z": 1.0}}, "unknown parameter 'z'"),
        ({"clone_of": 99}, "there is no trial 99; it has 0 to 8"),
        ({"clone_of": 0, "from_checkpoint": True}, "trial 0 has no checkpoint"),
        ({"count": 2_000_000}, "at most 1,000,000 trials"),
    ],
)
def test_trials_that_cannot_be_added_are_refused(trials: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Added(a_search()).preview(0.0, **trials)


def test_a_driver_says_why_a_trial_can_no_longer_be_added() -> None:
    run = Added(a_search()).drive(asked(1.0, clone_of=99))
    (joined,) = run.state.history.of(TrialsJoined)
    assert (joined.trials, joined.reason) == ((), "there is no trial 99; it has 0 to 8")
    assert len(run.state.trials) == 9


def test_a_grid_takes_points_only() -> None:
    space = {"x": {"type": "grid", "values": [1.0, 2.0, 3.0]}, "y": {"type": "grid", "values": [1.0, 2.0]}}
    run = Added(a_search("grid", {"type": "sha", "max_t": 9}, space=space))
    with pytest.raises(InputError, match="every configuration of the grid is a trial"):
        run.preview(0.0, count=2)
    with pytest.raises(InputError, match="y: give one of its values"):
        run.preview(0.0, configuration={"x": 1.0})
    assert run.drive(asked(1.0, configuration={"x": 1.0, "y": 2.0})).configurations()[6] == {"x": 1.0, "y": 2.0}


@pytest.mark.parametrize(
    "scheduler", [SHA, {"type": "asha", "num_samples": 9, "max_t": 9}, {"type": "hyperband", "max_t": 9}]
)
@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_configurations_that_join_a_search_with_repeats_are_repeated(scheduler: dict[str, Any], sampler: str) -> None:
    run = Added(a_search(sampler, scheduler, repeats=2))
    had = run.job.num_trials
    run.drive(asked(1.0, "a-1", count=3), asked(2.0, "a-2", configuration={"x": 1.0, "y": 2.0}))
    configs = run.configurations()
    assert len(configs) == had + 8
    assert configs[0::2] == configs[1::2]
    assert configs[-1] == {"x": 1.0, "y": 2.0}
    assert all(stage.trials % 2 == 0 for stage in run.state.job.stages)
    assert run.state.outcome == "done"
    with pytest.raises(InputError, match="repeats of a configuration have checkpoints of their own"):
        run.preview(0.0, clone_of=0, from_checkpoint=True)


def limited(**constraints: Any) -> Experiment:
    return Experiment(**{**a_search().to_words(), "constraints": constraints})


@pytest.mark.parametrize(
    ("constraints", "limit", "remedy"),
    [({"max_cost": 4.0}, "max_cost=4.00 USD", "--max-cost"), ({"deadline": "30m"}, "deadline=30m", "--deadline")],
)
def test_trials_that_do_not_fit_a_limit_are_refused_with_the_figures_and_the_remedy(
    constraints: dict[str, Any], limit: str, remedy: str
) -> None:
    run = Added(limited(**constraints))
    with pytest.raises(InputError, match=r"more trials would end after .* for .* USD, which exceeds") as refused:
        run.preview(0.0, count=900)
    assert limit in str(refused.value)
    assert f"rubberband extend sampled {remedy}" in str(refused.value)


def test_a_preview_is_what_comes() -> None:
    run = Added(limited(deadline="3h", max_cost=30.0, resize_in_stage=False))
    told = run.preview(0.0, count=18)
    run.drive(asked(0.0, count=18))
    ended_at = run.state.stages[-1].ended_at or 0.0
    assert told.after.jct_s == pytest.approx(ended_at - run.state.started_at)
    assert told.after.cost_usd > told.before.cost_usd
    assert told.after.reason == "18 trials added to stage 0"
    decision = run.state.decisions[0]
    assert "18 trials added" in decision.reason


# The command line.


FILE = {
    "name": "added",
    "search": {
        "space": SPACE,
        "scheduler": SHA,
        "sampler": {"type": "random", "seed": 7},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "3h", "max_cost": 20},
    "resources": {
        "provider": "virtual",
        "instance_type": "p3.8xlarge",
        "max_instances": 2,
        "gpus_per_trial": {"min": 1, "max": 4},
        "price_per_hour": 12.0,
    },
    "profile": {"seconds_per_iteration": {1: 60, 2: 32, 4: 18}, "trial_startup": "2s"},
}


@pytest.fixture
def done(rubberband: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    (tmp_path / "added.yaml").write_text(json.dumps(FILE))
    rubberband("run", str(tmp_path / "added.yaml"))
    return rubberband


def test_a_search_that_has_ended_is_extended_and_resumed(done: CommandLine) -> None:
    told = done.json("extend", "added", "--num-samples", "+9", "--dry-run")
    assert "applied" not in done.err
    assert len(told["trials"]) == 9
    done("extend", "added", "--num-samples", "18", "--yes")
    assert done.err.endswith("applied; `rubberband resume added` trains them\n")
    waits = "9 trials added; `rubberband resume added` trains them"
    assert done("status", "added").startswith(f"added: done ({waits})\n")
    assert done.json("status", "added")["summary"]["added_trials"] == 9
    assert waits in done("ps"), "also where its line is kept"
    assert "the search already has 18" in done.refused("extend", "added", "--num-samples", "18")
    out = done("resume", "added")
    assert done("status", "added").startswith("added: done\n")
    assert "trials 9 to 17 added, drawn by the random sampler" in out
    report = done.json("report", "added")
    assert len(report["trials"]) == 18
    assert report["actual_jct_s"] == pytest.approx(told["after"]["jct_s"])
    assert report["actual_cost_usd"] == pytest.approx(told["after"]["cost_usd"])
    assert [stage["planned_s"] > 0.0 for stage in report["stages"]] == [True] * 6
    assert [stage["added"] for stage in report["stages"]] == [False] * 3 + [True] * 3
    assert abs(report["planned_head_usd"]) < 1e-9
    assert "  head " not in done("report", "added")
    assert "trials added" in {line["what"] for line in done.json("status", "added")["story"]}


def test_a_configuration_and_a_clone_are_added(done: CommandLine) -> None:
    told = done.json("add", "added", "x=3.14", "--yes")
    assert told["applied"]
    assert told["trials"][0]["x"] == 3.14
    done("clone", "added", "0", "y=2.5", "--yes")
    stopped = next(trial for trial in done.json("report", "added")["trials"] if trial["iterations"] == 4)
    done("clone", "added", str(stopped["trial"]), "y=2.25", "--from-checkpoint", "--yes")
    out = done("resume", "added")
    assert (
        f"trial 11 added: trial {stopped['trial']} with y {stopped['configuration']['y']:.6g} -> 2.25, from its 4 "
        in out
    )
    trials = done.json("report", "added")["trials"]
    assert [trial["iterations"] for trial in trials[9:]] == [9, 9, 9]
    assert trials[9]["configuration"]["x"] == 3.14
    assert trials[10]["configuration"] == {**trials[0]["configuration"], "y": 2.5}


def test_trials_that_wait_are_withdrawn_by_cancel(done: CommandLine) -> None:
    done("ps")
    done("add", "added", "x=3.14", "--yes")
    assert "1 trial added; `rubberband resume added` trains it" in done("ps")
    done("cancel", "added")
    assert done.err == "added is done: what was added since its end is withdrawn\n"
    assert "trial added" not in done("ps")
    assert done("status", "added").startswith("added: done\n")
    done("cancel", "added")
    assert "it is over" in done.err
    done("resume", "added")
    assert len(done.json("report", "added")["trials"]) == 9


def test_trials_that_a_resume_added_before_it_was_cut_off_wait_too(done: CommandLine, tmp_path: Path) -> None:
    done("add", "added", "x=3.14", "--yes")
    folder = ExperimentFolder(home=tmp_path / "home", name="added")
    with closing(JournalFollower(folder)) as follower:
        follower.refresh(live=False)
        (asked,) = Inbox(folder.inbox).pending()
        event = Additions(follower.header.setup)(follower.controller.state, asked, follower.now)
        follower.journal.append([event])
    Inbox(folder.inbox).discard(asked.id)
    assert done("status", "added").startswith("added: done (1 trial added; `rubberband resume added` trains it)\n")
    done("cancel", "added")
    assert "a resume that was cut off has added its trials; resume it, and cancel it then" in done.err
    done("resume", "added")
    assert len(done.json("report", "added")["trials"]) == 10


REFUSED: Sequence[tuple[str, str]] = [
    ("add added x=99", "x: 99 is outside uniform from -5.0 to 10.0"),
    ("add added lrr=1", "unknown parameter 'lrr'"),
    ("add added x", "'x' is no KEY=VALUE"),
    ("add added x=1 x=2", "x is given twice"),
    ("clone added 99 x=1", "there is no trial 99; it has 0 to 8"),
    ("clone added WINNER --from-checkpoint", "has trained all of its 9 iterations; leave --from-checkpoint out"),
    ("extend added --num-samples nine", "num_samples: 'nine' is no number of trials; give +16"),
    ("extend added --num-samples 5", "the search already has 9"),
    ("extend added --num-samples +900", "which exceeds max_cost=20.00 USD"),
    ("extend added --deadline 4h", "it is over"),
    ("extend added --num-samples +1 --target 1e9", "target: 1e+09 is reached already (trial "),
]


@pytest.mark.usefixtures("trained_runs")
def test_each_slip_is_one_line(done: CommandLine) -> None:
    winner = str(done.json("report", "added")["best"]["trial"])
    for words, why in REFUSED:
        assert why in done.refused(*(winner if word == "WINNER" else word for word in words.split()), "--yes")
