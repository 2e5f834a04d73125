"""Instance types of EC2 whose accelerators the published wheels of PyTorch cannot use, refused before anything else."""

from __future__ import annotations

from rubberband.errors import InputError
from rubberband.resources import Resources
from rubberband.units import shown

_FAMILIES = {
    "g5g": "NVIDIA T4G on an Arm CPU (PyPI's torch for Arm has no CUDA, and PyTorch's CUDA builds for Arm no T4G)",
    "g4ad": "AMD Radeon Pro V520",
    "dl1": "Intel Gaudi",
    "dl2q": "Qualcomm AI 100",
    "inf1": "AWS Inferentia",
    "inf2": "AWS Inferentia2",
    "trn1": "AWS Trainium",
    "trn1n": "AWS Trainium",
    "trn2": "AWS Trainium2",
    "trn2u": "AWS Trainium2",
    "vt1": "AMD Alveo U30",
    "f1": "AMD FPGAs",
    "f2": "AMD FPGAs",
    "p2": "NVIDIA K80 (no current build of torch knows it)",
}
"""Family -> its accelerator. Of Arm: pytorch/pytorch#160162."""


def check_accelerator(resources: Resources, instance_type: str) -> None:
    """Raise InputError for a type of EC2 whose accelerator torch cannot use, unless an image brings what can."""
    accelerator = _FAMILIES.get(instance_type.partition(".")[0])
    brings_its_own = resources.aws.image is not None and (resources.aws.install or "").strip() == "none"
    if resources.provider == "aws" and accelerator and not brings_its_own:
        raise InputError(
            f"resources.instance_type: {shown(instance_type)} has {accelerator}, which the published builds of PyTorch "
            "cannot use; choose a type with an NVIDIA GPU, such as g4dn.xlarge or g5.xlarge, or give an image with "
            "everything (resources.aws: image, and install: none)"
        )
