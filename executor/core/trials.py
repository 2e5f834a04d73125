"""The attempts of a trial: started, reporting, moved, failed, stopped. Writes the state, returns orders."""

from __future__ import annotations

from collections.abc import Mapping

from rubberband.executor.core.ends import ends_trial, note_result
from rubberband.executor.core.events import Command, FailureKind, Gang, StartTrial, StopTrial, TrialArtifact
from rubberband.executor.core.events import TrialReported as Reported
from rubberband.executor.core.fleet import InstanceStatus
from rubberband.executor.core.forking import discard, rewind
from rubberband.executor.core.history import InstanceCapChanged, Setback
from rubberband.executor.core.idle_gpus import regrouped
from rubberband.executor.core.job import Job
from rubberband.executor.core.placement import place
from rubberband.executor.core.ranking import merit, repeats_of
from rubberband.executor.core.state import GangRun, LaneState, State
from rubberband.executor.core.trial_state import UNDER_WAY, Artifact, TrialReport, TrialState, TrialStatus
from rubberband.values.stopping import is_evaluated

SHORTEST_HANG_S = 60.0
"""A trial that trains is never taken to hang before this long without a report, unless the user set a timeout."""
SHORTEST_START_S = 300.0
"""Nor one that has not made its first step, whatever the user set: its worker may have to be started, and its data be
fetched, for the first time."""
MOST_GPU_FAILURES = 4
"""Failures of GPUs under a trial that are no failures of its own; after that they count, as they follow the trial."""
FINAL_FAILURES: frozenset[FailureKind] = frozenset({"not_a_number", "no_metric", "memory"})
"""Failures that another try would only repeat."""


def start(lane: LaneState, trial: TrialState, gang: Gang) -> StartTrial:
    """Order a queued trial to train on `gang`, until its lane's current stage ends."""
    state = lane.state
    trial.gang, trial.width = gang, 0
    state.put(trial, TrialStatus.RUNNING)
    trial.attempt += 1
    trial.allocation = len(state.allocations)
    state.allocations.append(
        GangRun(trial=trial.trial, attempt=trial.attempt, stage=trial.last_stage, gang=gang, started_at=state.now)
    )
    note_progress(lane, trial, state.now)
    _function_changed(state)
    return StartTrial(
        trial=trial.trial,
        attempt=trial.attempt,
        gang=gang,
        from_iterations=trial.iterations,
        until_iterations=lane.target_iterations(trial),
        checkpoint=trial.checkpoint,
    )


def note_progress(lane: LaneState, trial: TrialState, at: float) -> None:
    """The trial did something: it is not taken to hang for a while."""
    trial.progress_at = at
    lane.runners.note_due(trial, due_at(lane.state, trial))


def note_started(lane: LaneState, trial: TrialState, at: float) -> None:
    """The gang is up, and its first step begins."""
    lane.state.allocation(trial).training_at = at
    note_progress(lane, trial, at)


def note_repeated(lane: LaneState, trial: TrialState, at: float) -> None:
    """An iteration is done again that was reported before: that is progress, and nothing new."""
    use = lane.state.allocation(trial)
    if not trial.reports or use.training_at is None or trial.reports[-1].reported_at <= use.training_at:
        use.repeated_until = at
        use.repeated += 1
    note_progress(lane, trial, at)


def note_report(lane: LaneState, trial: TrialState, event: Reported) -> list[Command]:
    """One more iteration is done: pause at the end of stage or rung, and leave an instance that is taken away soon.

    The checkpoint before is kept, to go back to should the new one be lost.
    """
    state = lane.state
    at = event.occurred_at
    orders = _take_in(lane, trial, event)
    note_progress(lane, trial, at)
    is_over = event.ended or trial.iterations >= lane.target_iterations(trial)
    cut = ends_trial(lane, trial)  # asked of one that ends by itself too: others are compared with all of its results
    if not event.ended and cut is not None:
        state.history.add(cut)
        orders += [] if is_over else [StopTrial(trial=trial.trial, attempt=trial.attempt)]
        note_end(lane, trial)
    elif event.ended:
        note_end(lane, trial)
    elif is_over:
        free(state, trial)
        pause(lane, trial)
    elif event.checkpoint is not None and stops_at_checkpoint(lane, trial):
        orders.append(stop(state, trial, at=at))
    elif event.checkpoint is not None and (found := regrouped(lane, trial)) is not None:
        state.history.add(found)
        orders.append(stop(state, trial, at=at))
        trial.width, trial.gang = found.gpus, trial.gang if found.gpus > found.gpus_before else ()
    elif lane.held.leaving and moves(lane, trial):
        orders.append(stop(state, trial, at=at, preempted=True))
    return orders


def note_late(lane: LaneState, trial: TrialState, event: Reported) -> list[Command]:
    """A stopped attempt's report arrived after all: a resume goes on from there, and does not train it again."""
    state = lane.state
    if trial.status is not TrialStatus.QUEUED or event.iterations != trial.iterations + 1:
        return []
    if state.ended_by is not None and state.ended_by.trial == trial.trial:  # what reached the target is handed over
        return []
    orders = _take_in(lane, trial, event)
    cut = ends_trial(lane, trial)
    if cut is not None and not event.ended:
        state.history.add(cut)
    if event.ended or cut is not None or trial.iterations >= lane.target_iterations(trial):
        trial.ended = trial.ended or event.ended or cut is not None
        lane.has_ended = lane.has_ended or trial.ended
        pause(lane, trial)
    return orders


def _take_in(lane: LaneState, trial: TrialState, event: Reported) -> list[Command]:
    """Add a report to its trial."""
    replaced, best = None, trial.best
    trial.iterations = event.iterations
    if event.checkpoint is not None:
        replaced = trial.before
        trial.before, trial.before_iterations = trial.checkpoint, trial.checkpoint_iterations
        trial.checkpoint, trial.checkpoint_iterations = event.checkpoint, event.iterations
    trial.reports.append(
        TrialReport(
            reported_at=event.occurred_at,
            iterations=event.iterations,
            metrics=event.metrics,
            stage=lane.stages[-1].stage,
            batches=event.batches,
            updates=event.updates,
            saved_iterations=event.saved_iterations,
            balance=event.balance,
            use=event.use,
        )
    )
    note_result(lane.state, trial)
    if event.checkpoint is not None:
        _note_best(lane.job, trial)
    return discard(lane.state, trial, [replaced, best])


def _note_best(job: Job, trial: TrialState) -> None:
    """Keep the latest checkpoint, if its iteration is evaluated and the best one that is kept."""
    if not job.keep_best or trial.checkpoint is None:
        return
    report, best = trial.reports[trial.checkpoint_iterations - 1], None
    if trial.best is not None:
        best = job.ranking.merit(trial.reports[trial.best_iterations - 1].metrics)
    merit = job.ranking.merit(report.metrics)
    is_result = is_evaluated(report.iterations, report.metrics, job.metric) and not merit[0]
    if is_result and report.saved_iterations is None and (best is None or merit < best):
        trial.best, trial.best_iterations = trial.checkpoint, trial.checkpoint_iterations


def note_artifact(state: State, trial: TrialState, event: TrialArtifact) -> list[Command]:
    """A file of the trial is kept, instead of an earlier one of its name."""
    earlier = trial.artifacts.get(event.name)
    trial.artifacts[event.name] = Artifact(
        name=event.name, file=event.file, iterations=event.iterations, saved_at=event.occurred_at
    )
    return [] if earlier is None else discard(state, trial, [earlier.file])


def note_end(lane: LaneState, trial: TrialState) -> None:
    """The trial has ended by itself: its latest report counts, and it trains no more."""
    trial.ended = lane.has_ended = True
    free(lane.state, trial)
    pause(lane, trial)


def pause(lane: LaneState, trial: TrialState) -> None:
    """The trial has ended its rung, where its result counts at once; at the last one it is done, or waits for SYNC."""
    job = lane.job
    if trial.rung == 0 and trial.last_stage == job.bracket_of(trial.last_stage).first_stage:
        lane.state.best_so_far.note_end(trial.trial)
    is_done = not job.has_sync and lane.ends_last_rung(trial)
    lane.state.put(trial, TrialStatus.COMPLETED if is_done else TrialStatus.PAUSED)
    _record(lane, trial)


def _record(lane: LaneState, trial: TrialState) -> None:
    """The configuration's result counts on its rung once all repeats that are left have ended that."""
    left = [one for one in repeats_of(lane.state, trial) if one.status is not TrialStatus.FAILED]
    left = [one for one in left if one.stopped_at is None]
    if left and all(one.status is TrialStatus.PAUSED and one.rung == left[0].rung for one in left):
        lane.rungs.record(left[0].rung, merit(lane.job.ranking, left), trial.trial // lane.job.repeats)


def free(state: State, trial: TrialState, *, at: float | None = None, preempted: bool = False) -> None:
    """The trial's stretch on its gang is over."""
    use = state.allocation(trial)
    state.end(use, state.now if at is None else at)
    use.preempted = preempted
    _function_changed(state)


def stop(state: State, trial: TrialState, *, at: float | None = None, preempted: bool = False) -> StopTrial:
    """End the attempt at once; the trial waits for another, which goes on from its checkpoint."""
    free(state, trial, at=at, preempted=preempted)
    state.put(trial, TrialStatus.QUEUED)
    return StopTrial(trial=trial.trial, attempt=trial.attempt)


def withdraw(lane: LaneState, trial: TrialState) -> list[Command]:
    """The user stops a trial: it gives its gang back, and is neither started nor promoted again."""
    orders: list[Command] = [stop(lane.state, trial)] if trial.status is TrialStatus.RUNNING else []
    others = [one for one in repeats_of(lane.state, trial) if one is not trial and one.status in UNDER_WAY]
    if trial.status is TrialStatus.PAUSED and not others:
        lane.rungs.withdraw(trial.rung, trial.trial // lane.job.repeats)
    lane.state.put(trial, TrialStatus.STOPPED)
    trial.stopped_at, lane.has_ended = lane.state.now, True
    _record(lane, trial)
    return orders + let_go(lane.state, trial)


def note_failure(state: State, trial: TrialState, kind: FailureKind, message: str) -> None:
    """The attempt ended in a failure of the trial's own: try again, or give the trial up."""
    free(state, trial)
    state.failed.append(trial.trial)
    trial.failure = (kind, message)
    if kind == "gpu" and trial.gpu_failures < MOST_GPU_FAILURES:
        trial.gpu_failures += 1
        state.put(trial, TrialStatus.QUEUED)
        return
    trial.failures += 1
    final = kind in FINAL_FAILURES or trial.failures > state.job.max_failures
    state.put(trial, TrialStatus.FAILED if final else TrialStatus.QUEUED)
    if final:
        lane = state.lane_of_trial(trial)
        lane.has_ended = lane.has_ended or kind in FINAL_FAILURES  # others may be tried again by a resume
        _record(lane, trial)


def go_back(state: State, trial: TrialState, at: float, reason: str) -> None:
    """The trial's checkpoint is lost: another attempt goes on from the one before, or from the beginning.

    Where the one before is not kept, the best one is, unless that is the lost one.
    The iterations since then are trained again, so that none counts twice. The trial has not failed.
    """
    free(state, trial)
    if trial.best == trial.checkpoint:
        trial.best, trial.best_iterations = None, 0
    back, iterations = next(((one, at) for one, at in trial.kept() if one is not trial.checkpoint), (None, 0))
    state.history.add(
        Setback(
            at_s=state.elapsed_s(at),
            trial=trial.trial,
            from_iterations=trial.iterations,
            to_iterations=iterations,
            reason=reason,
        )
    )
    trial.iterations, trial.checkpoint, trial.before = iterations, back, None
    trial.checkpoint_iterations, trial.before_iterations = iterations, 0
    rewind(trial, iterations)
    _note_best(state.job, trial)
    if state.curves is not None:
        state.curves.renew(trial)
    state.put(trial, TrialStatus.QUEUED)


def let_go(state: State, trial: TrialState) -> list[Command]:
    """The trial is stopped: its latest checkpoint is enough."""
    replaced, trial.before = trial.before, None
    return discard(state, trial, [replaced])


def _function_changed(state: State) -> None:
    if state.job.offer.billing == "per_function":
        state.fleet.spending = None


# Where attempts start, and when they stop to go on elsewhere. Pure.


def starts(lane: LaneState) -> Mapping[int, Gang]:
    """Trial -> its gang, for the lane's queued trials (in order) for which slots are free.

    One that is to have a gang of its own width comes alone: ask again for the others.
    """
    if not lane.waiters or not lane.held.ready:
        return {}
    free = lane.free_slots
    if free.gpus == 0 or (size := lane.gang_size) == 0:
        return {}
    waiting = [trial for trial in lane.waiters.first(free.gpus // size) if lane.state.has_config(trial)]
    for trial in waiting:
        if trial.width and (gang := free.place(trial.width, [trial.gang])[0]) is not None:
            return {trial.trial: gang}
    placed = free.place(size, [trial.gang for trial in waiting])
    return {trial.trial: gang for trial, gang in zip(waiting, placed, strict=True) if gang is not None}


def moves(lane: LaneState, trial: TrialState) -> bool:
    """Whether a running trial is to leave an instance that is taken away soon, since there is room on those that stay.

    Where there is none, it may as well go on. A slow instance is not left for a narrower gang.
    """
    if lane.waiters or all(
        lane.state.instances[slot.instance].status is not InstanceStatus.LEAVING for slot in trial.gang
    ):
        return False
    gpus = {record.instance: lane.job.offer.slots for record in lane.held.ready}
    others = [other for other in lane.running() if other is not trial]
    held = {other.trial: tuple([slot for slot in other.gang if slot.instance in gpus]) for other in others}
    held = {other: gang for other, gang in held.items() if gang}
    size = lane.gang_size
    if size == 0 or sum(gpus.values()) - sum(map(len, held.values())) < size:
        return False
    left = [lane.state.instances[slot.instance] for slot in trial.gang]
    if size < len(trial.gang) and all(one.is_left_as_slow for one in left if one.status is InstanceStatus.LEAVING):
        return False
    allocation = {other: len(gang) for other, gang in held.items()} | {trial.trial: size}
    return trial.trial in place(allocation, held | {trial.trial: trial.gang}, gpus, locked=held)


def stops_at_checkpoint(lane: LaneState, trial: TrialState) -> bool:
    """Whether a running trial stops at a checkpoint: its instance is recalled, or it goes on with another gang."""
    if not lane.state.history.of(InstanceCapChanged):
        return False
    if any(lane.state.instances[slot.instance].recalled_at is not None for slot in trial.gang):
        return True
    return lane.resized == lane.stage.stage and _changes_width(lane, trial)


def _changes_width(lane: LaneState, trial: TrialState) -> bool:
    """Whether a trial takes a narrower gang, so that another trial can start too, or a wider one that is faster."""
    size, width = lane.gang_size, len(trial.gang)
    if size in (0, width) or (size > width and lane.waiters) or (size < width and not lane.waiters):
        return False
    profile, left = lane.state.profile, lane.target_iterations(trial) - trial.iterations
    saved_s = left * (profile.iteration_s(width) - profile.iteration_s(size))
    if size > width and saved_s <= profile.startup_s(size) + lane.state.repeats(trial) * profile.iteration_s(size):
        return False
    free = lane.free_slots
    return free.room_without(trial.gang, size) >= (1 if size > width else 2)


def due_at(state: State, trial: TrialState) -> float:
    """Return when a running trial is taken to hang, unless it reports before."""
    return trial.progress_at + hang_limit_s(state, trial)


def hang_limit_s(state: State, trial: TrialState) -> float:
    """Seconds without a report after which a running trial is taken to hang."""
    job = state.job
    if state.allocation(trial).training_at is None:
        return max(SHORTEST_START_S, 10.0 * state.profile.startup_s(len(trial.gang)), job.iteration_timeout_s or 0.0)
    if job.iteration_timeout_s is not None:
        return job.iteration_timeout_s
    return max(SHORTEST_HANG_S, 10.0 * state.profile.iteration_s(len(trial.gang)))
