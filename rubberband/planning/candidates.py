"""The candidates of an experiment: what is to be planned on each of its instance types, with its profile and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rubberband.cloud.catalogue import Table, similar_types, table_of
from rubberband.cloud.offers import offers
from rubberband.features import made_by, part
from rubberband.planner import Problem, Reserve
from rubberband.planning.least_gang import GangTooLargeError, least_gang, with_least_gang
from rubberband.planning.startup_history import StartTimes, remark
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import LognormalDelay, delay_of, dotted
from rubberband.spec.samplers import num_configurations
from rubberband.spec.space import canonical
from rubberband.units import counted, format_duration
from rubberband.values.adaptive import GoodputProfile
from rubberband.values.offer import Offer
from rubberband.values.plan import MARKETS, Market, Policy, Spent
from rubberband.values.profile import Profile, adding_up_words, mixed_factor, relative_speed, until_end

_ABOUT, _ABOUT_S = 0.2, 1.0
"""A delay in the file gets no remark if it is off by at most this share, or by at most these seconds."""
POOR_FIT = 0.1
"""Mean relative error over its own points above which a model gets a remark."""


Room = Mapping[str, Mapping[Market, int]]
"""Instance type -> market -> instances that the quota allows; unknown where it is missing."""


def with_start_times(
    experiment: Experiment, times: StartTimes | None, profiles: Profile | Mapping[str, Profile] | None = None
) -> tuple[Experiment, tuple[str, ...], frozenset[str]]:
    """Return the experiment with the start times of this machine, remarks, and the words that were replaced.

    The first start of a trial on a fresh worker, as `profiles` have it, belongs to the start of an instance. A delay in
    the file stays if it is close to the measured one; otherwise it is replaced, with a remark. On a Ray cluster, the
    times are those until further nodes join, and one in the file stays.
    """
    if times is not None and experiment.resources.kind.is_borrowed:
        return _with_join_times(experiment, times)
    if times is None or not experiment.resources.kind.is_this_machine:
        return experiment, (), frozenset()
    extra_s = profiles.cold_start_extra_s if isinstance(profiles, Profile) else 0.0
    seen = {
        "provision_delay": LognormalDelay.model_construct(mean_s=times.provision_s, cv=times.provision_spread.cv),
        "init_delay": LognormalDelay.model_construct(mean_s=times.init_s + extra_s, cv=0.0),
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


def _with_join_times(experiment: Experiment, times: StartTimes) -> tuple[Experiment, tuple[str, ...], frozenset[str]]:
    """Return the experiment whose instances take the time of a node that joins; those on nodes that are there less."""
    if _written_delay(experiment, "provision_delay")[1] is not None:
        return experiment, (), frozenset()
    delay = LognormalDelay.model_construct(mean_s=times.provision_s, cv=times.provision_spread.cv)
    shown = format_duration(times.provision_s)
    source = f"as the last {counted(times.starts, 'node')} did" if times.starts else "which is assumed"
    remark = (
        f"cluster: a node that joins takes {shown}, {source}; all instances are planned so. resources.provision_delay "
        "sets it."
    )
    changed = experiment.resources.model_copy(update={"provision_delay": delay})
    return experiment.model_copy(update={"resources": changed}), (remark,), frozenset({"provision_delay"})


def _written_delay(experiment: Experiment, word: str) -> tuple[str, float | None]:
    """Return the part of the file that has a delay, and its mean in seconds (None if it is not written)."""
    for place, words in (("resources", experiment.resources), ("profile", experiment.profile)):
        written = getattr(words, word, None)
        if written is not None:
            return place, delay_of(written)[0]
    return "resources", None


def candidates(
    experiment: Experiment,
    profiles: Profile | Mapping[str, Profile],
    now: float,
    *,
    policy: Policy = "optimal",
    seed: int = 0,
    table: Table | None = None,
    room: Room | None = None,
    spent: Spent | None = None,
) -> tuple[Problem, ...]:
    """Return the problem of each instance type of the experiment, in its order, for a start at `now` (Unix time).

    Its limits are those of the experiment less what is `spent`, and a plan leaves the money that a run keeps back.

    `profiles` is one for all types, or type -> profile. If trials adapt their batch and the profile has a model of
    that, the problem's profile has the times of adapting trials; only then does it keep the model. `table` has live
    prices, if they were asked for. With `room`, types and spot markets without quota are left out (unless that is all).

    Types on which no gang that is allowed holds a trial are left out. Raises InputError for an experiment that cannot
    be planned.
    """
    resources, used, chosen = experiment.resources, spent or Spent(), _offered(experiment, profiles, table, room)
    found, too_small = list[Problem](), list[GangTooLargeError]()
    for offer in chosen:
        try:
            found.append(_candidate(experiment, offer, _profile_of(profiles, offer), now - used.seconds, table))
        except GangTooLargeError as error:
            too_small.append(error)
    if not found:
        raise too_small[0]
    reserve = Reserve(
        margin_s=resources.kind.release_margin_s, highest_price_usd_per_hour=highest_price(experiment, chosen)
    )
    return tuple(replace(_left(one, used), reserve=reserve, policy=policy, seed=seed) for one in found)


def _offered(
    experiment: Experiment, profiles: Profile | Mapping[str, Profile], table: Table | None, room: Room | None
) -> list[Offer]:
    limited = [_within(offer, room or {}) for offer in offers(experiment.resources, profiles, table=table)]
    return [found for found in limited if found.max_instances] or limited


def _profile_of(profiles: Profile | Mapping[str, Profile], offer: Offer) -> Profile:
    return profiles if isinstance(profiles, Profile) else profiles[offer.instance_type]


def gang_notes(
    experiment: Experiment,
    profiles: Profile | Mapping[str, Profile],
    planned: Offer,
    *,
    table: Table | None = None,
    room: Room | None = None,
) -> list[str]:
    """Return a remark on the least gang of the planned type if it is auto, and on each type without a gang."""
    notes = list[str]()
    for offer in _offered(experiment, profiles, table, room):
        try:
            _, note = least_gang(experiment, offer, _profile_of(profiles, offer), table)
        except GangTooLargeError as error:
            notes.append(f"gang: {offer.instance_type} is left out. {error}.")
        else:
            notes += [note] if note and offer.instance_type == planned.instance_type else []
    return notes


def highest_price(experiment: Experiment, chosen: Sequence[Offer]) -> float | None:
    """Return the price of the most expensive type that may replace a sold-out one; None without fallback."""
    prices = [offer.price_usd_per_hour for offer in chosen]
    return max(prices) if experiment.resources.kind.replaces_types and len(prices) > 1 else None


def _left(problem: Problem, spent: Spent) -> Problem:
    limits = problem.constraints
    return problem.with_limits(
        deadline_s=None if limits.deadline_s is None else max(0.0, limits.deadline_s - spent.seconds),
        max_cost_usd=None if limits.max_cost_usd is None else max(0.0, limits.max_cost_usd - spent.cost_usd),
    )


def _within(offer: Offer, room: Room) -> Offer:
    """Return the offer within the quota, on the markets that have any."""
    markets = room.get(offer.instance_type, {})
    on_demand, spot = (min(offer.max_instances, markets.get(m, offer.max_instances)) for m in MARKETS)
    if offer.spot is None or not spot:
        return replace(offer, max_instances=on_demand, spot=None)
    # A plan may mix both markets, so the smaller quota counts; with none on demand that of spot, and a note says so.
    return replace(offer, max_instances=min(on_demand, spot) or spot)


def known_gpus(experiment: Experiment, offer: Offer, profile: Profile) -> int:
    """Return the largest number of GPUs of a trial that a profile knows: measured, or of one instance by its model."""
    adapts = experiment.batch.policy != "fixed" and profile.goodput is not None
    modelled = adapts or models_workers(experiment, profile)
    return max(profile.largest_gpus, offer.slots) if modelled else profile.largest_gpus


def _with_fetch(experiment: Experiment, offer: Offer, profile: Profile) -> Offer:
    """Return the offer whose instances are ready only once they have fetched models and data.

    A start that a profile measured had the fetch in it.
    """
    fetch_s, beside_s = experiment.fetch_s
    is_measured = profile.init_delay_s is not None and experiment.resources.init_delay is None
    begin_s = 0.0 if is_measured else max(0.0, offer.init_delay_s - beside_s)
    longer_s = max(0.0, begin_s + fetch_s - offer.init_delay_s) if fetch_s else 0.0
    if offer.spot is not None and experiment.resources.spot.restart_s is None:  # on another instance
        offer = replace(offer, spot=replace(offer.spot, restart_s=offer.spot.restart_s + longer_s))
    return replace(offer, init_delay_s=offer.init_delay_s + longer_s)


def _candidate(experiment: Experiment, offer: Offer, profile: Profile, now: float, table: Table | None) -> Problem:
    offer = _with_fetch(experiment, offer, profile)
    experiment, largest = with_least_gang(experiment, offer, profile, table), known_gpus(experiment, offer, profile)
    if profile.checkpoint_load_s:
        profile = replace(profile, gpus_per_machine=offer.slots)
    resources = experiment.resources.model_copy(update={"max_instances": offer.max_instances})
    allowed = experiment.model_copy(update={"resources": resources})
    constraints = allowed.planning_constraints(now, offer.slots, largest)
    plain = Problem(
        brackets=experiment.probed().brackets(),
        profile=replace(profile, goodput=None, asynchronous=None),
        offer=offer,
        constraints=constraints,
        objective=experiment.constraints.objective,
    )
    return made_by("problem", experiment, profile, plain) or plain


def models_workers(experiment: Experiment, profile: Profile) -> bool:
    """Return whether a profile has the model of an experiment's asynchronous workers.

    Workers that share the batch of each update (max_staleness 0) wait for each other, and the model does not hold.
    """
    asked = experiment.training.to_plain()
    return asked is not None and asked.max_staleness != 0 and profile.asynchronous is not None


def stand_in_speeds(experiment: Experiment, chosen: Problem, options: Sequence[Problem]) -> dict[str, float]:
    """Return the types that are used instead of the chosen one where it is sold out: type -> speed of a GPU over its.

    These are the experiment's other types with as many GPUs of as much memory; the speeds follow from their profiles.
    """
    if not experiment.resources.kind.replaces_types:
        return {}
    planned, table = chosen.fixed or chosen.profile, table_of(experiment.resources)
    similar = similar_types(experiment.resources, chosen.offer.instance_type, table)
    return {
        one.offer.instance_type: relative_speed(one.fixed or one.profile, planned)
        for one in options
        if one.offer.instance_type in similar
    }


def mixture_notes(experiment: Experiment, chosen: Problem, options: Sequence[Problem], gpus: int) -> list[str]:
    """Return a remark on each type of another speed that may be used instead, for gangs of `gpus` GPUs."""
    planned = chosen.offer.instance_type
    found, instances = [], max(1, gpus // chosen.offer.slots)
    for name, speed in stand_in_speeds(experiment, chosen, options).items():
        if not experiment.gains_from_mixtures or math.isclose(speed, 1.0, rel_tol=0.01):
            continue
        slow = min(gpus, chosen.offer.slots)
        mixed = _factor(chosen.profile, [1.0] * (gpus - slow) + [speed] * slow)
        gang = "a trial on it" if instances == 1 else f"a gang on {counted(instances, 'instance')}, one of them {name},"
        adds_up = "" if instances == 1 else f"; {adding_up_words(chosen.profile)}"
        found.append(
            f"instances: {name} is used instead of {planned} where that is sold out, and is {speed:.2g}x as fast by "
            f"the profile. An iteration of {gang} takes {mixed:.2f}x as long{adds_up}."
        )
    return found


def _factor(profile: Profile, speeds: Sequence[float]) -> float:
    if profile.asynchronous is None:
        return mixed_factor(speeds, balanced=True)
    return float(part("mixture")(profile.asynchronous, tuple(speeds)))


def network_notes(experiment: Experiment, offer: Offer, gpus: int, table: Table | None) -> list[str]:
    """Return the remark on gangs of `gpus` GPUs that span instances without EFA."""
    if gpus <= offer.slots or experiment.resources.kind.is_this_machine:
        return []
    row = table_of(experiment.resources, table=table).get(offer.instance_type)
    if row is None or row.has_efa is not False:
        return []
    speed = "" if row.network_gbps is None else f" ({row.network_gbps:g} Gbit/s by TCP)"
    return [
        f"gang: trials of {gpus} GPUs span {gpus // offer.slots} instances of {offer.instance_type}, whose network is "
        f"slow: it has no EFA{speed}. Use a type with EFA, or set resources.gpus_per_trial.max to {offer.slots}."
    ]


_MOST_COMPARED = 10_000
"""Trials whose configurations are compared with each other."""


def repeat_notes(experiment: Experiment) -> list[str]:
    """Return a remark on trials that train a configuration of another trial again."""
    search = experiment.search
    trials, size = search.num_configurations, num_configurations(search.space)
    if size < trials:
        again = "it" if size == 1 else "them"
        fewer = "remove values that occur twice" if search.sampler.type == "grid" else "start fewer trials"
        return [
            f"space: it has {size:,.0f} configuration{'s' * (size != 1)}, and {trials} trials train {again} again, "
            f"with other seeds; {fewer}, or widen the space."
        ]
    if search.sampler.learns or trials > _MOST_COMPARED or (math.isinf(size) and not search.points_to_train):
        return []
    different = len({canonical(each) for each in search.configurations()[:: search.repeats]})
    if different == trials:
        return []
    walked = "" if math.isinf(size) else ", or list its values and walk it with sampler: {type: grid}"
    return [
        f"space: {counted(trials, 'trial')} have {counted(different, 'configuration')}, and train "
        f"{trials - different:,} again, with other seeds; widen the space{walked}."
    ]


def stop_notes(experiment: Experiment) -> list[str]:
    """Return remarks on rules that end trials or the search early, of which no plan knows when they act."""
    if not (rules := ", ".join(experiment.search.stop.model_dump(by_alias=True))):
        return []
    idle = [f"search.stop.{dotted(path)}: {reason}." for path, reason in experiment.search.idle_rules()]
    return [f"stop: time and cost are upper bounds; trials or the search may end before by {rules}.", *idle]


def end_notes(experiment: Experiment, profile: Profile) -> list[str]:
    """Return the remark on trials that end by themselves by chance: which part of the iterations is expected.

    A trial has trained w iterations of a stage that begins after a of them in (until_end(a + w) - until_end(a)) on
    average; which trials go on is taken not to depend on that. The limits are kept without any such end.
    """
    if not (chance := profile.end_chance):
        return []
    planned, expected = 0, 0.0
    for stages in experiment.brackets():
        before = 0
        for stage in stages:
            for gain, trials in zip(stage.rungs.gains, stage.rungs.fewest(stage.trials), strict=True):
                planned += trials * gain
                expected += trials * (until_end(before + gain, chance) - until_end(before, chance))
                before += gain
    return [
        f"ends: after each iteration a trial ends by itself with {chance:.2g} (profile.end_chance), so about "
        f"{expected / planned:.0%} of the iterations are expected to be trained. Time and cost are upper bounds."
    ]


def sampler_notes(experiment: Experiment, at_once: int) -> list[str]:
    """Return a remark on a sampler that learns: the trials that it draws, and those before, which are random.

    `at_once` brackets begin at the start.
    """
    search, sizes = experiment.search, [bracket[0].trials for bracket in experiment.search.scheduler.brackets()]
    known, needed, trials = len(search.evaluated_rewards), search.results_needed, sum(sizes)
    if not search.sampler.learns or known >= needed:
        return []
    name, num_brackets = search.sampler.algorithm, len(sizes)
    if not experiment.brackets()[0][0].has_sync:  # a trial is drawn when it starts
        drawn = max(0, trials - (needed - known))
    else:
        drawn = sum(sizes[at] for at in range(at_once, num_brackets) if known + sum(sizes[:at]) >= needed)
    if drawn:
        return [
            f"sampler: {name} draws at most {drawn:,} of the {trials} trials. The others are drawn at random, as it "
            f"learns from {counted(needed, 'result')} on."
        ]
    if num_brackets == 1:
        why, remedy = (
            "all start before the first result",
            "use scheduler: {type: none}, {type: asha} or {type: hyperband}",
        )
    elif at_once >= num_brackets:
        why, remedy = (
            f"all {counted(num_brackets, 'bracket')} start before the first result",
            "lower resources.max_instances",
        )
    else:
        why, remedy = f"it learns from {counted(needed, 'result')} on", "raise max_t"
    return [
        f"sampler: {name} draws none of the {trials} trials, as {why}, and all are drawn at random; {remedy}, or "
        f"give {needed} evaluated_rewards."
    ]


def batch_notes(experiment: Experiment, model: GoodputProfile | None) -> list[str]:
    """Return remarks on planning adaptive batches with the model of a profile; none for fixed batches."""
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
