"""Experiments on disk: created, driven, cut off, driven again, read. On the virtual clock."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import resource
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

import pytest

from rubberband.errors import EntrypointError, InputError, JournalError, NameTakenError, StoreAwayError
from rubberband.executor import (
    Controller,
    Entrypoint,
    Event,
    ExperimentFolder,
    FailureKind,
    Faults,
    Journal,
    RunSpec,
    VirtualBackend,
    files_of,
    folders,
    open_store,
    session,
)
from rubberband.executor import read_journal as read
from rubberband.values.offer import Spot
from rubberband.values.plan import Plan
from tests.builders.jobs import JOB
from tests.builders.sessions import Killed, dying_after, run_spec
from tests.builders.waiting import eventually


@pytest.fixture
def folder(tmp_path: Path) -> ExperimentFolder:
    made = ExperimentFolder(home=tmp_path / "a home", name="test")
    session.create(made, JOB, run_spec(checkpoints=str(made.checkpoints)))
    return made


def test_before_anything_happened_nothing_was_spent(folder: ExperimentFolder) -> None:
    with folder.driving():
        result = read(folder)
    assert (result.outcome, result.actual_jct_s, result.actual_cost_usd) == ("unfinished", 0.0, 0.0)


def test_a_run_ends_and_can_be_read_again(folder: ExperimentFolder) -> None:
    result = session.run(folder)
    assert result.outcome == "done"
    assert read(folder) == result
    assert [found.name for found in folders(folder.home)] == ["test"]


@pytest.mark.parametrize("num_events", [0, 1, 3, 6, 9])
def test_a_virtual_run_that_was_cut_off_resumes_at_its_own_time(folder: ExperimentFolder, num_events: int) -> None:
    with contextlib.suppress(Killed):
        session.run(folder, view=dying_after(num_events))
    cut = read(folder)
    assert cut.outcome == "unfinished"
    result = session.run(folder)
    assert result.outcome == "done"
    assert result.actual_jct_s >= cut.actual_jct_s
    assert result.resumes == 1


@pytest.mark.parametrize(("num_events", "is_printed"), [(0, False), (12, True)])
def test_a_resume_names_the_files_that_changed_since_trials_were_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_events: int, is_printed: bool
) -> None:
    for name in ("net", "same"):
        (tmp_path / f"{name}.py").write_text("SCALE = 1.0\n")
    (tmp_path / "job.py").write_text("import net, same\ndef train(config): ...\n")
    code = files_of(Entrypoint.parse("job:train", (tmp_path,)))
    assert set(code) == {str(tmp_path / f"{name}.py") for name in ("job", "net", "same")}
    made = ExperimentFolder(home=tmp_path / "a home", name="test")
    session.create(made, JOB, run_spec(checkpoints=str(made.checkpoints), code=code))
    with contextlib.suppress(Killed):
        session.run(made, view=dying_after(num_events))
    (tmp_path / "net.py").write_text("SCALE = 100.0\n")
    (tmp_path / "same.py").unlink()
    assert capsys.readouterr().err == ""
    with contextlib.suppress(Killed):
        session.run(made, view=dying_after(num_events + 2))
    found = capsys.readouterr().err.splitlines()
    assert len(found) == is_printed
    if is_printed:
        assert re.fullmatch(r"code: \S*net.py, \S*same.py changed since the first trials were trained; .*", found[0])


def test_a_pickled_trial_is_resumed_as_it_was_and_its_modules_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    (tmp_path / "job.py").write_text("import net\n")
    entrypoint = Entrypoint(module="job", attribute="f.<locals>.train", search_path=(str(tmp_path),), pickled=b"")
    assert set(files_of(entrypoint)) == {str(tmp_path / "net.py")}
    assert files_of(Entrypoint.parse("nosuch:train")) == {}


def test_an_ended_run_is_only_read(folder: ExperimentFolder) -> None:
    result = session.run(folder)
    assert session.run(folder, view=dying_after(0)) == result


def test_a_cancelled_run_can_be_resumed(folder: ExperimentFolder) -> None:
    assert session.run(folder, cancelled=lambda: True).outcome == "cancelled"
    assert session.run(folder).outcome == "done"


def test_a_run_that_found_no_instance_can_be_resumed(folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    barren = Faults(refused={f"i-{number:03d}" for number in range(1, 100)})
    with monkeypatch.context() as patch:
        patch.setattr(session, "VirtualBackend", lambda *args, **kw: VirtualBackend(*args, **kw | {"faults": barren}))
        assert session.run(folder).outcome == "failed"
    assert session.run(folder).outcome == "done"


@pytest.mark.parametrize(("kind", "then"), [("checkpoint", "done"), ("died", "done"), ("raised", "failed")])
def test_a_failure_that_is_no_trials_fault_can_be_resumed(
    folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch, kind: FailureKind, then: str
) -> None:
    faults = Faults(failures={(trial, attempt): kind for trial in range(4) for attempt in (1, 2)})
    with monkeypatch.context() as patch:
        patch.setattr(session, "VirtualBackend", lambda *args, **kw: VirtualBackend(*args, **kw | {"faults": faults}))
        failed = session.run(folder)
    assert (failed.outcome, failed.resumable) == ("failed", then == "done")
    assert session.run(folder).outcome == then


def test_there_is_one_driver_at_a_time(folder: ExperimentFolder) -> None:
    assert not folder.driven
    with folder.driving():
        assert folder.driven
        with pytest.raises(InputError, match="another driver is running"):
            session.run(folder)


def test_files_of_a_home_are_this_user_s_alone(folder: ExperimentFolder) -> None:
    before = os.umask(0o022)
    try:
        session.run(folder)
    finally:
        os.umask(before)
    made = [path for path in folder.path.rglob("*") if path.parent != folder.checkpoints]
    assert made
    assert [path for path in (folder.path, *made) if path.stat().st_mode & 0o077] == []


def test_a_name_that_two_begin_at_once_is_given_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ExperimentFolder(home=tmp_path, name="test")
    really = ExperimentFolder.make

    def make(folder: ExperimentFolder) -> None:
        really(folder)
        monkeypatch.setattr(ExperimentFolder, "make", really)
        session.create(
            made, dataclasses.replace(JOB, metric="the other's"), run_spec(checkpoints=str(made.checkpoints))
        )

    monkeypatch.setattr(ExperimentFolder, "make", make)
    with pytest.raises(NameTakenError):
        session.create(made, JOB, run_spec(checkpoints=str(made.checkpoints)))
    assert read(made).metric == "the other's"


@pytest.mark.parametrize(("provider", "is_durable"), [("virtual", False), ("local", True)])
def test_events_of_runs_that_cost_something_outlive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, is_durable: bool
) -> None:
    made, seen = ExperimentFolder(home=tmp_path, name="test"), list[bool]()
    session.create(made, JOB, run_spec(provider=provider, checkpoints=str(made.checkpoints)))
    drive = session.drive

    def watched(controller: Controller, backend: VirtualBackend, journal: Journal, **others: object) -> object:
        seen.append(journal.durable)
        return drive(controller, backend, journal, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "drive", watched)
    assert session.run(made).outcome == "done"
    assert seen == [is_durable]


def test_a_home_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set RUBBERBAND_HOME"):
        session.create(ExperimentFolder(home=tmp_path / "file", name="test"), JOB, run_spec())


def test_an_entry_point_that_broke_is_reported_before_a_resume_does_anything(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    gone = Entrypoint.parse("nosuch_module:Trial", search_path=(tmp_path,))
    session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints), entrypoint=gone))
    with pytest.raises(EntrypointError, match="no module 'nosuch_module'"):
        session.run(folder)
    assert read(folder).instances == ()


def test_a_checkpoint_store_that_is_away_is_reported_before_a_resume_does_anything(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    gone = Entrypoint.parse("nosuch_module:Trial", search_path=(tmp_path,))
    session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints), entrypoint=gone))
    folder.checkpoints.rename(tmp_path / "unmounted")
    with pytest.raises(StoreAwayError, match=r"No such file .*; mount or restore it, .* `rubberband resume test`"):
        session.run(folder)
    folder.checkpoints.mkdir()
    with pytest.raises(StoreAwayError, match=r"found no file rubberband-store; mount or .* `rubberband resume test`"):
        session.run(folder)
    assert list(folder.checkpoints.iterdir()) == []
    assert read(folder).resumes == 0
    folder.checkpoints.rmdir()
    (tmp_path / "unmounted").rename(folder.checkpoints)
    with pytest.raises(EntrypointError):  # which is looked for next
        session.run(folder)


class Unmounted(VirtualBackend):
    """Its checkpoint store goes away after some rounds."""

    rounds = 6

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        self.rounds -= 1
        if self.rounds == 0:
            raise StoreAwayError("the checkpoint store is away; mount it")
        return super().next_events(wake_at)


def test_a_store_that_goes_away_stops_the_run_which_says_so_and_can_be_resumed(
    folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(session, "VirtualBackend", Unmounted)
        with pytest.raises(StoreAwayError, match="mount it, then continue with `rubberband resume test`"):
            session.run(folder)
    cut = read(folder)
    assert (cut.outcome, cut.reason) == ("unfinished", "the checkpoint store is away; mount it")
    result = session.run(folder)
    assert (result.outcome, result.reason, [trial.failures for trial in result.trials]) == ("done", "", [0] * 4)


GOODPUT = {"policy": "goodput"}


def through_json(made: RunSpec, **other: object) -> RunSpec:
    return RunSpec.from_json(json.loads(json.dumps({**made.to_json(), **other})))


def test_a_header_of_a_newer_version_is_refused_in_one_line() -> None:
    with pytest.raises(JournalError, match=r"unknown to this version .*'planet'; install the version that began"):
        through_json(run_spec(), planet="mars")
    words = run_spec().experiment.to_words() | {"planet": "mars"}
    with pytest.raises(JournalError, match=r"unknown to this version .*planet: unknown key; .*install the version"):
        through_json(run_spec(), experiment=words)


def test_a_trial_that_is_defined_in_a_function_is_resumed() -> None:
    def train(config: object) -> None: ...

    made = run_spec()
    made = dataclasses.replace(made, experiment=made.experiment.model_copy(update={"entrypoint": train}))
    found = through_json(made).experiment.entrypoint
    assert found == f"{__name__}:test_a_trial_that_is_defined_in_a_function_is_resumed.<locals>.train"


def test_a_resume_checks_first_that_the_batch_can_be_adapted(tmp_path: Path) -> None:
    (tmp_path / "trained_here.py").write_text("def train(config): pass")
    folder = ExperimentFolder(home=tmp_path / "home", name="test")
    train = Entrypoint.parse("trained_here:train", search_path=(tmp_path,))
    one_gpu = dataclasses.replace(
        JOB, plan=Plan(stages=tuple(dataclasses.replace(stage, gpus_per_trial=1) for stage in JOB.plan.stages))
    )
    made = run_spec(checkpoints=str(folder.checkpoints), entrypoint=train, batch=GOODPUT)
    session.create(folder, one_gpu, made)
    with pytest.raises(EntrypointError, match=r"is a function, .* leave out batch.policy: goodput"):
        session.run(folder)


def test_a_view_that_cannot_write_does_not_end_the_run(folder: ExperimentFolder) -> None:
    def observe(_event: Event, _controller: Controller) -> None:
        raise BrokenPipeError

    assert session.run(folder, view=lambda *_: [observe]).outcome == "done"


STEPS = [
    "rubberband.executor.run.session.make_store",
    "rubberband.executor.journal.journal._metadata.create_all",
    "rubberband.executor.journal.journal.Journal.create",
    "rubberband.executor.journal.journal.Journal.close",
    "rubberband.executor.journal.journal.os.replace",
]


@pytest.mark.by_default(3)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True])
def test_a_creation_that_is_killed_leaves_the_name_free_or_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    original = resolve_name(step)

    def die(*arguments: object, **words: object) -> None:
        if after:
            original(*arguments, **words)
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(step, die)
        session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints)))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    whole = step.endswith("os.replace") and after
    assert [found.name for found in folders(tmp_path)] == (["test"] if whole else [])
    if not whole:
        session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints)))
    assert session.run(folder).outcome == "done"
    assert [path.name for path in folder.path.iterdir() if ".new" in path.name] == []


def test_a_creation_that_fails_leaves_the_name_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = ExperimentFolder(home=tmp_path, name="test")
    with monkeypatch.context() as patched:
        patched.setattr("rubberband.executor.journal.journal.os.replace", refuse)
        with pytest.raises(JournalError, match="No space left"):
            session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints)))
    session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints)))
    assert session.run(folder).outcome == "done"


def test_looking_keeps_no_driver_out_and_misleads_no_other_look(folder: ExperimentFolder) -> None:
    """Two threads look without a pause: while nobody drives, none sees the other's look as a driver."""
    with folder.driving():
        pass
    stop, driven = threading.Event(), [list[bool](), list[bool]()]

    def look(seen: list[bool]) -> None:
        while not stop.is_set():
            seen.append(folder.driven)

    lookers = [threading.Thread(target=look, args=(seen,)) for seen in driven]
    for looker in lookers:
        looker.start()
    try:
        eventually(lambda: all(len(seen) > 500 for seen in driven))
        assert not any(any(seen) for seen in driven)
        for _ in range(200):
            with folder.driving():
                pass
        with folder.driving():
            for seen in driven:
                seen.clear()
            eventually(lambda: all(len(seen) > 500 for seen in driven))
            assert all(all(seen[1:]) for seen in driven), "but for a look that had begun before"
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


def test_a_disk_that_fills_up_ends_a_run_in_one_line_and_a_resume_resumes(folder: ExperimentFolder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    grown = max(path.stat().st_size for path in folder.path.glob("journal.db*")) + 16_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (grown, hard))
    try:
        with pytest.raises(JournalError, match=r"cannot be written: .*; make room .* `rubberband resume test`"):
            session.run(folder, view=dying_after(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    cut = read(folder)
    assert cut.outcome == "unfinished"
    assert not folder.driven
    result = session.run(folder)
    assert result.outcome == "done"
    assert result.actual_jct_s >= cut.actual_jct_s


def test_a_journal_that_is_none_is_one_clear_line(folder: ExperimentFolder) -> None:
    folder.journal.write_bytes(b"no journal " * 1000)
    with pytest.raises(JournalError, match=r"damaged .file is not a database.: none of its events"):
        session.run(folder)


def test_the_workers_learn_how_many_iterations_a_whole_trial_has(
    folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dict[str, RunSpec]()
    cluster = types.SimpleNamespace(device="cpu", clock=None)
    monkeypatch.setattr(session, "open_provider", lambda _: cluster)
    monkeypatch.setattr("rubberband.executor.ray.backend.RayBackend", lambda _, spec, **words: made.update(spec=spec))
    monkeypatch.setattr("rubberband.executor.ray.fork_server.ForkServer", lambda *_, **__: None)
    local = run_spec(entrypoint=Entrypoint.parse("trial:train"), checkpoints=str(folder.checkpoints))
    session.make_backend(folder, local, JOB, None, open_store(str(folder.checkpoints)))
    assert made["spec"].max_iterations == 3  # 1 in the first stage, 2 in the second


@pytest.mark.parametrize(
    "spot", [None, Spot(price_usd_per_hour=1.0, interruptions_per_hour=1.0, checkpoint_iterations=3)]
)
def test_virtual_runs_write_checkpoints_as_often_as_their_plan_assumes(
    folder: ExperimentFolder, monkeypatch: pytest.MonkeyPatch, spot: Spot | None
) -> None:
    made: dict[str, object] = {}
    monkeypatch.setattr(session, "VirtualBackend", lambda *_, **words: made.update(words))
    job = dataclasses.replace(JOB, offer=dataclasses.replace(JOB.offer, spot=spot))
    session.make_backend(folder, run_spec(), job, None, None)
    assert made["checkpoint_every"] == (3 if spot else 1)
