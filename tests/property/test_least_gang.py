"""The least gang, for any profile and file: no plan goes below it, and none smaller packs."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.planner import Infeasible, plan
from rubberband.planning.candidates import candidates
from rubberband.spec.experiment import Experiment
from rubberband.values.memory import FILLED, TrialMemory
from tests.builders.experiment_words import words

GPUS = st.integers(1, 24)


@given(
    starts=GPUS,
    more=st.sets(GPUS, max_size=3),
    asked=st.fixed_dictionaries({}, optional={"min": GPUS, "max": GPUS}),
    slots=st.sampled_from([1, 2, 4, 8]),
    instances=st.integers(1, 6),
)
def test_no_plan_goes_below_the_first_gang_of_the_profile(
    starts: int, more: set[int], asked: dict[str, Any], slots: int, instances: int
) -> None:
    table = {starts: 10.0} | {starts + each: 10.0 / (1 + each) for each in more}
    if asked.get("max", 24) < asked.get("min", 1):
        del asked["max"]
    resources = {"provider": "virtual", "gpus_per_instance": slots, "price_per_hour": 3.6, "max_instances": instances}
    experiment = Experiment(
        **words(resources=resources | {"gpus_per_trial": asked}, profile={"seconds_per_iteration": table})
    )
    profile = experiment.loaded_profile()
    assert profile is not None
    try:
        (problem,) = candidates(experiment, profile, 0.0)
    except InputError:
        packs = any(
            gpus <= slots or gpus % slots == 0
            for gpus in range(max(starts, asked.get("min", 1)), min(asked.get("max", 999), slots * instances) + 1)
        )
        written = [gpus for gpus in asked.values() if gpus < starts or (gpus > slots and gpus % slots)]
        assert written or not packs or max(asked.values(), default=0) > slots * instances
        return
    sizes = problem.constraints.gang_sizes(slots)
    assert sizes[0] == problem.constraints.min_gpus_per_trial >= starts
    if "min" not in asked:
        assert not any(gpus <= slots or gpus % slots == 0 for gpus in range(starts, sizes[0]))
    found = plan(problem)
    if not isinstance(found, Infeasible):
        assert all(stage.gpus_per_trial >= starts for stage in found.plan.stages)


@given(
    weights=st.integers(0, 10**13),
    states=st.integers(0, 10**13),
    gpu_bytes=st.integers(10**8, 10**12),
    is_divided=st.booleans(),
)
def test_the_least_gang_holds_the_parameters_and_one_gpu_fewer_does_not(
    weights: int, states: int, gpu_bytes: int, is_divided: bool
) -> None:
    memory = TrialMemory(
        parameters=weights // 4,
        weight_bytes=weights,
        gradient_bytes=weights,
        state_bytes=states,
        optimizer="Adam",
        is_divided=is_divided,
    )
    least, room = memory.least_gang(gpu_bytes), FILLED * gpu_bytes
    if least is None:
        assert not is_divided
        assert memory.total_bytes > room
        return
    assert memory.total_bytes <= least * room * (1 + 1e-12)
    assert least == 1 or (is_divided and memory.total_bytes > (least - 1) * room)
