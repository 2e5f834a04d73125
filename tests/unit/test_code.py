"""The user's code on its way to other machines."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import sysconfig
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.node import LEASE_VARIABLE
from rubberband.errors import InputError
from rubberband.executor import Entrypoint
from rubberband.executor.ray import code
from rubberband.executor.ray.code import install, pack
from rubberband.values.command import ProgramCommand, words_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in ("trial.py", "lib/deep/helper.py", ".git/config", ".env", "lib/__pycache__/x.pyc", "checkpoints/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "env").mkdir()
    (folder / "env" / "pyvenv.cfg").touch()
    return folder


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's folder; the working folder is as before afterwards."""
    monkeypatch.setenv(LEASE_VARIABLE, str(tmp_path / "lease"))
    monkeypatch.chdir(tmp_path)


def _installed(folders: list[str]) -> list[Path]:
    entrypoint = install(pack(folders), Entrypoint(module="trial", attribute="Trial", search_path=tuple(folders)))
    return [Path(folder) for folder in entrypoint.search_path]


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_imports_of_trials_are_there_and_nothing_else(project: Path) -> None:
    for name in ("key.pem", "lib/id_rsa"):
        (project / name).touch()
    (place,) = _installed([str(project)])
    assert _files(place) == {"trial.py", "lib/deep/helper.py"}
    assert not place.is_relative_to(project)


def test_a_link_to_code_elsewhere_is_sent_as_what_it_leads_to(project: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "common.py").touch()
    (tmp_path / "shared" / "back").symlink_to(project)
    (project / "shared").symlink_to(tmp_path / "shared")
    (project / "itself").symlink_to(project)
    (place,) = _installed([str(project)])
    assert _files(place) == {"trial.py", "lib/deep/helper.py", "shared/common.py"}


@pytest.mark.parametrize("place", ["", "home", "deep/home"])
def test_a_home_in_the_folder_stays_here_and_its_journals_keep_their_locks(
    project: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = project / place
    home.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("RUBBERBAND_HOME", str(home))
    (home / "ray-token").touch()
    folder = home / "experiments" / "digits"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("CREATE TABLE events (seq)")
        (copy,) = _installed([str(project)])
        assert _files(copy) == {"trial.py", "lib/deep/helper.py"}
        reader = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM events').connection.close()"
        subprocess.run([sys.executable, "-c", reader, folder / "journal.db"], check=True)
        assert (folder / "journal.db-wal").exists(), "what the writer adds would be lost"


def test_a_journal_of_another_program_is_sent_and_an_experiment_that_is_not_is_named(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("data/journal.db", "data/rows.csv", "kept/journal.db", "kept/driver.lock"):
        path = project / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (place,) = _installed([str(project)])
    assert _files(place) == {"trial.py", "lib/deep/helper.py", "data/journal.db", "data/rows.csv"}
    assert caplog.messages == [f"not sent to the instances, as experiments are kept there: {project / 'kept'}"]


def test_another_home_in_the_folder_stays_here_once_it_has_an_experiment(project: Path) -> None:
    journal = project / "other" / "experiments" / "digits" / "journal.db"
    journal.parent.mkdir(parents=True)
    journal.touch()
    (place,) = _installed([str(project)])
    assert _files(place) == {"trial.py", "lib/deep/helper.py"}


def test_a_file_whose_name_is_no_text_is_reported(project: Path) -> None:
    Path(os.fsdecode(os.fsencode(project) + b"/b\xff.py")).touch()
    with pytest.raises(InputError, match="rubberbandignore"):
        pack([str(project)])


def test_a_folder_within_another_is_sent_once_unless_it_is_hidden_there(project: Path) -> None:
    inner, outer = _installed([str(project / "lib"), str(project)])
    assert inner == outer / "lib"
    assert _files(inner) == {"deep/helper.py"}
    outer, hidden = _installed([str(project), str(project / ".git")])
    assert _files(outer) == {"trial.py", "lib/deep/helper.py"}
    assert _files(hidden) == {"config"}


def test_trials_work_in_the_copy_of_the_drivers_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "lib")
    (place,) = _installed([str(project)])
    assert Path.cwd() in (place, project / "lib")
    monkeypatch.chdir(project)
    (place,) = _installed([str(project)])
    assert Path.cwd() == place


def test_the_same_files_are_the_same_code_and_are_unpacked_once(project: Path) -> None:
    first = pack([str(project)])
    os.utime(project / "trial.py", (0, 0))
    assert pack([str(project)]) == first
    assert _installed([str(project)]) == _installed([str(project)])
    (project / "trial.py").write_text("other")
    assert pack([str(project)]).digest != first.digest


def test_installed_packages_and_this_one_are_not_sent(tmp_path: Path) -> None:
    assert pack([sysconfig.get_paths()["purelib"], str(tmp_path / "missing")]).places == ()
    (place,) = _installed([str(ROOT)])
    assert not (place / "rubberband" / "__init__.py").exists()
    assert (place / "examples" / "digits.py").exists()


def test_an_oversized_value_is_named_with_its_remedy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_BYTES", 1_000_000)
    (project / "data").mkdir()
    (project / "data" / "big.bin").write_bytes(bytes(2_000_000))
    with pytest.raises(InputError, match=rf"is 2 MB in 3 files.*{project / 'data'} \(2 MB\).*\.rubberbandignore"):
        pack([str(project)])
    (project / ".rubberbandignore").write_text("# not needed\ndata/\n")
    assert _files(_installed([str(project)])[0]) == {"trial.py", "lib/deep/helper.py"}
    monkeypatch.setattr(code, "MAX_FILES", 1)
    with pytest.raises(InputError, match="more than"):
        pack([str(project)])
    monkeypatch.setattr(code, "MAX_BYTES", 4)
    found = code.unsent(Entrypoint(module="trial", attribute="Trial", search_path=(str(project),)))
    assert found.startswith("the code to send to the instances is "), "found before any instance is rented"


def test_a_file_that_another_program_removes_meanwhile_is_not_sent(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = code._files

    def found(*arguments: Any) -> list[tuple[str, Path]]:
        files = walk(*arguments)
        (project / "lib" / "deep" / "helper.py").unlink()
        return files

    monkeypatch.setattr(code, "_files", found)
    assert _files(_installed([str(project)])[0]) == {"trial.py"}


def test_an_unreadable_entry_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(InputError, match=r"trial\.py cannot be read.*Permission denied"):
        pack([str(project)])


def test_a_program_that_instances_would_not_get_is_found_before_any_is_rented(project: Path) -> None:
    def fault(line: str) -> str:
        command = ProgramCommand(words=words_of(line))
        return code.unsent(Entrypoint(module="", attribute="", search_path=(str(project),), command=command))

    (project.parent / "outside.py").touch()
    for name in (".hidden.py", "run", "first.ckpt"):
        (project / name).touch()
    for line in ("python trial.py", "python -m trial", "/bin/ls", "./run --out=checkpoints", f"bash -c '{'x' * 300}'"):
        assert fault(line) == "", line
    for name in ("../outside.py", ".hidden.py", "--init=first.ckpt", ".."):
        assert f"command: {name.partition('=')[2] or name} is not sent" in fault(f"python trial.py {name}")
    assert f"{project}/trial.py is a path of this machine; write trial.py, as" in fault(f"python {project}/trial.py")
    python = Path(sys.executable)
    assert fault(f"{python} trial.py").endswith(f"write {python.name}, as instances have their own")


def test_a_module_that_a_program_imports_from_elsewhere_is_found_before_any_is_rented(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.parent / "mine" / "deep").mkdir(parents=True)
    (module := project.parent / "mine" / "deep" / "mylib.py").touch()
    monkeypatch.syspath_prepend(module.parent)
    (project / "trial.py").write_text("import mylib, lib.deep.helper\n")
    (project / "lib" / "deep" / "helper.py").write_text("import json, numpy\n")
    program = Entrypoint(
        module="", attribute="", search_path=(str(project),), command=ProgramCommand(words=("python", "trial.py"))
    )
    assert f"its program imports {module}, which is not sent to the instances" in code.unsent(program)
    assert code.unsent(program, installs=True) == ""


def test_a_module_that_a_trial_imports_from_elsewhere_is_found_before_any_is_rented(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.parent / "mine" / "library" / "deep").mkdir(parents=True)
    (project.parent / "mine" / "library" / "deep" / "losses.py").write_text("import numpy\n")
    (other := project.parent / "mine" / "other.py").touch()
    monkeypatch.syspath_prepend(project.parent / "mine")
    trial = Entrypoint(module="trial", attribute="Trial", search_path=(str(project),))
    (project / "trial.py").write_text("import json, numpy, lib.deep.helper\n")
    assert code.unsent(trial) == ""
    assert code.unsent_modules(trial) == code.unsent_modules(replace(trial, search_path=(str(project),) * 2)) == {}
    (project / "trial.py").write_text("from library.deep import losses\nimport lib.deep.helper\nimport other\n")
    assert f"entrypoint imports {other}, which is not sent to the instances" in code.unsent(trial)
    assert code.unsent(trial, installs=True) == ""
    assert code.unsent_modules(trial).keys() == {"library", "other"}
    elsewhere = Entrypoint(module="other", attribute="Trial", search_path=(str(project),))
    assert code.unsent_modules(elsewhere) == {"other": str(other)}


def test_a_script_can_be_started_on_the_instance(project: Path) -> None:
    (project / "run").write_text("#!/bin/sh\n")
    (project / "run").chmod(0o755)
    (place,) = _installed([str(project)])
    assert os.access(place / "run", os.X_OK)
    assert not (place / "trial.py").stat().st_mode & 0o111
