"""Batches chosen by goodput: the agent, the noise scale and the learning rate in each step of one worker.

Rank 0 decides, every `interval` steps, and the others follow; between two decisions nothing waits for the device.
Progress is statistical (Pollux §3.1): a step at batch M counts for M * EFFICIENCY(M) samples, so that an iteration is
the same progress at any batch size. (With AdaScale that is the gain of the step, in samples of M0 each.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from rubberband.executor.training.clocks import CudaLapClock, LapClock
from rubberband.executor.training.components import SharePolicy
from rubberband.executor.training.failures import refused
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.goodput.agent import BatchAgent, BatchChoice, ChoiceBudget
from rubberband.executor.training.goodput.gradient_noise import GradientNoise
from rubberband.executor.training.goodput.lr_scaling import LrScaling, make_lr_scaling, scaled_lr
from rubberband.executor.training.goodput.noise_scale import NoiseReading
from rubberband.executor.training.metrics import Weight
from rubberband.executor.training.sampler import Batching, GlobalBatch
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.step import TrainStep
from rubberband.planner.goodput import candidates, efficiency
from rubberband.units import counted
from rubberband.values.adaptive import MAX_GROWTH, AdaptiveBatch, BatchLimits, BatchUse
from rubberband.values.balance import even_shares

if TYPE_CHECKING:
    from rubberband.executor.training.loop import TorchRunner

MOST_USES = 16
"""The most stretches in the report of an iteration; neighbours are joined beyond that."""


def append(uses: list[BatchUse], use: BatchUse) -> None:
    """Add a stretch; if there are too many, join the shortest two neighbours, if possible of one size."""
    uses.append(use)
    if len(uses) > MOST_USES:
        pairs = [(_size(one) != _size(next_one), one.steps + next_one.steps) for one, next_one in pairwise(uses)]
        at = pairs.index(min(pairs))
        uses[at : at + 2] = [_joined(uses[at], uses[at + 1])]


def _size(use: BatchUse) -> tuple[int, int, int]:
    return use.batch_size, use.per_gpu, use.accumulation


def _joined(first: BatchUse, second: BatchUse) -> BatchUse:
    """Join two stretches in steps of the size with more samples; samples, progress and time stay exact."""
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


def resolve_limits(
    batch: AdaptiveBatch, *, batch_size: int, per_gpu: int | None, num_samples: int, samples_per_iteration: int
) -> BatchLimits:
    """Return the limits of one trial, whose own batch size and limit per GPU are the defaults.

    Beyond M0, no batch is larger than the training set of `num_samples`, or than an iteration. Raises TrialFailure if
    no size is left.
    """
    initial = batch.initial or batch_size
    whose = "batch.initial" if batch.initial else "the trial's own batch size"
    if initial > num_samples:
        raise refused(
            f"{whose} ({initial}) is more than the {counted(num_samples, 'sample')} of train_dataset(); "
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


FIRST_ESTIMATES = 40
"""The first estimates of the noise scale are frequent, at any cost."""
LEAST_HALVES_SHARE, MOST_HALVES_SHARE = 0.02, 0.10
"""Share of the steps' time for extra passes that only the noise scale needs: less if even its largest likely value
would bring little gain."""
GAIN_FOR_HALVES = 0.2
"""The share of the possible gain that these passes may cost."""
LEAST_STEPS_BETWEEN, MOST_STEPS_BETWEEN = 4, 32
HALVES_COST = 1.5
"""Time of a step in halves beyond that of a whole one, by the part of a pass that does not depend on the samples."""
FIRST_HALVES = 2
RAREST = 1000
"""The most steps between steps in halves, whatever they cost."""
SWEEP_SIZES = 6
SWEEP_WARM_STEPS = 2
LEAST_SWEEP_STEPS, MOST_SWEEP_STEPS = 8, 50
SWEEP_SIZE_S = 0.5
"""A size is timed for about this long, within these numbers of steps."""
SWEEP_S = 60.0
"""A sweep begins no further size after this time."""


def make_batching(loop: TorchRunner) -> AdaptiveBatching | None:
    """Return the adaptive batches of a trial on one worker. Raises TrialFailure if the limits do not fit the gang."""
    segment, step = loop.segment, loop.step
    if segment.batch is None:
        return None
    assert isinstance(step, TrainStep), "batches of an own step are fixed"
    limits = resolve_limits(
        segment.batch,
        batch_size=loop.batch_size,
        per_gpu=loop.limit,
        num_samples=loop.feed.num_samples,
        samples_per_iteration=loop.samples_per_iteration,
    )
    optimizer = loop.optimizers.members[0]
    return AdaptiveBatching(
        segment=segment,
        limits=limits,
        samples_per_iteration=loop.samples_per_iteration,
        num_samples=loop.feed.num_samples,
        gang=loop.gang,
        noise=GradientNoise(
            optimizer,
            step.wrapped,
            rank=segment.rank,
            num_workers=segment.num_workers,
            initial_batch=limits.initial,
            total=loop.gang.sum,
            gradient_scale=step.precision.scale,
        ),
        scaling=make_lr_scaling(segment.batch.lr_scaling, optimizer, segment.batch.warmup_epochs),
        least_per_gpu=step.least,
        fits=step.fits,
        clock=CudaLapClock() if segment.device == "cuda" else LapClock(),
        shares=loop.division.shares,
        pace=loop.division.pace,
    )


@dataclass(slots=True)
class _SteadySteps:
    """Steps of one size, from one decision to the next."""

    batch: BatchChoice
    untimed: int = 0
    """First steps that are not timed: the first of a size sets up memory and kernels."""
    steps: int = 0
    skipped: int = 0
    """Steps whose gradients overflowed: they take time and make no progress."""
    duration_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.timed_s / self.timed_steps if self.timed_steps else self.duration_s / self.steps


@dataclass(eq=False, kw_only=True)
class AdaptiveBatching(Batching):
    """Batches chosen by goodput, for one worker of a gang; all of its workers call it in lockstep.

    Raises TrialFailure if no batch can be split over the gang.
    """

    segment: Segment
    limits: InitVar[BatchLimits]
    samples_per_iteration: int
    num_samples: int
    gang: Gang
    noise: GradientNoise
    scaling: LrScaling
    least_per_gpu: int
    fits: Callable[[int], bool]
    """Tries a pass of m samples on every worker, and returns whether all of them had the memory for it."""
    clock: LapClock
    shares: SharePolicy = even_shares
    """Divides a batch among the workers."""
    pace: Callable[[], float] = lambda: 1.0
    """On rank 0: how much longer unequal workers take now than at first."""

    def __post_init__(self, limits: BatchLimits) -> None:
        segment = self.segment
        assert segment.batch is not None
        try:
            candidates(limits, segment.num_workers, least_per_gpu=self.least_per_gpu)
        except ValueError as error:
            raise refused(str(error)) from None
        self._interval = segment.batch.interval
        self._looks = ChoiceBudget()
        self._halves = 0
        """Steps in halves since the last decision."""
        self._agent = BatchAgent(
            limits,
            instances=segment.num_instances,
            gpus=segment.num_workers,
            clock=self.clock.own,
            least_per_gpu=self.least_per_gpu,
            known=segment.known_points,
            pace=self.pace,
        )
        self._noise_scale: float | None = None
        self._progress = 0.0
        self._target = 0.0
        self._scheduled = 0
        self._since_decision = 0
        self._step_s = 0.0
        self._uses: list[BatchUse] = []
        self._sweep: Iterator[int] | None = None
        self._sweep_steps = LEAST_SWEEP_STEPS
        self._started = False
        self._stretch: _SteadySteps
        initial = self._agent.split(limits.initial)
        self._proven = initial.per_gpu
        """Samples at once that memory sufficed for. A first batch that does not fit is divided when it is trained."""
        self._set(initial)

    def begin(self, iterations: int) -> None:
        """Begin an iteration, which ends at its statistical progress, or a sweep, which ends after its last size."""
        self._target = float(iterations * self.samples_per_iteration)
        if self.segment.batch_mode == "sweep":
            self._sweep, self._sweep_ends_at = iter(self._agent.sizes(SWEEP_SIZES)), self.clock.now() + SWEEP_S
            self._next_of_sweep()
        elif not self._started:
            self._decide()
        self._started = True
        self.clock.lap()

    def is_over(self) -> bool:
        if self.segment.batch_mode == "sweep":
            return self._sweep is None
        return self._progress >= self._target

    def wants_halves(self, share: int, steps_ahead: int = 0) -> bool:
        return self.noise.wants_halves(share, steps_ahead)

    def before_step(self, batch: GlobalBatch, parts: Sequence[int]) -> None:
        self._halves += self.segment.num_workers == 1 and len(parts) > self._stretch.batch.accumulation + 1
        self.noise.before_step(batch.shares, parts)

    def restrict(self, per_gpu: int) -> None:
        self._agent.restrict(per_gpu)
        self._proven = min(self._proven, per_gpu)
        self._set(self._agent.split(self._agent.attainable(self.batch_size)))

    def held_gradients(self) -> int:
        return 1 + self.noise.held_vectors

    def weigh(self, fractions: Sequence[Weight]) -> None:
        self.noise.weigh(fractions)

    def after_part(self) -> None:
        self.noise.after_part()

    def update(self, optimizer: Optimizer, step: Callable[[], bool]) -> bool:
        """Show the gradient to the noise scale, and step with the learning rate for this batch."""
        self.noise.before_update()
        with scaled_lr(optimizer, self._lr_factor):
            return step()

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool = True) -> None:
        """Count the step, and decide again when due. The LR schedule advances by progress in batches of M0."""
        if has_stepped:
            self._progress += self._useful * batch.size
        else:
            self._stretch.skipped += 1
        self._stretch.steps += 1
        self._since_decision += 1
        if self._stretch.steps == self._stretch.untimed:
            self._warmed_up(*self.clock.lap())
        if self._sweep is not None:
            if self._stretch.steps >= SWEEP_WARM_STEPS + self._sweep_steps:
                self._next_of_sweep()
        elif self._since_decision >= self._interval:
            self._decide()
        # A schedule may have exactly the planned steps: the excess counts in the next iteration.
        due = int(min(self._progress, self._target) // self._agent.limits.initial)
        self.batches_due, self._scheduled = due - self._scheduled, due

    def pause(self) -> None:
        self.clock.pause()

    def resume(self) -> None:
        self.clock.resume()

    def end(self) -> Mapping[str, Any]:
        """Return the stretches of the iteration. A decision of few steps ago still stands."""
        if self.segment.batch_mode != "sweep":
            if 4 * self._since_decision >= self._interval:
                self._decide()
            else:
                self._close_stretch(self._noise_scale)
        uses, self._uses = tuple(self._uses), []
        return {"batches": uses, "limits": self._agent.limits, "samples_per_iteration": self.samples_per_iteration}

    def _decide(self) -> None:
        """Learn from the last stretch, and choose the batch of the next one; on all ranks."""
        self.clock.wait()
        began = self.clock.own()
        reading = self.noise.reading()
        known = self._noise_scale if reading.noise_scale is None else reading.noise_scale
        self._close_stretch(known)
        batch = self._stretch.batch
        if self.segment.rank == 0 and self.segment.batch_mode == "adapt":
            batch = self._agent.choose(batch, _cautious(reading))
        scale = math.nan if known is None else known
        step_s, remaining_s = self._rest()
        if self.segment.batch_mode == "adapt" and step_s > 0.0:
            assert self.segment.batch is not None
            self._interval = self._looks.interval(self.segment.batch.interval, step_s, remaining_s)
        batch_size, per_gpu, accumulation, noise_scale, interval = self.gang.share(
            [batch.batch_size, batch.per_gpu, batch.accumulation, scale, self._interval]
        )
        self._interval = round(interval)
        self._noise_scale = None if math.isnan(noise_scale) else noise_scale
        self._since_decision = 0
        self.noise.halves_every = self._halves_every(reading, step_s, remaining_s)
        self._adopt(BatchChoice(batch_size=round(batch_size), per_gpu=round(per_gpu), accumulation=round(accumulation)))
        self._looks.spend(self.clock.own() - began)
        self.clock.lap()

    def _rest(self) -> tuple[float, float]:
        """Return the seconds of the latest steps, and of the segment's training that is left; 0 before the first."""
        step_s = self._step_s
        left = self.segment.until_iterations * self.samples_per_iteration - self._progress
        return step_s, max(0.0, left) / (self._useful * self.batch_size) * step_s

    def _halves_every(self, reading: NoiseReading, step_s: float, remaining_s: float) -> int:
        """Return the steps between steps in halves, for a single worker: few at first, then by the possible gain.

        They are part of what looks may cost, unless a profile is taken.
        """
        if self.segment.num_workers > 1:
            return LEAST_STEPS_BETWEEN
        every = LEAST_STEPS_BETWEEN
        if reading.estimates >= FIRST_ESTIMATES:
            most_gain = self._agent.most_gain(
                self._stretch.batch, (reading.noise_scale or 0.0) * (1.0 + reading.uncertainty)
            )
            share = max(LEAST_HALVES_SHARE, min(MOST_HALVES_SHARE, GAIN_FOR_HALVES * most_gain))
            every = max(every, min(MOST_STEPS_BETWEEN, math.ceil(self._agent.constant_share() / share)))
        if self.segment.batch_mode == "hold":
            return every
        if step_s == 0.0:
            return max(every, self._interval // FIRST_HALVES)
        affordable = self._looks.affordable(self._halves_s(step_s), self._interval, step_s, remaining_s)
        return max(every, min(RAREST, math.ceil(self._interval / max(affordable, 1e-9))))

    def _halves_s(self, step_s: float) -> float:
        """Return the seconds that a step in halves takes longer: for another pass, and to observe two gradients."""
        return HALVES_COST * self._agent.constant_share() * step_s

    def _adopt(self, batch: BatchChoice) -> None:
        """Continue with `batch`, or with the part of it that fits the memory."""
        while (most := self._pass_of(batch)) > self._proven:
            if self.fits(most):
                self._proven = most
                break
            self._agent.forbid(most, self._proven)
            batch = self._agent.split(self._agent.attainable(batch.batch_size))
        self._set(batch)

    def _set(self, batch: BatchChoice) -> None:
        is_new = not self._started or batch != self._stretch.batch
        untimed = SWEEP_WARM_STEPS if self.segment.batch_mode == "sweep" else int(is_new)
        self._stretch = _SteadySteps(batch=batch, untimed=untimed)
        self.batch_size, self.per_gpu = batch.batch_size, self._pass_of(batch)
        limits = self._agent.limits
        self.most_per_worker = None if limits.accumulation else limits.max_per_gpu
        self._useful = 1.0
        if self._noise_scale is not None:
            self._useful = float(efficiency(self._noise_scale, self._agent.limits.initial, batch.batch_size))
        # A sweep leaves the learning rate alone: it would not be safe at sizes that were not chosen.
        self._lr_factor = 1.0
        if self.segment.batch_mode != "sweep":
            initial, epochs = self._agent.limits.initial, self._progress / self.num_samples
            self._lr_factor = self.scaling.factor(initial, batch.batch_size, self._noise_scale, epochs)

    def _pass_of(self, batch: BatchChoice) -> int:
        """Return the samples of the largest pass: the largest share, in as few passes as fit the memory."""
        share = max(self.shares(batch.batch_size, self.segment.num_workers))
        passes = -(-share // min(self._agent.limits.max_per_gpu or share, share))
        return -(-share // passes)

    def before_shares_change(self) -> None:
        """Close the stretch with the present shares, whose steps take another time, unless it has few steps."""
        if 2 * self._stretch.steps >= self._interval:
            self._close_stretch(self._noise_scale)

    def after_shares_change(self) -> None:
        """Take the largest of the new shares in as few passes as fit the memory."""
        self.per_gpu = self._pass_of(self._stretch.batch)

    def _next_of_sweep(self) -> None:
        """Go to the next size of the sweep; end it if no size or time is left."""
        assert self._sweep is not None
        self._close_stretch(self.noise.reading().noise_scale)
        (late,) = self.gang.share([float(self.clock.now() >= self._sweep_ends_at)])
        size = None if late else next(self._sweep, None)
        if size is None:
            self._sweep = None
            return
        self._adopt(self._agent.split(self._agent.attainable(size)))
        self.clock.lap()

    def _warmed_up(self, lap_s: float, own_s: float) -> None:
        """Note that the untimed steps took `lap_s`; in a sweep, choose the number of timed ones."""
        self._stretch.duration_s += lap_s
        self._looks.trained_s += own_s
        if self._sweep is not None:
            wanted = SWEEP_SIZE_S * self._stretch.untimed / max(lap_s, 1e-9)
            wanted = min(max(math.ceil(wanted), LEAST_SWEEP_STEPS), MOST_SWEEP_STEPS)
            self._sweep_steps = round(self.gang.share([wanted])[0])

    def _close_stretch(self, noise_scale: float | None) -> None:
        """Record the stretch, show it to the agent, and begin another one of the same size."""
        stretch = self._stretch
        if not stretch.steps:
            return
        lap_s, own_s = self.clock.lap()
        timed = max(0, stretch.steps - stretch.untimed) if own_s > 0.0 else 0
        stretch.duration_s += lap_s
        self._looks.trained_s += own_s
        stretch.timed_s, stretch.timed_steps = own_s, timed
        if timed:
            self._agent.observe(stretch.batch, timed, own_s)
            self._step_s = own_s / timed
            self._looks.spent_s += self._halves * self._halves_s(self._step_s)
            self._halves = 0
        append(self._uses, self._use(stretch, noise_scale))
        self._stretch = _SteadySteps(batch=stretch.batch)

    def _use(self, stretch: _SteadySteps, noise_scale: float | None) -> BatchUse:
        initial = self._agent.limits.initial
        useful = 1.0 if noise_scale is None else float(efficiency(noise_scale, initial, stretch.batch.batch_size))
        useful *= 1.0 - stretch.skipped / stretch.steps
        return BatchUse(
            instances=self.segment.num_instances,
            gpus=self.segment.num_workers,
            batch_size=stretch.batch.batch_size,
            per_gpu=stretch.batch.per_gpu,
            accumulation=stretch.batch.accumulation,
            steps=stretch.steps,
            duration_s=stretch.duration_s,
            step_s=stretch.step_s,
            noise_scale=noise_scale,
            efficiency=useful,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self._progress,
            "scheduled": self._scheduled,
            "batch_size": self.batch_size,
            "noise_scale": self._noise_scale,
            "proven": self._proven,
            "agent": self._agent.state_dict(),
            "noise": self.noise.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with what was learnt. With another gang, the batch is split at once and chosen again soon."""
        if state is None or "agent" not in state:
            raise KeyError("it was written with a fixed batch")
        self._progress, self._noise_scale = state["progress"], state["noise_scale"]
        self._proven = max(self._proven, state["proven"])
        self._scheduled = state["scheduled"]
        self._agent.load_state_dict(state["agent"])
        self.noise.load_state_dict(state["noise"])
        self._set(self._agent.split(self._agent.attainable(state["batch_size"])))

    def close(self) -> None:
        self.noise.close()
        del self.fits


def _cautious(reading: NoiseReading) -> float | None:
    """Return a smaller phi if it is uncertain: a batch that is too small costs less than one too large."""
    return None if reading.noise_scale is None else reading.noise_scale / (1.0 + reading.uncertainty)
