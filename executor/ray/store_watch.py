"""Tells a checkpoint store that is full or gone, which is nobody's failure, from a checkpoint that is at fault."""

from __future__ import annotations

from collections.abc import Sequence

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.events import Event, TrialFailed, TrialReported

_SHORTEST_PROBE_BYTES = 2**16
_LONGEST_PROBE_BYTES = 2**26


class StoreWatch:
    """Shown every event before the controller; one that blames the store is checked by writing to the store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._probe_bytes = _SHORTEST_PROBE_BYTES

    def check(self, events: Sequence[Event]) -> None:
        """Raises CheckpointError if a checkpoint failed and the store takes no other either.

        The trials have not failed then: once there is room they can go on where they are.
        """
        for event in events:
            if isinstance(event, TrialReported):
                self._probe_bytes = min(max(self._probe_bytes, event.checkpoint.size_bytes), _LONGEST_PROBE_BYTES)
            elif isinstance(event, TrialFailed) and event.kind == "checkpoint":
                self._probe(event)

    def _probe(self, failed: TrialFailed) -> None:
        try:
            self._store.discard(self._store.save(failed.trial, 0, bytes(self._probe_bytes)))
        except CheckpointError:
            raise CheckpointError(
                f"checkpoints cannot be written any more; make room or give access, then go on by `rubberband resume`: "
                f"{failed.message}"
            ) from None
