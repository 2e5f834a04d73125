"""The features: what hangs on the sockets of the core. The core imports none of them, and asks this table.

A new feature is a row. A contract of import-linter and the test of a core without them read the same rows. Rows name
modules and functions, which are imported when the core asks for them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from rubberband.errors import InputError

Socket = Literal[
    "division",  # takes the loop, and returns how it divides batches; None where the segment does not ask for it
    "batching",  # takes the loop, and returns how it changes the batch size, or None
    "layout",  # takes the loop, and returns how its model lies on the workers; None: whole on each
    "divided checkpoint",  # takes a file and those of other workers, and returns the content with whole tensors
    "memory",  # takes an experiment and folders; returns the memory of its trial's parameters, or why it is not known
    "meter",  # takes the segment and the waits of its loop, and returns what measures the machine's use, or None
    "loop",  # takes the trial and the segment, and returns another runner, or None
    "problem",  # takes an experiment, a profile and the plain problem; returns that of a model of its speed, or None
    "changes",  # takes a plan and its problem, and yields inputs of a model that an estimate's assumptions try
    "notes",  # takes an experiment, a profile and the GPUs of trials in a plan, and returns remarks
    "profile lines",  # takes a measured profile and the GPUs of an instance, and returns lines on its model
    "fit",  # takes measured points of batches, and returns a throughput and its mean relative error
    "noise scale",  # takes a profile, the GPUs of an instance and a noise scale, and returns the profile at that
    "recalibrated",  # takes a profile, seconds by GPUs that were seen and times of a worker, and returns its correction
    "updates",  # takes a profile and a number of asynchronous workers, and returns their updates per second
    "batches over time",  # takes a result, and returns a chart, or None
    "batches by GPUs",  # takes a result, and returns a chart, or None
    "use of trials",  # takes trials of a result, and returns a sentence on their use of machines; empty: not measured
    "use over time",  # takes a result and the number of a trial, and returns a chart, or None
    "throughput chart",  # takes a profile and the GPUs of trials in a plan, and returns a chart
    "mixture",  # takes the model of asynchronous workers and their speeds, and returns how much longer they take
    "attempt",  # class of the attempts of a trial with parameter servers
    "server",  # takes the entry point, the segment, its number and a listener, and serves parameters
    "servers",  # takes their number, and returns servers of this process
    "programs",  # module that reads, looks at and patches programs: `findings_of`, `look`, `patch_of`
    "program check",  # takes what `checking.py` passes, and returns what checks a program
    "runnable",  # takes an experiment, and raises InputError for words that no machine can keep
    "installed",  # takes an experiment, and raises InputError for words that this machine cannot keep
    "start",  # takes an experiment's folder, its `notify` and whether it is simulated; a context around its start
    "observers",  # takes an experiment's folder and its `RunSpec`, and returns threads that follow the journal
    "lender",  # takes a `ClusterRequest`, and returns the provider of what a pool lends
    "broker",  # takes a pool's folder, and returns requests to its process
    "fetch",  # module that plans what instances fetch, and fetches it: `planned`, `order_of`, `fetch`, `fetch_here`
    "listing",  # takes the address of a store and a home, and returns what a service lists there
]
"""Sockets of the core: each may get a function or class of a feature, which it calls so."""
LOOP: tuple[Socket, ...] = ("division", "batching", "layout", "loop")
"""Sockets of the training loop."""
Panel = Literal["Plan", "Run", "Results", "Service and EC2"]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature. Its modules and what it joins are named below `rubberband`."""

    name: str
    page: str
    """Its page of docs."""
    modules: tuple[str, ...]
    """Its folders and files, which the core does not import."""
    words: tuple[str, ...] = ()
    """Keys of an experiment file that ask for it, some with the value that does."""
    joins: Mapping[Socket, str] = field(default_factory=dict)
    """Socket -> `module:name`."""
    commands: Mapping[str, tuple[Panel, str, str]] = field(default_factory=dict)
    """Command -> panel of the help, module in `rubberband.commands`, and the first sentence of its help."""

    @property
    def is_here(self) -> bool:
        """Whether this installation has it."""
        return find_spec(f"rubberband.{self.modules[0]}") is not None


_TRAIN, _SERVERS, _RUN = "executor.training", "executor.training.asynchronous", "executor.run"
_HOST: Panel = "Service and EC2"

FEATURES = (
    Feature(
        "Uneven shares of a batch",
        "unequal-workers.md",
        (f"{_TRAIN}.balancing", "planner.balancing"),
        ("batch.balance",),
        {"division": f"{_TRAIN}.balancing:make_division"},
    ),
    Feature(
        "Elastic batches",
        "elastic-batches.md",
        (f"{_TRAIN}.goodput", "planner.goodput", "planning.elastic", "views.charts.batches"),
        ("batch.policy: goodput",),
        {
            "batching": f"{_TRAIN}.goodput.adaptation:make_batching",
            "problem": "planning.elastic:problem",
            "changes": "planning.elastic:changes",
            "profile lines": "planning.elastic:lines",
            "fit": "planner.goodput.fit:fitted",
            "noise scale": "planner.goodput.planning:at_noise_scale",
            "batches over time": "views.charts.batches:batches_over_time",
            "batches by GPUs": "views.charts.batches:batches_by_gpus",
        },
    ),
    Feature(
        "Use of machines",
        "results.md",
        (f"{_TRAIN}.metering", "views.charts.machine_use"),
        joins={
            "meter": f"{_TRAIN}.metering:make_meter",
            "use of trials": "views.charts.machine_use:use_of_trials",
            "use over time": "views.charts.machine_use:use_over_time",
        },
    ),
    Feature(
        "Sharded models",
        "sharded.md",
        (f"{_TRAIN}.sharding",),
        joins={
            "layout": f"{_TRAIN}.sharding.fsdp:make_layout",
            "divided checkpoint": f"{_TRAIN}.sharding.pieces:read_whole",
            "memory": f"{_TRAIN}.sharding.memory:memory_of",
        },
    ),
    Feature(
        "Asynchronous training",
        "asynchronous.md",
        (_SERVERS, "executor.ray.async_attempt", "planner.queueing", "planning.workers", "views.charts.throughput"),
        ("training.mode: async",),
        {
            "batching": f"{_SERVERS}.runner:make_batching",
            "loop": f"{_SERVERS}.runner:make_runner",
            "problem": "planning.workers:problem",
            "changes": "planning.workers:changes",
            "notes": "planning.workers:notes",
            "profile lines": "planning.workers:lines",
            "recalibrated": "planner.queueing:recalibrated",
            "updates": "planner.queueing:updates_per_s",
            "throughput chart": "views.charts.throughput:throughput_chart",
            "mixture": "planner.queueing:mixed_factor",
            "attempt": "executor.ray.async_attempt:AsyncAttempt",
            "server": f"{_SERVERS}.server:run_server",
            "servers": f"{_SERVERS}.server:ServerThreads",
        },
    ),
    Feature(
        "Programs",
        "commands.md",
        (f"{_TRAIN}.programs", "running.programs", "objective", "wandb_run"),
        ("entrypoint.command",),
        {"programs": "running.programs.findings", "program check": f"{_TRAIN}.programs.check:ProgramCheck"},
    ),
    Feature("Integrations", "integrations.md", ("integrations",)),
    Feature(
        "Trackers",
        "results.md",
        (f"{_RUN}.trackers",),
        ("track",),
        {"installed": f"{_RUN}.trackers:require_trackers", "observers": f"{_RUN}.trackers:tracker_threads"},
    ),
    Feature(
        "Notices",
        "results.md",
        (f"{_RUN}.notices",),
        ("notify",),
        {
            "runnable": f"{_RUN}.notices:require_addresses",
            "start": f"{_RUN}.notices:noticed_start",
            "observers": f"{_RUN}.notices:notice_threads",
        },
    ),
    Feature(
        "EC2",
        "ec2.md",
        ("cloud.aws", "commands.aws", "commands.cloud", "commands.on_head"),
        ("resources.provider: aws",),
        commands={
            "aws": (_HOST, "aws", "Set up an account of AWS, or check it."),
            "cloud": (_HOST, "cloud", "Manage the head and images; show prices."),
        },
    ),
    Feature("Fetched models and data", "finetune.md", ("cloud.fetch",), ("resources.fetch",), {"fetch": "cloud.fetch"}),
    Feature("Ray clusters", "clusters.md", ("cloud.ray_cluster",), ("resources.provider: ray",)),
    Feature(
        "Pools",
        "pool.md",
        ("cloud.pool", "planner.sharing", "pools", "commands.pool"),
        ("resources.pool",),
        {"lender": "cloud.pool:open_cluster", "broker": "cloud.pool:RemotePool"},
        {
            "simulate": ("Plan", "pool", "Simulate policies that share a pool."),
            "pool": (_HOST, "pool", "Manage a pool that experiments share."),
        },
    ),
    Feature(
        "Service",
        "service.md",
        ("api", "commands.serve"),
        joins={"listing": "api.store:open_store"},
        commands={
            "serve": (_HOST, "serve", "Serve previews, runs and the dashboard."),
            "token": (_HOST, "store", "Manage the tokens of a service."),
        },
    ),
    Feature(
        "Agents",
        "agents.md",
        ("mcp", "commands.mcp"),
        commands={"mcp": (_HOST, "mcp", "Let an agent plan and run experiments.")},
    ),
    Feature(
        "Backup",
        "production.md",
        ("running.backup", "running.restore", "commands.store"),
        commands={
            "backup": ("Results", "store", "Back up experiments, service and pools."),
            "restore": ("Results", "store", "Restore a home from a backup."),
        },
    ),
)


def feature_of(module: str) -> Feature | None:
    """Return the feature that a module of `rubberband` belongs to; None: it is of the core."""
    below = module.removeprefix("rubberband.")
    return next((each for each in FEATURES for own in each.modules if f"{below}.".startswith(f"{own}.")), None)


@cache
def _joined(socket: Socket) -> tuple[str, ...]:
    return tuple(f"rubberband.{each.joins[socket]}" for each in FEATURES if socket in each.joins and each.is_here)


def parts(socket: Socket) -> Iterator[Any]:
    """Return what the features that are here join to a socket, in the order of the table."""
    return map(pkgutil.resolve_name, _joined(socket))


def made_by(socket: Socket, *place: Any) -> Any:
    """Return what the first feature makes that has something to make there; None if none has."""
    made = (make(*place) for make in parts(socket))
    return next((each for each in made if each is not None), None)


def part(socket: Socket) -> Any:
    """Return what one feature joins to a socket. Raises InputError with its name if it is not here."""
    for found in parts(socket):
        return found
    raise next(_absent(each) for each in FEATURES if socket in each.joins)


def is_word_here(word: str) -> bool:
    """Return whether no feature that is absent has a word of the file."""
    return all(feature.is_here for feature in FEATURES if word in feature.words)


def require_features(words: Mapping[str, Any]) -> None:
    """Raise InputError for words of an experiment file that ask for a feature which is not here."""
    for feature in FEATURES:
        for word in feature.words:
            path, _, value = word.partition(": ")
            found: Any = words
            for key in path.split("."):
                found = found.get(key) if isinstance(found, Mapping) else None
            if found is not None and value in ("", str(found)) and not feature.is_here:
                raise _absent(feature, f"{word}: ")


def _absent(feature: Feature, word: str = "") -> InputError:
    return InputError(f"{word}{feature.name} (docs/{feature.page}) is not part of this installation")
