"""The public measurements and workloads of Pollux (AdaptDL, OSDI '21 artifact), read as its authors' simulation does.

`TRACES_DIR/MODEL/` has `placements.csv`, `scalability.csv` and `validation-M.csv` for every total batch M.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rubberband.app.workload import Columns, Row, count, positive, read_rows, whole
from rubberband.errors import InputError
from rubberband.planner.sharing.traced import Application, Elasticity, Epochs, TracedJob

GPUS_PER_INSTANCE = 4
"""GPUs of the instances that were measured."""
_MAX_EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Epochs of the published workloads; of other models, all that were measured."""
_MAX_PER_GPU = {"yolov3": 8}
"""Samples that fit into memory, where fewer than the most measured."""
_ALONE = {"ncf": 32_768}
"""Total batch of the models that train on a single GPU and do not adapt it."""
_COLUMNS: Columns = {"name": str, "time": whole, "application": str, "num_replicas": count, "batch_size": count}
_STEP, _SYNC = "step_time", "sync_time"


def read_jobs(workload: Path, traces: Path, elasticity: Elasticity) -> list[TracedJob]:
    """Return the jobs of a workload file with the measurements in `traces`. Raises InputError in one line."""
    rows = read_rows(workload, _COLUMNS)
    if not traces.is_dir():
        raise InputError(f"{traces} is not a folder; give the folder of traces with one folder for each model")
    known = {name: _application(traces / name) for name in dict.fromkeys(str(row["application"]) for row in rows)}
    return [_job(row, known[str(row["application"])], elasticity) for row in rows]


def _job(row: Row, application: Application, elasticity: Elasticity) -> TracedJob:
    alone = elasticity != "rigid" and application.name in _ALONE
    own = _ALONE.get(application.name) if elasticity == "adaptive" else int(row["batch_size"])
    return TracedJob(
        name=str(row["name"]),
        submitted_at=float(row["time"]),
        application=application,
        elasticity=elasticity,
        target_gpus=int(row["num_replicas"]),
        target_batch=own,
        most_gpus=1 if alone else None,
    )


def _application(folder: Path) -> Application:
    """Read the measurements of one model."""
    step: Columns = {"local_bsz": positive, _STEP: positive, _SYNC: whole}
    rows = read_rows(folder / "placements.csv", {"placement": positive, **step})
    larger = read_rows(folder / "scalability.csv", {"num_nodes": positive, "num_replicas": positive, **step})
    placements: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    alike: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for row in rows:
        gpus = tuple(int(digit) for digit in f"{row['placement']:.0f}")
        seconds = float(row[_STEP]), float(row[_SYNC])
        placements.setdefault(gpus, []).append((float(row["local_bsz"]), *seconds))
        alike.setdefault((len(gpus), sum(gpus), float(row["local_bsz"])), []).append(seconds)
    steps = [(*key, *np.mean(seconds, axis=0)) for key, seconds in sorted(alike.items())]
    names = ("num_nodes", "num_replicas", "local_bsz", _STEP, _SYNC)
    steps += [tuple(float(row[name]) for name in names) for row in larger]
    sizes = [int(row["local_bsz"]) for row in rows]
    epochs = _epochs(folder)
    return Application(
        name=folder.name,
        max_epochs=min(_MAX_EPOCHS.get(folder.name, 1 << 30), *(len(run.progress) for run in epochs.values())),
        epochs=epochs,
        placements={gpus: np.asarray(sorted(each)) for gpus, each in placements.items()},
        steps=np.asarray(steps, dtype=np.float64),
        min_per_gpu=min(sizes),
        max_per_gpu=min(max(sizes), _MAX_PER_GPU.get(folder.name, max(sizes))),
        gpus_per_instance=GPUS_PER_INSTANCE,
    )


def _epochs(folder: Path) -> Mapping[int, Epochs]:
    found = {}
    columns: Columns = {"progress": positive, "iteration": positive, "grad_sqr": whole, "grad_var": whole}
    for path in folder.glob("validation-*.csv"):
        if match := re.fullmatch(r"validation-(\d+)\.csv", path.name):
            rows = read_rows(path, columns)
            found[int(match[1])] = Epochs(**{name: np.asarray([float(row[name]) for row in rows]) for name in columns})
    if not found:
        raise InputError(f"{folder} has no validation-M.csv; give the folder of traces with one folder for each model")
    return dict(sorted(found.items()))
