"""Tells a checkpoint store that is full or gone, which is nobody's failure, from a checkpoint that is at fault."""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.executor.checkpoints import CheckpointStore, probe
from rubberband.executor.events import CheckpointLost, Event, TrialFailed, TrialReported

_SHORTEST_PROBE_BYTES = 2**16


class StoreWatch:
    """Shown every event before the controller; one that blames the store is checked by writing to the store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._probe_bytes = _SHORTEST_PROBE_BYTES

    def check(self, events: Sequence[Event]) -> None:
        """Raises StoreAwayError if a checkpoint failed and the store is away, or takes no other either.

        The trials have not failed then: once it is back they can go on where they are.
        """
        for event in events:
            if isinstance(event, TrialReported):
                self._probe_bytes = max(self._probe_bytes, event.checkpoint.size_bytes)
            elif isinstance(event, CheckpointLost) or (isinstance(event, TrialFailed) and event.kind == "checkpoint"):
                probe(self._store, event.trial, self._probe_bytes)
