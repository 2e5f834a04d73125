"""A trial of which one sample does not fit into memory is skipped at once; the search goes on, with its share."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import Faults, ReleaseInstance, TrialStatus, VirtualBackend
from rubberband.executor.core.bill import bill_usd
from rubberband.executor.core.job import Job
from rubberband.planner.exact.model import predict
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.views.live.narration import Narrator
from tests.builders.jobs import JOB, OFFER, PROFILE
from tests.builders.stories import begun
from tests.builders.virtual_runs import jct_s, run_virtual

STAGES = (Stage(trials=4, iterations=40), Stage(trials=1, iterations=10))


def job(instances: int) -> Job:
    plan = Plan(stages=(StagePlan(instances=instances, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=1)))
    predicted = predict(STAGES, plan, PROFILE, OFFER)
    return dataclasses.replace(JOB, stages=STAGES, plan=plan, prediction=predicted, max_failures=2)


def run(instances: int, skipped: tuple[int, ...]) -> tuple[float, float, list[TrialStatus]]:
    made = job(instances)
    faults = Faults(failures={(trial, 1): "memory" for trial in skipped})
    backend = VirtualBackend(made.name, made.offer, made.profile, metric=made.metric, faults=faults)
    controller, _, finish = run_virtual(made, backend=backend)
    state = controller.state
    assert finish.outcome == "done"
    assert [state.trials[trial].attempt for trial in skipped] == [1] * len(skipped), "no other try repeats it"
    return jct_s(state), bill_usd(state, state.now), [trial.status for trial in state.trials]


@pytest.mark.parametrize("skipped", [(0, 1), (1, 3)])
def test_a_search_with_skipped_trials_is_over_earlier_or_costs_less(skipped: tuple[int, ...]) -> None:
    whole_s, whole_usd, _ = run(1, ())
    early_s, early_usd, statuses = run(1, skipped)
    assert early_s < 0.8 * whole_s, "two GPUs train four trials one after another: others have their turns"
    assert early_usd < 0.8 * whole_usd
    assert [number for number, status in enumerate(statuses) if status is TrialStatus.FAILED] == [*skipped]


def test_the_instance_of_skipped_trials_is_given_back_within_the_stage() -> None:
    wide_s, wide_usd, _ = run(2, ())
    same_s, cheaper_usd, _ = run(2, (0, 1))
    assert same_s <= wide_s
    assert cheaper_usd < 0.7 * wide_usd
    story = begun(job(2))
    assert story.fail(0, "memory") == []
    (release,) = story.fail(1, "memory")
    assert release == ReleaseInstance(instance="i-001")
    assert len(story.state.running()) == 2


def test_a_skipped_trial_is_one_line() -> None:
    made = dataclasses.replace(job(1), offer=dataclasses.replace(OFFER, instance_type="g5.xlarge"))
    lines, narrator = list[str](), Narrator(made)
    faults = Faults(failures={(3, 1): "memory"})
    backend = VirtualBackend(made.name, made.offer, made.profile, metric=made.metric, faults=faults)
    run_virtual(made, backend=backend, observers=[lambda event, seen: lines.extend(narrator.lines(event, seen))])
    assert [line for line in lines if "trial 3 on" in line] == ["trial 3 on g5.xlarge skipped: fault"]
