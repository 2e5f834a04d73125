"""Longest times of an EC2 instance, by type, from `running` (when billing begins) until trials start on it.

AWS publishes no figures. On bare metal, and with eight GPUs and their switches, the firmware takes minutes before the
boot script runs. Nothing on the machine can end it until then, so the budget counts this time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

LEASE_SHARE = 0.95
"""Share of the budget's reach that is armed as a lease: during the rest, the same request may be repeated."""

_FIRMWARE_S = 60.0
_SLOW_FIRMWARE_S = ((re.compile(r".*\.metal(-.*)?"), 1500.0), (re.compile(r"p([4-9]|\d\d)[a-z]*(-.*)?\..*"), 600.0))
"""Metal: Canonical saw "over 20 minutes" until commands ran (canonical/pycloudlib#192). P4 and later: AWS's own
ParallelCluster gives its nodes 30 minutes (ResumeTimeout, aws-parallelcluster-cookbook#960), and Karpenter's 15 were
too few for some nodes (kubernetes-sigs/karpenter#357); with the 15 minutes to install, 10 are left."""
_INSTALL_S = 900.0
_INSTALL_SHARE = 1.5
"""Limit of an installation over the file's estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLimits:
    """Limits of one type, or the longest of several."""

    firmware_s: float
    """From `running` until the boot script arms the lease, and from its end until the machine is off."""
    install_s: float
    """From there until the instance has joined; meanwhile it may renew its lease itself."""

    @property
    def ready_s(self) -> float:
        """From `running` until an instance that is not ready is given up."""
        return self.firmware_s + self.install_s

    @property
    def lease_s(self) -> float:
        """Time that the budget covers for an instance whose driver dies while it starts."""
        return reach_s(self.install_s, self.firmware_s)


def start_limits(types: Iterable[str], init_delay_s: float | None = None) -> StartLimits:
    """Return the longest limits of some types of EC2. `init_delay_s`: the file's estimate of the installation."""
    return StartLimits(
        firmware_s=max(map(firmware_s, types), default=_FIRMWARE_S),
        install_s=max(_INSTALL_S, _INSTALL_SHARE * (init_delay_s or 0.0)),
    )


def firmware_s(instance_type: str) -> float:
    """Return the longest time from `running` until an instance of the type runs its boot script."""
    return next((limit for names, limit in _SLOW_FIRMWARE_S if names.fullmatch(instance_type)), _FIRMWARE_S)


def usual_firmware_s(instance_type: str) -> float:
    """Return an estimate of the type's firmware time beyond that of an ordinary type: half of its limit."""
    return (firmware_s(instance_type) - _FIRMWARE_S) / 2.0


def reach_s(lease_s: float, firmware_s: float = _FIRMWARE_S) -> float:
    """Return how far ahead the budget must reach for an instance to live `lease_s` after its boot script began."""
    return float(math.ceil((lease_s + firmware_s) / LEASE_SHARE))


def armed_s(reach_s: float, firmware_s: float = _FIRMWARE_S) -> float:
    """Return the lease that is armed for a budget that reaches `reach_s` ahead; the inverse of the function."""
    return float(math.floor(LEASE_SHARE * reach_s - firmware_s))
