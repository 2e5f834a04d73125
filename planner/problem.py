"""A planning problem: a job on an offer, its limits, and the policy that plans it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rubberband.errors import InputError
from rubberband.planner.model import predict
from rubberband.planner.reserve import Reserve
from rubberband.planner.sampling import Draws, varies
from rubberband.planner.solver import Box, Objective
from rubberband.planner.table import gangs_of
from rubberband.values.offer import Offer
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Policy, Speeds, Stage
from rubberband.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A job to plan, or the rest of a running one."""

    stages: Sequence[Stage]
    profile: Profile
    offer: Offer
    constraints: PlanningConstraints
    policy: Policy = "optimal"
    objective: Objective = "min_cost"
    held: Sequence[Cohort] = ()
    """Instances held now, where the rest of a job is planned."""
    speeds: Speeds | None = None
    """Speeds of the trials that go on, where the rest of a job is planned."""
    seed: int = 0
    """Seed of the samples, where times vary."""
    reserve: Reserve | None = None
    """Terms of the money that a plan leaves of max_cost beside its cost; None: it leaves none."""

    @property
    def box(self) -> Box:
        """The limits as the solver takes them."""
        return Box.of(self.constraints)

    @property
    def constant(self) -> bool:
        """Whether all stages have the same number of instances."""
        return self.policy == "static"

    @property
    def is_asynchronous(self) -> bool:
        """Whether its trials climb rungs without a SYNC in between (asha): then simulations decide."""
        return self.stages[0].ladder is not None

    @property
    def varies(self) -> bool:
        """Whether times vary: then samples decide."""
        return varies(self.profile, self.offer, self.speeds)

    @property
    def prefers_spot(self) -> bool:
        """Whether a plan on spot alone comes first.

        Where time is the objective, on demand would always be chosen to save the losses of spot, which was asked for.
        """
        on_demand = any(cohort.market == "on_demand" for cohort in self.held)
        return self.objective == "min_time" and self.offer.spot is not None and not on_demand

    def draws(self) -> Draws:
        """Return the samples of the job, not yet drawn."""
        return Draws(self.stages, self.profile, self.offer, seed=self.seed, speeds=self.speeds)

    @property
    def beside(self) -> str:
        """Words on the other thing that max_cost pays for, after the cost of a plan."""
        terms = self.reserve
        return ", with the release of its instances" if terms is not None and terms.is_asked_for(self.offer) else ""

    def reserve_usd(self, plan: Plan, costs_usd: Sequence[float] | None = None) -> float:
        """Return the reserve of a plan, by the mean costs of its stages if they are known."""
        terms = self.reserve
        if terms is None or not terms.is_asked_for(self.offer):
            return 0.0
        if costs_usd is None:
            predicted = predict(self.stages, plan, self.profile, self.offer, self.held).stages
            costs_usd = [stage.cost_usd for stage in predicted]
        return terms.usd(self.offer, plan.stages, costs_usd)

    def families(self) -> list[PlanningConstraints]:
        """Return the limits of each search that the policy makes; the best of their plans is its plan.

        `naive_elastic` searches once for every number of GPUs per trial.
        """
        if self.policy != "naive_elastic":
            return [self.constraints]
        gangs = gangs_of(self.profile, self.offer, self.constraints)
        return [replace(self.constraints, min_gpus_per_trial=gpus, max_gpus_per_trial=gpus) for gpus in gangs]

    def check(self) -> None:
        """Raise InputError unless there are stages, each with trials and iterations."""
        if not self.stages:
            raise InputError("the job has 0 stages; give it at least 1")
        for index, stage in enumerate(self.stages):
            if stage.trials < 1 or stage.iterations < 1:
                raise InputError(
                    f"stage {index} has trials={stage.trials} and iterations={stage.iterations}; "
                    "both must be at least 1"
                )
