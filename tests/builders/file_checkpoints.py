"""Virtual runs whose trials keep checkpoints in files, which the driver deletes once it has journalled newer ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rubberband.executor import (
    CheckpointRef,
    CheckpointStore,
    Command,
    DiscardCheckpoint,
    Event,
    StartTrial,
    TrialReported,
    VirtualBackend,
    open_store,
    session,
)


class FileBackend(VirtualBackend):
    """A virtual backend that keeps checkpoints in a store; a trial that starts reads its own."""

    def __init__(self, store: CheckpointStore, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._store = store

    def execute(self, command: Command) -> None:
        """Carry it out with what the checkpoint says. Raises CheckpointError for one that is gone or has changed."""
        if isinstance(command, DiscardCheckpoint):
            self._store.discard(command.checkpoint)
        elif isinstance(command, StartTrial) and command.checkpoint is not None:
            kept = self._store.load(command.checkpoint).decode().partition("\n")[0]
            super().execute(replace(command, checkpoint=CheckpointRef(url=kept, digest="", size_bytes=0)))
        else:
            super().execute(command)

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Return events; the checkpoints of reports are files."""
        return [self._kept(event) for event in super().next_events(wake_at)]

    def _kept(self, event: Event) -> Event:
        if not isinstance(event, TrialReported) or event.checkpoint is None:
            return event
        payload = f"{event.checkpoint.url}\n".encode().ljust(4096)
        return replace(event, checkpoint=self._store.save(event.trial, event.iterations, payload))


@contextmanager
def keeping_files(folder: Path) -> Iterator[None]:
    """Let virtual runs of this process keep their checkpoints in a folder."""
    store = open_store(str(folder))
    with patch.object(session, "VirtualBackend", lambda *args, **options: FileBackend(store, *args, **options)):
        yield
