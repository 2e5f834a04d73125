"""Samples of what a plan takes and costs where times vary (design/planning-model.md, Noise).

Every candidate is evaluated with the same random numbers (common random numbers), so that plans differ by what they do
and not by luck. Samples come in chunks: a decision that is clear after few needs no more. It searches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from rubberband.chance import Law, Spread
from rubberband.offer import Offer, slots
from rubberband.plan import Cohort, Distribution, Plan, Prediction, Speeds, Stage, StagePlan
from rubberband.planner.model import Step, check_plan, interruptions, summed, walk
from rubberband.planner.table import Bools, Floats
from rubberband.profile import Profile

CHUNK = 1000
"""Samples in a chunk, fewer for very many trials."""
MOST_SAMPLES = 20_000
_MOST_NUMBERS = 4_000_000
_FEW_NUMBERS = 100_000
"""So many are remembered from one job to the next."""
_FEW_SLOTS = 16
_WAVE_SLOTS = 8
_FEW_WAVES = 5
"""From so many slots on and up to so many waves, a wave of trials at a time is faster than a trial at a time."""
_MOSTLY = 0.95
_TRIED_ROWS = 64
_MOST_SCHEDULED = 2048
"""Stages with more trials are not scheduled one by one: that would take minutes."""
_MANY_WAVES = 10
_SLOWNESS_LEAST = 1e-9
"""Of a trial that takes no time at all, as the normal law allows."""


def varies(profile: Profile, offer: Offer, speeds: Speeds | None = None) -> bool:
    """Return whether anything about a job on an offer is noisy, or its trials are known to differ."""
    taken_away = offer.spot is not None and offer.spot.interruptions_per_hour > 0.0
    differs = speeds is not None and not speeds.plain
    starts_vary = not (offer.provision_spread.certain and offer.init_spread.certain)
    return profile.varies or taken_away or starts_vary or differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What one plan takes and costs, S times."""

    jct_s: Floats
    """(S,)"""
    cost_usd: Floats
    """(S,)"""
    walks: Sequence[Sequence[Step]]
    """What every stage takes and costs, chunk by chunk."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """Mean values of every stage."""
        return tuple(
            Step(*(_mean([getattr(steps[at], name) for steps in self.walks]) for name in _STEP))
            for at in range(len(self.walks[0]))
        )

    def prediction(self, plan: Plan, profile: Profile, offer: Offer) -> Prediction:
        """Means and quantiles."""
        return replace(
            summed(plan, profile, offer, self.steps),
            jct=distribution(self.jct_s),
            cost=distribution(self.cost_usd),
            num_samples=len(self.jct_s),
        )


def distribution(values: Floats) -> Distribution:
    """Mean and quantiles of a sample."""
    p10, p50, p90, p95 = np.quantile(values, [0.1, 0.5, 0.9, 0.95]).tolist()
    return Distribution(mean=float(values.mean()), p10=p10, p50=p50, p90=p90, p95=p95)


def sample(
    stages: Sequence[Stage],
    plan: Plan,
    profile: Profile,
    offer: Offer,
    *,
    num_samples: int = MOST_SAMPLES,
    seed: int = 0,
    held: Sequence[Cohort] = (),
    speeds: Speeds | None = None,
) -> Samples:
    """Return at least `num_samples` samples of a plan (RubberBand §4.2, Algorithm 1, without the graph).

    Raises InputError as `predict` does.
    """
    check_plan(stages, plan, offer)
    draws = Draws(stages, profile, offer, seed=seed, speeds=speeds)
    return draws.evaluate(plan, -(-num_samples // draws.rows), held)


class Draws:
    """The random numbers of a job, drawn when they are first needed."""

    def __init__(
        self,
        stages: Sequence[Stage],
        profile: Profile,
        offer: Offer,
        *,
        seed: int,
        speeds: Speeds | None = None,
    ) -> None:
        """Draw nothing yet. With `speeds`, `stages` are the rest of a job; else nothing is known of its trials."""
        assert speeds is None or len(speeds.factors) == stages[0].trials, "every trial that goes on has a speed"
        self.stages, self.profile, self.offer, self.seed, self.speeds = stages, profile, offer, seed, speeds
        num_trials = sum(stage.trials for stage in stages)
        self.rows = max(100, min(CHUNK, _MOST_NUMBERS // num_trials))
        self.most_chunks = max(2, min(MOST_SAMPLES, _MOST_NUMBERS // num_trials) // self.rows)
        """As many as memory bears."""
        self._chunks: list[Chunk] = []

    def chunk(self, index: int) -> Chunk:
        """The chunk `index`; the same numbers whenever it is asked for."""
        while len(self._chunks) <= index:
            keep = len(self._chunks) < self.most_chunks
            self._chunks.append(
                Chunk(
                    self.stages, self.profile, self.offer, (self.seed, len(self._chunks)), self.rows, keep, self.speeds
                )
            )
        return self._chunks[index]

    def evaluate(self, plan: Plan, num_chunks: int, held: Sequence[Cohort] = (), first: int = 0) -> Samples:
        """The samples of chunks `first` … of a plan that fits the job."""
        walks = [walk(plan, self.offer, self.chunk(index), held) for index in range(first, first + num_chunks)]
        total = [
            (sum(step.provisioning_s + step.duration_s for step in steps), sum(step.cost_usd for step in steps))
            for steps in walks
        ]
        ones = np.ones(self.rows)
        return Samples(
            jct_s=np.concatenate([jct_s * ones for jct_s, _ in total]),
            cost_usd=np.concatenate([cost_usd * ones for _, cost_usd in total]),
            walks=walks,
        )


_STEP = ("provisioning_s", "duration_s", "cost_usd")


def _mean(values: Sequence[float | Floats]) -> float:
    return float(np.mean([np.mean(value) for value in values]))


@dataclass(slots=True)
class Chunk:
    """`rows` samples of everything: the `Times` of a walk, as arrays (rows,)."""

    stages: Sequence[Stage]
    profile: Profile
    offer: Offer
    seed: tuple[int, int]
    rows: int
    keep: bool
    """Whether the numbers are kept for the next candidate, or drawn again."""
    speeds: Speeds | None = None
    _own: dict[int, Floats] = field(default_factory=dict)
    _factors: dict[int, Floats] = field(default_factory=dict)
    _maxima: dict[int, Floats] = field(default_factory=dict)
    _totals: dict[int, Floats] = field(default_factory=dict)
    _stages: dict[tuple[int, int, int, str], tuple[Floats, Floats | None]] = field(default_factory=dict)
    _inits: dict[int, list[Floats]] = field(default_factory=dict)
    _init_rngs: dict[int, np.random.Generator] = field(default_factory=dict)
    _provisions: dict[int, Floats] = field(default_factory=dict)

    def provision_s(self, index: int) -> float | Floats:
        """SCALE before stage `index`."""
        if self.offer.provision_spread.certain:
            return self.offer.provision_delay_s
        if index not in self._provisions:
            self._provisions[index] = _factors(self.offer.provision_spread, self._rng(index, 1), self.rows)
        return self.offer.provision_delay_s * self._provisions[index]

    def init_s(self, index: int, started: int) -> float | Floats:
        """The slowest of `started` INIT_INSTANCE nodes: more of them are never faster."""
        if self.offer.init_spread.certain:
            return self.offer.init_delay_s
        rng = self._init_rngs.setdefault(index, self._rng(index, 2))
        slowest = self._inits.setdefault(index, [])
        while len(slowest) < started:
            drawn = _factors(self.offer.init_spread, rng, self.rows)
            slowest.append(np.maximum(slowest[-1], drawn) if slowest else drawn)
        return self.offer.init_delay_s * slowest[started - 1]

    def stage_s(self, index: int, choice: StagePlan) -> float | Floats:
        """List scheduling: a free slot takes the next trial; the stage ends with its last one."""
        return self._stage(index, choice)[0]

    def busy_s(self, index: int, choice: StagePlan) -> float | Floats:
        """What the trials take in all, where that is billed."""
        busy_s = self._stage(index, choice)[1]
        assert busy_s is not None, "instances are billed, busy or not"
        return busy_s

    def _stage(self, index: int, choice: StagePlan) -> tuple[Floats, Floats | None]:
        num_slots = min(self.stages[index].trials, slots(choice.instances, self.offer.gpus, choice.gpus_per_trial))
        key = (index, num_slots, choice.gpus_per_trial, choice.market)
        if key not in self._stages:
            self._stages[key] = self._schedule(index, num_slots, choice)
        return self._stages[key]

    def _schedule(self, index: int, num_slots: int, choice: StagePlan) -> tuple[Floats, Floats | None]:
        stage, startup_s = self.stages[index], self.startup_s(index)
        work_s = stage.iterations * self.profile.iteration_s(choice.gpus_per_trial)
        is_billed = self.offer.billing == "per_function"
        if choice.market == "on_demand" and num_slots == stage.trials and isinstance(startup_s, float):
            busy_s = stage.trials * startup_s + work_s * self._total(index) if is_billed else None
            return startup_s + work_s * self._slowest(index), busy_s
        trials_s = startup_s + work_s * self.factor(index)
        if choice.market == "spot":
            trials_s = trials_s + self._lost_s(index, choice, trials_s)
        return makespan(trials_s, num_slots), trials_s.sum(axis=0) if is_billed else None

    def _slowest(self, index: int) -> Floats:
        if index not in self._maxima:
            self._maxima[index] = self.factor(index).max(axis=0)
        return self._maxima[index]

    def _total(self, index: int) -> Floats:
        if index not in self._totals:
            self._totals[index] = self.factor(index).sum(axis=0)
        return self._totals[index]

    def startup_s(self, index: int) -> float | Floats:
        """(trials, rows) How long each trial takes to start in the stage; one number where that does not vary."""
        if not self.profile.startup_varies:
            return self.profile.trial_startup_s
        drawn = self._noise(self.profile.startup_cv, index, 4, "lognormal")
        startups_s: Floats = self.profile.trial_startup_s * drawn
        return startups_s

    def factor(self, index: int) -> Floats:
        """(trials, rows) How much longer than the profile's mean each trial trains in the stage.

        It is the product of what is the trial's own, the same in all of its stages, and of what is the stage's.
        """
        if index in self._factors:
            return self._factors[index]
        iterations = self.stages[index].iterations
        drawn = self._noise(self.profile.iteration_cv / math.sqrt(iterations), index, 0, self.profile.law)
        if self.profile.trial_cv > 0.0 or self.speeds is not None:
            drawn = self._own_factor(index) * drawn
        if self.keep:
            self._factors[index] = drawn
        return drawn

    def _own_factor(self, index: int) -> Floats:
        """(trials, rows) How much slower than the profile each trial of the stage is, all along."""
        first = _bracket(self.stages, index)
        own_s = self._own.get(first)
        if own_s is None:
            own_s = self._drawn_speeds(first)
            if self.keep:
                self._own[first] = own_s
        if index == first:
            return own_s
        rng, trials = self._rng(first, 6), self.stages[index].trials
        correlation = self.speeds.with_metric if self.speeds is not None else 0.0
        if correlation == 0.0:
            return own_s[rng.permutation(len(own_s))[:trials]]
        # The better of a metric that goes with the speed as far as has been seen (a Gaussian copula).
        slowness = np.log(np.maximum(own_s, _SLOWNESS_LEAST))
        spread = slowness.std(axis=0)
        slowness = (slowness - slowness.mean(axis=0)) / np.where(spread > 0.0, spread, 1.0)
        merit = correlation * slowness + math.sqrt(1.0 - correlation**2) * rng.standard_normal(own_s.shape)
        survivors: Floats = np.take_along_axis(own_s, np.argsort(-merit, axis=0)[:trials], axis=0)
        return survivors

    def _drawn_speeds(self, first: int) -> Floats:
        if self.speeds is None or first > 0:
            return self._noise(self.profile.trial_cv, first, 5, self.profile.law)
        factors, errors = np.array(self.speeds.factors)[:, None], np.array(self.speeds.errors)[:, None]
        variance = np.log1p(errors**2)
        normals = self._rng(first, 5).standard_normal((len(factors), self.rows))
        drawn: Floats = factors * np.exp(np.sqrt(variance) * normals - variance / 2.0)
        return drawn

    def _noise(self, cv: float, index: int, what: int, law: Law) -> Floats:
        """(trials, rows) Factors with mean 1."""
        shape = (self.stages[index].trials, self.rows)
        noise = _few_noises if shape[0] * self.rows <= _FEW_NUMBERS else _noise
        return noise(cv, law, (*self.seed, index, what), shape)

    def _lost_s(self, index: int, choice: StagePlan, trials_s: Floats) -> Floats:
        """(trials, rows) Seconds that interruptions cost each trial: a Poisson number of them, each as long."""
        spot, stage = self.offer.spot, self.stages[index]
        assert spot is not None, "a plan uses the markets that its offer has"
        rate, _ = interruptions(stage, choice.gpus_per_trial, self.profile, self.offer)
        rng = self._rng(index, 3)
        happens, where = rng.random(trials_s.shape), rng.random(trials_s.shape)
        redone_s = min(spot.checkpoint_iterations, stage.iterations) * self.profile.iteration_s(choice.gpus_per_trial)
        lost_s: Floats = poisson(happens, rate * trials_s) * (spot.restart_s + where * redone_s)
        return lost_s

    def _rng(self, index: int, what: int) -> np.random.Generator:
        return np.random.default_rng((*self.seed, index, what))


def _bracket(stages: Sequence[Stage], index: int) -> int:
    """The stage in which the trials of stage `index` began: more trials than before are those of another bracket."""
    while index > 0 and stages[index].trials <= stages[index - 1].trials:
        index -= 1
    return index


def _noise(cv: float, law: Law, seed: tuple[int, ...], shape: tuple[int, int]) -> Floats:
    if cv == 0.0:
        return np.ones(shape)
    normals = np.random.default_rng(seed).standard_normal(shape)
    drawn: Floats = np.maximum(0.0, 1.0 + cv * normals) if law == "normal" else _lognormal(cv, normals)
    drawn.flags.writeable = False
    return drawn


# Plans that are asked for one after another are of jobs that are alike, and their samples begin with the same seed.
_few_noises = lru_cache(maxsize=64)(_noise)


def _lognormal(cv: float, normals: Floats) -> Floats:
    variance = math.log1p(cv * cv)
    factors: Floats = np.exp(math.sqrt(variance) * normals - variance / 2.0)
    return factors


def _factors(spread: Spread, rng: np.random.Generator, size: int) -> Floats:
    if spread.samples:
        return rng.choice(np.array(spread.samples), size)
    return _lognormal(spread.cv, rng.standard_normal(size))


def poisson(uniforms: Floats, means: Floats) -> Floats:
    """Poisson numbers by inversion: the same uniforms give never fewer for a larger mean."""
    term = np.exp(-means)
    below, count = term.copy(), np.zeros_like(means)
    for number in range(1, 1000):
        more = uniforms > below
        if not more.any():
            break
        count += more
        term = term * means / number
        below = below + term
    return count


def makespan(trials_s: Floats, num_slots: int) -> Floats:
    """(rows,) When the last of the trials (n, rows) ends, if the first slot to be free takes the next one."""
    num_trials = len(trials_s)
    latest: Floats
    if num_slots >= num_trials or num_slots == 1:
        latest = trials_s.sum(axis=0) if num_slots == 1 else trials_s.max(axis=0)
        return latest
    if num_trials > _MOST_SCHEDULED:
        return _makespan_of_many(trials_s, num_slots)
    is_short = num_slots >= _WAVE_SLOTS and num_trials <= _FEW_WAVES * num_slots
    if not (is_short and _in_waves(trials_s[:, :_TRIED_ROWS], num_slots)[1].any()):
        return _one_by_one(trials_s, num_slots)
    latest, known = _in_waves(trials_s, num_slots)
    unknown = np.flatnonzero(~known)
    if len(unknown):
        latest[unknown] = _one_by_one(np.take(trials_s, unknown, axis=1), num_slots)
    return latest


def _in_waves(trials_s: Floats, num_slots: int) -> tuple[Floats, Bools]:
    """The same, a wave of trials at a time, and where it is known: nowhere if it is not so nearly everywhere.

    It is known where the trials of every wave take the slots in the order in which these were free: where the last of
    them is free before the first of these trials ends, as it is unless times vary much. Not where two slots are free at
    once: it is for `_one_by_one` to say what happens then.
    """
    rows = trials_s.shape[1]
    free_s, known = _first_wave(trials_s, num_slots), np.ones(rows, dtype=bool)
    for first in range(num_slots, len(trials_s), num_slots):
        wave_s = trials_s[first : first + num_slots]
        width = len(wave_s)
        free_s.sort(axis=0)
        last_s = free_s[width - 1].copy()
        known &= (free_s[1:] > free_s[:-1]).all(axis=0)
        free_s[:width] += wave_s
        known &= free_s[: width - 1].min(axis=0, initial=np.inf) > last_s
        if np.count_nonzero(known) < _MOSTLY * rows:
            return last_s, np.zeros(rows, dtype=bool)
    latest: Floats = free_s.max(axis=0)
    return latest, known


def _first_wave(trials_s: Floats, num_slots: int) -> Floats:
    """When each slot is free of its first trial; of few, a nanosecond a slot keeps two from being the first at once."""
    first_s: Floats = trials_s[:num_slots]
    return first_s + 1e-9 * np.arange(num_slots)[:, None] if num_slots <= _FEW_SLOTS else first_s.copy()


def _one_by_one(trials_s: Floats, num_slots: int) -> Floats:
    """The same, a trial at a time."""
    latest: Floats
    free_s = _first_wave(trials_s, num_slots)
    if num_slots <= _FEW_SLOTS:
        for trial_s in trials_s[num_slots:]:
            free_s += (free_s == free_s.min(axis=0)) * trial_s
        latest = free_s.max(axis=0)
        return latest
    free_s = np.ascontiguousarray(free_s.T)
    every = np.arange(trials_s.shape[1])
    for trial_s in trials_s[num_slots:]:
        free_s[every, free_s.argmin(axis=1)] += trial_s
    latest = free_s.max(axis=1)
    return latest


def _makespan_of_many(trials_s: Floats, num_slots: int) -> Floats:
    """The same, nearly: the slots end within the longest trial of each other, on average half of it (Graham 1969).

    With ten waves or more that is within 1 % of the mean; with fewer, Graham's bound is used, which is never too low.
    """
    share = 0.5 if len(trials_s) >= _MANY_WAVES * num_slots else 1.0
    longest_s = trials_s.max(axis=0)
    latest: Floats = np.maximum(
        longest_s, trials_s.sum(axis=0) / num_slots + share * (1.0 - 1.0 / num_slots) * longest_s
    )
    return latest
