"""What is said where no plan meets the constraints: what is out of reach, and the nearest value that is not."""

from __future__ import annotations

import math

from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.solver import Box
from rubberband.units import format_duration, format_usd
from rubberband.values.plan import Change, Remedy

Words = tuple[str, str]
"""What is out of reach, and what to do about it."""


def too_late(box: Box, shortest_s: float, surely: str = "") -> Words:
    """The deadline is out of reach; `surely` says with which confidence it is asked for."""
    shortest = format_duration(up_s(shortest_s))
    return (
        f"deadline {format_duration(box.time_s)} cannot be met{surely}: the shortest plan takes {shortest}",
        f"raise the deadline to {shortest}",
    )


def too_dear(box: Box, cheapest_usd: float, surely: str = "") -> Words:
    """The budget is out of reach."""
    cheapest = usd_up(cheapest_usd)
    return (
        f"max_cost {format_usd(box.cost_usd)} cannot be kept{surely}: the cheapest plan costs {cheapest}",
        f"raise max_cost to {cheapest}",
    )


def too_much_at_once(box: Box, in_time_usd: float, in_budget_s: float, surely: str = "") -> Words:
    """Each of the two can be kept, and not both."""
    in_time, in_budget = usd_up(in_time_usd), format_duration(up_s(in_budget_s))
    return (
        f"deadline {format_duration(box.time_s)} and max_cost {format_usd(box.cost_usd)} cannot both be kept{surely}: "
        f"the cheapest plan in time costs {in_time} and the shortest plan for the money takes {in_budget}",
        f"raise max_cost to {in_time}, or the deadline to {in_budget}",
    )


def advice(remedy: Remedy) -> str:
    """A remedy in a line: `raise max_instances to 24 (-s resources.max_instances=24: 18m41s, 14.47 USD)`."""
    named = [(_verb(change), f"{_NAMES[change.key]} to {_told(change)}") for change in remedy.changes]
    verbs = dict.fromkeys(verb for verb, _ in named)
    told = " and ".join(f"{verb} {' and '.join(what for each, what in named if each == verb)}" for verb in verbs)
    return f"{told} ({settings(remedy)}: {format_duration(remedy.jct_s)}, {format_usd(remedy.cost_usd)})"


def none_within(most_usd: float | None) -> str:
    """There is no remedy of what may be spent."""
    return f"no remedy was found within {format_usd(most_usd or 0.0)}, the limit here"


def line(remedy: Remedy) -> str:
    """A remedy in a line of a list: `-s constraints.deadline=26m5s: 26m5s, 13.71 USD; 6m5s later`."""
    told = f"{settings(remedy)}: {format_duration(remedy.jct_s)}, {format_usd(remedy.cost_usd)}"
    return "; ".join(filter(None, (told, concessions(remedy))))


def settings(remedy: Remedy) -> str:
    """What to add to a command line."""
    return " ".join(f"-s {change.setting}" for change in remedy.changes)


def concessions(remedy: Remedy) -> str:
    """`6m5s later`, `2.48 USD more`: what it asks for in time and money; empty if nothing."""
    later = f"{format_duration(remedy.later_s)} later" if remedy.later_s else ""
    return ", ".join(filter(None, (later, f"{format_usd(remedy.dearer_usd)} more" if remedy.dearer_usd else "")))


def _verb(change: Change) -> str:
    return "lower" if change.key.endswith(".min") else "raise"


def _told(change: Change) -> str:
    return format_usd(change.value) if isinstance(change.value, float) else str(change.value)


_NAMES = {
    "resources.gpus_per_trial.max": "gpus_per_trial.max",
    "resources.gpus_per_trial.min": "gpus_per_trial.min",
    "resources.max_instances": "max_instances",
    "constraints.deadline": "the deadline",
    "constraints.max_cost": "max_cost",
}


def up_s(seconds: float) -> int:
    """Whole seconds, never rounded down: what a remedy names must be enough."""
    return math.ceil(seconds - TIME_TOLERANCE_S)


def up_usd(amount_usd: float) -> float:
    """An amount in cents (or, below ten, in hundredths of them), never rounded down."""
    decimals = 2 if amount_usd >= 0.1 else 4
    return round(math.ceil((amount_usd - COST_TOLERANCE_USD) * 10.0**decimals) / 10.0**decimals, decimals)


def usd_up(amount_usd: float) -> str:
    """An amount as text, never rounded down."""
    return format_usd(up_usd(amount_usd))
