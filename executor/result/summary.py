"""The summary of an experiment: its result, from what the controller knows of it at any moment. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rubberband.executor.core.bill import (
    bill_lines,
    bill_usd,
    instance_cost_usd,
    lane_bill_usd,
    paid_time,
    rent_usd_per_hour,
)
from rubberband.executor.core.forecast import expected_iterations
from rubberband.executor.core.history import (
    DecisionResult,
    Fork,
    GivenBack,
    LimitsExtended,
    Pause,
    Promotion,
    Regrouped,
    Replacement,
    RungResult,
    Setback,
    TrialCut,
    TrialsJoined,
)
from rubberband.executor.core.limits import can_go_on
from rubberband.executor.core.ranking import best_trained, standing
from rubberband.executor.core.state import GangRun, LaneState, Phase, StageRecord, State
from rubberband.executor.core.trial_state import TrialState, TrialStatus
from rubberband.executor.result.batch_history import balance_history, batch_history, copied, use_history
from rubberband.executor.result.parts import (
    ArtifactResult,
    Busy,
    InstanceResult,
    KeptCheckpoint,
    ScheduleStep,
    StageResult,
    TrialResult,
)
from rubberband.executor.result.result import Objective, Result, best_iteration
from rubberband.executor.sampling import Seeds, configurations, first_configurations
from rubberband.units import counted
from rubberband.values.worth import RestWorth


def summarise(state: State, setup: Mapping[str, Any], now: float) -> Result:
    """Return the result as of `now`, on the clock of the events."""
    job = state.job
    as_of = state.ended_at if state.ended_at is not None else max(now, state.now)
    if state.phase is Phase.NEW:
        as_of = state.started_at
    trials, best = _trials(state, setup), best_trained(state)
    head_s = max(0.0, as_of - state.started_at - state.paused_s)
    return Result(
        name=job.name,
        outcome=state.outcome if state.outcome and state.phase is Phase.FINISHED else "unfinished",
        reason=state.reason or state.stopped,
        metric=job.metric,
        mode=job.mode,
        best=None if best is None else trials[best.trial],
        trials=trials,
        stages=stage_results(state, as_of),
        decisions=tuple(copied(DecisionResult, d, at_s=d.occurred_at - state.started_at) for d in state.decisions),
        planned_jct_s=job.prediction.jct_s,
        actual_jct_s=jct_s(state, as_of),
        planned_cost_usd=job.prediction.cost_usd,
        planned_head_usd=job.prediction.cost_usd - math.fsum(stage.cost_usd for stage in job.prediction.stages),
        actual_cost_usd=bill_usd(state, as_of),
        deadline_s=job.deadline_s,
        deadline=job.deadline,
        max_cost_usd=job.max_cost_usd,
        paid=paid_time(state, as_of),
        instances=tuple(_instances(state, as_of)),
        busy=tuple(_busy(state, as_of)),
        resumes=len(state.resumed_at),
        profiling_s=setup.get("profiling_s", 0.0),
        profiling_cost_usd=setup.get("profiling_cost_usd", 0.0),
        waited_s=setup.get("waited_s", {}),
        interruptions=sum(record.was_interrupted for record in state.instances.values()),
        redone_iterations=sum(_was_cut_off(state, use) for use in state.allocations),
        head_cost_usd=job.offer.head_cost_usd(head_s),
        side_usd_per_hour=job.offer.side_usd_per_hour,
        bill=bill_lines(state, as_of),
        goodput=state.profile.goodput,
        extensions=tuple(state.history.of(LimitsExtended)),
        resumed_s=tuple(map(state.elapsed_s, state.resumed_at)),
        setbacks=tuple(state.history.of(Setback)),
        pauses=tuple(state.history.of(Pause)),
        replacements=tuple(state.history.of(Replacement)),
        forks=tuple(state.history.of(Fork)),
        given_back=tuple(state.history.of(GivenBack)),
        regrouped=tuple(state.history.of(Regrouped)),
        added=tuple(state.history.of(TrialsJoined)),
        instead_of_spot=_instead_of_spot(state),
        resumable=state.phase is not Phase.FINISHED or can_go_on(state),
        unsaved_trials=sum(map(_is_unsaved, state.trials)) if job.max_iterations > 1 else 0,
        provider=setup.get("provider", ""),
        unit=job.offer.unit,
        rungs=tuple(_rungs(state)),
        repeats=job.repeats,
        also=tuple(Objective(**entry) for entry in setup.get("experiment", {}).get("search", {}).get("also", ())),
        ended_by=state.ended_by,
        cuts=tuple(state.history.of(TrialCut)),
        worths=tuple(state.history.of(RestWorth)),
        rehearsal=not job.trains,
        fetched=(setup.get("experiment", {}).get("resources", {}).get("fetch") or {}).get("commits", {}),
    )


def _is_unsaved(trial: TrialState) -> bool:
    """Whether its function has never passed a checkpoint, and is to train on."""
    if not trial.reports or trial.ended:
        return False
    return trial.checkpoint is not None and trial.reports[-1].saved_iterations == 0


def _instead_of_spot(state: State) -> str:
    """Return `2 instances on demand instead of spot: …`, counting those that ran."""
    count = sum(r.instead_of_spot and r.running_at is not None for r in state.instances.values())
    return f"{counted(count, 'instance')} on demand instead of spot: {state.fleet.spot_dry_reason}" if count else ""


def _was_cut_off(state: State, use: GangRun) -> bool:
    """Whether an interruption ended the gang's stretch within an iteration."""
    if not use.preempted or use.training_at is None or use.ended_at is None:
        return False
    return all(report.reported_at != use.ended_at for report in reversed(state.trials[use.trial].made))


def jct_s(state: State, at: float) -> float:
    """Return the seconds from the start to the last SYNC of a finished run, or its end by a rule, otherwise to `at`."""
    if state.ended_by is not None:
        return state.ended_by.at_s
    ends = [stage.ended_at for stage in state.stages if stage.ended_at is not None]
    return (max(ends) if state.outcome == "done" else at) - state.started_at


def _trials(state: State, setup: Mapping[str, Any]) -> tuple[TrialResult, ...]:
    known, seeds = configurations(state, setup), Seeds(setup.get("seeds", ()), setup.get("experiment", {}))
    rules = {cut.trial: cut.rule for cut in state.history.of(TrialCut)}
    trials = tuple(
        replace(_trial(state, trial, known.get(trial, {}), seeds[trial]), ended_by=rules.get(trial, ""))
        for trial in range(len(state.trials))
    )
    if not state.forked_configs:
        return trials
    began = first_configurations(state, setup)
    return tuple(replace(each, schedule=_schedule(state.trials[each.trial], began)) for each in trials)


def _trial(state: State, trial: int, config: Mapping[str, Any], seed: int) -> TrialResult:
    record = state.trials[trial]
    return TrialResult(
        trial=trial,
        status=record.status.value,
        configuration=config,
        iterations=record.iterations,
        metrics=record.metrics,
        failures=record.failures,
        failure=None if record.failure is None else f"{record.failure[0]}: {record.failure[1]}",
        checkpoint=record.checkpoint,
        curve=tuple((r.reported_at - state.started_at, r.iterations, r.metrics) for r in record.made),
        bracket=next((b.bracket for b in state.job.brackets if trial in state.job.trials_of(b)), None),
        batches=batch_history(record.made, state.started_at),
        balance=balance_history(record.made, (u for u in state.allocations if u.trial == trial), state.started_at),
        updates=tuple(report.updates for report in record.made if report.updates is not None),
        use=use_history(record.made, state.started_at),
        seed=seed,
        ended=record.ended,
        stopped_s=None if record.stopped_at is None else record.stopped_at - state.started_at,
        standing=standing(state, record) if state.job.limits or state.job.repeats > 1 else None,
        checkpoints=tuple(_saved(state, record)),
        artifacts=tuple(
            copied(ArtifactResult, record.artifacts[name], saved_s=record.artifacts[name].saved_at - state.started_at)
            for name in sorted(record.artifacts)
        ),
    )


def _schedule(trial: TrialState, began: Mapping[int, Mapping[str, Any]]) -> tuple[ScheduleStep, ...]:
    return tuple(
        ScheduleStep(
            after=span.after,
            trial=span.trial,
            configuration=began.get(span.trial, {}) if span.configuration is None else span.configuration,
        )
        for span in trial.configured
    )


def _saved(state: State, trial: TrialState) -> Iterator[KeptCheckpoint]:
    own = ((report.iterations, report.metrics) for report in trial.reports[trial.inherited :])
    best = best_iteration(state.job.ranking, own)
    for checkpoint, iterations in trial.kept():
        saved_s = trial.reports[iterations - 1].reported_at - state.started_at
        is_best = iterations == best
        yield KeptCheckpoint(checkpoint=checkpoint, iterations=iterations, saved_s=saved_s, best=is_best)


def stage_results(state: State, at: float) -> tuple[StageResult, ...]:
    """Return the stages, planned against actual; those that are not over as of `at`, on the clock of the events."""
    return tuple(_stage(state, stage, at) for stage in range(len(state.job.stages)))


def _stage(state: State, index: int, at: float) -> StageResult:
    job = state.job
    predicted, stage, bracket = job.prediction.stages[index], job.stages[index], job.bracket_of(index)
    planned_instances = job.plan.stages[index].instances
    if added := predicted.duration_s == 0.0:  # planned then
        predicted, planned_instances = state.predicted[index], state.plan.stages[index].instances
    record, lane = state.record_of(index), state.lanes[bracket.lane]
    actual_s = actual_cost_usd = None
    promoted: tuple[int, ...] = ()
    if record is not None:
        # Costs after the last SYNC, while instances are released, belong to the last begun stage of the lane.
        last = record is lane.stage
        actual_s = (at if record.ended_at is None else record.ended_at) - record.started_at
        until = at if last or record.ended_at is None else record.ended_at
        # The first stage's cost starts from nothing: an instance may be billed from the very instant of the start.
        # What was held between two stages, as while no driver ran, belongs to the later one.
        earlier = lane.stages[next(at for at, one in enumerate(lane.stages) if one is record) - 1]
        before_usd = _bill_usd(lane, earlier.ended_at or record.started_at) if record is not lane.stages[0] else 0.0
        actual_cost_usd = _bill_usd(lane, until) - before_usd
        promoted = job.promoted(record)
        promoted = tuple(sorted(promoted)) if index + 1 < bracket.end_stage else promoted
    return StageResult(
        stage=index,
        trials=stage.trials,
        iterations=stage.iterations,
        gpus_per_trial=state.plan.stages[index].gpus_per_trial,
        trials_per_gpu=job.offer.trials_per_gpu,
        place=job.offer.place,
        planned_instances=planned_instances,
        instances=record.widest if record else 0,
        planned_s=predicted.provisioning_s + predicted.duration_s,
        actual_s=actual_s,
        planned_cost_usd=predicted.cost_usd,
        actual_cost_usd=actual_cost_usd,
        promoted=promoted,
        start_s=None if record is None else record.started_at - state.started_at,
        bracket=bracket.bracket if job.is_divided else None,
        rung=index - bracket.first_stage,
        lane=bracket.lane,
        added=added,
        **_progress(state, index),
    )


def _progress(state: State, index: int) -> dict[str, int]:
    """Return the trials of a stage by what they do, and their iterations, done and expected."""
    job, stage, record = state.job, state.job.stages[index], state.record_of(index)
    trials = () if record is None else record.trials
    before = job.iterations_by(index) - stage.iterations
    expected = stage.iterations * (len(trials) or stage.trials) - _unneeded(state, trials, before, stage.iterations)
    return {
        **({} if record is None else _counts(state, record)),
        "iterations_done": sum(min(max(state.trials[t].iterations - before, 0), stage.iterations) for t in trials),
        "iterations_expected": expected if stage.has_sync else expected_iterations(state),
    }


def _unneeded(state: State, trials: Sequence[int], before: int, iterations: int) -> int:
    """Return the iterations of a stage that trials leave out which ended by themselves, or which the user stopped."""
    over = [trial for trial in map(state.trials.__getitem__, trials) if trial.ended or trial.stopped_at is not None]
    return sum(max(0, before + iterations - max(before, trial.iterations)) for trial in over)


def _counts(state: State, record: StageRecord) -> Counter[str]:
    """Count the stage's trials that run, wait, are done and have failed."""
    if record.ended_at is not None and not state.history.of(Promotion):
        unranked = {*record.trials} - {*record.ranking}  # one that is ranked failed later, if at all
        failed = sum(state.trials[trial].status is TrialStatus.FAILED for trial in unranked)
        return Counter(done=len(record.trials) - failed, failed=failed)
    names = {TrialStatus.RUNNING: "running", TrialStatus.QUEUED: "queued", TrialStatus.FAILED: "failed"}
    return Counter(names.get(state.trials[trial].status, "done") for trial in record.trials)


def _rungs(state: State) -> list[RungResult]:
    if state.job.has_sync:
        return []
    begun = [trial for trial in state.trials if trial.attempt > 0]
    return [
        RungResult(
            rung=rung,
            iterations=total,
            trials=sum(trial.rung >= rung for trial in begun),
            ended=sum(t.rung > rung or t.iterations >= total or (t.ended and t.rung == rung) for t in begun),
            promoted=sum(trial.rung > rung for trial in begun),
        )
        for rung, total in enumerate(state.job.rung_ends(0))
    ]


def _bill_usd(lane: LaneState, at: float) -> float:
    """Return the bill at `at`: of the whole job or, if it has several brackets, of a lane, without the head node."""
    return lane_bill_usd(lane, at) if lane.job.is_divided else bill_usd(lane.state, at)


def _instances(state: State, at: float) -> list[InstanceResult]:
    job = state.job

    def since_start(instant: float | None) -> float | None:
        return None if instant is None else instant - state.started_at

    return [
        copied(
            InstanceResult,
            record,
            requested_s=record.requested_at - state.started_at,
            running_s=since_start(record.running_at),
            ready_s=since_start(record.ready_at),
            ended_s=since_start(record.ended_at),
            cost_usd=instance_cost_usd(job, record, at),
            instance_type=record.instance_type or job.offer.instance_type,
            price_usd_per_hour=rent_usd_per_hour(job, record, at),
            interrupted_s=since_start(record.interrupted_at),
        )
        for record in state.instances.values()
    ]


def _busy(state: State, at: float) -> list[Busy]:
    start = state.started_at
    return [
        Busy(
            instance=slot.instance,
            gpu=slot.gpu,
            trial=use.trial,
            stage=use.stage,
            start_s=use.started_at - start,
            training_s=None if use.training_at is None else use.training_at - start,
            end_s=(at if use.ended_at is None else use.ended_at) - start,
        )
        for use in state.allocations
        for slot in use.gang
    ]
