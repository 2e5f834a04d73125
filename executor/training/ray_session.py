"""`ray.tune.report` and `ray.tune.get_checkpoint` inside a function trial: they reach the trial's own session.

Ray Tune looks its session up in a variable of a module; while a function runs, ours is there. Nothing is imported: a
function that calls `tune` has imported it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rubberband.executor.training.folder import FolderCheckpoint
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.trial import Session

_MODULE = "ray.train._internal.session"


@contextmanager
def tune_session(session: Session, segment: Segment) -> Iterator[None]:
    """Let Ray Tune's functions reach the `session`, if Ray Tune is imported."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or "ray.tune" not in sys.modules:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rubberband-trial-") as folder:
        before, module._session = module._session, _TuneSession(session, segment, Path(folder))
        try:
            yield
        finally:
            module._session = before


class _TuneSession:
    """The attributes that Ray Tune's functions read: those of its own session."""

    world_rank = None  # of Ray Train's workers alone
    trial_resources = None

    def __init__(self, session: Session, segment: Segment, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self.trial_id = f"{segment.trial:05d}"
        self.trial_name = f"trial_{self.trial_id}"
        self.experiment_name = "rubberband"
        self.trial_dir = str(folder / "trial")
        Path(self.trial_dir).mkdir()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """Report an iteration; the files of Ray Tune's checkpoint are kept in ours."""
        kept = None
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                kept = FolderCheckpoint.from_directory(folder)
        self._session.report(metrics, kept)

    @property
    def loaded_checkpoint(self) -> Any:
        """The latest checkpoint as one of Ray Tune's, or None."""
        kept = self._session.checkpoint()
        if not isinstance(kept, FolderCheckpoint):
            return kept
        folder = tempfile.mkdtemp(prefix="checkpoint-", dir=self._folder)
        return sys.modules["ray.tune"].Checkpoint.from_directory(str(kept.to_directory(folder)))
