"""Placement: gangs on slots, free slots, and the index of trials, against plain ones."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import Controller, Gang, Slot, StageRecord, TrialStatus
from rubberband.executor.core.placement import FreeSlots, gpu_of, place
from rubberband.values.offer import slots
from rubberband.values.plan import gang_sizes
from tests.builders.budget import examples
from tests.builders.jobs import JOB


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, dict[str, int]]:
    gpus = draw(st.sampled_from([1, 2, 3, 4, 8]))
    count = draw(st.integers(1, 6))
    return gpus, {f"i-{index:03d}": gpus for index in range(count)}


@st.composite
def mixed(draw: st.DrawFn) -> tuple[int, dict[str, int], dict[int, int]]:
    gpus, instances = draw(clusters())
    sizes = gang_sizes(gpus, 1, gpus * len(instances))
    widths = draw(st.lists(st.sampled_from(sizes), max_size=12))
    return gpus, instances, dict(enumerate(widths))


def check(gpus: int, instances: dict[str, int], allocation: dict[int, int], placed: dict[int, Gang]) -> None:
    used: set[Slot] = set()
    for trial, gang in placed.items():
        assert len(gang) == allocation[trial]
        assert len(set(gang)) == len(gang)
        assert not used & set(gang)
        used |= set(gang)
        held = {slot.instance for slot in gang}
        assert held <= set(instances)
        assert all(0 <= slot.gpu < gpus for slot in gang)
        assert len(held) == 1 or len(gang) == gpus * len(held)


@given(mixed())
def test_gangs_are_disjoint_whole_and_as_wide_as_allocated(case: tuple[int, dict[str, int], dict[int, int]]) -> None:
    gpus, instances, allocation = case
    check(gpus, instances, allocation, place(allocation, {}, instances))


@given(clusters(), st.data())
def test_equal_gangs_fill_every_slot(cluster: tuple[int, dict[str, int]], data: st.DataObject) -> None:
    gpus, instances = cluster
    width = data.draw(st.sampled_from(gang_sizes(gpus, 1, gpus * len(instances))))
    count = data.draw(st.integers(0, 40))
    placed = place(dict.fromkeys(range(count), width), {}, instances)
    assert len(placed) == min(count, slots(len(instances), gpus, width))


@given(mixed(), st.data())
def test_placements_that_need_not_move_stay(
    case: tuple[int, dict[str, int], dict[int, int]], data: st.DataObject
) -> None:
    _, instances, allocation = case
    first = place(allocation, {}, instances)
    kept = {trial: allocation[trial] for trial in first if data.draw(st.booleans())}
    second = place(kept, first, instances)
    assert second == {trial: first[trial] for trial in kept}


@given(mixed(), st.data())
def test_running_trials_are_never_displaced(
    case: tuple[int, dict[str, int], dict[int, int]], data: st.DataObject
) -> None:
    gpus, instances, allocation = case
    running = place(allocation, {}, instances)
    sizes = gang_sizes(gpus, 1, gpus * len(instances))
    newcomers = {
        100 + index: width for index, width in enumerate(data.draw(st.lists(st.sampled_from(sizes), max_size=4)))
    }
    wanted = {trial: allocation[trial] for trial in running} | newcomers
    placed = place(wanted, running, instances, locked=running)
    check(gpus, instances, wanted, placed)
    assert {trial: placed[trial] for trial in running} == running


@given(st.sampled_from([2, 4, 8]), st.integers(1, 4), st.data())
def test_powers_of_two_that_fit_are_all_placed_by_displacing(gpus: int, count: int, data: st.DataObject) -> None:
    """Narrow trials scattered over the cluster make room for a wide one."""
    instances = {f"i-{index:03d}": gpus for index in range(count)}
    narrow = data.draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, gpus - 1)), unique=True, max_size=8)
    )
    previous = {trial: (Slot(instance=f"i-{node:03d}", gpu=gpu),) for trial, (node, gpu) in enumerate(narrow)}
    room = gpus * count - len(previous)
    widths: list[int] = []
    while room - sum(widths) >= gpus and data.draw(st.booleans()):
        widths.append(gpus)
    allocation = dict.fromkeys(previous, 1) | {50 + index: width for index, width in enumerate(widths)}
    placed = place(allocation, previous, instances)
    check(gpus, instances, allocation, placed)
    assert set(placed) == set(allocation)


def test_best_fit_takes_the_fullest_instance_that_still_fits() -> None:
    instances = {"a": 4, "b": 4}
    running = {0: (Slot(instance="b", gpu=0), Slot(instance="b", gpu=1))}
    placed = place({0: 2, 1: 2}, running, instances, locked=running)
    assert placed[1] == (Slot(instance="b", gpu=2), Slot(instance="b", gpu=3))


def test_no_more_trials_move_than_make_room() -> None:
    instances = {"a": 4}
    placed = {trial: (Slot(instance="a", gpu=trial),) for trial in range(4)}
    moved = place(dict.fromkeys(placed, 1) | {9: 2}, placed, instances)
    assert len(moved[9]) == 2
    assert len(moved.keys() - {9}) == 2
    instances = {"a": 4, "b": 2}
    moved = place(dict.fromkeys(placed, 1) | {9: 3}, placed, instances)
    assert len(moved) == 4, "one trial finds no room"
    assert sum(moved.get(trial) == gang for trial, gang in placed.items()) == 1


def test_a_gang_that_left_its_instance_is_placed_anew() -> None:
    gone = {0: (Slot(instance="gone", gpu=0),)}
    assert place({0: 1}, gone, {"here": 1}) == {0: (Slot(instance="here", gpu=0),)}


def test_a_wide_gang_takes_no_halves_of_instances_that_others_train_on() -> None:
    instances = {"a": 2, "b": 2, "c": 2}
    narrow = {0: (Slot(instance="a", gpu=0),), 1: (Slot(instance="c", gpu=0),)}
    assert place({0: 1, 1: 1, 2: 4}, narrow, instances, locked=narrow) == narrow


@settings(max_examples=examples(200))
@given(width=st.sampled_from([1, 2, 3, 4, 8]), count=st.integers(1, 5), data=st.data())
def test_gangs_are_placed_as_by_a_walk_through_all_instances(width: int, count: int, data: st.DataObject) -> None:
    instances = {f"i-{8 + index}": width for index in range(count)}  # i-10 comes before i-8 by name
    sizes = gang_sizes(width, 1, width * count)
    free, running, latest = FreeSlots(instances, width, ()), dict[int, Gang](), dict[int, Gang]()
    for _ in range(data.draw(st.integers(1, 12))):
        for trial in [trial for trial in running if data.draw(st.booleans())]:
            free.give_back(running.pop(trial))
        room = width * count - sum(map(len, running.values()))
        assert free.gpus == room
        for size in sizes:
            gangs = place(
                {trial: len(gang) for trial, gang in running.items()} | dict.fromkeys(range(50, 50 + room), size),
                running,
                instances,
                locked=running,
            )
            assert free.room(size) == len(gangs) - len(running)
        size = data.draw(st.sampled_from(sizes))
        waiting = [trial for trial in range(20) if trial not in running][: room // size]
        allocation = {trial: len(gang) for trial, gang in running.items()} | dict.fromkeys(waiting, size)
        expected = place(allocation, latest | running, instances, locked=running)
        placed = free.place(size, [latest.get(trial, ()) for trial in waiting])
        found = {trial: gang for trial, gang in zip(waiting, placed, strict=True) if gang is not None}
        assert found == {trial: expected[trial] for trial in waiting if trial in expected}
        for trial, gang in found.items():
            free.take(gang)
            running[trial] = latest[trial] = gang


def test_slots_of_other_instances_do_not_count() -> None:
    there, elsewhere = Slot(instance="here", gpu=0), Slot(instance="gone", gpu=0)
    free = FreeSlots(["here"], 2, [(elsewhere,), (there, elsewhere)])
    assert free.gpus == 1
    free.give_back((there, elsewhere))
    assert free.gpus == 2
    assert free.place(1, [(elsewhere,)]) == [(there,)]


STATUSES = list(TrialStatus)


@settings(max_examples=examples(120))
@given(data=st.data())
def test_the_index_of_trials_equals_a_walk(data: st.DataObject) -> None:
    state, now = Controller(JOB).state, 0.0
    lane = state.lanes[0]
    lane.begin(StageRecord(stage=0, trials=tuple(range(len(state.trials))), started_at=now), state.trials)
    slots = [Slot(instance=f"i-{number}", gpu=gpu) for number in range(3) for gpu in range(2)]
    for _ in range(data.draw(st.integers(1, 30))):
        trial = data.draw(st.sampled_from(state.trials))
        if trial.status is TrialStatus.RUNNING and data.draw(st.booleans()):
            lane.runners.note_due(trial, now + data.draw(st.sampled_from([1.0, 5.0, 60.0])))
        else:
            status = data.draw(st.sampled_from(STATUSES))
            if trial.status is not TrialStatus.RUNNING:
                trial.gang = tuple(data.draw(st.lists(st.sampled_from(slots), min_size=1, unique=True)))
            state.put(trial, status)
        now += data.draw(st.sampled_from([0.0, 0.5, 10.0]))
        running = [trial for trial in state.trials if trial.status is TrialStatus.RUNNING]
        queued = [trial for trial in state.trials if trial.status is TrialStatus.QUEUED]
        assert (lane.running(), lane.queued()) == (running, queued)
        assert (len(lane.runners), len(lane.waiters)) == (len(running), len(queued))
        count = data.draw(st.integers(0, len(state.trials)))
        assert lane.waiters.first(count) == queued[:count]
        assert lane.runners.first_due_at() == min((trial.due_at for trial in running), default=math.inf)
        assert lane.runners.due(now) == [trial for trial in running if trial.due_at <= now]
        for instance in ("i-0", "i-1", "i-2"):
            there = [trial for trial in running if any(slot.instance == instance for slot in trial.gang)]
            assert (lane.runners.on(instance), lane.runners.uses(instance)) == (there, bool(there))


@settings(max_examples=examples(200))
@given(gpus=st.sampled_from([1, 2, 3, 4]), shared=st.integers(2, 5), count=st.integers(1, 3), data=st.data())
def test_trials_share_a_gpu_once_all_of_an_instance_have_one(
    gpus: int, shared: int, count: int, data: st.DataObject
) -> None:
    instances = [f"i-{index:03d}" for index in range(count)]
    free, running = FreeSlots(instances, gpus * shared, (), gpus=gpus), list[Gang]()
    for _ in range(data.draw(st.integers(1, 3 * gpus * shared))):
        for gang in [gang for gang in running if data.draw(st.integers(0, 3)) == 0]:
            running.remove(gang)
            free.give_back(gang)
        before = Counter((slot.instance, gpu_of(slot.gpu, gpus)) for gang in running for slot in gang)
        (gang,) = free.place(1, [()])
        if gang is None:
            assert len(running) == count * gpus * shared
            continue
        free.take(gang)
        running.append(gang)
        ((instance, at),) = [(slot.instance, gpu_of(slot.gpu, gpus)) for slot in gang]
        assert before[instance, at] < shared
        assert before[instance, at] == min(before[instance, gpu] for gpu in range(gpus))
    assert len(set(running)) == len(running)
