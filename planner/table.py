"""The choices of every stage as arrays: which instance counts are worth considering, and what each does to a stage.

SYNC makes stages additive (RubberBand §4.2), so this table and the terms of the offer hold all that a search needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rubberband.errors import InputError
from rubberband.offer import Offer, gang_sizes
from rubberband.plan import Constraints, Plan, Stage, StagePlan
from rubberband.planner.model import least_instances, run_s
from rubberband.profile import Profile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holding and starting instances costs and takes, for the searches."""

    price_usd_per_s: float
    """Of one instance held; 0 under `per_function` billing."""
    minimum_s: float
    data_usd: float
    head_usd_per_s: float
    provision_s: float
    init_s: float

    @property
    def growth_s(self) -> float:
        """SCALE + INIT_INSTANCE: what growing inserts before a stage."""
        return self.provision_s + self.init_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Stages x instance counts x options; an option is a number of GPUs per trial.

    Under `per_instance` billing the fastest option is always best and there is one; under `per_function` billing a
    faster one may cost more, and all that are not dominated are kept.
    """

    terms: Terms
    instances: Ints
    """(m,) The instance counts that the search considers, increasing."""
    duration_s: Floats
    """(stages, m, options) Stage time."""
    function_usd: Floats
    """(stages, m, options) What the trials cost under `per_function` billing, else 0."""
    gpus: Ints
    """(stages, m, options) GPUs per trial."""
    valid: Bools
    """(stages, m, options) False for padding, which repeats a valid option."""
    young_cohorts: int
    """Most groups of instances that can be younger than the billing minimum at a SYNC."""

    @property
    def num_stages(self) -> int:
        """Stages of the job."""
        return int(self.duration_s.shape[0])

    def plan(self, path: Sequence[tuple[int, int]]) -> Plan:
        """The plan that takes choice (index of the instance count, option) in each stage."""
        return Plan(
            stages=tuple(
                StagePlan(instances=int(self.instances[at]), gpus_per_trial=int(self.gpus[stage, at, option]))
                for stage, (at, option) in enumerate(path)
            )
        )


def build_table(stages: Sequence[Stage], profile: Profile, offer: Offer, constraints: Constraints) -> Table:
    """The table of a job on an offer.

    Instance counts beyond which no stage gets faster are left out. If no instance can live shorter than the billing
    minimum, a plan's cost between two counts at which some stage gets faster is linear in the counts, with growing
    and shrinking as its only constraints, so that one of its ends is a cheapest plan: only those counts are kept.
    If holding is free, the largest count is as good as any.

    Raises InputError if no GPUs per trial fit the offer, or the profile does not cover the smallest that do.
    """
    gangs = _gangs(profile, offer, constraints)
    per_trial_s = np.array([[run_s(stage, gpus, profile) for gpus in gangs] for stage in stages])
    trials = np.array([stage.trials for stage in stages])
    counts = np.arange(1, _most_instances(int(trials.max()), gangs, offer) + 1)
    slots = _slots(counts, np.array(gangs), offer.gpus)
    counts, slots = counts[slots[:, 0] > 0], slots[slots[:, 0] > 0]
    with np.errstate(divide="ignore"):
        duration_s = np.ceil(trials[:, None, None] / slots) * per_trial_s[:, None, :]
    per_trial_usd = offer.price_usd_per_s / offer.gpus * np.array(gangs) * per_trial_s
    stage_usd = np.broadcast_to((trials[:, None] * per_trial_usd)[:, None, :], duration_s.shape)
    if offer.billing == "per_instance":
        choice = np.argmin(duration_s, axis=2, keepdims=True)
        keep = np.ones(choice.shape, dtype=bool)
        faster = _faster(np.take_along_axis(duration_s, choice, axis=2))
    else:
        choice, keep = _undominated(duration_s, stage_usd)
        faster = _faster(duration_s)
    duration_s = np.take_along_axis(duration_s, choice, axis=2)
    function_usd = np.take_along_axis(stage_usd, choice, axis=2) * (offer.billing == "per_function")
    young = _young_cohorts(duration_s.min(axis=(1, 2)), offer)
    kept = _considered(faster, young, offer)
    return Table(
        terms=_terms(offer),
        instances=counts[kept],
        duration_s=duration_s[:, kept],
        function_usd=function_usd[:, kept],
        gpus=np.array(gangs)[choice[:, kept]],
        valid=keep[:, kept],
        young_cohorts=young,
    )


def _considered(faster: Bools, young_cohorts: int, offer: Offer) -> Ints:
    """Indices of the counts worth considering, for the reasons that `build_table` gives."""
    breakpoints = np.flatnonzero(faster)
    if holding_is_free(offer):
        return breakpoints[-1:]
    return breakpoints if young_cohorts == 0 else np.arange(breakpoints[-1] + 1)


def holding_is_free(offer: Offer) -> bool:
    """Whether neither an instance nor starting it costs anything: only what its trials use does."""
    return offer.billing == "per_function" and offer.data_usd_per_instance == 0.0


def _terms(offer: Offer) -> Terms:
    per_instance = offer.billing == "per_instance"
    return Terms(
        price_usd_per_s=offer.price_usd_per_s if per_instance else 0.0,
        minimum_s=offer.minimum_billed_s if per_instance else 0.0,
        data_usd=offer.data_usd_per_instance,
        head_usd_per_s=offer.head_cost_usd(1.0),
        provision_s=offer.provision_delay_s,
        init_s=offer.init_delay_s,
    )


def _gangs(profile: Profile, offer: Offer, constraints: Constraints) -> list[int]:
    """The GPUs per trial worth considering: beyond the largest measured count a trial is no faster, only wider."""
    least, most = constraints.min_gpus_per_trial, constraints.max_gpus_per_trial
    sizes = gang_sizes(offer.gpus, least, most)
    if not sizes:
        raise InputError(
            f"no number of GPUs from gpus_per_trial.min {least} to max {most} packs onto instances of {offer.gpus}; "
            f"beyond {offer.gpus} it must be a multiple of it: raise gpus_per_trial.max to "
            f"{-(-least // offer.gpus) * offer.gpus}"
        )
    room = offer.gpus * offer.max_instances
    fitting = [gpus for gpus in sizes if gpus <= room]
    if not fitting:
        raise InputError(
            f"a trial of {sizes[0]} GPUs does not fit on max_instances={offer.max_instances} of {offer.gpus} GPUs; "
            f"raise max_instances to {sizes[0] // offer.gpus}, or lower gpus_per_trial.min"
        )
    enough = next((gpus for gpus in fitting if gpus >= profile.largest_gpus), fitting[-1])
    return [gpus for gpus in fitting if gpus <= enough]


def _most_instances(trials: int, gangs: Sequence[int], offer: Offer) -> int:
    """The instance count that runs all `trials` at once for every gang size, or `max_instances`."""
    at_once = max(least_instances(trials, offer.gpus, gpus) for gpus in gangs)
    return min(at_once, offer.max_instances)


def _slots(counts: Ints, gangs: Ints, gpus_per_instance: int) -> Ints:
    """(counts, gangs) Trials that run at once; `offer.slots` for arrays."""
    per_instance = gpus_per_instance // gangs
    per_trial = np.maximum(1, gangs // gpus_per_instance)
    result: Ints = np.where(gangs <= gpus_per_instance, counts[:, None] * per_instance, counts[:, None] // per_trial)
    return result


def _faster(duration_s: Floats) -> Bools:
    """(m,) Whether some stage and option is faster than with the next smaller instance count."""
    steps = np.logical_or.reduce(duration_s[:, 1:] < duration_s[:, :-1], axis=(0, 2))
    return np.concatenate([np.ones(1, dtype=np.bool_), steps])


def _undominated(duration_s: Floats, function_usd: Floats) -> tuple[Ints, Bools]:
    """The options that no faster one undercuts, first, and which of the returned ones are more than padding."""
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
    """How many cohorts can be younger than the minimum at one SYNC: each lived INIT and its stages at least."""
    if offer.billing == "per_function":
        return 0
    most = 0
    for end in range(len(shortest_s)):
        lived_s = offer.init_delay_s + np.cumsum(shortest_s[end::-1])
        most = max(most, int((lived_s < offer.minimum_billed_s).sum()))
    return most
