"""The planning model: time and cost of a plan (RubberBand §3-4), for mean times or for many samples at once.

SYNC makes stages additive, so one pass over the stages is the whole model; no graph is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from rubberband.errors import InputError
from rubberband.units import counted
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, slots
from rubberband.values.plan import Cohort, Market, Plan, Prediction, Stage, StagePlan, StagePrediction
from rubberband.values.profile import Profile

Value = Any
"""Seconds or US dollars: a float, or an array with one per sample. All arithmetic here works for both."""


def run_s(
    stage: Stage, gpus_per_trial: int, profile: Profile, offer: Offer | None = None, market: Market = "on_demand"
) -> float:
    """Return the mean seconds of one trial of `stage` with `gpus_per_trial` GPUs: startup + w*e(g).

    On the spot market of `offer` this includes the mean loss by interruptions: a restart, and half of the iterations
    between two checkpoints; half of all where a trial saves none.
    """
    steady_s = profile.startup_s(gpus_per_trial) + stage.work * profile.iteration_s(gpus_per_trial)
    if market == "on_demand":
        return steady_s
    assert offer is not None, "the spot market is an offer's"
    rate, lost_s = interruptions(stage, gpus_per_trial, profile, offer)
    return steady_s * (1.0 + rate * lost_s)


def interruptions(stage: Stage, gpus_per_trial: int, profile: Profile, offer: Offer) -> tuple[float, float]:
    """Return a trial's interruptions per second on the spot market, and the mean seconds lost by one of them."""
    spot = offer.spot
    assert spot is not None, "a plan uses the markets that its offer has"
    rate = spot.interruptions_per_hour / SECONDS_PER_HOUR * max(1, gpus_per_trial // offer.slots)
    redone = (stage.work if stage.repeats is not None else min(spot.checkpoint_iterations, stage.iterations)) / 2.0
    return rate, spot.restart_s + redone * profile.iteration_s(gpus_per_trial)


def least_instances(num_slots: int, gpus_per_instance: int, gpus_per_trial: int) -> int:
    """Return the fewest instances that run `num_slots` trials at once: the inverse of `offer.slots`."""
    if gpus_per_trial <= gpus_per_instance:
        return -(-num_slots // (gpus_per_instance // gpus_per_trial))
    return num_slots * (gpus_per_trial // gpus_per_instance)


def check_plan(stages: Sequence[Stage], plan: Plan, offer: Offer) -> None:
    """Raise InputError unless `plan` fits `stages` and can be carried out on `offer`."""
    check_length(len(stages), plan)
    for index, choice in enumerate(plan.stages):
        check_choice(index, choice, offer)


def check_length(num_stages: int, plan: Plan) -> None:
    """Raise InputError unless `plan` has a choice for each stage."""
    if len(plan.stages) != num_stages:
        raise InputError(
            f"the plan has {counted(len(plan.stages), 'stage')} and the job {num_stages}; give instances and "
            "gpus_per_trial for each stage of the job"
        )


def check_choice(index: int, choice: StagePlan, offer: Offer) -> None:
    """Raise InputError unless the choice of stage `index` can be carried out on `offer`."""
    where = f"stage {index} of the plan"
    gpus = choice.gpus_per_trial
    if choice.instances < 1 or gpus < 1:
        raise InputError(f"{where} has instances={choice.instances} and gpus_per_trial={gpus}; both must be at least 1")
    if choice.instances > offer.max_instances:
        raise InputError(
            f"{where} wants {counted(choice.instances, 'instance')} and max_instances is {offer.max_instances}; "
            f"raise max_instances, or plan at most {offer.max_instances}"
        )
    if gpus > 1 and offer.trials_per_gpu > 1:
        raise InputError(
            f"{where} has gpus_per_trial={gpus}, and {offer.trials_per_gpu} trials share each GPU; plan 1, or set "
            "resources.trials_per_gpu to 1"
        )
    if gpus > offer.gpus and gpus % offer.gpus:
        raise InputError(
            f"{where} has gpus_per_trial={gpus}; beyond the {offer.gpus} GPUs of {offer.instance_type} it must be "
            f"a multiple of {offer.gpus}, such as {gpus // offer.gpus * offer.gpus}"
        )
    if choice.market == "spot" and offer.spot is None:
        raise InputError(
            f"{where} has market=spot and {offer.instance_type} is offered on demand only; use on_demand, or set "
            "resources.market to spot"
        )
    if slots(choice.instances, offer.gpus, gpus) < 1:
        raise InputError(
            f"{where} gives {counted(choice.instances, 'instance')} of {counted(offer.gpus, 'GPU')} to trials of "
            f"{gpus} GPUs; none fits: plan at least {counted(gpus // offer.gpus, 'instance')}, or fewer GPUs per trial"
        )


class Times(Protocol):
    """Durations of a job: means, or samples."""

    def provision_s(self, index: int) -> Value:
        """SCALE before stage `index`."""

    def init_s(self, index: int, started: int) -> Value:
        """INIT_INSTANCE before stage `index`: the slowest of `started` instances."""

    def unsettled_s(self, index: int, choice: StagePlan, held: int) -> Value:
        """Further wait on the spot market until no instance is missing, where the stage before held `held`."""

    def stage_s(self, index: int, choice: StagePlan) -> Value:
        """From the first trial's start to SYNC."""

    def busy_s(self, index: int, choice: StagePlan) -> Value:
        """Sum of the durations of the stage's trials."""


@dataclass(frozen=True, slots=True)
class MeanTimes:
    """Every trial and every delay lasts exactly its mean: deterministic waves."""

    stages: Sequence[Stage]
    profile: Profile
    offer: Offer
    _runs_s: dict[tuple[int, int, Market], float] = field(default_factory=dict, compare=False, repr=False)
    """By stage, GPUs per trial and market."""

    def provision_s(self, index: int) -> float:
        return self.offer.provision_delay_s

    def init_s(self, index: int, started: int) -> float:
        return self.offer.init_delay_s

    def unsettled_s(self, index: int, choice: StagePlan, held: int) -> float:
        return 0.0

    def stage_s(self, index: int, choice: StagePlan) -> float:
        """ceil(n/slots) waves of equally long trials."""
        num_slots = slots(choice.instances, self.offer.slots, choice.gpus_per_trial)
        return -(-self.stages[index].trials // num_slots) * self._run_s(index, choice)

    def busy_s(self, index: int, choice: StagePlan) -> float:
        """n trials of equal length."""
        return self.stages[index].trials * self._run_s(index, choice)

    def _run_s(self, index: int, choice: StagePlan) -> float:
        key = (index, choice.gpus_per_trial, choice.market)
        known = self._runs_s.get(key)
        if known is None:
            known = self._runs_s[key] = run_s(self.stages[index], key[1], self.profile, self.offer, key[2])
        return known


class StageOutcome(NamedTuple):
    """Time and cost of one stage."""

    provisioning_s: Value
    duration_s: Value
    cost_usd: Value


_Groups = tuple[tuple[int, Value], ...]
"""(instances, seconds until they reach the billing minimum, which is paid) of instances started together, oldest first;
all that have reached it are one group."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Billing rules of an offer, with every price per second."""

    prices_usd_per_s: dict[Market, float]
    """Price of one instance held, with what its replacements on the spot market cost and the time in which none is
    billed; the price itself is 0 under `per_function` billing."""
    trials_usd_per_s: dict[Market, float]
    """Price of one busy instance under `per_function` billing; else 0."""
    slots: int
    minimum_s: float
    """Seconds billed at least for one instance; 0 under `per_function` billing."""
    once_usd: float
    head_usd_per_s: float

    @classmethod
    def of(cls, offer: Offer) -> Rates:
        """Return the rates of an offer."""
        markets: list[Market] = ["on_demand"] if offer.spot is None else ["on_demand", "spot"]
        prices = {market: offer.market_price_usd_per_s(market) for market in markets}
        none = dict.fromkeys(prices, 0.0)
        held, busy = (prices, none) if offer.billing == "per_instance" else (none, prices)
        if offer.spot is not None:
            # Renewal: an instance lives for 1/rate, then its replacement waits for SCALE and costs its start.
            rate = offer.spot.interruptions_per_hour / SECONDS_PER_HOUR
            renewed = (held["spot"] + rate * offer.once_usd_per_instance) / (1.0 + rate * offer.provision_delay_s)
            held = {**held, "spot": renewed}
        return cls(
            prices_usd_per_s=held,
            trials_usd_per_s=busy,
            slots=offer.slots,
            minimum_s=float(offer.minimum_billed_s) if offer.billing == "per_instance" else 0.0,
            once_usd=offer.once_usd_per_instance,
            head_usd_per_s=offer.head_cost_usd(1.0),
        )

    def hold(self, groups: _Groups, seconds: Value, market: Market) -> tuple[_Groups, Value]:
        """Hold everything for `seconds`. Return the groups then, and the cost beyond the minimum already paid."""
        price_usd_per_s = self.prices_usd_per_s[market]
        if price_usd_per_s == 0.0 or not groups:
            return groups, 0.0
        old, billed_s, young = 0, 0.0, list[tuple[int, Value]]()
        for instances, left_s in groups:
            beyond_s = seconds - left_s
            if not isinstance(beyond_s, float):
                billed_s = billed_s + instances * beyond_s.clip(0.0)
                young.append((instances, (-beyond_s).clip(0.0)))
            elif beyond_s >= 0.0:
                billed_s += instances * beyond_s
                old += instances
            else:
                young.append((instances, -beyond_s))
        return ((old, 0.0), *young) if old else tuple(young), price_usd_per_s * billed_s

    def start_usd(self, instances: int, market: Market) -> float:
        """Return the minimum and the data that starting `instances` commits to."""
        return instances * (self.prices_usd_per_s[market] * self.minimum_s + self.once_usd)

    def trials_usd(self, index: int, choice: StagePlan, times: Times) -> Value:
        """Return the cost of the trials themselves, under `per_function` billing."""
        price_usd_per_s = self.trials_usd_per_s[choice.market]
        if price_usd_per_s == 0.0:
            return 0.0
        return price_usd_per_s * (choice.gpus_per_trial / self.slots) * times.busy_s(index, choice)


def _groups_of(held: Sequence[Cohort], rates: Rates) -> tuple[_Groups, Market | None]:
    """Return the groups of instances held, and their market."""
    markets = {cohort.market for cohort in held}
    assert len(markets) <= 1, "instances held are of one market"
    oldest_first = sorted(held, key=lambda cohort: -cohort.held_s)
    groups = tuple((one.instances, max(0.0, rates.minimum_s - one.held_s)) for one in oldest_first)
    return groups, markets.pop() if markets else None


def _after(
    groups: _Groups, index: int, choice: StagePlan, rates: Rates, times: Times
) -> tuple[_Groups, Value, Value, Value]:
    """Run stage `index`: release what it does not need, start what it lacks, hold all while it lasts.

    `groups` are held on the stage's market. Return those held after it, and the parts of its `StageOutcome`.
    """
    market = choice.market
    before = sum([group[0] for group in groups])
    missing = choice.instances - before
    provisioning_s, cost_usd = 0.0, rates.trials_usd(index, choice, times)
    if missing < 0:
        groups = _released(groups, -missing)
    elif missing > 0:
        provision_s, init_s = times.provision_s(index), times.init_s(index, missing)
        provisioning_s = provision_s + init_s
        groups, held_usd = rates.hold(groups, provision_s, market)
        groups, init_usd = rates.hold((*groups, (missing, rates.minimum_s)), init_s, market)
        cost_usd = cost_usd + held_usd + rates.start_usd(missing, market) + init_usd
    if market == "spot":
        wait_s = times.unsettled_s(index, choice, before)
        groups, held_usd = rates.hold(groups, wait_s, market)
        provisioning_s, cost_usd = provisioning_s + wait_s, cost_usd + held_usd
    duration_s = times.stage_s(index, choice)
    groups, held_usd = rates.hold(groups, duration_s, market)
    cost_usd = cost_usd + held_usd + rates.head_usd_per_s * (provisioning_s + duration_s)
    return groups, provisioning_s, duration_s, cost_usd


def _released(groups: _Groups, surplus: int) -> _Groups:
    """Return the groups less `surplus` instances; those billed longest are released first."""
    left = []
    for instances, left_s in groups:
        released = min(surplus, instances)
        surplus -= released
        if instances > released:
            left.append((instances - released, left_s))
    return tuple(left)


def walk(plan: Plan, offer: Offer, times: Times, held: Sequence[Cohort] = ()) -> list[StageOutcome]:
    """Return the stages of a plan one after another, each with what it adds to the bill."""
    rates = Rates.of(offer)
    (groups, market), steps = _groups_of(held, rates), list[StageOutcome]()
    for index, choice in enumerate(plan.stages):
        kept = groups if choice.market == market else ()
        groups, *outcome = _after(kept, index, choice, rates, times)
        market = choice.market
        steps.append(StageOutcome(*outcome))
    return steps


def predict(
    stages: Sequence[Stage], plan: Plan, profile: Profile, offer: Offer, held: Sequence[Cohort] = ()
) -> Prediction:
    """Return the time and cost of `plan` if every trial and every delay lasts exactly its mean (RubberBand §4.1-4.2).

    Growing inserts `offer.provision_delay_s` and then `offer.init_delay_s` before the stage; instances already held
    stay held and billed meanwhile. Shrinking is instant at the previous SYNC and releases those billed longest.
    The delays are the offer's: where the profile measured them, the caller puts them into the offer.

    The stages' costs add up to the total. An instance's minimum and data count for the stage that starts it; later
    stages add only the time beyond the minimum. With `held` (the rest of a running job), the bill counts from now on:
    the minimum of instances held is already paid.

    Raises InputError if the plan does not fit the job or the offer, or uses fewer GPUs than the profile measured.
    """
    check_plan(stages, plan, offer)
    return summed(plan, profile, offer, walk(plan, offer, MeanTimes(stages, profile, offer), held))


def summed(plan: Plan, profile: Profile, offer: Offer, steps: Sequence[StageOutcome]) -> Prediction:
    """Return the prediction that `steps` (of mean values) add up to."""
    predictions: list[StagePrediction] = []
    now_s = 0.0
    for step, choice in zip(steps, plan.stages, strict=True):
        predictions.append(
            StagePrediction(
                start_s=now_s,
                provisioning_s=step.provisioning_s,
                duration_s=step.duration_s,
                cost_usd=step.cost_usd,
                slots=slots(choice.instances, offer.slots, choice.gpus_per_trial),
            )
        )
        now_s += step.provisioning_s + step.duration_s
    beyond = {choice.gpus_per_trial for choice in plan.stages if choice.gpus_per_trial > profile.largest_gpus}
    return Prediction(
        jct_s=now_s,
        cost_usd=sum(predicted.cost_usd for predicted in predictions),
        stages=tuple(predictions),
        extrapolated=tuple(sorted(beyond)),
    )


_Choice = tuple[int, int, Market]
"""Instances, GPUs per trial and market of a stage."""


@dataclass(slots=True)
class _Node:
    """State of a job after its first stages: all that the cost of the next ones depends on."""

    groups: _Groups = ()
    market: Market | None = None
    after: dict[_Choice, tuple[_Node, float, float]] = field(default_factory=dict)
    """The state after the next stage, and its seconds and US dollars."""


KEPT_JOBS = 64
MOST_NODES = 20_000
"""Most steps from state to state of one job; beyond that its memory starts anew."""


class MeanCost:
    """A function from a plan to (jct_s, cost_usd): equal to those of `predict`, for searches that try many plans.

    Plans that come to the same state share the work of the stages after it.
    """

    figures: dict[tuple[tuple[int, int], ...], tuple[float, float]]
    """Notes of `rubberband.planner.search.greedy` on this job; bounded as the rest of the memory is."""

    def __init__(self, stages: Sequence[Stage], profile: Profile, offer: Offer) -> None:
        self.figures = {}
        self._offer, self._rates, self._num_stages = offer, Rates.of(offer), len(stages)
        self._times = MeanTimes(stages, profile, offer)
        self._forget()

    def _forget(self) -> None:
        self._root, self._num_steps = _Node(), 0
        self._nodes = dict[tuple[int, _Groups, Market], _Node]()
        self.figures.clear()

    def __call__(self, plan: Plan) -> tuple[float, float]:
        """Return time and cost of the plan. Raises InputError as `predict` does."""
        check_length(self._num_stages, plan)
        if self._num_steps > MOST_NODES:
            self._forget()
        node, jct_s, cost_usd = self._root, 0.0, 0.0
        for index, choice in enumerate(plan.stages):
            key = (choice.instances, choice.gpus_per_trial, choice.market)
            node, stage_s, stage_usd = node.after.get(key) or self._step(node, index, choice, key)
            jct_s += stage_s
            cost_usd += stage_usd
        return jct_s, cost_usd

    def _step(self, node: _Node, index: int, choice: StagePlan, key: _Choice) -> tuple[_Node, float, float]:
        check_choice(index, choice, self._offer)
        kept = node.groups if choice.market == node.market else ()
        groups, provisioning_s, duration_s, cost_usd = _after(kept, index, choice, self._rates, self._times)
        after = self._nodes.setdefault((index, groups, choice.market), _Node(groups, choice.market))
        node.after[key] = step = after, provisioning_s + duration_s, cost_usd
        self._num_steps += 1
        return step


def mean_cost_of(stages: Sequence[Stage], profile: Profile, offer: Offer) -> MeanCost:
    """Return the `MeanCost` of a job; those of recent jobs are kept with all that they have computed."""
    return _recent_cost(tuple(stages), profile, offer)


_recent_cost = lru_cache(maxsize=KEPT_JOBS)(MeanCost)
