"""What the service goes on with: what was run by hand, what may cost no more than it may, what is asked at once."""

from __future__ import annotations

import fcntl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband.api import experiments
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.experiments.starting import Processes
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import ServiceLimits
from rubberband.cli import app
from rubberband.executor import DriverRequest, ExperimentFolder, HostedRun
from rubberband.executor.journal.inbox import NewTrials
from rubberband.running.run import run_experiment
from rubberband.spec.experiment import Experiment
from rubberband.values.submission import Submission
from tests.builders.service_runs import (
    CANCELLED,
    DONE,
    INTERRUPTED,
    QUEUED,
    RUNNING,
    House,
    count_of,
    cut_off,
    experiment,
    extend,
    extension,
)


def test_a_run_started_by_hand_waits_in_the_queue_like_a_submitted_one(house: House) -> None:
    house.cut_template()
    house.set(limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        house.wait("template", INTERRUPTED)
        assert runs.resume("template").state is QUEUED
        assert extend(runs, house.home, "template", deadline="2h", request="r1").applied
        assert runs.cancel("template").state is INTERRUPTED
    assert house.row("template").words == {}
    assert house.pending("template") == ["extend"]


def test_a_resume_takes_back_what_was_asked_to_end_before(house: House) -> None:
    """As by who cancelled it at the moment at which it was cut off; what was granted stays."""
    house.cut_template()
    house.set(limits=ServiceLimits(max_running=0))
    inbox = house.inbox("template")
    inbox.put(DriverRequest(id="c-1", kind="cancel", asked_at=1.0))
    inbox.put(DriverRequest(id="r-1", kind="extend", asked_at=2.0, max_cost_usd=100.0))
    with house.open() as runs:
        house.wait("template", INTERRUPTED)
        assert runs.resume("template").state is QUEUED
    assert [asked.id for asked in inbox.pending()] == ["r-1"]


@pytest.mark.parametrize("name", ["-", "--x"])
def test_runs_with_names_of_an_older_form_are_shown_extended_cancelled_and_resumed(
    house: House, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = experiment().model_copy(update={"name": name})
    house.set(limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        assert runs.submit(old).state is QUEUED
        assert extend(runs, house.home, name, deadline="2h", request="r1").applied
        assert runs.cancel(name).state is CANCELLED
        assert runs.resume(name).state is QUEUED
    run_experiment(old, house.folder(name))
    cut_off(house.home / "experiments" / name / "journal.db", at=3)
    monkeypatch.setenv("RUBBERBAND_HOME", str(house.home))
    for command in ("resume", "report", "status"):
        assert CliRunner().invoke(app, [command, "--", name]).exit_code == 0


def test_a_budget_that_is_more_than_may_be_spent_here_is_not_gone_on_with(house: House) -> None:
    dear = house.folder("dear")
    run_experiment(experiment("dear", max_cost=6.0), dear)
    cut_off(dear.journal, at=3)
    house.cut_template()
    house.set(limits=ServiceLimits(max_cost_usd=5.0))
    with house.open() as runs:
        for name, text in (("template", "none is not allowed here"), ("dear", "6.00 USD is not allowed here")):
            house.wait(name, INTERRUPTED)
            with pytest.raises(HttpProblem, match=text):
                runs.resume(name)
    assert house.starts() == []


def test_a_reader_blocks_no_start_of_a_process(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="one")
    processes = Processes((sys.executable, "-S", "-c", ""))
    order = HostedRun(attempt=1, resume=False, words={})
    folder.path.mkdir(parents=True)
    with open(folder.process_lock, "a") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        leaving = threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN))
        leaving.start()
        assert processes.start(folder, order)
        leaving.join()
    processes.let_go()


def test_limits_that_are_changed_at_the_same_time_are_all_kept(house: House) -> None:
    house.allow(0)
    with house.open() as runs, ThreadPoolExecutor(2) as pool:
        runs.submit(experiment(max_cost=5.0, deadline="30m"))
        asked = [
            pool.submit(extend, runs, house.home, "one", deadline="1h", request="r1"),
            pool.submit(extend, runs, house.home, "one", max_cost_usd=6.0, request="r2"),
        ]
        assert all(done.result().applied for done in asked)
    constraints = experiment(**house.row("one").words["constraints"]).constraints
    assert constraints.deadline_at == pytest.approx(house.row("one").created_at + 3600.0, abs=0.001)
    assert constraints.max_cost_usd == 6.0


def test_a_journal_that_is_read_slowly_holds_up_no_other_experiment(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()

    def slow(folder: ExperimentFolder) -> bool:
        if folder.name == "slow" and threading.current_thread() is reader:
            began.set()
            assert go.wait(60.0)
        return False

    with house.open() as runs:
        for name in ("slow", "quick"):
            runs.submit(experiment(name))
            house.wait(name, DONE)
    runs = ExperimentRuns(house.settings, house.store, lambda: None)  # which is not started: it follows neither
    with closing(runs):
        monkeypatch.setattr(experiments, "at_work", slow)
        lines: list[Any] = []
        reader = threading.Thread(target=lambda: lines.append(runs.result("slow")))
        reader.start()
        assert began.wait(60.0)
        assert runs.result("quick") is not None
        go.set()
        reader.join()
    assert lines[0].outcome == "done"


def test_a_measurement_that_failed_on_ec2_is_not_paid_for_twice(house: House) -> None:
    house.tell(one="silent")
    house.set(providers=("aws",), entrypoints=("a:b",), checkpoints=("s3://a",))
    words = experiment("one").to_words() | {
        "entrypoint": "a:b",
        "constraints": {"max_cost": 5},
        "resources": {"provider": "aws", "instance_type": "g5.xlarge", "checkpoints": "s3://a/b"},
    }
    del words["profile"]
    with house.open() as runs:
        runs.submit(Experiment(**words))
        house.wait("one", INTERRUPTED)
        with pytest.raises(HttpProblem, match="submit it again"):
            runs.resume("one")
    assert len(house.starts()) == 1


def test_a_second_resume_withdraws_nothing_that_was_asked_since(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.cut_template()
    house.tell(template="hold")
    with house.open() as runs:
        stale = house.wait("template", INTERRUPTED)
        runs.resume("template")
        house.wait("template", RUNNING)
        runs.cancel("template")
        rows, read, here = iter([stale]), house.store.submission, threading.current_thread()

        def first_stale(name: str) -> Submission | None:
            return (next(rows, None) if threading.current_thread() is here else None) or read(name)

        monkeypatch.setattr(house.store, "submission", first_stale)
        with pytest.raises(HttpProblem, match="already running"):
            runs.resume("template")
        pending = house.pending("template")
        house.go()
        house.wait("template", DONE)
    assert pending == ["cancel"]


def test_a_resume_that_comes_late_leaves_the_cancel_of_what_runs_by_now(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.cut_template()
    house.tell(template="hold")
    with house.open() as runs:
        house.wait("template", INTERRUPTED)
        read, here, looks = house.store.submission, threading.current_thread(), iter(["before", "under the lock"])

        def slowly(name: str) -> Submission | None:
            row = read(name)
            if threading.current_thread() is here and next(looks, "") == "under the lock":
                monkeypatch.undo()
                assert house.store.change("template", at=house.clock(), state=QUEUED, reason="", expected=None)
                runs.watcher.kick("template")  # the automatic restart
                house.wait("template", RUNNING)
                runs.cancel("template")
            return row

        monkeypatch.setattr(house.store, "submission", slowly)
        with pytest.raises(HttpProblem, match="just changed"):
            runs.resume("template")
        pending = house.pending("template")
        house.go()
        house.wait("template", DONE)
    assert pending == ["cancel"]


def test_resuming(house: House) -> None:
    house.cut_template()
    count = count_of(house.journal)
    with house.open() as runs:
        house.wait("template", INTERRUPTED)
        runs.resume("template", request="r1")
    with house.open() as runs:  # the server died before it answered
        assert runs.resume("template", request="r1").name == "template"
        house.wait("template", DONE)
        assert runs.resume("template", request="r1").state is DONE
        with pytest.raises(HttpProblem, match="it is over"):
            runs.resume("template", request="r2")
    assert (len(house.starts()), house.row("template").attempt) == (1, 1)
    assert house.seqs("template") == list(range(count))


def test_extending_a_queued_experiment_that_has_begun_since(house: House) -> None:
    house.set(limits=ServiceLimits(max_running=0))
    with house.open() as runs:
        runs.submit(experiment(max_cost=5.0))
        for _ in range(2):
            found = extend(runs, house.home, "one", max_cost_usd=6.0, request="e1")
            assert (found.applied, found.after.max_cost_usd) == (True, 6.0)
        words = house.row("one").words
    house.set()
    with house.open() as runs:
        house.wait("one", DONE)
        assert extend(runs, house.home, "one", max_cost_usd=6.0, request="e1").applied
        with pytest.raises(HttpProblem, match="it is over"):
            extend(runs, house.home, "one", max_cost_usd=6.0, request="e2")
    assert house.row("one").words == words
    assert house.pending() == []


def test_trials_are_added_once_for_each_request_also_to_a_search_that_is_done(house: House) -> None:
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", DONE)
        with pytest.raises(HttpProblem, match="it is over; extend it first"):
            runs.resume("one")
        with pytest.raises(HttpProblem, match="there is no trial 999"):
            extension(runs, house.home, "one", trials=NewTrials(clone_of=999))
        for _ in range(2):
            assert extend(runs, house.home, "one", num_samples="+2", request="a1").applied
        assert house.pending() == ["add"]
        assert runs.resume("one").state in (QUEUED, RUNNING)


def test_extending_a_begun_experiment(house: House) -> None:
    house.tell(one="hold")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        for _ in range(2):
            assert extend(runs, house.home, "one", deadline="2h", request="e1").applied
        assert house.pending() == ["extend"]
        house.go()
        house.wait("one", DONE)
