"""Planning of elastic batches: trials whose batch size follows the model of a profile.

The model is imported where a profile has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rubberband.errors import InputError
from rubberband.planner import JobPlan, Problem
from rubberband.planning.assumptions import Change, slower
from rubberband.planning.candidates import POOR_FIT
from rubberband.spec.experiment import Experiment
from rubberband.units import counted
from rubberband.values.adaptive import GoodputProfile
from rubberband.values.plan import gang_sizes
from rubberband.values.profile import Profile


def problem(experiment: Experiment, profile: Profile, plain: Problem) -> Problem | None:
    """Return the problem with the times of trials that adapt their batch; None if they do not, or without a model.

    Raises InputError for gangs that are larger than the largest batch.
    """
    batch, limits, slots = experiment.batch.to_plain(), plain.constraints, plain.offer.slots
    if batch is None or profile.goodput is None:
        return None
    from rubberband.planner.goodput.planning import adapted, limits_within

    model = replace(profile.goodput, limits=limits_within(profile.goodput, batch))
    least, most = limits.min_gpus_per_trial, min(limits.max_gpus_per_trial, model.limits.max)
    if least > most:
        raise InputError(
            f"resources.gpus_per_trial.min: {least} GPUs are more than the {most} samples of the profile's largest "
            f"batch; lower it to {most}, or raise batch.max and profile again"
        )
    within = replace(limits, max_gpus_per_trial=most)
    sizes = [gpus for gpus in within.gang_sizes(slots) if gpus >= profile.smallest_gpus]
    if not sizes:
        return plain
    return replace(
        plain,
        profile=adapted(replace(plain.profile, goodput=model), slots, sizes),
        constraints=replace(limits, max_gpus_per_trial=sizes[-1]),
        fixed=plain.profile,
    )


def changes(job: JobPlan, now: Problem) -> Iterator[Change]:
    """Yield further inputs where trials adapt their batch."""
    model = now.profile.goodput
    if model is None:
        return
    from rubberband.planner.goodput.planning import at_noise_scale, extrapolated

    used = sorted({choice.gpus_per_trial for choice in job.plan.stages})
    if unseen := extrapolated(model, now.offer.slots, used):
        yield slower("speed beyond measured batches", "extrapolated", unseen, "by the model", now)
    halved = at_noise_scale(now.profile, now.offer.slots, model.noise_scale / 2.0)
    value = f"{model.noise_scale:,.0f} samples"
    yield Change("noise scale of the gradients", value, "half of it", replace(now, profile=halved))


def lines(profile: Profile, gpus_per_instance: int) -> list[str]:
    """Return lines on a measured model: its quality, and how far a trial scales; none without one."""
    model = profile.goodput
    if model is None:
        return []
    return [
        f"batches of {model.limits.initial} to {model.limits.max}: noise scale {model.noise_scale:,.0f}, "
        f"{model.overhead_s:.2f} s of an iteration beside its steps; the model is off by {model.fit_error:.1%}",
        _scaling_line(model, gpus_per_instance),
        *([_POOR] if model.fit_error > POOR_FIT else []),
    ]


def _scaling_line(model: GoodputProfile, gpus_per_instance: int) -> str:
    """Return a line on how far a trial scales (Pollux §5.4.1): beyond it, a GPU does less than half of one alone."""
    widest = max(point.gpus for point in model.points)
    if widest == 1:
        return "only 1 GPU was measured, so it is not known how far a trial scales"
    from rubberband.planner.goodput.planning import scaled_size

    sizes = gang_sizes(gpus_per_instance, 1, min(model.limits.max, WIDEST_NOTED))
    scaled = scaled_size(model, gpus_per_instance, sizes, 1)
    more = " or more" if scaled == sizes[-1] else ""
    beyond = f", which is extrapolated: {widest} were measured" if scaled > widest else ""
    return f"a trial scales to about {counted(scaled, 'GPU')}{more}{beyond}"


_POOR = "the model is far off: times varied while they were measured; measure again where nothing else runs"
WIDEST_NOTED = 256
"""Most GPUs that the report on scaling looks at."""
