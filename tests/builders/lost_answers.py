"""A fleet of virtual instances that loses answers to launches, and gives up as `rubberband.executor.ray.fleet` does."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

from rubberband.executor import Event
from rubberband.executor.virtual.fleet import VirtualFleet, VirtualHold
from rubberband.values.plan import Market

LOST = 0.15
"""Share of the launches whose answers are lost."""
UNANSWERED = "the provider does not answer"


class LossyFleet(VirtualFleet):
    """Some requests take effect at once, others after the driver has given them up. What it sees, it gives back."""

    def set_out(self, source: Random, seen: Counter[str], given_up: set[str]) -> None:
        """`source` says which answers are lost; `given_up` gets the instances that show up later."""
        self._source, self._seen, self._given_up = source, seen, given_up

    def launch(self, instance: str, market: Market, first_lease_s: float | None = None) -> None:
        """Rent an instance; the answer may be lost."""
        if instance in self.holds or self._source.random() >= LOST:
            super().launch(instance, market, first_lease_s)
            return
        self._seen["answer lost"] += 1
        now = self.clock.now()
        hold = self.hold(instance)
        self.renew(now)
        lease_s = max(0.0, self.provider.lease_until - now) if first_lease_s is None else first_lease_s
        given_up_at = now + self._source.choice([1.0, 60.0, 600.0])
        if (later_s := self._source.choice([None, None, 0.0, 300.0])) is None:
            self.ask(hold, market, lease_s)
            self.agenda.add(given_up_at, partial(self._lose, hold))
        else:
            self.agenda.add(given_up_at, lambda at: self.fail(hold, None, UNANSWERED, at))
            self.agenda.add(given_up_at + later_s, lambda _: self._show_up(hold, market, lease_s))

    def _lose(self, hold: VirtualHold, now: float) -> Event | None:
        """Release an instance that was not answered for: it was refused only if it never ran."""
        if hold.life.over:
            return None
        self.gone.add(hold.life.instance)
        return self.fail(hold, self.provider.lose(hold.life.instance, UNANSWERED), UNANSWERED, now)

    def _show_up(self, hold: VirtualHold, market: Market, lease_s: float) -> None:
        """Carry out a request that was given up; the instance is given back as soon as it is seen."""
        instance = hold.life.instance
        self.ask(hold, market, lease_s)
        if hold.launched:
            self._seen["shows up later"] += 1
            self.gone.add(instance)
            self._given_up.add(instance)
            seen_at = self.provider.course(instance).running_at + hold.messages.seen_after_s
            self.agenda.add(seen_at, partial(self._come_late, hold))

    def _come_late(self, hold: VirtualHold, now: float) -> None:
        if hold.life.came_late(self.provider.status(hold.life.instance)):
            self.give_back(hold, now)
