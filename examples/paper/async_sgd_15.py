"""Figure 15 on asynchronous SGD: several parameter servers, of which one may hold more of the model than the others."""

from __future__ import annotations

import common
from async_sgd import network, percent
from async_sgd_10 import GPU
from common import COLOURS, Finding, Report, Table, line, verdict
from page import panels

from rubberband.planner.queueing import Network, curve, exact
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes

UNEVEN = 4.0 / 6.0
"""Share of VGG16 on the largest of three servers, which holds 4 times as much as each of the others (§7)."""
CASES = {
    "2 even": (2, None),
    "3 even": (3, None),
    "3, one 4x": (3, UNEVEN),
}


def divided(times: AsyncTimes, servers: int, workers: int) -> list[float]:
    """Return X(1), …, X(workers) with all times at the servers divided by m, as the paper has it."""
    one = network(times)
    found = exact(
        Network(
            delay_s=one.delay_s, up_s=one.up_s / servers, server_s=one.server_s / servers, down_s=one.down_s / servers
        ),
        workers,
    )
    return [float(each) for each in found]


def ours(times: AsyncTimes, servers: int, largest_shard: float | None, workers: int) -> list[float]:
    """Return the low end of the planner's band, which is the same model with a worker's own link and shard."""
    share = 1.0 / servers if largest_shard is None else largest_shard
    measured = AsyncTimes(
        compute_s=times.compute_s, up_s=times.up_s, server_s=share * times.server_s, down_s=times.down_s
    )
    profile = AsyncProfile(times=measured, updates_per_iteration=1, servers=servers, largest_shard=largest_shard)
    return [float(each) for each in curve(profile, workers).low]


def compute(workers: int = 7) -> Report:
    """Compute both models for 1 to `workers` workers."""
    found = {
        (name, case): (divided(times, servers, workers), ours(times, servers, shard, workers))
        for name, times in GPU.items()
        for case, (servers, shard) in CASES.items()
    }
    rows = [
        (
            name,
            case,
            *(f"{each:.3f}" for each in (paper[0], mine[0], paper[-1], mine[-1])),
            percent(paper[-1] / mine[-1] - 1.0),
        )
        for (name, case), (paper, mine) in found.items()
    ]
    counts = list(range(1, workers + 1))
    vgg = {case: found["VGG16, GPU", case] for case in CASES}
    drawn = [
        part
        for axis, case in enumerate(CASES, start=1)
        for part in (
            line("S/m", counts, vgg[case][0], COLOURS[0], axis),
            line("own link, largest shard", counts, vgg[case][1], COLOURS[1], axis),
        )
    ]
    columns = (
        "DNN",
        "servers",
        "X(1), S/m",
        "X(1), ours",
        f"X({workers}), S/m",
        f"X({workers}), ours",
        "S/m is higher by",
    )
    return Report(
        title="Figure 15 (asynchronous SGD): updates per second with several parameter servers",
        tables=[
            Table(
                title="Exact MVA with S/m, and with a worker's own link and the largest shard",
                columns=columns,
                rows=rows,
            )
        ],
        figure=panels(drawn, [f"VGG16, {case}" for case in CASES], x="workers", y="updates per second"),
        findings=findings(found, workers),
        assumptions=[
            "Times as for Figure 11. Both models are with processor sharing, so that they differ in the servers only.",
            "All servers of an update work at the same time, and the update waits for the one that holds most.",
        ],
    )


def findings(found: dict[tuple[str, str], tuple[list[float], list[float]]], workers: int) -> list[Finding]:
    """Return the statements of §7."""
    higher = {key: paper[-1] / mine[-1] - 1.0 for key, (paper, mine) in found.items()}
    alone = {key: paper[0] / mine[0] - 1.0 for key, (paper, mine) in found.items()}
    vgg = [higher[name, "3, one 4x"] for name in GPU if name.startswith("VGG16")]
    even = [higher[name, "2 even"] for name in GPU if not name.startswith("VGG16")]
    return [
        Finding(
            says="For VGG16 with m = 3 servers, of which one holds 4 times more parameters, our models severely "
            "overestimate the throughput.",
            verdict=verdict(*(each > 0.3 for each in vgg)),
            found=f"With {workers} workers S/m is {percent(min(vgg))} to {percent(max(vgg))} above the model that "
            "counts the largest shard.",
        ),
        Finding(
            says="We observe encouraging results with m = 2 servers for InceptionV3 and ResNet-152.",
            verdict=verdict(*(each < 0.25 for each in even)),
            found=f"With {workers} workers the two models differ by {percent(min(even))} to {percent(max(even))}: "
            "the servers' links are the bottleneck, and S/m has them right. A worker alone does not gain from a second "
            f"server's link: S/m makes it {percent(min(alone.values()))} to {percent(max(alone.values()))} too fast.",
        ),
    ]


if __name__ == "__main__":
    common.show(compute)
