"""LB-BSP in a shared CPU cluster: Figures 1, 2, 9 and 10, and Table 3, on workers that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from rows import Found, Statement, Table, percent, verdict

from rubberband.planner.balancing.paper import Narx, OwnNarx
from rubberband.planner.balancing.speed_balancer import (
    LEAST_RESOURCE,
    Ema,
    Floats,
    Memoryless,
    NormalisedEma,
    Predictor,
    known,
    relative_time,
)

FORGETTING = 0.995


class Arima:
    """ARIMA(2, 1, 1) of the speeds, by recursive least squares with the last error as a regressor."""

    noise_share = 1.0

    def __init__(self, num_workers: int) -> None:
        self.speeds: Floats = np.full((num_workers, 3), np.nan)
        """The last speeds, newest first."""
        self.errors: Floats = np.zeros(num_workers)
        self.weights: Floats = np.zeros((num_workers, 3))
        self.inverse: Floats = np.tile(np.eye(3), (num_workers, 1, 1))

    def _regressors(self) -> Floats:
        differences = self.speeds[:, :-1] - self.speeds[:, 1:]
        scale = np.maximum(self.speeds[:, :1], LEAST_RESOURCE)
        return np.asarray(np.nan_to_num(np.column_stack([differences, self.errors]) / scale))

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        seen = ~np.isnan(speeds)
        last = self.speeds[:, 0]
        ready = seen & ~np.isnan(self.speeds).any(axis=1)
        inputs = self._regressors()
        target = np.where(ready, (speeds - last) / np.where(ready, last, 1.0), 0.0)
        error = np.where(ready, target - (self.weights * inputs).sum(axis=1), 0.0)
        gained = np.einsum("nij,nj->ni", self.inverse, inputs)
        gains = gained / (FORGETTING + (inputs * gained).sum(axis=1))[:, None]
        self.weights = np.where(ready[:, None], self.weights + gains * error[:, None], self.weights)
        inverse = (self.inverse - gains[:, :, None] * gained[:, None, :]) / FORGETTING
        bounded = ready & (np.einsum("nii->n", inverse) < 1e4)
        self.inverse = np.where(bounded[:, None, None], inverse, self.inverse)
        self.errors = np.where(seen, error * np.where(ready, last, 0.0), self.errors)
        self.speeds = np.where(seen[:, None], np.column_stack([speeds, self.speeds[:, :-1]]), self.speeds)

    def forecast(self) -> Floats:
        change = np.clip((self.weights * self._regressors()).sum(axis=1), -0.5, 1.0)
        return known(self.speeds[:, 0] * (1.0 + change))


LOOK_BACK, HIDDEN, KEPT, BATCH, UPDATES = 2, 10, 2048, 64, 2
SLOW = 0.02
"""Rate of each worker's mean."""
ENOUGH = 500
"""Samples of all workers together before the network is used; until then the forecast is the moving average."""


class Recurrent:
    """SimpleRNN or LSTM over the last two speeds, one network for all workers, trained as they come.

    Speeds are logarithms relative to each worker's own mean, as for the product's NARX; resources are not seen.
    """

    noise_share = 1.0

    def __init__(self, num_workers: int, kind: Literal["RNN", "LSTM"]) -> None:
        import torch  # only here: the other forecasts need none

        self._torch, self._generator = torch, np.random.default_rng(0)
        torch.set_num_threads(1)  # the network is too small for more
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self._layer = getattr(torch.nn, kind)(1, HIDDEN, batch_first=True)
            self._out = torch.nn.Linear(HIDDEN, 1)
        parameters = [*self._layer.parameters(), *self._out.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=0.005)
        self._history: Floats = np.full((num_workers, LOOK_BACK), np.nan)
        self._means: Floats = np.zeros(num_workers)
        self._inputs: Floats = np.zeros((KEPT, LOOK_BACK))
        self._targets: Floats = np.zeros(KEPT)
        self._looks = self._samples = 0
        self._ema = Ema(num_workers)

    def _network(self, rows: Floats) -> Any:
        inputs = self._torch.as_tensor(rows, dtype=self._torch.float32)[:, :, None]
        return self._out(self._layer(inputs)[0][:, -1])[:, 0]

    def observe(self, speeds: Floats, cpu: Floats, memory: Floats) -> None:
        self._looks += 1
        self._ema.observe(speeds, cpu, memory)
        logs = np.log(speeds)
        if self._looks > LOOK_BACK:
            at = (self._samples + np.arange(len(logs))) % KEPT
            self._inputs[at] = self._history - self._means[:, None]
            self._targets[at] = logs - self._means
            self._samples += len(logs)
        self._means += max(SLOW, 1.0 / self._looks) * (logs - self._means)
        self._history = np.column_stack([self._history[:, 1:], logs])
        filled = min(self._samples, KEPT)
        for _ in range(UPDATES if filled >= BATCH else 0):
            chosen = self._generator.integers(0, filled, BATCH)
            targets = self._torch.as_tensor(self._targets[chosen], dtype=self._torch.float32)
            loss = self._torch.nn.functional.mse_loss(self._network(self._inputs[chosen]), targets)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def forecast(self) -> Floats:
        if self._samples < ENOUGH:
            return self._ema.forecast()
        with self._torch.no_grad():
            found = self._network(self._history - self._means[:, None]).numpy().astype(np.float64)
        return known(np.exp(self._means + found))


CLUSTER_B = {
    "m4.2xlarge": (8, 17),
    "c5.2xlarge": (8, 10),
    "r4.2xlarge": (8, 2),
    "m4.4xlarge": (16, 2),
    "m4.xlarge": (4, 1),
}
"""Instance type -> cores and number (Table 2)."""
PER_CORE = {"m4": 1.0, "c5": 1.35, "r4": 1.0}
"""Speed of a core, m4 = 1 (assumed)."""
BACKUPS, SSP_BOUND = 2, 5
PAPER = {
    "Memoryless": (11.85, 0.58),
    "EMA": (7.85, 0.48),
    "ARIMA": (9.67, 0.52),
    "SimpleRNN": (8.34, 0.49),
    "LSTM": (9.19, 0.51),
    "NARX": (4.78, 0.42),
}
"""Table 3: RMSE, and iteration time over BSP's."""
PREDICTORS: dict[str, Callable[[int], Predictor]] = {
    "Memoryless": Memoryless,
    "EMA": Ema,
    "ARIMA": Arima,
    "SimpleRNN": partial(Recurrent, kind="RNN"),
    "LSTM": partial(Recurrent, kind="LSTM"),
    "NARX": OwnNarx,
    "NARX for all": Narx,
    "normalised EMA": NormalisedEma,
}
ASSUMED = (
    "The Google trace is not at hand, and Figures 1 and 2 have no numbers. Tasks of others begin at random, last 150 "
    "steps on average, and take 10 to 50 % of the cores and 5 to 25 % of the memory each. Speeds have 6 % of noise, "
    "and 1 % of the steps are spikes without a cause in CPU or memory."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Arrays of (steps, workers)."""

    speeds: Floats
    """Samples/s."""
    cpu: Floats
    """Cores that the tasks of others leave."""
    memory: Floats
    """Fraction that they leave."""
    backups: Floats
    """Speeds of the backup workers of redundant execution."""
    first: int
    """Steps before this one do not count, as predictors learn in them."""

    @property
    def counted(self) -> Floats:
        """Speeds of the steps that count."""
        return self.speeds[self.first :]

    @property
    def bsp_s(self) -> float:
        """Seconds of these steps with equal batches; a batch of all workers has one sample."""
        return float((1.0 / self.counted.min(axis=1)).sum()) / self.counted.shape[1]

    @property
    def clairvoyant_time(self) -> float:
        """Iteration time over BSP's where every speed is known."""
        return float((1.0 / self.counted.sum(axis=1)).sum()) / self.bsp_s


def speed(cores: Floats, memory: Floats) -> Floats:
    """Return the speed by the resources (Figures 1 and 2): about linear in the cores, less where memory is short."""
    return np.asarray(cores**0.95 * np.minimum(1.0, 0.3 + 2.5 * memory))


def cluster(steps: int, first: int) -> Cluster:
    """Return Cluster-B with tasks of others that come and go, and short slow-downs that no resource explains."""
    random = np.random.default_rng(0)
    kinds = [name for name, (_, count) in CLUSTER_B.items() for _ in range(count)] + ["c5.2xlarge"] * BACKUPS
    cores = np.array([CLUSTER_B[name][0] for name in kinds], dtype=np.float64)
    per_core = np.array([PER_CORE[name[:2]] for name in kinds])
    used, held = (np.zeros((steps, len(kinds))) for _ in range(2))
    for worker in range(len(kinds)):
        for begin in np.flatnonzero(random.random(steps + 400) < 0.012) - 400:
            end = begin + int(random.exponential(150.0)) + 5
            used[max(begin, 0) : max(end, 0), worker] += random.uniform(0.1, 0.5)
            held[max(begin, 0) : max(end, 0), worker] += random.uniform(0.05, 0.25)
    cpu = cores * np.maximum(1.0 - used, 0.15) * np.exp(0.01 * random.normal(size=used.shape))
    memory = np.maximum(1.0 - held, 0.08)
    noise = np.exp(0.06 * random.normal(size=used.shape))
    spikes = np.where(random.random(used.shape) < 0.01, random.uniform(0.4, 0.8, size=used.shape), 1.0)
    speeds, own = per_core * speed(cpu, memory) * noise * spikes, slice(-BACKUPS)
    return Cluster(
        speeds=speeds[:, own], cpu=cpu[:, own], memory=memory[:, own], backups=speeds[:, -BACKUPS:], first=first
    )


class Forecasts(NamedTuple):
    rmse: float
    """Root mean square error over the mean speed of a worker."""
    time: float
    """Iteration time over BSP's."""
    speeds: Floats
    """(steps, workers)"""

    @property
    def roughness(self) -> float:
        """Mean relative change from one step to the next."""
        return float(np.mean(np.abs(np.diff(np.log(self.speeds[len(self.speeds) // 4 :]), axis=0))))


def forecast(made: Cluster, make: Callable[[int], Predictor]) -> Forecasts:
    """Return the forecasts of a predictor, and what shares in proportion to them make of the iteration time."""
    predictor, speeds = make(made.speeds.shape[1]), np.full(made.speeds.shape, np.nan)
    for step in range(1, len(speeds)):
        predictor.observe(made.speeds[step - 1], made.cpu[step], made.memory[step])
        speeds[step] = predictor.forecast()
    found = speeds[made.first :]
    error = (found - made.counted) / made.speeds.mean(axis=0)
    balanced_s = sum(relative_time(f, v) / v.sum() for f, v in zip(found, made.counted, strict=True))
    return Forecasts(float(np.sqrt(np.mean(error * error))), balanced_s / made.bsp_s, speeds)


@cache
def forecasts(small: bool) -> tuple[Cluster, dict[str, Forecasts]]:
    made = cluster(120, 60) if small else cluster(1500, 700)
    return made, {name: forecast(made, make) for name, make in PREDICTORS.items()}


def schemes(made: Cluster) -> dict[str, float]:
    """Return the iteration time over BSP's of the schemes with equal batches (Figure 9)."""
    times, workers = 1.0 / made.counted, made.counted.shape[1]
    bsp = times.max(axis=1).sum()
    redundant = np.sort(np.column_stack([times, 1.0 / made.backups[made.first :]]), axis=1)[:, workers - 1].sum()
    flex = sum(map(flex_rr_s, made.counted))
    return {"BSP": 1.0, "R-E": redundant / bsp, "SSP": _ssp_s(times) / bsp, "FlexRR": float(flex / bsp)}


HELP, HELP_COST = 0.025, 0.01
"""Share of a batch that a helper takes at a time, and what the message costs, as a share of an idle iteration."""


def flex_rr_s(speeds: Floats) -> float:
    """Return the seconds of an iteration of one sample a worker in which those that are done help the slowest.

    A helper takes a piece of the rest of the worker that ends last, and informs it (FlexRR, Harlap et al.).
    """
    ends = 1.0 / speeds
    cost_s = HELP_COST * float(np.median(ends))
    while True:
        slowest, helper = int(ends.argmax()), int(ends.argmin())
        helped_s = ends[helper] + cost_s + HELP / speeds[helper]
        if (ends[slowest] - ends[helper]) * speeds[slowest] < HELP or helped_s >= ends[slowest]:
            return float(ends.max())
        ends[helper] = helped_s
        ends[slowest] -= HELP / speeds[slowest]


def _ssp_s(times: Floats) -> float:
    """Seconds until the slowest worker has done all iterations, where none may be more than the bound ahead of it."""
    ends = np.zeros((len(times) + 1, times.shape[1]))
    for step in range(1, len(ends)):
        slowest = ends[step - 1 - SSP_BOUND].max() if step > SSP_BOUND else 0.0
        ends[step] = np.maximum(ends[step - 1], slowest) + times[step - 1]
    return float(ends[-1].max())


def figure_1(small: bool) -> Found:
    """Computation time and batch size of CPU instances, as assumed."""
    batches = np.array([32, 64, 128, 256])
    found = {name: batches / (10.0 * PER_CORE[name[:2]] * cores**0.95) for name, (cores, _) in CLUSTER_B.items()}
    yield Statement(
        "Each case exhibits strong linearity between the batch size and the computation time.",
        verdict(*(abs(each[-1] / each[0] - 8.0) < 1e-9 for each in found.values())),
        "It is assumed, and the product does not rely on it: it finds the part of a step that no share shortens.",
    )
    yield Table(("instance", *map(str, batches)), [(name, *each) for name, each in found.items()])
    yield ASSUMED


def figure_2(small: bool) -> Found:
    """Speed by the CPU and memory that are left, as assumed."""
    left = np.array([1.0, 0.8, 0.6, 0.4, 0.2, 0.1])
    idle = speed(np.array(8.0), np.array(1.0))
    cpu, memory = speed(8.0 * left, np.array(1.0)) / idle, speed(np.array(8.0), left) / idle
    yield Statement(
        "Sample processing speed is affected by CPU or memory resources.",
        verdict(cpu[-1] < 0.5, memory[-1] < 0.7),
        f"With a tenth of the CPU {cpu[-1]:.2f}, with a tenth of the memory {memory[-1]:.2f} of the speed.",
    )
    yield Table(
        ("left", "of CPU", "of memory"), [(f"{at:.0%}", *both) for at, *both in zip(left, cpu, memory, strict=True)]
    )
    yield ASSUMED


def figure_9(small: bool) -> Found:
    """Time of an iteration in a shared CPU cluster, over BSP's."""
    made, found = forecasts(small)
    others = schemes(made)
    narx, ours, flex = found["NARX"].time, found["normalised EMA"].time, others["FlexRR"]
    yield Statement(
        "LB-BSP can bring a speedup of 62% for SVM and 58% for ResNet-32 over BSP.",
        verdict(1.0 - narx >= 0.5, 1.0 - narx <= 0.7),
        f"The iteration takes {1.0 - narx:.0%} less time with NARX, {1.0 - ours:.0%} with the default.",
    )
    yield Statement(
        "R-E and SSP speed up the training iterations only marginally.",
        verdict(others["R-E"] > 0.8, others["SSP"] > 0.8),
        f"{1.0 - others['R-E']:.0%} less time with {BACKUPS} backup workers, {1.0 - others['SSP']:.0%} with a bound of "
        f"{SSP_BOUND}: workers stay slow for longer than that.",
    )
    yield Statement(
        "FlexRR's performance is better but not the best; LB-BSP outperforms it by up to 38.7%.",
        verdict(flex < min(others["R-E"], others["SSP"]), narx < flex),
        f"FlexRR takes {1.0 - flex:.0%} less time than BSP, LB-BSP {percent(1.0 - narx / flex)} less than FlexRR. What "
        "its helpers cost is assumed: with little, it is a bound that no forecast reaches.",
    )
    yield Table((*others, "LB-BSP (NARX)", "default"), [(*others.values(), narx, ours)])
    yield ASSUMED
    yield (
        f"FlexRR is emulated: a worker that is done takes {HELP:.1%} of a batch from the one that would end last, for "
        f"{HELP_COST:.0%} of a usual iteration."
    )


def figure_10(small: bool) -> Found:
    """Forecasts of NARX beside the speeds."""
    narx, last = (forecasts(small)[1][name].roughness for name in ("NARX", "Memoryless"))
    yield Statement(
        "When there are spikes in the actual speed curve, the predicted curve fluctuates much less.",
        verdict(narx < 0.7 * last),
        f"From step to step NARX changes by {narx:.1%}, the speed itself by {last:.1%} on average.",
    )
    yield ASSUMED


def table_3(small: bool) -> Found:
    """Forecasts of speeds in Cluster-B (Table 2: 32 instances)."""
    made, found = forecasts(small)
    narx, ours = found["NARX"], found["normalised EMA"]
    rivals = [found[name] for name in PAPER if name != "NARX"]
    rmse, time = 1.0 - narx.rmse / min(r.rmse for r in rivals), 1.0 - narx.time / min(r.time for r in rivals)
    order = sorted(PAPER, key=lambda name: found[name].time)
    yield Statement(
        "NARX surpasses the second best by around 40% in RMSE and 15% in average iteration time.",
        verdict(rmse >= 0.30, time >= 0.10),
        f"By {rmse:.0%} in RMSE and {time:.0%} in iteration time, one network a worker from iteration 500 on; one "
        f"network for all: RMSE {found['NARX for all'].rmse:.3f}. The default needs no training: {ours.rmse:.3f} "
        f"(NARX {narx.rmse:.3f}).",
    )
    yield Statement(
        "NARX 0.42, EMA 0.48, SimpleRNN 0.49, LSTM 0.51, ARIMA 0.52, Memoryless 0.58 of BSP's iteration time.",
        verdict(order[0] == "NARX", order[-1] == "Memoryless", order == sorted(PAPER, key=lambda name: PAPER[name][1])),
        "From best to worst: " + ", ".join(f"{name} {found[name].time:.2f}" for name in order) + ".",
    )
    theirs = {name: tuple(map(str, PAPER.get(name, ("", "")))) for name in found}
    yield Table(
        ("method", "RMSE", "paper's", "iteration time / BSP", "paper's"),
        [
            *((name, each.rmse, theirs[name][0], each.time, theirs[name][1]) for name, each in found.items()),
            ("clairvoyant", 0.0, "", made.clairvoyant_time, ""),
        ],
        digits=3,
    )
    yield ASSUMED
    yield (
        "RMSE is over each worker's mean speed; the paper's is in samples/s. ARIMA is (2, 1, 1) by recursive least "
        "squares, the paper's (2, 2, 1). SimpleRNN and LSTM are one network for all workers, look-back 2."
    )
