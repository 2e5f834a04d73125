"""What a later deadline or a larger budget would change: previews, and limits in the file's words."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest

from rubberband.errors import InputError
from rubberband.executor import (
    Controller,
    Event,
    Header,
    Job,
    Limits,
    RestPlanned,
    State,
    VirtualBackend,
    bill_usd,
    drive,
    extension,
    limits_of,
)
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB, STAGES
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan
from tests.builders.stories import Story, begun
from tests.builders.timed_requests import TimedInbox, extend

PROFILE = Profile(seconds_per_iteration={1: 100.0, 2: 60.0}, trial_startup_s=2.0)
OFFER = Offer(
    instance_type="test",
    gpus=2,
    price_usd_per_hour=36.0,
    max_instances=4,
    provision_delay_s=10.0,
    init_delay_s=5.0,
    head_price_usd_per_hour=0.9,
)


def planned(**limits: float) -> Job:
    """A job whose plan is the best one within `limits`."""
    constraints = PlanningConstraints(max_gpus_per_trial=2, **limits)  # type: ignore[arg-type]
    found = plan(STAGES, PROFILE, OFFER, constraints)
    return dataclasses.replace(
        JOB, plan=found.plan, prediction=found.prediction, offer=OFFER, profile=PROFILE, replan=True,
        max_gpus_per_trial=2, **limits,
    )  # fmt: skip


TIGHT = planned(deadline_s=220.0)
"""Two GPUs a trial from the start; with more time one is cheaper."""
CHEAPEST = planned()


def run(job: Job, *requests: object, until: Callable[[Event, State], bool] | None = None) -> Controller:
    """Drive `job` to its end, or `until` something has happened."""

    class Enough(Exception):
        pass

    def look(event: Event, controller: Controller) -> None:
        if until is not None and until(event, controller.state):
            raise Enough

    controller = Controller(job)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    inbox = TimedInbox(backend.now, *requests)  # type: ignore[arg-type]
    with contextlib.suppress(Enough):
        drive(controller, backend, MemoryJournal(), observers=[look], requests=inbox)
    return controller


def in_the_first_stage(_event: Event, state: State) -> bool:
    return bool(state.running())


def in_the_last_stage(_event: Event, state: State) -> bool:
    return len(state.stages) == len(STAGES)


def test_with_more_time_the_rest_becomes_cheaper_and_the_next_sync_says_so() -> None:
    stopped = run(TIGHT, until=in_the_first_stage)
    seen = extension(stopped.state, stopped.state.now, deadline_s=600.0)
    assert seen.stage == 1
    assert (seen.before.deadline_s, seen.after.deadline_s) == (220.0, 600.0)
    assert seen.before.plan == TIGHT.plan
    assert seen.before.feasible
    assert seen.after.feasible
    assert seen.added_s > 10.0
    assert seen.added_usd < -0.05
    assert not seen.applied
    extended = run(TIGHT, extend(50.0, deadline_s=600.0))
    (decision,) = extended.state.decisions
    assert (decision.changed, decision.plan) == (True, seen.after.plan)
    assert decision.jct_s == pytest.approx(seen.after.jct_s)
    assert decision.cost_usd == pytest.approx(seen.after.cost_usd)


def test_a_preview_changes_nothing() -> None:
    stopped = run(TIGHT, until=in_the_first_stage)
    before = repr(stopped.state)
    extension(stopped.state, stopped.state.now, deadline_s=600.0, driven=False)
    assert repr(stopped.state) == before


def test_in_the_last_stage_nothing_is_left_to_plan() -> None:
    stopped = run(TIGHT, until=in_the_last_stage)
    seen = extension(stopped.state, stopped.state.now, deadline_s=600.0)
    assert seen.stage == len(STAGES)
    assert (seen.added_s, seen.added_usd) == (0.0, 0.0)
    assert seen.after.jct_s == pytest.approx(TIGHT.prediction.jct_s)
    assert seen.after.plan == TIGHT.plan


def test_a_plan_that_is_held_fixed_stays() -> None:
    job = dataclasses.replace(TIGHT, replan=False)
    stopped = run(job, until=in_the_first_stage)
    seen = extension(stopped.state, stopped.state.now, deadline_s=600.0)
    assert seen.before.plan == seen.after.plan == job.plan
    assert seen.after.jct_s == pytest.approx(job.prediction.jct_s)
    assert seen.after.feasible


def test_before_it_starts_it_is_as_planned() -> None:
    seen = extension(Controller(TIGHT).state, 1e9, deadline_s=600.0)
    assert seen.before.jct_s == pytest.approx(TIGHT.prediction.jct_s)
    assert seen.before.cost_usd == pytest.approx(TIGHT.prediction.cost_usd)
    assert seen.after.cost_usd < seen.before.cost_usd


def test_a_run_that_its_cap_ends_says_so_and_finishes_with_a_larger_cap() -> None:
    job = dataclasses.replace(CHEAPEST, max_cost_usd=0.7 * CHEAPEST.prediction.cost_usd)
    enough_usd = 2.0 * CHEAPEST.prediction.cost_usd
    controller, journal = Controller(job), MemoryJournal()
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    assert drive(controller, backend, journal).outcome == "budget"
    backend.close()
    backend.sleep(1000.0)

    seen = extension(controller.state, backend.now(), max_cost_usd=enough_usd)
    assert not seen.before.feasible
    assert "max_cost" in seen.before.reason
    assert seen.before.cost_usd == pytest.approx(bill_usd(controller.state, backend.now()))
    assert seen.after.feasible

    again = Controller(job)
    inbox = TimedInbox(backend.now, extend(0.0, max_cost_usd=enough_usd))
    assert drive(again, backend, journal, requests=inbox).outcome == "done"
    ended_at = again.state.stages[-1].ended_at
    assert ended_at is not None
    assert ended_at - again.state.started_at == pytest.approx(seen.after.jct_s)
    assert bill_usd(again.state, again.state.now) == pytest.approx(seen.after.cost_usd, abs=0.005)


def test_an_interrupted_run_holds_no_instances() -> None:
    stopped = run(TIGHT, until=in_the_first_stage)
    now = stopped.state.now
    held = extension(stopped.state, now, deadline_s=600.0)
    gone = extension(stopped.state, now, deadline_s=600.0, driven=False)
    assert gone.after.jct_s > held.after.jct_s + 10.0
    assert gone.after.cost_usd > held.after.cost_usd
    hours_later = extension(stopped.state, now + 7200.0, deadline_s=9000.0, driven=False)
    assert hours_later.after.cost_usd < held.after.cost_usd + 5.0


@pytest.mark.parametrize(
    ("job", "limits", "text"),
    [
        (TIGHT, {}, "experiment already has these limits; give a later deadline, a larger max_cost or another target"),
        (TIGHT, {"deadline_s": 220.0, "max_cost_usd": 9.0}, "experiment already has these limits"),
        (TIGHT, {"deadline_s": 200.0}, "deadline: 3m20s is before the present one, 3m40s; give a later one"),
        (TIGHT, {"max_cost_usd": 8.5}, "max_cost: 8.50 USD is less than the present 9.00 USD; give more"),
        (CHEAPEST, {"deadline_s": 900.0}, "deadline: the experiment has none"),
    ],
)
def test_an_invalid_extension_is_refused(job: Job, limits: dict[str, float], text: str) -> None:
    stopped = run(dataclasses.replace(job, max_cost_usd=9.0), until=in_the_first_stage)
    with pytest.raises(InputError, match=text):
        extension(stopped.state, stopped.state.now, **limits)


def test_a_limit_that_there_is_not_and_a_deadline_that_has_passed_are_refused() -> None:
    free, tight = run(CHEAPEST, until=in_the_first_stage).state, run(TIGHT, until=in_the_first_stage).state
    with pytest.raises(InputError, match="max_cost: "):
        extension(free, free.now, max_cost_usd=9.0)
    with pytest.raises(InputError, match="that would have been 1m40s ago; give a later one"):
        extension(tight, tight.started_at + 500.0, deadline_s=400.0)


def test_an_ended_run_is_not_extended() -> None:
    done = run(TIGHT)
    with pytest.raises(InputError, match=r"it has ended \(done\)"):
        extension(done.state, done.state.now, deadline_s=600.0)
    job = dataclasses.replace(CHEAPEST, max_cost_usd=0.7 * CHEAPEST.prediction.cost_usd, deadline_s=900.0)
    stopped = run(job)
    with pytest.raises(InputError, match="raise max_cost"):
        extension(stopped.state, stopped.state.now, deadline_s=1200.0)


# Limits in the file's words

START = 1_800_000_000.0
"""2027-01-15T08:00:00Z."""
LIMITED = dataclasses.replace(JOB, deadline_s=1800.0, max_cost_usd=5.0)


def header(**setup: object) -> Header:
    return Header(name="test", created_at=START - 100.0, job=LIMITED, setup={"provider": "local", **setup})


def started() -> State:
    story = Story(LIMITED)
    story.state.started_at, story.state.course = START, "running"
    return story.state


def of_words(state: State, deadline: object = None, max_cost_usd: float | None = None, **setup: float) -> Limits:
    profiled = state.supposed(job=dataclasses.replace(state.job, profiling_s=setup.get("profiling_s", 0.0)))
    return limits_of(header(**setup), profiled, deadline=deadline, max_cost_usd=max_cost_usd)


def test_words_are_counted_from_the_start_and_profiling_counts_against_them() -> None:
    used = {"profiling_s": 120.0, "profiling_cost_usd": 0.5}
    assert of_words(started()) == Limits()
    assert of_words(started(), "40m") == Limits(deadline_s=2400.0)
    assert of_words(started(), 2400, 7.0) == Limits(deadline_s=2400.0, max_cost_usd=7.0)
    assert of_words(started(), "40m", 7.0, **used) == Limits(deadline_s=2280.0, max_cost_usd=6.5)


def test_an_instant_is_counted_from_the_start_on_a_real_clock_only() -> None:
    assert of_words(started(), "2027-01-15T09:00:00Z") == Limits(deadline_s=3600.0)
    assert of_words(started(), "2027-01-15T10:00:00+01:00", profiling_s=120.0) == Limits(deadline_s=3600.0)
    assert of_words(begun(LIMITED).state, "2027-01-15T09:00:00Z", provider="virtual") == Limits(deadline_s=3700.0)
    assert of_words(Controller(LIMITED).state, "2027-01-15T09:00:00Z") == Limits(deadline_s=3700.0)


def test_a_present_deadline_counts_from_the_start_however_long_it_waited_for_that() -> None:
    assert of_words(started(), "2027-01-15T08:30:00Z", 7.0) == Limits(deadline_s=1800.0, max_cost_usd=7.0)
    with pytest.raises(InputError, match="08:29:00Z is before the present one, 2027-01-15T08:30:00Z"):
        of_words(started(), "2027-01-15T08:29:00Z")


@pytest.mark.parametrize(
    ("deadline", "max_cost_usd", "text"),
    [
        ("31m", None, "deadline: 31m is before the present one, 32m; give a later one"),
        ("2027-01-15T08:20:00Z", None, "2027-01-15T08:20:00Z is before the present one, 2027-01-15T08:30:00Z"),
        (None, 5.25, "max_cost: 5.25 USD is less than the present 5.50 USD; give more"),
        (None, float("nan"), "max_cost: nan is not an amount; give USD, such as 5"),
        (None, float("inf"), "max_cost: inf is not an amount"),
        ("soon", None, "soon"),
        ("2027-01-15T09:00:00", None, "time zone"),
        (0, None, "0s is over before it started"),
    ],
)
def test_words_that_extend_nothing_are_refused_in_the_same_words(
    deadline: object, max_cost_usd: float | None, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        of_words(started(), deadline, max_cost_usd, profiling_s=120.0, profiling_cost_usd=0.5)


def test_the_limits_of_the_preview_are_those_that_are_granted_later() -> None:
    extended = run(TIGHT, extend(50.0, deadline_s=600.0), until=lambda event, _: isinstance(event, RestPlanned))
    assert extended.job.deadline_s == 600.0
    again = extension(extended.state, extended.state.now, deadline_s=700.0)
    assert again.before.deadline_s == 600.0
