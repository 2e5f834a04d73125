"""The paper's algorithms: DAGs, samples and greedy steps known by hand."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from rubberband.errors import InputError
from rubberband.planner.dag import Sorted, build_dag, simulate
from rubberband.planner.exact.model import predict
from rubberband.planner.search import greedy
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile, Spread, measured

STAGES = [Stage(trials=4, iterations=1), Stage(trials=2, iterations=2), Stage(trials=1, iterations=4)]
PROFILE = Profile(seconds_per_iteration={1: 100.0, 2: 50.0, 4: 40.0})


def offer(**overrides):
    values = {
        "instance_type": "test",
        "gpus": 1,
        "price_usd_per_hour": 3.6,
        "max_instances": 8,
        "provision_delay_s": 15.0,
        "init_delay_s": 20.0,
        "minimum_billed_s": 0.0,
    }
    return Offer(**(values | overrides))


def plan_of(*choices):
    return Plan(stages=tuple(StagePlan(instances=instances, gpus_per_trial=gpus) for instances, gpus in choices))


def kinds(graph, nodes):
    tasks = graph.nodes(data="task")
    return Counter(tasks[node].kind for node in nodes)


def test_a_dag_has_a_node_forevery_task():
    graph = build_dag(STAGES, plan_of((2, 1), (2, 1), (4, 4)), PROFILE, offer())
    assert kinds(graph, graph) == {"SCALE": 2, "INIT_INSTANCE": 4, "TRAIN": 7, "SYNC": 3}


def test_growth_follows_the_last_synchronisation_and_the_stage_follows_all_new_instances():
    graph = build_dag(STAGES, plan_of((2, 1), (2, 1), (4, 4)), PROFILE, offer())
    scale = next(node for node, task in graph.nodes(data="task") if task.kind == "SCALE" and task.stage == 2)
    train = next(node for node, task in graph.nodes(data="task") if task.kind == "TRAIN" and task.stage == 2)
    assert kinds(graph, graph.predecessors(scale)) == {"SYNC": 1}
    assert kinds(graph, graph.successors(scale)) == {"INIT_INSTANCE": 2}
    assert kinds(graph, graph.predecessors(train)) == {"INIT_INSTANCE": 2}


def test_a_stage_with_one_slot_is_a_chain_of_trials():
    graph = build_dag(STAGES[:1], plan_of((1, 1)), PROFILE, offer())
    trains = [node for node, task in graph.nodes(data="task") if task.kind == "TRAIN"]
    assert [list(graph.predecessors(train)) for train in trains[1:]] == [[train] for train in trains[:-1]]


def test_the_same_seed_gives_the_same_samples():
    noisy = Profile(seconds_per_iteration={1: 100.0}, trial_cv=0.3)
    arguments = (STAGES, plan_of((3, 1), (2, 1), (1, 1)), noisy, offer(init_spread=Spread(cv=0.5)))
    first, again, other = (simulate(*arguments, seed=seed).jct_s.tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_queued_trial_takes_the_slot_that_is_free_first():
    """Three trials on two slots: the third follows the faster of the others, not the one that happens to be first."""
    rare = Profile(seconds_per_iteration={1: 100.0}, trial_cv=2.0)
    stages, chosen = [Stage(trials=3, iterations=1)], plan_of((2, 1))
    instant = offer(provision_delay_s=0.0, init_delay_s=0.0)
    sampled = simulate(stages, chosen, rare, instant, num_samples=2000).jct_s
    in_turn = np.random.default_rng(0).lognormal(-np.log(5.0) / 2, np.sqrt(np.log(5.0)), (3, 200_000)) * 100.0
    first_free = np.maximum(in_turn[:2].max(axis=0), in_turn[:2].min(axis=0) + in_turn[2])
    waiting = np.maximum(in_turn[0] + in_turn[2], in_turn[1])
    assert np.median(sampled) == pytest.approx(np.median(first_free), rel=0.06)
    assert np.median(sampled) < 0.95 * np.median(waiting)


def test_delays_follow_their_measured_values():
    mean_s, spread = measured([10.0, 30.0])
    slow = offer(provision_delay_s=mean_s, provision_spread=spread, init_delay_s=0.0)
    sampled = simulate(STAGES[2:], plan_of((1, 1)), PROFILE, slow, num_samples=50)
    assert set(sampled.jct_s.tolist()) == {410.0, 430.0}
    assert sampled.cost_usd == pytest.approx(np.full(50, 0.4))


def test_a_plan_on_the_spot_market_is_refused():
    spot = offer(spot=Spot(price_usd_per_hour=1.0, interruptions_per_hour=0.1))
    chosen = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1, market="spot"),))
    with pytest.raises(InputError, match="stage 0 of the plan has market=spot"):
        build_dag(STAGES[:1], chosen, PROFILE, spot)


def evaluate(stages, profile, chosen_offer):
    def of(candidate):
        predicted = predict(stages, candidate, profile, chosen_offer)
        return predicted.jct_s, predicted.cost_usd

    return of


def choices(found):
    return [(choice.instances, choice.gpus_per_trial) for choice in found.stages]


def test_greedy_lowers_what_saves_and_keeps_the_deadline_from_every_warm_start():
    """Static 4 takes 360 s for 1.44 USD and nothing can be lowered in time; from 8 instances 350 s cost 1.20 USD."""
    instant = offer(provision_delay_s=0.0, init_delay_s=0.0)
    limits = PlanningConstraints(deadline_s=360.0, max_gpus_per_trial=4)
    predicted = evaluate(STAGES, PROFILE, instant)
    once = greedy(STAGES, PROFILE, instant, limits, evaluate=predicted, warm_starts=(1,))
    often = greedy(STAGES, PROFILE, instant, limits, evaluate=predicted)
    assert choices(once) == [(4, 1), (4, 2), (4, 4)]
    assert choices(often) == [(8, 2), (4, 2), (2, 2)]


def test_allocations_step_by_factors_and_multiples_of_the_number_of_trials():
    """Of 4 trials: 12, 8, 4, 2, 1 GPUs. The last stage is worth keeping: the best static plan is the largest."""
    steps = []

    def first_stage_is_paid(candidate):
        first, last = (choice.instances for choice in candidate.stages)
        if last == 12:
            steps.append(first)
        return float(12 - first), float(first if last == 12 else 100)

    stages = [Stage(trials=4, iterations=1), Stage(trials=1, iterations=1)]
    profile = Profile(seconds_per_iteration={1: 3.0, 2: 2.0, 3: 1.0})
    limits = PlanningConstraints(max_gpus_per_trial=3)
    greedy(stages, profile, offer(max_instances=12), limits, evaluate=first_stage_is_paid)
    assert steps == [12, 8, 4, 2, 1]


@pytest.mark.parametrize(
    "limits",
    [
        PlanningConstraints(deadline_s=10.0, max_gpus_per_trial=4),
        PlanningConstraints(max_cost_usd=0.01, max_gpus_per_trial=4),
        PlanningConstraints(min_gpus_per_trial=2, max_gpus_per_trial=4, deadline_s=10.0),
    ],
)
def test_greedy_finds_nothing_that_breaks_a_limit(limits):
    assert greedy(STAGES, PROFILE, offer(), limits, evaluate=evaluate(STAGES, PROFILE, offer())) is None


def test_the_critical_path_leads_through_the_slowest_trials_and_what_they_waited_for():
    """Two slots, three trials of 100 s: the third waits for one of the others. Growth: 15 s and 20 s."""
    sampled = Sorted.of(build_dag([Stage(trials=3, iterations=1)], plan_of((2, 1)), PROFILE, offer()))
    critical_s = sampled.sample(random.Random(0)).critical_s
    assert critical_s == {(0, "SCALE"): 15.0, (0, "INIT_INSTANCE"): 20.0, (0, "TRAIN"): 200.0, (0, "SYNC"): 0.0}
