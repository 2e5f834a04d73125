"""Labels of an experiment in its home: a small file beside the journal, which stays pure."""

from __future__ import annotations

import json
from dataclasses import asdict

from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.files import EXCLUSIVE, locked, make_directories, private, write_atomically
from rubberband.values.labels import LabelChange, Labels

_PATIENCE_S = 10.0


def read_labels(folder: ExperimentFolder) -> Labels:
    """Return the labels of an experiment; none without a file. Raises InputError for a broken one."""
    try:
        words = json.loads(folder.labels.read_bytes())
        tags, note, archived = words["tags"], words["note"], words["archived"]
        return LabelChange(add_tags=tuple(tags), note=note, archived=bool(archived)).applied(Labels())
    except FileNotFoundError:
        return Labels()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, InputError):
        raise InputError(f"{folder.labels} cannot be read; delete it, and label the experiment again") from None


def write_labels(folder: ExperimentFolder, labels: Labels) -> None:
    """Keep the labels of an experiment. Raises InputError."""
    try:
        make_directories(folder.path)
        write_atomically(folder.labels, json.dumps(asdict(labels)).encode(), durable=False)
    except OSError as error:
        raise InputError(f"{folder.labels} cannot be written ({error.strerror}); make room or give access") from None


def change_labels(folder: ExperimentFolder, change: LabelChange) -> Labels:
    """Change the labels of an experiment, one process at a time, and return them. Raises InputError."""
    with open(folder.path / "labels.lock", "a", opener=private) as lock:
        if not locked(lock, EXCLUSIVE, wait_s=_PATIENCE_S):
            raise InputError(f"the labels of {folder.name!r} are being changed by another process; try again")
        labels = change.applied(read_labels(folder))
        write_labels(folder, labels)
    return labels
