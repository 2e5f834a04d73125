"""Told against seen: how often virtual runs keep the limits that plans promise to keep, for each kind of noise.

`python -m tests.bench.bench_calibration [JOBS] [KIND ...] [--runs N] [--best N]` from the checkout: JOBS random jobs of
each kind (2,000 by default), a quarter at each confidence; every plan is carried out on the virtual clock, without
replanning, `--runs` times. Prints the reliability table with 95 % intervals (bootstrapped over jobs). With `--best`, so
many jobs of each kind are also planned at other confidences, and every plan found is judged by samples that chose none
of them: the price of caution is what the plan costs over the cheapest one that keeps the limits. With `--keep`, jobs
are written to a file as they end, and those in it are not run again: a table of many jobs can be interrupted, resumed,
and printed of the first JOBS. Asserts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from rubberband.cloud.virtual import VirtualClock
from rubberband.errors import InfeasibleError
from rubberband.executor import Controller, Job, Noise, VirtualBackend, bill_usd, drive
from rubberband.planner.exact.solver import Box
from rubberband.planner.noise.sampling import Draws
from rubberband.spec.search import sha
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Stage
from rubberband.values.profile import Profile, Spread, measured
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan

CONFIDENCES = (0.80, 0.90, 0.95, 0.99)
_HEAVY = (0.6, 0.65, 0.7, 0.7, 0.75, 0.8, 0.8, 0.9, 1.3, 2.8)
"""Delays of which few are very long."""
_OTHERS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995)
_RESAMPLES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job within its limits, noise included."""

    stages: tuple[Stage, ...]
    profile: Profile
    offer: Offer
    limits: PlanningConstraints


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Predictions of a job's plan, and what came of it."""

    confidence: float
    predicted: float
    """P(deadline and budget kept)."""
    seen: float
    """The share of runs that kept both."""
    cost_ratio: float
    """Mean bill of the runs over the predicted cost."""
    caution: float | None
    """Cost over that of the best plan known; None where that was not looked for."""


def _persistent(source: random.Random, task: Task) -> Task:
    return replace(task, profile=replace(task.profile, trial_cv=source.uniform(0.05, 0.4)))


def _iterations(source: random.Random, task: Task) -> Task:
    return replace(task, profile=replace(task.profile, iteration_cv=source.uniform(0.1, 0.6)))


def _starts(source: random.Random, task: Task) -> Task:
    profile = replace(task.profile, trial_startup_s=source.uniform(5.0, 30.0), startup_cv=source.uniform(0.2, 0.8))
    spreads = [Spread(cv=source.uniform(0.1, 0.5)) for _ in range(2)]
    return replace(
        task, profile=profile, offer=replace(task.offer, provision_spread=spreads[0], init_spread=spreads[1])
    )


def _heavy_tails(source: random.Random, task: Task) -> Task:
    _, spread = measured(_HEAVY)
    profile = replace(task.profile, trial_cv=source.uniform(0.3, 0.7), iteration_cv=source.uniform(0.5, 1.2))
    return replace(
        task,
        profile=replace(profile, startup_cv=1.0),
        offer=replace(task.offer, provision_spread=spread, init_spread=spread),
    )


def _spot(source: random.Random, task: Task) -> Task:
    offer = task.offer
    restart_s = offer.provision_delay_s + offer.init_delay_s + task.profile.trial_startup_s
    spot = Spot(
        price_usd_per_hour=source.uniform(0.2, 0.6) * offer.price_usd_per_hour,
        interruptions_per_hour=source.uniform(0.02, 0.3),
        restart_s=restart_s,
    )
    return replace(task, offer=replace(offer, spot=spot))


def _mixed(source: random.Random, task: Task) -> Task:
    for vary in (_persistent, _iterations, _starts):
        task = vary(source, task)
    return _spot(source, task) if source.random() < 0.3 else task


KINDS: dict[str, Callable[[random.Random, Task], Task]] = {
    "persistent": _persistent,
    "iterations": _iterations,
    "start-ups": _starts,
    "heavy tails": _heavy_tails,
    "spot": _spot,
    "mixed": _mixed,
}


def random_task(source: random.Random, kind: str, confidence: float) -> Task:
    """Return a job of 4-32 trials whose limits bind: a deadline not far beyond the shortest time, at times a budget."""
    gpus, single_s = source.choice([1, 2, 4, 8]), source.uniform(5.0, 120.0)
    efficiency = source.uniform(0.5, 1.0)
    task = Task(
        stages=sha(
            source.randint(4, 32), source.choice([1, 2, 4]), source.choice([27, 50, 81]), source.choice([2, 3, 4])
        ),
        profile=Profile(
            seconds_per_iteration={count: single_s / count**efficiency for count in (1, 2, 4, 8)},
            trial_startup_s=source.choice([0.0, 2.0, 10.0]),
        ),
        offer=Offer(
            instance_type="random",
            gpus=gpus,
            price_usd_per_hour=3.06 * gpus,
            max_instances=source.randint(max(1, 8 // gpus), 64 // gpus),
            provision_delay_s=source.choice([5.0, 15.0, 60.0]),
            init_delay_s=source.choice([5.0, 15.0, 60.0]),
            minimum_billed_s=source.choice([0.0, 60.0]),
            head_price_usd_per_hour=source.choice([0.0, 0.2]),
        ),
        limits=PlanningConstraints(max_gpus_per_trial=8, confidence=confidence),
    )
    task = KINDS[kind](source, task)
    certain = replace(task.profile, trial_cv=0.0, iteration_cv=0.0, startup_cv=0.0)
    on_demand = replace(task.offer, spot=None)
    shortest_s = plan(
        task.stages, certain, _without_noise(on_demand), task.limits, objective="min_time"
    ).prediction.jct_s
    return replace(task, limits=replace(task.limits, deadline_s=source.uniform(1.2, 2.5) * shortest_s))


def _without_noise(offer: Offer) -> Offer:
    return replace(offer, provision_spread=Spread(), init_spread=Spread())


def with_budget(source: random.Random, task: Task, planned: Planned) -> Task:
    """Return the task with a budget that binds, at times."""
    cost = planned.prediction.cost
    if source.random() < 0.7 or cost is None:
        return task
    return replace(task, limits=replace(task.limits, max_cost_usd=source.uniform(0.97, 1.1) * cost.p95))


def solved(source: random.Random, kind: str, confidence: float) -> tuple[Task, Planned]:
    """Return the next job that has a plan, and its plan."""
    while True:
        task = random_task(source, kind, confidence)
        try:
            found = _plan(task)
            limited = with_budget(source, task, found)
            return limited, found if limited == task else _plan(limited)
        except InfeasibleError:
            continue


def _plan(task: Task, seed: int = 0) -> Planned:
    return plan(task.stages, task.profile, task.offer, task.limits, seed=seed)


def job_of(task: Task, planned: Planned, *, replanned: bool = False) -> Job:
    """Return the job that carries the plan out. The budget is not enforced: whether it holds is what is asked."""
    return Job(
        name="calibration",
        stages=task.stages,
        plan=planned.plan,
        prediction=planned.prediction,
        offer=task.offer,
        profile=task.profile,
        metric="score",
        mode="max",
        deadline_s=task.limits.deadline_s,
        confidence=task.limits.confidence,
        min_gpus_per_trial=task.limits.min_gpus_per_trial,
        max_gpus_per_trial=task.limits.max_gpus_per_trial,
        replan=replanned,
    )


def run(job: Job, seed: object) -> tuple[float, float]:
    """Return the seconds and US dollars that a virtual run takes in which chance decides who survives."""
    merit = random.Random(f"{seed}/merit")
    merits = [merit.random() for _ in range(job.stages[0].trials)]
    clock = VirtualClock()
    backend = VirtualBackend(
        job.name,
        job.offer,
        job.profile,
        metric=job.metric,
        metric_of=lambda trial, iterations: merits[trial],
        clock=clock,
        faults=Noise(job.profile, job.offer, seed=seed, now=clock.now),
    )
    controller = Controller(job)
    drive(controller, backend, MemoryJournal())
    state = controller.state
    ended_at = state.stages[-1].ended_at
    assert ended_at is not None, f"the run ended as {state.phase}"
    return ended_at - state.started_at, bill_usd(state, state.now)


def box_of(task: Task) -> Box:
    """Return the limits as the solver has them."""
    deadline_s, max_cost_usd = task.limits.deadline_s, task.limits.max_cost_usd
    return Box(
        time_s=np.inf if deadline_s is None else deadline_s, cost_usd=np.inf if max_cost_usd is None else max_cost_usd
    )


def caution(task: Task, chosen: Planned) -> float:
    """Return what the plan costs over the cheapest plan known that keeps the limits, by samples that chose neither."""
    plans: dict[Plan, None] = {chosen.plan: None}
    for confidence in _OTHERS:
        try:
            plans[_plan(replace(task, limits=replace(task.limits, confidence=confidence)), seed=17).plan] = None
        except InfeasibleError:
            break
    draws = Draws(task.stages, task.profile, task.offer, seed=4242)
    costs = {}
    for candidate in plans:
        samples = draws.evaluate(candidate, draws.most_chunks)
        if (
            candidate == chosen.plan
            or box_of(task).odds(samples.jct_s, samples.cost_usd).p_both >= task.limits.confidence
        ):
            costs[candidate] = float(samples.cost_usd.mean())
    return costs[chosen.plan] / min(costs.values()) - 1.0


def outcome(kind: str, number: int, runs: int, with_best: bool) -> Outcome:
    """Return what became of job `number` of a kind."""
    source = random.Random(f"{kind}/{number}")
    confidence = CONFIDENCES[number % len(CONFIDENCES)]
    task, planned = solved(source, kind, confidence)
    box, job = box_of(task), job_of(task, planned)
    ends = [run(job, f"{kind}/{number}/{again}") for again in range(runs)]
    assert planned.odds is not None
    return Outcome(
        confidence=confidence,
        predicted=planned.odds.p_both,
        seen=statistics.fmean(bool(box.holds(np.array(jct_s), np.array(usd))) for jct_s, usd in ends),
        cost_ratio=statistics.fmean(usd for _, usd in ends) / planned.prediction.cost_usd,
        caution=caution(task, planned) if with_best else None,
    )


def interval(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return a 95 % interval of the share seen: jobs resampled."""
    seen = np.array([each.seen for each in outcomes])
    means = np.random.default_rng(0).choice(seen, (_RESAMPLES, len(seen))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return low, high


def rows(kind: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the table of a kind."""
    lines = []
    for confidence in CONFIDENCES:
        some = [each for each in outcomes if each.confidence == confidence]
        if not some:
            continue
        predicted, seen = (
            statistics.fmean(each.predicted for each in some),
            statistics.fmean(each.seen for each in some),
        )
        low, high = interval(some)
        cautions = [each.caution for each in some if each.caution is not None]
        costs = statistics.fmean(each.cost_ratio for each in some)
        dear = f"{statistics.fmean(cautions):>+8.2%} {max(cautions):>+8.2%}" if cautions else ""
        lines.append(
            f"{kind:<12} {confidence:>10.2f} {len(some):>6} {predicted:>7.4f} {seen:>7.4f}  {low:.4f}-{high:.4f} "
            f"{100.0 * (seen - predicted):>+7.2f} {costs:>8.4f} {dear}"
        )
    return lines


def kept(file: Path | None) -> dict[tuple[str, int], Outcome]:
    """Return the outcomes in the file of `--keep`, by kind and number."""
    if file is None or not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {(line["kind"], line["number"]): Outcome(**line["outcome"]) for line in lines}


def outcomes_of(kind: str, asked: argparse.Namespace, pool: ProcessPoolExecutor) -> list[Outcome]:
    """Run the jobs of a kind that are not in the file yet; return all."""
    found = {number: each for (of, number), each in kept(asked.keep).items() if of == kind and number < asked.jobs}
    left = [number for number in range(asked.jobs) if number not in found]
    best = [number < asked.best for number in left]
    results = pool.map(outcome, itertools.repeat(kind), left, itertools.repeat(asked.runs), best, chunksize=8)
    for number, each in zip(left, results, strict=True):
        found[number] = each
        if asked.keep is not None:
            with asked.keep.open("a") as file:
                print(json.dumps({"kind": kind, "number": number, "outcome": asdict(each)}), file=file)
    return list(found.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="?", type=int, default=2000)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--runs", type=int, default=4, help="virtual runs of each job")
    parser.add_argument("--best", type=int, default=0, metavar="N", help="jobs of each kind that are planned anew")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="jobs that have ended, of the same version")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    print(
        f"{'noise':<12} {'confidence':>10} {'jobs':>6} {'planned':>7} {'seen':>7}  {'95 % interval':<13} {'points':>7} "
        f"{'USD/predicted':>8} {'caution':>8} {'worst':>8}",
        flush=True,
    )
    with ProcessPoolExecutor(asked.processes) as pool:
        for kind in asked.kinds or KINDS:
            print("\n".join(rows(kind, outcomes_of(kind, asked, pool))), flush=True)


if __name__ == "__main__":
    main()
