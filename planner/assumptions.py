"""What an estimate rests on, by its effect: the same plan predicted again with each input changed. No searching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from rubberband.planner.brackets import JobPlan, Lane
from rubberband.planner.estimate import Estimate
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.model import mean_cost_of
from rubberband.planner.policies import box_of
from rubberband.planner.sampling import Draws, varies
from rubberband.planner.table import Floats
from rubberband.units import format_duration, format_usd
from rubberband.values.chance import Spread
from rubberband.values.offer import DATA_LINE, HEAD_LINE, RENT_LINES, BillLine, Offer, SideCost
from rubberband.values.plan import Stage
from rubberband.values.profile import Profile

Basis = Literal["measured", "given", "live", "default", "interpolated", "extrapolated"]
"""Where a value comes from: a profile file, the experiment file, the cloud as it was asked, what rubberband takes where
nothing is said, or a profile's other GPU counts."""
Name = Literal[
    "time per iteration",
    "start-up of a trial",
    "provisioning of an instance",
    "initialising of an instance",
    "price of an instance",
    "price of a spot instance",
    "spot interruptions",
    "head node",
    "data",
    "noise of trials",
    "speed between measured GPU counts",
    "speed beyond measured GPU counts",
    "speed beyond measured batches",
    "noise scale of the gradients",
]
MORE = 1.1
"""Most inputs are raised by 10 %."""
_NOISE_WORDS = {
    "trial_cv": "trials differ by",
    "iteration_cv": "iterations vary by",
    "startup_cv": "start-ups vary by",
    "mean_cv": "their mean is unsure by",
}
_UNTOLD_CV = 0.1
"""The noise that is tried where the profile tells of none."""
_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One input, and what becomes of the estimate's plan if it is otherwise."""

    name: Name
    value: str
    """As it was reckoned with, for people."""
    basis: Basis
    change: str
    """What is tried, for people."""
    effect_usd: float
    """By how much the (mean) cost changes, the plan being kept."""
    effect_s: float
    """By how much the (mean) JCT changes."""
    p_kept: float
    """Probability that the plan then keeps deadline and budget; 1.0 or 0.0 where nothing varies."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a plan is predicted from."""

    profile: Profile
    offer: Offer


@dataclass(frozen=True, slots=True)
class _Outcome:
    jct_s: float
    cost_usd: float
    p_kept: float


@dataclass(frozen=True, slots=True)
class _Change:
    name: Name
    value: str
    change: str
    terms: _Terms
    basis: Basis | None = None
    """None: as the caller knows it."""


def assumptions(estimate: Estimate, bases: Mapping[Name, Basis]) -> tuple[Assumption, ...]:
    """The inputs of an estimate, those that matter most for the cost first; empty without a plan.

    `bases` tells where inputs come from; what it does not name is "given". The effects are those of the estimate's
    plan as it is: planned again, the harm may be less. Where times vary, they are differences of means over the same
    random numbers.
    """
    job = estimate.job
    if job is None:
        return ()
    now = _Terms(estimate.profile, estimate.offer)
    base, found = _outcome(estimate, job, now), list[Assumption]()
    for changed in _changes(job, now):
        after = _outcome(estimate, job, changed.terms)
        found.append(
            Assumption(
                name=changed.name,
                value=changed.value,
                basis=changed.basis or bases.get(changed.name, "given"),
                change=changed.change,
                effect_usd=_rounded(after.cost_usd - base.cost_usd),
                effect_s=_rounded(after.jct_s - base.jct_s),
                p_kept=after.p_kept,
            )
        )
    return tuple(sorted(found, key=lambda one: (-abs(one.effect_usd), -abs(one.effect_s))))


def _rounded(difference: float) -> float:
    """Without what only the rounding of floats left."""
    return 0.0 if abs(difference) < 1e-9 else difference


def _changes(job: JobPlan, now: _Terms) -> Iterator[_Change]:
    yield from _speeds(job, now)
    yield from _batches(job, now)
    yield from _delays(now)
    yield from _prices(now)
    yield _noise(now)


def _speeds(job: JobPlan, now: _Terms) -> Iterator[_Change]:
    profile = now.profile
    used = sorted({choice.gpus_per_trial for choice in job.plan.stages})
    table = {gpus: MORE * time_s for gpus, time_s in profile.seconds_per_iteration.items()}
    shown = ", ".join(f"{format_duration(profile.iteration_s(gpus))} on {gpus}" for gpus in used[:3])
    value = f"{shown}{', …' if len(used) > 3 else ''} GPU{'' if used == [1] else 's'}"
    yield _Change("time per iteration", value, "+10 %", _with_profile(now, seconds_per_iteration=table))
    between = [g for g in used if g not in profile.seconds_per_iteration and g < profile.largest_gpus]
    beyond = [g for g in used if g > profile.largest_gpus]
    if between:
        yield _slower("speed between measured GPU counts", "interpolated", between, _measured(profile), now)
    if beyond:
        yield _slower("speed beyond measured GPU counts", "extrapolated", beyond, _measured(profile), now)


def _batches(job: JobPlan, now: _Terms) -> Iterator[_Change]:
    """What there is besides where trials adapt their batch."""
    model = now.profile.goodput
    if model is None:
        return
    from rubberband.planner.goodput.planning import at_noise_scale, extrapolated

    used = sorted({choice.gpus_per_trial for choice in job.plan.stages})
    if unseen := extrapolated(model, now.offer.gpus, used):
        yield _slower("speed beyond measured batches", "extrapolated", unseen, "by the model", now)
    slower = at_noise_scale(now.profile, now.offer.gpus, model.noise_scale / 2.0)
    value = f"{model.noise_scale:,.0f} samples"
    yield _Change("noise scale of the gradients", value, "half of it", _Terms(slower, now.offer))


def _slower(name: Name, basis: Basis, counts: list[int], whence: str, now: _Terms) -> _Change:
    """Slower with exactly these GPU counts."""
    profile = now.profile
    table = {**profile.seconds_per_iteration, **{gpus: MORE * profile.iteration_s(gpus) for gpus in counts}}
    value = f"{', '.join(map(str, counts))} GPU{'s' * (counts != [1])} per trial, {whence}"
    return _Change(name, value, "10 % slower", _with_profile(now, seconds_per_iteration=table), basis)


def _measured(profile: Profile) -> str:
    counts = sorted(profile.seconds_per_iteration)
    return "measured are " + (f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]} alone")


def _delays(now: _Terms) -> Iterator[_Change]:
    profile, offer = now.profile, now.offer
    startup_s, change = _longer(profile.trial_startup_s, 1.0)
    yield _Change(
        "start-up of a trial",
        format_duration(profile.trial_startup_s),
        change,
        _with_profile(now, trial_startup_s=startup_s),
    )
    delays: tuple[tuple[Name, str, float, Spread], ...] = (
        ("provisioning of an instance", "provision_delay_s", offer.provision_delay_s, offer.provision_spread),
        ("initialising of an instance", "init_delay_s", offer.init_delay_s, offer.init_spread),
    )
    for name, field, delay_s, spread in delays:
        longer_s, change = _longer(delay_s, 10.0)
        value = f"{format_duration(delay_s)}{_varying(delay_s, spread)}"
        yield _Change(name, value, change, _with_offer(now, **{field: longer_s}))


def _varying(delay_s: float, spread: Spread) -> str:
    """What a delay varies by."""
    if spread.certain or delay_s == 0.0:
        return ""
    if not spread.samples:
        return f", varying by {_percent(spread.cv)}"
    least_s, most_s = (format_duration(delay_s * factor) for factor in (min(spread.samples), max(spread.samples)))
    return f", from {least_s} to {most_s} in {len(spread.samples)} samples"


def _longer(delay_s: float, from_nothing_s: float) -> tuple[float, str]:
    """10 % more; of nothing that is nothing, so there some seconds are tried."""
    if delay_s > 0.0:
        return MORE * delay_s, "+10 %"
    return from_nothing_s, f"{format_duration(from_nothing_s)} instead"


def _prices(now: _Terms) -> Iterator[_Change]:
    offer = now.offer
    price = offer.price_usd_per_hour
    if price > 0.0:
        yield _Change(
            "price of an instance",
            f"{format_usd(price)}/h on demand",
            "+10 %",
            _with_offer(now, price_usd_per_hour=MORE * price),
        )
    if offer.spot is not None:
        spot = offer.spot
        dearer = replace(spot, price_usd_per_hour=MORE * spot.price_usd_per_hour)
        yield _Change(
            "price of a spot instance",
            f"{format_usd(spot.price_usd_per_hour)}/h",
            "+10 %",
            _with_offer(now, spot=dearer),
        )
        often = replace(spot, interruptions_per_hour=2.0 * spot.interruptions_per_hour)
        rate = f"{spot.interruptions_per_hour:g} per instance-hour"
        yield _Change("spot interruptions", rate, "twice as often", _with_offer(now, spot=often))
    head = offer.head_price_usd_per_hour
    if head > 0.0:
        yield _Change(
            "head node", f"{format_usd(head)}/h", "+10 %", _with_offer(now, head_price_usd_per_hour=MORE * head)
        )
    data = offer.data_usd_per_instance
    if data > 0.0:
        value = f"{format_usd(data)} per instance started"
        yield _Change("data", value, "+10 %", _with_offer(now, data_usd_per_instance=MORE * data))


def _noise(now: _Terms) -> _Change:
    profile = now.profile
    if profile.varies:
        told_cvs = {name: cv for name in _NOISE_WORDS if (cv := getattr(profile, name)) > 0.0}
        more = {name: MORE * cv for name, cv in told_cvs.items()}
        value = ", ".join(f"{_NOISE_WORDS[name]} {_percent(cv)}" for name, cv in told_cvs.items())
        return _Change("noise of trials", value, "+10 %", _with_profile(now, **more))
    told = f"{_NOISE_WORDS['trial_cv']} {_percent(_UNTOLD_CV)} instead"
    return _Change("noise of trials", "none", told, _with_profile(now, trial_cv=_UNTOLD_CV))


def _percent(cv: float) -> str:
    return f"{100.0 * cv:.2g} %" if cv < 1.0 else f"{100.0 * cv:.0f} %"


def _with_profile(now: _Terms, **changes: object) -> _Terms:
    return _Terms(replace(now.profile, **changes), now.offer)  # type: ignore[arg-type]


def _with_offer(now: _Terms, **changes: object) -> _Terms:
    return _Terms(now.profile, replace(now.offer, **changes))  # type: ignore[arg-type]


def _outcome(estimate: Estimate, job: JobPlan, terms: _Terms) -> _Outcome:
    """The whole job on other terms."""
    alone = len(job.lanes) == 1
    offer = terms.offer if alone else replace(terms.offer, head_price_usd_per_hour=0.0)
    outcome = _sampled if varies(terms.profile, offer) else _certain
    parts = [outcome(lane, _Terms(terms.profile, offer), estimate.seed) for lane in job.lanes]
    jct_s = np.max([part_s for part_s, _ in parts], axis=0)
    shared_usd = 0.0 if alone else terms.offer.head_cost_usd(1.0) * jct_s
    cost_usd = np.sum([part_usd for _, part_usd in parts], axis=0) + shared_usd
    limits = box_of(estimate.constraints)
    in_time, in_budget = jct_s <= limits.time_s + TIME_TOLERANCE_S, cost_usd <= limits.cost_usd + COST_TOLERANCE_USD
    return _Outcome(float(jct_s.mean()), float(cost_usd.mean()), float((in_time & in_budget).mean()))


def predicted_usd(estimate: Estimate, offer: Offer) -> float:
    """The (mean) cost of an estimate's plan on another offer; over the same random numbers, where times vary."""
    assert estimate.job is not None, "the caller has a plan"
    return _outcome(estimate, estimate.job, _Terms(estimate.profile, offer)).cost_usd


def _certain(lane: Lane, terms: _Terms, seed: int) -> tuple[Floats, Floats]:
    jct_s, cost_usd = mean_cost_of(lane.stages, terms.profile, terms.offer)(lane.planned.plan)
    return np.array([jct_s]), np.array([cost_usd])


def _sampled(lane: Lane, terms: _Terms, seed: int) -> tuple[Floats, Floats]:
    draws = _draws(tuple(lane.stages), terms.profile, terms.offer, seed + lane.brackets[0])
    samples = draws.evaluate(lane.planned.plan, min(_CHUNKS, draws.most_chunks))
    return samples.jct_s, samples.cost_usd


@lru_cache(maxsize=2)
def _draws(stages: tuple[Stage, ...], profile: Profile, offer: Offer, seed: int) -> Draws:
    """The random numbers of a job are the same whatever its limits; those of the latest jobs are kept."""
    return Draws(stages, profile, offer, seed=seed)


# The lines of an estimate's bill: what the plan costs by what it is for. They add up to its (mean) cost.


_LEAST_USD = 1e-9


def bill_lines(estimate: Estimate) -> tuple[BillLine, ...]:
    """The lines of the plan's bill, those of nothing left out; empty without a plan.

    A bill is linear in its prices: one dollar more an hour tells the hours of instances, one more an instance how many
    are started.
    """
    job, offer = estimate.job, estimate.offer
    if job is None:
        return ()
    lines: list[BillLine] = []
    if offer.side_costs or offer.data_usd_per_instance:
        now_usd = predicted_usd(estimate, offer)
        hours = predicted_usd(estimate, _dearer(offer, SideCost(line="", usd_per_hour=1.0))) - now_usd
        started = predicted_usd(estimate, _dearer(offer, SideCost(line="", usd_once=1.0))) - now_usd
        lines += [
            BillLine(line=cost.line, usd=cost.usd_per_hour * hours + cost.usd_once * started)
            for cost in offer.side_costs
        ]
        lines.append(BillLine(line=DATA_LINE, usd=offer.data_usd_per_instance * started))
    lines.append(BillLine(line=HEAD_LINE, usd=offer.head_cost_usd(job.prediction.jct_s)))
    rest_usd = job.prediction.cost_usd - sum(line.usd for line in lines)
    found = [BillLine(line=RENT_LINES[offer.billing], usd=rest_usd), *lines]
    return tuple(line for line in found if abs(line.usd) > _LEAST_USD)


def _dearer(offer: Offer, cost: SideCost) -> Offer:
    return replace(offer, side_costs=(*offer.side_costs, cost))
