"""Words for constraints that no plan meets: the limit out of reach, the nearest value within reach, and remedies."""

from __future__ import annotations

import math
from collections.abc import Callable

from rubberband.errors import InfeasibleError
from rubberband.planner.exact.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.exact.solver import Box
from rubberband.units import format_duration, format_usd
from rubberband.values.plan import Change, Remedy


def unreachable(
    box: Box,
    shortest_s: float,
    cheapest_usd: float,
    both: Callable[[], tuple[float, float]],
    surely: str = "",
    beside: str = "",
) -> InfeasibleError:
    """Return the error for limits out of reach, with the nearest values within reach.

    `shortest_s` and `cheapest_usd` are those of all plans. `both` finds the lowest cost in time and the shortest time
    within the budget, where each limit can be kept by itself. `surely` names the confidence asked for, and `beside`
    what the costs include beside the plan's.
    """
    in_time, in_budget = box.limits_kept(shortest_s, cheapest_usd)
    if not in_time:
        return too_late(box, shortest_s, cheapest_usd, surely)
    if not in_budget:
        return too_dear(box, shortest_s, cheapest_usd, surely, beside)
    in_time_usd, in_budget_s = both()
    cost, duration = usd_up(in_time_usd), format_duration(up_s(in_budget_s))
    return InfeasibleError(
        f"deadline {format_duration(box.time_s)} and max_cost {format_usd(box.cost_usd)} cannot both be kept{surely}: "
        f"the cheapest plan in time costs {cost}{beside} and the shortest plan for the money takes {duration}",
        advice=f"raise max_cost to {cost}, or the deadline to {duration}",
        shortest_jct_s=shortest_s,
        cheapest_usd=cheapest_usd,
    )


def too_late(box: Box, shortest_s: float, cheapest_usd: float, surely: str = "") -> InfeasibleError:
    """Return the error for a deadline out of reach."""
    shortest = format_duration(up_s(shortest_s))
    return InfeasibleError(
        f"deadline {format_duration(box.time_s)} cannot be met{surely}: the shortest plan takes {shortest}",
        advice=f"raise the deadline to {shortest}",
        shortest_jct_s=shortest_s,
        cheapest_usd=cheapest_usd,
    )


def too_dear(box: Box, shortest_s: float, cheapest_usd: float, surely: str = "", beside: str = "") -> InfeasibleError:
    """Return the error for a budget out of reach."""
    cheapest = usd_up(cheapest_usd)
    return InfeasibleError(
        f"max_cost {format_usd(box.cost_usd)} cannot be kept{surely}: the cheapest plan costs {cheapest}{beside}",
        advice=f"raise max_cost to {cheapest}",
        shortest_jct_s=shortest_s,
        cheapest_usd=cheapest_usd,
    )


def advice(remedy: Remedy) -> str:
    """Return a remedy in a line: `raise max_instances to 24 (-s resources.max_instances=24: 18m41s, 14.47 USD)`."""
    named = [(_verb(change), f"{_NAMES[change.key]} to {_value(change)}") for change in remedy.changes]
    verbs = dict.fromkeys(verb for verb, _ in named)
    steps = " and ".join(f"{verb} {' and '.join(what for each, what in named if each == verb)}" for verb in verbs)
    return f"{steps} ({settings(remedy)}: {format_duration(remedy.jct_s)}, {format_usd(remedy.cost_usd)})"


def none_within(most_usd: float | None) -> str:
    """Say that no remedy within the budget was found."""
    return f"no remedy was found within {format_usd(most_usd or 0.0)}, the limit here"


def line(remedy: Remedy) -> str:
    """Return a remedy as a line of a list: `-s constraints.deadline=26m5s: 26m5s, 13.71 USD; 6m5s later`."""
    figures = f"{settings(remedy)}: {format_duration(remedy.jct_s)}, {format_usd(remedy.cost_usd)}"
    return "; ".join(filter(None, (figures, concessions(remedy))))


def settings(remedy: Remedy) -> str:
    """Return the options to add to a command line."""
    return " ".join(f"-s {change.setting}" for change in remedy.changes)


def concessions(remedy: Remedy) -> str:
    """Return the time and money that a remedy asks for, such as `6m5s later, 2.48 USD more`; empty if none."""
    later = f"{format_duration(remedy.later_s)} later" if remedy.later_s else ""
    return ", ".join(filter(None, (later, f"{format_usd(remedy.dearer_usd)} more" if remedy.dearer_usd else "")))


def _verb(change: Change) -> str:
    return "lower" if change.key.endswith(".min") else "raise"


def _value(change: Change) -> str:
    return format_usd(change.value) if isinstance(change.value, float) else str(change.value)


_NAMES = {
    "resources.gpus_per_trial.max": "gpus_per_trial.max",
    "resources.gpus_per_trial.min": "gpus_per_trial.min",
    "resources.max_instances": "max_instances",
    "constraints.deadline": "the deadline",
    "constraints.max_cost": "max_cost",
}


def up_s(seconds: float) -> int:
    """Round up to whole seconds: the value that a remedy names must be enough."""
    return math.ceil(seconds - TIME_TOLERANCE_S)


def up_usd(amount_usd: float) -> float:
    """Round up to cents (below ten cents, to hundredths of a cent)."""
    decimals = 2 if amount_usd >= 0.1 else 4
    return round(math.ceil((amount_usd - COST_TOLERANCE_USD) * 10.0**decimals) / 10.0**decimals, decimals)


def usd_up(amount_usd: float) -> str:
    """Format an amount, rounded up."""
    return format_usd(up_usd(amount_usd))
