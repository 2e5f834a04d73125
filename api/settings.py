"""What the operator of the service decides, once, when it is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rubberband.values.kinds import KINDS

KIB, MIB = 1 << 10, 1 << 20
HOUR_S, DAY_S = 3600.0, 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """How much one caller, or all of them, may ask of the service."""

    body_bytes: int = 1 * MIB
    """Largest body of a request, counted as it comes in."""
    requests_per_s: float = 200.0
    """Of one token (or, without tokens, of one address), on average."""
    burst: int = 400
    """So many requests may come at once before the average counts."""
    concurrent: int = 64
    """Requests of one token (or address) that are served at the same time; streams of events are counted apart."""
    streams: int = 16
    """Streams of events of one token (or address) at the same time."""
    planning_s: float = 30.0
    """A plan that takes longer is given up."""
    max_running: int = 4
    """Experiments that run at the same time; more are queued."""
    max_cost_usd: float | None = None
    """The highest max_cost that a submission may have; with it, every submission must have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How long the service's store keeps what grows by itself. Experiments and their journals are kept whole."""

    events_s: float = 30 * DAY_S
    """Events of the feed, from when nobody was at work any more on their experiment and nothing changed there."""
    plans_s: float = 30 * DAY_S
    """Previews, from when they were made last."""
    plans: int = 10_000
    """So many at most, the newest."""
    answers_s: float = 1 * DAY_S
    """Idempotency keys, with the answers to their requests."""
    sessions_s: float = 12 * HOUR_S
    """So long a browser stays signed in."""
    sessions: int = 1000
    """Browsers that are signed in with one token; with more, those that have been for longest are signed out."""


KEEPING = Keeping()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The service as a whole. Nothing here comes from a request."""

    home: Path
    """Where experiments are kept, as RUBBERBAND_HOME."""
    store: str | None = field(default=None, repr=False)
    """SQLAlchemy URL of the store, journals included; None: SQLite files below `home`. It may hold a password."""
    host: str = "127.0.0.1"
    port: int = 8265
    auth: bool = False
    """Whether a token is required. Without one, everybody who reaches the port may do everything."""
    hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]")
    """Values of the Host header that are answered, without a port; `*` for any."""
    entrypoints: Sequence[str] = ()
    """The code that submissions may run: `module:attribute`, or `module:*`, which is what it defines itself. A
    request only names one of them."""
    code: Sequence[Path] = ()
    """Folders in which that code is found."""
    providers: Sequence[str] = ("local", "virtual")
    """Where submissions may run."""
    checkpoints: Sequence[str] = ()
    """URL prefixes under which a submission may keep its checkpoints; without any, only in the experiment's folder."""
    planners: int = 1
    """Processes that plan, and as many again where what they plan takes long."""
    auto_resume: bool = False
    """Whether submissions go on by themselves whose process is gone without a word."""
    limits: ServiceLimits = ServiceLimits()
    keeping: Keeping = KEEPING

    @property
    def rents(self) -> bool:
        """Whether submissions may run where instances are rented."""
        return any(KINDS[name].is_rented for name in self.providers)
