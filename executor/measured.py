"""The profile as a run corrects it: times that were measured, against those that were expected. Pure.

A factor (observed over expected) is the median over trials, which a few broken ones do not move; a lognormal mean lies
above its median, by as much as the trials differ. Its deviation from 1 is shrunk by what chance would explain (the
James-Stein estimator): to nothing where few trials that vary much were seen, not at all where all of them agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rubberband.chance import Spread
from rubberband.executor.measured_batches import (
    Expected,
    is_settled,
    noise_finding,
    noise_scale_of,
    present_noise_scale,
)
from rubberband.executor.state import Allocation, Job, State, TrialStatus
from rubberband.offer import Offer
from rubberband.profile import Profile
from rubberband.units import format_duration, format_usd

FEWEST_ITERATIONS = 3
"""Fewer do not tell the speed of a gang size."""
FEWEST_STARTS = 3
"""Fewer starts of trials do not tell how long one takes."""
LATEST_STARTS = 8
"""Earlier ones do not count: the first starts, on workers that have trained nothing yet, take longer than the rest."""
WITHIN_NOISE = 0.03
"""A smaller deviation is left alone."""
SMALLEST_DELAY_S = 0.1
"""Likewise, of delays."""
SMALLEST_TOLD_S = 1.0
"""A delay that differs by less is corrected without a word."""


_GOING_ON = (TrialStatus.QUEUED, TrialStatus.RUNNING, TrialStatus.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rest is to be planned with, and what differs from what was expected, in words ("" if nothing does)."""

    profile: Profile
    offer: Offer
    findings: str


@dataclass(frozen=True, slots=True)
class _Speed:
    """How fast the trials of one gang size were."""

    factor: float
    """Seconds per iteration, observed over expected."""
    iterations: int


@dataclass(frozen=True, slots=True)
class _Iteration:
    duration_s: float
    noise_scale: float | None
    """At its end, where the trial knew it."""


def measured(job: Job, state: State) -> Measured:
    """The job's profile and offer, corrected by what the state's trials and instances took.

    Gang sizes that were seen get their own factor, the others the mean of those, weighted by iterations. Where trials
    adapt their batch, a factor is what their noise scale does not explain, and the rest is expected at the noise scale
    of the trials that go on.
    """
    expected, noise_scale = Expected(job.profile, job.offer.gpus), present_noise_scale(job, state)
    speeds = _speeds(job, state, expected)
    iterations = sum(speed.iterations for speed in speeds.values())
    overall = sum(speed.factor * speed.iterations for speed in speeds.values()) / iterations if iterations else 1.0
    startup_s = _startup_s(job, state)
    startup = _delay("a trial starts in", job.profile.trial_startup_s, startup_s)
    repeated = unsaved_iterations(state)
    findings = [noise_finding(job.profile, noise_scale), _pace(overall), startup, _repeated(repeated)]
    offer, changes = _delays(job.offer, state)
    basis = expected.profile(noise_scale)
    profile = replace(basis, seconds_per_iteration=_table(basis, speeds, overall), trial_startup_s=startup_s)
    if repeated:
        # A function trains on one GPU. The next stage is meant; each one after it is planned again in its turn.
        repeated_s = repeated * profile.iteration_s(profile.smallest_gpus)
        profile = replace(profile, trial_startup_s=startup_s + repeated_s)
    return Measured(
        profile=job.profile if profile == job.profile else profile,
        offer=offer,
        findings=", ".join(finding for finding in [*findings, *changes] if finding),
    )


def _table(profile: Profile, speeds: Mapping[int, _Speed], overall: float) -> dict[int, float]:
    seconds = {gpus: overall * expected_s for gpus, expected_s in profile.seconds_per_iteration.items()}
    own = {gpus: speed.factor * profile.iteration_s(gpus) for gpus, speed in speeds.items()}
    changed = overall != 1.0 or any(speed.factor != 1.0 for speed in speeds.values())
    return dict(sorted((seconds | own).items())) if changed else dict(profile.seconds_per_iteration)


def _speeds(job: Job, state: State, expected: Expected) -> dict[int, _Speed]:
    """Gang size -> its speed, where enough was seen of it."""
    seen: dict[int, list[list[_Iteration]]] = {}
    for use in state.allocations:
        if done := _iterations(state, use):
            seen.setdefault(len(use.gang), []).append(done)
    return {
        gpus: _Speed(_factor(trials, job.profile, gpus, expected), sum(map(len, trials)))
        for gpus, trials in sorted(seen.items())
        if sum(map(len, trials)) >= FEWEST_ITERATIONS
    }


def _iterations(state: State, use: Allocation) -> list[_Iteration]:
    """The iterations that were reported from one stretch on a gang."""
    if use.training_at is None:
        return []
    until = math.inf if use.ended_at is None else use.ended_at
    began_at, found = use.repeated_until or use.training_at, list[_Iteration]()
    for report in state.trials[use.trial].reports:
        if not use.training_at < report.reported_at <= until:
            continue
        if is_settled(report) and not any(began_at < woke_at <= report.reported_at for woke_at in state.woke_at):
            found.append(_Iteration(report.reported_at - began_at, noise_scale_of(report)))
        began_at = report.reported_at
    return found


def _factor(trials: Sequence[Sequence[_Iteration]], profile: Profile, gpus: int, expected: Expected) -> float:
    ratios = [
        fmean(done.duration_s for done in trial) / expected.mean_s(gpus, [done.noise_scale for done in trial])
        for trial in trials
    ]
    return _shrunk(ratios, profile.stage_cv(round(median(map(len, trials)))), WITHIN_NOISE)


def _shrunk(ratios: Sequence[float], cv: float, least: float) -> float:
    """The factor that the ratios are taken to show; 1 if it deviates by no more than `least`."""
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios) / middle if middle else 0.0
    deviation = middle * math.hypot(1.0, spread) - 1.0
    error = max(spread, cv) / math.sqrt(len(ratios))
    if abs(deviation) <= max(least, error):
        return 1.0
    factor = 1.0 + deviation * (1.0 - (error / deviation) ** 2)
    return factor if abs(factor - 1.0) > least else 1.0


def _startup_s(job: Job, state: State) -> float:
    seen = [use.training_at - use.started_at for use in state.allocations if use.training_at is not None]
    if len(seen) < FEWEST_STARTS:
        return job.profile.trial_startup_s
    return _settled(job.profile.trial_startup_s, seen[-LATEST_STARTS:], 0.0)


def unsaved_iterations(state: State) -> int:
    """Iterations that a trial which goes on has to train again, since its checkpoint does not hold them; the most."""
    latest = [trial.reports[-1] for trial in state.trials if trial.reports and trial.status in _GOING_ON]
    return max([report.unsaved_iterations for report in latest], default=0)


def _repeated(iterations: int) -> str:
    if not iterations:
        return ""
    return f"trials train {iterations} iteration{'s' * (iterations > 1)} again, for want of a checkpoint"


def _settled(expected_s: float, seen_s: Sequence[float], cv: float) -> float:
    """The delay to expect, from the one expected before and those that were seen."""
    if not seen_s:
        return expected_s
    if expected_s == 0.0:
        return median(seen_s) if median(seen_s) > SMALLEST_DELAY_S else 0.0
    least = max(WITHIN_NOISE, SMALLEST_DELAY_S / expected_s)
    return expected_s * _shrunk([seen / expected_s for seen in seen_s], cv, least)


def _delays(offer: Offer, state: State) -> tuple[Offer, list[str]]:
    """The offer with the delays and the spot price that instances showed, and what differs."""
    records = state.instances.values()
    provision = [r.running_at - r.requested_at for r in records if r.running_at is not None]
    init = [r.ready_at - r.running_at for r in records if r.ready_at is not None and r.running_at is not None]
    provision_s = _settled(offer.provision_delay_s, provision, _cv(offer.provision_spread))
    init_s = _settled(offer.init_delay_s, init, _cv(offer.init_spread))
    changes = [
        _delay("an instance runs after", offer.provision_delay_s, provision_s),
        _delay("its workers are warm after", offer.init_delay_s, init_s),
    ]
    priced, change = _spot_price(offer, state)
    return replace(priced, provision_delay_s=provision_s, init_delay_s=init_s), [*changes, change]


def _spot_price(offer: Offer, state: State) -> tuple[Offer, str]:
    """The offer with the spot price of the latest purchase, and what differs."""
    bought = [r for r in state.instances.values() if r.market == "spot" and r.price_usd_per_hour is not None]
    if offer.spot is None or not bought:
        return offer, ""
    price = max(bought, key=lambda record: record.requested_at).price_usd_per_hour
    expected = offer.spot.price_usd_per_hour
    if price is None or abs(price - expected) <= WITHIN_NOISE * expected:
        return offer, ""
    found = f"spot costs {format_usd(price)}/h instead of {format_usd(expected)}/h"
    return replace(offer, spot=replace(offer.spot, price_usd_per_hour=price)), found


def _cv(spread: Spread) -> float:
    if not spread.samples:
        return spread.cv
    return math.sqrt(fmean((sample - 1.0) ** 2 for sample in spread.samples))


def _pace(factor: float) -> str:
    if factor == 1.0:
        return ""
    return (
        f"iterations take {100.0 * abs(factor - 1.0):.0f} % {'longer' if factor > 1.0 else 'less time'} than profiled"
    )


def _delay(what: str, expected_s: float, settled_s: float) -> str:
    if abs(settled_s - expected_s) < SMALLEST_TOLD_S:
        return ""
    return f"{what} {format_duration(settled_s)} instead of {format_duration(expected_s)}"
