"""An asynchronous attempt when workers and servers die, with actors that follow a script in place of Ray's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rubberband.executor import (
    AsyncAttempt,
    Event,
    SegmentFailure,
    SegmentStarted,
    Slot,
    StartTrial,
    TrialFailed,
    TrialReported,
    TrialStarted,
)
from rubberband.values.asynchronous import AsyncTraining
from tests.builders.ray_actors import DEATH, Actor, report
from tests.builders.ray_actors import ray as ray
from tests.builders.segments import SEGMENT


class Place:
    """The workers of an instance, each a list of actors that follow each other."""

    def __init__(self, workers: list[list[Actor]], servers: list[Actor]) -> None:
        self._workers, self._servers = workers, servers
        self.used: list[Actor] = []

    def worker(self, gpu: int) -> Future[Actor]:
        found: Future[Actor] = Future()
        found.set_result(self._workers[gpu][0])
        return found

    def replace(self, gpu: int, worker: Actor) -> None:
        if self._workers[gpu][0] is worker and len(self._workers[gpu]) > 1:
            self._workers[gpu].pop(0)

    def server(self, place: tuple[int, int]) -> Actor:
        if not self.used or self.used[-1].is_dropped:
            self.used.append(self._servers.pop(0))
        return self.used[-1]

    def drop_server(self, place: tuple[int, int], server: Actor) -> None:
        server.is_dropped = True


def carried_out(place: Place, *, stopped: bool = False) -> list[Event]:
    """The events of an attempt on two slots, up to four iterations."""
    gang = (Slot(instance="i", gpu=0), Slot(instance="i", gpu=1))
    start = StartTrial(trial=4, attempt=1, gang=gang, from_iterations=0, until_iterations=4, checkpoint=None)
    events: list[Event] = []
    segment = replace(SEGMENT, num_workers=2, training=AsyncTraining())
    found = AsyncAttempt(start, segment, None, lambda _: place, lambda make: events.append(make(0.0)))  # type: ignore[arg-type, return-value]
    if stopped:
        found.stop(replace_workers=False)
    found.begin()
    found.wait(120.0)
    return events


def iterations(events: list[Event]) -> list[int]:
    return [each.iterations for each in events if isinstance(each, TrialReported)]


def until(holds: Callable[[], Any]) -> Callable[[], bool]:
    return lambda: bool(holds())


def test_a_worker_that_dies_is_replaced_while_the_others_go_on() -> None:
    gone = SegmentFailure(kind="raised", message="ServerGone", details="", secondary=True)
    ended: list[bool] = []
    again = Actor([until(lambda: ended), gone])
    first = Actor(
        [
            SegmentStarted(),
            report(1),
            report(2),
            until(lambda: again.orders),
            report(3),
            report(4),
            lambda: ended.append(True) or True,
        ]
    )
    second = Actor([until(lambda: len(first.orders) == 1), DEATH])
    server = Actor(["host:1", until(lambda: ended)])
    events = carried_out(Place([[first], [second, again]], [server]))
    assert iterations(events) == [1, 2, 3, 4]
    assert [each for each in events if isinstance(each, TrialFailed)] == []
    (order,) = again.orders
    assert (order.rank, order.servers, order.secret) == (1, ("host:1",), first.orders[0].secret)


def test_a_worker_that_still_computes_at_the_end_keeps_its_process() -> None:
    reported_at: list[float] = []
    first = Actor([SegmentStarted(), report(4), lambda: reported_at.append(time.monotonic()) or True])
    gone = SegmentFailure(kind="raised", message="ServerGone", details="", secondary=True)
    second = Actor([until(lambda: reported_at and time.monotonic() > reported_at[0] + 0.5), gone])
    workers = [[first], [second, Actor()]]
    events = carried_out(Place(workers, [Actor(["host:1"])]))
    assert iterations(events) == [4]
    assert workers[1][0] is second
    assert not second.scripts


def test_rank_0_that_dies_goes_on_after_its_latest_report() -> None:
    again = Actor([SegmentStarted(), report(3), report(4)])
    first, second = Actor([SegmentStarted(), report(1), report(2), DEATH]), Actor([until(lambda: again.orders)])
    events = carried_out(Place([[first, again], [second]], [Actor(["host:1"])]))
    assert iterations(events) == [1, 2, 3, 4]
    assert sum(isinstance(each, TrialStarted) for each in events) == 1
    assert again.orders[0].from_iterations == 2
    assert again.orders[0].checkpoint is not None
    assert again.orders[0].checkpoint.url == "memory:2"


def test_all_begin_again_from_the_latest_checkpoint_when_a_server_dies() -> None:
    gone = SegmentFailure(kind="raised", message="ServerGone", details="", secondary=True)
    reported: list[bool] = []
    lost = Actor(["host:1", until(lambda: reported), DEATH])
    first = Actor(
        [SegmentStarted(), report(1), lambda: reported.append(True) or True, until(lambda: lost.is_dropped), gone],
        [SegmentStarted(), report(2), report(3), report(4)],
    )
    second = Actor([until(lambda: lost.is_dropped), gone], [])
    fresh = Actor(["host:2"])
    place = Place([[first], [second]], [lost, fresh])
    events = carried_out(place)
    assert iterations(events) == [1, 2, 3, 4]
    assert sum(isinstance(each, TrialStarted) for each in events) == 1
    assert [order.servers for order in second.orders] == [("host:1",), ("host:2",)]
    assert second.orders[1].from_iterations == 1
    assert place.used == [lost, fresh]


def test_all_begin_again_in_smaller_passes_where_a_worker_runs_out_of_memory() -> None:
    ran_out = SegmentFailure(kind="raised", message="out of memory", details="", secondary=False, most_per_gpu=8)
    gone = SegmentFailure(kind="raised", message="ServerGone", details="", secondary=True)
    server = Actor(["host:1", until(lambda: server.is_dropped), DEATH])
    first = Actor([SegmentStarted(), until(lambda: server.is_dropped), gone], [report(1), report(2), report(4)])
    second = Actor([ran_out], [])
    events = carried_out(Place([[first], [second]], [server, Actor(["host:2"])]))
    assert iterations(events) == [1, 2, 4]
    assert [order.most_per_gpu for order in second.orders] == [None, 8]


def test_a_trial_whose_servers_die_again_without_a_report_has_failed() -> None:
    gone = SegmentFailure(kind="raised", message="ServerGone", details="", secondary=True)
    workers = [[Actor([SegmentStarted(), gone], [gone])], [Actor([gone], [gone])]]
    events = carried_out(Place(workers, [Actor(["host:1", DEATH]), Actor(["host:2", DEATH])]))
    (failed,) = [each for each in events if isinstance(each, TrialFailed)]
    assert failed.kind == "died"


def test_an_error_of_the_trial_ends_the_attempt_at_once() -> None:
    own = SegmentFailure(kind="raised", message="ArithmeticError: no more", details="", secondary=False)
    gone = SegmentFailure(kind="raised", message="ServerGone", details="", secondary=True)
    server = Actor(["host:1", until(lambda: server.is_dropped), DEATH])
    first = Actor([SegmentStarted(), report(1), until(lambda: server.is_dropped), gone])
    events = carried_out(Place([[first], [Actor([own])]], [server]))
    (failed,) = [each for each in events if isinstance(each, TrialFailed)]
    assert (failed.kind, failed.message) == ("raised", "ArithmeticError: no more")


def test_an_attempt_that_is_stopped_before_it_trains_touches_no_worker() -> None:
    first, second = Actor(), Actor()
    assert carried_out(Place([[first], [second]], []), stopped=True) == []
    assert first.orders == second.orders == []
