"""The random numbers of simulated runs of asha (`rubberband.planner.asha.runs`), the same for all plans of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.table import Floats, Ints
from rubberband.planner.noise import levels
from rubberband.planner.noise.makespan import Seconds
from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import Stage
from rubberband.values.profile import Profile

_MOST_LAUNCHES = 128
"""Instances of a run with random numbers of their own; more of them have those of another sample."""
_SHIFT = 7919


@dataclass(frozen=True, slots=True)
class Factors:
    """Random factors of trials, each number used for several rungs, as drawing them takes longest."""

    bits: npt.NDArray[np.uint16]
    tables: npt.NDArray[np.float32]
    """(rungs or 1, 2**16) Factor of each level."""

    def of(self, cells: Ints, rungs: Ints) -> npt.NDArray[np.float32]:
        """Return the factors of trials in some rungs."""
        stride = int(0.618 * len(self.bits)) | 1  # rungs have other samples' numbers
        bits = self.bits.take(cells + rungs * stride, mode="wrap")
        at: Any = bits if len(self.tables) == 1 else bits + rungs * levels.LEVELS
        found: npt.NDArray[np.float32] = self.tables.take(at)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Times and results of some samples, the same for all plans."""

    ranks: Ints
    """(rungs or 1, samples, trials) Rank of the trial's result in its rung: the lowest is the best."""
    provision_s: Floats
    """(samples,) SCALE of all instances."""
    init_s: Floats
    """INIT_INSTANCE of one instance: equally likely values, in order."""
    slow: Floats
    """(samples,) Probability that the slowest instance is no slower."""
    startup: Factors | None = None
    own: npt.NDArray[np.float32] | None = None
    """(samples * trials,) Factor of a trial in all of its rungs."""
    noise: Factors | None = None
    """Factors of its training in each rung."""
    launches: Launches | None = None
    """Set where instances may be lost."""

    def slowest_s(self, instances: Ints, columns: Ints) -> Floats:
        """Return INIT_INSTANCE of the slowest of some instances in some samples."""
        levels_at = len(self.init_s) * self.slow.take(columns) ** (1.0 / instances)
        return self.init_s.take(levels_at.astype(np.int64))


def drawn(stage: Stage, profile: Profile, offer: Offer, samples: int, seed: tuple[int, ...]) -> Draw:
    """Draw samples; what all trials of a run share is spread evenly over its law."""
    assert stage.ladder is not None, "asha has rungs"
    trials, rng = stage.trials, np.random.default_rng(seed)
    noise = startup = None
    own: npt.NDArray[Any] | None = None

    def bits(what: int) -> npt.NDArray[np.uint16]:
        """(samples * trials,) Half of the samples mirror the others, so that their means vary less."""
        half = levels.bits_of((*seed, what), -(-samples // 2) * trials)
        return np.concatenate([half, ~half])[: samples * trials]

    if profile.trial_cv or profile.mean_cv:
        own = levels.factor_levels(profile.trial_cv, profile.law).take(bits(1)).reshape(samples, trials)
        own = (own * _evenly(levels.factor_levels(profile.mean_cv, "lognormal"), samples, rng)[:, None]).ravel()
    if profile.iteration_cv:
        cvs = [profile.iteration_cv / math.sqrt(gain) for gain in stage.ladder.gains]
        noise = Factors(bits(2), np.array([levels.factor_levels(cv, profile.law) for cv in cvs]))
    if profile.startup_varies:
        startup = Factors(bits(3), levels.factor_levels(profile.startup_cv, "lognormal")[None])
    return Draw(
        ranks=rng.permuted(np.tile(np.arange(trials), (samples, 1)), axis=1)[None],
        provision_s=offer.provision_delay_s * _evenly(levels.spread_levels(offer.provision_spread), samples, rng),
        init_s=offer.init_delay_s * np.sort(levels.spread_levels(offer.init_spread)).astype(np.float64),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Instances on spot in some samples, each (launches, samples)."""

    provision_s: Floats
    """SCALE of a replacement."""
    init_s: Floats
    lives_s: Floats
    """From SCALE until it is lost."""
    longer_s: float
    """Further time of a restart, beside a new instance and a start-up."""

    def place(self, numbers: Any, columns: Any) -> Any:
        """Return where the numbers of a run's instance are; those of very many have another sample's."""
        launches, samples = self.lives_s.shape
        return (numbers * samples + columns + numbers // launches * _SHIFT) % (launches * samples)


def _launches(profile: Profile, offer: Offer, samples: int, seed: tuple[int, ...]) -> Launches | None:
    spot = offer.spot
    if spot is None or not spot.interruptions_per_hour:
        return None
    shape, rng = (_MOST_LAUNCHES, samples), np.random.default_rng(seed)
    provision, init = (
        levels.spread_levels(spread).take(rng.integers(levels.LEVELS, size=shape))
        for spread in (offer.provision_spread, offer.init_spread)
    )
    usual_s = offer.provision_delay_s + offer.init_delay_s + profile.trial_startup_s
    return Launches(
        provision_s=offer.provision_delay_s * provision,
        init_s=offer.init_delay_s * init,
        lives_s=rng.exponential(SECONDS_PER_HOUR / spot.interruptions_per_hour, shape),
        longer_s=spot.restart_s - usual_s,
    )
