"""Images that instances boot: the image of the file, the latest that fits, or the owner's own."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rubberband.cloud import wheel
from rubberband.cloud.aws.calls import (
    OWNER_TAG,
    ROLE_TAG,
    AwsSession,
    Machines,
    NodeStart,
    by_tags,
    tag_specifications,
    tags_in,
    tags_of,
)
from rubberband.cloud.aws.client import ALIVE, age, instances, last_words, output, pages, type_facts
from rubberband.cloud.aws.errors import FAILURES, code_of, explain, ignoring, verdict
from rubberband.cloud.aws.extras import HOURS_PER_MONTH, side_prices
from rubberband.cloud.aws.fleet import VISIBILITY_S
from rubberband.cloud.aws.guards import SLACK_S, guard
from rubberband.cloud.aws.installing import Installation
from rubberband.cloud.aws.prices import TypeFacts
from rubberband.cloud.aws.s3 import is_bucket, place_in, put
from rubberband.cloud.catalogue import Table
from rubberband.cloud.clock import Waiting
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Aws

_GPU_IMAGE = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
_CPU_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/{}/hvm/ebs-gp2/ami-id"
_CANONICAL = {"x86_64": "amd64", "arm64": "arm64"}
_FOREIGN_GPUS = frozenset({"V100", "M60", "K80", "Radeon Pro V520"})
"""GPUs without a driver in the Deep Learning AMI: its open kernel modules begin a generation after the first three."""
_INSTALLED_GB = 60
"""Root volume for the packages, on a plain image: torch with CUDA alone takes about ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An AMI that can be booted."""

    image_id: str
    architecture: str
    root_device: str
    root_gb: int | None
    """Size of its root volume; None if it does not say."""
    further_disks: tuple[str, ...] = ()
    """Device names of its volumes beside the root."""
    further_gb: int = 0
    """Their sizes together."""


def choose_image(
    session: AwsSession,
    word: str | None,
    facts: TypeFacts,
    volume_gb: int | None = None,
    *,
    installs: bool,
    own: Image | None = None,
) -> tuple[Image, int | None]:
    """Return the image that a type boots: the owner's `own` with the environment, that of `resources.aws.image`, or the
    type's default; and the size of the root volume to request (None: the image's own).

    `volume_gb`: the size that the file asks for. The default image without GPUs gets room for the packages that it
    `installs` at boot. Raises InputError if this account may not use it, or if the default one has no driver for the
    type's GPUs; botocore's errors.
    """
    if own is not None:
        return own, volume_gb
    if word is not None:
        image_id = _parameter(session, word.removeprefix("ssm:")) if word.startswith("ssm:") else word
        return described_image(session, image_id), volume_gb
    if installs and facts.gpu in _FOREIGN_GPUS:
        raise InputError(
            f"resources.aws.image: the driver of the latest Deep Learning AMI does not support the {facts.gpu} of "
            f"{facts.instance_type}; give an image that does, or another instance_type, such as g5.xlarge"
        )
    image = described_image(session, _parameter(session, default_parameter(facts)))
    if volume_gb is None and installs and not facts.gpus and (image.root_gb or 0) < _INSTALLED_GB:
        volume_gb = _INSTALLED_GB
    return image, volume_gb


def default_parameter(facts: TypeFacts) -> str:
    """Return the SSM parameter of a type's default image."""
    architecture = "x86_64" if "x86_64" in facts.architectures else "arm64"
    return _GPU_IMAGE.format(architecture) if facts.gpus else _CPU_IMAGE.format(_CANONICAL[architecture])


def _parameter(session: AwsSession, name: str) -> str:
    return str(session.client("ssm").get_parameter(Name=name)["Parameter"]["Value"])


def described_image(session: AwsSession, image_id: str) -> Image:
    """Return an AMI by its id. Raises InputError if this account may use none of that id; botocore's errors."""
    images = session.client("ec2").describe_images(ImageIds=[image_id])["Images"]
    if not images:
        raise InputError(f"resources.aws.image: this account may use no {image_id} in {session.region}; give another")
    image = images[0]
    if charge := _charge(image):
        raise InputError(
            f"resources.aws.image: {image_id} is charged by the hour as {charge}, and the prices here are Linux's; "
            "give an image without a charge of its own, or leave it out"
        )
    further = {disk["DeviceName"]: disk["Ebs"] for disk in image.get("BlockDeviceMappings", ()) if "Ebs" in disk}
    root_gb = further.pop(image.get("RootDeviceName"), {}).get("VolumeSize")
    return Image(
        image_id=image_id,
        architecture=str(image.get("Architecture", "x86_64")),
        root_device=str(image.get("RootDeviceName") or "/dev/sda1"),
        root_gb=int(root_gb) if root_gb else None,
        further_disks=tuple(further),
        further_gb=sum(int(disk.get("VolumeSize", 0)) for disk in further.values()),
    )


_AS_LINUX = ("RunInstances", "RunInstances:00g0")
"""Operations with the price of Linux: the second is Red Hat with a licence of one's own (EC2 User Guide, "AMI billing
information fields")."""


def _charge(image: Mapping[str, Any]) -> str:
    """Return what is charged for an image beside the rent of Linux; empty for nothing."""
    codes = ", ".join(str(code.get("ProductCodeId", "")) for code in image.get("ProductCodes", ()))
    if codes:
        return f"a product of AWS Marketplace ({codes})"
    usage = image.get("UsageOperation", "RunInstances")
    return "" if usage in _AS_LINUX else f"{image.get('PlatformDetails', 'other software')} ({usage})"


# Images of the owner: the driver's exact environment, installed once, so that instances need not install it again.
#
# An image is found by its key, a digest of all inputs of its environment. EC2 has no client token for images, but a
# name is unique, so the name contains the key. An interrupted build resumes from what EC2 shows, and from the zone in
# which it last requested a builder. The builder ends itself, by its lease or when CreateImage has rebooted it.


IMAGE_TAG = "rubberband:image"
LEASE_S, BOOT_S = 600.0, 2400.0
"""A builder ends itself this long after its boot script died, and in any case after the second."""
_FORMAT = "1"
"""Version of what the boot scripts leave on an image; part of the key."""
_OUR_WHEEL = re.compile(r"\./wheels/rubberband_tune-\S*\.whl")
_LOOK_S = 10.0
_MADE_S = 3600.0
"""An image that is not available after this time never will be."""
_LOOKS = 30
"""EC2 is eventually consistent: number of looks for a new image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnImage:
    """An image of the owner's, or a snapshot that is left of one."""

    image_id: str
    """Or the snapshot's."""
    key: str
    state: str
    """`pending`, `available`, `failed`, …; `deleted`: only a snapshot is left."""
    created: str
    """Time as EC2 writes it, such as 2026-11-22T19:00:00.000Z."""
    description: str
    volume_gb: int
    """Size of its volumes; snapshots are billed for the written part only, which is less."""
    snapshots: tuple[str, ...]

    def usd_per_month(self, region: str) -> float:
        """Return the most that its snapshots cost."""
        return self.volume_gb * side_prices(region).snapshot_usd_per_gb_month


def image_key(words: Aws, installed: Installation, facts: TypeFacts) -> str:
    """Return a digest of all inputs of an environment: the driver's requirements, but not the driver's own code."""
    parts = [
        _FORMAT,
        words.image or default_parameter(facts),
        "arm64" if facts.architectures == ("arm64",) else "x86_64",
        facts.gpu,
        installed.python,
        [_OUR_WHEEL.sub("", word) for word in installed.requirements],
        wheel.needs(),
        installed.index_url,
        installed.constraints.rpartition("#")[2],
        list(words.setup),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def own_images(session: AwsSession, owner: str, key: str | None = None) -> list[OwnImage]:
    """Return the owner's images, or those with a key, the latest first. Raises botocore's errors."""
    tags = by_tags(owner=owner) if key is None else by_tags(owner=owner, image=key)
    shown = pages(session.client("ec2").describe_images, "Images", Owners=["self"], Filters=tags)
    return sorted(map(_own, shown), key=lambda image: (image.created, image.image_id), reverse=True)


def listed_images(session: AwsSession, owner: str) -> list[OwnImage]:
    """Return all that is billed monthly: the owner's images, and snapshots that an interrupted deletion left.

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
    """Return the image that has this environment, if there is one. Raises InputError; botocore's errors."""
    if not installed.requirements:
        return None
    for one in own_images(session, words.owner, image_key(words, installed, facts)):
        if one.state == "available":
            return described_image(session, one.image_id)
    return None


def delete_image(session: AwsSession, owner: str, key: str) -> tuple[str, ...]:
    """Delete the images with a key, and their snapshots, also those that an earlier attempt left. Return the ids.

    Raises botocore's errors.
    """
    ec2, deleted = session.client("ec2"), list[str]()
    for image in own_images(session, owner, key):
        with ignoring("InvalidAMIID"):
            ec2.deregister_image(ImageId=image.image_id)
        deleted.append(image.image_id)
    for snapshot in [one["SnapshotId"] for one in _snapshots(session, by_tags(owner=owner, image=key))]:
        with ignoring("InvalidSnapshot.NotFound"):
            ec2.delete_snapshot(SnapshotId=snapshot)
        deleted.append(snapshot)
    return tuple(deleted)


class Build:
    """One build, from its start or from where an earlier one was interrupted."""

    def __init__(
        self,
        session: AwsSession,
        machines: Machines,
        instance_type: str,
        key: str,
        checkpoints: str | None,
        now: Waiting,
        announce: Callable[[str], None] = print,
        *,
        guard_role: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`machines`: how a builder is launched, and from which image. `guard_role`: the role by which AWS terminates a
        builder that never boots, by the Unix time of `wall_clock`.

        Raises InputError without a bucket, through which the builder reports that it is done.
        """
        if not is_bucket(checkpoints):
            raise InputError(
                "resources.checkpoints: a builder reports through the bucket that its environment is installed; give "
                "s3://bucket/prefix"
            )
        self._session, self._machines, self._type = session, machines, instance_type
        self._key, self._checkpoints, self._now, self._announce = key, checkpoints, now, announce
        self._guard_role, self._wall_clock = guard_role, wall_clock
        self._marker, self._zone = f"images/{key}", f"images/{key}.zone"

    def run(self) -> OwnImage:
        """Return the image once it is available. Raises InputError, ProviderError; botocore's errors."""
        if (image := self._image()) is None:
            image = self._made()
        found = self._until_available(image)
        self._end_builders()
        put(self._session, self._checkpoints, self._marker, b"")
        return found

    def _image(self) -> OwnImage | None:
        found = own_images(self._session, self._machines.owner, self._key)
        return next((one for one in found if one.state in ("pending", "available")), None)

    def _made(self) -> OwnImage:
        builder = next((one["InstanceId"] for one in self._builders()), None) or self._launch()
        self._guard(builder)
        self._announce(f"builder {builder} ({self._type}) installs the environment")
        try:
            self._until_installed(builder)
        except BaseException:
            self._end_builders()
            raise
        return self._image() or self._create(builder)

    def _builders(self) -> list[Any]:
        wanted = by_tags(owner=self._machines.owner, role="builder", image=self._key)
        return sorted(instances(self._session, wanted, *ALIVE), key=age)

    def _launch(self) -> str:
        from rubberband.cloud.aws.head import launch_in_some_zone

        bucket, marker = place_in(self._checkpoints, self._marker)
        start = NodeStart(
            instances=("builder",),
            head_address="none",
            gpus=max(1, type_facts(self._session, self._type).gpus),
            lease_s=LEASE_S,
            boot_s=BOOT_S,
            lifetime_s=BOOT_S,
            image_marker=f"s3://{bucket}/{marker}",
        )
        tags = tags_of(f"image-{self._key}", self._key, ("builder",), self._machines.owner, "builder")
        # A token buys once in its zone: after an interruption, the zone of the last request comes first.
        asked = self._read(self._zone)
        subnets = dict(sorted(self._machines.subnets.items(), key=lambda each: each[0] != asked))
        return launch_in_some_zone(
            self._session,
            replace(self._machines, subnets=subnets),
            self._type,
            self._machines.user_data(start),
            {**tags, IMAGE_TAG: self._key},
            self._now.sleep,
            before=self._note_zone,
        )

    def _guard(self, builder: str) -> None:
        """Have AWS terminate the builder should its guest never boot and this process die. The guard deletes itself."""
        if self._guard_role is not None:
            try:
                guard(self._session, self._guard_role, builder, self._wall_clock() + LEASE_S + BOOT_S + SLACK_S)
            except FAILURES as error:
                self._announce(f"AWS does not guard the builder {builder}: {explain(error)}")

    def _note_zone(self, zone: str) -> None:
        put(self._session, self._checkpoints, self._zone, zone.encode())

    def _until_installed(self, builder: str) -> None:
        seen, shown_by = False, self._now.clock() + VISIBILITY_S
        for _ in self._now.polls(LEASE_S + BOOT_S, every_s=_LOOK_S):
            with _next_look_instead():
                if self._read(self._marker) == builder or self._image() is not None:
                    return
                lives = any(one["InstanceId"] == builder for one in self._builders())
                if not lives and (seen or self._now.clock() > shown_by):
                    why = last_words(output(self._session, builder)) or "its console says nothing"
                    raise ProviderError(f"the builder {builder} ended before the image was made: {why}; build again")
                seen = seen or lives
        raise ProviderError(f"the builder {builder} did not finish within {LEASE_S + BOOT_S:.0f} s; build again")

    def _read(self, name: str) -> str:
        """Return the text in the bucket under this name; empty without one."""
        bucket, key = place_in(self._checkpoints, name)
        with ignoring("404", "NoSuchKey", "NotFound", "403", "AccessDenied"):
            found: bytes = self._session.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
            return found.decode(errors="replace").strip()
        return ""

    def _create(self, builder: str) -> OwnImage:
        """Create the image. A request without an answer is repeated: the name is then taken."""
        owner = self._machines.owner
        tags = {OWNER_TAG: owner, IMAGE_TAG: self._key, ROLE_TAG: "image", "Name": f"rubberband image {self._key}"}
        for _ in range(_LOOKS):
            try:
                self._session.client("ec2").create_image(
                    InstanceId=builder,
                    Name=f"rubberband-{owner}-{self._key}",
                    Description=f"rubberband environment {self._key}",
                    TagSpecifications=tag_specifications(tags, "image", "snapshot"),
                )
            except FAILURES as error:
                taken = code_of(error) == "InvalidAMIName.Duplicate"
                if not taken and verdict(error) not in ("unknown", "throttled"):
                    raise
            with _next_look_instead():
                if (image := self._image()) is not None:
                    self._announce(f"image {image.image_id} is being made; the builder reboots, and ends itself")
                    return image
            self._now.sleep(_LOOK_S)
        raise ProviderError(f"EC2 does not show the image rubberband-{owner}-{self._key}; build again")

    def _until_available(self, image: OwnImage) -> OwnImage:
        for _ in self._now.polls(_MADE_S, every_s=_LOOK_S):
            with _next_look_instead():
                found = own_images(self._session, self._machines.owner, self._key)
                shown = next((one for one in found if one.image_id == image.image_id), None)
                if shown is not None and shown.state == "available":
                    return shown
                if shown is not None and shown.state != "pending":
                    delete_image(self._session, self._machines.owner, self._key)
                    raise ProviderError(f"EC2 could not make the image {image.image_id} ({shown.state}); build again")
        raise ProviderError(f"the image {image.image_id} is not available after {_MADE_S:.0f} s; build again later")

    def _end_builders(self) -> None:
        if ids := [one["InstanceId"] for one in self._builders()]:
            self._session.client("ec2").terminate_instances(InstanceIds=ids)


@contextmanager
def _next_look_instead() -> Iterator[None]:
    """Ignore a look that EC2 did not answer, as another one follows."""
    try:
        yield
    except FAILURES as error:
        if verdict(error) not in ("unknown", "throttled"):
            raise


def builder_type(table: Table, region: str, instance_type: str) -> str:
    """Return the cheapest type with the same GPUs, as GPU and driver decide which build of torch is installed."""
    row = table.get(instance_type)
    if row is None or not row.gpu_model:
        return instance_type
    same = [one for one in table.values() if one.gpu_model == row.gpu_model and region in one.prices_usd_per_hour]
    return min(same, key=lambda one: one.prices_usd_per_hour[region], default=row).instance_type


def most_usd(price_usd_per_hour: float, region: str, volume_gb: int) -> float:
    """Return the most that a build costs: a builder for its whole lifetime, with its volume and its address."""
    beside = volume_gb * side_prices(region).volume_usd_per_gb_month / HOURS_PER_MONTH + 0.005
    return (price_usd_per_hour + beside) * (BOOT_S + LEASE_S) / 3600.0
