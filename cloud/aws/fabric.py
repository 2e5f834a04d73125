"""Elastic Fabric Adapters (EFA): the network by which NCCL joins instances of types that have it.

They cost nothing. Their traffic is neither TCP nor UDP, and passes between instances of one zone whose security group
lets everything from and to itself (EC2 User Guide, "Elastic Fabric Adapter"). An instance with several network
interfaces gets no public address: so one card has an adapter in a subnet with public addresses, all of them in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rubberband.cloud.aws.calls import OWNER_TAG, AwsSession, Machines, tags_in
from rubberband.cloud.aws.errors import FAILURES, explain, ignoring, lacks_rights
from rubberband.cloud.aws.images import TypeFacts, type_facts
from rubberband.cloud.aws.network import group_name
from rubberband.errors import InputError
from rubberband.units import counted


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
    public = _public(session, machines)
    cards = {zone: {one.instance_type: _cards(one, zone in public) for one in facts} for zone in machines.subnets}
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


def _cards(facts: TypeFacts, public: bool) -> tuple[int, ...]:
    return tuple(card for card in facts.efa_cards if card == 0) if public else facts.efa_cards


def _public(session: AwsSession, machines: Machines) -> set[str]:
    """Return the zones whose subnet gives public addresses."""
    shown = session.client("ec2").describe_subnets(SubnetIds=list(machines.subnets.values()))["Subnets"]
    return {one["AvailabilityZone"] for one in shown if one.get("MapPublicIpOnLaunch")}


def _passes(session: AwsSession, machines: Machines) -> bool:
    """Return whether the security group lets all traffic from and to itself; change it where it is ours."""
    ec2, group = session.client("ec2"), machines.security_group
    shown = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]
    is_ours = shown["GroupName"] == group_name(machines.owner) and tags_in(shown).get(OWNER_TAG) == machines.owner
    every = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    for rules, allow in (
        ("IpPermissions", ec2.authorize_security_group_ingress),
        ("IpPermissionsEgress", ec2.authorize_security_group_egress),
    ):
        if any(_is_for_all(rule, group) for rule in shown.get(rules, ())):
            continue
        if not is_ours:
            return False
        with ignoring("InvalidPermission.Duplicate"):
            allow(GroupId=group, IpPermissions=every)
    return True


def _is_for_all(rule: Mapping[str, Any], group: str) -> bool:
    peers = [pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())]
    return rule.get("IpProtocol") == "-1" and group in peers
