"""Table 3 of Pollux (OSDI '21, §5.4.2) on the simulator: TPE tunes ResNet-18, four trials at a time on 16 GPUs.

The sampler is the product's own. It proposes a trial whenever another one ends, so that each policy has a search of its
own. The accuracy is made up; times are assumed, or measured ones of the folder that the user gives.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from local_runs import ran
from measured_models import HOUR_S, SMALL, model
from rows import Found, Statement, Table, verdict

from rubberband import Experiment, Result
from rubberband.executor.sampling import Known, propose
from rubberband.planner.goodput import gain, step_s, sync_s
from rubberband.planner.sharing import Capacity, make_policy
from rubberband.planner.sharing.jobs import Application, Epochs, TracedJob
from rubberband.planner.sharing.simulation import Outcome, SimulatedJob, simulate
from rubberband.pools.process import bring_up, take_down
from rubberband.spec.pool import PoolFile, on_pool
from rubberband.spec.search import Search
from rubberband.values.adaptive import Throughput

TRIALS, AT_ONCE, GANG, PER_GPU = 100, 4, 4, 128
PRINTED = {"Baseline": ("95.5±0.3", "34", "14"), "Pollux": ("95.4±0.2", "25", "10")}
NEAR = 0.1
"""Largest difference of a share that was saved from the printed one."""
ALIKE = 0.5
"""Largest difference of accuracies that are alike, in points: the sum of the printed spreads."""
SEARCH: Mapping[str, Any] = {
    "space": {
        "lr": {"type": "loguniform", "lower": 1e-3, "upper": 1.0},
        "annealing": {"type": "loguniform", "lower": 0.02, "upper": 0.5},
        "momentum": {"type": "uniform", "lower": 0.5, "upper": 0.99},
        "weight_decay": {"type": "loguniform", "lower": 1e-5, "upper": 1e-2},
        "width": {"type": "quniform", "lower": 0.75, "upper": 1.25, "q": 0.125},
    },
    "scheduler": {"type": "none", "num_samples": TRIALS, "max_t": 100},
    "metric": "accuracy",
    "mode": "max",
}
BEST = {"lr": 0.1, "annealing": 0.1, "weight_decay": 5e-4}


def accuracy(config: Mapping[str, Any], seed: int, trial: int) -> float:
    """Return the made-up accuracy in percent, whatever the batch: best at `BEST`, momentum .9 and width 1."""
    decades = {name: math.log10(config[name] / best) for name, best in BEST.items()}
    lost = 0.9 * decades["lr"] ** 2 + 0.8 * decades["annealing"] ** 2 + 0.5 * decades["weight_decay"] ** 2
    lost += 8.0 * (config["momentum"] - 0.9) ** 2 + 6.0 * (config["width"] - 1.0) ** 2
    return 95.4 - lost + float(np.random.default_rng([seed, trial]).normal(scale=0.15))


class World(NamedTuple):
    """A pool, and the model that trains on it."""

    capacity: Capacity
    application: Callable[[float], Application]
    """That of a width."""


M0, EPOCHS, EPOCH_STEPS = 128, 25, 4 * 50_000 / 128
"""Smallest batch, and a training of 100 epochs in parts of four, with one noise scale each."""
SLOWER = 10.0
"""Chosen so that the baseline takes about the 34 minutes that are printed."""
STEP = Throughput(
    alpha_grad_s=0.010 * SLOWER,
    beta_grad_s=55e-6 * SLOWER,
    alpha_local_s=0.002 * SLOWER,
    beta_local_s=0.0001 * SLOWER,
    alpha_node_s=0.004 * SLOWER,
    beta_node_s=0.0002 * SLOWER,
    gamma=1.5,
)
"""The plain model: a step of a network of width 1."""


@cache
def plain_application(width: float) -> Application:
    """Return a network whose computation and gradients grow with the square of its width."""
    grown = ("beta_grad_s", "alpha_local_s", "beta_local_s", "alpha_node_s", "beta_node_s")
    step = replace(STEP, **{name: width**2 * getattr(STEP, name) for name in grown})
    sizes = [32 * 2**power for power in range(6)]
    times = {
        place: [(m, float(step_s(step, *_size(place), m, 0)), float(sync_s(step, *_size(place)))) for m in sizes]
        for place in [(gpus,) for gpus in range(1, 9)] + [(a, b) for b in range(1, 9) for a in range(1, b + 1)]
    }
    epochs, steps, trained = np.arange(EPOCHS), np.full(EPOCHS, EPOCH_STEPS), {}
    # the noise scale grows with the epochs, and fourfold once the learning rate is annealed
    scales = 400.0 * (1 + epochs) * np.where(epochs >= 0.6 * EPOCHS, 4.0, 1.0)
    for batch in (M0 * 2**power for power in range(6)):
        iterations = np.cumsum(steps / gain(scales, M0, batch))
        trained[batch] = Epochs(
            progress=np.cumsum(steps), iteration=iterations, grad_sqr=np.ones(EPOCHS), grad_var=scales / M0
        )
    return Application(
        name="resnet18",
        max_epochs=EPOCHS,
        epochs=trained,
        placements={place: np.array(rows) for place, rows in times.items()},
        steps=np.array([(*_size(place), *row) for place, rows in times.items() for row in rows]),
        min_per_gpu=sizes[0],
        max_per_gpu=sizes[-1],
        gpus_per_instance=8,
    )


def _size(place: tuple[int, ...]) -> tuple[int, int]:
    return len(place), sum(place)


PLAIN = World(capacity=Capacity(instances=2, gpus_per_instance=8), application=plain_application)


def measured(data: Path) -> World:
    """Return a pool of as many GPUs, of the instances that were measured."""
    found = model(data, SMALL)

    @cache
    def application(width: float) -> Application:
        scale = np.array([1.0, width**2, width**2])
        placements = {place: rows * scale for place, rows in found.placements.items()}
        return replace(found, placements=placements, steps=found.steps * np.array([1.0, 1.0, *scale]))

    gpus = found.gpus_per_instance
    capacity = Capacity(instances=AT_ONCE * GANG // gpus, gpus_per_instance=gpus)
    return World(capacity=capacity, application=application)


class Arm(NamedTuple):
    """A way to share the pool."""

    policy: str
    adapts: bool
    """Whether the batch does."""
    gang: int | None = None
    """GPUs of a trial that never change; None: they adapt."""


ARMS = {
    "Baseline": Arm(policy="fifo", adapts=False, gang=GANG),
    "batches adapt": Arm(policy="fifo", adapts=True, gang=GANG),
    "Pollux": Arm(policy="fitness", adapts=True),
}
"""Row of the table -> its arm; the second one shows what GPUs that adapt add."""


@dataclass(slots=True, kw_only=True)
class Tuned:
    """A search in which a trial that ends makes the sampler propose the next one."""

    arm: Arm
    world: World
    trials: int
    seed: int
    configs: list[Mapping[str, Any]] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)

    def run(self) -> Outcome:
        first = [self._next(0.0) for _ in range(min(AT_ONCE, self.trials))]
        return simulate(first, self.world.capacity, make_policy(self.arm.policy), after=self._after)

    def _after(self, ended: SimulatedJob) -> list[TracedJob]:
        trial, at_s = int(ended.name), ended.done_at
        assert at_s is not None, "it has ended"
        self.accuracies[trial] = accuracy(self.configs[trial], self.seed, trial)
        return [self._next(at_s)] if len(self.configs) < self.trials else []

    def _next(self, at_s: float) -> TracedJob:
        search = Search(**SEARCH, sampler={"type": "optuna", "sampler": "tpe", "seed": self.seed})
        known = [
            Known(configuration=config, values=(self.accuracies[trial],) if trial in self.accuracies else None)
            for trial, config in enumerate(self.configs)
        ]
        self.configs += propose(search, known, len(known), 1)
        arm, application = self.arm, self.world.application(self.configs[-1]["width"])
        return TracedJob(
            name=str(len(known)),
            submitted_at=at_s,
            application=application,
            elasticity="adaptive" if arm.adapts else "rigid",
            target_gpus=GANG,
            target_batch=None if arm.adapts else min(GANG * PER_GPU, application.limits.max),
            most_gpus=arm.gang,
            first_gpus=arm.gang or 1,
        )


def top_5(accuracies: Iterable[float]) -> tuple[float, float]:
    """Return the mean of the five best accuracies in percent, and their standard deviation."""
    best = sorted(accuracies)[-5:]
    return float(np.mean(best)), float(np.std(best))


MADE_UP = (
    "The accuracy is made up, with noise, and does not depend on the batch: it only compares searches in which trials "
    "end in another order."
)
SIMULATED = (
    "Under Pollux a trial begins on one GPU, has at most twice those that it was timed on, and stops for 30 s at each "
    "change, as in the paper's own simulator. Decisions are made each minute."
)
ASSUMED = (
    "A pass takes 10 ms and 55 us for each image, an all-reduce 2 ms within and 4 ms between instances, as of an A100; "
    f"all is {SLOWER:g} times slower, so that the baseline takes about the printed 34 minutes. The noise scale grows "
    "from 400 to 40,000. Computation and gradients grow with the square of the width."
)
MEASURED = (
    f"ResNet-18 was measured on T4 GPUs in instances of four. {PER_GPU} images keep a T4 busy: larger batches save "
    "only communication. A step is longer by the square of the width."
)


def table_3(small: bool) -> Found:
    """TPE with four trials at once on the paper's pool, with assumed times."""
    yield from _compared(PLAIN, ("Baseline", "Pollux") if small else tuple(ARMS), small)
    yield ASSUMED


def table_3_measured(folder: Path, small: bool) -> Found:
    """TPE with four trials at once on measured GPUs."""
    yield from _compared(measured(folder), ("Baseline", "Pollux"), small)
    yield MEASURED


def _compared(world: World, names: Sequence[str], small: bool) -> Found:
    trials = 14 if small else TRIALS
    tuned = {name: Tuned(arm=ARMS[name], world=world, trials=trials, seed=0) for name in names}
    outcomes = {name: each.run() for name, each in tuned.items()}
    top = {name: top_5(each.accuracies.values()) for name, each in tuned.items()}
    jct_s = {name: float(np.mean(outcome.jcts_s)) for name, outcome in outcomes.items()}
    makespan_s = {name: outcome.makespan_s for name, outcome in outcomes.items()}
    yield from statements({name: mean for name, (mean, _) in top.items()}, jct_s, makespan_s)
    yield Table(
        ("policy", "top 5", "JCT (min)", "makespan (h)", "moves", "printed", "JCT", "makespan"),
        [
            (
                name,
                "{:.2f}±{:.2f}".format(*top[name]),
                jct_s[name] / 60.0,
                makespan_s[name] / HOUR_S,
                float(np.mean([job.moves for job in outcome.jobs])),
                *PRINTED.get(name, (None, None, None)),
            )
            for name, outcome in outcomes.items()
        ],
        digits=1,
    )
    yield f"A simulated search has {trials} trials."
    yield from (MADE_UP, SIMULATED)


def statements(
    accuracy: Mapping[str, float], jct_s: Mapping[str, float], makespan_s: Mapping[str, float]
) -> Iterator[Statement]:
    """Compare the two rows of Table 3, whose means are given, with what is printed."""
    apart = abs(accuracy["Pollux"] - accuracy["Baseline"])
    sooner, quicker = (1.0 - each["Pollux"] / each["Baseline"] for each in (makespan_s, jct_s))
    yield Statement(
        "Similar accuracy values are achieved (95.4±0.2 and 95.5±0.3).",
        verdict(apart <= ALIKE),
        f"The means of the five best trials are {apart:.2f} points apart.",
    )
    yield Statement(
        "Pollux completes HPO 30% faster (10 against 14 hours).",
        verdict(sooner > 0.05, abs(sooner - 0.3) <= NEAR),
        f"It takes {1.0 - sooner:.2f} times as long as the baseline.",
    )
    yield Statement(
        "The average JCT is 25 instead of 34 minutes (26 % less).",
        verdict(quicker > 0.05, abs(quicker - 0.26) <= NEAR),
        f"It is {1.0 - quicker:.2f} times the baseline's.",
    )


SPACE = {
    "lr": {"type": "loguniform", "lower": 1e-3, "upper": 0.3},
    "momentum": {"type": "uniform", "lower": 0.0, "upper": 0.95},
    "weight_decay": {"type": "loguniform", "lower": 1e-5, "upper": 1e-2},
    "width": {"type": "choice", "values": [16, 32, 64]},
}


def searched(home: Path, pool: str, policy: str, trials: int) -> Result:
    """Run a search on a pool: four trials at once, two GPUs of one instance each."""
    words = {
        "name": policy,
        "entrypoint": "sleeping_torch:SleepingTrial",
        "search": {
            "space": SPACE,
            "scheduler": {"type": "none", "num_samples": trials, "max_t": 5},
            "sampler": {"type": "optuna", "sampler": "tpe", "seed": 7},
            "metric": "accuracy",
            "mode": "max",
        },
        "constraints": {"objective": "min_time", "max_cost": 5},
        "resources": {"pool": pool, "max_instances": 2, "gpus_per_trial": {"min": 2, "max": 2}},
        "batch": {"policy": policy},
        "profile": {"seconds_per_iteration": {2: 1.0}},
    }
    return ran(Experiment(**on_pool(words, home)), home)


def both(trials: int) -> dict[str, Result]:
    """Run the search with fixed and with adaptive batches at the same time, each on half of one pool.

    So what else the machine does slows both.
    """
    policies = {"Baseline": "fixed", "Pollux": "goodput"}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        file = PoolFile(name="tuning", instances=4, gpus_per_instance=4, price_per_hour=1)
        pool = bring_up(file, home)
        try:
            with ProcessPoolExecutor(len(policies), get_context("spawn")) as processes:
                runs = [processes.submit(searched, home, file.name, each, trials) for each in policies.values()]
            return {name: run.result() for name, run in zip(policies, runs, strict=True)}
        finally:
            take_down(pool)


def held_s(result: Result, trial: int | None = None) -> float:
    """Return the seconds from the start of a trial's processes to its end, or from those of the first to the last."""
    uses = [use for use in result.busy if trial is None or use.trial == trial]
    return max(use.end_s for use in uses) - min(use.start_s for use in uses)


def table_3_runs(small: bool) -> Found:
    """Real searches by TPE with four trials at once, on a pool of local instances."""
    found = both(4 if small else 14)
    tops = {name: top_5(100.0 * each.metrics["accuracy"] for each in of.trials) for name, of in found.items()}
    jct_s = {name: float(np.mean([held_s(of, each.trial) for each in of.trials])) for name, of in found.items()}
    makespans_s = {name: held_s(result) for name, result in found.items()}
    yield from statements({name: mean for name, (mean, _) in tops.items()}, jct_s, makespans_s)
    yield Table(
        ("policy", "top 5", "JCT (s)", "makespan (s)", "largest batch"),
        [
            (
                name,
                "{:.2f}±{:.2f}".format(*tops[name]),
                jct_s[name],
                makespans_s[name],
                max((use.batch_size for trial in result.trials for use in trial.batches), default=64),
            )
            for name, result in found.items()
        ],
        digits=1,
    )
    yield (
        "A real trial trains a small network with two workers of one instance, and sleeps 40 ms in each pass and .2 ms "
        "for each sample, as a GPU would compute: two CPUs cannot show that a GPU is idle. Gradients and their noise "
        "are real. Both searches run at the same time. Figures differ from run to run."
    )
    yield (
        "Only batches adapt in the real runs: a search gives all of its trials gangs of one size. GPUs adapt between "
        "experiments that share the pool of a service."
    )
