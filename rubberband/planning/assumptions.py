"""The assumptions of an estimate, by their effect: the same plan predicted again with each input changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from rubberband.features import parts
from rubberband.planner import Box, Draws, Estimate, JobPlan, Lane, Problem, predict, simulated_beside, varies
from rubberband.planner.exact.table import Floats
from rubberband.units import counted, format_duration, format_usd
from rubberband.values.offer import DATA_LINE, HEAD_LINE, RENT_LINES, BillLine, Offer, SideCost
from rubberband.values.plan import Stage
from rubberband.values.profile import Profile, Spread

Basis = Literal["measured", "given", "live", "default", "interpolated", "extrapolated"]
"""Source of a value: a profile file, the experiment file, the cloud's answer, a default of rubberband, or a
profile's other GPU counts."""
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
    "throughput of asynchronous workers",
]
MORE = 1.1
"""Most inputs are raised by 10 %."""
_NOISE_WORDS = {
    "trial_cv": "trials differ by",
    "iteration_cv": "iterations vary by",
    "startup_cv": "start-ups vary by",
    "mean_cv": "their mean is unsure by",
}
_TRIED_CV = 0.1
"""The noise that is tried where the profile has none."""
_CHUNKS, _MANY_TRIALS = 2, 2048
"""Chunks of samples, of which one does for many trials: the more there are, the less their sum varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One input, and its effect on the estimate's plan."""

    name: Name
    value: str
    """The assumed value, for people."""
    basis: Basis
    change: str
    """The change that is tried, for people."""
    effect_usd: float
    """Change of the (mean) cost of the same plan."""
    effect_s: float
    """Change of its (mean) JCT."""
    p_kept: float
    """Probability that the plan keeps deadline and budget after the change; 1.0 or 0.0 where nothing varies."""


class _Outcome(NamedTuple):
    jct_s: float
    cost_usd: float
    p_kept: float


class Change(NamedTuple):
    """An input, and the change of it that is tried."""

    name: Name
    value: str
    change: str
    problem: Problem
    """The inputs after the change."""
    basis: Basis | None = None
    """None: the caller knows."""


def assumptions(estimate: Estimate, bases: Mapping[Name, Basis]) -> tuple[Assumption, ...]:
    """Return the inputs of an estimate, those with most effect on the cost first; empty without a plan.

    `bases` has the sources of inputs; others are "given". The effects are those on the estimate's plan: planning again
    may cost less. Where times vary, they are differences of means over the same random numbers.
    """
    job = estimate.job
    if job is None:
        return ()
    now = estimate.problem
    changes, found = list(_changes(job, now)), list[Assumption]()
    base, *outcomes = _outcomes(estimate, job, [now, *(changed.problem for changed in changes)])
    for changed, after in zip(changes, outcomes, strict=True):
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
    """Drop differences that come from the rounding of floats."""
    return 0.0 if abs(difference) < 1e-9 else difference


def _changes(job: JobPlan, now: Problem) -> Iterator[Change]:
    yield from _speeds(job, now)
    for changes in parts("changes"):
        yield from changes(job, now)
    yield from _delays(now)
    yield from _prices(now)
    yield _noise(now)


def _speeds(job: JobPlan, now: Problem) -> Iterator[Change]:
    profile = now.profile
    used = sorted({choice.gpus_per_trial for choice in job.plan.stages})
    table = {gpus: MORE * time_s for gpus, time_s in profile.seconds_per_iteration.items()}
    shown = ", ".join(f"{format_duration(profile.iteration_s(gpus))} on {gpus}" for gpus in used[:3])
    value = f"{shown}{', …' if len(used) > 3 else ''} {now.offer.place}{'' if used == [1] else 's'}"
    yield Change("time per iteration", value, "+10 %", _with_profile(now, seconds_per_iteration=table))
    between = [g for g in used if g not in profile.seconds_per_iteration and g < profile.largest_gpus]
    beyond = [g for g in used if g > profile.largest_gpus]
    if between:
        yield slower("speed between measured GPU counts", "interpolated", between, _measured(profile), now)
    if beyond:
        yield slower("speed beyond measured GPU counts", "extrapolated", beyond, _measured(profile), now)


def slower(name: Name, basis: Basis, counts: list[int], whence: str, now: Problem) -> Change:
    """Slow down exactly these GPU counts."""
    profile = now.profile
    table = {**profile.seconds_per_iteration, **{gpus: MORE * profile.iteration_s(gpus) for gpus in counts}}
    value = f"{', '.join(map(str, counts))} GPU{'s' * (counts != [1])} per trial, {whence}"
    return Change(name, value, "10 % slower", _with_profile(now, seconds_per_iteration=table), basis)


def _measured(profile: Profile) -> str:
    counts = sorted(profile.seconds_per_iteration)
    return "measured are " + (f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]} alone")


def _loading(profile: Profile) -> str:
    load_s = profile.checkpoint_load_s
    return f" + {format_duration(load_s)} / machines" if load_s else ""


def _delays(now: Problem) -> Iterator[Change]:
    profile, offer = now.profile, now.offer
    startup_s, change = _longer(profile.trial_startup_s, 1.0)
    yield Change(
        "start-up of a trial",
        f"{format_duration(profile.trial_startup_s)}{_loading(profile)}",
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
        yield Change(name, value, change, _with_offer(now, **{field: longer_s}))


def _varying(delay_s: float, spread: Spread) -> str:
    """Say how much a delay varies."""
    if spread.certain or delay_s == 0.0:
        return ""
    if not spread.samples:
        return f", varying by {_percent(spread.cv)}"
    least_s, most_s = (format_duration(delay_s * factor) for factor in (min(spread.samples), max(spread.samples)))
    return f", from {least_s} to {most_s} in {counted(len(spread.samples), 'sample')}"


def _longer(delay_s: float, from_nothing_s: float) -> tuple[float, str]:
    """Add 10 %; to a delay of 0, some seconds."""
    if delay_s > 0.0:
        return MORE * delay_s, "+10 %"
    return from_nothing_s, f"{format_duration(from_nothing_s)} instead"


def _prices(now: Problem) -> Iterator[Change]:
    offer = now.offer
    if (price := offer.price_usd_per_hour) and offer.unit == "USD":
        raised = _with_offer(now, price_usd_per_hour=MORE * price)
        yield Change("price of an instance", f"{format_usd(price)}/h on demand", "+10 %", raised)
    if offer.spot is not None:
        spot = offer.spot
        price, rate = spot.price_usd_per_hour, spot.interruptions_per_hour
        raised = _with_offer(now, spot=replace(spot, price_usd_per_hour=MORE * price))
        yield Change("price of a spot instance", f"{format_usd(price)}/h", "+10 %", raised)
        often = _with_offer(now, spot=replace(spot, interruptions_per_hour=2.0 * rate))
        yield Change("spot interruptions", f"{rate:g} per instance-hour", "twice as often", often)
    if head := offer.head_price_usd_per_hour:
        raised = _with_offer(now, head_price_usd_per_hour=MORE * head)
        yield Change("head node", f"{format_usd(head)}/h", "+10 %", raised)
    if data := offer.data_usd_per_instance:
        raised = _with_offer(now, data_usd_per_instance=MORE * data)
        yield Change("data", f"{format_usd(data)} per instance started", "+10 %", raised)


def _noise(now: Problem) -> Change:
    profile = now.profile
    if profile.varies:
        known = {name: cv for name in _NOISE_WORDS if (cv := getattr(profile, name)) > 0.0}
        more = {name: MORE * cv for name, cv in known.items()}
        value = ", ".join(f"{_NOISE_WORDS[name]} {_percent(cv)}" for name, cv in known.items())
        return Change("noise of trials", value, "+10 %", _with_profile(now, **more))
    added = f"{_NOISE_WORDS['trial_cv']} {_percent(_TRIED_CV)} instead"
    return Change("noise of trials", "none", added, _with_profile(now, trial_cv=_TRIED_CV))


def _percent(cv: float) -> str:
    return f"{100.0 * cv:.2g} %" if cv < 0.1 else f"{100.0 * cv:.0f} %"


def _with_profile(now: Problem, **changes: object) -> Problem:
    return replace(now, profile=replace(now.profile, **changes))  # type: ignore[arg-type]


def _with_offer(now: Problem, **changes: object) -> Problem:
    return replace(now, offer=replace(now.offer, **changes))  # type: ignore[arg-type]


def _outcomes(estimate: Estimate, job: JobPlan, problems: Sequence[Problem]) -> list[_Outcome]:
    """Predict the whole job with other inputs; those of a run without a SYNC are simulated together."""
    first = job.lanes[0]
    if first.stages[0].has_sync:
        return [_judged(estimate, *_of_lanes(job, problem)) for problem in problems]
    worlds = [(problem.profile, problem.offer) for problem in problems]
    runs = simulated_beside(first.stages[0], first.planned.plan.stages[0], worlds, estimate.problem.seed)
    return [_judged(estimate, one.jct_s, one.cost_usd) for one in runs]


def _judged(estimate: Estimate, jct_s: Floats, cost_usd: Floats) -> _Outcome:
    kept = Box.of(estimate.constraints).holds(jct_s, cost_usd)
    return _Outcome(float(jct_s.mean()), float(cost_usd.mean()), float(kept.mean()))


def _of_lanes(job: JobPlan, problem: Problem) -> tuple[Floats, Floats]:
    """Return time and cost of the whole job in each sample."""
    alone = len(job.lanes) == 1
    offer = problem.offer if alone else replace(problem.offer, head_price_usd_per_hour=0.0)
    parts = [_figures(lane, problem.profile, offer, problem.seed) for lane in job.lanes]
    jct_s = np.max([part_s for part_s, _ in parts], axis=0)
    shared_usd = 0.0 if alone else problem.offer.head_cost_usd(1.0) * jct_s
    return jct_s, np.sum([part_usd for _, part_usd in parts], axis=0) + shared_usd


def predicted_usd(estimate: Estimate, offer: Offer) -> float:
    """Return the (mean) cost of an estimate's plan on another offer, over the same random numbers where times vary."""
    assert estimate.job is not None, "the caller has a plan"
    (found,) = _outcomes(estimate, estimate.job, [replace(estimate.problem, offer=offer)])
    return found.cost_usd


def _figures(lane: Lane, profile: Profile, offer: Offer, seed: int) -> tuple[Floats, Floats]:
    """Return time and cost of a lane in each sample; one value each if nothing varies."""
    if not varies(profile, offer):
        predicted = predict(lane.stages, lane.planned.plan, profile, offer)
        return np.array([predicted.jct_s]), np.array([predicted.cost_usd])
    draws = _draws(tuple(lane.stages), profile, offer, seed + lane.brackets[0])
    chunks = 1 if lane.stages[0].trials >= _MANY_TRIALS else _CHUNKS
    samples = draws.evaluate(lane.planned.plan, min(chunks, draws.most_chunks))
    return samples.jct_s, samples.cost_usd


@lru_cache(maxsize=2)
def _draws(stages: tuple[Stage, ...], profile: Profile, offer: Offer, seed: int) -> Draws:
    """Return the samples of a job, which do not depend on its limits; those of the latest jobs are kept."""
    return Draws(stages, profile, offer, seed=seed)


# The lines of an estimate's bill add up to its (mean) cost.


_LEAST_USD = 1e-9


def bill_lines(estimate: Estimate) -> tuple[BillLine, ...]:
    """Return the lines of the plan's bill without those of 0 USD; empty without a plan.

    A bill is linear in its prices: one more dollar per hour gives the instance-hours, one more per instance the number
    of instances started.
    """
    job, offer = estimate.job, estimate.offer
    if job is None:
        return ()
    lines: list[BillLine] = []
    if offer.side_costs or offer.data_usd_per_instance:
        now_usd = predicted_usd(estimate, offer)
        hours = predicted_usd(estimate, _with_cost(offer, SideCost(line="", usd_per_hour=1.0))) - now_usd
        started = predicted_usd(estimate, _with_cost(offer, SideCost(line="", usd_once=1.0))) - now_usd
        lines += [
            BillLine(line=cost.line, usd=cost.usd_per_hour * hours + cost.usd_once * started)
            for cost in offer.side_costs
        ]
        lines.append(BillLine(line=DATA_LINE, usd=offer.data_usd_per_instance * started))
    lines.append(BillLine(line=HEAD_LINE, usd=offer.head_cost_usd(job.prediction.jct_s)))
    rest_usd = job.prediction.cost_usd - sum(line.usd for line in lines)
    found = [BillLine(line=RENT_LINES[offer.billing], usd=rest_usd), *lines]
    return tuple(line for line in found if abs(line.usd) > _LEAST_USD)


def _with_cost(offer: Offer, cost: SideCost) -> Offer:
    return replace(offer, side_costs=(*offer.side_costs, cost))
