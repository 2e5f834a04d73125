"""Rules of `search.stop`: trials and searches that end early, on the virtual clock."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.executor import (
    CheckpointRef,
    Controller,
    DriverRequest,
    DriverResumed,
    Header,
    Job,
    LimitsExtended,
    LiveInstance,
    Result,
    State,
    Tick,
    TrialReported,
    VirtualBackend,
    best_trial,
    bill_usd,
    drive,
    extension,
    limits_of,
    summarise,
)
from rubberband.executor.core.history import SearchEnd, TrialCut
from rubberband.executor.core.job import Bracket
from rubberband.executor.core.limits import can_go_on
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.journal.journal import decode_job, encode_job
from rubberband.planner.exact.model import predict
from rubberband.planning.candidates import stop_notes
from rubberband.spec.experiment import Experiment
from rubberband.spec.schedulers import asha, sha
from rubberband.units import duration
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.ranking import Limit
from rubberband.values.stopping import Median, NoImprovement, Patience, StopRules
from rubberband.views.report.headlines import headlines
from rubberband.views.report.tables import comparison
from rubberband.views.story import sentence
from tests.builders.jobs import JOB
from tests.builders.memory import MemoryInbox, MemoryJournal
from tests.builders.stories import begun, checkpoint
from tests.builders.timed_requests import TimedInbox
from tests.builders.virtual_runs import check, run_virtual
from tests.harness.chaos_cases import asha_prediction
from tests.unit.test_controller_checkpoints import lose


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


def test_the_last_result_of_a_trial_that_ended_by_itself_is_in_the_median() -> None:
    story = begun(job_of(Stage(trials=3, iterations=6), stop=StopRules(median=Median(trials=2))))
    for trial, value in enumerate((0.8, 0.6)):
        told = {"trial": trial, "attempt": 1, "iterations": 1, "metrics": {"score": value}}
        story.tell(TrialReported, **told, checkpoint=checkpoint(trial, 1), ended=True)
    story.report(2, 0.5)
    assert [cut.trial for cut in story.state.history.of(TrialCut)] == [2]


def test_no_trial_ends_before_the_grace_period() -> None:
    rules = {
        "patience": StopRules(patience=Patience(iterations=2), grace_period=5),
        "median": StopRules(median=Median(trials=1), grace_period=5),
    }
    for rule, stop in rules.items():
        curves = {trial: [0.5 - 0.1 * trial] * 9 for trial in range(2)}
        cuts = run(job_of(Stage(trials=2, iterations=9), stop=stop), curves).state.history.of(TrialCut)
        assert {cut.iterations for cut in cuts} == {5}, rule


def test_a_trial_ends_with_an_iteration_that_a_checkpoint_holds() -> None:
    job = job_of(Stage(trials=2, iterations=9), stop=StopRules(patience=Patience(iterations=1)))
    backend = VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, metric_of=lambda *_: 0.5, checkpoint_every=3
    )
    state = run_virtual(job, backend=backend)[0].state
    assert [(cut.trial, cut.iterations) for cut in state.history.of(TrialCut)] == [(0, 3), (1, 3)]


def test_results_that_a_trial_has_lost_are_no_longer_in_the_median() -> None:
    stop = StopRules(median=Median(trials=1))
    job = job_of(Stage(trials=4, iterations=9), stop=stop)
    story = begun(replace(job, max_failures=1))
    story.report(0, 0.9)
    lose(story, 0)
    story.report(0, 0.1)
    story.report(1, 0.4)  # the median of 0.1; with the lost 0.9, that of 0.5
    assert not story.state.history.of(TrialCut)
    story.report(2, 0.2)
    assert [cut.trial for cut in story.state.history.of(TrialCut)] == [2]


def test_the_best_trial_is_none_of_those_without_an_improvement() -> None:
    story = begun(
        job_of(asha((Stage(trials=9, iterations=1),), 2), stop=StopRules(no_improvement=NoImprovement(trials=2)))
    )
    for trial, score in enumerate((0.5, 0.9, 0.4)):
        story.report(trial, score)
    assert story.state.ended_by is None
    story.report(3, 0.4)
    assert story.state.reason == "no improvement by 2 trials in a row"


def test_a_search_ends_at_the_sync_since_which_nothing_has_improved() -> None:
    stages = [Stage(trials=trials, iterations=1) for trials in (8, 4, 3, 2, 1)]
    curves = {trial: [0.1 * trial, 0.1 * trial + 0.05, 0.1, 0.1, 0.1] for trial in range(8)}
    for syncs in (1, 2):
        state = run(job_of(*stages, stop=StopRules(no_improvement=NoImprovement(syncs=syncs))), curves).state
        since = "1 SYNC" if syncs == 1 else "2 SYNCs"
        assert (state.reason, len(state.stages)) == (f"no improvement since {since}", 2 + syncs)


def test_money_without_an_improvement_counts_from_the_improvement() -> None:
    curves = {0: [0.1, 0.2, 0.3, 0.4, 0.5, *[0.5] * 15]}
    job, rule = job_of(Stage(trials=1, iterations=20), instances=1, stop=StopRules()), NoImprovement(cost_usd=0.02)
    state = run(replace(job, stop=StopRules(no_improvement=rule)), curves).state
    reports = state.trials[0].reports
    bills = [bill_usd(state, report.reported_at) for report in reports]
    assert state.reason.startswith("no improvement for 0.02")
    assert bills[4] > 0.02, "the rule would have ended it before, from the start on"
    assert bills[-1] - bills[4] >= 0.02 > bills[-2] - bills[4]


def test_time_for_which_no_driver_ran_is_no_time_without_an_improvement() -> None:
    job = job_of(Stage(trials=4, iterations=9), stop=StopRules(no_improvement=NoImprovement(time_s=50.0)))
    story = begun(job)
    story.report(0, 0.5)
    story.at += 1000.0
    live = tuple(LiveInstance(instance=one, running_at=101.0) for one in ("i-001", "i-002"))
    story.tell(DriverResumed, live=live, ended=())
    assert story.state.outcome is None
    story.at += 40.0
    story.tell(Tick)
    assert story.state.outcome is None
    story.at += 10.0
    story.tell(Tick)
    assert (story.state.outcome, story.state.ended_by is not None) == ("done", True)


def test_an_infeasible_result_is_no_improvement() -> None:
    job = job_of(Stage(trials=4, iterations=9), stop=StopRules(no_improvement=NoImprovement(time_s=50.0)))
    story = begun(replace(job, limits=(Limit(metric="ms", at_most=20.0),)))
    story.report(0, 0.5, ms=10.0)
    story.at += 40.0
    story.report(1, 0.9, ms=30.0)
    story.at += 10.0
    story.tell(Tick)
    assert story.state.reason.startswith("no improvement for")


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


WORDS: dict[str, Any] = {
    "name": "stops",
    "search": {"scheduler": {"type": "sha", "num_samples": 27, "max_t": 27}, "metric": "accuracy", "mode": "max"},
    "constraints": {"deadline": "2h", "max_cost": 20},
    "resources": {"provider": "virtual", "gpus_per_instance": 4, "price_per_hour": 12.24, "max_instances": 4},
}
ASHA = {"type": "asha", "num_samples": 8, "max_t": 9}


@pytest.mark.parametrize(
    ("stop", "changes", "message"),
    [
        ({"target": 101}, {}, "target: 101 is never reached: accuracy is from 0 to 100; give a target within that"),
        (
            {"target": 0},
            {},
            "target: every report is at least 0: accuracy is from 0 to 100; give a higher target, or the other mode",
        ),
        (
            {"target": -1},
            {"metric": "val_rmse", "mode": "min"},
            "target: -1 is never reached: val_rmse is 0 or more; give a target within that",
        ),
        (
            {"patience": {"iterations": 26}},
            {},
            "patience.iterations: 26 iterations without an improvement are no fewer than a trial of 27 iterations has "
            "before its end; lower it to 25",
        ),
        (
            {"patience": {"iterations": 2, "after": 27}},
            {},
            "patience.after: 27 iterations are no fewer than a trial of 27 iterations has before its end; "
            "lower it to 26",
        ),
        ({"patience": {"iterations": 1, "std": 0.1}}, {}, "patience.iterations: 1 result has no standard deviation"),
        ({"median": {"trials": 27}}, {}, "median.trials: 27 other trials are more than there are, of 27 in all"),
        (
            {"no_improvement": {"trials": 3}},
            {},
            "no_improvement.trials: all 27 trials start at once; use syncs, time or cost instead",
        ),
        (
            {"no_improvement": {"trials": 7}},
            {"scheduler": ASHA},
            "no_improvement.trials: of 8 trials one improves, and the last ends it; lower it to 6",
        ),
        (
            {"no_improvement": {"syncs": 1}},
            {"scheduler": ASHA},
            "no_improvement.syncs: the scheduler has no SYNC; use trials, time or cost instead",
        ),
        (
            {"no_improvement": {"syncs": 3}},
            {},
            "no_improvement.syncs: of 4 SYNCs the first improves, and the last ends it; lower it to 2",
        ),
        ({"no_improvement": {}}, {}, "no_improvement: has no limit; write one of trials, time, cost, syncs, plateau"),
        ({"no_improvement": {"cost": 20}}, {}, "no_improvement.cost: 20.00 USD are no less than constraints.max_cost"),
        ({"no_improvement": {"time": "2h"}}, {}, "no_improvement.time: 2h is no shorter than constraints.deadline"),
        ({"worth": 0.5}, {}, "worth: 0.5 is not an improvement of the metric for a USD; write it as 0.001 per USD"),
    ],
)
def test_a_rule_that_cannot_act_is_refused_in_one_line(
    stop: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        Experiment(**WORDS | {"search": WORDS["search"] | changes | {"stop": stop}})
    assert str(refused.value).startswith(f"search.stop.{message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("stop", "changes", "message"),
    [
        (
            {"worth": "0.001 per USD"},
            {"constraints": {}},
            "worth: weighs what is left against its cost, and nothing caps that; set constraints.max_cost or deadline",
        ),
        (
            {"no_improvement": {"cost": 3}},
            {"resources": {"provider": "local"}},
            "no_improvement.cost: is in USD, and these instances have no price; use time instead",
        ),
    ],
)
def test_money_rules_need_money(stop: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"search.stop.{message}"):
        Experiment(**WORDS | {"search": WORDS["search"] | {"stop": stop}} | changes)


def test_the_estimate_says_that_it_is_an_upper_bound() -> None:
    stop = {"target": 0.9, "patience": {"iterations": 3}}
    assert stop_notes(Experiment(**WORDS | {"search": WORDS["search"] | {"stop": stop}})) == [
        "stop: time and cost are upper bounds; trials or the search may end before by target, patience."
    ]
    assert stop_notes(Experiment(**WORDS)) == []


def test_a_search_that_was_sized_has_a_remark_on_rules_that_cannot_act() -> None:
    scheduler = {"type": "none", "num_samples": 8, "max_t": "auto"}
    words = WORDS | {"search": WORDS["search"] | {"scheduler": scheduler, "stop": {"patience": {"iterations": 5}}}}
    assert stop_notes(Experiment(**words).sized("max_t", 4))[1:] == [
        "search.stop.patience.iterations: 5 iterations without an improvement are no fewer than a trial of 4 "
        "iterations has before its end; lower it to 2."
    ]


def test_the_report_says_what_was_not_needed() -> None:
    curves = {trial: [0.1 * (trial + 1)] * 3 for trial in range(4)}
    curves[1] = [0.2, 0.95, 0.3]
    job = job_of(Stage(trials=4, iterations=3), Stage(trials=2, iterations=3), stop=StopRules(target=0.9))
    controller = run(job, curves)
    result = summarise(controller.state, {"configurations": []}, 1e9)
    lines = headlines(result)
    assert lines[0].endswith("; trial 1 reached the target: score=0.95 after 2 iterations (target 0.9)")
    assert result.actual_jct_s == pytest.approx(20.0)
    whole = f"{duration(job.prediction.jct_s)} and {job.prediction.cost_usd:.4f} USD"
    assert lines[1].startswith(f"not needed: {duration(job.prediction.jct_s - 20.0)} and ")
    assert lines[1].endswith(f" USD of the {whole} that were expected")
    assert result.best is not None
    assert (result.best.trial, result.best.metrics["score"]) == (1, 0.95)
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_a_trial_shows_the_rule_that_ended_it() -> None:
    curves = {0: [0.5] * 9, 1: [0.1 * i for i in range(1, 10)]}
    job = job_of(Stage(trials=2, iterations=9), stop=StopRules(patience=Patience(iterations=2, min_delta=0.01)))
    controller = run(job, curves)
    result = summarise(controller.state, {"configurations": []}, 1e9)
    assert result.trials[0].status_text == "completed (ended at 3 by patience)"
    assert [sentence(cut) for cut in result.cuts] == [
        "trial 0 ended by patience after 3 iterations: no improvement of more than 0.01 in 2 evaluated iterations"
    ]
    assert "1 trial ended early by patience." in comparison(result).notes


# Another target


def ended(
    *, stop: StopRules, stages: tuple[Stage, ...] = (Stage(trials=4, iterations=3), Stage(trials=2, iterations=3))
) -> Any:
    """A search that trial 1 has ended after two iterations, its journal and its backend."""
    job = job_of(*stages, stop=stop)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    journal = MemoryJournal()
    controller, _, _ = run_virtual(job, journal=journal, backend=backend)
    return job, journal, backend, controller


def go_on(job: Job, journal: MemoryJournal, backend: VirtualBackend, target: float) -> Controller:
    """Ask for another target, and resume it."""
    controller = Controller(job)
    request = DriverRequest(id="harder", kind="extend", asked_at=0.0, target=target)
    drive(controller, backend, journal, observers=[check], requests=MemoryInbox([request]))
    return controller


@pytest.mark.parametrize(
    "stages",
    [
        (Stage(trials=4, iterations=3), Stage(trials=2, iterations=3)),
        (asha(sha(9, 1, 9, 3), 3),),
        (asha((Stage(trials=4, iterations=6),), 2),),
    ],
    ids=["sha", "asha", "none"],
)
@pytest.mark.parametrize("target", [0.3, 0.5, 0.6, 0.7])
def test_a_search_that_reached_its_target_goes_on_with_a_harder_one(stages: tuple[Stage, ...], target: float) -> None:
    job, journal, backend, first = ended(stop=StopRules(target=target), stages=stages)
    assert first.state.ended_by is not None
    assert not can_go_on(first.state)
    state = go_on(job, journal, backend, 2.0).state
    assert (state.outcome, state.ended_by, state.reason) == ("done", None, "")
    assert [record.target for record in state.history.of(LimitsExtended)] == [2.0]
    whole = run_virtual(replace(job, stop=StopRules()))[0].state
    assert [trial.iterations for trial in state.trials] == [trial.iterations for trial in whole.trials]


def test_a_target_that_is_reached_already_ends_the_search_at_the_next_event() -> None:
    job = job_of(Stage(trials=4, iterations=5), stop=StopRules())
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    controller = Controller(job)
    asked = TimedInbox(backend.now, DriverRequest(id="easy", kind="extend", asked_at=25.0, target=0.6))
    drive(controller, backend, MemoryJournal(), observers=[check], requests=asked)
    assert controller.state.reason == "trial 0 reached the target: score=0.75 after 3 iterations (target 0.6)"


def test_the_effect_of_another_target_is_shown_before() -> None:
    job, _, _, controller = ended(stop=StopRules(target=0.6))
    found = extension(controller.state, controller.state.now, target=0.99)
    assert (found.before.target, found.after.target, found.after.jct_s > found.before.jct_s) == (0.6, 0.99, True)
    with pytest.raises(InputError, match=r"it has ended, since trial 0 reached the target: .*; give a harder target"):
        extension(controller.state, controller.state.now, target=0.5)
    header = Header(name="x", created_at=0.0, job=job, setup={"provider": "virtual"})
    with pytest.raises(InputError, match="target: inf is not a finite number"):
        limits_of(header, controller.state, target=float("inf"))
    accuracy = State.of(replace(job, metric="accuracy"))
    with pytest.raises(InputError, match="target: 101 is never reached: accuracy is from 0 to 100"):
        limits_of(header, accuracy, target=101.0)


def test_a_running_search_shows_that_it_ends_by_a_target_it_has_reached() -> None:
    job = job_of(Stage(trials=4, iterations=5), stop=StopRules())
    states: list[State] = []
    run_virtual(job, observers=[lambda event, controller: states.append(copy.deepcopy(controller.state))])
    half = next(state for state in states if state.trials[0].iterations == 3)
    found = extension(half, half.now, target=0.6)
    assert (found.after.reason, found.after.jct_s) == (
        "trial 0 has reached the target, and the search ends",
        half.now - half.started_at,
    )


def test_repeats_reach_the_target_by_their_mean() -> None:
    """Trials 0 and 1 are of one configuration, and 2 and 3 of another."""
    curves = {0: [0.95, 0.95, 0.95], 1: [0.5, 0.7, 0.86], 2: [0.4, 0.5, 0.6], 3: [0.4, 0.5, 0.6]}
    job = replace(job_of(Stage(trials=4, iterations=4), stop=StopRules(target=0.9)), repeats=2)
    state = run(job, {trial: [*curve, 0.1] for trial, curve in curves.items()}).state
    assert (
        state.reason
        == "trial 0 reached the target: score=0.95 after 3 iterations (target 0.9 by the mean of its 2 repeats)"
    )
    assert state.trials[1].iterations == 3


def test_a_late_report_does_not_replace_what_reached_the_target() -> None:
    job = job_of(Stage(trials=4, iterations=5), stop=StopRules(target=0.6))
    state = run_virtual(job)[0].state
    assert state.ended_by is not None
    late: dict[str, Any] = {"occurred_at": state.now, "trial": 0, "attempt": 1, "late": True}
    controller = Controller(job)
    controller.state = state
    controller.state.course = "ending"
    checkpoint = CheckpointRef(url="virtual:0/3", digest="", size_bytes=0)
    controller.handle(TrialReported(**late, iterations=3, metrics={"score": 0.1}, checkpoint=checkpoint))
    best = best_trial(controller.state)
    assert best is not None
    assert (best.trial, best.iterations, best.metric("score")) == (0, 2, pytest.approx(2 / 3))


def test_a_target_waits_for_a_report_whose_checkpoint_is_written() -> None:
    job = job_of(Stage(trials=4, iterations=5), stop=StopRules(target=0.6))
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, checkpoint_every=4)
    state = run_virtual(job, backend=backend)[0].state
    assert state.reason == "trial 0 reached the target: score=0.8 after 4 iterations (target 0.6)"
    assert state.trials[0].checkpoint_iterations == 4


def test_the_last_sync_of_a_bracket_ends_the_search_before_the_next_bracket_begins() -> None:
    """Otherwise instances of the next bracket would be paid for until its first report."""
    stages = (Stage(trials=4, iterations=1), Stage(trials=2, iterations=1), Stage(trials=2, iterations=2))
    job = job_of(*stages, stop=StopRules(no_improvement=NoImprovement(syncs=1)))
    brackets = (
        Bracket(bracket=0, first_stage=0, num_stages=2, first_trial=0, lane=0),
        Bracket(bracket=1, first_stage=2, num_stages=1, first_trial=4, lane=0),
    )
    curves = {trial: [0.5, 0.5] for trial in range(6)}
    state = run(replace(job, brackets=brackets), curves).state
    assert state.reason == "no improvement since 1 SYNC"
    assert state.stages[-1].stage == 1
    assert state.now == state.stages[-1].ended_at


@pytest.mark.parametrize(
    "stages", [(Stage(trials=4, iterations=3), Stage(trials=2, iterations=3)), (asha(sha(9, 1, 9, 3), 3),)]
)
def test_a_search_that_another_rule_than_the_target_ended_is_not_resumed(stages: tuple[Stage, ...]) -> None:
    """Trials that were under way are no trials that were added after the end."""
    job = job_of(*stages, stop=StopRules(no_improvement=NoImprovement(time_s=0.5)))
    state = run(job, {trial: [0.5] * 9 for trial in range(9)}).state
    assert state.reason.startswith("no improvement for")
    assert any(trial.status is TrialStatus.QUEUED for trial in state.trials)
    assert not can_go_on(state)
