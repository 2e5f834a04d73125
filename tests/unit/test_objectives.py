"""`rubberband init study.py:objective`: the space and the study of an objective of Optuna, and its run as a program."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.running.first_file import text_of
from rubberband.running.programs.findings import findings_of, is_program
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment
from rubberband.spec.program import Program
from rubberband.spec.space import SubSpace
from tests.builders.program_folder import enter, rubberband

optuna = pytest.importorskip("optuna")

STUDY = """
import optuna

EPOCHS = 9


def objective(trial):
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    optimizer = trial.suggest_categorical("optimizer", ["sgd", "momentum", "adam"])
    beta = trial.suggest_float("beta", 0.1, 0.9) if optimizer == "momentum" else 0.0
    if optimizer != "adam" and trial.suggest_categorical("nesterov", [False, True]):
        beta += 0.01 * trial.suggest_int("ahead", 2, 10, step=2)
    layers = [trial.suggest_int(f"units_l{i}", 4, 64, log=True) for i in range(trial.suggest_int("n_layers", 1, 3))]
    weight, speed = 0.0, 0.0
    for epoch in range(EPOCHS):
        speed = beta * speed - lr * 2 * (weight - 3.0)
        weight += speed
        loss = (weight - 3.0) ** 2 + 1 / sum(layers)
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()
    return loss


study = optuna.create_study(
    direction="minimize",
    storage="sqlite:///study.db",
    sampler=optuna.samplers.TPESampler(seed=7),
    pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3),
)
study.optimize(objective, n_trials=17)
print(study.best_params)
"""


BY_HAND = (
    STUDY.replace("study = optuna", "if __name__ == '__main__':\n  study = optuna")
    .replace("study.optimize", "  study.optimize")
    .replace("print(", "  print(")
)
"""The same, with its study below `if __name__ == "__main__":`, so that it can be imported."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch)


def init(source: str, name: str = "objective") -> tuple[Experiment, list[str]]:
    Path("study.py").write_text(source)
    seen = findings_of(f"study.py:{name}", path := Path("experiment.yaml"))
    path.write_text(text_of(seen, path))
    rubberband("estimate", "experiment.yaml")
    return load_experiment("experiment.yaml"), list(seen.remarks)


def short(source: str) -> str:
    """An objective of these lines, which returns `value`."""
    body = "\n".join(f"    {line}" for line in source.splitlines())
    return f"import optuna\n\ndef objective(trial):\n    value = 1.0\n{body}\n    return value\n"


def test_a_study_becomes_an_experiment_with_its_branches() -> None:
    found, notes = init(STUDY)
    space = found.search.space
    assert list(space) == ["lr", "optimizer", "n_layers", "units_l0", "units_l1", "units_l2"]
    assert space["lr"].to_words() == {"type": "loguniform", "lower": 1e-3, "upper": 1.0, "base": 10}
    sgd, momentum, adam = space["optimizer"].options
    assert adam == "adam"
    assert isinstance(sgd, SubSpace)
    assert isinstance(momentum, SubSpace)
    assert (set(sgd.space), set(momentum.space)) == ({"nesterov"}, {"nesterov", "beta"})
    off, on = sgd.space["nesterov"].options
    assert off is False
    assert (on.name, on.space["ahead"].to_words()) == ("true", {"type": "qrandint", "lower": 2, "upper": 10, "q": 2})
    assert space["units_l2"].to_words() == {"type": "lograndint", "lower": 4, "upper": 65, "base": 10}
    search = found.to_words()["search"]
    assert search["scheduler"] == {"type": "hyperband", "max_t": 9, "reduction_factor": 3, "num_samples": 17}
    assert search["sampler"] == {"type": "optuna", "sampler": "tpe", "seed": 7}
    assert (search["metric"], search["mode"]) == ("value", "min")
    assert [note.partition(":")[0] for note in notes] == [
        "units_l1, units_l2",
        "the program has no folder for its checkpoints, so each start trains from zero",
    ]
    assert not Path("study.db").exists(), "a study at the top of the file writes no database"


def run(config: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "rubberband.objective", *options, "study.py:objective", json.dumps(config)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def by_hand(config: dict[str, Any]) -> float:
    spec = importlib.util.spec_from_file_location("study_by_hand", "study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value: float = module.objective(optuna.trial.FixedTrial(config))
    return value


def test_a_configuration_gives_what_a_fixed_trial_gives() -> None:
    found, _ = init(BY_HAND)
    for config in found.search.configurations()[:3]:
        done = run(config)
        lines = done.stdout.splitlines()
        assert len(lines) == 9, done.stderr
        fixed = {
            name: {"true": True}.get(value, value) if isinstance(value, str) else value
            for name, value in config.items()
        }
        assert float(lines[-1].removeprefix("value=")) == by_hand(fixed)


def test_a_value_that_is_only_returned_is_reported_and_one_that_differs_too() -> None:
    found, notes = init(short("value = trial.suggest_float('x', 0, 1) ** 2"))
    assert found.to_words()["search"]["scheduler"] == {"type": "none", "num_samples": 16, "max_t": 1}
    assert run({"x": 0.5}).stdout == "value=0.25\n"
    assert "the file creates no study for objective: mode is min" in notes[0]
    best = (
        "x = trial.suggest_int('x', 1, 3)\n"
        "for step in range(4):\n    trial.report(x * step, step)\n    trial.report(9, step)"
    )
    found, notes = init(
        short(best)
        + "\nstudy = optuna.create_study(direction='maximize')\nstudy.enqueue_trial({})\nstudy.optimize(objective, 5)\n"
    )
    assert notes[0] == "study.enqueue_trial is left out: write search.points_to_evaluate"
    assert found.to_words()["search"]["scheduler"] == {"type": "none", "num_samples": 5, "max_t": 5}
    assert found.search.mode == "max"
    assert isinstance(found.entrypoint, Program)
    assert found.entrypoint.command == "python -m rubberband.objective --maximize study.py:objective ${args_json}"
    assert run({"x": 2}).stdout.split() == ["value=0.0", "value=2.0", "value=4.0", "value=6.0", "value=1.0"]


KINDS = {
    "suggest_float('x0', 0, 1, step=0.25)": {"type": "quniform", "lower": 0, "upper": 1, "q": 0.25},
    "suggest_float('x1', 0.05, 0.5, step=0.15)": {"type": "choice", "values": [0.05, 0.2, 0.35, 0.5]},
    "suggest_int('x2', 3, 9, step=3)": {"type": "qrandint", "lower": 3, "upper": 9, "q": 3},
    "suggest_int('x3', 1, 9, step=3)": {"type": "choice", "values": [1, 4, 7]},
    "suggest_uniform('x4', -1, 1)": {"type": "uniform", "lower": -1, "upper": 1},
    "suggest_loguniform('x5', 0.1, 1)": {"type": "loguniform", "lower": 0.1, "upper": 1, "base": 10},
    "suggest_discrete_uniform('x6', 0, 1, 0.5)": {"type": "quniform", "lower": 0, "upper": 1, "q": 0.5},
    "suggest_categorical('x7', [(1, 2), None, 3, 'a'])": {"type": "choice", "values": [[1, 2], None, 3, "a"]},
}


def test_each_kind_of_parameter() -> None:
    found, _ = init(short(f"print([{', '.join(f'trial.{kind}' for kind in KINDS)}])\nvalue = 1.0"))
    domains = found.search.space.values()
    assert [domain.to_words() for domain in domains] == list(KINDS.values())
    for at in range(4):
        values = [domain.options[at % len(domain.options)] if domain.options else 0.5 for domain in domains]
        values[2] = 6
        printed = run({f"x{number}": value for number, value in enumerate(values)}).stdout.splitlines()[0]
        values[7] = tuple(values[7]) if at == 0 else values[7]
        assert printed == repr(values), "the very choices"


@pytest.mark.parametrize(
    ("loops", "reports"),
    [
        ("for e in range(3):\n    for i, row in enumerate(rows):\n        trial.report(x, e * len(rows) + i)", 15),
        ("for fold in range(2):\n    for e in range(1, 10, 3):\n        trial.report(\n x, step=e)", 3),
    ],
)
def test_a_trial_has_as_many_iterations_as_the_steps_that_it_reports(loops: str, reports: int) -> None:
    found, _ = init(short(f"x, rows = trial.suggest_float('x', 0, 1), [0] * 5\n{loops}\nvalue = x"))
    assert found.to_words()["search"]["scheduler"]["max_t"] == reports + 1, "the value that it returns is one more"
    assert len(run({"x": 0.5}).stdout.splitlines()) == reports


def test_two_choices_may_decide_together() -> None:
    found, _ = init(
        short(
            "a = trial.suggest_categorical('a', ['x', 'y'])\n"
            "if a == 'y':\n"
            "    b = trial.suggest_categorical('b', ['p', 'q'])\n"
            "    if b == 'q':\n        trial.suggest_float('c', 0, 1)\n"
            "    else:\n        trial.suggest_float('c', 2, 3)"
        )
    )
    _, y = found.search.space["a"].options
    p, q = y.space["b"].options
    assert (p.space["c"].arguments["upper"], q.space["c"].arguments["upper"]) == (3, 1)


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        (short("pass"), "objective", "asked for no parameter; call trial.suggest_"),
        (short("raise ValueError('no data')"), "objective", "(ValueError: no data)"),
        ("import optuna\nobjective = 3\n", "objective", "objective is no function"),
        (
            "import optuna\nclass Objective:\n    pass\n",
            "Objective",
            "def objective(trial): return Objective(…)(trial)",
        ),
        (STUDY, "Objective()", "Objective() is no name of a function"),
        (STUDY, "other", "has no other at its top, above the study that it starts"),
        ("import optuna\ndef objective(trial, data):\n    pass\n", "objective", "return objective(trial, data)"),
        ("def train(config):\n    return 1\n", "train", "rubberband init study:train"),
        (STUDY.replace('direction="minimize"', "directions=['minimize'] * 2"), "objective", "several directions"),
        (
            STUDY.replace('direction="minimize"', "direction=sys.argv[1]"),
            "objective",
            "direction=sys.argv[1] is not plain",
        ),
        (short("import random\ntrial.suggest_float(f'x{random.random()}', 0, 1)"), "objective", "asks for other names"),
        (short("a = trial.suggest_int('a', 2, 9)\ntrial.suggest_int('b', 1, a)"), "objective", "b has other bounds"),
        (short("trial.suggest_categorical('a', [print, len])"), "objective", "values that are no plain ones"),
        ("def objective(trial:\n", "objective", "study.py:1"),
    ],
)
def test_an_objective_that_cannot_be_run_is_refused_in_one_line(source: str, name: str, line: str) -> None:
    Path("study.py").write_text(source)
    with pytest.raises(InputError) as caught:
        findings_of(f"study.py:{name}", Path("experiment.yaml"))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "source", "line"),
    [
        ({}, "trial.suggest_float('x', 0, 1)", "the objective asks for x, which the experiment's space lacks"),
        ({"x": 2}, "trial.suggest_float('x', 0, 1)", "x=2 is outside 0 to 1"),
        ({"x": "c"}, "trial.suggest_categorical('x', ['a', 'b'])", "x='c' is not one of a, b"),
        ({}, "trial.study.best_value", "study.best_value needs the other trials"),
        ({}, "value = (1, 2)", "objective returned 2 values"),
        ({}, "value = None", "objective returned None, which is no number"),
        ({}, "raise optuna.TrialPruned", "objective has pruned this configuration itself"),
    ],
)
def test_a_run_says_in_one_line_what_it_lacks(config: dict[str, Any], source: str, line: str) -> None:
    Path("study.py").write_text(short(source))
    done = run(config)
    assert done.returncode == 1
    assert line in done.stderr.splitlines()[-1]


def test_a_wrapper_of_an_objective_with_data_has_its_study() -> None:
    source = (
        "import argparse, optuna\nargs = argparse.ArgumentParser().parse_args()\n"
        "def objective(trial, data):\n    return sum(data) * trial.suggest_float('x', 0, 1)\n"
        "def tuned(trial):\n    return objective(trial, [1, 2])\n"
        "def main():\n    study = optuna.create_study(direction='maximize')\n"
        "    study.optimize(lambda trial: objective(trial, [1, 2]), n_trials=7)\n"
    )
    found, notes = init(source, "tuned")
    assert (found.search.num_trials, found.search.mode, notes) == (7, "max", [])
    done = subprocess.run(
        [sys.executable, "-m", "rubberband.objective", "study.py:tuned", '{"x": 0.5}'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "value=1.5\n", done.stderr


def test_a_module_with_an_objective_is_one_too(here: Path) -> None:
    Path("study.py").write_text(STUDY)
    Path("trial.py").write_text("def train(config):\n    return 1\n")
    assert is_program("study:objective")
    assert not is_program("trial:train")
    assert not is_program("absent:objective")
    found = findings_of("study:objective", here / "below" / "experiment.yaml")
    assert found.command[-2] == "../study.py:objective"


@pytest.mark.parametrize(
    ("pruner", "sampler", "words"),
    [
        ("SuccessiveHalvingPruner(min_resource=2, reduction_factor=2)", "RandomSampler(seed=3)", ("asha", "random", 3)),
        ("MedianPruner(n_warmup_steps=3)", "CmaEsSampler()", ("asha", "optuna", 1)),
        ("NopPruner()", "GridSampler({})", ("none", "optuna", 1)),
    ],
)
def test_pruners_and_samplers(pruner: str, sampler: str, words: tuple[str, str, int]) -> None:
    source = STUDY.replace("HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3)", pruner)
    found, notes = init(source.replace("TPESampler(seed=7)", sampler))
    search = found.search
    assert (search.scheduler.type, search.sampler.type, search.sampler.seed) == words  # type: ignore[union-attr]
    named = "".join(notes)
    assert ("MedianPruner has no counterpart" in named) == pruner.startswith("Median")
    assert ("GridSampler has no counterpart" in named) == sampler.startswith("Grid")


@pytest.mark.parametrize("changed", ["begins with trial(config)", "decorated"])
def test_an_objective_with_one_changed_line_is_read_like_any_other(changed: str) -> None:
    asked = (
        "    x = trial.suggest_float('x', 0, 1)\n    trial.report(x, 0)\n    trial.report(x / 2, 1)\n    return x / 2\n"
    )
    sources = {
        "begins with trial(config)": f"from rubberband.integrations import optuna as o\n\ndef objective(config):\n    "
        f"trial = o.trial(config)\n{asked}",
        "decorated": f"from rubberband.integrations import optuna as o\n\n@o.objective\ndef objective(trial):\n{asked}",
    }
    found, _ = init(sources[changed])
    assert found.search.space["x"].to_words() == {"type": "uniform", "lower": 0, "upper": 1}
    assert run({"x": 0.5}).stdout.split() == ["value=0.5", "value=0.25"]


@pytest.mark.long
@pytest.mark.ray
def test_the_winner_is_that_of_the_objective_run_by_hand() -> None:
    init(BY_HAND)
    text = Path("experiment.yaml").read_text()
    Path("experiment.yaml").write_text(
        text.replace("seconds_per_iteration: {1: 10}", "seconds_per_iteration: {1: 0.1}")
    )
    done = subprocess.run(["rubberband", "run", "experiment.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    from rubberband import load_result

    best = load_result("study").best
    fixed = {name: True if value == "true" else value for name, value in best.config.items()}
    assert best.metrics["value"] == by_hand(fixed)
