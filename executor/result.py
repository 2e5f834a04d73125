"""What came of an experiment: trials, the best configuration, planned against actual, and where the paid time went.

A view of the journal: it can be had at any moment, also while the experiment runs or after a crash. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rubberband.errors import InputError
from rubberband.executor.core import rules
from rubberband.executor.core.budget import (
    PaidTime,
    bill_lines,
    bill_usd,
    instance_cost_usd,
    paid_time,
    rent_usd_per_hour,
)
from rubberband.executor.core.events import CheckpointRef, RestPlanned
from rubberband.executor.core.state import (
    Allocation,
    Granted,
    InstanceRecord,
    Job,
    Pause,
    Phase,
    Setback,
    State,
    TrialReport,
)
from rubberband.executor.core.trials import best_trial
from rubberband.values.adaptive import BatchUse, GoodputProfile
from rubberband.values.offer import BillLine
from rubberband.values.plan import Market, Plan

# A trial's batch sizes over time and progress: what its reports told, laid out along the run. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStretch:
    """A stretch of a trial's training at one batch size; the symbols are those of `rubberband.values.adaptive`."""

    stage: int
    start_s: float
    """From the start of the run. Stretches of one iteration follow each other, up to its report."""
    end_s: float
    progress: float
    """Iterations done at its end; those of a stretch within one are in proportion to what its samples counted for."""
    instances: int
    gpus: int
    batch_size: int
    per_gpu: int
    accumulation: int
    steps: int
    noise_scale: float | None
    """phi at its end; None as long as there was no estimate."""
    efficiency: float
    """EFFICIENCY(M) at its end (Pollux, eq. 6)."""
    throughput: float | None
    """Samples per second (eq. 7); None if its steps took no time that could be measured."""
    goodput: float | None
    """Samples per second, counted by their efficiency (eq. 5)."""


def batch_history(reports: Sequence[TrialReport], started_at: float) -> tuple[BatchStretch, ...]:
    """The stretches of all `reports`, in order; empty where the batch is fixed. `started_at`: of the run."""
    stretches: list[BatchStretch] = []
    told_at = started_at
    for report in reports:
        if report.batches:
            stretches += _stretches(report, told_at, started_at)
        told_at = report.reported_at
    return tuple(stretches)


def _stretches(report: TrialReport, not_before: float, started_at: float) -> list[BatchStretch]:
    counted = [use.steps * use.batch_size * use.efficiency for use in report.batches]
    whole, so_far = sum(counted), 0.0
    later_s = sum(use.duration_s for use in report.batches)
    found = []
    for use, share in zip(report.batches, counted, strict=True):
        start_at = max(report.reported_at - later_s, not_before)
        later_s, so_far = later_s - use.duration_s, so_far + share
        end_at = max(report.reported_at - max(later_s, 0.0), start_at)
        progress = report.iterations - 1 + (so_far / whole if whole > 0.0 else 1.0)
        found.append(_stretch(use, report.stage, start_at - started_at, end_at - started_at, progress))
    return found


def _stretch(use: BatchUse, stage: int, start_s: float, end_s: float, progress: float) -> BatchStretch:
    throughput = use.throughput if use.step_s > 0.0 else None
    return BatchStretch(
        stage=stage,
        start_s=start_s,
        end_s=end_s,
        progress=progress,
        instances=use.instances,
        gpus=use.gpus,
        batch_size=use.batch_size,
        per_gpu=use.per_gpu,
        accumulation=use.accumulation,
        steps=use.steps,
        noise_scale=use.noise_scale,
        efficiency=use.efficiency,
        throughput=throughput,
        goodput=None if throughput is None else throughput * use.efficiency,
    )


SCHEMA = "rubberband.report/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One trial, with its learning curve."""

    trial: int
    status: str
    configuration: Mapping[str, Any]
    iterations: int
    metrics: Mapping[str, float]
    """Of its latest report; empty before the first."""
    failures: int
    failure: str | None
    """Why it failed (or was tried again), in one line."""
    checkpoint: CheckpointRef | None
    curve: tuple[tuple[float, int, Mapping[str, float]], ...]
    """(seconds from the start, iterations, metrics) of every report."""
    batches: tuple[BatchStretch, ...] = ()
    """Its batch sizes, in order; empty where the batch is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage, planned against actual. Actual values of a stage that is not over count up to now."""

    stage: int
    trials: int
    iterations: int
    gpus_per_trial: int
    """By the plan in force."""
    planned_instances: int
    """By the plan that the run began with, like all that is called planned."""
    instances: int
    """Most instances held at once."""
    planned_s: float
    """Provisioning included."""
    actual_s: float | None
    """None before it started."""
    planned_cost_usd: float
    actual_cost_usd: float | None
    promoted: tuple[int, ...]
    start_s: float | None = None
    """From the start of the run; None before it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionResult:
    """What was decided at a SYNC: to keep the plan for the rest, or to change it."""

    stage: int
    """The first stage that it is about."""
    at_s: float
    """From the start."""
    changed: bool
    reason: str
    plan: Plan
    """In force from then on."""
    present_jct_s: float
    """What was expected of the whole run by the plan that was in force."""
    present_cost_usd: float
    jct_s: float
    """What was expected of it by the plan that is in force now."""
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionResult:
    """More time or money that the user granted after the start; None is no limit."""

    at_s: float
    """From the start."""
    deadline_before_s: float | None
    deadline_s: float | None
    max_cost_before_usd: float | None
    max_cost_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetbackResult:
    """A trial that went back to an earlier checkpoint, or to its beginning, since its latest was lost."""

    at_s: float
    """From the start."""
    trial: int
    from_iterations: int
    to_iterations: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseResult:
    """The driver stood still, paused or with its machine asleep; `at_s` is when that began, from the start."""

    at_s: float
    paused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceResult:
    """One instance: instants in seconds from the start, and its share of the bill."""

    instance: str
    requested_s: float
    running_s: float | None
    ready_s: float | None
    ended_s: float | None
    cost_usd: float
    reason: str
    market: Market
    instance_type: str
    """What was bought."""
    zone: str
    """Empty where there are none."""
    price_usd_per_hour: float
    """The rent: on average over its hours, where each has its own price (spot)."""
    interrupted_s: float | None
    """When the provider gave notice that it takes it away; None without a notice."""
    preempted: bool
    """Whether the provider took it away."""
    failed_start: bool = False
    """Whether it never got ready, by a fault of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A GPU's stretch of time with one trial, in seconds from the start."""

    instance: str
    gpu: int
    trial: int
    stage: int
    start_s: float
    training_s: float | None
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The whole outcome; what `rubberband report` prints and `rubberband.tune` returns."""

    name: str
    outcome: Literal["done", "cancelled", "budget", "failed", "unfinished"]
    reason: str
    metric: str
    mode: Literal["max", "min"]
    best: TrialResult | None
    """The winner, or the best so far."""
    trials: tuple[TrialResult, ...]
    stages: tuple[StageResult, ...]
    decisions: tuple[DecisionResult, ...]
    """At each SYNC, in order; empty where nothing is planned again."""
    planned_jct_s: float
    actual_jct_s: float
    """From the start to the last SYNC; to now while it runs, to its end if it was cut short."""
    planned_cost_usd: float
    actual_cost_usd: float
    deadline_s: float | None
    """In force now, like max_cost: extensions included."""
    max_cost_usd: float | None
    paid: PaidTime
    instances: tuple[InstanceResult, ...]
    busy: tuple[Busy, ...]
    resumes: int
    profiling_s: float
    """Spent on measuring a profile before the start; it counts against the deadline."""
    profiling_cost_usd: float
    """Likewise, and against max_cost; not part of `actual_cost_usd`."""
    interruptions: int = 0
    """Instances that the provider took away, or said that it would."""
    redone_iterations: int = 0
    """Iterations that interruptions cut off and that were begun again: at most one for a trial each time."""
    head_cost_usd: float = 0.0
    """Of `actual_cost_usd`: the head's machine."""
    side_usd_per_hour: float = 0.0
    """What an instance costs in an hour beside its rent."""
    bill: tuple[BillLine, ...] = ()
    """The lines that add up to `actual_cost_usd`."""
    goodput: GoodputProfile | None = None
    """What adaptive training was planned with, as of the latest replan; None where no model was measured."""
    extensions: tuple[ExtensionResult, ...] = ()
    """In order."""
    resumed_s: tuple[float, ...] = ()
    """When drivers went on with it, from the start."""
    setbacks: tuple[SetbackResult, ...] = ()
    """In order."""
    pauses: tuple[PauseResult, ...] = ()
    """In order."""
    instead_of_spot: str = ""
    """How many instances were bought on demand instead of spot, and why; empty where none was."""
    resumable: bool = False
    """Whether a resume goes on with it; of what is not finished, should its driver be gone."""
    unsaved_trials: int = 0
    """Trials whose function never passed a checkpoint, and which are trained from zero after every stage."""

    @property
    def late(self) -> bool:
        """Whether it ended (or already is) past its deadline."""
        return self.deadline_s is not None and self.actual_jct_s > self.deadline_s

    @property
    def start_failures(self) -> str:
        """How many instances never got ready, and why the last of them did not; empty if all did."""
        failed = [instance for instance in self.instances if instance.failed_start]
        return rules.not_started(len(failed), len(self.instances), failed[-1].reason) if failed else ""

    @property
    def best_config(self) -> Mapping[str, Any] | None:
        """The best trial's configuration."""
        return self.best.configuration if self.best else None

    @property
    def exit_code(self) -> int:
        """The command line's: 0 done, 1 failed (or over budget), 4 after its deadline, 130 cancelled."""
        if self.outcome == "cancelled":
            return 130
        if self.outcome != "done":
            return 1
        return 4 if self.late else 0

    def to_json(self) -> dict[str, Any]:
        """The object that `rubberband report NAME -o json` prints."""
        plain: dict[str, Any] = _plain(self)
        shares = {"total_gpu_s": self.paid.total_gpu_s, "training_share": self.paid.training_share}
        return {"schema": SCHEMA, **plain, "late": self.late, "paid": plain["paid"] | shares}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Result:
        """The result that `to_json` made this of; what a newer version tells beside is left out.

        Raises InputError if it is none.
        """
        known = {field.name: plain[field.name] for field in fields(cls) if field.name in plain}
        paid = plain.get("paid")
        if isinstance(paid, Mapping):
            known["paid"] = {field.name: paid[field.name] for field in fields(PaidTime) if field.name in paid}
        try:
            return TypeAdapter(cls).validate_python(known)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(f"no report of schema {SCHEMA}: {where}: {first['msg']}; use the same version") from None


_ATOMS = frozenset({float, int, str, bool, type(None)})


def _plain(value: Any) -> Any:
    """What `dataclasses.asdict` makes of it, which would copy every number."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def summarise(job: Job, state: State, setup: Mapping[str, Any], now: float) -> Result:
    """The result as of `now`, on the clock of the events."""
    at = state.ended_at if state.ended_at is not None else max(now, state.now)
    if state.phase is Phase.NEW:
        at = state.started_at
    trials = tuple(_trial(state, trial, setup["configurations"][trial]) for trial in range(len(state.trials)))
    best = best_trial(state, job.metric, job.mode)
    head_s = max(0.0, at - state.started_at - state.paused_s)
    return Result(
        name=job.name,
        outcome=state.outcome if state.outcome and state.phase is Phase.FINISHED else "unfinished",
        reason=state.reason or state.stopped,
        metric=job.metric,
        mode=job.mode,
        best=None if best is None else trials[best.trial],
        trials=trials,
        stages=tuple(_stage(job, state, stage, at) for stage in range(len(job.stages))),
        decisions=tuple(_decision(state, decision) for decision in state.decisions),
        planned_jct_s=job.prediction.jct_s,
        actual_jct_s=_jct_s(state, at),
        planned_cost_usd=job.prediction.cost_usd,
        actual_cost_usd=bill_usd(job, state, at),
        deadline_s=job.deadline_s,
        max_cost_usd=job.max_cost_usd,
        paid=paid_time(job, state, at),
        instances=tuple(_instances(job, state, at)),
        busy=tuple(_busy(state, at)),
        resumes=len(state.resumed_at),
        profiling_s=setup.get("profiling_s", 0.0),
        profiling_cost_usd=setup.get("profiling_cost_usd", 0.0),
        interruptions=sum(was_interrupted(record) for record in state.instances.values()),
        redone_iterations=sum(_was_cut_off(state, use) for use in state.allocations),
        head_cost_usd=job.offer.head_cost_usd(head_s),
        side_usd_per_hour=job.offer.side_usd_per_hour,
        bill=bill_lines(job, state, at),
        goodput=state.profile.goodput,
        extensions=tuple(_extension(state, granted) for granted in state.granted),
        resumed_s=tuple(max(0.0, at - state.started_at) for at in state.resumed_at),
        setbacks=tuple(_setback(state, setback) for setback in state.setbacks),
        pauses=tuple(_pause(state, pause) for pause in state.pauses),
        instead_of_spot=_instead_of_spot(state),
        resumable=state.phase is not Phase.FINISHED or rules.can_go_on(job, state),
        unsaved_trials=sum(trial.reports[-1].saved_iterations == 0 for trial in state.trials if trial.reports),
    )


def _instead_of_spot(state: State) -> str:
    """`2 instances on demand instead of spot: …`, of those that ran."""
    count = sum(r.instead_of_spot and r.running_at is not None for r in state.instances.values())
    return f"{count} instance{'s' * (count != 1)} on demand instead of spot: {state.spot_dry_reason}" if count else ""


def was_interrupted(record: InstanceRecord) -> bool:
    """Whether the provider took the instance away, or said that it would."""
    return record.preempted or record.interrupted_at is not None


def _was_cut_off(state: State, use: Allocation) -> bool:
    """Whether an interruption ended the gang's stretch amid an iteration."""
    if not use.preempted or use.training_at is None or use.ended_at is None:
        return False
    return all(report.reported_at != use.ended_at for report in reversed(state.trials[use.trial].reports))


def _jct_s(state: State, at: float) -> float:
    last_sync = state.stages[-1].ended_at if state.outcome == "done" else None
    return (at if last_sync is None else last_sync) - state.started_at


def _trial(state: State, trial: int, config: Mapping[str, Any]) -> TrialResult:
    record = state.trials[trial]
    return TrialResult(
        trial=trial,
        status=record.status.value,
        configuration=config,
        iterations=record.iterations,
        metrics=record.reports[-1].metrics if record.reports else {},
        failures=record.failures,
        failure=None if record.failure is None else f"{record.failure[0]}: {record.failure[1]}",
        checkpoint=record.checkpoint,
        curve=tuple((r.reported_at - state.started_at, r.iterations, r.metrics) for r in record.reports),
        batches=batch_history(record.reports, state.started_at),
    )


def _decision(state: State, decision: RestPlanned) -> DecisionResult:
    return DecisionResult(
        stage=decision.stage,
        at_s=decision.occurred_at - state.started_at,
        changed=decision.changed,
        reason=decision.reason,
        plan=decision.plan,
        present_jct_s=decision.present_jct_s,
        present_cost_usd=decision.present_cost_usd,
        jct_s=decision.jct_s,
        cost_usd=decision.cost_usd,
    )


def _extension(state: State, granted: Granted) -> ExtensionResult:
    return ExtensionResult(
        at_s=max(0.0, granted.at - state.started_at),
        deadline_before_s=granted.deadline_before_s,
        deadline_s=granted.deadline_s,
        max_cost_before_usd=granted.max_cost_before_usd,
        max_cost_usd=granted.max_cost_usd,
    )


def _pause(state: State, pause: Pause) -> PauseResult:
    return PauseResult(at_s=max(0.0, pause.at - pause.paused_s - state.started_at), paused_s=pause.paused_s)


def _setback(state: State, setback: Setback) -> SetbackResult:
    return SetbackResult(
        at_s=max(0.0, setback.at - state.started_at),
        trial=setback.trial,
        from_iterations=setback.from_iterations,
        to_iterations=setback.to_iterations,
        reason=setback.reason,
    )


def _stage(job: Job, state: State, index: int, at: float) -> StageResult:
    predicted, stage = job.prediction.stages[index], job.stages[index]
    record = state.stages[index] if index < len(state.stages) else None
    actual_s = actual_cost_usd = None
    promoted: tuple[int, ...] = ()
    if record is not None:
        # What is billed after the last SYNC, while instances are given back, is the last begun stage's.
        last = index + 1 == len(state.stages)
        actual_s = (at if record.ended_at is None else record.ended_at) - record.started_at
        until = at if last or record.ended_at is None else record.ended_at
        # The first stage's cost starts from nothing: an instance may be billed from the very instant of the start.
        before_usd = bill_usd(job, state, record.started_at) if index else 0.0
        actual_cost_usd = bill_usd(job, state, until) - before_usd
        promoted = tuple(sorted(rules.promoted(job, record))) if index + 1 < len(job.stages) else record.ranking
    return StageResult(
        stage=index,
        trials=stage.trials,
        iterations=stage.iterations,
        gpus_per_trial=state.plan.stages[index].gpus_per_trial,
        planned_instances=job.plan.stages[index].instances,
        instances=record.widest if record else 0,
        planned_s=predicted.provisioning_s + predicted.duration_s,
        actual_s=actual_s,
        planned_cost_usd=predicted.cost_usd,
        actual_cost_usd=actual_cost_usd,
        promoted=promoted,
        start_s=None if record is None else record.started_at - state.started_at,
    )


def _instances(job: Job, state: State, at: float) -> list[InstanceResult]:
    def since_start(instant: float | None) -> float | None:
        return None if instant is None else instant - state.started_at

    return [
        InstanceResult(
            instance=record.instance,
            requested_s=record.requested_at - state.started_at,
            running_s=since_start(record.running_at),
            ready_s=since_start(record.ready_at),
            ended_s=since_start(record.ended_at),
            cost_usd=instance_cost_usd(job, record, at),
            reason=record.reason,
            market=record.market,
            instance_type=record.instance_type or job.offer.instance_type,
            zone=record.zone,
            price_usd_per_hour=rent_usd_per_hour(job, record, at),
            interrupted_s=since_start(record.interrupted_at),
            preempted=record.preempted,
            failed_start=record.failed_start,
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
