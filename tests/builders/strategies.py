"""Random jobs, offers and plans that tests share."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from rubberband.executor import FailureKind, Faults, Job
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Offer, slots
from rubberband.values.plan import Plan, Stage, StagePlan, gang_sizes, repeating
from rubberband.values.profile import Profile

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
        checkpoint_load_s=draw(st.sampled_from([0.0, 0.0, 40.0])),
        gpus_per_machine=draw(st.sampled_from([0, 1, 2, 4])),
    )


@st.composite
def stage_lists(draw: st.DrawFn, most_trials: int = 12) -> tuple[Stage, ...]:
    counts = sorted(draw(st.lists(st.integers(1, most_trials), min_size=1, max_size=4)), reverse=True)
    return tuple(Stage(trials=trials, iterations=draw(st.integers(1, 5))) for trials in counts)


@st.composite
def saving(draw: st.DrawFn, stages: tuple[Stage, ...], profile: Profile) -> tuple[tuple[Stage, ...], Profile]:
    """The stages and the profile of trials that may save no checkpoint."""
    if draw(st.sampled_from([True, True, False])):
        return stages, profile
    return repeating(stages), replace(profile, resumes=False)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    offer, profile, stages = draw(offers()), draw(profiles()), draw(stage_lists())
    stages, profile = draw(saving(stages, profile))
    repeats = draw(st.sampled_from([1, 1, 1, 2]))
    stages = tuple(replace(stage, trials=repeats * stage.trials) for stage in stages)
    if profile.smallest_gpus == 1:
        offer = replace(offer, trials_per_gpu=draw(st.sampled_from([1, 1, 2, 3])))
    chosen: list[StagePlan] = []
    for _ in stages:
        instances = draw(st.integers(1, offer.max_instances))
        allowed = gang_sizes(offer.gpus, profile.smallest_gpus, 16) if offer.trials_per_gpu == 1 else [1]
        sizes = [size for size in allowed if slots(instances, offer.slots, size) > 0]
        assume(sizes)
        chosen.append(StagePlan(instances=instances, gpus_per_trial=draw(st.sampled_from(sizes))))
    plan = Plan(stages=tuple(chosen))
    planned = {choice.gpus_per_trial for choice in chosen}
    listed = planned | draw(st.sets(st.sampled_from(allowed))) if draw(st.booleans()) else set[int]()
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
        gpus_per_trial_sizes=tuple(sorted(listed)),
        start_attempts=draw(st.sampled_from([None, 3])),
        repeats=repeats,
    )


SECONDS = st.sampled_from([0.0, 1.0, 7.5, 15.0, 40.0]) | st.floats(0.0, 100.0)


@st.composite
def carried_out(draw):
    """A job, a plan that can be carried out, a profile and an offer."""
    gpus = draw(st.sampled_from([1, 2, 3, 4, 8]))
    offer = Offer(
        instance_type="test",
        gpus=gpus,
        price_usd_per_hour=draw(st.floats(0.0, 40.0)),
        max_instances=12,
        provision_delay_s=draw(SECONDS),
        init_delay_s=draw(SECONDS),
        billing=draw(st.sampled_from(["per_instance", "per_function"])),
        minimum_billed_s=draw(st.sampled_from([0.0, 60.0, 200.0])),
        data_usd_per_instance=draw(st.sampled_from([0.0, 0.7])),
        head_price_usd_per_hour=draw(st.sampled_from([0.0, 0.4])),
        trials_per_gpu=draw(st.sampled_from([1, 1, 2, 3])),
    )
    table = draw(st.dictionaries(st.sampled_from([2, 3, 4, 8, 16]), st.floats(0.5, 100.0), max_size=3)) | {
        1: draw(st.floats(0.5, 100.0))
    }
    profile = Profile(seconds_per_iteration=table, trial_startup_s=draw(SECONDS))
    stages, choices = [], []
    for _ in range(draw(st.integers(1, 5))):
        stages.append(Stage(trials=draw(st.integers(1, 20)), iterations=draw(st.integers(1, 6))))
        size = draw(st.sampled_from(gang_sizes(gpus, 1, 3 * gpus if offer.trials_per_gpu == 1 else 1)))
        fitting = [count for count in range(1, 13) if slots(count, offer.slots, size)]
        choices.append(StagePlan(instances=draw(st.sampled_from(fitting)), gpus_per_trial=size))
    return stages, Plan(stages=tuple(choices)), profile, offer


failures: st.SearchStrategy[FailureKind] = st.sampled_from(
    ["raised", "hung", "died", "not_a_number", "checkpoint", "gpu", "memory"]
)


@st.composite
def faults(draw: st.DrawFn) -> Faults:
    names = st.integers(1, 12).map(lambda number: f"i-{number:03d}")
    return Faults(
        refused=draw(st.sets(names, max_size=4)),
        lost_after_s=draw(st.dictionaries(names, st.floats(0.0, 500.0), max_size=4)),
        failures=draw(st.dictionaries(st.tuples(st.integers(0, 11), st.integers(1, 3)), failures, max_size=6)),
    )
