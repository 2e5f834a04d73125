"""What the rest of a search may bring for its money: told at each SYNC, and acted on by `search.stop.worth`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rubberband.executor import Event, RestPlanned, State, TrialStatus, best_trial, summarise
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import DriverResumed, LiveInstance, RestValued
from rubberband.executor.core.forecast import forecast
from rubberband.executor.core.history import SearchEnd
from rubberband.executor.core.worth import results_of, worth_of
from rubberband.executor.journal.journal import decode_event, encode_event
from rubberband.values.worth import RestWorth, likelihood
from rubberband.views.live.narration import Narrator
from rubberband.views.report.headlines import headlines
from rubberband.views.report.tables import worths
from rubberband.views.story import story
from tests.builders.sampled_runs import Objective, SampledRun, an_experiment

SHA = {"type": "sha", "num_samples": 27, "grace_period": 1, "max_t": 40, "reduction_factor": 3}
SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "sha": SHA,
    "hyperband": {"type": "hyperband", "max_t": 27, "reduction_factor": 3},
    "asha": {"type": "asha", "num_samples": 30, "max_t": 27, "reduction_factor": 3},
    "none": {"type": "none", "num_samples": 16, "max_t": 6},
}


def flat(configuration: Mapping[str, Any], iterations: int) -> float:
    """Loss that no iteration changes."""
    return float(abs(configuration["x"]))


def falling(configuration: Mapping[str, Any], iterations: int) -> float:
    """Loss that falls to the end."""
    return float(abs(configuration["x"]) / 10.0 + 30.0 / iterations)


def searched(
    objective: Objective, worth: str | None = None, scheduler: Mapping[str, Any] = SHA, **search: Any
) -> SampledRun:
    stop = {} if worth is None else {"stop": {"worth": worth}}
    experiment = an_experiment(
        3, scheduler=scheduler, sampler={"type": "random"}, constraints={"max_cost": 1000}, **stop, **search
    )
    return SampledRun(experiment, objective).drive()


def looks(state: State) -> list[RestWorth]:
    return list(state.history.of(RestWorth))


def test_a_rest_that_brings_nothing_is_not_bought() -> None:
    whole, cut = searched(flat), searched(flat, "0.001 per USD")
    state = cut.controller.state
    (end,) = state.history.of(SearchEnd)
    (found,) = looks(state)
    assert (state.outcome, end.rule) == ("done", "worth")
    assert end.reason == f"{found.in_words('loss')}: 0 per USD, below worth=0.001"
    assert found.in_words("loss").startswith(
        f"another {found.price} improve loss={found.best:.6g} with a chance of 0 %"
    )
    best, theirs = best_trial(state), best_trial(whole.controller.state)
    assert best is not None
    assert theirs is not None
    assert best.metric("loss") == theirs.metric("loss")
    spent_usd, whole_usd = (bill_usd(run.controller.state, run.controller.state.now) for run in (cut, whole))
    assert spent_usd + found.left_usd == pytest.approx(whole_usd)
    result = summarise(state, {"configurations": []}, state.now)
    assert any(line.startswith("not needed: ") for line in headlines(result))
    assert [line.text for line in story(result) if line.kind == "worth"] == [found.in_words("loss")]
    assert len(worths(result).rows) == 1


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_rest_that_brings_much_is_bought_under_each_scheduler(name: str) -> None:
    told = searched(falling, scheduler=SCHEDULERS[name])
    kept = searched(falling, "0.0001 per USD", SCHEDULERS[name])
    first = looks(told.controller.state)[0]
    assert first.chances[0][1] > 0.5
    assert first == looks(kept.controller.state)[0]
    assert [one.at_s for one in looks(told.controller.state)] == sorted(
        one.at_s for one in looks(told.controller.state)
    )
    ends = kept.controller.state.history.of(SearchEnd)
    per_usd = [one.per_usd for one in looks(kept.controller.state)]
    assert all(value is None or value >= 0.0001 for value in per_usd[: len(per_usd) - len(ends)])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_rest_that_brings_nothing_ends_each_scheduler(name: str) -> None:
    state = searched(flat, "1000 per USD", SCHEDULERS[name]).controller.state
    assert [end.rule for end in state.history.of(SearchEnd)] == ["worth"]
    assert len(looks(state)) == 1


def test_too_few_reports_tell_nothing_and_end_nothing() -> None:
    scheduler = {"type": "sha", "num_samples": 9, "grace_period": 1, "max_t": 3, "reduction_factor": 3}
    run, said = searched(flat, "1000 per USD", scheduler), list[str]()
    controller, narrator = Controller(run.job), Narrator(run.job)
    for _, event in run.journal.events():
        controller.handle(event)
        said += narrator.lines(event, controller)
    state = run.controller.state
    assert sum("its worth is not known yet" in line for line in said) == 1
    assert looks(state) == []
    assert state.outcome == "done"
    assert not state.history.of(SearchEnd)


def test_higher_and_lower_metrics_have_the_same_chances() -> None:
    lower = looks(searched(falling).controller.state)
    higher = looks(searched(lambda *about: -falling(*about), mode="max").controller.state)
    assert len(lower) == len(higher) > 0
    for mine, theirs in zip(lower, higher, strict=True):
        assert (mine.chances, mine.expected, mine.left_usd) == (theirs.chances, theirs.expected, theirs.left_usd)
        assert mine.best == -theirs.best


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_rest_costs_what_is_forecast(name: str) -> None:
    run, seen = searched(falling, scheduler=SCHEDULERS[name]), list[tuple[float, float]]()
    controller = Controller(run.job)
    for _, event in run.journal.events():
        controller.handle(event)
        worth = event.worth if isinstance(event, (RestPlanned, RestValued)) else None
        if worth is not None:
            expected, state = forecast(controller.state, event.occurred_at), controller.state
            left_usd = expected.cost_usd - bill_usd(state, event.occurred_at)
            seen.append((worth.left_usd, left_usd))
            assert worth.left_s == pytest.approx(expected.jct_s - state.elapsed_s(event.occurred_at), abs=0.01)
    assert seen
    assert [told for told, _ in seen] == pytest.approx([found for _, found in seen], abs=1e-6)


def test_trials_that_were_trained_to_the_end_still_compete() -> None:
    """A search whose best trial is done does not end worse, whatever becomes of the bracket under way."""
    run, seen = searched(falling, scheduler={"type": "hyperband", "max_t": 9, "reduction_factor": 3}), 0
    controller = Controller(run.job)
    for _, event in run.journal.events():
        controller.handle(event)
        worth = event.worth if isinstance(event, (RestPlanned, RestValued)) else None
        best = best_trial(controller.state)
        if worth is not None and best is not None and best.status is TrialStatus.COMPLETED:
            seen += 1
            assert worth.worse == 0.0
    assert seen


def test_the_rest_is_looked_at_again_only_once_a_share_of_the_results_has_come() -> None:
    scheduler = {"type": "asha", "num_samples": 64, "max_t": 9, "reduction_factor": 3}
    run, looked_at = searched(falling, scheduler=scheduler), list[int]()
    controller = Controller(run.job)
    for _, event in run.journal.events():
        controller.handle(event)
        if isinstance(event, RestValued):
            looked_at.append(results_of(controller.state))
    assert len(looked_at) > 4
    assert min(after - before for before, after in pairwise(looked_at)) >= 64 // 16


@pytest.mark.parametrize("name", SCHEDULERS)
def test_it_is_narrated(name: str) -> None:
    experiment = an_experiment(3, scheduler=SCHEDULERS[name], sampler={"type": "random"})
    run, said = SampledRun(experiment, falling), list[str]()
    narrator = Narrator(run.job)

    def tell(event: Event, controller: Controller) -> None:
        said.extend(narrator.lines(event, controller))

    run.drive(observers=[tell])
    told = [line for line in said if "rest: another" in line]
    assert len(told) == len(looks(run.controller.state)) > 0


def test_journals_without_it_are_read() -> None:
    (event, *_) = [one for _, one in searched(falling).journal.events() if isinstance(one, RestPlanned) and one.worth]
    kind, body = encode_event(event)
    assert decode_event(kind, body) == event
    head, _, tail = body.partition(',"worth":')
    older = decode_event(kind, f"{head}{tail[tail.index('}') + 1 :]}")
    assert isinstance(older, RestPlanned)
    assert older.worth is None


@pytest.mark.parametrize(
    ("chance", "text"), [(0.0, "0 %"), (0.002, "less than 1 %"), (0.04, "4 %"), (0.996, "99 %"), (1.0, "100 %")]
)
def test_a_chance_is_never_rounded_to_certainty(chance: float, text: str) -> None:
    assert likelihood(chance) == text


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resume_decides_alike_wherever_the_driver_died(name: str) -> None:
    """A new driver reads each look from the journal, and ends the search at the same one."""
    whole = searched(falling, "0.9 per USD", SCHEDULERS[name])
    count = sum(1 for _ in whole.journal.events())
    valued = [at for at, event in whole.journal.events() if isinstance(event, (RestPlanned, RestValued))]
    points = {at + 1 + ahead for at in valued for ahead in (0, 1)}
    for kill_after in sorted(points)[:: max(1, len(points) // 6)]:
        run = SampledRun(whole.experiment, falling).drive(kill_after=kill_after)
        before = looks(run.controller.state)
        run.drive()
        assert looks(run.controller.state)[: len(before)] == before
        ends = run.controller.state.history.of(SearchEnd)
        replayed = Controller(run.job)
        for _, event in run.journal.events():
            replayed.handle(event)
        assert replayed.state.history.of(SearchEnd) == ends
        assert looks(replayed.state) == looks(run.controller.state)
    assert count > max(points) - 1


def test_repeats_of_a_configuration_are_one_curve() -> None:
    once = looks(searched(falling).controller.state)
    twice = looks(searched(falling, repeats=2).controller.state)
    assert [(one.best, one.chances) for one in once] == [(one.best, one.chances) for one in twice]


def test_the_bill_of_a_stage_has_instances_that_were_held_while_no_driver_ran() -> None:
    """It was killed between a SYNC and the next stage; the rows of the report add up to the bill."""
    run = searched(falling)
    controller = Controller(run.job)
    for _, event in run.journal.events():
        if isinstance(event, RestPlanned):
            now = controller.state.now + 100.0
            live = tuple(
                LiveInstance(instance=one.instance, running_at=one.running_at)
                for one in controller.state.instances.values()
                if one.ended_at is None
            )
            controller.handle(DriverResumed(occurred_at=now, live=live, ended=()))
            controller.handle(replace(event, occurred_at=now))
            break
        controller.handle(event)
    result = summarise(controller.state, {"configurations": []}, controller.state.now + 1.0)
    stages = [stage.actual_cost_usd for stage in result.stages if stage.actual_cost_usd is not None]
    assert len(stages) == 2
    assert sum(stages) == pytest.approx(result.actual_cost_usd)


def test_a_rest_of_which_nothing_is_known_has_no_price_and_no_line() -> None:
    """While the last repeat of a configuration is awaited, no trial is known to go on: `another 0.00 USD and 0s`."""
    run = searched(falling)
    controller = Controller(run.job)
    for _, event in run.journal.events():
        controller.handle(event)
        if looks(controller.state):
            break
    state = controller.state
    expected = forecast(state, state.now)
    assert worth_of(state, state.now, expected) is not None
    assert worth_of(state, state.now, replace(expected, jct_s=state.elapsed_s(state.now))) is None
