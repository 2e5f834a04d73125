"""The queue of a service: which experiment starts next. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping


class Queue:
    """Queued experiments, whose owners take turns: one with many experiments does not stand before all others.

    A free slot goes to the owner with the fewest running experiments for its weight. Among equals, it goes to the owner
    whose turn began first, by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996, section 2) with one unit of
    work for each start; then to the older experiment. The experiments of one owner start in the order of their arrival.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: owner -> share relative to others; 1 where it is missing."""
        self._weights = weights
        self._owners: dict[str, str] = {}
        """Experiment -> its owner, in the order of arrival."""
        self._finish: dict[str, float] = {}
        """Owner -> virtual time at which its latest turn is over."""
        self._now = 0.0
        """Virtual time: the begin of the latest turn."""

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the experiments in the order of their arrival."""
        return iter(tuple(self._owners))

    def put(self, name: str, owner: str) -> None:
        """Add an experiment as the last one. Idempotent: one that is queued keeps its place."""
        self._owners.setdefault(name, owner)

    def drop(self, name: str) -> None:
        """Remove an experiment. Idempotent."""
        self._owners.pop(name, None)

    def next(self, running: Mapping[str, int], without: Collection[str] = ()) -> str | None:
        """Return the experiment that starts next; None if there is none. `running`: owner -> its running experiments.

        Those in `without` are passed over: they cannot start now.
        """
        first: dict[str, str] = {}
        for name, owner in self._owners.items():
            if name not in without:
                first.setdefault(owner, name)

        def place(owner: str) -> tuple[float, float]:
            return running.get(owner, 0) / self._weight(owner), self._begin(owner)

        return first[min(first, key=place)] if first else None  # among equals the first: the owner of the oldest

    def took_turn(self, owner: str) -> None:
        """Note that an experiment of `owner` got a slot."""
        self._now = self._begin(owner)
        self._finish[owner] = self._now + 1.0 / self._weight(owner)

    def _begin(self, owner: str) -> float:
        """Return the virtual time at which the owner's next turn begins: an owner saves no turns while it asks none."""
        return max(self._finish.get(owner, 0.0), self._now)

    def _weight(self, owner: str) -> float:
        return self._weights.get(owner, 1.0)
