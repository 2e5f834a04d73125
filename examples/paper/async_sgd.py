"""Figures 1 to 15 and Tables II and III of the paper on asynchronous SGD, with this planner: a row for each.

The paper is "A model-based approach to streamlining distributed training for asynchronous SGD" (Lin et al.). It prints
the times of its model of 8 MB only; the others are assumed from sizes and bandwidths. Its measurements are plots
without numbers. Here simulated servers and a program that sleeps stand for them.

Run `python examples/paper/async_sgd.py`, or with the names of some parts, as `figure_1 table_2`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from parameter_server import (
    Discipline,
    Law,
    Links,
    Slept,
    constant,
    first_come,
    gamma,
    hybrid,
    printed,
    simulated_throughputs,
    slept,
)
from rows import Row, Statement, Table, listed, percent, show, verdict
from scheduling import NODES, figure_1, figure_12, figure_13, figure_14

from rubberband.planner.queueing import ASSUMED_BLEND, Network, blended, calibrated, curve, exact
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes

LINKS: tuple[Links, Links] = ("in turn", "shared")
CV = 0.1
"""Coefficient of variation of all simulated times."""
SMALL = AsyncTimes(compute_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072)
"""Fully connected model of 8 MB (§III-B)."""
APART = AsyncTimes(compute_s=0.25, up_s=0.1, server_s=0.05, down_s=0.1)
"""Five workers fit: an update takes as long as five transfers, as in Figure 9."""
SECONDS_PER_MB = 0.009
"""On 1 Gbit/s: 72 ms for 8 MB."""
SERVER_S_PER_MB = 0.018 / 8
CLOSE = 0.1
"""A model is accurate where it is off by less."""


def of_size(megabytes: float, compute_s: float, gigabits: float = 1.0, server: float = 1.0) -> AsyncTimes:
    """Return the times of a DNN of this size on links of this bandwidth; `server` scales the server's time."""
    transfer_s = SECONDS_PER_MB * megabytes / gigabits
    return AsyncTimes(
        compute_s=compute_s, up_s=transfer_s, server_s=server * SERVER_S_PER_MB * megabytes, down_s=transfer_s
    )


CPU = {
    "3 CONV, batch 8": of_size(16, 0.4),
    "3 CONV, batch 16": of_size(16, 0.8),
    "3 CONV, batch 32": of_size(16, 1.6),
    "InceptionV3": of_size(100, 0.8),
}
"""Figure 10: up to 10 workers."""
GPU = {
    "InceptionV3, GPU": of_size(100, 1.1, 1.0, 0.5),
    "ResNet-152, GPU": of_size(232, 1.6, 3.0, 0.5),
    "VGG16, GPU": of_size(528, 0.9, 5.0, 0.5),
    "VGG16 (64), GPU": of_size(528, 1.8, 5.0, 0.5),
}
"""Figure 11: up to 7 workers."""
ASSUMED_TIMES = (
    "Times are assumed: transfers 9 ms per MB on 1 Gbit/s, with 3 and 5 Gbit/s for ResNet-152 and VGG16; server 2.25 "
    "ms per MB, half of it in the cloud; compute 0.4, 0.8 and 1.6 s for the batches of 8, 16 and 32, 0.8 s for "
    "InceptionV3 on CPUs, and 1.1, 1.6, 0.9 and 1.8 s on a K80."
)
SIMULATED = (
    f"Simulated servers stand for measurements: all times vary by {100 * CV:g} %. TCP is between two kinds of links: "
    "'in turn' carries one transfer after another, 'shared' all at once."
)


def network(times: AsyncTimes) -> Network:
    """Return the closed network of one server (Figure 6)."""
    return Network(delay_s=times.compute_s, up_s=times.up_s, server_s=times.server_s, down_s=times.down_s)


@lru_cache
def simulated(times: AsyncTimes, workers: int, links: Links, cv: float = CV) -> float:
    """Return the updates per second of `workers` with a real queue at every station."""
    row = [times.compute_s, times.up_s, times.server_s, times.down_s]
    disciplines: list[Discipline] = ["delay", links, "in turn", links]
    laws: list[Law] = [gamma(cv) if cv else constant] * 4
    found = simulated_throughputs(
        np.array([row] * workers), disciplines, laws, replicas=60, steps=140 * workers + 300, warm_up=60 * workers + 150
    )
    return float(found.sum())


def truth(times: AsyncTimes, workers: int, links: Links) -> list[float]:
    """Return the simulated throughputs of 1, …, `workers` workers."""
    return [simulated(times, count, links) for count in range(1, workers + 1)]


MODELS: Mapping[str, Callable[[Network, int], Any]] = {
    "exact": exact,
    "FCFS": first_come,
    "hybrid": hybrid,
    "assumed": partial(blended, blend=ASSUMED_BLEND),
}
"""Models of X(K); the last one is what the product plans with before it has seen two workers."""


def errors(model: Callable[[Network, int], Any], times: AsyncTimes, workers: int, links: Links) -> list[float]:
    """Return the relative errors of a model for 2, …, `workers` workers."""
    pairs = zip(model(network(times), workers)[1:], truth(times, workers, links)[1:], strict=True)
    return [abs(float(found) / real - 1.0) for found, real in pairs]


def calibrated_errors(times: AsyncTimes, workers: int, links: Links) -> list[float]:
    """Return the errors of the product's model after it has seen two workers."""
    profile = AsyncProfile(times=times, updates_per_iteration=1)
    seen = calibrated(profile, {2: simulated(times, 2, links)})
    return errors(lambda station, most: curve(seen, most).point, times, workers, links)


@lru_cache
def measured(workers: int, links: Links, updates: int) -> Slept:
    """Return the program's run with the times of the model of 8 MB."""
    return slept(SMALL, workers, links, updates)


def profiled(updates: int) -> AsyncTimes:
    """Return the four times of one worker as its transfers show them (§III-A), which this machine makes longer."""
    run = measured(1, "in turn", updates)
    downs, ups = run.down[: len(run.up)], run.up
    return AsyncTimes(
        compute_s=fmean(up.began_s - down.ended_s for down, up in zip(downs, ups[1:], strict=False)),
        up_s=fmean(each.ended_s - each.began_s for each in ups[1:]),
        server_s=fmean(down.began_s - up.ended_s for up, down in zip(ups, downs, strict=True)),
        down_s=fmean(each.ended_s - each.began_s for each in downs),
    )


def figure_3(small: bool) -> Row:
    """Measure the throughput of a program that sleeps, as the paper does beside TensorFlow."""
    counts, updates = ((1, 2), 6) if small else ((1, 2, 3, 4, 6, 10), 30)
    found = {links: [measured(count, links, updates).updates_per_s for count in counts] for links in LINKS}
    times = profiled(updates)
    expected = {links: [simulated(times, count, links, 0.0) for count in counts] for links in LINKS}
    near = [abs(a / b - 1.0) for links in LINKS for a, b in zip(found[links], expected[links], strict=True)]
    big = truth(CPU["3 CONV, batch 8"], counts[-1], "shared")
    least = min(b / a for links in LINKS for a, b in itertools.pairwise(truth(SMALL, counts[-1], links)))
    return Row(
        title="measured throughput of a program that sleeps in place of computing",
        statements=[
            Statement(
                says="Measurements obtained with this client-server program are similar to TensorFlow measurements.",
                verdict=verdict(median(near) < CLOSE),
                found="Measured over TCP on this machine; servers simulated with the times of its one worker differ by "
                f"{percent(median(near))} in the median and {percent(max(near))} at most. TensorFlow was not run.",
            ),
            Statement(
                says="Throughput saturates smoothly for the 16 MB model, but presents a non-monotonic trend for the 8 "
                "MB model.",
                verdict=verdict(all(b > 0.98 * a for a, b in itertools.pairwise(big)), least < 0.98),
                found=f"16 MB, simulated: {listed(big)}. No queue makes 8 MB fall: with one more worker it is "
                f"simulated at {percent(least)} or more of what it was. So the paper's fall is TCP's.",
            ),
        ],
        tables=[
            Table(
                columns=(
                    "workers",
                    *(f"measured {links}" for links in LINKS),
                    *(f"simulated {links}" for links in LINKS),
                ),
                rows=[
                    (
                        str(count),
                        *(f"{found[links][at]:.2f}" for links in LINKS),
                        *(f"{expected[links][at]:.2f}" for links in LINKS),
                    )
                    for at, count in enumerate(counts)
                ],
            )
        ],
        assumptions=["Measured: other runs give slightly other numbers, and a busy machine lower ones."],
    )


def figure_5(small: bool) -> Row:
    """Measure the transfers of one worker, and recover the four times from them."""
    updates = 6 if small else 30
    times, begins = profiled(updates), [each.began_s for each in measured(1, "in turn", updates).up[1:]]
    both = {
        "S^U": (times.up_s, SMALL.up_s),
        "S^S": (times.server_s, SMALL.server_s),
        "S^D": (times.down_s, SMALL.down_s),
        "S^W": (times.compute_s, SMALL.compute_s),
    }
    off_s = max(abs(seen - asked) for seen, asked in both.values())
    varies = stdev([later - earlier for earlier, later in itertools.pairwise(begins)]) / SMALL.update_s
    return Row(
        title="measured transfers of one worker and one server",
        statements=[
            Statement(
                says="Communication between the parameter server and the worker follows the repetitive pattern "
                "abstracted in Fig. 4; we estimate S^W and S^S from the time elapsed between transmissions.",
                verdict=verdict(varies < CLOSE, off_s < CLOSE * SMALL.update_s),
                found="Measured, over TCP: "
                + ", ".join(
                    f"{name} {1e3 * seen:.0f} ms (set: {1e3 * asked:.0f})" for name, (seen, asked) in both.items()
                )
                + f"; the begins of {len(begins)} uploads are {percent(varies)} of an update off their mean distance.",
            )
        ],
        assumptions=["The model of 8 MB stands for VGG16, whose times are not printed."],
    )


def figure_7(small: bool) -> Row:
    """Compare PS and FCFS links with simulated ones, and thresholds of eq. 4."""
    most = 4 if small else 10
    real = {links: truth(SMALL, most, links) for links in LINKS}
    models = {name: model(network(SMALL), most) for name, model in MODELS.items()}
    ps, fcfs = models["exact"], models["FCFS"]
    few, many = range(1, 3), range(3, most)
    return Row(
        title="throughput of the model of 8 MB with PS and FCFS links",
        statements=[
            Statement(
                says="The real throughput is higher than predicted by our model with PS links when there are 2 to 3 "
                "workers (it scales almost linearly for 2), while predictions are accurate with more than 3 workers.",
                verdict=verdict(
                    *(real["in turn"][at] > 1.05 * ps[at] for at in few),
                    *(abs(real[links][at] / ps[at] - 1.0) < CLOSE for links in LINKS for at in many),
                ),
                found="So the paper's testbed uses its links in turn with few workers, and shares them with many: "
                f"with 2 {ps[1]:.2f} updates/s by PS, {real['in turn'][1]:.2f} simulated in turn (linear is "
                f"{2 * ps[0]:.2f}) and {real['shared'][1]:.2f} shared.",
            ),
            Statement(
                says="FCFS links show good accuracy for less than 4 workers, but overestimate the throughput for 4 and "
                "more.",
                verdict=verdict(
                    *(abs(fcfs[at] / real["in turn"][at] - 1.0) < 1.5 * CLOSE for at in few),
                    *(fcfs[at] > 1.05 * real["shared"][at] for at in many if at < 6),
                ),
                found=f"3 workers: {fcfs[2]:.2f} against {real['in turn'][2]:.2f} in turn. {most} workers: "
                f"{fcfs[-1]:.2f} against {real['shared'][-1]:.2f} shared.",
            ),
        ],
        tables=[
            Table(
                columns=("workers", *models, *(f"simulated {links}" for links in LINKS)),
                rows=[
                    (str(at + 1), *(f"{each[at]:.2f}" for each in (*models.values(), *real.values())))
                    for at in range(most)
                ],
            )
        ],
        assumptions=[SIMULATED],
    )


def overlap(run: Slept) -> float:
    """Return the share of the time of all uploads in which another one was under way."""
    edges = sorted([(each.began_s, 1) for each in run.up] + [(each.ended_s, -1) for each in run.up])
    under_way, twice_s, once_s = 0, 0.0, 0.0
    for (at_s, step), (until_s, _) in itertools.pairwise(edges):
        under_way += step
        once_s += (until_s - at_s) * (under_way > 0)
        twice_s += (until_s - at_s) * (under_way > 1)
    return twice_s / once_s


def figure_8(small: bool) -> Row:
    """Measure whether two workers send at the same time."""
    updates = 6 if small else 30
    runs = {links: measured(2, links, updates) for links in LINKS}
    alone = measured(1, "in turn", updates).updates_per_s
    overlaps = {links: overlap(run) for links, run in runs.items()}
    gains = {links: run.updates_per_s / alone for links, run in runs.items()}
    return Row(
        title="measured transfers of two workers",
        statements=[
            Statement(
                says="The workers send data during different time slots, without competing for network bandwidth: an "
                "almost linear speedup with 2 workers.",
                verdict=verdict(overlaps["in turn"] < 0.05, gains["in turn"] > 1.8, gains["shared"] < gains["in turn"]),
                found="Measured, over TCP: "
                + "; ".join(
                    f"links {links}: uploads overlap {percent(overlaps[links])} of their time, speed-up "
                    f"{gains[links]:.2f}"
                    for links in LINKS
                )
                + ". Once out of step, workers stay so on links that favour the transfer under way, and never "
                "on shared ones.",
            )
        ],
    )


def figure_9(small: bool) -> Row:
    """Count the workers that send without overlaps."""
    found = [simulated(APART, count, "in turn", 0.0) for count in range(1, (6 if small else 7) + 1)]
    apart = [each / found[0] for each in found]
    return Row(
        title="linear speed-up of workers that never overlap",
        statements=[
            Statement(
                says="The job allows up to 5 workers to transmit their updates without overlaps.",
                verdict=verdict(*(abs(apart[at] - min(at + 1, 5)) < 0.05 for at in range(len(apart)))),
                found=f"Speed-ups of 1, 2, … workers: {listed(apart)}.",
            )
        ],
        assumptions=["No numbers are printed: 0.25 s at the worker, 0.1 s up and down, 0.05 s at the server."],
    )


def error_table(dnns: Mapping[str, AsyncTimes], workers: int) -> Table:
    """Return mean and largest errors of all models."""

    def cell(found: Sequence[float]) -> str:
        return f"{percent(fmean(found))} ({percent(max(found))})"

    rows = [
        (
            name,
            links,
            *(cell(errors(model, times, workers, links)) for model in MODELS.values()),
            cell(calibrated_errors(times, workers, links)),
        )
        for name, times in dnns.items()
        for links in LINKS
    ]
    return Table(columns=("DNN", "links", *(f"{name}, mean (max)" for name in (*MODELS, "calibrated"))), rows=rows)


def spread(shares: Sequence[float]) -> str:
    """Return the least and the largest share."""
    return f"{percent(min(shares))} to {percent(max(shares))}"


def figure_10(small: bool) -> Row:
    """Compare the models on CPUs."""
    most = 3 if small else 10
    means = {links: [fmean(errors(hybrid, times, most, links)) for times in CPU.values()] for links in LINKS}
    ours = [fmean(calibrated_errors(times, most, links)) for times in CPU.values() for links in LINKS]
    return Row(
        title="throughput of four DNNs on CPUs",
        statements=[
            Statement(
                says="Our model achieves mean error within 10 % of measurements.",
                verdict=verdict(*(each <= CLOSE for links in LINKS for each in means[links])),
                found="; ".join(f"links {links}: {spread(means[links])}" for links in LINKS)
                + f"; the product's own model, after it has seen 2 workers: {spread(ours)}.",
            )
        ],
        tables=[error_table(CPU, most)],
        assumptions=[ASSUMED_TIMES, SIMULATED],
    )


TABLE_2 = {"3 CONV, batch 8": (8, 5), "3 CONV, batch 16": (13, 4), "3 CONV, batch 32": (14, 8), "InceptionV3": (6, 4)}
"""Mean errors of exact and hybrid MVA in %."""
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9)


def table_2(small: bool) -> Row:
    """Compare exact and hybrid MVA, and thresholds of eq. 4."""
    most = 3 if small else 10
    means = {
        (links, name): [fmean(errors(model, times, most, links)) for model in (exact, hybrid)]
        for links in LINKS
        for name, times in CPU.items()
    }
    by_threshold = {
        (links, begins): fmean(
            fmean(errors(partial(hybrid, begins=begins), times, most, links)) for times in CPU.values()
        )
        for links in LINKS
        for begins in THRESHOLDS
    }
    best = {links: min(THRESHOLDS, key=lambda begins: by_threshold[links, begins]) for links in LINKS}
    return Row(
        title="mean errors of exact and hybrid MVA",
        statements=[
            Statement(
                says="Throughput estimation based on hybrid MVA outperforms the estimation based on exact MVA.",
                verdict=verdict(*(mixed < ps for ps, mixed in means.values())),
                found="It does on links that are used in turn, which the paper's testbed was like. With regular times "
                "its threshold of 0.8 switches to sharing too early, on shared links too late.",
            ),
            Statement(
                says="For other environments, an appropriate form of g must be determined through preliminary "
                "profiling (eq. 4).",
                verdict=verdict(best["in turn"] > best["shared"]),
                found="Mean error by the threshold of eq. 4: "
                + "; ".join(
                    f"links {links}: "
                    + ", ".join(f"{percent(by_threshold[links, begins])} at {begins:g}" for begins in THRESHOLDS)
                    for links in LINKS
                )
                + ".",
            ),
        ],
        tables=[
            Table(
                columns=(
                    "DNN",
                    *(f"{name}, {links}" for links in LINKS for name in ("exact", "hybrid")),
                    "the paper's",
                ),
                rows=[
                    (
                        name,
                        *(percent(each) for links in LINKS for each in means[links, name]),
                        "{} %, {} %".format(*TABLE_2[name]),
                    )
                    for name in CPU
                ],
            )
        ],
        assumptions=[ASSUMED_TIMES, SIMULATED],
    )


def falls(values: Sequence[float]) -> bool:
    """Return whether a throughput falls anywhere."""
    return any(later < 0.995 * earlier for earlier, later in itertools.pairwise(values))


def faults(workers: int = 8) -> tuple[float, float]:
    """Return the share of an update on one link from which eq. 2 falls with more workers, and its largest excess."""
    shares = np.linspace(0.3, 1.0, 141)
    rest_s = (1.0 - shares) / 3.0
    found = printed(Network(delay_s=rest_s, up_s=shares, server_s=rest_s, down_s=rest_s), workers).T
    fall = shares[(np.diff(found, axis=1) < 0.0).any(axis=1)]
    return float(fall[0]), float((found * shares[:, None]).max() - 1.0)


def figure_11(small: bool) -> Row:
    """Compare the models on GPUs."""
    most = 3 if small else 7
    share, over = faults()
    resnet = printed(network(GPU["ResNet-152, GPU"]), most)
    some, (low, high) = GPU["InceptionV3, GPU"], (1, most - 1)
    ps, fcfs = exact(network(some), most), first_come(network(some), most)
    turns, shares = (truth(some, most, links) for links in LINKS)
    return Row(
        title="throughput of three DNNs on GPUs in the cloud",
        statements=[
            Statement(
                says="For InceptionV3 a PS networking model provides better predictions at high loads, while FCFS "
                "networking is more accurate at low loads.",
                verdict=verdict(
                    abs(fcfs[low] - turns[low]) < abs(ps[low] - turns[low]),
                    abs(ps[high] - shares[high]) < abs(fcfs[high] - shares[high]),
                ),
                found=f"2 workers, links in turn: {turns[low]:.3f}; FCFS {fcfs[low]:.3f}, PS {ps[low]:.3f}. {most} "
                f"workers, shared: {shares[high]:.3f}; FCFS {fcfs[high]:.3f}, PS {ps[high]:.3f}.",
            ),
            Statement(
                says="The non-monotonic trend of approximate MVA in Figure 11b is due to the error of this solution "
                "method: simulation of the queueing model indicates a monotonic increase.",
                verdict=verdict(
                    falls([float(each) for each in resnet]), not falls(truth(GPU["ResNet-152, GPU"], most, "in turn"))
                ),
                found="The simulated throughput never falls; eq. 2 as printed does where one link takes more than "
                f"{percent(share)} of an update, which these times do not, and reaches {percent(over)} more than the "
                "link carries. The product's form never does either.",
            ),
        ],
        tables=[error_table(GPU, most)],
        assumptions=[ASSUMED_TIMES, SIMULATED],
    )


UNEVEN = 4.0 / 6.0
"""Share of VGG16 on the largest of three servers, which holds 4 times as much as each of the others (§VII)."""
SERVERS = {"2 even": (2, 1.0 / 2), "3 even": (3, 1.0 / 3), "3, one 4x": (3, UNEVEN)}


def divided(times: AsyncTimes, servers: int, workers: int) -> list[float]:
    """Return X(1), …, X(workers) with all times at the servers divided by m, as the paper has it."""
    up_s, server_s, down_s = (each / servers for each in (times.up_s, times.server_s, times.down_s))
    return exact(Network(delay_s=times.compute_s, up_s=up_s, server_s=server_s, down_s=down_s), workers).tolist()


def by_shard(times: AsyncTimes, servers: int, share: float, workers: int) -> list[float]:
    """Return the low end of the product's band: the same model with a worker's own link and the largest shard."""
    held = AsyncTimes(compute_s=times.compute_s, up_s=times.up_s, server_s=share * times.server_s, down_s=times.down_s)
    profile = AsyncProfile(times=held, updates_per_iteration=1, servers=servers, largest_shard=share)
    return [float(each) for each in curve(profile, workers).low]


def figure_15(small: bool) -> Row:
    """Compare the models of several servers."""
    most = 3 if small else 7
    found = {
        (name, case): (divided(times, servers, most), by_shard(times, servers, share, most))
        for name, times in GPU.items()
        for case, (servers, share) in SERVERS.items()
    }
    higher = {key: paper[-1] / mine[-1] - 1.0 for key, (paper, mine) in found.items()}
    alone = [paper[0] / mine[0] - 1.0 for paper, mine in found.values()]
    vgg = [higher[name, "3, one 4x"] for name in GPU if name.startswith("VGG16")]
    even = [higher[name, "2 even"] for name in GPU if not name.startswith("VGG16")]
    return Row(
        title="several parameter servers",
        statements=[
            Statement(
                says="For VGG16 with m = 3 servers, of which one holds 4 times more parameters, our models severely "
                "overestimate the throughput.",
                verdict=verdict(*(each > 0.3 for each in vgg)),
                found=f"With {most} workers S/m is {spread(vgg)} above the model that counts the largest shard.",
            ),
            Statement(
                says="We observe encouraging results with m = 2 servers for InceptionV3 and ResNet-152.",
                verdict=verdict(*(each < 0.25 for each in even)),
                found=f"With {most} workers the two models differ by {spread(even)}: the servers' links are the "
                "bottleneck. A worker alone does not gain from a second server's link: S/m makes it "
                f"{spread(alone)} too fast.",
            ),
        ],
        tables=[
            Table(
                columns=("DNN", "servers", "X(1), S/m", "X(1), ours", f"X({most}), S/m", f"X({most}), ours"),
                rows=[
                    (name, case, *(f"{each:.3f}" for each in (paper[0], mine[0], paper[-1], mine[-1])))
                    for (name, case), (paper, mine) in found.items()
                ],
            )
        ],
        assumptions=[ASSUMED_TIMES, "An update waits for the server that holds most. Both models share their links."],
    )


PARTS = (
    figure_1,
    figure_3,
    figure_5,
    figure_7,
    figure_8,
    figure_9,
    figure_10,
    table_2,
    figure_11,
    figure_12,
    figure_13,
    figure_14,
    figure_15,
)

if __name__ == "__main__":
    show(PARTS, f"Figures and tables of the paper on asynchronous SGD; policies share {NODES} nodes.")
