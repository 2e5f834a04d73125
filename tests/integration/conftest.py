"""What several files of integration tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.builders.browser import chromium
from tests.builders.command_line import CommandLine

if TYPE_CHECKING:
    from tests.builders.processes.segment_worker import Worker


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests of a file; they are skipped where there is none."""
    with chromium() as found:
        yield found


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    """The command line as a user runs it, with a home and a folder of its own."""
    return CommandLine(tmp_path)


@pytest.fixture(scope="module")
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Warm workers for the gangs of a file: two, or as many as its NUM_WORKERS says."""
    from tests.builders.processes.segment_worker import gang_of

    with gang_of(getattr(request.module, "NUM_WORKERS", 2)) as started:
        yield started
