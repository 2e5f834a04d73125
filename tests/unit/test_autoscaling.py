"""The size of a pool by the efficiency of its GPUs (Pollux §5.4.1), by hand and in general."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.planner.sharing import Autoscaling, Capacity, Demand, Scale, make_policy, within
from rubberband.planner.sharing.autoscaling import efficiency, least_instances

RULE = Autoscaling(lower=0.55, upper=0.75)
LARGEST = Capacity(instances=8, gpus_per_instance=1)


def demand(name: str, single_s: float = 100.0, power: float = 1.0, **more: float) -> Demand:
    """Return the demand of a job that needs `single_s` / g^power on g GPUs: its efficiency is g^(power - 1)."""
    seconds = [single_s / gpus**power for gpus in range(1, 9)]
    return Demand(name=name, arrived_at=0.0, seconds_left=seconds, **more)  # type: ignore[arg-type]


def scale(instances: int, demands: Sequence[Demand], largest: Capacity = LARGEST) -> Scale:
    return RULE.scale(instances, demands, largest, make_policy("equal"), {}, 0.0)


def test_a_pool_grows_above_upper_to_the_largest_size_that_keeps_lower_and_shrinks_below_lower_to_that() -> None:
    # on 1, 2, 4, 8 GPUs: 1, .76, .57, .44; 5 of them have .525
    job = demand("a", power=0.6)
    assert scale(0, [job]) == Scale(instances=4, efficiency=pytest.approx(4**-0.4))
    assert scale(2, [job]).instances == 4, "above upper"
    assert scale(3, [job]).instances == 3, "between the two"
    assert scale(8, [job]).instances == 4, "below lower"
    assert scale(4, [job]).instances == 4


def test_a_pool_follows_a_goodput_that_fluctuates_without_going_to_and_fro() -> None:
    sizes, instances = [], 0
    for power in (0.4, 0.45, 0.6, 0.9, 0.85, 0.7, 0.6, 0.5):
        instances = scale(instances, [demand("a", power=power)]).instances
        sizes.append(instances)
    assert sizes == [2, 2, 4, 8, 8, 7, 4, 3]


def test_more_experiments_use_more_instances_and_none_uses_none() -> None:
    jobs = [demand(name, power=0.5) for name in "abc"]
    assert [scale(0, jobs[:count]).instances for count in range(4)] == [0, 3, 6, 8]
    assert scale(8, []) == Scale(instances=0, efficiency=0.0)


def test_promised_instances_and_any_one_of_the_others_find_room_and_promises_do_not_count() -> None:
    promised = demand("p", power=0.1, promised_gpus=3, max_gpus=3)
    assert scale(0, [promised]).instances == 3, "it is inefficient, and its plan wants it"
    wide = Demand(name="w", arrived_at=0.0, seconds_left=[math.inf] * 3 + [10.0], min_gpus=4)
    assert scale(0, [promised, wide]).instances == 7
    assert scale(0, [promised, wide]).efficiency == 1.0, "its four GPUs are the least that it can use"
    later = demand("l", max_gpus=0)
    assert scale(8, [later]).instances == 0


def test_gpus_that_no_demand_uses_are_inefficient() -> None:
    single, capacity = demand("a", max_gpus=1), Capacity(instances=1, gpus_per_instance=4)
    assert efficiency([single], capacity, {"a": {0: 1}}) == 0.25
    assert scale(3, [single], Capacity(instances=3, gpus_per_instance=4)).instances == 1


def test_on_a_smaller_pool_the_fullest_instances_stay() -> None:
    held = {"a": {0: 4, 3: 4}, "b": {1: 1}, "c": {2: 3}}
    assert within(held, Capacity(instances=2, gpus_per_instance=4)) == {"a": {0: 4, 1: 4}}
    assert within(held, Capacity(instances=3, gpus_per_instance=4)) == {"a": {0: 4, 2: 4}, "c": {1: 3}}
    assert within(held, Capacity(instances=4, gpus_per_instance=4)) == held
    assert within(held, Capacity(instances=0, gpus_per_instance=4)) == {}


@given(
    st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(1.0, 1e4), st.integers(0, 2)), max_size=5),
    st.integers(0, 8),
    st.sampled_from(["default", "fitness", "equal", "gain", "knee", "hell", "fifo", "optimus"]),
)
def test_any_size_is_within_the_bounds_and_settles(
    jobs: list[tuple[float, float, int]], instances: int, policy: str
) -> None:
    given_promises = policy != "optimus"  # it knows none
    demands = [
        demand(str(at), single_s, power, promised_gpus=promised if given_promises and at < 2 else 0)
        for at, (power, single_s, promised) in enumerate(jobs)
    ]
    largest = Capacity(instances=8, gpus_per_instance=2)
    seen = []
    for _ in range(6):
        found = RULE.scale(instances, demands, largest, make_policy(policy), {}, 0.0)
        seen.append(found.instances)
        assert least_instances(demands, largest) <= found.instances <= largest.instances
        if found.instances > instances and found.instances > least_instances(demands, largest):
            assert found.efficiency >= RULE.lower
        instances = found.instances
    assert seen[-1] == seen[-2], f"it does not settle: {seen}"
