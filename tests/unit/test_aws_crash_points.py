"""The driver is killed before and after every call that a small run makes to EC2, in fair weather and foul.

What it leaves is taken up by a resumed driver, or swept, or nobody comes back; the fake's own bill is the judge:
nothing lives on, nothing is billed for longer than its lease, and no name was ever bought twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from rubberband.cloud.aws.calls import name_in
from rubberband.cloud.aws.cleanup import clean_up
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.errors import ProviderError
from tests.builders.fake_ec2 import World
from tests.ec2 import FakeCall, Fault

WEATHER: dict[str, Callable[[FakeCall], Fault | None]] = {
    "fair": lambda call: None,
    "lost answer": lambda call: Fault.timeout(took_effect=True),
    "no connection": lambda call: Fault.timeout(took_effect=False),
    "throttled": lambda call: Fault.throttled(),
    "no capacity": lambda call: Fault.no_capacity() if call.operation == "RunInstances" else None,
    "server error": lambda call: Fault.server_error(took_effect=True),
}
HIDDEN_S = (0.0, 100.0, 299.0)
AFTERWARDS = ("resume", "sweep", "nothing")
LEASE_S = 600.0


class Killed(BaseException):
    """The driver is killed."""


def run(world: World, provider: AwsProvider) -> None:
    """What a driver does in a run of two stages; what it is refused it does without."""
    launched = []
    for name, market in (("a", "on_demand"), ("b", "spot"), ("c", "on_demand")):
        with suppress(ProviderError):
            provider.launch(name, market)  # type: ignore[arg-type]
            launched.append(name)
        if name == "b":
            with suppress(ProviderError):
                world.look(provider)
    world.sleep(40.0)
    with suppress(ProviderError):
        world.look(provider)
        world.look(provider)
    for name in launched[:1]:
        with suppress(ProviderError):
            provider.release(name)
    with suppress(ProviderError):
        provider.close()


def calls_of_a_run(folder: Path) -> int:
    """How many calls it makes in fair weather."""
    world = World(folder)
    run(world, world.driver())
    return len(world.fake.calls)


def story(folder: Path, *, kill_at: int, after: bool, weather: str, at: int, hidden_s: float, then: str) -> World:
    """A run that meets the weather at one call, and is killed before or after another; and what comes afterwards."""
    world = World(folder)
    alive = [True]

    def fault(call: FakeCall) -> Fault | None:
        if not alive:
            return None
        met = WEATHER[weather](call) if call.index == at else None
        if call.index == kill_at:
            alive.clear()
            took_effect = after and (met is None or met.took_effect)
            return Fault(error=Killed(), took_effect=took_effect, visible_after_s=hidden_s)
        return replace(met or Fault(), visible_after_s=hidden_s)

    world.fake.fault = fault
    with suppress(Killed):
        run(world, world.driver())
    alive.clear()
    world.sleep(7.0)
    if then == "nothing":
        world.sleep(2.0 * LEASE_S)
        return world
    if then == "sweep":
        found = clean_up(
            [world.directory],
            lambda _region: world.fake.session("driver"),
            clock=lambda: world.now,
            sleep=world.sleep,
        )
        assert found.troubles == ()
        return world
    driver = world.driver()
    world.look(driver)
    driver.close()
    return world


def points(calls: int, every: int = 1) -> Iterator[dict[str, object]]:
    """All of them, or each `every`-th."""
    chosen = product(range(calls + 2), (False, True), WEATHER, (-1, 0), HIDDEN_S, AFTERWARDS)
    for index, (kill_at, after, weather, back, hidden_s, then) in enumerate(chosen):
        if index % every == 0 and not (weather == "fair" and back):
            point = {"kill_at": kill_at, "after": after, "weather": weather, "at": kill_at + back}
            yield {**point, "hidden_s": hidden_s, "then": then}


def judge(folder: Path, every: int = 1) -> int:
    """Tell the stories and judge each by what really lives and was billed; how many there were."""
    expected = 0
    for point in points(calls_of_a_run(folder / "fair"), every):
        world = story(folder / str(expected), **point)  # type: ignore[arg-type]
        expected += 1
        assert world.living == [], f"an orphan: {point}"
        assert all(line.billed_s <= LEASE_S for line in world.fake.bill().lines), f"longer than a lease: {point}"
        bought = Counter(name_in(one.tags, one.launch_index) for one in world.fake.instances)
        assert all(count == 1 for count in bought.values()), f"a double launch, {bought}: {point}"
    return expected


def test_no_orphan_and_no_double_launch_at_some_crash_points(tmp_path: Path) -> None:
    assert judge(tmp_path, every=17) >= 50


@pytest.mark.long
def test_no_orphan_and_no_double_launch_at_any_crash_point(tmp_path: Path) -> None:
    assert judge(tmp_path) >= 1000
