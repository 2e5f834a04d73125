"""Headlines of a result: its outcome, its limits, and its best trial. Pure."""

from __future__ import annotations

from rubberband.executor.core.events import WITHOUT_CHECKPOINT
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.states import REHEARSAL
from rubberband.units import counted, duration, format_bytes
from rubberband.views.formatting import (
    TextTable,
    batch_line,
    config_line,
    most_frequent_cause,
    number,
    overall_saving,
    printable,
    setting,
    usd,
    usd_decimals,
)
from rubberband.views.story import not_needed


def headlines(result: Result) -> list[str]:
    """Return outcome, limits, best trial with configuration and checkpoint, and the change of its batch size."""
    best = result.best
    lines = [f"{result.name}: {_ended(result)}", *failed_alike(result)]
    limits = "; ".join(filter(None, (deadline_kept(result), "" if result.max_cost_usd is None else budget(result))))
    lines += [limits] if limits else []
    if result.ended_by is not None:
        lines.append(not_needed(result.ended_by, result.actual_jct_s, result.actual_cost_usd))
    lines += [printable(result.start_failures)] if tells_start_failures(result) else []
    if result.unsaved_trials:
        lines.append(f"{counted(result.unsaved_trials, 'trial')} {WITHOUT_CHECKPOINT}")
    if result.rehearsal:
        return [*lines, REHEARSAL]
    if best is None:
        return [*lines, "best: no trial has reported yet" if result.outcome == "unfinished" else "best: none"]
    lines.append(f"best: {_metrics_line(result, best)}")
    lines += [printable(result.infeasible)] if result.infeasible else []
    changed = f" (since iteration {best.schedule[-1].after + 1})" if best.schedule else ""
    lines.append(f"configuration: {config_line(best.configuration) or 'empty'}{changed}")
    if best.checkpoint is not None:
        size = f" ({format_bytes(best.checkpoint.total_bytes)})" if best.checkpoint.total_bytes else ""
        lines.append(f"checkpoint: {printable(best.checkpoint.url)}{size}")
    lines += filter(None, (batch_line(best), overall_saving(result)))
    reported = {metric for trial in result.trials for metric in trial.metrics}
    missing = [one.metric for one in result.also if one.metric not in reported]
    return [*lines, *(f"search.also: no trial has reported {printable(metric)}" for metric in missing)]


def best_lines(result: Result) -> list[str]:
    """Return the best trial's metrics, a line for each value of its configuration, and its checkpoint."""
    best = result.best
    assert best is not None, "the caller has made sure that there is one"
    lines = [_metrics_line(result, best), *([printable(result.infeasible)] if result.infeasible else [])]
    lines += [f"  {printable(str(name))}: {setting(value)}" for name, value in best.configuration.items()]
    if best.checkpoint is not None and not best.checkpoint.url.startswith("virtual:"):
        lines.append(f"checkpoint: {printable(best.checkpoint.url)} ({format_bytes(best.checkpoint.total_bytes)})")
    if rows := schedule(result).rows:
        lines += ["schedule:", *(f"  iterations {span}: {values} (trial {trial})" for span, trial, values in rows)]
    return lines


def _metrics_line(result: Result, best: TrialResult) -> str:
    others = " ".join(f"{printable(k)}={number(v)}" for k, v in sorted(best.metrics.items()) if k != result.metric)
    note = "" if best.standing is None else best.standing.note
    after = f"trial {best.trial}, {counted(best.iterations, 'iteration')}{note}"
    return f"{printable(result.metric)}={measured(best, result.metric)} ({after}){'; ' if others else ''}{others}"


def tells_start_failures(result: Result) -> bool:
    """Whether to report instances that failed to start: not if the run is done, or its reason says so."""
    return bool(result.start_failures) and result.outcome != "done" and "to start: " not in result.reason


def failed_alike(result: Result) -> list[str]:
    """Return a line for trials that failed for one cause, if many did; the reason of a run that failed has it."""
    found = most_frequent_cause(result)
    if found is None or (result.outcome == "failed" and "trial" in result.reason):
        return []
    failed, (alike, cause) = sum(trial.status == "failed" for trial in result.trials), found
    of_them = "" if alike == failed else f", {alike} of them alike"
    return [f"{failed} of {counted(len(result.trials), 'trial')} failed{of_them}: {cause}"]


def outcome(result: Result) -> str:
    """Return one sentence with outcome, time and cost, and the deadline if the run is done or not finished."""
    deadline = deadline_kept(result) if result.outcome in ("done", "unfinished") else ""
    return "; ".join(filter(None, (_ended(result), deadline)))


def _ended(result: Result) -> str:
    charged = "" if result.is_charged or not result.actual_cost_usd else "; nothing was charged"
    return f"{_course(result)}{charged}"


def _course(result: Result) -> str:
    decimals = usd_decimals(max(result.actual_cost_usd, result.planned_cost_usd)) if result.actual_cost_usd else None
    profile = f" and {usd(result.profiling_cost_usd)} USD for its profile" if result.profiling_cost_usd else ""
    spent = f"{duration(result.actual_jct_s)} for {usd(result.actual_cost_usd, decimals)} USD{profile}"
    planned = f"planned {duration(result.planned_jct_s)} for {usd(result.planned_cost_usd, decimals)} USD"
    why = f": {printable(result.reason)}" if result.reason else ""
    match result.outcome:
        case "done":
            return f"done in {spent} ({planned}){';' if why else ''}{why.removeprefix(':')}"
        case "unfinished":
            course = f"stopped{why}; {spent} so far" if why else f"not finished: {spent} so far"
            return f"{course} ({planned})"
        case "budget":
            return f"stopped to keep the budget{why}{'; ' if why else ' '}after {spent} ({planned})"
        case "cancelled":
            return f"cancelled after {spent} ({planned})"
        case "failed":
            return f"failed{why}{'; ' if why else ' '}after {spent}"


def deadline_kept(result: Result) -> str:
    """Return how much time was left before the deadline, or how late the run was; empty without a deadline."""
    if result.deadline_s is None:
        return ""
    left_s = result.deadline_s - result.actual_jct_s
    if result.outcome not in ("done", "unfinished"):
        verdict = f"passed by {duration(-left_s)}" if left_s < 0 else "not reached"
    elif result.outcome == "done":
        verdict = f"missed by {duration(-left_s)}" if left_s < 0 else f"met, {duration(left_s)} to spare"
    else:
        verdict = f"passed {duration(-left_s)} ago" if left_s < 0 else f"in {duration(left_s)}"
    return f"deadline {result.deadline} {verdict}"


def budget(result: Result) -> str:
    """Return whether `max_cost` was kept, and the rest of it."""
    if result.max_cost_usd is None:
        return "no max_cost"
    left_usd = result.max_cost_usd - result.actual_cost_usd
    kept = left_usd > -1e-9
    verdict = f"kept, {usd(max(0.0, left_usd))} left" if kept else f"passed by {usd(-left_usd)}"
    return f"max_cost {usd(result.max_cost_usd)} USD {verdict}"


def measured(trial: TrialResult, metric: str) -> str:
    """Return a metric of a trial's latest report; a dash if it is not in it."""
    value = trial.metrics.get(metric)
    return "-" if value is None else number(value)


def schedule(result: Result) -> TextTable:
    """Return the configurations that led to the best trial's weights, in order; empty if there is only its own."""
    best = result.best
    steps = () if best is None else best.schedule
    ends = [*(step.after for step in steps[1:]), 0 if best is None else best.iterations]
    return TextTable(
        title="Schedule of the best trial",
        header=("iterations", "trial", "configuration"),
        rows=tuple(
            (f"{step.after + 1} to {end}", str(step.trial), config_line(step.configuration))
            for step, end in zip(steps, ends, strict=False)
            if end > step.after
        ),
        words=frozenset({2}),
    )
