"""Batches chosen by goodput: what the agent, the noise scale and the learning rate do to each step of one worker.

Rank 0 decides, every `interval` steps, and the others follow; between two decisions nothing waits for the device.
Progress is statistical (Pollux §3.1): a step at batch M counts for M * EFFICIENCY(M) samples, so that an iteration is
the same progress at any batch size. (With AdaScale that is the gain of the step, in samples of M0 each.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from rubberband.executor.training.agent import BatchAgent, BatchChoice
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.gradient_noise import GradientNoise, NoiseReading
from rubberband.executor.training.lr_scaling import LrScaling, make_lr_scaling, scaled_lr
from rubberband.executor.training.runner import TrialFailure
from rubberband.executor.training.sampler import GlobalBatch
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.planner.goodput.choice import candidates
from rubberband.planner.goodput.fit import prepare
from rubberband.planner.goodput.model import efficiency
from rubberband.values.adaptive import MAX_GROWTH, AdaptiveBatch, BatchLimits, BatchUse

# What an iteration tells of its batches: few stretches, however many decisions there were.


MOST_USES = 16
"""Of an iteration; neighbours of one size are put together beyond that."""


def append(uses: list[BatchUse], use: BatchUse) -> None:
    """Add a stretch; where there are many, put the shortest two neighbours together, if possible of one size."""
    uses.append(use)
    if len(uses) > MOST_USES:
        pairs = [(_size(one) != _size(next_one), one.steps + next_one.steps) for one, next_one in pairwise(uses)]
        at = pairs.index(min(pairs))
        uses[at : at + 2] = [_joined(uses[at], uses[at + 1])]


def _size(use: BatchUse) -> tuple[int, int, int]:
    return use.batch_size, use.per_gpu, use.accumulation


def _joined(first: BatchUse, second: BatchUse) -> BatchUse:
    """Both in steps of the size that took in more samples, which are counted right, like their progress and time."""
    samples = first.steps * first.batch_size, second.steps * second.batch_size
    main = first if samples[0] > samples[1] else second
    steps = max(1, round(sum(samples) / main.batch_size))
    return replace(
        main,
        steps=steps,
        duration_s=first.duration_s + second.duration_s,
        step_s=(first.steps * first.step_s + second.steps * second.step_s) / steps,
        noise_scale=second.noise_scale,
        efficiency=(samples[0] * first.efficiency + samples[1] * second.efficiency) / sum(samples),
    )


# Which batches a trial may choose among: what the user allows and what the trial itself says, checked.
#
# Which of them it chooses is the agent's business.


def resolve_limits(
    batch: AdaptiveBatch, *, batch_size: int, per_gpu: int | None, num_samples: int, samples_per_iteration: int
) -> BatchLimits:
    """The limits of one trial, whose own batch size and limit per GPU stand in for what the user does not say.

    Where M0 is not, no batch is larger than the training set of `num_samples`, or than an iteration, which would have
    no step then. Raises TrialFailure where no size is left.
    """
    initial = batch.initial or batch_size
    whose = "batch.initial" if batch.initial else "the trial's own batch size"
    if initial > num_samples:
        raise refused(
            f"{whose} ({initial}) is more than the {num_samples} samples of train_dataset(); "
            f"set batch.initial to {num_samples} or less"
        )
    largest = MAX_GROWTH * initial if batch.max is None else batch.max
    if largest < initial:
        raise refused(f"batch.max ({largest}) is less than {whose} ({initial}); raise it, or lower batch.initial")
    return BatchLimits(
        initial=initial,
        max=max(initial, min(largest, num_samples, samples_per_iteration)),
        max_per_gpu=batch.max_per_gpu or per_gpu,
        accumulation=batch.accumulation,
    )


def check_gang(limits: BatchLimits, num_workers: int, least_per_gpu: int) -> None:
    """Raises TrialFailure where no batch can be split over the workers, each of which needs `least_per_gpu` samples."""
    try:
        candidates(limits, num_workers, least_per_gpu=least_per_gpu)
    except ValueError as error:
        raise refused(str(error)) from None


def refused(line: str) -> TrialFailure:
    """The failure of a trial whose user asked for what cannot be."""
    return TrialFailure("raised", line)


FIRST_ESTIMATES = 40
"""Of the noise scale, which are taken often whatever they cost."""
LEAST_HALVES_SHARE, MOST_HALVES_SHARE = 0.02, 0.10
"""Of the time of the steps, for passes that the noise scale needs and training does not: the less, the less there is to
gain where the noise scale is as large as it may be."""
GAIN_FOR_HALVES = 0.2
"""Of what there is to gain."""
LEAST_STEPS_BETWEEN, MOST_STEPS_BETWEEN = 4, 32
SWEEP_SIZES = 6
SWEEP_WARM_STEPS = 2
LEAST_SWEEP_STEPS, MOST_SWEEP_STEPS = 8, 50
SWEEP_SIZE_S = 0.5
"""Within these numbers of steps, a size is timed for about so long."""
SWEEP_S = 60.0
"""A sweep tries no further size after so long."""


def make_adaptive(
    segment: Segment,
    gang: Gang,
    optimizer: torch.optim.Optimizer,
    wrapped: torch.nn.Module,
    *,
    batch_size: int,
    per_gpu: int | None,
    samples_per_iteration: int,
    num_samples: int,
    least_per_gpu: int,
    fits: Callable[[int], bool],
) -> AdaptiveBatching:
    """The adaptive batches of a trial on one worker; `batch_size` and `per_gpu` are the trial's own.

    Raises TrialFailure where the user's limits do not fit the trial or the gang.
    """
    assert segment.batch is not None
    limits = resolve_limits(
        segment.batch,
        batch_size=batch_size,
        per_gpu=per_gpu,
        num_samples=num_samples,
        samples_per_iteration=samples_per_iteration,
    )
    if segment.rank == 0 and segment.batch_mode == "adapt":
        prepare()
    return AdaptiveBatching(
        segment=segment,
        limits=limits,
        samples_per_iteration=samples_per_iteration,
        num_samples=num_samples,
        gang=gang,
        noise=GradientNoise(
            optimizer,
            wrapped,
            rank=segment.rank,
            num_workers=segment.num_workers,
            initial_batch=limits.initial,
            total=gang.sum,
        ),
        scaling=make_lr_scaling(segment.batch.lr_scaling, optimizer, segment.batch.warmup_epochs),
        least_per_gpu=least_per_gpu,
        fits=fits,
        synchronize=torch.cuda.synchronize if segment.device == "cuda" else _nothing,
    )


def _nothing() -> None:
    """A CPU is done when it returns."""


@dataclass(slots=True)
class _Stretch:
    """Steps of one size, from one decision to the next."""

    batch: BatchChoice
    untimed: int = 0
    """Its first steps that are not timed: in the first of a size, memory and kernels are set up."""
    steps: int = 0
    duration_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.timed_s / self.timed_steps if self.timed_steps else self.duration_s / self.steps


class AdaptiveBatching:
    """Implements `batching.Batching` for one worker of a gang; all of its workers call it in lockstep."""

    def __init__(
        self,
        *,
        segment: Segment,
        limits: BatchLimits,
        samples_per_iteration: int,
        num_samples: int,
        gang: Gang,
        noise: GradientNoise,
        scaling: LrScaling,
        least_per_gpu: int,
        fits: Callable[[int], bool],
        synchronize: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fits(m)` tries a pass of m samples on every worker and says whether all of them had the memory for it.

        `synchronize` waits until the device has done what it was asked. Raises TrialFailure where no batch can be
        split over the gang.
        """
        assert segment.batch is not None
        check_gang(limits, segment.num_workers, least_per_gpu)
        self._least_per_gpu = least_per_gpu
        self._segment, self._gang, self._noise, self._scaling = segment, gang, noise, scaling
        self._samples_per_iteration, self._num_samples = samples_per_iteration, num_samples
        self._fits, self._synchronize, self._clock = fits, synchronize, clock
        self._interval = segment.batch.interval
        self._agent = BatchAgent(
            limits,
            instances=segment.num_instances,
            gpus=segment.num_workers,
            clock=clock,
            least_per_gpu=least_per_gpu,
            known=segment.known_points,
        )
        self._noise_scale: float | None = None
        self._progress = 0.0
        self._target = 0.0
        self._scheduled = 0
        self._proven = 0
        self._since_decision = 0
        self._uses: list[BatchUse] = []
        self._sweep: Iterator[int] | None = None
        self._sweep_steps = LEAST_SWEEP_STEPS
        self._mark = 0.0
        self._started = False
        self._stretch: _Stretch
        self._set(self._agent.split(limits.initial))

    @property
    def batch_size(self) -> int:
        """M."""
        return self._stretch.batch.batch_size

    @property
    def per_gpu(self) -> int:
        """m."""
        return self._stretch.batch.per_gpu

    def begin(self, iterations: int) -> None:
        """An iteration ends with the step that reaches its statistical progress; a sweep, when it is through."""
        self._target = float(iterations * self._samples_per_iteration)
        if self._segment.batch_mode == "sweep":
            self._sweep, self._sweep_ends_at = iter(self._agent.sizes(SWEEP_SIZES)), self._clock() + SWEEP_S
            self._next_of_sweep()
        elif not self._started:
            self._decide()
        self._started = True
        self._synchronize()
        self._mark = self._clock()

    def is_over(self) -> bool:
        """By statistical progress."""
        if self._segment.batch_mode == "sweep":
            return self._sweep is None
        return self._progress >= self._target

    def wants_halves(self, share: int) -> bool:
        """Where one worker has the whole batch, the noise scale needs it in halves now and then."""
        return self._noise.wants_halves(share)

    def before_step(self, batch: GlobalBatch, parts: Sequence[int]) -> None:
        """Tell the noise scale what the gradients will be of."""
        self._noise.before_step(batch.shares, parts)

    def after_part(self) -> None:
        """Let the noise scale see a micro-batch."""
        self._noise.after_part()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the noise scale see the gradient, and the optimizer use it with the learning rate for this batch."""
        self._noise.before_update()
        with scaled_lr(optimizer, self._lr_factor):
            optimizer.step()

    def after_step(self, batch: GlobalBatch) -> int:
        """Count the step, and decide anew where it is time to; the LR schedule goes by progress in batches of M0."""
        self._progress += self._useful * batch.size
        self._stretch.steps += 1
        self._since_decision += 1
        if self._stretch.steps == self._stretch.untimed:
            self._warmed_up(self._lap())
        if self._sweep is not None:
            if self._stretch.steps >= SWEEP_WARM_STEPS + self._sweep_steps:
                self._next_of_sweep()
        elif self._since_decision >= self._interval:
            self._decide()
        # A schedule may end with the steps that the user foresaw: what overshoots counts in the next iteration.
        due = int(min(self._progress, self._target) // self._agent.limits.initial)
        batches, self._scheduled = due - self._scheduled, due
        return batches

    def end(self) -> BatchReport:
        """The stretches of the iteration. Where few steps have passed since the last decision, it stands."""
        if self._segment.batch_mode != "sweep":
            if 4 * self._since_decision >= self._interval:
                self._decide()
            else:
                self._close_stretch(self._noise_scale)
        uses, self._uses = tuple(self._uses), []
        return BatchReport(batches=uses, limits=self._agent.limits, samples_per_iteration=self._samples_per_iteration)

    def _decide(self) -> None:
        """Take in what the last stretch showed, and choose the batch of the next one; on all ranks."""
        reading = self._noise.reading()
        known = self._noise_scale if reading.noise_scale is None else reading.noise_scale
        self._close_stretch(known)
        batch = self._stretch.batch
        if self._segment.rank == 0 and self._segment.batch_mode == "adapt":
            batch = self._agent.choose(batch, _cautious(reading))
        scale = math.nan if known is None else known
        batch_size, per_gpu, accumulation, noise_scale = self._gang.share(
            [batch.batch_size, batch.per_gpu, batch.accumulation, scale]
        )
        self._noise_scale = None if math.isnan(noise_scale) else noise_scale
        self._since_decision = 0
        self._noise.halves_every = self._halves_every(reading)
        self._adopt(BatchChoice(batch_size=round(batch_size), per_gpu=round(per_gpu), accumulation=round(accumulation)))
        self._mark = self._clock()

    def _halves_every(self, reading: NoiseReading) -> int:
        """Steps between those in halves, which one worker alone needs: few at first, then as they may bring."""
        if self._segment.num_workers > 1 or reading.estimates < FIRST_ESTIMATES:
            return LEAST_STEPS_BETWEEN
        gain = self._agent.most_gain(self._stretch.batch, (reading.noise_scale or 0.0) * (1.0 + reading.uncertainty))
        share = max(LEAST_HALVES_SHARE, min(MOST_HALVES_SHARE, GAIN_FOR_HALVES * gain))
        affordable = math.ceil(self._agent.constant_share() / share)
        return max(LEAST_STEPS_BETWEEN, min(MOST_STEPS_BETWEEN, affordable))

    def _adopt(self, batch: BatchChoice) -> None:
        """Go on with `batch`, or with what the memory allows of it."""
        while batch.per_gpu > self._proven:
            if self._fits(batch.per_gpu):
                self._proven = batch.per_gpu
                break
            if batch.per_gpu <= self._least_per_gpu:
                least = f"out of memory with a batch of {batch.per_gpu} on a GPU"
                raise refused(f"{least}; use a smaller model or an instance with more memory")
            self._agent.forbid(batch.per_gpu, self._proven)
            batch = self._agent.split(self._agent.attainable(batch.batch_size))
        self._set(batch)

    def _set(self, batch: BatchChoice) -> None:
        is_new = not self._started or batch != self._stretch.batch
        untimed = SWEEP_WARM_STEPS if self._segment.batch_mode == "sweep" else int(is_new)
        self._stretch = _Stretch(batch=batch, untimed=untimed)
        self._useful = 1.0
        if self._noise_scale is not None:
            self._useful = float(efficiency(self._noise_scale, self._agent.limits.initial, batch.batch_size))
        # A sweep leaves the learning rate alone: it would not be safe at sizes that nobody chose.
        self._lr_factor = 1.0
        if self._segment.batch_mode != "sweep":
            initial, epochs = self._agent.limits.initial, self._progress / self._num_samples
            self._lr_factor = self._scaling.factor(initial, batch.batch_size, self._noise_scale, epochs)

    def _next_of_sweep(self) -> None:
        """Go to the next size of the sweep; it is over where there is none, or no time."""
        assert self._sweep is not None
        self._close_stretch(self._noise.reading().noise_scale)
        (late,) = self._gang.share([float(self._clock() >= self._sweep_ends_at)])
        size = None if late else next(self._sweep, None)
        if size is None:
            self._sweep = None
            return
        self._adopt(self._agent.split(self._agent.attainable(size)))
        self._mark = self._clock()

    def _warmed_up(self, lap_s: float) -> None:
        """The steps that are not timed took `lap_s`; in a sweep, say how many of this size are."""
        self._stretch.duration_s += lap_s
        if self._sweep is not None:
            wanted = SWEEP_SIZE_S * self._stretch.untimed / max(lap_s, 1e-9)
            wanted = min(max(math.ceil(wanted), LEAST_SWEEP_STEPS), MOST_SWEEP_STEPS)
            self._sweep_steps = round(self._gang.share([wanted])[0])

    def _close_stretch(self, noise_scale: float | None) -> None:
        """Note the stretch, show it to the agent, and begin another one of the same size."""
        stretch = self._stretch
        if not stretch.steps:
            return
        lap_s, timed = self._lap(), max(0, stretch.steps - stretch.untimed)
        stretch.duration_s += lap_s
        stretch.timed_s, stretch.timed_steps = lap_s, timed
        if timed:
            self._agent.observe(stretch.batch, timed, lap_s)
        append(self._uses, self._use(stretch, noise_scale))
        self._stretch = _Stretch(batch=stretch.batch)

    def _use(self, stretch: _Stretch, noise_scale: float | None) -> BatchUse:
        initial = self._agent.limits.initial
        useful = 1.0 if noise_scale is None else float(efficiency(noise_scale, initial, stretch.batch.batch_size))
        return BatchUse(
            instances=self._segment.num_instances,
            gpus=self._segment.num_workers,
            batch_size=stretch.batch.batch_size,
            per_gpu=stretch.batch.per_gpu,
            accumulation=stretch.batch.accumulation,
            steps=stretch.steps,
            duration_s=stretch.duration_s,
            step_s=stretch.step_s,
            noise_scale=noise_scale,
            efficiency=useful,
        )

    def _lap(self) -> float:
        """Seconds since the last mark, which is set anew."""
        self._synchronize()
        now = self._clock()
        elapsed_s, self._mark = now - self._mark, now
        return elapsed_s

    def state(self) -> dict[str, Any]:
        """Progress, batch, noise scale and all that the agent has learnt."""
        return {
            "progress": self._progress,
            "scheduled": self._scheduled,
            "batch_size": self.batch_size,
            "noise_scale": self._noise_scale,
            "proven": self._proven,
            "agent": self._agent.state(),
            "noise": self._noise.state_dict(),
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on with what was learnt; with another gang, the batch is split over it at once and chosen anew soon."""
        if state is None:
            raise KeyError("it was written with a fixed batch")
        self._progress, self._noise_scale, self._proven = state["progress"], state["noise_scale"], state["proven"]
        self._scheduled = state["scheduled"]
        self._agent.restore(state["agent"])
        self._noise.load_state_dict(state["noise"])
        self._set(self._agent.split(self._agent.attainable(state["batch_size"])))

    def close(self) -> None:
        """Let go of model and optimizer."""
        self._noise.close()
        del self._fits


def _cautious(reading: NoiseReading) -> float | None:
    """A smaller phi where it is uncertain: too small a batch costs less than one too large."""
    return None if reading.noise_scale is None else reading.noise_scale / (1.0 + reading.uncertainty)
