"""The profile as a run corrects it: times that were measured, against those that were expected. Pure.

A factor (observed over expected) is the median over trials, which a few broken ones do not move; a lognormal mean lies
above its median, by as much as the trials differ. Its deviation from 1 is shrunk by what chance would explain (the
James-Stein estimator): to nothing if few trials that vary much were seen, not at all if all of them agree. The speed of
each trial is in `rubberband.executor.core.own_speeds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rubberband.executor.core.events import Slot
from rubberband.executor.core.fleet import InstanceRecord
from rubberband.executor.core.forecast import gang_factor
from rubberband.executor.core.own_speeds import OwnSpeed, OwnSpeeds, own_speeds, with_metric
from rubberband.executor.core.state import GangRun, LaneState, State
from rubberband.executor.core.trial_state import UNDER_WAY, TrialReport, TrialState, TrialStatus
from rubberband.features import part
from rubberband.units import counted, format_duration, format_usd
from rubberband.values.asynchronous import AsyncTimes, AsyncUse
from rubberband.values.offer import Offer
from rubberband.values.plan import Speeds
from rubberband.values.profile import Profile, Spread

# What the batches of a run tell of its noise scale, and how long iterations should take by that. Pure.
#
# The noise scale grows as training goes on and differs between trials; how fast steps are is another matter. A run
# that is planned again needs both apart: e(g) follows the noise scale of the trials that are left, and the speed that
# was seen, once the noise scale is taken out of it, stays what it is.


_STEP = 0.02
"""Noise scales that differ by less count as one, which is fast for a run of a thousand trials."""
_LEAST = 1e-6
SETTLED = 1.5
"""A batch that changes by more within an iteration is still being found."""
WITHIN_NOISE_SCALE = 0.2
"""A smaller deviation of the noise scale is left alone: it is not known any better."""


class Expected:
    """Seconds per iteration that a profile leads one to expect, at the noise scale that a trial had."""

    def __init__(self, profile: Profile, gpus_per_instance: int) -> None:
        self._profile = profile
        self._gpus_per_instance = gpus_per_instance
        self._known: dict[int, Profile] = {}

    def mean_s(self, gpus: int, noise_scales: Sequence[float | None]) -> float:
        """Return the mean seconds of iterations of a gang of `gpus`, at these noise scales; None: the profile's."""
        if self._profile.goodput is None:
            return self._profile.iteration_s(gpus)
        return fmean(self.profile(noise_scale).iteration_s(gpus) for noise_scale in noise_scales)

    def profile(self, noise_scale: float | None) -> Profile:
        """The profile at a noise scale; as it is where the batch is fixed."""
        if noise_scale is None or self._profile.goodput is None:
            return self._profile
        step = round(math.log(max(noise_scale, _LEAST)) / _STEP)
        if step not in self._known:
            self._known[step] = part("noise scale")(self._profile, self._gpus_per_instance, math.exp(step * _STEP))
        return self._known[step]


def noise_scale_of(report: TrialReport) -> float | None:
    """Return the noise scale that a trial knew at the end of an iteration."""
    known = [use.noise_scale for use in report.batches if use.noise_scale is not None]
    return known[-1] if known else None


def is_settled(report: TrialReport) -> bool:
    """Whether an iteration shows how fast adaptive steps are: not while the batch, or phi, is still being found."""
    sizes = [use.batch_size for use in report.batches]
    return not sizes or (noise_scale_of(report) is not None and max(sizes) <= SETTLED * min(sizes))


def present_noise_scale(lane: LaneState) -> float | None:
    """The median of the trials that go on; None where the profile has no model, none is known, or it is as expected."""
    if lane.job.profile.goodput is None:
        return None
    latest = [found for trial in _left(lane) if (found := _latest(trial)) is not None]
    if not latest or abs(median(latest) / lane.job.profile.goodput.noise_scale - 1.0) <= WITHIN_NOISE_SCALE:
        return None
    return median(latest)


def _left(lane: LaneState) -> list[TrialState]:
    if lane.stages and lane.stage.ranking:
        return [lane.state.trials[trial] for trial in _next(lane)]
    left = [trial for trial in lane.state.trials if trial.status is not TrialStatus.FAILED and not trial.ended]
    return [trial for trial in left if trial.stopped_at is None]


def _next(lane: LaneState) -> tuple[int, ...]:
    """The trials that train after the lane's last SYNC: the promoted ones, or those of the lane's next bracket."""
    job = lane.job
    following, bracket = lane.stage.stage + 1, lane.bracket
    if following < bracket.end_stage or following == lane.end_stage:
        promoted = [lane.state.trials[trial] for trial in job.promoted(lane.stage)]
        return tuple(trial.trial for trial in promoted if not trial.ended and trial.stopped_at is None)
    return job.trials_of(job.bracket_of(following))


def _latest(trial: TrialState) -> float | None:
    known = (noise_scale_of(report) for report in reversed(trial.reports))
    return next((found for found in known if found is not None), None)


def noise_finding(profile: Profile, now: float | None) -> str:
    """That the noise scale is another one than the profile has, in words; empty if it is not."""
    if now is None or profile.goodput is None:
        return ""
    before = profile.goodput.noise_scale
    went, pays = ("rose", "more") if now > before else ("fell", "less")
    return f"the noise scale {went} from {before:,.0f} to {now:,.0f}: larger gangs pay off {pays}"


# What a few measured values are taken to show, beside what was expected: as much as chance does not explain. Pure.


WITHIN_NOISE = 0.03
"""A smaller deviation is left alone."""
SMALLEST_DELAY_S = 0.1
"""Likewise, of delays."""


def shrunk(ratios: Sequence[float], cv: float, least: float) -> float:
    """Return the factor that the ratios are taken to show; 1 if it deviates by no more than `least`.

    `cv` is how much the ratios vary, as far as that is known: if they show that they vary more, they do.
    """
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios) / middle if middle else 0.0
    deviation = middle * math.hypot(1.0, spread) - 1.0
    error = max(spread, cv) / math.sqrt(len(ratios))
    if abs(deviation) <= max(least, error):
        return 1.0
    factor = 1.0 + deviation * (1.0 - (error / deviation) ** 2)
    return factor if abs(factor - 1.0) > least else 1.0


def settled(expected_s: float, seen_s: Sequence[float], cv: float) -> float:
    """Return the delay to expect, from the one expected before and those that were seen."""
    if not seen_s:
        return expected_s
    if expected_s == 0.0:
        return median(seen_s) if median(seen_s) > SMALLEST_DELAY_S else 0.0
    least = max(WITHIN_NOISE, SMALLEST_DELAY_S / expected_s)
    return expected_s * shrunk([seen / expected_s for seen in seen_s], cv, least)


# How long trials take to start, as a run shows it: the first time on a worker, and later. Pure.
#
# A worker that has trained nothing yet has modules to import and a GPU to wake, and on a new instance all of them do
# it at once. Later stages on instances that are held begin on warm workers; who grows pays for cold ones.


FEWEST_STARTS = 3
"""Fewer starts of trials do not show how long one takes."""
LATEST_STARTS = 8
"""Earlier ones do not count: of wide stages, where more trials start at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarts:
    """Duration of a trial's start."""

    warm_s: float
    """On workers that have trained before, as a profile has it."""
    cold_surplus_s: float
    """How much longer it takes on a worker that has trained nothing yet."""


def starts(state: State) -> TrialStarts:
    """Return what the starts of a run's trials take, as far as it shows another time than the profile's."""
    warm_s, cold_s = _seen(state.job.profile, state)
    profile = state.job.profile
    usual_s = profile.trial_startup_s
    if len(warm_s) >= FEWEST_STARTS:
        usual_s = settled(usual_s, warm_s[-LATEST_STARTS:], profile.startup_cv)
    if len(cold_s) < FEWEST_STARTS:
        return TrialStarts(warm_s=usual_s, cold_surplus_s=0.0)
    first_s = settled(usual_s, cold_s, profile.startup_cv)
    if len(warm_s) < FEWEST_STARTS:
        usual_s = min(usual_s, first_s)
    surplus_s = first_s - usual_s
    return TrialStarts(warm_s=usual_s, cold_surplus_s=surplus_s if surplus_s > SMALLEST_DELAY_S else 0.0)


def _seen(profile: Profile, state: State) -> tuple[list[float], list[float]]:
    """The starts on workers that had all trained before, and the others, without the loading of checkpoints."""
    warm_s, cold_s = list[float](), list[float]()
    for use, is_warm in _uses(state):
        assert use.training_at is not None, "it trains"
        whole_s = use.training_at - use.started_at + _within_first_s(profile, is_warm)
        (warm_s if is_warm else cold_s).append(max(0.0, whole_s - profile.load_s(len(use.gang))))
    return warm_s, cold_s


def _uses(state: State) -> Iterator[tuple[GangRun, bool]]:
    """Yield what trained, and whether all its workers had trained before."""
    trained = set[Slot]()
    for use in state.allocations:
        if use.training_at is not None:
            yield use, trained.issuperset(use.gang)
            trained.update(use.gang)


def _within_first_s(profile: Profile, is_warm: bool) -> float:
    """Return the part of a start that passes within the first iteration, which nothing else shows."""
    warm_s = profile.first_iteration_extra_s
    return warm_s if is_warm else max(warm_s, profile.cold_iteration_extra_s)


FEWEST_ITERATIONS = 3
"""Fewer do not show the speed of a gang size."""
_LEAST_RATIO = 0.1
"""An iteration that is shorter than its part of a start is taken for this much of the expected one."""
SMALLEST_REPORTED_S = 1.0
"""A delay that differs by less is corrected and not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Profile, offer and speeds to plan the rest with, and what differs from the expected, in words ("": nothing)."""

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


def measured(state: State, lane: LaneState | None = None) -> Measured:
    """The job's profile and offer, corrected by what the state's trials and instances took.

    Gang sizes that were seen get their own factor, the others the mean of those, weighted by iterations. Where workers
    train asynchronously, gangs of two or more calibrate the model of the others, by their throughput and by the times
    of their updates. Where trials adapt their batch, a factor is what their noise scale does not explain, and the rest
    is expected at the noise scale of the trials that go on: those of `lane`, or of the first one. The trials of all
    lanes show the speed.
    """
    job = state.job
    lane = state.lanes[0] if lane is None else lane
    expected, noise_scale = Expected(job.profile, job.offer.slots), present_noise_scale(lane)
    speeds, own = _speeds(state, expected)
    overall = _overall(speeds)
    seen = starts(state)
    resumes = _resumes(state)
    repeated = unsaved_iterations(state) if resumes or job.profile.resumes else 0
    basis = expected.profile(noise_scale)
    calibrated = _calibrated(basis, speeds, state)
    profile = replace(
        calibrated or replace(basis, seconds_per_iteration=_table(basis, speeds, overall)),
        resumes=resumes,
        trial_startup_s=seen.warm_s,
        trial_cv=own.trial_cv,
        iteration_cv=own.iteration_cv,
        mean_cv=0.0 if speeds else job.profile.mean_cv,
    )
    going_on = _going_on(lane, own)
    startup = _delay("a trial starts in", job.profile.trial_startup_s, seen.warm_s)
    pace = _pace(overall) if calibrated is None else _throughput(basis, calibrated, max(speeds))
    findings = [noise_finding(job.profile, noise_scale), pace, _survivors(own, going_on), startup]
    again = _repeated(repeated)
    if resumes != job.profile.resumes and not (repeated and not resumes):
        again = "trials go on from checkpoints" if resumes else "trials start from zero at each stage"
    offer, changes = _delays(job.offer, state, seen.cold_surplus_s)
    if repeated and resumes:
        # The next stage is meant; each one after it is planned again in its turn.
        repeated_s = repeated * profile.iteration_s(profile.smallest_gpus)
        profile = replace(profile, trial_startup_s=seen.warm_s + repeated_s)
    return Measured(
        profile=job.profile if profile == job.profile else profile,
        offer=offer,
        findings=", ".join(finding for finding in [*findings, again, *changes] if finding),
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


def _calibrated(profile: Profile, speeds: Mapping[int, _Speed], state: State) -> Profile | None:
    """The profile, its model of asynchronous workers calibrated by gangs of two or more; None where none differs."""
    off = any(gpus > 1 and speed.factor != 1.0 for gpus, speed in speeds.items())
    if profile.asynchronous is None or not off:
        return None
    seen_s = {gpus: speed.factor * profile.iteration_s(gpus) for gpus, speed in speeds.items()}
    corrected: Profile = part("recalibrated")(profile, seen_s, _times(profile.asynchronous.times, state))
    return corrected


def _times(expected: AsyncTimes, state: State) -> AsyncTimes | None:
    """The times of a worker alone as its trials' updates show them; None where they are as expected.

    Transfers wait for each other, and do not show how long one takes alone: it is at most as long.
    """
    uses = [report.updates for trial in state.trials for report in trial.reports if report.updates is not None]
    updates = [use.updates for use in uses]
    if not any(updates):
        return None

    def mean_s(each: Callable[[AsyncUse], float]) -> float:
        return fmean(map(each, uses), updates)

    found = AsyncTimes(
        compute_s=mean_s(lambda use: use.compute_s),
        up_s=min(mean_s(lambda use: use.up_s), expected.up_s),
        server_s=mean_s(lambda use: use.server_s),
        down_s=min(mean_s(lambda use: use.down_s), expected.down_s),
    )
    noise_s = WITHIN_NOISE * expected.update_s
    off_s = (abs(getattr(found, name) - getattr(expected, name)) for name in AsyncTimes.__dataclass_fields__)
    return found if any(each_s > noise_s for each_s in off_s) else None


def _throughput(before: Profile, after: Profile, workers: int) -> str:
    """How fast asynchronous workers are, in words."""
    assert after.asynchronous is not None, "only a model is calibrated"
    expected, found = (part("updates")(profile, workers) for profile in (before, after))
    return f"{counted(workers, 'worker')} make {found:.3g} updates/s instead of {expected:.3g}"


def _speeds(state: State, expected: Expected) -> tuple[dict[int, _Speed], OwnSpeeds]:
    """Gang size -> its speed, where enough was seen of it; and how fast trials are beside that.

    The gang sizes come in the order of their first use: later ones have the trials that survived, whose own speed is
    known by then, so that it is not taken for that of the gang.
    """
    job = state.job
    seen: dict[int, dict[int, list[float]]] = {}
    for use, is_warm in _uses(state):
        if ratios := _ratios(state, use, expected, _within_first_s(job.profile, is_warm)):
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


def _ratios(state: State, use: GangRun, expected: Expected, within_first_s: float) -> list[float]:
    """Return the times of the iterations reported from one stretch on a gang, each over the expected one.

    The first one is left out where the part of the start within it is longer than the iteration itself.

    On instances of other types that is the one that their speeds lead one to expect.
    """
    if use.training_at is None:
        return []
    until = math.inf if use.ended_at is None else use.ended_at
    began_at, found = use.repeated_until or use.training_at, list[float]()
    first_at = None if use.repeated_until else began_at
    mixed = gang_factor(state.job.profile, state, use.gang)
    for report in state.trials[use.trial].made:
        if not use.training_at < report.reported_at <= until:
            continue
        if is_settled(report) and not any(began_at < woke_at <= report.reported_at for woke_at in state.woke_at):
            expected_s = mixed * expected.mean_s(len(use.gang), [noise_scale_of(report)])
            extra_s = within_first_s if began_at == first_at else 0.0
            if extra_s <= expected_s:
                least_s = _LEAST_RATIO * expected_s if extra_s else 0.0
                found.append(max(least_s, report.reported_at - began_at - extra_s) / expected_s)
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


def _going_on(lane: LaneState, own: OwnSpeeds) -> dict[int, OwnSpeed]:
    if not own.of or not lane.stages or not lane.stage.ranking:
        return {}
    unseen = OwnSpeed(factor=1.0, error=own.trial_cv)
    return {trial: own.of.get(trial, unseen) for trial in _next(lane)}


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
    return max([trial.unsaved_iterations for trial in _under_way(state)], default=0)


def _under_way(state: State) -> list[TrialState]:
    return [trial for trial in state.trials if trial.status in UNDER_WAY and not trial.ended]


def _resumes(state: State) -> bool:
    """Whether trials go on from checkpoints: as profiled, until trials that were paused show it."""
    shown = [found for trial in _under_way(state) if (found := _goes_on(state, trial)) is not None]
    return any(shown) if shown else state.job.profile.resumes


def _goes_on(state: State, trial: TrialState) -> bool | None:
    """Whether the trial's latest start trained less than all again, or its checkpoint has any; None: not known yet."""
    if trial.checkpoint is None or not trial.has_reported:
        return None
    use = state.allocation(trial)
    before = 0 if use.training_at is None else sum(each.reported_at <= use.training_at for each in trial.reports)
    if 0 < before < len(trial.reports):
        return use.repeated < before
    return trial.reports[-1].saved_iterations != 0


def _repeated(iterations: int) -> str:
    if not iterations:
        return ""
    return f"trials train {counted(iterations, 'iteration')} again, without a checkpoint"


_AT_ONCE_S, _SLOW_S = 0.25, 1.0


def _delays(offer: Offer, state: State, cold_surplus_s: float) -> tuple[Offer, list[str]]:
    """The offer with the delays and the spot price that instances showed, and what differs.

    A new instance is as good as a held one only when its workers have started their first trials: what these take
    beyond others counts as its own, as it does in a measured profile. A restart after an interruption waits for one.
    """
    records = [each for each in state.instances.values() if not _began_before(each, offer)]
    waited = {r.requested_at: r.running_at - r.requested_at for r in records if r.running_at is not None}
    started = [(r.running_at, r.ready_at) for r in records if r.ready_at is not None and r.running_at is not None]
    init = [ready_at - running_at + cold_surplus_s for running_at, ready_at in started]
    # What is asked for at once waits in one queue, and tells of it once.
    provision_s = settled(offer.provision_delay_s, list(waited.values()), _cv(offer.provision_spread))
    init_s = settled(offer.init_delay_s, init, _cv(offer.init_spread))
    warm = "first trials train after" if cold_surplus_s >= SMALLEST_REPORTED_S else "workers are warm after"
    changes = [
        _delay("an instance runs after", offer.provision_delay_s, provision_s),
        _delay(warm, offer.init_delay_s, init_s),
    ]
    priced, change = _spot_price(offer, state)
    later_s = provision_s - offer.provision_delay_s + init_s - offer.init_delay_s
    if priced.spot is not None and later_s:
        priced = replace(priced, spot=replace(priced.spot, restart_s=max(0.0, priced.spot.restart_s + later_s)))
    return replace(priced, provision_delay_s=provision_s, init_delay_s=init_s), [*changes, change]


def _began_before(record: InstanceRecord, offer: Offer) -> bool:
    """Whether it was started before it was asked for, which says nothing of later ones."""
    at_once = record.running_at is not None and record.running_at - record.requested_at < _AT_ONCE_S
    return at_once and offer.provision_delay_s > _SLOW_S


def _spot_price(offer: Offer, state: State) -> tuple[Offer, str]:
    """The offer with the spot price of now, and what differs: that of what is held, or else of the latest purchase."""
    bought = [r for r in state.instances.values() if r.market == "spot" and r.price_usd_per_hour is not None]
    if offer.spot is None or not bought:
        return offer, ""
    latest = max(bought, key=lambda record: record.requested_at)
    held = [r.hour_prices_usd[-1] for r in state.fleet.live() if r.market == "spot" and r.hour_prices_usd]
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
    if abs(settled_s - expected_s) < SMALLEST_REPORTED_S:
        return ""
    return f"{what} {format_duration(settled_s)} instead of {format_duration(expected_s)}"
