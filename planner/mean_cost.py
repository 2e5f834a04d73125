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


@dataclass(slots=True)
class _Node:
    """Where a job stands after its first stages."""

    groups: _Groups
    market: Market | None
    jct_s: float
    costs_usd: tuple[float, ...]
    """Of the stages so far."""
    after: dict[tuple[int, int, Market], _Node] = field(default_factory=dict)


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
        self._offer, self._num_stages = offer, len(stages)
        self._times = MeanTimes(stages, profile, offer)
        self._root, self._num_nodes = _Node((), None, 0.0, ()), 0

    def __call__(self, plan: Plan) -> tuple[float, float]:
        """What the plan takes and costs. Raises InputError as `predict` does."""
        check_length(self._num_stages, plan)
        if self._num_nodes > MOST_NODES:
            self._root, self._num_nodes = _Node((), None, 0.0, ()), 0
        node = self._root
        for index, choice in enumerate(plan.stages):
            key = (choice.instances, choice.gpus_per_trial, choice.market)
            found = node.after.get(key)
            if found is None:
                check_choice(index, choice, self._offer)
                found = node.after[key] = self._after(node, index, choice)
                self._num_nodes += 1
            node = found
        return node.jct_s, sum(node.costs_usd)

    def _after(self, node: _Node, index: int, choice: StagePlan) -> _Node:
        offer, price = self._offer, self._offer.market_price_usd_per_s(choice.market)
        groups, started = _used(node.groups if choice.market == node.market else (), choice.instances)
        provisioning_s, cost_usd = 0.0, self._trials_usd(index, choice, price)
        if started:
            provisioning_s = offer.provision_delay_s + offer.init_delay_s
            groups, held_usd = self._held(groups, offer.provision_delay_s, price)
            groups, started_usd = (*groups, (started, 0.0)), self._started_usd(started, price)
            groups, init_usd = self._held(groups, offer.init_delay_s, price)
            cost_usd = cost_usd + held_usd + started_usd + init_usd
        duration_s = self._times.stage_s(index, choice)
        groups, held_usd = self._held(groups, duration_s, price)
        cost_usd = cost_usd + held_usd + offer.head_cost_usd(provisioning_s + duration_s)
        if choice.market == "spot" and offer.spot is not None and offer.data_usd_per_instance:
            replaced = choice.instances * duration_s * offer.spot.interruptions_per_hour / SECONDS_PER_HOUR
            cost_usd = cost_usd + replaced * offer.data_usd_per_instance
        jct_s = node.jct_s + (provisioning_s + duration_s)
        return _Node(groups, choice.market, jct_s, (*node.costs_usd, cost_usd))

    def _held(self, groups: _Groups, seconds: float, price_usd_per_s: float) -> tuple[_Groups, float]:
        """The groups some seconds later, and what that adds to the bill beyond the minimum."""
        if self._offer.billing == "per_function":
            return groups, 0.0
        minimum_s, billed_s, later = self._offer.minimum_billed_s, 0.0, list[tuple[int, float]]()
        for instances, held_s in groups:
            after_s = held_s + seconds
            billed_s += instances * (max(minimum_s, after_s) - max(minimum_s, held_s))
            later.append((instances, after_s))
        return tuple(later), price_usd_per_s * billed_s

    def _started_usd(self, instances: int, price_usd_per_s: float) -> float:
        minimum_s = 0.0 if self._offer.billing == "per_function" else self._offer.minimum_billed_s
        return instances * (price_usd_per_s * minimum_s + self._offer.data_usd_per_instance)

    def _trials_usd(self, index: int, choice: StagePlan, price_usd_per_s: float) -> float:
        if self._offer.billing == "per_instance":
            return 0.0
        return price_usd_per_s * (choice.gpus_per_trial / self._offer.gpus) * self._times.busy_s(index, choice)


def _used(groups: _Groups, instances: int) -> tuple[_Groups, int]:
    """What is left of the groups for so many instances, the oldest given back first; and how many are lacking."""
    surplus = sum([held for held, _ in groups]) - instances
    if surplus <= 0:
        return groups, -surplus
    left = []
    for held, held_s in groups:
        released = min(surplus, held)
        surplus -= released
        if held > released:
            left.append((held - released, held_s))
    return tuple(left), 0
