"""Planning of asynchronous training: trials whose speed follows the queueing model of a profile.

The model is imported where a profile has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from rubberband.planner import JobPlan, Problem
from rubberband.planning.assumptions import Change
from rubberband.planning.candidates import models_workers
from rubberband.spec.experiment import Experiment
from rubberband.units import counted, short_time
from rubberband.values.profile import Profile


def problem(experiment: Experiment, profile: Profile, plain: Problem) -> Problem | None:
    """Return the problem of asynchronous trials with a worker on every GPU; None for others, or without a model."""
    asked = experiment.training.to_plain()
    if asked is None or profile.asynchronous is None or not models_workers(experiment, profile):
        return None
    from rubberband.planner.queueing import scaled, with_servers

    modelled = replace(plain.profile, asynchronous=with_servers(profile.asynchronous, asked.servers))
    sizes = [gpus for gpus in plain.constraints.gang_sizes(plain.offer.slots) if gpus >= profile.smallest_gpus]
    return replace(plain, profile=scaled(modelled, sizes) if sizes else modelled)


def notes(experiment: Experiment, profile: Profile, used: Collection[int]) -> list[str]:
    """Return remarks on a plan whose trials train asynchronously on `used` numbers of GPUs."""
    asked, model = experiment.training.to_plain(), profile.asynchronous
    if asked is None or asked.max_staleness == 0 or not used:
        return []
    if model is None:
        return [
            "async: the profile has no model of the workers, so that gangs that were not measured are interpolated; "
            "measure one with `rubberband profile`."
        ]
    from rubberband.planner.queueing import KNEE_GAIN, curve, knee, least_telling, updates_per_s

    most, bend = max(used), knee(model)
    whole = curve(model, most)
    low, high = float(whole.low[-1]), float(whole.high[-1])
    telling = least_telling(model, most) if model.blend is None else None
    unsure = "" if telling is None else f"; profile {counted(telling, 'GPU')} to know better"
    band = "" if most == 1 else f"; the queueing model allows {low:.4g} to {high:.4g}{unsure}"
    remarks = [
        f"async: a trial with {counted(most, 'worker')} is planned with {updates_per_s(profile, most):.4g} "
        f"updates/s{band}. The knee is at {bend} "
        f"worker{'s' * (bend > 1)}: beyond it one more shortens an update by less than {100.0 * KNEE_GAIN:g} %."
    ]
    if most > bend:
        remarks.append(
            f"async: the plan uses {most} workers per trial, beyond the knee; lower resources.gpus_per_trial to {bend}."
        )
    return remarks


def changes(job: JobPlan, now: Problem) -> Iterator[Change]:
    """Yield a further input where no gang was measured that shows how asynchronous workers wait."""
    model, most = now.profile.asynchronous, max(choice.gpus_per_trial for choice in job.plan.stages)
    if model is None or model.blend is not None:
        return
    from rubberband.planner.queueing import least_telling, seconds_per_iteration, updates_per_s

    if least_telling(model, most) is None:
        return
    sizes = sorted(now.profile.seconds_per_iteration)
    expected, slowest = (seconds_per_iteration(one, sizes) for one in (model, replace(model, blend=0.0)))
    table = {g: time_s * slowest[g] / expected[g] for g, time_s in now.profile.seconds_per_iteration.items()}
    value = f"{updates_per_s(now.profile, most):.4g} updates/s of {most}"
    longer = replace(now, profile=replace(now.profile, seconds_per_iteration=table))
    yield Change("throughput of asynchronous workers", value, "low end of its band", longer, "default")


def lines(profile: Profile, _: int) -> list[str]:
    """Return lines on the times of an update, and on how far its workers scale; none for synchronous training."""
    if profile.asynchronous is None:
        return []
    from rubberband.planner.queueing import curve, knee, scaled

    model = scaled(profile, sorted(profile.seconds_per_iteration)).asynchronous
    assert model is not None, "it had one"
    times, bend = model.times, knee(model)
    band = curve(model, bend)
    return [
        f"an update of one worker: {short_time(times.compute_s)} to compute, {short_time(times.up_s)} up, "
        f"{short_time(times.server_s)} at the server, {short_time(times.down_s)} down",
        f"the knee is at {counted(bend, 'worker')}: {band.low[-1]:.3g} to {band.high[-1]:.3g} updates/s there",
    ]
