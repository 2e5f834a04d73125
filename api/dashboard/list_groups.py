"""Experiments of the list by tag, or by the first part of their names, with sums of what they cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rubberband.states import ACTIVE, ExperimentState
from rubberband.units import counted
from rubberband.values.submission import Submission
from rubberband.views.formatting import number, printable, usd, usd_decimals

By = Literal["tag", "name"]
TITLES: Mapping[By, str] = {"tag": "By tag", "name": "By name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Experiments that belong together. Empty texts are shown as a dash."""

    title: str
    tag: str
    """Tag that they have; empty for a group of names, and for those without a tag."""
    search: str
    """Search that finds them; may find others too."""
    states: str
    cost: str
    """Sum of what is charged; rehearsals and runs of this machine are not."""
    free: str
    """How many are not charged; empty if all are."""
    best: str
    """Best metric of all, where they have the same one; one that breaks its limits only if all do, which it says."""
    name: str
    """Experiment with the best metric."""


def groups_of(rows: Sequence[Submission], by: By) -> list[Group]:
    """Return the groups, the most expensive first; an experiment with several tags is in the group of each."""
    members: dict[str, list[Submission]] = {}
    for row in rows:
        for key in _tags(row) if by == "tag" else (_stem(row.name),):
            members.setdefault(key, []).append(row)
    costs_usd = {key: _charged_usd(ours) for key, ours in members.items()}
    decimals = usd_decimals(max(costs_usd.values(), default=0.0))
    order = sorted(members, key=lambda key: (-costs_usd[key], key))
    return [_group(key, by, members[key], usd(costs_usd[key], decimals)) for key in order]


def _tags(row: Submission) -> Iterable[str]:
    return row.labels.tags or ("",)


def _stem(name: str) -> str:
    """Return a name up to its last `-`, with it; the whole name without one."""
    head, dash, _ = name.rpartition("-")
    return f"{head}{dash}" or name


def _charged_usd(rows: Sequence[Submission]) -> float:
    return math.fsum(row.summary.cost_usd for row in rows if row.charged and row.summary.unit == "USD")


def _group(key: str, by: By, rows: Sequence[Submission], cost: str) -> Group:
    free, best = sum(not row.charged for row in rows), _best(rows)
    text = "" if best is None else f"{printable(best.summary.metric)} {number(best.summary.best_value or 0.0)}"
    text += ", not feasible" if best is not None and _is_infeasible(best) else ""
    return Group(
        title=key or "without a tag",
        tag=key if by == "tag" else "",
        search=key if by == "name" else "",
        states=", ".join(_states(rows)),
        cost=cost if free < len(rows) else "",
        free=f"{free} not charged" if free else "",
        best=text,
        name="" if best is None else best.name,
    )


def _states(rows: Sequence[Submission]) -> Iterator[str]:
    yield counted(len(rows), "experiment")
    active = sum(row.state in ACTIVE for row in rows)
    failed = sum(row.state is ExperimentState.FAILED for row in rows)
    yield from (f"{count} {word}" for count, word in ((active, "active"), (failed, "failed")) if count)


def _best(rows: Sequence[Submission]) -> Submission | None:
    found = [row for row in rows if row.summary.best_value is not None]
    if len({(row.summary.metric, row.summary.mode) for row in found}) != 1:
        return None
    sign = -1.0 if found[0].summary.mode == "max" else 1.0
    return min(found, key=lambda row: (_is_infeasible(row), sign * (row.summary.best_value or 0.0)))


def _is_infeasible(row: Submission) -> bool:
    return row.summary.best_note.endswith("not feasible")
