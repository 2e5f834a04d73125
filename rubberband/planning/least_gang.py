"""The fewest GPUs of a trial on an instance type: as the file has it, or where the profile starts."""

from __future__ import annotations

from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.values.offer import Offer
from rubberband.values.plan import gang_sizes
from rubberband.values.profile import Profile

_KEY = "resources.gpus_per_trial"


def with_least_gang(experiment: Experiment, offer: Offer, profile: Profile | None = None) -> Experiment:
    """Return the experiment with a number as `gpus_per_trial.min`, on instances of an offer.

    Without a profile trials begin at 1 GPU. Raises InputError for fewer GPUs than the profile starts at, and where a
    trial may not have as many.
    """
    asked, least = experiment.resources.gpus_per_trial, 1 if profile is None else profile.smallest_gpus
    for key, gpus in asked.written():
        if gpus < least:
            raise InputError(
                f"{_KEY}.{key}: {gpus} is below {least} GPUs, where the profile starts, and the model may not fit; use "
                f"{least} or more, or profile {gpus}"
            )
    if least == 1 or asked.least > 1:
        return experiment
    gang = gang_sizes(offer.slots, least, least + offer.slots)[0]
    if more := _too_small(experiment, offer, gang):
        raise InputError(f"{_KEY}.min: the profile starts at {least} GPUs, and {more}")
    return experiment.with_least_gang(gang)


def _too_small(experiment: Experiment, offer: Offer, gang: int) -> str:
    """Return why a trial may not have as many GPUs as `gang` on an offer, with the fix; empty if it may."""
    resources, every = experiment.resources, offer.slots * offer.max_instances
    most = resources.gpus_per_trial.most
    if gang > 1 and experiment.is_function:
        return "a function has 1; write @rubberband.distributed above it, and train as under torchrun"
    if gang > 1 and resources.trials_per_gpu > 1:
        return f"a trial has 1 with trials_per_gpu={resources.trials_per_gpu}; set resources.trials_per_gpu to 1"
    if most is not None and most < gang:
        return f"{_KEY}.max is {most}; raise it to {gang}"
    if experiment.batch.max is not None and experiment.batch.max < gang:
        return f"batch.max is {experiment.batch.max} samples, too few for them; raise it to {gang}"
    if every < gang:
        larger = "use a larger pool" if resources.pool is not None else f"raise it to {-(-gang // offer.slots)}"
        return f"max_instances={offer.max_instances} of {offer.instance_type} have {every}; {larger}"
    return ""
