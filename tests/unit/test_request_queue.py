"""What is asked of a driver while it drives: taken in once, journalled before it is let go of. Virtual runs."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.experiments.queueing import Queue
from rubberband.executor import (
    CancelRequested,
    Controller,
    DriverRequest,
    DriverResumed,
    Event,
    ExperimentFolder,
    Finish,
    Inbox,
    Job,
    LimitsChanged,
    LimitsExtended,
    Observer,
    Requests,
    TrialReported,
    VirtualBackend,
    drive,
    session,
)
from rubberband.executor import read_journal as read
from rubberband.planner.exact.model import predict
from rubberband.values.profile import Profile
from tests.builders.invariants import validate
from tests.builders.jobs import JOB
from tests.builders.memory import MemoryInbox, MemoryJournal
from tests.builders.sessions import Killed, dying_after, run_spec
from tests.builders.timed_requests import TimedInbox, cancel, extend

SLOW = Profile(seconds_per_iteration={1: 100.0, 2: 60.0})
FREE = dataclasses.replace(JOB, profile=SLOW, prediction=predict(JOB.stages, JOB.plan, SLOW, JOB.offer))
"""It takes 300 s, and the second stage begins at 100 s."""
CAPPED = dataclasses.replace(FREE, max_cost_usd=0.7 * FREE.prediction.cost_usd, deadline_s=600.0)
"""Without more money it is stopped in its second stage."""
ENOUGH_USD = 2.0 * FREE.prediction.cost_usd


class Run:
    """A job on a virtual clock, over several drivers."""

    def __init__(self, job: Job, *requests: DriverRequest) -> None:
        self.job = job
        self.backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
        self.journal = MemoryJournal()
        self.inbox: TimedInbox = TimedInbox(self.backend.now, *requests)
        self.controller = Controller(job)

    def drive(self, requests: Requests | None = None, observers: tuple[Observer, ...] = ()) -> Finish:
        self.controller = Controller(self.job)
        watching = [lambda _event, controller: validate(controller), *observers]
        return drive(self.controller, self.backend, self.journal, observers=watching, requests=requests or self.inbox)

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.journal.events()]

    def trained(self) -> list[tuple[int, int]]:
        reports = [event for event in self.events if isinstance(event, TrialReported)]
        return sorted((report.trial, report.iterations) for report in reports)


def whole() -> list[tuple[int, int]]:
    run = Run(FREE)
    run.drive()
    return run.trained()


def test_without_more_money_it_is_stopped_and_with_it_in_time_it_is_done() -> None:
    stopped = Run(CAPPED)
    assert stopped.drive().outcome == "budget"
    ended_at = stopped.controller.state.ended_at
    assert ended_at is not None
    for at in (120.0, ended_at):  # the very instant of the stop
        run = Run(CAPPED, extend(at, max_cost_usd=ENOUGH_USD))
        assert run.drive().outcome == "done"
        assert run.inbox.pending() == []
        assert run.trained() == whole()


def test_a_run_that_its_cap_ended_is_extended_resumed_and_repeats_nothing() -> None:
    run = Run(CAPPED)
    run.drive()
    run.backend.close()
    run.inbox.put(extend(0.0, max_cost_usd=ENOUGH_USD))
    assert run.drive().outcome == "done"
    assert run.trained() == whole()
    kinds = [type(event) for event in run.events]
    assert kinds.index(LimitsChanged) + 1 == kinds.index(DriverResumed)


def test_a_request_to_end_ends_it_later_ones_are_let_go_of_and_a_resume_resumes() -> None:
    run = Run(FREE, cancel(120.0), cancel(120.0, "c-2"))

    def ask_again(event: Event, _controller: Controller) -> None:
        if isinstance(event, CancelRequested):
            run.inbox.put(cancel(120.0, "c-3"))

    assert run.drive(observers=(ask_again,)).outcome == "cancelled"
    assert run.inbox.pending() == []
    run.backend.close()
    assert run.drive().outcome == "done"


def test_the_same_request_from_two_sides_counts_once() -> None:
    run = Run(CAPPED, extend(5.0, max_cost_usd=ENOUGH_USD))

    def ask_again(_event: Event, _controller: Controller) -> None:
        run.inbox.put(extend(5.0, max_cost_usd=2.0 * ENOUGH_USD))

    run.drive(observers=(ask_again,))
    assert [granted.max_cost_usd for granted in run.controller.state.history.of(LimitsExtended)] == [ENOUGH_USD]


def test_two_extensions_at_once_leave_the_larger_limits() -> None:
    run = Run(CAPPED, extend(5.0, deadline_s=700.0), extend(5.0, "r-2", deadline_s=650.0, max_cost_usd=ENOUGH_USD))
    run.drive()
    assert (run.controller.job.deadline_s, run.controller.job.max_cost_usd) == (700.0, ENOUGH_USD)


class DyingInbox(MemoryInbox):
    """Its driver dies between the journal and the discarding."""

    def discard(self, id: str) -> None:
        raise Killed


@pytest.mark.parametrize("asked", [extend(0.0, max_cost_usd=ENOUGH_USD), cancel(0.0)], ids=["extend", "cancel"])
def test_requests_that_a_driver_journalled_and_kept_are_taken_once(asked: DriverRequest) -> None:
    run = Run(CAPPED if asked.kind == "extend" else FREE)
    with pytest.raises(Killed):
        run.drive(DyingInbox([asked]))
    run.inbox.put(asked)
    assert run.drive().outcome == "done"
    assert run.inbox.pending() == []
    assert sum(isinstance(event, LimitsChanged | CancelRequested) for event in run.events) == 1


def test_an_interrupted_run_that_was_extended_resumes_with_its_new_limits() -> None:
    run = Run(CAPPED)
    left = iter(range(8))

    def die(_event: Event, _controller: Controller) -> None:
        if next(left, None) is None:
            raise Killed

    with pytest.raises(Killed):
        run.drive(observers=(die,))
    run.backend.forget()
    run.inbox.put(extend(0.0, max_cost_usd=ENOUGH_USD))
    assert run.drive().outcome == "done"
    assert run.trained() == whole()


def test_a_folder_s_inbox_reaches_its_driver_and_the_report_mentions_it(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    session.create(folder, CAPPED, run_spec(checkpoints=str(folder.checkpoints)))
    assert session.run(folder).outcome == "budget"
    assert session.run(folder, view=dying_after(0)).outcome == "budget"
    Inbox(folder.inbox).put(extend(0.0, max_cost_usd=ENOUGH_USD))
    assert read(folder).max_cost_usd == CAPPED.max_cost_usd
    result = session.run(folder)
    assert (result.outcome, result.max_cost_usd) == ("done", ENOUGH_USD)
    assert result.planned_cost_usd == FREE.prediction.cost_usd
    (extension,) = result.extensions
    assert (extension.max_cost_before_usd, extension.max_cost_usd) == (CAPPED.max_cost_usd, ENOUGH_USD)
    assert (extension.deadline_before_s, extension.deadline_s) == (600.0, 600.0)
    assert Inbox(folder.inbox).pending() == []
    assert read(folder) == result


OWNERS = "abcd"


def started(queue: Queue, owners: dict[str, str], number: int) -> str:
    """The owners of those that start in a single slot, one after the other."""
    found = []
    for _ in range(number):
        name = queue.next({})
        assert name is not None
        queue.drop(name)
        queue.took_turn(owners[name])
        found.append(owners[name])
    return "".join(found)


def queue_of(arrivals: str, **weights: float) -> tuple[Queue, dict[str, str]]:
    """A queue into which experiments of these owners came, one after the other."""
    queue, owners = Queue(weights), {f"{owner}-{number}": owner for number, owner in enumerate(arrivals)}
    for name, owner in owners.items():
        queue.put(name, owner)
    return queue, owners


def test_owners_take_turns_and_each_ones_experiments_keep_their_order() -> None:
    queue, owners = queue_of("aaaaabbc")
    assert started(queue, owners, 8) == "abcabaaa"
    assert queue.next({}) is None
    queue, _ = queue_of("aab")
    assert [queue.next({}, without) for without in ((), {"a-0"}, {"a-0", "a-1"})] == ["a-0", "a-1", "b-2"]
    queue.put("a-0", "a")
    assert list(queue) == ["a-0", "a-1", "b-2"]


def test_slots_go_to_the_owner_with_fewest_running_and_latest_turn_for_its_weight() -> None:
    queue, _ = queue_of("aab", a=2.0)
    assert queue.next({"a": 1, "b": 1}) == "a-0"
    assert queue.next({"a": 2, "b": 0}) == "b-2"
    queue, owners = queue_of("a" * 20 + "b" * 20, a=3.0)
    assert Counter(started(queue, owners, 16)) == {"a": 12, "b": 4}


def test_an_owner_saves_no_turns_while_it_asks_none() -> None:
    queue, owners = queue_of("a" * 40)
    started(queue, owners, 20)
    for number in range(20):
        owners[f"b-{number}"] = "b"
        queue.put(f"b-{number}", "b")
    assert started(queue, owners, 8) in ("babababa", "baababab")


class Slots:
    """A service with some slots, and what it starts."""

    def __init__(self, slots: int, weights: dict[str, float]) -> None:
        self.queue, self.slots, self.weights = Queue(weights), slots, weights
        self.running: deque[str] = deque()
        self.waiting: Counter[str] = Counter()
        self.passed: dict[str, Counter[str]] = {}
        """Owner that waits and has none running -> starts of each other one since."""

    def arrive(self, owner: str, name: str) -> None:
        self.queue.put(name, owner)
        self.waiting[owner] += 1

    def start(self) -> None:
        while len(self.running) < self.slots and (name := self.queue.next(Counter(self.running))) is not None:
            owner, running = name[0], Counter(self.running)
            least = min(running[one] / self.weights[one] for one in self.waiting if self.waiting[one])
            assert running[owner] / self.weights[owner] == least
            self.queue.drop(name)
            self.queue.took_turn(owner)
            self.waiting[owner] -= 1
            for other in OWNERS:
                if self.waiting[other] and not running[other] and other != owner:
                    self.passed.setdefault(other, Counter())[owner] += 1
                else:
                    self.passed.pop(other, None)
            for other, passed in self.passed.items():
                for one, number in passed.items():  # since its latest turn began, at most one turn's virtual time
                    assert number <= 1 + self.weights[one] / self.weights[other] + 1e-9
            self.running.append(owner)


@given(
    st.integers(1, 3),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(OWNERS), max_size=len(OWNERS)),
    st.lists(st.one_of(st.sampled_from(OWNERS), st.integers(0, 2)), max_size=60),
)
def test_no_owner_is_passed_over_without_end(slots: int, weights: Sequence[float], story: list[str | int]) -> None:
    """A letter: an experiment of that owner arrives; a number: that one of those that run ends."""
    service = Slots(slots, dict(zip(OWNERS, weights, strict=True)))
    for number, happens in enumerate(story):
        if isinstance(happens, str):
            service.arrive(happens, f"{happens}-{number}")
        elif happens < len(service.running):
            del service.running[happens]
        service.start()
    while service.running:
        service.running.popleft()
        service.start()
    assert not len(service.queue)
