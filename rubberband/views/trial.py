"""One trial of a result: its place among the others, its gangs and their cost, its configuration as text. Pure."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import yaml

from rubberband.errors import InputError
from rubberband.executor.core.events import Slot
from rubberband.executor.result.parts import Busy, TrialResult
from rubberband.executor.result.result import Result
from rubberband.executor.result.rows import paid_uses
from rubberband.spec.loading import Dumper
from rubberband.units import counted, duration
from rubberband.values.command import PLACES, ProgramCommand, text_of, words_of
from rubberband.views.equal_iterations import metric_after
from rubberband.views.formatting import Card, TextTable, number, printable, ranked, status, usd, usd_decimals


def rank(result: Result, trial: TrialResult) -> int | None:
    """Return its place among the trials with a metric, the best is 1; None without a metric."""
    order = [one.trial for one in ranked(result) if _value(result, one) is not None]
    return order.index(trial.trial) + 1 if trial.trial in order else None


def lead(result: Result, trial: TrialResult) -> str:
    """Return how much better or worse a trial is than the best of the others, where both had trained equally long.

    Empty without two trials that have a metric, and for a trial or a run that failed.
    """
    others = [one for one in ranked(result) if one.trial != trial.trial and one.feasible in (None, trial.feasible)]
    other = next((one for one in others if _value(result, one) is not None), None)
    if other is None or _value(result, trial) is None or "failed" in (trial.status, result.outcome):
        return ""
    after = min(trial.iterations, other.iterations)
    ours, theirs = (metric_after(result, one, after) for one in (trial, other))
    if ours is None or theirs is None:
        return ""
    better = result.ranking.signed(theirs) - result.ranking.signed(ours)
    report = f"{number(theirs)} after {counted(after, 'iteration')}"
    stopped = "; stopped there" if trial.status == "stopped" and after == trial.iterations < other.iterations else ""
    if better == 0:
        return f"as good as trial {other.trial}, {report}{stopped}"
    percent = f" ({_percent(abs(better / theirs))})" if theirs else ""
    than = f"{'better' if better > 0 else 'worse'} than trial {other.trial}, {report}"
    return f"{number(float(f'{abs(better):.3g}'))}{percent} {than}{stopped}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def why_not_stopped(result: Result | None, number: int) -> str:
    """Return why a trial of a running experiment cannot be stopped, in one line; empty if it can."""
    if result is None or not result.trials:
        return "it has no trials yet; try again once it runs"
    if not 0 <= number < len(result.trials):
        return f"it has no trial {number}; it has 0 to {len(result.trials) - 1}"
    trial = result.trials[number]
    return f"trial {number} is over ({trial.status_text}); there is nothing to stop" if trial.is_over else ""


def _value(result: Result, trial: TrialResult) -> float | None:
    return metric_after(result, trial, trial.iterations)


def configuration_texts(configuration: Mapping[str, Any], entrypoint: Any = None) -> dict[str, str]:
    """Return a configuration as YAML, JSON, command line and Python, to be copied.

    The command line is that of the experiment's program, or `--name=value` without one (`entrypoint`: as in its file).
    """
    values = json.loads(json.dumps(dict(configuration), ensure_ascii=False, default=str))
    return {
        "YAML": yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120).rstrip("\n"),
        "JSON": json.dumps(values, indent=2, ensure_ascii=False),
        "Command line": _command_line(values, entrypoint),
        "Python": "\n".join(["config = {", *(f"    {name!r}: {value!r}," for name, value in values.items()), "}"]),
    }


def _command_line(values: Mapping[str, Any], entrypoint: Any) -> str:
    """Return the program's command for a shell; a place that only a run fills is in capitals, such as CHECKPOINT."""
    command = entrypoint.get("command") if isinstance(entrypoint, Mapping) else None
    try:
        words = words_of(command) if command else ("${args}",)
        style = entrypoint.get("booleans", {}).get("style", "true/false") if command else "true/false"
        program = ProgramCommand(words=words, booleans=style)
        return shlex.join(program.line(values, {name: name.upper() for name in PLACES}))
    except InputError:  # a command of another version
        return shlex.join(f"--{name}={text_of(value)}" for name, value in values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GangUse:
    """A stretch of time of a trial with one gang, in seconds from the start."""

    stage: int
    start_s: float
    training_s: float | None
    """Its first step; None if it did not come to it."""
    end_s: float
    slots: tuple[Slot, ...]
    cost_usd: float
    """Its share of the bill."""

    @property
    def gpu_s(self) -> float:
        """The GPU time."""
        return (self.end_s - self.start_s) * len(self.slots)


def gang_uses(result: Result, trial: int) -> list[GangUse]:
    """Return the gangs that a trial had, in order."""
    ours = ((use, usd_per_s) for use, usd_per_s in paid_uses(result) if use.trial == trial)
    found = []
    for _, group in groupby(sorted(ours, key=_order), key=lambda one: (one[0].start_s, one[0].stage)):
        paid = list(group)
        first = paid[0][0]
        found.append(
            GangUse(
                stage=first.stage,
                start_s=first.start_s,
                training_s=first.training_s,
                end_s=first.end_s,
                slots=tuple(Slot(instance=use.instance, gpu=use.gpu) for use, _ in paid),
                cost_usd=sum(usd_per_s * (use.end_s - use.start_s) for use, usd_per_s in paid),
            )
        )
    return found


def most_workers(result: Result | None, trial: int | None = None) -> int:
    """Return the workers of the largest gang so far, of one trial or all; 0 before the first."""
    busy = () if result is None else result.busy
    gangs = Counter((use.trial, use.start_s) for use in busy if trial in (None, use.trial))
    return max(gangs.values(), default=0)


def _order(paid: tuple[Busy, float]) -> tuple[float, int, str, int]:
    use, _ = paid
    return use.start_s, use.stage, use.instance, use.gpu


def gangs(result: Result, trial: TrialResult) -> TextTable:
    """Return the instances and GPUs that the trial had over time, and what each gang cost."""
    uses = gang_uses(result, trial.trial)
    sum_usd = sum(use.cost_usd for use in uses)
    decimals = usd_decimals(sum_usd)
    is_running = trial.status == "running"
    return TextTable(
        title="Instances and gangs",
        header=("stage", "from", "until", "time", "first step", f"{result.slot_name}s", "USD", "instances"),
        rows=tuple(
            (
                result.stages[use.stage].name,
                duration(use.start_s),
                "now" if is_running and use is uses[-1] else duration(use.end_s),
                duration(use.end_s - use.start_s),
                "-" if use.training_s is None else f"after {duration(use.training_s - use.start_s)}",
                str(len(use.slots)),
                usd(use.cost_usd, decimals),
                _places(use.slots, result.slot_name),
            )
            for use in uses
        ),
        total=("", "", "", duration(sum(use.end_s - use.start_s for use in uses)), "", "", usd(sum_usd, decimals), "")
        if len(uses) > 1
        else None,
        words=frozenset({7}),
        notes=("USD: its share of the bill, idle time of instances included. Times are from the start.",),
    )


def _places(slots: Sequence[Slot], slot_name: str) -> str:
    """Return `i-001 GPU 0, 1; i-002 GPU 0`."""
    by_instance = groupby(slots, key=lambda slot: slot.instance)
    return "; ".join(
        f"{printable(name)} {slot_name} {', '.join(str(one.gpu) for one in group)}" for name, group in by_instance
    )


def trial_cards(result: Result, trial: TrialResult) -> list[Card]:
    """Return its metric with its rank, its iterations, its GPU time and its share of the bill."""
    uses, value, place = gang_uses(result, trial.trial), _value(result, trial), rank(result, trial)
    cost_usd, gpu_s = sum(use.cost_usd for use in uses), sum(use.gpu_s for use in uses)
    share = f"{_percent(cost_usd / result.actual_cost_usd)} of the bill" if result.actual_cost_usd else ""
    charged = () if result.is_charged else ("nothing is charged",)
    is_failed = trial.status == "failed"
    none = "no report" if is_failed else "no report yet"
    standing = none if place is None else f"rank {place} of {counted(len(result.trials), 'trial')}"
    mean = [] if trial.standing is None or not trial.standing.note else [trial.standing.note.removeprefix(", ")]
    was_tried_again = trial.failures > int(is_failed)
    failures = (
        f"{counted(trial.failures, 'failure')}{', tried again' if was_tried_again else ''}" if trial.failures else ""
    )
    metric = Card(printable(result.metric), "-" if value is None else number(value), (standing, *mean))
    return [
        *(() if result.rehearsal else (metric,)),
        Card("iterations", str(trial.iterations), (trial.with_end(status(result, trial)), failures)),
        Card(f"{result.slot_name} time", duration(gpu_s), (f"in {counted(len(uses), 'gang')}",)),
        Card("share (USD)", usd(cost_usd), (share, *charged), is_charged=result.is_charged),
    ]
