"""The spot market of the fake: a price for each type and zone that moves, the same for the same seed."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tests.ec2.machine_types import MachineType

HOUR_S = 3600.0
LOWEST = 0.1
"""No price falls below this share of its average."""


@dataclass(slots=True, kw_only=True)
class SpotMarket:
    """Its attributes may be changed by a test before anything is bought."""

    seed: int
    step_s: float = HOUR_S
    """From one price to the next."""
    swing: float = 0.2
    """A price is within this share of its average, and at most the price on demand (as it has been since 2017)."""
    walks: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def set(self, instance_type: str, zone: str, walk: Sequence[tuple[float, float]]) -> None:
        """Let a price be this walk: (from an instant on, USD per hour), in order; the first one holds before, too."""
        self.walks[instance_type, zone] = list(walk)

    def price_usd(self, machine: MachineType, zone: str, at: float) -> float:
        walk = self.walks.get((machine.name, zone))
        if walk is not None:
            return walk[max(0, bisect_right(walk, at, key=lambda change: change[0]) - 1)][1]
        step = int((at - self._offset_s(machine, zone)) // self.step_s)
        moved = _moved(f"{self.seed} {machine.name} {zone} {step}", self.swing)
        share = machine.spot_share * max(LOWEST, 1.0 + moved)
        return round(machine.price_usd_per_hour * min(1.0, share), 6)

    def changes(self, machine: MachineType, zone: str, start: float, end: float) -> Iterator[float]:
        """When the price changed between two instants, latest first; and the last change before them."""
        walk = self.walks.get((machine.name, zone))
        if walk is not None:
            yield from _changes_of(walk, start, end)
            return
        offset_s = self._offset_s(machine, zone)
        at = offset_s + (end - offset_s) // self.step_s * self.step_s
        while at > start:
            yield at
            at -= self.step_s
        yield at

    def cost_usd(self, machine: MachineType, zone: str, start: float, seconds: float) -> float:
        """What an instance costs that runs for `seconds` from `start`.

        Each hour since `start` costs what the price is when the hour begins, to the second ("You pay the Spot price
        that's in effect at the beginning of each instance-hour for your running instance. If Spot price changes after
        you launch the instance, the new price is charged against the instance usage for the subsequent hour": Amazon
        EC2 FAQs; AWS's support says so in awsdocs/amazon-ec2-user-guide#97).
        """
        cost_usd = 0.0
        for hour in range(math.ceil(seconds / HOUR_S)):
            lasts_s = min(HOUR_S, seconds - hour * HOUR_S)
            cost_usd += self.price_usd(machine, zone, start + hour * HOUR_S) * lasts_s / HOUR_S
        return cost_usd

    def _offset_s(self, machine: MachineType, zone: str) -> float:
        return _offset_s(f"{self.seed} {machine.name} {zone}", math.ceil(self.step_s))


@lru_cache(maxsize=2**15)  # a day of all types and zones is 13,000 prices
def _moved(seed: str, swing: float) -> float:
    return random.Random(seed).uniform(-swing, swing)


@lru_cache(maxsize=4096)
def _offset_s(seed: str, step_s: int) -> float:
    return random.Random(seed).randrange(step_s)


def _changes_of(walk: Sequence[tuple[float, float]], start: float, end: float) -> Iterator[float]:
    for at, _ in reversed(walk):
        if at <= end:
            yield at
            if at <= start:
                return
    yield min(start, walk[0][0]) - 1.0
