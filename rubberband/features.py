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
    "loop",  # takes the trial and the segment, and returns another runner, or None
    "attempt",  # class of the attempts of a trial with parameter servers
    "server",  # takes the entry point, the segment, its number and a listener, and serves parameters
    "servers",  # takes their number, and returns servers of this process
    "programs",  # module that reads programs: `is_program`, `program_of`, `booleans_of`
    "program check",  # takes what `checking.py` passes, and returns what checks a program
    "runnable",  # takes an experiment, and raises InputError for words that nobody could keep
    "installed",  # takes an experiment, and raises InputError for words that this machine cannot keep
    "start",  # takes an experiment's folder, its `notify` and whether it is simulated; a context around its start
    "observers",  # takes an experiment's folder and its `RunSpec`, and returns threads that follow the journal
    "lender",  # takes a `ClusterRequest`, and returns the provider of what a pool lends
    "broker",  # takes a pool's folder, and returns requests to its process
    "listing",  # takes the address of a store and a home, and returns what a service lists there
]
"""Sockets of the core: each may get a function or class of a feature, which it calls so."""
LOOP: tuple[Socket, ...] = ("division", "batching", "loop")
"""Sockets of the training loop."""
Panel = Literal["Plan", "Run", "Results", "Service and EC2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature."""

    name: str
    modules: tuple[str, ...]
    """Its folders and files below `rubberband`, which the core does not import."""
    page: str
    """Its page of docs."""
    words: tuple[str, ...] = ()
    """Keys of an experiment file that ask for it, some with the value that does."""
    joins: Mapping[Socket, str] = field(default_factory=dict)
    """Socket -> `module:name` below `rubberband`."""
    commands: Mapping[str, tuple[Panel, str, str]] = field(default_factory=dict)
    """Command -> panel of the help, module in `rubberband.commands`, and the first sentence of its help."""

    @property
    def is_here(self) -> bool:
        """Whether this installation has it."""
        return find_spec(f"rubberband.{self.modules[0]}") is not None


_TRAINING = "executor.training"

FEATURES = (
    Feature(
        name="Uneven shares of a batch",
        modules=(f"{_TRAINING}.balancing", "planner.balancing"),
        page="unequal-workers.md",
        words=("batch.balance",),
        joins={"division": f"{_TRAINING}.balancing:make_division"},
    ),
    Feature(
        name="Elastic batches",
        modules=(f"{_TRAINING}.goodput", "planner.goodput"),
        page="elastic-batches.md",
        words=("batch.policy: goodput",),
        joins={"batching": f"{_TRAINING}.goodput.adaptation:make_batching"},
    ),
    Feature(
        name="Asynchronous training",
        modules=(f"{_TRAINING}.asynchronous", "executor.ray.async_attempt", "planner.queueing"),
        page="asynchronous.md",
        words=("training.mode: async",),
        joins={
            "loop": f"{_TRAINING}.asynchronous.runner:make_runner",
            "attempt": "executor.ray.async_attempt:AsyncAttempt",
            "server": f"{_TRAINING}.asynchronous.server:run_server",
            "servers": f"{_TRAINING}.asynchronous.server:ServerThreads",
        },
    ),
    Feature(
        name="Programs",
        modules=(
            f"{_TRAINING}.command_runner",
            f"{_TRAINING}.function_process",
            f"{_TRAINING}.printed",
            f"{_TRAINING}.program",
            f"{_TRAINING}.program_check",
            f"{_TRAINING}.program_gang",
            "running.parser_probe",
            "running.program_options",
        ),
        page="commands.md",
        words=("entrypoint.command",),
        joins={"programs": "running.program_options", "program check": f"{_TRAINING}.program_check:ProgramCheck"},
    ),
    Feature(name="Integrations", modules=("integrations",), page="integrations.md"),
    Feature(
        name="Trackers",
        modules=("executor.run.trackers",),
        page="results.md",
        words=("track",),
        joins={
            "installed": "executor.run.trackers:require_trackers",
            "observers": "executor.run.trackers:tracker_threads",
        },
    ),
    Feature(
        name="Notices",
        modules=("executor.run.notices",),
        page="results.md",
        words=("notify",),
        joins={
            "runnable": "executor.run.notices:require_addresses",
            "start": "executor.run.notices:noticed_start",
            "observers": "executor.run.notices:notice_threads",
        },
    ),
    Feature(
        name="EC2",
        modules=("cloud.aws", "commands.aws", "commands.cloud", "commands.on_head"),
        page="ec2.md",
        words=("resources.provider: aws",),
        commands={
            "aws": ("Service and EC2", "aws", "Set up an account of AWS, or check it."),
            "cloud": ("Service and EC2", "cloud", "Manage the head and images; show prices."),
        },
    ),
    Feature(
        name="Ray clusters", modules=("cloud.ray_cluster",), page="clusters.md", words=("resources.provider: ray",)
    ),
    Feature(
        name="Pools",
        modules=("cloud.pool", "planner.sharing", "pools", "commands.pool"),
        page="pool.md",
        words=("resources.pool",),
        joins={"lender": "cloud.pool:open_cluster", "broker": "cloud.pool:RemotePool"},
        commands={
            "simulate": ("Plan", "pool", "Simulate policies that share a pool."),
            "pool": ("Service and EC2", "pool", "Manage a pool that experiments share."),
        },
    ),
    Feature(
        name="Service",
        modules=("api", "commands.serve"),
        page="service.md",
        joins={"listing": "api.store:open_store"},
        commands={
            "serve": ("Service and EC2", "serve", "Serve previews, runs and the dashboard."),
            "token": ("Service and EC2", "store", "Manage the tokens of a service."),
        },
    ),
    Feature(
        name="Backup",
        modules=("running.backup", "running.restore", "commands.store"),
        page="production.md",
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
    """Return what the first feature makes that the segment asks for; None if it asks for none."""
    made = (make(*place) for make in parts(socket))
    return next((each for each in made if each is not None), None)


def part(socket: Socket) -> Any:
    """Return what one feature joins to a socket. Raises InputError with its name if it is not here."""
    for found in parts(socket):
        return found
    raise next(_absent(each) for each in FEATURES if socket in each.joins)


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
