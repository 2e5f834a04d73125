"""Charges beside an instance's rent in this account: its root volume, an address, traffic through NAT.

It only reads. Where a role may not read, or nothing fits, the assumptions of `rubberband.cloud.side_costs` hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import FAILURES, explain
from rubberband.cloud.aws.images import Image, TypeFacts, built_image, find_image, root_volume_gb, type_facts
from rubberband.cloud.aws.network import OwnInstance, choose_subnets, own_place
from rubberband.cloud.aws.resolving import what_to_install
from rubberband.cloud.catalogue import types_of
from rubberband.cloud.prices import LiveTable
from rubberband.cloud.side_costs import SideFacts
from rubberband.errors import InputError
from rubberband.spec.resources import Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysOut:
    """Access of instances in some subnets to the Internet."""

    private: tuple[str, ...]
    """Subnets that give no public address."""
    nat: bool
    """Whether one of those uses a NAT gateway."""
    s3_endpoint: bool
    """Whether all of those reach S3 by a gateway endpoint, which is free."""

    def note(self) -> str:
        """Return a note on private subnets; empty where there are none."""
        if not self.private:
            return ""
        where = f"instances in {', '.join(self.private)} get no public address"
        if not self.nat:
            return (
                f"{where}: to install packages and to read the Ray token they need a NAT gateway there (or "
                "resources.aws.install: none, and endpoints of SSM and S3 in the VPC)"
            )
        if self.s3_endpoint:
            return f"{where}; the NAT gateway charges what they download, beside its hours, which are not in the bill"
        return (
            f"{where}, and S3 is reached through the NAT gateway, which charges every GB of checkpoints (not in the "
            "bill, like its hours); add a gateway endpoint of S3 to the VPC, which is free"
        )


def ways_out(session: AwsSession, subnets: Sequence[str]) -> WaysOut:
    """Return the access of these subnets to the Internet, by their route tables. Raises botocore's errors."""
    ec2 = session.client("ec2")
    shown = ec2.describe_subnets(SubnetIds=list(subnets))["Subnets"]
    private = [one for one in shown if not one.get("MapPublicIpOnLaunch")]
    if not private:
        return WaysOut(private=(), nat=False, s3_endpoint=False)
    of_vpc = [{"Name": "vpc-id", "Values": [private[0]["VpcId"]]}]
    tables = list(pages(ec2.describe_route_tables, "RouteTables", Filters=of_vpc))
    routes = [_routes(tables, one["SubnetId"]) for one in private]
    return WaysOut(
        private=tuple(one["SubnetId"] for one in private),
        nat=any("NatGatewayId" in route for each in routes for route in each),
        s3_endpoint=all(any("DestinationPrefixListId" in route for route in each) for each in routes),
    )


def _routes(tables: Sequence[Any], subnet: str) -> Sequence[Mapping[str, Any]]:
    """Return the routes of the subnet's own table, or of the VPC's main one."""
    for key, value in (("SubnetId", subnet), ("Main", True)):
        for table in tables:
            if any(one.get(key) == value for one in table.get("Associations", ())):
                return list(table.get("Routes", ()))
    return []


def side_facts(
    session: AwsSession, resources: Resources, instance_type: str, place: OwnInstance | None = None
) -> SideFacts:
    """Return what instances of a type are charged for besides rent. Raises InputError if they could not be launched;
    botocore's errors."""
    words = resources.aws
    facts = type_facts(session, instance_type)
    installs = (words.install or "").strip() != "none"
    is_head = instance_type == words.head_instance_type
    own = None if is_head else _built(session, resources, facts)
    image = own or find_image(session, None if is_head and installs else words.image, facts, installs=installs)
    plain = words.image is None and not facts.gpus and installs and own is None
    volume_gb = root_volume_gb(None if is_head else words.volume_gb, image, plain=plain) or image.root_gb
    _, subnets = choose_subnets(session, words.subnets, instance_type, place)
    out = ways_out(session, list(subnets.values()))
    return SideFacts(
        volume_gb=(volume_gb or 0) + image.further_gb,
        public_address=len(out.private) < len(subnets),
        nat=out.nat,
        s3_endpoint=out.s3_endpoint,
        installed=installs and own is None,
    )


def _built(session: AwsSession, resources: Resources, facts: TypeFacts) -> Image | None:
    """Return the owner's image that instances would boot, if there is one. Nothing is written into the bucket."""
    try:
        installed = what_to_install(None, resources.aws, resources.checkpoints)
    except InputError:  # preflight reports it
        return None
    return built_image(session, resources.aws, installed, facts)


def with_side_facts(table: LiveTable, session: AwsSession, resources: Resources) -> LiveTable:
    """Return the table with the side costs of the experiment's types (and its head) in this account.

    A note says why they are unknown, if they are.
    """
    rows, notes, place = dict(table), list(table.notes), own_place()
    names = dict.fromkeys([*types_of(resources), resources.aws.head_instance_type])
    for name in [name for name in names if name in rows]:
        try:
            beside = side_facts(session, resources, name, place)
        except InputError:  # preflight reports it
            continue
        except FAILURES as error:
            notes.append(f"volumes and addresses are those of a new account, with no NAT gateway: {explain(error)}")
            break
        live = replace(rows[name].live_in(resources.region), beside=beside)
        rows[name] = replace(rows[name], live={**rows[name].live, resources.region: live})
    return LiveTable(rows, notes)
