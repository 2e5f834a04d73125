"""The provider of an experiment on a pool: its instances are slices of the pool's machines.

`launch` takes a warm machine or lets the pool rent one, `release` gives the slice back, and `close` gives all back: the
pool itself goes on. Many experiments share its one Ray cluster; each sees only its own instances.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rubberband.cloud.clock import FILE as CLOCK_FILE
from rubberband.cloud.clock import experiment_clock
from rubberband.cloud.pool.broker import Broker
from rubberband.cloud.pool.journal import FileJournal
from rubberband.cloud.pool.pool import LentInstance, Pool, lent
from rubberband.cloud.pool.state import PoolState
from rubberband.cloud.provider import (
    ClusterProvider,
    ClusterRequest,
    Head,
    HeadError,
    InstanceDescription,
    NoRecordError,
)
from rubberband.errors import JournalError, ProviderError
from rubberband.files import make_directories
from rubberband.spec.pool import PoolFolder
from rubberband.values.plan import Market


class PoolProvider(ClusterProvider):
    """Slices of a pool's machines."""

    is_lent = True

    def __init__(
        self,
        experiment: str,
        pool: Pool | RemotePool,
        gpus_per_instance: int,
        *,
        run: str,
        clock: Callable[[], float],
        lease_s: float = 60.0,
        device: Literal["cpu", "cuda"] = "cpu",
        remote: bool = False,
        look_s: float = 0.25,
    ) -> None:
        """`run` differs for experiments of one name; after a crash it finds the slices that this one holds.

        `clock` is the pool's. `lease_s` is the first lease where none was renewed before.
        """
        self._experiment = experiment
        self._tenant = f"{experiment}.{run}"
        self._pool = pool
        self._gpus = gpus_per_instance
        self.clock = clock
        self.device = device
        self.remote = remote
        self.look_s = look_s
        self._lease_s = lease_s
        self._lease_until: float | None = None
        self._nodes: dict[str, str] = {}

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Ask the pool for an instance under this name; repeated calls ask once.

        A pool that is not on spot has instances on demand only.

        It is pending while the pool has none to lend. Raises ProviderError for more GPUs than the pool's machines have.
        """
        ahead_s = self._lease_s if self._lease_until is None else max(0.0, self._lease_until - self.clock())
        lease_s = ahead_s if first_lease_s is None else min(ahead_s, first_lease_s)
        self._pool.launch(self._tenant, self._experiment, instance, self._gpus, lease_s, market)

    def describe(self) -> Sequence[InstanceDescription]:
        """Return all instances of this experiment, living or ended, in the order of launch."""
        return [self._noted(loan) for loan in self._pool.describe(self._tenant)]

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """Give an instance back and return its final status; idempotent. It costs this experiment nothing from then on.

        With a `fault`, the pool lends its machine no more.

        Raises ProviderError if it was never launched.
        """
        return self._noted(self._pool.release(self._tenant, instance, fault))

    def _noted(self, loan: LentInstance) -> InstanceDescription:
        if loan.machine is not None:
            self._nodes[loan.status.instance] = loan.machine
        return loan.status

    def renew_lease(self, until: float) -> None:
        """Let the pool take its instances back at the time `until`, unless this is called again."""
        self._lease_until = until
        self._pool.renew(self._tenant, until)

    def close(self) -> None:
        """Give all instances back. Idempotent."""
        with suppress(NoRecordError):  # which was said as each was released
            self._pool.leave(self._tenant)

    def node(self, instance: str) -> str:
        """Return the label of the machine that an instance is on; its own name until it has one."""
        return self._nodes.get(instance, instance)

    def slowness(self, instance: str) -> float:
        """Return how many times as long as usual workers may take to start on an instance."""
        return self._pool.slowness(self.node(instance))

    def last_words(self, instance: str) -> str:
        """Return the log line that best explains why a living instance is not ready; empty without one."""
        return self._pool.last_words(self.node(instance))

    def head(self) -> Head | None:
        """Return the living head of the pool's cluster, or None."""
        head = self._pool.head()
        return None if head is None else replace(head, namespace=self._tenant)

    def ensure_head(self) -> Head:
        """Return the living head of the pool's cluster; start one if there is none. Raises HeadError."""
        return replace(self._pool.ensure_head(), namespace=self._tenant)


# A client of the broker's process, for drivers and commands. It starts a new broker if the last one died.
#
# Machines outlive their broker by their lease, so that the new one adopts them. A pool that was closed answers from its
# journal: everything in it has ended.

BROKER_MODULE = "rubberband.pools.process"
"""Run with the pool's folder, it is the broker's process."""
PATIENCE_S = 60.0
"""The longest wait for a broker that starts."""
_ANSWER_S = 60.0
_HEAD_S = 600.0
"""On a busy machine a head may take minutes to start."""
_GLANCE_S = 2.0
_RETRY_S = 0.1
_START_EVERY_S = 5.0


class BrokerAwayError(ProviderError):
    """The broker does not answer."""


class RemotePool:
    """Requests to the broker's process of a pool's folder: the calls of `Pool`. Thread-safe."""

    def __init__(self, folder: PoolFolder) -> None:
        self._folder = folder

    def launch(self, tenant: str, experiment: str, instance: str, gpus: int, lease_s: float, market: Market) -> None:
        """See `Pool.launch`."""
        if not self._folder.is_up:
            raise ProviderError(
                f"pool {self._folder.name} was closed; start it again with `rubberband pool up FILE`, and resume"
            )
        self._ask(
            "launch", tenant=tenant, experiment=experiment, instance=instance, gpus=gpus, lease_s=lease_s, market=market
        )

    def describe(self, tenant: str) -> list[LentInstance]:
        """See `Pool.describe`."""
        if not self._folder.is_up:
            return self._as_closed(tenant)
        return [_lent(plain) for plain in self._ask("describe", tenant=tenant)]

    def release(self, tenant: str, instance: str, fault: str = "") -> LentInstance:
        """See `Pool.release`."""
        if self._folder.is_up:
            return _lent(self._ask("release", tenant=tenant, instance=instance, fault=fault))
        ended = [loan for loan in self._as_closed(tenant) if loan.status.instance == instance]
        if not ended:
            raise ProviderError(f"instance {instance} was never launched in pool {self._folder.name}")
        return ended[0]

    def renew(self, tenant: str, until: float) -> None:
        """See `Pool.renew`; asked once, as the next renewal comes soon."""
        if self._folder.is_up:
            self._once("renew", _ANSWER_S, tenant=tenant, until=until)

    def leave(self, tenant: str) -> None:
        """See `Pool.leave`."""
        if self._folder.is_up:
            self._ask("leave", tenant=tenant)

    def head(self) -> Head | None:
        """See `Pool.head`."""
        plain = self._ask("head") if self._folder.is_up else None
        return None if plain is None else Head(**plain)

    def ensure_head(self) -> Head:
        """See `Pool.ensure_head`."""
        return Head(**self._ask("ensure_head", answer_s=_HEAD_S))

    def traits(self) -> dict[str, Any]:
        """See `Pool.traits`."""
        return dict(self._ask("traits"))

    def slowness(self, machine: str) -> float:
        """See `Pool.slowness`."""
        return float(self._ask("slowness", machine=machine))

    def last_words(self, machine: str) -> str:
        """See `Pool.last_words`."""
        return str(self._ask("last_words", machine=machine))

    def status(self) -> dict[str, Any]:
        """Return a snapshot of the pool (see `server.snapshot`)."""
        return dict(self._ask("status"))

    def waiting(self) -> list[tuple[str, str]]:
        """Return the experiment and instance of each request that waits for a machine.

        Raises ProviderError; starts no broker.
        """
        return [(experiment, instance) for experiment, instance in self._once("waiting", _GLANCE_S)]

    def scale(self, machines: int, efficiency: float) -> None:
        """See `Pool.scale`. Raises ProviderError; starts no broker."""
        self._once("scale", _GLANCE_S, machines=machines, efficiency=efficiency)

    def glance(self) -> dict[str, Any]:
        """Return a snapshot of the pool if its broker answers at once. Raises ProviderError; starts no broker."""
        return dict(self._once("status", _GLANCE_S))

    def closed_month_usd(self, now: float) -> float:
        """Return what a pool that was closed has cost in the month of `now` (Unix time). Raises JournalError."""
        return self._closed().month_usd(now)

    def month_usd(self, *, starts: bool = False) -> float:
        """Return the pool's bill of this month so far. Raises ProviderError if its broker does not answer at once.

        `starts`: then a broker is started, for the next time.
        """
        try:
            return float(self._once("month_usd", _GLANCE_S))
        except BrokerAwayError:
            if starts and self._folder.is_up:
                start_broker(self._folder)
            raise

    def ensure_broker(self) -> None:
        """Start a broker unless one answers, and wait for it.

        Raises ProviderError for a pool that is closed, or with what its broker printed last.
        """
        if not self._folder.is_up:
            raise ProviderError(f"pool {self._folder.name} is down; start it with `rubberband pool up FILE`")
        self._ask("ping")

    def stop(self) -> None:
        """Ask the broker to end the pool; a broker that died is started first, to end what it left."""
        self._ask("stop")

    def _ask(self, call: str, *, answer_s: float = _ANSWER_S, **arguments: Any) -> Any:
        """Return the answer; while no broker answers, start one. Raises ProviderError."""
        deadline, started_at = time.monotonic() + PATIENCE_S, -_START_EVERY_S
        while True:
            try:
                return self._once(call, answer_s, **arguments)
            except BrokerAwayError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise ProviderError(f"{error}; its log ends with: {self._last_words()}") from None
                if now - started_at >= _START_EVERY_S:
                    started_at = now
                    self._require_sound_journal()
                    start_broker(self._folder)
                time.sleep(_RETRY_S)

    def _require_sound_journal(self) -> None:
        """Raise NoRecordError if no broker can start, since the pool's journal is damaged."""
        try:
            FileJournal(self._folder.path).require_sound()
        except JournalError as error:
            raise NoRecordError(str(error)) from None

    def _once(self, call: str, answer_s: float, **arguments: Any) -> Any:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(answer_s)
                connection.connect(self._folder.address.read_text())
                connection.sendall(json.dumps({"call": call, **arguments}).encode() + b"\n")
                with connection.makefile("rb") as stream:
                    line = stream.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("it ended before it answered")
        except OSError as error:
            raise BrokerAwayError(
                f"the broker of pool {self._folder.name} does not answer ({error.strerror or error})"
            ) from None
        answer = json.loads(line)
        if "error" in answer:
            raise (HeadError if answer["kind"] == "HeadError" else ProviderError)(answer["error"])
        return answer["answer"]

    def _last_words(self) -> str:
        try:
            lines = self._folder.log.read_text(errors="replace").split("\n")
        except OSError:
            return "nothing"
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")

    def _as_closed(self, tenant: str) -> list[LentInstance]:
        self._require_sound_journal()
        return [lent(loan) for loan in self._closed().tenants.get(tenant, ()) if loan.ended_at is not None]

    def _closed(self) -> PoolState:
        broker = Broker()
        for event in FileJournal(self._folder.path).events():
            broker.handle(event)
        return broker.state


def open_cluster(request: ClusterRequest) -> PoolProvider:
    """Open the pool of an experiment for one run; its folder gets the pool's clock, which viewers of the run read.

    Raises ProviderError if the pool does not answer.
    """
    folder, directory = PoolFolder(path=Path(str(request.resources.pool))), request.directory
    pool = RemotePool(folder)
    pool.ensure_broker()
    make_directories(directory)
    shutil.copyfile(folder.machines / CLOCK_FILE, directory / CLOCK_FILE)
    clock = experiment_clock(directory)
    return PoolProvider(
        request.experiment,
        pool,
        request.offer.gpus,
        run=request.run,
        clock=lambda: max(clock(), request.not_before),
        lease_s=request.resources.lease_length_s,
        **pool.traits(),
    )


def start_broker(folder: PoolFolder) -> None:
    """Start the process of a pool's broker, which outlives this one. It ends at once if another one runs."""
    with open(folder.log, "ab") as log:
        broker = subprocess.Popen(
            [sys.executable, "-P", "-m", BROKER_MODULE, str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder.path,
            env={**os.environ, "RUBBERBAND_HOME": str(folder.path.parent.parent)},
        )
    threading.Thread(target=broker.wait, daemon=True, name="pool-broker").start()  # reaps it


def _lent(plain: dict[str, Any]) -> LentInstance:
    return LentInstance(status=InstanceDescription(**plain["status"]), machine=plain["machine"])
