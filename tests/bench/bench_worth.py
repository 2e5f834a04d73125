"""Measure the calibration of the worth of the rest, and what `search.stop.worth` saves, by kept curves.

    python -m tests.bench.bench_worth [--curves DIR] [--searches 20] [--first-seed 1000] [--schedulers sha …]
        [--families digits …] [--worths 0.001 …]

The curves are real ones of small networks, but for those of examples/scaling (tests/bench/real_curves.py). The seeds
are not those by which the model's constants were chosen (0 to 15). Each search runs on the virtual clock under several
schedulers, whole and with several values of `worth`. The first table compares the chances that the journal has with
what then happened, in ten bands. The second one has the money that was not spent, and what that changed in the best
metric.
Curves take about ten minutes to train on one core; `--curves` keeps them.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from rubberband.executor import State, VirtualBackend, best_trial
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.history import SearchEnd
from rubberband.planner import Chain, Curve, rest_of
from rubberband.values.worth import RestWorth
from tests.bench.real_curves import FAMILIES, Floats, searched
from tests.builders.sampled_runs import SampledRun, an_experiment

SHARES = {"digits": 3, "scaling": 3, "digits loss": 3, "blobs": 3}
"""Searches of a family among 20; two of the others."""
SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "sha": {"type": "sha", "num_samples": 27, "max_t": 81, "reduction_factor": 3},
    "sha, halves": {"type": "sha", "num_samples": 27, "max_t": 81, "reduction_factor": 2},
    "hyperband": {"type": "hyperband", "num_samples": 27, "max_t": 27, "reduction_factor": 3},
    "asha": {"type": "asha", "num_samples": 27, "max_t": 81, "reduction_factor": 3},
    "none": {"type": "none", "num_samples": 27, "max_t": 27},
}
WORTHS = (0.0001, 0.001, 0.003, 0.01)


def run(curves: Floats, mode: str, scheduler: Mapping[str, Any], worth: float | None) -> State:
    """Return the end of a search on the virtual clock, at 12 USD an hour for instances of four GPUs."""
    stop = {} if worth is None else {"stop": {"worth": f"{worth!r} per USD"}}
    experiment = an_experiment(
        0, scheduler=scheduler, sampler={"type": "random"}, mode=mode, constraints={"max_cost": 1000}, **stop
    )
    made = SampledRun(experiment)
    made.backend = VirtualBackend(
        made.job.name,
        made.job.offer,
        made.job.profile,
        metric=made.job.metric,
        metric_of=lambda trial, done: float(curves[trial, done - 1]),
    )
    return made.drive().controller.state


def result(state: State) -> tuple[float, float]:
    """Return the best metric, and the bill."""
    best = best_trial(state)
    value = None if best is None else best.metric(state.job.metric)
    assert value is not None
    return value, bill_usd(state, state.now)


def kept(family: str, seed: int, folder: Path | None) -> tuple[str, Floats]:
    """Return the mode and the curves of a search; they are trained unless the folder has them."""
    mode, _ = FAMILIES[family]
    path = None if folder is None else folder / f"{family}-{seed}.npy"
    if path is not None and path.exists():
        return mode, np.load(path)
    curves = searched(family, seed).curves
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, curves)
    return mode, curves


def bands(told: Sequence[tuple[float, bool]]) -> None:
    """Print the first table, and its Brier score and expected calibration error."""
    chances, seen = np.array([chance for chance, _ in told]), np.array([is_so for _, is_so in told], dtype=float)
    band = np.minimum((chances * 10.0).astype(int), 9)
    print(f"{'told':>10} {'times':>6} {'mean told':>10} {'seen':>6}")
    error = 0.0
    for at in range(10):
        if (here := band == at).any():
            mean, share = chances[here].mean(), seen[here].mean()
            error += here.mean() * abs(mean - share)
            print(f"{f'{10 * at}-{10 * at + 10} %':>10} {here.sum():6} {mean:10.2f} {share:6.2f}")
    brier, constant = ((chances - seen) ** 2).mean(), seen.mean() * (1.0 - seen.mean())
    print(f"Brier score {brier:.3f} (the base rate alone: {constant:.3f}); calibration error {error:.3f}\n")


def speed() -> None:
    """Print how long the model takes for 100 and 10,000 trials of 100 reports, a third of which go on."""
    source = np.random.default_rng(0)
    for trials in (100, 10_000):
        values = source.normal(0.0, 0.02, (trials, 100)) + 1.0 - 1.0 / np.arange(1, 101)
        curves = [Curve(iterations=range(1, 101), values=row) for row in values.tolist()]
        rounds = ((trials // 3, 300), (trials // 9, 900), (trials // 27, 2700))
        taken_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            rest_of(curves, [Chain(curves=tuple(range(trials // 3)), new=trials // 10, rounds=rounds)], 1.0)
            taken_s.append(time.perf_counter() - began_s)
        print(f"{trials} trials of 100 reports: {1000.0 * median(taken_s):.0f} ms")


def main() -> None:
    """Print both tables, and the time that the model takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--searches", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--schedulers", nargs="+", default=list(SCHEDULERS))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--worths", nargs="*", type=float, default=WORTHS)
    asked = parser.parse_args()
    names = [name for name in asked.families for _ in range(SHARES.get(name, 2))]
    told: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    saved: dict[tuple[str, float], list[tuple[float, float, float]]] = defaultdict(list)
    for number in range(asked.searches):
        family = names[number % len(names)]
        mode, curves = kept(family, asked.first_seed + number, asked.curves)
        better = 1.0 if mode == "max" else -1.0
        for name in asked.schedulers:
            state = run(curves, mode, SCHEDULERS[name], None)
            final, whole_usd = result(state)
            for worth in state.history.of(RestWorth):
                gain = better * (final - worth.best)
                told[name] += [(chance, gain > size) for size, chance in worth.chances]
            for least in asked.worths:
                cut = run(curves, mode, SCHEDULERS[name], least)
                value, usd = result(cut)
                ended = bool(cut.history.of(SearchEnd))
                saved[name, least].append((ended, 1.0 - usd / whole_usd, better * (value - final)))
        print(f"{number + 1}/{asked.searches} {family}", flush=True)
    for name in asked.schedulers:
        print(f"\n{name}: the chance that the best improves (by more than the sizes told), told and seen")
        bands(told[name])
    print("all schedulers")
    bands([pair for pairs in told.values() for pair in pairs])
    print(
        "worth in units of the metric per USD; the metric's change by the end: above 0 is better than the whole search"
    )
    heads = f"{'metric: mean':>13} {'median':>8} {'worse/better':>13}"
    print(f"{'scheduler':12} {'worth':>7} {'ended':>6} {'USD saved':>10} {heads}")
    for (name, least), rows in saved.items():
        changes = [change for *_, change in rows]
        worse, gained = sum(change < 0 for change in changes), sum(change > 0 for change in changes)
        ended, share = sum(has_ended for has_ended, *_ in rows), 100 * fmean(share for _, share, _ in rows)
        print(
            f"{name:12} {least:7} {ended:6.0f} {share:8.0f} % {fmean(changes):13.4f} {median(changes):8.4f} "
            f"{f'{worse}/{gained}':>13}"
        )
    speed()


if __name__ == "__main__":
    main()
