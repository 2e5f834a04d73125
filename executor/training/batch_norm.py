"""BatchNorm in a gang: the fewest samples of a pass, and running statistics of what all workers saw.

Each worker's layers follow its own samples. At the end of an iteration, the running statistics become the mean over the
workers, each counted by its samples; so they are the same whatever the shares, up to the noise of smaller batches.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rubberband.executor.training.gang import Gang

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def least_samples(module: nn.Module) -> int:
    """Return the fewest samples of a pass: 2 if a BatchNorm takes its statistics from the batch, 1 otherwise."""
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    return 2 if any(norm.training or norm.running_mean is None for norm in norms) else 1


def statistics_of(module: nn.Module) -> list[str]:
    """Return the names of all running statistics, as in `state_dict`."""
    return [
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        if isinstance(each, _BatchNorm)
        for name in _STATISTICS
        if getattr(each, name) is not None
    ]


class RunningStatistics:
    """The running statistics of one worker's model, which are averaged over its gang after each iteration."""

    def __init__(self, module: nn.Module, gang: Gang) -> None:
        self._module = module
        self._gang = gang
        self._samples = 0

    def add(self, samples: int) -> None:
        """Note that `samples` of this worker went through the model in training."""
        self._samples += samples

    @torch.no_grad()
    def average(self) -> None:
        """Replace the statistics that training changed by their means over the gang, on all workers."""
        samples, self._samples = self._samples, 0
        norms = [each for each in self._module.modules() if isinstance(each, _BatchNorm) and each.training]
        found = [value for each in norms for name in _STATISTICS if (value := getattr(each, name)) is not None]
        if self._gang.num_workers == 1 or not found:
            return
        sums = torch.cat([value.flatten().double() for value in found] + [found[0].new_ones(1).double()]) * samples
        *means, _ = torch.split((sums := self._gang.sum(sums)) / sums[-1], [each.numel() for each in found] + [1])
        for value, mean in zip(found, means, strict=True):
            value.copy_((mean if value.is_floating_point() else mean.round()).view_as(value))
