"""How one experiment stands, as its page says it: a sentence, cards, stages, and what happened when. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rubberband.executor.result import (
    DecisionResult,
    ExtensionResult,
    InstanceResult,
    PauseResult,
    Result,
    SetbackResult,
    StageResult,
)
from rubberband.states import ACTIVE, ExperimentState
from rubberband.values.submission import Submission, Summary
from rubberband.views.charts import stage_spans
from rubberband.views.tables import outcome, tells_start_failures
from rubberband.views.words import (
    counted,
    difference,
    duration,
    extended,
    listed,
    number,
    printable,
    stood_still,
    usd,
    usd_decimals,
    went_back,
)

_NOT_BEGUN = {
    ExperimentState.QUEUED: "It waits for a free slot.",
    ExperimentState.STARTING: "Its process is measuring a profile or planning.",
    ExperimentState.REFUSED: "It never started.",
    ExperimentState.CANCELLED: "It was cancelled before it started.",
    ExperimentState.INTERRUPTED: "Its process ended before it started.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Shares of a limit (or of the larger of plan and forecast), from 0 to 1."""

    done: float
    planned: float | None
    forecast: float | None
    over: bool
    """Whether the limit is passed."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A headline figure, with what it is to be held against."""

    title: str
    value: str
    notes: tuple[str, ...]
    gauge: Gauge | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A stage on one line; times and money are planned and actual."""

    stage: int
    standing: str
    """done, current, ended (before it was done) or planned"""
    trials: str
    promoted: str
    share: float
    """Of its iterations."""
    iterations: str
    instances: str
    gpus_per_trial: str
    planned_time: str
    time: str
    planned_cost: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that was decided, at an instant from the start."""

    at_s: float
    what: str
    told: str
    kind: str
    """sync, kept, changed, extended, resumed, setback or pause"""


def badge(submission: Submission, result: Result | None) -> tuple[str, str]:
    """The state as the badge has it: its class, and its words."""
    if submission.state is ExperimentState.DONE and result is not None and result.late:
        return "late", "done, late"
    return submission.state.value, submission.state.value


def sentence(submission: Submission, result: Result | None) -> str:
    """How it stands, in one sentence (or what is known of it)."""
    reason = printable(submission.reason)
    if result is None or submission.summary.started_at is None:
        told = _NOT_BEGUN.get(submission.state, "")
        return " ".join(part for part in (told, reason) if part) if submission.state in ACTIVE else told or reason
    if submission.state in ACTIVE:
        runs = submission.state is ExperimentState.RUNNING
        course = _ends(submission.summary, result) if runs else "resumes from its checkpoints"
        parts = [_where(result), course, _money(submission.summary, result)]
        sentences = [_capitalised("; ".join(parts)), _capitalised(reason) if reason and not runs else ""]
        sentences.append(printable(result.start_failures) if tells_start_failures(result) else "")
        sentences.append(printable(result.instead_of_spot))
        return " ".join(f"{each}." for each in sentences if each)
    ended = _capitalised(outcome(result))
    sentences = [ended, _capitalised(reason) if reason not in ended else "", printable(result.instead_of_spot)]
    return " ".join(f"{each}." for each in sentences if each)


def turn(standing: Mapping[str, int]) -> str:
    """What an experiment that is queued waits for; `standing`: state -> how many experiments are in it."""
    at_work = standing.get("running", 0) + standing.get("starting", 0)
    return f"{counted(at_work, 'experiment')} running, {standing.get('queued', 0)} queued."


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _where(result: Result) -> str:
    current = max((stage.stage for stage in result.stages if stage.actual_s is not None), default=0)
    left = sum(trial.status in ("queued", "running", "paused") for trial in result.trials)
    stage = f"stage {current} ({current + 1} of {len(result.stages)})"
    return f"{stage}; {left} of {counted(len(result.trials), 'trial')} left"


def _ends(summary: Summary, result: Result) -> str:
    expected_s = max(summary.forecast_jct_s or 0.0, result.actual_jct_s)
    left_s = expected_s - result.actual_jct_s
    ends = f"ends in about {duration(left_s)}" if left_s >= 1.0 else "about to end"
    if result.deadline_s is None:
        return ends
    slack_s = result.deadline_s - expected_s
    if abs(slack_s) < 1.0:
        return f"{ends}, at the deadline"
    return f"{ends}, {duration(abs(slack_s))} {'before' if slack_s > 0 else 'after'} the deadline"


def _money(summary: Summary, result: Result) -> str:
    cap_usd = result.max_cost_usd
    decimals = usd_decimals(max(result.actual_cost_usd, summary.forecast_cost_usd or 0.0))
    spent = usd(result.actual_cost_usd, decimals)
    return f"{spent} USD spent" if cap_usd is None else f"{spent} of {usd(cap_usd)} USD spent"


def cards(submission: Submission, result: Result) -> list[Card]:
    """Time and money against plan, forecast and limits; the best trial; the instances."""
    running = submission.state is ExperimentState.RUNNING
    return [_time(submission.summary, result, running), _cost(submission.summary, result, running), *_rest(result)]


def _time(summary: Summary, result: Result, running: bool) -> Card:
    expected_s = max(summary.forecast_jct_s or 0.0, result.actual_jct_s) if running else None
    limit = f"deadline {duration(result.deadline_s)}" if result.deadline_s is not None else "no deadline"
    notes = [
        limit,
        _against(
            duration(result.planned_jct_s),
            expected_s if running else _whole(result, result.actual_jct_s),
            result.planned_jct_s,
            "" if expected_s is None else duration(expected_s),
        ),
    ]
    gauge = _gauge(result.actual_jct_s, result.deadline_s, result.planned_jct_s, expected_s, "deadline")
    return Card(title="time", value=duration(result.actual_jct_s), notes=tuple(notes), gauge=gauge)


def _cost(summary: Summary, result: Result, running: bool) -> Card:
    spent_usd = result.actual_cost_usd
    expected_usd = max(summary.forecast_cost_usd or 0.0, spent_usd) if running else None
    decimals = usd_decimals(max(spent_usd, result.planned_cost_usd))
    cap = result.max_cost_usd
    notes = [
        "no max_cost" if cap is None else f"max_cost {usd(cap)}",
        _against(
            usd(result.planned_cost_usd, decimals),
            expected_usd if running else _whole(result, spent_usd),
            result.planned_cost_usd,
            "" if expected_usd is None else usd(expected_usd, decimals),
        ),
    ]
    gauge = _gauge(spent_usd, cap, result.planned_cost_usd, expected_usd, "max_cost")
    return Card(title="spent (USD)", value=usd(spent_usd, decimals), notes=tuple(notes), gauge=gauge)


def _whole(result: Result, actual: float) -> float | None:
    """What is to be held against the plan: only of a run that was carried out to its end."""
    return actual if result.outcome == "done" else None


def _against(planned: str, actual: float | None, plan: float, forecast: str) -> str:
    off = "" if actual is None else difference(actual, plan).replace(" %", "\N{NO-BREAK SPACE}%")
    told = f" ({off})" if off else ""
    return f"planned {planned}; forecast {forecast}{told}" if forecast else f"planned {planned}{told}"


def _gauge(done: float, limit: float | None, planned: float, forecast: float | None, name: str) -> Gauge | None:
    whole = limit or max(planned, forecast or 0.0, done)
    if whole <= 0:
        return None
    of = f"of the {name}" if limit else "of the plan"
    return Gauge(
        done=min(done / whole, 1.0),
        planned=planned / whole if planned <= whole else None,
        forecast=forecast / whole if forecast is not None and forecast <= whole else None,
        over=done > whole * (1 + 1e-9),
        label=f"{100 * done / whole:.0f} % {of}",
    )


def _rest(result: Result) -> list[Card]:
    best = result.best
    value = None if best is None else best.metrics.get(result.metric)
    note = "no report yet" if best is None else f"trial {best.trial}, {counted(best.iterations, 'iteration')}"
    held = [instance for instance in result.instances if instance.ended_s is None and not _refused(instance)]
    here = [stage for stage in result.stages if stage.actual_s is not None and not stage.promoted]
    planned = f"planned {here[-1].planned_instances} for this stage" if here and held else "none held now"
    bought = sum(instance.running_s is not None for instance in result.instances)
    return [
        Card(title=f"best {printable(result.metric)}", value="-" if value is None else number(value), notes=(note,)),
        Card(title="instances now", value=str(len(held)), notes=(planned, f"{bought} bought in all")),
    ]


def _refused(instance: InstanceResult) -> bool:
    return instance.running_s is None and bool(instance.reason)


def stage_rows(result: Result) -> list[StageRow]:
    """Every stage, planned against actual."""
    decimals = usd_decimals(max(result.actual_cost_usd, result.planned_cost_usd))
    before, rows = 0, []
    for stage in result.stages:
        rows.append(_stage_row(result, stage, before, decimals))
        before += stage.iterations
    return rows


def _stage_row(result: Result, stage: StageResult, before: int, decimals: int) -> StageRow:
    begun, over = stage.actual_s is not None, bool(stage.promoted)
    target = stage.trials * stage.iterations
    done = sum([min(t.iterations - before, stage.iterations) for t in result.trials if t.iterations > before])
    standing = "done" if over else "current" if result.outcome == "unfinished" else "ended"
    return StageRow(
        stage=stage.stage,
        standing=standing if begun else "planned",
        trials=str(stage.trials),
        promoted=f"{len(stage.promoted)} promoted" if over and stage.stage + 1 < len(result.stages) else "",
        share=min(done / target, 1.0) if target else 0.0,
        iterations=f"{done} of {target}",
        instances=f"{stage.instances if begun else '-'} / {stage.planned_instances}",
        gpus_per_trial=str(stage.gpus_per_trial),
        planned_time=duration(stage.planned_s),
        time="-" if stage.actual_s is None else duration(stage.actual_s),
        planned_cost=usd(stage.planned_cost_usd, decimals),
        cost="-" if stage.actual_cost_usd is None else usd(stage.actual_cost_usd, decimals),
    )


def happenings(result: Result) -> list[Happening]:
    """Ends of stages, replans, extensions and resumes, in order."""
    limits = map(_extended, result.extensions)
    back = map(_went_back, result.setbacks)
    stood = map(_stood_still, result.pauses)
    every = [*_syncs(result), *_resumed(result), *map(_decided, result.decisions), *limits, *back, *stood]
    return sorted(every, key=lambda happening: happening.at_s)


def _syncs(result: Result) -> Iterator[Happening]:
    for stage, _, at_s in stage_spans(result):
        if not stage.promoted:
            return
        last = stage.stage + 1 == len(result.stages)
        went = "finished" if last else "promoted"
        told = f"{len(stage.promoted)} of {counted(stage.trials, 'trial')} {went}: {listed(stage.promoted)}"
        yield Happening(at_s=at_s, what=f"SYNC of stage {stage.stage}", told=told, kind="sync")


def _decided(decision: DecisionResult) -> Happening:
    expected = f"{duration(decision.jct_s)} and {usd(decision.cost_usd)} USD expected"
    if decision.changed:
        expected += f", before {duration(decision.present_jct_s)} and {usd(decision.present_cost_usd)} USD"
    kind = "changed" if decision.changed else "kept"
    what = f"plan {'changed' if decision.changed else 'unchanged'} from stage {decision.stage} on"
    return Happening(at_s=decision.at_s, what=what, told=f"{printable(decision.reason)} ({expected})", kind=kind)


def _extended(granted: ExtensionResult) -> Happening:
    return Happening(at_s=granted.at_s, what="extended", told=extended(granted) or "unchanged", kind="extended")


def _went_back(setback: SetbackResult) -> Happening:
    return Happening(at_s=setback.at_s, what="checkpoint lost", told=went_back(setback), kind="setback")


def _stood_still(pause: PauseResult) -> Happening:
    return Happening(at_s=pause.at_s, what="driver paused", told=stood_still(pause), kind="pause")


def _resumed(result: Result) -> Iterator[Happening]:
    """The time before it is a gap in which nobody drove the run."""
    for at_s in result.resumed_s:
        yield Happening(at_s=at_s, what="resumed", told="its process restarted from its journal", kind="resumed")
