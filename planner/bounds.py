"""Lower bounds for the search: relaxations of the planning problem that a table solves in one sweep.

A row weighs cost and time: `cost_weight * cost + time_weight * time`, the Lagrangian of the problem with a deadline.
The billing minimum M makes an instance's cost max(M, L) for a life of L seconds; a row replaces it by the lower
alpha*M + (1 - alpha)*L, so that every term is linear in the instance counts. Then the best way from stage to stage
needs running minima only, not a look at every pair of instance counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rubberband.planner.table import Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """R relaxations at once; all arrays are (R,)."""

    cost_weight: Floats
    time_weight: Floats
    alpha: Floats

    def __len__(self) -> int:
        return len(self.alpha)


def make_rows(table: Table, time_weights: Floats, *, with_time: bool = False) -> Rows:
    """A row of cost + time_weight * time for each weight (USD/s) and alpha, and one of time alone `with_time`."""
    alphas = np.array([0.0, 0.5, 1.0]) if table.young_cohorts else np.array([0.0])
    tail = 1 if with_time else 0
    weights = np.repeat(time_weights, len(alphas))
    return Rows(
        cost_weight=np.concatenate([np.ones(len(weights)), np.zeros(tail)]),
        time_weight=np.concatenate([weights, np.ones(tail)]),
        alpha=np.concatenate([np.tile(alphas, len(time_weights)), np.zeros(tail)]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """The rows solved on a table, backwards and forwards."""

    rows: Rows
    to_go: Floats
    """(stages + 1, R, m) What the stages from this one on weigh at least, if m-th count is held before it."""
    so_far: Floats
    """(stages, R, m) What the stages up to this one weigh at least, if it uses the m-th count."""
    root: Floats
    """(R,) What the whole job weighs at least."""
    paths: Ints
    """(R, stages) Index of the instance count of each stage in a plan that reaches `root`."""
    options: Ints
    """(R, stages) Its options."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Arc weights of the rows: staying weighs `stay`, growing from k to k' adds `new * k' + old * k + delay`."""

    stay: Floats
    """(stages, R, m) A stage with the m-th count, without growth."""
    option: Ints
    """(stages, R, m) The option that makes it so."""
    new: Floats
    """(R, m)"""
    old: Floats
    """(R, m)"""
    delay: Floats
    """(R, 1)"""


def _weigh(table: Table, rows: Rows) -> _Weights:
    terms = table.terms
    counts = table.instances[None, :].astype(float)
    rate = (rows.cost_weight * (1.0 - rows.alpha))[:, None] * table.price_usd_per_s
    fee = rows.cost_weight[:, None] * (rows.alpha[:, None] * terms.minimum_s * table.price_usd_per_s + terms.data_usd)
    per_s = (rows.cost_weight * terms.head_usd_per_s + rows.time_weight)[:, None]
    held = (rate * counts + per_s)[None, :, :, None]
    weights = held * table.duration_s[:, None] + rows.cost_weight[None, :, None, None] * table.extra_usd[:, None]
    weights += rows.time_weight[None, :, None, None] * table.late_s[:, None]
    if weights.shape[3] == 1:
        option = np.zeros(weights.shape[:3], dtype=np.int64)
        stay = weights[..., 0]
    else:
        option = weights.argmin(axis=3)
        stay = weights.min(axis=3)
    return _Weights(
        stay=stay,
        option=option,
        new=(fee + rate * terms.init_s) * counts,
        old=(rate * terms.provision_s - fee) * counts,
        delay=per_s * terms.growth_s + rows.time_weight[:, None] * terms.late_growth_s,
    )


def roots(table: Table, rows: Rows, *, constant: bool = False, most: Ints | None = None) -> Floats:
    """(R,) What the whole job weighs at least: `relax` without all that a search needs beside.

    With `most`, each row has a largest instance count of its own (inf where no plan has as few).
    """
    weights = _weigh(table, rows)
    if most is not None:
        weights.stay[:, table.instances > most[:, None]] = np.inf
    to_go = np.zeros_like(weights.stay[0])
    for stage in range(table.num_stages - 1, 0, -1):
        to_go += weights.stay[stage]
        if not constant:
            to_go = _onward(table, weights, to_go)
    lowest: Floats = (weights.stay[0] + _entry(table, rows, weights) + to_go).min(axis=1)
    return lowest


def fastest_s(table: Table, *, constant: bool = False) -> Floats:
    """(m,) Seconds of the fastest plan with 1, 2, ... instances at most; inf where there is none."""
    most = np.arange(1, int(table.instances.max()) + 1)
    ones = np.ones(len(most))
    return roots(table, Rows(cost_weight=0.0 * ones, time_weight=ones, alpha=0.0 * ones), constant=constant, most=most)


def relax(table: Table, rows: Rows, *, constant: bool = False) -> Relaxed:
    """Solve `rows` on `table`; `constant` allows no change of the instance count after the first stage."""
    weights = _weigh(table, rows)
    num_stages, _, num_counts = weights.stay.shape
    to_go = np.zeros((num_stages + 1, len(rows), num_counts))
    for stage in range(num_stages - 1, 0, -1):
        onward = weights.stay[stage] + to_go[stage + 1]
        to_go[stage] = onward if constant else _onward(table, weights, onward)
    first = weights.stay[0] + _entry(table, rows, weights)
    whole = first + to_go[1]
    to_go[0] = whole.min(axis=1, keepdims=True)
    paths, options = _follow(weights, to_go, whole.argmin(axis=1), table, constant)
    return Relaxed(
        rows=rows,
        to_go=to_go,
        so_far=_so_far(table, weights, first, constant),
        root=to_go[0, :, 0],
        paths=paths,
        options=options,
    )


def _entry(table: Table, rows: Rows, weights: _Weights) -> Floats:
    """(R, m) What comes before the first stage: from what is held (less what of it is paid already) to each count."""
    begin = table.start
    if not begin.instances:
        return weights.new + weights.delay
    market = table.markets.index(begin.market)
    block = table.blocks[market]
    price = table.price_usd_per_s[block.start]
    rate = (rows.cost_weight * (1.0 - rows.alpha))[:, None] * price
    fee = rows.cost_weight[:, None] * (rows.alpha[:, None] * table.terms.minimum_s * price + table.terms.data_usd)
    grow = (
        weights.new
        + weights.delay
        + np.where(table.market == market, (rate * table.terms.provision_s - fee) * begin.instances, 0.0)
    )
    keeps = (table.market == market) & (table.instances <= begin.instances)
    entry: Floats = np.where(keeps, 0.0, grow) - rate * begin.prepaid_total_s
    return entry


def _onward(table: Table, weights: _Weights, onward: Floats) -> Floats:
    """(R, m) The best way on from each count: keep or shrink, grow, or buy anew on the other market."""
    best = np.empty_like(onward)
    for block in table.blocks:
        here, new = onward[:, block], weights.new[:, block]
        keep = np.minimum.accumulate(here, axis=1)
        grow = np.minimum.accumulate((here + new)[:, ::-1], axis=1)[:, ::-1] + weights.old[:, block] + weights.delay
        best[:, block] = np.minimum(keep, grow)
    for block, other in _crossings(table):
        anew = (onward[:, other] + weights.new[:, other]).min(axis=1, keepdims=True) + weights.delay
        best[:, block] = np.minimum(best[:, block], anew)
    return best


def _crossings(table: Table) -> list[tuple[slice, slice]]:
    return [(block, other) for block in table.blocks for other in table.blocks if block is not other]


def _so_far(table: Table, weights: _Weights, first: Floats, constant: bool) -> Floats:
    so_far = np.empty_like(weights.stay)
    so_far[0] = first
    for stage in range(1, len(so_far)):
        before = so_far[stage - 1]
        arrive = before if constant else np.empty_like(before)
        for block in [] if constant else table.blocks:
            here = before[:, block]
            kept = np.minimum.accumulate(here[:, ::-1], axis=1)[:, ::-1]
            grown = np.minimum.accumulate(here + weights.old[:, block], axis=1) + weights.new[:, block] + weights.delay
            arrive[:, block] = np.minimum(kept, grown)
        for block, other in [] if constant else _crossings(table):
            anew = before[:, other].min(axis=1, keepdims=True) + weights.new[:, block] + weights.delay
            arrive[:, block] = np.minimum(arrive[:, block], anew)
        so_far[stage] = weights.stay[stage] + arrive
    return so_far


def _follow(weights: _Weights, to_go: Floats, first: Ints, table: Table, constant: bool) -> tuple[Ints, Ints]:
    """Each row's best path from the start, and its options."""
    num_stages, num_rows, _ = weights.stay.shape
    rows, counts = np.arange(num_rows), table.instances
    paths = np.zeros((num_rows, num_stages), dtype=np.int64)
    paths[:, 0] = first
    for stage in range(1, num_stages):
        now = paths[:, stage - 1]
        if constant:
            paths[:, stage] = now
            continue
        onward = weights.stay[stage] + to_go[stage + 1]
        same = table.market == table.market[now][:, None]
        grow = weights.new + np.where(same, weights.old[rows, now][:, None], 0.0) + weights.delay
        keeps = same & (counts <= counts[now][:, None])
        paths[:, stage] = (onward + np.where(keeps, 0.0, grow)).argmin(axis=1)
    options = np.stack([weights.option[stage, rows, paths[:, stage]] for stage in range(num_stages)], axis=1)
    return paths, options
