"""The experiments of the service, their processes stood in for: started in turn, followed, adopted, ended."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.experiments.sharing import Sharing
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import ServiceLimits, SharedPool
from rubberband.api.store.schema import Promise
from rubberband.errors import InputError, JournalError
from rubberband.executor import read_mark, read_order, write_mark
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.clocks import MID_MONTH
from tests.builders.service_runs import (
    CANCELLED,
    DONE,
    INTERRUPTED,
    QUEUED,
    REFUSED,
    RUNNING,
    STARTING,
    UNREADABLE,
    House,
    count_of,
    experiment,
    extend,
    extension,
    template,
)
from tests.builders.waiting import eventually


def test_a_submission_runs_in_a_process_and_all_its_events_are_in_the_feed(house: House) -> None:
    with house.open() as runs:
        accepted = runs.submit(experiment(deadline="20m"), owner="ada", policy="greedy", plan="p1")
        row = house.wait("one", DONE)
    deadline_at = experiment(**accepted.words["constraints"]).constraints.deadline_at
    assert deadline_at == pytest.approx(accepted.created_at + 1200.0, abs=0.001), "it counts from the submission"
    assert all(event.occurred_at >= MID_MONTH for event in house.feed("one")), "in Unix time"
    assert (accepted.state, row.owner, row.policy, row.plan, row.attempt) == (QUEUED, "ada", "greedy", "p1", 1)
    assert house.seqs("one") == list(range(count_of(house.journal)))
    assert house.states("one")[0] == "queued"
    assert house.states("one")[-1] == "done"
    assert (row.summary.trials, row.summary.stages, row.summary.iterations) == (8, 3, row.summary.target_iterations)
    assert row.summary.best_trial is not None


def test_a_queue_keeps_its_order_over_a_restart(house: House) -> None:
    house.allow(0)
    with house.open() as runs:
        for name in ("b", "c", "a"):
            runs.submit(experiment(name))
    house.settings = replace(house.settings, limits=ServiceLimits(max_running=1))
    with house.open():
        house.wait("a", DONE)
    assert [name for name, *_ in house.starts()] == ["b", "c", "a"]


def test_owners_of_queued_experiments_take_turns(house: House) -> None:
    house.allow(1)
    house.tell(ada_0="hold")
    with house.open() as runs:
        for number in range(3):
            runs.submit(experiment(f"ada-{number}"), owner="ada")
        house.wait("ada-0", RUNNING)
        runs.submit(experiment("bob"), owner="bob")
        house.go()
        house.wait("ada-2", DONE)
    assert [name for name, *_ in house.starts()] == ["ada-0", "bob", "ada-1", "ada-2"]


def test_an_experiment_that_waits_for_its_checkpoint_store_holds_no_slot(house: House, tmp_path: Path) -> None:
    house.allow(1)
    house.tell(first="hold")
    with house.open() as runs:
        runs.submit(experiment("first"))
        house.wait("first", RUNNING)
        runs.submit(experiment("second"))
        folder = house.folder("first")
        mark = read_mark(folder)
        assert mark is not None
        lock = os.open(folder.process_lock, os.O_RDWR)
        write_mark(lock, replace(mark, waits_for="it waits: /mnt/checkpoints is not mounted"))
        os.close(lock)
        house.wait("second", DONE)
        assert "not mounted" in house.row("first").reason
        house.go()
        house.wait("first", DONE)


def test_an_experiment_with_a_promise_waits_for_no_slot(house: House) -> None:
    house.allow(1)
    pool = SharedPool(name="p", provider="virtual", instances=4, gpus_per_instance=1)
    house.settings = replace(house.settings, pool=pool)
    house.tell(first="hold")
    with house.open() as runs:
        runs.submit(experiment("first"))
        house.wait("first", RUNNING)
        runs.submit(experiment("waits"))
        promise = Promise(experiment="one", start_at=house.clock(), spans=[(4, 600.0)])
        runs.submit(experiment(), promise=promise)
        house.wait("one", DONE)
        assert house.row("waits").state is QUEUED
        house.go()
        house.wait("waits", DONE)


def test_no_more_run_at_once_than_may_and_the_others_follow_in_turn(house: House) -> None:
    house.allow(2)
    house.tell(a="hold", b="hold", c="hold", d="hold")
    with house.open() as runs:
        for name in "abcd":
            runs.submit(experiment(name))
        house.wait("a", RUNNING)
        house.wait("b", RUNNING)
        assert [house.row(name).state for name in "cd"] == [QUEUED, QUEUED]
        house.go()
        for name in "abcd":
            house.wait(name, DONE)
    assert {start[0] for start in house.starts()[:2]} == {"a", "b"}


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("way", "state", "text"),
    [
        ("refuse", REFUSED, "no plan meets the deadline of 1s"),
        ("vanish", REFUSED, "ended before the experiment started"),
        ("silent", INTERRUPTED, "ended unexpectedly"),
        ("cut", INTERRUPTED, "resume it to continue"),
    ],
)
def test_how_a_process_ends_that_does_not_finish(house: House, way: str, state: ExperimentState, text: str) -> None:
    house.tell(one=way)
    with house.open() as runs:
        runs.submit(experiment())
        row = house.wait("one", state)
    assert text in row.reason
    assert len(house.starts()) == (way != "vanish")


def test_an_interrupted_run_resumes_where_it_was(house: House) -> None:
    house.tell(one="cut")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", INTERRUPTED)
        assert runs.resume("one").state in (QUEUED, STARTING, RUNNING, DONE)
        row = house.wait("one", DONE)
    assert row.attempt == 2
    assert read_order(house.folder()).resume
    assert house.seqs("one") == list(range(count_of(house.journal)))


def test_a_name_is_taken_once(house: House) -> None:
    with house.open() as runs:
        runs.submit(experiment(), request="r1")
        assert runs.submit(experiment(), request="r1").name == "one"
        with pytest.raises(HttpProblem, match="taken") as refused:
            runs.submit(experiment(), request="r2")
        with pytest.raises(HttpProblem, match="taken"):
            runs.submit(experiment())
        house.wait("one", DONE)
    assert refused.value.kind.status == 409
    assert str(house.home) not in str(refused.value), "no path of the server"
    assert len(house.starts()) == 1


def test_a_run_started_by_hand_is_taken_in_with_its_events_and_its_name_is_taken(house: House) -> None:
    count = count_of(template(house.home))
    with house.open() as runs:
        with pytest.raises(HttpProblem, match="taken"):
            runs.submit(experiment("template"))
        row = house.wait("template", DONE)
        result = runs.result("template")
    assert (row.owner, row.words, row.attempt) == ("", {}, 0)
    assert house.seqs("template") == list(range(count))
    assert result is not None
    assert result.outcome == "done"


def test_a_server_that_restarts_finds_all_as_it_is_and_repeats_nothing(house: House) -> None:
    house.tell(held="hold", ended="hold", waiting="hold")
    house.set(limits=ServiceLimits(max_running=2))
    with house.open() as runs:
        for name in ("held", "ended", "waiting"):
            runs.submit(experiment(name))
        house.wait("held", RUNNING)
        house.wait("ended", RUNNING)
    begun = house.starts()
    house.go()
    eventually(lambda: count_of(house.folder("ended").journal) == count_of(house.journal))
    with house.open():
        for name in ("held", "ended", "waiting"):
            house.wait(name, DONE)
    assert house.starts()[:2] == begun
    assert sorted(start[0] for start in house.starts()) == ["ended", "held", "waiting"]
    for name in ("held", "ended", "waiting"):
        assert house.seqs(name) == list(range(count_of(house.journal)))


def test_a_process_that_was_ordered_and_never_started_is_started_after_a_restart(house: House) -> None:
    with house.open(("/nonexistent/command",)) as runs:
        runs.submit(experiment())
        assert "could not be started" in house.wait("one", REFUSED).reason
    assert house.store.change("one", at=0.0, state=STARTING, attempt=1)
    with house.open():
        house.wait("one", DONE)
    assert [start[2] for start in house.starts()] == ["1"]


def test_cancelling_a_queued_experiment_removes_it_from_the_queue(house: House) -> None:
    house.allow(1)
    house.tell(a="hold")
    with house.open() as runs:
        runs.submit(experiment("a"))
        house.wait("a", RUNNING)
        runs.submit(experiment("b"))
        for _ in range(2):
            assert runs.cancel("b", request="c1").state is CANCELLED
        assert runs.resume("b").state is QUEUED
        assert runs.cancel("b", request="c1").state is QUEUED, "it was done before"
        assert runs.cancel("b", request="c2").state is CANCELLED
        house.go()
        house.wait("a", DONE)
    assert [start[0] for start in house.starts()] == ["a"]


def test_the_limits_of_what_waits_are_changed_in_its_words(house: House, tmp_path: Path) -> None:
    house.allow(1)
    house.tell(a="hold")
    with house.open() as runs:
        runs.submit(experiment("a"))
        house.wait("a", RUNNING)
        accepted = runs.submit(experiment("b", deadline="10m", max_cost=5.0))
        seen = extension(runs, house.home, "b", deadline="1h")
        assert house.row("b").words == accepted.words
        assert (seen.before.feasible, seen.after.feasible, seen.applied) == (True, True, False)
        assert seen.added_usd <= 0.0
        assert extend(runs, house.home, "b", deadline="1h", max_cost_usd=6.0, request="more").applied
        assert extend(runs, house.home, "b", target=2.0, request="target").after.target == 2.0
        with pytest.raises(HttpProblem, match="not later"):
            extend(runs, house.home, "b", deadline="30m", request="less")
        with pytest.raises(HttpProblem, match="not more"):
            extend(runs, house.home, "b", max_cost_usd=2.0, request="less")
        house.go()
        house.wait("b", DONE)
    words = read_order(house.folder("b")).words
    assert words["search"]["stop"] == {"target": 2.0}
    constraints = experiment(**words["constraints"]).constraints
    assert constraints.deadline_at == pytest.approx(accepted.created_at + 3600.0, abs=0.001)
    assert constraints.max_cost_usd == 6.0


def test_an_ended_run_has_no_limits_to_change_and_the_operator_decides(house: House) -> None:
    house.set(limits=ServiceLimits(max_cost_usd=10.0))
    with house.open() as runs:
        runs.submit(experiment(max_cost=5.0))
        house.wait("one", DONE)
        with pytest.raises(HttpProblem, match="it is over"):
            extension(runs, house.home, "one", max_cost_usd=6.0)
        with pytest.raises(HttpProblem, match="more than is allowed here"):
            extension(runs, house.home, "one", max_cost_usd=11.0)


def test_cancelling_a_running_experiment_asks_its_driver_once(house: House) -> None:
    house.tell(one="hold")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        assert runs.cancel("one", request="c1").state is RUNNING
        runs.cancel("one")
        assert house.pending() == ["cancel"]
        house.inbox().withdraw_cancels()  # its driver does so once the cancel is journalled, and so does a resume
        assert runs.cancel("one", request="c1").state is RUNNING
        assert house.pending() == []
        house.go()
        house.wait("one", DONE)
        assert runs.cancel("one", request="c1").state is DONE


def test_an_action_that_a_state_forbids_is_a_conflict_with_a_remedy(house: House) -> None:
    house.tell(cut="cut", no="refuse")
    with house.open() as runs:
        for name in ("done", "cut", "no"):
            runs.submit(experiment(name))
        house.wait("done", DONE)
        house.wait("cut", INTERRUPTED)
        house.wait("no", REFUSED)
        asked = [
            (runs.cancel, "done", "it is over"),
            (runs.resume, "done", "it is over"),
            (runs.cancel, "cut", "resume it"),
            (runs.resume, "no", "another name"),
        ]
        for act, name, remedy in asked:
            with pytest.raises(HttpProblem, match=remedy) as refused:
                act(name)
            assert refused.value.kind.status == 409
        for act in (runs.cancel, runs.resume, runs.result, runs.lines):
            with pytest.raises(HttpProblem, match="not found") as refused:
                act("nobody")
            assert refused.value.kind.status == 404


def test_a_result_can_be_had_before_while_and_after_it_runs(house: House) -> None:
    house.tell(one="hold")
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        half = eventually(lambda: (found := runs.result("one")) and found.trials and found)
        assert half.outcome == "unfinished"
        house.go()
        house.wait("one", DONE)
        whole = runs.result("one")
    assert whole is not None
    assert whole.outcome == "done"
    assert sum(trial.iterations for trial in half.trials) < sum(trial.iterations for trial in whole.trials)


def test_an_unreadable_journal_is_reported_once_and_harms_no_other(house: House) -> None:
    folder = house.folder("broken")
    folder.path.mkdir(parents=True)
    folder.journal.write_bytes(b"no database" * 1000)
    with house.open() as runs:
        row = house.wait("broken", UNREADABLE)
        runs.submit(experiment())
        house.wait("one", DONE)
        assert runs.result("broken") is None
        with pytest.raises(HttpProblem, match=r"unreadable: its journal cannot be read: .* is damaged"):
            runs.resume("broken")
        shutil.copy(house.folder().journal, folder.journal)
    assert "cannot be read" in row.reason
    assert house.states("broken") == ["unreadable"]


def test_a_store_that_is_away_for_a_while_loses_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.tell(one="hold")
    away = False

    def or_away(method: Any) -> Any:
        def ask(*args: Any, **options: Any) -> Any:
            if away:
                raise JournalError("the store is away")
            return method(*args, **options)

        return ask

    for name in ("append", "change", "submission", "submissions", "last_seqs", "check"):
        monkeypatch.setattr(house.store, name, or_away(getattr(house.store, name)))
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", RUNNING)
        away = True
        house.go()
        journal = house.folder().journal
        eventually(lambda: count_of(journal) == count_of(house.journal))
        eventually(lambda: not runs.alive)
        away = False
        house.wait("one", DONE)
        eventually(lambda: runs.alive)
    assert house.seqs("one") == list(range(count_of(house.journal)))


@pytest.mark.parametrize("error", [JournalError("the store is away"), InputError("the inbox's disk is full")])
def test_an_experiment_of_a_pool_that_cannot_start_for_a_moment_is_started_later(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pool = SharedPool(name="p", provider="virtual", instances=4, gpus_per_instance=1)
    house.settings = replace(house.settings, pool=pool)
    errors = [error]

    def begin(sharing: Sharing, row: Submission) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(Sharing, "is_member", lambda *_: True)
    monkeypatch.setattr(Sharing, "begin", begin)
    with house.open() as runs:
        runs.submit(experiment())
        row = house.wait("one", DONE, REFUSED)
    assert (row.state, row.attempt, errors) == (DONE, 1, [])


def test_processes_leave_no_zombies_and_no_open_files(house: House) -> None:
    def of_the_house() -> list[str]:
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return [target for link in links if str(house.home) in (target := os.path.realpath(link))]

    with house.open() as runs:
        for name in ("a", "b", "c"):
            runs.submit(experiment(name))
        for name in ("a", "b", "c"):
            house.wait(name, DONE)
        pids = [int(start[1]) for start in house.starts()]
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        eventually(lambda: all(Path(path).name.startswith("server.db") for path in of_the_house()))
