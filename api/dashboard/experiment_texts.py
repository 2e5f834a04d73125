"""Texts of the page of one experiment: a sentence, cards, stages, troubles, and a page of its trials. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Query

from rubberband.executor.result.parts import StageResult, TrialResult
from rubberband.executor.result.result import Result
from rubberband.states import ACTIVE, REHEARSAL, ExperimentState
from rubberband.units import counted, duration, instant_text
from rubberband.values.submission import Submission, Summary
from rubberband.views.charts.parallel_coordinates import Range, Space, is_number, parameters, within
from rubberband.views.charts.parts import CURVES
from rubberband.views.charts.spending import trial_costs_usd
from rubberband.views.equal_iterations import after, choices
from rubberband.views.formatting import (
    Card,
    best_card,
    causes,
    change,
    cost_card,
    listed,
    mean_efficiency,
    printable,
    ranked,
    setting,
    shared_by,
    status,
    time_card,
    usd,
    usd_decimals,
)
from rubberband.views.report.headlines import measured, outcome, tells_start_failures
from rubberband.views.report.tables import interruptions, paid_card
from rubberband.views.story import cells, is_last_of_bracket
from rubberband.views.story import sentence as sentence_of

_NOT_BEGUN = {
    ExperimentState.QUEUED: "It waits for a free slot.",
    ExperimentState.STARTING: "Its process is measuring a profile or planning.",
    ExperimentState.REFUSED: "It never started.",
    ExperimentState.CANCELLED: "It was cancelled before it started.",
    ExperimentState.INTERRUPTED: "Its process ended before it started.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Row of a stage, planned against actual."""

    stage: str
    status: str
    """`done`, `current`, `ended` (before it was done) or `planned`."""
    trials: str
    promoted: str
    share: float
    """Share of its iterations."""
    iterations: str
    instances: str
    gpus_per_trial: str
    planned_time: str
    time: str
    planned_cost: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Trials or instances that were lost, and the cause."""

    what: str
    why: str
    severe: bool
    """Whether something is lost for good, rather than tried again or replaced."""


def sentence(submission: Submission, result: Result | None) -> str:
    """Return the state, progress and limits in a sentence or two. Instants are as `instant_text` writes them."""
    reason = printable(submission.reason)
    if result is None or submission.summary.started_at is None:
        text = _NOT_BEGUN.get(submission.state, "")
        if submission.state is ExperimentState.QUEUED and reason and not submission.home:
            return f"{_capitalised(reason)}."
        return " ".join(part for part in (text, reason) if part) if submission.state in ACTIVE else text or reason
    if submission.state in ACTIVE:
        runs = submission.state is ExperimentState.RUNNING
        course = _ends(submission.summary, result) if runs else "resumes from its checkpoints"
        parts = [_where(result), course, _money(submission.summary, result)]
        sentences = [
            REHEARSAL.capitalize() if result.rehearsal else "",
            _capitalised("; ".join(parts)),
            _capitalised(reason) if reason and (not runs or submission.home) else "",
            _capitalised(submission.waiting),
        ]
        sentences.append(printable(result.start_failures) if tells_start_failures(result) else "")
        sentences.append(printable(result.instead_of_spot))
        return " ".join(f"{each}." for each in sentences if each)
    ended = _capitalised(outcome(result))
    sentences = [
        REHEARSAL.capitalize() if result.rehearsal else "",
        ended,
        _capitalised(reason) if reason not in ended else "",
        printable(result.instead_of_spot),
    ]
    sentences.append(_capitalised(submission.waiting))
    return " ".join(f"{each}." for each in sentences if each)


_MOST_CAUSES = 3


def troubles(result: Result) -> list[Trouble]:
    """Return failed trials by cause, those that recovered, lost and refused instances, and lost checkpoints."""
    failed = [trial for trial in result.trials if trial.status == "failed"]
    again = [trial for trial in result.trials if trial.failures and trial.status != "failed"]
    every = f"of {counted(len(result.trials), 'trial')}"
    return [
        *_by_cause(result, failed, lambda number: f"{number} {every} failed", severe=True),
        *_by_cause(
            result, again, lambda number: f"{number} {every} failed and {_was(number)} tried again", severe=False
        ),
        *_of_instances(result),
        *(
            [Trouble(what=counted(len(result.setbacks), "lost checkpoint"), why=sentence_of(last), severe=False)]
            if (last := next(reversed(result.setbacks), None))
            else []
        ),
    ]


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _by_cause(
    result: Result, trials: Sequence[TrialResult], what: Callable[[int], str], *, severe: bool
) -> Iterator[Trouble]:
    found = causes(trials)
    for cause, ours in found[:_MOST_CAUSES]:
        named = f"trial{'' if len(ours) == 1 else 's'} {listed(ours)}"
        shared = shared_by(result, ours) if severe else ""
        yield Trouble(what=what(len(ours)), why=f"{cause} ({named}{f'; {shared}' if shared else ''})", severe=severe)
    if left := sum(len(ours) for _, ours in found[_MOST_CAUSES:]):
        yield Trouble(what=what(left), why=f"for {counted(len(found) - _MOST_CAUSES, 'other cause')}", severe=severe)


def _of_instances(result: Result) -> Iterator[Trouble]:
    struck = [one for one in result.instances if one.reason and not one.preempted and one.interrupted_s is None]
    for what, ours in (
        ("lost", [one for one in struck if one.running_s is not None and not one.failed_start]),
        ("failed to start", [one for one in struck if one.failed_start]),
        ("refused", [one for one in struck if one.running_s is None and not one.failed_start]),
    ):
        if ours:
            verb = what if what == "failed to start" else f"{_was(len(ours))} {what}"
            yield Trouble(what=f"{counted(len(ours), 'instance')} {verb}", why=printable(ours[-1].reason), severe=False)
    if result.interruptions:
        yield Trouble(what="Spot", why=interruptions(result), severe=False)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _where(result: Result) -> str:
    left = sum(trial.status in ("queued", "running", "paused") for trial in result.trials)
    if len(result.rungs) == 1:
        stage = f"{counted(result.rungs[0].trials, 'trial')} begun"
    elif result.rungs:
        stage = f"rungs {' > '.join(str(rung.trials) for rung in result.rungs)}"
    elif any(stage.bracket is not None for stage in result.stages):
        done = sum(bool(stage.promoted) for stage in result.stages)
        stage = f"{done} of {counted(len(result.stages), 'stage')} done"
    else:
        current = max((stage.stage for stage in result.stages if stage.actual_s is not None), default=0)
        stage = f"stage {current} ({current + 1} of {len(result.stages)})"
    return f"{stage}; {left} of {counted(len(result.trials), 'trial')} left"


def _ends(summary: Summary, result: Result) -> str:
    expected_s = summary.ends_s(elapsed_s=result.actual_jct_s)
    left_s = expected_s - result.actual_jct_s
    at = instant_text((summary.started_at or 0.0) + expected_s)
    then = f"in {duration(left_s)}" if result.is_simulated else f"{at} (in {duration(left_s)})"
    ends = f"ends {then}" if left_s >= 1.0 else "about to end"
    if result.deadline_s is None:
        return ends
    slack_s = result.deadline_s - expected_s
    if abs(slack_s) < 1.0:
        return f"{ends}, at the deadline"
    return f"{ends}, {duration(abs(slack_s))} {'before' if slack_s > 0 else 'after'} the deadline"


def _money(summary: Summary, result: Result) -> str:
    cap_usd = result.asked_max_cost_usd
    decimals = usd_decimals(max(result.whole_cost_usd, summary.forecast_cost_usd or 0.0))
    spent = usd(result.whole_cost_usd, decimals)
    return f"{spent} USD spent" if cap_usd is None else f"{spent} of {usd(cap_usd)} USD spent"


def cards(submission: Submission, result: Result) -> list[Card]:
    """Return the cards: time and cost against plan, forecast and limits; the best trial; the instances, or once it is
    over, the share of the paid time that trained."""
    summary, expected_s, expected_usd = submission.summary, None, None
    if submission.state is ExperimentState.RUNNING:
        expected_s = summary.ends_s(elapsed_s=result.actual_jct_s)
        expected_usd = max(summary.forecast_cost_usd or 0.0, result.whole_cost_usd)
    # An instance with a reason that never ran was refused.
    held = [one for one in result.instances if one.ended_s is None and (one.running_s is not None or not one.reason)]
    here = [stage for stage in result.stages if stage.actual_s is not None and not stage.promoted]
    wanted = sum(stage.planned_instances for stage in here)
    planned = f"planned {wanted} for {'this stage' if len(here) == 1 else 'these stages'}"
    planned = planned if here and held else "none held now"
    bought = sum(instance.running_s is not None for instance in result.instances)
    now = Card("instances now", str(len(held)), (planned, f"{bought} bought in all"))
    last = now if held or submission.state in ACTIVE else paid_card(result)
    best = () if result.rehearsal else (best_card(result),)
    return [time_card(result, expected_s), cost_card(result, expected_usd), *best, last]


def rungs_reached(result: Result) -> str:
    """Return a sentence on the trials that reached each rung; empty unless trials climb rungs."""
    if not result.rungs:
        return ""
    if len(result.rungs) == 1:
        return f"Trials that began: {result.rungs[0].trials}; at their end: {result.rungs[0].ended}."
    reached = " > ".join(str(rung.trials) for rung in result.rungs)
    ends = ", ".join(str(rung.iterations) for rung in result.rungs)
    return f"Trials that reached each rung: {reached}. The rungs end after {ends} iterations."


def stage_rows(result: Result, target_iterations: int = 0) -> list[StageRow]:
    """Return the rows of all stages; `target_iterations` are those expected of the job, where trials climb rungs."""
    decimals = usd_decimals(max(result.actual_cost_usd, result.planned_cost_usd))
    before, rows = 0, []
    for stage in result.stages:
        before = 0 if stage.rung == 0 and stage.bracket is not None else before
        rows.append(_stage_row(result, stage, before, decimals, target_iterations))
        before += stage.iterations
    return rows


def _stage_row(result: Result, stage: StageResult, before: int, decimals: int, target_iterations: int) -> StageRow:
    begun, over = stage.actual_s is not None, bool(stage.promoted)
    target = target_iterations if result.rungs else stage.trials * stage.iterations - _unneeded(result, stage, before)
    ours = [trial.iterations for trial in result.trials if trial.bracket == stage.bracket]
    done = sum([min(iterations - before, stage.iterations) for iterations in ours if iterations > before])
    status = "done" if over else "current" if result.outcome == "unfinished" else "ended"
    name, trials, _, instances, gpus_per_trial, planned_time, time, planned_cost, cost = cells(stage, decimals)
    return StageRow(
        stage=name,
        status=status if begun else "planned",
        trials=trials,
        promoted=f"{len(stage.promoted)} promoted" if over and not is_last_of_bracket(result.stages, stage) else "",
        share=min(done / target, 1.0) if target else 0.0,
        iterations=f"{done} of {target}",
        instances=instances,
        gpus_per_trial=gpus_per_trial,
        planned_time=planned_time,
        time=time or "-",
        planned_cost=planned_cost,
        cost=cost or "-",
    )


def _unneeded(result: Result, stage: StageResult, before: int) -> int:
    """Return the iterations of a begun stage that its trials do not train, as they have ended by themselves."""
    if stage.actual_s is None:
        return 0
    ours = [trial for trial in result.trials if trial.ended and trial.bracket == stage.bracket]
    if stage.rung:
        promoted = next(one for one in result.stages if (one.bracket, one.rung) == (stage.bracket, stage.rung - 1))
        ours = [trial for trial in ours if trial.trial in promoted.promoted]
    return sum(max(0, before + stage.iterations - max(before, trial.iterations)) for trial in ours)


# The table of trials: sorted, filtered, and a page at a time, as an address says.

PAGE_SIZE = 25
_MOST_COLUMNS = 10
_PARAMETER = "."
"""Prefix of parameters in sort keys; the other columns have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requested view of the trials; values that do not fit are ignored."""

    sort: str = ""
    """Key of a column; empty: best first."""
    down: bool = False
    status: str = ""
    """Empty: all."""
    page: int = 1
    after: int = 0
    """Iterations after which metrics are compared; 0: the latest ones."""
    brush: tuple[Range, ...] = ()
    """Ranges on the axes of the chart of configurations, through which the trials pass; empty: all."""

    def address(self, **changes: str | int | bool | tuple[()]) -> str:
        """Return the query and fragment of the address of this view, with changes."""
        wanted = replace(self, **changes)  # type: ignore[arg-type]
        query: dict[str, Any] = {"sort": wanted.sort, "down": int(wanted.down), "status": wanted.status}
        query |= {"page": wanted.page if wanted.page > 1 else 0, "after": wanted.after}
        query |= {"brush": [f"{name}:{100 * low:.0f}-{100 * high:.0f}" for name, low, high in wanted.brush]}
        return f"?{urlencode({key: value for key, value in query.items() if value}, doseq=True)}#trials"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column, and the address that sorts by it."""

    title: str
    words: bool
    address: str
    sorted: str
    """`ascending`, `descending` or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """Row of a trial, with a cell for each column after the first."""

    trial: int
    status: str
    winner: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChoice:
    """Filter by status: its number of trials, and its address."""

    title: str
    count: int
    address: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChoice:
    """Metric to compare trials by: the latest one, or that after equal iterations."""

    title: str
    after: int
    address: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """Page of the table."""

    columns: tuple[Column, ...]
    rows: tuple[TrialRow, ...]
    choices: tuple[StatusChoice, ...]
    metrics: tuple[MetricChoice, ...]
    """Empty without a choice."""
    shown: str
    """Such as `26 to 50 of 3,000 trials`."""
    before: str
    """Address of the previous page; empty on the first."""
    after: str
    clear: str
    """Address without ranges; empty if there are none."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of column: its values for sorting, and its texts."""

    key: str
    title: str
    value: Callable[[TrialResult], Any]
    text: Callable[[TrialResult], str]
    words: bool = False


def table_page(result: Result, asked: Asked, space: Space = None) -> TrialTable:
    """Return a page of trials; `space` is the search space in the words of the file, which has the scales of ranges."""
    kinds = _kinds(result, asked.after)
    compared = after(result, asked.after)
    every = Counter(status(result, trial) for trial in result.trials)
    wanted = asked.status if asked.status in every else ""
    at = {trial.trial: trial for trial in result.trials}
    ordered = [trial.trial for trial in ranked(compared)]
    found = [at[trial] for trial in ordered if not wanted or status(result, at[trial]) == wanted]
    if asked.brush:
        passing = within(compared, asked.brush, space)
        found = [trial for trial in found if trial.trial in passing]
    chosen = next((kind for kind in kinds if kind.key == asked.sort), None)
    if chosen is not None:
        found = _sorted(found, chosen.value, asked.down)
    pages = max(1, math.ceil(len(found) / PAGE_SIZE))
    page = max(1, min(asked.page, pages))
    first = (page - 1) * PAGE_SIZE
    rows = found[first : first + PAGE_SIZE]
    of = f"{len(found):,} {'trial' if len(found) == 1 else 'trials'}"
    return TrialTable(
        columns=tuple(_column(kind, asked) for kind in kinds),
        rows=tuple(_row(result, trial, kinds) for trial in rows),
        choices=_choices(result, every, wanted, asked),
        metrics=_metric_choices(result, asked),
        shown=of if pages == 1 else f"{first + 1:,} to {first + len(rows):,} of {of}",
        before=asked.address(page=page - 1) if page > 1 else "",
        after=asked.address(page=page + 1) if page < pages else "",
        clear=asked.address(brush=(), page=1) if asked.brush else "",
    )


def _kinds(result: Result, iterations: int) -> list[_Kind]:
    costs_usd = trial_costs_usd(result)
    decimals = usd_decimals(result.actual_cost_usd / max(1, len(result.trials)))

    def cost_usd(trial: TrialResult) -> float:
        return costs_usd[trial.trial]

    compared = after(result, iterations).trials
    title = printable(result.metric) + (f" after {iterations}" if iterations else "")

    def metric(trial: TrialResult) -> float | None:
        return compared[trial.trial].metrics.get(result.metric)

    def status_text(trial: TrialResult) -> str:
        return trial.with_end(status(result, trial))

    measures = (
        _Kind("metric", title, metric, lambda t: measured(compared[t.trial], result.metric)),
        *(_mean(result) if result.repeats > 1 else ()),
        *(_also(one.metric) for one in result.also),
    )
    return [
        _Kind("trial", "trial", lambda t: t.trial, lambda t: str(t.trial)),
        *(() if result.rehearsal else measures),
        _Kind("iterations", "iterations", lambda t: t.iterations, lambda t: str(t.iterations)),
        _Kind("status", "status", status_text, status_text, words=True),
        *(_BATCH_KINDS if any(trial.batches for trial in result.trials) else ()),
        *(_parameter(name) for name in _names(result.trials)),
        _Kind("cost", "share (USD)", cost_usd, lambda t: usd(cost_usd(t), decimals)),
    ]


_BATCH_KINDS = (
    _Kind(
        "batch",
        "batch size",
        lambda t: t.batches[-1].batch_size if t.batches else None,
        lambda t: change(t.batches[0].batch_size, t.batches[-1].batch_size) if t.batches else "-",
    ),
    _Kind(
        "efficiency",
        "efficiency",
        lambda t: mean_efficiency(t.batches) if t.batches else None,
        lambda t: f"{100 * mean_efficiency(t.batches):.0f} %" if t.batches else "-",
    ),
)
"""Columns of adaptive batches: the last batch size, and the share of samples that counted."""


def _names(trials: Sequence[TrialResult]) -> list[str]:
    """Return parameters in the order of the file, first those that differ between trials."""
    varies = parameters(trials)
    return sorted(varies, key=lambda name: not varies[name])[:_MOST_COLUMNS]


def _mean(result: Result) -> tuple[_Kind, ...]:
    """Return the columns of the configuration's number, and of the mean of its repeats."""

    def mean(trial: TrialResult) -> float | None:
        return None if trial.standing is None else trial.standing.mean

    def text(trial: TrialResult) -> str:
        return "-" if trial.standing is None or trial.standing.mean is None else trial.standing.mean_text

    def configuration(trial: TrialResult) -> int:
        return trial.trial // result.repeats

    return (
        _Kind("configuration", "configuration", configuration, lambda t: str(configuration(t))),
        _Kind("mean", f"mean of {result.repeats}", mean, text),
    )


def _also(metric: str) -> _Kind:
    """Return the column of another metric."""
    return _Kind(f"also:{metric}", printable(metric), lambda t: t.metrics.get(metric), lambda t: measured(t, metric))


def _parameter(name: str) -> _Kind:
    return _Kind(
        f"{_PARAMETER}{name}",
        printable(name),
        lambda t: t.configuration.get(name),
        lambda t: setting(t.configuration[name]) if name in t.configuration else "-",
    )


def _sorted(trials: Sequence[TrialResult], value: Callable[[TrialResult], Any], down: bool) -> list[TrialResult]:
    """Sort numbers before words, and missing values last in both directions."""
    known = [trial for trial in trials if is_number(value(trial))]
    other = [trial for trial in trials if not is_number(value(trial)) and not _is_missing(value(trial))]
    missing = [trial for trial in trials if _is_missing(value(trial))]
    known.sort(key=value, reverse=down)
    other.sort(key=lambda trial: setting(value(trial)), reverse=down)
    return [*known, *other, *missing]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _column(kind: _Kind, asked: Asked) -> Column:
    here = kind.key == asked.sort
    return Column(
        title=kind.title,
        words=kind.words,
        address=asked.address(sort=kind.key, down=here and not asked.down, page=1),
        sorted=("descending" if asked.down else "ascending") if here else "",
    )


def _row(result: Result, trial: TrialResult, kinds: Sequence[_Kind]) -> TrialRow:
    return TrialRow(
        trial=trial.trial,
        status=status(result, trial),
        winner=result.best is not None and trial.trial == result.best.trial,
        cells=tuple(kind.text(trial) for kind in kinds[1:]),
    )


def _choices(result: Result, every: Mapping[str, int], wanted: str, asked: Asked) -> tuple[StatusChoice, ...]:
    def choice(name: str, title: str, count: int) -> StatusChoice:
        return StatusChoice(title=title, count=count, address=asked.address(status=name, page=1), chosen=name == wanted)

    order = sorted(every, key=lambda name: (list(CURVES).index(name) if name in CURVES else len(CURVES), name))
    return (choice("", "All", len(result.trials)), *(choice(name, name, every[name]) for name in order))


def _metric_choices(result: Result, asked: Asked) -> tuple[MetricChoice, ...]:
    if result.rehearsal or not (ends := choices(result)):
        return ()
    every = sorted({0, *ends, asked.after})
    return tuple(
        MetricChoice(
            title=f"after {end}" if end else "latest",
            after=end,
            address=asked.address(after=end, brush=(), page=1),
            chosen=end == asked.after,
        )
        for end in every
    )


_MOST_RANGES = 20
_RANGE = re.compile(r"(.{1,200}):(\d{1,3})-(\d{1,3})", re.ASCII | re.DOTALL)


def asked_trials(
    sort: Annotated[str, Query(max_length=200)] = "",
    down: Annotated[str, Query(max_length=10)] = "",
    status: Annotated[str, Query(max_length=40)] = "",
    page: Annotated[str, Query(max_length=10)] = "",
    iterations: Annotated[str, Query(alias="after", max_length=10)] = "",
    brush: Annotated[Sequence[str], Query(max_length=_MOST_RANGES)] = (),
) -> Asked:
    """Dependency: the requested view of the trials."""
    ranges = tuple(found for text in brush if (found := _range(text)) is not None)
    return Asked(
        sort=sort, down=down == "1", status=status, page=whole(page) or 1, after=whole(iterations), brush=ranges
    )


def whole(text: str) -> int:
    """Return the number in an address; 0 for what is no number."""
    return int(text) if text.isascii() and text.isdigit() else 0


def _range(text: str) -> Range | None:
    """Return the range of `NAME:20-80`, in percent of the axis; None for anything else."""
    found = _RANGE.fullmatch(text)
    return None if found is None else (found[1], int(found[2]) / 100, int(found[3]) / 100)


Trials = Annotated[Asked, Depends(asked_trials)]
