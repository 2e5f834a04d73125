"""From an experiment to its result: check, profile if need be, plan, create, run. What `run` and `tune` do."""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rubberband.cases import cases
from rubberband.cloud.catalogue import offer, offers
from rubberband.errors import InfeasibleError, InputError, ProfileMissingError
from rubberband.executor.driver import Observer
from rubberband.executor.folder import ExperimentFolder
from rubberband.executor.profiling import Limits, Point, measure
from rubberband.executor.result import Result
from rubberband.executor.session import (
    RELEASE_MARGIN_S,
    Setup,
    cancel_on_signals,
    create,
    local_devices,
    make_ray_backend,
    run,
)
from rubberband.executor.state import Job
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.experiment import Experiment
from rubberband.offer import Offer
from rubberband.plan import Constraints
from rubberband.planner.estimate import Case, estimate
from rubberband.planner.families import Policy
from rubberband.planner.lanes import JobPlan
from rubberband.profile import Profile
from rubberband.profile_file import save_profile
from rubberband.units import format_duration, format_usd

View = Callable[[Job, Callable[[], float], ExitStack], Sequence[Observer]]
Announce = Callable[[str], None]


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where experiments are kept: RUBBERBAND_HOME, or `~/.rubberband`. Raises InputError where there is no `~`."""
    try:
        return Path(environment.get("RUBBERBAND_HOME") or Path.home() / ".rubberband").expanduser().resolve()
    except RuntimeError as error:
        raise InputError(f"this user has no home folder ({error}); set RUBBERBAND_HOME to a folder") from None


def tune(entrypoint: Any = None, /, *, home: str | os.PathLike[str] | None = None, **words: Any) -> Result:
    """Tune `entrypoint` (a trial class, a function, or `module:attribute`) and return the result.

    `words` are those of the experiment file: `name`, `search`, `constraints`, `resources`, `profile`, …; or, as
    `experiment=`, a whole `rubberband.Experiment`. Without a profile one is measured first. `home` is where the
    experiment is kept (default: RUBBERBAND_HOME, or `~/.rubberband`).

    Raises InputError for wrong words, InfeasibleError if no plan meets the constraints.
    """
    experiment = words.pop("experiment", None)
    if experiment is None:
        experiment = Experiment(**({} if entrypoint is None else {"entrypoint": entrypoint}), **words)
    elif words or entrypoint is not None:
        raise InputError(f"tune was given an experiment and {', '.join(words) or 'an entry point'} beside it; give one")
    folder = ExperimentFolder(home=Path(home).expanduser().resolve() if home else default_home(), name=experiment.name)
    return run_experiment(experiment, folder)


def run_experiment(
    experiment: Experiment,
    folder: ExperimentFolder,
    *,
    search_path: Sequence[str | os.PathLike[str]] = (),
    profile_path: Path | None = None,
    policy: Policy = "optimal",
    announce: Announce = lambda line: None,
    view: View = lambda *_: (),
) -> Result:
    """Plan an experiment (measuring its profile first if it has none) and run it to its end.

    A profile that is measured is kept at `profile_path`. `announce` is told, in a line, what is done before the run
    begins. Raises what `tune` raises.
    """
    started_at = time.time()
    experiment.require_runnable()
    entrypoint = find_entrypoint(experiment, search_path)
    folder.require_free()
    announce_device(experiment, announce)
    with cancel_on_signals() as cancelled:
        profiles, spent = experiment.loaded_profiles(), Spent()
        if profiles is None:
            announce("no profile yet: measuring one first")
            measured = measure_profile(experiment, entrypoint, folder, announce=announce, cancelled=cancelled)
            if measured.stopped_by:
                announce(measured.stopped_line())
            announce(f"the profile is kept in {_keep(measured, profile_path, folder)}")
            profiles = measured.profile
            spent = Spent(seconds=time.time() - started_at, cost_usd=measured.cost_usd)
        job = plan_job(experiment, profiles, policy, spent=spent)
        announce(_plan_line(job))
        create(folder, job, _setup(experiment, entrypoint, folder, spent))
        return run(folder, view=view, cancelled=cancelled)


def announce_device(experiment: Experiment, announce: Announce) -> None:
    """Say it if this machine has GPUs and the experiment's trials will not use them."""
    if experiment.resources.provider != "local":
        return
    for note in dict.fromkeys(local_devices(rented)[1] for rented in offers(experiment.resources)):
        if note:
            announce(note)


def find_entrypoint(experiment: Experiment, search_path: Sequence[str | os.PathLike[str]] = ()) -> Entrypoint | None:
    """The experiment's entry point, checked; None for a virtual run. Raises EntrypointError or InputError."""
    if experiment.resources.provider == "virtual":
        return None
    if experiment.entrypoint is None:
        raise InputError("entrypoint: missing; name what to train, such as entrypoint: examples.digits:DigitsTrial")
    if isinstance(experiment.entrypoint, str):
        found = Entrypoint.parse(experiment.entrypoint, search_path=search_path or (os.getcwd(),))
    else:
        found = Entrypoint.from_object(experiment.entrypoint)
    found.check(_widest_gang(experiment))
    return found


def _widest_gang(experiment: Experiment) -> int:
    asked = experiment.resources.gpus_per_trial
    return asked.max or max(asked.min, *(rented.gpus for rented in offers(experiment.resources)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """A profile, how it was measured, and what that cost."""

    profile: Profile
    points: Sequence[Point]
    cost_usd: float
    entrypoint: str
    instance_type: str
    stopped_by: str = ""
    """Why measuring stopped before all points were there; empty if it did not."""

    def save(self, path: Path) -> None:
        """Write the profile file. Raises InputError if it cannot be written."""
        save_profile(
            self.profile,
            path,
            measured_at=datetime.now(UTC),
            entrypoint=self.entrypoint,
            instance_type=self.instance_type,
            iteration_spread={point.gpus: point.iteration_cv for point in self.points},
            measurement={"points": [asdict(point) for point in self.points], "cost_usd": self.cost_usd},
        )

    def lines(self) -> list[str]:
        """What was measured, for people."""
        starts = [f"start-up of a trial {self.profile.trial_startup_s:.2f} s"]
        if self.profile.provision_delay_s is not None and self.profile.init_delay_s is not None:
            starts.append(f"an instance is provisioned in {self.profile.provision_delay_s:.1f} s")
            starts.append(f"and has warm workers {self.profile.init_delay_s:.1f} s later")
        cost = f"measuring cost {format_usd(self.cost_usd)}"
        stopped = [self.stopped_line()] if self.stopped_by else []
        return [point_line(point) for point in self.points] + [", ".join(starts), cost, *stopped]

    def stopped_line(self) -> str:
        """That larger numbers of GPUs were not measured, and why, for people."""
        return f"beyond {self.points[-1].gpus} GPU nothing was measured: {self.stopped_by}"


def point_line(point: Point) -> str:
    """A measured point, for people."""
    beside = f", {point.copies} trials side by side" if point.copies > 1 else ""
    return f"{point.gpus} GPU: {point.iteration_s:.3f} s per iteration (spread {point.iteration_cv:.1%}{beside})"


SHARED_INSTANCES = 4
"""On one machine instances share its cores, so up to this many are kept busy while measuring."""


def measure_profile(
    experiment: Experiment,
    entrypoint: Entrypoint | None,
    folder: ExperimentFolder,
    *,
    iterations: int = 3,
    announce: Announce = lambda line: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> MeasuredProfile:
    """Run trials for a few iterations at 1, 2, 4, … GPUs, up to what the experiment allows, on instances of its own.

    It stops where it would pass the experiment's max_cost or deadline; a trial that hangs is given up, after
    constraints.iteration_timeout where that is set. Raises InputError where max_cost does not cover it at all,
    ProfileMissingError for a virtual run (there is nothing to measure), RubberbandError if it cannot be done.
    """
    if entrypoint is None:
        raise ProfileMissingError("provider virtual has nothing to measure; write a profile into the experiment file")
    rented = offer(experiment.resources)
    limits = experiment.planning_constraints(time.time(), rented.gpus)
    num_instances = max(1, limits.max_gpus_per_trial // rented.gpus)
    if experiment.resources.provider == "local":
        needed = -(-experiment.stages()[0].trials * limits.min_gpus_per_trial // rented.gpus)
        num_instances = max(num_instances, min(rented.max_instances, needed, SHARED_INSTANCES))
    bounds = _profiling_limits(experiment, rented, num_instances, limits)
    scratch = ExperimentFolder(home=folder.home / "profiling", name=experiment.name)
    scratch.make()
    setup = replace(_setup(experiment, entrypoint, scratch, Spent()), checkpoints=str(scratch.checkpoints))
    with scratch.driving(), ExitStack() as stack:
        for old in (scratch.instances, scratch.checkpoints, scratch.logs):
            shutil.rmtree(old, ignore_errors=True)
        backend = make_ray_backend(scratch, setup, rented, experiment.search.metric)
        stack.callback(backend.close)
        found = measure(
            backend,
            gpus_per_instance=rented.gpus,
            num_trials=len(setup.configurations),
            instances=num_instances,
            min_gpus_per_trial=limits.min_gpus_per_trial,
            max_gpus_per_trial=limits.max_gpus_per_trial,
            iterations=iterations,
            limits=bounds,
            on_point=lambda point: announce(point_line(point)),
            cancelled=cancelled,
        )
    return MeasuredProfile(
        profile=found.profile,
        points=found.points,
        cost_usd=sum(_measuring_usd(rented, held_s) for held_s in found.held_s),
        entrypoint=str(entrypoint),
        instance_type=rented.instance_type,
        stopped_by=found.stopped_by,
    )


def _keep(measured: MeasuredProfile, wanted: Path | None, folder: ExperimentFolder) -> Path:
    """Save a measured profile where it is wanted, or else (a read-only folder, say) in the home; where that was."""
    fallback = folder.home / "profiling" / f"{folder.name}.profile.json"
    if wanted is not None:
        with suppress(InputError):
            measured.save(wanted)
            return wanted
    measured.save(fallback)
    return fallback


def _measuring_usd(rented: Offer, held_s: float) -> float:
    """What one instance costs on which every GPU is kept busy for `held_s` seconds."""
    return rented.instance_cost_usd(held_s) + rented.function_cost_usd(rented.gpus, held_s)


def _profiling_limits(experiment: Experiment, rented: Offer, num_instances: int, limits: Constraints) -> Limits:
    """What measuring may take. Raises InputError if max_cost does not even cover a minute of the instances."""
    found = Limits(iteration_s=experiment.constraints.iteration_timeout_s)
    if limits.deadline_s is not None:
        deadline = f"deadline ({format_duration(limits.deadline_s)} from now)"
        found = replace(found, time_s=limits.deadline_s - RELEASE_MARGIN_S, time_by=deadline)
    if limits.max_cost_usd is None:
        return found
    cap = f"max_cost={format_usd(limits.max_cost_usd)}"
    least_usd = num_instances * _measuring_usd(rented, 60.0)
    if least_usd > limits.max_cost_usd:
        raise InputError(
            f"{cap} does not cover measuring a profile on {num_instances} instances (at least "
            f"{format_usd(least_usd)}); raise it, or write a profile into the experiment file"
        )
    left_usd = limits.max_cost_usd - num_instances * rented.data_usd_per_instance
    usd_per_s = num_instances * rented.price_usd_per_s
    held_s = left_usd / usd_per_s - RELEASE_MARGIN_S if usd_per_s > 0 else math.inf
    return replace(found, held_s=held_s, held_by=cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was used up before an experiment starts, which its constraints no longer have."""

    seconds: float = 0.0
    cost_usd: float = 0.0


def plan_job(
    experiment: Experiment,
    profiles: Profile | Mapping[str, Profile],
    policy: Policy = "optimal",
    *,
    spent: Spent | None = None,
) -> Job:
    """Plan an experiment that starts now, on the best of its instance types, and say all that its controller must know.

    `profiles` is one for all types, or type -> profile. Raises InfeasibleError if no plan meets the constraints.
    """
    used = spent or Spent()
    found = estimate(
        [experiment.stages()],
        [_less(case, used) for case in cases(experiment, profiles, time.time() - used.seconds)],
        policy,
        experiment.name,
        clock=time.perf_counter,
        objective=experiment.constraints.objective,
        compare=False,
    )
    if found.job is None:
        assert found.nearest is not None, "what has no plan has a nearest one"
        raise InfeasibleError(
            found.reason or "", shortest_jct_s=found.nearest.jct_s, cheapest_usd=found.nearest.cost_usd
        )
    return _job(experiment, found.case, found.job, policy)


def _less(case: Case, spent: Spent) -> Case:
    return replace(case, constraints=_left(case.constraints, spent))


def _left(constraints: Constraints, spent: Spent) -> Constraints:
    deadline_s, max_cost_usd = constraints.deadline_s, constraints.max_cost_usd
    return replace(
        constraints,
        deadline_s=None if deadline_s is None else max(0.0, deadline_s - spent.seconds),
        max_cost_usd=None if max_cost_usd is None else max(0.0, max_cost_usd - spent.cost_usd),
    )


def _job(experiment: Experiment, case: Case, planned: JobPlan, policy: Policy) -> Job:
    constraints = case.constraints
    return Job(
        name=experiment.name,
        stages=experiment.stages(),
        plan=planned.plan,
        prediction=planned.prediction,
        offer=case.offer,
        profile=case.profile,
        metric=experiment.search.metric,
        mode=experiment.search.mode,
        deadline_s=constraints.deadline_s,
        max_cost_usd=constraints.max_cost_usd,
        max_failures=experiment.constraints.max_failures,
        iteration_timeout_s=experiment.constraints.iteration_timeout_s,
        release_margin_s=0.0 if experiment.resources.provider == "virtual" else RELEASE_MARGIN_S,
        replan=policy == "optimal",
        objective=experiment.constraints.objective,
        min_gpus_per_trial=constraints.min_gpus_per_trial,
        max_gpus_per_trial=constraints.max_gpus_per_trial,
        confidence=constraints.confidence,
    )


def trial_seeds(experiment: Experiment) -> list[int]:
    """A seed for every trial, from the sampler's: initial weights and data order follow from it."""
    seed = experiment.search.sampler.seed
    return [random.Random(f"{seed}/{trial}").getrandbits(31) for trial in range(experiment.stages()[0].trials)]


def _setup(experiment: Experiment, entrypoint: Entrypoint | None, folder: ExperimentFolder, spent: Spent) -> Setup:
    return Setup(
        provider=experiment.resources.provider,
        configurations=experiment.configurations(),
        seeds=trial_seeds(experiment),
        entrypoint=entrypoint,
        checkpoints=_store_url(experiment.resources.checkpoints or str(folder.checkpoints)),
        lease_s=experiment.resources.lease_s,
        profiling_s=spent.seconds,
        profiling_cost_usd=spent.cost_usd,
        experiment=experiment.to_words(),
    )


def _store_url(url: str) -> str:
    """A path as an absolute one: a resume may start from another folder."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))


def _plan_line(job: Job) -> str:
    stages = " -> ".join(
        f"{chosen.instances} x {job.offer.gpus} GPU ({stage.trials} trials x {chosen.gpus_per_trial} GPU)"
        for stage, chosen in zip(job.stages, job.plan.stages, strict=True)
    )
    predicted = f"{format_duration(job.prediction.jct_s)}, {format_usd(job.prediction.cost_usd)}"
    return f"plan: {stages}; predicted {predicted}"
