"""A pool from its file to its broker's process, which `python -m rubberband.app.pool FOLDER` runs."""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rubberband.cloud.catalogue import Table, offer
from rubberband.cloud.local import LocalProvider
from rubberband.cloud.pool import FileJournal, Pool, PoolLimits, PoolServer, RemotePool
from rubberband.cloud.steady import Waiting
from rubberband.errors import InputError, ProviderError, RubberbandError
from rubberband.executor.ray.fork_server import ForkServer
from rubberband.executor.session import local_devices
from rubberband.planner.sharing import make_policy
from rubberband.spec.pool import PoolFile, PoolFolder, pool_folder
from rubberband.spec.resources import Resources
from rubberband.units import format_usd
from rubberband.values.offer import Offer
from rubberband.values.plan import Market

CLOSE_S = 120.0
"""The longest wait for a pool to end all its instances."""


def bring_up(pool: PoolFile, home: Path, table: Table | None = None) -> PoolFolder:
    """Start a pool, or find it, and return its folder once its broker answers.

    Raises InputError for a pool that cannot be, or that is up with another file; ProviderError if it does not start.
    """
    if not pool.kind.is_this_machine:
        raise InputError(
            f"provider: a pool of {pool.provider} instances can be simulated, and not rented yet; write provider: local"
        )
    make_policy(pool.policy)
    offered = offer(resources_of(pool), table=table)
    _check_caps(pool, offered)
    whole = pool.model_copy(
        update={
            "gpus_per_instance": offered.gpus,
            "instance_type": offered.instance_type,
            "price_usd_per_hour": offered.price_usd_per_hour,
        }
    )
    folder = pool_folder(pool.name, home)
    words = whole.model_dump(mode="json", by_alias=True, exclude_none=True)
    if folder.is_up and folder.read() != words:
        raise InputError(
            f"pool {pool.name} is up with another file ({folder.file}); run `rubberband pool down {pool.name}` first"
        )
    folder.write(words)
    RemotePool(folder).ensure_broker()
    return folder


def resources_of(pool: PoolFile) -> Resources:
    """Return the pool's machines in an experiment's words."""
    given = {
        "provider": pool.provider,
        "region": pool.region,
        "instance_type": pool.instance_type,
        "gpus_per_instance": pool.gpus_per_instance,
        "price_per_hour": pool.price_usd_per_hour,
        "minimum_billed": pool.minimum_billed_s,
        "max_instances": pool.instances,
        "aws": pool.aws,
    }
    return Resources(**{key: value for key, value in given.items() if value is not None})


def _check_caps(pool: PoolFile, offered: Offer) -> None:
    """Raise InputError for a cap that covers no instance at all."""
    price, least_usd = offered.price_usd_per_hour, offered.instance_cost_usd(pool.minimum_billed_s)
    for key, cap, needed in (
        ("max_usd_per_hour", pool.max_usd_per_hour, price),
        ("max_usd_per_month", pool.max_usd_per_month, least_usd),
    ):
        if cap is not None and cap < needed:
            raise InputError(f"{key}: {format_usd(cap)} does not cover one instance ({format_usd(needed)}); raise it")


def limits_of(pool: PoolFile, offered: Offer) -> PoolLimits:
    """Return the broker's limits."""
    return PoolLimits(
        instances=pool.instances,
        gpus=offered.gpus,
        market=pool.market,
        price_usd_per_hour=offered.price_usd_per_hour + offered.side_usd_per_hour,
        side_usd_per_hour=offered.side_usd_per_hour,
        once_usd=offered.once_usd_per_instance,
        minimum_billed_s=pool.minimum_billed_s,
        idle_s=pool.idle_s,
        lease_s=pool.kind.lease_s if pool.lease_s is None else pool.lease_s,
        release_margin_s=pool.kind.release_margin_s,
        max_usd_per_hour=pool.max_usd_per_hour,
        max_usd_per_month=pool.max_usd_per_month,
    )


class PoolMachines(LocalProvider):
    """This machine's instances for a pool; their workers are forked from one process that has imported torch."""

    def __init__(self, name: str, directory: Path, gpus: int, lease_s: float, *, devices: Sequence[str] = ()) -> None:
        super().__init__(name, directory, gpus, lease_s, devices=devices)
        self._name, self._directory = name, directory
        self._forking = threading.Lock()
        self._fork_server: ForkServer | None = None

    def start_fork_server(self) -> None:
        """Start that process, unless it runs. A pool without instances has none, as it takes memory."""
        with self._forking:
            if self._fork_server is None:
                self._fork_server = ForkServer(self._name, self._directory, None)

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Start an instance, and before the first one the process that forks workers."""
        self.start_fork_server()
        super().launch(instance, market, first_lease_s=first_lease_s)

    def close(self) -> None:
        """End every instance, the head and that process. Idempotent."""
        super().close()
        if self._fork_server is not None:
            self._fork_server.close()


def serve(folder: PoolFolder) -> None:
    """Be the broker of a pool until it is closed. Raises RubberbandError; returns at once if another one runs."""
    with open(folder.lock, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        pool_file = PoolFile(**folder.read())
        offered = offer(resources_of(pool_file))
        limits = limits_of(pool_file, offered)
        devices = local_devices(offered)[0]
        provider = PoolMachines(pool_file.name, folder.machines, offered.gpus, limits.lease_s, devices=devices)
        pool = Pool(provider, FileJournal(folder.path), limits, provider.clock)
        if pool.state.live:
            provider.start_fork_server()
        server = PoolServer(folder, pool, look_s=provider.look_s)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        server.run()


def take_down(folder: PoolFolder) -> dict[str, Any]:
    """Close a pool, and return its bill in USD: `bill`, `idle`, … A broker that died is started to end what it left.

    Raises ProviderError if the pool does not end in time.
    """
    pool = RemotePool(folder)
    usd = pool.status()["usd"]
    pool.stop()
    for _ in Waiting().looks(CLOSE_S, every_s=0.1):
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
