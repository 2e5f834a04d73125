"""Measures an experiment's profile: its scaling function and its start-up times, on real (or virtual) instances.

It speaks the backend's protocol and nothing else. Every slot is kept busy with a copy of the trial while it measures:
a trial that trains alone on an instance looks faster than one that has neighbours, and in a stage it has neighbours.

The same trials are measured with every number of GPUs. Each has another place on the instances at every number, so that
what is slow about a place is not taken for the trial's own; with a single number, one is not told from the other. How
fast instances are by themselves is not fitted: a plan would not count with it. What else than batch sizes is measured
is so at the initial batch size.

Trials that fail or hang are done without, so a few bad configurations do no harm. A limit that is reached, or a hang of
all trials that train at once, ends the measurement with the points that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rubberband.errors import ProviderError, RubberbandError
from rubberband.executor.backend import Backend
from rubberband.executor.events import WITHOUT_CHECKPOINT, Gang, Slot
from rubberband.executor.profiling_points import Noise, Point, Starts, noise_of, profile_of
from rubberband.executor.profiling_session import Limits, Session, Stopped
from rubberband.offer import gang_sizes, slots
from rubberband.profile import Profile

NO_NOISE_SCALE = (
    "no trial told its noise scale, so that the initial batch size stands in for it (larger batches look worse than "
    "they may be); measure with more --iterations"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The profile and the points that it was made of."""

    profile: Profile
    points: tuple[Point, ...]
    noise: Noise
    """What training times vary by, and how sure that is."""
    starts: Starts
    held_s: tuple[float, ...]
    """Seconds for which each instance ran: what measuring cost."""
    stopped_by: str = ""
    """Why measuring stopped before all points were there, and what to do about it; empty if it did not."""
    remarks: tuple[str, ...] = ()
    """What is worth knowing of how good the model of goodput is."""


def gpu_counts(gpus_per_instance: int, instances: int, minimum: int, maximum: int) -> list[int]:
    """The GPUs per trial to measure: `minimum`, its doubles, and the most that fit, as far as packing allows them."""
    allowed = gang_sizes(gpus_per_instance, minimum, min(maximum, gpus_per_instance * instances))
    doubles = {minimum * 2**power for power in range(maximum.bit_length())}
    return [gpus for gpus in allowed if gpus in doubles or gpus in (allowed[0], allowed[-1])]


def _counts(gpus_per_instance: int, instances: int, minimum: int, maximum: int) -> list[int]:
    if found := gpu_counts(gpus_per_instance, instances, minimum, maximum):
        return found
    raise ProviderError(
        f"{instances} instances of {gpus_per_instance} GPUs cannot hold a trial of {minimum} GPUs; "
        f"raise the number of instances or lower resources.gpus_per_trial.min"
    )


def measure(
    backend: Backend,
    *,
    gpus_per_instance: int,
    instances: int = 1,
    min_gpus_per_trial: int = 1,
    max_gpus_per_trial: int = 1,
    num_trials: int | None = None,
    iterations: int = 3,
    least_trials: int | None = None,
    one_machine: bool = False,
    warm_up_iterations: int = 1,
    sweep: bool = False,
    limits: Limits | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Measured:
    """Fill `instances` instances with trials and time them, for every GPU count of `gpu_counts`.

    The backend knows `num_trials` trials (None: enough for every slot); the first ones are measured, as many as train
    side by side, or `least_trials` in turn (None: more as long as that takes seconds). With `sweep`, they then try the
    batch sizes that they may choose among. Instances on `one_machine` start at one another's cost. `on_point` is shown
    every point as soon as it is measured; `cancelled` is asked all the time. The instances are released in the end;
    the caller closes the backend.

    Raises ProviderError where an instance is refused or lost, RubberbandError where a limit, or a hang of all trials
    that train at once, leaves no point, where every trial fails, or none reports the metric, and Cancelled.
    """
    counts = _counts(gpus_per_instance, instances, min_gpus_per_trial, max_gpus_per_trial)
    names = [f"profile-{number}" for number in range(instances)]
    num_copies = instances * gpus_per_instance if num_trials is None else num_trials
    session = Session(backend, num_copies, limits or Limits(), cancelled)

    def measure_on(gangs: Sequence[Gang]) -> Point:
        return session.measure(gangs, warm_up_iterations, iterations, least_trials)

    turns = [_turned(_gangs(names, gpus_per_instance, gpus), turn) for turn, gpus in enumerate(counts)]
    sweep_after = warm_up_iterations + iterations if sweep else None
    points, stopped_by = _points(session, names, turns, measure_on, sweep_after, on_point)
    return _measured(session, points, stopped_by, one_machine=one_machine, sweep=sweep)


def _points(
    session: Session,
    names: Sequence[str],
    turns: Sequence[Sequence[Gang]],
    measure_on: Callable[[Sequence[Gang]], Point],
    sweep_after: int | None,
    on_point: Callable[[Point], None],
) -> tuple[list[Point], str]:
    """What was measured on the gangs of each turn, and what stopped it before the last one ("": nothing did).

    `sweep_after`: the iterations after which trials try their batch sizes; None: they do not.
    """
    points: list[Point] = []
    try:
        with session.instances(names):
            for gangs in turns:
                points.append(measure_on(gangs))
                try:
                    if sweep_after is not None and session.stopped is None:
                        session.sweep(sweep_after)
                finally:
                    points[-1] = replace(points[-1], batches=session.batches.times(points[-1].gpus))
                    on_point(points[-1])
                if session.stopped is not None:
                    raise session.stopped
    except Stopped as reason:
        if not points:
            raise RubberbandError(f"measuring the profile stopped before its first point: {reason}") from None
        return points, str(reason)
    return points, ""


def _measured(
    session: Session, points: Sequence[Point], stopped_by: str, *, one_machine: bool, sweep: bool
) -> Measured:
    """The profile that the points amount to."""
    noise = noise_of(points)
    starts = Starts(instances=session.instance_starts, cold_s=tuple(session.cold_starts_s), one_machine=one_machine)
    profile = profile_of(points, starts, noise)
    return Measured(
        profile=replace(profile, goodput=session.batches.model()) if sweep else profile,
        points=tuple(points),
        noise=noise,
        starts=starts,
        held_s=session.held_s(),
        stopped_by=stopped_by,
        remarks=(*_remarks(session), *(_batch_remarks(session) if sweep else ())),
    )


def _remarks(session: Session) -> tuple[str, ...]:
    return (f"the function {WITHOUT_CHECKPOINT}, which a plan does not count",) if session.is_unsaved else ()


def _batch_remarks(session: Session) -> tuple[str, ...]:
    found = [] if session.batches.knows_noise_scale else [NO_NOISE_SCALE]
    if session.failed_sweeps:
        found.append(f"some batch sizes could not be tried on {session.failed_sweeps[-1]}")
    return tuple(found)


def _gangs(instances: Sequence[str], gpus_per_instance: int, gpus: int) -> list[Gang]:
    """As many disjoint gangs of `gpus` slots as fit on the instances, by the rules of packing."""
    every = [[Slot(instance=instance, gpu=gpu) for gpu in range(gpus_per_instance)] for instance in instances]
    if gpus <= gpus_per_instance:
        groups = [group[start : start + gpus] for group in every for start in range(0, gpus_per_instance, gpus)]
        return [tuple(group) for group in groups if len(group) == gpus]
    flat = [slot for group in every for slot in group]
    copies = slots(len(instances), gpus_per_instance, gpus)
    return [tuple(flat[copy * gpus : (copy + 1) * gpus]) for copy in range(copies)]


def _turned(gangs: list[Gang], turn: int) -> list[Gang]:
    """The gangs in another order at every turn, those that come first being others."""
    first = turn % len(gangs)
    return gangs[first:] + gangs[:first]
