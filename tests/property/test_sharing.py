"""Every policy of a pool keeps its capacity, its promises, and gangs that need not move; the calendar its promises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.planner.sharing import POLICIES, Calendar, Capacity, Demand, Span, make_policy, place


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Demand], Capacity]:
    capacity = Capacity(instances=draw(st.integers(1, 5)), gpus_per_instance=draw(st.integers(1, 4)))
    free = capacity.gpus
    demands = []
    for number in range(draw(st.integers(0, 8))):
        sizes = draw(st.integers(1, capacity.gpus + 2))
        scaling = draw(st.floats(0.0, 1.0))
        work_s = draw(st.floats(1.0, 1e5))
        promised = draw(st.integers(0, min(free, sizes)) | st.just(0))
        free -= promised
        demands.append(
            Demand(
                name=f"e{number}",
                arrived_at=draw(st.floats(-100.0, 0.0)),
                seconds_left=[work_s / gpus**scaling for gpus in range(1, sizes + 1)],
                delta_s=draw(st.sampled_from([0.0, 30.0])),
                moves=draw(st.integers(0, 3)),
                weight=draw(st.sampled_from([1.0, 2.0])),
                min_gpus=draw(st.integers(1, sizes)) if not promised else 1,
                promised_gpus=promised,
                progress=draw(st.floats(0.0, 1.0)),
            )
        )
    return demands, capacity


@given(name=st.sampled_from(sorted([*POLICIES, "knee:alpha=0.01..0.5"])), pool=pools())
def test_a_policy_keeps_the_capacity_and_every_promise(name: str, pool: tuple[list[Demand], Capacity]) -> None:
    demands, capacity = pool
    policy = make_policy(name)
    first = policy.allocate(demands, capacity, {}, 0.0)
    for current in ({}, first):
        found = policy.allocate(demands, capacity, current, 0.0)
        used = [sum(where.get(number, 0) for where in found.values()) for number in range(capacity.instances)]
        assert all(gpus <= capacity.gpus_per_instance for gpus in used)
        for demand in demands:
            where = found.get(demand.name, {})
            assert all(0 <= number < capacity.instances and gpus > 0 for number, gpus in where.items())
            assert sum(where.values()) == 0 or sum(where.values()) >= min(demand.min_gpus, capacity.gpus)
            if name not in ("tiresias", "optimus"):  # the baselines know no promises
                assert sum(where.values()) >= demand.promised_gpus
        assert policy.allocate(demands, capacity, current, 0.0) == found, "equal arguments, equal allocations"


@given(pool=pools(), counts=st.lists(st.integers(0, 12), max_size=8))
def test_at_most_one_gang_spans_on_an_instance(pool: tuple[list[Demand], Capacity], counts: list[int]) -> None:
    _, capacity = pool
    free, gpus = capacity.gpus, {}
    for number, count in enumerate(counts):
        gpus[f"e{number}"] = min(count, free)
        free -= gpus[f"e{number}"]
    found = place(gpus, capacity, {})
    spanning = [number for where in found.values() if len(where) > 1 for number in where]
    assert len(spanning) == len(set(spanning))
    for name, where in found.items():
        assert len(where) == 1 or gpus[name] > capacity.gpus_per_instance, "a gang that fits into an instance is in one"
    again = place({name: sum(where.values()) for name, where in found.items()}, capacity, found)
    assert again == found, "gangs that keep their numbers stay"


def test_promised_gpus_are_given_beside_other_spanning_gangs_if_there_is_no_other_room() -> None:
    promised = {"a": 14, "b": 10}
    found = place(promised, Capacity(instances=6, gpus_per_instance=4), {}, promised=promised)
    assert {name: sum(where.values()) for name, where in found.items()} == promised


def test_whole_instances_always_find_room() -> None:
    capacity = Capacity(instances=4, gpus_per_instance=4)
    current = {"a": {0: 1}, "b": {1: 1}, "c": {2: 1}, "d": {3: 1}}
    found = place({"a": 1, "b": 1, "c": 1, "d": 1, "big": 12}, capacity, current)
    assert sum(found["big"].values()) == 12
    assert sorted(sum(where.values()) for where in found.values()) == [1, 1, 1, 1, 12]


def test_equal_follows_weights_and_fifo_the_order() -> None:
    capacity = Capacity(instances=3, gpus_per_instance=4)
    left = [100.0 / gpus for gpus in range(1, 13)]
    early = Demand(name="early", arrived_at=0.0, seconds_left=left)
    late = Demand(name="late", arrived_at=1.0, seconds_left=left, weight=2.0)
    shares = make_policy("equal").allocate([late, early], capacity, {}, 2.0)
    assert {name: sum(where.values()) for name, where in shares.items()} == {"early": 4, "late": 8}
    assert set(make_policy("fifo").allocate([late, early], capacity, {}, 2.0)) == {"early"}


def test_tiresias_lets_jobs_that_have_had_much_wait_for_those_that_have_not() -> None:
    capacity = Capacity(instances=1, gpus_per_instance=4)
    old, new = (
        Demand(name=name, arrived_at=at, seconds_left=[9.0] * 5, min_gpus=4, attained_gpu_s=had_s)
        for name, at, had_s in (("old", 0.0, 1e6), ("new", 9.0, 10.0))
    )
    assert set(make_policy("tiresias").allocate([old, new], capacity, {"old": {0: 4}}, 10.0)) == {"new"}


def test_an_unknown_policy_is_one_line() -> None:
    with pytest.raises(InputError, match="policy 'best' does not exist; choose one of default, ranked, fitness"):
        make_policy("best")
    with pytest.raises(InputError, match="alpha twice; give it once"):
        make_policy("knee:alpha=0.01,alpha=0.05")


spans = st.lists(
    st.builds(Span, gpus=st.integers(0, 4), duration_s=st.integers(1, 5).map(float)), min_size=1, max_size=3
)


@given(plans=st.lists(st.tuples(spans, st.integers(0, 10)), max_size=6))
def test_the_calendar_never_promises_more_than_the_pool(plans: list[tuple[list[Span], int]]) -> None:
    calendar = Calendar(gpus=4)
    for number, (plan, from_at) in enumerate(plans):
        slot = calendar.earliest(plan, float(from_at))
        assert slot is not None
        for earlier in range(from_at, math.floor(slot.start_at)):
            late = calendar.fits(plan, slot.end_at - 1.0, float(earlier))
            assert late is None, "no whole second before would do"
        assert calendar.fits(plan, slot.end_at, float(from_at)) == slot
        calendar = calendar.promise(f"e{number}", plan, slot.start_at)
    for tick in range(120):
        assert calendar.taken(tick / 2) <= 4


@given(plans=st.lists(spans, min_size=1, max_size=5), rest=spans, now=st.integers(0, 12))
def test_a_promise_follows_its_plan_and_takes_nothing_from_others(
    plans: list[list[Span]], rest: list[Span], now: int
) -> None:
    calendar = Calendar(gpus=4)
    for number, plan in enumerate(plans):
        slot = calendar.earliest(plan, 0.0)
        assert slot is not None
        calendar = calendar.promise(f"e{number}", plan, slot.start_at)
    moved, others = calendar.follow("e0", rest, float(now)), calendar.withdraw("e0")
    assert moved.withdraw("e0").promises == others.promises
    assert all(moved.taken(tick / 2) <= 4 for tick in range(2 * now, 120))
    slot = others.earliest(rest, float(now))
    assert slot is not None
    if slot.start_at == now:  # there is room: all of the rest is promised, at all times
        at = float(now)
        for span in rest:
            assert moved.promised("e0", at + span.duration_s / 2.0) >= span.gpus
            at += span.duration_s


def test_a_promise_can_be_withdrawn_and_replaced() -> None:
    whole = [Span(gpus=4, duration_s=10.0)]
    calendar = Calendar(gpus=4).promise("a", whole, 0.0)
    assert calendar.fits(whole, 15.0, 0.0) is None
    slot = calendar.earliest(whole, 0.0)
    assert slot is not None
    assert (slot.start_at, slot.end_at) == (10.0, 20.0)
    assert calendar.withdraw("a").fits(whole, 15.0, 0.0) is not None
    assert calendar.promise("a", [Span(gpus=2, duration_s=10.0)], 0.0).promised("a", 5.0) == 2
    assert calendar.earliest([Span(gpus=5, duration_s=1.0)], 0.0) is None
    with pytest.raises(ValueError, match="start it at the instant that earliest"):
        calendar.promise("b", whole, 5.0)
