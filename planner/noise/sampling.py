"""Samples of a plan's time and cost where times vary.

Every candidate is evaluated with the same random numbers (common random numbers), so that no plan is better by luck.
Samples come in chunks: a decision that is clear after few needs no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.model import StageOutcome, Times, Value, summed, walk
from rubberband.planner.exact.table import Floats
from rubberband.planner.noise.makespan import (
    Chances,
    Exposed,
    Seconds,
    Settling,
    makespan,
    totals,
    unsettled_s,
    with_losses,
)
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, slots
from rubberband.values.plan import Cohort, Distribution, Market, Plan, Prediction, Speeds, Stage, StagePlan
from rubberband.values.profile import FIXED, Law, Profile, Spread

CHUNK = 1024
"""Samples in a chunk: a power of two, as stages of many trials have fewer rows, which are repeated."""
MOST_SAMPLES = 20 * CHUNK
_MOST_PER_STAGE = 65_536
_FEWEST_ROWS = 32
"""Numbers, and rows, that are enough for one stage: the more trials it has, the less its time varies."""
_MOST_DRAWN = 20_000_000
_MOST_KEPT = 10_000_000
_SPARE = 2
"""Idle instances that shorten the wait of lost trials; more are seldom of use."""
_CHANCES = 16_381
"""Random numbers of losses in a chunk: a prime, so that instances of one row have different ones."""
_MOST_CHOICES = 128
"""Different choices of survivors in a chunk."""
_SLOWNESS_LEAST = 1e-9
"""Least slowness: the normal law allows trials that take no time."""


# Random factors with mean 1: 16 random bits choose one of as many equally likely levels of a law.

LEVELS = 2**16
FEW_NUMBERS = 100_000
"""Up to this size, random numbers are kept from one job to the next."""


@lru_cache(maxsize=1)
def normal_levels() -> Seconds:
    """Return the means of 2**16 equally likely parts of the standard normal law, in order."""
    fine = np.linspace(-7.0, 7.0, 200_001)
    density = np.exp(-fine * fine / 2.0) / math.sqrt(2.0 * math.pi)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2.0)]) * (fine[1] - fine[0])
    edges = np.interp(np.arange(1, LEVELS) / LEVELS, below, fine)
    density = np.concatenate([[0.0], np.exp(-edges * edges / 2.0) / math.sqrt(2.0 * math.pi), [0.0]])
    return np.asarray(((density[:-1] - density[1:]) * LEVELS).astype(np.float32))


def factors(cv: float, law: Law, seed: tuple[int, ...], size: int) -> Seconds:
    """(size,) Draw factors with mean 1."""
    bits = bits_of(seed, size)
    return factor_levels(cv, law).take(bits) if 4 * size >= LEVELS else noisy(cv, law, normal_levels().take(bits))


@lru_cache(maxsize=32)
def factor_levels(cv: float, law: Law) -> Seconds:
    """Return factors for all levels: where many are drawn, each is computed once."""
    return noisy(cv, law, normal_levels())


def noisy(cv: float, law: Law, normals: Seconds) -> Seconds:
    """Return factors with mean 1."""
    if law == "normal":
        return np.asarray(np.maximum(np.float32(0.0), np.float32(1.0) + np.float32(cv) * normals))
    return lognormal(cv, normals)


def normals_of(seed: tuple[int, ...], shape: tuple[int, int]) -> Seconds:
    """Return standard normal numbers."""
    return normal_levels().take(bits_drawn(seed, shape[0] * shape[1])).reshape(shape)


def bits_drawn(seed: tuple[int, ...], size: int) -> npt.NDArray[np.uint16]:
    """Draw levels by 16 random bits each: four from one random number."""
    drawn = np.random.PCG64(seed).random_raw(-(-size // 4)).view(np.uint16)[:size]
    drawn.flags.writeable = False
    return drawn


# Successive plans are mostly of similar jobs, whose samples begin with the same seed.
_few_bits = lru_cache(maxsize=128)(bits_drawn)


def bits_of(seed: tuple[int, ...], size: int) -> npt.NDArray[np.uint16]:
    """Return random levels: the same array for the same seed, if it is small."""
    return (_few_bits if size <= FEW_NUMBERS else bits_drawn)(seed, size)


@lru_cache(maxsize=1)
def exponential_levels() -> Seconds:
    """Return the means of 2**16 equally likely parts of the exponential law with mean 1, in order."""
    beyond = np.arange(LEVELS, -1, -1.0) / LEVELS
    above = beyond - np.append(beyond[:-1] * np.log(beyond[:-1]), 0.0)
    return np.asarray((-np.diff(above) * LEVELS).astype(np.float32))


@lru_cache(maxsize=8)
def spread_levels(spread: Spread) -> Seconds:
    """Return factors for all levels."""
    if spread.samples:
        return np.array(spread.samples, np.float32)[np.arange(LEVELS) * len(spread.samples) // LEVELS]
    return factor_levels(spread.cv, "lognormal")


def lognormal(cv: float, normals: Seconds) -> Seconds:
    """Return lognormal factors with mean 1."""
    variance = math.log1p(cv * cv)
    return np.asarray(np.exp(normals.dtype.type(math.sqrt(variance)) * normals - normals.dtype.type(variance / 2.0)))


def spread_factors(spread: Spread, rng: np.random.Generator, size: int) -> Floats:
    """Draw factors on a mean, shape (size,): from the spread's samples, else lognormal with mean 1."""
    if spread.samples:
        return rng.choice(np.array(spread.samples), size)
    return lognormal(spread.cv, rng.standard_normal(size))


def varies(profile: Profile, offer: Offer, speeds: Speeds | None = None) -> bool:
    """Return whether any time of a job on an offer is noisy, or its trials are known to differ."""
    taken_away = offer.spot is not None and offer.spot.interruptions_per_hour > 0.0
    differs = speeds is not None and not speeds.plain
    starts_vary = not (offer.provision_spread.certain and offer.init_spread.certain)
    return profile.varies or taken_away or starts_vary or differs


def without_noise(profile: Profile, offer: Offer) -> tuple[Profile, Offer]:
    """Return a profile and an offer without anything that varies: at mean times, and without interruptions."""
    spot = None if offer.spot is None else replace(offer.spot, interruptions_per_hour=0.0)
    fixed = replace(offer, provision_spread=FIXED, init_spread=FIXED, spot=spot)
    return replace(profile, trial_cv=0.0, iteration_cv=0.0, startup_cv=0.0, mean_cv=0.0), fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Time and cost of one plan, S times."""

    jct_s: Floats
    """(S,) Time of the plan."""
    cost_usd: Floats
    """(S,) Cost of the plan."""
    walked: Sequence[StageOutcome]
    """Time and cost of every stage: numbers, or arrays of S."""

    @property
    def steps(self) -> tuple[StageOutcome, ...]:
        """Mean values of every stage."""
        return tuple(
            StageOutcome(*(float(np.mean(value)) for value in (step.provisioning_s, step.duration_s, step.cost_usd)))
            for step in self.walked
        )

    def prediction(self, plan: Plan, profile: Profile, offer: Offer) -> Prediction:
        """Return means and quantiles."""
        return replace(
            summed(plan, profile, offer, self.steps),
            jct=distribution(self.jct_s),
            cost=distribution(self.cost_usd),
            num_samples=len(self.jct_s),
        )


def distribution(values: Floats) -> Distribution:
    """Return mean and quantiles of a sample."""
    p10, p50, p90, p95 = np.quantile(values, [0.1, 0.5, 0.9, 0.95]).tolist()
    return Distribution(mean=float(values.mean()), p10=p10, p50=p50, p90=p90, p95=p95)


class Draws:
    """Random numbers of a job, drawn when they are first needed."""

    def __init__(
        self,
        stages: Sequence[Stage],
        profile: Profile,
        offer: Offer,
        *,
        seed: int,
        speeds: Speeds | None = None,
        lane: int = 0,
        widest: int = 0,
    ) -> None:
        """Draw nothing yet. With `speeds`, `stages` are the rest of a job; else its trials are unknown.

        Lanes of one job have their own numbers, but share the error of the profile's mean and the first SCALE: they ask
        for their first instances together. `widest` is the most trials in a stage of any lane.
        """
        assert speeds is None or len(speeds.factors) == stages[0].trials, "every trial that goes on has a speed"
        self._lane, self._widest = lane, max(widest, *(stage.trials for stage in stages))
        self.stages, self.profile, self.offer, self.seed, self.speeds = stages, profile, offer, seed, speeds
        self.rows = CHUNK
        numbers = sum(stage.trials * rows_of(stage.trials) for stage in stages)
        loses = offer.spot is not None and offer.spot.interruptions_per_hour > 0.0
        most = MOST_SAMPLES // (2 if loses else 1)
        self.most_chunks = max(4, min(most // CHUNK, _MOST_DRAWN // numbers))
        """Limited by the time to draw them; losses take as long again, and half as many leave half a point of odds."""
        self._kept = max(2, _MOST_KEPT // numbers)
        """Chunks kept, limited by memory."""
        self._chunks: list[Chunk] = []
        self._means: Derived | None = None

    def chunk(self, index: int) -> Chunk:
        """Return chunk `index`, always with the same numbers."""
        while len(self._chunks) <= index:
            number = len(self._chunks)
            seed, keep = (self.seed + self._lane, number), number < self._kept
            mean, shared = self._mean_error(number), (self.seed, number)
            self._chunks.append(
                Chunk(self.stages, self.profile, self.offer, seed, self.rows, keep, mean, self.speeds, shared)
            )
        return self._chunks[index]

    def _mean_error(self, number: int) -> Seconds:
        """(1, rows) Factor by which all trials are slower than profiled, as long as none was measured."""
        rows = rows_of(self._widest)
        if self.profile.mean_cv == 0.0:
            return np.ones((1, rows), np.float32)
        return lognormal(self.profile.mean_cv, normals_of((self.seed, number, 0, 7), (1, rows)))

    def evaluate(self, plan: Plan, num_chunks: int, held: Sequence[Cohort] = ()) -> Samples:
        """Return the samples of the first chunks of a plan that fits the job, stage by stage."""
        steps = walk(plan, self.offer, self._joined(range(num_chunks)), held)
        jct_s = sum(step.provisioning_s + step.duration_s for step in steps)
        cost_usd = sum(step.cost_usd for step in steps)
        ones = np.ones(num_chunks * self.rows)
        return Samples(jct_s=jct_s * ones, cost_usd=cost_usd * ones, walked=steps)

    def totals(self, plan: Plan, chunks: range, held: Sequence[Cohort] = ()) -> tuple[Floats, Floats]:
        """Return time and cost of the plan in the samples of some chunks."""
        ones = np.ones(len(chunks) * self.rows)
        jct_s, cost_usd = totals(plan, self.offer, self._joined(chunks), held)
        return jct_s * ones, cost_usd * ones

    def _joined(self, indices: range) -> Times:
        chunks = [self.chunk(index) for index in indices]
        if len(chunks) == 1:
            return chunks[0]
        return Derived(chunks, lambda values: values[0] if isinstance(values[0], float) else np.concatenate(values))

    def least(self, plan: Plan, held: Sequence[Cohort] = ()) -> tuple[float, float]:
        """Return mean seconds of a plan in the first chunk, and a lower bound of its mean cost: bills are convex."""
        if self._means is None:
            self._means = Derived([self.chunk(0)], lambda values: float(np.mean(values[0])))
        return totals(plan, self.offer, self._means, held)


def rows_of(trials: int) -> int:
    """Return the rows of a stage's samples: all of a chunk, or fewer for very many trials."""
    rows = CHUNK
    while rows > _FEWEST_ROWS and trials * rows > _MOST_PER_STAGE:
        rows //= 2
    return rows


@dataclass(slots=True)
class Chunk:
    """`rows` samples of everything: the `Times` of a walk, as arrays (rows,).

    Durations of trials are in single precision, (trials, rows of the stage). Very many trials need fewer rows, which
    are then repeated.
    """

    stages: Sequence[Stage]
    profile: Profile
    offer: Offer
    seed: tuple[int, int]
    rows: int
    keep: bool
    """Whether the numbers are kept for the next candidate, or drawn again."""
    mean_error: Seconds
    """(1, rows of the job's widest stage) Factor by which all trials are slower than profiled."""
    speeds: Speeds | None = None
    seed_of_lanes: tuple[int, int] | None = None
    """Seed of what the lanes of a job share; None: its own."""
    _own: dict[int, Seconds] = field(default_factory=dict)
    _factors: dict[int, Seconds] = field(default_factory=dict)
    _reduced: dict[tuple[int, str], Floats] = field(default_factory=dict)
    _trials: tuple[tuple[int, int, str], Seconds] | None = None
    """Durations of the trials of a stage by a choice: the last one asked for."""
    _stages: dict[tuple[int, int, int, Market], tuple[Value, Value | None]] = field(default_factory=dict)
    _chances: Chances | None = None
    _unsettled: dict[tuple[int, int, int], Floats] = field(default_factory=dict)
    _inits: dict[int, list[Floats]] = field(default_factory=dict)
    _init_rngs: dict[int, np.random.Generator] = field(default_factory=dict)
    _provisions: dict[int, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trials, profile = tuple(stage.trials for stage in self.stages), self.profile
        if self.speeds is None and max(trials) * rows_of(max(trials)) <= FEW_NUMBERS:
            law, error = (profile.trial_cv, profile.law, profile.mean_cv), (self.mean_error.shape, self.seed_of_lanes)
            self._own = _few_own_factors(self.seed, trials, *law, *error)

    def provision_s(self, index: int) -> Value:
        """SCALE before stage `index`."""
        if self.offer.provision_spread.certain:
            return self.offer.provision_delay_s
        if index not in self._provisions:
            seed = self.seed_of_lanes if index == 0 and self.seed_of_lanes else self.seed
            rng = np.random.default_rng((*seed, index, 1))
            self._provisions[index] = spread_factors(self.offer.provision_spread, rng, self.rows)
        return self.offer.provision_delay_s * self._provisions[index]

    def init_s(self, index: int, started: int) -> Value:
        """INIT_INSTANCE of the slowest of `started` instances: more of them are never faster."""
        if self.offer.init_spread.certain:
            return self.offer.init_delay_s
        rng = self._init_rngs.setdefault(index, self._rng(index, 2))
        slowest = self._inits.setdefault(index, [])
        while len(slowest) < started:
            drawn = spread_factors(self.offer.init_spread, rng, self.rows)
            slowest.append(np.maximum(slowest[-1], drawn) if slowest else drawn)
        return self.offer.init_delay_s * slowest[started - 1]

    def unsettled_s(self, index: int, choice: StagePlan, held: int) -> Value:
        """Further wait until no spot instance is missing."""
        rate = self._losses_per_s(choice)
        if rate == 0.0:
            return 0.0
        key = (index, choice.instances, held)
        if key not in self._unsettled:
            grows, ones = choice.instances > held, np.ones(self.rows)
            begin = Settling(
                held=held if index else 0,
                instances=choice.instances,
                rate=rate,
                provision_s=ones * (self.provision_s(index) if grows else 0.0),
                init_s=ones * (self.init_s(index, choice.instances - held) if grows else 0.0),
                index=index,
                chances=self._chances_of_losses(),
            )
            self._unsettled[key] = unsettled_s(begin)
        return self._unsettled[key]

    def _chances_of_losses(self) -> Chances:
        """Return the random numbers of losses; a replacement that is lost in INIT_INSTANCE is replaced once more."""
        if self._chances is None:
            offer, spot = self.offer, self.offer.spot
            assert spot is not None, "only spot instances are replaced"
            usual_s = offer.provision_delay_s + offer.init_delay_s + self.profile.startup_s(1)
            lives, again, scales, inits = bits_of((*self.seed, 0, 8), 4 * _CHANCES).reshape(4, _CHANCES)
            scale_s = np.float32(offer.provision_delay_s) * spread_levels(offer.provision_spread).take(scales)
            init_s = np.float32(offer.init_delay_s) * spread_levels(offer.init_spread).take(inits)
            mean_s = np.float32(SECONDS_PER_HOUR / spot.interruptions_per_hour)
            lived_s = exponential_levels().take(again) * mean_s
            ready_s = scale_s + init_s + np.where(lived_s < init_s, lived_s + scale_s, np.float32(0.0))
            replaced_s = np.maximum(scale_s, ready_s + np.float32(spot.restart_s - usual_s))
            lives = exponential_levels().take(lives)
            self._chances = Chances(lives=lives, scale_s=scale_s, replaced_s=replaced_s)
        return self._chances

    def stage_s(self, index: int, choice: StagePlan) -> Value:
        """From the first trial's start to SYNC: a free slot takes the next trial (list scheduling)."""
        return self._stage(index, choice)[0]

    def busy_s(self, index: int, choice: StagePlan) -> Value:
        """Sum of the durations of the trials, where that is billed."""
        busy_s = self._stage(index, choice)[1]
        assert busy_s is not None, "instances are billed, busy or not"
        return busy_s

    def _stage(self, index: int, choice: StagePlan) -> tuple[Value, Value | None]:
        num_slots = slots(choice.instances, self.offer.slots, choice.gpus_per_trial)
        spare = _SPARE * max(1, self.offer.slots // choice.gpus_per_trial) if self._losses_per_s(choice) else 0
        num_slots = min(self.stages[index].trials + spare, num_slots)
        key = (index, num_slots, choice.gpus_per_trial, choice.market)
        if key not in self._stages:
            stage_s, busy_s = self._schedule(index, num_slots, choice)
            self._stages[key] = self._repeated(stage_s), None if busy_s is None else self._repeated(busy_s)
        return self._stages[key]

    def _repeated(self, values: Value) -> Value:
        return values if isinstance(values, float) else np.tile(values, self.rows // len(values))

    def _losses_per_s(self, choice: StagePlan) -> float:
        """Losses of an instance per second."""
        spot = self.offer.spot
        return 0.0 if choice.market == "on_demand" or spot is None else spot.interruptions_per_hour / SECONDS_PER_HOUR

    def _schedule(self, index: int, num_slots: int, choice: StagePlan) -> tuple[Value, Value | None]:
        stage, profile = self.stages[index], self.profile
        work_s = stage.work * profile.iteration_s(choice.gpus_per_trial)
        is_billed = self.offer.billing == "per_function"
        rate = self._losses_per_s(choice)
        if not rate and not profile.startup_varies:
            startup_s = profile.startup_s(choice.gpus_per_trial)
            if self.speeds is None and profile.stage_cv(stage.work) == 0.0:
                waves = -(-stage.trials // num_slots)
                return waves * (startup_s + work_s), stage.trials * (startup_s + work_s)
            if num_slots == stage.trials:
                busy_s = stage.trials * startup_s + work_s * self._over_trials(index, "sum") if is_billed else None
                return startup_s + work_s * self._over_trials(index, "max"), busy_s
        trials_s = self._trials_s(index, choice, work_s)
        if rate:
            return self._with_losses(index, num_slots, choice, trials_s)
        return makespan(trials_s, num_slots), trials_s.sum(axis=0, dtype=np.float64) if is_billed else None

    def _trials_s(self, index: int, choice: StagePlan, work_s: float) -> Seconds:
        """(trials, rows of the stage) Return the duration of each trial."""
        key = (index, choice.gpus_per_trial, choice.market)
        if self._trials is None or self._trials[0] != key:
            self._trials = key, self.startup_s(index, choice.gpus_per_trial) + np.float32(work_s) * self.factor(index)
        return self._trials[1]

    def _over_trials(self, index: int, reduction: Literal["max", "sum"]) -> Floats:
        """(rows,) Return the largest factor of the stage's trials, or their sum."""
        if (index, reduction) not in self._reduced:
            factor = self.factor(index)
            reduced = factor.max(axis=0) if reduction == "max" else factor.sum(axis=0, dtype=np.float64)
            self._reduced[index, reduction] = reduced.astype(np.float64)
        return self._reduced[index, reduction]

    def startup_s(self, index: int, gpus: int) -> np.float32 | Seconds:
        """(trials, rows) Return the start-up time of each trial in the stage; one number where it does not vary."""
        mean_s = np.float32(self.profile.startup_s(gpus))
        if not self.profile.startup_varies:
            return mean_s
        drawn = self._noise(self.profile.startup_cv, index, 4, "lognormal")
        return np.asarray(mean_s * drawn)

    def factor(self, index: int) -> Seconds:
        """(trials, rows) Return the factor by which each trial's training in the stage is slower than the profile.

        It is the product of the trial's own factor, the same in all of its stages, and of the stage's noise.
        """
        if index in self._factors:
            return self._factors[index]
        cv = self.profile.iteration_cv / math.sqrt(self.stages[index].work)
        has_own = self.profile.trial_cv > 0.0 or self.profile.mean_cv > 0.0 or self.speeds is not None
        drawn = self._own_factor(index) if has_own else self._noise(cv, index, 0, self.profile.law)
        if has_own and cv > 0.0:
            drawn = drawn * self._noise(cv, index, 0, self.profile.law)
        if self.keep:
            self._factors[index] = drawn
        return drawn

    def _own_factor(self, index: int) -> Seconds:
        """(trials, rows) Return the factor by which each trial of the stage is slower in all of its stages."""
        own_s = self._own.get(index)
        if own_s is None:
            first = _bracket(self.stages, index)
            own_s = self._drawn_speeds(first) if index == first else self._survivors(first, index)
            if self.keep:
                self._own[index] = own_s
        return own_s

    def _survivors(self, first: int, index: int) -> Seconds:
        """(trials, rows) Pick the trials of a stage in each row, by number, as the executor starts them.

        They survive at random, or by a metric that is correlated with speed, which is the same at every SYNC.
        """
        correlation, trials = (0.0 if self.speeds is None else self.speeds.with_metric), self.stages[index].trials
        before_s = self._own_factor(index - 1 if correlation == 0.0 else first)
        before_s = np.tile(before_s, rows_of(trials) // before_s.shape[1])
        if correlation == 0.0:
            size = before_s.size
            draw = _few_picks if size <= FEW_NUMBERS else _picks
            kept = draw((*self.seed, index, 6), before_s.shape[1], len(before_s), trials)
        else:
            kept = _best(self._merits(correlation, first, before_s), trials)
        return np.ascontiguousarray(before_s.T[kept].reshape(-1, trials).T)

    def _merits(self, correlation: float, first: int, own_s: Seconds) -> Seconds:
        """(rows, trials) Return the lower, the better: a Gaussian copula with the measured correlation."""
        slowness = np.log(np.maximum(own_s, _SLOWNESS_LEAST))
        spread = slowness.std(axis=0)
        slowness = (slowness - slowness.mean(axis=0)) / np.where(spread > 0.0, spread, 1.0)
        rows = rows_of(self.stages[first].trials)
        chance = np.tile(self._rng(first, 6).standard_normal((len(own_s), rows)), own_s.shape[1] // rows)
        return np.asarray(-(correlation * slowness + math.sqrt(1.0 - correlation**2) * chance).T)

    def _drawn_speeds(self, first: int) -> Seconds:
        if self.speeds is None or first > 0:
            drawn = self._noise(self.profile.trial_cv, first, 5, self.profile.law)
            if self.speeds is not None:
                return drawn
            mean: Seconds = np.tile(self.mean_error, drawn.shape[1] // self.mean_error.shape[1])
            return drawn * mean
        measured, errors = (np.array(given, np.float32)[:, None] for given in (self.speeds.factors, self.speeds.errors))
        variance = np.log1p(errors**2)
        normals = normals_of((*self.seed, first, 5), (len(measured), rows_of(len(measured))))
        return np.asarray(measured * np.exp(np.sqrt(variance) * normals - variance / 2.0))

    def _noise(self, cv: float, index: int, what: int, law: Law) -> Seconds:
        """(trials, rows of the stage) Factors with mean 1."""
        trials = self.stages[index].trials
        shape = (trials, rows_of(trials))
        if cv == 0.0:
            return np.ones(shape, np.float32)
        return factors(cv, law, (*self.seed, index, what), trials * shape[1]).reshape(shape)

    def _with_losses(
        self, index: int, num_slots: int, choice: StagePlan, trials_s: Seconds
    ) -> tuple[Floats, Floats | None]:
        """Return time of the stage and busy time of its trials, with what interruptions cost."""
        spot, stage, first = self.offer.spot, self.stages[index], _bracket(self.stages, index)
        assert spot is not None, "a plan uses the markets that its offer has"
        saves = stage.repeats is None
        per_instance = max(1, self.offer.slots // choice.gpus_per_trial)
        work_s = self.profile.iteration_s(choice.gpus_per_trial)
        return with_losses(
            Exposed(
                trials_s=trials_s,
                startup_s=self.startup_s(index, choice.gpus_per_trial),
                iteration_s=np.float32(work_s) * self.factor(index),
                iterations=stage.work,
                before=sum(earlier.iterations for earlier in self.stages[first:index]) if saves else 0,
                checkpoint_iterations=spot.checkpoint_iterations if saves else stage.work + 1,
                num_slots=num_slots,
                per_instance=per_instance,
                rate=self._losses_per_s(choice) * max(1, choice.gpus_per_trial // self.offer.slots),
                index=index,
                chances=self._chances_of_losses(),
                is_billed=self.offer.billing == "per_function",
            )
        )

    def _rng(self, index: int, what: int) -> np.random.Generator:
        return np.random.default_rng((*self.seed, index, what))


@dataclass(frozen=True, slots=True)
class Derived:
    """Times derived from those of chunks: the `Times` of a walk. Each value is computed once."""

    chunks: Sequence[Chunk]
    combine: Callable[[list[Value]], Value]
    _known: dict[tuple[Any, ...], Value] = field(default_factory=dict)

    def provision_s(self, index: int) -> Value:
        return self._value(Chunk.provision_s, index)

    def init_s(self, index: int, started: int) -> Value:
        return self._value(Chunk.init_s, index, started)

    def unsettled_s(self, index: int, choice: StagePlan, held: int) -> Value:
        return self._value(Chunk.unsettled_s, index, choice, held)

    def stage_s(self, index: int, choice: StagePlan) -> Value:
        return self._value(Chunk.stage_s, index, choice)

    def busy_s(self, index: int, choice: StagePlan) -> Value:
        return self._value(Chunk.busy_s, index, choice)

    def _value(self, times: Callable[..., Value], *arguments: Any) -> Value:
        key = (times, *arguments)
        if key not in self._known:
            self._known[key] = self.combine([times(chunk, *arguments) for chunk in self.chunks])
        return self._known[key]


def _bracket(stages: Sequence[Stage], index: int) -> int:
    """Return the stage in which the trials of stage `index` began: where trials increase, another bracket begins."""
    while index > 0 and stages[index].trials <= stages[index - 1].trials:
        index -= 1
    return index


def _picks(seed: tuple[int, ...], rows: int, trials: int, survivors: int) -> npt.NDArray[np.bool_]:
    """(rows, trials) Return which trials survive in each row, at random; some rows share a choice, to save time."""
    choices = min(rows, _MOST_CHOICES)
    merits = bits_drawn(seed, choices * trials).reshape(choices, trials)
    return np.tile(_best(merits, survivors), (rows // choices, 1))


def _best(merits: npt.NDArray[Any], survivors: int) -> npt.NDArray[np.bool_]:
    """(rows, trials) Return which trials have the lowest of the merits in each row."""
    best = np.zeros(merits.shape, np.bool_)
    np.put_along_axis(best, np.argpartition(merits, survivors - 1, axis=1)[:, :survivors], True, axis=1)
    return best


_few_picks = lru_cache(maxsize=128)(_picks)


@lru_cache(maxsize=8)
def _few_own_factors(*_draw: Hashable) -> dict[int, Seconds]:
    """Return the own factors of the trials of jobs with these numbers, by stage, as far as they were drawn."""
    return {}
