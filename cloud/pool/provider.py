"""The provider of an experiment on a pool: its instances are slices of the pool's machines.

`launch` takes a warm machine or lets the pool rent one, `release` gives the slice back, and `close` gives all back: the
pool itself goes on. Many experiments share its one Ray cluster; each sees only its own instances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from rubberband.cloud.pool.pool import LentInstance
from rubberband.cloud.provider import Head, InstanceDescription
from rubberband.values.plan import Market


class PoolCalls(Protocol):
    """Requests of a tenant to a pool, in this process (`Pool`) or in the broker's (`RemotePool`)."""

    def launch(
        self, tenant: str, experiment: str, instance: str, gpus: int, lease_s: float, market: Market
    ) -> None: ...
    def describe(self, tenant: str) -> list[LentInstance]: ...
    def release(self, tenant: str, instance: str) -> LentInstance: ...
    def renew(self, tenant: str, until: float) -> None: ...
    def leave(self, tenant: str) -> None: ...
    def head(self) -> Head | None: ...
    def ensure_head(self) -> Head: ...
    def slowness(self, machine: str) -> float: ...
    def last_words(self, machine: str) -> str: ...


class PoolProvider:
    """Implements `rubberband.cloud.provider.ClusterProvider` on a pool."""

    is_lent = True

    def __init__(
        self,
        experiment: str,
        pool: PoolCalls,
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
        return [self._noted(lent) for lent in self._pool.describe(self._tenant)]

    def release(self, instance: str) -> InstanceDescription:
        """Give an instance back and return its final status; idempotent. It costs this experiment nothing from then on.

        Raises ProviderError if it was never launched.
        """
        return self._noted(self._pool.release(self._tenant, instance))

    def _noted(self, lent: LentInstance) -> InstanceDescription:
        if lent.machine is not None:
            self._nodes[lent.status.instance] = lent.machine
        return lent.status

    def renew_lease(self, until: float) -> None:
        """Let the pool take its instances back at the time `until`, unless this is called again."""
        self._lease_until = until
        self._pool.renew(self._tenant, until)

    def close(self) -> None:
        """Give all instances back. Idempotent."""
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
        found = self._pool.head()
        return None if found is None else replace(found, namespace=self._tenant)

    def ensure_head(self) -> Head:
        """Return the living head of the pool's cluster; start one if there is none. Raises HeadError."""
        return replace(self._pool.ensure_head(), namespace=self._tenant)
