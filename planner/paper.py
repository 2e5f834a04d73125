"""Algorithm 2 of the paper, literally: the greedy search for an allocation (RubberBand §4.3).

An allocation is a number of GPUs for each stage, divided fairly among its trials. What a plan takes and costs is for
the caller to say; with Algorithm 1 (`rubberband.planner.paper`) the whole is the paper's planner.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from rubberband.errors import InputError
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.model import check_plan
from rubberband.planner.table import gangs_of
from rubberband.values.chance import FIXED, Law, Spread
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile

if TYPE_CHECKING:
    import networkx as nx  # type: ignore[import-untyped]

# Algorithm 1 of the paper, literally: a plan as a DAG of tasks, sampled node by node (RubberBand §4.2).
#
# It is the oracle of the model's tests and the paper's row in comparisons. The product does without it: a DAG for
# each candidate is what makes planning slow.


NUM_SAMPLES = 20
"""The paper's "fixed number of samples"; it names none."""

Kind = Literal["SCALE", "INIT_INSTANCE", "TRAIN", "SYNC"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long a task takes: `fixed_s + varying_s * X`, X with mean 1."""

    fixed_s: float = 0.0
    varying_s: float = 0.0
    spread: Spread = FIXED
    law: Law = "lognormal"

    def sample_s(self, source: random.Random) -> float:
        """One draw, in seconds."""
        if self.spread.certain:
            return self.fixed_s + self.varying_s
        return self.fixed_s + self.varying_s * self._factor(source)

    def _factor(self, source: random.Random) -> float:
        if self.spread.samples:
            return source.choice(self.spread.samples)
        cv = self.spread.cv
        if self.law == "normal":
            return max(0.0, source.gauss(1.0, cv))
        variance = math.log1p(cv * cv)
        return source.lognormvariate(-variance / 2.0, math.sqrt(variance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a node of the DAG stands for; its attribute `task`."""

    kind: Kind
    stage: int
    latency: Latency
    queued: bool = False
    """Of a TRAIN beyond the stage's slots: it starts when a slot gets free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a plan took and cost in each of N samples; both arrays are (N,)."""

    jct_s: npt.NDArray[np.float64]
    cost_usd: npt.NDArray[np.float64]


def build_dag(stages: Sequence[Stage], plan: Plan, profile: Profile, offer: Offer) -> nx.DiGraph:
    """The paper's DAG of a plan: nodes 0, 1, … in the order they are added, each with a `Task` as attribute `task`.

    Every node depends on the frontier before it: a SCALE (where the stage grows the cluster) on the last SYNC, one
    INIT_INSTANCE for each new instance on SCALE, the first TRAINs on all of those. A queued TRAIN depends on the one
    as many places before it as the stage has slots, "a previously run trial"; that is the one which frees its slot if
    all take equally long, and `simulate` follows the sampled times where they do not. SYNC depends on all TRAINs.

    Raises InputError if the plan does not fit the job or the offer, or is not on demand: the paper knows no other.
    """
    import networkx

    check_plan(stages, plan, offer)
    _check_on_demand(plan)
    graph = networkx.DiGraph()
    frontier: list[int] = []
    held = 0
    for index, (stage, choice) in enumerate(zip(stages, plan.stages, strict=True)):
        if choice.instances > held:
            frontier = _grow(graph, frontier, index, choice.instances - held, offer)
        held = choice.instances
        trains = _train(graph, frontier, index, stage, choice, profile, offer)
        frontier = [_add(graph, trains, Task(kind="SYNC", stage=index, latency=Latency()))]
    return graph


def _check_on_demand(plan: Plan) -> None:
    for index, choice in enumerate(plan.stages):
        if choice.market != "on_demand":
            raise InputError(
                f"stage {index} of the plan has market={choice.market} and the paper's algorithms know on_demand only; "
                "use the model's prediction"
            )


def _add(graph: nx.DiGraph, predecessors: Sequence[int], task: Task) -> int:
    node = len(graph)
    graph.add_node(node, task=task)
    graph.add_edges_from((before, node) for before in predecessors)
    return node


def _grow(graph: nx.DiGraph, frontier: Sequence[int], index: int, instances: int, offer: Offer) -> list[int]:
    provisioning = Latency(varying_s=offer.provision_delay_s, spread=offer.provision_spread)
    scale = _add(graph, frontier, Task(kind="SCALE", stage=index, latency=provisioning))
    task = Task(
        kind="INIT_INSTANCE", stage=index, latency=Latency(varying_s=offer.init_delay_s, spread=offer.init_spread)
    )
    return [_add(graph, [scale], task) for _ in range(instances)]


def _train(
    graph: nx.DiGraph,
    frontier: Sequence[int],
    index: int,
    stage: Stage,
    choice: StagePlan,
    profile: Profile,
    offer: Offer,
) -> list[int]:
    latency = Latency(
        fixed_s=profile.trial_startup_s,
        varying_s=stage.iterations * profile.iteration_s(choice.gpus_per_trial),
        spread=Spread(cv=profile.stage_cv(stage.iterations)),
        law=profile.law,
    )
    num_slots = slots(choice.instances, offer.gpus, choice.gpus_per_trial)
    trains: list[int] = []
    for trial in range(stage.trials):
        queued = trial >= num_slots
        before = [trains[trial - num_slots]] if queued else frontier
        trains.append(_add(graph, before, Task(kind="TRAIN", stage=index, latency=latency, queued=queued)))
    return trains


def simulate(
    stages: Sequence[Stage],
    plan: Plan,
    profile: Profile,
    offer: Offer,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Sampled:
    """Algorithm 1: sort the DAG, sample the latency of every node along the critical path, and bill it.

    The paper's prediction is the mean of the samples. Raises InputError as `build_dag` does.
    """
    graph = build_dag(stages, plan, profile, offer)
    source = random.Random(seed)
    return sampled([Sorted.of(graph).sample(source) for _ in range(num_samples)], plan, offer)


def sampled(executions: Sequence[Execution], plan: Plan, offer: Offer) -> Sampled:
    """What executions of a plan took and cost."""
    return Sampled(
        jct_s=np.array([execution.syncs_s[-1] for execution in executions]),
        cost_usd=np.array([_cost_usd(execution, plan, offer) for execution in executions]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One sample: the instants that the bill depends on."""

    scaled_s: dict[int, float]
    """Stage -> when its new instances run; only stages that grow the cluster."""
    syncs_s: list[float]
    """When each stage ends."""
    busy_s: list[float]
    """The sum of what each stage's trials take."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """A DAG in topological order, each node with what it stands for and its predecessors."""

    nodes: list[tuple[int, Task, list[int]]]
    num_stages: int
    queues: frozenset[int]
    """The stages in which trials queue."""

    @classmethod
    def of(cls, graph: nx.DiGraph) -> Sorted:
        import networkx

        tasks: dict[int, Task] = dict(graph.nodes(data="task"))
        order = [(node, tasks[node], list(graph.predecessors(node))) for node in networkx.topological_sort(graph)]
        queues = frozenset(task.stage for task in tasks.values() if task.queued)
        return cls(order, 1 + max(task.stage for task in tasks.values()), queues)

    def sample(self, source: random.Random) -> Execution:
        """One execution. A queued trial waits for the slot that gets free first (list scheduling).

        The topological order has a queue's trials wave by wave, so that all that a queued trial may follow are known.
        """
        ends_s = [0.0] * len(self.nodes)
        scaled_s: dict[int, float] = {}
        syncs_s, busy_s = [0.0] * self.num_stages, [0.0] * self.num_stages
        slots_s: dict[int, list[float]] = {stage: [] for stage in self.queues}
        for node, task, predecessors in self.nodes:
            took_s = task.latency.sample_s(source)
            if task.queued:
                begun_s = heapq.heappop(slots_s[task.stage])
            else:
                begun_s = max([ends_s[before] for before in predecessors], default=0.0)
            ends_s[node] = end_s = begun_s + took_s
            if task.kind == "TRAIN":
                busy_s[task.stage] += took_s
                if task.stage in self.queues:
                    heapq.heappush(slots_s[task.stage], end_s)
            elif task.kind == "SCALE":
                scaled_s[task.stage] = end_s
            elif task.kind == "SYNC":
                syncs_s[task.stage] = end_s
        return Execution(scaled_s=scaled_s, syncs_s=syncs_s, busy_s=busy_s)


def _cost_usd(execution: Execution, plan: Plan, offer: Offer) -> float:
    """The bill of one execution: instances by their lives, functions by their trials, data, and the head node."""
    cost_usd = offer.head_cost_usd(execution.syncs_s[-1])
    running_since_s: list[float] = []
    now_s = 0.0
    for index, choice in enumerate(plan.stages):
        missing = choice.instances - len(running_since_s)
        if missing > 0:
            running_since_s += [execution.scaled_s[index]] * missing
        released, running_since_s = running_since_s[: max(0, -missing)], running_since_s[max(0, -missing) :]
        cost_usd += sum(offer.instance_cost_usd(now_s - since_s) for since_s in released)
        cost_usd += offer.function_cost_usd(choice.gpus_per_trial, execution.busy_s[index])
        now_s = execution.syncs_s[index]
    return cost_usd + sum(offer.instance_cost_usd(now_s - since_s) for since_s in running_since_s)


__all__ = ["Evaluate", "Sampled", "build_dag", "greedy", "literal_plan", "simulate"]

Evaluate = Callable[[Plan], tuple[float, float]]
"""(jct_s, cost_usd) of a plan."""


@dataclass(frozen=True, slots=True)
class _Allocation:
    """What a stage gets: GPUs in all, and what they make of its plan."""

    gpus: int
    choice: StagePlan
    key: tuple[int, int]
    """Of the choice: cheaper to look up than the choice itself."""


_Allocations = tuple[_Allocation, ...]
_Key = tuple[tuple[int, int], ...]
_Figures = tuple[float, float]
"""What allocations are predicted to cost (USD) and take (s)."""


def literal_plan(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    *,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> Plan | None:
    """The paper's planner: Algorithm 2 on the means of Algorithm 1's samples, every plan with the same seed.

    None and errors as for `greedy`.
    """

    def evaluate(plan: Plan) -> tuple[float, float]:
        sampled = simulate(stages, plan, profile, offer, num_samples=num_samples, seed=seed)
        return float(sampled.jct_s.mean()), float(sampled.cost_usd.mean())

    return greedy(stages, profile, offer, constraints, evaluate=evaluate)


def greedy(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: PlanningConstraints,
    *,
    evaluate: Evaluate,
    warm_starts: Sequence[int] = (1, 2, 3),
    known: dict[_Key, _Figures] | None = None,
) -> Plan | None:
    """Algorithm 2 from multiples of the best static allocation; the cheapest of the plans that it ends at.

    None if no static allocation is in time (the paper's greedy needs a feasible start, though an elastic plan may
    be), or the plan found is beyond `max_cost_usd`. With 1 among the `warm_starts` the plan is never dearer than the
    best static allocation.
    Equal plans are evaluated once; `known` has the figures of earlier searches with the same `evaluate`. Raises
    InputError if no GPUs per trial fit the offer, and what `evaluate` raises.
    """
    search = _LiteralSearch.of(
        stages, _Fair(offer, gangs_of(profile, offer, constraints)), constraints, evaluate, known
    )
    statics = [search.static(count) for count in range(1, offer.max_instances + 1)]
    feasible = [allocations for allocations in statics if search.in_time(allocations)]
    if not feasible:
        return None
    instances = min(feasible, key=search.cost_and_time)[0].choice.instances
    multiples = [statics[min(factor * instances, offer.max_instances) - 1] for factor in warm_starts]
    ends = [search.descend(warm_start) for warm_start in multiples if search.in_time(warm_start)]
    found = min(ends, key=search.cost_and_time, default=None)
    return _plan(found) if found and search.affordable(found) else None


@dataclass(frozen=True, slots=True)
class _Fair:
    """Dividing GPUs fairly among trials."""

    offer: Offer
    sizes: Sequence[int]
    """GPUs per trial that are allowed and pack, increasing; at least one, and none without use."""

    def allocation(self, gpus: int, trials: int) -> _Allocation:
        """What `gpus` GPUs make of a stage, on as many whole instances as that takes."""
        instances = -(-gpus // self.offer.gpus)
        share = self._share(gpus, instances, trials)
        return _Allocation(gpus, StagePlan(instances=instances, gpus_per_trial=share), (instances, share))

    def allocations(self, trials: int) -> list[_Allocation]:
        """Those of a factor or a multiple of the number of trials, in units of the smallest gang, fewest GPUs first.

        Only where the instances can hold every share at once, since nothing else is divided fairly.
        """
        factors = [(count, self.sizes[0]) for count in range(1, trials) if trials % count == 0]
        multiples = [(trials, size) for size in self.sizes]
        fair = (
            self.allocation(count * size, trials)
            for count, size in factors + multiples
            if count * size <= self.offer.gpus * self.offer.max_instances
            and slots(-(-count * size // self.offer.gpus), self.offer.gpus, size) >= count
        )
        return sorted(fair, key=lambda allocation: allocation.gpus)

    def _share(self, gpus: int, instances: int, trials: int) -> int:
        """A trial's share, max(1, floor(gpus / trials)), rounded down to what packs with all trials at once."""
        most = gpus // trials
        for size in reversed(self.sizes):
            if size <= most and slots(instances, self.offer.gpus, size) >= trials:
                return size
        return self.sizes[0]


@dataclass(frozen=True, slots=True)
class _LiteralSearch:
    """Allocations of a job, and what each is predicted to take and cost."""

    stages: Sequence[Stage]
    constraints: PlanningConstraints
    evaluate: Evaluate
    fair: _Fair
    ladders: Sequence[Sequence[_Allocation]]
    """Of each stage: its fair allocations, fewest GPUs first."""
    known: dict[_Key, _Figures]

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        fair: _Fair,
        constraints: PlanningConstraints,
        evaluate: Evaluate,
        known: dict[_Key, _Figures] | None,
    ) -> _LiteralSearch:
        ladders = [fair.allocations(stage.trials) for stage in stages]
        return cls(stages, constraints, evaluate, fair, ladders, {} if known is None else known)

    def static(self, instances: int) -> _Allocations:
        """The same `instances` for every stage; empty if no trial fits on them."""
        gpus_per_instance, least = self.fair.offer.gpus, self.fair.sizes[0]
        if slots(instances, gpus_per_instance, least) == 0:
            return ()
        return tuple(self.fair.allocation(instances * gpus_per_instance, stage.trials) for stage in self.stages)

    def descend(self, allocations: _Allocations) -> _Allocations:
        """Algorithm 2: take the best candidate until it saves nothing or is late."""
        figures = self.cost_and_time(allocations)
        while candidates := self._candidates(allocations):
            found = [(_marginal_benefit(figures, after := self.cost_and_time(one)), one, after) for one in candidates]
            (_, saved_usd), best, after = max(found, key=itemgetter(0))
            if saved_usd <= COST_TOLERANCE_USD or not self.in_time(best):
                break
            allocations, figures = best, after
        return allocations

    def in_time(self, allocations: _Allocations) -> bool:
        """Whether these are allocations, and predicted to keep the deadline."""
        deadline_s = math.inf if self.constraints.deadline_s is None else self.constraints.deadline_s
        return bool(allocations) and self.cost_and_time(allocations)[1] <= deadline_s + TIME_TOLERANCE_S

    def affordable(self, allocations: _Allocations) -> bool:
        """Whether these are predicted to keep the budget."""
        limit_usd = math.inf if self.constraints.max_cost_usd is None else self.constraints.max_cost_usd
        return self.cost_and_time(allocations)[0] <= limit_usd + COST_TOLERANCE_USD

    def cost_and_time(self, allocations: _Allocations) -> _Figures:
        """What the allocations are predicted to cost and take: ties on cost go to the shorter time."""
        key = tuple([allocation.key for allocation in allocations])
        known = self.known.get(key)
        if known is None:
            jct_s, cost_usd = self.evaluate(_plan(allocations))
            known = self.known[key] = (cost_usd, jct_s)
        return known

    def _candidates(self, allocations: _Allocations) -> list[_Allocations]:
        """The allocations with one stage's lowered by the smallest step to a fair one."""
        candidates = []
        for index, (ladder, allocation) in enumerate(zip(self.ladders, allocations, strict=True)):
            lower = [fair for fair in ladder if fair.gpus < allocation.gpus]
            if lower:
                candidates.append((*allocations[:index], lower[-1], *allocations[index + 1 :]))
        return candidates


def _marginal_benefit(before: _Figures, after: _Figures) -> tuple[float, float]:
    """Equation 1, m = (C(a*) - C(a)) / (T(a) - T(a*)), and the saving for ties.

    Where the paper leaves it undefined or it would reward a dearer plan: no saving is the least, one for no time
    the most.
    """
    (cost_before_usd, before_s), (cost_after_usd, after_s) = before, after
    saved_usd, longer_s = cost_before_usd - cost_after_usd, after_s - before_s
    if saved_usd <= COST_TOLERANCE_USD:
        return -math.inf, saved_usd
    return (saved_usd / longer_s if longer_s > TIME_TOLERANCE_S else math.inf), saved_usd


def _plan(allocations: _Allocations) -> Plan:
    return Plan(stages=tuple(allocation.choice for allocation in allocations))
