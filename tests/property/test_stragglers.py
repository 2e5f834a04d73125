"""Replacing slow instances on the virtual clock: never later, never dearer without need, and within every limit."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from hypothesis import event, given, settings
from hypothesis import strategies as st

from rubberband.executor import Faults, Job, Replacement, State, bill_usd
from rubberband.executor.core import stragglers
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.budget import examples
from tests.builders.virtual_runs import jct_s, run_virtual


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    gpus, instances = draw(st.sampled_from([1, 2])), draw(st.integers(2, 5))
    wide = gpus * draw(st.sampled_from([1, instances, instances]))
    offer = Offer(
        instance_type="test",
        gpus=gpus,
        price_usd_per_hour=3.6,
        max_instances=instances + draw(st.integers(0, 2)),
        provision_delay_s=draw(st.sampled_from([0.0, 30.0, 200.0])),
        init_delay_s=draw(st.sampled_from([0.0, 20.0])),
        minimum_billed_s=draw(st.sampled_from([0.0, 60.0])),
        data_usd_per_instance=draw(st.sampled_from([0.0, 0.3])),
        head_price_usd_per_hour=draw(st.sampled_from([0.0, 0.5])),
    )
    profile = Profile(
        seconds_per_iteration={count: 40.0 / count for count in range(1, 11)},
        trial_startup_s=draw(st.sampled_from([0.0, 5.0])),
    )
    trials = draw(st.integers(1, 4))
    stages = (
        Stage(trials=trials, iterations=draw(st.integers(1, 12))),
        Stage(trials=1, iterations=draw(st.integers(1, 80))),
    )
    plan = Plan(stages=(StagePlan(instances=instances, gpus_per_trial=gpus),) * 2)
    plan = replace(plan, stages=(plan.stages[0], StagePlan(instances=instances, gpus_per_trial=wide)))
    prediction = predict(stages, plan, profile, offer)
    slack = draw(st.sampled_from([None, 1.02, 1.3]))
    return Job(
        name="test",
        stages=stages,
        plan=plan,
        prediction=prediction,
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        objective=draw(st.sampled_from(["min_cost", "min_time"])),
        deadline_s=None if slack is None else slack * prediction.jct_s,
        iteration_timeout_s=1e6,
        replan=False,
    )


slowness = st.builds(
    Faults,
    slow=st.dictionaries(
        st.sampled_from([f"i-00{n}" for n in range(1, 8)]), st.sampled_from([2.0, 9.0, 50.0]), min_size=1
    ),
    slow_from=st.sampled_from([0.0, 100.0, 400.0]),
)


def ran(job: Job, faults: Faults, most: int) -> State:
    with mock.patch.object(stragglers, "MOST_REPLACEMENTS", most):
        controller, _, finish = run_virtual(job, faults)
    assert finish.outcome in ("done", "budget")
    return controller.state


@settings(deadline=None, max_examples=examples(60))
@given(jobs(), slowness)
def test_one_replacement_ends_the_run_no_later_and_costs_no_more_than_was_expected(job: Job, faults: Faults) -> None:
    state, before = ran(job, faults, 1), ran(job, faults, 0)
    event(f"{len(state.history.of(Replacement))} replaced")
    for found in state.history.of(Replacement):
        is_next_slow = faults.slow.get(f"i-00{len(before.instances) + 1}", 1.0) > 1.0
        if is_next_slow or faults.slow_from > state.started_at + found.at_s:
            return
        tolerance_s = 0.03 * found.left_s
        assert jct_s(state) <= jct_s(before) + tolerance_s
        extra_usd = bill_usd(state, state.now) - bill_usd(before, before.now)
        usd_per_s = job.offer.max_instances * job.offer.price_usd_per_s
        if job.objective == "min_cost" and job.deadline_s is None:
            assert extra_usd <= tolerance_s * usd_per_s
        assert extra_usd <= max(0.0, found.extra_usd) + tolerance_s * usd_per_s


@settings(deadline=None, max_examples=examples(60))
@given(jobs(), slowness, st.sampled_from([1.0, 1.2, 2.0]))
def test_the_cap_holds_and_evidence_counts_once(job: Job, faults: Faults, room: float) -> None:
    capped = replace(job, max_cost_usd=room * job.prediction.cost_usd)
    state = ran(capped, faults, stragglers.MOST_REPLACEMENTS)
    assert bill_usd(state, state.now) <= (capped.max_cost_usd or 0.0) + 1e-6
    used = [(found.trial, rank) for found in state.history.of(Replacement) for rank in found.ranks]
    assert len(state.history.of(Replacement)) <= stragglers.MOST_REPLACEMENTS
    assert len({found.instance for found in state.history.of(Replacement)}) == len(state.history.of(Replacement))
    assert len(set(used)) == len(used)
