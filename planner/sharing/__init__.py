"""Sharing a pool: policies that divide its GPUs among experiments, their place on instances, and promises.

`make_policy(name).allocate(demands, capacity, current, now_s)` is one decision. `Calendar` says which plans can still
be promised. All of it is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from rubberband.errors import InputError
from rubberband.planner.sharing.autoscaling import Autoscaling, Scale, within
from rubberband.planner.sharing.calendar import Calendar, CalendarSlot, Span
from rubberband.planner.sharing.demand import Allocation, Allocations, Capacity, Demand, Ints, Policy, Table
from rubberband.planner.sharing.placement import place, place_side_by_side
from rubberband.planner.sharing.policies import (
    AlphaRange,
    Optimus,
    Resizing,
    Tiresias,
    equal,
    fifo,
    fitness,
    gain,
    hell,
    knee,
    ranked,
    srpt,
)

__all__ = [
    "POLICIES",
    "Allocation",
    "Allocations",
    "Autoscaling",
    "Calendar",
    "CalendarSlot",
    "Capacity",
    "Counting",
    "Demand",
    "Policy",
    "Scale",
    "Span",
    "keeps_promises",
    "make_policy",
    "place",
    "place_side_by_side",
    "within",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """Policy that counts GPUs first and then places them."""

    count: Callable[[Table], Ints]
    first_gpus: int = 1
    """Most GPUs that a job begins with whose speed is measured as it runs; then it has at most twice those measured."""
    share_machines: bool = False
    """Whether gangs that span instances may share one. By default they avoid it (Pollux §4.2, interference)."""

    def allocate(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allocations, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Count the GPUs of every demand, and place them."""
        table = Table.of(demands, capacity, current, now_s)
        counted = table.rounded(self.count(table)).tolist()
        assert sum(counted) <= capacity.gpus, f"{sum(counted)} GPUs of {capacity.gpus} are given"
        gpus = {demand.name: count for demand, count in zip(demands, counted, strict=True)}
        if self.share_machines:
            return place_side_by_side(gpus, capacity, current)
        least = {demand.name: demand.min_gpus for demand in demands}
        promised = {demand.name: demand.promised_gpus for demand in demands}
        return place(gpus, capacity, current, least, promised)


def _counting(count: Callable[..., Ints], first: float = 1) -> Callable[..., Policy]:
    """Return the maker of a policy that counts; its options are those of `count`, and the GPUs of a job's start."""
    return lambda *, first=first, **options: Counting(count=partial(count, **options), first_gpus=int(first))


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "default": _counting(ranked, first=2),
    "ranked": _counting(ranked, first=2),
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


def keeps_promises(name: str) -> bool:
    """Return whether a policy, named as for `make_policy`, gives every demand what it is promised."""
    return isinstance(make_policy(name), Counting)


def make_policy(name: str, **options: Any) -> Policy:
    """Return a policy by its name, with options: `fitness` has p, `knee` alpha, `hell` gamma.

    They may also be written behind the name, as `knee:alpha=0.05`. `knee` and `hell` take resizing=moldable, too.
    `alpha` may be two numbers, (0.01, 0.05) or `knee:alpha=0.01..0.05`: then it follows the load.

    Raises InputError for a name or an option that does not exist, one given twice, and a value out of range.
    """
    bare, _, written = name.partition(":")
    if bare not in POLICIES:
        raise InputError(f"policy {bare!r} does not exist; choose one of {', '.join(POLICIES)}")
    for part in filter(None, written.split(",")):
        key, _, value = (each.strip() for each in part.partition("="))
        if key in options:
            raise InputError(f"policy {name!r} has {key} twice; give it once")
        options[key] = _value(name, key, value)
    for key in options:
        if key not in OPTIONS.get(bare, ()):
            known = ", ".join(OPTIONS.get(bare, ())) or "none"
            raise InputError(f"policy {bare!r} has no option {key!r}; its options: {known}")
    return POLICIES[bare](**options)


OPTIONS: Mapping[str, Sequence[str]] = {
    "default": ("gamma", "first"),
    "ranked": ("gamma", "first"),
    "fitness": ("p", "first"),
    "hell": ("gamma", "resizing"),
    "knee": ("alpha", "resizing"),
    "tiresias": ("threshold_gpu_s",),
}
"""Policy -> its options."""
_RANGES = {"p": (-100.0, 1.0), "first": (1.0, 1024.0), "gamma": (0.0, 10.0), "alpha": (0.0, 1.0)}


def _value(policy: str, key: str, text: str) -> float | str | AlphaRange:
    if key == "resizing":
        if text not in get_args(Resizing):
            raise InputError(f"policy {policy!r}: resizing={text!r}; write one of {', '.join(get_args(Resizing))}")
        return text
    low, high = _RANGES.get(key, (0.0, math.inf))
    first, is_range, last = text.partition("..") if key == "alpha" else (text, "", "")
    try:
        value, end = float(first), float(last or first)
    except ValueError:
        value = end = math.nan
    if not low <= value <= end <= high or (is_range and not last):
        also = ", or two of them, the smaller one first, as 0.01..0.05" if key == "alpha" else ""
        raise InputError(
            f"policy {policy!r}: {key}={text!r} is not a number from {low:g} to {high:g}{also}; correct it"
        )
    return (value, end) if is_range else value
