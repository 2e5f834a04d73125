"""The number of instances of a pool, by the efficiency of its GPUs (Pollux §5.4.1, cloud auto-scaling). Pure.

Pollux grows one training where its goodput per GPU is above U of the ideal, to the size where about L of it is left. A
pool grows so, too, with the sum of its experiments, and it shrinks to that size where less than L is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rubberband.planner.sharing.demand import Allocations, Capacity, Demand, Policy, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of a pool from an instant on."""

    instances: int
    efficiency: float
    """That of `efficiency`, at this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """The rule, with its two thresholds; the paper has 1/2 and 2/3."""

    lower: float
    """L: below it the pool shrinks, to the largest size that keeps it."""
    upper: float
    """U: above it the pool grows, to the largest size that keeps L."""

    def scale(
        self,
        instances: int,
        demands: Sequence[Demand],
        largest: Capacity,
        policy: Policy,
        current: Allocations,
        now_s: float,
    ) -> Scale:
        """Return the size that follows `instances`, from none to that of `largest`.

        It holds what is promised and, beside it, each single demand; and no instance is of no use to any. The search
        assumes that a larger pool is less efficient.
        """
        low, high = least_instances(demands, largest), most_instances(demands, largest)

        def at(size: int) -> Scale:
            capacity = Capacity(instances=size, gpus_per_instance=largest.gpus_per_instance)
            allocated = policy.allocate(demands, capacity, within(current, capacity), now_s)
            return Scale(instances=size, efficiency=efficiency(demands, capacity, allocated))

        if low == 0:
            return Scale(instances=0, efficiency=0.0)
        found = now = at(min(max(instances, low), high))
        if now.efficiency < self.lower:
            if now.instances == low:
                return now
            found, high = at(low), now.instances - 1
        elif now.efficiency <= self.upper:
            return now
        while found.instances < high:
            tried = at((found.instances + high + 1) // 2)
            if tried.efficiency >= self.lower:
                found = tried
            else:
                high = tried.instances - 1
        return found


def efficiency(demands: Sequence[Demand], capacity: Capacity, allocated: Allocations) -> float:
    """Return the speed-ups of the demands over the GPUs of the pool: 1 if all are used by gangs that scale perfectly.

    A speed-up is that over one GPU; where fewer than w are of no use, w times that over w. GPUs that are promised, and
    who holds them, do not count: their plans have chosen them.
    """
    free = capacity.gpus - sum(demand.promised_gpus for demand in demands)
    if free <= 0:
        return 0.0
    table = Table.of(demands, capacity, allocated, 0.0)
    rows = np.arange(len(demands))
    single_s, held_s = table.single_s(), table.seconds[rows, np.minimum(table.current, capacity.gpus)]
    speedups = np.where(np.isfinite(held_s) & (table.floor == 0), single_s / np.maximum(held_s, 1e-300), 0.0)
    return float(np.minimum(speedups, table.current).sum()) / free


def least_instances(demands: Sequence[Demand], largest: Capacity) -> int:
    """Return the fewest instances that hold what is promised and, beside it, any one of the other demands."""
    promised = sum(demand.promised_gpus for demand in demands)
    others = [demand.min_gpus for demand in demands if not demand.promised_gpus and demand.most_gpus > 0]
    gpus = promised + max(others, default=0)
    return min(largest.instances, -(-gpus // largest.gpus_per_instance))


def most_instances(demands: Sequence[Demand], largest: Capacity) -> int:
    """Return the most instances that are of use, each to one demand."""
    most = Table.of(demands, largest, {}, 0.0).most
    return min(largest.instances, int((-(-most // largest.gpus_per_instance)).sum()))


def within(allocations: Allocations, capacity: Capacity) -> dict[str, dict[int, int]]:
    """Return what is left of allocations on a pool of another size: the instances with the most GPUs in use stay."""
    used: dict[int, int] = {}
    for where in allocations.values():
        for number, gpus in where.items():
            used[number] = used.get(number, 0) + gpus
    if all(number < capacity.instances for number in used):
        return {name: dict(where) for name, where in allocations.items()}
    kept = sorted(used, key=lambda number: (-used[number], number))[: capacity.instances]
    numbers = {number: new for new, number in enumerate(sorted(kept))}
    cut = {
        name: {numbers[number]: gpus for number, gpus in where.items() if number in numbers}
        for name, where in allocations.items()
    }
    return {name: where for name, where in cut.items() if where}
