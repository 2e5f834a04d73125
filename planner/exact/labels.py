"""Partial plans as arrays (labels), their extension by a stage, and the bounds by which the search drops them.

A label is a plan for the first stages: their time and cost, and the instances held after them. An instance's minimum is
paid when it starts. So a label also keeps the prepaid seconds: those that each young cohort (a group started together,
not yet held for the minimum) can still be held at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rubberband.planner.exact.table import Bools, Floats, Ints, StageTable

TIME_TOLERANCE_S = 1e-6
COST_TOLERANCE_USD = 1e-9


@dataclass(slots=True, kw_only=True)
class PlanLabels:
    """N partial plans that end with the same stage; not frozen, which would take as long as a few sums."""

    time_s: Floats
    cost_usd: Floats
    instances: Ints
    at: Ints
    """Index of `instances` in the table."""
    option: Ints
    parent: Ints
    """Index of the label of the previous stage that this one continues."""
    young: Ints
    """(N, cohorts) Instances of each cohort younger than the minimum, youngest first, 0 where there is none."""
    prepaid_s: Floats
    """(N, cohorts) Seconds until each of them reaches the minimum."""
    held: Ints
    """Instances summed over the stages, for ties."""

    def __len__(self) -> int:
        return len(self.time_s)

    def take(self, which: Ints | Bools) -> PlanLabels:
        """Return the labels `which`."""
        return PlanLabels(**{name: getattr(self, name)[which] for name in PlanLabels.__slots__})

    @property
    def prepaid_total_s(self) -> Floats:
        """(N,) Instance-seconds paid and not yet used."""
        return np.asarray((self.young * self.prepaid_s).sum(axis=1))


def start(table: StageTable) -> PlanLabels:
    """Return the one label before the first stage: nothing spent, and the instances of the table's start."""
    zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
    begin = table.start
    young, prepaid_s = np.zeros((1, table.young_cohorts), dtype=np.int64), np.zeros((1, table.young_cohorts))
    young[0, : len(begin.young)], prepaid_s[0, : len(begin.young)] = begin.young, begin.prepaid_s
    market = table.markets.index(begin.market)
    return PlanLabels(
        time_s=zero,
        cost_usd=zero,
        instances=np.array([begin.instances]),
        at=np.array([table.blocks[market].start]),
        option=none,
        parent=none,
        young=young,
        prepaid_s=prepaid_s,
        held=none,
    )


def extend(table: StageTable, stage: int, labels: PlanLabels, parent: Ints, at: Ints, option: Ints) -> PlanLabels:
    """Extend each label `parent` by `stage` with choice (`at`, `option`); time and cost are exact."""
    terms, price = table.terms, table.price_usd_per_s[at]
    after, before = table.instances[at], labels.instances[parent]
    if len(table.blocks) > 1:
        before = np.where(table.market[labels.at[parent]] == table.market[at], before, 0)
    grows = after > before
    picked = at * table.duration_s.shape[2] + option
    duration_s, late_s, extra_usd = (
        values[stage].ravel()[picked] for values in (table.duration_s, table.late_s, table.extra_usd)
    )
    kept = np.minimum(before, after)
    started = after - kept
    init_s = terms.init_s + terms.later_s(started)
    elapsed_s = duration_s + (terms.provision_s + init_s) * grows
    billed_s = kept * elapsed_s
    young, prepaid_s = labels.young[parent], labels.prepaid_s[parent]
    if table.young_cohorts:
        if labels.young.any():
            young = young * (before > 0)[:, None]
            older = np.cumsum(young, axis=1) - young  # these are released first
            young = np.minimum(np.maximum(after[:, None] - older, 0), young)
            billed_s = billed_s - (young * np.minimum(prepaid_s, elapsed_s[:, None])).sum(axis=1)
        young, prepaid_s = _age(table, young, prepaid_s, elapsed_s, started, init_s + duration_s)
    billed_s = billed_s + started * np.maximum(terms.minimum_s, init_s + duration_s)
    return PlanLabels(
        time_s=labels.time_s[parent] + elapsed_s + late_s + terms.late_growth_s * grows,
        cost_usd=labels.cost_usd[parent]
        + price * billed_s
        + terms.data_usd * started
        + terms.head_usd_per_s * elapsed_s
        + extra_usd,
        instances=after,
        at=at,
        option=option,
        parent=parent,
        young=young,
        prepaid_s=prepaid_s,
        held=labels.held[parent] + after,
    )


def _age(
    table: StageTable, young: Ints, prepaid_s: Floats, elapsed_s: Floats, started: Ints, new_age_s: Floats
) -> tuple[Ints, Floats]:
    """Return the young cohorts `elapsed_s` later, with those `started` meanwhile (aged `new_age_s`) in front."""
    new_s = np.maximum(0.0, table.terms.minimum_s - new_age_s)
    grows = started > 0
    if not young.any():
        young, prepaid_s = np.zeros_like(young), np.zeros_like(prepaid_s)
        young[:, 0], prepaid_s[:, 0] = started * (new_s > 0.0), new_s * grows
        return young, prepaid_s
    prepaid_s = np.maximum(0.0, prepaid_s - elapsed_s[:, None])
    shifted_young = np.concatenate([started[:, None], young[:, :-1]], axis=1)
    shifted_s = np.concatenate([new_s[:, None], prepaid_s[:, :-1]], axis=1)
    young, prepaid_s = np.where(grows[:, None], shifted_young, young), np.where(grows[:, None], shifted_s, prepaid_s)
    return np.where(prepaid_s > 0.0, young, 0), prepaid_s


def undominated(table: StageTable, labels: PlanLabels) -> PlanLabels:
    """Return `labels` without those that another label with as many instances beats in every continuation.

    A beats B if it is not later, and its cost plus B's prepaid time beyond A's (instance by instance in the order of
    release) is not higher: every continuation of B is possible from A for no more.
    """
    if len(labels) == 1:
        return labels
    labels = labels.take(
        np.lexsort((labels.held, np.round(labels.cost_usd, 10), np.round(labels.time_s, 7), labels.at))
    )
    price = table.price_usd_per_s[labels.at]
    cost_usd = np.round(labels.cost_usd, 10)
    net_usd = np.round(labels.cost_usd - price * labels.prepaid_total_s, 10)
    keep = net_usd < _cheapest_before(labels.at, cost_usd)
    labels = labels.take(keep)
    if table.young_cohorts and labels.young.any():
        labels = labels.take(~_beaten(table, labels))
    return labels


def _cheapest_before(groups: Ints, cost_usd: Floats) -> Floats:
    """Return the lowest cost before each label in its group (inf for the first); groups are contiguous."""
    cheapest, current, lowest_usd = list[float](), -1, math.inf
    for group, label_usd in zip(groups.tolist(), cost_usd.tolist(), strict=True):
        if group != current:
            current, lowest_usd = group, math.inf
        cheapest.append(lowest_usd)
        if label_usd < lowest_usd:
            lowest_usd = label_usd
    return np.array(cheapest)


_LAGS = 8


def _beaten(table: StageTable, labels: PlanLabels) -> Bools:
    """Return whether one of the `_LAGS` labels next to each one in its group, on either side, beats it.

    Comparing neighbours only keeps this linear. A beaten label that stays costs time, never correctness.
    """
    beaten = np.zeros(len(labels), dtype=bool)
    for lag in range(1, min(_LAGS, len(labels) - 1) + 1):
        early, late = np.arange(len(labels) - lag), np.arange(lag, len(labels))
        pairs = labels.at[early] == labels.at[late]
        pairs &= ~beaten[early] & ~beaten[late]
        first, second = early[pairs], late[pairs]
        if len(first):
            beaten[second[_beats(table, labels, first, second)]] = True
    return beaten


def _beats(table: StageTable, labels: PlanLabels, first: Ints, second: Ints) -> Bools:
    """Return whether label `first` (never later), plus the prepaid time of `second` beyond it, costs no more."""
    ends_a, ends_b = np.cumsum(labels.young, axis=1)[first], np.cumsum(labels.young, axis=1)[second]
    starts_a, starts_b = ends_a - labels.young[first], ends_b - labels.young[second]
    prepaid_a, prepaid_b = labels.prepaid_s[first], labels.prepaid_s[second]
    missing_s = np.zeros(len(first))
    for b in range(table.young_cohorts):
        uncovered = ends_b[:, b] - starts_b[:, b]
        for a in range(table.young_cohorts):
            both = np.minimum(ends_a[:, a], ends_b[:, b]) - np.maximum(starts_a[:, a], starts_b[:, b])
            both = np.maximum(0, both)
            uncovered = uncovered - both
            missing_s += both * np.maximum(0.0, prepaid_b[:, b] - prepaid_a[:, a])
        missing_s += uncovered * prepaid_b[:, b]
    missing_usd = table.price_usd_per_s[labels.at[first]] * missing_s
    return np.asarray(labels.cost_usd[first] + missing_usd <= labels.cost_usd[second] + 1e-12)


# Lower bounds for the search: relaxations of the planning problem, each solved in one sweep over the table.
#
# A row weighs cost and time: `cost_weight * cost + time_weight * time`, the Lagrangian of the problem with a
# deadline. The billing minimum M makes an instance's cost max(M, L) for a life of L seconds. A row replaces it by the
# lower alpha*M + (1 - alpha)*L, so that every term is linear in the instance counts. Then the best way from stage to
# stage takes running minima only, not every pair of instance counts.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """R relaxations at once; all arrays are (R,)."""

    cost_weight: Floats
    time_weight: Floats
    alpha: Floats

    def __len__(self) -> int:
        return len(self.alpha)


def make_rows(table: StageTable, time_weights: Floats, *, with_time: bool = False) -> Rows:
    """Return a row of cost + time_weight * time for each weight (USD/s) and alpha, and one of time if `with_time`."""
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
    """The solved rows of a table, backwards and forwards."""

    rows: Rows
    to_go: Floats
    """(stages + 1, R, m) Least weight of the stages from this one on, if the m-th count is held before it."""
    through: Floats
    """(stages, R, m) Least weight of the whole job, if this stage uses the m-th count."""
    root: Floats
    """(R,) Least weight of the whole job."""
    weights: Weights


@dataclass(frozen=True, slots=True)
class Weights:
    """Arc weights of the rows: staying weighs `stay`, growing from k to k' adds `new * k' + old * k + delay`."""

    stay: Floats
    """(stages, R, m) A stage with the m-th count, without growth."""
    option: Ints
    """(stages, R, m) The option with this weight."""
    rate: Floats
    """(R, m) Of one instance held for a second."""
    leave: Floats
    """(R, m) Of one instance already held while others start, less the fee that it does not pay again."""
    new: Floats
    """(R, m) Added for the count after the growth."""
    old: Floats
    """(R, m) Added for the count before the growth."""
    delay: Floats
    """(R, 1) Added for any growth, of one instance."""
    per_s: Floats
    """(R, 1) Of a second of the job."""


def _weigh(table: StageTable, rows: Rows) -> Weights:
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
    return Weights(
        stay=stay,
        option=option,
        rate=rate,
        leave=rate * terms.provision_s - fee,
        new=(fee + rate * terms.init_s) * counts,
        old=(rate * terms.provision_s - fee) * counts,
        delay=per_s * terms.growth_s + rows.time_weight[:, None] * terms.late_growth_s,
        per_s=per_s,
    )


def roots(table: StageTable, rows: Rows, *, constant: bool = False, most: Ints | None = None) -> Floats:
    """(R,) Return the least weight of the whole job: `relax` without its other results.

    With `most`, each row has its own largest instance count (inf where no plan has as few).
    """
    weights = _weigh(table, rows)
    if most is not None:
        weights.stay[:, table.instances > most[:, None]] = np.inf
    to_go = np.zeros_like(weights.stay[0])
    for stage in range(table.num_stages - 1, 0, -1):
        to_go += weights.stay[stage]
        if not constant:
            to_go = _onward(table, weights, to_go)
    return np.asarray((weights.stay[0] + _entry(table, weights) + to_go).min(axis=1))


def relax(table: StageTable, rows: Rows, *, constant: bool = False) -> Relaxed:
    """Solve `rows` on `table`; `constant` allows no change of the instance count after the first stage."""
    weights = _weigh(table, rows)
    num_stages, _, num_counts = weights.stay.shape
    to_go = np.zeros((num_stages + 1, len(rows), num_counts))
    for stage in range(num_stages - 1, 0, -1):
        onward = weights.stay[stage] + to_go[stage + 1]
        to_go[stage] = onward if constant else _onward(table, weights, onward)
    first = weights.stay[0] + _entry(table, weights)
    whole = first + to_go[1]
    to_go[0] = whole.min(axis=1, keepdims=True)
    through = _so_far(table, weights, first, constant)
    through += to_go[1:]
    return Relaxed(rows=rows, to_go=to_go, through=through, root=to_go[0, :, 0], weights=weights)


def _entry(table: StageTable, weights: Weights) -> Floats:
    """(R, m) Return the weight before the first stage: from the instances held, less prepaid time, to each count."""
    begin = table.start
    if not begin.instances:
        held = weights.rate * table.instances + weights.per_s
        return np.asarray(weights.new + weights.delay + held * table.terms.later_s(table.instances))
    market = table.markets.index(begin.market)
    block = table.blocks[market]
    rate, leave = weights.rate[:, block.start, None], weights.leave[:, block.start, None]
    grow = weights.new + weights.delay + np.where(table.market == market, leave * begin.instances, 0.0)
    keeps = (table.market == market) & (table.instances <= begin.instances)
    return np.asarray(np.where(keeps, 0.0, grow) - rate * begin.prepaid_total_s)


def _onward(table: StageTable, weights: Weights, onward: Floats) -> Floats:
    """(R, m) Return the best way on from each count: keep or shrink, grow, or start anew on the other market."""
    if len(table.blocks) == 1:
        grow = np.minimum.accumulate((onward + weights.new)[:, ::-1], axis=1)[:, ::-1]
        grow += weights.old
        grow += weights.delay
        return np.minimum(np.minimum.accumulate(onward, axis=1), grow, out=grow)
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


def _crossings(table: StageTable) -> list[tuple[slice, slice]]:
    return [(block, other) for block in table.blocks for other in table.blocks if block is not other]


def _so_far(table: StageTable, weights: Weights, first: Floats, constant: bool) -> Floats:
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


def best_paths(table: StageTable, relaxed: Relaxed, constant: bool) -> tuple[Ints, Ints]:
    """(R, stages) Return the index of each stage's instance count in a plan that reaches `root`, and its option."""
    weights, to_go = relaxed.weights, relaxed.to_go
    num_stages, num_rows, _ = weights.stay.shape
    rows, counts = np.arange(num_rows), table.instances
    paths = np.zeros((num_rows, num_stages), dtype=np.int64)
    paths[:, 0] = relaxed.through[0].argmin(axis=1)
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
