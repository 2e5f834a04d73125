"""Random jobs of each kind by seed, and what the planner tells of them, as `rubberband estimate` does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from rubberband.executor import Job
from rubberband.planner.estimates import Estimate, estimate
from rubberband.planner.exact.solver import Objective
from rubberband.planner.problem import Problem
from rubberband.planner.reserve import Reserve
from rubberband.spec.schedulers import asha, hyperband, sha
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import PlanningConstraints, Stage
from rubberband.values.profile import Profile, Spread
from tests.judge.virtual import job_of

Brackets = tuple[tuple[Stage, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A job to plan."""

    kind: str
    seed: int
    brackets: Brackets
    problems: tuple[Problem, ...]
    """One for each type, without the brackets."""
    objective: Objective = "min_cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """What the planner answered for a job, and the job as the executor takes it."""

    question: Question
    estimate: Estimate
    job: Job

    @property
    def constraints(self) -> PlanningConstraints:
        """The limits of the chosen instance type."""
        return self.estimate.constraints


def planned_job(kind: str, seed: int) -> PlannedJob:
    """Return the random job of a seed with its plan; its limits are widened until there is one."""
    source = random.Random(f"{kind} {seed}")
    while True:
        question = KINDS[kind](source, kind, seed)
        shortest = _planned(
            replace(question, problems=tuple(_without_noise(problem) for problem in question.problems)), "min_time"
        )
        if shortest.job is None:
            continue
        slack = source.uniform(1.02, 1.8)
        for _ in range(10):
            limited = _limited(source, question, slack * shortest.job.prediction.jct_s)
            estimate = _planned(limited, limited.objective)
            if estimate.job is not None and estimate.feasible:
                job = job_of(limited.brackets, estimate.job, estimate.offer, estimate.profile)
                limits = estimate.constraints
                job = replace(job, deadline_s=limits.deadline_s, confidence=limits.confidence)
                reserve = Reserve() if estimate.problem.reserve is None else estimate.problem.reserve
                job = replace(job, objective=limited.objective, release_margin_s=reserve.margin_s)
                return PlannedJob(question=limited, estimate=estimate, job=job)
            slack *= 1.15


def _planned(question: Question, objective: Objective) -> Estimate:
    asked = [
        replace(each, brackets=question.brackets, objective=objective, seed=question.seed) for each in question.problems
    ]
    return estimate(asked, clock=lambda: 0.0, compare=False)


def _without_noise(problem: Problem) -> Problem:
    profile = replace(problem.profile, trial_cv=0.0, iteration_cv=0.0, startup_cv=0.0, mean_cv=0.0)
    offer = replace(problem.offer, provision_spread=Spread(), init_spread=Spread(), spot=None)
    return replace(problem, profile=profile, offer=offer, constraints=replace(problem.constraints, max_cost_usd=None))


def _limited(source: random.Random, question: Question, deadline_s: float) -> Question:
    """The question with a deadline near which its plan ends, so that the odds say something."""
    confidence = source.choice([0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
    problems = [
        replace(problem, constraints=replace(problem.constraints, deadline_s=deadline_s, confidence=confidence))
        for problem in question.problems
    ]
    return replace(question, problems=tuple(problems))


def _profile(source: random.Random) -> Profile:
    single_s, efficiency = source.uniform(5.0, 90.0), source.uniform(0.5, 1.0)
    return Profile(
        seconds_per_iteration={gpus: single_s / gpus**efficiency for gpus in (1, 2, 4, 8)},
        trial_startup_s=source.choice([0.0, 2.0, 10.0]),
        trial_cv=source.choice([0.0, 0.1, 0.2, 0.3]),
        iteration_cv=source.choice([0.0, 0.1, 0.3]),
        startup_cv=source.choice([0.0, 0.0, 0.5]),
        mean_cv=source.choice([0.0, 0.0, 0.05]),
        law=source.choice(["lognormal", "lognormal", "lognormal", "normal"]),
    )


def _offer(source: random.Random, most: int) -> Offer:
    """At most `most` GPUs."""
    gpus = source.choice([1, 2, 4, 8])
    spreads = [source.choice([Spread(), Spread(cv=0.4), Spread(samples=(0.6, 0.8, 1.0, 1.6))]) for _ in range(2)]
    return Offer(
        instance_type="judged",
        gpus=gpus,
        price_usd_per_hour=3.06 * gpus,
        max_instances=max(1, source.randint(2, most) // gpus),
        provision_delay_s=source.choice([0.0, 15.0, 60.0]),
        provision_spread=spreads[0],
        init_delay_s=source.choice([0.0, 15.0, 60.0]),
        init_spread=spreads[1],
        minimum_billed_s=source.choice([0.0, 60.0]),
        data_usd_per_instance=source.choice([0.0, 0.0, 0.1]),
        head_price_usd_per_hour=source.choice([0.0, 0.2, 1.0]),
    )


def _problem(source: random.Random, offer: Offer) -> Problem:
    limits = PlanningConstraints(max_gpus_per_trial=min(source.choice([1, 2, 4, 8]), offer.gpus * offer.max_instances))
    profile = _profile(source)
    if offer.spot is not None:
        restart_s = offer.provision_delay_s + offer.init_delay_s + profile.trial_startup_s
        offer = replace(offer, spot=replace(offer.spot, restart_s=restart_s))
    return Problem(brackets=(), offer=offer, profile=profile, constraints=limits)


def _sha(source: random.Random, most: int = 32) -> Brackets:
    trials, eta = source.randint(4, most), source.choice([2, 3, 4])
    return (sha(trials, source.choice([1, 2]), source.choice([9, 16, 27]), eta),)


def _waves(source: random.Random, kind: str, seed: int) -> Question:
    """Halving on few GPUs: trials queue."""
    return Question(kind=kind, seed=seed, brackets=_sha(source), problems=(_problem(source, _offer(source, 12)),))


def _hyperband(source: random.Random, kind: str, seed: int) -> Question:
    """Several brackets at once, with a head node."""
    offer = replace(_offer(source, 48), head_price_usd_per_hour=source.choice([0.2, 1.0]))
    brackets = hyperband(*source.choice([(4, 2), (8, 2), (9, 3), (16, 4), (27, 3)]))
    return Question(kind=kind, seed=seed, brackets=brackets, problems=(_problem(source, offer),))


def _asha(source: random.Random, kind: str, seed: int) -> Question:
    """Halving without a SYNC."""
    eta = source.choice([2, 3, 4])
    stage = asha(sha(source.randint(4, 32), source.choice([1, 2]), source.choice([9, 16, 27]), eta), eta)
    offer = _offer(source, 16)
    if source.random() < 0.25:
        offer = _spotty(source, offer, source.choice([0.1, 1.0]))
    return Question(kind=kind, seed=seed, brackets=((stage,),), problems=(_problem(source, offer),))


def _function(source: random.Random, kind: str, seed: int) -> Question:
    """Billed by the function, at times on spot."""
    offer = replace(_offer(source, 24), billing="per_function")
    if source.random() < 0.3:
        offer = _spotty(source, offer, source.choice([0.1, 1.0]))
    return Question(kind=kind, seed=seed, brackets=_sha(source), problems=(_problem(source, offer),))


def _spot(source: random.Random, kind: str, seed: int) -> Question:
    """On the spot market, from quiet to busy."""
    offer = _spotty(source, _offer(source, 24), source.choice([0.1, 0.5, 1.0, 2.0, 5.0]))
    return Question(kind=kind, seed=seed, brackets=_sha(source), problems=(_problem(source, offer),))


def _spotty(source: random.Random, offer: Offer, interruptions_per_hour: float) -> Offer:
    spot = Spot(
        price_usd_per_hour=source.uniform(0.3, 0.6) * offer.price_usd_per_hour,
        interruptions_per_hour=interruptions_per_hour,
        checkpoint_iterations=source.choice([1, 1, 3]),
    )
    return replace(offer, spot=spot)


def _capped(source: random.Random, kind: str, seed: int) -> Question:
    """Halving within a deadline and a budget."""
    offer = _offer(source, 24)
    if source.random() < 0.3:
        offer = _spotty(source, offer, source.choice([0.1, 0.5, 1.0]))
    problem = _problem(source, offer)
    brackets = _sha(source)
    question = Question(kind=kind, seed=seed, brackets=brackets, problems=(problem,))
    cheapest = _planned(replace(question, problems=(_without_noise(problem),)), "min_cost")
    cheapest_usd = 1.0 if cheapest.job is None else cheapest.job.prediction.cost_usd
    limits = replace(problem.constraints, max_cost_usd=cheapest_usd * source.uniform(1.05, 1.8))
    objective: Objective = source.choice(["min_cost", "min_time"])
    reserve = Reserve(margin_s=source.choice([0.0, 3.0, 60.0]))
    return replace(question, problems=(replace(problem, constraints=limits, reserve=reserve),), objective=objective)


def _types(source: random.Random, kind: str, seed: int) -> Question:
    """Several instance types, each with its profile."""
    problems: list[Problem] = []
    for number in range(source.choice([2, 3])):
        offer = replace(_offer(source, 16), instance_type=f"judged-{number}")
        offer = replace(offer, price_usd_per_hour=offer.price_usd_per_hour * source.uniform(0.5, 1.5))
        problems.append(_problem(source, offer))
    return Question(kind=kind, seed=seed, brackets=_sha(source), problems=tuple(problems))


def _again(source: random.Random, kind: str, seed: int) -> Question:
    """Programs without checkpoints: every start trains all again, also after an interruption."""
    question = source.choice([_waves, _hyperband, _asha, _function])(source, kind, seed)
    problems = [replace(one, profile=replace(one.profile, resumes=False)) for one in question.problems]
    return replace(question, problems=tuple(problems))


KINDS: dict[str, Callable[[random.Random, str, int], Question]] = {
    "waves": _waves,
    "hyperband": _hyperband,
    "asha": _asha,
    "function": _function,
    "spot": _spot,
    "capped": _capped,
    "types": _types,
    "again": _again,
}
