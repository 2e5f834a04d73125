"""Two services on one PostgreSQL that restarts while they run experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bench_two_services import story
from tests.builders.databases import NONE, programs


@pytest.mark.long
@pytest.mark.skipif(programs() is None, reason=NONE)
def test_each_journal_has_one_driver_whatever_restarts(tmp_path: Path) -> None:
    assert story(tmp_path, restarts=20, seed=5) == []
