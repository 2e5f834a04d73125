"""Around real runs on local instances: what tune() shows and calls, trackers over kill -9, and the trained trial."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.builders.command_line import PATIENCE_S, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

SCRIPT = """
import json
import threading

import rubberband
from sleepy import Sleepy

calls = []


class Recorder(rubberband.Callback):
    def on_experiment_start(self, run):
        calls.append(["start", run.num_trials])

    def on_trial_report(self, report):
        calls.append(["report", report.trial, report.iterations])
        raise RuntimeError("a callback that fails")

    def on_sync(self, sync):
        calls.append(["sync", sync.stage, sorted(sync.promoted)])

    def on_end(self, result):
        calls.append(["end", result.outcome])


if __name__ == "__main__":
    experiment = rubberband.load_experiment("sleepy.yaml", ["track=[csv, tensorboard]"])
    result = rubberband.tune(experiment=experiment, callbacks=[Recorder()], check=False)
    best = result.load_best(Sleepy)
    frame = result.to_dataframe()
    print(json.dumps({
        "calls": calls,
        "curves": [[trial.trial, done] for trial in result.trials for _, done, _ in trial.curve],
        "best": [best.iterations, result.best.iterations, best.config == result.best.config],
        "cost_usd": [frame.cost_usd.sum(), result.actual_cost_usd],
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("rubberband ")],
    }))
"""


@pytest.mark.long
def test_tune_calls_back_shows_its_course_and_returns_the_trained_trial(command_line: CommandLine) -> None:
    (command_line.folder / "tuned.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "tuned.py"],
        cwd=command_line.folder,
        env=command_line.environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = json.loads(done.stdout)
    first, *calls, last = text["calls"]
    assert (first, last) == (["start", 4], ["end", "done"])
    assert sorted(call[1:] for call in calls if call[0] == "report") == sorted(text["curves"])
    assert [call[1] for call in calls if call[0] == "sync"] == [0, 1]
    iterations, reported, is_same = text["best"]
    assert (iterations, is_same) == (reported, True)
    shares_usd, bill_usd = text["cost_usd"]
    assert shares_usd == pytest.approx(bill_usd)
    assert text["threads"] == []
    assert done.stderr.count("the callback Recorder raised an error, which is shown once") == 1
    assert "plan: " in done.stderr
    assert sum(" SYNC " in line for line in done.stderr.splitlines()) == 2
    assert "nothing was charged" in command_line.shows("report", "sleepy")
    assert command_line.nothing_left()


@pytest.mark.long
def test_trackers_have_each_report_once_after_kill_9_and_a_resume(command_line: CommandLine) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=8s", "-s", "track=[csv, tensorboard]")
    command_line.wait_for(driver, lambda result: sum(trial.iterations for trial in result.trials) >= 12)
    driver.kill()
    driver.communicate()
    command_line("resume", "sleepy")
    result = command_line.result()
    reports = Counter((trial.trial, done) for trial in result.trials for _, done, _ in trial.curve)
    folder = command_line.home / "experiments" / "sleepy"
    with open(folder / "csv" / "reports.csv", newline="") as file:
        assert Counter((int(row["trial"]), int(row["iterations"])) for row in csv.DictReader(file)) == reports
    assert {path.name for path in (folder / "tensorboard").iterdir()} == {f"trial-{n:04d}" for n in range(4)}
