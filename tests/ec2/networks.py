"""VPCs, subnets and security groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.filters import Reader, filtered, page
from tests.ec2.launch_order import tags_of
from tests.ec2.launch_rights import arn, request_tags, resource_tags
from tests.ec2.request import Request, operation
from tests.ec2.world import ACCOUNT, Group, Rule, Subnet, Vpc


@operation("ec2", "DescribeVpcs", checked=True)
def describe_vpcs(request: Request) -> dict[str, Any]:
    chosen = _chosen(request.world.vpcs, request.params.get("VpcIds"), "InvalidVpcID.NotFound", "The vpc ID")
    shown, following = page(filtered(chosen, request.params, _VPC_READERS), request.params)
    return {"Vpcs": [_shown_vpc(vpc) for vpc in shown], **following}


@operation("ec2", "DescribeSubnets", checked=True)
def describe_subnets(request: Request) -> dict[str, Any]:
    asked = request.params.get("SubnetIds")
    chosen = _chosen(request.world.subnets, asked, "InvalidSubnetID.NotFound", "The subnet ID")
    shown, following = page(filtered(chosen, request.params, _SUBNET_READERS), request.params)
    return {"Subnets": [_shown_subnet(request, subnet) for subnet in shown], **following}


@operation("ec2", "DescribeRouteTables", checked=True)
def describe_route_tables(request: Request) -> dict[str, Any]:
    """DescribeRouteTables: a VPC's main one leads to its Internet gateway; subnets that are not public have their own,
    which leads to a NAT gateway."""
    tables = [_main_table(vpc) for vpc in request.world.vpcs.values()]
    tables += [_private_table(subnet) for subnet in request.world.subnets.values() if not subnet.public]
    shown, following = page(filtered(tables, request.params, _ROUTE_READERS), request.params)
    return {"RouteTables": shown, **following}


def _main_table(vpc: Vpc) -> dict[str, Any]:
    gateway = {"GatewayId": f"igw-{vpc.vpc_id[4:]}", "State": "active"}
    return {"VpcId": vpc.vpc_id, "Routes": [gateway], "Associations": [{"Main": True}]}


def _private_table(subnet: Subnet) -> dict[str, Any]:
    nat = {"NatGatewayId": f"nat-{subnet.subnet_id[7:]}", "State": "active"}
    s3 = {"DestinationPrefixListId": "pl-63a5400a", "GatewayId": f"vpce-{subnet.subnet_id[7:]}", "State": "active"}
    associations = [{"Main": False, "SubnetId": subnet.subnet_id}]
    return {"VpcId": subnet.vpc_id, "Routes": [nat, s3] if subnet.s3_endpoint else [nat], "Associations": associations}


@operation("ec2", "DescribeSecurityGroups", checked=True)
def describe_security_groups(request: Request) -> dict[str, Any]:
    asked = request.params.get("GroupIds")
    chosen = _chosen(request.world.groups, asked, "InvalidGroup.NotFound", "The security group")
    names = request.params.get("GroupNames")
    named = [group for group in chosen if not names or group.name in names]
    shown, following = page(filtered(named, request.params, _GROUP_READERS), request.params)
    return {"SecurityGroups": [_shown_group(group) for group in shown], **following}


@operation("ec2", "CreateSecurityGroup")
def create_security_group(request: Request) -> dict[str, Any]:
    """CreateSecurityGroup: a name is taken once in each VPC."""
    world, params = request.world, request.params
    vpc_id = params.get("VpcId") or next(vpc.vpc_id for vpc in world.vpcs.values() if vpc.default)
    if vpc_id not in world.vpcs:
        raise FakeError("InvalidVpcID.NotFound", f"The vpc ID '{vpc_id}' does not exist")
    tags = tags_of(params).get("security-group", {})
    asked = {"ec2:Region": world.region, **request_tags(tags)}
    request.access.check("ec2:CreateSecurityGroup", arn(world, "security-group/*"), asked)
    request.access.check("ec2:CreateSecurityGroup", arn(world, f"vpc/{vpc_id}"), {"ec2:Region": world.region})
    if tags:
        created = {**asked, "ec2:CreateAction": "CreateSecurityGroup"}
        request.access.check("ec2:CreateTags", arn(world, "security-group/*"), created)
    request.end_dry_run()
    name = params["GroupName"]
    if any(group.name == name and group.vpc_id == vpc_id for group in world.groups.values()):
        message = f"The security group '{name}' already exists for VPC '{vpc_id}'"
        raise FakeError("InvalidGroup.Duplicate", message)
    group_id = world.new_id("sg")
    group = Group(group_id=group_id, name=name, description=params["Description"], vpc_id=vpc_id, tags=tags)
    world.groups[group_id] = group
    return {"GroupId": group_id, **({"Tags": _shown_tags(tags)} if tags else {})}


@operation("ec2", "DeleteSecurityGroup")
def delete_security_group(request: Request) -> dict[str, Any]:
    """DeleteSecurityGroup: refused while an instance that is not terminated has it, or another group names it."""
    group = _changed(request, "ec2:DeleteSecurityGroup")
    world = request.world
    instances = (
        one for one in world.instances.values() if one.keeps_interfaces or one.state(request.now) != "terminated"
    )
    worn = any(group.group_id == worn_id for one in instances for worn_id, _ in one.groups)
    others = (one for one in world.groups.values() if one is not group)
    if worn or any(rule.peer == group.group_id for one in others for rule in one.ingress + one.egress):
        raise FakeError("DependencyViolation", f"resource {group.group_id} has a dependent object")
    if group.name == "default":
        raise FakeError("CannotDelete", f'the specified group: "{group.group_id}" name: "default" cannot be deleted')
    del world.groups[group.group_id]
    return {"Return": True, "GroupId": group.group_id}


@operation("ec2", "AuthorizeSecurityGroupIngress")
def authorize_ingress(request: Request) -> dict[str, Any]:
    group = _changed(request, "ec2:AuthorizeSecurityGroupIngress")
    return _authorized(request, group.ingress)


@operation("ec2", "AuthorizeSecurityGroupEgress")
def authorize_egress(request: Request) -> dict[str, Any]:
    group = _changed(request, "ec2:AuthorizeSecurityGroupEgress")
    return _authorized(request, group.egress)


def _changed(request: Request, action: str) -> Group:
    group_id = request.params.get("GroupId", "")
    group: Group = _chosen(request.world.groups, [group_id], "InvalidGroup.NotFound", "The security group")[0]
    keys = {
        "ec2:Region": request.world.region,
        "ec2:Vpc": arn(request.world, f"vpc/{group.vpc_id}"),
        **resource_tags(group.tags),
    }
    request.access.check(action, arn(request.world, f"security-group/{group_id}"), keys)
    request.end_dry_run()
    return group


def _authorized(request: Request, rules: list[Rule]) -> dict[str, Any]:
    added = list(_asked_rules(request.params))
    for rule in added:
        if rule.peer_kind == "group" and rule.peer not in request.world.groups:
            raise FakeError("InvalidGroup.NotFound", f"The security group '{rule.peer}' does not exist")
        if rule in rules:
            message = f'the specified rule "peer: {rule.peer}, {rule.protocol}, ALLOW" already exists'
            raise FakeError("InvalidPermission.Duplicate", message)
    rules.extend(added)
    return {"Return": True}


def _asked_rules(params: Mapping[str, Any]) -> Iterator[Rule]:
    for permission in params["IpPermissions"]:
        ports = permission["IpProtocol"], permission.get("FromPort", -1), permission.get("ToPort", -1)
        for pair in permission.get("UserIdGroupPairs", ()):
            yield Rule(*ports, "group", pair.get("GroupId", ""))
        for ip_range in permission.get("IpRanges", ()):
            yield Rule(*ports, "cidr", ip_range["CidrIp"])


def _chosen(things: Mapping[str, Any], asked: Iterable[str] | None, code: str, kind: str) -> list[Any]:
    if not asked:
        return list(things.values())
    for name in asked:
        if name not in things:
            raise FakeError(code, f"{kind} '{name}' does not exist")
    return [things[name] for name in asked]


def _shown_vpc(vpc: Vpc) -> dict[str, Any]:
    return {
        "VpcId": vpc.vpc_id,
        "IsDefault": vpc.default,
        "State": "available",
        "InstanceTenancy": vpc.tenancy,
        "Tags": _shown_tags(vpc.tags),
    }


def _shown_subnet(request: Request, subnet: Subnet) -> dict[str, Any]:
    return {
        "SubnetId": subnet.subnet_id,
        "VpcId": subnet.vpc_id,
        "AvailabilityZone": subnet.zone,
        "AvailableIpAddressCount": subnet.free_addresses,
        "DefaultForAz": subnet.default,
        "MapPublicIpOnLaunch": subnet.public,
        "State": "available",
        "Tags": _shown_tags(subnet.tags),
    }


def _shown_group(group: Group) -> dict[str, Any]:
    return {
        "GroupId": group.group_id,
        "GroupName": group.name,
        "Description": group.description,
        "VpcId": group.vpc_id,
        "IpPermissions": _shown_permissions(group.ingress),
        "IpPermissionsEgress": _shown_permissions(group.egress),
        "Tags": _shown_tags(group.tags),
    }


def _shown_permissions(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    permissions: dict[tuple[str, int, int], dict[str, Any]] = {}
    for rule in rules:
        protocol, from_port, to_port = rule[:3]
        ports = {} if protocol == "-1" else {"FromPort": from_port, "ToPort": to_port}
        empty: dict[str, Any] = {"UserIdGroupPairs": [], "IpRanges": [], "Ipv6Ranges": [], "PrefixListIds": []}
        permission = permissions.setdefault(rule[:3], {"IpProtocol": protocol, **ports, **empty})
        if rule.peer_kind == "group":
            permission["UserIdGroupPairs"].append({"GroupId": rule.peer, "UserId": ACCOUNT})
        else:
            permission["IpRanges"].append({"CidrIp": rule.peer})
    return list(permissions.values())


def _shown_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


_VPC_READERS: Mapping[str, Reader] = {
    "is-default": lambda vpc: (str(vpc.default).lower(),),
    "state": lambda vpc: ("available",),
    "vpc-id": lambda vpc: (vpc.vpc_id,),
}
_SUBNET_READERS: Mapping[str, Reader] = {
    "availability-zone": lambda subnet: (subnet.zone,),
    "default-for-az": lambda subnet: (str(subnet.default).lower(),),
    "state": lambda subnet: ("available",),
    "subnet-id": lambda subnet: (subnet.subnet_id,),
    "vpc-id": lambda subnet: (subnet.vpc_id,),
}
_ROUTE_READERS: Mapping[str, Reader] = {"vpc-id": lambda table: (table["VpcId"],)}
_GROUP_READERS: Mapping[str, Reader] = {
    "group-id": lambda group: (group.group_id,),
    "group-name": lambda group: (group.name,),
    "vpc-id": lambda group: (group.vpc_id,),
}
