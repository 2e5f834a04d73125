"""From an experiment to its result: check, profile if need be, plan, create, run. What `rubberband run` and `tune` do."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rubberband.cloud.catalogue import offer
from rubberband.errors import InputError
from rubberband.executor.driver import Observer
from rubberband.executor.folder import ExperimentFolder
from rubberband.executor.result import Result
from rubberband.executor.session import RELEASE_MARGIN_S, Setup, cancel_on_signals, create, run
from rubberband.executor.state import Job
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.experiment import Experiment
from rubberband.offer import Offer
from rubberband.plan import Constraints, Planned
from rubberband.planner.search import Policy, plan
from rubberband.profile import Profile
from rubberband.units import format_duration, format_usd

View = Callable[[Job, Callable[[], float], ExitStack], Sequence[Observer]]
Announce = Callable[[str], None]


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where experiments are kept: RUBBERBAND_HOME, or `~/.rubberband`."""
    return Path(environment.get("RUBBERBAND_HOME") or Path.home() / ".rubberband").expanduser().resolve()


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
    folder = ExperimentFolder(home=Path(home) if home else default_home(), name=experiment.name)
    return run_experiment(experiment, folder)


def run_experiment(
    experiment: Experiment,
    folder: ExperimentFolder,
    *,
    search_path: Sequence[str | os.PathLike[str]] = (),
    policy: Policy = "optimal",
    announce: Announce = lambda line: None,
    view: View = lambda *_: (),
) -> Result:
    """Plan an experiment (measuring its profile first if it has none) and run it to its end.

    `announce` is told, in a line, what is done before the run begins. Raises what `tune` raises.
    """
    started_at = time.time()
    entrypoint = find_entrypoint(experiment, search_path)
    if folder.exists:
        folder.make()  # raises, before anything is measured
    with cancel_on_signals() as cancelled:
        measured = _profile(experiment, entrypoint, folder, announce)
        spent = Spent(seconds=time.time() - started_at, cost_usd=measured.cost_usd)
        job = plan_job(experiment, measured.profile, policy, spent=spent)
        announce(_plan_line(job))
        create(folder, job, _setup(experiment, entrypoint, folder, spent))
        return run(folder, view=view, cancelled=cancelled)


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
    return asked.max or max(asked.min, offer(experiment.resources).gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was used up before an experiment starts, which its constraints no longer have."""

    seconds: float = 0.0
    cost_usd: float = 0.0


def plan_job(
    experiment: Experiment, profile: Profile, policy: Policy = "optimal", *, spent: Spent | None = None
) -> Job:
    """Plan an experiment that starts now and say everything that its controller must know.

    Raises InfeasibleError if no plan meets the constraints.
    """
    used = spent or Spent()
    rented = offer(experiment.resources, profile)
    constraints = _left(experiment.planning_constraints(time.time() - used.seconds, rented.gpus), used)
    planned = plan(experiment.stages(), profile, rented, constraints, policy)
    return _job(experiment, profile, rented, constraints, planned)


def _left(constraints: Constraints, spent: Spent) -> Constraints:
    deadline_s, max_cost_usd = constraints.deadline_s, constraints.max_cost_usd
    return replace(
        constraints,
        deadline_s=None if deadline_s is None else deadline_s - spent.seconds,
        max_cost_usd=None if max_cost_usd is None else max(0.0, max_cost_usd - spent.cost_usd),
    )


def _job(experiment: Experiment, profile: Profile, rented: Offer, constraints: Constraints, planned: Planned) -> Job:
    return Job(
        name=experiment.name,
        stages=experiment.stages(),
        plan=planned.plan,
        prediction=planned.prediction,
        offer=rented,
        profile=profile,
        metric=experiment.search.metric,
        mode=experiment.search.mode,
        deadline_s=constraints.deadline_s,
        max_cost_usd=constraints.max_cost_usd,
        max_failures=experiment.constraints.max_failures,
        iteration_timeout_s=experiment.constraints.iteration_timeout_s,
        release_margin_s=0.0 if experiment.resources.provider == "virtual" else RELEASE_MARGIN_S,
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
        checkpoints=experiment.resources.checkpoints or str(folder.checkpoints),
        lease_s=experiment.resources.lease_s,
        profiling_s=spent.seconds if spent.cost_usd else 0.0,
        profiling_cost_usd=spent.cost_usd,
        experiment=experiment.to_words(),
    )


def _plan_line(job: Job) -> str:
    stages = " -> ".join(
        f"{chosen.instances} x {job.offer.gpus} GPU ({stage.trials} trials x {chosen.gpus_per_trial} GPU)"
        for stage, chosen in zip(job.stages, job.plan.stages, strict=True)
    )
    predicted = f"{format_duration(job.prediction.jct_s)}, {format_usd(job.prediction.cost_usd)}"
    return f"plan: {stages}; predicted {predicted}"
