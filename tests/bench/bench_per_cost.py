"""Whether TPE should rank by expected improvement per second: the best at equal dollars, against plain TPE.

    python tests/bench/bench_per_cost.py [--seeds 20] [--budgets 30 60]

Four workers on a virtual clock draw a configuration whenever one is free, until the budget is spent (in mean trials).
A trial's value and seconds are those of a real fit: a network on scikit-learn's digits, boosted trees on its breast
cancer data, each configuration measured once (two minutes). Branin's function has a cost that grows with x, and so has
nothing to do with its minima. `per_cost` divides the expected improvement by the predicted seconds (Snoek et al. 2012,
section 3.2), `cooling` by a power of them that falls to 0 with the budget (Lee et al. 2020). The columns are the regret
over the seeds, the seeds that are better and worse than plain TPE's, and the two-sided sign test of these.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import TPESampler

from tests.builders.sampled_runs import branin

WORKERS = 4
_SHARE = 0.1
"""Share of the results that TPE calls good."""
Point = dict[str, Any]
Objective = Callable[[Point], tuple[float, float]]
"""Configuration -> its value, the lower the better, and its seconds."""


class PerCost(TPESampler):
    """TPE whose acquisition is the expected improvement over a power of the predicted seconds."""

    def __init__(self, power: Callable[[], float], **options: Any) -> None:
        super().__init__(**options)
        self.power = power
        self.seen: list[tuple[Point, float]] = []

    def _compute_acquisition_func(self, samples: dict[str, np.ndarray], below: Any, above: Any) -> np.ndarray:
        ratio = super()._compute_acquisition_func(samples, below, above)
        improvement = -np.logaddexp(math.log(_SHARE), math.log(1.0 - _SHARE) - ratio)  # Bergstra et al. 2011, 4.1
        scored: np.ndarray = improvement - self.power() * self._log_seconds(samples)
        return scored

    def _log_seconds(self, samples: Mapping[str, np.ndarray]) -> np.ndarray:
        """Predict the logarithm of seconds: a plane, and a ridge regression of what that leaves."""
        from sklearn.kernel_ridge import KernelRidge

        points = np.array([[point[name] for name in samples] for point, _ in self.seen], float)
        asked, seconds = np.array(list(samples.values()), float).T, np.log([each for _, each in self.seen])
        low, spread = points.min(0), np.maximum(np.ptp(points, 0), 1e-9)
        points, asked = (points - low) / spread, (asked - low) / spread
        plane, more = (np.c_[each, np.ones(len(each))] for each in (points, asked))
        slopes = np.linalg.lstsq(plane, seconds, rcond=None)[0]
        rest = KernelRidge(alpha=0.1, kernel="rbf", gamma=2.0).fit(points, seconds - plane @ slopes)
        found: np.ndarray = more @ slopes + rest.predict(asked)
        return found


def digits(width: int, rate: int, decay: int, batch: int) -> Any:
    from sklearn.neural_network import MLPClassifier

    options = {"alpha": (1e-5, 1e-3, 0.1, 1.0)[decay], "batch_size": (16, 64)[batch], "max_iter": 8}
    return MLPClassifier((8 * 2**width,), learning_rate_init=1e-4 * 10 ** (rate / 2), random_state=0, **options)


def boosting(trees: int, depth: int, rate: int, share: int) -> Any:
    from sklearn.ensemble import GradientBoostingClassifier

    options = {"max_depth": depth + 1, "learning_rate": 0.01 * 10 ** (rate / 2), "subsample": (0.3, 0.6, 1.0)[share]}
    return GradientBoostingClassifier(n_estimators=10 * 2**trees, random_state=0, **options)


def measured(make: Callable[..., Any], data: Any, sizes: tuple[int, ...], *, equal: bool = False) -> Any:
    """Return the distributions, the objective and the optimum of a grid of fits."""
    from sklearn.metrics import log_loss
    from sklearn.model_selection import train_test_split

    inputs, labels = data(return_X_y=True)
    inputs, held_out, labels, held_out_labels = train_test_split(
        inputs / inputs.max(0).clip(1), labels, test_size=0.4, random_state=0
    )
    table = dict[tuple[int, ...], tuple[float, float]]()
    for at in itertools.product(*map(range, sizes)):
        began_s = time.process_time()
        model = make(*at).fit(inputs, labels)
        seconds = time.process_time() - began_s
        table[at] = float(log_loss(held_out_labels, model.predict_proba(held_out))), seconds
    mean_s = statistics.mean(seconds for _, seconds in table.values())

    def look(point: Point) -> tuple[float, float]:
        value, seconds = table[tuple(point.values())]
        return value, 1.0 if equal else seconds / mean_s

    names = {f"p{axis}": IntDistribution(0, size - 1) for axis, size in enumerate(sizes)}
    return names, look, min(value for value, _ in table.values())


def problems() -> Iterator[tuple[str, Any]]:
    from sklearn.datasets import load_breast_cancer, load_digits

    yield "digits", measured(digits, load_digits, (7, 7, 4, 2))
    yield "boosting", measured(boosting, load_breast_cancer, (6, 5, 5, 3))
    plane = {"x": FloatDistribution(-5, 10), "y": FloatDistribution(0, 15)}
    costs: dict[str, Callable[[float], float]] = {
        "Branin, 0.1 to 4 s with x": lambda x: math.exp(0.26 * (x - 2.5)) / 1.75,
        "Branin, equal costs": lambda x: 1.0,
    }
    for name, cost in costs.items():
        yield name, (plane, lambda point, cost=cost: (branin(point, 10**9), cost(point["x"])), 0.397887)


def regret(variant: str, problem: Any, seed: int, budget: float) -> float:
    """Return how far the best trial within a budget is from the optimum."""
    names, objective, optimum = problem
    now = 0.0
    options = {"seed": seed, "multivariate": True, "group": True, "constant_liar": True, "n_startup_trials": 10}
    powers = {"per_cost": lambda: 1.0, "cooling": lambda: max(0.0, 1.0 - WORKERS * now / budget)}
    sampler = PerCost(powers[variant], **options) if variant in powers else TPESampler(**options)
    study, running, best = optuna.create_study(sampler=sampler), list[Any](), math.inf
    for worker in itertools.count():
        trial = study.ask(names)
        value, seconds = objective(trial.params)
        heapq.heappush(running, (now + seconds, worker, trial, value, seconds))
        if worker + 1 < WORKERS:
            continue
        now, _, done, value, seconds = heapq.heappop(running)
        if now > budget / WORKERS:
            return best - optimum
        best = min(best, value)
        study.tell(done, value)
        if isinstance(sampler, PerCost):
            sampler.seen.append((done.params, seconds))
    raise AssertionError


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p of a sign test."""
    pairs = better + worse
    return min(1.0, 2.0 * sum(math.comb(pairs, each) for each in range(min(better, worse) + 1)) / 2**pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budgets", type=float, nargs="+", default=[30.0, 60.0])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{'problem':26} {'budget':>6} {'sampler':9} {'median':>8} {'mean':>8} {'better/worse':>12} {'p':>6}")
    for name, problem in problems():
        for budget in asked.budgets:
            plain = list[float]()
            for variant in ("tpe", "per_cost", "cooling"):
                found = [regret(variant, problem, seed, budget) for seed in range(asked.seeds)]
                plain = plain or found
                pairs = list(zip(found, plain, strict=True))
                better, worse = sum(a < b - 1e-12 for a, b in pairs), sum(a > b + 1e-12 for a, b in pairs)
                figures = f"{statistics.median(found):8.4f} {statistics.mean(found):8.4f}"
                compared = f"{f'{better}/{worse}':>12} {sign_test(better, worse):6.3f}"
                print(f"{name:26} {budget:6.0f} {variant:9} {figures} {compared}", flush=True)


if __name__ == "__main__":
    main()
