"""Spending: how the bill grows from here, as long as nothing is launched, released or lost. Plain values and sums.

It knows two courses of the bill: what it will be at the prices that are known (on spot those of the hours that have
begun; after them, the most that they may be), and what is reserved, at the prices that may still come (spot up to its
maximum price, an instance that is not bought yet up to the most expensive type that may be used instead).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rubberband.planner import SHORTEST_REACH_S
from rubberband.units import MONEY_SLACK_USD


class RunningCost(NamedTuple):
    """One running instance. It is a tuple, as thousands are made a second whenever the rent changes."""

    since: float
    """Start of the hour whose price is `usd_per_s`; if the price never changes, start of the instance."""
    before_usd: float
    """Cost of the hours before that."""
    paid_until: float
    """Billed until then whatever happens: the minimum."""
    bound_until: float
    """The earliest instant at which it surely ends, if the driver wants it to."""
    usd_per_s: float
    known_until: float
    """`usd_per_s` is the price until then, infinite where it stays; afterwards it is at most the reserved one."""
    reserved_usd_per_s: float

    def spent_usd(self, until: float) -> float:
        """Return its cost by then."""
        known_s = (until if until < self.known_until else self.known_until) - self.since
        spent_usd = self.before_usd + self.usd_per_s * known_s
        return (
            spent_usd if until <= self.known_until else spent_usd + self.reserved_usd_per_s * (until - self.known_until)
        )


class Coming(NamedTuple):
    """One instance that is asked for, and may begin to run at any moment."""

    bound_s: float
    """Shortest time that is billed once it runs."""
    reserved_usd_per_s: float
    data_usd: float


@dataclass(slots=True, kw_only=True)
class RunSpending:
    """All that is paid for, and all that may be; it keeps answers that hold for a while."""

    cap_usd: float
    settled_usd: float
    """Cost of ended instances, and of one-off charges (data)."""
    rate_usd_per_s: float
    """Rate of the costs that grow all the time (the head, functions)."""
    rate_since: float
    """`settled_usd` holds what grows all the time up to then."""
    lines: tuple[RunningCost, ...]
    coming: tuple[Coming, ...]
    _stops_at: float | None = field(default=None, init=False)
    _reached: tuple[float, float] | None = field(default=None, init=False)
    """(as of, until): the latest answer of `reaches_about`."""
    _is_surcharged: bool | None = field(default=None, init=False)
    """Whether anything is reserved at more than it costs."""

    def spent_usd(self, now: float) -> float:
        """The bill, at the prices that are known."""
        spent = self.settled_usd + self.rate_usd_per_s * (now - self.rate_since)
        for line in self.lines:
            spent += line.spent_usd(line.paid_until if line.paid_until > now else now)
        return spent

    def with_more(self, coming: Coming, count: int) -> RunSpending:
        """The spending if `count` more instances were asked for."""
        return RunSpending(
            cap_usd=self.cap_usd,
            settled_usd=self.settled_usd,
            rate_usd_per_s=self.rate_usd_per_s,
            rate_since=self.rate_since,
            lines=self.lines,
            coming=(*self.coming, *[coming] * count),
        )

    def reaches(self, now: float) -> float:
        """Until when all may be held at the reserved prices; before `now` if that is not even now."""
        return self._reaches(now, [(line, line.reserved_usd_per_s) for line in self.lines], 0.0)

    def reaches_about(self, now: float) -> float:
        """Return `reaches`, or a little less: it is computed again once a sixteenth of that time has passed.

        As time passes it moves on, since prices are lower than the reserved ones, and what may come has not come.
        """
        if self._reached is not None:
            as_of, until = self._reached
            if now - as_of <= (until - as_of) / 16.0:
                return until
        until = self.reaches(now)
        self._reached = (now, until)
        return until

    def refresh_at(self, now: float) -> float:
        """Return when to compute the reach again, as it will be farther then; infinite: never.

        Long before it reaches no farther than to the very moment, so that leases can be put off in time.
        """
        if self._is_surcharged is None:
            self._is_surcharged = any(line.reserved_usd_per_s > line.usd_per_s for line in self.lines)
        if not self._is_surcharged:
            return math.inf
        self.reaches_about(now)
        assert self._reached is not None, "it was asked just now"
        as_of, until = self._reached
        return as_of + max(0.0, until - as_of) / 4.0

    def stops_at(self, now: float, margin_s: float) -> float:
        """Until when all may be held at the known prices, `margin_s` being left for the end at the reserved ones.

        As time passes it does not move, but for what may come: that moves it on, and is not looked at before it counts.
        """
        if self._stops_at is not None and (not self.coming or now < self._stops_at - SHORTEST_REACH_S):
            return self._stops_at
        end_s = max(margin_s, SHORTEST_REACH_S)
        surcharge = sum([line.reserved_usd_per_s - line.usd_per_s for line in self.lines]) * end_s
        growing = [(line, line.usd_per_s) for line in self.lines]
        found = self._reaches(now, growing, surcharge) - margin_s
        bound = [line for line in self.lines if line.bound_until > now]
        if bound and found < (paid_until := min([line.bound_until for line in bound]) - margin_s):
            # These are paid for at the reserved prices already, until then.
            surcharge -= sum([line.reserved_usd_per_s - line.usd_per_s for line in bound]) * end_s
            return max(found, min(paid_until, self._reaches(now, growing, surcharge) - margin_s))
        self._stops_at = found
        return found

    def _reaches(self, now: float, lines: Iterable[tuple[RunningCost, float]], set_aside_usd: float) -> float:
        left_usd = self.cap_usd - self.spent_usd(now) - set_aside_usd
        rate_usd_per_s = self.rate_usd_per_s
        growths: list[tuple[float, float]] = []
        for line, usd_per_s in lines:
            paid_until = line.paid_until if line.paid_until > now else now
            if line.bound_until > paid_until:
                left_usd -= line.reserved_usd_per_s * (line.bound_until - paid_until)
                paid_until = line.bound_until
            growths.append((paid_until, usd_per_s))
            if line.known_until < math.inf and usd_per_s < line.reserved_usd_per_s:
                rises_at = line.known_until if line.known_until > paid_until else paid_until
                growths.append((rises_at, line.reserved_usd_per_s - usd_per_s))
        for coming in self.coming:
            left_usd -= coming.reserved_usd_per_s * coming.bound_s + coming.data_usd
            growths.append((now + coming.bound_s, coming.reserved_usd_per_s))
        if left_usd < -MONEY_SLACK_USD:
            return -math.inf
        return _exhausted_at(now, max(0.0, left_usd), rate_usd_per_s, sorted(growths))


def _exhausted_at(now: float, left_usd: float, rate_usd_per_s: float, growths: list[tuple[float, float]]) -> float:
    """Return when `left_usd` is used up, at a rate that grows at each of `growths`: (instant, by how much)."""
    at = now
    for growth_at, growth in growths:
        if rate_usd_per_s > 0 and left_usd < rate_usd_per_s * (growth_at - at):
            break
        left_usd -= rate_usd_per_s * (growth_at - at)
        at = growth_at
        rate_usd_per_s += growth
    return at + left_usd / rate_usd_per_s if rate_usd_per_s > 0 else math.inf
