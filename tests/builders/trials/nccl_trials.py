"""Trials of gangs that lose a worker, on a stand-in for NCCL."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from tests.builders import nccl_stand_in
from tests.builders.trials.segment_trials import STUMBLES_AT, Regression

nccl_stand_in.install()


class Lossy(Regression):
    """Is killed on one rank, in the middle of an iteration."""

    num_workers = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        found = super().loss(model, batch)
        if self.batches == STUMBLES_AT and self.config.get("killed_rank") == torch.distributed.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        return found
