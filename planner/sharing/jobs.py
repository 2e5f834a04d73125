"""Jobs that replay measurements: steps timed on placements, and noise and progress of every epoch (Pollux §5.3).

An `Application` is what was measured about one model; a `TracedJob` is one training of it. The job sees of the
application only what it has run: it fits the time of a step to those (§4.1), and knows the noise of the present epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from rubberband.planner.goodput import Candidates, considered, efficiency, gain, step_s
from rubberband.planner.goodput.fit import fit
from rubberband.planner.sharing.demand import Demand, Floats, Ints
from rubberband.values.adaptive import BatchLimits, BatchPoint, Throughput

RESIZE_S = 30.0
"""Seconds without training after each change of a job's GPUs (§5.3, simulator fidelity)."""
_ALONE_STEP_S = 60.0
"""Seconds between two choices of the batch by a job alone; those of a decision (§5.1)."""

Elasticity = Literal["adaptive", "fixed_batch", "rigid"]
"""Parts of a job that a policy may change: GPUs and batch, GPUs only, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """A training with one total batch; arrays with one row per epoch."""

    progress: Floats
    """Steps, each weighted by its gain, at the end of the epoch."""
    iteration: Floats
    """Steps at the end of the epoch."""
    grad_sqr: Floats
    """|g|^2 during the epoch."""
    grad_var: Floats
    """Variance of a gradient of the smallest batch."""


@dataclass(frozen=True, kw_only=True)
class Application:
    """Measurements of one model on instances of one type."""

    name: str
    max_epochs: int
    """Epochs until a job is done."""
    epochs: Mapping[int, Epochs]
    """Total batch M -> its training, smallest M first."""
    placements: Mapping[tuple[int, ...], Floats]
    """GPUs per instance, as the smallest of its rotations -> (n, 3) rows of m, seconds of a step, those of its
    synchronisation; m increasing."""
    steps: Floats
    """(n, 5) Rows of instances, GPUs, m, seconds of a step, those of its synchronisation: means over placements."""
    min_per_gpu: int
    max_per_gpu: int
    gpus_per_instance: int
    alone_s: dict[tuple[int, int | None], float] = field(default_factory=dict, init=False, repr=False)
    """GPUs, and the batch if it is fixed -> seconds of a job alone, as far as they are known."""
    _seen: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    _fixed: dict[tuple[int, int], Floats] = field(default_factory=dict, init=False, repr=False)
    _fits: dict[Hashable, Throughput] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def limits(self) -> BatchLimits:
        """The batches: M0 is the smallest that was trained with, and the largest no more than the largest."""
        return BatchLimits(initial=min(self.epochs), max=max(self.epochs), max_per_gpu=self.max_per_gpu)

    @property
    def most_gpus(self) -> int:
        """GPUs on which the largest batch leaves each the fewest samples measured."""
        return self.limits.max // self.min_per_gpu

    @cached_property
    def work(self) -> Floats:
        """(max_epochs + 1,) Progress at the end of 0, 1, … epochs: the least of all trainings."""
        least = np.min([run.progress[: self.max_epochs] for run in self.epochs.values()], axis=0)
        return np.append(0.0, least)

    def step_s(self, placement: Sequence[int], per_gpu: int) -> tuple[float, float]:
        """Return the seconds of a step of one pass, and those of its synchronisation. Linear between measured ones."""
        gpus = tuple(placement)
        key = gpus, per_gpu
        if key not in self._seen:
            rows = self.placements.get(min(gpus[turn:] + gpus[:turn] for turn in range(len(gpus))))
            if rows is None:
                found = self._between(len(gpus), sum(gpus), per_gpu)
            else:
                found = [float(np.interp(per_gpu, rows[:, 0], rows[:, column])) for column in (1, 2)]
            self._seen[key] = (found[0], found[1])
        return self._seen[key]

    def fixed_s(self, batch_size: int, most: int) -> Floats:
        """(most,) Seconds of a step with this batch on 1, 2, … GPUs, as few instances as hold them."""
        if (batch_size, most) not in self._fixed:
            found = np.empty(most)
            for gpus in range(1, most + 1):
                per_gpu, accumulation = self.passes(batch_size, gpus)
                first_s, sync_s = self.step_s(self.packed(gpus), per_gpu)
                found[gpus - 1] = first_s + accumulation * (first_s - sync_s)
            self._fixed[batch_size, most] = found
        return self._fixed[batch_size, most]

    def packed(self, gpus: int) -> tuple[int, ...]:
        """Return as few instances as hold these GPUs."""
        whole, rest = divmod(gpus, self.gpus_per_instance)
        return (self.gpus_per_instance,) * whole + ((rest,) if rest else ())

    def _between(self, instances: int, gpus: int, per_gpu: int) -> list[float]:
        found = self._interpolation(float(instances), float(gpus), float(per_gpu))
        if not np.isfinite(found).all():  # outside of what was measured: the nearest
            far = np.abs(np.log(self.steps[:, :3] / np.asarray([instances, gpus, per_gpu]))).sum(axis=1)
            found = self.steps[int(np.argmin(far)), 3:]
        return [float(value) for value in np.ravel(found)]

    @cached_property
    def _interpolation(self) -> Callable[[float, float, float], Floats]:
        from scipy.interpolate import LinearNDInterpolator  # slow to import, and only simulations need it

        found: Callable[[float, float, float], Floats] = LinearNDInterpolator(self.steps[:, :3], self.steps[:, 3:])
        return found

    def statistics(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Return |g|^2 and the variance during an epoch, linear between two measured batches."""
        sqr, var = (self._between_batches(what, batch_size, epoch) for what in ("grad_sqr", "grad_var"))
        return sqr, var

    def steps_left(self, batch_size: int, epoch: int) -> float:
        """Return the steps after this epoch until the end, with this batch; at least 1."""
        last = self._between_batches("iteration", batch_size, self.max_epochs - 1)
        return max(1.0, last - self._between_batches("iteration", batch_size, epoch))

    def _between_batches(self, what: str, batch_size: int, epoch: int) -> float:
        sizes, table = self._by_epoch[what]
        return float(np.interp(batch_size, sizes, table[epoch]))

    @cached_property
    def _by_epoch(self) -> Mapping[str, tuple[Floats, Floats]]:
        """Field of `Epochs` -> (batches,) total batches, and (max_epochs, batches) its values."""
        sizes = np.asarray(list(self.epochs), dtype=np.float64)
        return {
            name: (sizes, np.stack([getattr(run, name)[: self.max_epochs] for run in self.epochs.values()], axis=1))
            for name in Epochs.__slots__
        }

    def passes(self, batch_size: int, gpus: int) -> tuple[int, int]:
        """Return m and s of a total batch: as few passes as fit into memory.

        A single GPU takes at least two for more than M0: one pass has no other to compare its gradient with.
        """
        least = 2 if gpus == 1 and batch_size > self.limits.initial else 1
        num = max(least, math.ceil(batch_size / gpus / self.max_per_gpu - 1e-8))
        per_gpu = math.ceil(batch_size / gpus / num - 1e-8)
        return min(per_gpu, self.limits.max // (gpus * num)), num - 1

    @cached_property
    def choices(self) -> Candidates:
        """Batches to choose among for 1, 2, … GPUs: (most_gpus, batches)."""
        return considered(self.limits, tuple(range(1, self.most_gpus + 1)), self.min_per_gpu)

    def fit_of(self, measured: Mapping[tuple[int, int, int], tuple[float, float]]) -> Throughput:
        """Return the fit of steps that a job has measured; jobs that measured the same ones share it.

        Unmeasured, synchronising across instances costs as much as within.
        """
        key = tuple(measured.items())
        if key not in self._fits:
            points = []
            for (instances, gpus, per_gpu), (step_s, pass_s) in measured.items():
                points.append(_point(instances, gpus, per_gpu, step_s))
                points.append(_point(1, 1, per_gpu, pass_s))
            found = fit(points)
            if all(instances == 1 for instances, _, _ in measured):
                found = replace(found, alpha_node_s=1.1 * found.alpha_local_s, beta_node_s=1.1 * found.beta_local_s)
            self._fits[key] = found
        return self._fits[key]

    def steps_s(self, parameters: Throughput, instances: Ints, gpus: Ints) -> Floats:
        """(n, batches) Seconds of a step with every choice; inf where it is not allowed."""
        found, of = self.choices, gpus - 1
        seconds = step_s(parameters, instances[:, None], gpus[:, None], found.per_gpu[of], found.accumulation[of])
        return np.asarray(np.where(found.feasible[of], seconds, np.inf))


@dataclass(slots=True, kw_only=True)
class TracedJob:
    """One training of an application."""

    name: str
    submitted_at: float
    application: Application
    elasticity: Elasticity
    target_gpus: int
    """GPUs of a rigid job."""
    target_batch: int | None
    """M of a job that does not adapt its batch; None where it adapts it."""
    most_gpus: int | None = None
    """A limit beside that of the batch."""
    first_gpus: int = 1
    """Most GPUs to begin with. Later it has at most twice those that it has trained on."""
    weight: float = 1.0
    done_at: float | None = None
    placement: tuple[int, ...] = ()
    moves: int = -1
    """Changes of its GPUs after the start; -1 before it."""
    attained_gpu_s: float = 0.0
    speed: float = 1.0
    """Share of its speed that interference leaves it. Its fit is to times without interference."""
    epoch: int = 0
    progress: float = 0.0
    _resizing_s: float = 0.0
    _per_gpu: int = 0
    _accumulation: int = 0
    _measured: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    """Instances, GPUs and m -> seconds of a step, and those of a pass without synchronisation."""
    _fitted: Throughput | None = None
    _steps_s: dict[tuple[bytes, bytes], Floats] = field(default_factory=dict, init=False, repr=False)
    """Instances and GPUs -> seconds of a step with every choice, by `_fitted`."""
    _noise_scale: float = 0.0
    _trained_gpus: int = 0
    """Most GPUs that it has trained on."""
    _chosen_for: tuple[Throughput, float, tuple[int, ...]] | None = None
    """Fit, noise scale and GPUs that the batch was chosen for."""

    @property
    def kind(self) -> str:
        """Its application."""
        return self.application.name

    @property
    def batch_size(self) -> int:
        """Its total batch M; 0 without GPUs."""
        return sum(self.placement) * self._per_gpu * (self._accumulation + 1)

    def resize(self, placement: tuple[int, ...]) -> None:
        """Give it other GPUs, as counts of instance after instance; none at all stops it."""
        self.placement = placement
        if placement:
            self._resizing_s = RESIZE_S
            self.moves += 1
            self._choose_batch()

    def advance(self, seconds: float, now_s: float) -> None:
        """Train for `seconds`, from `now_s` on."""
        if not self.placement or self.done_at is not None:
            return
        waited_s = min(self._resizing_s, seconds)
        self._resizing_s -= waited_s
        gpus = sum(self.placement)
        left_s = seconds - waited_s
        while left_s > 0.0 and self.done_at is None:
            rate = self._rate()
            needed_s = (self.application.work[self.epoch + 1] - self.progress) / rate
            if needed_s > left_s:
                self.progress += rate * left_s
                left_s = 0.0
            else:
                left_s -= needed_s
                self.epoch += 1
                self.progress = float(self.application.work[self.epoch])
                if self.epoch >= self.application.max_epochs:
                    self.done_at = now_s + seconds - left_s
                    self.attained_gpu_s += (seconds - left_s) * gpus
                    return
            self._choose_batch()
        self.attained_gpu_s += seconds * gpus

    def alone_s(self, gpus: int) -> float:
        """Return the seconds from its start to its end with at most `gpus` GPUs of its own, on few instances.

        It may change its GPUs and batch as in the pool; a rigid job trains with its batch on fewer GPUs.
        """
        app, batch = self.application, self.target_batch
        most = min(gpus, self.most_gpus or gpus, app.most_gpus if batch is None else batch // app.min_per_gpu)
        if self.elasticity == "rigid":
            most = min(most, self.target_gpus)
        key = max(1, most), batch
        if key not in app.alone_s:
            job = TracedJob(
                name=self.name,
                submitted_at=0.0,
                application=app,
                elasticity=self.elasticity,
                target_gpus=self.target_gpus,
                target_batch=batch,
            )
            job.resize(app.packed(key[0]))
            now_s = 0.0
            while job.done_at is None:
                job.advance(_ALONE_STEP_S, now_s)
                now_s += _ALONE_STEP_S
            app.alone_s[key] = job.done_at
        return app.alone_s[key]

    def _rate(self) -> float:
        """Return the progress per second, and keep what it shows of the application."""
        app = self.application
        first_s, sync_s = self.time_step(self.placement, self._per_gpu)
        self._trained_gpus = max(self._trained_gpus, sum(self.placement))
        sqr, var = app.statistics(self.batch_size, self.epoch)
        self._noise_scale = app.limits.initial * var / sqr if sqr > 0.0 else math.inf
        step_s = first_s + self._accumulation * (first_s - sync_s)
        return self.speed * float(gain(self._noise_scale, app.limits.initial, self.batch_size)) / step_s

    def time_step(self, placement: Sequence[int], per_gpu: int) -> tuple[float, float]:
        """Return the seconds of a step of one pass, and those of its synchronisation; its fit includes them."""
        first_s, sync_s = self.application.step_s(placement, per_gpu)
        key = len(placement), sum(placement), per_gpu
        if key not in self._measured:
            self._measured[key] = (first_s, first_s - sync_s)
            self._fitted = None
        return first_s, sync_s

    def _choose_batch(self) -> None:
        gpus, app = sum(self.placement), self.application
        if self.target_batch is not None:
            self._per_gpu, self._accumulation = app.passes(self.target_batch, gpus)
        elif not self._measured:
            first = max(app.limits.initial, app.min_per_gpu * gpus)
            self._per_gpu, self._accumulation = app.passes(first, gpus)
        elif self._chosen_for != (now := (self._model(), self._noise_scale, self.placement)):
            self._chosen_for = now
            at = int(np.argmax(self._goodputs(np.asarray([len(self.placement)]), np.asarray([gpus]))))
            self._per_gpu = int(app.choices.per_gpu[gpus - 1, at])
            self._accumulation = int(app.choices.accumulation[gpus - 1, at])

    def _goodputs(self, instances: Ints, gpus: Ints) -> Floats:
        """(n, batches) Useful samples per second with every choice, by the fit; 0 where it is not allowed."""
        model, key, app = self._model(), (instances.tobytes(), gpus.tobytes()), self.application
        if key not in self._steps_s:
            self._steps_s[key] = app.steps_s(model, instances, gpus)
        batches = app.choices.batch_size[gpus - 1]
        return np.asarray(batches * efficiency(self._noise_scale, app.limits.initial, batches) / self._steps_s[key])

    def _model(self) -> Throughput:
        if self._fitted is None:
            self._fitted = self.application.fit_of(self._measured)
            self._steps_s.clear()
        return self._fitted

    def ends_in_s(self) -> float:
        """Return inf: its end is not known before."""
        return math.inf

    def demand(self, now_s: float, gpus: int) -> Demand:
        """Return its demand on a pool of `gpus` GPUs."""
        most = min(gpus, self.application.most_gpus)
        if self.elasticity == "rigid":
            left, least, limit = [math.inf] * (self.target_gpus - 1) + [1.0], self.target_gpus, self.target_gpus
        elif self.elasticity == "fixed_batch":
            assert self.target_batch is not None
            limit = max(1, min(gpus, self.most_gpus or gpus, self.target_batch // self.application.min_per_gpu))
            left, least = self._oracle(limit), 1
        else:
            left, least = self._believed(most), 1
            limit = min(most, self.most_gpus or most, max(self.first_gpus, 2 * self._trained_gpus))
        return Demand(
            name=self.name,
            arrived_at=self.submitted_at,
            seconds_left=left,
            delta_s=RESIZE_S,
            moves=max(0, self.moves),
            weight=self.weight,
            min_gpus=least,
            max_gpus=limit,
            attained_gpu_s=self.attained_gpu_s,
            progress=self.progress / float(self.application.work[-1]),
        )

    def _believed(self, most: int) -> list[float]:
        """Return the seconds left by the fit. Before the first measurement it takes itself for short and scalable."""
        gpus = np.arange(1, most + 1)
        if not self._measured:
            return [1.0 / count for count in range(1, most + 1)]
        app = self.application
        instances = -(-gpus // app.gpus_per_instance)
        rates = self._goodputs(instances, gpus).max(axis=1)
        left = float(app.work[-1]) - self.progress
        return [float(each) for each in left * app.limits.initial / rates]

    def _oracle(self, most: int) -> list[float]:
        """Return the seconds left with the fixed batch by the true times of its steps."""
        assert self.target_batch is not None
        app = self.application
        steps = app.steps_left(self.target_batch, min(self.epoch, app.max_epochs - 1))
        return [float(each) for each in steps * app.fixed_s(self.target_batch, most)]


def _point(instances: int, gpus: int, per_gpu: int, step_s: float) -> BatchPoint:
    return BatchPoint(instances=instances, gpus=gpus, per_gpu=per_gpu, accumulation=0, step_s=step_s)


_DONE = 1e-9
"""Share of a job that is rounding only."""


@dataclass(slots=True, kw_only=True)
class CurveJob:
    """Job of fixed size; resizing stops it for a while."""

    name: str
    submitted_at: float
    kind: str
    seconds: Sequence[float]
    """Seconds of the whole job with 1, 2, … GPUs; inf where it cannot run."""
    resize_s: float = 0.0
    """Seconds without training after each change of its GPUs, the start included."""
    min_gpus: int = 1
    max_gpus: int | None = None
    weight: float = 1.0
    done_at: float | None = None
    moves: int = -1
    attained_gpu_s: float = 0.0
    speed: float = 1.0
    """Share of its speed that interference leaves it."""
    gpus: int = 0
    started_gpus: int = 0
    left: float = 1.0
    """Share of the job that is not done."""
    resizing_s: float = 0.0
    _curve: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._curve = np.asarray(self.seconds, dtype=np.float64)

    def resize(self, placement: tuple[int, ...]) -> None:
        """Give it other GPUs, as counts of instance after instance; none at all stops it."""
        self.gpus = sum(placement)
        if self.gpus:
            self.started_gpus = self.started_gpus or self.gpus
            self.resizing_s = self.resize_s
            self.moves += 1

    def _whole_s(self) -> float:
        usable = min(self.gpus, len(self.seconds), self.max_gpus or self.gpus)
        return self.seconds[usable - 1] / self.speed if usable else math.inf

    def ends_in_s(self) -> float:
        """Return the seconds until its end if nothing changes; inf without GPUs."""
        return self.resizing_s + self.left * self._whole_s() if self.gpus else math.inf

    def alone_s(self, gpus: int) -> float:
        """Return the seconds from its start to its end with at most `gpus` GPUs of its own; inf if it cannot run.

        It has at least `min_gpus`.
        """
        most = min(max(gpus, self.min_gpus), self.max_gpus or len(self.seconds), len(self.seconds))
        return self.resize_s + float(self._curve[self.min_gpus - 1 : most].min(initial=math.inf))

    def advance(self, seconds: float, now_s: float) -> None:
        """Train for `seconds`, from `now_s` on."""
        if not self.gpus or self.done_at is not None:
            return
        end_s = self.ends_in_s()
        waited_s = min(self.resizing_s, seconds)
        self.resizing_s -= waited_s
        self.left -= (seconds - waited_s) / self._whole_s()
        self.attained_gpu_s += min(seconds, end_s) * self.gpus
        if self.left <= _DONE:
            self.left = 0.0
            self.done_at = now_s + min(seconds, end_s)

    def demand(self, now_s: float, gpus: int) -> Demand:
        """Return its demand on a pool of `gpus` GPUs."""
        return Demand(
            name=self.name,
            arrived_at=self.submitted_at,
            seconds_left=(self.left * self._curve[:gpus]).tolist(),
            delta_s=self.resize_s,
            moves=max(0, self.moves),
            weight=self.weight,
            min_gpus=self.min_gpus,
            max_gpus=self.max_gpus,
            started_gpus=self.started_gpus,
            attained_gpu_s=self.attained_gpu_s,
            progress=1.0 - self.left,
        )
