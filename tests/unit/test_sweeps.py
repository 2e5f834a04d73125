"""`rubberband init` of a sweep of W&B: shapes that people have, and what is refused."""

from __future__ import annotations

import ast
import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.running.first_file import text_of
from rubberband.running.programs.findings import findings_of, is_program
from rubberband.running.programs.sweeps import _domain
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment
from rubberband.spec.program import Program
from rubberband.spec.space import Domain
from tests.builders.program_folder import enter, rubberband
from tests.builders.tables import cases

PROGRAM = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--steps-a-line", type=int, default=1)
args, _ = parser.parse_known_args()
print(f"epoch 1 val_loss=0.5 val/acc=0.5 score={args.lr}")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return enter(tmp_path, monkeypatch, DATA_ROOT="/data")


def init(sweep: str) -> tuple[Experiment, list[str]]:
    """Return the experiment of a sweep, which is estimated, and the notes about it."""
    Path("sweep.yaml").write_text(sweep)
    Path("experiment.yaml").unlink(missing_ok=True)
    seen = findings_of("sweep.yaml", path := Path("experiment.yaml"))
    path.write_text(text_of(seen if seen.metric else replace(seen, metric="score"), path))
    rubberband("estimate", "experiment.yaml")
    return load_experiment("experiment.yaml"), list(seen.remarks)


def argv(experiment: Experiment, **values: Any) -> list[str]:
    assert isinstance(experiment.entrypoint, Program)
    drawn = experiment.search.configurations()[0]
    return experiment.entrypoint.to_plain().line({**drawn, **values}, {"max_t": "7", "checkpoint": "/out", "seed": "3"})


@cases("sweep", "words", "line", "notes")
def test_a_sweep_becomes_the_experiment(sweep: str, words: Mapping[str, Any], line: str, notes: list[str]) -> None:
    found, said = init(sweep)
    written = found.to_words()
    search = written["search"]
    shown = {
        "name": written["name"],
        "space": search["space"],
        "scheduler": search["scheduler"],
        "sampler": search["sampler"],
        "metric": f"{search['metric']} {search['mode']}",
        "env": written["resources"].get("env", {}),
        "track": written.get("track", []),
    }
    for key, value in words.items():
        assert shown[key] == value, key
    assert isinstance(found.entrypoint, Program)
    text = found.entrypoint.command
    assert text == line
    for note in notes:
        assert any(note in each for each in said), (note, said)
    assert len(said) == len(notes), said


@cases("sweep", "line")
def test_a_sweep_without_counterpart_is_refused_in_one_line(sweep: str, line: str) -> None:
    Path("sweep.yaml").write_text(sweep)
    with pytest.raises(InputError) as caught:
        findings_of("sweep.yaml", Path("experiment.yaml"))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_experiment_and_other_files_are_no_sweeps() -> None:
    init("{program: train.py, method: random, parameters: {lr: {min: 0.1, max: 1.0}}, run_cap: 2}")
    assert is_program("sweep.yaml")
    assert not is_program("experiment.yaml")
    Path("config.yaml").write_text("parameters: {lr: 0.1}")
    Path("broken.yaml").write_text("parameters: {lr: [")
    assert not any(map(is_program, ("config.yaml", "broken.yaml", "absent.yaml")))


def test_values_are_written_as_an_agent_of_wandb_writes_them() -> None:
    sweep = """
program: train.py
method: random
run_cap: 4
metric: {name: val_loss}
parameters:
  lr: {value: 1e-5}
  amp: {values: [true, false]}
  layers: {values: [[1, 2], null]}
  name: {value: "it's"}
"""
    found, _ = init(sweep)
    values = {"lr": 1e-5, "amp": True, "layers": None, "name": "it's"}
    assert argv(found, **values)[2:6] == [f"--{name}={value}" for name, value in values.items()]
    flags, _ = init(sweep.replace("metric:", "command: [python, train.py, '${args_no_boolean_flags}']\nmetric:"))
    assert argv(flags, **values | {"layers": "None"})[2:6] == ["--lr=1e-05", "--amp", "--layers=None", "--name=it's"]
    assert "--amp" not in argv(flags, amp=False)
    assert {str(value) for value in flags.search.space["layers"].options} == {"[1, 2]", "None"}


def test_a_look_at_a_sweeps_program_has_the_folder_of_the_trial(here: Path) -> None:
    more = 'parser.add_argument("--out-dir", default="runs")\n'
    (here / "train.py").write_text(PROGRAM.replace("args, _", f"{more}args, _"))
    Path("sweep.yaml").write_text(
        "command: [python, train.py, '${args}']\nmethod: random\nrun_cap: 2\n"
        "parameters: {lr: {values: [0.5]}, model: {value: m}}"
    )
    found = findings_of("sweep.yaml", here / "experiment.yaml")
    assert found.start[-2:] == ("--out-dir", "${checkpoint}")
    assert found.command == ("python", "train.py", "${args}", "--out-dir", "${checkpoint}")


NESTED = """
program: train.py
method: random
run_cap: 4
metric: {name: val_loss}
command: [python, train.py, '%s']
parameters:
  lr: {value: 0.1}
  optimizer:
    parameters:
      kind: {values: [sgd, adam]}
      inner: {parameters: {beta: {min: 0.1, max: 0.9}, nesterov: {values: [true, false]}}}
"""


@pytest.mark.parametrize(
    ("macro", "word", "read"),
    [
        ("${args}", "--optimizer=", ast.literal_eval),
        ("${args_no_hyphens}", "optimizer=", ast.literal_eval),
        ("${args_json}", "", json.loads),
    ],
)
def test_nested_parameters_are_one_word_as_at_wandb(macro: str, word: str, read: Any) -> None:
    found, _ = init(NESTED % macro)
    values = {"optimizer.kind": "sgd", "optimizer.inner.beta": 0.5, "optimizer.inner.nesterov": True}
    optimizer = {"kind": "sgd", "inner": {"beta": 0.5, "nesterov": True}}
    words = argv(found, **values)[2:]
    if word:
        assert words[0] == f"{word.partition('optimizer')[0]}lr=0.1"
        assert words[1] == f"{word}{optimizer}"
        assert read(words[1].removeprefix(word)) == optimizer
    else:
        assert read(words[0]) == {"lr": 0.1, "optimizer": optimizer}


FAKE_WANDB = """
class Config(dict):
    __getattr__ = dict.__getitem__

    def update(self, values, allow_val_change=False):
        assert allow_val_change, "a run's own defaults are changed"
        dict.update(self, values)


class Run:
    def __init__(self, config):
        self.config, self.logged = Config(config or {}), []

    def log(self, data, step=None):
        self.logged.append(data)


def init(config=None, **options):
    global run, log
    run = Run(config)
    log = run.log
    globals()["config"] = run.config
    return run
"""
OF_WANDB = """
import wandb

run = wandb.init(config={"lr": 9.0, "epochs": 9, "batch": 4})
for epoch in range(wandb.config.epochs):
    wandb.log({"val/loss": wandb.config.lr / (epoch + 1), "note": "text"}, step=epoch)
    run.log({"other": run.config.batch})
assert len(run.logged) == 2 * run.config.epochs
print(sorted(run.config.items()))
"""
SWEEP_OF_WANDB = """
program: train.py
method: random
run_cap: 2
metric: {name: val/loss}
parameters:
  {lr: {min: 0.1, max: 1.0}, epochs: {value: 3}, optim: {parameters: {beta: {values: [1, 2]}}}, amp: {value: true}}
"""


def test_a_script_that_reads_and_logs_by_wandb_alone_is_followed(here: Path) -> None:
    (here / "train.py").write_text(OF_WANDB)
    (here / "wandb.py").write_text(FAKE_WANDB)
    found, notes = init(SWEEP_OF_WANDB)
    assert isinstance(found.entrypoint, Program)
    assert found.entrypoint.metrics == "report"
    assert [note[:30] for note in notes] == ["the program has no folder for "]
    words = argv(found, **{"lr": 0.5, "optim.beta": 2})
    assert words[:4] == ["python", "-m", "rubberband.wandb_run", "val/loss"]
    printed = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = printed.stdout.splitlines()
    assert lines[:2] == ["val/loss=0.5", "val/loss=0.25"], printed.stderr
    values = [("amp", True), ("batch", 4), ("epochs", 7), ("lr", 0.5), ("optim", {"beta": 2})]
    assert lines[7:] == [str(values)]


@pytest.mark.parametrize("sign", [" ", "="])
def test_a_folder_in_the_command_of_a_sweep_becomes_that_of_each_trial(sign: str, here: Path) -> None:
    (here / "train.py").write_text(PROGRAM.replace("args, _ =", 'parser.add_argument("--out")\nargs, _ ='))
    sweep = "{program: train.py, method: random, run_cap: 2, parameters: {lr: {min: 0.1, max: 1.0}}, command: '%s'}"
    found, _ = init(sweep % f"python train.py --out{sign}runs ${{args}}")
    assert isinstance(found.entrypoint, Program)
    assert found.entrypoint.command == f"python train.py --out{sign}${{checkpoint}} ${{args}}"


def test_a_script_that_reports_itself_is_left_as_it_is(here: Path) -> None:
    (here / "train.py").write_text(
        "import json, os, rubberband, wandb\n"
        "run = wandb.init(config=json.loads(os.environ['RUBBERBAND_CONFIG']))\n"
        "rubberband.report({'val/loss': run.config.lr}, checkpoint=rubberband.get_checkpoint())\n"
    )
    found, notes = init(SWEEP_OF_WANDB)
    assert isinstance(found.entrypoint, Program)
    assert found.entrypoint.metrics == "report"
    assert "wandb_run" not in found.entrypoint.command
    assert notes == []
    (here / "train.py").write_text("import wandb\nwandb.init()\n")
    Path("sweep.yaml").write_text(SWEEP_OF_WANDB.replace("metric: {name: val/loss}\n", ""))
    with pytest.raises(InputError, match=r"the sweep names no metric; write the one that wandb\.log has"):
        findings_of("sweep.yaml", Path("experiment.yaml"))


_NUMBER = st.floats(-50, 50, allow_nan=False)
_POSITIVE = st.floats(1e-6, 1e4)
_KINDS = {
    "": (_NUMBER, None),
    "uniform": (_NUMBER, None),
    "int_uniform": (st.integers(-50, 50), None),
    "q_uniform": (st.integers(-50, 50), st.integers(1, 5)),
    "log_uniform": (st.floats(-10, 5), None),
    "inv_log_uniform": (st.floats(-5, 10), None),
    "log_uniform_values": (_POSITIVE, None),
    "inv_log_uniform_values": (_POSITIVE, None),
    "q_log_uniform_values": (st.integers(1, 500), st.integers(1, 5)),
}


@given(st.data(), st.sampled_from(sorted(_KINDS)), st.floats(1e-9, 1 - 1e-9))
def test_drawn_values_lie_in_the_ranges_of_the_sweep(data: st.DataObject, kind: str, u: float) -> None:
    numbers, steps = _KINDS[kind]
    low, high = sorted((data.draw(numbers), data.draw(numbers)))
    words = {"min": low, "max": high} | ({"distribution": kind} if kind else {})
    if steps is not None:
        words["q"] = data.draw(steps)
    try:
        domain = _domain(words, False)
    except InputError:
        return  # an empty range
    assert isinstance(domain, Domain)
    value = domain.draw(u)
    if kind == "log_uniform":
        low, high = math.exp(low), math.exp(high)
    elif kind == "inv_log_uniform":
        low, high = math.exp(-high), math.exp(-low)
    assert low * (1 - 1e-9 * (low > 0)) <= value <= high * (1 + 1e-9 * (high > 0))
    if "q" in words:
        assert value % words["q"] == 0
    if kind == "int_uniform" or steps is not None:
        assert isinstance(value, int)


@given(st.integers(-5, 5), st.integers(0, 20), st.integers(1, 4))
def test_a_grid_walks_each_value_of_a_range(low: int, width: int, q: int) -> None:
    domain = (
        _domain({"distribution": "q_uniform", "min": low, "max": low + width, "q": q}, True) if width >= q else None
    )
    if domain is not None:
        assert list(domain.options) == [value for value in range(low, low + width + 1) if value % q == 0]


def test_numbers_are_read_as_wandbs_users_mean_them() -> None:
    text = "{program: train.py, method: random, run_cap: 2, parameters: {a: {values: [1e-4, 1E5, -2e3, 1.5e-3, x1e4]}}}"
    assert yaml.safe_load(text)["parameters"]["a"]["values"][0] == "1e-4", "PyYAML alone"
    found, _ = init(text + "\n")
    assert found.search.space["a"].options == (1e-4, 1e5, -2e3, 1.5e-3, "x1e4")
