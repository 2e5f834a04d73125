"""The record of the provider `shed`. RubberBand imports it to read a file, so it imports little."""

from __future__ import annotations

from collections.abc import Mapping

from rubberband.cloud.catalogue import InstanceType
from rubberband.spec.fields import Words
from rubberband.spec.resources import Resources
from rubberband.values.kinds import ProviderKind

SHED = ProviderKind(
    open_cluster="shed_cloud.cluster:open_cluster",
    options="shed_cloud:Options",
    instance_types="shed_cloud:instance_types",
    is_rented=True,
    provision_s=1.0,
    init_s=10.0,
    release_margin_s=10.0,
    lease_s=60.0,
)


class Options(Words):
    """The words of `resources.options`."""

    boot_s: float = 0.0
    """Time that a machine takes to boot."""


def instance_types(resources: Resources, _environment: Mapping[str, str]) -> dict[str, InstanceType]:
    """Return the types by name, with their prices in US dollars per hour."""
    prices = {"small": (1, 0.4), "large": (4, 1.5)}
    return {
        name: InstanceType(instance_type=name, gpus=gpus, prices_usd_per_hour={resources.region: usd})
        for name, (gpus, usd) in prices.items()
    }
