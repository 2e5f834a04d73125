"""Algorithm 1 of the paper, literally: a plan as a DAG of tasks, sampled node by node (RubberBand §4.2).

It is the oracle of the model's tests, the paper's row in `tests/bench/bench_paper.py`, and what `rubberband estimate
--simulate` shows beside the model's figures. The search does without it: one DAG for each candidate is what makes
planning slow.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import networkx as nx
import numpy as np
import numpy.typing as npt

from rubberband.errors import InputError
from rubberband.planner.exact.model import check_plan
from rubberband.planner.problem import JobPlan
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import FIXED, Law, Profile, Spread

NUM_SAMPLES = 20
"""The paper's "fixed number of samples"; it names none."""

Kind = Literal["SCALE", "INIT_INSTANCE", "TRAIN", "SYNC"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Duration of a task: `fixed_s + varying_s * X`, X with mean 1."""

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
    """Task of a node of the DAG: the node's attribute `task`."""

    kind: Kind
    stage: int
    latency: Latency
    queued: bool = False
    """True for a TRAIN beyond the stage's slots: it starts when a slot is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Time and cost of a plan in each of N samples; both arrays are (N,)."""

    jct_s: npt.NDArray[np.float64]
    cost_usd: npt.NDArray[np.float64]


def build_dag(stages: Sequence[Stage], plan: Plan, profile: Profile, offer: Offer) -> nx.DiGraph:
    """Return the paper's DAG of a plan: nodes 0, 1, … in the order they are added, each with a `Task` as `task`.

    Every node depends on the frontier before it: a SCALE (where the stage grows the cluster) on the last SYNC, one
    INIT_INSTANCE for each new instance on SCALE, the first TRAINs on all of those. A queued TRAIN depends on the one
    as many places before it as the stage has slots, "a previously run trial". That one frees its slot if all take
    equally long; where they do not, `simulate` follows the sampled times. SYNC depends on all TRAINs.

    Raises InputError if the plan does not fit the job or the offer, or is not on demand: the paper knows no spot.
    """
    check_plan(stages, plan, offer)
    _check_on_demand(plan)
    graph = nx.DiGraph()
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
        fixed_s=profile.startup_s(choice.gpus_per_trial),
        varying_s=stage.work * profile.iteration_s(choice.gpus_per_trial),
        spread=Spread(cv=profile.stage_cv(stage.work)),
        law=profile.law,
    )
    num_slots = slots(choice.instances, offer.slots, choice.gpus_per_trial)
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
    """Return samples of a plan by Algorithm 1: sort the DAG, sample each node's latency, and bill the execution.

    The paper's prediction is the mean of the samples. Raises InputError as `build_dag` does.
    """
    graph = build_dag(stages, plan, profile, offer)
    source = random.Random(seed)
    return sampled([Sorted.of(graph).sample(source) for _ in range(num_samples)], plan, offer)


def sampled(executions: Sequence[Execution], plan: Plan, offer: Offer) -> Sampled:
    """Return the time and cost of executions of a plan."""
    return Sampled(
        jct_s=np.array([execution.syncs_s[-1] for execution in executions]),
        cost_usd=np.array([_cost_usd(execution, plan, offer) for execution in executions]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One sample: the times that the bill depends on."""

    scaled_s: dict[int, float]
    """Stage -> when its new instances run; only for stages that grow the cluster."""
    syncs_s: list[float]
    """End of each stage."""
    busy_s: list[float]
    """Sum of the durations of each stage's trials."""
    critical_s: dict[tuple[int, Kind], float]
    """(stage, kind) -> seconds of its tasks on the critical path; they add up to the last SYNC."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """A DAG in topological order: each node with its task and its predecessors."""

    nodes: list[tuple[int, Task, list[int]]]
    num_stages: int
    queues: frozenset[int]
    """The stages in which trials queue."""

    @classmethod
    def of(cls, graph: nx.DiGraph) -> Sorted:
        tasks: dict[int, Task] = dict(graph.nodes(data="task"))
        order = [(node, tasks[node], list(graph.predecessors(node))) for node in nx.topological_sort(graph)]
        queues = frozenset(task.stage for task in tasks.values() if task.queued)
        return cls(order, 1 + max(task.stage for task in tasks.values()), queues)

    def sample(self, source: random.Random) -> Execution:
        """Sample one execution. A queued trial takes the slot that is free first (list scheduling).

        The topological order lists a queue's trials wave by wave, so a slot is known before it is taken.
        """
        ends_s, causes = [0.0] * len(self.nodes), [-1] * len(self.nodes)
        scaled_s: dict[int, float] = {}
        syncs_s, busy_s = [0.0] * self.num_stages, [0.0] * self.num_stages
        free_slots: dict[int, list[tuple[float, int]]] = {stage: [] for stage in self.queues}
        for node, task, predecessors in self.nodes:
            took_s = task.latency.sample_s(source)
            if task.queued:
                begun_s, cause = heapq.heappop(free_slots[task.stage])
            else:
                begun_s, cause = max([(ends_s[before], before) for before in predecessors], default=(0.0, -1))
            end_s = ends_s[node] = begun_s + took_s
            causes[node] = cause
            if task.kind == "TRAIN":
                busy_s[task.stage] += took_s
                if task.stage in self.queues:
                    heapq.heappush(free_slots[task.stage], (end_s, node))
            elif task.kind == "SCALE":
                scaled_s[task.stage] = end_s
            elif task.kind == "SYNC":
                syncs_s[task.stage] = end_s
        critical_s = self._critical_s(ends_s, causes)
        return Execution(scaled_s=scaled_s, syncs_s=syncs_s, busy_s=busy_s, critical_s=critical_s)

    def _critical_s(self, ends_s: Sequence[float], causes: Sequence[int]) -> dict[tuple[int, Kind], float]:
        """Walk back from the last SYNC: from each task to the one whose end it began at."""
        tasks = {node: task for node, task, _ in self.nodes}
        critical_s: dict[tuple[int, Kind], float] = defaultdict(float)
        node = self.nodes[-1][0]
        while node >= 0:
            begun_s = ends_s[causes[node]] if causes[node] >= 0 else 0.0
            critical_s[tasks[node].stage, tasks[node].kind] += ends_s[node] - begun_s
            node = causes[node]
        return dict(critical_s)


def _cost_usd(execution: Execution, plan: Plan, offer: Offer) -> float:
    """Bill one execution: instances for their lifetime, functions for their trials, data, and the head node."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalTask:
    """Share of the critical path that tasks of one kind in one stage take."""

    lane: int
    stage: int
    """Number among the stages of its lane."""
    kind: Kind
    share: float
    """Mean share of the time of its lane; those of a lane add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """Executions of a job's plan by Algorithm 1."""

    sampled: Sampled
    critical: tuple[CriticalTask, ...]
    """The critical path of the lane that ends last (on average), in order; no tasks that take nothing."""

    def to_json(self) -> dict[str, Any]:
        """Return quantiles (seconds, USD) and the critical path."""
        return {
            "num_samples": len(self.sampled.jct_s),
            "jct_s": _quantiles(self.sampled.jct_s),
            "cost_usd": _quantiles(self.sampled.cost_usd),
            "critical_path": [
                {"lane": task.lane, "stage": task.stage, "task": task.kind, "share": round(task.share, 6)}
                for task in self.critical
            ],
        }


def _quantiles(values: npt.NDArray[np.float64]) -> dict[str, float]:
    low, middle, high = (float(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return {"mean": float(values.mean()), "p5": low, "p50": middle, "p95": high}


def simulate_job(job: JobPlan, profile: Profile, offer: Offer, *, num_samples: int, seed: int = 0) -> SimulatedPlan:
    """Return N executions of a job's plan: each of its lanes is a DAG, and they run side by side.

    Raises InputError as `build_dag` does, and for asha and none.
    """
    if scheduler := job.lanes[0].stages[0].scheduler:
        raise InputError(
            f"scheduler.type={scheduler} has no DAG, as no trial waits for a SYNC; the estimate simulates its runs "
            "already"
        )
    source, alone = random.Random(seed), replace(offer, head_price_usd_per_hour=0.0)
    runs: list[Sampled] = []
    paths: list[list[CriticalTask]] = []
    for number, lane in enumerate(job.lanes):
        plan = lane.planned.plan
        dag = Sorted.of(build_dag(lane.stages, plan, profile, offer))
        executions = [dag.sample(source) for _ in range(num_samples)]
        runs.append(sampled(executions, plan, alone))
        paths.append(_critical(executions, number))
    times_s = np.array([run.jct_s for run in runs])
    jct_s = times_s.max(axis=0)
    heads_usd = np.array([offer.head_cost_usd(float(end_s)) for end_s in jct_s])
    whole = Sampled(jct_s=jct_s, cost_usd=np.sum([run.cost_usd for run in runs], axis=0) + heads_usd)
    return SimulatedPlan(sampled=whole, critical=tuple(paths[int(times_s.mean(axis=1).argmax())]))


def _critical(executions: Sequence[Execution], lane: int) -> list[CriticalTask]:
    """Return the tasks of the critical paths of a lane."""
    taken_s: dict[tuple[int, Kind], float] = defaultdict(float)
    for execution in executions:
        for task, seconds in execution.critical_s.items():
            taken_s[task] += seconds
    order: dict[Kind, int] = {"SCALE": 0, "INIT_INSTANCE": 1, "TRAIN": 2, "SYNC": 3}
    total_s = sum(taken_s.values())
    return [
        CriticalTask(lane=lane, stage=stage, kind=kind, share=seconds / total_s)
        for (stage, kind), seconds in sorted(taken_s.items(), key=lambda taken: (taken[0][0], order[taken[0][1]]))
        if seconds > 0.0
    ]
