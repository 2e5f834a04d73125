"""Life lines: a gang learns at once that a worker failed, died or was lost, and nothing where all leave in order."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from rubberband.executor import worker_process
from rubberband.executor.training.lifeline import Lifeline, accepted, connected


class Gang:
    """Three workers that are connected, and what each of them hears."""

    def __init__(self, sockets: list[dict[int, socket.socket]]) -> None:
        self.sockets = [each for found in sockets for each in found.values()]
        self.lost = [threading.Event() for _ in sockets]
        self.on_loss = [event.set for event in self.lost]
        before = set(threading.enumerate())
        first = Lifeline(0, sockets[0], self._hear(0))
        (self._first,) = set(threading.enumerate()) - before
        self.lines = [first, *(Lifeline(rank, sockets[rank], self._hear(rank)) for rank in (1, 2))]

    def _hear(self, rank: int) -> Callable[[], None]:
        return lambda: self.on_loss[rank]()

    def settle(self) -> None:
        """Wait until the first worker has heard of all others that they left, or were lost."""
        self._first.join()


@pytest.fixture
def gang() -> Iterator[Gang]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"GET ")
        others = {rank: connected("127.0.0.1", port, rank, 5.0) for rank in (1, 2)}
        lines = [accepted(listener, 3, 5.0), others[1], others[2]]
    made = Gang(lines)
    yield made
    for each in made.lines:
        each.close()
    stranger.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_others_hear_why_a_worker_failed_and_then_nothing_else(gang, rank):
    lines, lost = gang.lines, gang.lost
    lines[rank].fail("ValueError: no")
    lines[rank].close()
    for other in {0, 1, 2} - {rank}:
        assert lost[other].wait(5.0)
        assert lines[other].broken == f"worker {rank} failed: ValueError: no"
    assert not lost[rank].is_set()


def test_the_first_loss_stays_the_reason(gang):
    lines, lost = gang.lines, gang.lost
    lines[1].fail("ValueError: no")
    assert lost[0].wait(5.0)
    lines[2].close()
    lines[1].close()
    gang.settle()
    assert lines[0].broken == "worker 1 failed: ValueError: no"


def test_others_hear_of_a_loss_before_the_first_worker_has_left_its_collective(gang):
    lines, lost = gang.lines, gang.lost
    heard: list[bool] = []
    gang.on_loss[0] = lambda: heard.append(lost[2].wait(5.0))
    lines[1].close()
    assert lost[2].wait(10.0)
    lines[2].close()
    gang.settle()
    assert heard == [True]


@pytest.mark.parametrize("rank", [0, 2])
def test_all_others_hear_that_a_worker_is_gone(gang, rank):
    lines, lost = gang.lines, gang.lost
    lines[rank].close()
    for other in {0, 1, 2} - {rank}:
        assert lost[other].wait(5.0)
        assert lines[other].broken == f"the process of worker {rank} is gone"


def test_a_worker_that_has_left_in_order_loses_nothing_any_more(gang):
    lines, lost = gang.lines, gang.lost
    lines[0].leave()
    lines[1].close()
    lines[2].close()
    gang.settle()
    assert not lost[0].is_set()


def test_a_machine_that_vanishes_is_asked_whether_it_is_there(gang):
    for line in gang.sockets:
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert line.gettimeout() is None


def test_where_all_leave_in_order_none_is_lost(gang):
    lines, lost = gang.lines, gang.lost
    for each in reversed(lines):
        each.leave()
    for each in lines:
        each.close()
    assert not any(event.is_set() for event in lost)


def test_a_forked_process_does_not_keep_a_dead_worker_alive(gang):
    child = os.fork()
    if child == 0:
        os._exit(sum(line.fileno() != -1 for line in gang.sockets))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_reserved_port_stays_its_own_until_the_gang_takes_it():
    port = worker_process.reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    descriptor = worker_process.take_port(port)
    assert descriptor is not None
    assert worker_process.take_port(port) is None
    os.close(descriptor)
    worker_process.reserve_port()
    again = worker_process.reserve_port()
    worker_process.release_port()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", again))
