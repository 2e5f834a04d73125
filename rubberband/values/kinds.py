"""Kinds of providers: one record each of what differs between them, so that nothing else asks for one by its name.

It stands below the words of the experiment file, which take their defaults from it. How a cluster is opened is in
`rubberband.executor.session`, how prices and quotas are asked for in `rubberband.app.terms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ProviderName = Literal["local", "aws", "virtual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderKind:
    """A kind of provider. Seconds, as everywhere."""

    is_simulated: bool = False
    """Instances, trials and the clock are simulated: no process trains, no lease runs, no entry point is needed, and
    the clock of its events starts at 0."""
    is_this_machine: bool = False
    """All instances are processes of this machine, which they share; they cost nothing."""
    is_rented: bool = False
    """Instances are rented from a cloud, which bills them, has prices and quotas, and sees no file of this machine."""
    default_type: str | None = None
    """The instance type where none is named; None: one must be."""
    provision_s: float = 0.0
    init_s: float = 0.0
    """How long provisioning and initialising are assumed to take, where neither the file nor the profile tells."""
    release_margin_s: float
    """Up to how long giving instances back takes, retries included; the budget keeps clear of it. Leases end half of it
    before the budget: a machine on EC2 takes seconds to notice, ten to stop its workers, and more to be off."""
    lease_s: float = 60.0
    """How long an instance outlives a driver that died, where the file does not say."""
    lease_interval_s: float = 2.0
    """How often its lease is renewed, or four times a lease, if that is more often."""


KINDS: Mapping[str, ProviderKind] = MappingProxyType(
    {
        # On one machine four Ray nodes take about 3 s to start and their first workers about 8 s (mostly importing
        # torch, once for all of them). The type has one GPU.
        "local": ProviderKind(
            is_this_machine=True, default_type="local", provision_s=3.0, init_s=8.0, release_margin_s=3.0
        ),
        "virtual": ProviderKind(is_simulated=True, release_margin_s=0.0),
        # The delays are a guess, which a measured profile replaces: booting (longer on bare metal and on p4, p5 and p6,
        # see `start_limits`), and installing torch.
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
