"""Small promises of many parts: what is durable, how often, what is kept or let go, and what counts as nothing."""

from __future__ import annotations

import math
import sqlite3
import tarfile
import threading
from contextlib import closing
from dataclasses import replace
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sql

from rubberband.api.store import Store
from rubberband.api.store.schema import Promise
from rubberband.cloud.aws import prices, quotes
from rubberband.cloud.aws.prices import Book, Quote
from rubberband.cloud.aws.quotes import FetchedQuotes
from rubberband.executor import Beat, Journal, Leases, RemoteAgent, Tick, connection
from rubberband.executor import begin_journal as begin
from rubberband.executor.checkpoints import folders
from rubberband.executor.checkpoints import scratch as scratches
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.core.forecast import lateness
from rubberband.executor.training.programs.gang import Place, ProgramGang
from rubberband.executor.training.programs.runner import CommandRunner
from rubberband.planner.planning import LOWER_CONFIDENCES, _likeliest
from rubberband.states import ExperimentState
from rubberband.values.command import Metrics, ProgramCommand
from rubberband.values.environment import Environment
from rubberband.values.plan import PlanningConstraints
from rubberband.values.submission import Submission
from tests.builders import segments
from tests.builders.jobs import JOB


def test_events_are_synced_to_the_disk_as_they_are_inserted_unless_a_rehearsal_writes_them(tmp_path):
    begin(tmp_path / "j.db", "one", created_at=1.0, job=JOB, setup={})
    seen: list[str] = []

    def watch(connection: sqlite3.Connection, _record: object) -> None:
        connection.set_trace_callback(seen.append)

    sql.event.listen(sql.Engine, "connect", watch)
    with closing(Journal(f"sqlite:///{tmp_path / 'j.db'}", "one")) as journal:
        for durable in (True, False, True, True):
            journal.durable = durable
            journal.append([Tick(occurred_at=1.0)])
    sql.event.remove(sql.Engine, "connect", watch)
    synced, found = "", []
    for line in seen:
        if line.startswith("PRAGMA synchronous="):
            synced = line.removeprefix("PRAGMA synchronous=")
        found += [synced] if line.startswith("INSERT INTO events") else []
    assert found == ["FULL", "NORMAL", "FULL", "FULL"]


def test_a_file_that_is_rewritten_in_place_at_its_size_is_packed_again(tmp_path, monkeypatch):
    (folder := tmp_path / "out").mkdir()
    (folder / "a").write_bytes(b"old" * 100)
    (folder / "b").write_bytes(b"old" * 100)
    add, rewritten = tarfile.TarFile.addfile, []

    def added(*given: Any) -> None:
        add(*given)
        if not rewritten:  # `a` is packed, and `b` is not
            rewritten.append(1)
            for name in ("a", "b"):
                with open(folder / name, "r+b") as file:
                    file.write(b"new" * 100)

    monkeypatch.setattr(tarfile.TarFile, "addfile", added)
    monkeypatch.setattr(folders, "_PAUSE_S", 0.0)
    folders.pack(folder, tmp_path / "packed", iterations=1, metrics={})
    folders.unpack(tmp_path / "packed", tmp_path / "there")
    assert [(tmp_path / "there" / name).read_bytes() for name in ("a", "b")] == [b"new" * 100] * 2


class Waits:
    """Stands for an Event: notes how long it is waited for, and stops the thread after a few."""

    def __init__(self, stop: Any, most: int = 6) -> None:
        self.waits: list[float] = []
        self._stop, self._most, self._over = stop, most, threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if len(self.waits) >= self._most:
            self._stop()
            self._over.set()
        return False

    def set(self) -> None: ...

    def clear(self) -> None: ...


def test_an_agent_is_asked_no_more_often_than_wanted(monkeypatch):
    beats = []
    actor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda *given: beats.append(given)))
    posted = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))
    ray = SimpleNamespace(
        remote=lambda _: posted, get=lambda *_, **__: Beat(interruption=None, logs=()), kill=lambda _: None
    )
    monkeypatch.setattr(connection, "ray", ray)
    monkeypatch.setattr(connection, "ray_nodes", lambda _: {"a": True})
    agent = RemoteAgent(
        "a", until=lambda: 40.0, interval_s=7.5, logs=None, log_limit_bytes=1000, on_notice=lambda: None
    )
    agent._wake = waits = Waits(lambda: setattr(agent, "_dismissed", True))  # type: ignore[assignment]
    agent._run()
    assert waits.waits == [7.5] * 6
    assert len(beats) == 7, "one to see that it has started, then one for each wait"


def test_leases_are_renewed_no_more_often_than_wanted():
    class Unstarted(Leases):
        def _run(self) -> None: ...

    renewed: list[float] = []
    leases = Unstarted(SimpleNamespace(renew_lease=renewed.append), lease_s=60.0, interval_s=20.0, clock=lambda: 0.0)
    leases._wake = waits = Waits(lambda: setattr(leases, "_closed", True))  # type: ignore[assignment]
    leases.hold_until(math.inf)
    Leases._run(leases)
    assert waits.waits == [20.0] * 6
    assert renewed == [60.0] * 5


def test_a_name_can_be_promised_again_after_it_was_deleted(tmp_path):
    done = Submission(name="a", state=ExperimentState.DONE, created_at=1.0, changed_at=1.0)
    running = Submission(name="a", state=ExperimentState.RUNNING, created_at=2.0, changed_at=2.0)
    with closing(Store(f"sqlite:///{tmp_path / 'store.db'}")) as store:
        assert store.add(done, Promise(experiment="a", start_at=1.0, spans=[[1, 2.0]]))
        assert store.upkeep.delete(done, expected=[ExperimentState.DONE])
        second = Promise(experiment="a", start_at=9.0, spans=[[3, 4.0]], cost_usd=2.0)
        assert store.add(running, second)
        assert store.promises() == [second]


@pytest.mark.parametrize("usd", [(3.0, 2.0, 1.0), (1.0, 2.0, 3.0), (2.0, 1.0, 3.0)])
def test_the_cheapest_of_plans_with_equal_odds_is_taken(usd):
    present = SimpleNamespace(odds=0.5, usd=4.0)
    found = [SimpleNamespace(odds=0.5, usd=each) for each in usd]
    limits = PlanningConstraints(confidence=0.95, deadline_s=100.0)
    rest: Any = SimpleNamespace(
        limits=limits,
        problem=SimpleNamespace(objective="min_cost"),
        best=lambda limits, objective: found[len(found) - 1 if objective == "min_time" else limits.confidence > 0.6],
        odds=lambda planned: planned.odds,
        worth=lambda planned: 10.0,
        value=lambda planned: planned.usd,
    )
    tried = {rest.best(replace(limits, confidence=share * 0.95), "min_cost").usd for share in LOWER_CONFIDENCES}
    assert _likeliest(rest, present).usd == min(*tried, usd[-1])


@pytest.mark.parametrize(("trials", "off"), [(2, 0.05), (3, 0.03), (5, 0.02), (16, 0.01), (64, 0.01), (500, 0.01)])
def test_the_last_of_several_trials_is_as_late_as_the_largest_of_as_many_normals(trials, off):
    """The mean of the largest: the integral of 1 - F^n above and F^n below 0."""
    at = np.linspace(-9.0, 9.0, 20_001)
    below = np.array([NormalDist().cdf(value) for value in at]) ** trials
    step = at[1] - at[0]
    mean = float(((1.0 - below)[at >= 0.0].sum() - below[at < 0.0].sum()) * step)
    assert lateness(trials, trials) == pytest.approx(mean, rel=off)
    assert lateness(4 * trials, trials) == pytest.approx(mean / 2.0, rel=off)


def test_an_answer_without_a_part_keeps_what_was_known_of_it(tmp_path, monkeypatch):
    known = Quote(on_demand_usd_per_hour=1.0, on_demand_at=5.0, spot_usd_per_hour={"a": 0.25}, spot_at=6.0)
    prices.write_book(tmp_path, Book(region="r", quotes={"g5.xlarge": known}))
    on_demand = Quote(on_demand_usd_per_hour=2.0, on_demand_at=9.0)
    for answer, spot in ((on_demand, ({"a": 0.25}, 6.0)), (Quote(spot_usd_per_hour={}, spot_at=9.0), ({}, 9.0))):
        monkeypatch.setattr(quotes, "fetch", lambda *_, found=answer, **__: FetchedQuotes(quotes={"g5.xlarge": found}))
        prices.prices_of(["g5.xlarge"], "r", tmp_path, session=SimpleNamespace(), refresh=True)
        found = prices.read_book(tmp_path, "r").quotes["g5.xlarge"]
        assert (found.spot_usd_per_hour, found.spot_at) == spot
        assert (found.on_demand_usd_per_hour, found.on_demand_at) == (2.0, 9.0)


@pytest.mark.parametrize(
    ("usd", "unit", "found"), [("0.0000000000", "Hrs", []), ("1.5", "Hrs", [1.5]), ("1.5", "Q", [])]
)
def test_a_price_of_nothing_is_none(usd, unit, found):
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    product = {"product": {}, "terms": {"OnDemand": {"t": {"priceDimensions": {"d": dimension}}}}}
    assert list(quotes.hourly_prices_usd(product)) == found


def test_the_copies_of_a_program_s_checkpoints_go_once_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(scratches, "machine_folder", lambda: tmp_path)
    command = ProgramCommand(words=("true",), metrics=Metrics(source="stdout"), launch="worker")
    scratch = Scratch()
    gang = ProgramGang(Place.alone(folder=str(scratch.path)), None)
    runner = CommandRunner(command, segments.SEGMENT, str(tmp_path), gang, Environment(), scratch)
    runner.begin(None)
    before = sorted((tmp_path / "scratch").rglob("*"))
    for iterations in (1, 2, 3):
        payload: Any = runner.dump(iterations, {"loss": 0.5})
        payload(tmp_path / f"kept-{iterations}")
    assert sorted((tmp_path / "scratch").rglob("*")) == before
    assert (tmp_path / "kept-2").stat().st_size > 0
    for iterations in (1, 2, 3):
        (scratch.path / "checkpoint" / "state").write_text(str(iterations))
        runner._take(iterations, {"loss": 0.5}, scratch.path / "checkpoint")
        payload = runner.dump(iterations, {"loss": 0.5})
        payload(tmp_path / f"kept-{iterations}")
    assert [each.read_text() for each in (scratch.path / "saved").rglob("state")] == ["3"]
    runner.close()
    assert list((tmp_path / "scratch").iterdir()) == []
