"""A provider on a virtual clock: instances appear after their delay and cost nothing real. With faults, for tests.

It bills like a real one and says what it has billed, so that a test can hold the controller's ledger against it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rubberband.cloud.provider import InstanceStatus
from rubberband.errors import ProviderError


class VirtualClock:
    """A clock that stands still until it is told to jump."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds on this clock."""
        return self._now

    def advance_to(self, instant: float) -> None:
        """Jump to `instant`; never back."""
        self._now = max(self._now, instant)


class VirtualProvider:
    """Implements `rubberband.cloud.provider.Provider` on a `VirtualClock`."""

    def __init__(
        self, experiment: str, clock: VirtualClock, *, provision_delay_s: float = 0.0, refuse: Collection[str] = ()
    ) -> None:
        self._experiment = experiment
        self._clock = clock
        self._provision_delay_s = provision_delay_s
        self._refuse = frozenset(refuse)
        self._instances: dict[str, InstanceStatus] = {}
        self.lease_renewed_at = clock.now()

    def launch(self, instance: str) -> None:
        """Ask for an instance; those in `refuse` are refused."""
        if instance in self._refuse:
            raise ProviderError(f"no capacity for {instance}")
        if instance not in self._instances:
            self._instances[instance] = InstanceStatus(
                instance=instance, experiment=self._experiment, state="pending", requested_at=self._clock.now()
            )

    def describe(self) -> Sequence[InstanceStatus]:
        """Every instance as of the clock's now."""
        return [self._current(instance) for instance in self._instances]

    def _current(self, instance: str) -> InstanceStatus:
        status = self._instances[instance]
        running_at = status.requested_at + self._provision_delay_s
        if status.state == "pending" and running_at <= self._clock.now():
            status = replace(status, state="running", running_at=running_at)
            self._instances[instance] = status
        return status

    def release(self, instance: str) -> InstanceStatus:
        """End the instance now."""
        return self._end(instance, "")

    def lose(self, instance: str, reason: str = "lost") -> InstanceStatus:
        """A fault: the machine dies now."""
        return self._end(instance, reason)

    def _end(self, instance: str, reason: str) -> InstanceStatus:
        if instance not in self._instances:
            raise ProviderError(f"no instance {instance} was ever launched for {self._experiment}")
        status = self._current(instance)
        if status.state != "terminated":
            status = replace(status, state="terminated", ended_at=self._clock.now(), reason=reason)
            self._instances[instance] = status
        return status

    def renew_lease(self) -> None:
        """Note that the driver lives."""
        self.lease_renewed_at = self._clock.now()

    def close(self) -> None:
        """Release everything."""
        for instance in self._instances:
            self.release(instance)
