"""Places of gangs on the instances of a pool: apart from each other (Pollux §4.2), side by side, or freely."""

from __future__ import annotations

from collections.abc import Mapping

from rubberband.planner.sharing.demand import Allocations, Capacity


def place(
    gpus: Mapping[str, int],
    capacity: Capacity,
    current: Allocations,
    least: Mapping[str, int] | None = None,
    promised: Mapping[str, int] | None = None,
) -> dict[str, dict[int, int]]:
    """Return GPUs on instances for `gpus`, name -> number; the largest gangs are placed first.

    A gang lies within one instance where it fits, and an instance has a part of at most one spanning gang: two slow
    each other down (Pollux §4.2, interference). A gang that keeps its number of GPUs stays where it is, unless another
    one finds no room.

    Where the free GPUs lie on too many instances, gangs move, the smallest ones; where that does not help, a gang
    gets the GPUs that are free on one instance, or none if they are fewer than its `least` (by default 1). It always
    gets the GPUs that it is `promised`, beside other spanning gangs if there is no other room.
    """
    kept = _kept(gpus, capacity, current)
    for tried in (kept, {}):
        board = _Board(capacity, tried)
        waiting = {name: count for name, count in gpus.items() if count > 0 and name not in tried}
        if board.settle(waiting):
            return board.found
    promises = sorted((promised or {}).items())
    board.scatter({name: count for name, count in promises if name not in board.found and count > 0})
    board.squeeze({name: count for name, count in gpus.items() if name not in board.found}, least or {})
    return board.found


def place_side_by_side(gpus: Mapping[str, int], capacity: Capacity, current: Allocations) -> dict[str, dict[int, int]]:
    """Return GPUs on instances for `gpus`, whose sum fits: like `place`, but spanning gangs may share an instance.

    No gang moves to make room for another one. Each lies on the instance with the least room that holds it, else on
    those with the most free GPUs.
    """
    board = _Board(capacity, _kept(gpus, capacity, current))
    waiting = {name: count for name, count in gpus.items() if count > 0 and name not in board.found}
    for name, count in sorted(waiting.items(), key=lambda item: -item[1]):
        roomy = board.roomy(count)
        if roomy is None:
            board.scatter({name: count})
        else:
            board.put(name, {roomy: count})
    return board.found


def place_freely(gpus: Mapping[str, int], capacity: Capacity, current: Allocations) -> dict[str, dict[int, int]]:
    """Return GPUs for `gpus`, whose sum fits, in their order, on the instances with the most free GPUs.

    A gang that keeps its number of GPUs stays.
    """
    board = _Board(capacity, _kept(gpus, capacity, current))
    board.scatter({name: count for name, count in gpus.items() if name not in board.found})
    return board.found


def _kept(gpus: Mapping[str, int], capacity: Capacity, current: Allocations) -> dict[str, dict[int, int]]:
    """Return the gangs that keep their number of GPUs, on instances that are still there."""
    return {
        name: dict(where)
        for name, where in current.items()
        if gpus.get(name, 0) == sum(where.values()) > 0 and all(0 <= at < capacity.instances for at in where)
    }


class _Board:
    """Instances with gangs on them."""

    def __init__(self, capacity: Capacity, kept: Mapping[str, dict[int, int]]) -> None:
        self.size = capacity.gpus_per_instance
        self.free = [self.size] * capacity.instances
        self.spanned: set[int] = set()
        """Instances with a part of a spanning gang."""
        self.guests: list[set[str]] = [set() for _ in range(capacity.instances)]
        """Gangs of each instance that lie on it alone."""
        self.found: dict[str, dict[int, int]] = {}
        for name, where in kept.items():
            self.put(name, where)

    def settle(self, waiting: Mapping[str, int]) -> bool:
        """Place the gangs, the largest first; return whether all found room."""
        queue = sorted(waiting.items(), key=lambda item: item[1])
        all_placed = True
        while queue:
            name, count = queue.pop()
            where = self._within(count) if count <= self.size else self._across(count)
            if where is None:
                all_placed = False
                continue
            displaced = self._make_room(where)
            self.put(name, where)
            if displaced:
                queue = sorted([*queue, *displaced.items()], key=lambda item: item[1])
        return all_placed

    def scatter(self, waiting: Mapping[str, int]) -> None:
        """Give each its GPUs wherever they are free, on as few instances as hold them, in order."""
        for name, count in waiting.items():
            where: dict[int, int] = {}
            for number in sorted(range(len(self.free)), key=lambda number: -self.free[number]):
                taken = min(self.free[number], count - sum(where.values()))
                if taken > 0:
                    where[number] = taken
            self.put(name, where)

    def squeeze(self, waiting: Mapping[str, int], least: Mapping[str, int]) -> None:
        """Give each of the others what one instance has left, the smallest first."""
        for name, count in sorted(waiting.items(), key=lambda item: item[1]):
            room = max(self.free, default=0)
            if min(count, room) >= max(1, least.get(name, 1)):
                self.put(name, {self.free.index(room): min(count, room)})

    def roomy(self, count: int) -> int | None:
        """Return the instance with the least room that holds the gang; None if none does."""
        rooms = ((room, number) for number, room in enumerate(self.free) if room >= count)
        return min(rooms, default=(0, None))[1]

    def _within(self, count: int) -> dict[int, int] | None:
        """Return the instance with the least room that holds the gang, after moving smaller gangs if it must."""
        roomy = self.roomy(count)
        if roomy is not None:
            return {roomy: count}
        fits = [(self._cost(number, count), self.free[number], number) for number in range(len(self.free))]
        cost, _, number = min(fits, default=(None, 0, 0))
        return None if cost is None or cost == _NEVER else {number: count}

    def _across(self, count: int) -> dict[int, int] | None:
        """Return whole instances, and the rest on one that no other spanning gang shares."""
        whole, rest = divmod(count, self.size)
        costs = sorted((self._cost(number, self.size, spanning=True), number) for number in range(len(self.free)))
        chosen = [number for cost, number in costs[:whole] if cost != _NEVER]
        if len(chosen) < whole:
            return None
        where = dict.fromkeys(chosen, self.size)
        if rest:
            others = [number for number in range(len(self.free)) if number not in where]
            fits = [(self._cost(number, rest, spanning=True), self.free[number], number) for number in others]
            cost, _, number = min(fits, default=(_NEVER, 0, 0))
            if cost == _NEVER:
                return None
            where[number] = rest
        return where

    def _cost(self, number: int, count: int, *, spanning: bool = False) -> int:
        """Return the GPUs of the gangs that must leave the instance for `count` more; all are smaller than that."""
        if spanning and number in self.spanned:
            return _NEVER
        lacking, cost = count - self.free[number], 0
        if lacking <= 0:
            return 0
        for size in sorted(self.found[name][number] for name in self.guests[number]):
            if lacking <= 0:
                break
            if size >= count:
                return _NEVER
            lacking -= size
            cost += size
        return cost if lacking <= 0 else _NEVER

    def _make_room(self, where: Mapping[int, int]) -> dict[str, int]:
        """Take the smallest gangs from the instances until `where` fits; return them with their sizes."""
        displaced = {}
        for number, count in where.items():
            for name in sorted(self.guests[number], key=lambda name: (self.found[name][number], name)):
                if self.free[number] >= count:
                    break
                displaced[name] = self.found.pop(name)[number]
                self.guests[number].remove(name)
                self.free[number] += displaced[name]
        return displaced

    def put(self, name: str, where: Mapping[int, int]) -> None:
        """Place a gang."""
        self.found[name] = dict(where)
        for number, count in where.items():
            self.free[number] -= count
        if len(where) > 1:
            self.spanned.update(where)
        else:
            self.guests[next(iter(where))].add(name)


_NEVER = 1 << 60
"""Cost of an instance that cannot take the gang."""
