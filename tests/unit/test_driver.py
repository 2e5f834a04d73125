"""The driver loop, with a controller and a backend that are told what to say."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest

from rubberband.executor import (
    Command,
    Controller,
    DriverResumed,
    Event,
    Finish,
    LaunchInstance,
    ReleaseInstance,
    Started,
    Tick,
    TrialReported,
    drive,
    replay,
)
from tests.builders.jobs import JOB
from tests.builders.memory import MemoryJournal
from tests.builders.virtual_runs import run_virtual

FINISH = Finish(outcome="done", reason="")


class ScriptedController(Controller):
    """Answers each event with the next of its answers: orders, and how far the budget reaches then."""

    def __init__(self, answers: Sequence[tuple[Command | None, float]]) -> None:
        super().__init__(JOB)
        self._answers, self._reach = list(answers), math.inf

    def handle(self, event: Event) -> list[Command]:
        """The next answer."""
        order, self._reach = self._answers.pop(0)
        return [] if order is None else [order]

    def hold_until(self) -> float:
        """Of the latest answer."""
        return self._reach


class Listening:
    """A backend that keeps what it is told."""

    def __init__(self, rounds: Sequence[Sequence[Event]]) -> None:
        self.calls: list[object] = []
        self._rounds = list(rounds)

    def now(self) -> float:
        return 0.0

    def hold_until(self, instant: float) -> None:
        self.calls.append(instant)

    def execute(self, command: Command) -> None:
        self.calls.append(command)

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        return self._rounds.pop(0)

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        return DriverResumed(occurred_at=0.0, live=(), ended=())

    def close(self) -> None:
        pass


TICK = Tick(occurred_at=0.0)
LAUNCH, RELEASE = LaunchInstance(instance="i-001"), ReleaseInstance(instance="i-002")


@pytest.mark.parametrize(
    ("answers", "until"),
    [
        ([(LAUNCH, 50.0), (LAUNCH, 80.0), (None, 90.0)], 50.0),
        ([(LAUNCH, 80.0), (RELEASE, 50.0), (None, 90.0)], 50.0),
        ([(LAUNCH, 80.0), (None, 40.0), (None, 60.0)], 60.0),
        ([(None, 20.0), (None, 30.0), (None, 90.0)], 90.0),
    ],
)
def test_the_least_reach_of_several_orders_counts_for_leases(
    answers: list[tuple[Command | None, float]], until: float
) -> None:
    """Each order was reserved for by what the budget reached when it was given; leases are put off before it is."""
    backend = Listening([[TICK] * len(answers), [TICK]])
    journal = MemoryJournal()
    journal.append([Started(occurred_at=0.0)])
    controller = ScriptedController([(None, math.inf), (None, math.inf), *answers, (FINISH, math.inf)])
    assert drive(controller, backend, journal) == FINISH
    orders = [order for order, _ in answers if order is not None]
    assert backend.calls == [math.inf, until, *orders, math.inf]


def test_the_error_of_an_impossible_transition_has_the_story_of_its_trial() -> None:
    journal = MemoryJournal()
    run_virtual(JOB, journal=journal)
    reports = [event for _, event in journal.events() if isinstance(event, TrialReported)]
    broken = reports[-1]

    class Breaking(Controller):
        def handle(self, event: Event) -> list[Command]:
            if event is broken:
                raise KeyError(broken.trial)
            return super().handle(event)

    with pytest.raises(KeyError) as raised:
        replay(Breaking(JOB), journal)
    (note,) = raised.value.__notes__
    at, head, *story = note.splitlines()
    assert at == f"at {broken}"
    assert head == f"the story of trial {broken.trial}:"
    assert len(story) >= sum(report.trial == broken.trial for report in reports) > 1
    assert all(f"trial={broken.trial}," in line for line in story)
