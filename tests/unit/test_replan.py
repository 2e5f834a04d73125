"""Planning the rest of a job: when the plan stays, when it goes, and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from rubberband.errors import InputError
from rubberband.planner.exact.solver import Objective
from rubberband.planner.planning import Replanned, replan
from rubberband.values.offer import Offer
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Speeds, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.plans import problem

STAGES = (Stage(trials=8, iterations=2), Stage(trials=4, iterations=4), Stage(trials=1, iterations=8))
PROFILE = Profile(seconds_per_iteration={1: 30.0})
SLOWER = Profile(seconds_per_iteration={1: 39.0})
OFFER = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.6, max_instances=8)


def instances(*counts: int) -> Plan:
    return Plan(stages=tuple(StagePlan(instances=count, gpus_per_trial=1) for count in counts))


def from_first_sync(
    profile: Profile = PROFILE,
    *,
    current: Plan | None = None,
    held: Sequence[Cohort] = (Cohort(instances=4, held_s=120.0),),
    objective: Objective = "min_cost",
    because: str = "",
    offer: Offer = OFFER,
    speeds: Speeds | None = None,
    spent_s: float = 120.0,
    spent_usd: float = 0.48,
    **limits: float,
) -> Replanned:
    """After stage 0 took four instances of 3.6 USD an hour two minutes, and cost 0.48 USD."""
    constraints = PlanningConstraints(**limits)  # type: ignore[arg-type]
    job = problem((STAGES,), profile, offer, constraints, objective=objective, held=held, speeds=speeds)
    rest = current or instances(4, 2, 1)
    return replan(job, done=1, spent_s=spent_s, spent_usd=spent_usd, current=rest, because=because)


def test_a_plan_that_keeps_its_limits_stays() -> None:
    found = from_first_sync(deadline_s=700.0, max_cost_usd=1.2)
    assert not found.changed
    assert found.plan == instances(4, 2, 1)
    assert found.prediction == found.present
    assert found.prediction.jct_s == 480.0
    assert found.prediction.cost_usd == pytest.approx(0.72)
    assert found.reason == "1m40s to spare"


def test_a_plan_that_would_be_late_is_changed_and_the_reason_says_how() -> None:
    found = from_first_sync(SLOWER, because="30 % slower than profiled", deadline_s=700.0)
    assert found.changed
    assert found.plan == instances(4, 4, 1)
    assert found.reason == (
        "30 % slower than profiled; the plan would end 44s after the deadline; "
        "stage 1 gets 4 instances instead of 2 (no extra cost, 2m36s sooner)"
    )


def test_growing_again_pays_for_new_instances_and_waits_for_them() -> None:
    offer = Offer(
        instance_type="test",
        gpus=1,
        price_usd_per_hour=3.6,
        max_instances=8,
        provision_delay_s=20.0,
        init_delay_s=10.0,
        data_usd_per_instance=0.01,
    )
    held = (Cohort(instances=2, held_s=120.0),)
    found = from_first_sync(SLOWER, offer=offer, held=held, deadline_s=650.0)
    assert found.plan == instances(4, 4, 1)
    assert found.prediction.stages[0].provisioning_s == 30.0
    assert found.prediction.cost_usd == pytest.approx(0.06 + 0.04 + 4 * 0.156 + 0.312 + 0.02 - 0.02)


def test_it_is_changed_for_a_saving_that_is_worth_it_only() -> None:
    wasteful = from_first_sync(current=instances(4, 3, 1))
    assert wasteful.plan.stages[1].instances in (2, 4)
    assert "(saves 0.24 USD" in wasteful.reason
    cheap = Offer(instance_type="test", gpus=1, price_usd_per_hour=0.036, max_instances=8)
    assert not from_first_sync(current=instances(4, 3, 1), offer=cheap).changed


def test_where_time_counts_it_is_changed_for_a_shorter_one() -> None:
    found = from_first_sync(objective="min_time", max_cost_usd=2.0)
    assert found.plan == instances(4, 4, 1)
    assert found.reason == "stage 1 gets 4 instances instead of 2 (no extra cost, 2m sooner)"


def test_a_deadline_that_cannot_be_met_is_missed_by_as_little_as_the_budget_allows() -> None:
    found = from_first_sync(SLOWER, deadline_s=400.0)
    assert found.plan == instances(4, 4, 1)
    assert found.reason.startswith(
        "no plan keeps the deadline any more; this one ends 3m8s after the deadline; stage 1"
    )
    one_held = (Cohort(instances=1, held_s=120.0),)
    poor = from_first_sync(SLOWER, held=one_held, current=instances(1, 1, 1), deadline_s=400.0, max_cost_usd=1.42)
    assert poor.prediction.cost_usd <= 1.42 - 0.48 + 1e-9


def test_a_budget_that_cannot_be_kept_is_passed_by_as_little_as_can_be() -> None:
    found = from_first_sync(SLOWER, current=instances(4, 3, 1), max_cost_usd=1.0)
    assert found.prediction.cost_usd == pytest.approx(0.936)
    assert found.reason.startswith(
        "no plan keeps max_cost any more; this one costs 0.42 USD more than max_cost; stage 1"
    )


def test_a_spent_budget_and_a_passed_deadline_still_leave_a_plan() -> None:
    assert not from_first_sync(deadline_s=60.0, max_cost_usd=0.4, current=instances(4, 4, 1)).changed


def test_noisy_times_ask_for_a_plan_that_keeps_the_deadline_with_confidence() -> None:
    noisy = Profile(seconds_per_iteration={1: 30.0}, trial_cv=0.2)
    found = from_first_sync(noisy, deadline_s=640.0)
    assert found.plan == instances(4, 4, 1)
    assert "with a probability of 0." in found.reason


def varying(iteration_cv: float) -> Profile:
    return Profile(seconds_per_iteration={1: 30.0}, iteration_cv=iteration_cv)


def test_a_saving_within_the_uncertainty_changes_nothing_and_both_figures_are_shown() -> None:
    found = from_first_sync(varying(1.0), current=instances(4, 4, 1), deadline_s=800.0)
    assert not found.changed
    assert re.search(r"; changing would save 0\.\d\d \+- 0\.\d\d USD$", found.reason), found.reason


def test_a_saving_beyond_the_uncertainty_is_taken() -> None:
    found = from_first_sync(varying(0.3), current=instances(4, 4, 2), deadline_s=800.0)
    assert found.plan == instances(4, 2, 1)
    assert re.search(r"\(saves 0\.\d\d \+- 0\.\d\d USD, ", found.reason), found.reason


def test_where_time_counts_its_uncertainty_is_shown() -> None:
    found = from_first_sync(varying(0.3), current=instances(4, 1, 1), objective="min_time", max_cost_usd=2.0)
    assert found.changed
    assert re.search(r", \dm\d+s \+- \d+s sooner\)$", found.reason), found.reason


def test_a_probability_that_is_dear_to_buy_is_not_bought() -> None:
    dear = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.6, max_instances=8, data_usd_per_instance=5.0)
    noisy = Profile(seconds_per_iteration={1: 30.0}, trial_cv=0.1)
    found = from_first_sync(noisy, offer=dear, held=(Cohort(instances=2, held_s=120.0),), deadline_s=660.0)
    assert not found.changed
    assert "changing would cost" in found.reason


def test_a_price_that_is_paid_for_a_deadline_at_high_risk_is_not_paid_at_low_risk() -> None:
    dear = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.6, max_instances=8, data_usd_per_instance=0.1)
    noisy, held = Profile(seconds_per_iteration={1: 30.0}, trial_cv=0.1), (Cohort(instances=2, held_s=120.0),)
    rescued = from_first_sync(noisy, offer=dear, held=held, deadline_s=580.0)
    assert rescued.plan == instances(4, 4, 1)
    assert "costs 0.23 +- 0.02 USD more" in rescued.reason
    likely = from_first_sync(noisy, offer=dear, held=held, deadline_s=640.0)
    assert not likely.changed
    assert likely.reason.endswith("changing would cost 0.23 +- 0.02 USD more")


@pytest.mark.parametrize(
    ("objective", "current", "held", "before", "after"),
    [
        ("min_time", (4, 4, 1), 4, {"max_cost_usd": 1.23}, {"max_cost_usd": 1001.23, "spent_usd": 1000.48}),
        ("min_cost", (4, 2, 1), 2, {"deadline_s": 640.0}, {"deadline_s": 1e5 + 640.0, "spent_s": 1e5 + 120.0}),
    ],
)
def test_money_spent_decides_nothing_where_time_counts_and_time_spent_nothing_where_money_does(
    objective: Objective, current: Sequence[int], held: int, before: dict[str, float], after: dict[str, float]
) -> None:
    dear = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.6, max_instances=8, data_usd_per_instance=0.1)
    noisy, cohorts = Profile(seconds_per_iteration={1: 30.0}, trial_cv=0.1), (Cohort(instances=held, held_s=120.0),)
    first, second = (
        from_first_sync(noisy, offer=dear, current=instances(*current), held=cohorts, objective=objective, **words)
        for words in (before, after)
    )
    assert not first.changed
    assert (second.plan, second.prediction) == (first.plan, first.prediction)


def test_a_problem_that_can_be_fixed_after_the_next_stage_waits() -> None:
    two_gpus = Profile(seconds_per_iteration={1: 30.0, 2: 18.0}, iteration_cv=0.3)
    held = (Cohort(instances=4, held_s=120.0),)
    found = from_first_sync(two_gpus, current=instances(4, 4, 1), held=held, deadline_s=520.0, max_gpus_per_trial=2)
    assert not found.changed
    assert found.reason.endswith("not 0.95; stage 1 stays as it is, later ones can still change")
    needed = from_first_sync(two_gpus, current=instances(4, 4, 1), held=held, deadline_s=480.0, max_gpus_per_trial=2)
    assert needed.plan.stages[:2] == instances(4, 4).stages
    assert needed.plan.stages[2].instances == 2


def test_the_trials_that_continue_are_planned_for_by_their_own_speed() -> None:
    slow = Speeds(factors=(1.4, 1.3, 1.0, 0.9), errors=(0.0,) * 4)
    average = from_first_sync(deadline_s=700.0)
    known = from_first_sync(speeds=slow, deadline_s=700.0)
    assert known.present.jct_s > average.present.jct_s + 60.0
    assert known.plan == instances(4, 4, 1)


def test_an_unplannable_experiment_is_an_input_error() -> None:
    with pytest.raises(InputError):
        from_first_sync(min_gpus_per_trial=16, max_gpus_per_trial=16)
