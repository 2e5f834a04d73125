"""Texts of the page of one experiment: a sentence, cards, stages, troubles, and a page of its trials. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rubberband.executor.result.parts import StageResult, TrialResult
from rubberband.executor.result.result import Result
from rubberband.states import ACTIVE, REHEARSAL, ExperimentState
from rubberband.units import counted, duration, instant_text
from rubberband.values.submission import Submission, Summary
from rubberband.views.formatting import (
    Card,
    best_card,
    causes,
    cost_card,
    printable,
    shared_by,
    time_card,
    usd,
    usd_decimals,
)
from rubberband.views.report.headlines import outcome, tells_start_failures
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
    trials: tuple[int, ...] = ()
    """The first of its trials, for links."""


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


_MOST_CAUSES, _MOST_LINKS = 3, 8


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
        shared = shared_by(result, ours) if severe else ""
        why = f"{cause}{f' ({shared})' if shared else ''}"
        yield Trouble(what=what(len(ours)), why=why, severe=severe, trials=tuple(ours[:_MOST_LINKS]))
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
