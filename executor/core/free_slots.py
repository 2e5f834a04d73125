"""Free GPUs of instances that are all as wide, where nothing is displaced: a gang more, without a walk through them.

It places as `rubberband.executor.core.placement.place` does where all that runs is locked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from rubberband.executor.core.events import Gang
from rubberband.executor.core.placement import slot_of


class FreeSlots:
    """The free GPUs of every instance, and the instances by how many they have free."""

    def __init__(self, instances: Iterable[str], width: int, taken: Iterable[Gang]) -> None:
        """Instances of `width` GPUs each, of which `taken` are taken; these may have some of other instances too."""
        self._width = width
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

    def _some(self, instance: str, gpus: int) -> Gang:
        return tuple([slot_of(instance, gpu) for gpu in sorted(self._free[instance])[:gpus]])

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
