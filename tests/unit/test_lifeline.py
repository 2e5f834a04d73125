"""Life lines: a gang learns at once that a worker failed, died or was lost, and nothing where all leave in order."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from rubberband.executor.training import rendezvous
from rubberband.executor.training.lifeline import Lifeline, accepted, connected

Gang = tuple[list[Lifeline], list[threading.Event]]


@pytest.fixture
def gang() -> Iterator[Gang]:
    lost = [threading.Event() for _ in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"GET ")
        others = {rank: connected("127.0.0.1", port, rank, 5.0) for rank in (1, 2)}
        lines = [accepted(listener, 3, 5.0), others[1], others[2]]
    found = [Lifeline(rank, each, lost[rank].set) for rank, each in enumerate(lines)]
    yield found, lost
    for each in found:
        each.close()
    stranger.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_others_hear_why_a_worker_failed_and_then_nothing_else(gang, rank):
    lines, lost = gang
    lines[rank].fail("ValueError: no")
    lines[rank].close()
    for other in {0, 1, 2} - {rank}:
        assert lost[other].wait(5.0)
        assert lines[other].broken == f"worker {rank} failed: ValueError: no"
    assert not lost[rank].is_set()


@pytest.mark.parametrize("rank", [0, 2])
def test_all_others_hear_that_a_worker_is_gone(gang, rank):
    lines, lost = gang
    lines[rank].close()
    for other in {0, 1, 2} - {rank}:
        assert lost[other].wait(5.0)
        assert lines[other].broken == f"the process of worker {rank} is gone"


def test_where_all_leave_in_order_none_is_lost(gang):
    lines, lost = gang
    for each in reversed(lines):
        each.leave()
    for each in lines:
        each.close()
    assert not any(event.is_set() for event in lost)


def test_a_forked_process_does_not_keep_a_dead_worker_alive(gang):
    lines, _ = gang
    child = os.fork()
    if child == 0:
        os._exit(sum(line.fileno() != -1 for each in lines for line in each._lines.values()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_reserved_port_stays_its_own_until_the_gang_takes_it():
    port = rendezvous.reserve()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    descriptor = rendezvous.take(port)
    assert descriptor is not None
    assert rendezvous.take(port) is None
    os.close(descriptor)
    rendezvous.reserve()
    again = rendezvous.reserve()
    rendezvous.release()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", again))
