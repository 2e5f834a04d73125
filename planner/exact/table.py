"""The choices of every stage as arrays: the instance counts worth considering, and a stage's time and cost with each.

SYNC makes stages additive (RubberBand §4.2), so this table and the terms of the offer are all that a search needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rubberband.errors import InputError
from rubberband.planner.exact.model import Rates, least_instances, run_s
from rubberband.values.offer import Offer
from rubberband.values.plan import Cohort, Market, Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTerms:
    """Terms of starting instances, and terms that do not depend on the market."""

    minimum_s: float
    data_usd: float
    head_usd_per_s: float
    provision_s: float
    init_s: float
    """Seconds that one instance takes to start."""
    late_growth_s: float = 0.0
    """Seconds that the deadline must allow for a growth beyond its mean."""
    slower_s: Floats | None = None
    """Seconds by which the slowest of 0, 1, 2, … instances takes longer than one; None if all take as long."""

    @property
    def growth_s(self) -> float:
        """SCALE + INIT_INSTANCE of one instance, which growing inserts before a stage."""
        return self.provision_s + self.init_s

    def later_s(self, started: Ints) -> Floats | float:
        """Return the seconds that starting `started` instances at once adds."""
        return 0.0 if self.slower_s is None else self.slower_s[started]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAtStart:
    """Instances held before the first stage, youngest group first (none, unless a job is replanned)."""

    instances: int = 0
    market: Market = "on_demand"
    young: tuple[int, ...] = ()
    """Instances of each group younger than the billing minimum."""
    prepaid_s: tuple[float, ...] = ()
    """Seconds until each of them reaches it."""

    @property
    def prepaid_total_s(self) -> float:
        """Instance-seconds paid and not yet used."""
        return sum(count * left_s for count, left_s in zip(self.young, self.prepaid_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Stages x counts x options; a count is a number of instances on a market, an option a number of GPUs per trial.

    Under `per_instance` billing the fastest option is always best, and the only one. Under `per_function` billing a
    faster option may cost more, and all undominated options are kept.
    """

    terms: StartTerms
    start: HeldAtStart
    markets: tuple[Market, ...]
    """Market of each block of counts."""
    blocks: tuple[slice, ...]
    """The counts of each market; increasing within a block."""
    market: Ints
    """(m,) Index of each count's market."""
    price_usd_per_s: Floats
    """(m,) Price of one instance held; 0 under `per_function` billing."""
    instances: Ints
    """(m,) The counts."""
    duration_s: Floats
    """(stages, m, options) Mean stage time, which the bill counts."""
    late_s: Floats
    """(stages, m, options) Seconds that the deadline must allow beyond the mean; 0 if nothing varies."""
    extra_usd: Floats
    """(stages, m, options) Cost of the trials under `per_function` billing, and the data of replaced instances."""
    gpus: Ints
    """(stages, m, options) GPUs per trial."""
    valid: Bools
    """(stages, m, options) False for padding, which repeats a valid option."""
    young_cohorts: int
    """Most groups of instances that can be younger than the billing minimum at a SYNC."""
    bounds: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Bounds by the solver that hold for any limits: users move a deadline along one table."""

    @property
    def num_stages(self) -> int:
        """Stages of the job."""
        return int(self.duration_s.shape[0])

    def plan(self, path: Sequence[tuple[int, int]]) -> Plan:
        """Return the plan with choice (index of the count, option) in each stage."""
        return Plan(
            stages=tuple(
                StagePlan(
                    instances=int(self.instances[at]),
                    gpus_per_trial=int(self.gpus[stage, at, option]),
                    market=self.markets[self.market[at]],
                )
                for stage, (at, option) in enumerate(path)
            )
        )


Moments = Callable[[Market, Ints, Ints], tuple[Floats, Floats]]
"""Mean and late seconds of stages, each (stages, counts, gangs), for a market, gangs, and slots (counts, gangs)."""


def _mean_moments(stages: Sequence[Stage], profile: Profile, offer: Offer) -> Moments:
    """Return the moments where nothing varies: waves of equally long trials."""

    def moments(market: Market, gangs: Ints, slots: Ints) -> tuple[Floats, Floats]:
        per_trial_s = mean_runs_s(stages, profile, offer, market, gangs)
        trials = np.array([stage.trials for stage in stages])
        with np.errstate(divide="ignore"):
            duration_s = np.ceil(trials[:, None, None] / slots) * per_trial_s[:, None, :]
        return duration_s, np.zeros_like(duration_s)

    return moments


def mean_runs_s(stages: Sequence[Stage], profile: Profile, offer: Offer, market: Market, gangs: Ints) -> Floats:
    """(stages, gangs) Mean seconds of one trial."""
    if market == "on_demand":
        iterations = np.array([[stage.work] for stage in stages])
        iteration_s = np.array([profile.iteration_s(gpus) for gpus in gangs.tolist()])
        startup_s = np.array([profile.startup_s(gpus) for gpus in gangs.tolist()])
        return np.asarray(startup_s + iterations * iteration_s)
    return np.array([[run_s(stage, int(gpus), profile, offer, market) for gpus in gangs] for stage in stages])


def build_table(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    held: Sequence[Cohort] = (),
    moments: Moments | None = None,
    terms: StartTerms | None = None,
    only: tuple[Market, ...] | None = None,
) -> StageTable:
    """Build the table of a job (or of the rest of one that holds instances) on an offer.

    Instance counts beyond which no stage gets faster are left out. Suppose that no instance can live shorter than the
    billing minimum. Then a plan's cost between two counts at which some stage gets faster is linear in the counts, and
    growing and shrinking are its only constraints. So one of the two ends (or the count held) is a cheapest plan, and
    only those counts are kept. If holding is free, the largest count is as good as any. The markets are `only` those
    (instances held are on one of them), or all of the offer.

    Raises InputError if no GPUs per trial fit the offer, or the profile does not cover the smallest that do.
    """
    gangs = np.array(gangs_of(profile, offer, constraints))
    all_markets: tuple[Market, ...] = ("on_demand",) if offer.spot is None else ("on_demand", "spot")
    markets = only or all_markets
    begin = _start(held, offer, markets[0])
    edges: set[int] | None = None
    if moments is not None:  # the fewest instances that run a stage in one wave, two, and so on
        needed = {-(-stage.trials // waves) for stage in stages for waves in range(1, _EDGES + 1)}
        edges = {least_instances(trials, offer.slots, gpus) for trials in needed for gpus in gangs.tolist()}
    job = (stages, profile, offer, gangs, begin, moments or _mean_moments(stages, profile, offer), edges)
    parts = [_block(market, *job) for market in markets]
    counts, duration_s, late_s, extra_usd, gpus, valid = zip(*parts, strict=True)
    ends = np.cumsum([0] + [len(part) for part in counts]).tolist()
    market_of = np.repeat(np.arange(len(markets)), [len(part) for part in counts])
    prices_usd_per_s = Rates.of(offer).prices_usd_per_s
    joined_s = _joined(duration_s)
    return StageTable(
        terms=terms or mean_terms(offer),
        start=begin,
        markets=markets,
        blocks=tuple(slice(first, last) for first, last in itertools.pairwise(ends)),
        market=market_of,
        price_usd_per_s=np.array([prices_usd_per_s[market] for market in markets])[market_of],
        instances=np.concatenate(counts),
        duration_s=joined_s,
        late_s=_joined(late_s),
        extra_usd=_joined(extra_usd),
        gpus=_joined(gpus),
        valid=_joined(valid, fill=False),
        young_cohorts=_young_cohorts(joined_s.min(axis=(1, 2)), offer) + len(begin.young),
    )


def _block(
    market: Market,
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    gangs: Ints,
    begin: HeldAtStart,
    moments: Moments,
    edges: set[int] | None,
) -> tuple[Ints, Floats, Floats, Floats, Ints, Bools]:
    """Return a market's part of the table: instances, duration_s, late_s, extra_usd, gpus and valid."""
    trials = np.array([stage.trials for stage in stages])
    at_once = max(least_instances(int(trials.max()), offer.slots, gpus) for gpus in gangs.tolist())
    counts = np.arange(1, min(at_once, offer.max_instances) + 1)
    slots = _slots(counts, gangs, offer.slots)
    counts, slots = counts[slots[:, 0] > 0], slots[slots[:, 0] > 0]
    duration_s, late_s = moments(market, gangs, slots)
    deadline_s = duration_s + late_s
    trials_usd = np.zeros_like(deadline_s)
    if offer.billing == "per_instance":
        choice = np.argmin(deadline_s, axis=2, keepdims=True)
        keep = np.ones(choice.shape, dtype=bool)
        faster = _faster(_chosen(deadline_s, choice))
    else:
        per_trial_s = mean_runs_s(stages, profile, offer, market, gangs)
        per_trial_usd = offer.market_price_usd_per_s(market) / offer.slots * gangs * per_trial_s
        trials_usd += (trials[:, None] * per_trial_usd)[:, None, :]
        choice, keep = _undominated(deadline_s, trials_usd)
        faster = _faster(deadline_s)
    young = _young_cohorts(duration_s.min(axis=(1, 2)), offer) + len(begin.young)
    kept = _considered(faster, young, offer, counts, begin, edges)
    choice, keep = choice[:, kept], keep[:, kept]
    duration_s, extra_usd = _chosen(duration_s[:, kept], choice), _chosen(trials_usd[:, kept], choice)
    return counts[kept], duration_s, _chosen(late_s[:, kept], choice), extra_usd, gangs[choice], keep


def _chosen(values: Floats, choice: Ints) -> Floats:
    """(stages, m, options) Pick the chosen gangs from values (stages, m, gangs)."""
    stages, counts, gangs = values.shape
    if gangs == 1:
        return values
    first = np.arange(0, values.size, gangs).reshape(stages, counts, 1)
    return np.asarray(values.ravel()[first + choice])


def _joined(parts: Sequence[npt.NDArray[Any]], fill: bool = True) -> npt.NDArray[Any]:
    """Join the parts side by side; missing options repeat the part's first one, or are False without `fill`."""
    if len(parts) == 1:
        return parts[0]
    width, padded = max(part.shape[2] for part in parts), []
    for part in parts:
        missing = np.repeat(part[:, :, :1], width - part.shape[2], axis=2)
        padded.append(np.concatenate([part, missing if fill else np.zeros_like(missing)], axis=2))
    return np.concatenate(padded, axis=1)


def _start(held: Sequence[Cohort], offer: Offer, market: Market) -> HeldAtStart:
    groups = sorted((cohort for cohort in held if cohort.instances), key=lambda cohort: cohort.held_s)
    if not groups:
        return HeldAtStart(market=market)
    minimum_s = Rates.of(offer).minimum_s
    young = [group for group in groups if group.held_s < minimum_s]
    return HeldAtStart(
        instances=sum(group.instances for group in groups),
        market=groups[0].market,
        young=tuple(group.instances for group in young),
        prepaid_s=tuple(minimum_s - group.held_s for group in young),
    )


_ALL_COUNTS = 64
_EDGES = 4
_STEP = 1.04
"""Factor between two counts beyond `_ALL_COUNTS`, where times vary."""


def distinct(values: Floats) -> Floats:
    """Return the values in order, each once; np.unique imports masked arrays for it, a tenth of a start."""
    ordered = np.sort(values)
    return np.concatenate([ordered[:1], ordered[1:][ordered[1:] != ordered[:-1]]])


def _considered(
    faster: Bools, young_cohorts: int, offer: Offer, counts: Ints, begin: HeldAtStart, edges: set[int] | None
) -> Ints:
    """Return indices of the counts worth considering, for the reasons that `build_table` gives.

    Where times vary, no count is quite like its neighbours. As many as the search can handle are kept, and those
    (`edges`) at which a stage needs one wave less.
    """
    fastest = int(np.flatnonzero(faster)[-1])
    kept = counts == begin.instances
    if holding_is_free(offer):
        kept[fastest] = True
        return np.flatnonzero(kept)
    if edges is not None and fastest >= _ALL_COUNTS:
        few = np.geomspace(1.0, counts[fastest], round(math.log(counts[fastest]) / math.log(_STEP)))
        near = edges | set(np.round(few).astype(int).tolist())
        return np.flatnonzero(kept | [int(count) in near for count in counts] & (np.arange(len(counts)) <= fastest))
    if young_cohorts or edges is not None:
        return np.arange(fastest + 1)
    return np.flatnonzero(kept | faster)


def holding_is_free(offer: Offer) -> bool:
    """Return whether only the trials cost money, neither holding nor starting an instance."""
    return offer.billing == "per_function" and offer.once_usd_per_instance == 0.0


def mean_terms(offer: Offer) -> StartTerms:
    """Return the terms of an offer if nothing varies."""
    rates = Rates.of(offer)
    return StartTerms(
        minimum_s=rates.minimum_s,
        data_usd=rates.once_usd,
        head_usd_per_s=rates.head_usd_per_s,
        provision_s=offer.provision_delay_s,
        init_s=offer.init_delay_s,
    )


def gangs_of(profile: Profile, offer: Offer, constraints: PlanningConstraints) -> list[int]:
    """Return the GPUs per trial worth considering: beyond the largest measured count a trial is wider, but no faster.

    Raises InputError if there is none.
    """
    least, most = constraints.min_gpus_per_trial, constraints.max_gpus_per_trial
    sizes = constraints.gang_sizes(offer.slots)
    if not sizes:
        raise InputError(
            f"no number of GPUs from gpus_per_trial.min {least} to max {most} packs onto instances of {offer.gpus}; "
            f"beyond {offer.gpus} it must be a multiple of it: raise gpus_per_trial.max to "
            f"{-(-least // offer.gpus) * offer.gpus}"
        )
    room = offer.slots * offer.max_instances
    fitting = [gpus for gpus in sizes if gpus <= room]
    if not fitting:
        raise InputError(
            f"a trial of {sizes[0]} GPUs does not fit on max_instances={offer.max_instances} of {offer.gpus} GPUs; "
            f"raise max_instances to {sizes[0] // offer.gpus}, or lower gpus_per_trial.min"
        )
    enough = next((gpus for gpus in fitting if gpus >= profile.largest_gpus), fitting[-1])
    return [gpus for gpus in fitting if gpus <= enough]


def _slots(counts: Ints, gangs: Ints, gpus_per_instance: int) -> Ints:
    """(counts, gangs) Trials that run at once; `offer.slots` for arrays."""
    per_instance = gpus_per_instance // gangs
    per_trial = np.maximum(1, gangs // gpus_per_instance)
    result: Ints = np.where(gangs <= gpus_per_instance, counts[:, None] * per_instance, counts[:, None] // per_trial)
    return result


def _faster(duration_s: Floats) -> Bools:
    """(m,) Return whether some stage and option is faster than with the next smaller instance count."""
    steps = np.logical_or.reduce(duration_s[:, 1:] < duration_s[:, :-1], axis=(0, 2))
    return np.concatenate([np.ones(1, dtype=np.bool_), steps])


def _undominated(duration_s: Floats, function_usd: Floats) -> tuple[Ints, Bools]:
    """Return the options that no faster one undercuts, first, and which of those returned are not padding."""
    order = np.lexsort((function_usd, duration_s), axis=2)
    sorted_s = np.take_along_axis(duration_s, order, axis=2)
    sorted_usd = np.take_along_axis(function_usd, order, axis=2)
    cheapest = np.minimum.accumulate(sorted_usd, axis=2)
    keep = np.isfinite(sorted_s)
    keep[:, :, 1:] &= sorted_usd[:, :, 1:] < cheapest[:, :, :-1]
    width = int(keep.sum(axis=2).max())
    front = np.argsort(~keep, axis=2, kind="stable")[:, :, :width]
    kept = np.take_along_axis(keep, front, axis=2)
    choice = np.take_along_axis(order, front, axis=2)
    return np.where(kept, choice, choice[:, :, :1]), kept


def _young_cohorts(shortest_s: Floats, offer: Offer) -> int:
    """Return the most cohorts younger than the minimum at one SYNC: each has lived INIT and its stages at least."""
    most, known_s, minimum_s = 0, shortest_s.tolist(), Rates.of(offer).minimum_s
    for end in range(len(known_s)):
        young, lived_s = 0, 0.0
        for stage_s in reversed(known_s[: end + 1]):
            lived_s += stage_s
            if offer.init_delay_s + lived_s >= minimum_s:
                break
            young += 1
        most = max(most, young)
    return most
