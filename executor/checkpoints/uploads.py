"""Large files go to a bucket from a process of their own: in the one that trains, a driver would hold Python's lock.

Run: python -m rubberband.executor.checkpoints.uploads, with pickled folder, name and path as the input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rubberband.errors import CheckpointError

if TYPE_CHECKING:
    from rubberband.executor.checkpoints.objects import ObjectFolder

LARGE_BYTES = 2**26
"""Bytes of a file from which on it is sent so; the process takes most of a second to start."""
_NICENESS = 10
"""Training comes first where all cores are busy."""


def send(folder: ObjectFolder, name: str, path: Path) -> str:
    """Do as `folder.put`. Raises CheckpointError, and OSError if there can be no process."""
    if path.stat().st_size < LARGE_BYTES:
        return folder.put(name, path)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((folder, name, path), process.stdin)
            process.stdin.flush()  # not closed: it ends with this process
        answer = process.stdout.read()
    if not answer:
        raise CheckpointError(
            f"{folder.url}/{name} could not be written: the process that sends it ended with exit code "
            f"{process.returncode}"
        )
    found: str | CheckpointError = pickle.loads(answer)
    if isinstance(found, CheckpointError):
        raise found
    return found


# The process.


def main() -> None:
    """Send the file, and print its URL or the CheckpointError, pickled."""
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the driver prints
    folder: ObjectFolder
    folder, name, path = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found: str | CheckpointError
    try:
        found = folder.put(name, path)
    except CheckpointError as error:
        found = error
    pickle.dump(found, answers)
    answers.close()
    os._exit(0)  # the driver's threads do not matter any more


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
