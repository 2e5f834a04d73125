"""What a new account has: Amazon's images and the public parameters that name the latest of them."""

from __future__ import annotations

from tests.ec2.machine_types import Architecture
from tests.ec2.principals import BUCKET
from tests.ec2.world import Image, World

_DEEP_LEARNING = "/aws/service/deeplearning/ami"
_UBUNTU = "/aws/service/canonical/ubuntu/server"
_AMAZON = "/aws/service/ami-amazon-linux-latest"
_KERNEL = "kernel-default"


def furnish(world: World) -> None:
    """Add them, and a bucket. Image ids differ from one region to another, as they do with AWS."""
    world.buckets[BUCKET] = {}
    for arch, debian in (("x86_64", "amd64"), ("arm64", "arm64")):
        for version in ("22.04", "24.04"):
            for flavour in ("base-oss-nvidia-driver-gpu", "oss-nvidia-driver-gpu-pytorch-2.7"):
                name = f"Deep Learning {flavour} (Ubuntu {version}) {arch}"
                parameter = f"{_DEEP_LEARNING}/{arch}/{flavour}-ubuntu-{version}/latest/ami-id"
                _add(world, parameter, name, arch, "/dev/sda1", volume_gb=75)
            volume = "ebs-gp2" if version == "22.04" else "ebs-gp3"
            parameter = f"{_UBUNTU}/{version}/stable/current/{debian}/hvm/{volume}/ami-id"
            _add(world, parameter, f"ubuntu-{version}-{debian}-server", arch, "/dev/sda1", volume_gb=8)
        name = f"Deep Learning base-oss-nvidia-driver-gpu (Amazon Linux 2023) {arch}"
        parameter = f"{_DEEP_LEARNING}/{arch}/base-oss-nvidia-driver-gpu-al2023/latest/ami-id"
        _add(world, parameter, name, arch, "/dev/xvda", volume_gb=75)
        parameter = f"{_AMAZON}/al2023-ami-{_KERNEL}-{arch}"
        _add(world, parameter, f"al2023-ami-2023-{_KERNEL}-{arch}", arch, "/dev/xvda", volume_gb=8)


def _add(world: World, parameter: str, name: str, architecture: str, root_device: str, *, volume_gb: int) -> None:
    arch: Architecture = "arm64" if architecture == "arm64" else "x86_64"
    image = Image(
        image_id=world.new_id("ami"), name=name, architecture=arch, root_device=root_device, volume_gb=volume_gb
    )
    world.images[image.image_id] = image
    world.parameters[parameter] = {"Name": parameter, "Type": "String", "Value": image.image_id, "Version": 1}
