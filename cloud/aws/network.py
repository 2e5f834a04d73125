"""Network of instances: the driver's own place, subnets in the zones that have the type, security group, clusters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rubberband.cloud import node
from rubberband.cloud.aws.calls import OWNER_TAG, AwsSession, by_tags, tag_specifications
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import code_of, ignoring
from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.errors import InputError, ProviderError
from rubberband.units import shown

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
    """Return the zones that have the type, in order. Raises botocore's errors."""
    found = pages(
        session.client("ec2").describe_instance_type_offerings,
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [instance_type]}],
    )
    return tuple(sorted(one["Location"] for one in found))


def choose_subnets(
    session: AwsSession, asked: Sequence[str], instance_type: str, place: OwnInstance | None
) -> tuple[str, dict[str, str]]:
    """Return the VPC, and zone -> subnet in the order in which they are tried: those `asked`, or one for each zone.

    The default is the driver's VPC (its own zone first), or else the default VPC. Raises InputError for subnets that
    do not exist or lie in several VPCs, if none lies in a zone that has the type, and where instances cost more than
    the region's prices for shared hardware; botocore's errors.
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
    try:
        found = {
            one["SubnetId"]: one for one in session.client("ec2").describe_subnets(SubnetIds=list(asked))["Subnets"]
        }
    except Exception as error:
        if not code_of(error).startswith("InvalidSubnetID"):
            raise
        raise InputError(
            f"resources.aws.subnets: not all of {', '.join(asked)} are subnets of this account in {session.region} "
            f"({error}); correct them, or leave them out"
        ) from None
    subnets = [found[each] for each in asked]
    if outside := [one for one in subnets if not _in_region(session, one)]:
        where = ", ".join(f"{one['SubnetId']} in {one['AvailabilityZone']}" for one in outside)
        raise InputError(
            f"resources.aws.subnets: {where}: Local and Wavelength Zones have prices of their own, which "
            f"RubberBand does not count; keep subnets in the zones of {session.region} itself"
        )
    if without := [one["SubnetId"] for one in subnets if one.get("Ipv6Native")]:
        raise InputError(
            f"resources.aws.subnets: {', '.join(without)} has no IPv4 addresses, by which instances and their head "
            "reach each other; name subnets that have"
        )
    if len({subnet["VpcId"] for subnet in subnets}) > 1:
        where = ", ".join(f"{subnet['SubnetId']} in {subnet['VpcId']}" for subnet in subnets)
        raise InputError(f"resources.aws.subnets: they lie in several VPCs ({where}); keep those of one")
    return subnets


def _in_region(session: AwsSession, subnet: Any) -> bool:
    """Return whether a subnet is in a zone of the region, not in a Local Zone and the like (us-east-1-bos-1a)."""
    return str(subnet["AvailabilityZone"])[:-1] == session.region


def _of_vpc(session: AwsSession, place: OwnInstance | None) -> list[Any]:
    ec2 = session.client("ec2")
    vpc = place.vpc if place is not None else _default_vpc(ec2, session.region)
    shown = pages(ec2.describe_subnets, "Subnets", Filters=[{"Name": "vpc-id", "Values": [vpc]}])
    found = [one for one in shown if _in_region(session, one) and not one.get("Ipv6Native")]
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


def check_group(session: AwsSession, group: str, vpc: str) -> str:
    """Return `group`. Raises InputError unless it is a security group of the VPC; botocore's errors."""
    found = []
    with ignoring("InvalidGroup"):
        found = session.client("ec2").describe_security_groups(GroupIds=[group])["SecurityGroups"]
    if not found or found[0].get("VpcId") != vpc:
        where = f"is in {found[0].get('VpcId')}, and the subnets are in {vpc}" if found else "does not exist"
        raise InputError(f"resources.aws.security_group: {group} {where}; correct it, or leave it out")
    return group


def ensure_group(session: AwsSession, owner: str, vpc: str, *, sleep: Callable[[float], None] = time.sleep) -> str:
    """Return our security group in the VPC, with ingress from itself only; create it where it is missing. Idempotent.

    Raises InputError if another group has its name, ProviderError if it does not become visible; botocore's errors.
    """
    ec2 = session.client("ec2")
    found = _find_group(ec2, owner, vpc)
    group = found["GroupId"] if found is not None else _make_group(ec2, owner, vpc, sleep)
    if found is None or not _lets_itself_in(found):
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


def _lets_itself_in(group: Mapping[str, Any]) -> bool:
    for rule in group.get("IpPermissions", ()):
        every_port = rule.get("FromPort", 0) <= 1 and rule.get("ToPort", 65535) == 65535
        every_port = rule.get("IpProtocol") == "-1" or (rule.get("IpProtocol") == "tcp" and every_port)
        if every_port and any(pair.get("GroupId") == group["GroupId"] for pair in rule.get("UserIdGroupPairs", ())):
            return True
    return False


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
