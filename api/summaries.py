"""What is kept of an experiment's journal: its events as lines of the feed, where it stands, and its summary. Pure.

Instants are Unix time: those of a virtual run, whose clock starts at 0, are counted from when it was made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rubberband.api.store.records import Entry, Submission, Summary
from rubberband.executor import rules
from rubberband.executor.accounting import bill_usd
from rubberband.executor.codec import encode_event
from rubberband.executor.controller import Controller
from rubberband.executor.events import Event
from rubberband.executor.forecast import forecast
from rubberband.executor.hosting import Ending, Mark
from rubberband.executor.journal import Header
from rubberband.executor.ranking import best_trial
from rubberband.executor.state import Phase, State
from rubberband.states import ExperimentState


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen of an experiment's folder: first whether somebody is at work, then what is written."""

    at_work: bool
    """Whether a process of the service, or a driver that was started by hand, is at work."""
    mark: Mark | None
    ending: Ending | None
    outcome: ExperimentState | None
    """How its journal says that it ended; None while that is open."""
    reason: str
    """The journal's, of the outcome, or of what keeps it from going on."""
    has_begun: bool
    """Whether there is a journal."""
    stopped: str = ""
    """Why its latest driver gave up, by its journal; empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where an experiment stands, and why."""

    state: ExperimentState
    reason: str = ""


def standing(row: Submission, sight: Sight) -> Standing | None:
    """Where an experiment stands by what was seen; None if the process that it was given was never started."""
    if sight.at_work and sight.mark is not None and sight.mark.waits_for and sight.mark.attempt == row.attempt:
        return Standing(state=ExperimentState.STARTING, reason=sight.mark.waits_for)
    if row.state is ExperimentState.STARTING:
        return _starting(row, sight)
    if not sight.has_begun:
        return Standing(state=row.state, reason=row.reason)
    if sight.outcome is not None:
        return Standing(state=sight.outcome, reason=sight.reason)
    return Standing(state=ExperimentState.RUNNING, reason=sight.reason) if sight.at_work else _cut_off(row, sight)


def _starting(row: Submission, sight: Sight) -> Standing | None:
    if sight.at_work:
        # What was resumed has its old outcome in the journal until its driver goes on.
        settled = sight.outcome is not None and (row.attempt > 1 or not row.words)
        if not sight.has_begun or settled:
            return Standing(state=row.state, reason=row.reason)
        return Standing(state=sight.outcome or ExperimentState.RUNNING, reason=sight.reason)
    if sight.mark is None or sight.mark.attempt < row.attempt:
        return None
    if sight.outcome is not None:
        return Standing(state=sight.outcome, reason=_error(row, sight) or sight.reason)
    if sight.has_begun or _told(row, sight) is None:
        return _cut_off(row, sight)
    cancelled = _told(row, sight) == CANCELLED_EXIT_CODE
    return Standing(
        state=ExperimentState.CANCELLED if cancelled else ExperimentState.REFUSED, reason=_error(row, sight)
    )


CANCELLED_EXIT_CODE = 130


def _told(row: Submission, sight: Sight) -> int | None:
    """The exit code that the row's latest process left."""
    return None if sight.ending is None or sight.ending.attempt != row.attempt else sight.ending.exit_code


def _error(row: Submission, sight: Sight) -> str:
    return "" if sight.ending is None or sight.ending.attempt != row.attempt else sight.ending.error


def _cut_off(row: Submission, sight: Sight) -> Standing:
    told = (
        _error(row, sight)
        or sight.stopped
        or "its process is gone without a word: it was killed, or the machine was restarted"
    )
    return Standing(state=ExperimentState.INTERRUPTED, reason=f"{told}; resume it to go on")


def outcome_of(controller: Controller) -> tuple[ExperimentState | None, str]:
    """How an experiment ended and why, by its journal; None while that is open, and what keeps it from going on."""
    state = controller.state
    if state.phase is not Phase.FINISHED or state.outcome is None:
        return None, rules.fails_to_start(state) if state.failed_starts else ""
    return ExperimentState(state.outcome), state.reason


def offset_s(header: Header) -> float:
    """What makes an instant on the clock of an experiment's events one in Unix time."""
    return header.created_at if header.setup["provider"] == "virtual" else 0.0


def entries(header: Header, events: Sequence[tuple[int, Event]]) -> list[Entry]:
    """Events of a journal as lines of the feed."""
    return [_entry(header, seq, event) for seq, event in events]


def _entry(header: Header, seq: int, event: Event) -> Entry:
    kind, body = encode_event(event)
    data = json.loads(body)
    occurred_at = data.pop("occurred_at") + offset_s(header)
    return Entry(experiment=header.name, seq=seq, kind=kind, occurred_at=occurred_at, data=data)


def summary_of(header: Header, controller: Controller, now: float) -> Summary:
    """What a list shows of an experiment, as of `now` on the clock of its events."""
    job, state = controller.job, controller.state
    at = state.ended_at if state.ended_at is not None else max(now, state.now)
    begun = state.phase is not Phase.NEW
    expected = forecast(job, state, at) if begun else None
    best = best_trial(state, job.metric, job.mode)
    return Summary(
        trials=len(state.trials),
        stages=len(job.stages),
        stage=state.stages[-1].stage if state.stages else 0,
        iterations=sum(trial.iterations for trial in state.trials),
        target_iterations=sum(stage.trials * stage.iterations for stage in job.stages),
        instances=len(state.current()),
        started_at=state.started_at + offset_s(header) if begun else None,
        ended_at=None if state.ended_at is None else state.ended_at + offset_s(header),
        jct_s=_jct_s(state, at) if begun else 0.0,
        cost_usd=bill_usd(job, state, at) if begun else 0.0,
        planned_jct_s=job.prediction.jct_s,
        planned_cost_usd=job.prediction.cost_usd,
        forecast_jct_s=job.prediction.jct_s if expected is None else expected.jct_s,
        forecast_cost_usd=job.prediction.cost_usd if expected is None else expected.cost_usd,
        deadline_s=job.deadline_s,
        max_cost_usd=job.max_cost_usd,
        metric=job.metric,
        mode=job.mode,
        best_value=None if best is None else best.metric(job.metric),
        best_trial=None if best is None else best.trial,
    )


def _jct_s(state: State, at: float) -> float:
    last_sync = state.stages[-1].ended_at if state.outcome == "done" else None
    return (at if last_sync is None else last_sync) - state.started_at
