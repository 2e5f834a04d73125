"""`rubberband.hosted` on a virtual clock that takes its time, so that a test can step in, until there is HOME/go."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rubberband.executor.virtual import VirtualBackend
from rubberband.hosted import main

PAUSE_S = 0.05
next_events = VirtualBackend.next_events


def slowly(backend: VirtualBackend, *arguments: Any) -> Any:
    if not (Path(sys.argv[1]) / "go").exists():
        time.sleep(PAUSE_S)
    return next_events(backend, *arguments)


if __name__ == "__main__":
    VirtualBackend.next_events = slowly  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
