"""A trial finds its process as the import of its module left it, whatever the trial before it has set."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rubberband
from rubberband.executor.checkpoints import open_store
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run import run_segment
from tests.builders import segments
from tests.builders.segments import reports

pytestmark = pytest.mark.usefixtures("one_thread")


def spoil(folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.set_num_threads(3)
    os.chdir(folder)


def seen() -> list[Any]:
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
        Path.cwd(),
    ]


def function(config: dict[str, Any]) -> None:
    spoil(config["folder"])
    rubberband.report({"loss": 1.0}, checkpoint=1)


class Broken(rubberband.Trial):
    def setup(self, config, context):
        spoil(config["folder"])
        raise ValueError("it fails after that")

    def iterate(self):
        return {}

    def save(self):
        return None

    def load(self, state):
        pass


@pytest.mark.parametrize("trial", [function, Broken])
def test_defaults_that_a_trial_sets_in_its_process_end_with_it(trial: Any, tmp_path: Path) -> None:
    segment = replace(segments.SEGMENT, until_iterations=1, config={"folder": str(tmp_path)})
    before = seen()
    items = list(run_segment(Entrypoint.from_object(trial), segment, open_store(str(tmp_path / "store"))))
    assert seen() == before
    assert trial is Broken or len(reports(items)) == 1
