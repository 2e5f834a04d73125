"""The store knows which requests took effect, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rubberband.api.store import ACT_KEPT_S, Store
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission

QUEUED, RUNNING = ExperimentState.QUEUED, ExperimentState.RUNNING


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()


def test_a_request_has_acted_if_what_it_changes_was_changed(store: Store) -> None:
    assert store.add(Submission(name="a", state=QUEUED, created_at=1.0, changed_at=1.0))
    assert not store.change("a", at=2.0, state=QUEUED, expected={RUNNING}, request="r1")
    assert not store.has_acted("r1", since=0.0)
    assert store.change("a", at=3.0, state=RUNNING, expected={QUEUED}, request="r1")
    assert store.has_acted("r1", since=3.0)
    assert not store.has_acted("r1", since=3.5)
    assert not store.has_acted("r2", since=0.0)


def test_requests_that_acted_are_noted_again_and_forgotten_in_time(store: Store) -> None:
    for at in (1.0, 2.0):
        store.note_act("r1", at=at)
    store.prune(at=ACT_KEPT_S + 1.5)
    assert store.has_acted("r1", since=2.0)
    store.prune(at=ACT_KEPT_S + 2.0)
    assert not store.has_acted("r1", since=0.0)
