"""Limits of max_cost: until when all may be held, what may still be asked for, why a run must end. Pure."""

from __future__ import annotations

import math

from rubberband.executor.core import bill
from rubberband.executor.core.bill import RunSpending
from rubberband.executor.core.ends import idle_until, reaching
from rubberband.executor.core.events import FailureKind
from rubberband.executor.core.fleet import InstanceRecord, InstanceStatus
from rubberband.executor.core.job import Job
from rubberband.executor.core.state import LaneState, Phase, State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.units import MONEY_SLACK_USD, counted, format_usd

SHORTEST_HOLD_S = 0.01
"""An instance that can be paid for no longer than that, or not until it is ready, is not worth asking for."""
BLAMELESS_FAILURES: frozenset[FailureKind] = frozenset({"checkpoint", "died", "gpu", "hung"})
"""Failures that come of stores and machines as often as of a trial's code: the user may have them tried again."""
SMALLEST_WAIT_S = 1e-6
"""A stop that is so near is reached: sums of instants are no more exact than that."""


def can_go_on(state: State) -> bool:
    """Whether a resume goes on with an experiment that has ended: by the user, a cap, the fault of no trial, or a
    target that is harder now.
    """
    if state.outcome == "cancelled" or state.stranded or (state.outcome == "failed" and failed_blameless(state)):
        return True
    if state.ended_by is not None:  # trials that another rule of search.stop kept from their ends stay where they are
        return state.ended_by.rule == "target" and reaching(state, state.trials) is None
    if state.outcome == "done" and any(trial.status is TrialStatus.QUEUED for trial in state.trials):
        return True  # trials were added after its end
    exhausted_usd = state.exhausted_usd
    return exhausted_usd is not None and (state.job.max_cost_usd is None or state.job.max_cost_usd > exhausted_usd)


def failed_blameless(state: State) -> list[TrialState]:
    """The trials that a resume tries again where none of a stage is left: what failed them is not their own code."""
    over = [lane.stage for lane in state.lanes if lane.stages and lane.stage.ended_at is not None]
    contenders = [state.trials[trial] for stage in over if not stage.ranking for trial in stage.trials]
    failed = [trial for trial in contenders if trial.failure is not None and trial.stopped_at is None]
    return [trial for trial in failed if trial.failure is not None and trial.failure[0] in BLAMELESS_FAILURES]


def stop_at(state: State) -> float:
    """Return when everything must be given back for the bill to stay within max_cost; infinite without a cap."""
    if state.job.max_cost_usd is None:
        return math.inf
    return bill.spending(state).stops_at(state.now, state.job.release_margin_s)


def look_ahead(state: State) -> tuple[float, float | None]:
    """Return when all instances end themselves without a driver, and when a Tick is due if no other event comes before.

    The first is half of the release margin before max_cost is reached at the reserved prices: the driver's own stop
    comes first, and a machine takes a while to notice that its lease is over. It is infinite without a cap. A Tick is
    due for a hang, a retry, a longer lease, or the end of the budget.
    """
    job = state.job
    now, ends_at = state.now, math.inf
    spending = None if job.max_cost_usd is None else bill.spending(state)
    if spending is not None:
        ends_at = max(now, spending.reaches_about(now) - job.release_margin_s / 2.0)
    if state.course != "running":
        return ends_at, None
    earliest = math.inf
    for lane in state.lanes:
        if leaving := [record.left_until for record in lane.held.leaving if record.left_until > now]:
            earliest = min(earliest, *leaving)
        if (due_at := lane.runners.first_due_at()) < earliest:
            earliest = due_at
        if now < lane.relaunch_at < earliest and lane.phase is not Phase.FINISHED:
            earliest = lane.relaunch_at
    if (improves_by := idle_until(state)) is not None:
        earliest = min(earliest, max(now, improves_by))
    if spending is not None:
        earliest = min(earliest, spending.refresh_at(now), max(now, spending.stops_at(now, job.release_margin_s)))
    return ends_at, earliest if earliest < math.inf else None


def over_budget(state: State, ticked: bool) -> str | None:
    """Why the experiment must end for its cap; None if it need not.

    At the cap's very instant other events (the last SYNC of a plan that costs just the cap) go before the Tick; but
    where events come thick and fast, the cap does not wait for one.
    """
    job = state.job
    if job.max_cost_usd is None or state.now + SMALLEST_WAIT_S < stop_at(state):
        return None
    spent_usd = bill.spending(state).spent_usd(state.now)
    if spent_usd <= job.max_cost_usd + MONEY_SLACK_USD and not ticked:
        return None
    text = f"max_cost={format_usd(job.max_cost_usd)} is reached ({format_usd(spent_usd)} spent)"
    failed = [record for record in state.instances.values() if record.failed_start]
    if job.start_attempts is None or 2 * len(failed) <= len(state.instances):
        return text
    return f"{not_started(len(failed), len(state.instances), failed[-1].reason)}; {text}"


def leased_until(state: State, *, booting: bool = False) -> float | None:
    """How far the leases of instances that the driver has a worker on may reach, or of those that are `booting`.

    None: as far as the budget is concerned, they end with the driver.
    """
    job = state.job
    if job.lease_s is None or job.max_cost_usd is None:
        return None
    length_s = job.longest_lease_s if booting else job.lease_s
    reached_at = bill.spending(state).reaches(state.now) - job.release_margin_s / 2.0
    return max(state.now, min(state.now + length_s, reached_at))


def affordable(state: State, wanted: int = 1) -> int:
    """How many of `wanted` instances may be asked for: all that is held, and they, can be given back within max_cost.

    This holds for any price that they may have, and for any time at which they may begin to run. The lease of a
    released instance cannot be shortened, and counts until it is given back; none is asked for meanwhile whose own
    lease would be shorter for that.
    """
    job = state.job
    if job.max_cost_usd is None:
        return wanted
    count, reached_at = _affordable(state, bill.spending(state), wanted)
    if count and job.lease_s is not None and reached_at < state.now + job.longest_lease_s + job.release_margin_s:
        rest = _if_given_back(state)
        if rest is not None and reached_at < _affordable(state, rest, count)[1]:
            return 0
    return count


def awaits_release(lane: LaneState) -> bool:
    """Whether another instance could be asked for, were all given back that is released."""
    state = lane.state
    lacking = lane.missing
    if lacking == 0 or affordable(state, lacking):
        return False
    rest = _if_given_back(state)
    return rest is not None and _affordable(state, rest, 1)[0] > 0


def _if_given_back(state: State) -> RunSpending | None:
    """The spending if all were given back that is released; None if nothing is."""
    if not any(record.status is InstanceStatus.RELEASING for record in state.fleet.current()):
        return None
    return bill.spending_without_released(state)


def _affordable(state: State, spending: RunSpending, wanted: int) -> tuple[int, float]:
    """How many more the spending allows, and until when all may be held then."""
    job = state.job
    least_until = state.now + job.release_margin_s + max(SHORTEST_HOLD_S, job.offer.init_delay_s)
    another = bill.coming(job, 0.0)
    for count in range(wanted, 0, -1):
        reached_at = spending.with_more(another, count).reaches(state.now)
        if reached_at >= least_until:
            return count, reached_at
    return 0, math.inf


def cut_short(job: Job, record: InstanceRecord) -> bool:
    """Whether an instance ended before it was ready since max_cost paid for no longer."""
    if record.ready_at is not None or record.running_at is None or record.ended_at is None:
        return False
    if job.lease_s is None or record.first_lease_s is None or record.first_lease_s >= job.longest_lease_s:
        return False
    return record.ended_at >= record.running_at + record.first_lease_s


def not_started(failed: int, instances: int, reason: str) -> str:
    """Say how many instances never got ready, and why the last of them did not."""
    return f"{failed} of {counted(instances, 'instance')} failed to start: {reason}"


def fails_to_start(state: State) -> str:
    """Say why the latest instances never got ready, and how many did not."""
    failed = [record for record in state.instances.values() if record.failed_start]
    in_a_row, bought = state.fleet.failed_starts, len(state.instances)
    share = f"{len(failed)} of {bought}"
    count = f"{share} in a row" if in_a_row == bought else f"{in_a_row} in a row, {share} in all"
    return f"instances fail to start: {failed[-1].reason} ({count})"
