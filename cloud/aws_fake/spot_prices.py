"""The spot market of the fake: a price for each type and zone that moves every hour, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rubberband.cloud.aws_fake.machine_types import MachineType

STEP_S = 3600.0
SWING = 0.2
"""A price is within this share of its average."""


def spot_price_usd(seed: int, machine: MachineType, zone: str, at: float) -> float:
    """USD per hour for one instance, at an instant."""
    step = int((at - _offset_s(seed, machine, zone)) // STEP_S)
    swing = random.Random(f"{seed} {machine.name} {zone} {step}").uniform(-SWING, SWING)
    return round(machine.price_usd_per_hour * machine.spot_share * (1.0 + swing), 6)


def changes(seed: int, machine: MachineType, zone: str, start: float, end: float) -> Iterator[float]:
    """When the price changed between two instants, latest first; and the last change before them."""
    offset_s = _offset_s(seed, machine, zone)
    at = offset_s + (end - offset_s) // STEP_S * STEP_S
    while at > start:
        yield at
        at -= STEP_S
    yield at


def _offset_s(seed: int, machine: MachineType, zone: str) -> float:
    return random.Random(f"{seed} {machine.name} {zone}").randrange(int(STEP_S))
