"""`ray.tune.report` and `ray.tune.get_checkpoint` inside a function trial: they reach the trial's own session.

Ray Tune looks its session up in a variable of a module; while a function runs, ours is there. Nothing is imported: a
function that calls `tune` has imported it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rubberband.executor.training.segment import Segment
from rubberband.executor.training.trial import FolderCheckpoint, Session

TuneStop = Callable[[str, Mapping[str, Any]], bool]
"""Returns whether a trial (its id, its result) ends with this result."""

_MODULE = "ray.train._internal.session"


@contextmanager
def tune_session(session: Session, segment: Segment, stop: TuneStop | None = None) -> Iterator[None]:
    """Let Ray Tune's functions reach the `session`, if Ray Tune is imported. `stop` may end the trial."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or "ray.tune" not in sys.modules:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rubberband-trial-") as folder:
        before, module._session = module._session, _TuneSession(session, segment, Path(folder), stop)
        try:
            yield
        finally:
            module._session = before


def flat(result: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a result whose nested metrics are named `a/b`, as Ray Tune names them."""
    found: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found


class _TuneSession:
    """The attributes that Ray Tune's functions read: those of its own session."""

    world_rank = None  # of Ray Train's workers alone
    trial_resources = None

    def __init__(self, session: Session, segment: Segment, folder: Path, stop: TuneStop | None) -> None:
        self._session = session
        self._folder = folder
        self._stop = stop
        self.trial_id = f"{segment.trial:05d}"
        self.trial_name = f"trial_{self.trial_id}"
        self.experiment_name = "rubberband"
        self.trial_dir = str(folder / "trial")
        Path(self.trial_dir).mkdir()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """Report an iteration, the last one with `done` or by the rule; a checkpoint's files are kept in ours."""
        kept = None
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                kept = FolderCheckpoint.from_directory(folder)
        found = flat(metrics)
        result = {"training_iteration": self._session.iteration, **found}
        if found.get("done") or (self._stop is not None and self._stop(self.trial_id, result)):
            self._session.ended = True
        self._session.report(found, kept)

    @property
    def loaded_checkpoint(self) -> Any:
        """The latest checkpoint as one of Ray Tune's, or None."""
        kept = self._session.checkpoint()
        if not isinstance(kept, FolderCheckpoint):
            return kept
        folder = tempfile.mkdtemp(prefix="checkpoint-", dir=self._folder)
        return sys.modules["ray.tune"].Checkpoint.from_directory(str(kept.to_directory(folder)))
