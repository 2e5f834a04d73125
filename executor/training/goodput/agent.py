"""The agent of a trial: learns from timed steps and the noise scale which batch makes the most progress per second.

PolluxAgent (OSDI '21, §4.1) for a gang whose GPUs the plan has chosen. Pure except for its clock. It runs on rank 0,
and its knowledge is part of the checkpoint. `ChoiceBudget` bounds the time of its choices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from statistics import median
from typing import Any

from rubberband.planner.goodput import GoodputChoice, better, candidates, choose, choose_at, efficiency, step_s
from rubberband.planner.goodput.fit import fit
from rubberband.values.adaptive import BatchLimits, BatchPoint, Throughput
from rubberband.values.balance import even_shares

WINDOW = 8
"""The number of latest timings of each layout that count."""
MOST_POINTS = 64
"""The most layouts that are remembered; those timed longest ago go first."""
FIT_SHARE = 0.005
"""Share of the time for fitting."""
GROWTH = 2.0
"""From one choice to the next, the batch grows or shrinks by this factor at most: the model is only good nearby."""
TRUSTED_STRETCHES = 3
"""A layout with fewer timings is doubted after a while: other work on the machine may have slowed it."""
DOUBTED_AFTER = 32
"""Stretches of any layout since its last one."""
WORTH_CORRECTING = 0.2
"""A smaller relative change of the gang's pace is taken for noise."""
DOUBTED_WEIGHT = 0.1
"""Its weight in the fit, where a stretch weighs 1."""
TRY_GROWTH = 1.5
"""A batch this much larger is tried while the cost of a sample is unknown."""
LEAST_GAIN = 0.01
"""A smaller gain in goodput is not worth a change."""

Layout = tuple[int, int, int, int]
"""Instances, GPUs, samples per GPU at once, and accumulation of a batch (N, K, m, s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """A batch: M, in s + 1 passes of at most m samples on every GPU."""

    batch_size: int
    per_gpu: int
    accumulation: int


@dataclass(eq=False)
class BatchAgent:
    """Chooses batches for a gang of `gpus` workers on `instances` instances."""

    limits: BatchLimits
    instances: int = field(kw_only=True)
    """N."""
    gpus: int = field(kw_only=True)
    """K."""
    clock: Callable[[], float] = field(kw_only=True)
    least_per_gpu: int = field(default=1, kw_only=True)
    known: InitVar[Sequence[BatchPoint]] = field(default=(), kw_only=True)
    """Steps that profiling timed, of any gang."""
    pace: Callable[[], float] = field(default=lambda: 1.0, kw_only=True)
    """The time of unequal workers, max_i t_i(x_i), now, in relation to what it was at first at the same sizes."""

    def __post_init__(self, known: Sequence[BatchPoint]) -> None:
        self._known = {_layout_of(point): point.step_s for point in known}
        self._known_model: Throughput | None = None
        self._seen: dict[Layout, deque[tuple[int, float]]] = {}
        """Layout -> (steps, seconds) of its latest stretches."""
        self._paces: dict[Layout, float] = {}
        """Layout that this gang timed -> the pace that its timings are for."""
        self._seen_at: dict[Layout, int] = {}
        """Layout -> number of stretches when it was last timed."""
        self._num_stretches = 0
        self._model: Throughput | None = None
        self._fit_due_at = 0.0
        self._news = bool(known)

    def split(self, batch_size: int) -> BatchChoice:
        """Return M with the smallest s that keeps m within its limit."""
        share = max(even_shares(batch_size, self.gpus))
        passes = -(-share // (self.limits.max_per_gpu or share))
        return BatchChoice(batch_size=batch_size, per_gpu=-(-share // passes), accumulation=passes - 1)

    def attainable(self, batch_size: int) -> int:
        """Return the size, or the largest below it that the limits allow."""
        most = self.limits.max
        if self.limits.max_per_gpu is not None and not self.limits.accumulation:
            most = min(most, self.gpus * self.limits.max_per_gpu)
        return max(self.limits.initial, min(batch_size, most))

    def sizes(self, num: int) -> list[int]:
        """Return at most `num` sizes from the smallest to the largest, evenly spread on a log scale."""
        found = candidates(self.limits, self.gpus, least_per_gpu=self.least_per_gpu, num=num)
        return [int(size) for size in found.batch_size]

    def observe(self, used: BatchChoice, steps: int, seconds: float) -> None:
        """Note that `steps` optimizer steps took `seconds`."""
        layout = (self.instances, self.gpus, used.per_gpu, used.accumulation)
        self._news = self._news or layout not in self._seen
        self._correct()
        timings = self._seen.pop(layout, deque(maxlen=WINDOW))
        self._paces.setdefault(layout, self.pace())
        timings.append((steps, seconds))
        self._seen[layout] = timings
        self._num_stretches += 1
        self._seen_at[layout] = self._num_stretches
        if len(self._seen) > MOST_POINTS:
            oldest = next(iter(self._seen))
            del self._seen[oldest], self._seen_at[oldest]
            self._paces.pop(oldest, None)

    def _correct(self) -> None:
        """Scale timings of this gang that were taken with other shares, or when its workers were slower or faster."""
        now = self.pace()
        for layout, before in self._paces.items():
            if abs(now / before - 1.0) >= WORTH_CORRECTING:
                timings = ((steps, seconds * now / before) for steps, seconds in self._seen[layout])
                self._seen[layout] = deque(timings, maxlen=WINDOW)
                self._paces[layout] = now
                self._news = True

    def forbid(self, per_gpu: int, proven: int) -> None:
        """Note that `per_gpu` samples do not fit the memory, and `proven` do: stay well below the former."""
        self.limits = replace(self.limits, max_per_gpu=max(proven, min(per_gpu - 1, per_gpu * 3 // 4), 1))

    def restrict(self, per_gpu: int) -> None:
        """Note that a step with more than `per_gpu` samples at once ran out of memory."""
        self.limits = replace(self.limits, max_per_gpu=min(per_gpu, self.limits.max_per_gpu or per_gpu))

    def choose(self, current: BatchChoice, noise_scale: float | None) -> BatchChoice:
        """Return the next batch (§4.1), within `GROWTH` times the current one; the same if the gain is small.

        `noise_scale` is phi, rather too small than too large; None: unknown, and the batch stays.
        """
        model = self._fitted()
        if noise_scale is None or model is None:
            return self.split(self.attainable(current.batch_size))
        stay = self.attainable(current.batch_size)
        most = max(self.limits.initial, self.gpus * self.least_per_gpu, int(GROWTH * stay))
        limits = replace(self.limits, max=min(self.limits.max, most))
        here = choose_at(model, noise_scale, limits, self.instances, self.gpus, stay)
        found = choose(model, noise_scale, limits, self.instances, self.gpus, least_per_gpu=self.least_per_gpu)
        if found.goodput > (1.0 + LEAST_GAIN) * here.goodput and better(stay, found):
            return self.split(max(found.batch_size, math.ceil(stay / GROWTH)))
        return self._tried(model, noise_scale, here) or self.split(stay)

    def _tried(self, model: Throughput, noise_scale: float, here: GoodputChoice) -> BatchChoice | None:
        """Return a size of unknown time, if it would gain at its best possible speed.

        Timings at one m do not show the cost of a sample, and those in single passes do not separate computing, which
        accumulation repeats, from synchronising, which it does not. Each is tried once, or until it can be trusted.
        """
        mine = [(m, s) for n, k, m, s in filter(self._trusted, self._seen) if (n, k) == (self.instances, self.gpus)]
        initial, size = self.limits.initial, here.batch_size
        if here.per_gpu != self.limits.max_per_gpu and len({m for m, _ in mine}) == 1:
            size, least_s = self.attainable(int(TRY_GROWTH * size)), here.step_s
        elif self.limits.accumulation and here.per_gpu == self.limits.max_per_gpu and len({s for _, s in mine}) == 1:
            size = self.attainable(2 * size)
            least_s = here.step_s + (here.accumulation + 1) * model.beta_grad_s * here.per_gpu
        found = self.split(size)
        if size == here.batch_size or (found.per_gpu, found.accumulation) in mine:
            return None
        hoped = size / least_s * float(efficiency(noise_scale, initial, size))
        return found if hoped > (1.0 + LEAST_GAIN) * here.goodput else None

    def _weights(self, points: Sequence[BatchPoint]) -> list[float]:
        """Return the weight of each point in the fit: its number of timings, or little if it is doubted."""
        return [
            float(len(self._seen[key]) if self._trusted(key) else DOUBTED_WEIGHT)
            if (key := _layout_of(point)) in self._seen
            else float(TRUSTED_STRETCHES)
            for point in points
        ]

    def _trusted(self, layout: Layout) -> bool:
        since = self._num_stretches - self._seen_at[layout]
        return since <= DOUBTED_AFTER or len(self._seen[layout]) >= TRUSTED_STRETCHES

    def _fitted(self) -> Throughput | None:
        """Return the model, fitted again after a new layout, or once enough time has passed to afford it."""
        points = self.points()
        if points and (self._news or self.clock() >= self._fit_due_at):
            began = self.clock()
            self._model = fit(points, self._model, self._weights(points))
            now = self.clock()
            self._fit_due_at = now + (now - began) / FIT_SHARE
            self._news = False
        return self._model

    def points(self) -> list[BatchPoint]:
        """Return the points of the fit: own timings, and profiling's, scaled by how much slower the own ones are."""
        own = {layout: _typical(timings) for layout, timings in self._seen.items()}
        pace = self._pace(own)
        every = {key: pace * seconds for key, seconds in self._known.items()} | own
        return [_point(layout, seconds) for layout, seconds in every.items()]

    def _pace(self, own: Mapping[Layout, float]) -> float:
        """Return how much slower own steps are than profiling's, or than their fit for layouts that it did not time."""
        if not own or not self._known:
            return 1.0
        if self._known_model is None:
            self._known_model = fit([_point(key, seconds) for key, seconds in self._known.items()])
        model = self._known_model
        return median(own[key] / (self._known.get(key) or float(step_s(model, *key))) for key in own)

    def most_gain(self, current: BatchChoice, noise_scale: float) -> float:
        """Return the relative gain in goodput of the best batch if phi were `noise_scale`; 0 without a model."""
        if self._model is None or not math.isfinite(noise_scale):
            return 0.0
        size = self.attainable(current.batch_size)
        here = choose_at(self._model, noise_scale, self.limits, self.instances, self.gpus, size)
        found = choose(
            self._model, noise_scale, self.limits, self.instances, self.gpus, least_per_gpu=self.least_per_gpu
        )
        return max(0.0, found.goodput / here.goodput - 1.0)

    def constant_share(self) -> float:
        """Return the share of a step's time on one worker that a pass takes at any size, and another pass would add."""
        if self._model is None or not self._seen:
            return 1.0
        latest = next(reversed(self._seen.values()))
        return min(1.0, self._model.alpha_grad_s / median(seconds / steps for steps, seconds in latest))

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": [(key, self._seen_at[key], list(timings)) for key, timings in self._seen.items()],
            "stretches": self._num_stretches,
            "max_per_gpu": self.limits.max_per_gpu,
            "model": None if self._model is None else asdict(self._model),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state`, perhaps with another gang; the tighter memory limit holds."""
        self._seen = {tuple(key): deque(map(tuple, timings), maxlen=WINDOW) for key, _, timings in state["seen"]}
        self._seen_at = {tuple(key): seen_at for key, seen_at, _ in state["seen"]}
        self._num_stretches = state["stretches"]
        self._model = None if state["model"] is None else Throughput(**state["model"])
        limits = [limit for limit in (self.limits.max_per_gpu, state["max_per_gpu"]) if limit is not None]
        self.limits = replace(self.limits, max_per_gpu=min(limits, default=None))
        self._news = bool(self._seen)
        self._paces = dict.fromkeys((key for key in self._seen if key[:2] == (self.instances, self.gpus)), 1.0)


def _point(layout: Layout, seconds: float) -> BatchPoint:
    instances, gpus, per_gpu, accumulation = layout
    return BatchPoint(instances=instances, gpus=gpus, per_gpu=per_gpu, accumulation=accumulation, step_s=seconds)


def _layout_of(point: BatchPoint) -> Layout:
    return point.instances, point.gpus, point.per_gpu, point.accumulation


def _typical(timings: Sequence[tuple[int, float]]) -> float:
    """Return the median seconds per step; between two equal stretches the faster one, since interference only slows."""
    rest = sum(steps for steps, _ in timings) / 2
    ordered = sorted((seconds / steps, steps) for steps, seconds in timings)
    for each_s, steps in ordered:
        rest -= steps
        if rest <= 0:
            return each_s
    return ordered[-1][0]


# The budget of time for choosing the batch.
#
# Every look at the batch takes time: readings, fits, trial passes, and the additional pass of a step in halves. A
# budget bounds them all together, whether steps take a millisecond or a minute.


CHOICE_SHARE = 0.0075
"""Share of the time for looks: of what has passed, and of the whole segment's from its beginning, since what is learnt
early is used for long. Together 1.5 % in the end."""


@dataclass(slots=True)
class ChoiceBudget:
    """Time that one segment's training and its looks took, in seconds."""

    trained_s: float = 0.0
    spent_s: float = 0.0
    look_s: float = 0.0
    """Seconds of a usual look."""

    def spend(self, seconds: float) -> None:
        """Note a look."""
        self.spent_s += seconds
        self.look_s = seconds if self.look_s == 0.0 else 0.5 * (self.look_s + seconds)

    def left_s(self, remaining_s: float) -> float:
        """Return what looks may still take now; `remaining_s` is the training that is left."""
        return CHOICE_SHARE * (2.0 * self.trained_s + remaining_s) - self.spent_s

    def interval(self, least: int, step_s: float, remaining_s: float) -> int:
        """Return the steps until the next look: `least`, or more if the budget does not suffice by then."""
        missing_s = self.look_s - self.left_s(remaining_s)
        return max(least, math.ceil(missing_s / (CHOICE_SHARE * step_s)))

    def affordable(self, cost_s: float, interval: int, step_s: float, remaining_s: float) -> float:
        """Return how many times `cost_s` can be spent until the next look, beside it."""
        left_s = self.left_s(remaining_s) + CHOICE_SHARE * interval * step_s - self.look_s
        return max(0.0, left_s) / cost_s
