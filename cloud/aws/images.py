"""What a type of instance is, and the image that it boots: the one asked for, the latest that fits, or our own."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from rubberband.cloud.aws import wheel
from rubberband.cloud.aws.boot import Installation
from rubberband.cloud.aws.calls import (
    OWNER_TAG,
    ROLE_TAG,
    AwsSession,
    Machines,
    NodeStart,
    Purchase,
    by_tags,
    launch_request,
    tags_in,
    tags_of,
)
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import FAILURES, code_of, verdict
from rubberband.cloud.aws.fleet import VISIBILITY_S
from rubberband.cloud.aws.s3 import is_bucket, place_in, put
from rubberband.cloud.aws.states import last_words, output
from rubberband.cloud.catalogue import Table
from rubberband.cloud.side_costs import HOURS_PER_MONTH, side_prices
from rubberband.cloud.steady import elapsed_s
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Aws
from rubberband.units import nearest, shown

_GPU_IMAGE = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
_CPU_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/{}/hvm/ebs-gp2/ami-id"
_CANONICAL = {"x86_64": "amd64", "arm64": "arm64"}
_FOREIGN_GPUS = frozenset({"V100", "M60", "K80", "Radeon Pro V520"})
"""NVIDIA's open kernel modules, which the Deep Learning AMI has, begin with the generation after the first three."""
_INSTALLED_GB = 60
"""Root volume for the packages, on a plain image: torch with CUDA alone takes about ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFacts:
    """What EC2 tells of an instance type."""

    instance_type: str
    architectures: tuple[str, ...]
    vcpus: int
    gpus: int
    gpu_model: str
    """Such as `T4`; empty without GPUs."""
    clusters: bool
    """Whether its instances can be in a cluster placement group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An AMI that can be booted."""

    image_id: str
    architecture: str
    root_device: str
    root_gb: int | None
    """Size of its root volume; None if it does not say."""
    lasting_disks: tuple[str, ...] = ()
    """Device names of its volumes that outlive an instance unless told not to."""


def type_facts(session: AwsSession, instance_type: str, key: str = "resources.instance_type") -> TypeFacts:
    """The facts of a type. Raises InputError, naming near ones, if the region has no such type; botocore's errors."""
    ec2 = session.client("ec2")
    named = [{"Name": "instance-type", "Values": [instance_type]}]
    for one in pages(ec2.describe_instance_types, "InstanceTypes", Filters=named):
        gpus = one.get("GpuInfo", {}).get("Gpus", [])
        return TypeFacts(
            instance_type=instance_type,
            architectures=tuple(one["ProcessorInfo"]["SupportedArchitectures"]),
            vcpus=int(one["VCpuInfo"]["DefaultVCpus"]),
            gpus=sum(int(gpu["Count"]) for gpu in gpus),
            gpu_model=str(gpus[0].get("Name", "")) if gpus else "",
            clusters="cluster" in one.get("PlacementGroupInfo", {}).get("SupportedStrategies", ()),
        )
    known = [one["InstanceType"] for one in pages(ec2.describe_instance_types, "InstanceTypes")]
    raise InputError(
        f"{key}: EC2 has no type {shown(instance_type)} in {session.region}; {nearest(instance_type, sorted(known))}"
    )


def find_image(session: AwsSession, word: str | None, facts: TypeFacts, *, installs: bool) -> Image:
    """The image that `resources.aws.image` says, or the default one for the type; `installs`: packages, at boot.

    Raises InputError if there is none, if it does not run on the type, or if the default one does not know the type's
    GPUs; botocore's errors.
    """
    if word is None:
        if installs and facts.gpu_model in _FOREIGN_GPUS:
            raise InputError(
                "resources.aws.image: the driver of the latest Deep Learning AMI does not support the "
                f"{facts.gpu_model} of {facts.instance_type}; give an image that does, or another instance_type, such "
                "as g5.xlarge"
            )
        image_id = _parameter(session, _default_parameter(facts))
    else:
        image_id = _parameter(session, word.removeprefix("ssm:")) if word.startswith("ssm:") else word
    image = described_image(session, image_id)
    if image.architecture not in facts.architectures:
        raise InputError(
            f"resources.aws.image: {image_id} is for {image.architecture}, and {facts.instance_type} is "
            f"{' or '.join(facts.architectures)}; give an image for that, or another instance_type"
        )
    return image


def base_of(word: str | None, facts: TypeFacts) -> str:
    """What an image is built on: the AMI or the parameter that `resources.aws.image` names, or the default one's."""
    return word or _default_parameter(facts)


def root_volume_gb(asked_gb: int | None, image: Image, *, plain: bool) -> int | None:
    """The size of the root volume to ask for; None: the image's own. `plain`: the default image without GPUs.

    Raises InputError if the one that is asked for is smaller than the image's.
    """
    if asked_gb is None:
        return _INSTALLED_GB if plain and (image.root_gb or 0) < _INSTALLED_GB else None
    if image.root_gb is not None and asked_gb < image.root_gb:
        raise InputError(
            f"resources.aws.volume_gb: {asked_gb} GB are less than the {image.root_gb} GB of {image.image_id}; raise "
            "it, or leave it out"
        )
    return asked_gb


def _default_parameter(facts: TypeFacts) -> str:
    architecture = "x86_64" if "x86_64" in facts.architectures else "arm64"
    return _GPU_IMAGE.format(architecture) if facts.gpus else _CPU_IMAGE.format(_CANONICAL[architecture])


def _parameter(session: AwsSession, name: str) -> str:
    try:
        return str(session.client("ssm").get_parameter(Name=name)["Parameter"]["Value"])
    except Exception as error:
        if code_of(error) not in ("ParameterNotFound", "ValidationException"):
            raise
        raise InputError(
            f"resources.aws.image: there is no SSM parameter {name} in {session.region}; give an AMI (ami-…) or a "
            "parameter that names one (ssm:/…)"
        ) from None


def described_image(session: AwsSession, image_id: str) -> Image:
    """An AMI by its id. Raises InputError if there is none that this account may use; botocore's errors."""
    try:
        images = session.client("ec2").describe_images(ImageIds=[image_id])["Images"]
    except Exception as error:
        if not code_of(error).startswith("InvalidAMIID"):
            raise
        images = []
    if images and images[0].get("State") == "pending":
        raise InputError(f"resources.aws.image: {image_id} is still being made; wait until EC2 shows it as available")
    if not images or images[0].get("State", "available") != "available":
        raise InputError(
            f"resources.aws.image: there is no image {shown(image_id)} in {session.region} that this account may use; "
            "images belong to one region: give one of this region, or leave it out"
        )
    image = images[0]
    return Image(
        image_id=image_id,
        architecture=str(image.get("Architecture", "x86_64")),
        root_device=str(image.get("RootDeviceName") or "/dev/sda1"),
        root_gb=_root_gb(image.get("RootDeviceName"), image.get("BlockDeviceMappings", ())),
        lasting_disks=tuple(
            disk["DeviceName"]
            for disk in image.get("BlockDeviceMappings", ())
            if disk.get("Ebs", {}).get("DeleteOnTermination") is False
        ),
    )


def _root_gb(root_device: str | None, disks: Iterable[Any]) -> int | None:
    sizes = [disk.get("Ebs", {}).get("VolumeSize") for disk in disks if disk.get("DeviceName") == root_device]
    return int(sizes[0]) if sizes and sizes[0] else None


# Images of one's own: the driver's exact environment, installed once, so that instances need not install it again.
#
# An image is found by a key: a digest of all that its environment follows from. EC2 has no client token for images,
# but a name is taken once, so the name has the key. A build that was cut off goes on from what EC2 shows, and from
# the zone in which it last asked for a builder; that ends itself, by its lease or when CreateImage has rebooted it.


IMAGE_TAG = "rubberband:image"
LEASE_S, BOOT_S = 600.0, 2400.0
"""Of a builder: it ends itself so long after its boot script has died, and in any case."""
_FORMAT = "1"
"""Of what the boot scripts leave on an image; another one is another key."""
_OUR_WHEEL = re.compile(r"\./wheels/rubberband_tune-\S*\.whl")
_LOOK_S = 10.0
_MADE_S = 3600.0
"""An image that is not available after so long never will be."""
_LOOKS = 30
"""EC2 is eventually consistent: so often it is looked for what has been made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnImage:
    """An image of the owner's, or a snapshot that is left of one."""

    image_id: str
    """Or the snapshot's."""
    key: str
    state: str
    """`pending`, `available`, `failed`, …; `deleted`: only a snapshot is left."""
    created: str
    """As EC2 has it, such as 2026-11-22T19:00:00.000Z."""
    description: str
    volume_gb: int
    """Size of its volumes; its snapshots are billed for what is written, which is less."""
    snapshots: tuple[str, ...]

    def usd_per_month(self, region: str) -> float:
        """What its snapshots cost at most."""
        return self.volume_gb * side_prices(region).snapshot_usd_per_gb_month


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """How time passes while EC2 works, and who hears of it."""

    clock: Callable[[], float] = elapsed_s
    sleep: Callable[[float], None] = time.sleep
    announce: Callable[[str], None] = print


def image_key(words: Aws, installed: Installation, facts: TypeFacts) -> str:
    """A digest of all that an environment follows from; the driver's own code is not part of it, what that needs is."""
    parts = [
        _FORMAT,
        base_of(words.image, facts),
        "arm64" if facts.architectures == ("arm64",) else "x86_64",
        facts.gpu_model,
        installed.python,
        [_OUR_WHEEL.sub("", word) for word in installed.requirements],
        wheel.needs(),
        installed.index_url,
        installed.constraints.rpartition("#")[2],
        list(words.setup),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def own_images(session: AwsSession, owner: str, key: str | None = None) -> list[OwnImage]:
    """The owner's images, or those with a key, the latest first. Raises botocore's errors."""
    tags = by_tags(owner=owner) if key is None else by_tags(owner=owner, image=key)
    shown = pages(session.client("ec2").describe_images, "Images", Owners=["self"], Filters=tags)
    return sorted(map(_own, shown), key=lambda image: (image.created, image.image_id), reverse=True)


def listed_images(session: AwsSession, owner: str) -> list[OwnImage]:
    """All that is billed every month: the owner's images, and what deletions that were cut off left of others.

    Raises botocore's errors.
    """
    found = own_images(session, owner)
    snapshots = _snapshots(session, by_tags(owner=owner, role="image"))
    return [*found, *(one for one in map(_rest, snapshots) if one.key not in {image.key for image in found})]


def _snapshots(session: AwsSession, tags: list[Any]) -> list[Any]:
    return list(pages(session.client("ec2").describe_snapshots, "Snapshots", OwnerIds=["self"], Filters=tags))


def _rest(snapshot: Any) -> OwnImage:
    return OwnImage(
        image_id=snapshot["SnapshotId"],
        key=tags_in(snapshot).get(IMAGE_TAG, ""),
        state="deleted",
        created=snapshot["StartTime"].isoformat(),
        description=snapshot.get("Description", ""),
        volume_gb=int(snapshot["VolumeSize"]),
        snapshots=(snapshot["SnapshotId"],),
    )


def _own(shown: Any) -> OwnImage:
    disks = [disk["Ebs"] for disk in shown.get("BlockDeviceMappings", ()) if "Ebs" in disk]
    return OwnImage(
        image_id=shown["ImageId"],
        key=tags_in(shown).get(IMAGE_TAG, ""),
        state=shown.get("State", "available"),
        created=shown.get("CreationDate", ""),
        description=shown.get("Description", ""),
        volume_gb=sum(int(disk.get("VolumeSize", 0)) for disk in disks),
        snapshots=tuple(disk["SnapshotId"] for disk in disks if disk.get("SnapshotId")),
    )


def built_image(session: AwsSession, words: Aws, installed: Installation, facts: TypeFacts) -> Image | None:
    """The image that has this environment, if there is one. Raises InputError; botocore's errors."""
    if not installed.requirements:
        return None
    for one in own_images(session, words.owner, image_key(words, installed, facts)):
        if one.state == "available":
            return described_image(session, one.image_id)
    return None


def delete_image(session: AwsSession, owner: str, key: str) -> tuple[str, ...]:
    """Delete the images with a key, and their snapshots, also those that an earlier attempt left; the ids of both.

    Raises botocore's errors.
    """
    ec2, deleted = session.client("ec2"), list[str]()
    for image in own_images(session, owner, key):
        _unless_gone("InvalidAMIID", ec2.deregister_image, ImageId=image.image_id)
        deleted.append(image.image_id)
    for snapshot in [one["SnapshotId"] for one in _snapshots(session, by_tags(owner=owner, image=key))]:
        _unless_gone("InvalidSnapshot.NotFound", ec2.delete_snapshot, SnapshotId=snapshot)
        deleted.append(snapshot)
    return tuple(deleted)


def _unless_gone(gone: str, operation: Callable[..., object], **words: str) -> None:
    try:
        operation(**words)
    except ClientError as error:
        if not code_of(error).startswith(gone):
            raise


class Build:
    """One build, to its end or on from where an earlier one was cut off."""

    def __init__(
        self,
        session: AwsSession,
        machines: Machines,
        instance_type: str,
        key: str,
        checkpoints: str | None,
        now: Passing,
    ) -> None:
        """`machines`: how a builder is launched, with the image that it starts from.

        Raises InputError where there is no bucket through which the builder can say that it is done.
        """
        if checkpoints is None or not is_bucket(checkpoints):
            raise InputError(
                "resources.checkpoints: a builder reports through the bucket that its environment is installed; give "
                "s3://bucket/prefix"
            )
        self._session, self._machines, self._type = session, machines, instance_type
        self._key, self._checkpoints, self._now = key, checkpoints, now
        self._marker, self._zone = f"images/{key}", f"images/{key}.zone"

    def run(self) -> OwnImage:
        """The image, available. Raises InputError, ProviderError; botocore's errors."""
        if (image := self._image()) is None:
            image = self._made()
        found = self._until_available(image)
        self._end_builders()
        self._forget_marker()
        return found

    def _image(self) -> OwnImage | None:
        found = own_images(self._session, self._machines.owner, self._key)
        return next((one for one in found if one.state in ("pending", "available")), None)

    def _made(self) -> OwnImage:
        builder = next((one["InstanceId"] for one in self._builders()), None) or self._launch()
        self._now.announce(f"builder {builder} ({self._type}) installs the environment")
        try:
            self._until_installed(builder)
        except BaseException:
            self._end_builders()
            raise
        return self._image() or self._create(builder)

    def _builders(self) -> Iterator[Any]:
        states = {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}
        wanted = [*by_tags(owner=self._machines.owner, role="builder", image=self._key), states]
        shown = pages(self._session.client("ec2").describe_instances, "Reservations", Filters=wanted)
        found = [one for each in shown for one in each["Instances"]]
        return iter(sorted(found, key=lambda one: (one["LaunchTime"], one["InstanceId"])))

    def _tags(self) -> dict[str, str]:
        tags = tags_of(f"image-{self._key}", self._key, ("builder",), self._machines.owner, "builder")
        return {**tags, IMAGE_TAG: self._key}

    def _launch(self) -> str:
        from rubberband.cloud.aws.head import launch_in_some_zone

        bucket, _ = place_in(self._checkpoints, self._marker)
        marker = f"s3://{bucket}/{place_in(self._checkpoints, self._marker)[1]}"
        start = NodeStart(
            instances=("builder",),
            head_address="none",
            gpus=max(1, type_facts(self._session, self._type).gpus),
            lease_s=LEASE_S,
            boot_s=BOOT_S,
            lifetime_s=BOOT_S,
            image_marker=marker,
        )
        choice = Purchase(
            instance_type=self._type,
            zone=next(iter(self._machines.subnets)),
            market="on_demand",
            price_usd_per_hour=0.0,
            on_demand_usd_per_hour=0.0,
        )
        user_data = self._machines.user_data(start)
        request = launch_request(self._machines, choice, token="", tags=self._tags(), user_data=user_data)
        for name in ("ClientToken", "SubnetId"):
            del request[name]
        # A token buys once in its zone: after a cut-off, the zone that was asked last is asked first.
        asked = self._read(self._zone)
        subnets = dict(sorted(self._machines.subnets.items(), key=lambda each: each[0] != asked))
        profile = self._machines.instance_profile
        return launch_in_some_zone(
            self._session, request, subnets, profile, self._now.sleep, "builder", before=self._note_zone
        )

    def _note_zone(self, zone: str) -> None:
        put(self._session, self._checkpoints, self._zone, zone.encode())

    def _until_installed(self, builder: str) -> None:
        before, seen = self._now.clock() + LEASE_S + BOOT_S, False
        shown_by = self._now.clock() + VISIBILITY_S
        while self._now.clock() < before:
            with _next_look_instead():
                if self._read(self._marker) == builder or self._image() is not None:
                    return
                lives = any(one["InstanceId"] == builder for one in self._builders())
                if not lives and (seen or self._now.clock() > shown_by):
                    raise ProviderError(f"the builder {builder} ended before the image was made: {self._why(builder)}")
                seen = seen or lives
            self._now.sleep(_LOOK_S)
        raise ProviderError(f"the builder {builder} did not finish within {LEASE_S + BOOT_S:.0f} s; build again")

    def _why(self, builder: str) -> str:
        return last_words(output(self._session, builder)) or (
            f"see `aws ec2 get-console-output --instance-id {builder} --region {self._session.region}`; build again"
        )

    def _read(self, name: str) -> str:
        """What was written in the bucket under this name; empty where nothing was."""
        bucket, key = place_in(self._checkpoints, name)
        try:
            found: bytes = self._session.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        except ClientError as error:
            if code_of(error) not in ("404", "NoSuchKey", "NotFound", "403", "AccessDenied"):
                raise
            return ""
        return found.decode(errors="replace").strip()

    def _create(self, builder: str) -> OwnImage:
        """Have EC2 make the image, unless it has; a lost answer is asked for again: the name is then taken."""
        owner = self._machines.owner
        tags = {OWNER_TAG: owner, IMAGE_TAG: self._key, ROLE_TAG: "image", "Name": f"rubberband image {self._key}"}
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        for _ in range(_LOOKS):
            try:
                self._session.client("ec2").create_image(
                    InstanceId=builder,
                    Name=f"rubberband-{owner}-{self._key}",
                    Description=f"rubberband environment {self._key}",
                    TagSpecifications=[{"ResourceType": kind, "Tags": listed} for kind in ("image", "snapshot")],
                )
            except FAILURES as error:
                taken = code_of(error) == "InvalidAMIName.Duplicate"
                if not taken and verdict(error) not in ("unknown", "throttled"):
                    raise
            with _next_look_instead():
                if (image := self._image()) is not None:
                    self._now.announce(f"image {image.image_id} is being made; the builder reboots, and ends itself")
                    return image
            self._now.sleep(_LOOK_S)
        raise ProviderError(f"EC2 does not show the image rubberband-{owner}-{self._key}; build again")

    def _until_available(self, image: OwnImage) -> OwnImage:
        before = self._now.clock() + _MADE_S
        while self._now.clock() < before:
            with _next_look_instead():
                found = own_images(self._session, self._machines.owner, self._key)
                shown = next((one for one in found if one.image_id == image.image_id), None)
                if shown is not None and shown.state == "available":
                    return shown
                if shown is not None and shown.state != "pending":
                    delete_image(self._session, self._machines.owner, self._key)
                    raise ProviderError(f"EC2 could not make the image {image.image_id} ({shown.state}); build again")
            self._now.sleep(_LOOK_S)
        raise ProviderError(f"the image {image.image_id} is not available after {_MADE_S:.0f} s; build again later")

    def _end_builders(self) -> None:
        if ids := [one["InstanceId"] for one in self._builders()]:
            self._session.client("ec2").terminate_instances(InstanceIds=ids)

    def _forget_marker(self) -> None:
        put(self._session, self._checkpoints, self._marker, b"")


@contextmanager
def _next_look_instead() -> Iterator[None]:
    """A look that EC2 does not answer is no reason to give up: there is a next one."""
    try:
        yield
    except FAILURES as error:
        if verdict(error) not in ("unknown", "throttled"):
            raise


def builder_type(table: Table, region: str, instance_type: str) -> str:
    """The cheapest type with the same GPUs: which build of torch is installed follows from the GPU and its driver."""
    row = table.get(instance_type)
    if row is None or not row.gpu_model:
        return instance_type
    same = [one for one in table.values() if one.gpu_model == row.gpu_model and region in one.prices_usd_per_hour]
    return min(same, key=lambda one: one.prices_usd_per_hour[region], default=row).instance_type


def most_usd(price_usd_per_hour: float, region: str, volume_gb: int) -> float:
    """What a build costs at most: a builder that only its own bound ends, with its volume and its address."""
    beside = volume_gb * side_prices(region).volume_usd_per_gb_month / HOURS_PER_MONTH + 0.005
    return (price_usd_per_hour + beside) * (BOOT_S + LEASE_S) / 3600.0
