"""LB-BSP, Figures 1, 2, 9 and 10, Tables 2 and 3: forecasts of speeds in a shared CPU cluster, and their use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import common
import numpy as np
import numpy.typing as npt
from arima import Arima
from common import COLOURS, Finding, Report, Table, line, verdict
from page import Figure, panels

from rubberband.planner.balancing.paper import Narx
from rubberband.planner.balancing.speed_balancer import (
    Ema,
    Memoryless,
    NormalisedEma,
    Predictor,
    relative_time,
)

Floats = npt.NDArray[np.float64]

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
STEPS, FIRST = 1200, 300
"""Steps in all, and those that do not count, as predictors learn in them."""
BACKUPS, SSP_BOUND = 2, 5
PAPER = {"Memoryless": 0.58, "EMA": 0.48, "ARIMA": 0.52, "NARX": 0.42}
"""Table 3: iteration time over BSP's."""
PAPER_RMSE = {"Memoryless": 11.85, "EMA": 7.85, "ARIMA": 9.67, "NARX": 4.78}
PREDICTORS: dict[str, Callable[[int], Predictor]] = {
    "Memoryless": Memoryless,
    "EMA": Ema,
    "ARIMA": Arima,
    "NARX": Narx,
    "normalised EMA": NormalisedEma,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Arrays of (steps, workers), the backup workers of redundant execution last."""

    speeds: Floats
    """Samples/s."""
    cpu: Floats
    """Cores that the tasks of others leave."""
    memory: Floats
    """Fraction that they leave."""


def speed(cores: Floats, memory: Floats) -> Floats:
    """Return the speed by the resources (Figures 1 and 2): about linear in the cores, less where memory is short."""
    return np.asarray(cores**0.95 * np.minimum(1.0, 0.3 + 2.5 * memory))


def cluster(steps: int, seed: int = 0) -> Cluster:
    """Return Cluster-B with tasks of others that come and go, and short slow-downs that no resource explains."""
    random = np.random.default_rng(seed)
    kinds = [name for name, (_, count) in CLUSTER_B.items() for _ in range(count)] + ["c5.2xlarge"] * BACKUPS
    cores = np.array([CLUSTER_B[name][0] for name in kinds], dtype=np.float64)
    per_core = np.array([PER_CORE[name.split(".")[0]] for name in kinds])
    used, held = (np.zeros((steps, len(kinds))) for _ in range(2))
    for worker in range(len(kinds)):
        for begin in np.flatnonzero(random.random(steps + 400) < 0.012) - 400:
            end = begin + int(random.exponential(150.0)) + 5
            used[max(begin, 0) : max(end, 0), worker] += random.uniform(0.1, 0.5)
            held[max(begin, 0) : max(end, 0), worker] += random.uniform(0.05, 0.25)
    left = np.maximum(1.0 - used, 0.15) * np.exp(0.01 * random.normal(size=used.shape))
    memory = np.maximum(1.0 - held, 0.08)
    noise = np.exp(0.06 * random.normal(size=used.shape))
    spikes = np.where(random.random(used.shape) < 0.01, random.uniform(0.4, 0.8, size=used.shape), 1.0)
    speeds = per_core * speed(cores * left, memory) * noise * spikes
    return Cluster(speeds=speeds, cpu=cores * left, memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Forecasts of one predictor."""

    rmse: float
    """Root mean square error over the mean speed of a worker."""
    time: float
    """Iteration time over BSP's."""
    speeds: Floats
    """(steps, workers)"""


def forecast(made: Cluster, make: Callable[[int], Predictor], first: int) -> Forecasts:
    """Return the forecasts of a predictor, and what shares in proportion to them make of the iteration time."""
    workers = made.speeds.shape[1] - BACKUPS
    speeds, cpu, memory = (each[:, :workers] for each in (made.speeds, made.cpu, made.memory))
    predictor, found = make(workers), np.full(speeds.shape, np.nan)
    for step in range(1, len(speeds)):
        predictor.observe(speeds[step - 1], cpu[step], memory[step])
        found[step] = predictor.forecast()
    error = (found[first:] - speeds[first:]) / speeds.mean(axis=0)
    balanced = sum(relative_time(f, v) / v.sum() for f, v in zip(found[first:], speeds[first:], strict=True))
    equal = float((1.0 / speeds[first:].min(axis=1) / workers).sum())
    return Forecasts(rmse=float(np.sqrt(np.mean(error * error))), time=balanced / equal, speeds=found)


def schemes(made: Cluster, first: int) -> dict[str, float]:
    """Return the iteration time over BSP's of the schemes with equal batches (Figure 9)."""
    times = 1.0 / made.speeds[first:]
    workers = times.shape[1] - BACKUPS
    bsp = times[:, :workers].max(axis=1).sum()
    redundant = np.sort(times, axis=1)[:, workers - 1].sum()
    return {"BSP": 1.0, "R-E": redundant / bsp, "SSP": _ssp_s(times[:, :workers]) / bsp}


def _ssp_s(times: Floats) -> float:
    """Seconds until the slowest worker has done all iterations, where none may be more than the bound ahead of it."""
    ends = np.zeros((len(times) + 1, times.shape[1]))
    for step in range(1, len(ends)):
        slowest = ends[step - 1 - SSP_BOUND].max() if step > SSP_BOUND else 0.0
        ends[step] = np.maximum(ends[step - 1], slowest) + times[step - 1]
    return float(ends[-1].max())


def compute(steps: int = STEPS, first: int = FIRST) -> Report:
    """Compute the cluster, the predictors and the schemes."""
    made = cluster(steps)
    found = {name: forecast(made, make, first) for name, make in PREDICTORS.items()}
    others = schemes(made, first)
    clairvoyant = clairvoyant_time(made, first)
    fig_9 = {**others, "LB-BSP (NARX)": found["NARX"].time, "default": found["normalised EMA"].time}
    return Report(
        title="LB-BSP, Figures 1, 2, 9 and 10, Tables 2 and 3: a shared CPU cluster",
        tables=[
            Table(
                title="Figure 1 as assumed: seconds of a batch, 10 samples/s per m4 core",
                columns=("instance", *map(str, (32, 64, 128, 256))),
                rows=[
                    (name, *(f"{x / (10.0 * PER_CORE[name[:2]] * cores**0.95):.2f}" for x in (32, 64, 128, 256)))
                    for name, (cores, _) in CLUSTER_B.items()
                ],
            ),
            Table(
                title="Figure 2 as assumed: speed over that of an idle c5.2xlarge, by what is left of CPU or memory",
                columns=("left", "of CPU", "of memory"),
                rows=[(f"{left:.0%}", *_slowed(left)) for left in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)],
            ),
            Table(
                title="Table 3: forecasts in Cluster-B (Table 2: 32 instances)",
                columns=("method", "RMSE", "paper", "iteration time / BSP", "paper"),
                rows=[
                    (
                        name,
                        f"{each.rmse:.3f}",
                        str(PAPER_RMSE.get(name, "")),
                        f"{each.time:.2f}",
                        str(PAPER.get(name, "")),
                    )
                    for name, each in found.items()
                ]
                + [("clairvoyant", "0.000", "", f"{clairvoyant:.2f}", "")],
            ),
            Table(
                title="Figure 9: iteration time over BSP's",
                columns=tuple(fig_9),
                rows=[tuple(f"{value:.2f}" for value in fig_9.values())],
            ),
        ],
        figure=figure(made, found),
        findings=findings(found, others),
        assumptions=[
            "Figures 1 and 2 have no numbers, and the Google trace is not at hand. Tasks of others begin at random, "
            "last 150 steps on average, and take 10 to 50 % of the cores and 5 to 25 % of the memory each.",
            "Speeds have 6 % of noise, and 1 % of the steps are spikes without a cause in CPU or memory.",
            "RMSE is over each worker's mean speed; the paper's is in samples/s. ARIMA is (2, 1, 1) by recursive least "
            "squares, the paper's (2, 2, 1).",
            "One NARX network for all workers, trained online; the paper has one per worker. SimpleRNN, LSTM and "
            "FlexRR are not emulated.",
        ],
    )


def _slowed(left: float) -> tuple[str, str]:
    idle = speed(np.array(8.0), np.array(1.0))
    cpu, memory = speed(np.array(8.0 * left), np.array(1.0)), speed(np.array(8.0), np.array(left))
    return f"{cpu / idle:.2f}", f"{memory / idle:.2f}"


def clairvoyant_time(made: Cluster, first: int) -> float:
    """Return the iteration time over BSP's where every speed is known."""
    speeds = made.speeds[first:, :-BACKUPS]
    return float((1.0 / speeds.sum(axis=1)).sum() / (1.0 / speeds.min(axis=1) / speeds.shape[1]).sum())


def findings(found: dict[str, Forecasts], others: dict[str, float]) -> list[Finding]:
    """Return the statements of §5.3 and §5.4."""
    narx, ours = found["NARX"], found["normalised EMA"]
    rivals = [found[name] for name in ("Memoryless", "EMA", "ARIMA")]
    rmse = 1.0 - narx.rmse / min(each.rmse for each in rivals)
    time = 1.0 - narx.time / min(each.time for each in rivals)
    order = sorted(PAPER, key=lambda name: found[name].time)
    return [
        Finding(
            says="NARX surpasses the second best by around 40% in RMSE and 15% in average iteration time.",
            verdict=verdict(rmse >= 0.30, time >= 0.10),
            found=f"By {rmse:.0%} in RMSE and {time:.0%} in iteration time. The normalised average of the default "
            f"needs no training: RMSE {ours.rmse:.3f} (NARX {narx.rmse:.3f}), iteration time {ours.time:.2f} "
            f"({narx.time:.2f}).",
        ),
        Finding(
            says="Memoryless 0.58, ARIMA 0.52, EMA 0.48, NARX 0.42 of BSP's iteration time (Table 3).",
            verdict=verdict(order[0] == "NARX", order == sorted(PAPER, key=PAPER.__getitem__)),
            found="From best to worst: "
            + ", ".join(f"{name} {found[name].time:.2f}" for name in order)
            + ". The order of "
            "the three without resources depends on how often they change.",
        ),
        Finding(
            says="LB-BSP can bring a speedup of 62% for SVM and 58% for ResNet-32 over BSP.",
            verdict=verdict(1.0 - narx.time >= 0.58, 1.0 - narx.time <= 0.70),
            found=f"The iteration takes {1.0 - narx.time:.0%} less time. Our workers are more unlike than the paper's.",
        ),
        Finding(
            says="R-E and SSP speed up the training iterations only marginally.",
            verdict=verdict(others["R-E"] > 0.8, others["SSP"] > 0.8),
            found=f"{1.0 - others['R-E']:.0%} less time with {BACKUPS} backup workers, {1.0 - others['SSP']:.0%} with "
            f"a bound of {SSP_BOUND}: workers stay slow for longer than that.",
        ),
        Finding(
            says="When there are spikes in the actual speed curve, the predicted curve fluctuates much less.",
            verdict=verdict(_roughness(narx.speeds) < 0.7 * _roughness(found["Memoryless"].speeds)),
            found=f"From step to step NARX changes by {_roughness(narx.speeds):.1%}, the speed itself by "
            f"{_roughness(found['Memoryless'].speeds):.1%} on average.",
        ),
    ]


def _roughness(speeds: Floats) -> float:
    """Mean relative change from one step to the next."""
    kept = speeds[len(speeds) // 4 :]
    return float(np.mean(np.abs(np.diff(np.log(kept), axis=0))))


def figure(made: Cluster, found: dict[str, Forecasts]) -> Figure:
    """Return Figure 10: the speed of one m4.2xlarge over 100 steps, and its forecasts."""
    steps = range(len(made.speeds) - 100, len(made.speeds))
    lines = []
    for panel, name in enumerate(("NARX", "normalised EMA"), start=1):
        lines.append(line("actual", list(steps), made.speeds[-100:, 0].tolist(), COLOURS[1], panel, width=1.5))
        forecast_line = line("predicted", list(steps), found[name].speeds[-100:, 0].tolist(), COLOURS[0], panel)
        lines.append(forecast_line)
    return panels(lines, ["NARX", "normalised EMA"], x="step", y="samples/s")


if __name__ == "__main__":
    common.show(compute)
