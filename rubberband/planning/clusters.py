"""An experiment on an existing Ray cluster, with what its nodes set: the size of instances, and how many there are."""

from __future__ import annotations

from pathlib import Path

from rubberband.cloud.provider import Share
from rubberband.errors import InputError
from rubberband.installation import require_ray
from rubberband.planning.startup_history import StartTimes, join_times
from rubberband.spec.experiment import Experiment
from rubberband.spec.resources import Resources
from rubberband.units import counted, format_usd
from rubberband.values.kinds import part_of


def on_cluster(experiment: Experiment) -> Experiment:
    """Return the experiment with the GPUs and the number of instances that its Ray cluster has, and a note on it.

    Others are returned as they are. Asks the cluster's head; connects no driver and claims nothing. Raises InputError
    for a cluster that does not answer, that has other versions of Ray or Python, or no such nodes.
    """
    resources = experiment.resources
    if resources.kind.share is None:
        return experiment
    part = _share(resources)
    note, most = f"cluster: {part.line}.", part.fitting
    kinds = sorted({node.accelerator for node in part.nodes} - {""})
    if len(kinds) > 1 and resources.slots is None:
        note += f" The plan takes {' and '.join(kinds)} to be equally fast; resources.node_labels keeps to one kind."
    if "max_instances" in resources.model_fields_set:
        most = resources.max_instances
        if most > part.fitting:
            more = counted(most - part.fitting, "instance")
            note += f" Of max_instances={most}, {more} must join it."
    changed = resources.model_copy(update={"gpus_per_instance": part.gpus_per_instance, "max_instances": most})
    found_on = experiment.model_copy(update={"resources": changed}).with_notes(note)
    return found_on if resources.unit == "USD" else _in_gpu_hours(found_on)


def joining(experiment: Experiment, home: Path) -> StartTimes | None:
    """Return the times until nodes join a cluster; None if all instances have room on those that are there."""
    part = _share(experiment.resources)
    return None if experiment.resources.max_instances <= part.fitting else join_times(home, part.address)


def free_together(resources: Resources) -> int:
    """Return how many instances one machine of a Ray cluster has room for now. Raises InputError as `on_cluster`."""
    return _share(resources).free_together


def _share(resources: Resources) -> Share:
    require_ray(f"resources.provider: {resources.provider}")
    found: Share = part_of(resources.provider, "share")(resources)
    return found


def _in_gpu_hours(experiment: Experiment) -> Experiment:
    """Return the experiment with the fastest plan as its objective, unless it names one.

    Raises InputError for a max_cost, which is in US dollars.
    """
    constraints, gpus = experiment.constraints, experiment.resources.gpus_per_instance or 1
    if constraints.max_cost_usd is not None:
        raise InputError(
            f"constraints.max_cost: {format_usd(constraints.max_cost_usd)} limits nothing on a Ray cluster without a "
            f"price; write resources.price_per_hour: {gpus}, which counts each GPU-hour as 1 USD, or leave max_cost out"
        )
    hours = "GPU-hours" if experiment.resources.slots is None else "slot-hours (as GPU-h)"
    if "objective" in constraints.model_fields_set:
        return experiment.with_notes(f"cost: nothing is charged; {hours} are counted.")
    note = f"cost: nothing is charged; the plan is the fastest, and objective: min_cost uses the fewest {hours}."
    fastest = constraints.model_copy(update={"objective": "min_time"})
    return experiment.model_copy(update={"constraints": fastest}).with_notes(note)
