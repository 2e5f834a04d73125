"""Sharing a pool: policies that divide its GPUs among experiments, their place on instances, and promises.

`make_policy(name).allot(demands, capacity, current, now_s)` is one decision. `Calendar` says which plans can still be
promised. All of it is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rubberband.errors import InputError
from rubberband.planner.sharing.calendar import Calendar, Slot, Span
from rubberband.planner.sharing.demand import Allotment, Allotments, Capacity, Demand, Policy
from rubberband.planner.sharing.placement import place
from rubberband.planner.sharing.simple import equal, fifo
from rubberband.planner.sharing.table import Ints, Table

__all__ = [
    "POLICIES",
    "Allotment",
    "Allotments",
    "Calendar",
    "Capacity",
    "Demand",
    "Policy",
    "Slot",
    "Span",
    "make_policy",
    "place",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """Policy that counts GPUs first and then places them."""

    count: Callable[[Table], Ints]

    def allot(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allotments, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Count the GPUs of every demand, and place them."""
        counted = self.count(Table.of(demands, capacity, current, now_s)).tolist()
        gpus = {demand.name: count for demand, count in zip(demands, counted, strict=True)}
        return place(gpus, capacity, current, {demand.name: demand.min_gpus for demand in demands})


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "fifo": lambda: Counting(count=fifo),
    "equal": lambda: Counting(count=equal),
}
"""Name of a policy -> its maker."""


def make_policy(name: str) -> Policy:
    """Return a policy by its name. Raises InputError if there is none of it."""
    if name not in POLICIES:
        raise InputError(f"policy {name!r} does not exist; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
