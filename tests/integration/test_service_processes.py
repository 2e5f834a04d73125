"""Experiments of the service in their real processes, on a virtual clock."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rubberband.api.dashboard.experiment_texts import sentence
from rubberband.api.dashboard.listing import row as listed
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.problems import HttpProblem
from rubberband.api.store import open_store
from rubberband.executor import ExperimentFolder, holding, is_hosted, read_ending, read_mark
from rubberband.running import hosted
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from tests.builders import processes
from tests.builders.service_runs import DONE, House, experiment, extend, extension
from tests.builders.waiting import eventually

SLOW = (sys.executable, "-P", str(processes.FOLDER / "slow_hosted.py"))
HOSTED = (sys.executable, "-P", "-m", "rubberband.running.hosted")
RUNNING, INTERRUPTED, STARTING = ExperimentState.RUNNING, ExperimentState.INTERRUPTED, ExperimentState.STARTING
CANCELLED, REFUSED = ExperimentState.CANCELLED, ExperimentState.REFUSED


@pytest.fixture(autouse=True)
def from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes import rubberband from where the tests do."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A home with its store, whose experiments have processes of their own."""
    made = House(tmp_path, tmp_path)
    made.settings = replace(made.settings, clock=time.time)  # as the processes have it
    yield made
    made.store.close()


def folder_of(house: House, name: str = "one") -> ExperimentFolder:
    return ExperimentFolder(home=house.home, name=name, store=house.settings.store)


def wait_for_reports(house: House, runs: ExperimentRuns, count: int) -> None:
    """Wait until the trials have reported `count` iterations."""
    eventually(lambda: (found := runs.result("one")) and sum(trial.iterations for trial in found.trials) >= count)


def test_a_run_that_is_killed_resumed_cancelled_and_resumed_trains_nothing_twice(house: House) -> None:
    with house.open(SLOW) as runs:
        runs.submit(experiment())
        wait_for_reports(house, runs, 1)
        house.kill()
        assert "resume it" in house.wait("one", INTERRUPTED).reason
        runs.resume("one")
        house.wait("one", RUNNING)
        runs.cancel("one")
        assert house.wait("one", CANCELLED).reason == "cancelled by the user"
        house.go()
        runs.resume("one")
        row = house.wait("one", DONE)
        result = runs.result("one")
        said, _ = runs.lines("one", source="process")
    assert row.attempt == 3
    assert result is not None
    for trial in result.trials:
        assert [iterations for _, iterations, _ in trial.curve] == list(range(1, trial.iterations + 1))
    assert house.seqs("one") == list(range(len(house.seqs("one"))))
    assert any("SYNC 2" in line.text for line in said)


@pytest.mark.long
def test_hyperband_is_killed_resumed_and_extended_by_the_service(house: House) -> None:
    plain = experiment(max_cost=50.0).to_words()
    plain["search"]["scheduler"] = {"type": "hyperband", "max_t": 9, "reduction_factor": 3}
    with house.open(SLOW) as runs:
        runs.submit(Experiment(**plain))
        wait_for_reports(house, runs, 1)
        house.kill()
        house.wait("one", INTERRUPTED)
        assert extend(runs, house.home, "one", request="r1", max_cost_usd=60.0).applied
        runs.resume("one")
        house.go()
        row = house.wait("one", DONE)
        result = runs.result("one")
    assert result is not None
    assert (result.outcome, result.resumes, result.max_cost_usd, len(result.stages)) == ("done", 1, 60.0, 6)
    assert (row.summary.brackets, row.summary.stage) == (3, 6)
    assert {trial.bracket for trial in result.trials if trial.status == "completed"} == {0, 1, 2}
    for trial in result.trials:
        assert [iterations for _, iterations, _ in trial.curve] == list(range(1, trial.iterations + 1))
    assert "6 stages" in str(listed(row, 0.0))


@pytest.mark.long
def test_a_store_that_is_mounted_late_after_a_reboot_is_waited_for(house: House, tmp_path: Path) -> None:
    house.settings = replace(house.settings, auto_resume=True)
    folder = folder_of(house)

    def waiting(attempt: int) -> int | None:
        row, mark = house.row("one"), read_mark(folder)
        is_waiting = (
            row.attempt == attempt and row.state is STARTING and "resumes automatically: the checkpoint" in row.reason
        )
        return mark.pid if is_waiting and mark is not None else None

    with house.open(SLOW) as runs:
        runs.submit(experiment())
        wait_for_reports(house, runs, 1)
        folder.checkpoints.rename(tmp_path / "unmounted")
        house.kill()
        pid = eventually(lambda: waiting(2))
        assert str(folder.checkpoints) in sentence(house.row("one"), runs.result("one"))
        assert str(folder.checkpoints) in listed(house.row("one"), 0.0).reason
    os.kill(pid, signal.SIGKILL)  # a reboot before it was mounted
    with house.open(SLOW) as runs:
        eventually(lambda: waiting(3))
        assert not folder.checkpoints.exists()
        (tmp_path / "unmounted").rename(folder.checkpoints)
        house.go()
        row = house.wait("one", DONE)
    assert (row.attempt, row.reason) == (3, "")
    assert [event.kind for event in house.feed("one")].count("DriverResumed") == 1


@pytest.mark.long
def test_a_run_that_waits_for_its_store_can_be_cancelled(house: House, tmp_path: Path) -> None:
    house.settings = replace(house.settings, auto_resume=True)
    with house.open(SLOW) as runs:
        runs.submit(experiment())
        wait_for_reports(house, runs, 1)
        folder_of(house).checkpoints.rename(tmp_path / "unmounted")
        house.kill()
        eventually(lambda: "resumes automatically: the checkpoint" in house.row("one").reason)
        runs.cancel("one")
        row = house.wait("one", INTERRUPTED)
        assert row.reason.startswith("cancelled while it waited for its checkpoint store")
        (tmp_path / "unmounted").rename(folder_of(house).checkpoints)
        house.go()
        runs.resume("one")
        house.wait("one", DONE)


@pytest.mark.long
def test_a_paused_run_is_not_restarted_automatically(house: House) -> None:
    house.settings = replace(house.settings, auto_resume=True)
    with house.open(SLOW) as runs:
        runs.submit(experiment())
        wait_for_reports(house, runs, 1)
        house.wait("one", RUNNING)
        house.kill(what=signal.SIGSTOP)
        try:
            with house.open(SLOW) as another:  # a server that is started meanwhile
                with pytest.raises(HttpProblem):
                    another.resume("one")
                assert house.row("one").state is RUNNING
        finally:
            house.kill(what=signal.SIGCONT)
        house.go()
        assert house.wait("one", DONE).attempt == 1
    assert "DriverResumed" not in [event.kind for event in house.feed("one")]


@pytest.mark.long
def test_limits_are_raised_while_it_runs_and_a_signal_ends_it_cleanly(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    with house.open(SLOW) as runs:
        runs.submit(experiment(max_cost=5.0))
        wait_for_reports(house, runs, 1)
        seen = extension(runs, house.home, "one", deadline="2h", max_cost_usd=6.0)
        assert not seen.applied
        assert extend(runs, house.home, "one", deadline="2h", max_cost_usd=6.0, request="more").applied
        eventually(lambda: any(event.kind == "LimitsChanged" for event in house.feed("one")))
        assert extend(runs, house.home, "one", deadline="2h", max_cost_usd=6.0, request="more").applied
        with pytest.raises(HttpProblem, match="less than"):
            extension(runs, house.home, "one", max_cost_usd=1.0)
        folder = folder_of(house)
        assert is_hosted(folder)
        house.kill(what=signal.SIGTERM)
        house.wait("one", CANCELLED)
        eventually(lambda: not is_hosted(folder))
        result = runs.result("one")
        with holding(folder):
            assert hosted.main([str(house.home), "one"]) == hosted.AT_WORK
    assert capsys.readouterr().err == "another process is running experiment 'one'\n"
    ending = read_ending(folder)
    assert ending is not None
    assert ending.exit_code == 130
    assert result is not None
    assert result.max_cost_usd == 6.0
    assert [event.kind for event in house.feed("one")].count("LimitsChanged") == 1


@pytest.mark.long
def test_an_infeasible_submission_is_refused_with_the_reason_of_the_command_line(house: House) -> None:
    with house.open(HOSTED) as runs:
        runs.submit(experiment(max_cost=0.01))
        row = house.wait("one", REFUSED)
        assert runs.result("one") is None
    assert "raise max_cost" in row.reason
    ending = read_ending(folder_of(house))
    assert ending is not None
    assert (ending.exit_code, ending.error) == (3, row.reason)


@pytest.mark.long
def test_a_star_allows_what_a_module_defines_and_not_what_it_imports(house: House, tmp_path: Path) -> None:
    made = tmp_path / "made-by-a-configuration"
    (tmp_path / "mine.py").write_text("from subprocess import run\n")
    house.settings = replace(house.settings, code=(tmp_path,), entrypoints=("mine:*",))
    words = experiment().to_words() | {"entrypoint": "mine:run", "resources": {"provider": "local"}}
    words["search"]["space"] = {"touch": 1, str(made): 1}
    with house.open(HOSTED) as runs:
        runs.submit(Experiment(**words))
        row = house.wait("one", REFUSED)
    assert "run is defined in subprocess" in row.reason
    assert not made.exists()


@pytest.mark.long
def test_journals_are_in_the_store_where_one_is_given(house: House, tmp_path: Path, postgresql_url: str) -> None:
    house.store.close()
    house.settings, house.store = replace(house.settings, store=postgresql_url), open_store(postgresql_url, tmp_path)
    with house.open(HOSTED) as runs:
        runs.submit(experiment())
        house.wait("one", DONE)
        result = runs.result("one")
    assert result is not None
    assert result.outcome == "done"
    assert not folder_of(house).journal.exists()
    assert "s3cret" not in folder_of(house).order.read_text()
    assert house.seqs("one") == list(range(len(house.seqs("one"))))
