"""Everything that can be known to go wrong on EC2 is looked for before anything is rented, and refused in one line.

Nothing is bought: what a role may do is asked by dry runs and by calls that are harmless. It does not say that there is
capacity: nobody can.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.exceptions import ClientError

from rubberband.cloud.aws.calls import (
    AwsSession,
    Machines,
    NodeStart,
    Purchase,
    by_tags,
    launch_request,
    open_aws,
    tags_of,
)
from rubberband.cloud.aws.client import check_region, pages
from rubberband.cloud.aws.errors import FAILURES, code_of, explain, lacks_rights
from rubberband.cloud.aws.guards import delete, guard
from rubberband.cloud.aws.images import type_facts
from rubberband.cloud.aws.metadata import OwnInstance, own_address, own_place
from rubberband.cloud.aws.network import choose_subnets, ensure_cluster
from rubberband.cloud.aws.provider import check_lease
from rubberband.cloud.aws.quota import quotas
from rubberband.cloud.aws.resolving import in_one_line, resolve
from rubberband.cloud.aws.s3 import is_bucket, place_in, trouble
from rubberband.cloud.aws.side_costs import ways_out
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Aws, Resources
from rubberband.units import shown
from rubberband.values.offer import Offer
from rubberband.values.plan import Market

# Whether this machine's clock agrees with AWS's: leases end, and bills are reckoned, by the one and by the other.


MOST_S = 15.0
"""Half of what is kept clear of max_cost for giving instances back."""


def check_clock(answer: Mapping[str, Any], now: float) -> None:
    """Compare the date of an answer of AWS with `now` (Unix time). Raises InputError if they are far apart."""
    told = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        off_s = now - parsedate_to_datetime(told).timestamp()
    except (TypeError, ValueError):  # whatever answered does not tell the time
        return
    if abs(off_s) > MOST_S:
        raise InputError(
            f"this machine's clock is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} AWS's, by which "
            f"instances are billed and end themselves, and may be off by {MOST_S:.0f} s; correct it (chrony, or "
            "`timedatectl set-ntp true`)"
        )


# Whether the checkpoint store of an experiment on EC2 is seen by every instance, outlives them, and can be written.


_NETWORK = re.compile(r"nfs4?|cifs|smb\w*|lustre|ceph|glusterfs|beegfs|gpfs|wekafs|9p|fuse(\..*)?")
"""File systems that other machines see too: EFS is nfs4, FSx lustre or nfs, Mountpoint for S3 fuse."""


def check_store(session: AwsSession, resources: Resources, *, mounts: Sequence[str] | None = None) -> Iterator[str]:
    """Notes on `resources.checkpoints`. `mounts`: lines as in /proc/mounts, by default this machine's.

    Raises InputError, with the remedy, if instances do not see it, if it does not outlive them, or if it cannot be
    written; botocore's errors.
    """
    url = resources.checkpoints
    if url is None:
        raise InputError(
            "resources.checkpoints: instances of EC2 do not see the experiment's folder; give s3://bucket/prefix, or a "
            "directory on a network mount that all of them have"
        )
    if is_bucket(url):
        _check_bucket(session.client("s3"), url)
        return
    if re.match("[a-z0-9]+://", url) and not url.startswith("file://"):
        raise InputError(f"resources.checkpoints: {url} is not known; give s3://bucket/prefix, or a directory")
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else Path(url).expanduser()
    kind = file_system(path.absolute(), _mounts() if mounts is None else mounts)
    if _NETWORK.fullmatch(kind):
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


def file_system(path: Path, mounts: Sequence[str]) -> str:
    """The kind of file system that `path` is on, such as `nfs4`; empty if no mount holds it."""
    best, found = -1, ""
    for line in mounts:
        words = line.split()
        if len(words) < 3:
            continue
        mount = Path(words[1].replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), words[2]
    return found


def _mounts() -> list[str]:
    try:
        return Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return []


def _check_bucket(s3: Any, url: str) -> None:
    bucket, key = place_in(url, f".probe-{uuid.uuid4().hex}")
    try:
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
        s3.get_object(Bucket=bucket, Key=key)
        s3.delete_object(Bucket=bucket, Key=key)
    except ClientError as error:
        raise InputError(f"resources.checkpoints: {trouble(error, bucket)}") from None


_PROBE = "preflight"
_YEAR_S = 366 * 86_400.0
_LONGEST_S = 1e9
"""Of a lease, in the dry run: the script is as long as any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """What all checks of one experiment share."""

    session: AwsSession
    resources: Resources
    place: OwnInstance | None

    @property
    def markets(self) -> tuple[Market, ...]:
        """Where a plan may buy; profiles are measured on demand."""
        return ("on_demand", "spot") if self.resources.market == "spot" else ("on_demand",)


def preflight(
    resources: Resources,
    offers: Sequence[Offer],
    *,
    session: AwsSession | None = None,
    place: OwnInstance | None = None,
) -> list[str]:
    """Notes for the user, one line each, if the experiment can be rented for.

    `place` is where this machine is in EC2, if not as its metadata service tells. Raises InputError (one line: what,
    which value, the remedy) for the first thing that is amiss: credentials, this machine's clock, region, types,
    images, network, roles and rights, quota, the checkpoint store, or where the driver runs.
    """
    check_region(resources.region)
    check_lease(resources)
    checks = _Checks(session=session or open_aws(resources.region), resources=resources, place=place or own_place())
    sign_in(checks.session)
    with _with_names_of_the_policy(resources.aws), in_one_line():
        return list(dict.fromkeys(_looked_at(checks, offers)))


def sign_in(session: AwsSession) -> None:
    """Raise InputError unless AWS takes the credentials, and its clock and this machine's agree."""
    with in_one_line():
        check_clock(session.client("sts").get_caller_identity(), time.time())


@contextmanager
def _with_names_of_the_policy(words: Aws) -> Iterator[None]:
    """Where a right is missing, tell which names of this experiment are not those in the policy as it is shipped."""
    try:
        yield
    except InputError as error:
        shipped = {"owner": "rubberband", "worker_profile": "rubberband-worker"}
        other = [f"{key} {getattr(words, key)}" for key, name in shipped.items() if getattr(words, key) != name]
        if not other or "driver.json" not in str(error):
            raise
        raise InputError(f"{error}, and which must name {' and '.join(other)} here") from None


def _looked_at(checks: _Checks, offers: Sequence[Offer]) -> Iterator[str]:
    words = checks.resources.aws
    if words.install == "none" and words.image is None:
        yield "install: none, and no image of your own: instances boot Amazon's, which does not have rubberband"
    for offer in offers:
        yield from _look_at_type(checks, offer)
    yield from _look_at_driver(checks, offers[0].instance_type)
    yield from _look_at_quota(checks, [offer.instance_type for offer in offers])
    yield from check_store(checks.session, checks.resources)
    for offer in offers:
        yield from _look_at_launch(checks, offer)
    yield from _look_at_end(checks)
    yield from _look_at_guard(checks)


def _look_at_type(checks: _Checks, offer: Offer) -> Iterator[str]:
    facts = type_facts(checks.session, offer.instance_type)
    if facts.gpus and offer.gpus > facts.gpus:
        raise InputError(
            f"resources.gpus_per_instance: {offer.gpus} are more than the {facts.gpus} GPUs of {offer.instance_type}; "
            f"lower it to {facts.gpus}, or leave it out"
        )
    if not facts.gpus:
        yield f"{offer.instance_type} has no GPUs: trials train on its {facts.vcpus} vCPUs, in {offer.gpus} slots"
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
            "it; start a head there with `rubberband up FILE` and run on it, or give the address by which they reach "
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


def _look_at_launch(checks: _Checks, offer: Offer) -> Iterator[str]:
    words = checks.resources.aws
    machines = resolve(
        checks.session, words, offer.instance_type, checkpoints=checks.resources.checkpoints, place=checks.place
    )
    for market in checks.markets:
        _dry_run(checks.session, machines, offer, market)
    if _may_span(checks.resources, offer):
        zone = next(iter(machines.subnets))
        ensure_cluster(checks.session, words.owner, zone, offer.instance_type, only_try=True)
    if checks.resources.market == "spot":
        checks.session.client("ec2").describe_spot_price_history(
            InstanceTypes=[offer.instance_type], ProductDescriptions=["Linux/UNIX"], MaxResults=1
        )
    yield from _look_at_ways_out(checks.session, machines)
    place = checks.place
    if place is not None and place.security_groups and machines.security_group not in place.security_groups:
        yield (
            f"this machine is not in the instances' security group {machines.security_group}; its own groups "
            f"({', '.join(place.security_groups)}) must let them in, on every TCP port"
        )


def _may_span(resources: Resources, offer: Offer) -> bool:
    """Whether a trial may span instances, which are then launched into a cluster placement group."""
    most = resources.gpus_per_trial.max
    return resources.max_instances > 1 and (most is None or most > offer.gpus)


def _look_at_ways_out(session: AwsSession, machines: Machines) -> Iterator[str]:
    if told := ways_out(session, list(machines.subnets.values())).note():
        yield told


def _dry_run(session: AwsSession, machines: Machines, offer: Offer, market: Market) -> None:
    choice = Purchase(
        instance_type=offer.instance_type,
        zone=next(iter(machines.subnets)),
        market=market,
        price_usd_per_hour=offer.price_usd_per_hour,
        on_demand_usd_per_hour=offer.price_usd_per_hour,
    )
    start = NodeStart(
        instances=(_PROBE,),
        head_address="255.255.255.255:65535",
        gpus=offer.gpus,
        lease_s=_LONGEST_S,
        lifetime_s=_LONGEST_S,
    )
    request = launch_request(
        machines,
        choice,
        token=_PROBE,
        tags=tags_of(_PROBE, _PROBE, (_PROBE,), machines.owner),
        user_data=machines.user_data(start),
    )
    del request["ClientToken"]  # another dry run may differ, and a token stands for one request
    try:
        session.client("ec2").run_instances(**request, DryRun=True)
    except ClientError as error:
        if code_of(error) != "DryRunOperation":
            refused = refused_launch(error, machines.instance_profile, machines.key_name)
            raise InputError(refused) from None


def refused_launch(error: ClientError, profile: str, key_name: str | None, key: str = "worker_profile") -> str:
    """Why EC2 would not launch such a machine, with the remedy, in one line. `key`: where the profile is written."""
    said = str(error)
    if "iamInstanceProfile" in said or "IAM Instance Profile" in said:
        return (
            f"resources.aws.{key}: EC2 knows no instance profile {shown(profile)} that has a role; make it as "
            "rubberband/cloud/aws/policies/README.md says (it is known some seconds later), or name another"
        )
    if code_of(error).startswith("InvalidKeyPair"):
        return (
            f"resources.aws.key_name: there is no key pair {shown(key_name)} in this region; import it "
            "(`aws ec2 import-key-pair`), or leave it out"
        )
    if key == "head_profile" and "iam:PassRole" in said:
        return (
            f"resources.aws.{key}: these credentials may not give the role of {profile} to a machine (iam:PassRole); "
            "use an administrator's, or allow it for that role"
        )
    return explain(error)


def _look_at_guard(checks: _Checks) -> Iterator[str]:
    """Whether AWS would end what outlives its lease, by a schedule that is made, moved and deleted: it has no dry
    run."""
    role, some_day = checks.resources.aws.guard_role, time.time() + _YEAR_S
    if role is None:
        return
    try:
        for moves in (False, True):
            guard(checks.session, role, _PROBE, some_day, moves=moves)
        delete(checks.session, _PROBE)
    except FAILURES as error:
        yield (
            "an instance that never boots keeps running if the driver dies too, because AWS does not guard it: "
            f"{explain(error)} (see the role {role} in rubberband/cloud/aws/policies/README.md), or silence this with "
            "resources.aws.guard_role: null"
        )


def _look_at_end(checks: _Checks) -> Iterator[str]:
    """Whether this role may end instances, by a dry run on one of the owner's (it is tied to their tag)."""
    owner = checks.resources.aws.owner
    ec2 = checks.session.client("ec2")
    living = [*by_tags(owner=owner), {"Name": "instance-state-name", "Values": ["pending", "running"]}]
    found: list[Any] = list(pages(ec2.describe_instances, "Reservations", Filters=living))
    if not found:
        yield f"permission to end instances (ec2:TerminateInstances) is first checked with an instance of owner {owner}"
        return
    try:
        ec2.terminate_instances(InstanceIds=[found[0]["Instances"][0]["InstanceId"]], DryRun=True)
    except ClientError as error:
        if lacks_rights(error):
            raise
