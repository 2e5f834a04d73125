"""The rules that the controller keeps: when a trial hangs, how wide its gang is, what may still be launched. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rubberband.executor import accounting
from rubberband.executor.events import Gang
from rubberband.executor.placement import place
from rubberband.executor.state import InstanceStatus, Job, Phase, StageRecord, State, TrialState
from rubberband.offer import gang_sizes, slots
from rubberband.plan import total_iterations
from rubberband.units import format_usd

SHORTEST_HANG_S = 60.0
"""A trial that trains is never taken to hang before this long without a report, unless the user set a timeout."""
SHORTEST_START_S = 300.0
"""Nor one that has not made its first step, whatever the user set: its worker may have to be started, and its data be
fetched, for the first time."""


def hang_limit_s(job: Job, state: State, trial: TrialState) -> float:
    """Seconds without a report after which a running trial is taken to hang."""
    if state.allocation(trial).training_at is None:
        return max(SHORTEST_START_S, 10.0 * state.profile.trial_startup_s, job.iteration_timeout_s or 0.0)
    if job.iteration_timeout_s is not None:
        return job.iteration_timeout_s
    return max(SHORTEST_HANG_S, 10.0 * state.profile.iteration_s(len(trial.gang)))


def stop_at(job: Job, state: State) -> float:
    """When everything must be given back for the bill to stay within max_cost."""
    return accounting.budget_ends_at(job, state) - job.release_margin_s


def wake_at(job: Job, state: State) -> float | None:
    """When a Tick is due, if no other event comes before: a hang, a retry, or the end of the budget."""
    if state.phase in (Phase.NEW, Phase.FINISHED, Phase.ENDING):
        return None
    instants = [trial.progress_at + hang_limit_s(job, state, trial) for trial in state.running()]
    if state.relaunch_at > state.now:
        instants.append(state.relaunch_at)
    earliest = min([*instants, stop_at(job, state)])
    return earliest if math.isfinite(earliest) else None


def over_budget(job: Job, state: State, ticked: bool) -> str | None:
    """Why the experiment must end for its cap; None if it need not.

    At the cap's very instant other events (the last SYNC of a plan that costs just the cap) go before the Tick; but
    where events come thick and fast, the cap does not wait for one.
    """
    if job.max_cost_usd is None:
        return None
    spent_usd = accounting.bill_usd(job, state, state.now)
    if spent_usd <= job.max_cost_usd + 1e-9 and not (ticked and state.now >= stop_at(job, state)):
        return None
    return f"max_cost={format_usd(job.max_cost_usd)} is reached ({format_usd(spent_usd)} spent)"


def affordable(job: Job, state: State) -> bool:
    """Whether one more instance may be asked for: its minimum fits beside all that is committed."""
    if job.max_cost_usd is None:
        return True
    new_usd = job.offer.instance_cost_usd(0.0)
    requested = sum(record.status is InstanceStatus.REQUESTED for record in state.instances.values())
    committed_usd = accounting.bill_usd(job, state, state.now) + requested * new_usd
    return committed_usd + new_usd <= job.max_cost_usd + 1e-9


def gang_size(job: Job, state: State) -> int:
    """GPUs per trial: as planned, or the widest gang that fits what there is; 0 if none does.

    Never fewer than were profiled: a trial may not fit there.
    """
    planned = state.chosen().gpus_per_trial
    ready = len(state.ready())
    allowed = gang_sizes(job.offer.gpus, job.profile.smallest_gpus, planned)
    return max((size for size in allowed if slots(ready, job.offer.gpus, size) > 0), default=0)


def target_iterations(job: Job, state: State) -> int:
    """Iterations in all that a trial has done at the current stage's end."""
    return total_iterations(job.stages[: state.stages[-1].stage + 1])


def missing(state: State) -> int:
    """Instances that the current stage still lacks."""
    return max(0, state.chosen().instances - len(state.live()))


def awaited(state: State) -> bool:
    """Whether an instance of this stage may still come before its trials start."""
    waiting = any(record.status is not InstanceStatus.READY for record in state.live())
    asked_again = missing(state) > 0 and state.launches_left > 0 and state.relaunch_at > state.now
    return waiting or asked_again


def starts(job: Job, state: State, size: int) -> Mapping[int, Gang]:
    """Trial -> its gang, for the queued trials (in order) for which slots of `size` GPUs are free."""
    running = {trial.trial: trial.gang for trial in state.running()}
    gpus = {record.instance: job.offer.gpus for record in state.ready()}
    free_gpus = sum(gpus.values()) - sum(len(gang) for gang in running.values())
    waiting = state.queued()[: free_gpus // size]
    if not waiting:
        return {}
    allocation = {trial: len(gang) for trial, gang in running.items()} | {t.trial: size for t in waiting}
    placed = place(allocation, running | {t.trial: t.gang for t in waiting}, gpus, locked=running)
    return {trial.trial: placed[trial.trial] for trial in waiting if trial.trial in placed}


def promoted(job: Job, stage: StageRecord) -> tuple[int, ...]:
    """The trials that go on after a stage whose SYNC is over, best first; all of its ranking after the last stage."""
    following = job.stages[stage.stage + 1 : stage.stage + 2]
    return stage.ranking[: following[0].trials] if following else stage.ranking
