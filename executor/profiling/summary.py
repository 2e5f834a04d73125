"""Measures an experiment's profile, its scaling function and its start-up times, through a backend.

Every slot trains a copy of the trial while it measures: a trial that is alone on an instance looks faster than one with
neighbours, and in a stage it has neighbours. The same trials are measured with every number of GPUs, each time in
another place on the instances, so that a slow place is not taken for a slow trial. The speed of an instance itself is
not fitted, since no plan uses it. Everything but batch sizes is measured at the initial batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rubberband.errors import ProviderError, RubberbandError
from rubberband.executor.core.backend import Backend
from rubberband.executor.core.events import WITHOUT_CHECKPOINT, Gang, Slot
from rubberband.executor.profiling.points import InstanceStarts, MeasuredNoise, Point, noise_of, profile_of
from rubberband.executor.profiling.session import ProfilingLimits, ProfilingSession, Stopped
from rubberband.values.offer import slots
from rubberband.values.plan import gang_sizes
from rubberband.values.profile import Profile, wide_spread


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingResult:
    """The profile and its points."""

    profile: Profile
    points: tuple[Point, ...]
    noise: MeasuredNoise
    """Components of noise, with their uncertainty."""
    starts: InstanceStarts
    held_s: tuple[float, ...]
    """Seconds for which each instance ran: the cost of measuring."""
    stopped_by: str = ""
    """Why measuring stopped before the last point, and the fix; empty if it did not."""
    remarks: tuple[str, ...] = ()
    """Remarks on the quality of the model of goodput."""


def gpu_counts(
    slots_per_instance: int, instances: int, minimum: int, maximum: int, sizes: Sequence[int] = ()
) -> list[int]:
    """Return the GPUs per trial to measure: `minimum`, its doubles, and the most that fit, if packing allows them.

    If `sizes` are given, they are measured instead.
    """
    allowed = gang_sizes(slots_per_instance, minimum, min(maximum, slots_per_instance * instances), sizes)
    if sizes:
        return allowed
    doubles = {minimum * 2**power for power in range(maximum.bit_length())}
    return [gpus for gpus in allowed if gpus in doubles or gpus in (allowed[0], allowed[-1])]


def measure(
    backend: Backend,
    *,
    slots_per_instance: int,
    instances: int = 1,
    min_gpus_per_trial: int = 1,
    max_gpus_per_trial: int = 1,
    gpus_per_trial_sizes: Sequence[int] = (),
    num_trials: int | None = None,
    iterations: int = 3,
    least_trials: int | None = None,
    one_machine: bool = False,
    warm_up_iterations: int = 1,
    sweep: bool = False,
    models_updates: bool = False,
    limits: ProfilingLimits | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ProfilingResult:
    """Fill `instances` instances with trials and time them, for every GPU count of `gpu_counts`.

    The backend knows `num_trials` trials (None: enough for every slot). As many are measured as train side by side, or
    `least_trials` in turn (None: more if that takes seconds). With `sweep`, they then try the batch sizes that they may
    choose among; with `models_updates`, the profile has the model of their asynchronous updates. Instances on
    `one_machine` slow each other's start. `on_point` gets every point as soon as it is measured, and `cancelled` is
    polled. The instances are released in the end; the caller closes the backend.

    Raises ProviderError if an instance is refused or lost; RubberbandError if a limit or a hang of all trials leaves no
    point, every trial fails, or none reports the metric; and Cancelled.
    """
    names = [f"profile-{number}" for number in range(instances)]
    num_copies = instances * slots_per_instance if num_trials is None else num_trials
    session = ProfilingSession(backend, num_copies, limits or ProfilingLimits(), cancelled)

    def measure_on(gangs: Sequence[Gang]) -> Point:
        return session.measure(gangs, warm_up_iterations, iterations, least_trials)

    counts = gpu_counts(slots_per_instance, len(names), min_gpus_per_trial, max_gpus_per_trial, gpus_per_trial_sizes)
    if not counts:
        raise ProviderError(
            f"{len(names)} instances of {slots_per_instance} GPUs cannot hold a trial of {min_gpus_per_trial} GPUs; "
            "raise the number of instances or lower resources.gpus_per_trial.min"
        )
    turns = _turns(names, slots_per_instance, counts)
    points, stopped_by = _points(session, names, turns, measure_on, sweep, on_point)
    result = _measured(
        session, points, stopped_by, gpus_per_machine=slots_per_instance, one_machine=one_machine, sweep=sweep
    )
    if not models_updates:
        return result
    return replace(result, profile=replace(result.profile, asynchronous=session.updates.model()))


def _points(
    session: ProfilingSession,
    names: Sequence[str],
    turns: Sequence[Sequence[Gang]],
    measure_on: Callable[[Sequence[Gang]], Point],
    sweep: bool,
    on_point: Callable[[Point], None],
) -> tuple[list[Point], str]:
    """Measure on the gangs of each turn; return the points, and why it stopped early ("": it did not).

    With `sweep`, trials try their batch sizes after each turn.
    """
    points: list[Point] = []
    try:
        with session.instances(names):
            # A short job may have no time for the numbers of GPUs between the fewest and the most.
            for gangs in turns if session.is_whole else [*turns[:1], *turns[:0:-1]]:
                if not _is_worth_it(session, points, len(gangs[0])):
                    session.left_out.append(len(gangs[0]))
                    continue
                points.append(measure_on(gangs))
                try:
                    if sweep and session.stopped is None:
                        session.sweep()
                finally:
                    points[-1] = replace(points[-1], batches=session.batches.times(points[-1].gpus))
                    on_point(points[-1])
                if session.stopped is not None:
                    raise session.stopped
    except Stopped as reason:
        if not points:
            raise RubberbandError(f"measuring the profile stopped before its first point: {reason}") from None
        return sorted(points, key=lambda point: point.gpus), str(reason)
    return sorted(points, key=lambda point: point.gpus), ""


def _is_worth_it(session: ProfilingSession, points: Sequence[Point], gpus: int) -> bool:
    """Whether there is time to measure this number of GPUs, of which one between two that are known needs most."""
    if len(points) < 2:
        return True
    known = Profile(seconds_per_iteration={point.gpus: point.iteration_s for point in points})
    return 2.0 * known.iteration_s(gpus) <= session.left_s()


def _measured(
    session: ProfilingSession,
    points: Sequence[Point],
    stopped_by: str,
    *,
    gpus_per_machine: int,
    one_machine: bool,
    sweep: bool,
) -> ProfilingResult:
    noise = noise_of(points)
    starts = InstanceStarts(
        instances=session.instance_starts,
        cold_s=tuple(session.cold_starts_s),
        cold_iteration_s=max(session.cold_extras_s, default=0.0),
        one_machine=one_machine,
    )
    machine = max(gpus_per_machine, *(point.gpus for point in points)) if one_machine else gpus_per_machine
    profile = profile_of(points, starts, noise, gpus_per_machine=machine)
    profile = replace(profile, resumes=not (session.is_unsaved or session.begins_again))
    return ProfilingResult(
        profile=replace(profile, goodput=session.batches.model()) if sweep else profile,
        points=tuple(points),
        noise=noise,
        starts=starts,
        held_s=session.held_s(),
        stopped_by=stopped_by,
        remarks=tuple(_remarks(session, points, sweep=sweep)),
    )


def _remarks(session: ProfilingSession, points: Sequence[Point], *, sweep: bool) -> Iterator[str]:
    if session.is_unsaved:
        yield f"a trial {WITHOUT_CHECKPOINT}; plans count that"
    elif session.begins_again:
        yield "a trial starts from zero though it has saved files, as it does not load them; plans count that"
    if wide := wide_spread({point.gpus: point.iteration_cv for point in points}):
        yield wide
    if session.times_warm_up:
        yield "some trials ended by themselves in the warm-up, which is timed: it has the work of a first iteration too"
    if session.left_out:
        gpus = ", ".join(map(str, sorted(session.left_out)))
        yield f"the job is short: speeds with {gpus} GPUs are interpolated; `rubberband profile` measures them"
    if sweep and not session.batches.noise_scales:
        yield (
            "no trial measured its noise scale; the initial batch size is used instead (larger batches may be better "
            "than they look); measure with more --iterations"
        )
    if sweep and session.failed_sweeps:
        yield f"some batch sizes could not be tried on {session.failed_sweeps[-1]}"


def _turns(names: Sequence[str], slots_per_instance: int, counts: Sequence[int]) -> list[list[Gang]]:
    """Return the gangs of each number of GPUs to measure, every time with another one first."""
    gangs_by_count = [_gangs(names, slots_per_instance, gpus) for gpus in counts]
    return [gangs[turn % len(gangs) :] + gangs[: turn % len(gangs)] for turn, gangs in enumerate(gangs_by_count)]


def _gangs(instances: Sequence[str], slots_per_instance: int, gpus: int) -> list[Gang]:
    """Return as many disjoint gangs of `gpus` slots as fit on the instances, by the rules of packing."""
    machines = [[Slot(instance=instance, gpu=gpu) for gpu in range(slots_per_instance)] for instance in instances]
    if gpus <= slots_per_instance:
        groups = [group[start : start + gpus] for group in machines for start in range(0, slots_per_instance, gpus)]
        return [tuple(group) for group in groups if len(group) == gpus]
    flat = [slot for group in machines for slot in group]
    copies = slots(len(instances), slots_per_instance, gpus)
    return [tuple(flat[copy * gpus : (copy + 1) * gpus]) for copy in range(copies)]
