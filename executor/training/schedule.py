"""The LR schedules of a trial: built, checked, and stepped after every batch or iteration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rubberband.executor.training.components import Component
from rubberband.executor.training.failures import refused
from rubberband.executor.training.options import Group
from rubberband.executor.training.torch_trial import TorchTrial, override_of
from rubberband.units import shown

if TYPE_CHECKING:
    from rubberband.executor.training.loop import TorchRunner
    from rubberband.executor.training.sampler import GlobalBatch


class LrSchedule(Component):
    """Steps the LR schedules that `build_scheduler` returned, if any."""

    def __init__(self, loop: TorchRunner) -> None:
        self._loop = loop
        self.total_steps = self._total_steps()
        """How often it steps in a trial that trains to the end."""
        self._built = build_scheduler(loop.trial, loop.segment.config, loop.optimizers, self.total_steps)
        self.members: Sequence[LRScheduler] = () if self._built is None else self._built.members

    def _total_steps(self) -> int:
        loop, batch = self._loop, self._loop.segment.batch
        iterations = loop.trial.max_iterations
        if loop.trial.scheduler_step == "iteration":
            return iterations
        if batch is not None:
            return max(1, iterations * loop.samples_per_iteration // (batch.initial or loop.batch_size))
        return loop.fixed_steps(iterations)

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool) -> None:
        if self._loop.trial.scheduler_step == "batch":
            for schedule in [*self.members] * self._loop.batching.batches_due:
                schedule.step()

    def after_evaluation(self, iterations: int, metrics: Mapping[str, float]) -> None:
        """Step by iteration; ReduceLROnPlateau: by the metric of rank 0, where it is evaluated."""
        loop = self._loop
        value = loop.gang.agree(metrics[self.watched(metrics)] if loop.gang.rank == 0 else None)
        for schedule in self.members:
            if isinstance(schedule, ReduceLROnPlateau):
                if loop.evaluation.is_regular(iterations):
                    schedule.step(value)
            elif loop.trial.scheduler_step == "iteration":
                schedule.step()

    def watched(self, metrics: Mapping[str, float]) -> str:
        """Return the metric that ReduceLROnPlateau steps with. Raises ValueError if it is not reported."""
        watched = self._loop.trial.scheduler_metric or self._loop.segment.metric
        if watched not in metrics:
            raise ValueError(f"scheduler_metric {watched!r} is not reported; the trial reports {', '.join(metrics)}")
        return watched

    @property
    def has_plateau(self) -> bool:
        """Whether any schedule steps with a metric."""
        return any(isinstance(each, ReduceLROnPlateau) for each in self.members)

    def state_dict(self) -> Any:
        return None if self._built is None else self._built.state_dict()

    def load_state_dict(self, state: Any, /) -> None:
        if self._built is not None:
            self._built.load_state_dict(state)


def build_scheduler(
    trial: TorchTrial, config: Mapping[str, Any], optimizers: Group[Optimizer], total_steps: int
) -> Group[LRScheduler] | None:
    """Return the trial's LR schedules, None without one; `total_steps` is passed if its method has the parameter.

    Raises TrialFailure for anything that is no schedule, or needs the metric after every batch.
    """
    build: Any = trial.build_scheduler
    parameters = inspect.signature(build).parameters
    wants_total = "total_steps" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    scheduler: Any = build(config, optimizers.built, **({"total_steps": total_steps} if wants_total else {}))
    if scheduler is None:
        return None
    group = Group[LRScheduler](scheduler)
    are_schedules = all(hasattr(each, "step") and hasattr(each, "state_dict") for each in group.members)
    if not are_schedules or (group.members != [scheduler] and override_of(trial, "step") is None):
        raise refused(f"build_scheduler() returned {shown(scheduler)}; return a schedule of torch.optim, or None")
    if any(isinstance(each, ReduceLROnPlateau) for each in group.members) and trial.scheduler_step == "batch":
        raise refused(
            'ReduceLROnPlateau needs the metric, which is there once an iteration; use scheduler_step = "iteration"'
        )
    return group


def fixed_steps(
    iterations: int, *, num_samples: int, batch_size: int, samples_per_iteration: int, drop_last: bool = False
) -> int:
    """Return the batches of that many iterations: the last one of an epoch is smaller, and each iteration has one.

    With `drop_last`, a smaller one is left out.
    """
    per_epoch = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    steps = 0
    for iteration in range(1, iterations + 1):
        epochs, rest = divmod(iteration * samples_per_iteration, num_samples)
        steps = max(steps + 1, epochs * per_epoch + min(per_epoch, math.ceil(rest / batch_size)))
    return steps
