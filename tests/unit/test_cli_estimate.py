"""`rubberband estimate` as a command: what adds up, plans of the user, refusals, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rubberband.units import parse_duration
from rubberband.views.formatting import aligned, rounded
from tests.builders.cli_runs import CommandLine
from tests.builders.cli_runs import file as file
from tests.builders.cli_runs import rubberband as rubberband
from tests.builders.journalled_runs import recorded
from tests.builders.tables import cases

DEADLINE = "constraints.deadline=30m"


def test_a_table_has_a_row_for_each_stage_and_adds_up(file: str, rubberband: CommandLine) -> None:
    out = rubberband("estimate", file, "-s", DEADLINE)
    assert rubberband.err == ""
    rows = out.partition("Stages on ")[2].splitlines()[2:]
    stages = [row.split() for row in rows[:4]]
    assert [row[:3] for row in stages] == [["0", "32", "1"], ["1", "10", "3"], ["2", "3", "9"], ["3", "1", "37"]]
    total = rows[4].split()
    assert sum(float(row[-1]) for row in stages) == pytest.approx(float(total[-1]))
    times_s = [parse_duration(time) for row in stages for time in row[-3:-1]]
    assert sum(times_s) == sum(parse_duration(time) for time in total[-3:-1])


def test_simulate_shows_the_dag_beside_the_plan(file: str, rubberband: CommandLine) -> None:
    answer = rubberband.json("estimate", file, "-s", DEADLINE, "--simulate", "3")
    simulated, predicted = answer["simulation"], answer["prediction"]
    assert simulated["num_samples"] == 3
    for figure in ("jct_s", "cost_usd"):
        assert simulated[figure]["p50"] == pytest.approx(predicted[figure]["mean"])
    assert sum(task["share"] for task in simulated["critical_path"]) == pytest.approx(1.0, abs=1e-5)
    out = rubberband("estimate", file, "-s", DEADLINE, "--simulate", "3")
    assert "The plan's DAG, simulated 3 times" in out
    assert "Critical path: stage 0 SCALE" in out
    asha = "search.scheduler={type: asha, num_samples: 9, grace_period: 1, max_t: 9, reduction_factor: 3}"
    assert "scheduler.type=asha has no DAG" in rubberband.refused("estimate", file, "-s", asha, "--simulate", "3")


def test_a_plan_of_the_user(file: str, tmp_path: Path, rubberband: CommandLine) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"stages": [{"instances": 8, "gpus_per_trial": 1}] * 4}))
    wide = ["-s", "constraints.deadline=9h", "-s", "constraints.max_cost=900"]
    assert "given plan" in rubberband("estimate", file, *wide, "--plan", str(path))
    rubberband("estimate", file, "-s", DEADLINE, "--plan", str(path), code=3)
    assert rubberband.err.startswith("error: the plan does not keep the deadline of 30m (it takes ")
    assert "and the budget of 40.00 USD (it costs " in rubberband.err


@pytest.mark.parametrize("content", ["", "[", "{}", '{"stages": [{"instances": 0, "gpus_per_trial": 1}]}'])
def test_invalid_plans(content: str, file: str, tmp_path: Path, rubberband: CommandLine) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    rubberband("estimate", file, "--plan", str(path), code=2)
    assert rubberband.err.startswith(f"error: {path}")


@cases("arguments", "message")
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], message: str, file: str, rubberband: CommandLine
) -> None:
    assert message in rubberband.refused("estimate", file, *arguments)


def test_a_missing_file_and_wrong_usage_are_exit_2(rubberband: CommandLine) -> None:
    missing = "error: there is no experiment file 'none.yaml'; check the path\n"
    assert rubberband.refused("estimate", "none.yaml") == missing
    for arguments in (["estimate"], ["estimat"], ["estimate", "x", "--polic"], ["estimate", "x", "-o", "y"]):
        rubberband(*arguments, code=2)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, ""),
        (
            ModuleNotFoundError("No module named 'ray'", name="ray.util"),
            2,
            "error: this needs ray.util; run pip install 'rubberband-tune[ray]'\n",
        ),
    ],
)
def test_an_interruption_and_a_missing_extra_are_no_traceback(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, file: str, rubberband: CommandLine
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("rubberband.spec.loading.load_experiment", fail)
    rubberband("estimate", file, code=code)
    assert rubberband.err.endswith(line)


def modules_after(*arguments: str) -> set[str]:
    """Modules imported by the end of a command; it must do without the sources of modules (pydantic reads some)."""
    code = f"""
import inspect, sys, tokenize
def refuse(*_, **__):
    raise AssertionError("a source is read")
inspect.findsource = tokenize.tokenize = tokenize.generate_tokens = refuse
from rubberband import cli
sys.argv = ["rubberband", *{arguments!r}]
try:
    cli.main()
except SystemExit as error:
    assert not error.code, error.code
print("MODULES", *sorted(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES ")[2].split())


@pytest.mark.long
def test_estimate_starts_nothing_heavy(file: str) -> None:
    heavy = {"ray", "torch", "boto3", "sqlalchemy", "fastapi", "plotly", "networkx", "numpy.ma"}
    modules = modules_after("estimate", file, "-s", DEADLINE, "-o", "json")
    assert not modules & heavy
    assert not any(name.startswith(("scipy", "rubberband.planner.goodput")) for name in modules)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_start_nothing_at_all(flag: str) -> None:
    modules = modules_after(flag)
    assert not modules & {"ray", "torch", "pydantic", "numpy", "yaml", "sqlalchemy", "rich"}
    assert not any(name.startswith("rubberband.commands") for name in modules)


def test_the_help_of_a_command_imports_no_other() -> None:
    modules = modules_after("status", "--help")
    assert not modules & {"numpy", "yaml", "sqlalchemy", "rubberband.commands.estimate", "rubberband.commands.serve"}


@pytest.mark.by_default(1)
@pytest.mark.parametrize("command", ["ps", "status", "report"])
def test_looking_at_a_run_does_not_wait_for_a_planner(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    folder = recorded().put(tmp_path)
    modules = modules_after(command, *([] if command == "ps" else [folder.name]))
    assert not modules & {"ray", "torch", "boto3", "numpy", "fastapi", "plotly", "sqlalchemy.dialects.postgresql"}


def test_columns_line_up_and_parts_add_up() -> None:
    assert aligned([["a", "bb"], ["ccc", "d"]]) == ["  a  bb", "ccc   d"]
    assert rounded([1 / 3, 1 / 3, 1 / 3], 0.01) == pytest.approx([0.33, 0.34, 0.33])
