"""The driver leaves the cluster after the threads that call Ray, and not before."""

from __future__ import annotations

import threading

from rubberband.executor.ray import connection


def test_a_thread_that_still_works_is_waited_for() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(30.0)
        ended.set()

    connection.start(work, "works")
    connection.settle(0.0)
    assert not ended.is_set()
    may_end.set()
    connection.settle(30.0)
    assert ended.is_set()


def test_a_thread_does_not_wait_for_itself() -> None:
    thread = connection.start(lambda: connection.settle(30.0), "settles")
    thread.join(10.0)
    assert not thread.is_alive()
