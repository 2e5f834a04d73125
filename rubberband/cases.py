"""From an experiment to what it can be planned on: every instance type with its profile and its limits."""

from __future__ import annotations

from collections.abc import Mapping

from rubberband.cloud.catalogue import offers
from rubberband.experiment import Experiment
from rubberband.planner.estimate import Case
from rubberband.profile import Profile


def cases(experiment: Experiment, profiles: Profile | Mapping[str, Profile], now: float) -> tuple[Case, ...]:
    """A case for each instance type of the experiment, in its order, if it starts at `now` (Unix time).

    `profiles` is one for all types, or type -> profile. Raises InputError for what no plan can be made on.
    """
    return tuple(
        Case(
            offer=offer,
            profile=profiles if isinstance(profiles, Profile) else profiles[offer.instance_type],
            constraints=experiment.planning_constraints(now, offer.gpus),
        )
        for offer in offers(experiment.resources, profiles)
    )
