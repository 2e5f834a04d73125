"""What is said where no plan meets the constraints: what is out of reach, and the nearest value that is not."""

from __future__ import annotations

import math

from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.solver import Box
from rubberband.units import format_duration, format_usd


def too_late(box: Box, shortest_s: float, surely: str = "") -> str:
    """The deadline is out of reach; `surely` says with which confidence it is asked for."""
    return (
        f"deadline {format_duration(box.time_s)} cannot be met{surely}: the shortest plan takes "
        f"{_duration_up(shortest_s)}; raise the deadline to {_duration_up(shortest_s)}"
    )


def too_dear(box: Box, cheapest_usd: float, surely: str = "") -> str:
    """The budget is out of reach."""
    return (
        f"max_cost {format_usd(box.cost_usd)} cannot be kept{surely}: the cheapest plan costs {usd_up(cheapest_usd)}; "
        f"raise max_cost to {usd_up(cheapest_usd)}"
    )


def too_much_at_once(box: Box, in_time_usd: float, in_budget_s: float, surely: str = "") -> str:
    """Each of the two can be kept, and not both."""
    return (
        f"deadline {format_duration(box.time_s)} and max_cost {format_usd(box.cost_usd)} cannot both be kept{surely}: "
        f"the cheapest plan in time costs {usd_up(in_time_usd)} and the shortest plan for the money takes "
        f"{_duration_up(in_budget_s)}; raise max_cost to {usd_up(in_time_usd)}, "
        f"or the deadline to {_duration_up(in_budget_s)}"
    )


def _duration_up(seconds: float) -> str:
    """A duration as text, never rounded down: what the remedy names must be enough."""
    return format_duration(math.ceil(seconds - TIME_TOLERANCE_S))


def usd_up(amount_usd: float) -> str:
    """An amount as text, never rounded down."""
    unit_usd = 0.01 if amount_usd >= 0.1 else 0.0001
    return format_usd(math.ceil((amount_usd - COST_TOLERANCE_USD) / unit_usd) * unit_usd)
