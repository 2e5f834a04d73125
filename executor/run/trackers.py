"""Trackers: the `track` of an experiment file, written by the driver to CSV, TensorBoard, MLflow or Weights & Biases.

Each is a `Tracker`, so that it runs in a thread of its own and continues after a resume. Its state for
that is kept in `tracking/` of the experiment's folder.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.result.result import Result
from rubberband.executor.run.callbacks import CallbackThread, ReportInfo, RunInfo, SyncInfo, Tracker
from rubberband.executor.training.run_spec import RunSpec
from rubberband.files import write_atomically
from rubberband.spec.experiment import Experiment
from rubberband.spec.observers import CsvTracker, MlflowTracker, TensorboardTracker, WandbTracker

LAST_S = 60.0
"""The longest wait for a tracker's last calls."""
_MOST_OPEN = 64
"""Files, or runs, that one tracker keeps open."""


def require_trackers(experiment: Experiment) -> None:
    """Raise InputError, with the command that installs it, for a tracker that cannot be used here."""
    needed = {"tensorboard": ("tensorboardX", "tensorboard"), "mlflow": ("mlflow",), "wandb": ("wandb",)}
    packages = {"tensorboard": "tensorboardX", "mlflow": "mlflow-skinny"}
    for tracker in experiment.track or ():
        modules = needed.get(tracker.type, ())
        if modules and not any(_is_installed(module) for module in modules):
            package = packages.get(tracker.type, tracker.type)
            raise InputError(
                f"track: {tracker.type} needs {modules[0]}; pip install {package}, or remove it from track"
            )
        if isinstance(tracker, WandbTracker):
            _require_login(tracker)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _require_login(words: WandbTracker) -> None:
    """Raise InputError where wandb would ask for a key: a driver has no terminal of its own."""
    if (words.mode or os.environ.get("WANDB_MODE", "online")) != "online":
        return
    import wandb

    if not wandb.login(prompt=False):
        raise InputError(
            "track: wandb is not logged in on this machine; run `wandb login`, set WANDB_API_KEY, or write "
            "{type: wandb, mode: offline}"
        )


class Csv(Tracker):
    """`reports.csv`, which is written anew from the journal after a resume."""

    label = "the tracker csv"

    def __init__(self, words: CsvTracker, folder: Path, _run: str) -> None:
        self._path = _place(words.folder, folder, "csv") / "reports.csv"
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []

    def open(self, state: dict[str, Any]) -> int:
        self._path = Path(state.setdefault("path", str(self._path)))
        return -1

    def on_experiment_start(self, run: RunInfo) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")
        self._columns = []

    def on_trial_report(self, report: ReportInfo) -> None:
        row = {"trial": report.trial, "iterations": report.iterations, "elapsed_s": round(report.elapsed_s, 3)}
        configuration = {f"config.{name}": _text(value) for name, value in report.config.items()}
        self._rows.append(row | {"stage": report.stage} | dict(report.metrics) | configuration)

    def flush(self) -> None:
        columns = list(dict.fromkeys([*self._columns, *(name for row in self._rows for name in row)]))
        if columns != self._columns and self._columns:
            with open(self._path, newline="", encoding="utf-8") as file:
                self._rows = [*csv.DictReader(file), *self._rows]
        mode = "a" if columns == self._columns else "w"
        with open(self._path, mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if mode == "w" and columns:
                writer.writeheader()
            writer.writerows(self._rows)
        self._columns, self._rows = columns, []


class _LastUsed:
    """The files or runs of trials that were used last; others are closed, and opened again when they are needed."""

    def __init__(self, make: Callable[[ReportInfo], Any], close: Callable[[Any], None]) -> None:
        self._make, self._close = make, close
        self._open: OrderedDict[int, Any] = OrderedDict()

    def of(self, report: ReportInfo) -> Any:
        """Return that of a report's trial."""
        if report.trial not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self.close(next(iter(self._open)))
            self._open[report.trial] = self._make(report)
        self._open.move_to_end(report.trial)
        return self._open[report.trial]

    def close(self, trial: int) -> None:
        """Close that of a trial, if it is open."""
        if trial in self._open:
            self._close(self._open.pop(trial))

    def each(self) -> list[Any]:
        """Return all that are open."""
        return list(self._open.values())

    def close_all(self) -> None:
        """Close every one."""
        for trial in list(self._open):
            self.close(trial)


class _Configurations:
    """The configurations of trials, to see where one has taken over another's checkpoint and changed its own."""

    def __init__(self) -> None:
        self._known: dict[int, Mapping[str, Any]] = {}

    def changed(self, report: ReportInfo) -> dict[str, float]:
        """Return the numbers of a trial's configuration under `config.NAME`; empty where it is as before."""
        before = self._known.setdefault(report.trial, report.config)
        self._known[report.trial] = report.config
        if before == report.config:
            return {}
        numbers = {name: value for name, value in report.config.items() if isinstance(value, int | float)}
        return {f"config.{name}": float(value) for name, value in numbers.items()}


class Tensorboard(Tracker):
    """Event files, a folder `trial-NNNN` for each trial: metrics by iteration, and configurations as hyperparameters.

    A writer hides the steps from its first one on that earlier files of its folder hold: those of a trial that went
    back, or that a dead driver had written and not acknowledged.
    """

    label = "the tracker tensorboard"

    def __init__(self, words: TensorboardTracker, folder: Path, _run: str) -> None:
        self._folder = _place(words.folder, folder, "tensorboard")
        self._writers = _LastUsed(self._writer, lambda writer: writer.close())
        self._done: dict[int, int] = {}
        self._configurations = _Configurations()

    def open(self, state: dict[str, Any]) -> int:
        self._folder = Path(state.setdefault("folder", str(self._folder)))
        return super().open(state)

    def _writer(self, report: ReportInfo) -> Any:
        module = "tensorboardX" if _is_installed("tensorboardX") else "torch.utils.tensorboard"
        library = importlib.import_module(module)
        place = self._folder / f"trial-{report.trial:04d}"
        writer = library.SummaryWriter(str(place), purge_step=report.iterations, filename_suffix=f".{time.time_ns()}")
        if report.trial not in self._done:
            hparams = importlib.import_module(f"{module}.summary").hparams
            values = {name: _text(value) for name, value in report.config.items()}
            for summary in hparams(values, dict(report.metrics)):
                writer.file_writer.add_summary(summary)
        return writer

    def on_trial_report(self, report: ReportInfo) -> None:
        if report.iterations <= self._done.get(report.trial, 0):
            self._writers.close(report.trial)
        writer = self._writers.of(report)
        for name, value in (dict(report.metrics) | self._configurations.changed(report)).items():
            writer.add_scalar(name, value, report.iterations, walltime=report.reported_at)
        self._done[report.trial] = report.iterations

    def on_sync(self, sync: SyncInfo) -> None:
        for trial in set(sync.trials) - set(sync.promoted):
            self._writers.close(trial)

    def flush(self) -> None:
        for writer in self._writers.each():
            writer.flush()

    def close(self) -> None:
        self._writers.close_all()


class Mlflow(Tracker):
    """A run of MLflow for each trial, below one of the whole experiment; ids are kept, so that a resume continues."""

    label = "the tracker mlflow"

    def __init__(self, words: MlflowTracker, _folder: Path, _run: str) -> None:
        self._words = words
        self._state: dict[str, Any] = {}
        self._client: Any = None
        self._metrics: dict[str, list[Any]] = {}
        """Run -> metrics to be sent."""
        self._reached: dict[str, tuple[int, int]] = {}
        """Run -> step and milliseconds of its latest metric, of runs that a driver before this one has begun."""
        self._run: RunInfo | None = None
        self._ended: list[tuple[str, str]] = []
        """Runs to be ended, with their status."""
        self._over: set[int] = set()
        self._configurations = _Configurations()

    def open(self, state: dict[str, Any]) -> int:
        self._state = state
        return super().open(state)

    def on_experiment_start(self, run: RunInfo) -> None:
        import mlflow
        from mlflow.tracking import MlflowClient

        state, self._run = self._state, run
        state.setdefault("uri", self._words.uri or mlflow.get_tracking_uri())
        self._client = MlflowClient(tracking_uri=state["uri"])
        if "experiment" not in state:
            name = self._words.experiment or run.name
            existing = self._client.get_experiment_by_name(name)
            state["experiment"] = existing.experiment_id if existing else self._client.create_experiment(name)
        if "parent" not in state:
            state["parent"] = self._create(run.name, {"rubberband.experiment": run.name})
        elif run.is_resumed:
            self._client.set_terminated(state["parent"], "RUNNING")

    def _create(self, name: str, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(self._state["experiment"], run_name=name, tags=dict(tags))
        return str(run.info.run_id)

    def _run_of(self, report: ReportInfo) -> str:
        from mlflow.entities import Param

        runs = self._state.setdefault("runs", {})
        trial = str(report.trial)
        if trial not in runs:
            assert self._run is not None
            tags = {"mlflow.parentRunId": self._state["parent"], "rubberband.trial": trial}
            runs[trial] = self._create(f"{self._run.name} {report.trial}", tags)
            params = [Param(str(name), str(_text(value))[:6000]) for name, value in report.config.items()]
            self._client.log_batch(runs[trial], params=params[:100])
            self._reached[runs[trial]] = (0, 0)
        return str(runs[trial])

    def on_trial_report(self, report: ReportInfo) -> None:
        from mlflow.entities import Metric

        run = self._run_of(report)
        at_ms = round(1000.0 * report.reported_at)
        if run not in self._reached:
            self._reached[run] = self._latest(run)
        step, last_ms = self._reached[run]
        if report.iterations <= step and at_ms <= last_ms:
            return
        waiting = self._metrics.setdefault(run, [])
        values = dict(report.metrics) | self._configurations.changed(report)
        waiting += [Metric(name, value, at_ms, report.iterations) for name, value in values.items()]

    def _latest(self, run: str) -> tuple[int, int]:
        """Return step and milliseconds of the latest metric of a run: a dead driver may not have acknowledged it."""
        assert self._run is not None
        history = self._client.get_metric_history(run, self._run.metric)
        return max(((metric.step, metric.timestamp) for metric in history), default=(0, 0))

    def on_sync(self, sync: SyncInfo) -> None:
        for trial in set(sync.ranking) - set(sync.promoted):
            self._end(trial, "FINISHED")

    def _end(self, trial: int, status: str) -> None:
        if trial not in self._over and str(trial) in self._state.get("runs", {}):
            self._over.add(trial)
            self._ended.append((self._state["runs"][str(trial)], status))

    def on_end(self, result: Result) -> None:
        from mlflow.entities import Metric

        status = {"done": "FINISHED", "failed": "FAILED"}.get(result.outcome, "KILLED")
        of_trials = {"failed": "FAILED", "stopped": "FINISHED", "completed": "FINISHED"}
        for trial in result.trials:
            self._end(trial.trial, of_trials.get(trial.status, status))
        self._ended.append((self._state["parent"], status))
        summary = {"cost_usd": result.whole_cost_usd, "jct_s": result.actual_jct_s}
        if result.best is not None:
            summary[f"best_{result.metric}"] = result.best.metrics[result.metric]
        at_ms = round(1000.0 * time.time())
        self._metrics.setdefault(self._state["parent"], []).extend(
            Metric(name, value, at_ms, 0) for name, value in summary.items()
        )

    def flush(self) -> None:
        for run in list(self._metrics):
            while self._metrics[run]:
                self._client.log_batch(run, metrics=self._metrics[run][:1000])
                del self._metrics[run][:1000]
            del self._metrics[run]
        while self._ended:
            self._client.set_terminated(*self._ended[0])
            del self._ended[0]


class Wandb(Tracker):
    """A run of Weights & Biases for each trial, in the group of the experiment; ids follow from the experiment's."""

    label = "the tracker wandb"

    def __init__(self, words: WandbTracker, folder: Path, run: str) -> None:
        self._words, self._folder, self._id = words, folder, run
        self._run: RunInfo | None = None
        self._runs = _LastUsed(self._open_run, lambda run: run.finish())
        self._configurations = _Configurations()

    def on_experiment_start(self, run: RunInfo) -> None:
        self._run = run

    def _open_run(self, report: ReportInfo) -> Any:
        import wandb

        assert self._run is not None
        words = self._words
        return wandb.init(
            project=words.project or os.environ.get("WANDB_PROJECT") or "rubberband",
            entity=words.entity,
            mode=words.mode,
            dir=str(self._folder),
            group=self._run.name,
            name=f"{self._run.name}-{report.trial}",
            id=f"{self._run.name}-{self._id}-{report.trial}"[-128:],
            resume="allow" if (words.mode or os.environ.get("WANDB_MODE", "online")) == "online" else None,
            config=dict(report.config),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def on_trial_report(self, report: ReportInfo) -> None:
        # wandb drops steps that it has, so nothing is there twice.
        run, changed = self._runs.of(report), self._configurations.changed(report)
        if changed:
            run.config.update(dict(report.config), allow_val_change=True)
        run.log(dict(report.metrics) | changed, step=report.iterations)

    def on_sync(self, sync: SyncInfo) -> None:
        for trial in set(sync.trials) - set(sync.promoted):
            self._runs.close(trial)

    def close(self) -> None:
        self._runs.close_all()


TRACKERS: Mapping[str, Callable[[Any, Path, str], Tracker]] = {
    "csv": Csv,
    "tensorboard": Tensorboard,
    "mlflow": Mlflow,
    "wandb": Wandb,
}


def _place(written: str | None, folder: Path, name: str) -> Path:
    return folder / name if written is None else Path(written).expanduser().absolute()


def _text(value: Any) -> Any:
    """Return a value of a configuration as it is written in a table."""
    return value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False, default=str)


def tracker_threads(folder: ExperimentFolder, spec: RunSpec) -> list[CallbackThread]:
    """Return the threads of an experiment's trackers. Raises InputError if one is not installed."""
    require_trackers(spec.experiment)
    threads = []
    for number, tracker in enumerate(spec.experiment.track or ()):
        file = folder.path / "tracking" / f"{number}-{tracker.type}.json"
        state: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            state = json.loads(file.read_text(encoding="utf-8"))
        made = TRACKERS[tracker.type](tracker, folder.path, spec.run)
        threads.append(CallbackThread(folder, made, state=state, save=partial(_save, file, state), last_s=LAST_S))
    return threads


def _save(file: Path, state: Mapping[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, json.dumps(state).encode(), durable=False)
