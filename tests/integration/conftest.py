"""What several files of integration tests begin with."""

from __future__ import annotations

import asyncio
from asyncio.events import _set_running_loop
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.builders.browser import chromium
from tests.builders.command_line import CommandLine

if TYPE_CHECKING:
    from tests.builders.processes.segment_worker import Worker


@pytest.fixture(scope="session")
def _one_browser() -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    with chromium() as found:
        loop = asyncio.get_running_loop()
        _set_running_loop(None)
        yield found, loop
        _set_running_loop(loop)


@pytest.fixture
def browser(_one_browser: tuple[Any, asyncio.AbstractEventLoop]) -> Iterator[Any]:
    """One for all tests, each of which has a profile of its own; they are skipped where there is none.

    Playwright's loop counts as running only here: tests in between run loops of their own.
    """
    found, loop = _one_browser
    _set_running_loop(loop)
    yield found
    _set_running_loop(None)


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
