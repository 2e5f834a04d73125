"""The planner against the paper's Algorithms 1 and 2, taken literally: time and cost, side by side in one run.

`planning` and `saving` are sections of `python tests/bench/bench_planner.py`. The literal algorithms are as printed in
the paper (a DAG for each candidate, sorted for each sample), with equal plans evaluated once, which the paper does not
say. "sorted once" is what remains if the DAG is sorted once for all samples, which it does not say either.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from rubberband.planner.dag import Sorted, build_dag, sampled, simulate
from rubberband.planner.exact.model import predict
from rubberband.planner.search import greedy
from rubberband.values.plan import Plan
from tests.bench.jobs import BenchJob, cost_usd, paper_job, random_job

LONGEST_S = 120.0
"""Rows that would take longer are extrapolated from some of their evaluations."""
PART = 10

Predict = Callable[[Plan], tuple[float, float]]


def planning() -> None:
    """Planning time for SHA(64,4,508,2) in 20 minutes against the literal algorithms with 20 and 1,000 samples."""
    sys.stdout.write("\nSHA(64,4,508,2), 20 min, p3.8xlarge: Algorithms 1 and 2 literally, against `optimal`\n")
    sys.stdout.write(f"{'speed':>6} {'k <=':>4}  {'planner':<38} {'CPU s':>10} {'ratio':>9}  {'USD':>8}\n")
    for speed_up, max_instances in ((27.5, 32), (27.5, 64), (20.0, 32), (20.0, 64), (15.0, 32)):
        _planning_rows(paper_job(speed_up, max_instances), speed_up)


def _planning_rows(job: BenchJob, speed_up: float) -> None:
    ours_s = min(_seconds(partial(cost_usd, job, "optimal")) for _ in range(15))
    _row(job, speed_up, "optimal (best of 15)", ours_s, 1.0, cost_usd(job, "optimal"))
    asked: list[Plan] = []
    literal_s = min(_literal_s(job, _algorithm_1(job, 20), asked) for _ in range(3))
    num_dags, found_usd = len(set(asked)), _greedy_usd(job)
    _row(job, speed_up, f"literal, 20 samples ({num_dags} DAGs)", literal_s, literal_s / ours_s, found_usd)
    once_s = min(_literal_s(job, _sorted_once(job, 20), []) for _ in range(3))
    _row(job, speed_up, "  sorted once, 20 samples", once_s, once_s / ours_s, found_usd)
    seconds, how = _thousand_s(job, literal_s, asked[:num_dags])
    _row(job, speed_up, f"literal, 1,000 samples ({how})", seconds, seconds / ours_s, found_usd)


def _row(job: BenchJob, speed_up: float, what: str, seconds: float, ratio: float, usd: float | None) -> None:
    cost = "none" if usd is None else f"{usd:.3f}"
    sys.stdout.write(
        f"{speed_up:>5}x {job.offer.max_instances:>4}  {what:<38} {seconds:>10.4f} {ratio:>8,.0f}x  {cost:>8}\n"
    )
    sys.stdout.flush()


def _seconds(call: Callable[[], object]) -> float:
    """CPU seconds: on a machine that is shared, the long rows would wait and the best of short ones not."""
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def _algorithm_1(job: BenchJob, num_samples: int) -> Predict:
    def evaluate(candidate: Plan) -> tuple[float, float]:
        result = simulate(job.stages, candidate, job.profile, job.offer, num_samples=num_samples)
        return float(result.jct_s.mean()), float(result.cost_usd.mean())

    return evaluate


def _sorted_once(job: BenchJob, num_samples: int) -> Predict:
    def evaluate(candidate: Plan) -> tuple[float, float]:
        graph = Sorted.of(build_dag(job.stages, candidate, job.profile, job.offer))
        source = random.Random(0)
        result = sampled([graph.sample(source) for _ in range(num_samples)], candidate, job.offer)
        return float(result.jct_s.mean()), float(result.cost_usd.mean())

    return evaluate


def _literal_s(job: BenchJob, evaluate: Predict, asked: list[Plan]) -> float:
    """Seconds of Algorithm 2; the plans that it evaluated go to `asked`."""

    def watched(candidate: Plan) -> tuple[float, float]:
        asked.append(candidate)
        return evaluate(candidate)

    return _seconds(lambda: greedy(job.stages, job.profile, job.offer, job.limits, evaluate=watched))


def _thousand_s(job: BenchJob, twenty_s: float, asked: list[Plan]) -> tuple[float, str]:
    """Seconds with 1,000 samples, and how they are known."""
    if twenty_s * 50 <= LONGEST_S:
        return _literal_s(job, _algorithm_1(job, 1000), []), "measured"
    part = asked[:: max(1, len(asked) // PART)]
    few_s = min(_evaluating_s(job, 20, part) for _ in range(3))
    return twenty_s * _evaluating_s(job, 1000, part) / few_s, f"from {len(part)} of them"


def _evaluating_s(job: BenchJob, num_samples: int, plans: Sequence[Plan]) -> float:
    evaluate = _algorithm_1(job, num_samples)
    return sum(_seconds(partial(evaluate, candidate)) for candidate in plans)


def _greedy_usd(job: BenchJob) -> float | None:
    """What the literal greedy's plan costs; where nothing varies Algorithm 1 is the model (property-tested)."""

    def evaluate(candidate: Plan) -> tuple[float, float]:
        prediction = predict(job.stages, candidate, job.profile, job.offer)
        return prediction.jct_s, prediction.cost_usd

    found = greedy(job.stages, job.profile, job.offer, job.limits, evaluate=evaluate)
    return None if found is None else evaluate(found)[1]


def saving(num_jobs: int = 200) -> None:
    """What `optimal` saves on random deterministic jobs against the other policies."""
    source = random.Random(1)
    jobs = [random_job(source) for _ in range(num_jobs)]
    optimal = [cost_usd(job, "optimal") for job in jobs]
    sys.stdout.write(f"\n{num_jobs} random deterministic jobs: what `optimal` saves (of the other plan's cost)\n")
    sys.stdout.write(
        f"{'against':<16} {'mean':>7} {'median':>7} {'max':>7} {'equal':>6} {'dearer':>7} {'no plan':>8}\n"
    )
    others: dict[str, list[float | None]] = {
        "literal greedy": [_greedy_usd(job) for job in jobs],
        "static": [cost_usd(job, "static") for job in jobs],
        "naive_elastic": [cost_usd(job, "naive_elastic") for job in jobs],
    }
    for name, costs in others.items():
        _saving_row(name, optimal, costs)


def _saving_row(name: str, optimal: list[float | None], costs: list[float | None]) -> None:
    both = [(ours, theirs) for ours, theirs in zip(optimal, costs, strict=True) if ours is not None and theirs]
    saved = [1.0 - ours / theirs for ours, theirs in both]
    dearer = sum(ours > theirs + 1e-8 for ours, theirs in both)
    equal = sum(abs(ours - theirs) <= 1e-8 for ours, theirs in both)
    missing = sum(ours is not None and theirs is None for ours, theirs in zip(optimal, costs, strict=True))
    sys.stdout.write(
        f"{name:<16} {statistics.mean(saved):>7.1%} {statistics.median(saved):>7.1%} {max(saved):>7.1%} "
        f"{equal:>6} {dearer:>7} {missing:>8}\n"
    )
