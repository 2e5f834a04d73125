"""From an experiment to what it can be planned on: every instance type with its profile and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rubberband.cloud.catalogue import Table, offers
from rubberband.errors import InputError
from rubberband.planner.estimate import Case
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import LognormalDelay, delay_of
from rubberband.values.adaptive import GoodputProfile
from rubberband.values.offer import Offer, gang_sizes
from rubberband.values.plan import Market
from rubberband.values.profile import Profile
from rubberband.values.start_times import StartTimes, remark

_ABOUT, _ABOUT_S = 0.2, 1.0
"""A delay in the file that is off by no more than this share, or by no more seconds, is not remarked upon."""
MARKETS: tuple[Market, Market] = ("on_demand", "spot")
POOR_FIT = 0.1
"""A model that is off by more over its own points is worth a remark."""


Room = Mapping[str, Mapping[Market, int]]
"""Instance type -> market -> how many instances the provider lets one hold; what is not named is not known."""


def with_start_times(
    experiment: Experiment, times: StartTimes | None
) -> tuple[Experiment, tuple[str, ...], frozenset[str]]:
    """The experiment with the delays that were seen on this machine, remarks, and the words that were replaced.

    What the file says stays where it is about what was seen; where it is not, a remark says so.
    """
    if times is None or not experiment.resources.kind.is_this_machine:
        return experiment, (), frozenset()
    seen = {
        "provision_delay": LognormalDelay.model_construct(mean_s=times.provision_s, cv=times.provision_spread.cv),
        "init_delay": LognormalDelay.model_construct(mean_s=times.init_s, cv=0.0),
    }
    remarks = []
    for word, delay in list(seen.items()):
        place, written_s = _written_delay(experiment, word)
        if written_s is None:
            continue
        if abs(written_s - delay.mean_s) <= max(_ABOUT_S, _ABOUT * delay.mean_s):
            del seen[word]
        else:
            remarks.append(remark(f"{place}.{word}", written_s, delay.mean_s, times))
    changed = experiment.resources.model_copy(update=seen)
    return experiment.model_copy(update={"resources": changed}), tuple(remarks), frozenset(seen)


def _written_delay(experiment: Experiment, word: str) -> tuple[str, float | None]:
    """In which part of the file a delay is written, and its mean in seconds; None if it is not."""
    for place, part in (("resources", experiment.resources), ("profile", experiment.profile)):
        written = getattr(part, word, None)
        if written is not None:
            return place, delay_of(written)[0]
    return "resources", None


def cases(
    experiment: Experiment,
    profiles: Profile | Mapping[str, Profile],
    now: float,
    *,
    table: Table | None = None,
    room: Room | None = None,
) -> tuple[Case, ...]:
    """A case for each instance type of the experiment, in its order, if it starts at `now` (Unix time).

    `profiles` is one for all types, or type -> profile. Where trials adapt their batch and the profile has a model of
    that, the case's profile has the times of adapting trials; only then does it keep the model. `table` is that with
    live prices, where there is one. With `room`, types of which none may be held are left out (unless that is all),
    and so is a spot market on which none may be.

    Raises InputError for what no plan can be made on.
    """
    resources = experiment.resources
    limited = [_within(offer, room or {}) for offer in offers(resources, profiles, table=table)]
    return tuple(
        _case(experiment, offer, profiles if isinstance(profiles, Profile) else profiles[offer.instance_type], now)
        for offer in [found for found in limited if found.max_instances] or limited
    )


def _within(offer: Offer, room: Room) -> Offer:
    """An offer of no more instances than may be held, on the markets on which any may be."""
    markets = room.get(offer.instance_type, {})
    on_demand, spot = (min(offer.max_instances, markets.get(m, offer.max_instances)) for m in MARKETS)
    if offer.spot is None or not spot:
        return replace(offer, max_instances=on_demand, spot=None)
    return replace(offer, max_instances=min(on_demand, spot) or spot)


def _with_instances(experiment: Experiment, max_instances: int) -> Experiment:
    resources = experiment.resources
    if resources.max_instances == max_instances:
        return experiment
    fewer = resources.model_copy(update={"max_instances": max_instances})
    return experiment.model_copy(update={"resources": fewer})


def known_gpus(experiment: Experiment, offer: Offer, profile: Profile) -> int:
    """The largest number of GPUs that a profile knows: what was measured, or what a model says of one instance."""
    adapts = experiment.batch.policy != "fixed" and profile.goodput is not None
    return max(profile.largest_gpus, offer.gpus) if adapts else profile.largest_gpus


def _case(experiment: Experiment, offer: Offer, profile: Profile, now: float) -> Case:
    batch, largest = experiment.batch.to_plain(), known_gpus(experiment, offer, profile)
    constraints = _with_instances(experiment, offer.max_instances).planning_constraints(now, offer.gpus, largest)
    fixed = replace(profile, goodput=None)
    if batch is None or profile.goodput is None:
        return Case(offer=offer, profile=fixed, constraints=constraints)
    from rubberband.planner.goodput.planning import adapted, limits_within

    model = replace(profile.goodput, limits=limits_within(profile.goodput, batch))
    least, most = constraints.min_gpus_per_trial, min(constraints.max_gpus_per_trial, model.limits.max)
    if least > most:
        raise InputError(
            f"resources.gpus_per_trial.min: {least} GPUs are more than the {most} samples of the profile's largest "
            f"batch; lower it to {most}, or raise batch.max and profile again"
        )
    sizes = [gpus for gpus in gang_sizes(offer.gpus, least, most) if gpus >= profile.smallest_gpus]
    if not sizes:
        return Case(offer=offer, profile=fixed, constraints=constraints)
    return Case(
        offer=offer,
        profile=adapted(replace(profile, goodput=model), offer.gpus, sizes),
        constraints=replace(constraints, max_gpus_per_trial=sizes[-1]),
        fixed=fixed,
    )


def batch_notes(experiment: Experiment, model: GoodputProfile | None) -> list[str]:
    """What is worth knowing of how adaptive batches are planned, a line each; nothing where batches are fixed.

    `model` is that of a case's profile.
    """
    batch = experiment.batch
    if batch.policy == "fixed":
        return []
    if model is None:
        return [
            "batch: the profile has no model of goodput, so that trials are planned as if their batch were fixed "
            "(adapting it is never slower); measure one with `rubberband profile`."
        ]
    notes = []
    if batch.max is not None and batch.max > model.limits.max:
        notes.append(
            f"batch: max={batch.max} is more than the {model.limits.max} samples of the largest batch when it was "
            "profiled, and planned as those; profile again if more are possible now."
        )
    if model.fit_error > POOR_FIT:
        notes.append(f"batch: the model misses its own points by {model.fit_error:.0%} on average; profile again.")
    return notes
