"""An instance, whatever happens to it in whatever order: its driver hears of one beginning and of one end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rubberband.cloud.provider import InstanceDescription
from rubberband.executor import (
    Event,
    InstanceInterrupted,
    InstanceLost,
    InstancePriced,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
)
from rubberband.executor.core.backend import LAST_EVENTS, Lifecycle
from tests.builders.budget import examples


class Story(RuleBasedStateMachine):
    """A provider to which anything may happen, and a driver that looks when it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.status = InstanceDescription(instance="a", experiment="test", state="pending", requested_at=100.0)
        self.life = Lifecycle(instance="a")
        self.heard: list[Event] = []
        self.billed_s = 0.0
        self.was_over = False
        self.late = 0

    # The provider

    @rule(seconds=st.sampled_from([0.0, 1.0, 100.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.status.running_at is None and self.status.ended_at is None)
    @rule(prices=st.sampled_from([None, (1.0,)]))
    def it_begins_to_run(self, prices: tuple[float, ...] | None) -> None:
        self.status = replace(self.status, state="running", running_at=self.now, hour_prices_usd=prices)

    @precondition(lambda self: self.status.hour_prices_usd is not None and self.status.running_at is not None)
    @rule(price=st.sampled_from([0.0, 0.5, 1.0]))
    def another_hour_is_priced(self, price: float) -> None:
        self.status = replace(self.status, hour_prices_usd=(*(self.status.hour_prices_usd or ()), price))

    @precondition(lambda self: self.status.running_at is not None and self.status.ended_at is None)
    @rule()
    def notice_is_given(self) -> None:
        self.status = replace(self.status, interrupted_at=self.now)

    @precondition(lambda self: self.status.ended_at is None)
    @rule(reason=st.sampled_from(["", "process died", "lease expired"]), preempted=st.booleans(), dry=st.booleans())
    def it_ends_by_itself(self, reason: str, preempted: bool, dry: bool) -> None:
        sold_out = dry and self.status.running_at is None
        self.status = replace(
            self.status, state="terminated", ended_at=self.now, reason=reason, preempted=preempted, sold_out=sold_out
        )

    # Its driver

    @rule()
    def the_driver_looks(self) -> None:
        if self.life.came_late(self.status):
            self.late += 1
        if self.status.ended_at is not None and self.life.end():
            self._hear(self.life.lose_ended(self.status, self.now, began_at=50.0))
        else:
            self._hear(self.life.see(self.status, self.now, free_if_taken=True))

    @rule()
    def its_workers_are_warm(self) -> None:
        self._hear(self.life.ready(self.now))

    @rule()
    def its_worker_reports_the_notice(self) -> None:
        self._hear(self.life.interrupt(self.now, free_if_taken=False))

    @rule()
    def it_is_given_no_more_work(self) -> None:
        assert self.life.end() is not self.was_over

    @rule(released=st.booleans(), is_known=st.booleans())
    def the_provider_answers_that_it_has_ended(self, released: bool, is_known: bool) -> None:
        if is_known and self.status.ended_at is None:
            self.status = replace(self.status, state="terminated", ended_at=self.now)
        status = self.status if is_known else None
        self._hear(
            self.life.release(status, self.now)
            if released or self.late  # it is only ever released again
            else self.life.lose(status, "it does not answer", self.now, failed_start=True)
        )

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.occurred_at == self.now
            self._check(event)
            self.heard.append(event)

    def _check(self, event: Event) -> None:
        ran = self._count(InstanceRunning) > 0
        ended = self._count(*LAST_EVENTS) > 0
        match event:
            case InstanceRunning():
                assert not ran
                assert not ended
                assert event.running_at == self.status.running_at == self.life.running_at
            case InstanceReady():
                assert ran
                assert not self.life.over, "it is given work, which it must not have"
            case InstanceInterrupted():
                assert ran
                assert not self.life.over
                assert self._count(InstanceInterrupted) == 0
            case InstancePriced():
                prices = [e.hour_prices_usd for e in self.heard if isinstance(e, InstanceRunning | InstancePriced)]
                assert event.hour_prices_usd not in prices[-1:]
            case InstanceRefused():
                assert not ran, "it ran, and is billed"
                assert not ended
            case InstanceLost():
                assert ran
                assert not ended
                assert (event.reason == "it does not answer") <= (self._count(InstanceInterrupted) == 0)
            case InstanceReleased() if ended:
                assert self.late == 1 == self._count(*LAST_EVENTS), "a second end is that of one that came late"
                assert event.running_at is not None

    def _count(self, *kinds: type[Event]) -> int:
        return sum(isinstance(event, kinds) for event in self.heard)

    @invariant()
    def what_has_ended_stays_ended(self) -> None:
        assert self.life.over or not self.was_over
        self.was_over = self.life.over
        assert self._count(*LAST_EVENTS) in ((0, 1) if self.life.ended_at is None else (1, 1 + self.late))
        assert self.late <= 1

    @invariant()
    def the_billed_time_never_shrinks(self) -> None:
        began_at = math.inf if self.life.running_at is None else self.life.running_at
        ends = [at for at in (self.life.ended_at, self.status.ended_at) if at is not None]
        billed_s = max(0.0, (ends[0] if ends else self.now) - began_at)
        assert billed_s >= self.billed_s
        self.billed_s = billed_s
        ends = [event.ended_at for event in self.heard if isinstance(event, InstanceLost | InstanceReleased)]
        if ends and self.life.ended_at is not None:
            assert ends[-1] == self.life.ended_at
        if self.life.ended_at is not None and self.life.running_at is not None:
            assert self.life.ended_at >= self.life.running_at

    @invariant()
    def nobody_pays_for_what_was_refused(self) -> None:
        if self._count(InstanceRefused) and not self.late:
            assert self.life.running_at is None


TestStory = Story.TestCase
TestStory.settings = settings(max_examples=examples(1000), stateful_step_count=30, deadline=None)
