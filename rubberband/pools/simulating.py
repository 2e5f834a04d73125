"""Simulates a workload on a pool, under one policy after another.

A workload file is a CSV with one job per row; the profile of each kind of job is beside it. `read_traces` reads the
public measurements and workloads of Pollux (AdaptDL, OSDI '21 artifact), as its authors' simulation does:
`TRACES_DIR/MODEL/` has `placements.csv`, `scalability.csv` and `validation-M.csv` for every total batch M.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from rubberband.cloud.catalogue import catalogue, nearest_types
from rubberband.errors import InputError
from rubberband.planner.goodput.planning import adapted
from rubberband.planner.sharing import Autoscaling, Capacity, Counting, make_policy
from rubberband.planner.sharing.jobs import RESIZE_S, Application, CurveJob, Elasticity, Epochs, TracedJob
from rubberband.planner.sharing.simulation import INTERVAL_S, Outcome, SimulatedJob, simulate
from rubberband.spec.pool import Autoscale, PoolFile
from rubberband.spec.profile_file import load_profile
from rubberband.units import counted, parse_duration
from rubberband.values.profile import Profile

Row = Mapping[str, str | float]
Columns = Mapping[str, Callable[[str], str | float]]
"""Name of a column -> the reader of its cells, which raises ValueError or InputError."""


def whole(text: str) -> float:
    """Return a number that is not negative."""
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise ValueError("a number >= 0")
    return value


def positive(text: str) -> float:
    """Return a number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise ValueError("a number above 0")
    return value


def count(text: str) -> float:
    """Return a whole number from 1 up."""
    value = int(text)
    if value < 1:
        raise ValueError("a whole number from 1 up")
    return value


def read_rows(path: Path, columns: Columns, optional: Columns | None = None) -> list[Row]:
    """Return the rows of a CSV file, at least one; columns that are not named are left out.

    Raises InputError, with the line, for a file that cannot be read, a missing column or a wrong cell.
    """
    readers = {**columns, **(optional or {})}
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            table = csv.DictReader(stream)
            missing = [name for name in columns if name not in (table.fieldnames or ())]
            if missing:
                raise InputError(f"{path} has no column {missing[0]!r}; {_first_line(columns)}")
            rows: list[Row] = []
            for line, cells in enumerate(table, start=2):
                written = {name: (cells.get(name) or "").strip() for name in readers}
                asked = [name for name, text in written.items() if text or name in columns]
                rows.append({name: _cell(f"{path}, line {line}", name, readers[name], written[name]) for name in asked})
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; check the path") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a readable CSV file") from None
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{path} is not a CSV file; {_first_line(columns)}") from None
    if not rows:
        raise InputError(f"{path} has no rows; write one for each job")
    return rows


def _first_line(columns: Columns) -> str:
    return f"its first line must name {', '.join(columns)}"


def _cell(where: str, name: str, read: Callable[[str], str | float], text: str) -> str | float:
    if not text:
        raise InputError(f"{where}: {name} is empty; fill it in")
    try:
        return read(text)
    except InputError as error:
        raise InputError(f"{where}: {name}: {error}") from None
    except ValueError as error:
        asked = str(error) if str(error).startswith("a ") else "a number"
        raise InputError(f"{where}: {name}={text!r} is not {asked}; correct it") from None


COLUMNS: Columns = {"at": parse_duration, "name": str, "kind": str, "iterations": positive}
OPTIONAL: Columns = {"gpus": count, "min_gpus": count, "weight": positive}


def read_jobs(path: Path, gpus: int, gpus_per_instance: int, elasticity: Elasticity) -> list[CurveJob]:
    """Return the jobs of a workload on a pool of `gpus` GPUs; KIND.json beside it is the profile of each kind.

    Raises InputError in one line.
    """
    rows = _jobs_of(path, COLUMNS, OPTIONAL)
    profiles = {str(row["kind"]): load_profile(path.parent / f"{row['kind']}.json") for row in rows}
    curves = {kind: curve_of(profile, gpus, gpus_per_instance, elasticity) for kind, profile in profiles.items()}
    jobs = [_job(row, curves[str(row["kind"])], profiles[str(row["kind"])], gpus, elasticity) for row in rows]
    for line, job in enumerate(jobs, start=2):
        if job.min_gpus > gpus:
            needs = f"job {job.name!r} needs {counted(job.min_gpus, 'GPU')}, and the pool has {gpus}"
            raise InputError(f"{path}, line {line}: {needs}; leave it out, or use a larger pool")
    return jobs


def _jobs_of(path: Path, columns: Columns, optional: Columns | None = None) -> list[Row]:
    """Return the rows of a workload. Raises InputError for two jobs of one name, too."""
    rows = read_rows(path, columns, optional)
    names = [str(row["name"]) for row in rows]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path} has two jobs with the name {twice!r}; name each job once")
    return rows


def curve_of(profile: Profile, gpus: int, gpus_per_instance: int, elasticity: Elasticity) -> list[float]:
    """Return the seconds of an iteration with 1, 2, … GPUs; inf below the smallest measured number."""
    sizes = [size for size in range(1, gpus + 1) if size >= profile.smallest_gpus]
    if not sizes:
        return [math.inf] * gpus
    if profile.goodput is not None and elasticity == "adaptive":
        sizes_of_batch = [size for size in sizes if size <= profile.goodput.limits.max]
        profile = adapted(profile, gpus_per_instance, sizes_of_batch or sizes[:1])
    else:
        profile = replace(profile, goodput=None)
    return [math.inf] * (gpus - len(sizes)) + [profile.iteration_s(size) for size in sizes]


def _job(row: Row, curve: list[float], profile: Profile, gpus: int, elasticity: Elasticity) -> CurveJob:
    most = int(row.get("gpus", gpus))
    least = most if elasticity == "rigid" else int(row.get("min_gpus", 1))
    return CurveJob(
        name=str(row["name"]),
        submitted_at=float(row["at"]),
        kind=str(row["kind"]),
        seconds=[float(row["iterations"]) * each for each in curve],
        resize_s=profile.startup_s(profile.smallest_gpus) or RESIZE_S,
        min_gpus=max(least, profile.smallest_gpus),
        max_gpus=most,
        weight=float(row.get("weight", 1.0)),
    )


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


def read_traces(
    workload: Path,
    traces: Path,
    elasticity: Elasticity,
    first_gpus: int = 1,
    known: dict[str, Application] | None = None,
) -> list[TracedJob]:
    """Return the jobs of a workload file with the measurements in `traces`; each begins with at most `first_gpus` GPUs.

    Models in `known` are not read again, and it gets the others: what they have computed is then computed once.
    Raises InputError in one line.
    """
    rows = _jobs_of(workload, _COLUMNS)
    if not traces.is_dir():
        found = f"{traces} is a file" if traces.exists() else f"there is no folder {traces}"
        raise InputError(f"{found}; give the folder of traces, which has a folder for each model")
    known = {} if known is None else known
    for name in dict.fromkeys(str(row["application"]) for row in rows):
        known[name] = known.get(name) or read_application(traces / name)
    return [_traced_job(row, known[str(row["application"])], elasticity, first_gpus) for row in rows]


def _traced_job(row: Row, application: Application, elasticity: Elasticity, first_gpus: int) -> TracedJob:
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
        first_gpus=first_gpus,
    )


def read_application(folder: Path) -> Application:
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


ELASTICITY: Mapping[str, Elasticity] = {"tiresias": "rigid", "optimus": "fixed_batch"}
"""Policy -> what it may change of a job; the others may change all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Outcomes of one workload on one pool."""

    pool: str
    workload: str
    capacity: Capacity
    usd_per_hour: float
    """Price of an instance of the pool."""
    autoscaling: Autoscaling | None = None
    interference: float = 0.0
    """Share of its speed that a gang loses while it spans instances and shares one with another such gang."""
    share_machines: bool = False
    """Whether policies that avoid this were kept from it."""
    outcomes: Mapping[str, Outcome]
    """Policy -> outcome, in the order asked."""

    def to_json(self) -> dict[str, object]:
        """Return the figures as JSON values."""
        return {
            "schema": "rubberband.simulation/1",
            "pool": self.pool,
            "workload": self.workload,
            "gpus": self.capacity.gpus,
            "autoscale": None if self.autoscaling is None else asdict(self.autoscaling),
            "interference": self.interference,
            "share_machines": self.share_machines,
            "policies": {
                name: {
                    **outcome.summary(self.usd_per_hour),
                    "sizes": [{"at": at, "instances": instances} for at, instances in outcome.sizes],
                }
                for name, outcome in self.outcomes.items()
            },
        }


def simulated(
    pool: PoolFile,
    file: Path,
    policies: Sequence[str],
    traces: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    *,
    interference: float = 0.0,
    share_machines: bool = False,
) -> Simulation:
    """Run the workload in `file` under every policy; with `traces` it is one of AdaptDL's.

    `progress` gets a line after each policy. Raises InputError for a policy, pool, file or interference that cannot be
    used.
    """
    if not 0.0 <= interference < 1.0:
        raise InputError(
            f"interference={interference:g} is not a number from 0 to below 1; write 0.25 for gangs that train at 75 % "
            "of their speed"
        )
    capacity, usd_per_hour = _capacity(pool)
    made = {name: make_policy(name) for name in policies}
    if share_machines:
        made = {
            name: replace(each, share_machines=True) if isinstance(each, Counting) else each
            for name, each in made.items()
        }
    autoscaling = autoscaling_of(pool.autoscale)
    outcomes: dict[str, Outcome] = {}
    models: dict[str, Application] = {}
    for name, policy in made.items():
        elasticity = ELASTICITY.get(name.partition(":")[0], "adaptive")
        jobs: Sequence[SimulatedJob]
        if traces is None:
            jobs = read_jobs(file, capacity.gpus, capacity.gpus_per_instance, elasticity)
        else:
            first_gpus = policy.first_gpus if isinstance(policy, Counting) else 1
            jobs = read_traces(file, traces, elasticity, first_gpus, models)
        interval_s = None if traces is None else INTERVAL_S
        outcomes[name] = simulate(
            jobs, capacity, policy, interval_s=interval_s, autoscaling=autoscaling, interference=interference
        )
        progress(f"{name}: {counted(len(jobs), 'job')} simulated in {outcomes[name].cpu_s:.1f} CPU s")
    return Simulation(
        pool=pool.name,
        workload=file.name,
        capacity=capacity,
        usd_per_hour=usd_per_hour,
        autoscaling=autoscaling,
        interference=interference,
        share_machines=share_machines,
        outcomes=outcomes,
    )


def autoscaling_of(autoscale: Autoscale | None) -> Autoscaling | None:
    """Return the rule of a pool's words."""
    return None if autoscale is None else Autoscaling(lower=autoscale.lower, upper=autoscale.upper)


def _capacity(pool: PoolFile) -> tuple[Capacity, float]:
    """Return the instances that a pool pays for at once, and what one costs per hour."""
    row = None
    if pool.instance_type is not None and (pool.gpus_per_instance is None or pool.price_usd_per_hour is None):
        row = catalogue().get(pool.instance_type)
    gpus = pool.gpus_per_instance if pool.gpus_per_instance is not None else 0 if row is None else row.gpus
    if not gpus and row is None:
        near = nearest_types(str(pool.instance_type), catalogue(), "or set gpus_per_instance")
        raise InputError(f"the catalogue does not know {pool.instance_type!r}; {near}")
    if not gpus:
        raise InputError(f"instance_type {pool.instance_type!r} has no GPUs; choose another, or set gpus_per_instance")
    price = pool.price_usd_per_hour
    if price is None:
        price = 0.0 if row is None else row.prices_usd_per_hour.get(pool.region, 0.0)
    instances = pool.model_copy(update={"price_usd_per_hour": price}).instances_at_once()
    return Capacity(instances=instances, gpus_per_instance=gpus), price
