"""The one way in which tests wait: for an event, with patience that no healthy machine needs, and never for a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
PATIENCE_S = float(os.environ.get("RUBBERBAND_TEST_PATIENCE_S", "120"))
"""It ends a test that waits in vain, and is no claim about speed."""


def eventually(look: Callable[[], Found | None], what: str = "it", *, within_s: float = PATIENCE_S) -> Found:
    """Return what `look` finds, as soon as that is true; fail where `what` does not happen in time."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.01)
    return found
