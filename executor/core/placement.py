"""Placement: which GPUs of which instances a gang trains on (RubberBand §4.4, Algorithm 3). A pure function.

A gang that fits an instance sits whole on one (best fit); a wider one owns whole instances. Trials that need not move
stay. Wider gangs go first, and may displace narrower ones, which are then placed anew. `FreeSlots` adds one gang.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rubberband.executor.core.events import Gang, Slot


def place(
    allocation: Mapping[int, int],
    previous: Mapping[int, Gang],
    instances: Mapping[str, int],
    locked: Iterable[int] = (),
) -> dict[int, Gang]:
    """Place every trial of `allocation` (trial -> GPUs) on `instances` (name -> GPUs), near to `previous`.

    Trials in `locked` run now and are not displaced. Returns trial -> gang; a trial that finds no room is not in it.
    """
    nodes = _Nodes(instances)
    placement: dict[int, Gang] = {}
    fixed = set(locked)
    for trial in sorted(previous, key=lambda trial: (trial not in fixed, trial)):
        gang = previous[trial]
        if allocation.get(trial) == len(gang) and nodes.can_keep(gang):
            nodes.take(gang)
            placement[trial] = gang
    waiting = [trial for trial in allocation if trial not in placement]
    waiting.sort(key=lambda trial: (-allocation[trial], trial))
    while waiting:
        trial = waiting.pop(0)
        best = nodes.best_fit(allocation[trial])
        if best is None:
            displaced = nodes.make_space(allocation[trial], fixed, placement)
            for other in displaced:
                nodes.free(placement.pop(other))
            waiting = sorted([*waiting, *displaced], key=lambda t: (-allocation[t], t))
            best = nodes.best_fit(allocation[trial])
        if best is not None:
            nodes.take(best)
            placement[trial] = best
            fixed.add(trial)
    return placement


@functools.lru_cache(maxsize=4096)
def slot_of(instance: str, gpu: int) -> Slot:
    """The slot; the same ones are placed over and over."""
    return Slot(instance=instance, gpu=gpu)


def gpu_of(slot: int, gpus: int) -> int:
    """Return the GPU of a slot of an instance with `gpus` GPUs: neighbouring slots are on different ones."""
    return slot % gpus


class _Nodes:
    """The free GPUs of every instance."""

    def __init__(self, instances: Mapping[str, int]) -> None:
        self._gpus = dict(instances)
        self._largest = max(instances.values(), default=0)
        self._free = {instance: set(range(gpus)) for instance, gpus in instances.items()}

    def can_keep(self, gang: Gang) -> bool:
        """Whether every slot of `gang` exists, is free, and the gang is packed as a new one would be."""
        free = self._free
        for slot in gang:
            if slot.instance not in free or slot.gpu not in free[slot.instance]:
                return False
        if len(gang) == 1:
            return True
        held = {slot.instance for slot in gang}
        return len(held) == 1 or len(gang) == sum(self._gpus[instance] for instance in held)

    def take(self, gang: Gang) -> None:
        free = self._free
        for slot in gang:
            free[slot.instance].remove(slot.gpu)

    def free(self, gang: Gang) -> None:
        for slot in gang:
            self._free[slot.instance].add(slot.gpu)

    def _some(self, instance: str, gpus: int) -> Gang:
        return tuple([slot_of(instance, gpu) for gpu in sorted(self._free[instance])[:gpus]])

    def best_fit(self, gpus: int) -> Gang | None:
        """The fullest instance that still holds `gpus`, else as few wholly free instances as make up `gpus` exactly."""
        if gpus <= self._largest:
            fitting = [(len(free), instance) for instance, free in self._free.items() if len(free) >= gpus]
            return self._some(min(fitting)[1], gpus) if fitting else None
        gang: Gang = ()
        for instance in sorted(self._gpus):
            own = self._gpus[instance]
            if len(self._free[instance]) == own and len(gang) + own <= gpus:
                gang += self._some(instance, own)
        return gang if len(gang) == gpus else None

    def make_space(self, gpus: int, fixed: set[int], placement: Mapping[int, Gang]) -> list[int]:
        """The narrower trials to displace so that a gang of `gpus` fits; empty if that cannot be had."""
        by_space = sorted(self._gpus, key=lambda instance: (-len(self._free[instance]), instance))
        displaced: list[int] = []
        missing = gpus
        wide = gpus > self._largest
        for instance in by_space:
            victims = self._displaceable(instance, self._gpus[instance] if wide else gpus, gpus, fixed, placement)
            if victims is None:
                continue
            if not wide:
                return victims
            displaced += [trial for trial in victims if trial not in displaced]
            missing -= self._gpus[instance]
            if missing <= 0:
                return displaced if missing == 0 else []
        return []

    def _displaceable(
        self, instance: str, wanted: int, gpus: int, fixed: set[int], placement: Mapping[int, Gang]
    ) -> list[int] | None:
        """Trials narrower than `gpus` on `instance` whose GPUs, with the free ones, make `wanted`; None if too few."""
        if wanted > self._gpus[instance]:
            return None
        held = Counter(trial for trial, gang in placement.items() for slot in gang if slot.instance == instance)
        room = len(self._free[instance])
        victims: list[int] = []
        for trial in sorted(held, key=lambda trial: (held[trial], trial)):
            if room >= wanted:
                break
            if trial not in fixed and len(placement[trial]) < gpus:
                victims.append(trial)
                room += held[trial]
        return victims if room >= wanted else None


# Free GPUs of instances that are all as wide, where nothing is displaced: a gang more, without a walk through them.
#
# It places as `place` does where all that runs is locked.


class FreeSlots:
    """The free GPUs of every instance, and the instances by how many they have free."""

    def __init__(self, instances: Iterable[str], width: int, taken: Iterable[Gang], *, gpus: int | None = None) -> None:
        """Instances of `width` slots each, of which `taken` are taken; these may have some of other instances too.

        `gpus` is the number of GPUs that the slots of an instance share, if they are fewer (see `gpu_of`).
        """
        self._width, self._gpus = width, gpus or width
        self._free = {instance: set(range(width)) for instance in instances}
        self.gpus = width * len(self._free)
        """Free ones, in all."""
        self._by_free: list[list[str]] = [[] for _ in range(width + 1)]
        """Free GPUs -> a heap of the instances with that number free; it may hold others too."""
        self._listed: set[tuple[int, str]] = set()
        for gang in taken:
            self.take(gang)
        for instance in self._free:
            self._list(instance)

    def _list(self, instance: str) -> None:
        key = (len(self._free[instance]), instance)
        if key not in self._listed:
            self._listed.add(key)
            heapq.heappush(self._by_free[key[0]], instance)

    def take(self, gang: Gang) -> None:
        """Its GPUs are not free any more."""
        for slot in gang:
            if (free := self._free.get(slot.instance)) is not None:
                free.remove(slot.gpu)
                self.gpus -= 1
        self._changed(gang)

    def give_back(self, gang: Gang) -> None:
        """Its GPUs are free again."""
        for slot in gang:
            if (free := self._free.get(slot.instance)) is not None:
                free.add(slot.gpu)
                self.gpus += 1
        self._changed(gang)

    def _changed(self, gang: Gang) -> None:
        for instance in {slot.instance for slot in gang}:
            if instance in self._free:
                self._list(instance)

    def room(self, size: int) -> int:
        """Return how many more gangs of `size` there is room for."""
        if size <= self._width:
            return 0 if self.gpus < size else sum(len(free) // size for free in self._free.values())
        return sum(len(free) == self._width for free in self._free.values()) // (size // self._width)

    def room_without(self, gang: Gang, size: int) -> int:
        """Return how many gangs of `size` there would be room for without `gang`."""
        self.give_back(gang)
        room = self.room(size)
        self.take(gang)
        return room

    def place(self, size: int, before: Sequence[Gang]) -> list[Gang | None]:
        """Gangs of `size` for trials that wait, each of which had a gang before: it stays there where it can.

        None where there is no room any more. Nothing is taken yet.
        """
        placed: list[Gang | None] = [None] * len(before)
        for index, gang in enumerate(before):
            if len(gang) == size and self._can_keep(gang):
                placed[index] = gang
                self.take(gang)
        left = [index for index, gang in enumerate(placed) if gang is None]
        for index in left:
            if (found := self._best_fit(size)) is None:
                break
            placed[index] = found
            if index != left[-1]:
                self.take(found)
        for index, taken in enumerate(placed):
            if taken is not None and (not left or index != left[-1]):
                self.give_back(taken)
        return placed

    def _can_keep(self, gang: Gang) -> bool:
        if any(slot.gpu not in self._free.get(slot.instance, ()) for slot in gang):
            return False
        held = {slot.instance for slot in gang}
        return len(held) == 1 or len(gang) == len(held) * self._width

    def _best_fit(self, size: int) -> Gang | None:
        """The fullest instance that still holds `size`, or as many wholly free ones as make up `size`."""
        if size > self._width:
            whole = [] if size % self._width else self._first(self._width, size // self._width)
            return tuple([slot for instance in whole for slot in self._some(instance, self._width)]) or None
        for free in range(size, self._width + 1):
            if found := self._first(free, 1):
                return self._some(found[0], size)
        return None

    def _some(self, instance: str, size: int) -> Gang:
        """The first free slots, those on the emptiest GPUs first."""
        free = sorted(self._free[instance])
        if self._gpus < self._width:
            left = Counter(gpu_of(slot, self._gpus) for slot in free)
            free.sort(key=lambda slot: -left[gpu_of(slot, self._gpus)])
        return tuple([slot_of(instance, slot) for slot in free[:size]])

    def _first(self, free: int, count: int) -> list[str]:
        """Return the first `count` instances with exactly `free` free GPUs, by name; empty if there are fewer."""
        heap, found = self._by_free[free], list[str]()
        while heap and len(found) < count:
            instance = heapq.heappop(heap)
            if len(self._free[instance]) == free:
                found.append(instance)
            else:
                self._listed.discard((free, instance))
        for instance in found:
            heapq.heappush(heap, instance)
        return found if len(found) == count else []
