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
    rate = (rows.cost_weight * terms.price_usd_per_s * (1.0 - rows.alpha))[:, None]
    fee = (rows.cost_weight * (terms.price_usd_per_s * rows.alpha * terms.minimum_s + terms.data_usd))[:, None]
    per_s = (rows.cost_weight * terms.head_usd_per_s + rows.time_weight)[:, None]
    held = (rate * counts + per_s)[None, :, :, None]
    weights = held * table.duration_s[:, None] + rows.cost_weight[None, :, None, None] * table.function_usd[:, None]
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
        delay=per_s * terms.growth_s,
    )


def relax(table: Table, rows: Rows, *, constant: bool = False) -> Relaxed:
    """Solve `rows` on `table`; `constant` allows no change of the instance count after the first stage."""
    weights = _weigh(table, rows)
    num_stages, _, num_counts = weights.stay.shape
    to_go = np.zeros((num_stages + 1, len(rows), num_counts))
    for stage in range(num_stages - 1, 0, -1):
        onward = weights.stay[stage] + to_go[stage + 1]
        if constant:
            to_go[stage] = onward
            continue
        keep = np.minimum.accumulate(onward, axis=1)
        grow = np.minimum.accumulate((onward + weights.new)[:, ::-1], axis=1)[:, ::-1] + weights.old + weights.delay
        to_go[stage] = np.minimum(keep, grow)
    first = weights.stay[0] + weights.new + weights.delay
    whole = first + to_go[1]
    to_go[0] = whole.min(axis=1, keepdims=True)
    paths, options = _follow(weights, to_go, whole.argmin(axis=1), table, constant)
    return Relaxed(
        rows=rows,
        to_go=to_go,
        so_far=_so_far(weights, first, constant),
        root=to_go[0, :, 0],
        paths=paths,
        options=options,
    )


def _so_far(weights: _Weights, first: Floats, constant: bool) -> Floats:
    so_far = np.empty_like(weights.stay)
    so_far[0] = first
    for stage in range(1, len(so_far)):
        before = so_far[stage - 1]
        if constant:
            so_far[stage] = weights.stay[stage] + before
            continue
        kept = np.minimum.accumulate(before[:, ::-1], axis=1)[:, ::-1]
        grown = np.minimum.accumulate(before + weights.old, axis=1) + weights.new + weights.delay
        so_far[stage] = weights.stay[stage] + np.minimum(kept, grown)
    return so_far


def _follow(weights: _Weights, to_go: Floats, first: Ints, table: Table, constant: bool) -> tuple[Ints, Ints]:
    """Each row's best path from the start, and its options."""
    num_stages, num_rows, num_counts = weights.stay.shape
    rows, counts = np.arange(num_rows), np.arange(num_counts)
    paths = np.zeros((num_rows, num_stages), dtype=np.int64)
    paths[:, 0] = first
    for stage in range(1, num_stages):
        now = paths[:, stage - 1]
        if constant:
            paths[:, stage] = now
            continue
        onward = weights.stay[stage] + to_go[stage + 1]
        grow = weights.new + weights.old[rows, now][:, None] + weights.delay
        paths[:, stage] = (onward + np.where(counts > now[:, None], grow, 0.0)).argmin(axis=1)
    options = np.stack([weights.option[stage, rows, paths[:, stage]] for stage in range(num_stages)], axis=1)
    return paths, options
