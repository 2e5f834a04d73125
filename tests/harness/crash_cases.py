"""The points of the crash points: what is run, when its driver dies, and the weather around that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from random import Random
from typing import Any, Literal, TypeVar

from rubberband.cloud.aws.extras import side_costs
from rubberband.executor import Job, TrialEnd, brackets_of
from rubberband.planner.exact.model import predict
from rubberband.spec.resources import Resources
from rubberband.spec.schedulers import asha
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Market, Plan, Prediction, Stage, StagePlan
from rubberband.values.profile import Profile
from rubberband.values.stopping import Median, StopRules
from tests.ec2 import FakeCall, Fault
from tests.harness.chaos_cases import asha_prediction
from tests.harness.crash_world import BOOT_LEASE_S, LEASE_S, TYPE
from tests.harness.together import KINDS, Features, all_together, case_of, random_end

Then = Literal["resume", "sweep", "down", "nobody"]
Cap = Literal["roomy", "tight"]
P = TypeVar("P")
Hook = Callable[[FakeCall], Fault | None]

WEATHERS: dict[str, Hook] = {
    "ok": lambda call: None,
    "lost-answer": lambda call: Fault.timeout(took_effect=True),
    "no-connection": lambda call: Fault.timeout(took_effect=False),
    "throttled": lambda call: Fault.throttled(),
    "no-capacity": lambda call: Fault.no_capacity() if launches(call) else None,
    "partial": lambda call: Fault(launches_at_most=1) if launches(call) else None,
    "partial-lost": lambda call: replace(Fault.timeout(took_effect=True), launches_at_most=1),
    "no-spot": lambda call: Fault.no_capacity() if launches(call) and "InstanceMarketOptions" in call.params else None,
    "5xx": lambda call: Fault.server_error(),
    "5xx-after": lambda call: Fault.server_error(took_effect=True),
    "stale": lambda call: Fault.stale(60.0),
}
HIDDEN_S = (0.0, 5.0, 60.0, 300.0)
GAPS_S = (0.0, 30.0, 900.0)
AFTERWARDS: tuple[Then, ...] = ("resume", "sweep", "down", "nobody")
MARKETS: dict[str, tuple[Market, Market]] = {
    "on_demand": ("on_demand", "on_demand"),
    "spot": ("spot", "spot"),
    "mixed": ("spot", "on_demand"),
    "hours": ("spot", "spot"),
    "brackets": ("spot", "on_demand"),
    "asha": ("spot", "spot"),
    "learning": ("spot", "spot"),
    "ending": ("spot", "on_demand"),
    "stopping": ("spot", "on_demand"),
}
"""The job of `hours` takes an hour and a half, so that the price of an instance changes while it runs. The job of
`brackets` has two brackets beside the one: the three are in two lanes. The trials of `asha` climb rungs, and those of
`learning` too, each with a configuration that a sampler draws when it starts. Two trials of `ending` end by themselves:
one with its last report, and one that returns after it. Rules end a trial of `stopping` at its first report, and the
search within its second stage."""
TOGETHER = "together "
"""With a seed after it, the job is drawn: `tests.harness.together`."""
TRIAL_ENDS: dict[str, Mapping[int, TrialEnd]] = {
    "ending": {0: TrialEnd(iterations=2, returns=True), 1: TrialEnd(iterations=1)}
}
MOST_TRIALS = 200
ITERATION_S = {"hours": 1900.0}
LOOKS_APART = 100
"""In a longer run one look in this number is a point; another seed chooses other looks."""
SWING = 1.5
"""Prices are between a tenth of the usual and the price on demand."""
STAGES = (Stage(trials=3, iterations=1), Stage(trials=1, iterations=2))
CAP_USD: dict[Cap, float] = {"roomy": 3.0, "tight": 0.15}
CAP_OF_HOURS_USD: dict[Cap, float] = {"roomy": 9.0, "tight": 1.5}
BOOT_S: dict[Cap, float] = {"roomy": 0.0, "tight": 45.0}
"""Where the cap is tight, machines take a while to boot: that is billed, and the lease is armed only afterwards."""


def launches(call: FakeCall) -> bool:
    return call.operation == "RunInstances" and not call.params.get("DryRun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One death of a driver and the faults around it; by default there are none."""

    kill_at: int = -1
    """Index of the call, from the first of the experiment or the build."""
    after: bool = False
    """Whether the call takes effect."""
    weather: str = "ok"
    offset: int = 0
    """Calls from the death to the start of the weather; negative: it begins before."""
    lasts: int = 1
    """Calls."""
    hidden_s: float = 0.0
    """Seconds from a launch until EC2 shows the instance."""
    gap_s: float = 0.0
    """Until the next driver, or the sweep, comes."""
    again: int = -1
    """Calls after which the next driver is killed too; -1: it is not."""

    def __str__(self) -> str:
        return words_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Death):
    """One death of the driver of a run, and what comes afterwards."""

    markets: str
    then: Then = "resume"
    head: Literal["stays", "dies"] = "stays"
    cap: Cap = "roomy"
    together: bool = False
    """Whether its other threads are at their calls at that moment, too."""
    one_zone: bool = False
    """Whether trials may span instances, which are then in one zone."""
    taken: bool = False
    """Whether EC2 takes a spot instance away before the next one comes."""
    hung: bool = False
    """Whether the guests of all instances stop when the driver dies for good."""
    cancelled: int = -1
    """Calls from the user's cancel to the death, at which the run gives all back; -1: the user does not cancel."""
    prices: int = 0
    """The seed of the spot market."""


def words_of(point: Any) -> str:
    return ",".join(f"{one.name}={getattr(point, one.name)}" for one in fields(point))


def parse(text: str, kind: type[P]) -> P:
    """The point that `words_of` made this of."""
    words = dict(part.split("=", 1) for part in text.split(","))
    types = {"int": int, "float": float, "bool": lambda word: word == "True"}
    return kind(**{one.name: types.get(str(one.type), str)(words[one.name]) for one in fields(kind)})


def points_of(markets: str, calls: Mapping[str, Sequence[str]], seed: int) -> Iterator[Point]:
    """Every call x before or after x weather x visibility x what comes then; the rest is drawn for each.

    `calls`: cap -> what a run asks for under it.
    """
    source = Random(f"{seed} {markets}")
    longest = max(calls.values(), key=len)
    at = range(len(longest)) if markets not in ITERATION_S else _some(longest, seed)
    every = itertools.product(at, (False, True), WEATHERS, HIDDEN_S, AFTERWARDS)
    for kill_at, after, weather, hidden_s, then in every:
        caps: list[Cap] = ["roomy", "roomy", "tight"] if kill_at < len(calls["roomy"]) else ["tight"]
        point = Point(markets=markets, kill_at=kill_at, after=after, weather=weather, hidden_s=hidden_s, then=then)
        yield _around(point, source, caps)


def point_together(seed: int, calls: Sequence[str]) -> Point:
    """One point of an experiment that a seed draws, which asks for these calls: all is drawn."""
    source = Random(f"{seed} point")
    at = [at for at, call in enumerate(calls) if call != "DescribeInstances" or source.random() < 0.2]
    point = Point(
        markets=f"{TOGETHER}{seed}",
        kill_at=source.choice(at),
        after=source.random() < 0.5,
        weather=source.choice(list(WEATHERS)),
        hidden_s=source.choice(HIDDEN_S),
        then=source.choice(["resume", "resume", "resume", *AFTERWARDS]),
    )
    return _around(point, source, ["roomy", "tight"])


def _around(point: Point, source: Random, caps: Sequence[Cap]) -> Point:
    """Draw what else is around a death."""
    return replace(
        point,
        offset=source.choice([-1, -1, 1]),
        lasts=source.choice([1, 1, 1, 3, 30]),
        gap_s=source.choice(GAPS_S),
        head=source.choice(["stays", "dies"]),
        cap=source.choice(caps),
        again=source.choice([-1, -1, source.randrange(40)]),
        together=source.random() < 0.5,
        one_zone=source.random() < 0.25,
        taken=point.markets != "on_demand" and source.random() < 0.25,
        hung=point.then == "nobody" and source.random() < 0.5,
        cancelled=source.choice([-1, -1, -1, source.randint(1, 6)]),
        prices=source.randrange(1000),
    )


def _some(calls: Sequence[str], seed: int) -> list[int]:
    """Those from the purchase on, but not every look."""
    bought_at = max(at for at, call in enumerate(calls) if call == "RunInstances")
    return [
        at for at in range(bought_at, len(calls)) if calls[at] != "DescribeInstances" or (at - seed) % LOOKS_APART == 0
    ]


def trial_ends(markets: str) -> Mapping[int, TrialEnd]:
    """How trials end by themselves."""
    drawn = {trial: random_end(markets, trial) for trial in range(MOST_TRIALS)} if features_of(markets).ends else {}
    return TRIAL_ENDS.get(markets) or {trial: end for trial, end in drawn.items() if end is not None}


def undisturbed(markets: str, cap: Cap) -> Point:
    return Point(markets=markets, cap=cap)


_ON_EC2: dict[str, Any] = {
    "name": "digits",
    "release_margin_s": 30.0,
    "lease_s": LEASE_S,
    "boot_lease_s": BOOT_LEASE_S,
    "start_attempts": 3,
}
OFFER = Offer(
    instance_type=TYPE,
    gpus=1,
    price_usd_per_hour=1.006,
    max_instances=4,
    provision_delay_s=20.0,
    init_delay_s=10.0,
    spot=Spot(price_usd_per_hour=0.42, interruptions_per_hour=0.1),
    side_costs=side_costs(Resources(), None, gpus=True, provision_delay_s=20.0),
)


def features_of(markets: str) -> Features:
    """What the experiment of a point has."""
    if not markets.startswith(TOGETHER):
        return Features()
    drawn = all_together(markets, *(kind for kind in KINDS if kind != "27 trials"))
    return replace(drawn, listed=False, odd=False)


def _drawn(markets: str) -> Job:
    """The job that a seed draws, on instances of the fake EC2; some iterations take seconds, some minutes."""
    source = Random(markets)
    iteration_s = source.choice([5.0, 20.0, 60.0])
    profile = Profile(seconds_per_iteration={1: iteration_s, 2: 0.6 * iteration_s}, trial_startup_s=2.0)
    job = case_of(markets, features_of(markets), source, (OFFER, profile)).job
    return replace(job, **_ON_EC2, highest_price_usd_per_hour=None)


@lru_cache
def job_of(markets: str, cap: Cap, iteration_s: float | None = None) -> Job:
    """Three trials on three instances, then the better one alone; `brackets` has two brackets more."""
    if markets.startswith(TOGETHER):
        return _drawn(markets)
    caps_usd = CAP_OF_HOURS_USD if markets in ITERATION_S or (iteration_s or 0.0) > 100.0 else CAP_USD
    iteration_s = iteration_s or ITERATION_S.get(markets, 20.0)
    profile = Profile(seconds_per_iteration={1: iteration_s}, trial_startup_s=2.0)
    first, later = MARKETS[markets]
    plan = Plan(stages=(_on(3, first), _on(1, later)))
    job = Job(
        **_ON_EC2,
        stages=STAGES,
        plan=plan,
        prediction=predict(STAGES, plan, profile, OFFER),
        offer=OFFER,
        profile=profile,
        metric="score",
        mode="max",
        max_cost_usd=caps_usd[cap],
        replan=False,
        resize_in_stage=True,
    )
    if markets in ("asha", "learning"):
        return _as_asha(replace(job, draws=markets == "learning"), first)
    if markets == "stopping":
        return replace(job, stop=StopRules(target=0.66, median=Median(trials=2)))
    return _divided(job, first) if markets == "brackets" else job


def _on(instances: int, market: Market) -> StagePlan:
    return StagePlan(instances=instances, gpus_per_trial=1, market=market)


def _as_asha(job: Job, market: Market) -> Job:
    """The same trials on two instances, without a SYNC."""
    stage, choice = asha(job.stages, 3), _on(2, market)
    prediction = asha_prediction(stage, choice, job.profile, job.offer)
    return replace(job, stages=(stage,), plan=Plan(stages=(choice,)), prediction=prediction)


def _divided(job: Job, market: Market) -> Job:
    """The job with two brackets more: one after its own, on the instance that it ends with, and one beside them."""
    after, beside = (Stage(trials=1, iterations=1),), (Stage(trials=2, iterations=1), Stage(trials=1, iterations=1))
    lanes = [
        ((*job.stages, *after), Plan(stages=(*job.plan.stages, _on(1, "on_demand")))),
        (beside, Plan(stages=(_on(1, market), _on(1, market)))),
    ]
    found = [predict(stages, plan, job.profile, job.offer) for stages, plan in lanes]
    return replace(
        job,
        stages=tuple(stage for stages, _ in lanes for stage in stages),
        plan=Plan(stages=tuple(choice for _, plan in lanes for choice in plan.stages)),
        prediction=Prediction(
            jct_s=max(one.jct_s for one in found),
            cost_usd=sum(one.cost_usd for one in found),
            stages=tuple(stage for one in found for stage in one.stages),
        ),
        brackets=brackets_of([job.stages, after, beside], [(0, 1), (2,)]),
        lane_instances=(3, 1),
    )
