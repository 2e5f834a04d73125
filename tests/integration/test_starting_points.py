"""Seven programs as people have them: few of their lines change, and the best trial equals the original run by hand."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.builders.command_line import CommandLine

if TYPE_CHECKING:
    pass

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
    in_gangs: bool = False
    """Whether its later trials train on two workers."""
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
    StartingPoint("ddp", "train.py", f"{TORCHRUN} train.py {EPOCHS} --lr {{lr}}", in_gangs=True),
    StartingPoint("ray_tune", "tuned.py", RAY_TUNE, "tuned"),
    StartingPoint("optuna", "study.py", OPTUNA, "search", package="optuna"),
    StartingPoint(
        "lightning",
        "train.py",
        "python train.py --lr {lr} --hidden {hidden}",
        metric="val_loss",
        in_gangs=True,
        package="lightning",
    ),
    StartingPoint(
        "hugging_face",
        "train.py",
        # On two processes, transformers 5.23 doubles this model's loss; `fit` sees to that.
        "python train.py --learning_rate {learning_rate} --weight_decay {weight_decay} --batch_size 32",
        metric="eval_loss",
        in_gangs=True,
        package="transformers",
    ),
)


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
@pytest.mark.long
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
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
    assert [stage.gpus_per_trial for stage in result.stages] == [1, 1, 2 if point.in_gangs else 1]
    assert command_line.nothing_left()
    expected = by_hand(point, result.best.config, tmp_path / "by-hand")
    found = result.best.metrics[point.metric]
    print(f"{point.name}: {found!r} as a trial, {expected!r} by hand, difference {abs(found - expected):.1e}")
    assert found == pytest.approx(expected, abs=1e-6)
