"""Status of an experiment in a few lines and a table, as `rubberband status` shows it. Pure.

The input is the answer of `GET /v1/experiments/NAME`, also for experiments of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rubberband.states import EXPLAINED, REHEARSAL
from rubberband.units import counted, duration
from rubberband.values.kinds import KINDS, NOT_INSTALLED, ProviderKind
from rubberband.values.submission import waiting
from rubberband.views.formatting import TextTable, ends, number, printable, usd
from rubberband.views.live.progress import cost_line, time_line
from rubberband.views.queueing import queue_line

_EXTEND = "`extend --max-cost` and `resume` continue it"
STATES = {
    "queued": "waits for a free slot",
    "starting": "is measuring its profile or planning",
    "running": "runs",
    "interrupted": "its process has ended; `resume` continues it",
    "done": "done",
    "cancelled": "cancelled; `resume` continues it",
    "budget": f"stopped by max_cost; {_EXTEND}",
    "failed": "failed",
    "refused": "never began",
    "unreadable": "its journal cannot be read",
}
_HEADED_FOR_ITS_END = ("starting", "running", "interrupted", "done")
EXIT_CODES = {"done": 0, "cancelled": 130}
"""State -> exit code of a command that waited for it; else 1, and 4 if it is done after its deadline."""


def exit_code(view: Mapping[str, Any]) -> int:
    """Return the exit code of a command that waited for an experiment."""
    is_late = view["state"] == "done" and (view.get("slack_s") or 0.0) < 0.0
    return 4 if is_late else EXIT_CODES.get(view["state"], 1)


def headline(view: Mapping[str, Any]) -> str:
    """Return the state in one line, with its reason if there is one."""
    state, summary = str(view["state"]), view["summary"]
    phrase = STATES.get(state, state)
    waits = waiting(str(view["name"]), state, summary)
    if state == "running" and summary["stages"]:
        phrase = f"runs, stage {summary['stage']} ({summary['stage'] + 1} of {summary['stages']})"
    reason = printable(view.get("reason") or "")
    if (queue := view.get("queue")) and not reason:
        return f"{view['name']}: queued: {queue_line(view['name'], queue)}"
    if state in EXPLAINED and reason:
        hint = waits or (_EXTEND if state == "budget" else "")
        return f"{view['name']}: {state}: {reason}" + (f"; {hint}" if hint else "")
    notes = "; ".join(note for note in (reason, waits) if note and note not in phrase)
    return f"{view['name']}: {phrase}" + (f" ({notes})" if notes else "")


def lines(view: Mapping[str, Any]) -> list[str]:
    """Return the headline, the best so far, time and cost against their limits, and progress."""
    summary = view["summary"]
    found = [headline(view), *([f"rehearsal {REHEARSAL}"] if view.get("rehearsal") else []), *labels(view)]
    if summary["started_at"] is None:
        return found
    if summary["best_value"] is not None:
        note = f", {summary['best_note']}" if summary.get("best_note") else ""
        best = f"{printable(summary['metric'])}={number(summary['best_value'])} (trial {summary['best_trial']}{note})"
        found.append(f"best      {best}")
    metered = "" if _kind(view).is_charged(summary.get("unit")) else "; nothing is charged"
    return [*found, _time(view), f"{_cost(summary)}{metered}", _progress(summary)]


def labels(view: Mapping[str, Any]) -> list[str]:
    """Return tags, note and archive of an experiment, each in a line; nothing for those that it has not."""
    tags, note = " ".join(map(printable, view.get("tags", ()))), printable(view.get("note", ""))
    found = {"tags": tags, "note": note, "archived": "yes" if view.get("archived") else ""}
    return [f"{name:10}{text}" for name, text in found.items() if text]


def _time(view: Mapping[str, Any]) -> str:
    summary, slack_s = view["summary"], view.get("slack_s")
    end = ""
    if view["state"] == "running" and summary["forecast_jct_s"] is not None:
        ends_s = summary["forecast_jct_s"]
        end = ends(None if _kind(view).is_simulated else summary["started_at"] + ends_s, ends_s - summary["jct_s"])
    return time_line(
        summary["jct_s"],
        deadline=None if summary["deadline_s"] is None else summary["deadline"],
        end=end,
        slack_s=slack_s if view["state"] in _HEADED_FOR_ITS_END else None,
        planned_s=summary["planned_jct_s"],
    )


def _cost(summary: Mapping[str, Any]) -> str:
    return cost_line(
        summary["cost_usd"],
        max_cost_usd=summary["max_cost_usd"],
        forecast_usd=None if summary["ended_at"] is not None else summary["forecast_cost_usd"],
        planned_usd=summary["planned_cost_usd"],
    )


def _kind(view: Mapping[str, Any]) -> ProviderKind:
    return KINDS.get(view.get("provider") or "", NOT_INSTALLED)


def _progress(summary: Mapping[str, Any]) -> str:
    held = f"; {counted(summary['instances'], 'instance')} held" if summary["ended_at"] is None else ""
    if held and summary.get("max_instances") is not None:
        held += f", limited to {summary['max_instances']}"
    return (
        f"progress  {summary['iterations']} of {counted(summary['target_iterations'], 'iteration')}, "
        f"{counted(summary['trials'], 'trial')}{held}"
    )


_MOST_OF_STORY = 8


def story_table(story: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return the latest entries of a story, as the page of an experiment has it."""
    left = len(story) - _MOST_OF_STORY
    return TextTable(
        title="Decisions",
        header=("at", "what", "why"),
        rows=tuple((duration(one["at_s"]), one["what"], printable(one["text"])) for one in story[-_MOST_OF_STORY:]),
        words=frozenset({1, 2}),
        notes=(f"{left} before are in the report and on the page.",) if left > 0 else (),
    )


def extension_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the effect of other limits, as the basis of a decision to grant them."""
    before, after = found["before"], found["after"]
    return [
        f"now:  {_outlook(before)}",
        f"then: {_outlook(after)}",
        f"that is {_more(found['added_s'], duration, 'later', 'earlier')} and "
        f"{_more(found['added_usd'], lambda amount: f'{usd(amount)} USD', 'more', 'less')}",
    ]


def _outlook(outlook: Mapping[str, Any]) -> str:
    deadline_s, max_cost_usd = outlook["deadline_s"], outlook["max_cost_usd"]
    within = "no deadline" if deadline_s is None else f"deadline {outlook['deadline']}"
    cap = "no max_cost" if max_cost_usd is None else f"max_cost {usd(max_cost_usd)} USD"
    if (target := outlook.get("target")) is not None:
        cap += f", target {target:g}"
    expected = f"{duration(outlook['jct_s'])} and {usd(outlook['cost_usd'])} USD expected"
    return f"{within}, {cap}: {expected}; {printable(outlook['reason'])}"


def _more(value: float, shown: Any, more: str, less: str) -> str:
    return f"{shown(abs(value))} {more if value >= 0 else less}"
