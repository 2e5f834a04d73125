"""Random experiments and random faults for the chaos harness: everything is drawn from one seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor import AttemptFaults, FailureKind, Job, TrialEnd, brackets_of
from rubberband.executor.core.job import Bracket
from rubberband.executor.virtual.fleet import Messages
from rubberband.planner.exact.model import predict
from rubberband.spec.schedulers import asha, sha
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, Spot, slots
from rubberband.values.plan import Market, Plan, Prediction, Stage, StagePlan, StagePrediction, gang_sizes
from rubberband.values.profile import Profile
from rubberband.values.schedulers import Exchange
from tests.builders.asha_runs import steady_run
from tests.builders.jobs import JOB

LEASE_S = 600.0
RELEASE_MARGIN_S = 30.0
READY_TIMEOUT_S = 900.0
TWENTY_SEVEN = (
    Stage(trials=27, iterations=1),
    Stage(trials=9, iterations=2),
    Stage(trials=3, iterations=6),
    Stage(trials=1, iterations=18),
)
"""SHA(27, 1, 27, 3)."""

Family = Literal[
    "27 trials", "random", "brackets", "asha", "brackets that learn", "asha that learns", "population", "caps"
]
"""All but the first two are drawn only where they are asked for: two to four brackets in up to three lanes, trials that
climb rungs, both with configurations that a sampler draws from results, a population whose worst trials take over
checkpoints at each SYNC, and any of those without a sampler while it may have fewer and more instances at random."""
_CAPPED: tuple[Family, ...] = ("27 trials", "random", "brackets", "asha", "brackets", "population")
FAMILIES: tuple[Family, ...] = get_args(Family)
_DIVIDED: tuple[Family, ...] = ("brackets", "brackets that learn")
LEARNING: tuple[Family, ...] = ("brackets that learn", "asha that learns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How much goes wrong; probabilities unless a unit is named."""

    refused: float = 0.0
    """That a launch finds the market's capacity gone, for a while."""
    sold_out_s: float = 0.0
    """For how long, on average."""
    sold_out_for_good: float = 0.0
    """That it stays so."""
    interruptions_per_hour: float = 0.0
    deaths_per_hour: float = 0.0
    """Of machines that nobody takes away."""
    slow: float = 0.0
    """That an instance takes 20 times as long to start."""
    stillborn: float = 0.0
    """That it never runs, or its workers never become warm."""
    late: float = 0.0
    """That messages about an instance are late."""
    latest_s: float = 0.0
    """The driver sees by then what happened to it."""
    trial_fails: float = 0.0
    loses_checkpoint: float = 0.0
    """Per attempt: that the checkpoint that it would go on from is gone, or torn."""
    store_away: float = 0.0
    """Per round: that the checkpoint store goes away, for a while."""
    slow_trial: float = 0.0
    slow_instance: float = 0.0
    """That an instance trains slower than others, from its start or later on."""
    wake_early: float = 0.0
    """Per round of events: that the loop wakes up for nothing."""
    busy: float = 0.0
    """Per round: that the loop takes in what happens within seconds at once."""
    stall: float = 0.0
    """Per round: that the driver's machine sleeps."""
    deaths: float = 0.0
    """Drivers that die, per run."""
    gone_for_good: float = 0.0
    """That a driver which dies never comes back."""
    cancels: float = 0.0
    extends: float = 0.0
    """That the user grants more while it runs; and, each time that the cap ends it, that it is raised and goes on."""


CALM = Weather(extends=0.2)
ROUGH = Weather(
    refused=0.05,
    sold_out_s=60.0,
    sold_out_for_good=0.1,
    interruptions_per_hour=2.0,
    deaths_per_hour=0.2,
    slow=0.03,
    stillborn=0.02,
    late=0.2,
    latest_s=300.0,
    trial_fails=0.02,
    loses_checkpoint=0.05,
    store_away=0.0005,
    slow_trial=0.05,
    slow_instance=0.05,
    wake_early=0.005,
    busy=0.05,
    stall=0.001,
    deaths=0.4,
    gone_for_good=0.2,
    cancels=0.05,
    extends=0.2,
)
BREEZE = replace(
    ROUGH,
    refused=0.0,
    deaths_per_hour=0.0,
    stillborn=0.0,
    trial_fails=0.0,
    latest_s=30.0,
    gone_for_good=0.0,
    cancels=0.0,
)
"""Nothing that should keep a run without a cap from being done. Trials hang on an instance that is 40 times slower than
others; once one has hung there, it is replaced."""
STORM = replace(
    ROUGH,
    refused=0.15,
    interruptions_per_hour=12.0,
    deaths_per_hour=2.0,
    stillborn=0.1,
    late=0.7,
    trial_fails=0.1,
    loses_checkpoint=0.2,
    store_away=0.005,
    slow_instance=0.15,
    stall=0.01,
    deaths=2.0,
)
WEATHERS = {"calm": CALM, "breeze": BREEZE, "rough": ROUGH, "storm": STORM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One experiment, and the weather that it meets."""

    job: Job
    weather: str
    family: Family


def random_case(
    source: Random,
    family: Family | None = None,
    *,
    replan: bool | None = None,
    repeats: int = 1,
    resumes: bool = True,
    on: tuple[Offer, Profile] | None = None,
) -> Case:
    """Draw one; `family` and `replan` of your choice, or drawn too: every fifth is random, one in fifty replans.

    `resumes`: whether trials go on from checkpoints. `on`: instances of your choice, and how fast trials train there.
    """
    if family == "caps":
        return replace(random_case(source, source.choice(_CAPPED), replan=replan), family=family)
    family = family or ("27 trials" if source.random() < 0.8 else "random")
    stages = _repeated(TWENTY_SEVEN, repeats) if family == "27 trials" else _stages(source, repeats)
    stages = _generations(source) if family == "population" else stages
    offer, profile = on or (_offer(source, family), _profile(source))
    profile = replace(profile, resumes=resumes)
    divided = _divided(source, offer, repeats) if family in _DIVIDED else None
    if family in ("asha", "asha that learns"):
        eta = source.randint(2, 4)
        stage = asha(sha(source.randint(1, 27), 1, source.randint(1, 27), eta), eta)
        assert stage.ladder is not None
        stage = replace(stage, trials=repeats * stage.trials, ladder=replace(stage.ladder, repeats=repeats))
        stages, replan = (stage,), False
        plan = _plan(source, stages, offer)
        prediction = asha_prediction(stages[0], plan.stages[0], profile, offer)
    elif divided is None:
        plan = _plan(source, stages, offer)
        prediction = predict(stages, plan, profile, offer)
    else:
        offer, stages, plan = divided.offer, divided.stages, divided.plan
        prediction = divided.prediction(profile)
    tightness = source.choice([0.2, 0.6, 1.0, 1.02, 1.1, 1.3, 2.0]) * source.uniform(1.0, 1.1)
    room = tightness if source.random() < 0.7 else None
    highest_price = source.uniform(1.0, 1.5) if source.random() < 0.1 else None
    replanned = source.random() < 0.02
    job = replace(
        JOB,
        name="chaos",
        stages=stages,
        plan=plan,
        prediction=prediction,
        offer=offer,
        profile=profile,
        deadline_s=source.uniform(0.8, 2.0) * prediction.jct_s if source.random() < 0.5 else None,
        max_cost_usd=None if room is None else room * prediction.cost_usd,
        release_margin_s=RELEASE_MARGIN_S,
        replan=replanned if replan is None else replan,
        highest_price_usd_per_hour=None if highest_price is None else highest_price * offer.price_usd_per_hour,
        lease_s=LEASE_S,
        start_attempts=3,
        hung_replacements=3,
        brackets=() if divided is None else divided.brackets,
        lane_instances=() if divided is None else divided.quotas,
        draws=family in LEARNING,
        repeats=repeats,
        keep_best=len(stages) % 2 == 0,
    )
    weather = source.choices(list(WEATHERS), weights=[1, 2, 5, 2])[0]
    state = source.getstate()
    # Drawn apart, so that all before is as it was without it.
    own = Random(f"{state[1][:3] if isinstance(state, tuple) else state}")
    job = replace(job, resize_in_stage=own.random() < 0.7)
    return Case(job=job, weather=weather, family=family)


def asha_prediction(stage: Stage, choice: StagePlan, profile: Profile, offer: Offer) -> Prediction:
    """Simulate one run in which nothing goes wrong, and a trial with a lower number is better."""
    runs = steady_run(stage, choice, profile, offer, [range(stage.trials)] * len(stage.rungs.totals))
    starts_s, jct_s, cost_usd = (float(values[0, 0]) for values in (runs.starts_s, runs.jct_s, runs.cost_usd))
    one = StagePrediction(
        start_s=0.0,
        provisioning_s=starts_s,
        duration_s=jct_s - starts_s,
        cost_usd=cost_usd,
        slots=slots(choice.instances, offer.gpus, choice.gpus_per_trial),
    )
    return Prediction(jct_s=jct_s, cost_usd=cost_usd, stages=(one,))


def _stages(source: Random, repeats: int) -> tuple[Stage, ...]:
    counts = sorted((source.randint(1, 12) for _ in range(source.randint(1, 4))), reverse=True)
    return _repeated([Stage(trials=trials, iterations=source.randint(1, 5)) for trials in counts], repeats)


def _repeated(stages: Sequence[Stage], repeats: int) -> tuple[Stage, ...]:
    return tuple(replace(stage, trials=repeats * stage.trials) for stage in stages)


def _generations(source: Random) -> tuple[Stage, ...]:
    stage = Stage(trials=source.randint(2, 12), iterations=source.randint(1, 4))
    exchange = Exchange(quantile=source.choice([0.1, 0.25, 0.5]))
    return (*[replace(stage, exchange=exchange)] * source.randint(1, 5), stage)


def _offer(source: Random, family: Family) -> Offer:
    gpus = source.choice([1, 2, 4, 8])
    price = source.choice([0.9, 3.06]) * gpus
    spot = Spot(price_usd_per_hour=price * source.uniform(0.2, 0.8), interruptions_per_hour=source.uniform(0.0, 1.0))
    return Offer(
        instance_type="chaos",
        gpus=gpus,
        price_usd_per_hour=price,
        max_instances=max(1, (16 if family == "27 trials" else 8) // gpus) + source.randint(0, 2),
        provision_delay_s=source.uniform(10.0, 90.0),
        init_delay_s=source.uniform(10.0, 200.0),
        minimum_billed_s=source.choice([60.0, 60.0, 0.0]),
        data_usd_per_instance=source.choice([0.0, 0.0, 0.05]),
        head_price_usd_per_hour=source.choice([0.0, 0.2]),
        spot=spot if source.random() < 0.7 else None,
    )


def _profile(source: Random) -> Profile:
    single_s, efficiency = math.exp(source.uniform(1.0, 6.0)), source.uniform(0.4, 1.0)
    return Profile(
        seconds_per_iteration={gpus: single_s / gpus**efficiency for gpus in (1, 2, 4, 8)},
        trial_startup_s=source.choice([0.0, 2.0, 10.0]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Divided:
    """Brackets in lanes, each with a plan for its instances."""

    offer: Offer
    brackets: tuple[Bracket, ...]
    quotas: tuple[int, ...]
    lanes: tuple[tuple[tuple[Stage, ...], Plan], ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for stages, _ in self.lanes for stage in stages)

    @property
    def plan(self) -> Plan:
        return Plan(stages=tuple(choice for _, plan in self.lanes for choice in plan.stages))

    def prediction(self, profile: Profile) -> Prediction:
        """The latest end of the lanes, and what they and the head node cost."""
        alone = replace(self.offer, head_price_usd_per_hour=0.0)
        found = [predict(stages, plan, profile, alone) for stages, plan in self.lanes]
        jct_s = max(one.jct_s for one in found)
        return Prediction(
            jct_s=jct_s,
            cost_usd=sum(one.cost_usd for one in found) + self.offer.head_cost_usd(jct_s),
            stages=tuple(stage for one in found for stage in one.stages),
        )


def _divided(source: Random, offer: Offer, repeats: int) -> _Divided:
    each = [_stages(source, repeats) for _ in range(source.randint(2, 4))]
    count = source.randint(1, min(3, len(each)))
    numbers = [tuple(range(first, len(each), count)) for first in range(count)]
    most = min(offer.max_instances, max(1, 8 // offer.gpus))
    quotas = tuple(source.randint(1, most) for _ in numbers)
    lanes = []
    for brackets, quota in zip(numbers, quotas, strict=True):
        stages = tuple(stage for bracket in brackets for stage in each[bracket])
        lanes.append((stages, _plan(source, stages, replace(offer, max_instances=quota))))
    offer = replace(offer, max_instances=sum(quotas) + source.randint(0, 2))
    return _Divided(offer=offer, brackets=brackets_of(each, numbers), quotas=quotas, lanes=tuple(lanes))


def _plan(source: Random, stages: tuple[Stage, ...], offer: Offer) -> Plan:
    markets: list[Market] = ["on_demand"] if offer.spot is None else ["on_demand", "spot"]
    everywhere = source.choice(markets)
    mixed = source.random() < 0.3
    chosen = []
    for _ in stages:
        instances = source.randint(1, offer.max_instances)
        sizes = [size for size in gang_sizes(offer.gpus, 1, 8) if slots(instances, offer.gpus, size) > 0]
        market = source.choice(markets) if mixed else everywhere
        chosen.append(StagePlan(instances=instances, gpus_per_trial=source.choice(sizes), market=market))
    return Plan(stages=tuple(chosen))


def with_sizes(job: Job, source: Random) -> Job:
    """Return the job with the numbers of GPUs that its trials may have: those of its plan, and some of the others."""
    planned = {choice.gpus_per_trial for choice in job.plan.stages}
    more = {size for size in job.gang_sizes(job.largest_gang) if source.random() < 0.3}
    return replace(job, gpus_per_trial_sizes=tuple(sorted(planned | more)))


_KINDS: tuple[FailureKind, ...] = ("raised", "hung", "died", "not_a_number", "checkpoint")
_SOUND = AttemptFaults()
_PROMPT = Messages()


class Chance:
    """A `FaultModel` drawn from a seed as the run goes on, and a count of what it brought."""

    def __init__(
        self,
        source: Random,
        weather: Weather,
        offer: Offer,
        highest_price_usd_per_hour: float,
        now: Callable[[], float],
        disk: Random,
    ) -> None:
        """`highest_price_usd_per_hour`: the most that another type may cost; `now`: the clock.

        What becomes of checkpoints is drawn from `disk`.
        """
        self._source = source
        self._disk = disk
        self._weather = weather
        self._offer = offer
        self._highest_price_usd_per_hour = highest_price_usd_per_hour
        self._now = now
        self._sold_out_until: dict[Market, float] = {}
        self.ends: Callable[[int], TrialEnd | None] = lambda trial: None
        """How trials end by themselves."""
        self._machines = Random(str(source.getstate()))
        self._paces: dict[str, tuple[float, float]] = {}
        """Instance -> how many times longer its steps take, and the instant from which."""
        self.seen: Counter[str] = Counter()

    def _happens(self, probability: float, what: str) -> bool:
        if probability and self._source.random() < probability:
            self.seen[what] += 1
            return True
        return False

    def instance(self, instance: str, market: Market) -> InstanceFaults:
        weather, source = self._weather, self._source
        if weather is CALM:
            return InstanceFaults()
        if self._now() >= self._sold_out_until.get(market, -math.inf) and self._happens(weather.refused, "sold out"):
            for_good = self._happens(weather.sold_out_for_good, "sold out for good")
            open_again_s = math.inf if for_good else source.expovariate(1.0 / weather.sold_out_s)
            self._sold_out_until[market] = self._now() + open_again_s
        if self._now() < self._sold_out_until.get(market, -math.inf):
            self.seen["refused"] += 1
            return InstanceFaults(refused=f"no capacity for {instance}", sold_out=True)
        slow = 20.0 if self._happens(weather.slow, "slow start") else 1.0
        provision_s = self._offer.provision_delay_s * slow * source.lognormvariate(0.0, 0.3)
        init_s = self._offer.init_delay_s * source.lognormvariate(0.0, 0.3)
        stillborn_after_s = math.inf
        if self._happens(weather.stillborn, "stillborn"):
            init_s, stillborn_after_s = source.choice(
                [(math.inf, math.inf), (init_s, source.uniform(0.0, provision_s))]
            )
        return self._with_end(
            InstanceFaults(
                provision_s=provision_s,
                init_s=init_s,
                stillborn_after_s=stillborn_after_s,
                price_usd_per_hour=self._price_usd_per_hour(market),
                hour_prices_usd=self._hour_prices_usd(market),
                lease_late_s=source.uniform(0.0, RELEASE_MARGIN_S / 2.0),
            ),
            market,
        )

    def _price_usd_per_hour(self, market: Market) -> float | None:
        if market == "spot":
            return self._offer.price_usd_per_hour * self._source.uniform(0.2, 1.0)
        if self._highest_price_usd_per_hour > self._offer.price_usd_per_hour and self._happens(0.2, "another type"):
            return self._highest_price_usd_per_hour
        return None

    def _hour_prices_usd(self, market: Market) -> tuple[float, ...] | None:
        """Of spot, half of the time: another price in each hour, at most that on demand."""
        if market != "spot" or not self._happens(0.5, "price moves"):
            return None
        return tuple(self._offer.price_usd_per_hour * self._source.uniform(0.2, 1.0) for _ in range(6))

    def _with_end(self, faults: InstanceFaults, market: Market) -> InstanceFaults:
        dies = self._weather.deaths_per_hour
        taken = self._weather.interruptions_per_hour if market == "spot" else 0.0
        if dies + taken == 0.0:
            return faults
        ends_after_s = self._source.expovariate((dies + taken) / SECONDS_PER_HOUR)
        preempted = self._source.random() < taken / (dies + taken)
        notice_s = self._source.choice([120.0, 120.0, 20.0, None]) if preempted else None
        return replace(faults, ends_after_s=ends_after_s, preempted=preempted, notice_s=notice_s)

    def messages(self, instance: str) -> Messages:
        if not self._happens(self._weather.late, "late messages"):
            return _PROMPT
        source = self._source
        return Messages(
            answer_s=source.choice([0.0, source.uniform(0.0, 120.0)]),
            arrives=source.random() < 0.5,
            seen_after_s=source.choice([0.0, 0.03, 1.0]) * source.uniform(0.0, self._weather.latest_s),
            release_s=source.choice([0.0, source.uniform(0.0, 5.0), source.uniform(0.0, 600.0)]),
        )

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        lost = self._disk.random() < self._weather.loses_checkpoint
        return replace(self._attempt(), loses_checkpoint=True) if lost else self._attempt()

    def end(self, trial: int) -> TrialEnd | None:
        """As `ends` says."""
        return self.ends(trial)

    def iteration(self, trial: int, iterations: int) -> float:
        """As all others of the attempt."""
        return 1.0

    def pace(self, instance: str, at: float) -> float:
        """Drawn once for each instance."""
        if instance not in self._paces:
            pace, since = 1.0, self._now() + self._machines.choice([0.0, 300.0])
            if self._machines.random() < self._weather.slow_instance:
                self.seen["slow instance"] += 1
                pace = self._machines.choice([2.0, 8.0, 40.0])
            self._paces[instance] = pace, since
        pace, since = self._paces[instance]
        return pace if at >= since else 1.0

    def _attempt(self) -> AttemptFaults:
        fails = self._happens(self._weather.trial_fails, "trial fails")
        slow = self._happens(self._weather.slow_trial, "slow trial")
        if not fails and not slow:
            return _SOUND
        return AttemptFaults(
            failure=self._source.choice(_KINDS) if fails else None,
            after_reports=self._source.choice([0, 0, 1, 5]),
            pace=self._source.uniform(1.0, 4.0) if slow else 1.0,
            outlives_stop=slow,
        )
