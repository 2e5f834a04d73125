"""What replanning at SYNC is worth: `python -m tests.bench.bench_replan [SEEDS] [PROCESSES] [KIND|FACTOR …]`.

Each seed is a random job (8-32 trials, 2-4 stages, a deadline) and its faults: how fast each trial is, what every
iteration and start-up takes, what instances do. It runs twice, with and without replanning, with the same faults.
The profile knows how much times vary (of cold starts it knows nothing), and is right, or misses the mean time of
iterations by a factor. Prints figures, asserts none.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from rubberband.cloud.virtual import VirtualClock
from rubberband.errors import InfeasibleError
from rubberband.executor import (
    AttemptFaults,
    Command,
    Controller,
    Event,
    Gang,
    Job,
    Noise,
    Phase,
    Slot,
    StartTrial,
    VirtualBackend,
    bill_usd,
    drive,
)
from rubberband.executor.core.replanning import decide
from rubberband.spec.search import sha
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import PlanningConstraints
from rubberband.values.profile import FIXED, Profile, Spread
from tests.builders.first_sync import slower
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What varies, and by how much."""

    trial_cv: float = 0.0
    iteration_cv: float = 0.0
    startup_cv: float = 0.0
    delay_cv: float = 0.0
    cold_start: float = 0.0
    """Additional time of the first start on a worker, in usual start-ups."""
    with_metric: float = 0.0
    """Correlation of how slow a trial is with how good it is."""
    spot: bool = False
    short: bool = False
    """Iterations of a second or so and start-ups of 0.2 s, as on small data."""


KINDS = {
    "none": Kind(),
    "persistent": Kind(trial_cv=0.2),
    "larger wins": Kind(trial_cv=0.2, with_metric=0.8),
    "iteration": Kind(iteration_cv=0.3),
    "start-ups": Kind(startup_cv=0.5, cold_start=3.0),
    "crowded": Kind(iteration_cv=0.2, startup_cv=0.3, cold_start=13.5, short=True),
    "mixed": Kind(trial_cv=0.15, iteration_cv=0.2, startup_cv=0.3, delay_cv=0.3, cold_start=1.0),
    "spot": Kind(trial_cv=0.1, iteration_cv=0.1, spot=True),
}
SLOWDOWNS = (1.0, 0.8, 1.3)
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How one virtual run came out."""

    jct_s: float
    cost_usd: float
    in_time: bool
    changes: int
    predicted: float | None
    """The time that the first SYNC predicted over what came; None if the plan was changed later."""
    deciding_s: float
    decisions: int


class Weather(Noise):
    """The noise of a kind: cold starts, and metrics that go with speed, beside what a profile describes."""

    def __init__(self, kind: Kind, job: Job, *, seed: int, clock: VirtualClock) -> None:
        super().__init__(job.profile, job.offer, seed=seed, now=clock.now)
        self._kind, self._seed_of_merit = kind, seed
        self._warm: set[Slot] = set()
        self._gang: Gang = ()

    def starts_on(self, gang: Gang) -> None:
        """The attempt that is asked for next starts there."""
        self._gang = gang

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        """As profiled, and longer on a worker that has started none."""
        faults, is_cold = super().attempt(trial, attempt), not self._warm.issuperset(self._gang)
        self._warm.update(self._gang)
        return replace(faults, startup=faults.startup + self._kind.cold_start * is_cold)

    def merit(self, trial: int, iterations: int) -> float:
        """The metric of a trial: the larger, the better."""
        chance = random.Random(f"{self._seed_of_merit}/merit {trial}").gauss(0.0, 1.0)
        slowness = math.log(self.speed(trial)) / (self._kind.trial_cv or 1.0)
        correlation = self._kind.with_metric
        return iterations + correlation * slowness + math.sqrt(1.0 - correlation**2) * chance


class Machines(VirtualBackend):
    """A virtual backend that tells its weather where trials start."""

    weather: Weather

    def execute(self, command: Command) -> None:
        """As it does."""
        if isinstance(command, StartTrial):
            self.weather.starts_on(command.gang)
        super().execute(command)


def random_job(chance: random.Random, kind: Kind) -> Job:
    """A successive-halving job on 4-GPU instances and its optimal plan. Raises InfeasibleError if there is none."""
    single_s, efficiency = chance.uniform(5.0, 60.0), chance.uniform(0.6, 0.95)
    startup_s = chance.uniform(1.0, 5.0)
    if kind.short:
        single_s, startup_s = single_s / 20.0, 0.2
    profile = Profile(
        seconds_per_iteration={gpus: single_s / gpus**efficiency for gpus in (1, 2, 4, 8)},
        trial_startup_s=startup_s,
        trial_cv=kind.trial_cv,
        iteration_cv=kind.iteration_cv,
        startup_cv=kind.startup_cv,
    )
    offer = Offer(
        instance_type="p3.8xlarge",
        gpus=4,
        price_usd_per_hour=12.24,
        max_instances=chance.choice([4, 8, 16]),
        provision_delay_s=chance.uniform(0.0, 60.0),
        provision_spread=Spread(cv=kind.delay_cv),
        init_delay_s=chance.uniform(0.0, 30.0),
        init_spread=Spread(cv=kind.delay_cv),
    )
    if kind.spot:
        restart_s = offer.provision_delay_s + offer.init_delay_s + profile.trial_startup_s
        offer = replace(offer, spot=Spot(price_usd_per_hour=4.9, interruptions_per_hour=0.5, restart_s=restart_s))
    stages = sha(chance.choice([8, 16, 32]), chance.choice([2, 4]), chance.choice([30, 60]), chance.choice([2, 3, 4]))
    limits = PlanningConstraints(max_gpus_per_trial=8, confidence=CONFIDENCE)
    certain = replace(offer, provision_spread=FIXED, init_spread=FIXED, spot=None)
    steady = replace(profile, trial_cv=0.0, iteration_cv=0.0, startup_cv=0.0)
    shortest_s = plan(stages, steady, certain, limits, "optimal", "min_time").prediction.jct_s
    cheapest_s = plan(stages, steady, certain, limits).prediction.jct_s
    deadline_s = shortest_s + chance.uniform(0.0, 1.2) * max(cheapest_s - shortest_s, 0.3 * shortest_s)
    planned = plan(stages, profile, offer, replace(limits, deadline_s=deadline_s))
    return Job(
        name="replanned",
        stages=stages,
        plan=planned.plan,
        prediction=planned.prediction,
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        deadline_s=deadline_s,
        min_gpus_per_trial=1,
        max_gpus_per_trial=8,
        confidence=CONFIDENCE,
    )


def run(job: Job, kind: Kind, slowdown: float, seed: int) -> Run:
    """Drive `job` on a virtual clock, in the weather of the seed."""
    deciding_s: list[float] = []

    def time_decision(_event: Event, controller: Controller) -> None:
        if controller.state.phase is Phase.PLANNING:
            began_s = time.process_time()
            decide(controller.state, controller.state.now)
            deciding_s.append(time.process_time() - began_s)

    clock, controller = VirtualClock(0.0), Controller(job)
    true = replace(job, profile=slower(job.profile, slowdown))
    weather = Weather(kind, true, seed=seed, clock=clock)
    backend = Machines(
        job.name, job.offer, true.profile, metric=job.metric, metric_of=weather.merit, faults=weather, clock=clock
    )
    backend.weather = weather
    drive(controller, backend, MemoryJournal(), observers=[time_decision] if seed % 50 == 0 else [])
    state = controller.state
    ended_at = state.stages[-1].ended_at
    assert ended_at is not None
    assert job.deadline_s is not None
    later_changes = any(decision.changed for decision in state.decisions[1:])
    first = state.decisions[0] if state.decisions and not later_changes else None
    return Run(
        jct_s=ended_at - state.started_at,
        cost_usd=bill_usd(state, state.now),
        in_time=ended_at - state.started_at <= job.deadline_s + 1e-3,
        changes=sum(decision.changed for decision in state.decisions),
        predicted=None if first is None else first.jct_s / (ended_at - state.started_at),
        deciding_s=sum(deciding_s),
        decisions=len(deciding_s),
    )


def pair(name: str, slowdown: float, seed: int) -> tuple[Run, Run]:
    """The runs of a seed with and without replanning."""
    kind, chance = KINDS[name], random.Random(seed)
    while True:
        try:
            job = random_job(chance, kind)
        except InfeasibleError:
            continue
        return run(job, kind, slowdown, seed), run(replace(job, replan=False), kind, slowdown, seed)


def row(name: str, slowdown: float, pairs: Sequence[tuple[Run, Run]]) -> str:
    """One line of the table."""
    ratios = [replanned.cost_usd / fixed.cost_usd for replanned, fixed in pairs]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    total = sum(replanned.cost_usd for replanned, _ in pairs) / sum(fixed.cost_usd for _, fixed in pairs)
    in_time, in_time_fixed = (statistics.fmean(both[which].in_time for both in pairs) for which in (0, 1))
    changed = statistics.fmean(replanned.changes > 0 for replanned, _ in pairs)
    decisions = sum(replanned.decisions for replanned, _ in pairs)
    predicted = [replanned.predicted - 1.0 for replanned, _ in pairs if replanned.predicted is not None]
    deciding_ms = 1e3 * sum(replanned.deciding_s for replanned, _ in pairs) / max(1, decisions)
    return (
        f"{name:<12} {slowdown:>8.1f} {len(pairs):>6} {statistics.fmean(ratios):>8.3f} {error:>7.3f} {total:>7.3f} "
        f"{in_time:>8.3f} {in_time_fixed:>8.3f} {changed:>8.2f} "
        f"{statistics.fmean(predicted):>+9.1%} {statistics.fmean(map(abs, predicted)):>9.1%} {deciding_ms:>9.0f}"
    )


def main() -> None:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    kinds = [name for name in sys.argv[3:] if name in KINDS] or list(KINDS)
    slowdowns = [float(factor) for factor in sys.argv[3:] if factor not in KINDS] or SLOWDOWNS
    head = (
        "profile",
        "seeds",
        "ratio",
        "+-",
        "total",
        "in time",
        "fixed",
        "changed",
        "predicted",
        "off by",
        "decide ms",
    )
    widths = (8, 6, 8, 7, 7, 8, 8, 8, 9, 9, 9)
    print(f"{'noise':<12} " + " ".join(f"{name:>{width}}" for name, width in zip(head, widths, strict=True)))
    with ProcessPoolExecutor(processes) as pool:
        for slowdown in slowdowns:
            for name in kinds:
                pairs = list(pool.map(partial(pair, name, slowdown), range(count), chunksize=max(1, count // 20)))
                print(row(name, slowdown, pairs), flush=True)
    print("profile: factor of the true iterations over those profiled. ratio: cost with replanning over cost without,")
    print(f"mean over seeds, +- its standard error; total: of the sums. in time: share of runs; {CONFIDENCE} was told.")
    print("predicted: the time that the first SYNC predicts, over what comes, if no later one changes the plan: mean")
    print("deviation; off by: mean size of it. decide: CPU time of a decision.")


if __name__ == "__main__":
    main()
