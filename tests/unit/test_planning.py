"""What is accepted for a run also finishes: the reserve beside max_cost, and what is refused with which remedy."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError, InputError
from rubberband.executor import Job, VirtualBackend, with_trial
from rubberband.planner.reserve import SLACK_S, Reserve
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas
from rubberband.planning.prices_and_quotas import answer
from rubberband.spec.experiment import Experiment
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Market, Spent, StagePlan
from rubberband.values.profile import Profile
from tests.builders.experiments import PROFILE, experiment
from tests.builders.plans import plan_job
from tests.builders.virtual_runs import jct_s, run_virtual

SPOT_MARKET: dict[str, Any] = {
    "instance_type": "x",
    "market": "spot",
    "spot": {"price_per_hour": 9.0, "interruptions_per_hour": 0.05},
}
FREE = {"provision_delay": "20s", "init_delay": "10s", "minimum_billed": "60s"}


def planned(constraints: dict[str, Any] | None = None, profile: Profile = PROFILE, **resources: Any) -> Job:
    return plan_job(experiment(constraints, **{**FREE, **resources}), profile)


def test_a_plan_leaves_what_giving_its_instances_back_may_cost() -> None:
    free = planned()
    cost_usd = free.prediction.cost_usd
    reserve_usd = max(choice.instances for choice in free.plan.stages) * 0.01 * (free.release_margin_s + SLACK_S)
    enough = planned({"max_cost": cost_usd + reserve_usd + 0.001})
    assert run_virtual(enough)[2].outcome == "done"
    with pytest.raises(InfeasibleError, match="with the release of its instances; raise max_cost to"):
        planned({"max_cost": cost_usd + 0.001})


def test_a_refusal_after_measuring_says_what_that_took_of_the_limits() -> None:
    soonest = planned({"objective": "min_time", "max_cost": 1000})
    deadline = {"deadline": f"{soonest.prediction.jct_s + 5.0:.0f}s"}
    text = r"cannot be met: .*; measuring took 40s and 0\.0200 USD of the limits; raise the deadline to"
    with pytest.raises(InfeasibleError, match=text):
        plan_job(experiment(deadline, **FREE), PROFILE, spent=Spent(seconds=40.0, cost_usd=0.02), most_usd=5.0)


@pytest.mark.parametrize("max_cost_usd", [0.01, 0.5, 0.7])
@pytest.mark.parametrize("resources", [{}, {"billing": "per_function"}, {"head_price_per_hour": 3.6}])
def test_the_max_cost_that_is_named_is_accepted_and_the_run_finishes(
    max_cost_usd: float, resources: dict[str, Any]
) -> None:
    with pytest.raises(InfeasibleError) as refused:
        planned({"max_cost": max_cost_usd}, **resources)
    named = re.search(r"raise max_cost to ([0-9.]+) USD", str(refused.value))
    assert named is not None
    job = planned({"max_cost": float(named.group(1))}, **resources)
    assert run_virtual(job)[2].outcome == "done"


def test_the_fastest_plan_is_one_that_can_be_paid_to_its_end() -> None:
    fastest = planned({"objective": "min_time"})
    tight = planned({"objective": "min_time", "max_cost": fastest.prediction.cost_usd + 0.02})
    assert max(choice.instances for choice in tight.plan.stages) < max(c.instances for c in fastest.plan.stages)
    assert run_virtual(tight)[2].outcome == "done"


def test_a_new_plan_can_be_paid_to_its_end_as_well() -> None:
    asked = words(experiment({"objective": "min_time", "max_cost": 1.164587}))
    asked["search"]["scheduler"] = {"type": "sha", "num_samples": 16, "max_t": 13, "reduction_factor": 2}
    asked["resources"] = {"provider": "aws", "instance_type": "g4dn.12xlarge", "price_per_hour": 3.912}
    asked["resources"] |= {"max_instances": 8, "provision_delay": "34s", "init_delay": "39s"}
    job = plan_job(Experiment(**asked), Profile(seconds_per_iteration={1: 60.0, 2: 33.0, 4: 18.6}, trial_startup_s=2.0))
    faster = Profile(seconds_per_iteration={1: 57.0, 2: 31.35, 4: 17.67}, trial_startup_s=2.0)
    _, _, finish = run_virtual(job, backend=VirtualBackend(job.name, job.offer, faster, metric=job.metric))
    assert finish.outcome == "done"


@pytest.mark.by_default(2)
@pytest.mark.parametrize("resources", [{}, {"provider": "virtual", **SPOT_MARKET}, {"billing": "per_function"}])
@pytest.mark.parametrize("objective", ["min_cost", "min_time"])
def test_an_estimate_calls_feasible_what_a_run_accepts(resources: dict[str, Any], objective: str) -> None:
    cost_usd = planned({}, **resources).prediction.cost_usd
    for share in (0.99, 1.01, 1.06):
        limits = {"objective": objective, "max_cost": round(share * cost_usd, 6), "deadline": "1h"}
        asked = experiment(limits, **FREE, **resources)
        found = answer(
            asked, PROFILE, PricesAndQuotas(), PlanningOptions(now=0.0, clock=itertools.repeat(0.0).__next__)
        ).estimate
        if found.job is not None:
            assert plan_job(asked, PROFILE, now=0.0).plan == found.job.plan
            continue
        with pytest.raises(InfeasibleError, match=re.escape(str(found.reason))):
            plan_job(asked, PROFILE, now=0.0)
        (change,) = found.remedies[0].changes
        assert change.key == "constraints.max_cost"
        assert isinstance(change.value, float)
        assert plan_job(_capped(asked, change.value), PROFILE, now=0.0).plan
        if "billing" in resources:
            continue  # a narrower plan, which keeps less back, may do with a little less
        with pytest.raises(InfeasibleError):
            plan_job(_capped(asked, change.value - 0.011), PROFILE, now=0.0)


def _capped(asked: Experiment, max_cost_usd: float) -> Experiment:
    constraints = asked.constraints.model_copy(update={"max_cost_usd": max_cost_usd})
    return asked.model_copy(update={"constraints": constraints})


def test_a_stage_that_grows_on_spot_is_planned_with_the_money_to_start_it() -> None:
    stages = [{"trials": 4, "iterations": 1}, {"trials": 4, "iterations": 8}]
    asked = words(experiment({"objective": "min_time"}))
    asked["search"]["scheduler"] = {"type": "stages", "stages": stages}
    asked["resources"] = {"provider": "virtual", "price_per_hour": 36.0, "gpus_per_instance": 1, "max_instances": 4}
    asked["resources"] |= {"instance_type": "x", "market": "spot", "init_delay": "3m", "minimum_billed": 0}
    asked["resources"]["spot"] = {"price_per_hour": 3.6, "interruptions_per_hour": 0.0}
    asked["constraints"]["max_cost"] = 7.0  # 4 instances for 3 minutes at 36 USD/h are 7.20 USD
    job = plan_job(Experiment(**asked), Profile(seconds_per_iteration={1: 60.0}))
    assert max(choice.instances for choice in job.plan.stages) == 2
    controller, _, finish = run_virtual(job)
    assert finish.outcome == "done"
    assert jct_s(controller.state) == pytest.approx(job.prediction.jct_s)


def test_odds_count_the_money_that_is_kept_back() -> None:
    noisy = Profile(seconds_per_iteration={1: 4.0, 2: 2.5}, trial_startup_s=3.0, trial_cv=0.2)
    free = planned({}, noisy)
    assert free.prediction.cost is not None
    limits = {"max_cost": free.prediction.cost.p95 + 0.01, "confidence": 0.5}
    asked = experiment(limits, **FREE)
    found = answer(
        asked, noisy, PricesAndQuotas(), PlanningOptions(now=0.0, clock=itertools.repeat(0.0).__next__)
    ).estimate
    assert found.odds is not None
    assert found.odds.p_budget < 0.93, "the bill itself stays within max_cost with 95 %"


def test_a_function_has_one_gpu_by_default(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("def train(config): ...\nclass Other: ...\n")
    (tmp_path / "passed.py").write_text("from made import Other, train as again\nnamed = again\n")
    asked = experiment({"max_cost": 50, "objective": "min_time"}, max_instances=8, gpus_per_trial={})

    def of(name: str, **resources: Any) -> Experiment:
        given = words(asked) | {"entrypoint": name}
        given["resources"] = given["resources"] | {"gpus_per_trial": {}} | resources
        return with_trial(Experiment(**given), [tmp_path])

    for name, most in {"made:train": 1, "passed:again": 1, "made:Other": 2, "passed:named": 2, "no:where": 2}.items():
        assert max(choice.gpus_per_trial for choice in plan_job(of(name), PROFILE).plan.stages) == most
    for key in ("min", "max"):
        with pytest.raises(InputError, match=rf"made:train is a function, .*gpus_per_trial.{key} is 2; set it to 1"):
            plan_job(of("made:train", gpus_per_trial={key: 2}), PROFILE)


def test_no_advice_passes_what_may_be_spent() -> None:
    tight = experiment({"max_cost": 0.5}, **FREE)
    with pytest.raises(InfeasibleError) as free:
        plan_job(tight, PROFILE)
    needed_usd = free.value.remedies[0].cost_usd
    with pytest.raises(InfeasibleError, match="no remedy was found within") as refused:
        plan_job(tight, PROFILE, most_usd=needed_usd / 2)
    assert refused.value.remedies == ()


def test_a_greedy_plan_that_misses_the_confidence_is_refused() -> None:
    noisy = Profile(seconds_per_iteration={1: 4.0, 2: 2.5}, trial_startup_s=3.0, trial_cv=0.3)
    stages = [{"trials": 8, "iterations": 2}, {"trials": 2, "iterations": 6}]
    asked = words(experiment({"deadline": "3m", "max_cost": 1.0}, **FREE))
    asked["search"]["scheduler"] = {"type": "stages", "stages": stages}
    with pytest.raises(InfeasibleError, match=r"greedy plan does not keep deadline 3m .* confidence 0\.95"):
        plan_job(Experiment(**asked), noisy, "greedy")


def test_on_ec2_the_dearest_fallback_type_is_reserved_for() -> None:
    asked = words(experiment({"max_cost": 500}))
    asked["resources"] = {"provider": "aws", "instance_types": ["p3.8xlarge", "p3.16xlarge"]}
    job = plan_job(Experiment(**asked), PROFILE)
    assert job.reserved_usd_per_hour > 20.0
    assert (job.release_margin_s, job.lease_s) == (60.0, 600.0)


RENTED = Offer(
    instance_type="test",
    gpus=2,
    price_usd_per_hour=36.0,
    max_instances=8,
    init_delay_s=30.0,
    head_price_usd_per_hour=3.6,
)
STAGES = tuple(StagePlan(instances=instances, gpus_per_trial=1) for instances in (4, 2))
SPOT = dataclasses.replace(
    RENTED, head_price_usd_per_hour=0.0, spot=Spot(price_usd_per_hour=12.0, interruptions_per_hour=0.05)
)


def test_the_reserve_pays_for_the_last_stage_and_the_head_while_all_is_given_back() -> None:
    reserve_usd = Reserve(margin_s=60.0).usd(RENTED, STAGES, [10.0, 10.0])
    assert reserve_usd == pytest.approx((2 * 36.0 + 3.6) * (60.0 + SLACK_S) / 3600.0)
    assert Reserve().usd(RENTED, STAGES, [10.0, 10.0]) == 0.0


def test_an_earlier_stage_is_given_back_from_what_later_ones_cost() -> None:
    reserve_usd = Reserve(margin_s=60.0).usd(RENTED, STAGES, [10.0, 0.5])
    assert reserve_usd == pytest.approx((4 * 36.0 + 3.6) * (60.0 + SLACK_S) / 3600.0 - 0.5)


def test_a_stage_that_grows_is_started_at_the_highest_price_from_what_is_left_then() -> None:
    grows = tuple(StagePlan(instances=instances, gpus_per_trial=1, market="spot") for instances in (2, 4))
    starts_usd = (2 * 72.0 * 30.0 + 2 * 72.0 * 60.0) / 3600.0  # those held until they are ready, new ones at least 60 s
    reserve_usd = Reserve(highest_price_usd_per_hour=72.0).usd(SPOT, grows, [5.0, 1.0])
    assert reserve_usd == pytest.approx(starts_usd - 1.0)
    assert Reserve(highest_price_usd_per_hour=72.0, ready=4).usd(SPOT, grows[1:], [1.0]) == pytest.approx(
        4 * (72.0 - 12.0) * 2.0 / 3600.0  # nothing starts: what the stop needs at the highest price
    )


stages_on_markets = st.lists(
    st.builds(
        StagePlan, instances=st.integers(1, 4), gpus_per_trial=st.just(1), market=st.sampled_from(get_args(Market))
    ),
    min_size=1,
    max_size=4,
)


@given(stages_on_markets, st.lists(st.floats(0.0, 5.0), min_size=4, max_size=4))
def test_the_reserve_starts_each_instance_that_no_earlier_stage_holds(
    chosen: list[StagePlan], costs_usd: list[float]
) -> None:
    reserve = Reserve(highest_price_usd_per_hour=72.0)
    held, spent_usd, needed_usd = set[tuple[str, int]](), 0.0, 0.0
    for stage, cost_usd in zip(chosen, costs_usd, strict=False):
        wanted = {(stage.market, number) for number in range(stage.instances)}
        if wanted - held:  # those held until they are ready, new ones at least 60 s
            starts_s = 30.0 * len(wanted & held) + 60.0 * len(wanted - held)
            needed_usd = max(needed_usd, spent_usd + 72.0 / 3600.0 * starts_s)
        spent_usd += cost_usd
        needed_usd = max(needed_usd, spent_usd + reserve.release_usd(SPOT, stage))
        held = wanted
    found_usd = reserve.usd(SPOT, chosen, costs_usd[: len(chosen)])
    assert found_usd == pytest.approx(max(0.0, needed_usd - spent_usd))


def words(asked: Experiment) -> dict[str, Any]:
    return asked.model_dump(by_alias=True, exclude_none=True)
