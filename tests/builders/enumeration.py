"""Every plan that a small job has, reckoned instance by instance, and jobs small enough for that."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from rubberband.values.offer import Offer, slots
from rubberband.values.plan import PlanningConstraints, Stage, gang_sizes
from rubberband.values.profile import Profile


def every_plan(stages, profile, offer, constraints):
    """(jct_s, cost_usd, instance counts) of every plan, reckoned instance by instance."""
    gangs = constraints.gang_sizes(offer.slots)
    choices = [(k, g) for k in range(1, offer.max_instances + 1) for g in gangs if slots(k, offer.slots, g)]
    price_per_s = offer.price_usd_per_hour / 3600
    plans = []

    def owed(lived_s):
        return 0.0 if offer.billing == "per_function" else max(lived_s, offer.minimum_billed_s) * price_per_s

    def go(index, now_s, cost_usd, held, counts):
        if index == len(stages):
            total = cost_usd + sum(owed(now_s - since_s) for since_s in held) + now_s * offer.head_cost_usd(1.0)
            plans.append((now_s, total, counts))
            return
        stage = stages[index]
        for k, g in choices:
            took_s = profile.startup_s(g) + stage.iterations * profile.iteration_s(g)
            begun_s, cost, instances = now_s, cost_usd, held
            if k > len(held):
                running_s = now_s + offer.provision_delay_s
                instances = held + [running_s] * (k - len(held))
                cost += offer.data_usd_per_instance * (k - len(held))
                begun_s = running_s + offer.init_delay_s
            else:
                cost += sum(owed(now_s - since_s) for since_s in held[: len(held) - k])
                instances = held[len(held) - k :]
            if offer.billing == "per_function":
                cost += stage.trials * took_s * g / offer.slots * price_per_s
            waves = math.ceil(stage.trials / slots(k, offer.slots, g))
            go(index + 1, begun_s + waves * took_s, cost, instances, (*counts, k))

    go(0, 0.0, 0.0, [], ())
    return plans


@st.composite
def jobs(draw, billing=None, most_stages=4):
    """A job small enough to enumerate: stages, profile, offer, limits on GPUs per trial."""
    num_stages = draw(st.integers(1, most_stages))
    gpus = draw(st.sampled_from([1, 2, 4]))
    gangs, instances = {1: (2, 6), 2: (2, 6), 3: (2, 5), 4: (2, 3)}[num_stages]
    seconds = st.integers(1, 60).map(float) | st.floats(1.0, 60.0)
    first = draw(seconds)
    table = {1: first}
    for count in (2, 4, 8):
        table[count] = table[count // 2] * draw(st.sampled_from([0.5, 0.55, 0.7, 0.9, 1.0, 1.1]))
    offer = Offer(
        instance_type="test",
        gpus=gpus,
        price_usd_per_hour=draw(st.sampled_from([0.0, 3.6, 12.24])),
        max_instances=draw(st.integers(1, instances)),
        provision_delay_s=draw(st.sampled_from([0.0, 15.0, 120.0])),
        init_delay_s=draw(st.sampled_from([0.0, 15.0, 45.0])),
        billing=billing or draw(st.sampled_from(["per_instance", "per_function"])),
        minimum_billed_s=draw(st.sampled_from([0.0, 60.0, 300.0])),
        data_usd_per_instance=draw(st.sampled_from([0.0, 0.05])),
        head_price_usd_per_hour=draw(st.sampled_from([0.0, 0.5])),
    )
    falling = draw(st.booleans())
    trials = draw(st.lists(st.integers(1, 14), min_size=num_stages, max_size=num_stages))
    stages = [
        Stage(trials=count, iterations=draw(st.integers(1, 8)))
        for count in (sorted(trials, reverse=True) if falling else trials)
    ]
    least = draw(st.sampled_from([1, 1, 1, 2]))
    most = [size for size in gang_sizes(gpus, least, 8) if size <= gpus * offer.max_instances][:gangs]
    assume(most)
    profile = Profile(seconds_per_iteration=table, trial_startup_s=draw(st.sampled_from([0.0, 2.0])))
    listed = sorted(draw(st.just(set[int]()) | st.sets(st.sampled_from(most))))
    return (
        stages,
        profile,
        offer,
        PlanningConstraints(
            min_gpus_per_trial=listed[0] if listed else least,
            max_gpus_per_trial=listed[-1] if listed else most[-1],
            gpus_per_trial_sizes=tuple(listed),
        ),
    )


@st.composite
def limited_jobs(draw, **kinds):
    """A job, all its plans, and limits near one plan, near two plans, or none."""
    stages, profile, offer, constraints = draw(jobs(**kinds))
    plans = every_plan(stages, profile, offer, constraints)
    near = st.integers(0, len(plans) - 1).map(plans.__getitem__)
    slack = st.sampled_from([0.97, 1.0, 1.0, 1.05])
    deadline_s = draw(st.none() | st.builds(lambda chosen, factor: chosen[0] * factor, near, slack))
    max_cost_usd = draw(st.none() | st.builds(lambda chosen, factor: chosen[1] * factor, near, slack))
    limits = replace(constraints, deadline_s=deadline_s, max_cost_usd=max_cost_usd)
    return stages, profile, offer, limits, plans


def best(plans, constraints, objective="min_cost"):
    """(jct_s, cost_usd) of the best plan within the constraints, or None."""
    deadline_s = math.inf if constraints.deadline_s is None else constraints.deadline_s + 1e-6
    max_cost_usd = math.inf if constraints.max_cost_usd is None else constraints.max_cost_usd + 1e-9
    inside = [(time_s, usd) for time_s, usd, _ in plans if time_s <= deadline_s and usd <= max_cost_usd]
    if not inside:
        return None
    if objective == "min_time":
        shortest_s = min(time_s for time_s, _ in inside) + 1e-6
        return min((point for point in inside if point[0] <= shortest_s), key=lambda point: point[1])
    cheapest_usd = min(usd for _, usd in inside) + 1e-9
    return min((point for point in inside if point[1] <= cheapest_usd), key=lambda point: point[0])
