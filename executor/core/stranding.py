"""Ends for want of something: of an instance to train on, or of a trial that goes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.executor.core import bill, launching, limits
from rubberband.executor.core.events import FailureKind, Outcome
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.core.trials import starts
from rubberband.units import format_usd


def goes_on(lane: LaneState) -> bool:
    """Whether a lane trains, or will without further ado."""
    if lane.runners or not lane.waiters or lane.phase is Phase.PLANNING:
        return True
    if lane.waits_for_instances:
        return False
    return launching.awaited(lane) or bool(starts(lane))


def end_of(lane: LaneState) -> tuple[Outcome, str]:
    """Return how an experiment ends that has no instance to train on, and why; note whether a resume may find one."""
    state = lane.state
    last = next((record for record in reversed(state.instances.values()) if record.reason), None)
    cut_short = last is not None and limits.cut_short(state.job, last)
    if state.fleet.failed_starts and not cut_short and last is not None and last.failed_start:
        return _end_unstarted(state)
    unnamed = "none came" if state.job.max_cost_usd is None else "max_cost leaves room for none"
    reason = f"no instance to train on: {unnamed if last is None else last.reason}"
    if (enough_usd := launching.needed_usd(lane)) is not None:
        reason += f"; max_cost of {format_usd(enough_usd)} would buy one on demand instead of spot"
    if last is not None and cut_short:
        reason += f"; max_cost paid for {last.first_lease_s:.0f} s of {last.instance}, which was not ready by then"
    if cut_short or not limits.affordable(state):
        return "budget", reason
    state.stranded = True
    return "failed", f"{reason}; run `rubberband resume {state.job.name}` once one is available"


def _end_unstarted(state: State) -> tuple[Outcome, str]:
    """No instance gets ready: the cause comes first, and a resume tries again."""
    reason = f"{limits.fails_to_start(state)}; {format_usd(bill.bill_usd(state, state.now))} spent"
    if not limits.affordable(state):
        return "budget", f"{reason}; max_cost leaves room for no other instance"
    state.stranded = True
    return "failed", f"{reason}; fix it, then rubberband resume {state.job.name}"


def without_a_trial(lane: LaneState, failed: Sequence[tuple[FailureKind, str]], *, whole: bool) -> str:
    """Return why no trial of a lane's stage goes on; `whole`: all of them `failed`, and none was stopped."""
    job = lane.job
    name, stopped = job.stage_name(lane.stage.stage), "" if whole else " or was stopped"
    reason = f"every trial of {name} was stopped before its first report"
    if failed:
        kind, message = failed[0]
        reason = f"every trial of {name} failed{stopped}; the first one {kind}: {message}"
    if limits.failed_blameless(lane.state):
        reason += f"; `rubberband resume {job.name}` tries again"
    return reason
