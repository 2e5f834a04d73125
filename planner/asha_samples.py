"""Samples of plans without a SYNC: simulated runs of asha, or of trials that train to their end (none).

Which configuration is better is not known, and with asha decides how many are promoted: each sample ranks the trials at
random, and draws every time that varies. All plans are compared on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.table import Floats, distinct
from rubberband.planner.noise.asha_draws import Draw, Factors, Launches
from rubberband.planner.noise.asha_runs import World, simulate_some
from rubberband.planner.noise.makespan import Seconds
from rubberband.planner.noise.sampling import LEVELS, bits_of, factor_levels, spread_levels, varies
from rubberband.planner.problem import Problem
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, slots
from rubberband.values.plan import Stage, StagePlan
from rubberband.values.profile import Profile

_MOST_LAUNCHES = 128
"""Instances of a run with random numbers of their own; more of them have those of another sample."""
_SAMPLES_OF_ONE = 33_000
_MOST_SAMPLES, _FEWEST_SAMPLES = 3000, 300
"""Samples of a chosen plan: fewer of many trials, whose mean varies less."""
_FEW = 10
"""Share of them that candidates are compared with."""
_SIEVE = 4
"""Share that shows which candidates are surely late."""
_BETWEEN = ((_FEW, 100), (3, 300))
"""Parts of them that rule candidates out, and the fewest samples for that: fewer save no time."""
_MOST_CELLS = 4_000_000
"""Trials that are simulated side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How thoroughly plans are compared."""

    rough_samples: int = 8
    """Samples of every candidate."""
    share: float = 1.0
    """Share of the samples of a chosen plan."""
    counts: int = 12
    """Numbers of instances tried for each gang; those between the best ones are tried next."""


THOROUGH = Effort()
QUICK = Effort(rough_samples=4, share=0.2, counts=6)
"""For a row beside another plan."""


def drawn(stage: Stage, profile: Profile, offer: Offer, samples: int, seed: tuple[int, ...]) -> Draw:
    """Draw samples; what all trials of a run share is spread evenly over its law."""
    trials, rng = stage.trials, np.random.default_rng(seed)
    noise = startup = None
    own: npt.NDArray[Any] | None = None

    def bits(what: int) -> npt.NDArray[np.uint16]:
        """(samples * trials,) Half of the samples mirror the others, so that their means vary less."""
        half = bits_of((*seed, what), -(-samples // 2) * trials)
        return np.concatenate([half, ~half])[: samples * trials]

    if profile.trial_cv or profile.mean_cv:
        own = factor_levels(profile.trial_cv, profile.law).take(bits(1)).reshape(samples, trials)
        own = (own * _evenly(factor_levels(profile.mean_cv, "lognormal"), samples, rng)[:, None]).ravel()
    if profile.iteration_cv:
        cvs = [profile.iteration_cv / math.sqrt(gain) for gain in stage.rung_work]
        noise = Factors(bits(2), np.array([factor_levels(cv, profile.law) for cv in cvs]))
    if profile.startup_varies:
        startup = Factors(bits(3), factor_levels(profile.startup_cv, "lognormal")[None])
    ranks = np.tile(np.arange(trials), (samples, 1))
    if stage.rungs.promotes or not (offer.provision_spread.certain and offer.init_spread.certain):
        ranks = rng.permuted(ranks, axis=1)  # else they decide nothing, and no number drawn after them does
    return Draw(
        ranks=ranks[None],
        provision_s=offer.provision_delay_s * _evenly(spread_levels(offer.provision_spread), samples, rng),
        init_s=offer.init_delay_s * np.sort(spread_levels(offer.init_spread)).astype(np.float64),
        slow=(rng.permutation(samples) + rng.random(samples)) / samples,
        startup=startup,
        own=own,
        noise=noise,
        launches=_launches(profile, offer, samples, (*seed, 4)),
    )


def _evenly(table: Seconds, samples: int, rng: np.random.Generator) -> Floats:
    """(samples,) Draw from a table of equally likely values, about as many from each part of it."""
    at = (rng.permutation(samples) + rng.random(samples)) * (len(table) / samples)
    return table.take(at.astype(np.int64)).astype(np.float64)


def _launches(profile: Profile, offer: Offer, samples: int, seed: tuple[int, ...]) -> Launches | None:
    spot = offer.spot
    if spot is None or not spot.interruptions_per_hour:
        return None
    shape, rng = (_MOST_LAUNCHES, samples), np.random.default_rng(seed)
    provision, init = (
        spread_levels(spread).take(rng.integers(LEVELS, size=shape))
        for spread in (offer.provision_spread, offer.init_spread)
    )
    usual_s = offer.provision_delay_s + offer.init_delay_s + profile.startup_s(1)
    return Launches(
        provision_s=offer.provision_delay_s * provision,
        init_s=offer.init_delay_s * init,
        lives_s=rng.exponential(SECONDS_PER_HOUR / spot.interruptions_per_hour, shape),
        longer_s=spot.restart_s - usual_s,
    )


@dataclass(frozen=True)
class Figures:
    """Samples of a plan, each (samples,)."""

    jct_s: Floats
    cost_usd: Floats
    starts_s: Floats
    """Instants at which its instances are ready."""

    @cached_property
    def mean(self) -> tuple[float, float]:
        """Mean JCT and cost."""
        return float(self.jct_s.mean()), float(self.cost_usd.mean())

    @cached_property
    def _firsts(self) -> dict[int, Figures]:
        return {len(self.jct_s): self}

    def first(self, count: int) -> Figures:
        """Return the first samples."""
        if count not in self._firsts:
            self._firsts[count] = Figures(self.jct_s[:count], self.cost_usd[:count], self.starts_s[:count])
        return self._firsts[count]

    def joined(self, more: Figures) -> Figures:
        """Return these and more samples."""
        pairs = ((self.jct_s, more.jct_s), (self.cost_usd, more.cost_usd), (self.starts_s, more.starts_s))
        return Figures(*(np.concatenate(pair) for pair in pairs))


@dataclass(slots=True)
class Simulations:
    """The samples of a job, drawn when they are first needed."""

    stage: Stage
    profile: Profile
    offer: Offer
    seed: int
    effort: Effort = THOROUGH
    _draw: Draw | None = None
    _figures: dict[StagePlan, Figures] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def knows(self, choice: StagePlan, count: int) -> bool:
        """Whether the first samples of a plan were simulated."""
        return choice in self._figures and len(self._figures[choice].jct_s) >= count

    @property
    def is_certain(self) -> bool:
        """Whether all samples are the same: no rung decides, and no time varies."""
        return not self.stage.rungs.promotes and not varies(self.profile, self.offer)

    @property
    def ends(self) -> list[int]:
        """Numbers of samples: all plans are looked at with the first, and fewer and fewer plans with more."""
        if self.is_certain:
            return [1, 1]
        most = min(_MOST_SAMPLES, max(_FEWEST_SAMPLES, int(_SAMPLES_OF_ONE / self.stage.trials**0.75)))
        rough, most = self.effort.rough_samples, int(most * self.effort.share)
        return [rough, *(most // part for part, least in _BETWEEN if most // part >= least), most]

    @property
    def rough(self) -> int:
        """Samples of every candidate."""
        return self.ends[0]

    @property
    def sieve(self) -> int:
        """Samples that show which plans are surely late."""
        return max(self.rough, self.most // _SIEVE)

    @property
    def few(self) -> int:
        """Samples that show how plans differ."""
        return max(self.rough, self.most // _FEW)

    @property
    def most(self) -> int:
        """Samples of a chosen plan."""
        return self.ends[-1]

    def figures(self, choices: Sequence[StagePlan], count: int) -> list[Figures]:
        """Return the first samples of plans."""
        return self.several(dict.fromkeys(choices, count), choices)

    def several(self, counts: Mapping[StagePlan, int], choices: Sequence[StagePlan] = ()) -> list[Figures]:
        """Simulate first samples of plans side by side, as many as `counts` says; return those of some plans."""
        with self._lock:  # estimates in several threads share them
            self._complete(counts)
            return [self._figures[choice].first(counts[choice]) for choice in choices]

    def _complete(self, counts: Mapping[StagePlan, int]) -> None:
        """Simulate what is lacking of the first samples of plans."""
        lacking: dict[str, list[tuple[StagePlan, range]]] = {}
        for choice, count in counts.items():
            known = len(self._figures[choice].jct_s) if choice in self._figures else 0
            if known < count:
                lacking.setdefault(choice.market, []).append((choice, range(known, count)))
        for some in lacking.values():
            some.sort(key=lambda one: slots(one[0].instances, self.offer.slots, one[0].gpus_per_trial))
            ends = np.cumsum([len(samples) for _, samples in some]) * self.stage.trials // _MOST_CELLS
            for part in distinct(ends).tolist():
                self._simulate([one for one, end in zip(some, ends.tolist(), strict=True) if end == part])

    def _simulate(self, runs: Sequence[tuple[StagePlan, range]]) -> None:
        if self._draw is None:
            self._draw = drawn(self.stage, self.profile, self.offer, self.most, (self.seed,))
        choices, samples = zip(*runs, strict=True)
        simulated = simulate_some(self.stage, choices, self.profile, self.offer, self._draw, samples)
        for choice, found in zip(choices, simulated, strict=True):
            before, more = self._figures.get(choice), Figures(found.jct_s, found.cost_usd, found.starts_s)
            self._figures[choice] = more if before is None else before.joined(more)


def simulations_of(problem: Problem, effort: Effort = THOROUGH) -> Simulations:
    """Return the samples of a job: not yet drawn, or those of an earlier row beside other plans."""
    job = (problem.stages[0], problem.profile, problem.offer, problem.seed, effort)
    return _kept(*job) if effort is QUICK else Simulations(*job)


# A row beside other plans does not depend on deadline and budget, and these are what users ask about again.
_kept = lru_cache(maxsize=4)(Simulations)


def simulated_beside(stage: Stage, choice: StagePlan, worlds: Sequence[World], seed: int) -> list[Figures]:
    """Return few samples of a plan in several worlds, on the same random numbers where nothing more varies.

    They are simulated together unless instances are lost or times vary from rung to rung.
    """
    runs = [Simulations(stage, profile, offer, seed) for profile, offer in worlds]
    if any(offer.spot or profile.iteration_cv or profile.startup_varies for profile, offer in worlds):
        return [one.figures([choice], one.few)[0] for one in runs]
    draws, samples, end = dict[tuple[object, ...], tuple[Draw, range]](), list[range](), 0
    for one in runs:
        profile, offer = one.profile, one.offer
        law = (one.most, profile.trial_cv, profile.mean_cv, offer.provision_delay_s, offer.init_delay_s)
        if law not in draws:
            draws[law] = drawn(stage, profile, offer, one.most, (seed,)), range(end, end + one.few)
            end += one.few
        samples.append(draws[law][1])
    draw = Draw.together([(each, len(few)) for each, few in draws.values()])
    found = simulate_some(stage, [choice] * len(runs), *worlds[0], draw, samples, worlds)
    return [Figures(one.jct_s, one.cost_usd, one.starts_s) for one in found]
