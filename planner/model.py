"""The planning model: what a plan takes and costs (RubberBand §3-4), when nothing varies or for many samples at once.

SYNC makes stages additive, so one pass over the stages is the whole model; no graph is built. It searches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from rubberband.errors import InputError
from rubberband.values.offer import SECONDS_PER_HOUR, Offer, slots
from rubberband.values.plan import Cohort, Market, Plan, Prediction, Stage, StagePlan, StagePrediction
from rubberband.values.profile import Profile

Value = Any
"""Seconds or US dollars: a float, or an array of one for each sample. All arithmetic here holds for both."""


def run_s(
    stage: Stage, gpus_per_trial: int, profile: Profile, offer: Offer | None = None, market: Market = "on_demand"
) -> float:
    """Mean seconds that one trial of `stage` takes with `gpus_per_trial` GPUs: startup + w*e(g).

    On the spot market of `offer`, what interruptions cost on average is added: a restart, and half of the iterations
    between two checkpoints.
    """
    steady_s = profile.trial_startup_s + stage.iterations * profile.iteration_s(gpus_per_trial)
    if market == "on_demand":
        return steady_s
    assert offer is not None, "the spot market is an offer's"
    rate, lost_s = interruptions(stage, gpus_per_trial, profile, offer)
    return steady_s * (1.0 + rate * lost_s)


def interruptions(stage: Stage, gpus_per_trial: int, profile: Profile, offer: Offer) -> tuple[float, float]:
    """A trial's interruptions per second on the spot market, and the mean seconds that one of them costs it."""
    spot = offer.spot
    assert spot is not None, "a plan uses the markets that its offer has"
    rate = spot.interruptions_per_hour / SECONDS_PER_HOUR * max(1, gpus_per_trial // offer.gpus)
    redone = min(spot.checkpoint_iterations, stage.iterations) / 2.0
    return rate, spot.restart_s + redone * profile.iteration_s(gpus_per_trial)


def least_instances(num_slots: int, gpus_per_instance: int, gpus_per_trial: int) -> int:
    """The fewest instances that run `num_slots` trials at once: the inverse of `offer.slots`."""
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
            f"the plan has {len(plan.stages)} stages and the job {num_stages}; give instances and gpus_per_trial "
            "for each stage of the job"
        )


def check_choice(index: int, choice: StagePlan, offer: Offer) -> None:
    """Raise InputError unless the choice of stage `index` can be carried out on `offer`."""
    where = f"stage {index} of the plan"
    gpus = choice.gpus_per_trial
    if choice.instances < 1 or gpus < 1:
        raise InputError(f"{where} has instances={choice.instances} and gpus_per_trial={gpus}; both must be at least 1")
    if choice.instances > offer.max_instances:
        raise InputError(
            f"{where} wants {choice.instances} instances and max_instances is {offer.max_instances}; "
            f"raise max_instances, or plan at most {offer.max_instances}"
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
            f"{where} gives {choice.instances} instances of {offer.gpus} GPUs to trials of {gpus} GPUs; none fits: "
            f"plan at least {gpus // offer.gpus} instances, or fewer GPUs per trial"
        )


class Times(Protocol):
    """How long things take: means, or samples."""

    def provision_s(self, index: int) -> Value:
        """SCALE before stage `index`."""

    def init_s(self, index: int, started: int) -> Value:
        """INIT_INSTANCE before stage `index`: the slowest of `started` instances."""

    def stage_s(self, index: int, choice: StagePlan) -> Value:
        """From the first trial's start to SYNC."""

    def busy_s(self, index: int, choice: StagePlan) -> Value:
        """The sum of what the stage's trials take."""


@dataclass(frozen=True, slots=True)
class MeanTimes:
    """Every trial and every delay lasts exactly its mean (deterministic waves)."""

    stages: Sequence[Stage]
    profile: Profile
    offer: Offer

    def provision_s(self, index: int) -> float:
        """SCALE."""
        return self.offer.provision_delay_s

    def init_s(self, index: int, started: int) -> float:
        """INIT_INSTANCE."""
        return self.offer.init_delay_s

    def stage_s(self, index: int, choice: StagePlan) -> float:
        """ceil(n/slots) waves of equally long trials."""
        num_slots = slots(choice.instances, self.offer.gpus, choice.gpus_per_trial)
        return -(-self.stages[index].trials // num_slots) * self._run_s(index, choice)

    def busy_s(self, index: int, choice: StagePlan) -> float:
        """n times the same."""
        return self.stages[index].trials * self._run_s(index, choice)

    def _run_s(self, index: int, choice: StagePlan) -> float:
        return run_s(self.stages[index], choice.gpus_per_trial, self.profile, self.offer, choice.market)


@dataclass(slots=True)
class _Group:
    """Instances that were started together."""

    instances: int
    held_s: Value
    billed_s: Value
    """The same, or the minimum where that is more."""


def _group(instances: int, held_s: float, offer: Offer) -> _Group:
    return _Group(instances, held_s, max(offer.minimum_billed_s, held_s))


@dataclass(slots=True)
class _Cluster:
    """The instances held, oldest first and all of one market, and what each further second of them costs."""

    offer: Offer
    groups: list[_Group]
    market: Market

    @property
    def instances(self) -> int:
        return sum(group.instances for group in self.groups)

    def use(self, choice: StagePlan) -> int:
        """Release what `choice` does not need, those billed longest first; how many it lacks."""
        if choice.market != self.market:
            self.groups, self.market = [], choice.market
        surplus = self.instances - choice.instances
        for group in self.groups:
            released = min(max(0, surplus), group.instances)
            group.instances -= released
            surplus -= released
        return max(0, -surplus)

    def hold(self, seconds: Value) -> Value:
        """Hold everything for `seconds`; what that adds to the bill beyond the minimum already paid, in USD."""
        minimum_s = self.offer.minimum_billed_s
        billed_s: Value = 0.0
        for group in self.groups:
            before_s = group.billed_s
            group.held_s = group.held_s + seconds
            group.billed_s = _at_least(minimum_s, group.held_s)
            billed_s += group.instances * (group.billed_s - before_s)
        return 0.0 if self.offer.billing == "per_function" else self._price_usd_per_s * billed_s

    def start(self, instances: int) -> float:
        """Start `instances` more; the minimum and the data that this commits to, in USD."""
        self.groups.append(_group(instances, 0.0, self.offer))
        minimum_s = 0.0 if self.offer.billing == "per_function" else self.offer.minimum_billed_s
        return instances * (self._price_usd_per_s * minimum_s + self.offer.once_usd_per_instance)

    @property
    def _price_usd_per_s(self) -> float:
        return self.offer.market_price_usd_per_s(self.market)


def _at_least(minimum: float, value: Value) -> Value:
    return max(minimum, value) if isinstance(value, float) else value.clip(minimum)


@dataclass(frozen=True, slots=True)
class Step:
    """What one stage takes and costs."""

    provisioning_s: Value
    duration_s: Value
    cost_usd: Value


def walk(plan: Plan, offer: Offer, times: Times, held: Sequence[Cohort] = ()) -> list[Step]:
    """The stages of a plan one after another, with the bill that each adds."""
    markets: set[Market] = {cohort.market for cohort in held}
    assert len(markets) <= 1, "instances held are of one market"
    oldest_first = sorted(held, key=lambda cohort: -cohort.held_s)
    groups = [_group(cohort.instances, float(cohort.held_s), offer) for cohort in oldest_first]
    cluster = _Cluster(offer, groups, markets.pop() if markets else plan.stages[0].market)
    return [_step(index, choice, cluster, times) for index, choice in enumerate(plan.stages)]


def _step(index: int, choice: StagePlan, cluster: _Cluster, times: Times) -> Step:
    offer = cluster.offer
    started = cluster.use(choice)
    provisioning_s, cost_usd = 0.0, _trials_usd(index, choice, offer, times)
    if started:
        provision_s, init_s = times.provision_s(index), times.init_s(index, started)
        provisioning_s = provision_s + init_s
        cost_usd = cost_usd + cluster.hold(provision_s) + cluster.start(started) + cluster.hold(init_s)
    duration_s = times.stage_s(index, choice)
    cost_usd = cost_usd + cluster.hold(duration_s) + offer.head_cost_usd(provisioning_s + duration_s)
    if choice.market == "spot" and offer.spot is not None and offer.once_usd_per_instance:
        replaced = choice.instances * duration_s * offer.spot.interruptions_per_hour / SECONDS_PER_HOUR
        cost_usd = cost_usd + replaced * offer.once_usd_per_instance
    return Step(provisioning_s, duration_s, cost_usd)


def _trials_usd(index: int, choice: StagePlan, offer: Offer, times: Times) -> Value:
    """What the trials themselves cost, under `per_function` billing."""
    if offer.billing == "per_instance":
        return 0.0
    share = choice.gpus_per_trial / offer.gpus
    return offer.market_price_usd_per_s(choice.market) * share * times.busy_s(index, choice)


def predict(
    stages: Sequence[Stage], plan: Plan, profile: Profile, offer: Offer, held: Sequence[Cohort] = ()
) -> Prediction:
    """What `plan` takes and costs when every trial and every delay lasts exactly its mean (RubberBand §4.1-4.2).

    Growing inserts `offer.provision_delay_s` and then `offer.init_delay_s` before the stage, while the instances
    already held stay held and billed; shrinking is instant at the previous SYNC and releases those billed longest.
    The delays are the offer's: where the profile measured them, the caller puts them into the offer.

    The stages' costs add up to the total. An instance's minimum and data count for the stage that starts it, since
    they are owed from then on; later stages add only what goes beyond the minimum. With `held` (the rest of a job that
    runs), the bill is what is added from now on: minima of the instances held are paid.

    Raises InputError if the plan does not fit the job or the offer, or uses fewer GPUs than the profile measured.
    """
    check_plan(stages, plan, offer)
    return summed(plan, profile, offer, walk(plan, offer, MeanTimes(stages, profile, offer), held))


def summed(plan: Plan, profile: Profile, offer: Offer, steps: Sequence[Step]) -> Prediction:
    """The prediction that `steps` (of mean values) add up to."""
    predictions: list[StagePrediction] = []
    now_s = 0.0
    for step, choice in zip(steps, plan.stages, strict=True):
        predictions.append(
            StagePrediction(
                start_s=now_s,
                provisioning_s=step.provisioning_s,
                duration_s=step.duration_s,
                cost_usd=step.cost_usd,
                slots=slots(choice.instances, offer.gpus, choice.gpus_per_trial),
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


# What many plans of one job take and cost where nothing varies: the figures of `model.predict`, without its parts.
#
# Plans that begin alike share the work of their first stages, so that searches which look at many pay for each once.
# All sums are made in the order of `model.walk`: the results are equal, not close.


_Groups = tuple[tuple[int, float], ...]
"""(instances, seconds that they are held), oldest first."""
_Key = tuple[int, int, Market]
"""Of a choice: instances, GPUs per trial, market."""


@dataclass(slots=True)
class _Node:
    """Where a job stands after its first stages."""

    groups: _Groups
    instances: int
    """Of all groups."""
    market: Market | None
    jct_s: float
    costs_usd: tuple[float, ...]
    """Of the stages so far."""
    after: dict[_Key, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a stage takes and costs by a choice, whatever came before."""

    instances: int
    market: Market
    price_usd_per_s: float
    duration_s: float
    trials_usd: float
    replaced_usd: float | None
    """The data of replaced instances; None where there is none."""


KEPT_JOBS = 64
MOST_NODES = 20_000
"""Of one job; beyond that it starts anew."""


def mean_cost_of(stages: Sequence[Stage], profile: Profile, offer: Offer) -> MeanCost:
    """The function of a job; of those that were asked about lately, with all that it found out before."""
    return _kept(tuple(stages), profile, offer)


@lru_cache(maxsize=KEPT_JOBS)
def _kept(stages: tuple[Stage, ...], profile: Profile, offer: Offer) -> MeanCost:
    return MeanCost(stages, profile, offer)


class MeanCost:
    """A function from a plan to (jct_s, cost_usd)."""

    def __init__(self, stages: Sequence[Stage], profile: Profile, offer: Offer) -> None:
        self._offer = offer
        self._times = MeanTimes(stages, profile, offer)
        self._known: list[dict[_Key, _Choice]] = [{} for _ in stages]
        self._minimum_s = offer.minimum_billed_s if offer.billing == "per_instance" else 0.0
        self._root, self._num_nodes = _nothing(), 0
        self.figures: dict[tuple[tuple[int, int], ...], tuple[float, float]] = {}
        """Figures of the allocations that `rubberband.planner.paper.greedy` has looked at, for its next search."""

    def __call__(self, plan: Plan) -> tuple[float, float]:
        """What the plan takes and costs. Raises InputError as `predict` does."""
        check_length(len(self._known), plan)
        if self._num_nodes > MOST_NODES:
            self._root, self._num_nodes = _nothing(), 0
            self.figures.clear()
        node = self._root
        for index, choice in enumerate(plan.stages):
            key = (choice.instances, choice.gpus_per_trial, choice.market)
            found = node.after.get(key)
            if found is None:
                known = self._known[index].get(key)
                if known is None:
                    known = self._known[index][key] = self._choice(index, choice)
                found = node.after[key] = self._after(node, known)
                self._num_nodes += 1
            node = found
        return node.jct_s, sum(node.costs_usd)

    def _choice(self, index: int, choice: StagePlan) -> _Choice:
        offer = self._offer
        check_choice(index, choice, offer)
        duration_s, price = self._times.stage_s(index, choice), offer.market_price_usd_per_s(choice.market)
        replaced_usd = None
        if choice.market == "spot" and offer.spot is not None and offer.once_usd_per_instance:
            replaced = choice.instances * duration_s * offer.spot.interruptions_per_hour / SECONDS_PER_HOUR
            replaced_usd = replaced * offer.once_usd_per_instance
        return _Choice(
            choice.instances,
            choice.market,
            price,
            duration_s,
            self._trials_usd(index, choice, price),
            replaced_usd,
        )

    def _after(self, node: _Node, choice: _Choice) -> _Node:
        offer, price, duration_s = self._offer, choice.price_usd_per_s, choice.duration_s
        groups, held = (node.groups, node.instances) if choice.market == node.market else ((), 0)
        provisioning_s, cost_usd = 0.0, choice.trials_usd
        if held > choice.instances:
            groups = _released(groups, held - choice.instances)
        elif held < choice.instances:
            started = choice.instances - held
            provisioning_s = offer.provision_delay_s + offer.init_delay_s
            groups, held_usd = self._held(groups, offer.provision_delay_s, price)
            groups, started_usd = (*groups, (started, 0.0)), self._started_usd(started, price)
            groups, init_usd = self._held(groups, offer.init_delay_s, price)
            cost_usd = cost_usd + held_usd + started_usd + init_usd
        groups, held_usd = self._held(groups, duration_s, price)
        cost_usd = cost_usd + held_usd + offer.head_cost_usd(provisioning_s + duration_s)
        if choice.replaced_usd is not None:
            cost_usd = cost_usd + choice.replaced_usd
        jct_s = node.jct_s + (provisioning_s + duration_s)
        return _Node(groups, choice.instances, choice.market, jct_s, (*node.costs_usd, cost_usd))

    def _held(self, groups: _Groups, seconds: float, price_usd_per_s: float) -> tuple[_Groups, float]:
        """The groups some seconds later, and what that adds to the bill beyond the minimum."""
        if self._offer.billing == "per_function":
            return groups, 0.0
        minimum_s, billed_s, later = self._minimum_s, 0.0, list[tuple[int, float]]()
        for instances, held_s in groups:
            after_s = held_s + seconds
            if after_s > minimum_s:
                billed_s += instances * (after_s - (held_s if held_s > minimum_s else minimum_s))
            later.append((instances, after_s))
        return tuple(later), price_usd_per_s * billed_s

    def _started_usd(self, instances: int, price_usd_per_s: float) -> float:
        return instances * (price_usd_per_s * self._minimum_s + self._offer.once_usd_per_instance)

    def _trials_usd(self, index: int, choice: StagePlan, price_usd_per_s: float) -> float:
        if self._offer.billing == "per_instance":
            return 0.0
        return price_usd_per_s * (choice.gpus_per_trial / self._offer.gpus) * self._times.busy_s(index, choice)


def _nothing() -> _Node:
    return _Node((), 0, None, 0.0, ())


def _released(groups: _Groups, surplus: int) -> _Groups:
    """What is left of the groups without so many instances, the oldest given back first."""
    left = []
    for held, held_s in groups:
        released = min(surplus, held)
        surplus -= released
        if held > released:
            left.append((held - released, held_s))
    return tuple(left)
