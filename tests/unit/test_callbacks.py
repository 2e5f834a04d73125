"""Callbacks and trackers: called in order, once, and never in the way of a run."""

from __future__ import annotations

import csv
import logging
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.api.body import require_allowed
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import Settings
from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder, FailureKind, Faults, JournalFollower, Result, session
from rubberband.executor.run import callbacks as module
from rubberband.executor.run import trackers
from rubberband.executor.run.callbacks import (
    Callback,
    CallbackThread,
    FailureInfo,
    ReportInfo,
    RunInfo,
    SyncInfo,
    Tracker,
    Translator,
    calling,
)
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from tests.builders.journalled_runs import recorded, words
from tests.builders.sessions import dying_after
from tests.builders.tables import cases
from tests.builders.virtual_runs import Killed
from tests.builders.waiting import eventually


class Kept(Callback):
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_experiment_start(self, run: RunInfo) -> None:
        self.calls.append(run)

    def on_trial_report(self, report: ReportInfo) -> None:
        self.calls.append(report)

    def on_sync(self, sync: SyncInfo) -> None:
        self.calls.append(sync)

    def on_end(self, result: Result) -> None:
        self.calls.append(result)

    def of(self, kind: type[Any]) -> list[Any]:
        return [call for call in self.calls if isinstance(call, kind)]


def run(home: Path, callbacks: Sequence[Callback] = (), **changes: Any) -> Result:
    experiment = rubberband.Experiment(**words(**changes))
    return run_experiment(
        experiment, ExperimentFolder(home=home, name=experiment.name), RunOptions(callbacks=callbacks)
    )


def cut_off(home: Path, events: int, **changes: Any) -> ExperimentFolder:
    """Make a virtual run whose driver was killed after `events` events."""
    experiment = rubberband.Experiment(**words(**changes))
    folder = ExperimentFolder(home=home, name=experiment.name)
    with pytest.raises(Killed):
        run_experiment(experiment, folder, RunOptions(view=dying_after(events)))
    return folder


def test_a_callback_hears_of_every_report_and_every_sync_in_order(tmp_path: Path) -> None:
    kept = Kept()
    result = run(tmp_path, [kept])
    first, *_, last = kept.calls
    assert isinstance(first, RunInfo)
    assert (first.name, first.metric, first.num_trials, first.is_resumed) == ("digits-sha", "accuracy", 27, False)
    assert first.experiment["search"]["metric"] == "accuracy"
    assert last == result
    text = {(report.trial, report.iterations): report for report in kept.of(ReportInfo)}
    curves = {(trial.trial, done): (at, metrics) for trial in result.trials for at, done, metrics in trial.curve}
    assert {key: (report.elapsed_s, report.metrics) for key, report in text.items()} == curves
    assert all(report.config == result.trials[report.trial].config for report in text.values())
    syncs = kept.of(SyncInfo)
    assert [sync.stage for sync in syncs] == [0, 1, 2, 3]
    assert [tuple(sorted(sync.promoted)) for sync in syncs[:-1]] == [stage.promoted for stage in result.stages[:-1]]
    assert syncs[-1].promoted == ()
    assert [sync.cost_usd for sync in syncs] == sorted(sync.cost_usd for sync in syncs)
    before = kept.calls[: kept.calls.index(syncs[0])]
    assert Counter(call.stage for call in before if isinstance(call, ReportInfo)) == {0: 27 * 2}


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "asha", "num_samples": 12, "grace_period": 1, "max_t": 9, "reduction_factor": 3},
        {"type": "hyperband", "max_t": 9, "reduction_factor": 3},
    ],
    ids=lambda scheduler: scheduler["type"],
)
def test_reports_of_other_schedulers_arrive_too(tmp_path: Path, scheduler: dict[str, Any]) -> None:
    kept = Kept()
    result = run(tmp_path, [kept], search={"scheduler": scheduler}, constraints={"deadline": "3h", "max_cost": 40})
    assert {(report.trial, report.iterations) for report in kept.of(ReportInfo)} == reports_of(result)
    assert all(report.config == result.trials[report.trial].config for report in kept.of(ReportInfo))
    assert kept.calls[-1] == result


def test_a_callback_hears_of_trials_that_failed_for_good(tmp_path: Path) -> None:
    failures: dict[tuple[int, int], FailureKind] = {(1, 1): "raised", (2, 1): "raised", (2, 2): "died"}
    found = recorded(faults=Faults(failures=failures))
    with closing(JournalFollower(found.put(tmp_path))) as follower:
        lines = [each.notice for each in Translator(follower).read()]
    (failed,) = [each for each in lines if isinstance(each, FailureInfo)]
    assert (failed.trial, failed.iterations) == (2, 0)
    assert failed.config == found.setup["configurations"][2]
    assert failed.failure


class Broken(Kept):
    """Raises at every report."""

    def on_trial_report(self, report: ReportInfo) -> None:
        super().on_trial_report(report)
        raise ValueError("out of paper")


def test_an_error_of_a_callback_is_logged_once_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, kept = Broken(), Kept()
    result = run(tmp_path, [broken, kept])
    assert result.outcome == "done"
    assert broken.calls == kept.calls
    (record,) = caplog.records
    assert "the callback Broken raised an error, which is shown once" in record.message
    assert "out of paper" in caplog.text


def test_a_class_in_place_of_a_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"callbacks: Kept is not an instance of .*; give Kept\(\)"):
        run(tmp_path, [Kept])  # type: ignore[list-item]
    with pytest.raises(InputError, match="int is not an instance of rubberband"):
        run(tmp_path, [3])  # type: ignore[list-item]
    assert not (tmp_path / "experiments").exists()


@pytest.mark.by_default(2)
@pytest.mark.parametrize("events", [1, 20, 120, 200])
def test_after_a_resume_only_new_reports_arrive(tmp_path: Path, events: int) -> None:
    folder, kept = cut_off(tmp_path, events), Kept()
    before = rubberband.load_result(folder.name, home=tmp_path)
    result = session.run(folder, callbacks=[kept])
    assert kept.calls[0].is_resumed
    assert len(kept.of(ReportInfo)) == sum(len(t.curve) for t in result.trials) - sum(
        len(t.curve) for t in before.trials
    )
    assert kept.calls[-1] == result


def test_the_thread_of_a_slow_callback_does_not_hold_up_the_driver(tmp_path: Path) -> None:
    opened, at_end = threading.Event(), threading.Event()

    class Slow(Kept):
        def on_experiment_start(self, run: RunInfo) -> None:
            assert opened.wait(60.0)

        def on_end(self, result: Result) -> None:
            at_end.set()

    def view(*_: Any) -> Any:
        def observe(_event: object, controller: Any) -> None:
            if controller.state.outcome is not None:
                opened.set()

        return [observe]

    experiment = rubberband.Experiment(**words())
    folder = ExperimentFolder(home=tmp_path, name=experiment.name)
    assert run_experiment(experiment, folder, RunOptions(view=view, callbacks=[Slow()])).outcome == "done"
    assert at_end.is_set()


class Flaky(Tracker):
    """Cannot be reached at first."""

    label = "the tracker flaky"

    def __init__(self, failures: int) -> None:
        self.failures, self.taken, self.written = failures, list[tuple[int, int]](), list[tuple[int, int]]()

    def on_trial_report(self, report: ReportInfo) -> None:
        self.taken.append((report.trial, report.iterations))

    def flush(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        self.written += self.taken
        self.taken = []


def test_a_tracker_that_cannot_be_reached_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    folder, flaky, state = recorded().put(tmp_path), Flaky(failures=3), dict[str, Any]()
    with calling([CallbackThread(folder, flaky, state=state)]):
        eventually(lambda: not flaky.failures, "three tries")
    result = rubberband.load_result(folder.name, home=tmp_path)
    assert sorted(flaky.written) == sorted((t.trial, done) for t in result.trials for _, done, _ in t.curve)
    assert [record.message for record in caplog.records] == [
        "the tracker flaky cannot be reached (ConnectionError: no route to host); the run continues, and it is tried "
        "again"
    ]
    for _ in range(2):  # also where the resume before had nothing new
        again = Flaky(failures=0)
        with calling([CallbackThread(folder, again, state=state)]):
            pass
        assert again.written == []


def test_a_tracker_that_stays_away_is_reported_with_the_way_to_its_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, state = recorded().put(tmp_path), dict[str, Any]()
    with calling([CallbackThread(folder, Flaky(failures=99), state=state)]):
        pass
    assert caplog.messages[-1].endswith("reports; `rubberband export --reports` has them")
    assert "seq" not in state


def test_a_tracker_that_hangs_does_not_keep_the_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()

    class Hanging(Flaky):
        def flush(self) -> None:
            free.wait(60.0)

    with calling([CallbackThread(recorded().put(tmp_path), Hanging(0), state={}, last_s=0.05)]):
        pass
    free.set()
    assert "the tracker flaky does not answer" in caplog.text


# The trackers of an experiment file


def reports_of(result: Result) -> set[tuple[int, int]]:
    return {(trial.trial, done) for trial in result.trials for _, done, _ in trial.curve}


def test_csv_has_each_report_once_also_after_a_resume(tmp_path: Path) -> None:
    folder = cut_off(tmp_path, 120, track="csv")
    result = session.run(folder)
    with open(folder.path / "csv" / "reports.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert Counter((int(row["trial"]), int(row["iterations"])) for row in rows) == Counter(reports_of(result))
    assert [name for name in rows[0] if name.startswith("config.")] == [f"config.{n}" for n in result.trials[0].config]


def test_csv_gets_the_columns_of_later_metrics(tmp_path: Path) -> None:
    made = trackers.Csv(trackers.CsvTracker(folder=str(tmp_path)), tmp_path, "")
    assert made.open({}) == -1
    report = ReportInfo(trial=0, config={}, iterations=1, metrics={"a": 1.0}, stage=0, elapsed_s=1.0, reported_at=1.0)
    made.on_experiment_start(RunInfo(name="x", metric="a", mode="max", num_trials=1, experiment={}, is_resumed=False))
    made.on_trial_report(report)
    made.flush()
    made.on_trial_report(replace(report, iterations=2, metrics={"a": 2.0, "b": 3.0}))
    made.flush()
    text = (tmp_path / "reports.csv").read_text()
    assert text == "trial,iterations,elapsed_s,stage,a,b\n0,1,1.0,0,1.0,\n0,2,1.0,0,2.0,3.0\n"


def tensorboard_events(folder: Path) -> Iterator[Any]:
    """The events of a folder's files, in order (TFRecord: length, checksum, data, checksum)."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.glob("events.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16


def test_tensorboard_shows_each_report_once_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    folder = cut_off(tmp_path, 120, track=["tensorboard"])
    (folder.path / "tracking" / "0-tensorboard.json").write_text("{}")  # as if nothing had been acknowledged
    result = session.run(folder)
    seen: Counter[tuple[int, int]] = Counter()
    starts = set[float]()
    for trial in result.trials:
        values: dict[int, float] = {}
        reported_s = {done: at_s for at_s, done, _ in trial.curve}
        for event in tensorboard_events(folder.path / "tensorboard" / f"trial-{trial.trial:04d}"):
            if event.HasField("session_log"):
                values = {step: value for step, value in values.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "accuracy":
                    seen[trial.trial, event.step] += 1
                    starts.add(round(event.wall_time - reported_s[event.step], 3))
                    values[event.step] = value.simple_value
        assert values == pytest.approx({done: metrics["accuracy"] for _, done, metrics in trial.curve}, rel=1e-5)
    assert seen.keys() == reports_of(result)
    assert max(seen.values()) == 2
    assert len(starts) == 1, "the times are those of the reports, whenever they were written"


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_mlflow_has_a_run_for_each_trial_and_continues_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path / 'ml.db'}"
    folder = cut_off(tmp_path, 120, track=[{"type": "mlflow", "uri": uri}])
    result = session.run(folder)
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    (found,) = [one for one in client.search_experiments() if one.name == "digits-sha"]
    runs = {run.data.tags.get("rubberband.trial"): run for run in client.search_runs([found.experiment_id])}
    parent = runs.pop(None)
    assert parent.info.status == "FINISHED"
    assert result.best is not None
    assert parent.data.metrics["best_accuracy"] == result.best.metrics["accuracy"]
    assert {int(trial) for trial in runs} == set(range(27))
    for trial in result.trials:
        run = runs[str(trial.trial)]
        assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", parent.info.run_id)
        assert run.data.params["optimizer"] == trial.config["optimizer"]
        history = client.get_metric_history(run.info.run_id, "accuracy")
        assert [(metric.step, metric.value) for metric in history] == [(n, m["accuracy"]) for _, n, m in trial.curve]


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_wandb_writes_a_run_for_each_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(tmp_path, track=[{"type": "wandb", "mode": "offline"}])
    assert len(list((tmp_path / "experiments" / "digits-sha" / "wandb").glob("offline-run-*"))) >= 27


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_wandb_without_a_login_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(InputError, match="wandb is not logged in on this machine; run `wandb login`"):
        run(tmp_path, track=["wandb"])


@cases("name", "remedy")
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setattr(trackers, "_is_installed", lambda _module: False)
    with pytest.raises(InputError, match=remedy):
        run(tmp_path, track=[name])
    assert not (tmp_path / "experiments").exists()


@cases("track", "error")
def test_wrong_words_are_refused(track: Any, error: str) -> None:
    with pytest.raises(InputError, match=error):
        rubberband.Experiment(**words(track=track))


def test_the_words_of_trackers_are_read_back() -> None:
    experiment = rubberband.Experiment(**words(track=["csv", {"type": "mlflow", "uri": "http://localhost:5000"}]))
    assert experiment.to_words()["track"] == [{"type": "csv"}, {"type": "mlflow", "uri": "http://localhost:5000"}]
    assert rubberband.Experiment(**experiment.to_words()) == experiment
    assert "track" not in rubberband.Experiment(**words()).to_words()


@cases("tracker", "key")
def test_a_service_says_where_runs_are_tracked(tracker: dict[str, str], key: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    asked = rubberband.Experiment(**words(track=[tracker]))
    with pytest.raises(HttpProblem, match="only the operator says where runs are tracked") as caught:
        require_allowed(asked, settings)
    assert caught.value.detail.startswith(f"{key}: ")
    require_allowed(rubberband.Experiment(**words(track=["csv", "mlflow"])), settings)


def test_a_message_of_a_tracker_has_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Wordy(Flaky):
        def flush(self) -> None:
            raise ConnectionError("no\nroute")

    caplog.set_level(logging.WARNING)
    with calling([CallbackThread(recorded().put(tmp_path), Wordy(1), state={})]):
        pass
    assert all("\n" not in message for message in caplog.messages)
