"""A run at a glance: a frozen picture of the state, taken at an event and read by another thread until the next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.forecast import Forecast, forecast
from rubberband.executor.core.state import Job, Phase, StageRecord, State, TrialStatus
from rubberband.executor.core.trials import best_trial
from rubberband.values.plan import total_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Where one stage stands."""

    stage: int
    standing: Literal["done", "current", "planned"]
    running: int
    queued: int
    done: int
    failed: int
    iterations_done: int
    iterations: int
    """Of all its trials."""
    instances: int
    """Held now; the most that were held, of a stage that is over."""
    planned_instances: int
    """By the plan in force, as is what follows."""
    gpus_per_trial: int
    started_s: float | None
    """From the start of the run."""
    ended_s: float | None
    planned_s: float
    before_usd: float
    """The bill when it began."""
    ended_usd: float | None
    """The bill at its SYNC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; what goes on by itself (time, the bill) is asked for an instant."""

    job: Job
    phase: Phase
    stages: tuple[StageProgress, ...]
    started_at: float
    ended_at: float | None
    best: tuple[int, float] | None
    """(trial, metric)"""
    batch_sizes: tuple[int, ...]
    """Of the running trials, as last reported; empty where the batch is fixed."""
    state: State
    """A copy of all that the bill and the forecast are reckoned from."""

    def elapsed_s(self, now: float) -> float:
        """From the start until `now`, or until the end."""
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.started_at)

    def spent_usd(self, now: float) -> float:
        """The bill at `now`."""
        return bill_usd(self.job, self.state, now if self.ended_at is None else self.ended_at)

    def expected(self, now: float) -> Forecast:
        """What is expected of the whole run, as of `now`."""
        return forecast(self.job, self.state, max(now, self.state.now))


def observe(job: Job, state: State) -> Progress:
    """A picture of `state`, which shares nothing that will change."""
    best = best_trial(state, job.metric, job.mode) if state.outcome != "done" or state.stages[-1].ranking else None
    value = None if best is None else best.metric(job.metric)
    return Progress(
        job=job,
        phase=state.phase,
        stages=tuple(_stage(job, state, stage) for stage in range(len(job.stages))),
        started_at=state.started_at,
        ended_at=state.ended_at,
        best=None if best is None or value is None else (best.trial, value),
        batch_sizes=tuple(
            trial.reports[-1].batches[-1].batch_size
            for trial in state.running()
            if trial.reports and trial.reports[-1].batches
        ),
        state=_copy(job, state),
    )


def _copy(job: Job, state: State) -> State:
    functions = job.offer.billing == "per_function"
    return replace(
        state,
        trials=[replace(trial, reports=[]) for trial in state.trials],
        instances={name: replace(record) for name, record in state.instances.items()},
        allocations=[replace(use) for use in state.allocations if functions or use.ended_at is None],
        stages=[replace(stage) for stage in state.stages],
        decisions=list(state.decisions),
    )


def _stage(job: Job, state: State, index: int) -> StageProgress:
    stage, chosen, predicted = job.stages[index], state.plan.stages[index], state.predicted[index]
    record = state.stages[index] if index < len(state.stages) else None
    trials = record.trials if record else ()
    before = total_iterations(job.stages[:index])
    over = record is not None and (record.ended_at is not None or state.phase is Phase.FINISHED)
    count = _trials(state, record) if record else Counter[str]()
    instances = 0
    if record is not None:
        instances = record.widest if over else len(state.live())
    started_at = record.started_at if record else None
    ended_at = None
    if record is not None and over:
        ended_at = record.ended_at if record.ended_at is not None else state.ended_at
    return StageProgress(
        stage=index,
        standing="planned" if record is None else "done" if over else "current",
        running=count["running"],
        queued=count["queued"] if record else stage.trials,
        done=count["done"],
        failed=count["failed"],
        iterations_done=sum(min(max(state.trials[t].iterations - before, 0), stage.iterations) for t in trials),
        iterations=stage.iterations * (len(trials) or stage.trials),
        instances=instances,
        planned_instances=chosen.instances,
        gpus_per_trial=chosen.gpus_per_trial,
        started_s=None if started_at is None else started_at - state.started_at,
        ended_s=None if ended_at is None else ended_at - state.started_at,
        planned_s=predicted.provisioning_s + predicted.duration_s,
        before_usd=bill_usd(job, state, started_at) if index and started_at is not None else 0.0,
        ended_usd=None if ended_at is None else bill_usd(job, state, ended_at),
    )


def _trials(state: State, record: StageRecord) -> Counter[str]:
    """How many of the stage's trials run, wait, are done and have failed."""
    if record.ended_at is not None:
        return Counter(done=len(record.ranking), failed=len(record.trials) - len(record.ranking))
    names = {TrialStatus.RUNNING: "running", TrialStatus.QUEUED: "queued", TrialStatus.FAILED: "failed"}
    return Counter(names.get(state.trials[trial].status, "done") for trial in record.trials)
