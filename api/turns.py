"""Who is next: those who wait are taken in turn by caller, however much one of them asks. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """What waits, by who asks for it."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, caller: str, item: Item) -> None:
        """Add to what waits; a caller for whom nothing waits comes last."""
        self._waiting.setdefault(caller, deque()).append(item)
        self._count += 1

    def has_others(self, caller: str) -> bool:
        """Whether anybody else waits."""
        return any(each != caller for each in self._waiting)

    def take(self, busy: Collection[str] = ()) -> Item:
        """The next one: of the caller who waits longest for a turn, and first of those who are not `busy`.

        Raises LookupError if nothing waits.
        """
        if not self._waiting:
            raise LookupError("nothing waits")
        caller = next((each for each in self._waiting if each not in busy), next(iter(self._waiting)))
        item = self._waiting[caller].popleft()
        self._shrunk(caller)
        if caller in self._waiting:
            self._waiting.move_to_end(caller)
        return item

    def drop(self, caller: str, item: Item) -> None:
        """Wait no longer for it. Idempotent."""
        waiting = self._waiting.get(caller, ())
        if item in waiting:
            self._waiting[caller].remove(item)
            self._shrunk(caller)

    def displace(self, caller: str) -> Item | None:
        """Make room for a caller: the last that was asked by who has most waiting; None if that is the caller."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]), default=caller)
        if len(self._waiting.get(most, ())) <= len(self._waiting.get(caller, ())) + 1:
            return None
        item = self._waiting[most].pop()
        self._shrunk(most)
        return item

    def _shrunk(self, caller: str) -> None:
        self._count -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]
