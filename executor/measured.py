"""The profile as a run corrects it: times that were measured, against those that were expected. Pure.

A factor (observed over expected) is the median over trials, which a few broken ones do not move; a lognormal mean lies
above its median, by as much as the trials differ. Its deviation from 1 is shrunk by what chance would explain (the
James-Stein estimator): to nothing where few trials that vary much were seen, not at all where all of them agree. What
is each trial's own is `rubberband.executor.own_speeds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from rubberband.executor.own_speeds import OwnSpeed, OwnSpeeds, own_speeds, with_metric
from rubberband.executor.rules import promoted
from rubberband.executor.shrinking import WITHIN_NOISE, settled, shrunk
from rubberband.executor.starts import starts
from rubberband.executor.state import Allocation, Job, State, TrialStatus
from rubberband.offer import Offer
from rubberband.plan import Speeds
from rubberband.profile import Profile
from rubberband.units import format_duration, format_usd

FEWEST_ITERATIONS = 3
"""Fewer do not tell the speed of a gang size."""
SMALLEST_TOLD_S = 1.0
"""A delay that differs by less is corrected without a word."""


_GOING_ON = (TrialStatus.QUEUED, TrialStatus.RUNNING, TrialStatus.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rest is to be planned with, and what differs from what was expected, in words ("" if nothing does)."""

    profile: Profile
    offer: Offer
    findings: str
    own: Mapping[int, OwnSpeed]
    """How fast each trial that goes on is, beside the profile; empty if all are alike, or it is not known which do."""
    with_metric: float
    """Correlation of how slow trials are with how good they are."""

    @property
    def speeds(self) -> Speeds | None:
        """The speeds of the trials that go on, in the order in which they start; None if nothing is known of them."""
        if not self.own:
            return None
        own = [self.own[trial] for trial in sorted(self.own)]
        return Speeds(
            factors=tuple(speed.factor for speed in own),
            errors=tuple(speed.error for speed in own),
            with_metric=self.with_metric,
        )


@dataclass(frozen=True, slots=True)
class _Speed:
    """How fast the trials of one gang size were."""

    factor: float
    """Seconds per iteration, observed over expected."""
    iterations: int


def measured(job: Job, state: State) -> Measured:
    """The job's profile and offer, corrected by what the state's trials and instances took.

    Gang sizes that were seen get their own factor, the others the mean of those, weighted by iterations. Where trials
    adapt their batch, a factor is what their noise scale does not explain, and the rest is expected at the noise scale
    of the trials that go on.
    """
    expected, noise_scale = Expected(job.profile, job.offer.gpus), present_noise_scale(job, state)
    speeds, own = _speeds(job, state, expected)
    overall = _overall(speeds)
    seen = starts(job, state)
    repeated = unsaved_iterations(state)
    basis = expected.profile(noise_scale)
    profile = replace(
        basis,
        seconds_per_iteration=_table(basis, speeds, overall),
        trial_startup_s=seen.warm_s,
        trial_cv=own.trial_cv,
        iteration_cv=own.iteration_cv,
        mean_cv=0.0 if speeds else job.profile.mean_cv,
    )
    going_on = _going_on(job, state, own)
    startup = _delay("a trial starts in", job.profile.trial_startup_s, seen.warm_s)
    findings = [noise_finding(job.profile, noise_scale), _pace(overall), _survivors(own, going_on), startup]
    offer, changes = _delays(job.offer, state, seen.cold_surplus_s)
    if repeated:
        # A function trains on one GPU. The next stage is meant; each one after it is planned again in its turn.
        repeated_s = repeated * profile.iteration_s(profile.smallest_gpus)
        profile = replace(profile, trial_startup_s=seen.warm_s + repeated_s)
    return Measured(
        profile=job.profile if profile == job.profile else profile,
        offer=offer,
        findings=", ".join(finding for finding in [*findings, _repeated(repeated), *changes] if finding),
        own=going_on,
        with_metric=_with_metric(state, own),
    )


def _overall(speeds: Mapping[int, _Speed]) -> float:
    iterations = sum(speed.iterations for speed in speeds.values())
    return sum(speed.factor * speed.iterations for speed in speeds.values()) / iterations if iterations else 1.0


def _table(profile: Profile, speeds: Mapping[int, _Speed], overall: float) -> dict[int, float]:
    seconds = {gpus: overall * expected_s for gpus, expected_s in profile.seconds_per_iteration.items()}
    own = {gpus: speed.factor * profile.iteration_s(gpus) for gpus, speed in speeds.items()}
    changed = overall != 1.0 or any(speed.factor != 1.0 for speed in speeds.values())
    return dict(sorted((seconds | own).items())) if changed else dict(profile.seconds_per_iteration)


def _speeds(job: Job, state: State, expected: Expected) -> tuple[dict[int, _Speed], OwnSpeeds]:
    """Gang size -> its speed, where enough was seen of it; and how fast trials are beside that.

    The gang sizes come in the order of their first use: later ones have the trials that survived, whose own speed is
    known by then, so that it is not taken for that of the gang.
    """
    seen: dict[int, dict[int, list[float]]] = {}
    for use in state.allocations:
        if ratios := _ratios(state, use, expected):
            seen.setdefault(len(use.gang), {}).setdefault(use.trial, []).extend(ratios)
    speeds, own = dict[int, _Speed](), _own(job.profile, seen, {})
    for gpus, trials in seen.items():
        count = sum(map(len, trials.values()))
        if count >= FEWEST_ITERATIONS:
            known = _own(job.profile, {size: seen[size] for size in speeds}, speeds)
            speeds[gpus] = _Speed(_factor(trials, job.profile, known), count)
            own = _own(job.profile, seen, speeds)
    return dict(sorted(speeds.items())), own


def _own(profile: Profile, seen: Mapping[int, Mapping[int, list[float]]], speeds: Mapping[int, _Speed]) -> OwnSpeeds:
    ratios, overall = dict[int, list[float]](), _Speed(_overall(speeds), 0)
    for gpus, trials in seen.items():
        factor = speeds.get(gpus, overall).factor
        for trial, taken in trials.items():
            ratios.setdefault(trial, []).extend(ratio / factor for ratio in taken)
    return own_speeds(ratios, profile.trial_cv, profile.iteration_cv)


def _ratios(state: State, use: Allocation, expected: Expected) -> list[float]:
    """What the iterations that were reported from one stretch on a gang took, each over what was expected of it."""
    if use.training_at is None:
        return []
    until = math.inf if use.ended_at is None else use.ended_at
    began_at, found = use.repeated_until or use.training_at, list[float]()
    for report in state.trials[use.trial].reports:
        if not use.training_at < report.reported_at <= until:
            continue
        if is_settled(report) and not any(began_at < woke_at <= report.reported_at for woke_at in state.woke_at):
            expected_s = expected.mean_s(len(use.gang), [noise_scale_of(report)])
            found.append((report.reported_at - began_at) / expected_s)
        began_at = report.reported_at
    return found


def _factor(trials: Mapping[int, list[float]], profile: Profile, known: OwnSpeeds) -> float:
    """That of a gang size, from what trials took on it, over what was known of them before."""
    ratios, cvs = list[float](), list[float]()
    for trial, taken in trials.items():
        own = known.of.get(trial, OwnSpeed(factor=1.0, error=profile.trial_cv))
        ratios.append(fmean(taken) / own.factor)
        cvs.append(math.hypot(own.error, profile.iteration_cv / math.sqrt(len(taken))))
    return shrunk(ratios, median(cvs), WITHIN_NOISE)


def _going_on(job: Job, state: State, own: OwnSpeeds) -> dict[int, OwnSpeed]:
    if not own.of or not state.stages or not state.stages[-1].ranking:
        return {}
    unseen = OwnSpeed(factor=1.0, error=own.trial_cv)
    return {trial: own.of.get(trial, unseen) for trial in promoted(job, state.stages[-1])}


def _with_metric(state: State, own: OwnSpeeds) -> float:
    if not own.of:
        return 0.0
    return with_metric([own.of[trial].factor for trial in done.ranking if trial in own.of] for done in state.stages)


def _survivors(own: OwnSpeeds, going_on: Mapping[int, OwnSpeed]) -> str:
    """How much slower the trials that go on are than all were, in words; empty where they are not."""
    if not going_on:
        return ""
    average = fmean(speed.factor for speed in own.of.values())
    slower = fmean(speed.factor for speed in going_on.values()) / average - 1.0
    if abs(slower) <= WITHIN_NOISE:
        return ""
    return (
        f"the trials that go on are {100.0 * abs(slower):.0f} % {'slower' if slower > 0.0 else 'faster'} than average"
    )


def unsaved_iterations(state: State) -> int:
    """Iterations that a trial which goes on has to train again, since its checkpoint does not hold them; the most."""
    latest = [trial.reports[-1] for trial in state.trials if trial.reports and trial.status in _GOING_ON]
    return max([report.unsaved_iterations for report in latest], default=0)


def _repeated(iterations: int) -> str:
    if not iterations:
        return ""
    return f"trials train {iterations} iteration{'s' * (iterations > 1)} again, for want of a checkpoint"


def _delays(offer: Offer, state: State, cold_surplus_s: float) -> tuple[Offer, list[str]]:
    """The offer with the delays and the spot price that instances showed, and what differs.

    A new instance is as good as a held one only when its workers have started their first trials: what these take
    beyond others counts as its own, as it does in a measured profile. A restart after an interruption waits for one.
    """
    records = state.instances.values()
    waited = {r.requested_at: r.running_at - r.requested_at for r in records if r.running_at is not None}
    started = [(r.running_at, r.ready_at) for r in records if r.ready_at is not None and r.running_at is not None]
    init = [ready_at - running_at + cold_surplus_s for running_at, ready_at in started]
    # What is asked for at once waits in one queue, and tells of it once.
    provision_s = settled(offer.provision_delay_s, list(waited.values()), _cv(offer.provision_spread))
    init_s = settled(offer.init_delay_s, init, _cv(offer.init_spread))
    warm = "first trials train after" if cold_surplus_s >= SMALLEST_TOLD_S else "workers are warm after"
    changes = [
        _delay("an instance runs after", offer.provision_delay_s, provision_s),
        _delay(warm, offer.init_delay_s, init_s),
    ]
    priced, change = _spot_price(offer, state)
    later_s = provision_s - offer.provision_delay_s + init_s - offer.init_delay_s
    if priced.spot is not None and later_s:
        priced = replace(priced, spot=replace(priced.spot, restart_s=max(0.0, priced.spot.restart_s + later_s)))
    return replace(priced, provision_delay_s=provision_s, init_delay_s=init_s), [*changes, change]


def _spot_price(offer: Offer, state: State) -> tuple[Offer, str]:
    """The offer with the spot price of now, and what differs: that of what is held, or else of the latest purchase."""
    bought = [r for r in state.instances.values() if r.market == "spot" and r.price_usd_per_hour is not None]
    if offer.spot is None or not bought:
        return offer, ""
    latest = max(bought, key=lambda record: record.requested_at)
    held = [r.hour_prices_usd[-1] for r in state.live() if r.market == "spot" and r.hour_prices_usd]
    price = fmean(held) if held else latest.price_usd_per_hour
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
    return f"{100.0 * abs(factor - 1.0):.0f} % {'slower' if factor > 1.0 else 'faster'} than profiled"


def _delay(what: str, expected_s: float, settled_s: float) -> str:
    if abs(settled_s - expected_s) < SMALLEST_TOLD_S:
        return ""
    return f"{what} {format_duration(settled_s)} instead of {format_duration(expected_s)}"
