"""Whole runs on real Ray nodes, through the command line: the end, Ctrl-C, kill -9, bad trials, bad input."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from rubberband.executor import WITHOUT_CHECKPOINT, Result
from tests.builders.command_line import PATIENCE_S, CommandLine, interrupt
from tests.builders.invariants import validate
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]


def acknowledged(result: Result) -> dict[int, int]:
    return {trial.trial: trial.iterations for trial in result.trials}


def iterations_trained(command_line: CommandLine, trial: int) -> Counter[int]:
    lines = command_line.shows("logs", "sleepy", str(trial)).splitlines()
    texts = [line.rpartition(" | ")[2] for line in lines]
    return Counter(int(text.split()[1]) for text in texts if text.startswith("iteration "))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    command_line = CommandLine(tmp_path_factory.mktemp("undisturbed"))
    output, errors = command_line("run", "sleepy.yaml")
    command_line.output, command_line.errors = output, errors  # type: ignore[attr-defined]
    return command_line


@pytest.mark.long
def test_a_run_ends_with_a_report_and_leaves_no_process(undisturbed: CommandLine) -> None:
    result = undisturbed.result()
    assert result.outcome == "done"
    assert undisturbed.nothing_left()
    assert f"trial {result.best.trial}" in undisturbed.output if result.best else False  # type: ignore[attr-defined]
    assert "score" in undisturbed.output  # type: ignore[attr-defined]
    stages = [stage.instances for stage in result.stages]
    assert stages == [stage.planned_instances for stage in result.stages]


@pytest.mark.long
def test_report_ps_and_logs_mention_it(undisturbed: CommandLine, tmp_path: Path) -> None:
    report = json.loads(undisturbed.shows("report", "sleepy", "-o", "json"))
    assert report["schema"] == "rubberband.report/1"
    assert report["outcome"] == "done"
    assert [trial["iterations"] for trial in report["trials"]].count(14) == 2
    undisturbed.shows("report", "sleepy", "--html", str(tmp_path / "page.html"))
    assert "<html" in (tmp_path / "page.html").read_text()
    listed = json.loads(undisturbed.shows("ps", "-o", "json"))["experiments"]
    assert [(row["name"], row["state"], row["iterations"]) for row in listed] == [("sleepy", "done", 4 * 4 + 2 * 10)]
    assert iterations_trained(undisturbed, report["best"]["trial"]) == Counter(range(1, 15))
    assert "experiment 'nosuch' not found" in undisturbed.refused("report", "nosuch")
    assert "it has 0 to 3" in undisturbed.refused("logs", "sleepy", "4")


@pytest.mark.long
def test_a_rest_that_is_not_worth_its_money_is_not_trained(command_line: CommandLine) -> None:
    _, errors = command_line("run", "sleepy.yaml", "-s", "search.stop.worth=1e9 per USD")
    result = command_line.result()
    assert result.outcome == "done"
    assert result.ended_by is not None
    assert result.ended_by.rule == "worth"
    assert sum(acknowledged(result).values()) == 4 * 4
    (found,) = result.worths
    assert f"rest: {found.in_words('score')}" in errors
    assert result.actual_cost_usd + found.left_usd == pytest.approx(result.ended_by.expected_cost_usd, rel=0.2)
    assert "not needed: " in command_line.shows("report", "sleepy")
    assert found.price in command_line.shows("status", "sleepy")
    assert command_line.nothing_left()


def test_after_kill_9_a_resume_finishes_with_the_same_winner_and_trains_nothing_again(
    command_line: CommandLine, undisturbed: CommandLine
) -> None:
    command_line.hold(after=8)
    begun_at = time.time()
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=300s")
    command_line.wait_for(driver, lambda result: sum(acknowledged(result).values()) >= 20)
    driver.kill()
    driver.communicate()
    cut = command_line.result()
    assert cut.outcome == "unfinished"
    command_line.end_leases(300.0)
    assert command_line.nothing_left(within_s=120.0), "instances outlived their lease"
    before = {trial: iterations_trained(command_line, trial) for trial in range(4)}
    gone_s = time.time() - begun_at
    store = command_line.home / "experiments" / "sleepy" / "checkpoints"
    whole = next(store.glob("trial-0000-*.ckpt"))
    left_behind = [store / f"{whole.stem[:-3]}xyz.ckpt", store / f".{whole.name}.0123abcd.new"]
    for path in left_behind:
        path.write_bytes(b"cut off")

    command_line.go()
    command_line("resume", "sleepy")
    assert not any(path.exists() for path in left_behind)
    result, expected = command_line.result(), undisturbed.result()
    assert result.outcome == "done"
    assert result.resumes == 1
    assert result.best is not None
    assert expected.best is not None
    assert (result.best.trial, result.best.metrics) == (expected.best.trial, expected.best.metrics)
    for trial, iterations in acknowledged(cut).items():
        trained = iterations_trained(command_line, trial)
        again = [done for done in before[trial] if trained[done] > before[trial][done] and done <= iterations]
        assert again == []
    lost = [instance for instance in result.instances if instance.reason]
    assert lost, "the instances of the dead driver are on the bill"
    assert all(cut.actual_jct_s - 1.0 <= (i.ended_s or 0.0) <= gone_s for i in lost)
    assert result.actual_cost_usd == pytest.approx(sum(instance.cost_usd for instance in result.instances))
    assert command_line.nothing_left()


@pytest.mark.long
def test_a_function_without_a_checkpoint_is_trained_from_zero_also_after_kill_9(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "entrypoint=sleepy:forgetful", "-s", "resources.lease=8s")
    command_line.wait_for(driver, lambda result: sum(acknowledged(result).values()) >= 20)
    driver.kill()
    _, errors = driver.communicate()
    assert errors.count(WITHOUT_CHECKPOINT) == 2, "the check says it, and the first report"
    command_line("resume", "sleepy")
    result = command_line.result()
    assert (result.outcome, result.unsaved_trials) == ("done", 4)
    assert result.paid.repeated_gpu_s > 0.0
    assert sum(trial.failures for trial in result.trials) == 0
    for trial in result.trials:
        scores = [(iterations, metrics["score"]) for _, iterations, metrics in trial.curve]
        expected = [(done, pytest.approx(trial.configuration["x"] * done)) for done in range(1, trial.iterations + 1)]
        assert scores == expected
    assert result.best is not None
    assert iterations_trained(command_line, result.best.trial)[1] >= 2
    assert f"forgetful() {WITHOUT_CHECKPOINT}" in command_line.shows("logs", "sleepy", "0")
    assert WITHOUT_CHECKPOINT in command_line.shows("report", "sleepy")


@pytest.mark.long
def test_a_resume_within_the_lease_adopts_the_instances(command_line: CommandLine) -> None:
    command_line.hold(after=3)
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=120s")
    cut = command_line.wait_for(driver, lambda result: sum(acknowledged(result).values()) >= 6)
    driver.kill()
    driver.communicate()
    command_line.go()
    command_line("resume", "sleepy")
    result = command_line.result()
    assert result.outcome == "done"
    assert [instance.instance for instance in result.instances] == [instance.instance for instance in cut.instances]
    assert command_line.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("and_resumed", [False, True])
def test_ctrl_c_ends_cleanly_reports_the_best_so_far_and_can_be_resumed(
    command_line: CommandLine, and_resumed: bool
) -> None:
    command_line.hold(after=3)
    driver = command_line.start("run", "sleepy.yaml")
    command_line.wait_for(driver, lambda result: sum(acknowledged(result).values()) >= 4)
    interrupt(driver)
    output, errors = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 130, errors
    assert command_line.nothing_left()
    assert command_line.result().outcome == "cancelled"
    assert "score" in output
    if and_resumed:
        command_line.go()
        command_line("resume", "sleepy")
        assert command_line.result().outcome == "done"


@pytest.mark.long
def test_sweep_ends_what_a_killed_driver_left(command_line: CommandLine) -> None:
    command_line.hold(after=3)
    driver = command_line.start("run", "sleepy.yaml")
    command_line.wait_for(driver, lambda result: any(instance.running_s is not None for instance in result.instances))
    assert "nothing was left behind" in command_line("cleanup")[0], "a living driver's instances are its own"
    driver.kill()
    driver.communicate()
    assert "i-001 of sleepy" in command_line("cleanup")[0]
    assert command_line.nothing_left()


@pytest.mark.long
def test_bad_trials_cost_only_themselves(command_line: CommandLine) -> None:
    behaviours = "{type: grid, values: [good, raise, 'nan', hang, exit]}"
    command_line(
        *("run", "sleepy.yaml", "-s", f"search.space={{x: 1.0, behaviour: {behaviours}}}"),
        *("-s", "search.sampler={type: grid}", "-s", "search.metric=score"),
        *("-s", "search.scheduler={type: stages, stages: [{trials: 5, iterations: 2}, {trials: 2, iterations: 2}]}"),
        *("-s", "constraints.iteration_timeout=15s", "-s", "constraints.max_failures=0"),
    )
    result = command_line.result()
    assert result.outcome == "done"
    good, raised, nan, hung, exited = result.trials
    assert (good.status, good.iterations) == ("completed", 4)
    assert [trial.status for trial in (raised, nan, hung, exited)] == ["failed"] * 4
    assert "ValueError: the data is bad" in (raised.failure or "")
    assert "not_a_number" in (nan.failure or "")
    assert "hung" in (hung.failure or "")
    assert "died" in (exited.failure or "")
    assert "Traceback" in command_line.shows("logs", "sleepy", "1")
    assert command_line.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("entrypoint=nosuch:Sleepy", "no module 'nosuch'"),
        ("resources.checkpoints=/dev/null/here", "checkpoints cannot be written"),
        ("constraints.deadline=2s", "deadline 2s cannot be met"),
        ("resources.gpus_per_trial={min: 3, max: 3}", "no whole multiple"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(command_line: CommandLine, override: str, text: str) -> None:
    code = 3 if "deadline" in override else 2
    assert text in command_line.refuses("run", "sleepy.yaml", "-s", override, exit_code=code)
    assert command_line.processes() == []
    assert not (command_line.home / "experiments" / "sleepy" / "journal.db").exists()


@pytest.mark.long
def test_the_invariants_hold_over_a_whole_real_history(undisturbed: CommandLine) -> None:
    from rubberband.executor import Controller, ExperimentFolder, Journal, sqlite_url

    folder = ExperimentFolder(home=undisturbed.home, name="sleepy")
    journal = Journal(sqlite_url(folder.journal), folder.name)
    header = journal.header()
    assert header is not None
    controller = Controller(header.job)
    for _, event in journal.events():
        controller.handle(event)
        validate(controller)
    journal.close()


@pytest.mark.long
def test_a_run_without_a_profile_measures_one_and_says_so(command_line: CommandLine) -> None:
    _, errors = command_line("run", "sleepy.yaml", "-s", "profile=null", "-s", "resources.max_instances=1")
    assert "measuring one first" in errors
    kept = command_line.folder / "sleepy.profile.json"
    assert str(kept.name) in errors
    profile = json.loads(kept.read_text())
    assert profile["schema"] == "rubberband.profile/1"
    assert list(profile["seconds_per_iteration"]) == ["1"]
    assert min(profile["provision_delay_s"], profile["init_delay_s"], profile["trial_startup_s"]) > 0
    result = command_line.result()
    assert result.outcome == "done"
    assert result.profiling_cost_usd > 0
    settings = ("-s", "profile=null", "-s", "resources.max_instances=1")
    _, errors = command_line("run", "sleepy.yaml", "--new", *settings)
    assert "and used again; --profile-again measures it afresh" in errors
    assert "checked sleepy" not in errors
    assert "measuring" not in errors.replace("measures", "")
    assert command_line.result("sleepy-2").profiling_cost_usd == 0
    assert command_line.nothing_left()


@pytest.mark.long
def test_profile_says_what_it_measured_and_estimate_uses_it(command_line: CommandLine) -> None:
    text = (command_line.folder / "sleepy.yaml").read_text()
    without = "\n".join(line for line in text.splitlines() if not line.startswith("profile:"))
    (command_line.folder / "sleepy.yaml").write_text(without)
    assert "rubberband profile sleepy.yaml" in command_line.refused("estimate", "sleepy.yaml")
    output, errors = command_line("profile", "sleepy.yaml", "--iterations", "2", "-s", "resources.gpus_per_trial.max=2")
    assert "1 GPU: " in output
    assert "2 GPU: " in output
    assert "sleepy.profile.json" in errors
    assert json.loads(command_line("estimate", "sleepy.yaml", "-o", "json")[0])["feasible"]
    assert command_line.nothing_left()


@pytest.mark.long
def test_interrupted_while_measuring_it_saves_nothing_and_leaves_nothing(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "profile=null")
    # Beyond the driver: the head and its guards come first, then the instances.
    eventually(lambda: len(set(command_line.processes()) - {driver.pid}) >= 3, "the start of the head")
    interrupt(driver)
    _, errors = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 130, errors
    assert "cancelled" in errors
    assert not (command_line.folder / "sleepy.profile.json").exists()
    assert command_line.nothing_left()


@pytest.mark.long
def test_functions_that_return_early_are_complete_and_keep_their_rank(command_line: CommandLine) -> None:
    output, _ = command_line("run", "sleepy.yaml", "-s", "entrypoint=sleepy:patient")
    result = command_line.result()
    assert result.outcome == "done"
    statuses = sorted((trial.iterations, trial.status_text, trial.failures) for trial in result.trials)
    assert statuses == [(4, "stopped", 0)] * 2 + [(5, "completed (ended at 5)", 0)] * 2
    assert result.best is not None
    assert result.best.metrics["score"] == max(trial.metrics["score"] for trial in result.trials)
    assert "winner (ended at 5)" in output
    assert command_line.nothing_left()
