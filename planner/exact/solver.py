"""The exact search: label-setting over (stage, instances held), pruned by Lagrangian bounds (RubberBand §4).

The paper's Algorithm 2 is a greedy descent; this one finds a plan that no other beats. If no plan is within the limits
it returns None; it raises nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from rubberband.planner.exact.labels import (
    COST_TOLERANCE_USD,
    TIME_TOLERANCE_S,
    PlanLabels,
    Relaxed,
    Rows,
    best_paths,
    extend,
    make_rows,
    relax,
    roots,
    start,
    undominated,
)
from rubberband.planner.exact.table import Bools, Floats, Ints, StageTable, distinct
from rubberband.values.plan import Odds, PlanningConstraints

Objective = Literal["min_cost", "min_time"]
OBJECTIVES: tuple[Objective, Objective] = ("min_time", "min_cost")
Path = list[tuple[int, int]]


def by_objective(objective: Objective, time_s: Any, cost_usd: Any) -> tuple[Any, Any]:
    """Return the figure that is the objective, and the other one: numbers or arrays."""
    return (cost_usd, time_s) if objective == "min_cost" else (time_s, cost_usd)


_FAR = np.concatenate([[0.0], np.geomspace(1 / 64, 4096, 19)])
_NEAR = np.geomspace(1 / 64, 64, 12)
"""Weights of time, as shares of cost per second."""
_SLOPES = np.geomspace(1 / 256, 256, 40)
_PARTS = 2  # most labels fall out of a room by the first part of its rows
_NEAR_ROWS = 24
"""Relaxations that bound one part of the frontier."""
_PAIRS_AT_ONCE = 1_000_000  # bounds the memory of a stage
_BOUNDS_AT_ONCE = 50_000  # labels times rows; those that fall out are not compared with the rows after
_NEARBY = (1.02, 1.0001)  # most best plans cost less than their lower bound by these factors
_FEW_COUNTS = 8  # with more in a stage, few plans are near the bound only if none is
_FEW_PLANS = 300  # as many are tried as fast as a search without any finds one
_FEW_STATES = 500  # with so few, one search is as fast as a narrow one before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The plans of interest: those within this time and cost."""

    time_s: float = np.inf
    cost_usd: float = np.inf

    @classmethod
    def of(cls, constraints: PlanningConstraints) -> Box:
        """Return the box of all plans that keep deadline and budget."""
        return cls(
            time_s=np.inf if constraints.deadline_s is None else constraints.deadline_s,
            cost_usd=np.inf if constraints.max_cost_usd is None else constraints.max_cost_usd,
        )

    def limits_kept(self, time_s: Any, cost_usd: Any) -> tuple[Any, Any]:
        """Return whether plans are in time, and in budget, up to the rounding of floats: for numbers or arrays."""
        return time_s <= self.time_s + TIME_TOLERANCE_S, cost_usd <= self.cost_usd + COST_TOLERANCE_USD

    def holds(self, time_s: Floats, cost_usd: Floats) -> Bools:
        """Return which of the plans lie in the box."""
        in_time, in_budget = self.limits_kept(time_s, cost_usd)
        return np.asarray(in_time & in_budget)

    def odds(self, jct_s: Floats, cost_usd: Floats) -> Odds:
        """Return the share of samples that keep each limit."""
        in_time, in_budget = self.limits_kept(jct_s, cost_usd)
        return Odds(
            p_deadline=float(in_time.mean()),
            p_budget=float(in_budget.mean()),
            p_both=float((in_time & in_budget).mean()),
        )

    def less(self, reserve_usd: float) -> Box:
        """Return the plans that leave this money beside their cost."""
        return Box(time_s=self.time_s, cost_usd=self.cost_usd - reserve_usd)

    def within(self, objective: Objective, upper: float) -> Box:
        """Return the part of the box whose plans reach an objective of `upper` or better."""
        if objective == "min_cost":
            return Box(time_s=self.time_s, cost_usd=min(upper, self.cost_usd))
        return Box(time_s=min(upper, self.time_s), cost_usd=self.cost_usd)

    def limits(self, rows: Rows) -> Floats:
        """(R,) The most that a plan in the box weighs in each row, with room for the rounding of sums."""
        with np.errstate(invalid="ignore"):
            time_s = np.where(rows.time_weight > 0, rows.time_weight * (self.time_s + 2 * TIME_TOLERANCE_S), 0.0)
            cost_usd = np.where(rows.cost_weight > 0, rows.cost_weight * (self.cost_usd + 2 * COST_TOLERANCE_USD), 0.0)
        total: Floats = time_s + cost_usd
        return total + 1e-12 * np.abs(np.where(np.isfinite(total), total, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan's choices, with its time and cost."""

    time_s: float
    cost_usd: float
    path: Path

    def rank(self, objective: Objective) -> tuple[float, float]:
        """Return the objective and the other figure, rounded: the lowest is the best."""
        return by_objective(objective, round(self.time_s, 6), round(self.cost_usd, 9))


def solve(
    table: StageTable, box: Box, objective: Objective = "min_cost", *, constant: bool = False
) -> FoundPlan | None:
    """Return the best plan in `box`, or None; `constant` allows one instance count for all stages.

    The best has the lowest cost and, among those, the shortest time (`min_time`: the other way round), then the
    fewest instances held over the stages, then the fewest GPUs per trial.
    """
    if constant and table.duration_s.shape[2] == 1:
        return _best_constant(table, box, objective)
    plans = several(table, box, objective, constant=constant, most=1)
    return plans[0] if plans else None


def _best_constant(table: StageTable, box: Box, objective: Objective) -> FoundPlan | None:
    """Try every instance count for all stages at once, where each stage has one option."""
    paths = np.arange(len(table.instances))[:, None].repeat(table.num_stages, axis=1)
    layers = _carried_out(table, paths, np.zeros_like(paths))
    labels = layers[-1]
    if objective == "min_time" and not np.isfinite(box.cost_usd):
        box, objective = Box(time_s=min(box.time_s, float(labels.time_s.min()))), "min_cost"
    layers[-1] = labels.take(box.holds(labels.time_s, labels.cost_usd))
    return _best(layers, objective, 1)[0] if len(layers[-1]) else None


def several(table: StageTable, box: Box, objective: Objective, *, constant: bool = False, most: int) -> list[FoundPlan]:
    """Return the best plan in `box` and up to `most` - 1 others that the search has met, best first."""
    if objective == "min_time" and not np.isfinite(box.cost_usd) and table.terms.slower_s is None:
        fastest_s = float(relax(table, make_rows(table, np.zeros(0), with_time=True), constant=constant).root[0])
        box, objective = Box(time_s=min(box.time_s, fastest_s)), "min_cost"
    relaxed, lowest = _bracket(table, box, objective, constant)
    if most == 1 and not constant:
        for share in _NEARBY:
            near = box.within(objective, lowest * share)
            counts = _open_counts(relaxed, _Rooms.of(near, relaxed.rows))
            if (plan := _best_of_few(table, near, counts, objective)) is not None:
                return [plan]
            if max(map(len, counts)) > _FEW_COUNTS:
                break
    best = _achieved(table, relaxed, box, objective, constant)
    reach = best if best is not None else by_objective(objective, box.time_s, box.cost_usd)[0]
    for upper in _widening(table, box, relaxed, objective, lowest, reach):
        smaller = box.within(objective, upper)
        layers = label_setting(table, _Rooms.of(smaller, relaxed.rows), relaxed, constant=constant)
        if len(layers) == table.num_stages:
            layers[-1] = layers[-1].take(smaller.holds(layers[-1].time_s, layers[-1].cost_usd))
            if len(layers[-1]):
                return _best(layers, objective, most)
    return []


def _best_of_few(table: StageTable, box: Box, counts: Sequence[Ints], objective: Objective) -> FoundPlan | None:
    """Return the best plan in a box by trying all of these instance counts; None if there are many plans, or none."""
    choices = [np.nonzero(table.valid[stage, of_stage]) for stage, of_stage in enumerate(counts)]
    sizes = [len(option) for _, option in choices[::-1]]
    if not 0 < math.prod(sizes) <= _FEW_PLANS:
        return None
    numbers = np.unravel_index(np.arange(math.prod(sizes)), sizes)[::-1]
    paths = np.stack([of_stage[at][n] for of_stage, (at, _), n in zip(counts, choices, numbers, strict=True)], axis=1)
    options = np.stack([option[n] for (_, option), n in zip(choices, numbers, strict=True)], axis=1)
    layers = _carried_out(table, paths, options)
    layers[-1] = layers[-1].take(box.holds(layers[-1].time_s, layers[-1].cost_usd))
    return _best(layers, objective, 1)[0] if len(layers[-1]) else None


def _widening(
    table: StageTable, box: Box, relaxed: Relaxed, objective: Objective, lowest: float, reach: float
) -> list[float]:
    """Return upper bounds on the objective to try in turn, up to `reach`: near the lower bound, few labels survive."""
    if not np.isfinite(reach) or reach <= lowest * (1.0 + 1e-9):
        return [reach]
    rooms = _Rooms.of(box.within(objective, reach), relaxed.rows)
    num_states = sum(map(len, _open_counts(relaxed, rooms)))
    if num_states * table.duration_s.shape[2] <= _FEW_STATES:
        return [reach]
    return [lowest + share * (reach - lowest) for share in (0.02, 0.1, 0.3)] + [reach]


def _open_counts(relaxed: Relaxed, rooms: _Rooms) -> list[Ints]:
    """Return indices of the instance counts that some plan in the rooms may use in each stage."""
    return [np.flatnonzero(is_open) for is_open in rooms.open(relaxed.through)]


def pareto(table: StageTable, box: Box, *, constant: bool = False) -> list[FoundPlan]:
    """Return every plan in `box` that no other beats on both time and cost, fastest first.

    The relaxations meet some of them. The others lie in the rectangles (rooms) between two neighbours: one search
    covers all rooms at once, each with the bounds that are tight there.
    """
    weights = _usd_per_s(_ends(table, constant)) * _SLOPES
    rows = make_rows(table, np.concatenate([[0.0], weights]), with_time=True)
    relaxed = relax(table, rows, constant=constant)
    own = _carried_out(table, *best_paths(table, relaxed, constant))[-1]
    inside = box.holds(own.time_s, own.cost_usd)
    met = list(zip(own.time_s[inside].tolist(), own.cost_usd[inside].tolist(), strict=True))
    if not met:
        ends = [solve(table, box, objective, constant=constant) for objective in OBJECTIVES]
        met = [(plan.time_s, plan.cost_usd) for plan in ends if plan is not None]
    if not met:
        return []
    layers = label_setting(table, _Rooms.between(_staircase(met), box, rows), relaxed, constant=constant)
    labels = layers[-1].take(box.holds(layers[-1].time_s, layers[-1].cost_usd))
    points = list(zip(labels.time_s.tolist(), labels.cost_usd.tolist(), strict=True))
    index_of = {point: index for index, point in reversed(list(enumerate(points)))}
    layers[-1] = labels
    return [_plan_of(layers, index_of[point]) for point in _staircase(points)]


@dataclass(frozen=True, slots=True)
class _Rooms:
    """Rectangles of time and cost that plans of interest lie in, each with the rows that bound it."""

    rows: Ints
    """(rooms, r) Indices of rows."""
    limits: Floats
    """(rooms, r) The most that a plan in the room weighs in each."""
    times_s: Floats
    """(rooms,) Longest time of a plan in the room, increasing."""
    costs_usd: Floats
    """(rooms,) Its highest cost, decreasing."""

    @classmethod
    def of(cls, box: Box, rows: Rows) -> _Rooms:
        """Return one room, with all rows that bound it."""
        limits = box.limits(rows)
        binding = np.flatnonzero(np.isfinite(limits))
        return cls(binding[None], limits[None, binding], np.array([box.time_s]), np.array([box.cost_usd]))

    @classmethod
    def between(cls, corners: Sequence[tuple[float, float]], box: Box, rows: Rows) -> _Rooms:
        """Return the rooms between unbeaten plans (`corners`), and at the two ends."""
        times_s, costs_usd = [time_s for time_s, _ in corners], [cost_usd for _, cost_usd in corners]
        boxes = [
            Box(time_s=min(time_s, box.time_s), cost_usd=min(cost_usd, box.cost_usd))
            for time_s, cost_usd in zip([*times_s, box.time_s], [costs_usd[0], *costs_usd], strict=True)
        ]
        limits = np.array([room.limits(rows) for room in boxes])
        # The rows that are tight in a room weigh time about as its sides do.
        drops = [max(dear - cheap, 1e-9) for dear, cheap in itertools.pairwise(costs_usd)]
        spans = [max(late - early, 1e-9) for early, late in itertools.pairwise(times_s)]
        inner = [drop / span for drop, span in zip(drops, spans, strict=True)]
        slopes = np.array([np.inf, *inner, 0.0])[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.abs(np.log(rows.time_weight[None, :]) - np.log(slopes))
        steps[:, rows.cost_weight == 0.0] = -1.0
        steps[0] = np.where(rows.cost_weight == 0.0, -1.0, -rows.time_weight)
        steps[-1] = np.where(rows.cost_weight == 0.0, -1.0, rows.time_weight)
        steps[0, rows.cost_weight == 0.0] = -np.inf
        steps[~np.isfinite(limits)] = np.inf
        near = np.argsort(steps, axis=1, kind="stable")[:, :_NEAR_ROWS]
        kept = np.take_along_axis(limits, near, axis=1)
        return cls(
            near,
            np.where(np.isfinite(kept), kept, np.inf),
            np.array([room.time_s * (1.0 + 1e-12) + 2 * TIME_TOLERANCE_S for room in boxes]),
            np.array([room.cost_usd * (1.0 + 1e-12) + 2 * COST_TOLERANCE_USD for room in boxes]),
        )

    def latest_s(self, row: int) -> float:
        """Return the bound of the row of time alone in the widest room; inf if it bounds none."""
        here = self.rows == row
        return float(self.limits[here].max()) if here.any(axis=1).all() else np.inf

    def open(self, weights: Floats) -> Bools:
        """(stages, N) Whether partial plans of these weights (stages, R, N) may lie in a room."""
        is_open = np.zeros((weights.shape[0], weights.shape[2]), dtype=bool)
        for rows, limits in zip(self.rows, self.limits, strict=True):
            is_open |= (weights[:, rows] <= limits[:, None]).all(axis=1)
        return is_open


def _staircase(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (seconds, USD) that no other beats on both by more than rounding, by time."""
    steps: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (round(point[0], 6), point[1])):
        if not steps or point[1] < steps[-1][1] - COST_TOLERANCE_USD:
            steps.append(point)
    return steps


def unbeaten(points: Sequence[tuple[float, float]], box: Box | None = None) -> list[tuple[float, float]]:
    """Return the points (seconds, USD) of a box that no other beats on both, by time, to the last bit."""
    steps: list[tuple[float, float]] = []
    for point in sorted(points):
        is_inside = box is None or (point[0] <= box.time_s and point[1] <= box.cost_usd)
        if is_inside and (not steps or point[1] < steps[-1][1]):
            steps.append(point)
    return steps


def label_setting(table: StageTable, rooms: _Rooms, relaxed: Relaxed, *, constant: bool = False) -> list[PlanLabels]:
    """Return the undominated labels of each stage that some plan in the rooms may continue; short if none is left."""
    labels, layers = start(table), list[PlanLabels]()
    for stage, open_counts in enumerate(_open_counts(relaxed, rooms)):
        if not len(open_counts):
            return layers
        labels = _next(table, stage, labels, open_counts, relaxed, rooms, constant)
        if not len(labels):
            return layers
        layers.append(labels)
    return layers


def _next(
    table: StageTable, stage: int, labels: PlanLabels, counts: Ints, relaxed: Relaxed, rooms: _Rooms, constant: bool
) -> PlanLabels:
    """Return the undominated labels after `stage`, by chunks of pairs (label, choice)."""
    open_at, option = np.nonzero(table.valid[stage, counts])
    at = counts[open_at]
    chunk = max(1, _PAIRS_AT_ONCE // len(at))
    parts = []
    for first in range(0, len(labels), chunk):
        parents = np.arange(first, min(first + chunk, len(labels)))
        pairs = _promising(table, stage, labels, parents, at, option, relaxed, rooms, constant)
        grown = extend(table, stage, labels, *pairs)
        parts.append(grown.take(_within(table, stage, grown, relaxed, rooms)))
    if len(parts) == 1:
        return undominated(table, parts[0])
    merged = PlanLabels(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in PlanLabels.__slots__}
    )
    return undominated(table, merged)


def _promising(
    table: StageTable,
    stage: int,
    labels: PlanLabels,
    parents: Ints,
    at: Ints,
    option: Ints,
    relaxed: Relaxed,
    rooms: _Rooms,
    constant: bool,
) -> tuple[Ints, Ints, Ints]:
    """Return the pairs (label, choice) that can be in time: a cheap sieve before exact costs."""
    before, after = labels.instances[parents][:, None], table.instances[at][None, :]
    same = table.market[labels.at[parents]][:, None] == table.market[at]
    growth_s = (table.terms.growth_s + table.terms.late_growth_s) * ((after > before) | ~same)
    if table.terms.slower_s is not None:
        growth_s = growth_s + table.terms.later_s(np.maximum(0, after - before * same))
    stage_s = table.duration_s[stage, at, option] + table.late_s[stage, at, option]
    ends_s = labels.time_s[parents][:, None] + stage_s + growth_s
    keep = np.ones(ends_s.shape, dtype=bool)
    for row in np.flatnonzero(relaxed.rows.cost_weight == 0.0):
        latest_s = rooms.latest_s(int(row))
        if np.isfinite(latest_s):
            keep &= ends_s + relaxed.to_go[stage + 1, row, at] <= latest_s
    if constant and stage:
        keep &= (before == after) & same
    parent, choice = np.nonzero(keep)
    return parents[parent], at[choice], option[choice]


def _within(table: StageTable, stage: int, labels: PlanLabels, relaxed: Relaxed, rooms: _Rooms) -> Ints:
    """Return the labels that some plan in the rooms may continue, by every row's bound, a few rows at a time."""
    rows, to_go = relaxed.rows, relaxed.to_go[stage + 1]
    prepaid_usd = table.price_usd_per_s[labels.at] * labels.prepaid_total_s
    if len(rooms.rows) > 1:
        return _within_some(labels, prepaid_usd, rows, to_go, rooms)
    left = np.arange(len(labels))
    size = max(1, _BOUNDS_AT_ONCE // max(1, len(labels)))
    for first in range(0, rooms.rows.shape[1], size):
        block, limits = rooms.rows[0, first : first + size, None], rooms.limits[0, first : first + size, None]
        weight = _weight(rows, labels.cost_usd[left], labels.time_s[left], prepaid_usd[left], block)
        left = left[(weight + to_go[block, labels.at[left]] <= limits).all(axis=0)]
    return left


def _within_some(labels: PlanLabels, prepaid_usd: Floats, rows: Rows, to_go: Floats, rooms: _Rooms) -> Ints:
    """`_within` for several rooms: each label is compared with the rooms that its least time and cost allow."""
    ends = np.flatnonzero((rows.cost_weight == 0.0) | (rows.time_weight == 0.0))[:, None]
    least = _weight(rows, labels.cost_usd, labels.time_s, prepaid_usd, ends) + to_go[ends, labels.at]
    is_time = rows.cost_weight[ends[:, 0]] == 0.0
    first = np.searchsorted(rooms.times_s, least[is_time].max(axis=0))
    last = len(rooms.rows) - np.searchsorted(rooms.costs_usd[::-1], least[~is_time].max(axis=0))
    left, is_within = np.flatnonzero(first < last), np.zeros(len(labels), dtype=bool)
    for room, (block, limits) in enumerate(zip(rooms.rows, rooms.limits, strict=True)):
        here = left[(first[left] <= room) & (room < last[left]) & ~is_within[left]]
        for some in np.array_split(np.arange(len(block)), _PARTS):
            cut = block[some, None]
            weight = _weight(rows, labels.cost_usd[here], labels.time_s[here], prepaid_usd[here], cut)
            here = here[(weight + to_go[cut, labels.at[here]] <= limits[some, None]).all(axis=0)]
        is_within[here] = True
    return np.flatnonzero(is_within)


def _weight(rows: Rows, cost_usd: Floats, time_s: Floats, prepaid_usd: Floats, block: Ints) -> Floats:
    """(rows of the block, N) Weights of partial plans so far."""
    sunk_usd = cost_usd - (1.0 - rows.alpha[block]) * prepaid_usd
    return np.asarray(rows.cost_weight[block] * sunk_usd + rows.time_weight[block] * time_s)


def lower_bound(table: StageTable, box: Box, objective: Objective) -> float:
    """Return a lower bound on the objective of any plan in `box`; inf if there is surely none."""
    ends, least = _sloped(table, "ends", constant=False)
    if least[-1] > box.time_s + TIME_TOLERANCE_S or least[0] > box.cost_usd + COST_TOLERANCE_USD:
        return np.inf
    between, root = _sloped(table, "near", constant=False)
    return float(max(_dual(ends, least, box, objective).max(), _dual(between, root, box, objective).max()))


def _sloped(table: StageTable, which: Literal["ends", "near", "far"], *, constant: bool) -> tuple[Rows, Floats]:
    """Return rows of a table and their roots: of cost and of time alone, or of slopes between them."""
    if (which, constant) not in table.bounds:
        if which == "ends":
            rows = make_rows(table, np.zeros(1), with_time=True)
        else:
            rows = make_rows(table, _usd_per_s(_ends(table, constant)) * (_NEAR if which == "near" else _FAR))
        table.bounds[which, constant] = rows, roots(table, rows, constant=constant)
    found: tuple[Rows, Floats] = table.bounds[which, constant]
    return found


def _ends(table: StageTable, constant: bool) -> Floats:
    """Return lower bounds on the cost (first) and the time (last) of any plan."""
    return _sloped(table, "ends", constant=constant)[1]


def _usd_per_s(ends: Floats) -> float:
    """Return the cost per second at which time and cost weigh alike."""
    return float(max(ends[0], 1e-9) / max(ends[-1], 1e-9))


class Reach:
    """Lower bounds on the time and the cost of a table's plans, for any deadline; each is solved when it is needed."""

    def __init__(self, table: StageTable, *, constant: bool) -> None:
        self._table, self._constant = table, constant

    @cached_property
    def fastest_s(self) -> list[float]:
        """Seconds with at most 1, 2, ... instances; inf where they cannot hold a trial."""
        most = np.arange(1, int(self._table.instances.max()) + 1)
        ones = np.ones(len(most))
        times = Rows(cost_weight=0.0 * ones, time_weight=ones, alpha=0.0 * ones)
        found: list[float] = roots(self._table, times, constant=self._constant, most=most).tolist()
        return found

    def needed(self, deadline_s: float | None) -> float:
        """Return the fewest instances that a plan in time needs; inf if none is in time."""
        if deadline_s is None:
            return int(self._table.instances.min())
        late_s = deadline_s + TIME_TOLERANCE_S
        return next((count for count, time_s in enumerate(self.fastest_s, 1) if time_s <= late_s), math.inf)

    def least_usd(self, deadline_s: float | None) -> float:
        """Return a lower bound on the cost of a plan in time, up to rounding."""
        rows, root = _sloped(self._table, "ends" if deadline_s is None else "far", constant=self._constant)
        box = Box(time_s=math.inf if deadline_s is None else deadline_s)
        return float(_dual(rows, root, box, "min_cost").max())


def _bracket(table: StageTable, box: Box, objective: Objective, constant: bool) -> tuple[Relaxed, float]:
    """Return the solved rows, and a lower bound on the objective."""
    usd_per_s, bounded = _usd_per_s(_ends(table, constant)), box.time_s if objective == "min_cost" else box.cost_usd
    if np.isfinite(bounded):
        known: Literal["near", "far"] = "near" if ("near", constant) in table.bounds else "far"
        weights = usd_per_s * (_NEAR if known == "near" else _FAR)
        rows, root = _sloped(table, known, constant=constant)
        value = _dual(rows, root, box, objective)
        peak = int(np.searchsorted(weights, rows.time_weight[int(value.argmax())]))
        low, high = weights[max(0, peak - 1)], weights[min(len(weights) - 1, peak + 1)]
        near = np.concatenate([np.linspace(low, high, 7), [weights[peak]]])
        weights = distinct(np.concatenate([near, high * np.array([0.0, 0.25, 0.5, 2.0, 4.0, 16.0])]))
    else:  # it only breaks ties
        weights = np.array([0.0]) if objective == "min_cost" else usd_per_s * _FAR[-1:]
    solved = relax(table, make_rows(table, weights, with_time=True), constant=constant)
    return solved, max(0.0, float(_dual(solved.rows, solved.root, box, objective).max()))


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


def _achieved(table: StageTable, solved: Relaxed, box: Box, objective: Objective, constant: bool) -> float | None:
    """Return the best objective in `box` among the rows' own plans."""
    own = _carried_out(table, *best_paths(table, solved, constant))[-1]
    inside = box.holds(own.time_s, own.cost_usd)
    values, _ = by_objective(objective, own.time_s, own.cost_usd)
    return float(values[inside].min()) if inside.any() else None


def _carried_out(table: StageTable, paths: Ints, options: Ints) -> list[PlanLabels]:
    """Return the labels of each stage of given plans; both arrays are (plans, stages)."""
    layers: list[PlanLabels] = []
    for stage in range(table.num_stages):
        parents = np.arange(len(paths)) if layers else np.zeros(len(paths), dtype=np.int64)
        before = layers[-1] if layers else start(table)
        layers.append(extend(table, stage, before, parents, paths[:, stage], options[:, stage]))
    return layers


def _best(layers: list[PlanLabels], objective: Objective, most: int) -> list[FoundPlan]:
    final = layers[-1]
    first, second = by_objective(objective, np.round(final.time_s, 6), np.round(final.cost_usd, 9))
    ranked = np.lexsort((final.held, second, first))
    return [_plan_of(layers, int(index)) for index in ranked[:most]]


def _plan_of(layers: list[PlanLabels], index: int) -> FoundPlan:
    time_s, cost_usd = float(layers[-1].time_s[index]), float(layers[-1].cost_usd[index])
    path: Path = []
    for labels in reversed(layers):
        path.append((int(labels.at[index]), int(labels.option[index])))
        index = int(labels.parent[index])
    return FoundPlan(time_s=time_s, cost_usd=cost_usd, path=path[::-1])
