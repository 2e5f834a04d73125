"""What a type of instance is, and the image that it boots: the one that is asked for, or the latest that fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import code_of
from rubberband.errors import InputError
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
