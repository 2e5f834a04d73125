"""Files that a program writes into its own folder, which all trials share."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_NO_STATE = re.compile(r"(^|/)(wandb|__pycache__|\.[^/]*|[^/]*tfevents[^/]*|[^/]*\.(pyc|log|png|svg))$")
"""Folders and files that no program loads."""
_OF_TOOLS = re.compile(r"(^|/)(outputs|multirun|lightning_logs|tb_logs|runs|mlruns|mlartifacts)/")
"""Folders of hydra, Lightning, TensorBoard and MLflow, with a new folder for each start."""
_OF_DATA = re.compile(
    r"(^|/)[^/]*(data|dataset|datasets|cache|raw|processed|corpus|vocab|tokenizer)[^/]*(/|$)", re.IGNORECASE
)
_OF_MODELS = re.compile(r"\.(pt|pth|ckpt|pkl|joblib|h5|keras|safetensors|npz|msgpack|pt\.tar|pth\.tar)$")
_MOST_FILES = 20_000
_SHOWN = 3


def files_in(folder: Path) -> dict[str, int] | None:
    """Return path -> time of change in nanoseconds of the files of a folder; `path/` -> 0 of the folders in it.

    None: there are too many.
    """
    found: dict[str, int] = {}
    for top, folders, names in os.walk(folder):
        place = Path(top).relative_to(folder)
        folders[:] = [name for name in folders if not _NO_STATE.search(name)]
        found |= {f"{place / name}/": 0 for name in folders}
        for path in (place / name for name in names if not _NO_STATE.search(name)):
            with suppress(OSError):
                found[str(path)] = (folder / path).stat().st_mtime_ns
        if len(found) > _MOST_FILES:
            return None
    return found


def written(before: Mapping[str, int] | None, after: Mapping[str, int] | None) -> list[str]:
    """Return the paths that are new or have changed; none where it is not known."""
    if before is None or after is None:
        return []
    return sorted(path for path, at in after.items() if before.get(path) != at)


def told(paths: Collection[str]) -> list[str]:
    """Return the files that are worth a remark."""
    return [path for path in paths if not path.endswith("/") and not _OF_TOOLS.search(path)]


def models(paths: Collection[str]) -> list[str]:
    """Return the files that hold a model by their names, and no data."""
    return [path for path in paths if _OF_MODELS.search(path) and not _OF_DATA.search(path)]


def states(paths: Collection[str]) -> list[str]:
    """Return the files that a second start may have loaded: models, or else all but data."""
    return models(paths) or [path for path in paths if not path.endswith("/") and not _OF_DATA.search(path)]


def shown(paths: Sequence[str]) -> str:
    """Return the first paths in one text, for a finding."""
    return ", ".join(paths[:_SHOWN]) + (", …" if len(paths) > _SHOWN else "")


@contextmanager
def without(paths: Sequence[str], folder: Path) -> Iterator[None]:
    """Keep files of a folder away for a moment; they are back afterwards as they were."""
    with TemporaryDirectory(prefix=".rubberband-", dir=folder) as aside:
        moved = [(folder / path, Path(aside, str(number))) for number, path in enumerate(paths)]
        try:
            for path, place in moved:
                path.rename(place)
            yield
        finally:
            for path, place in moved:
                if place.exists():
                    place.replace(path)
