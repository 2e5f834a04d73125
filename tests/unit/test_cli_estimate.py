from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rubberband.units import parse_duration
from rubberband.views.formatting import aligned, rounded
from tests.builders.cli_runs import file as file
from tests.builders.cli_runs import run
from tests.builders.journalled_runs import recorded
from tests.builders.tables import cases

DEADLINE = "constraints.deadline=30m"


def test_a_table_has_a_row_for_each_stage_and_adds_up(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", file, "-s", DEADLINE) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = out.partition("Stages on ")[2].splitlines()[2:]
    stages = [row.split() for row in rows[:4]]
    assert [row[:3] for row in stages] == [["0", "32", "1"], ["1", "10", "3"], ["2", "3", "9"], ["3", "1", "37"]]
    total = rows[4].split()
    assert total[0] == "total"
    assert sum(float(row[-1]) for row in stages) == pytest.approx(float(total[-1]))
    times_s = [parse_duration(time) for row in stages for time in row[-3:-1]]
    assert sum(times_s) == sum(parse_duration(time) for time in total[-3:-1])


def test_json_holds_the_plan_the_prediction_and_the_baseline(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", file, "-o", "json", "-s", DEADLINE) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "rubberband.estimate/1"
    assert answer["feasible"] is True
    assert answer["prediction"]["jct_s"]["mean"] <= 1800
    assert answer["prediction"]["cost_usd"]["mean"] < answer["baselines"]["static"]["prediction"]["cost_usd"]["mean"]
    assert [stage["trials"] for stage in answer["plan"]["stages"]] == [32, 10, 3, 1]


def test_simulate_shows_the_dag_beside_the_plan(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", file, "-o", "json", "-s", DEADLINE, "--simulate", "3") == 0
    answer = json.loads(capsys.readouterr().out)
    simulated, predicted = answer["simulation"], answer["prediction"]
    assert simulated["num_samples"] == 3
    for figure in ("jct_s", "cost_usd"):
        assert simulated[figure]["p50"] == pytest.approx(predicted[figure]["mean"])
    assert sum(task["share"] for task in simulated["critical_path"]) == pytest.approx(1.0, abs=1e-5)
    assert run(monkeypatch, "estimate", file, "-s", DEADLINE, "--simulate", "3") == 0
    out = capsys.readouterr().out
    assert "The plan's DAG, simulated 3 times" in out
    assert "Critical path: stage 0 SCALE" in out


def test_simulate_refuses_a_search_without_syncs(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asha = "search.scheduler={type: asha, num_samples: 9, grace_period: 1, max_t: 9, reduction_factor: 3}"
    assert run(monkeypatch, "estimate", file, "-s", asha, "--simulate", "3") == 2
    assert "scheduler.type=asha has no DAG" in capsys.readouterr().err


def test_a_deadline_that_no_plan_meets(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", file, "-o", "json", "-s", "constraints.deadline=5m") == 3
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["feasible"], answer["plan"]) == (False, None)
    assert answer["nearest"]["jct_s"] > 300
    assert err.startswith("error: deadline 5m cannot be met: the shortest plan takes ")
    assert "; raise the deadline to " in err
    assert err.count("\n") == 1


def test_a_plan_of_the_user(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"stages": [{"instances": 8, "gpus_per_trial": 1}] * 4}))
    assert (
        run(
            monkeypatch,
            "estimate",
            file,
            "-s",
            "constraints.deadline=9h",
            "-s",
            "constraints.max_cost=900",
            "--plan",
            str(path),
        )
        == 0
    )
    assert "given plan" in capsys.readouterr().out
    assert run(monkeypatch, "estimate", file, "-s", DEADLINE, "--plan", str(path)) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: the plan does not keep the deadline of 30m (it takes ")
    assert "and the budget of 40.00 USD (it costs " in error


@pytest.mark.parametrize("content", ["", "[", "{}", '{"stages": [{"instances": 0, "gpus_per_trial": 1}]}'])
def test_invalid_plans(
    content: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    assert run(monkeypatch, "estimate", file, "--plan", str(path)) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}")


def test_the_fixed_cluster_alone(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", file, "--policy", "static", "-s", DEADLINE) == 0
    out = capsys.readouterr().out
    assert "best fixed cluster on p3.8xlarge" in out
    assert "elasticity saves" not in out


def test_gpus_beyond_the_profile_are_marked(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["-s", "profile.seconds_per_iteration={1: 10, 2: 6}", "-s", "resources.gpus_per_trial={min: 4, max: 4}"]
    assert run(monkeypatch, "estimate", file, "--verbose", *changes) == 0
    out = capsys.readouterr().out
    assert "4 GPUs per trial are extrapolated: the profile ends at 2" in out
    assert "speed beyond measured GPU counts" in out


@cases("arguments", "message")
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], message: str, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", file, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["estimate"], ["estimat"], ["estimate", "x", "--polic"], ["estimate", "x", "-o", "y"]]
)
def test_wrong_usage_is_exit_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, *arguments) == 2


def test_a_missing_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "estimate", "none.yaml") == 2
    assert capsys.readouterr().err == "error: there is no experiment file 'none.yaml'; check the path\n"


def test_an_interruption_is_exit_130(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rubberband.spec.loading.load_experiment", interrupt)
    assert run(monkeypatch, "estimate", file) == 130


def test_a_module_of_an_extra_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    def lack(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray.util")

    monkeypatch.setattr("rubberband.spec.loading.load_experiment", lack)
    assert run(monkeypatch, "estimate", file) == 2
    assert capsys.readouterr().err == "error: this needs ray.util; run pip install 'rubberband-tune[ray]'\n"


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
