"""Kinds of providers: one record each of their differences, so that no other code compares their names.

The experiment file takes defaults from it. `rubberband.executor.run.session` opens their clusters, and
`rubberband.planning.prices_and_quotas` looks up prices and quotas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ProviderName = Literal["local", "aws", "ray", "virtual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderKind:
    """A kind of provider. Seconds, as everywhere."""

    is_simulated: bool = False
    """Instances, trials and the clock are simulated: no process trains, there are no leases, no entry point is needed,
    and the clock of its events starts at 0."""
    is_this_machine: bool = False
    """All instances are processes of this machine, which they share; they cost nothing."""
    is_rented: bool = False
    """Instances are rented from a cloud, which bills them, has prices and quotas, and sees no file of this machine."""
    is_borrowed: bool = False
    """Instances are nodes of a Ray cluster that was there before and stays: a release gives GPUs back, and Ray frees
    those of a driver that died. It sees this machine's files only where both share a file system."""
    default_type: str | None = None
    """The instance type where none is named; None: one must be. Where instances are priced, it needs price_per_hour."""
    provision_s: float = 0.0
    init_s: float = 0.0
    """Assumed times of provisioning and initialising, if neither the file nor the profile has them."""
    release_margin_s: float
    """Longest time to release instances, with retries; the budget reserves it. Leases end half of it before the budget:
    a machine on EC2 takes seconds to notice, ten to stop its workers, and more to be off."""
    lease_s: float = 60.0
    """Default time that an instance outlives a dead driver."""
    lease_interval_s: float = 2.0
    """Interval of renewals of its lease; a quarter of the lease, if that is shorter."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether instances are other machines, to which the trial's code is sent."""
        return self.is_rented or self.is_borrowed

    @property
    def is_free(self) -> bool:
        """Whether an instance costs nothing unless the file has a price."""
        return self.is_this_machine or self.is_borrowed


KINDS: Mapping[str, ProviderKind] = MappingProxyType(
    {
        # On one machine four Ray nodes take about 3 s to start and their first workers about 8 s (mostly importing
        # torch, once for all of them). The type has one GPU.
        "local": ProviderKind(
            is_this_machine=True, default_type="local", provision_s=3.0, init_s=8.0, release_margin_s=3.0
        ),
        # The first worker of a node imports torch, and a group of free GPUs is placed at once.
        "ray": ProviderKind(
            is_borrowed=True, default_type="ray", provision_s=1.0, init_s=10.0, release_margin_s=30.0, lease_s=10.0
        ),
        "virtual": ProviderKind(is_simulated=True, default_type="virtual", release_margin_s=0.0),
        # The delays are a guess, which a measured profile replaces: booting (longer on bare metal and on p4, p5 and p6,
        # see `boot_timeouts`), and installing torch.
        "aws": ProviderKind(
            is_rented=True,
            provision_s=20.0,
            init_s=180.0,
            release_margin_s=60.0,
            lease_s=600.0,
            lease_interval_s=5.0,
        ),
    }
)
"""Provider, as experiment files and journals name it -> its kind."""
