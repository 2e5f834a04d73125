"""A cluster of rented machines whose leases this process renews: the broker's side of a pool on EC2.

A machine's lease is renewed on the machine itself, by an actor there (see `executor.ray.connection`). The drivers of a
pool come and go, and none may end a machine that others use; so the broker joins the cluster, and renews all leases.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from rubberband.cloud.provider import ClusterProvider, Head, InstanceDescription
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import Connection, RemoteAgent
from rubberband.executor.ray.fleet import cut_leases
from rubberband.values.plan import Market

_log = logging.getLogger(__name__)
_SETTLED_S = 10.0
"""The longest wait for threads that may still call Ray, before disconnecting."""


class LeasedProvider:
    """Implements `rubberband.cloud.provider.ClusterProvider`: another one, whose machines have agents of this process.

    It has no workers. Thread-safe.
    """

    remote = True
    is_lent = False

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
