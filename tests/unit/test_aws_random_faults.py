"""AwsProvider under random faults, deaths of its driver and reclaims: what holds whatever happens.

Judged by the fake itself, which knows what really lives: never two live instances for one name for longer than it
takes to see them, nothing of the run after `close`, and statuses that never go back.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rubberband.cloud.aws.fleet import VISIBILITY_S
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.provider import InstanceDescription
from rubberband.errors import ProviderError
from tests.builders.fake_ec2 import Killed, World
from tests.ec2 import FakeCall, Fault

SEEDS = 20
STEPS = 25
_ORDER = {"pending": 0, "running": 1, "terminated": 2}


@dataclass
class Chaos:
    """One random story. `trouble` is the share of calls that meet a fault."""

    world: World
    random: random.Random
    trouble: float
    provider: AwsProvider = field(init=False)
    seen: dict[str, InstanceDescription] = field(default_factory=dict)
    launched: int = 0
    pausing: bool = False

    def __post_init__(self) -> None:
        """A driver starts."""
        self.world.fake.fault = self.fault
        self.provider = self.world.driver()

    def fault(self, call: FakeCall) -> Fault | None:
        """What happens to a call; what it launches may not be seen for a while."""
        hidden_s = self.random.uniform(0.0, VISIBILITY_S) if self.random.random() < 0.4 else 0.0
        if self.pausing or self.random.random() >= self.trouble:
            return Fault.invisible(hidden_s)
        return replace(self.random.choice(self.faults(call)), visible_after_s=hidden_s)

    def faults(self, call: FakeCall) -> list[Fault]:
        """What may happen to a call."""
        took_effect = self.random.random() < 0.5
        refused = [Fault.no_capacity()] * 2 if call.operation == "RunInstances" else []
        return [
            Fault.throttled(),
            Fault.server_error(took_effect=took_effect),
            Fault.timeout(took_effect=took_effect),
            Fault(error=Killed(), took_effect=took_effect),
            *refused,
        ]

    def do(self, step: str) -> None:
        """One step; a driver that is killed comes back, perhaps after a while."""
        try:
            getattr(self, step)()
            self.look()
        except ProviderError:
            pass
        except Killed:
            self.world.sleep(self.random.choice([1.0, 60.0, 1000.0, 10_000.0]))
            self.provider = self.world.driver()

    def launch(self) -> None:
        """A new name."""
        self.launched += 1
        self.provider.launch(f"i-{self.launched:03}", self.random.choice(["on_demand", "spot"]))

    def launch_again(self) -> None:
        """A name that was launched before, refused or not."""
        if self.launched:
            self.provider.launch(f"i-{self.random.randint(1, self.launched):03}")

    def release(self) -> None:
        """Whatever became of it."""
        if self.launched:
            self.provider.release(f"i-{self.random.randint(1, self.launched):03}")

    def renew(self) -> None:
        """The driver lives."""
        until = self.world.now + 600.0
        self.provider.renew_lease(until)
        self.world.beat(until)

    def wait(self) -> None:
        """Time passes."""
        self.world.sleep(self.random.choice([1.0, 10.0, 100.0, 400.0]))

    def reclaim(self) -> None:
        """EC2 takes a spot instance away."""
        spot = [one for one in self.world.fake.living if one.market == "spot"]
        if spot:
            notice_s = self.random.choice([None, 20.0, 120.0])
            self.world.fake.reclaim(self.random.choice(spot).instance_id, notice_s=notice_s)

    def lose_head(self) -> None:
        """The Ray head dies."""
        self.world.head.lives = False

    def look(self) -> None:
        """Statuses go forward only, and an end is final."""
        for name, status in self.world.look(self.provider).items():
            before = self.seen.get(name, status)
            assert _ORDER[before.state] <= _ORDER[status.state], (before, status)
            if before.state == "terminated":
                assert replace(status, hour_prices_usd=before.hour_prices_usd) == before
            expected, tells = before.hour_prices_usd or (), status.hour_prices_usd or ()
            assert tells[: len(expected)] == expected or tells == (0.0,)
            if before.running_at is not None:
                assert status.running_at == before.running_at
            self.seen[name] = status

    def quietly(self) -> None:
        """Nothing happens to what is called from here on."""
        self.pausing = True

    def bills(self) -> tuple[float, float]:
        """By what the provider showed, and by the fake's own meter."""
        shown = 0.0
        for status in self.provider.describe():
            if status.running_at is not None and status.price_usd_per_hour is not None:
                ended_at = self.world.now if status.ended_at is None else status.ended_at
                shown += max(60.0, ended_at - status.running_at) * status.price_usd_per_hour / 3600.0
        return shown, self.world.fake.bill().rent_usd


STEPS_OF = ("launch", "launch", "launch_again", "release", "release", "renew", "renew", "wait", "reclaim", "lose_head")


def tell(tmp_path: Path, seed: int, trouble: float) -> Chaos:
    """One story, to where the driver has gone and everything is over."""
    chaos = Chaos(World(tmp_path), random.Random(seed), trouble)
    for _ in range(STEPS):
        chaos.do(chaos.random.choice(STEPS_OF))
    chaos.quietly()
    chaos.world.sleep(VISIBILITY_S)
    chaos.look()
    chaos.look()
    twice = {name: count for name, count in Counter(chaos.world.living).items() if count > 1}
    assert not twice, f"{twice} live twice"
    chaos.provider.close()
    return chaos


@pytest.mark.parametrize("trouble", [0.0, 0.05, 0.3])
def test_nothing_lives_twice_or_after_close_under_any_faults(tmp_path: Path, trouble: float) -> None:
    for seed in range(60, 60 + SEEDS):
        chaos = tell(tmp_path / str(seed), seed, trouble)
        assert chaos.world.living == [], f"seed {seed}: {chaos.world.living} live on"
        assert all(status.state == "terminated" for status in chaos.provider.describe()), f"seed {seed}"


@pytest.mark.long
def test_nothing_lives_twice_or_after_close_in_a_thousand_stories(tmp_path: Path) -> None:
    for seed in range(1000, 2000):
        chaos = tell(tmp_path / str(seed), seed, trouble=0.3)
        assert chaos.world.living == [], f"seed {seed}: {chaos.world.living} live on"


def test_the_shown_cost_covers_the_bill(tmp_path: Path) -> None:
    for seed in range(60, 60 + SEEDS):
        chaos = tell(tmp_path / str(seed), seed, trouble=0.0)
        shown_usd, billed_usd = chaos.bills()
        assert shown_usd >= billed_usd - 1e-6, f"seed {seed}"
