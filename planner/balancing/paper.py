"""The paper's own algorithms: the baseline (LB-BSP, SoCC '20, Algorithms 1 and 2).

Algorithm 1 is as printed: each worker has a NARX network of its own, which is used from the 500th iteration on (§4).

Algorithm 2 keeps the traps of its pseudo-code. Line 5 returns before a fine-tune phase can begin. The phase is entered
once for all time, and the window is not reset by a move. A step is 5 samples, whatever the batch. There is no dead
band, so shares move to and fro. A straggler that no share makes faster loses samples all the same. The leader may have
memory for less than a step. Where only the straggler has memory left, it is its own leader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rubberband.planner.balancing.measured import LineBalancer
from rubberband.planner.balancing.shares import Look, Remembering, ShareLimits, held, keeps, proportional_shares
from rubberband.planner.balancing.speed_balancer import LEAST_RESOURCE, Ema, Floats, ForecastBalancer, known

STEP, WINDOW = 5, 5
"""Delta and D of the fast-approach phase."""
FINE_STEP, FINE_WINDOW = 1, 20
"""Delta and D of the fine-tune phase."""
MOST_MEMORY = 0.95
"""A worker that uses more of its memory is not the leader."""


class Algorithm2(Remembering):
    """Batch sizes of GPU workers. All past times are kept as what lines 7 and 9 ask of them, per pair of workers."""

    kept = ("step", "window", "led", "was_slower")

    def __init__(self, num_workers: int) -> None:
        self.step, self.window = STEP, WINDOW
        self._led = np.zeros((num_workers, num_workers), dtype=np.int64)
        """Looks in a row, up to now, in which worker i was faster than worker j."""
        self._was_slower = np.zeros((num_workers, num_workers), dtype=np.bool_)
        """Whether worker i has ever been slower than worker j."""

    def update(self, shares: Sequence[int], times_s: Sequence[float], memory: Sequence[float]) -> tuple[int, ...]:
        """Return x^k from x^(k-1), t^(k-1) and the fractions m^k of memory in use."""
        times = np.asarray(times_s, dtype=np.float64)
        faster = times[:, None] < times[None, :]
        self._led = np.where(faster, self._led + 1, 0)
        self._was_slower |= faster.T
        free = [rank for rank, used in enumerate(memory) if used <= MOST_MEMORY]
        moved = list(shares)
        if not free:  # the print has no leader then
            return tuple(moved)
        leader = min(free, key=lambda rank: times_s[rank])
        straggler = max(range(len(moved)), key=lambda rank: times_s[rank])
        if moved[straggler] <= self.step:
            return tuple(moved)
        if self._led[leader, straggler] >= self.window:
            moved[leader] += self.step
            moved[straggler] -= self.step
        elif self._was_slower[leader, straggler]:
            self.step, self.window = FINE_STEP, FINE_WINDOW
        return tuple(moved)


class PaperGpuBalancer(LineBalancer):
    """Algorithm 2, held to the limits. A look counts as one iteration; the lines are for predictions only."""

    kept = (*LineBalancer.kept, "algorithm")

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self._algorithm = Algorithm2(num_workers)

    def observe(self, look: Look) -> None:
        """Take in one look and update the shares."""
        super().observe(look)
        used = [0.0] * self.num_workers if look.memory is None else [1.0 - part for part in look.memory]
        self._shares = self._algorithm.update(look.shares, look.compute_s, used)

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return the algorithm's shares, in proportion where the batch has changed."""
        if not self._shares:
            return self._even(batch_size, limits)
        limits = held(batch_size, limits)
        self._count_stragglers(self.lines(), self._shares, limits)
        if sum(self._shares) == batch_size and keeps(self._shares, limits):
            return self._shares
        return proportional_shares(self._shares, batch_size, limits)


HIDDEN = 10
LOOK_BACK = 2
INPUTS = LOOK_BACK + 2 * (LOOK_BACK + 1)
ENOUGH = 500
"""Samples before a network is used; of one worker, those are its first 500 iterations (§4)."""
KEPT = 2048
"""Samples to train on."""
UPDATES, BATCH = 2, 64
LEARNING_RATE = 0.005
CLIP = 0.5
"""The largest error that training sees, so that spikes do not rule it."""
SLOW = 0.02
"""Rate of each worker's means."""


class Narx(Remembering):
    """A pooled NARX network.

    v^k = F(v^(k-1), v^(k-2), c^k, c^(k-1), c^(k-2), m^k, m^(k-1), m^(k-2)), one F for all its workers, on logarithms
    relative to each worker's own means. The paper trains one F per worker (`OwnNarx`).

    Training is spread: a look adds one sample per worker and does `UPDATES` steps of Adam on samples of the past, so no
    look takes long. Until there are `ENOUGH` samples the forecast is the exponential moving average, as in §4; eight
    workers have them after 65 looks.
    """

    kept = ("looks", "samples", "updates", "parameters", "first_moments", "second_moments", "history", "means", "ema")
    """The samples that it was trained on are not: training begins again with new ones."""

    def __init__(self, num_workers: int, seed: int = 0) -> None:
        self.looks = 0
        self._random = np.random.default_rng(seed)
        self.samples = self.updates = 0
        size = HIDDEN * (INPUTS + 2) + INPUTS + 1
        self.parameters: Floats = self._random.normal(scale=0.3, size=size)
        self.parameters[-INPUTS - 1 :] = 0.0
        """The hidden layer's weights and biases, the output's weights, and what goes straight to the output."""
        self.first_moments: Floats = np.zeros(size)
        self.second_moments: Floats = np.zeros(size)
        self.history: Floats = np.full((num_workers, LOOK_BACK + 1, 3), np.nan)
        """(n, 3, 3) log v, log c and log m of the last steps, newest first; v of the steps to come is nan."""
        self.means: Floats = np.zeros((num_workers, 3))
        self._inputs: Floats = np.zeros((KEPT, INPUTS))
        self._targets: Floats = np.zeros(KEPT)
        self._ema = Ema(num_workers)

    @property
    def noise_share(self) -> float:
        return self._ema.noise_share

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.looks += 1
        self._ema.observe(speeds, cpu, memory)
        seen = ~np.isnan(speeds)
        resources = np.log(np.maximum(np.column_stack([cpu, memory]), LEAST_RESOURCE))
        if self.looks == 1:
            self.history[:, :, 1:] = resources[:, None, :]
            self.means[:, 1:] = resources
        log_speeds = np.log(np.where(seen, speeds, 1.0))
        speed_now = np.where(seen, log_speeds, self.history[:, 1, 0])
        if self.looks == 1:
            self.means[:, 0] = speed_now
            self.history[:, :, 0] = speed_now[:, None]
        self._learn(seen, log_speeds)
        self.history[:, 0, 0] = speed_now
        rate = max(SLOW, 1.0 / self.looks)
        self.means += rate * (np.nan_to_num(self.history[:, 0, :], nan=0.0) - self.means)
        self.history = np.roll(self.history, 1, axis=1)
        self.history[:, 0, 0] = np.nan
        self.history[:, 0, 1:] = resources

    def _rows(self) -> Floats:
        """(n, INPUTS) The inputs for the steps to come."""
        relative = self.history - self.means[:, None, :]
        return np.asarray(np.nan_to_num(np.column_stack([relative[:, 1:, 0], relative[:, :, 1], relative[:, :, 2]])))

    def _learn(self, seen: npt.NDArray[np.bool_], log_speeds: Floats) -> None:
        if self.looks > LOOK_BACK:
            rows, targets = self._rows()[seen], (log_speeds - self.means[:, 0])[seen]
            places = (self.samples + np.arange(len(rows))) % KEPT
            self._inputs[places], self._targets[places] = rows, targets
            self.samples += len(rows)
        filled = min(self.samples, KEPT)
        if filled < BATCH:
            return
        for _ in range(UPDATES):
            chosen = self._random.integers(0, filled, BATCH)
            self._adam(self._gradient(self._inputs[chosen], self._targets[chosen]))

    def _layers(self) -> tuple[Floats, Floats, Floats, Floats, float]:
        end = HIDDEN * INPUTS
        hidden, straight = self.parameters[:end].reshape(INPUTS, HIDDEN), self.parameters[-INPUTS - 1 : -1]
        biases, output = self.parameters[end : end + HIDDEN], self.parameters[end + HIDDEN : end + 2 * HIDDEN]
        return hidden, biases, output, straight, float(self.parameters[-1])

    def _gradient(self, inputs: Floats, targets: Floats) -> Floats:
        hidden, biases, output, straight, bias = self._layers()
        active = np.tanh(inputs @ hidden + biases)
        error = np.clip(active @ output + inputs @ straight + bias - targets, -CLIP, CLIP) / len(targets)
        behind = error[:, None] * output * (1.0 - active * active)
        parts = ((inputs.T @ behind).ravel(), behind.sum(axis=0), error @ active, error @ inputs, [error.sum()])
        return np.concatenate(parts)

    def _adam(self, gradient: Floats) -> None:
        self.updates += 1
        self.first_moments += 0.1 * (gradient - self.first_moments)
        self.second_moments += 0.001 * (gradient * gradient - self.second_moments)
        first = self.first_moments / (1.0 - 0.9**self.updates)
        second = self.second_moments / (1.0 - 0.999**self.updates)
        self.parameters -= LEARNING_RATE * first / (np.sqrt(second) + 1e-8)

    def forecast(self) -> Floats:
        if self.samples < ENOUGH:
            return self._ema.forecast()
        hidden, biases, output, straight, bias = self._layers()
        rows = self._rows()
        log_speeds = np.tanh(rows @ hidden + biases) @ output + rows @ straight + bias
        return known(np.exp(self.means[:, 0] + np.clip(log_speeds, -3.0, 3.0)))


class OwnNarx(Remembering):
    """A NARX network for each worker, as the paper has it. Each is used once it has `ENOUGH` samples."""

    kept = ("networks", "seen")

    def __init__(self, num_workers: int) -> None:
        self.networks = [Narx(1, seed=rank) for rank in range(num_workers)]
        self.seen: Floats = np.zeros(num_workers)

    @property
    def noise_share(self) -> float:
        return self.networks[0].noise_share

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self.seen += ~np.isnan(speeds)
        for rank, network in enumerate(self.networks):
            own = slice(rank, rank + 1)
            network.observe(speeds[own], cpu[own], memory[own])

    def forecast(self) -> Floats:
        speeds = np.concatenate([network.forecast() for network in self.networks])
        return known(np.where(self.seen > 0.0, speeds, np.nan))


class PaperCpuBalancer(ForecastBalancer):
    """Algorithm 1 with NARX, at every look, held to the limits."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers, OwnNarx(num_workers))

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        """Return shares in proportion to the forecast speeds."""
        lines = self.lines()
        if not lines or not self._shares:
            return self._even(batch_size, limits)
        self._count_stragglers(lines, self._shares, limits)
        return self._proposal(lines, batch_size, limits)
