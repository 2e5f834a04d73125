"""Seven programs as people have them: few of their lines change, and the best trial equals the original run by hand."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rubberband.executor import Entrypoint, SegmentEnded, SegmentReport, open_store
from tests.builders.command_line import CommandLine
from tests.builders.segments import SEGMENT

if TYPE_CHECKING:
    from tests.builders.processes.segment_worker import Worker

FOLDER = Path(__file__).parents[1] / "starting_points"
MOST_LINES = 5
EPOCHS = 7

RAY_TUNE = """
import sys
from ray import tune
tune.get_checkpoint = lambda: None
tune.report = lambda metrics, checkpoint: print("loss", metrics["loss"])
import tuned
tuned.train_digits(CONFIG)
"""
"""Calls the trainable of Ray Tune without a cluster."""
OPTUNA = """
import optuna
import study
print("loss", study.objective(optuna.trial.FixedTrial(CONFIG)))
"""


@dataclass(frozen=True)
class StartingPoint:
    """A program as a user has it, and the same as a trial."""

    name: str
    file: str
    by_hand: str
    """Command of the original, with `{name}` for each parameter; or Python code with CONFIG."""
    search: str = "rubberband.cli run train.yaml --no-check"
    """The search, as arguments of `python -m`, or a script."""
    metric: str = "loss"
    config: Mapping[str, Any] | None = None
    """A configuration for gangs that are resized."""
    package: str = ""

    def text(self, sign: str) -> str:
        """Return the program before (-) or after (+) the change: the file has both, line by line."""
        lines = (FOLDER / self.name / f"{self.file}.diff").read_text(encoding="utf-8").splitlines()
        return "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", sign))

    def put(self, sign: str, folder: Path) -> Path:
        """Write the program into a new folder, after the change with the files that come with it."""
        ignored = shutil.ignore_patterns("*.diff" if sign == "+" else "*")
        shutil.copytree(FOLDER / self.name, folder, ignore=ignored)
        (folder / self.file).write_text(self.text(sign), encoding="utf-8")
        return folder


TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node 2"
POINTS = (
    StartingPoint("bash", "train.sh", f"bash train.sh {{lr}} {EPOCHS} out"),
    StartingPoint("plain", "train.py", f"python train.py --lr {{lr}} --hidden {{hidden}} --epochs {EPOCHS}"),
    StartingPoint("ddp", "train.py", f"{TORCHRUN} train.py {EPOCHS} --lr {{lr}}", config={"lr": 0.05}),
    StartingPoint("ray_tune", "tuned.py", RAY_TUNE, "tuned"),
    StartingPoint("optuna", "study.py", OPTUNA, "search", package="optuna"),
    StartingPoint(
        "lightning",
        "train.py",
        "python train.py --lr {lr} --hidden {hidden}",
        metric="val_loss",
        config={"lr": 0.02, "hidden": 16},
        package="lightning",
    ),
    StartingPoint(
        "hugging_face",
        "train.py",
        # On two processes, transformers 5.23 doubles this model's loss; `fit` sees to that.
        "python train.py --learning_rate {learning_rate} --weight_decay {weight_decay} --batch_size 32",
        metric="eval_loss",
        config={"learning_rate": 5e-3, "weight_decay": 0.01},
        package="transformers",
    ),
)
every_point = pytest.mark.parametrize(
    "point",
    [pytest.param(each, id=each.name, marks=pytest.mark.long) for each in POINTS],
)
gangs = pytest.mark.parametrize("point", [pytest.param(each, id=each.name) for each in POINTS if each.config])


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_few_lines_change(point: StartingPoint) -> None:
    """A line that is written otherwise is one, and so is an added one; empty lines are none."""
    before, after = ([line for line in point.text(sign).splitlines() if line.strip()] for sign in "-+")
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(a_end - a, b_end - b) for tag, a, a_end, b, b_end in changes if tag != "equal")
    print(f"{point.name}: {changed} changed lines")
    assert changed <= MOST_LINES


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Return the output of a command, with `python` as that of the tests."""
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def with_python(environment: Mapping[str, str]) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {**environment, "PATH": os.pathsep.join([here, environment["PATH"]]), "OMP_NUM_THREADS": "1"}


def by_hand(point: StartingPoint, config: Mapping[str, Any], folder: Path) -> float:
    """Return the last loss that the original prints with a configuration."""
    point.put("-", folder)
    words = point.by_hand.format(**config).split() if "CONFIG" not in point.by_hand else []
    words = words or ["python", "-c", point.by_hand.replace("CONFIG", repr(dict(config)))]
    output = run(words, folder, with_python(os.environ))
    return float(re.findall(r"loss(?:es)?[ =](?:\[.*[, ])?(\d[\d.e-]*)", output)[-1])


@pytest.mark.ray
@pytest.mark.timeout(600)
@every_point
def test_the_best_trial_equals_the_original_run_by_hand(
    point: StartingPoint, command_line: CommandLine, tmp_path: Path
) -> None:
    pytest.importorskip(point.package or "os")
    folder = point.put("+", tmp_path / "code")
    words = ["python", "-m", *point.search.split()]
    run(words, folder, with_python(command_line.environment))
    (name,) = (each.name for each in (command_line.home / "experiments").iterdir() if each.is_dir())
    result = command_line.result(name)
    assert result.best is not None
    assert result.best.iterations == EPOCHS or point.name == "hugging_face"  # which may stop early
    assert [stage.gpus_per_trial for stage in result.stages] == [1, 1, 2 if point.config else 1]
    assert command_line.nothing_left()
    expected = by_hand(point, result.best.config, tmp_path / "by-hand")
    found = result.best.metrics[point.metric]
    print(f"{point.name}: {found!r} as a trial, {expected!r} by hand, difference {abs(found - expected):.1e}")
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
@pytest.mark.timeout(600)
@gangs
def test_a_gang_of_1_2_1_workers_equals_the_original_run_by_hand(
    point: StartingPoint, workers: list[Worker], tmp_path: Path
) -> None:
    from tests.builders.processes.segment_worker import run_gang

    pytest.importorskip(point.package or "os")
    assert point.config is not None
    folder, store = point.put("+", tmp_path / "code"), open_store(str(tmp_path / "store"))
    last: SegmentReport | None = None
    for size, until in ((1, 2), (2, 4), (1, EPOCHS)):
        segment = replace(
            SEGMENT,
            config=dict(point.config),
            metric=point.metric,
            max_iterations=EPOCHS,
            from_iterations=0 if last is None else last.iterations,
            until_iterations=until,
            checkpoint=None if last is None else last.checkpoint,
        )
        found = run_gang(workers[:size], entrypoint_of(point, folder), segment, store)[0]
        reports = [item for item in found if isinstance(item, SegmentReport | SegmentEnded)]
        assert reports, found
        assert isinstance(reports[-1], SegmentReport), found
        last = reports[-1]
        if last.ended:
            break
    assert last is not None
    assert last.ended or last.iterations == EPOCHS
    expected = by_hand(point, point.config, tmp_path / "by-hand")
    print(f"{point.name}: {last.metrics[point.metric]!r} resized, {expected!r} by hand")
    assert last.metrics[point.metric] == pytest.approx(expected, abs=1e-6)


def entrypoint_of(point: StartingPoint, folder: Path) -> Entrypoint:
    """Return the trial of its experiment file."""
    import yaml

    from rubberband.values.command import ProgramCommand, words_of

    words = yaml.safe_load((folder / "train.yaml").read_text())["entrypoint"]
    if isinstance(words, str):
        return Entrypoint.parse(words, [folder])
    command = ProgramCommand(words=words_of(words["command"].replace("python", sys.executable, 1)))
    return Entrypoint(module="", attribute="", search_path=(str(folder),), command=command)
