"""Random jobs, offers and plans that tests share."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from rubberband.executor.state import Job
from rubberband.offer import Offer, gang_sizes, slots
from rubberband.plan import Plan, Stage, StagePlan
from rubberband.planner.model import predict
from rubberband.profile import Profile

seconds = st.floats(0.0, 300.0, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    return Offer(
        instance_type="test",
        gpus=draw(st.sampled_from([1, 2, 3, 4, 8])),
        price_usd_per_hour=draw(st.sampled_from([0.5, 3.06, 12.24])),
        max_instances=draw(st.integers(1, 6)),
        provision_delay_s=draw(seconds),
        init_delay_s=draw(seconds),
        billing=draw(st.sampled_from(["per_instance", "per_instance", "per_function"])),
        minimum_billed_s=draw(st.sampled_from([0.0, 60.0, 600.0])),
        data_usd_per_instance=draw(st.sampled_from([0.0, 0.75])),
        head_price_usd_per_hour=draw(st.sampled_from([0.0, 0.4])),
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    single = draw(st.floats(0.05, 200.0).map(lambda value: round(value, 3)))
    efficiency = draw(st.floats(0.3, 1.0))
    smallest = draw(st.sampled_from([1, 1, 2]))
    return Profile(
        seconds_per_iteration={gpus: single / gpus**efficiency for gpus in (1, 2, 4, 8) if gpus >= smallest},
        trial_startup_s=draw(seconds),
    )


@st.composite
def stage_lists(draw: st.DrawFn, most_trials: int = 12) -> tuple[Stage, ...]:
    counts = sorted(draw(st.lists(st.integers(1, most_trials), min_size=1, max_size=4)), reverse=True)
    return tuple(Stage(trials=trials, iterations=draw(st.integers(1, 5))) for trials in counts)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    offer, profile, stages = draw(offers()), draw(profiles()), draw(stage_lists())
    chosen: list[StagePlan] = []
    for _ in stages:
        instances = draw(st.integers(1, offer.max_instances))
        allowed = gang_sizes(offer.gpus, profile.smallest_gpus, 16)
        sizes = [size for size in allowed if slots(instances, offer.gpus, size) > 0]
        assume(sizes)
        chosen.append(StagePlan(instances=instances, gpus_per_trial=draw(st.sampled_from(sizes))))
    plan = Plan(stages=tuple(chosen))
    return Job(
        name="random",
        stages=stages,
        plan=plan,
        prediction=predict(stages, plan, profile, offer),
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        replan=False,
        start_attempts=draw(st.sampled_from([None, 3])),
    )
