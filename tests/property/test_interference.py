"""Gangs that span instances and share one: their places, and what their interference costs (Pollux §4.2, §5.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.planner.sharing import POLICIES, Allocations, Autoscaling, Capacity, keeps_promises, make_policy
from rubberband.planner.sharing.jobs import CurveJob
from rubberband.planner.sharing.placement import place_freely, place_side_by_side
from rubberband.planner.sharing.simulation import interfering, simulate

Placing = Callable[[Mapping[str, int], Capacity, Allocations], dict[str, dict[int, int]]]
capacities = st.builds(Capacity, instances=st.integers(1, 6), gpus_per_instance=st.integers(1, 4))
COUNTING = [name for name in POLICIES if keeps_promises(name)]


def divided(draw: st.DrawFn, capacity: Capacity) -> dict[str, int]:
    """Numbers of GPUs, at least 1, that fit together."""
    free, gpus = capacity.gpus, {}
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True)):
        if free:
            gpus[name] = draw(st.integers(1, free))
            free -= gpus[name]
    return gpus


@given(data=st.data(), capacity=capacities, placing=st.sampled_from([place_freely, place_side_by_side]))
def test_gangs_without_avoidance_all_find_room_and_stay_where_they_are(
    data: st.DataObject, capacity: Capacity, placing: Placing
) -> None:
    before = placing(data.draw(st.composite(divided)(capacity)), capacity, {})
    gpus = data.draw(st.composite(divided)(capacity))
    found = placing(gpus, capacity, before)
    assert {name: sum(where.values()) for name, where in found.items()} == gpus
    for number in range(capacity.instances):
        assert sum(where.get(number, 0) for where in found.values()) <= capacity.gpus_per_instance
    assert all(
        0 <= number < capacity.instances and held > 0 for where in found.values() for number, held in where.items()
    )
    for name, where in before.items():
        assert sum(where.values()) != gpus.get(name) or found[name] == where
    assert placing(gpus, capacity, found) == found


def test_a_gang_lies_within_the_fullest_instance_that_holds_it_or_on_the_emptiest_ones() -> None:
    capacity = Capacity(instances=3, gpus_per_instance=4)
    held = {"a": {0: 3}, "b": {1: 1}}
    assert place_side_by_side({"a": 3, "b": 1, "c": 1}, capacity, held)["c"] == {0: 1}
    assert place_side_by_side({"a": 3, "b": 1, "c": 6}, capacity, held)["c"] == {2: 4, 1: 2}
    assert place_freely({"a": 3, "b": 1, "c": 1}, capacity, held)["c"] == {2: 1}
    largest_first = place_side_by_side({"small": 2, "b": 3, "c": 3}, Capacity(instances=2, gpus_per_instance=4), {})
    assert {name: len(where) for name, where in largest_first.items()} == {"small": 2, "b": 1, "c": 1}


def test_gangs_interfere_where_two_that_span_have_a_part() -> None:
    meet = {"a": {0: 4, 1: 2}, "b": {1: 2, 2: 4}, "apart": {3: 1, 4: 1}, "within": {2: 1}}
    assert interfering(meet) == {"a", "b"}
    assert interfering({"a": {0: 4, 1: 2}, "within": {1: 2}}) == set()


def curves(capacity: Capacity, works_s: Sequence[float], least: int = 1) -> list[CurveJob]:
    return [
        CurveJob(
            name=name,
            submitted_at=40.0 * number,
            kind="curve",
            seconds=[work_s / count**0.8 for count in range(1, capacity.gpus + 1)],
            resize_s=5.0,
            min_gpus=min(least, capacity.gpus),
        )
        for number, (name, work_s) in enumerate(zip("abcdefgh", works_s, strict=False))
    ]


works = st.lists(st.floats(10.0, 5000.0), min_size=8, max_size=8)


@given(
    name=st.sampled_from(COUNTING),
    capacity=capacities,
    works_s=works,
    least=st.integers(1, 6),
    interference=st.floats(0.0, 0.9),
)
def test_with_avoidance_the_outcome_does_not_depend_on_interference(
    name: str, capacity: Capacity, works_s: list[float], least: int, interference: float
) -> None:
    alone, beside = (
        simulate(curves(capacity, works_s, least), capacity, make_policy(name), interval_s=None, interference=each)
        for each in (0.0, interference)
    )
    assert beside.jobs == alone.jobs
    assert beside.allocated == alone.allocated


TWO_OF_SIX = Capacity(instances=3, gpus_per_instance=4)
"""Two gangs of 6 GPUs share the third instance."""


def test_a_job_loses_speed_only_while_it_meets_others_and_its_figures_follow() -> None:
    # Gangs of 6 on 3 instances of 4; at half speed a is 1005 s beside b, 205 beside c, and 397.5 alone.
    jobs = [
        CurveJob(name=name, submitted_at=0.0, kind="k", seconds=[work_s] * 6, resize_s=5.0, min_gpus=6)
        for name, work_s in (("a", 1000.0), ("b", 500.0), ("c", 100.0))
    ]
    scaling = Autoscaling(lower=0.01, upper=0.02)
    found = simulate(jobs, TWO_OF_SIX, make_policy("tiresias"), interval_s=None, autoscaling=scaling, interference=0.5)
    assert [job.done_at for job in found.jobs] == pytest.approx([1607.5, 1005.0, 1210.0])
    assert [job.gpu_s for job in found.jobs] == pytest.approx([6.0 * 1607.5, 6.0 * 1005.0, 6.0 * 205.0])
    assert [job.fair_s for job in found.jobs] == [1005.0, 505.0, 105.0]  # alone on 6 GPUs nothing interferes
    assert found.sizes == [(0.0, 3), (1210.0, 2)]
    assert found.summary(3.6)["cost_usd"] == pytest.approx(3.6 * (3 * 1210.0 + 2 * 397.5) / 3600.0)
