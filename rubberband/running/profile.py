"""The measuring of a profile on the experiment's provider, for `rubberband profile` and a first run."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from rubberband.cloud.catalogue import Table, boot_timeouts
from rubberband.cloud.clock import elapsed_s
from rubberband.cloud.offers import offer
from rubberband.errors import InputError, ProfileMissingError, RubberbandError
from rubberband.executor.core.backend import Backend
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.profiling.points import InstanceStarts, MeasuredNoise, NoiseComponent, Point
from rubberband.executor.profiling.session import ProfilingLimits
from rubberband.executor.profiling.summary import ProfilingResult, measure
from rubberband.executor.run.session import cluster_request, make_ray_backend, open_provider
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run_spec import RunSpec
from rubberband.features import parts
from rubberband.interrupts import uninterrupted
from rubberband.planning.clusters import free_together
from rubberband.planning.least_gang import with_least_gang
from rubberband.planning.startup_history import record, start_of
from rubberband.running.profile_cache import SHARED_INSTANCES, Announce, ProfileContent, cache_path, content_to_measure
from rubberband.spec.experiment import Experiment
from rubberband.spec.profile_file import save_profile
from rubberband.spec.resources import Resources
from rubberband.units import counted, format_duration, format_usd, gpus_each, short_time
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints, Spent, Stage, total_iterations
from rubberband.values.profile import Profile

ENOUGH_TRIALS = 8
"""With fewer trials, the spread between them is little more than a guess, and the report says how to measure more."""


def point_line(point: Point, trials_per_gpu: int = 1) -> str:
    """Return a line on one number of GPUs."""
    trials = len(point.timed)
    more = (
        f"{counted(trials, 'trial')}, {point.copies}" if trials > point.copies else f"{counted(point.copies, 'trial')}"
    )
    beside = (
        f", {more} side by side" if point.copies > 1 else f", {counted(trials, 'trial')} in turn" if trials > 1 else ""
    )
    gpus = gpus_each(point.gpus, trials_per_gpu)
    line = f"{gpus} GPU: {point.iteration_s:.3f} s per iteration (spread {point.iteration_cv:.1%}{beside})"
    if not point.batches:
        return line
    steps = ", ".join(f"{timed.batch_size} in {short_time(timed.step_s)}" for timed in point.batches)
    return f"{line}; a step of {steps}"


def noise_lines(noise: MeasuredNoise) -> list[str]:
    """Return a line on each component of the noise, with the interval that holds it with a probability of 90 %."""
    return [_trials_line(noise), f"iterations of one trial vary by {_spread(noise.iteration)}"]


def _trials_line(noise: MeasuredNoise) -> str:
    mean = f", so that the mean of all trials is unsure by {_percent(noise.mean_cv)}"
    if noise.num_trials == 1:
        assumed = f"trials are assumed to differ in speed by {_spread(noise.trial)}{mean}"
        return f"{assumed}: 1 trial was measured; measure more with --trials N"
    few = "; measure more with --trials N" if noise.num_trials < ENOUGH_TRIALS else ""
    return f"trials differ in speed by {_spread(noise.trial, f', {noise.num_trials} trials')}{mean}{few}"


def start_lines(profile: Profile, starts: InstanceStarts, noise: MeasuredNoise) -> list[str]:
    """Return lines on how long trials and instances take to start."""
    vary = "" if noise.startup is None else f", varying by {_spread(noise.startup)}"
    load_s, surplus_s = profile.checkpoint_load_s, profile.cold_start_extra_s
    loads = f" and {load_s:.2f} s over the machines of its gang" if load_s else ""
    found = [f"a trial starts in {profile.trial_startup_s:.2f} s{loads} on a warm worker{vary}"]
    first = f", of which the first start of a trial takes {surplus_s:.1f} s more" if surplus_s >= 0.1 else ""
    if profile.provision_delay_s is not None and profile.init_delay_s is not None:
        provisions = _range([instance.provision_s for instance in starts.instances])
        inits = _range([instance.init_s + surplus_s for instance in starts.instances])
        found.append(f"an instance is provisioned in {profile.provision_delay_s:.1f} s{provisions}")
        last = " and all that were started at once" if starts.one_machine and len(starts.instances) > 1 else ""
        found.append(f"its workers{last} are warm {profile.init_delay_s:.1f} s later{inits}{first}")
    return found


def _spread(component: NoiseComponent, beside: str = "") -> str:
    interval = f"{_percent(component.low_cv, '')} to {_percent(component.high_cv)}"
    return f"{_percent(component.cv)} (90 % interval {interval}{beside})"


def _percent(cv: float, unit: str = " %") -> str:
    return f"{100.0 * cv:.{0 if cv >= 0.0995 else 1}f}{unit}"


def _range(values_s: list[float]) -> str:
    least_s, most_s = min(values_s), max(values_s)
    return f" ({least_s:.1f} to {most_s:.1f} s, {counted(len(values_s), 'instance')})" if len(values_s) > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile(ProfilingResult):
    """A profile, how and where it was measured, and the cost of that."""

    cost_usd: float
    entrypoint: str
    instance_type: str
    gpus_per_instance: int
    trials_per_gpu: int = 1
    content: ProfileContent | None = None
    """Its content; None if that is not known."""

    def keep(self, home: Path) -> None:
        """Keep it for later runs of the same content; a full disk keeps none."""
        if self.content is not None:
            with suppress(InputError):
                self.save(cache_path(home, self.content))

    def save(self, path: Path) -> None:
        """Write the profile file. Raises InputError if it cannot be written."""
        save_profile(
            self.profile,
            path,
            measured_at=datetime.now(UTC),
            entrypoint=self.entrypoint,
            instance_type=self.instance_type,
            iteration_spread={point.gpus: point.iteration_cv for point in self.points},
            measurement={
                "points": [asdict(point) for point in self.points],
                "noise": asdict(self.noise),
                "starts": asdict(self.starts),
                "cost_usd": self.cost_usd,
                **({} if self.content is None else {"content": self.content.words()}),
            },
        )

    def lines(self) -> list[str]:
        """Return the report on the measurements, for people."""
        cost = f"measuring cost {format_usd(self.cost_usd)}"
        points = [point_line(point, self.trials_per_gpu) for point in self.points]
        noise = noise_lines(self.noise)
        starts = start_lines(self.profile, self.starts, self.noise)
        return [
            *points,
            *(line for lines in parts("profile lines") for line in lines(self.profile, self.gpus_per_instance)),
            *noise,
            *starts,
            cost,
            *self.remark_lines(),
        ]

    def remark_lines(self) -> list[str]:
        """Return remarks on the profile, such as what is missing in it and why."""
        if not self.stopped_by:
            return list(self.remarks)
        return [*self.remarks, f"beyond {self.points[-1].gpus} GPU nothing was measured: {self.stopped_by}"]


@contextmanager
def noting(spent_usd: Callable[[], float]) -> Iterator[None]:
    """Note in an error what was spent before it."""
    try:
        yield
    except RubberbandError as error:
        error.spent_usd += spent_usd()
        raise


def measure_profile(
    experiment: Experiment,
    entrypoint: Entrypoint | None,
    folder: ExperimentFolder,
    *,
    iterations: int = 3,
    least_trials: int | None = None,
    briefly: bool = False,
    table: Table | None = None,
    announce: Announce = lambda line: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> MeasuredProfile:
    """Run trials for a few iterations at 1, 2, 4, … GPUs, up to what the experiment allows, on instances of its own.

    It stops before max_cost or the deadline; `least_trials` is that of `measure`. `briefly`: training takes a tenth of
    the job's predicted time at most, if the smallest and the largest number of GPUs can be measured in it.
    Raises InputError if max_cost does not cover it, ProfileMissingError for a virtual run, or RubberbandError.
    """
    is_sized = experiment.search.auto is None
    experiment = experiment.probed()
    if entrypoint is None:
        raise ProfileMissingError("provider virtual has nothing to measure; write a profile into the experiment file")
    rented = offer(experiment.resources, table=table)
    limits = with_least_gang(experiment, rented, table=table).planning_constraints(time.time(), rented.gpus)
    together = _together(experiment.resources)
    num_instances = _num_instances(experiment, rented, limits, together)
    bounds = profiling_limits(experiment, rented, num_instances, limits)
    if entrypoint.command is not None or not isinstance(entrypoint.load(), type):  # each start is an iteration's begin
        bounds = replace(bounds, least_iterations=2)
    if briefly and is_sized:  # a search sized to its limits is as long as they allow
        bounds = replace(bounds, job_iterations=_job_iterations(experiment, rented, limits))
    began_s, training = elapsed_s(), experiment.training
    with (
        noting(lambda: num_instances * _measuring_usd(rented, elapsed_s() - began_s)),
        _backend(experiment, entrypoint, folder, rented, limits.max_gpus_per_trial) as backend,
    ):
        found = measure(
            backend,
            slots_per_instance=rented.slots,
            num_trials=experiment.search.num_trials,
            instances=num_instances,
            min_gpus_per_trial=limits.min_gpus_per_trial,
            max_gpus_per_trial=limits.max_gpus_per_trial,
            gpus_per_trial_sizes=limits.gpus_per_trial_sizes,
            iterations=iterations,
            least_trials=least_trials,
            one_machine=together > 1,
            sweep=experiment.batch.policy == "goodput",
            # Where all workers share each batch, they wait for each other: the model does not hold.
            models_updates=training.mode == "async" and training.max_staleness != 0,
            limits=bounds,
            on_point=lambda point: announce(point_line(point, rented.trials_per_gpu)),
            cancelled=cancelled,
        )
    if experiment.resources.kind.is_this_machine:
        instants = [(0.0, start.provision_s, start.provision_s + start.init_s) for start in found.starts.instances]
        with suppress(OSError):  # a full disk: later plans do not know these starts
            record(folder.home, [start_of(str(entrypoint), instants)], time.time())
    return _measured(found, entrypoint, rented, content_to_measure(experiment, entrypoint))


@contextmanager
def _backend(
    experiment: Experiment, entrypoint: Entrypoint, folder: ExperimentFolder, rented: Offer, largest_gang: int
) -> Iterator[Backend]:
    """Yield a backend in a folder of its own, after cleaning up after an earlier measurement."""
    scratch = ExperimentFolder(home=folder.home / "profiling", name=experiment.name)
    scratch.make()
    spec = RunSpec.of(experiment, entrypoint, scratch, Spent())
    spec = replace(spec, configurations=experiment.configurations())
    if spec.kind.is_this_machine:
        spec = replace(spec, checkpoints=str(scratch.checkpoints))
    with scratch.driving(), ExitStack() as stack:
        _end_leftovers(scratch, spec, rented)
        for old in (scratch.instances, scratch.checkpoints, scratch.logs):
            shutil.rmtree(old, ignore_errors=True)
        request = replace(cluster_request(scratch, spec, rented), largest_gang=largest_gang)
        backend = make_ray_backend(scratch, spec, request)
        stack.callback(_run_note(scratch).unlink, missing_ok=True)
        stack.callback(uninterrupted, backend.close)
        yield backend


def _job_iterations(experiment: Experiment, rented: Offer, limits: PlanningConstraints) -> float:
    """Return how many iterations the job trains one after another, on all instances with the fewest GPUs per trial."""
    slots = max(1, rented.max_instances * rented.slots // limits.min_gpus_per_trial)
    brackets = experiment.brackets()
    longest = max(map(total_iterations, brackets))
    every = sum(_iterations(stage) for bracket in brackets for stage in bracket)
    return max(float(longest), every / slots)


def _iterations(stage: Stage) -> int:
    """Return the iterations of all trials of a stage; of those that climb rungs, as if they waited at each."""
    rungs = stage.rungs
    return sum(trials * gain for trials, gain in zip(rungs.fewest(stage.trials), rungs.gains, strict=True))


def _measured(
    found: ProfilingResult, entrypoint: Entrypoint, rented: Offer, content: ProfileContent | None
) -> MeasuredProfile:
    return MeasuredProfile(
        **{field.name: getattr(found, field.name) for field in fields(found)},
        cost_usd=sum(_measuring_usd(rented, held_s) for held_s in found.held_s),
        entrypoint=str(entrypoint),
        instance_type=rented.instance_type,
        gpus_per_instance=rented.gpus,
        trials_per_gpu=rented.trials_per_gpu,
        content=content,
    )


def _run_note(scratch: ExperimentFolder) -> Path:
    return scratch.path / "run"


def _end_leftovers(scratch: ExperimentFolder, spec: RunSpec, rented: Offer) -> None:
    """Terminate instances left by an interrupted measurement, and note the run of this one."""
    if not spec.kind.is_rented:
        return  # leases end those, or Ray
    note = _run_note(scratch)
    if note.exists():
        open_provider(cluster_request(scratch, replace(spec, run=note.read_text()), rented)).close()
    note.write_text(spec.run)


def _num_instances(experiment: Experiment, rented: Offer, limits: PlanningConstraints, together: int) -> int:
    """Return the number of instances: enough for the widest gang, and for its neighbours on a shared machine."""
    widest = max(1, limits.max_gpus_per_trial // rented.gpus)
    needed = -(-max(bracket[0].trials for bracket in experiment.brackets()) * limits.min_gpus_per_trial // rented.slots)
    return max(widest, min(rented.max_instances, needed, together))


def _together(resources: Resources) -> int:
    """Return how many instances are measured on one machine, where they slow each other."""
    if resources.kind.is_rented:
        return 1
    return min(SHARED_INSTANCES, free_together(resources) if resources.kind.share is not None else SHARED_INSTANCES)


def _measuring_usd(rented: Offer, held_s: float) -> float:
    """Return the cost of one instance whose GPUs are all busy for `held_s` seconds."""
    return rented.instance_cost_usd(held_s) + rented.function_cost_usd(rented.slots, held_s)


def profiling_limits(
    experiment: Experiment, rented: Offer, num_instances: int, limits: PlanningConstraints
) -> ProfilingLimits:
    """Return the limits of measuring. Raises InputError if max_cost does not cover a minute of the instances."""
    margin_s = experiment.resources.kind.release_margin_s
    found = ProfilingLimits(iteration_s=experiment.constraints.iteration_timeout_s)
    if experiment.resources.kind.is_rented:
        slowest = boot_timeouts([rented.instance_type], experiment.resources.init_delay_s)
        found = replace(found, ready_s=max(found.ready_s, slowest.ready_s))
    if experiment.resources.kind.is_borrowed:  # a node that joins is waited for twice as long as it is expected to take
        found = replace(found, ready_s=found.ready_s + 2.0 * rented.provision_delay_s)
    if limits.deadline_s is not None:
        deadline = f"deadline ({format_duration(limits.deadline_s)} from now)"
        found = replace(found, time_s=limits.deadline_s - margin_s, time_by=deadline)
    if limits.max_cost_usd is None:
        return found
    cap = f"max_cost={format_usd(limits.max_cost_usd)}"
    least_usd = num_instances * _measuring_usd(rented, 60.0)
    if least_usd > limits.max_cost_usd:
        raise InputError(
            f"{cap} does not cover measuring a profile on {counted(num_instances, 'instance')} (at least "
            f"{format_usd(least_usd)}); raise it, or write a profile into the experiment file"
        )
    left_usd = limits.max_cost_usd - num_instances * rented.once_usd_per_instance
    usd_per_s = num_instances * rented.price_usd_per_s
    held_s = left_usd / usd_per_s - margin_s if usd_per_s > 0 else math.inf
    return replace(found, held_s=held_s, slack_s=margin_s / 2.0, held_by=cap)
