"""`rubberband estimate` and `cloud prices` as commands: what adds up, live prices, refusals, and what they import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rubberband.units import parse_duration
from rubberband.views.formatting import aligned, rounded
from tests.builders.cli_runs import CommandLine
from tests.builders.cli_runs import file as file
from tests.builders.cli_runs import rubberband as rubberband
from tests.builders.journalled_runs import recorded
from tests.builders.tables import cases
from tests.ec2 import FakeAws

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


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_a_plan_of_the_user(write: Callable[..., str], file: str, tmp_path: Path, rubberband: CommandLine) -> None:
    path = tmp_path / "plan"
    path.write_text(write({"stages": [{"instances": 8, "gpus_per_trial": 1} for _ in range(4)]}))
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
    ours = (
        "cloud.aws",
        "cloud.local",
        "cloud.pool",
        "executor.core",
        "executor.result",
        "planner.goodput",
        "views.report",
    )
    assert not any(name.startswith(("scipy", *(f"rubberband.{part}." for part in ours))) for name in modules)


def test_estimate_for_this_machine_needs_no_network_and_no_checkpoints() -> None:
    modules = modules_after("estimate", str(Path(__file__).parents[2] / "examples/digits.yaml"))
    assert not modules & {"ray", "torch", "boto3", "fastapi", "httpx", "urllib.request", "ssl"}
    ours = ("cloud.local.provider", "cloud.ray_head", "executor.checkpoints", "executor.core")
    assert not any(name.startswith(tuple(f"rubberband.{part}" for part in ours)) for name in modules)


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


AWS = [
    *("-s", "resources={provider: aws, instance_type: g5.xlarge, checkpoints: s3://bucket/x}"),
    *("-s", "constraints={deadline: 3h, max_cost: 100}"),
]
G_ON_DEMAND, G_SPOT = "L-DB2E81BA", "L-3819A6DF"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    """What `open_session` opens."""
    fake = FakeAws(time.time)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RUBBERBAND_CATALOGUE", raising=False)
    monkeypatch.setattr("rubberband.cloud.aws.client.open_session", lambda region: fake.session(region=region))
    return fake


@pytest.fixture
def offline(fake: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.cloud.aws.client.open_session", lambda _: fake.session("nobody"))


@pytest.mark.usefixtures("fake")
def test_all_types_with_gpus_the_cheapest_gpu_first(rubberband: CommandLine) -> None:
    out = rubberband("cloud", "prices", "-o", "json")
    assert rubberband.err == ""
    answer = json.loads(out)
    assert (answer["schema"], answer["region"], answer["notes"]) == ("rubberband.prices/1", "us-east-1", [])
    per_gpu = [row["on_demand_usd_per_hour"] / row["gpus"] for row in answer["types"]]
    assert per_gpu == sorted(per_gpu)
    (t4,) = (row for row in answer["types"] if row["instance_type"] == "g4dn.xlarge")
    assert (t4["gpus"], t4["gpu"], t4["vcpus"], t4["on_demand_usd_per_hour"]) == (1, "T4", 4, 0.526)
    assert t4["on_demand_source"] == "aws"
    assert t4["spot_usd_per_hour"] == min(t4["spot_zones_usd_per_hour"].values())
    assert t4["spot_share"] == pytest.approx(t4["spot_usd_per_hour"] / 0.526)


@pytest.mark.usefixtures("fake")
def test_a_table_shows_source_zone_and_age(rubberband: CommandLine) -> None:
    header, gpu, cpu = rubberband("cloud", "prices", "g5.xlarge", "m7i.large").splitlines()
    assert header.split()[:2] == ["type", "GPUs"]
    assert gpu.split()[:2] == ["g5.xlarge", "1"]
    assert gpu.count("AWS, now") == 2
    assert gpu.split()[-3].startswith("us-east-1")
    assert cpu.split()[:2] == ["m7i.large", "0"]
    assert "0.1008" in cpu
    assert f"{0.1008 * 1.1:.4f}" in rubberband("cloud", "prices", "m7i.large", "-r", "eu-west-1")


@pytest.mark.usefixtures("offline")
def test_offline_the_catalogue_is_shown_and_a_note(rubberband: CommandLine) -> None:
    out = rubberband("cloud", "prices", "p3.8xlarge", "g6.12xlarge")
    err = rubberband.err
    assert err.startswith("note: AWS prices are not available: there are no AWS credentials")
    _, first, second = out.splitlines()
    assert (first.split()[0], second.split()[0]) == ("g6.12xlarge", "p3.8xlarge")
    assert "2026-01-19" in first
    assert "~43%" in first


@pytest.mark.usefixtures("offline")
@cases("arguments", "code", "message")
def test_questions_without_an_offline_answer(
    arguments: list[str], code: int, message: str, rubberband: CommandLine
) -> None:
    err = rubberband.refused("cloud", "prices", *arguments, code=code)
    assert err.startswith(f"error: {message}")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("name", "remedy"), [("g5.xlrge", "did you mean 'g5.xlarge'"), ("zzz", "`rubberband cloud prices` lists the types")]
)
def test_a_type_that_aws_does_not_have(name: str, remedy: str, rubberband: CommandLine) -> None:
    assert rubberband.refused("cloud", "prices", name).startswith(f"error: AWS has no '{name}' in us-east-1; {remedy}")


def test_a_warm_cache_answers_without_boto3(fake: FakeAws, tmp_path: Path, rubberband: CommandLine) -> None:
    text = rubberband.json("cloud", "prices")
    code = (
        "import sys\nfrom rubberband import cli\nsys.argv = ['rubberband', 'cloud', 'prices', '-o', 'json']\n"
        "try:\n    cli.main()\nfinally:\n    "
        "assert not {'boto3', 'botocore', 'numpy', 'sqlalchemy', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert json.loads(done.stdout) == text


def test_without_boto3_the_catalogue_is_shown_and_how_to_install_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rubberband import cli\nsys.modules['boto3'] = None\n"
        "sys.argv = ['rubberband', 'cloud', 'prices', 'p3.8xlarge']\ncli.main()"
    )
    environment = {**os.environ, "RUBBERBAND_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "12.2400" in done.stdout
    assert "AWS needs boto3; run pip install 'rubberband-tune[aws]'" in done.stderr


def test_plan_takes_live_prices_and_says_so(fake: FakeAws, file: str, rubberband: CommandLine) -> None:
    planned = rubberband.json("estimate", "--live", file, *AWS)
    estimated = rubberband.json("estimate", file, *AWS, "-s", "resources.head_price_per_hour=0.10742666666666667")
    assert planned.keys() == estimated.keys()
    assert all(planned[key] == estimated[key] for key in ("plan", "prediction", "baselines"))
    sources = {one["name"]: one["basis"] for one in planned["assumptions"]}
    assert (sources["price of an instance"], sources["head node"]) == ("live", "live")
    sources = {one["name"]: one["basis"] for one in estimated["assumptions"]}
    assert (sources["price of an instance"], sources["head node"]) == ("default", "given")
    notes = "\n".join(planned["notes"])
    assert "price: that of g5.xlarge is from AWS, us-east-1, 2" in notes
    assert "price of the head: that of m7i-flex.large is from AWS" in notes
    assert "quota: 192 more g5.xlarge on demand in us-east-1 (768 vCPUs of 'Running On-Demand G and VT" in notes
    assert "price: that of g5.xlarge is from the catalogue of 2026-01-19" in "\n".join(estimated["notes"])


def test_plan_takes_no_more_instances_than_the_quota_allows(fake: FakeAws, file: str, rubberband: CommandLine) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 11.0
    answer = rubberband.json("estimate", "--live", file, *AWS)
    assert max(stage["instances"] for stage in answer["plan"]["stages"]) <= 2
    assert any(
        note.startswith("quota: 2 more g5.xlarge on demand") and note.endswith("planned with (max_instances=16).")
        for note in answer["notes"]
    )
    out = rubberband("estimate", "--live", file, *AWS)
    assert "quota: 2 more g5.xlarge on demand" in out
    assert f"Next: rubberband run {file} --on head -s " in out


def test_plan_refuses_what_the_account_may_not_hold(fake: FakeAws, file: str, rubberband: CommandLine) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 0.0
    err = rubberband.refused("estimate", "--live", file, *AWS)
    assert err.startswith("error: resources.instance_type: no quota for g5.xlarge on demand in us-east-1: it has 4 ")
    assert "--quota-code L-DB2E81BA --desired-value 64 --region us-east-1" in err
    two_types = ["-s", "resources={provider: aws, instance_types: [g5.xlarge, g5.2xlarge, p3.2xlarge]}"]
    by_type = "{seconds_per_iteration: {1: 100}}"
    profiles = f"profile={{by_instance_type: {{g5.xlarge: {by_type}, g5.2xlarge: {by_type}, p3.2xlarge: {by_type}}}}}"
    answer = rubberband.json("estimate", "--live", file, *AWS, *two_types, "-s", profiles)
    assert {stage["instance_type"] for stage in answer["plan"]["stages"]} == {"p3.2xlarge"}
    assert any("quota: 0 more g5.xlarge" in note and note.endswith("it is left out.") for note in answer["notes"])


def test_plan_leaves_spot_out_where_there_is_no_quota_for_it(fake: FakeAws, file: str, rubberband: CommandLine) -> None:
    spot = ["-s", "resources.market=spot"]
    answer = rubberband.json("estimate", "--live", file, *AWS, *spot)
    assert {stage["market"] for stage in answer["plan"]["stages"]} == {"spot"}
    assert any(note.startswith("price on spot: that of g5.xlarge is from AWS, us-east-1") for note in answer["notes"])
    fake.world.quotas_vcpus[G_SPOT] = 0.0
    answer = rubberband.json("estimate", "--live", file, *AWS, *spot)
    assert {stage["market"] for stage in answer["plan"]["stages"]} == {"on_demand"}
    assert any(note.endswith("; it is left out.") for note in answer["notes"])
    fake.world.quotas_vcpus |= {G_SPOT: 8.0, G_ON_DEMAND: 0.0}
    answer = rubberband.json("estimate", "--live", file, *AWS, *spot)
    assert {(stage["market"], stage["instances"] <= 2) for stage in answer["plan"]["stages"]} == {("spot", True)}
    assert any(note.endswith("; it is left out.") for note in answer["notes"])


@pytest.mark.usefixtures("offline")
def test_plan_without_credentials_is_an_estimate_that_says_so(file: str, rubberband: CommandLine) -> None:
    planned = rubberband.json("estimate", "--live", file, *AWS)
    assert planned["prediction"] == rubberband.json("estimate", file, *AWS)["prediction"]
    notes = "\n".join(planned["notes"])
    assert "AWS prices are not available (there are no AWS credentials" in notes
    assert "quota: not known (there are no AWS credentials" in notes
    assert "price: that of g5.xlarge is from the catalogue of 2026-01-19" in notes


@pytest.mark.usefixtures("fake")
def test_plan_refuses_a_region_that_is_none(file: str, rubberband: CommandLine) -> None:
    assert rubberband.refused("estimate", "--live", file, *AWS, "-s", "resources.region=us-easy-1").startswith(
        "error: resources.region: 'us-easy-1' is not a region of EC2"
    )


def test_plan_of_another_provider_asks_no_cloud(fake: FakeAws, file: str, rubberband: CommandLine) -> None:
    planned = rubberband("estimate", "--live", file, "-s", "constraints.deadline=30m")
    assert planned == rubberband("estimate", file, "-s", "constraints.deadline=30m")
    assert fake.calls == []
