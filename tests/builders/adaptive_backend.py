"""A virtual backend whose trials adapt their batch: they report as real ones do, with the times of a known model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rubberband.executor import Command, Event, StartTrial, TrialReported, VirtualBackend
from rubberband.planner.goodput import candidates, step_s
from rubberband.values.adaptive import BatchLimits, BatchUse, GoodputProfile

SIZES = 6


class AdaptiveBackend(VirtualBackend):
    """Reports batches: at M0 where they are held, several sizes in a sweep."""

    model: GoodputProfile
    noise_scales: Sequence[float | None] = (None,)
    """Of trial 0, 1, …, and again from the first."""
    started: list[StartTrial]

    def reporting(self, model: GoodputProfile, *noise_scales: float | None) -> AdaptiveBackend:
        """With trials of this model; it returns itself."""
        self.model, self.noise_scales, self.started = model, noise_scales, []
        return self

    def execute(self, command: Command) -> None:
        if isinstance(command, StartTrial):
            self.started.append(command)
        super().execute(command)

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        return [self._with_batches(event) for event in super().next_events(wake_at)]

    def _with_batches(self, event: Event) -> Event:
        if not isinstance(event, TrialReported):
            return event
        order = next(o for o in reversed(self.started) if (o.trial, o.attempt) == (event.trial, event.attempt))
        limits, gpus = self.model.limits, len(order.gang)
        instances = len({slot.instance for slot in order.gang})
        swept = candidates(limits, gpus, num=SIZES).batch_size.tolist() if order.batch_mode == "sweep" else []
        uses = tuple(self._use(event.trial, instances, gpus, size) for size in swept or [limits.initial])
        samples = round(self.model.samples_per_iteration)
        return replace(event, batches=uses, limits=limits, samples_per_iteration=samples)

    def _use(self, trial: int, instances: int, gpus: int, batch_size: int) -> BatchUse:
        per_gpu, accumulation = _split(self.model.limits, gpus, batch_size)
        took_s = float(step_s(self.model.throughput, instances, gpus, per_gpu, accumulation))
        return BatchUse(
            instances=instances,
            gpus=gpus,
            batch_size=batch_size,
            per_gpu=per_gpu,
            accumulation=accumulation,
            steps=10,
            duration_s=10 * took_s,
            step_s=took_s,
            noise_scale=self.noise_scales[trial % len(self.noise_scales)],
            efficiency=1.0,
        )


def _split(limits: BatchLimits, gpus: int, batch_size: int) -> tuple[int, int]:
    passes = -(-batch_size // (gpus * (limits.max_per_gpu or batch_size)))
    return -(-batch_size // (gpus * passes)), passes - 1
