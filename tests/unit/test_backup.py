"""Backups of homes in use, and restores: whole, of one instant, and with no more access than there was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rubberband import installation
from rubberband.api.security import Tokens
from rubberband.api.store import Store, open_store
from rubberband.errors import InputError, JournalError
from rubberband.executor import ExperimentFolder, read_at_once, session
from rubberband.executor import read_journal as read
from rubberband.files import EXCLUSIVE, try_lock
from rubberband.running import backup
from rubberband.running import restore as restoring
from rubberband.running.backup import Manifest, back_up, dump_store, read_manifest
from rubberband.running.restore import Restored, restore
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.bench import bench_backup
from tests.builders.file_checkpoints import keeping_files
from tests.builders.service_runs import experiment


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home with a run that has ended, and a store with two tokens and a session."""
    folder = ExperimentFolder(home=tmp_path / "home", name="one")
    run_experiment(experiment("one"), folder)
    with closing(open_store(None, folder.home)) as store:
        for name in ("ann", "bob"):
            Tokens(store).create(name, "submit")
        store.add_session("hash", token=store.tokens()[0].id, expires_at=2e9)
    (folder.home / "pools" / "team").mkdir(parents=True)
    (folder.home / "pools" / "team" / "journal.jsonl").write_text('{"event": "Opened"}\n')
    return folder.home


def taken(home: Path, target: Path, store: str | None = None) -> Manifest:
    """Take a backup that has nothing to remark."""
    said: list[str] = []
    made = back_up(home, target, store, said.append)
    assert said == []
    return made


def later(name: str = "a") -> Submission:
    return Submission(name=name, state=ExperimentState.DONE, created_at=1.0, changed_at=1.0, words={})


def put_back(target: Path, home: Path, store: str | None = None, **options: bool) -> Restored:
    return restore(target, home, store, **{"keep_tokens": False, "announce": lambda _: None, **options})  # type: ignore[arg-type]


def valid(store: Store) -> set[str]:
    return {record.name for record in store.tokens() if record.revoked_at is None}


def test_a_restored_home_has_what_was_backed_up_and_nothing_else(home: Path, tmp_path: Path) -> None:
    before = read(ExperimentFolder(home=home, name="one"))
    made = taken(home, tmp_path / "backup")
    assert made.experiments == {"one"}
    run_experiment(experiment("later"), ExperimentFolder(home=home, name="later"))
    done = put_back(tmp_path / "backup", home)
    assert sorted(path.name for path in (home / "experiments").iterdir()) == ["one"]
    assert read(ExperimentFolder(home=home, name="one")) == before
    assert (home / "pools" / "team" / "journal.jsonl").read_text() == '{"event": "Opened"}\n'
    assert done.before is not None
    assert (done.before / "experiments" / "later").is_dir()
    for path in [home, *home.rglob("*"), *(tmp_path / "backup").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0 or BEFORE_IN in str(path), path


BEFORE_IN = f"/{backup.BEFORE}"


def write_and_die(url: str, count: int) -> None:
    """Add experiments to a store as a service does that is killed then."""
    write = """
import os, sys
from rubberband.api.store import Store
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission

store = Store(sys.argv[1])
for at in range(int(sys.argv[2])):
    words = {"x": "y" * 300}
    store.add(Submission(name=f"e{at}", state=ExperimentState.DONE, created_at=at, changed_at=at, words=words))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", write, url, str(count)], check=False, cwd=bench_backup.ROOT)


def test_a_log_that_a_killed_service_left_is_not_applied_to_a_restored_store(home: Path, tmp_path: Path) -> None:
    """SQLite would take it for that of the restored file: rows after the backup, or a malformed database."""
    taken(home, tmp_path / "backup")
    write_and_die(f"sqlite:///{home}/server.db", 200)
    assert (home / "server.db-wal").exists()
    put_back(tmp_path / "backup", home)
    assert not (home / "server.db-wal").exists()
    with closing(open_store(None, home)) as store:
        assert store.submissions().items == []
        store.add(later())


def test_a_token_that_was_revoked_since_the_backup_stays_revoked(home: Path, tmp_path: Path) -> None:
    taken(home, tmp_path / "backup")
    with closing(open_store(None, home)) as store:
        ann = next(record.id for record in store.tokens() if record.name == "ann")
        store.revoke_token(ann, at=5.0)
    assert put_back(tmp_path / "backup", home).revoked == 1
    with closing(open_store(None, home)) as store:
        assert valid(store) == {"bob"}
        assert store.find_sessions(["hash"], at=1.0) == {}


@pytest.mark.parametrize(("keep_tokens", "still"), [(False, set()), (True, {"ann", "bob"})])
def test_tokens_that_no_present_store_knows_are_revoked_unless_kept(
    home: Path, tmp_path: Path, keep_tokens: bool, still: set[str]
) -> None:
    taken(home, tmp_path / "backup")
    shutil.rmtree(home)
    put_back(tmp_path / "backup", home, keep_tokens=keep_tokens)
    with closing(open_store(None, home)) as store:
        assert valid(store) == still
        assert store.find_sessions(["hash"], at=1.0) == {}


def test_the_checkpoints_that_a_copied_journal_names_are_in_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver replaces them before, while and after the journal is copied."""
    folder = ExperimentFolder(home=tmp_path / "home", name="one")
    allowed, seen, is_over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def step(*_: object) -> None:
        seen.release()
        allowed.acquire(timeout=20.0)

    def drive() -> None:
        run_experiment(of_files("one"), folder, RunOptions(view=lambda *_: [step]))
        is_over.set()

    def let_pass(events: int) -> None:
        """Let the driver pass some events; it stands at the next one then."""
        for _ in range(events):
            until_it_stands()
            allowed.release()
        until_it_stands()
        seen.release()

    def until_it_stands() -> None:
        while not seen.acquire(timeout=0.01) and not is_over.is_set():
            pass

    real = backup.copy_file
    copies: list[int] = []

    def copy_file(source: Path, target: Path) -> None:
        passed = 0 if copies else 9
        let_pass(passed)
        real(source, target)
        copies.append(len(read_at_once(folder).events))
        let_pass(passed)

    monkeypatch.setattr(backup, "copy_file", copy_file)
    folder.checkpoints.mkdir(parents=True)
    with keeping_files(folder.checkpoints):
        driver = threading.Thread(target=drive)
        driver.start()
        try:
            let_pass(16)
            made = taken(folder.home, tmp_path / "backup")
            assert not is_over.is_set(), copies
        finally:
            allowed.release(10_000)
            driver.join()
        expected = bench_backup.winner(read(folder))
        assert sum(name.endswith(".ckpt") for name in made.files) > 3
        put_back(tmp_path / "backup", folder.home)
        assert len(read_at_once(folder).events) == copies[-1]
        assert bench_backup.winner(session.run(folder)) == expected
    assert len(copies) > 1, "one that a copied journal names was replaced before it was held"


@pytest.mark.long
def test_virtual_runs_are_restored_whole_from_random_instants(tmp_path: Path) -> None:
    outcomes = [bench_backup.virtual(seed, tmp_path / str(seed)) for seed in range(100, 112)]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert sum(outcome.taken == "running" for outcome in outcomes) >= 4


@pytest.mark.ray
@pytest.mark.long
def test_a_real_run_is_restored_whole(tmp_path: Path) -> None:
    found = bench_backup.real(0, tmp_path)
    assert (found.wrong, found.taken) == ("", "running")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("home/backup", "is in the home"),
        (".", "has it; back up to a folder outside of it"),
        ("full", "exists already; choose a folder that is new or empty"),
    ],
)
def test_a_backup_has_a_folder_of_its_own(home: Path, tmp_path: Path, place: str, text: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match=text):
        taken(home, tmp_path / place)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_a_full_disk_is_one_line_and_leaves_no_backup(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(backup, "copy_file", full)
    with pytest.raises(InputError, match=r"the backup could not be taken: .*No space left on device; make room"):
        taken(home, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    assert not (home / "backup.held").exists()


def test_a_folder_that_cannot_be_read_is_named_and_not_left_out(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup without it would be taken for a whole one."""
    real, closed = os.scandir, home / "experiments" / "one" / "logs"

    def scandir(path: Any) -> Any:
        if path == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    closed.mkdir(exist_ok=True)
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=f"could not be taken: {closed}: Permission denied"):
        taken(home, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_a_journal_that_cannot_be_opened_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = ExperimentFolder(home=home, name="one").journal
    real = sqlite3.connect

    def connect(place: Any, **options: Any) -> Any:
        if str(journal) in str(place):
            return real(f"file:{home}?mode=rw", **options)  # a folder: the same error as without access
        return real(place, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(InputError, match=f"could not be taken: {journal}: unable to open database file; .*give access"):
        taken(home, tmp_path / "backup")


def test_checkpoints_in_a_home_that_is_reached_by_a_link_are_in_its_backup(tmp_path: Path) -> None:
    """The home was moved to another disk, or restored on another machine: its journals name the earlier path."""
    kept = ExperimentFolder(home=tmp_path / "home", name="one")
    half_a_run_with_files(kept)
    shutil.move(tmp_path / "home", tmp_path / "disk")
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    made = taken(tmp_path / "home", tmp_path / "backup")
    named = {
        Path(trial.checkpoint.url).name for trial in read_at_once(kept).controller.state.trials if trial.checkpoint
    }
    assert named
    assert named <= {Path(name).name for name in made.files}


def half_a_run_with_files(folder: ExperimentFolder) -> None:
    """Run an experiment, whose checkpoints are files, until some are there."""

    class Killed(BaseException):
        pass

    def die_at_once(*_: object) -> None:
        if len([*folder.checkpoints.glob("*.ckpt")]) == 4:
            raise Killed

    folder.checkpoints.mkdir(parents=True)
    with keeping_files(folder.checkpoints), pytest.raises(Killed):
        run_experiment(of_files(folder.name), folder, RunOptions(view=lambda *_: [die_at_once]))


def of_files(name: str) -> Experiment:
    """Four trials that save a checkpoint in each of twenty iterations."""
    words = experiment(name).to_words()
    words["search"]["scheduler"] |= {"num_samples": 4, "grace_period": 20, "max_t": 20}
    return Experiment(**words)


def test_a_backup_without_the_store_of_its_journals_is_refused_and_says_what_it_lacks(tmp_path: Path) -> None:
    """Cron does not have the variables of the service."""
    home, store = tmp_path / "home", f"sqlite:///{tmp_path / 'store.db'}"
    run_experiment(experiment("one"), ExperimentFolder(home=home, name="one", store=store))
    with pytest.raises(InputError, match=rf"journals of one are not in {home}; .* --store URL, or RUBBERBAND_STORE"):
        taken(home, tmp_path / "backup")
    with pytest.raises(JournalError, match=r"store .*other\.db does not exist; name the one that the service uses"):
        taken(home, tmp_path / "backup", f"sqlite:///{tmp_path / 'other.db'}")
    run_experiment(experiment("two"), ExperimentFolder(home=home, name="two"))
    said: list[str] = []
    back_up(home, tmp_path / "backup", None, said.append)
    assert said == ["note: the journals of one are not in this backup; if a store has them, name it: --store URL"]
    assert not (tmp_path / "other.db").exists()


def test_the_store_is_copied_before_the_journals(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed that is ahead of a journal would skip the events between them."""
    copied: list[str] = []
    real = backup.copy_file

    def copy_file(source: Path, target: Path) -> None:
        copied.append(source.name)
        real(source, target)

    monkeypatch.setattr(backup, "copy_file", copy_file)
    taken(home, tmp_path / "backup")
    assert copied == ["server.db", "journal.db"]


def test_a_log_that_grows_as_it_is_read_ends(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = home / "experiments" / "one" / "logs" / "trial-000.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("begin")
    real = hashlib.sha256

    class Growing:
        def __init__(self) -> None:
            self._digest = real()

        def update(self, chunk: bytes) -> None:
            self._digest.update(chunk)
            if chunk.startswith((b"begin", b"more")) and log.stat().st_size < 5000:
                with open(log, "a") as file:
                    file.write("more")

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Growing)
    made = taken(home, tmp_path / "backup")
    assert made.files[f"home/{log.relative_to(home)}"][0] == len("begin")


def test_a_run_that_begins_while_a_restore_copies_keeps_its_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(home, tmp_path / "backup")
    with ExitStack() as stack:
        begin = lambda: stack.enter_context(ExperimentFolder(home=home, name="one").driving())  # noqa: E731
        monkeypatch.setattr(os, "sync", begin)  # after all is copied
        with pytest.raises(InputError, match="experiment 'one' runs"):
            put_back(tmp_path / "backup", home)
    assert not (home / installation.RESTORING).exists()


def test_a_store_beside_the_home_is_replaced_with_its_log_unless_it_is_in_use(tmp_path: Path) -> None:
    home, path = tmp_path / "home", tmp_path / "store.db"
    url = f"sqlite:///{path}"
    run_experiment(experiment("one"), ExperimentFolder(home=home, name="one", store=url))
    with closing(Store(url)):
        pass
    taken(home, tmp_path / "backup", url)
    write_and_die(url, 1)
    assert Path(f"{path}-wal").stat().st_size > 0
    with open(f"{path}.lock", "a") as lock:
        assert try_lock(lock, EXCLUSIVE)
        with pytest.raises(InputError, match="is in use by a service; stop it first"):
            put_back(tmp_path / "backup", home, url)
    put_back(tmp_path / "backup", home, url, all_homes=True)
    assert path.stat().st_mode & 0o077 == 0, "it has hashes of tokens"
    with closing(Store(url)) as store:
        assert store.submissions().items == []


def test_experiments_of_other_homes_are_not_replaced_unless_that_is_asked_for(tmp_path: Path, store_url: str) -> None:
    home, theirs = tmp_path / "home", tmp_path / "theirs"
    with closing(open_store(store_url, home)):
        run_experiment(experiment("one"), ExperimentFolder(home=home, name="one", store=store_url))
    taken(home, tmp_path / "backup", store_url)
    other = ExperimentFolder(home=theirs, name="other", store=store_url)
    run_experiment(experiment("other"), other)
    with pytest.raises(InputError, match=r"not of this home \(other\), .* add --all-homes"):
        put_back(tmp_path / "backup", home, store_url)
    assert other.exists
    put_back(tmp_path / "backup", home, store_url, all_homes=True)
    assert not other.exists


def test_a_copy_of_a_postgresql_store_is_of_one_instant(tmp_path: Path, postgresql_url: str) -> None:
    added = list[bool]()
    with closing(Store(postgresql_url)) as store:
        store.take("1a host:/home")
        dump_store(postgresql_url, tmp_path / "copy.db", lambda: added.append(store.add(later())))
    with closing(Store(f"sqlite:///{tmp_path / 'copy.db'}")) as copied:
        assert (added, copied.submissions().items) == ([True], [])


def test_a_file_that_is_no_database_is_copied_as_it_is(home: Path, tmp_path: Path) -> None:
    (home / "experiments" / "one" / "cache.db").write_bytes(b"\1" * 5000)
    made = taken(home, tmp_path / "backup")
    assert made.files["home/experiments/one/cache.db"][0] == 5000


def test_links_that_lead_back_to_what_has_them_end_no_backup(home: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "data.txt").write_text("data")
    (home / "linked").symlink_to(disk)
    (disk / "back").symlink_to(disk)
    (home / "itself").symlink_to(home / "itself")
    said: list[str] = []
    made = back_up(home, disk / "backup", None, said.append)
    assert [name for name in made.files if "linked" in name] == ["home/linked/data.txt"]
    assert said == [f"note: {home}/linked/back leads back to {disk}, which has it; it is not copied"]


def test_a_backup_that_was_cut_off_is_not_restored(home: Path, tmp_path: Path) -> None:
    taken(home, tmp_path / "backup")
    (tmp_path / "backup" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"is no whole backup: it has no manifest\.json"):
        put_back(tmp_path / "backup", home)
    with pytest.raises(InputError, match=r"there is no backup at .*/other; name the folder"):
        put_back(tmp_path / "other", home)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), r"journal\.db has changed"),
        (lambda path: path.unlink(), r"journal\.db is missing"),
    ],
)
def test_a_damaged_backup_changes_nothing(home: Path, tmp_path: Path, damage: Any, text: str) -> None:
    taken(home, tmp_path / "backup")
    damage(tmp_path / "backup" / "home" / "experiments" / "one" / "journal.db")
    before = sorted(path for path in home.rglob("*") if path.name not in ("backup.lock", "server.lock"))
    with pytest.raises(InputError, match=text):
        put_back(tmp_path / "backup", home)
    assert sorted(path for path in home.rglob("*") if path.name not in ("backup.lock", "server.lock")) == before


def test_a_backup_of_another_home_or_of_a_newer_version_is_refused(home: Path, tmp_path: Path) -> None:
    taken(home, tmp_path / "backup")
    with pytest.raises(InputError, match=f"a backup of the home {home}, .*set RUBBERBAND_HOME={home}, or make"):
        put_back(tmp_path / "backup", tmp_path / "other")
    with pytest.raises(InputError, match="this backup needs none: unset RUBBERBAND_STORE"):
        put_back(tmp_path / "backup", home, f"sqlite:///{tmp_path}/store.db")
    path = tmp_path / "backup" / "manifest.json"
    words = json.loads(path.read_text())
    path.write_text(json.dumps({**words, "version": 2, "written_by": "9.1"}))
    with pytest.raises(InputError, match=r"written by version 9\.1 of rubberband"):
        read_manifest(tmp_path / "backup")
    path.write_text(json.dumps({**words, "packed": True}))
    with pytest.raises(InputError, match=r"not of this version .*'packed'"):
        read_manifest(tmp_path / "backup")


def test_a_home_in_use_is_not_replaced(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(home, tmp_path / "backup")
    folder = ExperimentFolder(home=home, name="one")
    with folder.driving(), pytest.raises(InputError, match=r"in use: experiment 'one' runs; .*rubberband cancel one"):
        put_back(tmp_path / "backup", home)
    real = backup.copy_file

    def copy_file(source: Path, target: Path) -> None:
        for use in (put_back, lambda *_: taken(home, tmp_path / "third")):
            with pytest.raises(InputError, match=r"in use by a backup|another backup"):
                use(tmp_path / "backup", home)
        real(source, target)

    monkeypatch.setattr(backup, "copy_file", copy_file)
    taken(home, tmp_path / "second")
    assert read(folder).outcome == "done"


def test_a_restore_that_was_cut_off_keeps_all_commands_out_until_it_is_run_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(home, tmp_path / "backup")

    def rename(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(restoring.os, "rename", rename)
        with pytest.raises(InputError, match="half restored; give access, and run this"):
            put_back(tmp_path / "backup", home)
    with pytest.raises(InputError, match="being restored, or that was cut off"):
        installation.home_at(home)
    put_back(tmp_path / "backup", home)
    assert installation.home_at(home) == home
    assert read(ExperimentFolder(home=home, name="one")).outcome == "done"


def test_a_store_beside_the_home_is_backed_up_with_the_journals_in_it(tmp_path: Path, store_url: str) -> None:
    folder = ExperimentFolder(home=tmp_path / "home", name="one", store=store_url)
    with closing(open_store(store_url, folder.home)) as store:
        Tokens(store).create("ann", "submit")
        folder.checkpoints.mkdir(parents=True)
        with keeping_files(folder.checkpoints):
            best = run_experiment(experiment("one"), folder).best
        taken(folder.home, tmp_path / "backup", store_url)
        run_experiment(experiment("two"), ExperimentFolder(home=folder.home, name="two", store=store_url))
        store.revoke_token(store.tokens()[0].id, at=5.0)
    with pytest.raises(InputError, match=r"is of the store .*; name the store to restore to"):
        put_back(tmp_path / "backup", folder.home)
    put_back(tmp_path / "backup", folder.home, store_url)
    assert read(folder).best == best
    assert not ExperimentFolder(home=folder.home, name="two", store=store_url).exists
    with closing(open_store(store_url, folder.home)) as store:
        assert [record.name for record in store.tokens()] == ["ann"]
        assert valid(store) == set()
        store.take("a home:/")
        store.add(later())


def test_a_store_of_another_name_in_the_home_is_restored_with_limited_access(tmp_path: Path) -> None:
    """It is not copied a second time, as a file of the home with all of its tokens."""
    home = tmp_path / "home"
    home.mkdir(0o700)
    store_url = f"sqlite:///{home}/other.db"
    run_experiment(experiment("one"), ExperimentFolder(home=home, name="one", store=store_url))
    with closing(open_store(store_url, home)) as store:
        Tokens(store).create("ann", "submit")
        taken(home, tmp_path / "backup", store_url)
        store.revoke_token(store.tokens()[0].id, at=5.0)
    put_back(tmp_path / "backup", home, store_url)
    assert ExperimentFolder(home=home, name="one", store=store_url).exists
    with closing(open_store(store_url, home)) as store:
        assert valid(store) == set()


def test_the_damaged_journal_of_one_experiment_does_not_keep_others_from_being_backed_up(
    home: Path, tmp_path: Path
) -> None:
    path = home / "experiments" / "one" / "journal.db"
    path.write_bytes(b"no database" * 1000)
    said: list[str] = []
    made = back_up(home, tmp_path / "backup", None, said.append)
    assert "note: the journal of one is damaged" in said[0]
    assert "home/experiments/one/journal.db" in made.files
    assert (tmp_path / "backup/home/experiments/one/journal.db").read_bytes() == path.read_bytes()


def test_a_backup_takes_no_part_of_a_database_for_a_whole_one(home: Path, tmp_path: Path) -> None:
    """Rows that are only in the log of a database are in its copy, which has no log."""
    with closing(sqlite3.connect(home / "server.db")) as held:
        held.execute("BEGIN")
        held.execute("SELECT count(*) FROM service_submissions").fetchone()
        with closing(open_store(None, home)) as store:
            store.add(later())
        taken(home, tmp_path / "backup")
    assert [path.name for path in (tmp_path / "backup" / "home").glob("server.db*")] == ["server.db"]
    with closing(sqlite3.connect(tmp_path / "backup" / "home" / "server.db")) as copy:
        assert copy.execute("SELECT name FROM service_submissions").fetchall() == [("a",)]
