"""Trials for the tests of unequal workers; the configuration says how slow each rank is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from segment_trials import Loaded, OwnStep, Regression, rank


class Sleepy(Regression):
    """Every pass sleeps for `pass_s[rank]` and, for each sample, `sample_s[rank]` seconds; the first rank evaluates."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        pause_s = self.config.get("pass_s", [0.0] * 8)[rank()]
        pause_s += self.config.get("sample_s", [0.0] * 8)[rank()] * len(batch[0])
        if model.training and pause_s:
            time.sleep(pause_s)  # balancing goes by the time of passes
        return loss


class SleepyOwn(OwnStep, Sleepy):
    """The same with a step of its own."""


class Normed(Sleepy):
    """With a BatchNorm on the inputs, whose running statistics show what each worker saw."""

    samples_per_iteration = 48

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        model = super().build_model(config)
        return torch.nn.Sequential(torch.nn.BatchNorm1d(5, momentum=None), model).double()


class SleepyLoaded(Sleepy, Loaded):
    """With loader workers, as many as the configuration says."""
