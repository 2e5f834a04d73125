"""Open EC2 for an experiment: session, machines, the head on this machine, and the provider over them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from rubberband.cloud import catalogue
from rubberband.cloud.aws.calls import Session
from rubberband.cloud.aws.choosing import Ware
from rubberband.cloud.aws.client import open_session
from rubberband.cloud.aws.guards import Guards
from rubberband.cloud.aws.images import type_facts
from rubberband.cloud.aws.metadata import Place, own_address, own_place
from rubberband.cloud.aws.provider import LEAST_LEASE_S, AwsProvider
from rubberband.cloud.aws.resolving import in_one_line, resolve
from rubberband.cloud.catalogue import Table
from rubberband.cloud.ray_head import RayHead
from rubberband.cloud.start_limits import reach_s
from rubberband.errors import InputError
from rubberband.spec.resources import Resources
from rubberband.units import shown
from rubberband.values.offer import Offer

DEVICE_VARIABLE = "RUBBERBAND_DEVICE"
"""Environment variable of the driver: `cpu` or `cuda`, what trials use whatever the type has. For rehearsals, in which
an instance is a machine without GPUs."""
_DEVICES: Mapping[str, Literal["cpu", "cuda"]] = {"cpu": "cpu", "cuda": "cuda"}


def open_provider(
    name: str,
    directory: Path,
    resources: Resources,
    offer: Offer,
    *,
    run: str,
    session: Session | None = None,
    dearest_usd_per_hour: float | None = None,
    table: Table | None = None,
    environment: Mapping[str, str] = os.environ,
    not_before: float = 0.0,
    together: bool = False,
) -> AwsProvider:
    """The provider of one run of the experiment `name`, which keeps its records in `directory`.

    Where `offer`'s type is not to be had, other types of the experiment stand in that have the same GPUs and cost no
    more than `dearest_usd_per_hour` (None: than the offer); `table` has their prices.

    `together`: trials may span instances, so all of them are to be in one zone.

    Raises InputError for what does not fit in the account or on this machine, with the remedy; ProviderError if another
    driver holds the directory.
    """
    check_lease(resources)
    session = session or open_session(resources.region)
    place = own_place()
    host = _host(resources, place)
    device = device_of(session, offer.instance_type, environment)
    machines = resolve(
        session,
        resources.aws,
        offer.instance_type,
        checkpoints=resources.checkpoints,
        place=place,
        device=device,
    )
    limit_usd = max(offer.price_usd_per_hour, dearest_usd_per_hour or 0.0)
    head = RayHead(name, directory, host=host, lease_s=resources.lease_length_s, not_before=not_before)
    return AwsProvider(
        name,
        directory,
        session,
        machines,
        head,
        run=run,
        wares=[_ware(offer), *_stand_ins(resources, offer, limit_usd, table, environment)],
        gpus=offer.gpus,
        lease_s=resources.lease_length_s,
        device=device,
        guards=_guards(session, resources, head.clock),
        clock=head.clock,
        together=together,
    )


def _guards(session: Session, resources: Resources, clock: Callable[[], float]) -> Guards | None:
    def begin(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="guards", daemon=True).start()

    role = resources.aws.guard_role
    return None if role is None else Guards(session, role, clock=clock, begin=begin)


def check_lease(resources: Resources) -> None:
    """Raise InputError for a lease that ends before it could be renewed for the first time."""
    lease_s, least_s = resources.lease_length_s, reach_s(LEAST_LEASE_S)
    if lease_s < least_s:
        raise InputError(
            f"resources.lease: {lease_s:g} s is too short for EC2, where an instance must boot before the lease can be "
            f"renewed; give at least {least_s:.0f} s"
        )


def _host(resources: Resources, place: Place | None) -> str:
    """This machine's address as instances reach it."""
    if resources.aws.driver_address is not None:
        return own_address(resources.aws.driver_address)
    if place is None:
        raise InputError(
            "resources.aws.driver_address: this machine is not in EC2, and instances could not reach it; start a head "
            "there with `rubberband up FILE` and run the experiment on it, or give this machine's address in the VPC"
        )
    return place.address


def stand_ins(
    resources: Resources, offer: Offer, *, table: Table | None = None, environment: Mapping[str, str] = os.environ
) -> list[Offer]:
    """The offers of the experiment's other types that have as many GPUs, of the same model, cheapest first."""
    known = catalogue.table_of(resources, environment, table)
    row = known.get(offer.instance_type)
    found = []
    for name in catalogue.types_of(resources):
        other = known.get(name)
        if name == offer.instance_type or row is None or other is None:
            continue
        if (other.gpus, other.gpu_model) == (row.gpus, row.gpu_model):
            found.append(catalogue.offer(resources, instance_type=name, environment=environment, table=known))
    return sorted(found, key=lambda offer: offer.price_usd_per_hour)


def _stand_ins(
    resources: Resources, offer: Offer, limit_usd: float, table: Table | None, environment: Mapping[str, str]
) -> Iterator[Ware]:
    for other in stand_ins(resources, offer, table=table, environment=environment):
        if other.price_usd_per_hour <= limit_usd:
            yield _ware(other)


def _ware(offer: Offer) -> Ware:
    return Ware(
        instance_type=offer.instance_type,
        on_demand_usd_per_hour=offer.price_usd_per_hour,
        spot_usd_per_hour=None if offer.spot is None else offer.spot.price_usd_per_hour,
    )


def device_of(
    session: Session, instance_type: str, environment: Mapping[str, str] = os.environ
) -> Literal["cpu", "cuda"]:
    """What trials use on a type: its GPUs, or what the environment says. Raises InputError for another word there."""
    asked = environment.get(DEVICE_VARIABLE, "")
    if asked in _DEVICES:
        return _DEVICES[asked]
    if asked:
        raise InputError(f"{DEVICE_VARIABLE}={shown(asked)}: a device is cpu or cuda; leave it unset")
    with in_one_line():
        return "cuda" if type_facts(session, instance_type).gpus else "cpu"
