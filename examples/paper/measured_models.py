"""Figures 1 to 3 and 9 of Pollux (OSDI '21): the measured models alone, each without other jobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rows import Found, Statement, Table, percent, series, verdict

from rubberband.planner.goodput import efficiency, step_s
from rubberband.planner.goodput.fit import fit, relative_errors
from rubberband.planner.goodput.planning import LOWER, UPPER
from rubberband.planner.sharing import Capacity
from rubberband.planner.sharing.jobs import Application
from rubberband.pools.simulating import read_application
from rubberband.values.adaptive import BatchPoint

POOL = Capacity(instances=16, gpus_per_instance=4)
HOUR_S = 3600.0
SMALL, LARGEST = "cifar10", "imagenet"
TINY = 1e-9


@cache
def models(folder: Path) -> dict[str, Application]:
    """Return the measured models of the folder, which all parts share."""
    found = {each.name: read_application(each) for each in sorted(folder.glob("traces/*")) if each.is_dir()}
    if not found:
        raise SystemExit(f"{folder} has no traces/MODEL; give the folder of the public data")
    return found


def model(folder: Path, name: str) -> Application:
    """Return a model, or any where the data do not have it."""
    return models(folder).get(name) or next(iter(models(folder).values()))


def rate(app: Application, gpus: int, batch_size: int) -> float:
    """Return the measured samples per second; 0 where GPUs would have fewer samples than were measured."""
    per_gpu, _ = app.passes(batch_size, gpus)
    return batch_size / float(app.fixed_s(batch_size, gpus)[-1]) if per_gpu >= app.min_per_gpu else 0.0


def noise_scale(app: Application, batch_size: int, epoch: int) -> float:
    """Return phi, as measured with this batch."""
    sqr, var = app.statistics(batch_size, epoch)
    return app.limits.initial * var / sqr


def worth(app: Application, batch_size: int, epoch: int, noted: int | None = None) -> float:
    """Return the EFFICIENCY of a batch, by phi as measured with it or with another one."""
    return float(efficiency(noise_scale(app, noted or batch_size, epoch), app.limits.initial, batch_size))


class Choice(NamedTuple):
    """A batch, ordered by what it is chosen for."""

    wanted: float
    goodput: float
    efficiency: float
    batch_size: int


def best(app: Application, gpus: int, epoch: int, batches: Sequence[int], by_goodput: bool) -> Choice:
    """Return the batch with the highest measured goodput, or the highest throughput."""
    found = []
    for batch_size in batches:
        speed, share = rate(app, gpus, batch_size), worth(app, batch_size, epoch)
        found.append(Choice(speed * share if by_goodput else speed, max(speed * share, TINY), share, batch_size))
    return max(found)


def figure_1(folder: Path, small: bool) -> Found:
    """Trade-offs between the batch, the GPUs and the stage of training (ResNet-18 on CIFAR-10)."""
    app = model(folder, SMALL)
    sizes, gpus = sorted(app.epochs), [each for each in (1, 2, 4, 8, 16) if each <= app.most_gpus]
    few, many = sizes[(len(sizes) - 1) // 2], sizes[-max(1, len(sizes) // 3)]
    speeds = {each: [rate(app, count, each) for count in gpus] for each in (few, many)}
    grown = {each: of[-1] / of[0] for each, of in speeds.items()}
    yield Statement(
        "System throughput can be increased by increasing the batch size; job scalability depends on it (1a).",
        verdict(speeds[many][-1] > speeds[few][-1], grown[many] > grown[few]),
        f"On {gpus[-1]} GPUs a batch of {few} is {grown[few]:.1f} times as fast as on one, and one of {many} "
        f"{grown[many]:.1f} times.",
    )
    batches = np.unique(np.geomspace(sizes[0], sizes[-1], 33).astype(int)).tolist()
    early, late = app.max_epochs // 8, app.max_epochs - 1 - app.max_epochs // 8
    chosen = {epoch: [best(app, count, epoch, batches, True).batch_size for count in gpus] for epoch in (early, late)}
    yield Statement(
        "The most efficient batch size depends on the allocated resources and stage of training (1b).",
        verdict(chosen[early][-1] > chosen[early][0], chosen[late][-1] > chosen[early][-1]),
        f"Early {chosen[early][0]} on one GPU and {chosen[early][-1]} on {gpus[-1]}; late {chosen[late][0]} and "
        f"{chosen[late][-1]}.",
    )
    middle = sizes[len(sizes) // 2]
    tolerated = [0.25 * noise_scale(app, middle, each) + 1.25 * sizes[0] for each in range(app.max_epochs)]
    yield Statement(
        "A later stage can potentially tolerate 10x or larger batch sizes without degrading statistical efficiency.",
        verdict(max(tolerated[early:]) >= 10.0 * tolerated[early]),
        f"An efficiency of .8 allows {tolerated[early]:.0f} after an eighth of the training, and at most "
        f"{max(tolerated[early:]):.0f} later.",
    )
    columns = {f"samples/s, {each}": of for each, of in speeds.items()}
    yield series("GPUs", gpus, {**columns, "best early": chosen[early], "best late": chosen[late]}, 0)


def metrics(folder: Path, app: Application, batch_size: int) -> list[float]:
    read = np.genfromtxt(folder / "traces" / app.name / f"validation-{batch_size}.csv", delimiter=",", names=True)
    return [float(each) for each in read["metric"][: app.max_epochs]]


PLATEAU, WIDER, FLAT = 0.01, {"deepspeech2": 0.04}, ("bert", "ncf")
"""What is alike, and the paper's exceptions: one is less alike, and the efficiency of two does not rise."""
ACCURATE = 0.1
"""Mean relative error up to which a prediction is accurate: that of the throughput model."""


def figure_2(folder: Path, small: bool) -> Found:
    """Statistical efficiency of all models, over the training and by the batch."""
    rows, plateaus, rises, errors, shares = [], [], [], [], {}
    for name, app in models(folder).items():
        sizes = sorted(app.epochs)
        three = sizes[0], sizes[len(sizes) // 2], sizes[-1]
        curves = [metrics(folder, app, each) for each in three]
        pick = max if curves[0][-1] >= curves[0][0] else min
        tops = [pick(each) for each in curves]
        apart = max(abs(each / tops[0] - 1.0) for each in tops)
        plateaus.append(apart <= WIDER.get(name, PLATEAU) + 5e-4)
        early, last = app.max_epochs // 8, max(1, app.max_epochs // 8)
        shares[name] = [worth(app, three[1], each) for each in range(app.max_epochs)]
        first, later = shares[name][early], float(np.mean(shares[name][-last:]))
        rises.append((later > first + 0.05) is (name not in FLAT))
        actual, said = ([worth(app, each, early, by) for each in sizes] for by in (None, three[1]))
        errors.append(float(np.mean(np.abs(np.divide(said, actual) - 1.0))))
        rows.append((name, *map(str, three), *tops, percent(apart), first, later, percent(errors[-1])))
    yield Statement(
        "They achieve similar best values across the different batch sizes (±1% relative difference for all tasks "
        "except DeepSpeech2 at ±4%).",
        verdict(*plateaus),
        f"{sum(plateaus)} of {len(plateaus)} models do, with the smallest, a middle and the largest batch.",
    )
    yield Statement(
        "Larger batch sizes have lower EFFICIENCY early in training, but close the gap later on, the exceptions being "
        "BERT and recommendation.",
        verdict(*rises),
        f"As said for {sum(rises)} of {len(rises)} models: with the middle batch it rises by more than .05, or not.",
    )
    annealed = shares.get(LARGEST) or next(iter(shares.values()))
    begins = len(annealed) // 8
    steps = np.diff(annealed[begins:])
    jumps = sorted(int(each) + begins + 1 for each in np.argsort(-steps)[:2])
    yield Statement(
        "ImageNet, which uses step-based learning rate annealing, experiences sharp increases whenever the learning "
        "rate is annealed.",
        verdict(float(np.sort(steps)[-2:].mean()) > 10.0 * float(np.median(np.abs(steps)))),
        f"After the first eighth, the two sharpest rises are after epochs {jumps[0]} and {jumps[-1]}, by at most "
        f"{percent(float(steps.max()))}; the median change is {percent(float(np.median(np.abs(steps))))}.",
    )
    yield Statement(
        "phi measured using batch size M can be used to predict the EFFICIENCY at a different batch size M'.",
        verdict(*(each <= ACCURATE for each in errors)),
        f"By phi of the middle batch after an eighth of the training, off by {percent(min(errors))} to "
        f"{percent(max(errors))} in the mean over all batches; up to {percent(ACCURATE)} is called accurate.",
    )
    columns = ("", "M0", "middle", "largest", "metric", "middle", "largest", "apart", "early", "late", "error")
    yield Table(columns, rows, 3)


def step_points(app: Application) -> list[BatchPoint]:
    """Return what was measured as what a trial would have seen."""
    return [
        BatchPoint(instances=int(n), gpus=int(k), per_gpu=int(m), accumulation=0, step_s=float(seconds))
        for n, k, m, seconds, _ in app.steps
    ]


SENSITIVE, BENEFIT = 1.25, 1.05
"""Times as long as on one instance takes a step of four GPUs on four that is sensitive to co-location."""


def figure_3(folder: Path, small: bool) -> Found:
    """Fit of the throughput model to measured placements and batches."""
    rows, sensitive, accumulates = [], [], {}
    for name, app in models(folder).items():
        points = step_points(app)
        at = np.random.default_rng(0).permutation(len(points))
        half = [points[each] for each in at[: len(points) // 2]]
        rest = [points[each] for each in at[len(points) // 2 :]]
        fitted = fit(half)
        errors = [float(relative_errors(found, on).mean()) for found, on in ((fitted, rest), (fit(points), points))]
        middle = int(np.median(app.steps[:, 2]))
        apart = app.step_s((1,) * 4, middle)[0] / app.step_s((4,), middle)[0]
        sensitive.append((apart >= SENSITIVE) is (name != LARGEST))
        full, (most, passes) = min(app.max_per_gpu, app.limits.max // 16), app.passes(app.limits.max, 16)
        times = [float(step_s(fitted, 4, 16, *each)) for each in ((full, 0), (most, passes))]
        accumulates[name] = most * (passes + 1) / times[1] / (full / times[0])
        rows.append((name, str(len(points)), *map(percent, errors), apart, accumulates[name]))
    worst = max(float(row[2].rstrip(" %")) for row in rows)
    yield Statement(
        "Across all DL tasks, the average error of the fitted model was at most 10%.",
        verdict(*(float(each.rstrip(" %")) <= 10.0 for row in rows for each in row[2:4])),
        f"At most {worst:.1f} % on the half of the placements and batches that was not fitted.",
    )
    yield Statement(
        "All models we measured except ImageNet exhibited high sensitivity to inter-node synchronization.",
        verdict(*sensitive),
        f"As said for {sum(sensitive)} of {len(sensitive)}: four GPUs on four instances take {SENSITIVE} times as "
        "long as on one, or not.",
    )
    gains = {name: accumulates.get(name, 0.0) for name in ("yolov3", "bert")}
    yield Statement(
        "YOLOv3 and BERT benefit from using gradient accumulation to increase their total batch sizes.",
        verdict(*(each >= BENEFIT for each in gains.values())),
        "On 16 GPUs the largest batch has "
        f"{', '.join(f'{each:.2f} times the throughput of a full memory ({name})' for name, each in gains.items())}.",
    )
    yield Table(("", "points", "error, unseen", "error, all", "4 instances / 1", "largest / full"), rows)


class Training(NamedTuple):
    """One training that scales its instances (Figure 9)."""

    hours: float
    instance_hours: float
    instances: Sequence[int]
    """In every epoch."""
    efficiencies: Sequence[float]


def scaled(app: Application, by_goodput: bool) -> Training:
    """Train with the instances that scale well enough: by goodput, or by throughput alone (Or et al.)."""
    sizes, batches = range(1, POOL.instances + 1), sorted(app.epochs)
    instances, hours, held, counts, efficiencies = 1, 0.0, 0.0, [], []
    for epoch in range(app.max_epochs):
        chosen = {each: best(app, each * POOL.gpus_per_instance, epoch, batches, by_goodput) for each in sizes}
        single = best(app, 1, epoch, batches, by_goodput).wanted
        share = {each: of.wanted / (each * POOL.gpus_per_instance) / single for each, of in chosen.items()}
        if share[instances] > UPPER:
            instances = max([instances, *(each for each in sizes if share[each] >= LOWER)])
        work = float(app.work[epoch + 1] - app.work[epoch]) * app.limits.initial
        hours += work / chosen[instances].goodput / HOUR_S
        held += instances * work / chosen[instances].goodput / HOUR_S
        counts.append(instances)
        efficiencies.append(chosen[instances].efficiency)
    return Training(hours=hours, instance_hours=held, instances=counts, efficiencies=efficiencies)


def figure_9(folder: Path, small: bool) -> Found:
    """Scaling the instances of one ImageNet training, by goodput and by throughput."""
    app = model(folder, LARGEST)
    trained = {name: scaled(app, name == "goodput") for name in ("goodput", "throughput")}
    ours, theirs = trained.values()
    cheaper = 100.0 * (1.0 - ours.instance_hours / theirs.instance_hours)
    longer = 100.0 * (ours.hours / theirs.hours - 1.0)
    yield Statement(
        "Compared to Or et al.'s throughput-based auto-scaling, Pollux trains ImageNet with 25% cheaper cost, with "
        "only a 6% longer completion time.",
        verdict(cheaper > 10.0, longer < 15.0),
        f"{cheaper:.0f} % cheaper and {longer:.0f} % longer.",
    )
    yield Statement(
        "Throughput-based autoscaling quickly scales out, and remains constant thereafter. Pollux starts with a small "
        "number of nodes, and gradually increases it (9a).",
        verdict(len(set(theirs.instances)) == 1, ours.instances[0] < theirs.instances[0] < 2 * ours.instances[-1]),
        f"By throughput {theirs.instances[0]} to {theirs.instances[-1]} instances, by goodput {ours.instances[0]} to "
        f"{ours.instances[-1]}, in {len(set(ours.instances))} sizes.",
    )
    lows = [min(each.efficiencies) for each in (ours, theirs)]
    yield Statement(
        "Pollux maintains a high statistical efficiency throughout training (9b).",
        verdict(lows[0] > lows[1], lows[0] >= 0.5),
        f"At least {lows[0]:.2f}, by throughput {lows[1]:.2f}.",
    )
    yield Table(
        ("rule", "hours", "instance hours", "first epoch", "last epoch", "mean efficiency"),
        [
            (
                name,
                each.hours,
                each.instance_hours,
                *(str(each.instances[at]) for at in (0, -1)),
                float(np.mean(each.efficiencies)),
            )
            for name, each in trained.items()
        ],
    )
    yield "Figure 9 chooses among the measured batches by the measured step times; an instance is 4 GPUs."
