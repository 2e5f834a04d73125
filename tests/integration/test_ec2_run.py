"""Tuning on EC2 from end to end, with real boot scripts, Ray nodes and trials: the run, spot, deaths, bad boots."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.cloud.aws.calls import name_in
from rubberband.executor import Result
from tests.builders.command_line import ROOT
from tests.builders.ec2_runs import (
    FEW,
    MEASURED,
    ON_EC2,
    SPOT,
    TALKATIVE,
    Ec2CommandLine,
    each_iteration_once,
    ec2,
    iterations,
    ran,
    words,
)
from tests.builders.waiting import eventually
from tests.ec2 import BUCKET

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[Ec2CommandLine]:
    with ec2(tmp_path) as driver:
        yield driver


def finished(command_line: Ec2CommandLine, driver: subprocess.Popen[str]) -> tuple[str, Result]:
    """The whole report and the result of a run that is done and holds nothing any more."""
    output, errors = driver.communicate(timeout=400)
    assert driver.returncode == 0, f"{output}\n{errors}"
    assert not command_line.aws.fake.living
    assert command_line.nothing_left()
    result = command_line.result("digits")
    assert result.outcome == "done"
    assert each_iteration_once(result)
    assert all(trial.failures == 0 for trial in result.trials)
    holds_the_bill(command_line, result)
    return command_line("report", "digits", "--verbose")[0], result


def holds_the_bill(command_line: Ec2CommandLine, result: Result) -> None:
    """The ledger has what EC2 charges for, and at its prices; it differs from the bill by what a look takes."""
    bill = command_line.lines_of_the_bill()
    bought = {one.instance: one for one in result.instances if one.running_s is not None}
    assert bought.keys() == bill.keys()
    for name, line in bill.items():
        paid = bought[name]
        assert (paid.market.replace("_", "-"), paid.zone) == (line.market, line.zone)
        assert paid.price_usd_per_hour == pytest.approx(line.price_usd_per_hour)
        beside_usd = result.side_usd_per_hour * (line.billed_s + 180.0) / 3600.0
        assert paid.cost_usd == pytest.approx(line.cost_usd, abs=60.0 / 3600.0 * line.price_usd_per_hour + beside_usd)
    found = {line.line: line.usd for line in result.bill}
    for line, kind in (("root volumes", "volume"), ("public IPv4 addresses", "address")):
        paid_usd = sum(
            one.cost_usd
            for one in command_line.aws.fake.bill().beside
            if one.line == kind and one.tags["rubberband:instance"] in bill
        )
        assert found[line] == pytest.approx(paid_usd, abs=len(bill) * 180.0 / 3600.0 * result.side_usd_per_hour), line
    assert result.max_cost_usd is not None
    assert command_line.aws.fake.bill().total_usd < result.max_cost_usd


@pytest.mark.parametrize("notice_s", [20.0, 3.0, None])
def test_a_run_on_spot_of_which_an_instance_is_taken_away(command_line: Ec2CommandLine, notice_s: float | None) -> None:
    driver = command_line.start("run", "digits.yaml", *words(*ON_EC2, *SPOT, *FEW))
    begun = command_line.wait_for(driver, lambda result: iterations(result) >= 2, "digits")
    # Lines that a machine has not sent yet are lost with it.
    for trial in [trial.trial for trial in begun.trials if trial.iterations]:
        eventually(lambda trial=trial: "iteration 1," in command_line("logs", "digits", str(trial))[0])
    assert {one.market for one in command_line.aws.fake.living} == {"spot"}
    taken = command_line.instance("i-001")
    command_line.aws.fake.reclaim(taken.instance_id, notice_s=notice_s)
    output, result = finished(command_line, driver)
    assert result.interruptions == 1
    assert result.redone_iterations <= 1
    assert len(command_line.lines_of_the_bill()) in (2, 3)  # a third one, unless the second is soon done alone
    assert re.search(r"i-001 +PREEMPTED" if notice_s is None else r"i-001 +(interrupted|PREEMPTED)", output)
    assert re.search(rf"spot +g4dn.xlarge +{taken.zone}", output)
    assert result.best is not None
    log, _ = command_line("logs", "digits", str(result.best.trial))
    assert 7 <= log.count("accuracy") <= 7 + result.redone_iterations
    assert "reading the Ray token from /rubberband/rubberband/ray-token" in command_line.console("i-002")
    token = (command_line.home / "ray-token").read_text().strip()
    assert all(token not in one.user_data for one in command_line.aws.fake.instances)
    assert any(key.endswith(".ckpt") for key in command_line.aws.fake.world.buckets[BUCKET])


def test_the_digits_of_the_examples_are_measured_first(command_line: Ec2CommandLine) -> None:
    driver = command_line.start("run", "digits.yaml", *words(*ON_EC2, *MEASURED))
    output, result = finished(command_line, driver)
    assert "deadline 5m" in output
    assert (len(result.trials), result.interruptions) == (64, 0)
    assert result.best is not None
    assert result.best.iterations == 85
    assert re.search(r"[1-4] +on demand +g4dn.xlarge +us-east-1", output)
    assert {name_in(one.tags, one.launch_index).partition("-")[0] for one in command_line.aws.fake.instances} == {
        "profile",
        "i",
    }


def test_hyperband_survives_a_killed_driver_and_a_reclaimed_instance(command_line: Ec2CommandLine) -> None:
    hyperband = (
        *TALKATIVE,
        "search.scheduler={type: hyperband, max_t: 20, reduction_factor: 8}",
        "constraints={deadline: 20m, max_cost: 5, objective: min_time}",
        "resources.max_instances=3",
    )
    driver = command_line.start("run", "digits.yaml", *words(*ON_EC2, *SPOT, *hyperband))
    before = command_line.wait_for(driver, lambda result: iterations(result) >= 4, "digits")
    assert len({stage.lane for stage in before.stages}) > 1
    driver.kill()
    driver.communicate()
    driver = command_line.start("resume", "digits")
    command_line.wait_for(driver, lambda result: iterations(result) >= iterations(before) + 1, "digits")
    command_line.aws.fake.reclaim(command_line.aws.fake.living[0].instance_id, notice_s=20.0)
    _, result = finished(command_line, driver)
    assert (result.resumes, result.interruptions) == (1, 1)
    assert result.redone_iterations <= 1
    assert result.best is not None
    assert result.best.iterations == 20
    assert {trial.bracket for trial in result.trials if trial.status == "completed"} == {0, 1}


def test_resume_resumes_where_a_killed_driver_was(command_line: Ec2CommandLine) -> None:
    driver = command_line.start("run", "digits.yaml", *words(*ON_EC2, *FEW))
    before = command_line.wait_for(driver, lambda result: iterations(result) >= 2, "digits")
    driver.kill()
    driver.communicate()
    held = {one.instance_id for one in command_line.aws.fake.living}
    assert len(held) == 2
    _, result = finished(command_line, command_line.start("resume", "digits"))
    assert result.resumes == 1
    done_before = {trial.trial: trial.iterations for trial in before.trials}
    assert all(trial.iterations >= done_before[trial.trial] for trial in result.trials)
    assert {one.instance_id for one in command_line.aws.fake.instances} == held


def test_instances_of_a_killed_driver_end_by_their_leases(command_line: Ec2CommandLine) -> None:
    driver = command_line.start("run", "digits.yaml", *words(*ON_EC2, *FEW, "resources.lease=130s"))
    before = command_line.wait_for(driver, lambda result: iterations(result) >= 2, "digits")
    driver.kill()
    driver.communicate()
    # The head's lease is the driver's own, and may end some seconds after the last that an instance heard of.
    eventually(
        lambda: not (command_line.aws.fake.living or command_line.processes()), "the end of the leases", within_s=240
    )
    assert "the lease has ended" in command_line.console("i-001")
    assert before.max_cost_usd is not None
    assert command_line.aws.fake.bill().total_usd < before.max_cost_usd
    output, _ = command_line("cleanup")
    assert "nothing was left behind" in output
    assert not command_line.processes()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_driver_that_is_asked_to_end_terminates_its_instances(command_line: Ec2CommandLine, name: str) -> None:
    driver = command_line.start("run", "digits.yaml", *words(*ON_EC2, *FEW))
    command_line.wait_for(driver, lambda result: iterations(result) >= 1, "digits")
    driver.send_signal(signal.Signals[name])
    _, errors = driver.communicate(timeout=400)
    assert (driver.returncode, command_line.result("digits").outcome) == (130, "cancelled"), errors
    assert not command_line.aws.fake.living
    assert command_line.nothing_left()


def test_a_boot_script_that_fails_is_reported_in_one_line(command_line: Ec2CommandLine) -> None:
    bad = "resources.aws.setup=['echo the disk is bad; exit 3']"
    output, errors = command_line("run", "digits.yaml", *words(*ON_EC2, *FEW, bad), exit_code=1)
    why = "it powered itself off: its boot script failed at `setup: echo the disk is bad; exit 3`: the disk is bad"
    assert f"digits: failed: instances fail to start: {why} (3 of 3 in a row); " in " ".join(output.split())
    assert "spent; fix it, then rubberband resume digits" in " ".join(output.split())
    assert f"i-001 failed to start ({why})" in errors
    assert len(command_line.aws.fake.instances) == 3
    assert "Traceback" not in errors
    assert not command_line.aws.fake.living


def test_a_run_on_the_fake_ec2_in_bad_weather_as_a_user_types_it(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text((ROOT / "examples" / "digits.yaml").read_text())
    weather = ("--faults", "0.15", "--interrupt-every", "15", "--notice", "20", "--invisible", "5")
    limits = ("constraints.deadline=30m", "constraints.objective=min_cost", "constraints.confidence=0.5")
    changes = words(*ON_EC2, *MEASURED, *SPOT, *limits)
    command = (sys.executable, "-m", "rubberband.cli", "run", "digits.yaml", *changes)
    text = ran(
        {**os.environ, "PYTHONPATH": str(ROOT)},
        tmp_path,
        "tests.ec2",
        *("--dir", str(tmp_path / "aws"), *weather, "--", *command),
    )
    assert "digits: done in" in text
    assert re.search(r"taken\s+away\s+by\s+the\s+provider", text)  # named, among what --verbose shows
    assert "still there" not in text
    assert re.search(r"the bill: 0\.\d+ USD for \d+ instances", text)
