"""What an instance finds out of its GPUs before it joins; types whose accelerators torch cannot use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rubberband.cloud.aws.joining import WAIT_S, gpu_trouble
from rubberband.cloud.offers import offer
from rubberband.errors import InputError
from rubberband.spec.resources import Resources

TWO = (True, "GPU 0: Tesla T4 (UUID: GPU-1)\nGPU 1: Tesla T4 (UUID: GPU-2)\n")
NONE = (False, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
FINE = (True, "")


class Machine:
    """Answers of nvidia-smi, one after the other, and of torch; a clock that only waiting moves."""

    def __init__(self, *listed: tuple[bool, str], torch: tuple[bool, str] = FINE) -> None:
        self.listed, self.torch, self.now = list(listed), torch, 0.0

    def run(self, command: list[str]) -> tuple[bool, str]:
        if command[0] == sys.executable:
            return self.torch
        assert command == ["nvidia-smi", "-L"]
        return self.listed.pop(0) if len(self.listed) > 1 else self.listed[0]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def trouble(self, gpus: int) -> str:
        return gpu_trouble(gpus, run=self.run, clock=lambda: self.now, sleep=self.sleep)


def test_gpus_that_work_are_fine_at_once() -> None:
    machine = Machine(TWO)
    assert (machine.trouble(2), machine.trouble(1), machine.now) == ("", "", 0.0)


def test_a_driver_that_is_late_is_waited_for() -> None:
    machine = Machine(NONE, NONE, TWO)
    assert machine.trouble(2) == ""
    assert machine.now > 0.0


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (Machine(NONE), r"^0 of 4 GPUs found within 120 s \(NVIDIA-SMI has failed .*\); give an image"),
        (Machine(TWO), r"^2 of 4 GPUs found within 120 s; give an image with a driver"),
    ],
)
def test_gpus_that_do_not_come_are_said_in_one_line(machine: Machine, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        raise AssertionError(machine.trouble(4))
    assert WAIT_S <= machine.now < WAIT_S + 60.0


def test_a_build_without_cuda_is_refused_at_once() -> None:
    machine = Machine(TWO, torch=(False, "torch 2.9.0+cpu is a build without CUDA\n"))
    assert machine.trouble(2).startswith("torch 2.9.0+cpu is a build without CUDA; run again, or give an index")
    assert machine.now == 0.0


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update it",
            "; give a newer image (resources.aws.image), or an index of an older CUDA (resources.aws.index_url)",
        ),
        (
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
            "; give an index of an older CUDA (resources.aws.index_url), or another type",
        ),
    ],
)
def test_a_driver_or_gpu_that_torch_is_not_made_for_is_refused_at_once_with_its_fix(error: str, fix: str) -> None:
    advice = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    machine = Machine(TWO, torch=(False, f'Traceback:\n  File "<string>"\n{error}\n{advice}'))
    said = machine.trouble(2)
    assert said.startswith(error[:80])
    assert said.endswith(fix)
    assert machine.now == 0.0


def test_the_line_fits_into_what_is_reported_of_a_console() -> None:
    for machine in (Machine(NONE), Machine(TWO, torch=(False, "x" * 500))):
        assert len(machine.trouble(2)) <= 200 + 20
        assert "\n" not in machine.trouble(2)


@pytest.mark.long
def test_this_torch_is_found_out() -> None:
    """The code that asks torch is run for real: on a machine without GPUs it says so."""
    real = Machine((True, "GPU 0: x\n"))

    def run(command: list[str]) -> tuple[bool, str]:
        from rubberband.cloud.aws import joining

        return joining._run(command) if command[0] == sys.executable else real.run(command)

    import torch

    said = gpu_trouble(1, run=run, clock=lambda: real.now, sleep=real.sleep)
    assert (said == "") == (torch.cuda.device_count() >= 1)
    assert said == "" or "is a build without CUDA" in said or "sees 0 of 1 GPUs" in said


@pytest.mark.parametrize("stream", ["1", "2"])
def test_the_reason_is_what_a_command_says_in_either_stream(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho driver/library version mismatch >&{stream}\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    clock = Machine(NONE)
    assert "(driver/library version mismatch)" in gpu_trouble(1, clock=lambda: clock.now, sleep=clock.sleep)


@pytest.mark.parametrize(
    ("instance_type", "accelerator"),
    [
        ("g5g.xlarge", "NVIDIA T4G"),
        ("g4ad.xlarge", "Radeon Pro V520"),
        ("dl1.24xlarge", "Intel Gaudi"),
        ("inf2.xlarge", "AWS Inferentia2"),
        ("trn1.2xlarge", "AWS Trainium"),
        ("p2.xlarge", "K80"),
    ],
)
def test_a_type_whose_accelerator_torch_cannot_use_is_refused_by_name(instance_type: str, accelerator: str) -> None:
    words = {"instance_type": instance_type, "gpus_per_instance": 1, "price_per_hour": 1.0}
    with pytest.raises(InputError, match=rf"{accelerator}.* choose a type with an NVIDIA GPU, such as g4dn"):
        offer(Resources(provider="aws", **words), environment={})

    offer(Resources(provider="virtual", **words), environment={})
    offer(Resources(provider="aws", aws={"image": "ami-1", "install": "none"}, **words), environment={})
