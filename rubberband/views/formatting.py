"""Figures, phrases and tables that views share: amounts that add up, percentages, configurations, lists of trials."""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from rubberband.units import TURNING, counted, duration, format_duration, format_usd
from rubberband.values.balance import BalanceUse
from rubberband.values.offer import BillLine
from rubberband.values.plan import PlanningConstraints, Size
from rubberband.values.ranking import Merit

if TYPE_CHECKING:
    from rubberband.executor.core.events import Gang
    from rubberband.executor.result.batch_history import BatchStretch
    from rubberband.executor.result.parts import TrialResult
    from rubberband.executor.result.result import Result


def rounded(parts: Sequence[float], unit: float) -> list[float]:
    """Round `parts` to multiples of `unit` that add up to their rounded sum; each is off by less than one unit."""
    steps, so_far, sum_so_far = [], 0, 0.0
    for part in parts:
        sum_so_far = math.fsum((sum_so_far, part))
        reached = round(sum_so_far / unit)
        steps.append((reached - so_far) * unit)
        so_far = reached
    return steps


def usd_decimals(largest_usd: float) -> int:
    """Return the decimals for amounts up to `largest_usd`: 1234.50, 12.34, 0.0134, 0.000134."""
    for least_usd, decimals in ((1.0, 2), (0.01, 4), (0.0001, 6)):
        if abs(largest_usd) >= least_usd:
            return decimals
    return 2 if largest_usd == 0 else 8


def usd(amount_usd: float, decimals: int | None = None) -> str:
    """Return an amount in US dollars without its unit; the decimals depend on its size unless given."""
    return f"{amount_usd:,.{usd_decimals(amount_usd) if decimals is None else decimals}f}"


def hanging(line: str, width: int) -> str:
    """Fold a line to `width`, and indent its further parts below its text, which two blanks part from a label.

    A word that is wider, such as a path, stays whole.
    """
    label = re.match(r"\s*\S+\s{2,}", line)
    indent = " " * (2 if label is None or 2 * label.end() > width else label.end())
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def ends(at: float | None, left_s: float) -> str:
    """Return when something ends, in this process's time zone: `ends 16:42 (in 4m16s)`. Another day is named.

    `at` is Unix time; None if its clock has no time of day, as that of a rehearsal: `ends in 4m16s`.
    """
    if at is None:
        return f"ends in {duration(left_s)}"
    return f"ends {_local(at, at - left_s)} (in {duration(left_s)})"


def _local(at: float, now: float) -> str:
    """Return an instant (Unix time) in this process's time zone; another day than that of `now` is named."""
    then = datetime.fromtimestamp(at)
    day = "" if then.date() == datetime.fromtimestamp(now).date() else f"{then:%b} {then.day} "
    return f"{day}{then:%H:%M}"


_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d):\d\dZ")


def local_times(text: str, now: float) -> str:
    """Return a text for a terminal: its instants, as `instant_text` writes them, in this process's time zone.

    `now` is Unix time: another day than that is named.
    """
    return _INSTANT.sub(lambda found: _local(datetime.fromisoformat(found[0]).timestamp(), now), text)


def timed(text: str) -> str:
    """Escape a text for a page, and mark its instants, which scripts show in the reader's time zone."""
    return _INSTANT.sub(r'<time datetime="\g<0>" data-clock>\1 UTC</time>', html.escape(text))


def time_unit_s(largest_s: float) -> float:
    """Return the unit to which times up to `largest_s` are rounded, so that `format_duration` writes all digits."""
    if largest_s >= 59.95:
        return 1.0
    return 0.1 if largest_s >= 9.995 else 0.01


def difference(actual: float, planned: float) -> str:
    """Return the difference from the plan in percent; empty if nothing was planned."""
    if planned <= 0:
        return ""
    percent = (actual / planned - 1.0) * 100.0
    decimals = 0 if abs(percent) >= 9.95 else 1
    text = f"{percent:+.{decimals}f} %"
    return "0 %" if float(f"{percent:.{decimals}f}") == 0 else text


def number(value: float) -> str:
    """Return a metric or a number of a configuration with up to six digits."""
    return f"{value:.6g}"


def config_line(values: Mapping[str, Any]) -> str:
    """Return a configuration on one line: `lr=0.001 batch_size=64`."""
    return " ".join(f"{printable(str(name))}={setting(value)}" for name, value in values.items())


def setting(value: object) -> str:
    """Return a value of a configuration; text with spaces or control characters is quoted."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str) and value.isprintable() and value and " " not in value:
        return value
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def printable(text: str) -> str:
    """Return text on one line without control characters, which a terminal would obey."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def harmless(text: str) -> str:
    """Return a line of a trial's output without the characters that a terminal would obey, colours excepted.

    A progress bar returns to its line's beginning: its latest state is left.
    """

    def neutral(sign: str) -> str:
        return " " if sign in TURNING or (unicodedata.category(sign) == "Cc" and sign != "\t") else sign

    parts = _COLOUR.split(text.rpartition("\r")[2])
    return "".join(part if _COLOUR.fullmatch(part) else "".join(map(neutral, part)) for part in parts)


def listed(names: Iterable[object], most: int = 8) -> str:
    """Return `3, 7, 9`; names beyond `most` are counted."""
    every = [str(name) for name in names]
    left = len(every) - most
    return ", ".join(every[:most]) + (f" and {left} more" if left > 0 else "")


def size_line(name: str, asked: PlanningConstraints, size: Size) -> str:
    """Return the size in a line: `digits: 283 configurations fit 10m and 1.00 USD (num_samples: 283); no more do`."""
    time = [] if asked.deadline_s is None else [format_duration(asked.deadline_s)]
    within = " and ".join(time + ([] if asked.max_cost_usd is None else [format_usd(asked.max_cost_usd)]))
    if size.number is None:
        return f"{name}: no search fits {within}"
    if size.key == "num_samples":
        return f"{name}: {counted(size.number, 'configuration')} fit {within} (num_samples: {size.number}); no more do"
    trials = counted(size.num_trials, "configuration")
    return f"{name}: max_t: {size.number} fits {within}, with {trials}; no more does"


def causes(trials: Iterable[TrialResult]) -> list[tuple[str, list[int]]]:
    """Return the causes of failures, the most frequent first, and the trials of each.

    Causes that differ only in numbers are one, which has `…` in their place.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for trial in trials:
        kind, colon, message = printable(trial.failure or "").partition(": ")
        text = message if kind == "raised" and message else f"{kind.replace('_', ' ')}{colon}{message}"
        found.setdefault(_NUMBER.sub("…", text), []).append((trial.trial, text))
    named = [
        (texts.pop() if len(texts := {text for _, text in ours}) == 1 else shape, [trial for trial, _ in ours])
        for shape, ours in found.items()
    ]
    return sorted(named, key=lambda cause: -len(cause[1]))


_OF_PARSER = re.compile(r"^\S+: error: ")
_ENDED = re.compile(r" \((?:(?! \().)* ended with exit code .*\)$")
_FEWEST_ALIKE = 3


def most_frequent_cause(result: Result) -> tuple[int, str] | None:
    """Return how many trials failed for the most frequent cause, and the cause with the parameter that they share.

    None unless two trials, and a tenth of all, failed alike.
    """
    failed = [trial for trial in result.trials if trial.status == "failed"]
    cause, ours = next(iter(causes(failed)), ("", []))
    if len(ours) < 2 or 10 * len(ours) < len(result.trials):
        return None
    shared = shared_by(result, ours)
    return len(ours), _OF_PARSER.sub("", _ENDED.sub("", cause)).partition("; its last lines: ")[0] + (
        f" ({shared})" if shared else ""
    )


def shared_by(result: Result, trials: Collection[int]) -> str:
    """Return the values that these trials alone have, such as `shift < 0`; empty if no parameter says it, or few."""
    ours = [trial.configuration for trial in result.trials if trial.trial in trials]
    others = [trial.configuration for trial in result.trials if trial.status != "failed" and trial.iterations]
    if min(len(ours), len(others)) < _FEWEST_ALIKE:
        return ""
    for name in ours[0]:
        one, other = [each.get(name) for each in ours], [each.get(name) for each in others]
        if len({repr(value) for value in one}) == 1 and one[0] not in other:
            return f"{name}={setting(one[0])}"
        low, high = ([value for value in values if _is_number(value)] for values in (one, other))
        if len(low) + len(high) < len(one) + len(other):
            continue
        if max(low) < min(high):
            return f"{name} < {number(0.0 if max(low) < 0.0 <= min(high) else min(high))}"
        if min(low) > max(high):
            return f"{name} > {number(0.0 if max(high) <= 0.0 < min(low) else max(high))}"
    return ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


# Phrases and figures about adaptive batch sizes.


def change(first: float, last: float) -> str:
    """Return `64 -> 512`, or `64` without a change."""
    before, after = amount(first), amount(last)
    return after if before == after else f"{before} -> {after}"


def amount(value: float) -> str:
    """Return a noise scale or a speed with about three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def noise_scales(stretches: Sequence[BatchStretch]) -> list[float]:
    """Return the known noise scales."""
    return [stretch.noise_scale for stretch in stretches if stretch.noise_scale is not None]


def first_and_last(
    stretches: Sequence[BatchStretch], name: Literal["throughput", "goodput"]
) -> tuple[float, float] | None:
    """Return the mean throughput or goodput at the first batch size and GPUs, and at the last ones.

    None if nothing was measured.
    """
    measured = [stretch for stretch in stretches if stretch.throughput is not None]
    if not measured:
        return None
    return _mean(measured, measured[0], name), _mean(measured, measured[-1], name)


def _mean(measured: Sequence[BatchStretch], like: BatchStretch, name: str) -> float:
    alike = [s for s in measured if (s.gpus, s.batch_size) == (like.gpus, like.batch_size)]
    times_s = [max(1, s.steps) * s.batch_size / (s.throughput or 1.0) for s in alike]
    values = [getattr(s, name) or 0.0 for s in alike]
    return math.fsum(time_s * value for time_s, value in zip(times_s, values, strict=True)) / math.fsum(times_s)


def gain(values: tuple[float, float] | None) -> str:
    """Return the ratio of the last value to the first, such as `1.8x`; `-` without values."""
    return f"{values[1] / values[0]:.1f}x" if values and values[0] > 0.0 else "-"


def mean_efficiency(stretches: Sequence[BatchStretch]) -> float:
    """Return the mean efficiency of all samples."""
    samples = [stretch.steps * stretch.batch_size for stretch in stretches]
    counted_for = [count * stretch.efficiency for count, stretch in zip(samples, stretches, strict=True)]
    return math.fsum(counted_for) / sum(samples) if sum(samples) else 1.0


def batch_line(trial: TrialResult) -> str:
    """Return the change of a trial's batch size, for a headline; empty without one."""
    stretches = trial.batches
    if not stretches or stretches[0].batch_size == stretches[-1].batch_size:
        return ""
    first, last = stretches[0], stretches[-1]
    gpus = counted(last.gpus, "GPU") if first.gpus == last.gpus else f"{first.gpus} -> {last.gpus} GPUs"
    parts = [f"batch size: {change(first.batch_size, last.batch_size)} on {gpus}"]
    noise, faster = noise_scales(stretches), first_and_last(stretches, "throughput")
    parts += [f"noise scale {change(noise[0], noise[-1])}"] if noise else []
    better = gain(first_and_last(stretches, "goodput"))
    parts += [f"{gain(faster)} the samples/s, {better} the goodput"] if faster else []
    return "; ".join(parts)


# Phrases about unequal workers.


_MANY_WORKERS = 8
_LEAST_SAVED = 0.005
"""A smaller saving is rounded to nothing."""


def worker_values(values: Sequence[float]) -> str:
    """Return shares or times, worker by worker: `12 / 12 / 24 / 48`; of many workers, the least and the most."""
    if len(values) > _MANY_WORKERS:
        return f"{amount(min(values))} to {amount(max(values))}"
    return " / ".join(map(amount, values))


def saving(use: BalanceUse) -> str:
    """Return what balancing saves, said as a model; empty if that is nothing."""
    if use.saved < _LEAST_SAVED:
        return ""
    return f"balancing saves {100 * use.saved:.0f} % against equal shares (model from measured times)"


def unequal(use: BalanceUse) -> str:
    """Return the shares of unequal workers, and what balancing saves."""
    return "; ".join(filter(None, [f"{worker_values(use.shares)} samples per step", saving(use)]))


def slow_workers(use: BalanceUse, gang: Gang, slot_name: str = "GPU") -> list[str]:
    """Return a phrase about the workers without samples, and one about those that hold up their gang."""
    idle = [rank for rank, samples in enumerate(use.shares) if samples == 0]
    slow = [rank for rank in use.stragglers if rank not in idle]
    said = []
    if idle:
        verb = f"get{'s' * (len(idle) == 1)}"
        said.append(f"{worker_names(idle, gang, slot_name)} {verb} no samples, which makes the step shorter")
    if slow:
        said.append(f"the step would be shorter without {worker_names(slow, gang, slot_name)}")
    return said


def worker_names(ranks: Sequence[int], gang: Gang, slot_name: str) -> str:
    """Return workers by their instances, such as `i-003 GPU 1`; by rank where the gang is not known."""
    if len(gang) <= max(ranks):
        return f"worker {listed(ranks)}" if len(ranks) == 1 else f"workers {listed(ranks)}"
    return listed(f"{gang[rank].instance} {slot_name} {gang[rank].gpu}" for rank in ranks)


def overall_saving(result: Result) -> str:
    """Return the headline: what balancing saved over all unequal steps, and in how many trials; empty if nothing."""
    stretches = [stretch for trial in result.trials for stretch in trial.balance]
    equal_s = math.fsum(stretch.steps * stretch.equal_step_s for stretch in stretches)
    saved_s = equal_s - math.fsum(stretch.steps * stretch.step_s for stretch in stretches)
    if not stretches or saved_s < _LEAST_SAVED * equal_s:
        return ""
    trials = counted(sum(bool(trial.balance) for trial in result.trials), "trial")
    return (
        f"unequal workers in {trials}: balancing saved {100 * saved_s / equal_s:.0f} % of their steps' time, "
        f"{duration(saved_s)}, against equal shares (model from measured times)"
    )


Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Table of text. Figures are right-aligned, the columns in `words` left-aligned; `total` is set apart."""

    title: str
    header: Row
    rows: tuple[Row, ...]
    total: Row | None = None
    words: frozenset[int] = frozenset({0})
    notes: tuple[str, ...] = ()
    marked: frozenset[int] = frozenset()
    """Rows that stand out on a terminal."""

    def mapped(self, shown: Callable[[str], str]) -> TextTable:
        """Return it with all texts as `shown` returns them, but for a cell that is the word USD: a user's."""
        return replace(
            self,
            title=shown(self.title),
            header=tuple(map(shown, self.header)),
            rows=tuple(tuple(cell if cell == "USD" else shown(cell) for cell in row) for row in self.rows),
            total=self.total and tuple(map(shown, self.total)),
            notes=tuple(map(shown, self.notes)),
        )


def aligned(rows: Sequence[Sequence[str]], words: Collection[int] = ()) -> list[str]:
    """Return rows as lines whose columns line up on the right, those in `words` on the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = (
        (cell.ljust(width) if column in words else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    )
    return ["  ".join(line).rstrip() for line in padded]


def finite(value: float | None) -> float | None:
    """Return a value if it is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None


def ranked(result: Result) -> list[TrialResult]:
    """Return the trials, best first: the winner, then by the latest metric; those without one last.

    With several brackets, the trials that were trained to the end come before those that were stopped. Repeats of a
    configuration follow each other, in the order of their mean.
    """
    ranking = result.ranking
    of: dict[int, list[TrialResult]] = {}
    for trial in result.trials:
        of.setdefault(trial.trial // ranking.repeats, []).append(trial)
    merits = {configuration: ranking.merit(ranking.mean(_counting(trials))) for configuration, trials in of.items()}
    winner = -1 if result.best is None else result.best.trial

    def key(trial: TrialResult) -> tuple[bool, bool, bool, Merit, int, Merit, int]:
        configuration = trial.trial // ranking.repeats
        stopped = trial.bracket is not None and trial.status != "completed"
        others = (stopped, merits[configuration], configuration, ranking.merit(trial.metrics), trial.trial)
        return (trial.trial != winner, configuration != winner // ranking.repeats, *others)

    return sorted(result.trials, key=key)


def _counting(repeats: Sequence[TrialResult]) -> list[Mapping[str, float]]:
    """Return the metrics of the repeats that count: those trained to the end or, without any, that did not fail."""
    if len(repeats) == 1:
        return [repeats[0].metrics]
    done = [trial.metrics for trial in repeats if trial.status == "completed"]
    return done or [trial.metrics for trial in repeats if trial.status != "failed"] or [{}]


def status(result: Result, trial: TrialResult) -> str:
    """Return a trial's status; a trial that the end of the experiment interrupted was cut short."""
    if result.best is not None and trial.trial == result.best.trial and result.outcome == "done":
        return "winner"
    if result.outcome != "unfinished" and trial.status in ("queued", "running", "paused"):
        return "cut short"
    return trial.status


def bill(lines: Sequence[BillLine], notes: Sequence[str] = ()) -> TextTable:
    """Return the lines of a bill and their sum; empty if there is only one line."""
    decimals = usd_decimals(min([line.usd for line in lines if line.usd > 0.0], default=0.0))
    amounts_usd = rounded([line.usd for line in lines], 10**-decimals)
    return TextTable(
        title="The bill",
        header=("line", "USD"),
        rows=tuple((line.line, usd(amount, decimals)) for line, amount in zip(lines, amounts_usd, strict=True))
        if len(lines) > 1
        else (),
        total=("total", usd(sum(amounts_usd), decimals)),
        notes=tuple(notes),
    )


# Headline figures as cards: time, cost and best trial of a result, against plan, forecast and limits.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Shares of a limit (or of the larger of plan and forecast), from 0 to 1."""

    done: float
    planned: float | None = None
    forecast: float | None = None
    over: bool
    """Whether the limit is exceeded."""
    label: str


@dataclass(frozen=True, slots=True)
class Card:
    """Headline figure, with the figures to compare it to."""

    title: str
    value: str
    notes: tuple[str, ...] = ()
    gauge: Gauge | None = None
    is_charged: bool = True
    """False for an amount that is only metered."""


def time_card(result: Result, forecast_s: float | None = None) -> Card:
    """Return the time of a run, with its deadline, and the plan and the forecast of one that runs."""
    took_s, planned_s = result.actual_jct_s, result.planned_jct_s
    deadline = "no deadline" if result.deadline_s is None else f"deadline {result.deadline}"
    against = _against(result, planned_s, forecast_s, took_s, duration)
    gauge = _gauge(took_s, result.deadline_s, planned_s, forecast_s, "deadline")
    return Card("time", duration(took_s), (deadline, against), gauge)


def cost_card(result: Result, forecast_usd: float | None = None) -> Card:
    """Return the cost of a run and its profile, with its max_cost, and the plan and the forecast of one that runs."""
    spent_usd, cap_usd, planned_usd = result.whole_cost_usd, result.asked_max_cost_usd, result.whole_planned_usd
    decimals = usd_decimals(max(spent_usd, planned_usd))
    cap = "no max_cost" if cap_usd is None else f"max_cost {usd(cap_usd)}"
    against = _against(result, planned_usd, forecast_usd, spent_usd, lambda money: usd(money, decimals))
    charged = () if result.is_charged else ("nothing is charged",)
    gauge = _gauge(spent_usd, cap_usd, planned_usd, forecast_usd, "max_cost")
    return Card("spent (USD)", usd(spent_usd, decimals), (cap, against, *charged), gauge, result.is_charged)


def best_card(result: Result) -> Card:
    """Return the metric of the best trial."""
    best = result.best
    value = None if best is None else best.metrics.get(result.metric)
    note = "no report yet" if best is None else f"trial {best.trial}, {counted(best.iterations, 'iteration')}"
    note += "" if best is None or best.standing is None else best.standing.note
    return Card(f"best {printable(result.metric)}", "-" if value is None else number(value), (note,))


def _against(
    result: Result, planned: float, forecast: float | None, actual: float, text: Callable[[float], str]
) -> str:
    """Return the plan and the forecast; only a forecast, or a run that is done, compares to its plan."""
    compared = actual if result.outcome == "done" and forecast is None else forecast
    off = "" if compared is None else difference(compared, planned).replace(" %", "\N{NO-BREAK SPACE}%")
    detail = f" ({off})" if off else ""
    return f"planned {text(planned)}{'' if forecast is None else f'; forecast {text(forecast)}'}{detail}"


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
