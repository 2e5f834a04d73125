"""The deterministic planning model: what a plan takes and costs when nothing varies (RubberBand §3-4).

SYNC makes stages additive, so one pass over the stages is the whole model; no graph is built. It searches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubberband.errors import InputError
from rubberband.offer import Offer, slots
from rubberband.plan import Plan, Prediction, Stage, StagePlan, StagePrediction
from rubberband.profile import Profile


def run_s(stage: Stage, gpus_per_trial: int, profile: Profile) -> float:
    """Seconds that one trial of `stage` takes with `gpus_per_trial` GPUs: startup + w*e(g)."""
    return profile.trial_startup_s + stage.iterations * profile.iteration_s(gpus_per_trial)


def least_instances(num_slots: int, gpus_per_instance: int, gpus_per_trial: int) -> int:
    """The fewest instances that run `num_slots` trials at once: the inverse of `offer.slots`."""
    if gpus_per_trial <= gpus_per_instance:
        return -(-num_slots // (gpus_per_instance // gpus_per_trial))
    return num_slots * (gpus_per_trial // gpus_per_instance)


def stage_s(stage: Stage, choice: StagePlan, profile: Profile, offer: Offer) -> float:
    """Stage time in seconds: ceil(n/slots) waves of equally long trials, from the first start to SYNC.

    Precondition: `choice` gives at least one slot (`predict` checks it).
    """
    num_slots = slots(choice.instances, offer.gpus, choice.gpus_per_trial)
    return -(-stage.trials // num_slots) * run_s(stage, choice.gpus_per_trial, profile)


def check_plan(stages: Sequence[Stage], plan: Plan, offer: Offer) -> None:
    """Raise InputError unless `plan` fits `stages` and can be carried out on `offer`."""
    if len(plan.stages) != len(stages):
        raise InputError(
            f"the plan has {len(plan.stages)} stages and the job {len(stages)}; give instances and gpus_per_trial "
            "for each stage of the job"
        )
    for index, choice in enumerate(plan.stages):
        _check_choice(index, choice, offer)


def _check_choice(index: int, choice: StagePlan, offer: Offer) -> None:
    where = f"stage {index} of the plan"
    gpus = choice.gpus_per_trial
    if choice.instances < 1 or gpus < 1:
        raise InputError(f"{where} has instances={choice.instances} and gpus_per_trial={gpus}; both must be at least 1")
    if choice.instances > offer.max_instances:
        raise InputError(
            f"{where} wants {choice.instances} instances and max_instances is {offer.max_instances}; "
            f"raise max_instances, or plan at most {offer.max_instances}"
        )
    if gpus > offer.gpus and gpus % offer.gpus:
        raise InputError(
            f"{where} has gpus_per_trial={gpus}; beyond the {offer.gpus} GPUs of {offer.instance_type} it must be "
            f"a multiple of {offer.gpus}, such as {gpus // offer.gpus * offer.gpus}"
        )
    if slots(choice.instances, offer.gpus, gpus) < 1:
        raise InputError(
            f"{where} gives {choice.instances} instances of {offer.gpus} GPUs to trials of {gpus} GPUs; none fits: "
            f"plan at least {gpus // offer.gpus} instances, or fewer GPUs per trial"
        )


@dataclass(slots=True)
class _Cohort:
    """Instances that were started together."""

    instances: int
    held_s: float


@dataclass(slots=True)
class _Cluster:
    """The instances held, oldest cohort first, and what each further second of them costs."""

    offer: Offer
    cohorts: list[_Cohort]

    @property
    def instances(self) -> int:
        return sum(cohort.instances for cohort in self.cohorts)

    def shrink(self, instances: int) -> None:
        """Release the instances billed longest until `instances` are left."""
        surplus = self.instances - instances
        for cohort in self.cohorts:
            released = min(surplus, cohort.instances)
            cohort.instances -= released
            surplus -= released

    def hold(self, seconds: float) -> float:
        """Hold everything for `seconds`; what that adds to the bill beyond the minimum already paid, in USD."""
        minimum_s = self.offer.minimum_billed_s
        billed_s = 0.0
        for cohort in self.cohorts:
            before_s = max(minimum_s, cohort.held_s)
            cohort.held_s += seconds
            billed_s += cohort.instances * (max(minimum_s, cohort.held_s) - before_s)
        return 0.0 if self.offer.billing == "per_function" else self.offer.price_usd_per_s * billed_s

    def start(self, instances: int) -> float:
        """Start `instances` more; the minimum and the data that this commits to, in USD."""
        self.cohorts.append(_Cohort(instances, 0.0))
        return instances * self.offer.instance_cost_usd(0.0)


def predict(stages: Sequence[Stage], plan: Plan, profile: Profile, offer: Offer) -> Prediction:
    """What `plan` takes and costs when every trial and every delay lasts exactly its mean (RubberBand §4.1-4.2).

    Growing inserts `offer.provision_delay_s` and then `offer.init_delay_s` before the stage, while the instances
    already held stay held and billed; shrinking is instant at the previous SYNC and releases those billed longest.
    The delays are the offer's: where the profile measured them, the caller puts them into the offer.

    The stages' costs add up to the total. An instance's minimum and data count for the stage that starts it, since
    they are owed from then on; later stages add only what goes beyond the minimum.

    Raises InputError if the plan does not fit the job or the offer, or uses fewer GPUs than the profile measured.
    """
    check_plan(stages, plan, offer)
    cluster = _Cluster(offer, [])
    predictions: list[StagePrediction] = []
    now_s = 0.0
    for stage, choice in zip(stages, plan.stages, strict=True):
        predicted = _predict_stage(stage, choice, profile, cluster, now_s)
        predictions.append(predicted)
        now_s += predicted.provisioning_s + predicted.duration_s
    return Prediction(
        jct_s=now_s,
        cost_usd=sum(predicted.cost_usd for predicted in predictions),
        stages=tuple(predictions),
        extrapolated=tuple(
            sorted({choice.gpus_per_trial for choice in plan.stages if choice.gpus_per_trial > profile.largest_gpus})
        ),
    )


def _predict_stage(
    stage: Stage, choice: StagePlan, profile: Profile, cluster: _Cluster, start_s: float
) -> StagePrediction:
    offer = cluster.offer
    duration_s = stage_s(stage, choice, profile, offer)
    grown = choice.instances - cluster.instances
    provisioning_s = 0.0
    cost_usd = offer.function_cost_usd(
        stage.trials * choice.gpus_per_trial, run_s(stage, choice.gpus_per_trial, profile)
    )
    if grown > 0:
        provisioning_s = offer.provision_delay_s + offer.init_delay_s
        cost_usd += cluster.hold(offer.provision_delay_s) + cluster.start(grown) + cluster.hold(offer.init_delay_s)
    else:
        cluster.shrink(choice.instances)
    cost_usd += cluster.hold(duration_s) + offer.head_cost_usd(provisioning_s + duration_s)
    return StagePrediction(
        start_s=start_s,
        provisioning_s=provisioning_s,
        duration_s=duration_s,
        cost_usd=cost_usd,
        slots=slots(choice.instances, offer.gpus, choice.gpus_per_trial),
    )
