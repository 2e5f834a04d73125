"""Balancers of measured lines: when shares change, who is probed, who is a straggler; and the default one of GPUs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.balancing.shares import (
    Balancer,
    Line,
    Look,
    Remembering,
    ShareLimits,
    aligned_shares,
    held,
    keeps,
    min_max_shares,
    proportional_shares,
    slowest_s,
)
from rubberband.values.balance import even_shares, scale_shares

NEAR_SHARE = 0.22
"""Difference of the logarithms of two shares below which a look at one informs about the other."""
EQUAL = 0.1
"""The same for a look that replaces the time at an equal share: near shares differ by up to a fifth."""
RATE = 0.1
"""Weight of a look in the moving average of the logarithm of the time."""
NEW_LOOKS = 5
"""Looks at a new share that are averaged before the worker is said to change."""
LEAST_CHANGE, MOST_CHANGE = 0.25, 0.5
"""Difference of the logarithms of two times beyond which the worker has changed at once."""
SPREADS = 5.0
"""The same as a multiple of the usual difference of a look, between these limits."""
SPREAD_RATE = 0.05


class WorkerTimes(Remembering):
    """Times of one worker. Shares are samples per step; an equal share need not be a whole number.

    A line through looks at a small share says little about a large one: a GPU's time is flat until a batch saturates it
    (LB-BSP §3.3.1), and small errors of the slope become large ones. So the time at an equal share is kept from the
    looks at it, and afterwards changes only as the worker does: by the part by which its time at the same share
    changes.

    A step with more samples takes more time, but at most in proportion: t(x) <= t(y) <= t(x) y / x for x <= y. The kept
    time stays within these bounds, so errors do not add up in a long run. A worker without samples keeps its times.
    """

    kept = ("share", "looks", "seconds", "equal_share", "equal_s", "spread")

    def __init__(self) -> None:
        self._share = 0
        """Around which the present looks are; 0 before the first one."""
        self._looks = 0
        self._seconds = 0.0
        self._equal_share, self._equal_s = 0.0, 0.0
        self._spread = 0.0
        """Mean absolute difference of the logarithms of a look and of the average before it."""

    def observe(self, share: int, seconds: float, equal_share: float, line: Line) -> None:
        """Take in a look. `line` says how the time changes from one share to a near one."""
        if share == self._share:
            self._follow(seconds)
        elif not self._share or abs(math.log(share / self._share)) > NEAR_SHARE:
            self._share, self._seconds, self._looks = share, seconds, 1
        else:
            self._follow(seconds * _ratio(line, share, self._share))
        if abs(math.log(self._share / equal_share)) <= EQUAL or not self._equal_s:
            self._equal_s = self._seconds * _ratio(line, self._share, equal_share)
        elif equal_share != self._equal_share:
            self._equal_s *= _ratio(line, self._equal_share, equal_share)
        self._equal_share = equal_share
        if self._looks >= NEW_LOOKS:
            least, most = sorted((1.0, equal_share / self._share))
            self._equal_s = min(max(self._equal_s, least * self._seconds), most * self._seconds)

    def _follow(self, seconds: float) -> None:
        """Take in a time at the present share."""
        self._looks += 1
        off = math.log(seconds / self._seconds)
        is_known = self._looks > NEW_LOOKS
        limit = min(max(LEAST_CHANGE, SPREADS * self._spread), MOST_CHANGE) if is_known else MOST_CHANGE
        has_changed = abs(off) > limit
        self._spread += SPREAD_RATE * (min(abs(off), limit) - self._spread)
        factor = math.exp(off if has_changed else off * max(RATE, 1.0 / self._looks))
        self._seconds *= factor
        if has_changed or is_known:
            self._equal_s *= factor

    def time_s(self, share: int, line: Line) -> float:
        """Return the time at a share, by the line from the nearer one of the two; the line's own before any look."""
        if not self._share or not share:
            return line.time_s(share)
        to_present, to_equal = (abs(math.log(share / known)) for known in (self._share, self._equal_share))
        if to_present <= to_equal:
            return self._seconds * _ratio(line, self._share, share)
        return self._equal_s * _ratio(line, self._equal_share, share)


def _ratio(line: Line, share: float, other: float) -> float:
    """Return t(other) / t(share)."""
    seconds = line.base_s + line.per_sample_s * share
    return (line.base_s + line.per_sample_s * other) / seconds if seconds > 0.0 else 1.0


WORTHWHILE = 0.02
"""Least part of a step that a change of shares must save."""
SURE = 3.0
"""Standard errors of the predicted times by which it must."""
FIRST_DOUBT = 0.15
"""Assumed standard error of even shares at the first look, half of it at the second, and so on: most
gangs are equal, and the noise of their looks is not known yet."""
STRAGGLER_STEPS = 20
"""Steps after which a worker that slows the gang is reported."""
PROBE_COST = 0.005
"""Part of the time for giving workers that have no samples a few, to see whether they have recovered."""
LEAST_WAIT, MOST_WAIT = 20, 2000
"""Looks between two such probes."""


class MeasuredBalancer(Remembering, Balancer):
    """Changes shares where the lines say that it pays, and otherwise keeps them."""

    kept: tuple[str, ...] = ("num_workers", "shares", "looks", "idle", "slow_steps", "times")

    def __init__(self, num_workers: int, *, moves: bool = True) -> None:
        """Without `moves` the shares stay even, and the lines are only for predictions."""
        self.num_workers = num_workers
        self._moves = moves
        self._shares: tuple[int, ...] = ()
        """Shares of the last look; none before the first one."""
        self._looks = 0
        self._idle = [0] * num_workers
        """Looks since each worker last had samples."""
        self._slow_steps = [0] * num_workers
        self._steps = 0
        """Steps of the last look; 0 once its stragglers are counted."""
        self._times = [WorkerTimes() for _ in range(num_workers)]
        self._lines: tuple[Line, ...] = ()
        """Lines after the last look; empty after a restart."""

    @abstractmethod
    def lines(self) -> tuple[Line, ...]: ...

    @abstractmethod
    def _learn(self, look: Look) -> None:
        """Take the look into the lines."""

    @abstractmethod
    def _proposal(self, lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """The best shares by the lines."""

    def _aligned(self, lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> tuple[int, ...]:
        """Shares that are hardly slower, and suit the device better."""
        return shares

    @abstractmethod
    def _error(self) -> float:
        """Relative standard error of the lines' times."""

    def observe(self, look: Look) -> None:
        """Take in one look."""
        self._learn(look)
        self._time(look)
        self._shares, self._steps = look.shares, look.steps
        self._looks += 1
        self._idle = [0 if share else idle + 1 for share, idle in zip(look.shares, self._idle, strict=True)]

    def _time(self, look: Look) -> None:
        """Take the times of the workers that had samples."""
        equal_share = sum(look.shares) / self.num_workers
        self._lines = lines = self.lines()
        for rank, (share, seconds) in enumerate(zip(look.shares, look.compute_s, strict=True)):
            if share and 0.0 < seconds < math.inf:
                self._times[rank].observe(share, seconds, equal_share, lines[rank])

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return the present shares, or others that save more than `WORTHWHILE` and more than noise could pretend."""
        lines = self._lines or self.lines()
        if not lines or not self._shares:
            return self._even(batch_size, limits)
        limits = held(batch_size, limits)
        present = scale_shares(self._shares, batch_size)
        if present != self._shares:
            present = self._aligned(lines, present, limits)
        self._count_stragglers(lines, present, limits)
        if not self._moves:
            return self._even(batch_size, limits)
        proposed = self._proposal(lines, batch_size, limits)
        present_s = slowest_s(lines, present, limits) if keeps(present, limits) else math.inf
        if slowest_s(lines, proposed, limits) <= (1.0 - self._threshold(present)) * present_s:
            proposed = self._aligned(lines, proposed, limits)
        else:
            # Between shares that noise cannot tell apart, even ones are the likelier.
            even = self._even(batch_size, limits)
            proposed = even if slowest_s(lines, even, limits) < present_s else present
        return self._with_probe(lines, proposed, limits)

    def _threshold(self, present: Sequence[int]) -> float:
        """The least gain for which shares change."""
        is_even = max(present) - min(present) <= 1
        error = max(self._error(), FIRST_DOUBT / self._looks if is_even else 0.0)
        return max(WORTHWHILE, SURE * error)

    def _even(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        even = even_shares(batch_size, self.num_workers)
        limits = held(batch_size, limits)
        return even if keeps(even, limits) else proportional_shares((1.0,) * self.num_workers, batch_size, limits)

    def _with_probe(self, lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> tuple[int, ...]:
        """The shares, with a few samples for the worker that has had none for longest, if it is time."""
        step_s = slowest_s(lines, shares, limits)
        giver = max(range(self.num_workers), key=lambda rank: shares[rank])
        for rank in sorted(range(self.num_workers), key=lambda rank: -self._idle[rank]):
            few = limits.least
            if shares[rank] or self._idle[rank] < LEAST_WAIT:
                return shares
            late = lines[rank].time_s(few) / step_s - 1.0 if step_s > 0.0 else 0.0
            wait = min(MOST_WAIT, math.ceil(late / PROBE_COST))
            if self._idle[rank] >= wait and limits.caps[rank] >= few and shares[giver] >= 2 * few:
                probed = list(shares)
                probed[rank], probed[giver] = few, shares[giver] - few
                return tuple(probed)
        return shares

    def step_s(self, shares: Sequence[int], limits: ShareLimits) -> float:
        """Return max_i t_i(x_i), the predicted seconds of a step; nan before the first look.

        Each time is by the look at the nearest share: a line says little about shares that are far from the present.
        """
        lines = self.lines()
        if not lines:
            return math.nan
        workers = zip(self._times, shares, lines, strict=True)
        free = limits.zero_costs_nothing
        return max(times.time_s(share, line) if share or not free else 0.0 for times, share, line in workers)

    def stragglers(self) -> tuple[int, ...]:
        """Return the ranks whose removal would have made the last 20 steps or more no slower."""
        return tuple(rank for rank, steps in enumerate(self._slow_steps) if steps >= STRAGGLER_STEPS)

    def _count_stragglers(self, lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> None:
        """Once per look: without those that take longest, would the others do the whole batch in less time?

        A worker that is left without samples is one too, if there are samples for all.
        """
        if not self._steps or not lines:
            return
        steps, self._steps = self._steps, 0
        batch_size = sum(shares)
        idle = {rank for rank, share in enumerate(shares) if not share}
        free = limits.zero_costs_nothing
        times_s = [line.time_s(share, zero_costs_nothing=free) for line, share in zip(lines, shares, strict=True)]
        step_s = max(times_s)
        slow = {rank for rank, time_s in enumerate(times_s) if time_s >= (1.0 - WORTHWHILE) * step_s} - idle
        if batch_size < self.num_workers * limits.least:
            idle = set()
        if slow and len(slow | idle) <= self.num_workers // 2:
            caps = tuple(0 if rank in slow | idle else batch_size for rank in range(self.num_workers))
            alone = replace(limits, caps=caps, zero_costs_nothing=True)
            without_s = slowest_s(lines, min_max_shares(lines, batch_size, alone), alone)
            slow = slow if without_s < (1.0 - WORTHWHILE) * step_s else set()
        else:
            slow = set()
        late = slow | idle
        self._slow_steps = [so_far + steps if rank in late else 0 for rank, so_far in enumerate(self._slow_steps)]

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of another number of workers is ignored."""
        if state.get("num_workers") == self.num_workers:
            super().restore(state)
            self._lines = ()


# The default balancer of GPUs: the shares with the least max_i t_i from a line per worker (LB-BSP §3.3, eq. 3).

Floats = npt.NDArray[np.float64]

KEPT = 32
"""Looks kept of each worker."""
DECAY = 0.93
"""Weight of a look, relative to the one after it."""
NEAR = 0.7
"""Difference of the logarithms of two shares at which a look counts for half."""
SLOPE_DOUBT = 0.5
"""Relative standard deviation of the slope's prior."""
PRIOR_RATE = 0.1
"""Part by which the prior follows the fitted slope at every look, so that it is known when its looks are forgotten."""
FIRST_NOISE = 0.07
"""Assumed relative noise of a look, until it is measured."""
FIRST_LOOKS = 2
"""Looks that the assumption is worth."""
LEAST_NOISE = 1e-3
NOISE_RATE = 0.05
OUTLIER_NOISES, OUTLIER = 4.0, 0.08
"""A look is an outlier if its distance from the line exceeds both the first number times the noise's standard deviation
and the second number times the line's value."""
KNOWN = 0.1
"""Shares within this part of a kept one are covered by the line: others may be off because the curve bends."""


class LineFit(Remembering):
    """The lines of a gang's workers.

    Each worker's last looks are weighed by their age and by how near their shares are to the present one, since a GPU's
    time is flat until a batch saturates it (LB-BSP §3.3.1): what counts is the line around the present share. As long
    as only one share was seen, the slope is taken from the line before, at first from t = b x, which moves too little
    rather than too much.

    A look that is far from its worker's line waits for the next one. If this one is off in the same direction, the
    worker has changed: its looks before are forgotten, and its line is scaled until new ones say more.
    """

    kept = ("num_looks", "variance", "shares", "times_s", "weights", "base_s", "slope_s", "prior_s", "doubts", "idle")

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.num_looks = 0
        self._shares: Floats = np.ones((num_workers, KEPT))
        self._times_s: Floats = np.ones((num_workers, KEPT))
        self._weights: Floats = np.zeros((num_workers, KEPT))
        """0 where nothing is kept."""
        self._base_s: Floats = np.zeros(num_workers)
        self._slope_s: Floats = np.zeros(num_workers)
        """0 for a worker that has never had samples."""
        self._prior_s: Floats = np.zeros(num_workers)
        """The slopes that looks at one share only leave as they are."""
        self._doubts: Floats = np.zeros(num_workers)
        """Logarithm of how far the last look was off, where it was an outlier."""
        self._idle: Floats = np.zeros(num_workers)
        """Looks since a worker last had samples."""
        self._variance = FIRST_NOISE**2

    @property
    def noise(self) -> float:
        """Relative standard deviation of a look, over all workers."""
        return math.sqrt(self._variance)

    def error(self) -> float:
        """Return the relative standard error of the times at the present shares, for the worker with fewest looks."""
        weights = self._weights.sum(axis=1)
        effective = weights**2 / np.maximum((self._weights**2).sum(axis=1), 1e-300)
        return self.noise / math.sqrt(max(1.0, float(effective.min(initial=np.inf, where=weights > 0.0))))

    def largest_shares(self) -> Floats:
        """Return the largest share that is kept of each worker; 0 without any."""
        return np.asarray(np.where(self._weights > 0.0, self._shares, 0.0).max(axis=1))

    def observe(self, look: Look) -> None:
        """Take in a look. Workers without samples, or without a time, stay as they are."""
        shares = np.asarray(look.shares, dtype=np.float64)
        times_s = np.asarray(look.compute_s, dtype=np.float64)
        seen = (shares > 0.0) & np.isfinite(times_s) & (times_s > 0.0)
        expected = seen & ((self._slope_s > 0.0) | (self._base_s > 0.0))
        predicted_s = self._base_s + self._slope_s * shares
        off = np.log(np.where(expected, times_s, 1.0) / np.where(expected, predicted_s, 1.0))
        near = np.abs(self._shares / np.maximum(shares, 1.0)[:, None] - 1.0) < KNOWN
        covered = (near & (self._weights > 0.0)).any(axis=1)
        far = covered & (np.abs(off) > max(OUTLIER_NOISES * self.noise, OUTLIER))
        # A worker that was idle may have changed meanwhile, and would wait long for a second look.
        changed = far & ((off * self._doubts > 0.0) | (self._idle > 0.0))
        self._idle = np.where(seen, 0.0, self._idle + 1.0)
        self._forget(changed, np.exp(off))
        self._doubts = np.where(seen, np.where(far & ~changed, off, 0.0), self._doubts)
        kept = seen & ~(far & ~changed)
        self._learn_noise(off[kept & covered & ~changed])
        self._keep(kept, shares, times_s)
        self._fit(kept, shares)
        self.num_looks += 1

    def _forget(self, changed: npt.NDArray[np.bool_], factors: Floats) -> None:
        """Begin a changed worker's line again, with its shape so far."""
        self._weights[changed] = 0.0
        self._base_s[changed] *= factors[changed]
        self._slope_s[changed] *= factors[changed]
        self._prior_s[changed] = self._slope_s[changed]

    def _learn_noise(self, off: Floats) -> None:
        if len(off):
            rate = max(NOISE_RATE, 1.0 / (FIRST_LOOKS + self.num_looks + 1.0))
            self._variance += rate * (float(np.square(off).mean()) - self._variance)
            self._variance = max(self._variance, LEAST_NOISE**2)

    def _keep(self, kept: npt.NDArray[np.bool_], shares: Floats, times_s: Floats) -> None:
        column = self.num_looks % KEPT
        self._weights[kept] *= DECAY
        self._shares[kept, column] = shares[kept]
        self._times_s[kept, column] = times_s[kept]
        self._weights[kept, column] = 1.0

    def _fit(self, kept: npt.NDArray[np.bool_], shares: Floats) -> None:
        """Weighted least squares of the relative errors, with a prior on b, and a and b at least 0."""
        x, t = self._shares[kept], self._times_s[kept]
        now = shares[kept]
        nearness = 1.0 / (1.0 + np.square(np.log(x / now[:, None]) / NEAR))
        weights = self._weights[kept] * nearness / np.square(t)
        total = weights.sum(axis=1)
        mean_x, mean_t = (weights * x).sum(axis=1) / total, (weights * t).sum(axis=1) / total
        from_mean = x - mean_x[:, None]
        spread = (weights * from_mean * from_mean).sum(axis=1)
        both = (weights * from_mean * t).sum(axis=1)
        prior = np.where(self._base_s[kept] + self._slope_s[kept] > 0.0, self._prior_s[kept], mean_t / mean_x)
        trust = self._variance / np.square(SLOPE_DOUBT * mean_t / mean_x)
        slope = np.maximum((both + trust * prior) / (spread + trust), 0.0)
        base = mean_t - slope * mean_x
        through_zero = (weights * x * t).sum(axis=1) / (weights * x * x).sum(axis=1)
        self._slope_s[kept] = np.where(base < 0.0, through_zero, slope)
        self._base_s[kept] = np.maximum(base, 0.0)
        self._prior_s[kept] = prior + PRIOR_RATE * (self._slope_s[kept] - prior)

    def lines(self) -> tuple[Line, ...]:
        """Return the lines; one of a worker that has never had samples is the mean of the others'. Empty at first."""
        bases, slopes = self._base_s.tolist(), self._slope_s.tolist()
        known = [rank for rank in range(self.num_workers) if bases[rank] > 0.0 or slopes[rank] > 0.0]
        if not known:
            return ()
        mean = Line(sum(bases) / len(known), sum(slopes) / len(known))
        lines = [mean] * self.num_workers
        for rank in known:
            lines[rank] = Line(bases[rank], slopes[rank])
        return tuple(lines)


GROWTH = 2
"""The most that a share grows at once, as a multiple of the largest share that was seen: the line is a guess beyond."""


class LineBalancer(MeasuredBalancer):
    """Finds shares from fitted lines by bisection, in multiples that suit GPUs where these cost little."""

    kept = (*MeasuredBalancer.kept, "fit")

    def __init__(self, num_workers: int, *, moves: bool = True) -> None:
        super().__init__(num_workers, moves=moves)
        self._fit = LineFit(num_workers)

    def lines(self) -> tuple[Line, ...]:
        """Return the fitted lines; empty before the first look."""
        return self._fit.lines()

    def _learn(self, look: Look) -> None:
        self._fit.observe(look)

    def _proposal(self, lines: Sequence[Line], batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        even = math.ceil(batch_size / self.num_workers)
        seen = self._fit.largest_shares().tolist()
        reach = tuple(min(cap, max(even, GROWTH * int(share))) for cap, share in zip(limits.caps, seen, strict=True))
        if sum(reach) < batch_size:  # where the caps are tight
            reach = limits.caps
        return min_max_shares(lines, batch_size, replace(limits, caps=reach))

    def _aligned(self, lines: Sequence[Line], shares: tuple[int, ...], limits: ShareLimits) -> tuple[int, ...]:
        return aligned_shares(lines, shares, limits)

    def _error(self) -> float:
        return self._fit.error()
