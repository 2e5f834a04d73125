"""Known facts of one lane of several brackets: bounds on its time and cost, and the plans already solved."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rubberband.planner.exact.labels import TIME_TOLERANCE_S, fastest_s
from rubberband.planner.exact.solver import Price
from rubberband.planner.exact.table import StageTable
from rubberband.values.plan import Planned

Group = tuple[int, ...]
"""Numbers of the brackets of a lane."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Lower bounds on time and cost of a lane's plans, on fixed times."""

    fastest_s: list[float]
    """With at most 1, 2, ... instances; inf where they cannot hold a trial."""
    price: Price

    @classmethod
    def of(cls, table: StageTable, *, constant: bool) -> Reach:
        """Solve the relaxations of the lane's table."""
        return cls(fastest_s(table, constant=constant).tolist(), Price.of(table, constant=constant))

    def needed(self, deadline_s: float | None) -> float:
        """Return the fewest instances that a plan in time needs; inf if none is in time."""
        late_s = sys.float_info.max if deadline_s is None else deadline_s + TIME_TOLERANCE_S
        return next((count for count, time_s in enumerate(self.fastest_s, 1) if time_s <= late_s), math.inf)

    def least_usd(self, deadline_s: float | None) -> float:
        """Return a lower bound on the cost of a plan in time, up to rounding."""
        return self.price.least_usd(math.inf if deadline_s is None else deadline_s)


class Solved(NamedTuple):
    """The cheapest plan of a lane with at most `quota` instances by `limit_s`; None if there is none."""

    quota: int
    limit_s: float
    planned: Planned | None

    def answers(self, quota: int, limit_s: float) -> bool:
        """Return whether this answers other limits too: they are narrower, and the plan is within them."""
        if quota > self.quota or limit_s > self.limit_s:
            return False
        return self.planned is None or (
            self.planned.prediction.jct_s <= limit_s + TIME_TOLERANCE_S and widest(self.planned) <= quota
        )


def widest(planned: Planned) -> int:
    """Return the most instances that a plan holds."""
    return max(choice.instances for choice in planned.plan.stages)


def partitions(numbers: list[int]) -> Iterator[list[Group]]:
    """Yield every division of `numbers` into groups."""
    if not numbers:
        yield []
        return
    first, rest = numbers[0], numbers[1:]
    for groups in partitions(rest):
        yield [(first,), *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], (first, *group), *groups[at + 1 :]]
