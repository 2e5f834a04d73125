"""The exact search: label-setting over (stage, instances held), pruned by Lagrangian bounds (RubberBand §4, exactly).

The paper's Algorithm 2 is a greedy descent; this one finds a plan that no other beats. It knows no file format and
raises nothing: no plan within the limits is None.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rubberband.planner.bounds import Relaxed, Rows, make_rows, relax, roots
from rubberband.planner.labels import (
    COST_TOLERANCE_USD,
    TIME_TOLERANCE_S,
    Labels,
    extend,
    start,
    undominated,
)
from rubberband.planner.table import Bools, Floats, Ints, Table, distinct

Objective = Literal["min_cost", "min_time"]
OBJECTIVES: tuple[Objective, Objective] = ("min_time", "min_cost")
Path = list[tuple[int, int]]

_FAR = np.geomspace(1 / 64, 4096, 19)
_NEAR = np.geomspace(1 / 64, 64, 12)
"""Shares of cost per second that time is weighed with."""
_PAIRS_AT_ONCE = 1_000_000
_BOUNDS_AT_ONCE = 50_000
_FEW_STATES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The plans of interest: those that take and cost no more than this."""

    time_s: float = np.inf
    cost_usd: float = np.inf

    def holds(self, time_s: Floats, cost_usd: Floats) -> Bools:
        """Which of the plans lie in the box, up to the rounding of floats."""
        inside: Bools = (time_s <= self.time_s + TIME_TOLERANCE_S) & (cost_usd <= self.cost_usd + COST_TOLERANCE_USD)
        return inside

    def limits(self, rows: Rows) -> Floats:
        """(R,) What a plan in the box weighs at most in each row."""
        with np.errstate(invalid="ignore"):
            time_s = np.where(rows.time_weight > 0, rows.time_weight * (self.time_s + 2 * TIME_TOLERANCE_S), 0.0)
            cost_usd = np.where(rows.cost_weight > 0, rows.cost_weight * (self.cost_usd + 2 * COST_TOLERANCE_USD), 0.0)
        total: Floats = time_s + cost_usd
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan's choices, and what it takes and costs."""

    time_s: float
    cost_usd: float
    path: Path


def solve(table: Table, box: Box, objective: Objective = "min_cost", *, constant: bool = False) -> Found | None:
    """The best plan in `box`, or None if there is none; `constant` allows one instance count for all stages.

    The best has the lowest cost and, among those, the shortest time (`min_time`: the other way round), then the
    fewest instances held over the stages, then the fewest GPUs per trial.
    """
    if constant and table.duration_s.shape[2] == 1:
        return _best_constant(table, box, objective)
    found = several(table, box, objective, constant=constant, most=1)
    return found[0] if found else None


def _best_constant(table: Table, box: Box, objective: Objective) -> Found | None:
    """The best plan with one instance count for all stages, where each has one option: they are few enough to try."""
    every = np.arange(len(table.instances))
    labels, layers, parents = start(table), list[Labels](), np.zeros_like(every)
    for stage in range(table.num_stages):
        labels = extend(table, stage, labels, parents, every, np.zeros_like(every))
        layers.append(labels)
        parents = every
    if objective == "min_time" and not np.isfinite(box.cost_usd):
        box, objective = Box(time_s=min(box.time_s, float(labels.time_s.min()))), "min_cost"
    layers[-1] = labels.take(box.holds(labels.time_s, labels.cost_usd))
    return _best(layers, objective, 1)[0] if len(layers[-1]) else None


def several(table: Table, box: Box, objective: Objective, *, constant: bool = False, most: int) -> list[Found]:
    """The best plan in `box` and up to `most` - 1 others that the search has met, best first; none if there is none."""
    if objective == "min_time" and not np.isfinite(box.cost_usd):
        fastest_s = float(relax(table, make_rows(table, np.zeros(0), with_time=True), constant=constant).root[0])
        box, objective = Box(time_s=min(box.time_s, fastest_s)), "min_cost"
    relaxed, lowest, best = _bracket(table, box, objective, constant)
    reach = best if best is not None else (box.cost_usd if objective == "min_cost" else box.time_s)
    for upper in _widening(table, box, relaxed, objective, lowest, reach):
        smaller = _shrunk(box, objective, upper)
        layers = label_setting(table, smaller, relaxed, constant=constant)
        if len(layers) == table.num_stages and len(layers[-1]):
            return _best(layers, objective, most)
    return []


def _shrunk(box: Box, objective: Objective, upper: float) -> Box:
    """The part of `box` whose plans reach an objective of `upper` or better."""
    if objective == "min_cost":
        return Box(time_s=box.time_s, cost_usd=min(upper, box.cost_usd))
    return Box(time_s=min(upper, box.time_s), cost_usd=box.cost_usd)


def _widening(
    table: Table, box: Box, relaxed: Relaxed, objective: Objective, lowest: float, reach: float
) -> list[float]:
    """Upper bounds on the objective to try in turn, up to `reach`: near the lower bound, few labels survive."""
    if not np.isfinite(reach) or reach <= lowest * (1.0 + 1e-9):
        return [reach]
    limits = _limits(_shrunk(box, objective, reach), relaxed.rows)
    num_states = sum(len(_open_counts(relaxed, stage, limits)) for stage in range(table.num_stages))
    if num_states * table.duration_s.shape[2] <= _FEW_STATES:
        return [reach]
    return [lowest + share * (reach - lowest) for share in (0.02, 0.1, 0.3)] + [reach]


def _limits(box: Box, rows: Rows) -> Floats:
    """(R,) `box.limits` with room for the rounding of sums."""
    limits = box.limits(rows)
    return limits + 1e-12 * np.abs(np.where(np.isfinite(limits), limits, 0.0))


def _open_counts(relaxed: Relaxed, stage: int, limits: Floats) -> Ints:
    """Indices of the instance counts that some plan in the box may use in `stage`."""
    through = relaxed.so_far[stage] + relaxed.to_go[stage + 1]
    return np.flatnonzero((through <= limits[:, None]).all(axis=0))


def pareto(table: Table, box: Box, *, constant: bool = False) -> list[Found]:
    """Every plan in `box` that no other beats on both time and cost, fastest first.

    Between two plans that the relaxations meet, the others lie in the rectangle that the two span: each such
    rectangle is a small search with bounds of its own.
    """
    fastest, cheapest = (solve(table, box, objective, constant=constant) for objective in OBJECTIVES)
    if fastest is None or cheapest is None:
        return []
    ends = relax(table, make_rows(table, np.zeros(1), with_time=True), constant=constant)
    weights = max(ends.root[0], 1e-9) / max(ends.root[-1], 1e-9) * np.geomspace(1 / 256, 256, 48)
    time_s, cost_usd = _carried_out(table, relax(table, make_rows(table, weights), constant=constant))
    inside = box.holds(time_s, cost_usd)
    met = [(found.time_s, found.cost_usd) for found in (fastest, cheapest)]
    corners = _staircase([*met, *zip(time_s[inside].tolist(), cost_usd[inside].tolist(), strict=True)])
    points = {(found.time_s, found.cost_usd): found for found in (fastest, cheapest)}
    for (early_s, dear_usd), (late_s, cheap_usd) in itertools.pairwise(corners):
        slope = (dear_usd - cheap_usd) / (late_s - early_s)
        rows = make_rows(table, slope * np.array([0.25, 0.5, 1.0, 2.0, 4.0]), with_time=True)
        relaxed = relax(table, rows, constant=constant)
        layers = label_setting(table, Box(time_s=late_s, cost_usd=dear_usd), relaxed, constant=constant)
        if len(layers) == table.num_stages:
            found_here = [_found(layers, index) for index in range(len(layers[-1]))]
            points |= {(found.time_s, found.cost_usd): found for found in found_here}
    return [points[point] for point in _staircase(list(points))]


def _staircase(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (seconds, USD) that no other beats on both, by time."""
    steps: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (round(point[0], 6), point[1])):
        if not steps or point[1] < steps[-1][1] - COST_TOLERANCE_USD:
            steps.append(point)
    return steps


def label_setting(table: Table, box: Box, relaxed: Relaxed, *, constant: bool = False) -> list[Labels]:
    """The undominated labels of each stage that some plan in `box` may continue; short if none is left."""
    limits = _limits(box, relaxed.rows)
    labels, layers = start(table), list[Labels]()
    for stage in range(table.num_stages):
        open_counts = _open_counts(relaxed, stage, limits)
        if not len(open_counts):
            return layers
        labels = _next(table, stage, labels, open_counts, relaxed, limits, constant)
        if not len(labels):
            return layers
        layers.append(labels)
    inside = box.holds(layers[-1].time_s, layers[-1].cost_usd)
    layers[-1] = layers[-1].take(inside)
    return layers


def _next(
    table: Table, stage: int, labels: Labels, counts: Ints, relaxed: Relaxed, limits: Floats, constant: bool
) -> Labels:
    """The undominated labels after `stage`, a chunk of pairs (label, choice) at a time."""
    open_at, option = np.nonzero(table.valid[stage, counts])
    at = counts[open_at]
    chunk = max(1, _PAIRS_AT_ONCE // len(at))
    parts = []
    for first in range(0, len(labels), chunk):
        parents = np.arange(first, min(first + chunk, len(labels)))
        pairs = _promising(table, stage, labels, parents, at, option, relaxed, limits, constant)
        grown = extend(table, stage, labels, *pairs)
        parts.append(grown.take(_within(table, stage, grown, relaxed, limits)))
    if len(parts) == 1:
        return undominated(table, parts[0])
    merged = Labels(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Labels.__slots__})
    return undominated(table, merged)


def _promising(
    table: Table,
    stage: int,
    labels: Labels,
    parents: Ints,
    at: Ints,
    option: Ints,
    relaxed: Relaxed,
    limits: Floats,
    constant: bool,
) -> tuple[Ints, Ints, Ints]:
    """Pairs (label, choice) that are in time at least: a cheap sieve before the exact reckoning."""
    before, after = labels.instances[parents][:, None], table.instances[at][None, :]
    same = table.market[labels.at[parents]][:, None] == table.market[at]
    growth_s = (table.terms.growth_s + table.terms.late_growth_s) * ((after > before) | ~same)
    stage_s = table.duration_s[stage, at, option] + table.late_s[stage, at, option]
    ends_s = labels.time_s[parents][:, None] + stage_s + growth_s
    keep = np.ones(ends_s.shape, dtype=bool)
    for row in np.flatnonzero((relaxed.rows.cost_weight == 0.0) & np.isfinite(limits)):
        keep &= ends_s + relaxed.to_go[stage + 1, row, at] <= limits[row]
    if constant and stage:
        keep &= (before == after) & same
    parent, choice = np.nonzero(keep)
    return parents[parent], at[choice], option[choice]


def _within(table: Table, stage: int, labels: Labels, relaxed: Relaxed, limits: Floats) -> Ints:
    """The labels that some plan in the box may still continue, by every row's bound, a few rows at a time."""
    rows, to_go = relaxed.rows, relaxed.to_go[stage + 1]
    prepaid_usd = table.price_usd_per_s[labels.at] * labels.prepaid_total_s
    left = np.arange(len(labels))
    binding = np.flatnonzero(np.isfinite(limits))
    size = max(1, _BOUNDS_AT_ONCE // max(1, len(labels)))
    for first in range(0, len(binding), size):
        block = binding[first : first + size, None]
        sunk_usd = labels.cost_usd[left] - (1.0 - rows.alpha[block]) * prepaid_usd[left]
        weight = rows.cost_weight[block] * sunk_usd + rows.time_weight[block] * labels.time_s[left]
        left = left[(weight + to_go[block, labels.at[left]] <= limits[block]).all(axis=0)]
    return left


def lower_bound(table: Table, box: Box, objective: Objective) -> float:
    """What the objective of any plan in `box` is at least; inf if it is seen that there is none."""
    ends = make_rows(table, np.zeros(1), with_time=True)
    least = roots(table, ends)
    if least[-1] > box.time_s + TIME_TOLERANCE_S or least[0] > box.cost_usd + COST_TOLERANCE_USD:
        return np.inf
    between = make_rows(table, max(least[0], 1e-9) / max(least[-1], 1e-9) * _NEAR)
    return float(
        max(_dual(ends, least, box, objective).max(), _dual(between, roots(table, between), box, objective).max())
    )


def _bracket(table: Table, box: Box, objective: Objective, constant: bool) -> tuple[Relaxed, float, float | None]:
    """Bounds for the search: the solved rows, a lower bound on the objective, and a plan's value if one was met."""
    ends = roots(table, make_rows(table, np.zeros(1), with_time=True), constant=constant)
    scale = max(ends[0], 1e-9) / max(ends[-1], 1e-9)
    weights = np.concatenate([[0.0], scale * _FAR])
    bounded = box.time_s if objective == "min_cost" else box.cost_usd
    if not np.isfinite(bounded):
        # Nothing to weigh against: the objective alone, with the other one far behind it, is the problem.
        weights = np.array([0.0]) if objective == "min_cost" else weights[-1:]
    if np.isfinite(bounded):
        rows = make_rows(table, weights)
        value = _dual(rows, roots(table, rows, constant=constant), box, objective)
        peak = int(np.searchsorted(weights, rows.time_weight[int(value.argmax())]))
        low, high = weights[max(0, peak - 1)], weights[min(len(weights) - 1, peak + 1)]
        near = np.concatenate([np.linspace(low, high, 7), [weights[peak]]])
        weights = distinct(np.concatenate([near, high * np.array([0.0, 0.25, 0.5, 2.0, 4.0, 16.0])]))
    solved = relax(table, make_rows(table, weights, with_time=True), constant=constant)
    best = _achieved(table, solved, box, objective)
    lowest = max(0.0, float(_dual(solved.rows, solved.root, box, objective).max()))
    return solved, lowest, best


def _dual(rows: Rows, root: Floats, box: Box, objective: Objective) -> Floats:
    """(R,) The lower bound on the objective that each row gives; -inf from rows that give none."""
    value = np.full(len(rows), -np.inf)
    if objective == "min_cost":
        limit = np.where(rows.time_weight > 0, box.time_s, 0.0)
        use = (rows.cost_weight > 0) & np.isfinite(limit)
        value[use] = root[use] - rows.time_weight[use] * limit[use]
    else:
        limit = np.where(rows.cost_weight > 0, box.cost_usd, 0.0)
        use = (rows.time_weight > 0) & np.isfinite(limit)
        value[use] = (root[use] - rows.cost_weight[use] * limit[use]) / rows.time_weight[use]
    return value


def _achieved(table: Table, solved: Relaxed, box: Box, objective: Objective) -> float | None:
    """The best objective in `box` among the rows' own plans."""
    time_s, cost_usd = _carried_out(table, solved)
    inside = box.holds(time_s, cost_usd)
    values = cost_usd if objective == "min_cost" else time_s
    return float(values[inside].min()) if inside.any() else None


def _carried_out(table: Table, solved: Relaxed) -> tuple[Floats, Floats]:
    """(R,) What the rows' own plans really take and cost."""
    labels = start(table)
    parents = np.zeros(len(solved.rows), dtype=np.int64)
    for stage in range(table.num_stages):
        labels = extend(table, stage, labels, parents, solved.paths[:, stage], solved.options[:, stage])
        parents = np.arange(len(labels))
    return labels.time_s, labels.cost_usd


def _best(layers: list[Labels], objective: Objective, most: int) -> list[Found]:
    final = layers[-1]
    cost_usd, time_s = np.round(final.cost_usd, 9), np.round(final.time_s, 6)
    first, second = (cost_usd, time_s) if objective == "min_cost" else (time_s, cost_usd)
    ranked = np.lexsort((final.held, second, first))
    return [_found(layers, int(index)) for index in ranked[:most]]


def _found(layers: list[Labels], index: int) -> Found:
    time_s, cost_usd = float(layers[-1].time_s[index]), float(layers[-1].cost_usd[index])
    path: Path = []
    for labels in reversed(layers):
        path.append((int(labels.at[index]), int(labels.option[index])))
        index = int(labels.parent[index])
    return Found(time_s=time_s, cost_usd=cost_usd, path=path[::-1])
