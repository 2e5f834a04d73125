"""The noise that a profile and an offer describe, drawn for a virtual run: the planner's model, one trial at a time.

It is the other side of `rubberband.planner.sampling`, and shares none of its code: iterations are drawn one by one,
instances are taken away and replaced, and the controller decides. Nothing fails here for other reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from rubberband.cloud.virtual import Fate
from rubberband.executor.virtual.fleet import AttemptFate, Messages
from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import Market
from rubberband.values.profile import Law, Profile, Spread

_PROMPT = Messages()


class Noise:
    """A `Fortune` in which everything varies as the profile and the offer say, and nothing else goes wrong."""

    def __init__(self, profile: Profile, offer: Offer, *, seed: object, now: Callable[[], float]) -> None:
        """The same `seed` gives the same noise, whatever the plan. `now` reads the clock of the virtual run."""
        self._profile, self._offer, self._seed, self._now = profile, offer, seed, now
        self._speeds: dict[int, float] = {}
        self._mean = _factor(profile.mean_cv, "lognormal", Random(f"{seed}/mean"))
        self._provision: dict[float, float] = {}
        self._iterations: dict[int, list[float]] = {}
        self._iteration_rngs: dict[int, Random] = {}

    def instance(self, instance: str, market: Market) -> Fate:
        """Return delays, and when the spot market takes it. Launches of one instant wait in one queue (SCALE)."""
        source, offer = Random(f"{self._seed}/{instance}"), self._offer
        asked_at = self._now()
        if asked_at not in self._provision:
            shared = Random(f"{self._seed}/provision {len(self._provision)}")
            self._provision[asked_at] = _spread_factor(offer.provision_spread, shared)
        ends_after_s = math.inf
        if market == "spot" and offer.spot is not None and offer.spot.interruptions_per_hour > 0.0:
            ends_after_s = source.expovariate(offer.spot.interruptions_per_hour / SECONDS_PER_HOUR)
        return Fate(
            provision_s=offer.provision_delay_s * self._provision[asked_at],
            init_s=offer.init_delay_s * _spread_factor(offer.init_spread, source),
            ends_after_s=ends_after_s,
            preempted=ends_after_s < math.inf,
        )

    def messages(self, instance: str) -> Messages:
        """Return that nothing is late."""
        return _PROMPT

    def attempt(self, trial: int, attempt: int) -> AttemptFate:
        """Return the trial's own speed, and a start-up drawn anew."""
        source = Random(f"{self._seed}/trial {trial}/start {attempt}")
        startup = _factor(self._profile.startup_cv, "lognormal", source)
        return AttemptFate(pace=self.speed(trial), startup=startup)

    def speed(self, trial: int) -> float:
        """Return how many times longer than profiled the trial's iterations take, all along."""
        if trial not in self._speeds:
            source = Random(f"{self._seed}/trial {trial}")
            self._speeds[trial] = self._mean * _factor(self._profile.trial_cv, self._profile.law, source)
        return self._speeds[trial]

    def iteration(self, trial: int, iterations: int) -> float:
        """Return how many times longer than its mean the trial's iteration number `iterations` takes."""
        if self._profile.iteration_cv == 0.0:
            return 1.0
        source = self._iteration_rngs.setdefault(trial, Random(f"{self._seed}/trial {trial}/iterations"))
        drawn = self._iterations.setdefault(trial, [])
        while len(drawn) < iterations:
            drawn.append(_factor(self._profile.iteration_cv, self._profile.law, source))
        return drawn[iterations - 1]

    def pace(self, instance: str, at: float) -> float:
        """Return that instances are alike."""
        return 1.0


def _factor(cv: float, law: Law, source: Random) -> float:
    if cv == 0.0:
        return 1.0
    if law == "normal":
        return max(0.0, source.gauss(1.0, cv))
    variance = math.log1p(cv * cv)
    return source.lognormvariate(-variance / 2.0, math.sqrt(variance))


def _spread_factor(spread: Spread, source: Random) -> float:
    return source.choice(spread.samples) if spread.samples else _factor(spread.cv, "lognormal", source)
