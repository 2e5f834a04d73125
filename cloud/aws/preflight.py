"""Checks before a run on EC2: each problem that can be known before renting is refused in one line.

Nothing is bought: permissions are checked by dry runs and by harmless calls. Capacity cannot be checked.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.exceptions import ClientError

from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import AwsSession, Machines, NodeStart, Purchase, by_tags, launch_request, tags_of
from rubberband.cloud.aws.capacity import check_size, check_time, quotas, reservation_of
from rubberband.cloud.aws.client import check_region, instances, type_facts
from rubberband.cloud.aws.errors import FAILURES, code_of, explain, ignoring, in_one_line, lacks_rights, missing_action
from rubberband.cloud.aws.guards import delete, guard
from rubberband.cloud.aws.network import (
    Fabric,
    OwnInstance,
    choose_subnets,
    ensure_cluster,
    fabric_of,
    own_address,
    own_place,
    ways_out,
)
from rubberband.cloud.aws.provider import check_lease
from rubberband.cloud.aws.s3 import PACKAGES, is_bucket, owner_words, place_in, trouble
from rubberband.errors import InputError, ProviderError
from rubberband.files import file_system, is_remote
from rubberband.installation import STORE_DRIVERS, require_driver
from rubberband.spec.resources import Resources
from rubberband.units import counted, shown
from rubberband.values.offer import Offer
from rubberband.values.plan import Market

MOST_S = 15.0
"""Largest difference from AWS's clock: half of the margin to max_cost that is kept for releasing instances."""


def check_clock(answer: Mapping[str, Any], now: float) -> None:
    """Compare the date of an answer of AWS, which bills by its clock, with `now` (Unix time).

    Raises InputError if they are far apart.
    """
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        off_s = now - parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):  # an endpoint that is not AWS's may send no date
        return
    if abs(off_s) > MOST_S:
        raise InputError(
            f"this machine's clock is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} AWS's, by which "
            f"instances are billed and end themselves, and may be off by {MOST_S:.0f} s; correct it (chrony, or "
            "`timedatectl set-ntp true`)"
        )


def check_store(session: AwsSession, resources: Resources) -> Iterator[str]:
    """Yield notes on `resources.checkpoints`.

    Raises InputError, with the remedy, if instances do not see the store, if it does not outlive them, or if it cannot
    be written; botocore's errors.
    """
    url = resources.checkpoints
    if url is None:
        raise InputError(
            "resources.checkpoints: instances of EC2 do not see the experiment's folder; give s3://bucket/prefix, or a "
            "directory on a network mount that all of them have"
        )
    if is_bucket(url):
        yield from _check_bucket(session, url)
        return
    if scheme := require_driver(url):
        yield (
            f"checkpoints go to {url}: every instance needs {STORE_DRIVERS[scheme]} (resources.aws.install) and its "
            "credentials (resources.secrets)"
        )
        return
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else Path(url).expanduser()
    kind = file_system(path)
    if is_remote(path):
        yield f"checkpoints go to {path} ({kind}), which every instance must have mounted there (resources.aws.setup)"
        return
    if resources.market == "spot":
        raise InputError(
            f"resources.checkpoints: {path} is a directory of one machine ({kind or 'no mount'}), and checkpoints must "
            "outlive instances of the spot market; give s3://bucket/prefix or a network mount, or set market: "
            "on_demand"
        )
    yield (
        f"checkpoints go to {path}, which is not a network mount here ({kind or 'no mount found'}); "
        "check that instances see it"
    )


def _check_bucket(session: AwsSession, url: str) -> Iterator[str]:
    s3, owner = session.client("s3"), owner_words(session)
    bucket, key = place_in(url, f".probe-{uuid.uuid4().hex}")
    if key.startswith(f"{PACKAGES}/"):
        raise InputError(
            f"resources.checkpoints: {url} is in the folder {PACKAGES} of the bucket, which S3 empties, "
            "and workers may not write there; give another prefix"
        )
    try:
        s3.put_object(Bucket=bucket, Key=key, Body=b"", **owner)
        s3.get_object(Bucket=bucket, Key=key, **owner)
        s3.delete_object(Bucket=bucket, Key=key, **owner)
    except ClientError as error:
        raise InputError(f"resources.checkpoints: {trouble(error, bucket)}") from None
    try:
        region = s3.head_bucket(Bucket=bucket, **owner).get("BucketRegion", session.region)
    except FAILURES as error:
        yield f"the region of bucket {bucket} is not known: {explain(error)}"
        return
    if region != session.region:
        yield (
            f"bucket {bucket} is in {region} and instances are in {session.region}: each GB between them costs about "
            f"0.02 USD, which is in no bill here; make a bucket in {session.region}"
        )


_PROBE = "preflight"
_YEAR_S = 366 * 86_400.0
_LONGEST_S = 1e9
"""Lease in the dry run, so that the script is as long as any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """Arguments that all checks of one experiment share."""

    session: AwsSession
    resources: Resources
    place: OwnInstance | None
    on_head: bool
    together: bool

    @property
    def markets(self) -> tuple[Market, ...]:
        # Profiles are always measured on demand.
        return ("on_demand", "spot") if self.resources.market == "spot" else ("on_demand",)


def preflight(
    resources: Resources,
    offers: Sequence[Offer],
    *,
    session: AwsSession,
    place: OwnInstance | None = None,
    on_head: bool = True,
    together: bool = True,
) -> list[str]:
    """Return notes for the user, one line each, if the experiment can run on EC2.

    `place` is where this machine is in EC2, by default as its metadata service says. Not `on_head`, a head will be the
    driver, and this machine's place is not checked. `together`: trials that span instances have these placed close to
    each other, as in any run but in a pool's. Raises InputError (one line: the problem, its value, the remedy) for the
    first problem: credentials, this machine's clock, region, types, images, network, roles and permissions, quota, the
    checkpoint store, or the place of the driver.
    """
    check_region(resources.region)
    check_lease(resources)
    place = place or own_place()
    checks = _Checks(session=session, resources=resources, place=place, on_head=on_head, together=together)
    sign_in(session)
    with in_one_line():
        return list(dict.fromkeys(_looked_at(checks, offers)))


def sign_in(session: AwsSession) -> None:
    """Raise InputError unless AWS accepts the credentials, and its clock and this machine's agree."""
    with in_one_line():
        check_clock(session.client("sts").get_caller_identity(), time.time())


def _looked_at(checks: _Checks, offers: Sequence[Offer]) -> Iterator[str]:
    words = checks.resources.aws
    if words.install == "none" and words.image is None:
        yield "install: none, and no image of your own: instances boot Amazon's, which does not have rubberband"
    for offer in offers:
        yield from _look_at_type(checks, offer)
        if held := reservation_of(checks.session, words.reservation, offer.instance_type):
            check_size(held, checks.resources)
            yield from check_time(held, time.time())
    if checks.on_head:
        yield from _look_at_driver(checks, offers[0].instance_type)
    if words.reservation is None:  # what is reserved counts against the quota already
        yield from _look_at_quota(checks, [offer.instance_type for offer in offers])
    if checks.on_head or checks.resources.checkpoints is None or is_bucket(checks.resources.checkpoints):
        yield from check_store(checks.session, checks.resources)  # a network mount is there on the head only
    for offer in offers:
        yield from _look_at_launch(checks, offer, offers)
    yield from _look_at_end(checks)
    yield from _look_at_guard(checks)


def _look_at_type(checks: _Checks, offer: Offer) -> Iterator[str]:
    facts = type_facts(checks.session, offer.instance_type)
    if facts.gpus and checks.resources.slots is not None:
        raise InputError(
            f"resources.slots: for instances without GPUs, and {offer.instance_type} has {facts.gpus}; leave it out"
        )
    if facts.gpus and offer.gpus > facts.gpus:
        raise InputError(
            f"resources.gpus_per_instance: {offer.gpus} are more than the {counted(facts.gpus, 'GPU')} of "
            f"{offer.instance_type}; lower it to {facts.gpus}, or leave it out"
        )
    if not facts.gpus:
        yield f"{offer.instance_type} has no GPUs: trials train on its {facts.vcpus:g} vCPUs, in {offer.gpus} slots"
    elif offer.gpus < facts.gpus:
        yield f"{offer.instance_type} has {facts.gpus} GPUs, of which {offer.gpus} are used and all are paid for"


def _look_at_driver(checks: _Checks, instance_type: str) -> Iterator[str]:
    words, place, region = checks.resources.aws, checks.place, checks.session.region
    vpc, _ = choose_subnets(checks.session, words.subnets, instance_type, place)
    if words.driver_address is not None:
        yield f"instances must reach this machine at {own_address(words.driver_address)}, on every TCP port"
        return
    if place is None or place.region != region or place.vpc != vpc:
        where = "is not in EC2" if place is None else f"is in {place.vpc} ({place.region})"
        raise InputError(
            f"resources.provider: instances would be in {vpc} ({region}) and this machine {where}: they cannot reach "
            "it; let a head there run it (`rubberband run FILE --on head`), or give the address by which they reach "
            "this machine (resources.aws.driver_address)"
        )


def _look_at_quota(checks: _Checks, types: Sequence[str]) -> Iterator[str]:
    try:
        rooms = quotas(checks.session, types, checks.markets)
    except ProviderError as error:
        raise InputError(str(error)) from None
    most = checks.resources.max_instances
    without = {room.instance_type: room for room in reversed(rooms) if room.instances < 1}
    if without.keys() >= set(types):
        raise InputError(f"resources.instance_type: {without[types[0]].refusal(most)}")
    yield from (room.note() for room in rooms if room.instances < most)


def _look_at_launch(checks: _Checks, offer: Offer, offers: Sequence[Offer]) -> Iterator[str]:
    words = checks.resources.aws
    machines = resolve(
        checks.session, words, offer.instance_type, checkpoints=checks.resources.checkpoints, place=checks.place
    )
    most_gpus = checks.resources.gpus_per_trial.max
    may_span = checks.together and checks.resources.max_instances > 1 and (most_gpus is None or most_gpus > offer.gpus)
    types = dict.fromkeys(one.instance_type for one in (offer, *offers) if one.gpus == offer.gpus)
    fabric = fabric_of(checks.session, machines, list(types)) if may_span else Fabric()
    if fabric.note:
        yield fabric.note
    for market in checks.markets:
        _dry_run(checks.session, machines, offer, market, fabric)
    if may_span and machines.reservation is None:
        # A trial may span instances, which are then launched into a cluster placement group.
        zone = next(iter(machines.subnets))
        ensure_cluster(checks.session, words.owner, zone, offer.instance_type, only_try=True)
    if checks.resources.market == "spot":
        checks.session.client("ec2").describe_spot_price_history(
            InstanceTypes=[offer.instance_type], ProductDescriptions=["Linux/UNIX"], MaxResults=1
        )
    if note := ways_out(checks.session, list(machines.subnets.values())).note():
        yield note
    place = checks.place
    if place is not None and place.security_groups and machines.security_group not in place.security_groups:
        yield (
            f"this machine is not in the instances' security group {machines.security_group}; its own groups "
            f"({', '.join(place.security_groups)}) must let them in, on every TCP port"
        )


def _dry_run(session: AwsSession, machines: Machines, offer: Offer, market: Market, fabric: Fabric) -> None:
    zone = next(iter(machines.subnets))
    choice = Purchase(
        instance_type=offer.instance_type,
        zone=zone,
        efa_cards=fabric.cards.get((offer.instance_type, zone), ()),
        market=market,
        price_usd_per_hour=offer.price_usd_per_hour,
        on_demand_usd_per_hour=offer.price_usd_per_hour,
    )
    start = NodeStart(
        instances=(_PROBE * 32,),  # as long as the names of any request
        head_address="255.255.255.255:65535",
        gpus=offer.gpus,
        lease_s=_LONGEST_S,
        lifetime_s=_LONGEST_S,
    )
    request = launch_request(  # without a token, which stands for one request: another dry run may differ
        machines, choice, tags=tags_of(_PROBE, _PROBE, (_PROBE,), machines.owner), user_data=machines.user_data(start)
    )
    try:
        session.client("ec2").run_instances(**request, DryRun=True)
    except ClientError as error:
        if code_of(error) != "DryRunOperation":
            raise InputError(refused_launch(error, machines.instance_profile)) from None


def refused_launch(error: ClientError, profile: str, key: str = "worker_profile") -> str:
    """Return one line: why EC2 refuses to launch, with the remedy. `key`: the field that names the profile."""
    said = str(error)
    if "iamInstanceProfile" in said or "IAM Instance Profile" in said:
        return (
            f"resources.aws.{key}: EC2 knows no instance profile {shown(profile)} that has a role; run "
            "`rubberband aws setup` (it is known some seconds later), or name another"
        )
    if key == "head_profile" and "iam:PassRole" in said:
        return (
            f"resources.aws.{key}: these credentials may not give the role of {profile} to a machine (iam:PassRole); "
            "use an administrator's, or allow it for that role"
        )
    if missing_action(error) == "ec2:RunInstances":
        return f"{explain(error)}; or these types or region are none of `rubberband aws setup --types LIST --region R`"
    return explain(error)


def _look_at_guard(checks: _Checks) -> Iterator[str]:
    # Schedules have no dry run: one is made, moved and deleted.
    role, some_day = checks.resources.aws.guard_role, time.time() + _YEAR_S
    if role is None:
        return
    try:
        for moves in (False, True):
            with ignoring("ConflictException"):  # the call is allowed, and the one before it is not carried out yet
                guard(checks.session, role, _PROBE, some_day, moves=moves)
        with ignoring("ConflictException"):  # else it deletes itself that day
            delete(checks.session, _PROBE)
    except FAILURES as error:
        yield (
            "an instance that never boots keeps running if the driver dies too, because AWS does not guard it: "
            f"{explain(error)} (`rubberband aws setup` makes the role {role}), or silence this with "
            "resources.aws.guard_role: null"
        )


def _look_at_end(checks: _Checks) -> Iterator[str]:
    # The permission to terminate is tied to the owner's tag: a dry run needs one of the owner's instances.
    owner = checks.resources.aws.owner
    found = instances(checks.session, by_tags(owner=owner), "pending", "running")
    if not found:
        yield f"permission to end instances (ec2:TerminateInstances) is first checked with an instance of owner {owner}"
        return
    try:
        checks.session.client("ec2").terminate_instances(InstanceIds=[found[0]["InstanceId"]], DryRun=True)
    except ClientError as error:
        if lacks_rights(error):
            raise
