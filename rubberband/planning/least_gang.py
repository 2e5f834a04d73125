"""The fewest GPUs of a trial on an instance type: as the file has it, where the profile starts, or by memory."""

from __future__ import annotations

from functools import cache

from rubberband.cloud.catalogue import Table, table_of
from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.units import counted
from rubberband.values.memory import FILLED
from rubberband.values.offer import Offer
from rubberband.values.plan import gang_sizes
from rubberband.values.profile import Profile

_KEY = "resources.gpus_per_trial"


class GangTooLargeError(InputError):
    """A trial needs more GPUs than it may have on an instance type; it may have enough on another."""


def with_least_gang(
    experiment: Experiment, offer: Offer, profile: Profile | None = None, table: Table | None = None
) -> Experiment:
    """Return the experiment with a number as `gpus_per_trial.min`, on instances of an offer. Raises as `least_gang`."""
    gang, _ = least_gang(experiment, offer, profile, table)
    return experiment if gang is None else experiment.with_least_gang(gang)


def least_gang(
    experiment: Experiment, offer: Offer, profile: Profile | None, table: Table | None
) -> tuple[int | None, str]:
    """Return the fewest GPUs of a trial on an offer (None: those of the file), and a remark if they are auto.

    Without a profile trials begin at 1 GPU, unless that is auto. Raises InputError for fewer GPUs than the profile
    starts at, and for auto without the memory of parameters or GPUs; GangTooLargeError where a trial may not have as
    many as it needs.
    """
    asked, least = experiment.resources.gpus_per_trial, 1 if profile is None else profile.smallest_gpus
    for key, gpus in asked.written():
        if gpus < least:
            raise InputError(
                f"{_KEY}.{key}: {gpus} is below {least} GPUs, where the profile starts, and the model may not fit; use "
                f"{least} or more, or profile {gpus}"
            )
    needs, remark = f"the profile starts at {least} GPUs", ""
    if asked.min == "auto":
        by_memory, in_words, remark = _by_memory(experiment, offer, profile, table)
        if by_memory >= least:
            least, needs = by_memory, in_words
        elif needs not in remark:
            remark = f"{needs}; {remark}"
    elif least == 1 or asked.least > 1:
        return None, ""
    gang = gang_sizes(offer.slots, least, least + offer.slots)[0]
    if more := _too_small(experiment, offer, gang):
        raise GangTooLargeError(f"{_KEY}.min: {needs}, and {more}")
    return gang, remark and f"gang: auto is {counted(gang, 'GPU')} per trial: {remark}."


def _by_memory(
    experiment: Experiment, offer: Offer, profile: Profile | None, table: Table | None
) -> tuple[int, str, str]:
    """Return the fewest GPUs that hold a trial, this in words, and the figures.

    Raises InputError where that is not known, GangTooLargeError if none do.
    """
    resources, memory, name = experiment.resources, experiment.memory, offer.instance_type
    gpu_bytes = memory_of_gpu(experiment, offer, table)
    if gpu_bytes == 0.0:
        none = "this machine has no GPU" if resources.kind.is_this_machine else f"{name} has no GPU"
        return 1, "a trial needs 1", none
    if isinstance(memory, str) or gpu_bytes is None:
        unknown = memory if isinstance(memory, str) else f"the memory of a GPU of {name} is not known"
        if profile is None:
            raise InputError(f"{_KEY}.min: auto is not known: {unknown}; write the fewest GPUs that the model fits on")
        starts = f"the profile starts at {counted(profile.smallest_gpus, 'GPU')}"
        return 1, starts, f"{starts}; {unknown}"
    gpu_bytes /= resources.trials_per_gpu
    least, room = memory.least_gang(gpu_bytes), f"{100.0 * FILLED:.0f} % of the {_gib(gpu_bytes)} of a GPU of {name}"
    if least is None:
        raise GangTooLargeError(
            f"{_KEY}.min: {memory.in_words} are {_gib(memory.total_bytes)}, more than {room}, and each GPU has all of "
            'it; set sharding = "fsdp" in the trial, or use a type with more memory'
        )
    largest = f", in the largest of {memory.configurations} configurations" if memory.configurations > 1 else ""
    share = f"{' / ' + str(least) if least > 1 else ''} are {_gib(memory.total_bytes / least)}"
    return (
        least,
        f"{memory.in_words} need {counted(least, 'GPU')} of {_gib(gpu_bytes)}",
        f"{memory.in_words}{share}{largest}, within {room}; activations are not measured and count 0",
    )


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.3g} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.3g} MiB"


def memory_of_gpu(experiment: Experiment, offer: Offer, table: Table | None) -> float | None:
    """Return the memory of a GPU of an offer; 0 for instances without one, None if it is not known."""
    resources = experiment.resources
    if offer.place == "slot":
        return 0.0
    if resources.kind.is_this_machine:
        return _local_gpu_bytes()
    row = table_of(resources, table=table).get(offer.instance_type)
    return None if row is None or row.gpu_memory_gib is None else row.gpu_memory_gib * 2**30


@cache
def _local_gpu_bytes() -> float | None:
    """Return the memory of this machine's smallest GPU, which is asked once; 0 without one, None if it is not known."""
    from rubberband.cloud.local.gpus import find_gpus, least_memory_bytes  # few experiments ask

    ids = find_gpus().ids
    return least_memory_bytes(ids) if ids else 0.0


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
        larger = "use a larger pool"
        if resources.pool is None:
            larger = f"raise resources.max_instances to {gang // offer.slots}"
        return f"{counted(offer.max_instances, 'instance')} of {offer.instance_type} have {every}; {larger}"
    return ""
