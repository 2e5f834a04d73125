"""Offers: the GPUs and the price of one kind of instance, as plain values for the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rubberband.values.plan import Market
from rubberband.values.profile import FIXED, Spread

Billing = Literal["per_instance", "per_function"]
Place = Literal["GPU", "slot"]
Unit = Literal["USD", "GPU-h"]
"""Unit of prices. Where an experiment has none, a GPU-hour has a nominal price of 1 GPU-h."""

SECONDS_PER_HOUR = 3600.0

RENT_LINES: dict[Billing, str] = {"per_instance": "instances", "per_function": "functions"}
DATA_LINE = "data"
HEAD_LINE = "head node"
PROFILE_LINE = "profile"
"""Lines of a bill; those of side costs have their own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The spot market of an instance type: cheaper, with interruptions."""

    price_usd_per_hour: float
    interruptions_per_hour: float
    """Rate of interruptions of one instance (a Poisson process)."""
    checkpoint_iterations: int = 1
    """Iterations between checkpoints: on average half of them are repeated after an interruption."""
    restart_s: float = 0.0
    """From an interruption until the trial trains again elsewhere: a new instance, warm workers, start-up."""


_TAKEN_WITHIN_S = 150.0
"""EC2 takes a spot instance away 120 s after its notice, which is best effort."""


def left_to_provider_until(running_at: float | None, interrupted_at: float) -> float:
    """Return until when an interrupted spot instance is not given back, though it is not used any more.

    EC2 charges nothing for an instance that it takes away in the first hour, and every second of one that its user
    ends. -inf where that hour is over before.
    """
    first_hour_ends_at = -math.inf if running_at is None else running_at + SECONDS_PER_HOUR
    until = interrupted_at + _TAKEN_WITHIN_S
    return until if until <= first_hour_ends_at else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCost:
    """A cost of an instance beside its rent, as a line of the bill: its root volume, its public address, …"""

    line: str
    """Such as `root volumes`."""
    usd_per_hour: float = 0.0
    """While the instance runs, with the same billing minimum."""
    usd_once: float = 0.0
    """For each instance started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BillLine:
    """An amount of a bill; the lines of a bill add up to it."""

    line: str
    """Purpose of the charge, such as `instances` or `root volumes`."""
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One instance type of one provider, with its price and its billing rules (RubberBand §4.1)."""

    instance_type: str
    gpus: int
    """GPUs per instance, G."""
    price_usd_per_hour: float
    """The rent of one instance, on demand."""
    max_instances: int
    """Most instances that may be held at any moment."""
    provision_delay_s: float = 0.0
    """SCALE: from asking until the instance runs and is billed; its mean."""
    provision_spread: Spread = FIXED
    init_delay_s: float = 0.0
    """INIT_INSTANCE: from running until trials can start on it; billed; its mean."""
    init_spread: Spread = FIXED
    billing: Billing = "per_instance"
    minimum_billed_s: float = 60.0
    """An instance is billed for at least this long (`per_instance` only)."""
    data_usd_per_instance: float = 0.0
    """Price of bringing the data set to one instance, once for each instance started."""
    head_price_usd_per_hour: float = 0.0
    """Price of the head node, for the whole job completion time, with its volume and its address."""
    head_side_usd_per_hour: float = 0.0
    """The share of its volume and its address in that price."""
    spot: Spot | None = None
    """Set where a plan may use the spot market; every stage is then on spot or on demand, as the plan says."""
    side_costs: tuple[SideCost, ...] = ()
    """Costs beside the rent, on either market (`per_instance` only)."""
    unit: Unit = "USD"
    """Unit of all amounts, also of those whose names say `usd`."""
    trials_per_gpu: int = 1
    """Trials that train side by side on one GPU, each on a slot of its own. Above 1, a trial has one slot."""
    place: Place = "GPU"
    """Word for one of its `gpus`: slots share the CPUs of an instance without GPUs."""

    @property
    def slots(self) -> int:
        """Slots per instance: its GPUs, each as often as trials share it. A trial of g GPUs takes g of them."""
        return self.gpus * self.trials_per_gpu

    @property
    def side_usd_per_hour(self) -> float:
        """Cost of an instance per hour beside its rent."""
        return sum([cost.usd_per_hour for cost in self.side_costs])

    @property
    def once_usd_per_instance(self) -> float:
        """Cost of each start of an instance: its data, and its side costs of that kind."""
        return self.data_usd_per_instance + self.side_usd_once

    @property
    def side_usd_once(self) -> float:
        """Side costs of each start of an instance."""
        return sum([cost.usd_once for cost in self.side_costs])

    @property
    def price_usd_per_s(self) -> float:
        """Price of one instance for one second, on demand, with its side costs."""
        return (self.price_usd_per_hour + self.side_usd_per_hour) / SECONDS_PER_HOUR

    def market_price_usd_per_s(self, market: Market) -> float:
        """Return the price of one instance for one second on a market of the offer, with its side costs."""
        if market == "on_demand":
            return self.price_usd_per_s
        assert self.spot is not None, "a plan uses the markets that its offer has"
        return (self.spot.price_usd_per_hour + self.side_usd_per_hour) / SECONDS_PER_HOUR

    @property
    def least_price_usd_per_s(self) -> float:
        """The lowest of the offer's markets."""
        on_demand = self.price_usd_per_s
        return on_demand if self.spot is None else min(on_demand, self.market_price_usd_per_s("spot"))

    def instance_cost_usd(self, held_s: float) -> float:
        """Return the cost of one instance that ran for `held_s` seconds, with its minimum and its data.

        Under `per_function` billing the instance itself is free and only its data counts.
        """
        if self.billing == "per_function":
            return self.once_usd_per_instance
        return self.price_usd_per_s * max(held_s, self.minimum_billed_s) + self.once_usd_per_instance

    def function_cost_usd(self, slots: int, busy_s: float) -> float:
        """Return the cost of `slots` slots that were busy for `busy_s` seconds; 0 unless billed `per_function`."""
        if self.billing == "per_instance":
            return 0.0
        return self.price_usd_per_s * slots / self.slots * busy_s

    def head_cost_usd(self, jct_s: float) -> float:
        """Return the cost of the head node for `jct_s` seconds."""
        return self.head_price_usd_per_hour / SECONDS_PER_HOUR * jct_s


def slots(instances: int, slots_per_instance: int, gpus_per_trial: int) -> int:
    """Return the number of trials of `gpus_per_trial` slots that run at once on `instances` instances (gang packing).

    A trial with g <= G sits whole on one instance; one with g > G has g a multiple of G and owns g/G of them.
    """
    if gpus_per_trial <= slots_per_instance:
        return instances * (slots_per_instance // gpus_per_trial)
    assert gpus_per_trial % slots_per_instance == 0, "a gang wider than an instance takes whole instances"
    return instances // (gpus_per_trial // slots_per_instance)
