"""Trial programs: what tests train. Workers import them by `entrypoint`, as they import a user's file."""

from __future__ import annotations

from pathlib import Path

from rubberband.executor import Entrypoint

FOLDER = Path(__file__).parent


def entrypoint(name: str) -> Entrypoint:
    """Return the entrypoint of a trial of this folder, as in `segment_trials:Weighed`."""
    return Entrypoint.parse(name, [FOLDER])
