"""Free slots: gangs are placed as Algorithm 3 places them where all that runs is locked, however it came to that."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor.core.events import Gang, Slot
from rubberband.executor.core.placement import FreeSlots, place
from rubberband.values.offer import gang_sizes
from tests.builders.budget import examples


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
