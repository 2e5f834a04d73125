"""An experiment on an existing Ray cluster, with what its nodes set: the size of instances, and how many there are."""

from __future__ import annotations

from rubberband.installation import require_ray
from rubberband.spec.experiment import Experiment
from rubberband.units import counted


def on_cluster(experiment: Experiment) -> Experiment:
    """Return the experiment with the GPUs and the number of instances that its Ray cluster has, and a note on it.

    Others are returned as they are. Asks the cluster's head; connects no driver and claims nothing. Raises InputError
    for a cluster that does not answer, that has other versions of Ray or Python, or no such nodes.
    """
    resources = experiment.resources
    if not resources.kind.is_borrowed:
        return experiment
    require_ray(f"resources.provider: {resources.provider}")
    from rubberband.cloud.ray_cluster import view

    found = view.view(view.resolve(resources.address))
    view.require_versions(found)
    part = view.share(found, resources)
    note, most = f"cluster: {part.line}.", part.fitting
    if "max_instances" in resources.model_fields_set:
        most = resources.max_instances
        if most > part.fitting:
            more = counted(most - part.fitting, "instance")
            note += f" Of max_instances={most}, {more} of {counted(part.gpus_per_instance, 'GPU')} must be added to it."
    changed = resources.model_copy(update={"gpus_per_instance": part.gpus_per_instance, "max_instances": most})
    return experiment.model_copy(update={"resources": changed}).with_notes(note)
