"""Random small jobs of each kind, and whether the planner chooses the best of all plans, as it prices them itself.

What a plan is told to take and to cost is judged elsewhere (`tests.judge`); here only which plan is chosen.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rubberband.errors import InfeasibleError
from rubberband.planner.estimates import estimate
from rubberband.planner.exact.model import MeanCost, predict
from rubberband.planner.exact.solver import Box, Objective, unbeaten
from rubberband.planner.noise.sampling import Draws, varies
from rubberband.planner.problem import JobPlan, Problem
from rubberband.values.offer import Offer, SideCost, Spot, slots
from rubberband.values.plan import Cohort, Plan, Planned, PlanningConstraints, Policy, Stage, StagePlan, gang_sizes
from rubberband.values.profile import Profile, Spread
from tests.builders.plans import plan

Points = list[tuple[float, float]]
MOST_PLANS = 4000
MOST_NOISY = 3000
NEARLY = 1e-6
"""Relative difference of figures that are equal."""
NEARLY_NOISY = 0.01
"""The same where samples decide: a candidate may be this much better by luck."""
BISECTED = 0.02
"""The same for the shortest time of several brackets, which `plan_job` approaches to this."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A job, the instance types that it may use, and what is asked."""

    brackets: Sequence[Sequence[Stage]]
    problems: Sequence[Problem]
    """One for each type, without the brackets."""
    policy: Policy = "optimal"
    objective: Objective = "min_cost"
    held: Sequence[Cohort] = ()

    @property
    def varies(self) -> bool:
        return any(varies(problem.profile, problem.offer) for problem in self.problems)


def choices(offer: Offer, limits: PlanningConstraints) -> list[StagePlan]:
    """Return all that a stage can get."""
    gangs = limits.gang_sizes(offer.slots)
    return [
        StagePlan(instances=count, gpus_per_trial=gpus, market=market)
        for count in range(1, offer.max_instances + 1)
        for gpus in gangs
        for market in (("on_demand",) if offer.spot is None else ("on_demand", "spot"))
        if slots(count, offer.slots, gpus)
    ]


def plans(num_stages: int, problem: Problem, policy: Policy = "optimal") -> Iterator[Plan]:
    for chosen in itertools.product(choices(problem.offer, problem.constraints), repeat=num_stages):
        if policy == "static" and len({(one.instances, one.market) for one in chosen}) > 1:
            continue
        if policy == "naive_elastic" and len({one.gpus_per_trial for one in chosen}) > 1:
            continue
        yield Plan(stages=chosen)


def points(question: Question, problem: Problem) -> Points:
    """Return (jct_s, cost_usd) of the unbeaten plans of a job, or of its lanes, where nothing varies."""
    if len(question.brackets) > 1:
        return _lanes_points(question, problem)
    stages, found = question.brackets[0], []
    price = MeanCost(stages, problem.profile, problem.offer)
    for each in plans(len(stages), problem, question.policy):
        if question.held:
            answer = predict(stages, each, problem.profile, problem.offer, question.held)
            found.append((answer.jct_s, answer.cost_usd))
        else:
            found.append(price(each))
    return unbeaten(found)


def _lanes_points(question: Question, problem: Problem) -> Points:
    """`points` of every division of the brackets into lanes, and of the instances among them."""
    known: dict[tuple[tuple[int, ...], int], Points] = {}

    def alone(group: tuple[int, ...], quota: int) -> Points:
        if (group, quota) not in known:
            stages = tuple(stage for bracket in group for stage in question.brackets[bracket])
            offer = replace(problem.offer, max_instances=quota, head_price_usd_per_hour=0.0)
            lane = replace(problem, offer=offer)
            known[group, quota] = points(replace(question, brackets=[stages]), lane)
        return known[group, quota]

    most, found = problem.offer.max_instances, list[tuple[float, float]]()
    for groups in _partitions(list(range(len(question.brackets)))):
        for quotas in itertools.product(range(1, most + 1), repeat=len(groups)):
            if sum(quotas) == most:
                lanes = [alone(group, quota) for group, quota in zip(groups, quotas, strict=True)]
                for each in itertools.product(*lanes):
                    jct_s = max(time_s for time_s, _ in each)
                    found.append((jct_s, sum(usd for _, usd in each) + problem.offer.head_cost_usd(jct_s)))
    return unbeaten(found)


def _partitions(numbers: list[int]) -> Iterator[list[tuple[int, ...]]]:
    if not numbers:
        yield []
        return
    for groups in _partitions(numbers[1:]):
        yield [(numbers[0],), *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], (numbers[0], *group), *groups[at + 1 :]]


def answer(question: Question) -> tuple[Problem, Planned | JobPlan] | None:
    """Return the planner's choice, or None if it knows no plan."""
    if question.held:
        (problem,) = question.problems
        job = (question.brackets[0], problem.profile, problem.offer, problem.constraints)
        try:
            return problem, plan(*job, question.policy, question.objective, held=question.held)
        except InfeasibleError:
            return None
    asked = [
        replace(each, brackets=question.brackets, policy=question.policy, objective=question.objective)
        for each in question.problems
    ]
    found = estimate(asked, clock=lambda: 0.0, compare=False)
    return None if found.job is None else (found.problem, found.job)


def fault(question: Question) -> str | None:
    """Return what is wrong with the planner's choice; None if it is the best that keeps the limits."""
    return _noisy_fault(question) if question.varies else _certain_fault(question)


def _certain_fault(question: Question) -> str | None:
    inside = [
        point
        for problem in question.problems
        for point in points(question, problem)
        if all(Box.of(problem.constraints).limits_kept(*point))
    ]
    at = 1 if question.objective == "min_cost" else 0
    best = min((point[at] for point in inside), default=None)
    found = answer(question)
    if found is None:
        return None if best is None else f"infeasible, though {_words(best, at)} is within the limits"
    problem, result = found
    figures = (result.prediction.jct_s, result.prediction.cost_usd)
    if best is None or not all(Box.of(problem.constraints).limits_kept(*figures)):
        return f"{figures} is not within the limits"
    near = BISECTED if at == 0 and len(question.brackets) > 1 else NEARLY
    return None if figures[at] <= best * (1.0 + near) + 1e-9 else f"{_words(figures[at], at)}, not {_words(best, at)}"


def _words(value: float, at: int) -> str:
    return f"{value:.6g} {('s', 'USD')[at]}"


def _noisy_fault(question: Question) -> str | None:
    """`fault` by the samples that the planner draws: a plan counts if it keeps the limits by more than luck."""
    (problem,), (stages,) = question.problems, question.brackets
    box, confidence = Box.of(problem.constraints), problem.constraints.confidence
    draws = Draws(stages, problem.profile, problem.offer, seed=0)
    at = 1 if question.objective == "min_cost" else 0
    found = answer(question)
    values = None if found is None else _figures(draws, found[1].plan, draws.most_chunks)
    reach = math.inf if values is None else float(values[at].mean()) * (1.0 - NEARLY_NOISY)
    if values is not None and box.holds(*values).mean() < confidence - 0.005:
        return "the plan does not keep the confidence"
    spot_first = values is not None and question.objective == "min_time" and problem.offer.spot is not None
    if spot_first and any(choice.market == "on_demand" for choice in found[1].plan.stages):
        reach = math.inf  # with this objective, any plan on spot alone comes before
    for each in plans(len(stages), problem, question.policy):
        if draws.least(each)[at] >= reach:  # its mean time, and a lower bound on its mean cost
            continue
        if spot_first and any(choice.market == "on_demand" for choice in each.stages):
            continue
        rough = _figures(draws, each, 1)
        if rough[at].mean() > reach * 1.02 or box.holds(*rough).mean() < confidence - 0.03:
            continue
        figures = _figures(draws, each, draws.most_chunks)
        clearly = confidence + 2.0 * math.sqrt(confidence * (1.0 - confidence) / len(figures[0]))
        if figures[at].mean() < reach and box.holds(*figures).mean() >= clearly:
            best = _words(float(figures[at].mean()), at)
            words = "infeasible" if values is None else _words(float(values[at].mean()), at)
            return f"{words}, though {best} keeps its word"
    return None


def _figures(draws: Draws, each: Plan, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    samples = draws.evaluate(each, num_chunks)
    return samples.jct_s, samples.cost_usd


@dataclass
class _Maker:
    """Draws what the kinds have in common."""

    rng: random.Random
    prices: dict[str, object] = field(default_factory=dict)

    def profile(self, **noise: float) -> Profile:
        table = {1: self.rng.uniform(5.0, 60.0)}
        for gpus in (2, 4):
            table[gpus] = table[gpus // 2] * self.rng.choice([0.5, 0.55, 0.7, 0.9, 1.05])
        return Profile(seconds_per_iteration=table, trial_startup_s=self.rng.choice([0.0, 2.0, 10.0]), **noise)

    def offer(self, most: int, **prices: object) -> Offer:
        pick = self.rng.choice
        values: dict[str, object] = {
            "instance_type": "test",
            "gpus": pick([1, 2, 4]),
            "price_usd_per_hour": pick([1.2, 3.6]),
            "max_instances": self.rng.randint(2, most),
            "provision_delay_s": pick([0.0, 15.0, 90.0]),
            "init_delay_s": pick([0.0, 15.0, 45.0]),
            "minimum_billed_s": pick([0.0, 60.0, 300.0]),
            "data_usd_per_instance": pick([0.0, 0.0, 0.05]),
            "head_price_usd_per_hour": pick([0.0, 0.5]),
            "side_costs": pick([(), (SideCost(line="volumes", usd_per_hour=0.2, usd_once=0.01),)]),
        }
        return Offer(**{**values, **prices})  # type: ignore[arg-type]

    def spot(self, price: float) -> Spot:
        return Spot(price_usd_per_hour=price * self.rng.choice([0.25, 0.5, 0.8, 1.0]), interruptions_per_hour=0.0)

    def stages(self, num: int, most: int = 14) -> tuple[Stage, ...]:
        """Stages of fewer and fewer trials, which may queue."""
        trials = sorted((self.rng.randint(1, most) for _ in range(num)), reverse=True)
        return tuple(Stage(trials=count, iterations=self.rng.randint(1, 8)) for count in trials)

    def problem(self, offer: Offer, num_stages: int, most_plans: int = MOST_PLANS, **noise: float) -> Problem:
        """Return the problem of an offer, made small enough that all its plans can be tried."""
        most = max(size for size in gang_sizes(offer.slots, 1, 4) if size <= offer.slots * offer.max_instances)
        limits = PlanningConstraints(max_gpus_per_trial=self.rng.choice([1, most, most]), confidence=0.9)
        while len(choices(offer, limits)) ** num_stages > most_plans:
            if limits.max_gpus_per_trial > 1:
                limits = replace(limits, max_gpus_per_trial=1)
            else:
                offer = replace(offer, max_instances=offer.max_instances - 1)
        return Problem(brackets=(), offer=offer, profile=self.profile(**noise), constraints=limits)

    def limited(self, question: Question, *, kinds: Sequence[str] = ("deadline", "max_cost", "both")) -> Question:
        """Return the question with limits near one plan, or two."""
        kind = self.rng.choice(kinds)
        some = list(_some(question))
        deadline_s = self.rng.choice(some)[0] * self.rng.choice([0.98, 1.0, 1.0, 1.05])
        max_cost_usd = self.rng.choice(some)[1] * self.rng.choice([0.98, 1.0, 1.0, 1.05])
        if kind == "both":  # about one plan, so that some plan often keeps both
            deadline_s, max_cost_usd = (value * self.rng.choice([1.0, 1.02, 1.1]) for value in self.rng.choice(some))
        limits = {
            "deadline_s": deadline_s if kind in ("deadline", "both") else None,
            "max_cost_usd": max_cost_usd if kind in ("max_cost", "both") else None,
        }
        return replace(question, problems=[problem.with_limits(**limits) for problem in question.problems])


def _some(question: Question) -> Points:
    if not question.varies:
        return [point for problem in question.problems for point in points(question, problem)]
    (problem,), (stages,) = question.problems, question.brackets
    draws, found = Draws(stages, problem.profile, problem.offer, seed=0), list[tuple[float, float]]()
    for each in plans(len(stages), problem, question.policy):
        figures = _figures(draws, each, 1)
        jct_s, cost_usd = (float(np.quantile(values, problem.constraints.confidence)) for values in figures)
        found.append((jct_s, cost_usd))
    return unbeaten(found)


def _one(make: _Maker, offer: Offer, objective: Objective = "min_cost", **noise: float) -> Question:
    stages = make.stages(make.rng.randint(1, 4 if offer.max_instances < 6 else 3))
    return Question(brackets=[stages], problems=[make.problem(offer, len(stages), **noise)], objective=objective)


def waves(make: _Maker) -> Question:
    """Successive halving whose trials queue."""
    return make.limited(_one(make, make.offer(8)))


def policies(make: _Maker) -> Question:
    """The same with another policy."""
    offer = make.offer(6, billing=make.rng.choice(["per_instance", "per_function"]))
    offer = make.rng.choice([offer, replace(offer, spot=make.spot(offer.price_usd_per_hour))])
    return make.limited(replace(_one(make, offer), policy=make.rng.choice(["static", "naive_elastic"])))


def functions(make: _Maker) -> Question:
    return make.limited(_one(make, make.offer(8, billing="per_function", side_costs=())))


def spot(make: _Maker) -> Question:
    """A spot market, on either billing."""
    offer = make.offer(5, billing=make.rng.choice(["per_instance", "per_function"]))
    return make.limited(_one(make, replace(offer, spot=make.spot(offer.price_usd_per_hour))))


def rest(make: _Maker) -> Question:
    """The rest of a job, with instances held."""
    offer = make.offer(5, billing=make.rng.choice(["per_instance", "per_function"]), head_price_usd_per_hour=0.0)
    offer = make.rng.choice([offer, replace(offer, spot=make.spot(offer.price_usd_per_hour))])
    question = _one(make, offer)
    (problem,) = question.problems
    market = make.rng.choice(["on_demand", "spot"]) if offer.spot else "on_demand"
    count = make.rng.randint(1, problem.offer.max_instances)
    held = [Cohort(instances=count, held_s=make.rng.choice([0.0, 20.0, 400.0]), market=market)]
    return make.limited(replace(question, held=held))


def types(make: _Maker) -> Question:
    stages = make.stages(make.rng.randint(1, 3))
    offers = [make.offer(6, instance_type=name, gpus=gpus) for name, gpus in zip("abc", (1, 2, 4), strict=True)]
    offers = make.rng.sample(offers, make.rng.randint(2, 3))
    return make.limited(Question(brackets=[stages], problems=[make.problem(offer, len(stages)) for offer in offers]))


def soonest(make: _Maker) -> Question:
    """The shortest time within a budget."""
    offer = make.offer(6, billing=make.rng.choice(["per_instance", "per_function"]))
    offer = make.rng.choice([offer, replace(offer, spot=make.spot(offer.price_usd_per_hour))])
    return make.limited(_one(make, offer, "min_time"), kinds=("max_cost", "max_cost", "both"))


def _brackets(make: _Maker, offer: Offer, objective: Objective = "min_cost") -> Question:
    brackets = [
        make.stages(num, 8) for num in make.rng.choice([(1, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 1), (2, 1, 2)])
    ]
    problem = make.problem(offer, sum(map(len, brackets)))
    return Question(brackets=brackets, problems=[problem], objective=objective)


def head(make: _Maker) -> Question:
    """Hyperband with a head node."""
    offer = make.offer(5, head_price_usd_per_hour=make.rng.choice([1.0, 1.0, 4.0]))
    return make.limited(_brackets(make, replace(offer, billing=make.rng.choice(["per_instance", "per_function"]))))


def head_soonest(make: _Maker) -> Question:
    """Hyperband with a head node: the shortest time within a budget."""
    offer = make.offer(5, head_price_usd_per_hour=make.rng.choice([0.0, 1.0, 4.0]))
    return make.limited(_brackets(make, offer, "min_time"), kinds=("max_cost", "both"))


def head_spot(make: _Maker) -> Question:
    """Hyperband on a spot market."""
    offer = make.offer(3, billing=make.rng.choice(["per_instance", "per_function"]))
    return make.limited(_brackets(make, replace(offer, spot=make.spot(offer.price_usd_per_hour))))


SPREADS = [Spread(), Spread(cv=0.5), Spread(samples=(0.5, 1.0, 1.5)), Spread(samples=(0.5,) * 9 + (4.0,))]


def _noisy(make: _Maker, objective: Objective, **prices: object) -> Question:
    pick = make.rng.choice
    prices = {"init_spread": pick(SPREADS), "provision_spread": pick(SPREADS), **prices}
    stages = make.stages(pick([1, 2, 2, 3]))
    noise = {
        "trial_cv": pick([0.0, 0.05, 0.1, 0.3]),
        "iteration_cv": pick([0.0, 0.2]),
        "startup_cv": pick([0.0, 0.5]),
        "mean_cv": pick([0.0, 0.0, 0.1]),
    }
    problem = make.problem(make.offer(12, **prices), len(stages), MOST_NOISY, **noise)
    limits = replace(problem.constraints, confidence=pick([0.5, 0.8, 0.9, 0.95, 0.99]))
    return Question(brackets=[stages], problems=[replace(problem, constraints=limits)], objective=objective)


def confidence(make: _Maker) -> Question:
    """Times that vary: the cheapest plan that keeps the limits with the confidence."""
    return make.limited(_noisy(make, "min_cost", billing=make.rng.choice(["per_instance", "per_function"])))


def losses(make: _Maker) -> Question:
    """A spot market with interruptions, and billing by function or not."""
    found = Spot(
        price_usd_per_hour=make.rng.choice([0.4, 1.0]),
        interruptions_per_hour=make.rng.choice([0.2, 2.0]),
        restart_s=40.0,
    )
    billing = make.rng.choice(["per_instance", "per_function"])
    return make.limited(_noisy(make, make.rng.choice(["min_cost", "min_time"]), spot=found, billing=billing))


def starts(make: _Maker) -> Question:
    """The shortest time where instances start at different times: more of them start later."""
    init_s, spread = make.rng.choice([15.0, 45.0, 90.0]), Spread(cv=make.rng.choice([0.3, 0.8]))
    question = _noisy(make, "min_time", gpus=make.rng.choice([1, 2]), init_delay_s=init_s, init_spread=spread)
    return make.limited(question, kinds=("neither", "max_cost", "both"))


_PLAIN = (waves, policies, functions, spot, rest, types, soonest)
_BRACKETS = (head, head_soonest, head_spot)
_NOISY = (confidence, losses, starts)
KINDS: dict[str, Callable[[_Maker], Question]] = {kind.__name__: kind for kind in (*_PLAIN, *_BRACKETS, *_NOISY)}


def question_of(kind: str, seed: int) -> Question:
    return KINDS[kind](_Maker(random.Random(f"{kind} {seed}")))
