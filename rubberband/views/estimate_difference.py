"""What is different between two estimates, as a table of text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rubberband.units import format_duration, format_usd
from rubberband.views.tables import Row, TextTable
from rubberband.views.words import counted, difference

_LIMITS = {"deadline_s": "deadline", "max_cost_usd": "budget", "confidence": "confidence"}


def difference_table(compared: Mapping[str, Any], source: str) -> TextTable:
    """A row for everything that differs; `source` names the saved estimate."""
    rows: list[Row] = [_figure(compared, "jct_s", "time"), _figure(compared, "cost_usd", "cost")]
    for name in ("policy", "batch", "feasible"):
        before, now = compared[name]["before"], compared[name]["now"]
        if before != now:
            rows.append(("within the limits" if name == "feasible" else name, _yes(before), _yes(now), ""))
    for name, pair in compared["constraints"].items():
        rows.append((_LIMITS[name], _limit(name, pair["before"]), _limit(name, pair["now"]), ""))
    for stage in compared["stages"]:
        place = f"stage {stage['stage']}"
        place = f"bracket {stage['bracket']}, {place}" if "bracket" in stage else place
        rows.append((place, *_stage_pair(stage["before"], stage["now"]), ""))
    notes = () if compared["stages"] else ("The plan is the same.",)
    return TextTable(
        title=f"Compared to {source} ({compared['experiment']})",
        header=("", "before", "now", "change"),
        rows=tuple(rows),
        words=frozenset({0, 1, 2}),
        notes=notes,
    )


def _figure(compared: Mapping[str, Any], key: str, name: str) -> Row:
    before, now, change = (compared[key][word] for word in ("before", "now", "change"))
    shown = format_duration if key == "jct_s" else format_usd
    words = tuple("no plan" if value is None else shown(value) for value in (before, now))
    if change is None:
        return (name, *words, "")
    share = difference(now, before)
    signed = "" if abs(change) < 1e-9 else f"{'+' if change > 0 else '-'}{shown(abs(change))}"
    return (name, *words, f"{signed} ({share})" if signed and share else signed or "0")


def _yes(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _limit(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name == "deadline_s":
        return format_duration(value)
    return format_usd(value) if name == "max_cost_usd" else f"{value:g}"


def _stage_pair(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> tuple[str, str]:
    """Both in words; the work and the instances' kind only where they differ."""
    pairs = (before, now)
    told = ["instances", "gpus_per_trial"]
    if before is not None and now is not None:
        told += [key for key in ("trials", "iterations", "instance_type", "market") if before[key] != now[key]]
    first, second = ("not there" if stage is None else _stage(stage, told) for stage in pairs)
    return first, second


def _stage(stage: Mapping[str, Any], told: list[str]) -> str:
    words = [f"{counted(stage['instances'], 'instance')}, {counted(stage['gpus_per_trial'], 'GPU')} per trial"]
    words += [f"{stage[key]} {key}" for key in ("trials", "iterations") if key in told]
    words += [str(stage[key]).replace("_", " ") for key in ("instance_type", "market") if key in told]
    return ", ".join(words)
