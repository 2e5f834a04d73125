"""What many plans of one job take and cost where nothing varies: the figures of `model.predict`, without its parts.

Plans that begin alike share the work of their first stages, so that searches which look at many pay for each once. All
sums are made in the order of `model.walk`: the results are equal, not close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from rubberband.offer import SECONDS_PER_HOUR, Offer
from rubberband.plan import Market, Plan, Stage, StagePlan
from rubberband.planner.model import MeanTimes, check_choice, check_length
from rubberband.profile import Profile

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
