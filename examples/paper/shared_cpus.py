"""LB-BSP in a shared CPU cluster: Figures 1, 2, 9 and 10, and Table 3, on workers that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from predictors import Arima, Recurrent
from rows import Row, Statement, Table, percent, verdict

from rubberband.planner.balancing.paper import Narx, OwnNarx
from rubberband.planner.balancing.speed_balancer import (
    Ema,
    Floats,
    Memoryless,
    NormalisedEma,
    Predictor,
    relative_time,
)

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
STEPS, FIRST = 1500, 700
"""Steps in all, and those that do not count, as predictors learn in them."""
BACKUPS, SSP_BOUND = 2, 5
PAPER = {"Memoryless": 0.58, "EMA": 0.48, "ARIMA": 0.52, "SimpleRNN": 0.49, "LSTM": 0.51, "NARX": 0.42}
"""Table 3: iteration time over BSP's."""
PAPER_RMSE = {"Memoryless": 11.85, "EMA": 7.85, "ARIMA": 9.67, "SimpleRNN": 8.34, "LSTM": 9.19, "NARX": 4.78}
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
    flex = sum(flex_rr_s(each) for each in made.speeds[first:, :workers])
    return {"BSP": 1.0, "R-E": redundant / bsp, "SSP": _ssp_s(times[:, :workers]) / bsp, "FlexRR": float(flex / bsp)}


HELP, HELP_COST = 0.025, 0.01
"""Share of a batch that a helper takes at a time, and what the message costs, as a share of an idle iteration."""


def flex_rr_s(speeds: Floats) -> float:
    """Return the seconds of an iteration of one sample a worker in which those that are done help the slowest.

    A helper takes a piece of what the worker that ends last has left, and tells it (FlexRR, Harlap et al.).
    """
    ends = 1.0 / speeds
    cost_s = HELP_COST * float(np.median(ends))
    while True:
        slowest, helper = int(ends.argmax()), int(ends.argmin())
        helped_s = ends[helper] + cost_s + HELP / speeds[helper]
        left = (ends[slowest] - ends[helper]) * speeds[slowest]
        if left < HELP or helped_s >= ends[slowest]:
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


def clairvoyant_time(made: Cluster, first: int) -> float:
    """Return the iteration time over BSP's where every speed is known."""
    speeds = made.speeds[first:, :-BACKUPS]
    return float((1.0 / speeds.sum(axis=1)).sum() / (1.0 / speeds.min(axis=1) / speeds.shape[1]).sum())


def _roughness(speeds: Floats) -> float:
    """Mean relative change from one step to the next."""
    kept = speeds[len(speeds) // 4 :]
    return float(np.mean(np.abs(np.diff(np.log(kept), axis=0))))


@cache
def forecasts(steps: int, first: int) -> tuple[Cluster, dict[str, Forecasts]]:
    """Return the cluster and the forecasts of all predictors."""
    made = cluster(steps)
    return made, {name: forecast(made, make, first) for name, make in PREDICTORS.items()}


def sizes(small: bool) -> tuple[int, int]:
    """Return steps, and those that do not count."""
    return (120, 60) if small else (STEPS, FIRST)


ASSUMED = (
    "The Google trace is not at hand, and Figures 1 and 2 have no numbers. Tasks of others begin at random, last 150 "
    "steps on average, and take 10 to 50 % of the cores and 5 to 25 % of the memory each. Speeds have 6 % of noise, "
    "and 1 % of the steps are spikes without a cause in CPU or memory."
)


def figure_1(small: bool) -> Row:
    """Show the assumed seconds of a batch."""
    batches = (32, 64, 128, 256)
    found = {
        name: [batch / (10.0 * PER_CORE[name[:2]] * cores**0.95) for batch in batches]
        for name, (cores, _) in CLUSTER_B.items()
    }
    return Row(
        title="computation time and batch size of CPU instances, as assumed",
        statements=[
            Statement(
                says="Each case exhibits strong linearity between the batch size and the computation time.",
                verdict=verdict(*(abs(each[-1] / each[0] - 8.0) < 1e-9 for each in found.values())),
                found="It is assumed, and the product does not rely on it: it finds the part of a step that no share "
                "shortens.",
            )
        ],
        tables=[
            Table(
                columns=("instance", *map(str, batches)),
                rows=[(name, *(f"{each:.2f}" for each in times)) for name, times in found.items()],
            )
        ],
        assumptions=[ASSUMED],
    )


def figure_2(small: bool) -> Row:
    """Show the assumed speed by what is left of CPU and memory."""
    idle = float(speed(np.array(8.0), np.array(1.0)))
    rows = [
        (
            left,
            float(speed(np.array(8.0 * left), np.array(1.0))) / idle,
            float(speed(np.array(8.0), np.array(left))) / idle,
        )
        for left in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)
    ]
    return Row(
        title="speed by the CPU and memory that are left, as assumed",
        statements=[
            Statement(
                says="Sample processing speed is affected by CPU or memory resources.",
                verdict=verdict(rows[-1][1] < 0.5, rows[-1][2] < 0.7),
                found=f"With a tenth of the CPU {rows[-1][1]:.2f}, with a tenth of the memory {rows[-1][2]:.2f} of "
                "the speed.",
            )
        ],
        tables=[
            Table(
                columns=("left", "of CPU", "of memory"),
                rows=[(f"{left:.0%}", f"{cpu:.2f}", f"{memory:.2f}") for left, cpu, memory in rows],
            )
        ],
        assumptions=[ASSUMED],
    )


def figure_9(small: bool) -> Row:
    """Compare the schemes by the time of an iteration."""
    steps, first = sizes(small)
    made, found = forecasts(steps, first)
    others = schemes(made, first)
    narx, ours = found["NARX"].time, found["normalised EMA"].time
    return Row(
        title="time of an iteration in a shared CPU cluster, over BSP's",
        statements=[
            Statement(
                says="LB-BSP can bring a speedup of 62% for SVM and 58% for ResNet-32 over BSP.",
                verdict=verdict(1.0 - narx >= 0.5, 1.0 - narx <= 0.7),
                found=f"The iteration takes {1.0 - narx:.0%} less time with NARX, {1.0 - ours:.0%} with the default.",
            ),
            Statement(
                says="R-E and SSP speed up the training iterations only marginally.",
                verdict=verdict(others["R-E"] > 0.8, others["SSP"] > 0.8),
                found=f"{1.0 - others['R-E']:.0%} less time with {BACKUPS} backup workers, {1.0 - others['SSP']:.0%} "
                f"with a bound of {SSP_BOUND}: workers stay slow for longer than that.",
            ),
            Statement(
                says="FlexRR's performance is better but not the best; LB-BSP outperforms it by up to 38.7%.",
                verdict=verdict(others["FlexRR"] < min(others["R-E"], others["SSP"]), narx < others["FlexRR"]),
                found=f"FlexRR takes {1.0 - others['FlexRR']:.0%} less time than BSP, LB-BSP "
                f"{percent(1.0 - narx / others['FlexRR'])} less than FlexRR. What its helpers cost is assumed: with "
                "little, it is a bound that no forecast reaches.",
            ),
        ],
        tables=[
            Table(
                columns=(*others, "LB-BSP (NARX)", "default"),
                rows=[tuple(f"{each:.2f}" for each in (*others.values(), narx, ours))],
            )
        ],
        assumptions=[
            ASSUMED,
            f"FlexRR is emulated: a worker that is done takes {HELP:.1%} of a batch from the one that would end last, "
            f"for {HELP_COST:.0%} of a usual iteration.",
        ],
    )


def figure_10(small: bool) -> Row:
    """Compare how much speeds and forecasts fluctuate."""
    _, found = forecasts(*sizes(small))
    narx, last = (_roughness(found[name].speeds) for name in ("NARX", "Memoryless"))
    return Row(
        title="forecasts of NARX beside the speeds",
        statements=[
            Statement(
                says="When there are spikes in the actual speed curve, the predicted curve fluctuates much less.",
                verdict=verdict(narx < 0.7 * last),
                found=f"From step to step NARX changes by {narx:.1%}, the speed itself by {last:.1%} on average.",
            )
        ],
        assumptions=[ASSUMED],
    )


def table_3(small: bool) -> Row:
    """Compare the predictors."""
    steps, first = sizes(small)
    made, found = forecasts(steps, first)
    narx, ours = found["NARX"], found["normalised EMA"]
    rivals = [found[name] for name in PAPER if name != "NARX"]
    rmse, time = 1.0 - narx.rmse / min(r.rmse for r in rivals), 1.0 - narx.time / min(r.time for r in rivals)
    order = sorted(PAPER, key=lambda name: found[name].time)
    return Row(
        title="forecasts of speeds in Cluster-B (Table 2: 32 instances)",
        statements=[
            Statement(
                says="NARX surpasses the second best by around 40% in RMSE and 15% in average iteration time.",
                verdict=verdict(rmse >= 0.30, time >= 0.10),
                found=f"By {rmse:.0%} in RMSE and {time:.0%} in iteration time, one network a worker from iteration "
                f"500 on; one network for all: RMSE {found['NARX for all'].rmse:.3f}. The default needs no training: "
                f"{ours.rmse:.3f} (NARX {narx.rmse:.3f}).",
            ),
            Statement(
                says="NARX 0.42, EMA 0.48, SimpleRNN 0.49, LSTM 0.51, ARIMA 0.52, Memoryless 0.58 of BSP's iteration "
                "time.",
                verdict=verdict(
                    order[0] == "NARX", order[-1] == "Memoryless", order == sorted(PAPER, key=PAPER.__getitem__)
                ),
                found="From best to worst: " + ", ".join(f"{name} {found[name].time:.2f}" for name in order) + ".",
            ),
        ],
        tables=[
            Table(
                columns=("method", "RMSE", "paper's", "iteration time / BSP", "paper's"),
                rows=[
                    *(
                        (
                            *(name, f"{each.rmse:.3f}", str(PAPER_RMSE.get(name, ""))),
                            *(f"{each.time:.3f}", str(PAPER.get(name, ""))),
                        )
                        for name, each in found.items()
                    ),
                    ("clairvoyant", "0.000", "", f"{clairvoyant_time(made, first):.3f}", ""),
                ],
            )
        ],
        assumptions=[
            ASSUMED,
            "RMSE is over each worker's mean speed; the paper's is in samples/s. ARIMA is (2, 1, 1) by recursive least "
            "squares, the paper's (2, 2, 1). SimpleRNN and LSTM are one network for all workers, look-back 2.",
        ],
    )
