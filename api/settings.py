"""Settings that the operator chooses when the service starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rubberband.planner.sharing import Autoscaling
from rubberband.values.kinds import KINDS

MIB = 1 << 20
HOUR_S, DAY_S = 3600.0, 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits on requests and experiments. A caller is a token, or without tokens an address."""

    body_bytes: int = 1 * MIB
    """Largest body of a request, counted as it arrives."""
    requests_per_s: float = 200.0
    """Average rate of one caller."""
    burst: int = 400
    """Requests at once before the average rate applies."""
    concurrent: int = 64
    """Requests of one caller served at the same time, without streams of events."""
    streams: int = 16
    """Streams of events of one caller at the same time."""
    planning_s: float = 30.0
    """Time limit of one plan."""
    max_running: int = 4
    """Experiments that run at the same time; others are queued."""
    max_cost_usd: float | None = None
    """Highest max_cost of a submission; if set, every submission needs a max_cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How long the store keeps data that grows without end. Experiments and their journals are never deleted."""

    events_s: float = 30 * DAY_S
    """Events of the feed, from the end of their experiment."""
    plans_s: float = 30 * DAY_S
    """Previews, from when they were last planned."""
    plans: int = 10_000
    """Largest number of previews; the newest are kept."""
    answers_s: float = 1 * DAY_S
    """Idempotency keys and their answers."""
    sessions_s: float = 12 * HOUR_S
    """Time that a browser stays signed in."""
    sessions: int = 1000
    """Signed-in browsers of one token; beyond that, the oldest are signed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPool:
    """Pool of instances that the experiments of one provider share."""

    name: str
    provider: str
    """Experiments of this provider share it."""
    instances: int
    """Most instances at once, as far as its cap per hour pays for them."""
    gpus_per_instance: int
    max_usd_per_month: float | None = None
    """Cap on the bill of a calendar month (UTC)."""
    policy: str = "default"
    """Name of the sharing policy."""
    autoscaling: Autoscaling | None = None
    """Rule of the number of instances that the policy divides; None: all of them."""
    folder: str | None = None
    """Folder of the pool that is up, which lends its instances warm; None: each experiment starts its own."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Token's name -> share of its experiments relative to others; 1 where it is missing."""
    budgets_usd: Mapping[str, float] = field(default_factory=dict)
    """Token's name -> most that its experiments may cost in a calendar month (UTC)."""

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.instances * self.gpus_per_instance


KEEPING = Keeping()


def child_environment(store: str | None, without: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment for a child, less the variables `without`.

    The URL of the store goes there: arguments are public.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("RUBBERBAND_STORE", *without)}
    return kept if store is None else kept | {"RUBBERBAND_STORE": store}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the service. Nothing here comes from a request."""

    home: Path
    """Folder of experiments, as RUBBERBAND_HOME."""
    store: str | None = field(default=None, repr=False)
    """SQLAlchemy URL of the store, journals included; None: SQLite files below `home`. May hold a password."""
    host: str = "127.0.0.1"
    port: int = 8642
    auth: bool = False
    """Whether tokens are required. Without them, every client that reaches the port may do everything."""
    hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]")
    """Accepted values of the Host header, without a port; `*` for any."""
    entrypoints: Sequence[str] = ()
    """Code that submissions may run: `module:attribute`, or `module:*` for all that the module defines."""
    code: Sequence[Path] = ()
    """Folders that contain this code."""
    allow_commands: bool = False
    """Whether submissions may run commands: then every token is a shell on this machine."""
    env: Sequence[str] = ()
    """Variables that submissions may set for their trials."""
    secrets: Sequence[str] = ()
    """Variables of the service's own environment that submissions may hand to their trials."""
    notify: Sequence[str] = ()
    """Variables of the service's own environment with addresses that get a notice about each experiment."""
    providers: Sequence[str] = ("local", "virtual")
    """Providers that submissions may use."""
    checkpoints: Sequence[str] = ()
    """URLs and folders below which a submission may keep checkpoints; without any, only in the experiment's folder."""
    planners: int = 1
    """Planning processes, and as many again for plans that take long."""
    auto_resume: bool = False
    """Whether submissions restart automatically after their process was killed."""
    pool: SharedPool | None = None
    """Pool that the experiments share; None: each has instances of its own."""
    limits: ServiceLimits = ServiceLimits()
    keeping: Keeping = KEEPING
    clock: Callable[[], float] = field(default=time.time, repr=False, compare=False)
    """Unix time, for every age, month and promise of the service. Tests set another one."""

    @property
    def rents(self) -> bool:
        """Whether submissions may rent instances."""
        return any(KINDS[name].is_rented for name in self.providers)

    @property
    def has_cluster(self) -> bool:
        """Whether submissions may be on the Ray cluster of this machine."""
        return any(KINDS[name].is_borrowed for name in self.providers)
