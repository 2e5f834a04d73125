"""Sharing a pool: policies that divide its GPUs among experiments, their place on instances, and promises.

`make_policy(name).allot(demands, capacity, current, now_s)` is one decision. `Calendar` says which plans can still be
promised. All of it is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rubberband.errors import InputError
from rubberband.planner.sharing.baselines import Optimus, Tiresias
from rubberband.planner.sharing.calendar import Calendar, Slot, Span
from rubberband.planner.sharing.demand import Allotment, Allotments, Capacity, Demand, Policy
from rubberband.planner.sharing.fitness import fitness
from rubberband.planner.sharing.greedy import gain, hell, knee
from rubberband.planner.sharing.placement import place
from rubberband.planner.sharing.simple import equal, fifo, srpt
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


def _counting(count: Callable[..., Ints], **fixed: Any) -> Callable[..., Policy]:
    """Return the maker of a policy that counts; its options are those of `count`."""
    return lambda **options: Counting(count=partial(count, **{**fixed, **options}))


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "default": _counting(fitness, p=-0.5, shortest=0.25),
    "fitness": _counting(fitness),
    "hell": _counting(hell),
    "knee": _counting(knee),
    "gain": _counting(gain),
    "equal": _counting(equal),
    "fifo": _counting(fifo),
    "srpt": _counting(srpt),
    "tiresias": Tiresias,
    "optimus": Optimus,
}
"""Name of a policy -> its maker; the last three are baselines to compare with."""


def make_policy(name: str, **options: Any) -> Policy:
    """Return a policy by its name, with its options: `fitness` has p, `knee` alpha, `hell` gamma.

    `knee` and `hell` also take resizing="moldable". Raises InputError if no policy has the name.
    """
    if name not in POLICIES:
        raise InputError(f"policy {name!r} does not exist; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](**options)
