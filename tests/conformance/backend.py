"""What `rubberband.executor.core.backend.Backend` promises, as tests that every implementation passes.

A test module makes a class of `BackendSuite`, with a fixture `talk` of its own: a conversation with a backend that
holds the instances `a` and `b`, of two slots each, and may hold one more. The tests run in the order in which they are
written here: the last ones give back what the others train on.
"""

from __future__ import annotations

from rubberband.executor import (
    DriverResumed,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    LaunchInstance,
    ReleaseInstance,
    StopTrial,
    TrialFailed,
    TrialReported,
)
from tests.builders.conversation import Conversation, kinds

WELL, RAISES, SLOW, ENDS = 0, 3, 6, 8
"""Trials: the second iteration of RAISES raises at the latest, SLOW has more to do than any test waits for, and ENDS
ends by itself with its second iteration."""


def require_adoption(talk: Conversation, resumed: DriverResumed, *, known: str, unknown: str) -> None:
    """After a driver's death: `known` is adopted and gets ready again, and `unknown` has been released."""
    assert [live.instance for live in resumed.live] == [known]
    assert resumed.live[0].running_at is not None
    (ended,) = resumed.ended
    assert ended.instance == unknown
    assert ended.running_at <= ended.ended_at <= resumed.occurred_at + 5.0
    assert talk.until(InstanceReady).instance == known
    talk.start(WELL, (known, 0), until=2)
    talk.report(WELL, 2)
    assert [event.attempt for event in talk.of_trial(WELL) if isinstance(event, TrialReported)] == [1, 1]


class BackendSuite:
    """Holds for every backend."""

    def test_an_instance_runs_before_it_is_ready(self, talk: Conversation) -> None:
        for instance in ("a", "b"):
            running, ready = [event for event in talk.heard if getattr(event, "instance", None) == instance]
            assert isinstance(running, InstanceRunning)
            assert isinstance(ready, InstanceReady)
            assert running.running_at <= running.occurred_at <= ready.occurred_at

    def test_a_trial_reports_every_iteration_and_resumes_from_its_checkpoint_on_more_slots(
        self, talk: Conversation
    ) -> None:
        before = len(talk.of_trial(WELL))
        talk.start(WELL, ("a", 0), until=2)
        alone = talk.report(WELL, 2)
        talk.start(WELL, ("a", 0), ("b", 1), done=2, until=4, checkpoint=alone.checkpoint)
        talk.report(WELL, 4)
        events = talk.of_trial(WELL)[before:]
        assert kinds(events) == ["TrialStarted", "TrialReported", "TrialReported"] * 2
        reports = [event for event in events if isinstance(event, TrialReported)]
        assert [report.iterations for report in reports] == [1, 2, 3, 4]
        assert all("loss" in report.metrics for report in reports)

    def test_a_trial_repeats_first_what_its_checkpoint_lacks(self, talk: Conversation) -> None:
        before = len(talk.of_trial(WELL))
        talk.start(WELL, ("a", 0), until=2)
        saved = talk.report(WELL, 2)
        for done, checkpoint in ((3, saved.checkpoint), (1, None)):
            talk.start(WELL, ("b", 0), done=done, until=done + 1, checkpoint=checkpoint)
            talk.report(WELL, done + 1)
        text = talk.of_trial(WELL)[before:]
        assert [(type(event).__name__, getattr(event, "iterations", 0)) for event in text] == [
            *[("TrialStarted", 0), ("TrialReported", 1), ("TrialReported", 2)],
            *[("TrialStarted", 0), ("TrialRepeated", 3), ("TrialReported", 4)],
            *[("TrialStarted", 0), ("TrialRepeated", 1), ("TrialReported", 2)],
        ]

    def test_a_failure_is_said_once_and_its_slot_can_be_used_again(self, talk: Conversation) -> None:
        before = len(talk.of_trial(RAISES))
        attempt = talk.start(RAISES, ("a", 1), until=5)
        failed = talk.until(TrialFailed)
        assert (failed.trial, failed.attempt, failed.kind) == (RAISES, attempt, "raised")
        talk.start(WELL, ("a", 1), until=1)
        talk.report(WELL, 1)
        names = kinds(talk.of_trial(RAISES)[before:])
        assert (names[0], names[-1], names.count("TrialFailed")) == ("TrialStarted", "TrialFailed", 1)

    def test_the_last_report_of_a_trial_that_ends_by_itself_says_so_and_its_slots_can_be_used_again(
        self, talk: Conversation
    ) -> None:
        talk.start(ENDS, ("a", 0), ("a", 1), until=5)
        last = talk.report(ENDS, 2)
        assert last.ended
        assert last.checkpoint is not None
        for gpu in range(2):
            talk.start(WELL, ("a", gpu), until=1)
            talk.report(WELL, 1)
        assert kinds(talk.of_trial(ENDS)) == ["TrialStarted", "TrialReported", "TrialReported"]

    def test_a_stopped_trial_says_no_more_and_its_slot_can_be_used_again(self, talk: Conversation) -> None:
        attempt = talk.start(SLOW, ("a", 1), until=1000)
        talk.report(SLOW, 1)
        for _ in range(2):
            talk.backend.execute(StopTrial(trial=SLOW, attempt=attempt))
        talk.start(WELL, ("a", 1), until=1)
        talk.report(WELL, 1)
        assert [event for event in talk.listen(0.5) if getattr(event, "trial", None) == SLOW] == []

    def test_an_instance_too_many_is_refused_with_the_reason(self, talk: Conversation) -> None:
        talk.backend.execute(LaunchInstance(instance="e"))
        talk.backend.execute(LaunchInstance(instance="f"))
        refused = talk.until(InstanceRefused)
        assert refused.reason
        other = {"e": "f", "f": "e"}[refused.instance]
        talk.backend.execute(ReleaseInstance(instance=other))
        assert talk.until(InstanceReleased).instance == other

    def test_waiting_ends_when_it_is_asked_to(self, talk: Conversation) -> None:
        talk.listen(0.2)
        wake_at = talk.backend.now() + 0.2
        while talk.backend.now() < wake_at:
            assert list(talk.backend.next_events(wake_at)) == []

    def test_a_released_instance_says_so_once(self, talk: Conversation) -> None:
        asked_at = talk.backend.now()
        for _ in range(2):
            talk.backend.execute(ReleaseInstance(instance="b"))
        released = talk.until(InstanceReleased)
        assert released.instance == "b"
        assert asked_at <= released.ended_at <= released.occurred_at
        assert [event for event in talk.listen(1.0) if getattr(event, "instance", None) == "b"] == []

    def test_instants_never_decrease(self, talk: Conversation) -> None:
        instants = [event.occurred_at for event in talk.heard]
        assert instants == sorted(instants)
