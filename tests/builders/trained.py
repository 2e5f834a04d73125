"""Runs on the virtual clock that stand in for trained ones: in a rehearsal no trial is the best, and no sum counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rubberband.executor import Job


@contextmanager
def trained() -> Iterator[None]:
    """What starts on the virtual clock, in this process and meanwhile, counts as trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubberband.running.job.Job", lambda **words: Job(**words | {"trains": True}))
        yield


@pytest.fixture
def trained_runs() -> Iterator[None]:
    """All of a test is within `trained`."""
    with trained():
        yield
