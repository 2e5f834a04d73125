"""A pool from its file to its broker's process, which `python -m rubberband.pools.process FOLDER` runs."""

from __future__ import annotations

import faulthandler
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rubberband.cloud.catalogue import boot_timeouts, types_of
from rubberband.cloud.clock import Waiting
from rubberband.cloud.local.gpus import free_gpus, gpus_to_share
from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.offers import offer
from rubberband.cloud.pool import FileJournal, Pool, PoolLimits, PoolServer, RemotePool
from rubberband.cloud.pool.broker import Broker
from rubberband.cloud.provider import ClusterProvider, ClusterRequest, Head, InstanceDescription
from rubberband.errors import InputError, ProviderError, RubberbandError
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import Connection, RemoteAgent
from rubberband.executor.ray.fleet import cut_leases
from rubberband.executor.ray.fork_server import ForkServer
from rubberband.executor.run.allowance import require_capped, require_pool
from rubberband.files import EXCLUSIVE, private, require_home, try_lock
from rubberband.installation import require_ray
from rubberband.interrupts import heeded
from rubberband.planner.sharing import make_policy
from rubberband.spec.pool import PoolFile, PoolFolder, pool_folder, resources_of, too_low
from rubberband.units import counted, format_usd
from rubberband.values.kinds import part_of
from rubberband.values.offer import Offer
from rubberband.values.plan import Market

CLOSE_S = 600.0
"""The longest wait for a pool to end all its instances: EC2 may take minutes to show what was requested last."""
LONGEST_LOOK_S = 1.0
"""A broker decides at least this often; EC2 is asked less often."""


def bring_up(
    pool: PoolFile,
    home: Path,
    announce: Callable[[str], None] = lambda line: None,
    confirm: Callable[[str], None] = lambda bill: None,
) -> PoolFolder:
    """Start a pool, or find it, and return its folder once its broker answers.

    `announce` gets remarks on the account, a line each; `confirm` is asked before a pool of rented instances comes up.
    Raises InputError for a pool that cannot be, without a cap, beyond the policy, or that is up with another file;
    ProviderError if it does not start.
    """
    if pool.kind.is_simulated:
        raise InputError(f"provider: a pool of {pool.provider} instances can only be simulated; write local or aws")
    require_ray(f"provider: {pool.provider}")
    make_policy(pool.policy)
    folder = pool_folder(pool.name, home)
    if folder.is_up:
        known = PoolFile(**folder.read())
        if _filled(pool, known) != known:
            raise InputError(
                f"pool {pool.name} is up with another file ({folder.file}); run `rubberband pool down {pool.name}` "
                "first"
            )
    else:
        offered = _offered(pool, home, announce)
        priced = _priced(pool, offered)
        _check_caps(priced, offered)
        if pool.kind.is_rented:
            require_pool(priced, home, offered)
            confirm(_bill(priced, offered))
        for note in require_home(home):
            announce(note)
        folder.write(_words(_filled(pool, priced)))
    RemotePool(folder).ensure_broker()
    return folder


def _bill(pool: PoolFile, offered: Offer) -> str:
    """Return what a pool may cost, in one line."""
    each_usd = offered.price_usd_per_hour + offered.side_usd_per_hour
    caps = [
        f"{key}={format_usd(cap_usd)}"
        for key, cap_usd in (("max_usd_per_hour", pool.max_usd_per_hour), ("max_usd_per_month", pool.max_usd_per_month))
        if cap_usd is not None
    ]
    size = f"at most {counted(pool.instances_at_once(), 'instance')} of {offered.instance_type}"
    return f"{size} at {format_usd(each_usd)} an hour each, none until an experiment asks; {', '.join(caps)}"


def _words(pool: PoolFile) -> dict[str, Any]:
    return pool.model_dump(mode="json", by_alias=True, exclude_none=True)


def simulated(pool: PoolFile) -> PoolFile:
    """Return a pool that is only simulated with the GPUs and prices of its type, if it names one. Raises InputError."""
    return pool if pool.instance_type is None else _priced(pool, offer(resources_of(pool)))


def _priced(pool: PoolFile, offered: Offer) -> PoolFile:
    """Return the pool with the GPUs and the prices that its instances have today."""
    spot_usd = None if offered.spot is None else offered.spot.price_usd_per_hour
    found = {
        "gpus_per_instance": offered.gpus,
        "instance_type": offered.instance_type,
        "price_usd_per_hour": offered.price_usd_per_hour,
        "side_usd_per_hour": offered.side_usd_per_hour if pool.kind.is_rented else None,
        "spot": pool.spot.model_copy(update={"price_usd_per_hour": spot_usd}),
    }
    return pool.model_copy(update=found)


def _filled(pool: PoolFile, known: PoolFile) -> PoolFile:
    """Return a pool with the GPUs and prices of `known` where its own file has none."""
    names = ("gpus_per_instance", "instance_type", "price_usd_per_hour", "side_usd_per_hour")
    found = {name: getattr(known, name) for name in names if getattr(pool, name) is None}
    if pool.spot.price_usd_per_hour is None:
        found["spot"] = pool.spot.model_copy(update={"price_usd_per_hour": known.spot.price_usd_per_hour})
    return PoolFile(**_words(pool.model_copy(update=found)))


def _offered(pool: PoolFile, home: Path, announce: Callable[[str], None]) -> Offer:
    """Return the offer of a pool's instances; on EC2 with today's prices, once the account has been checked."""
    resources = resources_of(pool)
    if not pool.kind.is_rented:
        return offer(resources)
    if pool.checkpoints is None:
        raise InputError(
            "checkpoints: missing, and instances of EC2 do not see this machine's files; run `rubberband aws setup`, "
            "which makes a bucket, or name one, such as checkpoints: s3://my-bucket/team"
        )
    require_capped(pool)
    preflight = part_of(pool.provider, "preflight")
    try:
        today = preflight(resources, home, None, lambda note: announce(_at_the_top(note)), together=False)
        return offer(resources, table=today.table)
    except InputError as error:
        raise InputError(_at_the_top(str(error))) from None


def _at_the_top(line: str) -> str:
    """Return a line with the words of a pool file, which has those of `resources` at its top."""
    return line.replace("resources.max_instances", "instances").replace("resources.", "")


def _check_caps(pool: PoolFile, offered: Offer) -> None:
    """Raise InputError for a cap that covers no instance at all."""
    pool.instances_at_once()
    cap_usd, least_usd = pool.max_usd_per_month, Broker(limits_of(pool, offered)).first_usd()
    if cap_usd is not None and cap_usd < least_usd:
        raise too_low("max_usd_per_month", cap_usd, least_usd)


def limits_of(pool: PoolFile, offered: Offer) -> PoolLimits:
    """Return the broker's limits."""
    lease_s = pool.kind.lease_s if pool.lease_s is None else pool.lease_s
    if pool.kind.is_rented:  # while an instance boots, its lease covers that as well
        lease_s = max(lease_s, boot_timeouts(types_of(resources_of(pool)), resources_of(pool).init_delay_s).lease_s)
    return PoolLimits(
        instances=pool.instances,
        gpus=offered.gpus,
        market=pool.market if pool.kind.is_rented else "on_demand",
        price_usd_per_hour=offered.price_usd_per_hour + offered.side_usd_per_hour,
        side_usd_per_hour=offered.side_usd_per_hour,
        once_usd=offered.once_usd_per_instance,
        minimum_billed_s=pool.minimum_billed_s,
        idle_s=pool.idle_s,
        lease_s=lease_s,
        release_margin_s=pool.kind.release_margin_s,
        max_usd_per_hour=pool.max_usd_per_hour,
        max_usd_per_month=pool.max_usd_per_month,
        autoscales=pool.autoscale is not None,
    )


class PoolMachines(LocalProvider):
    """This machine's instances for a pool; their workers are forked from one process that has imported torch."""

    def __init__(
        self,
        name: str,
        directory: Path,
        gpus: int,
        lease_s: float,
        *,
        devices: Sequence[str] = (),
        slots_on_machine: int = 1,
        not_before: float = 0.0,
    ) -> None:
        super().__init__(name, directory, gpus, lease_s, devices=devices, not_before=not_before)
        self._name, self._directory, self._slots_on_machine = name, directory, slots_on_machine
        self._forking = threading.Lock()
        self._fork_server: ForkServer | None = None

    def start_fork_server(self) -> None:
        """Start that process, unless it runs. A pool without instances has none, as it takes memory."""
        with self._forking:
            if self._fork_server is None:
                self._fork_server = ForkServer(
                    self._name, self._directory, None, device=self.device, slots_on_machine=self._slots_on_machine
                )

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Start an instance, and before the first one the process that forks workers."""
        self.start_fork_server()
        super().launch(instance, market, first_lease_s=first_lease_s)

    def close(self) -> None:
        """End every instance, the head and that process. Idempotent."""
        super().close()
        if self._fork_server is not None:
            self._fork_server.close()


def _machines(pool: PoolFile, folder: PoolFolder, offered: Offer) -> ClusterProvider:
    """Return the provider that a broker owns. Raises InputError and ProviderError as it does.

    After a reboot its clock goes on from the end of the pool's journal at least.
    """
    resources = resources_of(pool)
    not_before = max((event.at for event in FileJournal(folder.path).events()), default=0.0)
    if not pool.kind.is_rented:
        devices = free_gpus(gpus_to_share(offered, None), offered, folder.machines).ids
        lease_s = resources.lease_length_s
        return PoolMachines(
            pool.name,
            folder.machines,
            offered.gpus,
            lease_s,
            devices=devices,
            slots_on_machine=offered.gpus * offered.max_instances,
            not_before=not_before,
        )
    request = ClusterRequest(
        experiment=pool.name,
        run="",
        directory=folder.machines,
        home=folder.path.parent.parent,
        resources=resources,
        offer=offered,
        not_before=not_before,
    )
    cluster = part_of(pool.provider, "open_cluster")(request)
    lease_s = resources.lease_length_s
    return LeasedProvider(
        cluster,
        lease_s=lease_s,
        interval_s=min(pool.kind.lease_interval_s, lease_s / 4.0),
        ready_s=boot_timeouts(types_of(resources), resources.init_delay_s).ready_s,
    )


def serve(folder: PoolFolder) -> None:
    """Be the broker of a pool until it is closed. Raises RubberbandError; returns at once if another one runs."""
    with open(folder.lock, "a", opener=private) as lock:
        if not try_lock(lock, EXCLUSIVE):
            return
        pool_file = PoolFile(**folder.read())
        offered = offer(resources_of(pool_file))
        limits = limits_of(pool_file, offered)
        provider = _machines(pool_file, folder, offered)
        pool = Pool(provider, FileJournal(folder.path), limits, provider.clock)
        if isinstance(provider, PoolMachines) and pool.state.live:
            provider.start_fork_server()
        server = PoolServer(folder, pool, look_s=min(provider.look_s, LONGEST_LOOK_S))
        for number in heeded():
            signal.signal(number, lambda *_: server.stop())
        server.run()


def take_down(folder: PoolFolder) -> dict[str, Any]:
    """Close a pool, and return its bill in USD: `bill`, `idle`, … A broker that died is started to end what it left.

    Raises ProviderError if the pool does not end in time.
    """
    pool = RemotePool(folder)
    usd = pool.status()["usd"]
    pool.stop()
    for _ in Waiting().polls(CLOSE_S, every_s=0.1):
        if not folder.is_up:
            return dict(usd)
    raise ProviderError(f"pool {folder.name} has not ended within {CLOSE_S:.0f} s; see {folder.log}, and try again")


def main(arguments: Sequence[str]) -> int:
    """Run the broker of the pool in a folder, and return the exit code."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        serve(PoolFolder(path=Path(arguments[0])))
    except RubberbandError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 0


_log = logging.getLogger(__name__)
_SETTLED_S = 10.0
"""The longest wait for threads that may still call Ray, before disconnecting."""


class LeasedProvider(ClusterProvider):
    """Another provider, whose machines have agents of this process.

    It has no workers. Thread-safe.
    """

    def __init__(self, cluster: ClusterProvider, *, lease_s: float, interval_s: float, ready_s: float) -> None:
        """Leases of machines that have joined reach `lease_s` ahead, and are renewed every `interval_s`.

        Those of machines that an earlier broker rented may reach as far from now. A machine that runs should have
        joined after `ready_s`.
        """
        self._cluster = cluster
        self._lease_s, self._interval_s, self._ready_s = lease_s, interval_s, ready_s
        self.clock: Callable[[], float] = cluster.clock
        self.device: Literal["cpu", "cuda"] = cluster.device
        self.look_s = cluster.look_s
        self._connection = Connection()
        self._mutex = threading.Lock()
        self._agents: dict[str, RemoteAgent] = {}
        self._launched: set[str] = set()
        self._unwanted: set[str] = set()
        """Machines that were released; their leases are renewed no more."""
        self._noticed: dict[str, float] = {}
        """Machine -> when the cloud announced its interruption."""
        self._answered: dict[str, float] = {}
        """Machine -> when it answered last."""
        self._former_until = cluster.clock() + lease_s
        self._until = -math.inf
        self._closing = threading.Event()

    def node(self, instance: str) -> str:
        """Return the label of a machine's Ray node."""
        return self._cluster.node(instance)

    def slowness(self, instance: str) -> float:
        """Return how many times as long as usual workers may take to start on a machine."""
        return self._cluster.slowness(instance)

    def last_words(self, instance: str) -> str:
        """Return the log line that best explains why a machine is not ready; empty without one."""
        return self._cluster.last_words(instance)

    def head(self) -> Head | None:
        """Return the living head, or None."""
        return self._cluster.head()

    def ensure_head(self) -> Head:
        """Return the living head once it answers; start one if there is none. Raises HeadError."""
        return self._cluster.ensure_head()

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Rent a machine, once no lease of another one exceeds the latest `renew_lease`.

        Raises ProviderError if one cannot be cut: if this process died, the bill could exceed its cap.
        """
        cut_leases(self._living_agents, lambda: self._until, self._closing)
        self._launched.add(instance)
        self._cluster.launch(instance, market, first_lease_s=first_lease_s)

    def describe(self) -> Sequence[InstanceDescription]:
        """Return all machines; those that run get an agent, which also brings the notices of interruptions."""
        statuses = self._cluster.describe()
        for status in statuses:
            if status.ended_at is not None:
                self._dismiss(status.instance)
            elif status.running_at is not None and not self._closing.is_set():
                self._attend(status.instance)
        if self._connection.address is not None and self._cluster.head() is None:
            self._connection.leave()
        return [self._as_heard(status) for status in statuses]

    def _as_heard(self, status: InstanceDescription) -> InstanceDescription:
        """Return a status with what the agent of the machine has said, and when."""
        if status.running_at is None or status.ended_at is not None:
            return status
        interrupted_at = status.interrupted_at or self._noticed.get(status.instance)
        silent_since = self._answered.get(status.instance, status.running_at + self._ready_s)
        return replace(status, interrupted_at=interrupted_at, silent_since=silent_since)

    def _attend(self, machine: str) -> None:
        with self._mutex:
            if machine in self._agents or machine in self._unwanted:
                return
            agent = self._agents[machine] = RemoteAgent(
                machine,
                until=self._lease_until,
                interval_s=self._interval_s,
                logs=None,
                log_limit_bytes=0,
                on_notice=lambda: self._notice(machine),
                on_answer=lambda: self._answered.update({machine: self.clock()}),
                node=self._cluster.node,
            )
            if machine not in self._launched:
                agent.reaches = self._former_until
        connection.start(lambda: self._begin(machine, agent), f"attend-{machine}")

    def _begin(self, machine: str, agent: RemoteAgent) -> None:
        try:
            self._connection.open(self._cluster.ensure_head())
            agent.begin()
        except Exception as error:  # the next look tries again
            _log.warning("machine %s has no agent yet: %s", machine, error)
            self._dismiss(machine)

    def _notice(self, machine: str) -> None:
        self._noticed.setdefault(machine, self.clock())

    def _lease_until(self) -> float | None:
        return None if self._until == -math.inf else min(self.clock() + self._lease_s, self._until)

    def _living_agents(self) -> list[RemoteAgent]:
        with self._mutex:
            return list(self._agents.values())

    def _dismiss(self, machine: str) -> None:
        with self._mutex:
            agent = self._agents.pop(machine, None)
        if agent is not None:
            agent.dismiss()

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """End a machine and return its final status; idempotent. Raises ProviderError if it was never launched."""
        self._unwanted.add(instance)
        self._dismiss(instance)
        return self._cluster.release(instance, fault=fault)

    def renew_lease(self, until: float) -> None:
        """Let machines live until `until`, and no longer; leases that reach further are cut at once."""
        self._until = until
        for agent in self._living_agents():
            if agent.reaches > until:
                agent.hurry()
        self._cluster.renew_lease(until)

    def close(self) -> None:
        """Leave the cluster, and end every machine and the head. Idempotent."""
        self._closing.set()
        for agent in self._living_agents():
            agent.dismiss()
        connection.settle(_SETTLED_S)
        try:
            self._connection.close()
        finally:
            self._cluster.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
