"""Network of instances: the driver's own place, subnets in the zones that have the type, their ways to the Internet,
security group, clusters, and Elastic Fabric Adapters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rubberband.cloud import node
from rubberband.cloud.aws.calls import OWNER_TAG, AwsSession, Machines, by_tags, tag_specifications, tags_in
from rubberband.cloud.aws.client import pages, type_facts
from rubberband.cloud.aws.errors import FAILURES, code_of, explain, ignoring, lacks_rights
from rubberband.cloud.aws.prices import TypeFacts
from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.errors import InputError, ProviderError
from rubberband.units import counted, shown

_LOOKS = 10
_PAUSE_S = 1.0
"""A group that was just made may not be visible yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInstance:
    """The instance of EC2 on which this process runs."""

    instance_id: str
    address: str
    """Its private IPv4 address."""
    region: str
    zone: str
    vpc: str
    subnet: str
    security_groups: tuple[str, ...] = ()


def own_place(read: Callable[[str], str | None] | None = None) -> OwnInstance | None:
    """Return where this machine is; None outside EC2, or where the metadata service does not answer.

    `read` returns the text at a path below `/latest/meta-data/`, or None.
    """
    ask = read or node.metadata
    zone = ask("placement/availability-zone")
    mac = ask("mac") if zone else None
    if not zone or not mac:
        return None
    interface = f"network/interfaces/macs/{mac.strip('/')}"
    vpc, address = ask(f"{interface}/vpc-id"), ask("local-ipv4")
    if not vpc or not address:
        return None
    return OwnInstance(
        instance_id=ask("instance-id") or "",
        address=address,
        region=ask("placement/region") or zone[:-1],
        zone=zone,
        vpc=vpc,
        subnet=ask(f"{interface}/subnet-id") or "",
        security_groups=tuple((ask(f"{interface}/security-group-ids") or "").split()),
    )


def own_address(address: str) -> str:
    """Return `resources.aws.driver_address`. Raises InputError unless this machine, where the head listens, has it."""
    try:
        free_port(address)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"resources.aws.driver_address: {shown(address)} is no address of this machine ({error}); give one that "
            "`ip address` lists, or run on a head (`rubberband cloud up FILE`)"
        ) from None
    return address


def zones_of(session: AwsSession, instance_type: str) -> tuple[str, ...]:
    """Return the region's own zones that have the type, in order, without Local Zones (us-east-1-bos-1a), which have
    prices of their own. Raises botocore's errors."""
    found = pages(
        session.client("ec2").describe_instance_type_offerings,
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [instance_type]}],
    )
    return tuple(sorted(one["Location"] for one in found if one["Location"][:-1] == session.region))


def choose_subnets(
    session: AwsSession, asked: Sequence[str], instance_type: str, place: OwnInstance | None
) -> tuple[str, dict[str, str]]:
    """Return the VPC, and zone -> subnet in the order in which they are tried: those `asked`, or one for each zone.

    The default is the driver's VPC (its own zone first), or else the default VPC. Raises InputError for subnets that
    lie in several VPCs, if none lies in a zone that has the type, and where instances cost more than the region's
    prices for shared hardware; botocore's errors.
    """
    if place is not None and place.region != session.region:
        place = None
    subnets = _asked(session, asked) if asked else _of_vpc(session, place)
    offered = zones_of(session, instance_type)
    chosen: dict[str, str] = {}
    for subnet in sorted(subnets, key=lambda one: one.get("AvailableIpAddressCount") == 0):
        if subnet["AvailabilityZone"] in offered:
            chosen.setdefault(subnet["AvailabilityZone"], subnet["SubnetId"])
    if not chosen:
        here = ", ".join(sorted({subnet["AvailabilityZone"] for subnet in subnets}))
        raise InputError(
            f"resources.aws.subnets: {instance_type} is available in "
            f"{', '.join(offered) or f'no zone of {session.region}'}, and the subnets are in {here}; add a subnet "
            "there, or choose another instance_type"
        )
    vpc = str(subnets[0]["VpcId"])
    _check_tenancy(session, vpc)
    return vpc, chosen


def _check_tenancy(session: AwsSession, vpc: str) -> None:
    """Raise InputError for a VPC whose instances are on dedicated hardware, whatever is asked for."""
    found = session.client("ec2").describe_vpcs(VpcIds=[vpc])["Vpcs"]
    tenancy = found[0].get("InstanceTenancy", "default") if found else "default"
    if tenancy != "default":
        raise InputError(
            f"resources.aws.subnets: instances in {vpc} are on {tenancy} hardware, for which EC2 charges about 2 USD "
            "per hour more in a region, and higher rents; name subnets of another VPC, or run `aws ec2 "
            f"modify-vpc-tenancy --vpc-id {vpc} --instance-tenancy default --region {session.region}`"
        )


def _asked(session: AwsSession, asked: Sequence[str]) -> list[Any]:
    shown = session.client("ec2").describe_subnets(SubnetIds=list(asked))["Subnets"]
    found = {one["SubnetId"]: one for one in shown}
    subnets = [found[each] for each in asked]
    if len({subnet["VpcId"] for subnet in subnets}) > 1:
        where = ", ".join(f"{subnet['SubnetId']} in {subnet['VpcId']}" for subnet in subnets)
        raise InputError(f"resources.aws.subnets: they lie in several VPCs ({where}); keep those of one")
    return subnets


def _of_vpc(session: AwsSession, place: OwnInstance | None) -> list[Any]:
    ec2 = session.client("ec2")
    vpc = place.vpc if place is not None else _default_vpc(ec2, session.region)
    found = list(pages(ec2.describe_subnets, "Subnets", Filters=[{"Name": "vpc-id", "Values": [vpc]}]))
    if not found:
        raise InputError(f"resources.aws.subnets: {vpc} has no subnets in {session.region}; make one, or name others")
    own = place.subnet if place is not None else ""
    public = next((bool(one.get("MapPublicIpOnLaunch")) for one in found if one["SubnetId"] == own), None)

    def rank(subnet: Any) -> tuple[Any, ...]:
        # Instances need the driver's access to the Internet: its own subnet is best, then a similar one.
        unlike = public is not None and bool(subnet.get("MapPublicIpOnLaunch")) != public
        other_zone = place is not None and subnet["AvailabilityZone"] != place.zone
        room = -int(subnet.get("AvailableIpAddressCount", 0))
        return (
            other_zone,
            subnet["AvailabilityZone"],
            subnet["SubnetId"] != own,
            unlike,
            not subnet.get("DefaultForAz"),
            room,
            subnet["SubnetId"],
        )

    return sorted(found, key=rank)


def _default_vpc(ec2: Any, region: str) -> str:
    found = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    if not found:
        raise InputError(
            f"resources.aws.subnets: the account has no default VPC in {region}; name the subnets to use, or run "
            "`aws ec2 create-default-vpc`"
        )
    return str(found[0]["VpcId"])


def group_name(owner: str) -> str:
    """Return the name of an owner's security group."""
    return "rubberband" if owner == "rubberband" else f"rubberband-{owner}"


def ensure_group(session: AwsSession, owner: str, vpc: str, *, sleep: Callable[[float], None] = time.sleep) -> str:
    """Return our security group in the VPC, with ingress from itself only; create it where it is missing. Idempotent.

    Raises InputError if another group has its name, ProviderError if it does not become visible; botocore's errors.
    """
    ec2 = session.client("ec2")
    found = _find_group(ec2, owner, vpc)
    group = found["GroupId"] if found is not None else _make_group(ec2, owner, vpc, sleep)
    _let_itself_in(ec2, group, sleep)
    return str(group)


def delete_groups(session: AwsSession, owner: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Delete our security groups in every VPC. Return those deleted and those in use. Raises botocore's errors."""
    ec2 = session.client("ec2")
    deleted, in_use = [], []
    # All of them first: what is deleted while pages are read may move others to a page that was read.
    for group in list(pages(ec2.describe_security_groups, "SecurityGroups", Filters=_group_filters(owner))):
        try:
            ec2.delete_security_group(GroupId=group["GroupId"])
        except Exception as error:
            if code_of(error) in ("DependencyViolation", "InvalidGroup.InUse"):
                in_use.append(str(group["GroupId"]))
            elif code_of(error) != "InvalidGroup.NotFound":
                raise
        else:
            deleted.append(str(group["GroupId"]))
    return tuple(deleted), tuple(in_use)


def _group_filters(owner: str, vpc: str | None = None) -> list[dict[str, Any]]:
    named = [{"Name": "group-name", "Values": [group_name(owner)]}, *by_tags(owner=owner)]
    return named if vpc is None else [*named, {"Name": "vpc-id", "Values": [vpc]}]


def _find_group(ec2: Any, owner: str, vpc: str) -> Mapping[str, Any] | None:
    return next(iter(ec2.describe_security_groups(Filters=_group_filters(owner, vpc))["SecurityGroups"]), None)


def _make_group(ec2: Any, owner: str, vpc: str, sleep: Callable[[float], None]) -> str:
    name = group_name(owner)
    with ignoring("InvalidGroup.Duplicate"):
        made = ec2.create_security_group(
            GroupName=name,
            Description="RubberBand: instances and their head, among themselves",
            VpcId=vpc,
            TagSpecifications=tag_specifications({OWNER_TAG: owner, "Name": name}, "security-group"),
        )
        return str(made["GroupId"])
    for _ in range(_LOOKS):  # another process has just created it
        found = _find_group(ec2, owner, vpc)
        if found is not None:
            return str(found["GroupId"])
        sleep(_PAUSE_S)
    raise InputError(
        f"resources.aws.security_group: {vpc} has a group named {group_name(owner)} without the tag "
        f"{OWNER_TAG}={owner}; name it in the file to use it, or rename it"
    )


def _let_itself_in(ec2: Any, group: str, sleep: Callable[[float], None]) -> None:
    rule = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "UserIdGroupPairs": [{"GroupId": group}]}
    for _ in range(_LOOKS):
        with ignoring("InvalidGroup.NotFound", "InvalidGroupId.NotFound"):
            with ignoring("InvalidPermission.Duplicate"):
                ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
            return
        sleep(_PAUSE_S)
    raise ProviderError(f"security group {group} was created, but EC2 does not list it; try again")


def ensure_cluster(session: AwsSession, owner: str, zone: str, instance_type: str, *, only_try: bool = False) -> str:
    """Return the name of our cluster placement group for a type in a zone; create it where it is missing. Idempotent.

    It costs nothing. Runs of the owner share it. `only_try`: a dry run. Raises botocore's errors.
    """
    name = f"{group_name(owner)}-{instance_type}-{zone}"
    words = {"DryRun": True} if only_try else {}
    with ignoring("InvalidPlacementGroup.Duplicate", "DryRunOperation"):
        session.client("ec2").create_placement_group(
            GroupName=name,
            Strategy="cluster",
            TagSpecifications=tag_specifications({OWNER_TAG: owner}, "placement-group"),
            **words,
        )
    return name


def delete_clusters(session: AwsSession, owner: str) -> tuple[str, ...]:
    """Delete our placement groups and return those deleted. One in use stays. Raises botocore's errors."""
    ec2 = session.client("ec2")
    deleted = []
    for group in ec2.describe_placement_groups(Filters=by_tags(owner=owner))["PlacementGroups"]:
        with ignoring("InvalidPlacementGroup.InUse", "InvalidPlacementGroup.Unknown"):
            ec2.delete_placement_group(GroupName=group["GroupName"])
            deleted.append(str(group["GroupName"]))
    return tuple(deleted)


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
        return (
            f"instances in {', '.join(self.private)} get no public address, and need a NAT gateway (or "
            "resources.aws.install: none, and endpoints of SSM and S3 in the VPC). It charges its hours, which are in "
            "no bill here, and what they download; checkpoints are free with a gateway endpoint of S3"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Adapters of instances of several types."""

    cards: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """(type, zone) -> its network cards that get one; none are missing."""
    note: str = ""
    """Line on cards without one, with the remedy; empty where all have one, or the type supports none."""


def fabric_of(session: AwsSession, machines: Machines, types: Sequence[str]) -> Fabric:
    """Return the adapters of `types`, of which the first is preferred, and let the security group pass their traffic.

    The instances of a trial need one network, whichever of the types they are: so all get adapters, or none. Without
    the rights for that, none. Raises botocore's errors.
    """
    facts = []
    for name in types:
        with suppress(InputError):  # EC2 has no such type here
            facts.append(type_facts(session, name))
    if not facts or not facts[0].efa_cards:
        return Fabric()
    first = facts[0]
    if lacking := [one.instance_type for one in facts if not one.efa_cards]:
        others = ", ".join(lacking)
        return Fabric(note=f"{_tcp(first)}, as {others} may be used instead and has none: leave it out for EFA")
    try:
        if not _passes(session, machines):
            return Fabric(
                note=f"{_tcp(first)}: {machines.security_group} must let all traffic from and to itself; add that, or "
                "leave out resources.aws.security_group"
            )
    except FAILURES as error:
        if not lacks_rights(error):
            raise
        return Fabric(note=f"{_tcp(first)}: {explain(error)} (`rubberband aws setup` renews the policy)")
    subnets = session.client("ec2").describe_subnets(SubnetIds=list(machines.subnets.values()))["Subnets"]
    public = {one["AvailabilityZone"] for one in subnets if one.get("MapPublicIpOnLaunch")}
    cards = {
        zone: {
            one.instance_type: tuple(card for card in one.efa_cards if card == 0 or zone not in public) for one in facts
        }
        for zone in machines.subnets
    }
    chosen = {(name, zone): own for zone, each in cards.items() if all(each.values()) for name, own in each.items()}
    least = min(len(chosen.get((first.instance_type, zone), ())) for zone in cards)
    return Fabric(cards=chosen, note=_note(first, least, public))


def _tcp(facts: TypeFacts) -> str:
    return f"instances of {facts.instance_type} reach each other by TCP, without EFA"


def _note(first: TypeFacts, least: int, public: set[str]) -> str:
    if least == len(first.efa_cards):
        return ""
    what = f"instances of {first.instance_type} have EFA on {least} of {counted(len(first.efa_cards), 'network card')}"
    return (
        f"{what}, as EC2 gives no public address to an instance that uses several; for all of them, name private "
        f"subnets with a NAT gateway (resources.aws.subnets) instead of those in {', '.join(sorted(public))}"
    )


def _passes(session: AwsSession, machines: Machines) -> bool:
    """Return whether the security group lets all traffic from and to itself; change it where it is ours."""
    ec2, group = session.client("ec2"), machines.security_group
    shown = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]
    is_ours = shown["GroupName"] == group_name(machines.owner) and tags_in(shown).get(OWNER_TAG) == machines.owner
    if is_ours:
        every = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
        for allow in (ec2.authorize_security_group_ingress, ec2.authorize_security_group_egress):
            with ignoring("InvalidPermission.Duplicate"):
                allow(GroupId=group, IpPermissions=every)
    return is_ours or all(
        any(
            rule.get("IpProtocol") == "-1"
            and group in [pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())]
            for rule in shown.get(rules, ())
        )
        for rules in ("IpPermissions", "IpPermissionsEgress")
    )
