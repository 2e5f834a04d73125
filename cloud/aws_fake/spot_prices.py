"""The spot market of the fake: a price for each type and zone that moves, the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rubberband.cloud.aws_fake.machine_types import MachineType

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

    def price_usd(self, machine: MachineType, zone: str, at: float) -> float:
        """USD per hour for one instance, at an instant."""
        step = int((at - self._offset_s(machine, zone)) // self.step_s)
        source = random.Random(f"{self.seed} {machine.name} {zone} {step}")
        share = machine.spot_share * max(LOWEST, 1.0 + source.uniform(-self.swing, self.swing))
        return round(machine.price_usd_per_hour * min(1.0, share), 6)

    def changes(self, machine: MachineType, zone: str, start: float, end: float) -> Iterator[float]:
        """When the price changed between two instants, latest first; and the last change before them."""
        offset_s = self._offset_s(machine, zone)
        at = offset_s + (end - offset_s) // self.step_s * self.step_s
        while at > start:
            yield at
            at -= self.step_s
        yield at

    def mean_usd(self, machine: MachineType, zone: str, start: float, seconds: float) -> float:
        """USD per hour, on average, of an instance that runs for `seconds` from `start`.

        Each hour since `start` costs what the price is when the hour begins, to the second ("the Spot price that's in
        effect at the beginning of each instance-hour": AWS's support, in awsdocs/amazon-ec2-user-guide#97). EC2 waives
        an hour that it interrupts if it is the first; this meter does not.
        """
        weighted, hours = 0.0, math.ceil(seconds / HOUR_S)
        for hour in range(hours):
            lasts_s = min(HOUR_S, seconds - hour * HOUR_S)
            weighted += self.price_usd(machine, zone, start + hour * HOUR_S) * lasts_s
        return weighted / seconds

    def _offset_s(self, machine: MachineType, zone: str) -> float:
        return random.Random(f"{self.seed} {machine.name} {zone}").randrange(math.ceil(self.step_s))
