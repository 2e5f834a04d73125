"""Figures 10 and 11 and Table II on asynchronous SGD: errors of the models for larger DNNs, on CPUs and on GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

import common
import numpy as np
from async_sgd import LINKS, Links, Throughputs, lines, percent, printed, simulation_assumption, throughputs
from common import Finding, Report, Table, verdict
from page import panels

from rubberband.planner.queueing import Network
from rubberband.values.asynchronous import AsyncTimes

SECONDS_PER_MB = 0.009
"""On 1 Gbit/s: 72 ms for the 8 MB of §3.2."""
SERVER_S_PER_MB = 0.018 / 8


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
MODELS = ("exact", "FCFS", "hybrid", "assumed")
PRINTED = {
    "3 CONV, batch 8": ("8 %", "5 %"),
    "3 CONV, batch 16": ("13 %", "4 %"),
    "3 CONV, batch 32": ("14 %", "8 %"),
    "InceptionV3": ("6 %", "4 %"),
}
"""Mean errors of exact and hybrid MVA (Table II)."""


def findings(found: Mapping[str, Throughputs]) -> list[Finding]:
    """Return the statements of §5.1."""
    cpu = [found[name] for name in CPU]
    mean = {
        (model, links): [fmean(each.error(model, links)) for each in cpu]
        for model in ("exact", "hybrid")
        for links in LINKS
    }
    narrow = {links: [fmean(each.error(f"calibrated ({links})", links)) for each in found.values()] for links in LINKS}
    resnet = found["ResNet-152, GPU"]
    falls = {name: _falls(each.models["FCFS as printed"]) for name, each in found.items()}
    inception = found["InceptionV3, GPU"]
    share, over = faults()
    return [
        Finding(
            says="Throughput estimation based on hybrid MVA outperforms the estimation based on exact MVA (Table II).",
            verdict=verdict(
                *(h < e for links in LINKS for e, h in zip(mean["exact", links], mean["hybrid", links], strict=True))
            ),
            found="; ".join(
                f"links {links}: mean errors of exact {_range(mean['exact', links])}, of hybrid "
                f"{_range(mean['hybrid', links])}"
                for links in LINKS
            )
            + ". It does on links that are used in turn, which the paper's testbed was like; with regular times its "
            "threshold of 0.8 switches to sharing too early.",
        ),
        Finding(
            says="Our model achieves mean error within 10 % of measurements.",
            verdict=verdict(*(each <= 0.1 for links in LINKS for each in mean["hybrid", links])),
            found="; ".join(f"links {links}: {_range(mean['hybrid', links])}" for links in LINKS)
            + "; with one observation at 2 workers, the planner's own model over all eight DNNs: "
            + "; ".join(f"{_range(narrow[links])} ({links})" for links in LINKS)
            + ".",
        ),
        Finding(
            says="The non-monotonic trend of approximate MVA in Figure 11b is due to the error of this solution "
            "method: simulation of the queueing model indicates a monotonic increase.",
            verdict=verdict(falls["ResNet-152, GPU"], not _falls(resnet.simulated["in turn"])),
            found=f"The simulated throughput never falls. Eq. 2 as printed falls for {sum(falls.values())} of "
            f"{len(falls)} DNNs with the times assumed here, as both links take equally long. It falls where one link "
            f"takes more than {percent(share)} of an update, and reaches {percent(over)} more than the link carries. "
            "The planner's form never exceeds the link, and never falls.",
        ),
        Finding(
            says="For InceptionV3 on GPUs, PS links predict better at high loads, while FCFS links are more accurate "
            "at low loads.",
            verdict=verdict(
                _closer(inception, "FCFS", "exact", "in turn", 1), _closer(inception, "exact", "FCFS", "shared", -1)
            ),
            found=f"2 workers, links in turn: {inception.simulated['in turn'][1]:.3f}, FCFS "
            f"{inception.models['FCFS'][1]:.3f}, PS {inception.models['exact'][1]:.3f}. "
            f"{len(inception.models['FCFS'])} workers, shared: {inception.simulated['shared'][-1]:.3f}, FCFS "
            f"{inception.models['FCFS'][-1]:.3f}, PS {inception.models['exact'][-1]:.3f}.",
        ),
    ]


def faults(workers: int = 8) -> tuple[float, float]:
    """Return the share of an update on one link from which eq. 2 falls with more workers, and its largest excess."""
    shares = np.linspace(0.3, 1.0, 141)
    rest_s = (1.0 - shares) / 3.0
    found = np.array(
        [
            printed(Network(delay_s=rest, up_s=up, server_s=rest, down_s=rest), workers)
            for up, rest in zip(shares, rest_s, strict=True)
        ]
    )
    falls = shares[(np.diff(found, axis=1) < 0.0).any(axis=1)]
    return float(falls[0]), float((found * shares[:, None]).max() - 1.0)


def _falls(values: Sequence[float]) -> bool:
    return any(later < 0.995 * earlier for earlier, later in itertools.pairwise(values))


def _closer(found: Throughputs, one: str, other: str, links: Links, at: int) -> bool:
    truth = found.simulated[links][at]
    return abs(found.models[one][at] - truth) < abs(found.models[other][at] - truth)


def _range(shares: Sequence[float]) -> str:
    return f"{percent(min(shares))} to {percent(max(shares))}"


def compute(cpu_workers: int = 10, gpu_workers: int = 7) -> Report:
    """Compute the errors of all models."""
    found = {name: throughputs(times, cpu_workers) for name, times in CPU.items()}
    found |= {name: throughputs(times, gpu_workers) for name, times in GPU.items()}
    columns = (
        "DNN",
        "links",
        *(f"{model}, mean (max)" for model in (*MODELS, "calibrated")),
        "Table II: exact, hybrid",
    )
    rows = [
        (
            name,
            links,
            *(_errors(each.error(model, links)) for model in (*MODELS, f"calibrated ({links})")),
            ", ".join(PRINTED.get(name, ("-", "-"))),
        )
        for name, each in found.items()
        for links in LINKS
    ]
    drawn = [part for axis, name in enumerate((*CPU,), start=1) for part in lines(found[name], MODELS[:3], axis)]
    return Report(
        title="Figures 10 and 11, Table II (asynchronous SGD): errors of the throughput for 2 and more workers",
        tables=[Table(title="Errors against simulated servers", columns=columns, rows=rows)],
        figure=panels(drawn, list(CPU), x="workers", y="updates per second"),
        findings=findings(found),
        assumptions=[
            "The paper prints no times of these DNNs. Transfers: 9 ms per MB on 1 Gbit/s (72 ms for 8 MB), with 3 and "
            "5 Gbit/s for ResNet-152 and VGG16. Server: 2.25 ms per MB (18 ms for 8 MB), half of it in the cloud. "
            "Compute: 0.4, 0.8 and 1.6 s for the batches of 8, 16 and 32 (more than the transfers take, as the paper "
            "says), 0.8 s for InceptionV3 on CPUs (less), and 1.1, 1.6, 0.9 and 1.8 s on a K80.",
            "'assumed' is what the planner takes without an observation; 'calibrated' has seen 2 workers.",
            simulation_assumption(),
        ],
    )


def _errors(errors: Sequence[float]) -> str:
    return f"{percent(fmean(errors))} ({percent(max(errors))})"


if __name__ == "__main__":
    common.show(compute)
