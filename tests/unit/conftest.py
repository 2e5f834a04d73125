"""What several files of tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.service_runs import House, template


@pytest.fixture(scope="module")
def done_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a run that is done, which the processes of a house's experiments take theirs from."""
    return template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def house(tmp_path: Path, done_run: Path) -> Iterator[House]:
    """A home with its store, and experiments whose processes are stood in for."""
    made = House(tmp_path, done_run)
    yield made
    made.store.close()
