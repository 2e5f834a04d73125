"""Slow and silent instances: the controller replaces one that holds up a gang, or on which a trial hung.

A trial reports a straggler after 20 steps or more in which its gang would have been no slower without that worker
(LB-BSP's straggler that no share makes fast enough). The instance is then the provider's fault, not the trial's, unless
the same worker is slow on another instance as well.

An instance that is 40 times slower than others lets its trials hang instead, and so does one whose GPU is stuck: a
trial that is tried again there hangs again, and in the end the whole stage has failed. This writes the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from rubberband.executor.core import limits
from rubberband.executor.core.bill import instance_cost_usd, market_usd_per_s, new_instance_usd
from rubberband.executor.core.events import Command
from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.forecast import forecast, running_left_s, stage_left_s
from rubberband.executor.core.history import HungInstance, Replacement
from rubberband.executor.core.instances import release
from rubberband.executor.core.launching import allow_another_launch
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.executor.core.trials import stop
from rubberband.values.balance import BalanceUse

MOST_REPLACEMENTS = 3
"""Limit of replacements in a run: later slowness has another reason."""
LEAST_SAVED = 0.05
"""Part of the stage's remaining time that a replacement must save: forecasts are no more exact."""


def replace_slow(lane: LaneState, trial: TrialState) -> list[Command]:
    """Replace a slow instance of a trial that has just reported, if that pays within deadline and budget."""
    state = lane.state
    use = trial.reports[-1].balance if trial.reports else None
    if use is None or trial.status is not TrialStatus.RUNNING or len(use.shares) != len(trial.gang):
        return []
    _note_own_slowness(state, trial, use)
    if not use.stragglers or not _may_replace(lane):
        return []
    found = [_weighed(lane, trial, use, record) for record in _suspects(state, trial, use)]
    paying = [one for one in found if _pays(lane, one)]
    if not paying:
        return []
    best = max(paying, key=lambda one: (one.saved_s, one.instance))
    state.history.add(best)
    return _replace(lane, state.instances[best.instance], first=best.first)


def replace_hung(lane: LaneState, trial: TrialState) -> list[Command]:
    """Replace the instance of a trial that has just hung in training, if no other trial on it has reported meanwhile.

    A trial is evidence once. One that hangs on the other instance too, and has no retry left, hangs by its own doing;
    no instance is replaced for a hang after that. A gang on several instances does not show which one is at fault.
    """
    state = lane.state
    names = {slot.instance for slot in trial.gang}
    if len(names) != 1 or not _hang_is_evidence(lane, trial):
        return []
    record = state.instances[names.pop()]
    if record.status is not InstanceStatus.READY or _is_alive(state, record, since=trial.progress_at):
        return []
    first = _has_room(lane)
    at_s = state.elapsed_s(state.now)
    state.history.add(HungInstance(at_s=at_s, instance=record.instance, trial=trial.trial, first=first))
    return _replace(lane, record, first=first)


# Which instances are suspected, and on what evidence.


def _note_own_slowness(state: State, trial: TrialState, use: BalanceUse) -> None:
    """Note workers that are slow although their instance was replaced: they are slow by their trial's own doing."""
    replaced = {one.instance for one in state.history.of(Replacement)}
    for one in state.history.of(Replacement):
        still_slow = one.trial == trial.trial and set(one.ranks) & set(use.stragglers)
        state.fleet.slow_anywhere.update(rank for rank in still_slow or () if trial.gang[rank].instance not in replaced)


def _suspects(state: State, trial: TrialState, use: BalanceUse) -> list[InstanceRecord]:
    """Return the instances that are ready and have a straggler of the trial on them, on evidence that is not used up.

    A rank of a trial is evidence once: what it showed before led to a replacement.
    """
    spent = {(one.trial, rank) for one in state.history.of(Replacement) for rank in one.ranks}
    fresh = [
        rank for rank in use.stragglers if (trial.trial, rank) not in spent and rank not in state.fleet.slow_anywhere
    ]
    names = dict.fromkeys(trial.gang[rank].instance for rank in fresh)
    return [state.instances[name] for name in names if state.instances[name].status is InstanceStatus.READY]


def _hang_is_evidence(lane: LaneState, trial: TrialState) -> bool:
    """Whether a trial's hang says something about its instance, and the instance may be exchanged now."""
    state = lane.state
    hung = state.history.of(HungInstance)
    if len(hung) >= lane.job.hung_replacements or trial.trial in {one.trial for one in hung}:
        return False
    again = [state.trials[one.trial] for one in hung]
    if any(one.status is TrialStatus.FAILED and one.failure and one.failure[0] == "hung" for one in again):
        return False
    return state.allocation(trial).training_at is not None and _may_exchange(lane)


def _is_alive(state: State, record: InstanceRecord, since: float) -> bool:
    """Whether a trial that trains or trained on an instance has reported from there after `since`."""
    for trial in state.trials:
        if trial.attempt and trial.made and trial.made[-1].reported_at > since:
            use = state.allocation(trial)
            is_here = any(slot.instance == record.instance for slot in use.gang)
            if is_here and use.training_at is not None and trial.made[-1].reported_at >= use.training_at:
                return True
    return False


def _may_replace(lane: LaneState) -> bool:
    """Whether a slow instance may be exchanged now: no trial waits, and replacements are left."""
    if len(lane.state.history.of(Replacement)) >= MOST_REPLACEMENTS or lane.waiters:
        return False
    return _may_exchange(lane)


def _may_exchange(lane: LaneState) -> bool:
    """Whether an instance may be exchanged now: all that are wanted are there, and one more can be bought."""
    state = lane.state
    if lane.job.offer.billing == "per_function" or state.course != "running" or lane.phase is not Phase.TRAINING:
        return False
    held = lane.held
    if held.leaving or len(held.ready) < len(held.live) or lane.missing:
        return False
    is_calm = state.fleet.failed_starts == 0 and lane.relaunch_at <= state.now
    return is_calm and limits.affordable(state) > 0


# What a replacement saves and costs.


def _weighed(lane: LaneState, trial: TrialState, use: BalanceUse, record: InstanceRecord) -> Replacement:
    """Return what replacing an instance does: the start of another one, and of its trials, included."""
    job, state = lane.job, lane.state
    ranks = tuple(rank for rank, slot in enumerate(trial.gang) if slot.instance == record.instance)
    iteration_s = _iteration_s(state, trial, use)
    present_s = (lane.target_iterations(trial) - trial.iterations) * iteration_s
    first = _has_room(lane)
    ready_s = job.offer.provision_delay_s + job.offer.init_delay_s
    # A trial moves at its next report after the other instance is ready, or waits for it.
    moved_s = math.ceil(ready_s / iteration_s) * iteration_s if first and iteration_s > 0.0 else 0.0
    slow_s = min(moved_s, present_s)
    waits_s = 0.0 if first else ready_s
    startup_s = state.profile.startup_s(len(trial.gang))
    again_s = state.repeats(trial) * iteration_s
    later_s = slow_s + waits_s + startup_s + (present_s - slow_s + again_s) * _remaining_part(use, ranks)
    known = {trial.trial: present_s}
    moved = {
        other.trial: waits_s
        + startup_s
        + running_left_s(lane, other, state.now, starts=state.allocation(other).training_at is None)
        for other in lane.runners.on(record.instance)
    }
    before_s = stage_left_s(lane, state.now, known_s=known)
    after_s = stage_left_s(lane, state.now, known_s=moved | {trial.trial: later_s})
    kept, market = len(lane.held.live) - 1, lane.chosen.market
    before_usd = _rest_usd(lane, before_s, instances=kept) + _growth_usd(state, record, before_s)
    after_usd = _rest_usd(lane, after_s, instances=kept) + _growth_usd(state, record, moved_s)
    after_usd += new_instance_usd(job.offer, market, max(0.0, after_s - job.offer.provision_delay_s))
    return Replacement(
        at_s=state.elapsed_s(state.now),
        instance=record.instance,
        trial=trial.trial,
        ranks=tuple(rank for rank in use.stragglers if rank in ranks),
        first=first,
        left_s=before_s,
        saved_s=before_s - after_s,
        extra_usd=after_usd - before_usd,
    )


def _remaining_part(use: BalanceUse, ranks: Sequence[int]) -> float:
    """Return the part of a step that is left with another instance, with workers as fast as the median of the rest.

    The speeds of balanced workers add up: computing takes the batch over their sum, and the rest of the step stays.
    """
    speeds = [x / t if t > 0.0 else 0.0 for x, t in zip(use.shares, use.compute_s, strict=True)]
    rest = [speed for rank, speed in enumerate(speeds) if rank not in ranks]
    usual = median(rest) if rest else max(speeds)
    total = math.fsum(rest) + usual * len(ranks)
    if total <= 0.0 or use.step_s <= 0.0:
        return 1.0
    rest_s = max(0.0, use.step_s - max(use.compute_s))
    return min(1.0, (sum(use.shares) / total + rest_s) / use.step_s)


def _iteration_s(state: State, trial: TrialState, use: BalanceUse) -> float:
    """Seconds of the trial's iterations as they are now: between its last two reports, or of its steps."""
    began_at = state.allocation(trial).training_at
    last = [report.reported_at for report in trial.reports[-2:]]
    if len(last) == 2 and began_at is not None and last[0] >= began_at:
        return last[1] - last[0]
    return use.step_s * use.steps


def _rest_usd(lane: LaneState, left_s: float, *, instances: int) -> float:
    """Return the cost of a number of the lane's instances, and of the head node, for the rest of the stage."""
    usd_per_s = market_usd_per_s(lane.job.offer, lane.chosen.market)
    return instances * usd_per_s * left_s + lane.job.offer.head_cost_usd(left_s)


def _growth_usd(state: State, record: InstanceRecord, held_s: float) -> float:
    """Return the cost of an instance that is held for `held_s` from now on; a minimum that is paid is used up first."""
    return instance_cost_usd(state.job, record, state.now + held_s) - instance_cost_usd(state.job, record, state.now)


def _pays(lane: LaneState, found: Replacement) -> bool:
    """Whether a replacement saves time, and money too unless the deadline or the objective asks for time alone."""
    job, state = lane.job, lane.state
    if found.saved_s < LEAST_SAVED * found.left_s or found.saved_s <= 0.0:
        return False
    expected, slower_s = forecast(state, state.now), found.left_s - stage_left_s(lane, state.now)
    expected_usd = expected.cost_usd + _rest_usd(lane, slower_s, instances=len(lane.held.live))
    if job.max_cost_usd is not None and expected_usd + max(0.0, found.extra_usd) > job.max_cost_usd:
        return False
    if found.extra_usd <= 0.0 or job.objective == "min_time":
        return True
    return job.deadline_s is not None and expected.jct_s + slower_s > job.deadline_s


# The exchange.


def _has_room(lane: LaneState) -> bool:
    """Whether another instance may be held beside the slow one until it is ready."""
    state = lane.state
    held, fleet = len(lane.held.live), state.fleet
    total = len(fleet.live()) + len(fleet.leaving())
    return held < lane.max_instances and (state.instance_cap is None or total < state.instance_cap)


def _replace(lane: LaneState, record: InstanceRecord, *, first: bool) -> list[Command]:
    """Leave an instance: at once, or once another one is ready where both may be held."""
    state = lane.state
    allow_another_launch(lane)
    record.status = InstanceStatus.LEAVING
    state.fleet.rent_changed()
    if first:
        return []
    stopped = [stop(state, one, at=state.now) for one in lane.runners.on(record.instance)]
    return [*stopped, *release(state, [record])]
