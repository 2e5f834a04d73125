"""Events of a pool, and the files that keep them: the journal, written before anything that costs money, and leases.

A *machine* is an instance that the pool rents from its provider. A *slice* is what one experiment holds of it: some or
all of its GPUs, which that experiment sees as an instance under a name of its own. A *tenant* is one run of an
experiment. Times are seconds on the pool's clock (Unix time on real ones).
"""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rubberband.errors import JournalError
from rubberband.files import write_atomically
from rubberband.values.plan import Market


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Size, price and caps of a pool."""

    instances: int
    """Most machines at any moment."""
    gpus: int
    """GPUs of a machine."""
    market: Market = "on_demand"
    """With `spot`, machines are rented on the market for which a tenant asks."""
    price_usd_per_hour: float = 0.0
    """Price of a machine on demand, with its side costs; that of its purchase replaces the rent in it."""
    side_usd_per_hour: float = 0.0
    """The share of volumes and addresses in the price."""
    once_usd: float = 0.0
    """Cost of each start of a machine; the pool's, not an experiment's."""
    minimum_billed_s: float = 0.0
    """The provider bills a machine for at least this long."""
    idle_s: float = 300.0
    """A machine that no tenant holds is released after this time."""
    lease_s: float = 60.0
    """Time that a machine outlives a broker that died."""
    release_margin_s: float = 3.0
    """Longest time to release a machine, with retries; the caps reserve it."""
    autoscales: bool = False
    """Whether the number of machines in use follows their efficiency (`Scaled`)."""
    max_usd_per_hour: float | None = None
    max_usd_per_month: float | None = None
    """Cap on the bill of a calendar month (UTC)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """Something that has happened, at the instant `at`."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(PoolEvent):
    """A broker has taken the pool over, with these limits from now on."""

    limits: PoolLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted(PoolEvent):
    """All that happened before, as the state that it led to: the first line of a journal that was compacted."""

    state: Mapping[str, Any]
    """See `PoolState.to_json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRequested(PoolEvent):
    """A tenant asks for some GPUs of one machine, under a name of its own."""

    tenant: str
    experiment: str
    instance: str
    gpus: int
    lease_s: float
    """Length of the first lease, from when the slice runs."""
    market: Market = "on_demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReturned(PoolEvent):
    """A tenant gives a slice back, or withdraws its request."""

    tenant: str
    instance: str
    fault: str = ""
    """Why its machine is of no use to the tenant, if the machine is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRefused(PoolEvent):
    """A request that waits cannot be met any more."""

    tenant: str
    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired(PoolEvent):
    """The tenant has not renewed its lease. Its driver may be frozen, so the machine is not lent again."""

    tenant: str
    instance: str
    until: float | None = None
    """Instant at which the tenant's lease ended: it pays until then, also if no broker saw it. None: `at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(PoolEvent):
    """The service that divides the pool uses this many machines from now on."""

    machines: int
    efficiency: float
    """Speed-ups of the experiments over the GPUs of `machines` machines (Pollux §5.4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRuns(PoolEvent):
    """A machine runs, and is billed, since `running_at`."""

    machine: str
    running_at: float
    price_usd_per_hour: float | None = None
    """Rent at purchase; None: the pool's price."""
    market: Market = "on_demand"
    instance_type: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePriced(PoolEvent):
    """The rents of a machine's hours have changed: on spot each hour has a price of its own."""

    machine: str
    hour_prices_usd: tuple[float, ...]
    """USD per hour of each hour since it began to run, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineWarned(PoolEvent):
    """A machine will be lost soon: the provider reclaims it, the month's budget ends, or others wait for its place."""

    machine: str
    interrupted: bool = False
    """Whether the provider reclaims it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineEnded(PoolEvent):
    """A machine has ended, and costs no more since `ended_at`; or it was refused, and never ran."""

    machine: str
    ended_at: float
    running_at: float | None = None
    """None: it never ran."""
    reason: str = ""
    preempted: bool = False
    sold_out: bool = False
    """Whether it never ran because the provider has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRetired(PoolEvent):
    """A machine is lent no more, and released once it is free, or at once."""

    machine: str
    reason: str
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """Command: rent a machine under this name, which is its client token."""

    machine: str
    market: Market


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Command: release a machine."""

    machine: str


PoolCommand = Rent | Release

_KINDS: Mapping[str, type[PoolEvent]] = {kind.__name__: kind for kind in PoolEvent.__subclasses__()}


def to_line(event: PoolEvent) -> str:
    """Return an event as a line of JSON."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def from_line(line: str) -> PoolEvent:
    """Return the event of a line of JSON. Raises ValueError, KeyError or TypeError for another line."""
    words: dict[str, Any] = json.loads(line)
    kind = _KINDS[words.pop("event")]
    if kind is Opened:
        words["limits"] = PoolLimits(**words["limits"])
    if kind is MachinePriced:
        words["hour_prices_usd"] = tuple(words["hour_prices_usd"])
    return kind(**words)


@dataclass(slots=True, kw_only=True)
class Lease:
    """Latest renewal of one tenant."""

    until: float
    renewed_at: float
    length_s: float
    """The longest that it ever reached ahead."""

    @property
    def is_cut(self) -> bool:
        """Whether it reaches less far than usual: the tenant's own budget ends there."""
        return self.until < self.renewed_at + self.length_s - 1.0


class FileJournal:
    """A journal in a folder: a line of JSON for each event, and a small file for each tenant's lease."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal.jsonl"
        self._leases = folder / "leases"

    def events(self) -> Iterator[PoolEvent]:
        """Yield the events in order; a last line that was cut off by a crash is removed. Raises JournalError."""
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._path, whole)
        yield from self._parsed(data[:whole])

    def require_sound(self) -> None:
        """Raise JournalError for a damaged line. Changes nothing: a broker may be writing."""
        with suppress(OSError):
            data = self._path.read_bytes()
            deque(self._parsed(data[: data.rfind(b"\n") + 1]), maxlen=0)

    def _parsed(self, data: bytes) -> Iterator[PoolEvent]:
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                yield from_line(line.decode())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise JournalError(
                    f"{self._path}:{number} is no event of a pool ({error}); was it written by a newer version? move "
                    "the file away to begin a new pool"
                ) from None

    def append(self, events: Sequence[PoolEvent]) -> None:
        """Add events; they are durable once this returns. Raises OSError, and adds none then."""
        if not events:
            return
        is_new = not self._path.exists()
        data = "".join(f"{to_line(event)}\n" for event in events).encode()
        with open(self._path, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:  # a full disk: the next line must not begin within this one
                file.truncate(size)
                raise
        if is_new:
            descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
            os.close(descriptor)

    def replace(self, event: PoolEvent) -> None:
        """Keep this event in place of all others, durably; after a crash there is either. Raises OSError."""
        write_atomically(self._path, f"{to_line(event)}\n".encode(), durable=True)

    def leases(self) -> dict[str, Lease]:
        """Return the latest lease of each tenant; unreadable files count as none."""
        found = {}
        for path in self._leases.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                found[path.stem] = Lease(**json.loads(path.read_text()))
        return found

    def renew(self, tenant: str, lease: Lease) -> None:
        """Keep the latest lease of a tenant. A full disk keeps none."""
        words = json.dumps(asdict(lease))
        with suppress(OSError):
            self._leases.mkdir(exist_ok=True)
            write_atomically(self._leases / f"{tenant}.json", words.encode(), durable=False)
