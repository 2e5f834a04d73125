"""Partial plans as arrays (labels) and what another stage does to them; labels that another one beats are dropped.

A label is a plan for the first stages: how long they take, what they cost, and how many instances are held after them.
An instance's minimum is paid when it starts, so a label also keeps what is prepaid: the seconds that each young cohort
(a group started together, not yet held for the minimum) may still be held for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rubberband.planner.table import Bools, Floats, Ints, Table

TIME_TOLERANCE_S = 1e-6
COST_TOLERANCE_USD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """N partial plans that end with the same stage."""

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

    def take(self, which: Ints | Bools) -> Labels:
        """The labels `which`."""
        return Labels(
            time_s=self.time_s[which],
            cost_usd=self.cost_usd[which],
            instances=self.instances[which],
            at=self.at[which],
            option=self.option[which],
            parent=self.parent[which],
            young=self.young[which],
            prepaid_s=self.prepaid_s[which],
            held=self.held[which],
        )

    @property
    def prepaid_total_s(self) -> Floats:
        """(N,) Instance-seconds that are paid and not yet used."""
        total: Floats = (self.young * self.prepaid_s).sum(axis=1)
        return total


def start(table: Table) -> Labels:
    """The one label before the first stage: nothing spent, and what the table's start holds."""
    zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
    begin = table.start
    young, prepaid_s = np.zeros((1, table.young_cohorts), dtype=np.int64), np.zeros((1, table.young_cohorts))
    young[0, : len(begin.young)], prepaid_s[0, : len(begin.young)] = begin.young, begin.prepaid_s
    market = table.markets.index(begin.market)
    return Labels(
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


def extend(table: Table, stage: int, labels: Labels, parent: Ints, at: Ints, option: Ints) -> Labels:
    """Labels `parent`, each continued through `stage` with choice (`at`, `option`); exact time and cost."""
    terms, price = table.terms, table.price_usd_per_s[at]
    after, before = table.instances[at], labels.instances[parent]
    if len(table.blocks) > 1:
        before = np.where(table.market[labels.at[parent]] == table.market[at], before, 0)
    grows = after > before
    picked = at * table.duration_s.shape[2] + option
    duration_s, late_s, extra_usd = (
        each[stage].ravel()[picked] for each in (table.duration_s, table.late_s, table.extra_usd)
    )
    elapsed_s = duration_s + terms.growth_s * grows
    kept = np.minimum(before, after)
    started, billed_s = after - kept, kept * elapsed_s
    young, prepaid_s = labels.young[parent], labels.prepaid_s[parent]
    if table.young_cohorts:
        if labels.young.any():
            young = _remaining(young * (before > 0)[:, None], after)
            billed_s = billed_s - (young * np.minimum(prepaid_s, elapsed_s[:, None])).sum(axis=1)
        young, prepaid_s = _age(table, young, prepaid_s, elapsed_s, started, terms.init_s + duration_s)
    billed_s = billed_s + started * np.maximum(terms.minimum_s, terms.init_s + duration_s)
    return Labels(
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


def _remaining(young: Ints, after: Ints) -> Ints:
    """What of each young cohort is left where `after` instances are: the older ones are released first."""
    older = np.cumsum(young, axis=1) - young
    return np.minimum(np.maximum(after[:, None] - older, 0), young)


def _age(
    table: Table, young: Ints, prepaid_s: Floats, elapsed_s: Floats, started: Ints, new_age_s: Floats
) -> tuple[Ints, Floats]:
    """The young cohorts `elapsed_s` later, with those `started` meanwhile (aged `new_age_s` by now) in front."""
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


def undominated(table: Table, labels: Labels) -> Labels:
    """`labels` without those that another label with as many instances beats whatever follows.

    A beats B if it is not later and its cost, plus all that B has prepaid beyond A (instance by instance in the order
    of release), is not higher: whatever B does next, A can do for no more.
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


def _cheapest_before(group: Ints, cost_usd: Floats) -> Floats:
    """The lowest cost of the labels before each one in its group (inf for the first); groups are contiguous."""
    found, here, lowest_usd = list[float](), -1, math.inf
    for at, label_usd in zip(group.tolist(), cost_usd.tolist(), strict=True):
        if at != here:
            here, lowest_usd = at, math.inf
        found.append(lowest_usd)
        if label_usd < lowest_usd:
            lowest_usd = label_usd
    return np.array(found)


def _beaten(table: Table, labels: Labels, lags: int = 8) -> Bools:
    """Whether one of the `lags` labels next to each one in its group, on either side, beats it.

    Looking at neighbours only keeps this linear; a label that stays by mistake costs time, never correctness.
    """
    beaten = np.zeros(len(labels), dtype=bool)
    for lag in range(1, min(lags, len(labels) - 1) + 1):
        early, late = np.arange(len(labels) - lag), np.arange(lag, len(labels))
        pairs = labels.at[early] == labels.at[late]
        pairs &= ~beaten[early] & ~beaten[late]
        first, second = early[pairs], late[pairs]
        if len(first):
            beaten[second[_beats(table, labels, first, second)]] = True
    return beaten


def _beats(table: Table, labels: Labels, first: Ints, second: Ints) -> Bools:
    """Whether each label `first` (never later) costs no more than `second` with what `second` has prepaid beyond it."""
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
    beats: Bools = labels.cost_usd[first] + missing_usd <= labels.cost_usd[second] + 1e-12
    return beats
