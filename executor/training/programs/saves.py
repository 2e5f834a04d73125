"""Files that the programs of a gang have saved: rank 0 keeps those of its machine, and with them those of the others.

Rank 0 asks the first worker of each other machine to take a snapshot at the same moment, and to save it when rank 0
saves its own. It holds the files that were written there since the start: the others are on rank 0's machine too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import Payload
from rubberband.executor.checkpoints.folders import Signature, signature
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.checkpoints.snapshots import Snapshot, Snapshots
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.training.failures import refused
from rubberband.executor.training.programs.gang import ProgramGang

_TAKE, _SAVE = "take", "save"


class Saves:
    """The latest files of one machine that may become a checkpoint; asked by its first worker."""

    def __init__(self, gang: ProgramGang, folder: Path, scratch: Scratch) -> None:
        """`folder`: that of the programs on this machine; `scratch`: where snapshots are kept."""
        self._gang, self._folder = gang, folder
        self._snapshots = Snapshots(scratch)
        self._latest: Snapshot | None = None
        self._old: list[Snapshot] = []
        """Snapshots that were packed when a later one was taken."""
        self._number = 0
        self._asked = 0
        """Number of the snapshot that other machines save; 0 if none of them does."""
        self._start: Signature = ()
        self._writer: ThreadPoolExecutor | None = None
        self._error = ""

    def begin(self) -> None:
        """Take the files that are there for those with which all machines start."""
        if self._gang.place.machines > 1:
            self._start = signature(self._folder)

    def take(self, folder: Path, **content: Any) -> None:
        """Keep the files of a folder as they are now, and those of the other machines; called on rank 0.

        Raises CheckpointError, GangBroken, and TrialFailure for parts in a folder that the other machines do not know.
        """
        self._forget()
        self._number += 1
        if self._gang.leaders:
            if folder != self._folder:
                _require_whole(folder)
            self._gang.ask(f"{_TAKE} {self._number}")
            content["inherited"] = sorted(self._unchanged()) if folder == self._folder else []
        self._latest = self._snapshots.take(folder, content)
        self._gang.answers(f"{_TAKE} {self._number}")

    def payload(self) -> Payload | None:
        """Return what writes the files that were taken last, which other machines save too; None without any."""
        if self._latest is None:
            return None
        if self._gang.leaders:
            self._asked = self._number
            self._gang.ask(f"{_SAVE} {self._number} {self._latest.content['iterations']}")
        return self._latest.payload()

    def parts(self) -> tuple[CheckpointRef, ...]:
        """Return what the other machines saved of them, once they have. Raises CheckpointError, GangBroken."""
        if not self._asked:
            return ()
        answers = [json.loads(answer) for answer in self._gang.answers(f"{_SAVE} {self._asked} ")]
        for answer in answers:
            if "error" in answer:
                raise CheckpointError(answer["error"])
        return tuple(CheckpointRef(**answer) for answer in answers if answer)

    def answer(self, save: Callable[[int, Payload], CheckpointRef]) -> None:
        """Do what rank 0 asks of the first worker of another machine; `save` puts a file into the store."""
        while (question := self._gang.asked()) is not None:
            what, number, *rest = question.split()
            if what == _TAKE:
                self._take_changed()
                self._gang.answer(question)
            else:
                self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="rubberband part")
                payload = self._latest.payload() if self._latest is not None and self._latest.has_files else None
                self._writer.submit(self._save, number, payload, self._error, partial(save, int(rest[0])))

    def close(self) -> None:
        """Wait until nothing is saved any more."""
        if self._writer is not None:
            self._writer.shutdown()

    def _take_changed(self) -> None:
        self._forget()
        self._error = ""
        try:
            self._latest = self._snapshots.take(self._folder, {"kind": "part"}, without=self._unchanged())
        except CheckpointError as error:
            self._error = str(error)

    def _save(self, number: str, payload: Payload | None, error: str, save: Callable[[Payload], CheckpointRef]) -> None:
        found: dict[str, Any] = {"error": error} if error else {}
        if payload is not None:
            try:
                found = asdict(save(payload))
                del found["parts"]
            except Exception as failed:  # rank 0 raises it
                found = {"error": str(failed)}
        self._gang.answer(f"{_SAVE} {number} {json.dumps(found)}")

    def _unchanged(self) -> set[str]:
        """Return the paths of what is as it was at the start."""
        return {entry[0] for entry in set(self._start) & set(signature(self._folder))}

    def _forget(self) -> None:
        """Remove the latest snapshot, at once or when it is packed."""
        self._old += [self._latest] if self._latest is not None else []
        self._latest = None
        for snapshot in [each for each in self._old if not each.is_packed_now]:
            snapshot.remove()
            self._old.remove(snapshot)


def _require_whole(folder: Path) -> None:
    """Raise TrialFailure for a checkpoint in parts in a folder of one machine's own."""
    for kind in ("*.distcp", "*zero_pp_rank_*"):  # of torch.distributed.checkpoint and DeepSpeed
        if (found := next(folder.rglob(kind), None)) is not None:
            raise refused(
                f"{found.name} is a part of a checkpoint whose other parts are on other machines: save all in the "
                "folder of the environment's RUBBERBAND_CHECKPOINT, and report that folder"
            )
