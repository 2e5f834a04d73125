"""What a machine or a user does around a run: a locale, limits, a folder that is moved. Each is said in one line."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.errors import InputError, JournalError
from rubberband.executor import Controller, Entrypoint, Event, TrialReported, open_folder, session
from rubberband.installation import FEWEST_FILES, home_at, require_ray
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.loading import load_experiment
from tests.builders.documents import ROOT

WORDS: dict[str, Any] = {
    "name": "virtual",
    "search": {
        "space": {"x": 1},
        "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "2h"},
    "resources": {"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 2},
    "profile": {"seconds_per_iteration": {1: 10}, "trial_startup": "1s"},
}


def test_a_path_that_the_locale_cannot_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    unreadable = os.fsencode(tmp_path / "hömé").decode("ascii", "surrogateescape")  # as an ASCII locale reads it
    for use in (home_at, lambda path: Entrypoint.parse("trials:train", search_path=[path])):
        with pytest.raises(InputError, match=r"hömé has characters that this locale cannot read; set LC_ALL=C.UTF-8"):
            use(unreadable)
    assert home_at(tmp_path / "hömé") == tmp_path.resolve() / "hömé"


def test_tables_are_printed_in_an_ascii_locale(tmp_path: Path) -> None:
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rubberband.cli", "estimate", str(ROOT / "examples/scaling.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=ascii_only, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_too_few_open_files_for_ray_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    require_ray("provider: local")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (FEWEST_FILES - 1, FEWEST_FILES - 1))
    with pytest.raises(InputError, match=r"may open 255 files here \(ulimit -n\), and Ray needs 256; run `ulimit -n"):
        require_ray("provider: local")


def test_without_ray_a_run_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.installation.find_spec", lambda module: None if module == "ray" else module)
    experiment = load_experiment(ROOT / "examples/digits.yaml", {})
    with pytest.raises(InputError, match=r"provider: local needs ray; run pip install 'rubberband-tune\[ray\]'"):
        experiment.require_runnable()


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_folder_that_is_moved_while_it_runs_ends_the_run_with_a_line(tmp_path: Path, is_made_anew: bool) -> None:
    folder = open_folder("virtual", tmp_path)

    def move(event: Event, _: Controller) -> None:
        if isinstance(event, TrialReported) and folder.journal.exists():
            shutil.move(folder.path, tmp_path / "elsewhere")
            if is_made_anew:
                folder.path.mkdir()

    with pytest.raises(
        JournalError, match=r"'virtual' was moved or deleted while it ran .*`rubberband resume virtual`"
    ):
        run_experiment(rubberband.Experiment(**WORDS), folder, RunOptions(view=lambda *_: [move]))
    shutil.rmtree(folder.path, ignore_errors=True)
    shutil.move(tmp_path / "elsewhere", folder.path)
    assert session.run(folder).outcome == "done"
