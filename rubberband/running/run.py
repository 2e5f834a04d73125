"""From an experiment to its result, for `run` and `tune`: check, measure a profile if there is none, plan, run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rubberband.cloud.catalogue import Table, boot_timeouts, types_of
from rubberband.cloud.clock import elapsed_s
from rubberband.cloud.local.gpus import free_gpus, gpus_to_share
from rubberband.cloud.offers import offers
from rubberband.errors import Cancelled, InputError, briefly
from rubberband.executor.core.brackets import brackets_of
from rubberband.executor.core.state import Job, lanes_of
from rubberband.executor.journal.folder import ExperimentFolder, open_folder
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.journal.reading import read
from rubberband.executor.result.result import Result
from rubberband.executor.run.allowance import pledged, require_rate, require_runnable
from rubberband.executor.run.callbacks import Callback, check_callbacks
from rubberband.executor.run.driver import Observer
from rubberband.executor.run.session import cancel_on_signals, create, run
from rubberband.executor.run.trackers import require_trackers
from rubberband.executor.training.entrypoint import Entrypoint, with_trial
from rubberband.executor.training.run_spec import RunSpec
from rubberband.files import require_home
from rubberband.installation import home_at
from rubberband.planning.candidates import (
    async_notes,
    batch_notes,
    repeat_notes,
    sampler_notes,
    stand_in_speeds,
)
from rubberband.planning.feasible import PlannedExperiment, Profiles, Terms, planned
from rubberband.planning.prices_and_quotas import cloud_terms, local_terms
from rubberband.running.check import check_first, named_entrypoint, widest_gang
from rubberband.running.estimating import experiment_of
from rubberband.running.profile import (
    Announce,
    MeasuredProfile,
    beside,
    content_to_measure,
    kept_profile,
    measure_profile,
    noting,
)
from rubberband.spec.experiment import Experiment
from rubberband.units import counted, format_duration, format_usd, shown
from rubberband.values.plan import Policy, Spent

START_ATTEMPTS = 3
"""A run stops buying for now after this number of instances in a row that never became ready."""
HUNG_REPLACEMENTS = 3
"""A run replaces at most this number of instances since trials hung on them."""


def job_of(found: PlannedExperiment, spent: Spent) -> Job:
    """Return the job of an experiment that starts now. Raises InfeasibleError if no plan keeps its limits."""
    chosen, experiment, problem = found.job, found.experiment, found.estimate.problem
    constraints, kind = problem.constraints, experiment.resources.kind
    assert problem.reserve is not None, "the candidates of an experiment have one"
    brackets = brackets_of(experiment.brackets(), [lane.brackets for lane in chosen.lanes])
    return Job(
        name=experiment.name,
        stages=tuple(stage for lane in chosen.lanes for stage in lane.stages),
        plan=chosen.plan,
        prediction=chosen.prediction,
        offer=problem.offer,
        # A simulated start is whole before the first iteration.
        profile=replace(problem.profile, first_iteration_extra_s=0.0, cold_iteration_extra_s=0.0)
        if kind.is_simulated
        else problem.profile,
        metric=experiment.search.metric,
        mode=experiment.search.mode,
        deadline_s=constraints.deadline_s,
        deadline_at=None if experiment.resources.kind.is_simulated else experiment.constraints.deadline_at,
        max_cost_usd=constraints.max_cost_usd,
        max_failures=experiment.constraints.max_failures,
        iteration_timeout_s=experiment.constraints.iteration_timeout_s,
        release_margin_s=problem.reserve.margin_s,
        replan=found.estimate.policy == "optimal" and chosen.lanes[0].stages[0].ladder is None,
        objective=experiment.constraints.objective,
        min_gpus_per_trial=constraints.min_gpus_per_trial,
        max_gpus_per_trial=constraints.max_gpus_per_trial,
        confidence=constraints.confidence,
        highest_price_usd_per_hour=problem.reserve.highest_price_usd_per_hour,
        lease_s=None if experiment.resources.kind.is_simulated else experiment.resources.lease_length_s,
        boot_lease_s=_boot_lease_s(experiment),
        start_attempts=START_ATTEMPTS,
        hung_replacements=HUNG_REPLACEMENTS,
        draws=experiment.search.sampler.learns,
        brackets=brackets,
        lane_instances=tuple(lane.max_instances for lane in chosen.lanes) if brackets else (),
        balances=experiment.gains_from_mixtures,
        speeds=stand_in_speeds(experiment, problem, found.candidates),
        profiling_s=spent.seconds,
    )


def _boot_lease_s(experiment: Experiment) -> float | None:
    """Return the lease of an instance while it starts; None: the usual one."""
    resources = experiment.resources
    if not resources.kind.is_rented or resources.pool is not None:  # what boots for a pool is its own
        return None
    return boot_timeouts(types_of(resources), resources.init_delay_s).lease_s


View = Callable[[Job, Callable[[], float], ExitStack], Sequence[Observer]]
Confirm = Callable[[str], None]
"""Is called with what is known of the bill before anything is rented. Raises Cancelled if the user does not want it."""


@briefly
def tune(
    entrypoint: Any = None,
    /,
    *,
    home: str | os.PathLike[str] | None = None,
    check: bool = True,
    profile_again: bool = False,
    new: bool = False,
    verbose: int = 1,
    callbacks: Sequence[Callback] = (),
    **words: Any,
) -> Result:
    """Tune `entrypoint` (a trial class, a function, or `module:attribute`) and return the result.

    `words` are those of the experiment file: `name`, `search`, `constraints`, `resources`, `profile`, …; or, as
    `experiment=`, a whole `rubberband.Experiment`. Without a name it is called by its trial and the time, such as
    `train-20261125-1903`. If the name is taken, `new` uses the next free one (`digits-2`, `digits-3`).

    Without a profile one is measured first. `home` is where the experiment is kept (default: RUBBERBAND_HOME, or
    `~/.rubberband`). With `check`, a trial that is new or has changed
    trains one iteration in a process of its own before anything is started. A measured profile is kept and used again
    while trial, space and hardware are the same; `profile_again` measures it afresh. `callbacks` are called while the
    experiment runs.

    `verbose` is what is shown meanwhile: 0 is silent; 1 shows the plan, and the progress as a table (on a terminal, on
    stderr), a display (in a notebook) or a line for each stage; 2 shows also lines about instances.

    Raises InputError for wrong words (NameTakenError for a name that is taken), InfeasibleError if no plan meets the
    constraints.
    """
    place = home_at(home)
    experiment = experiment_of(entrypoint, words, "tune", place, began=f"-{datetime.now():%Y%m%d-%H%M}")
    folder = open_folder(experiment.name, place)
    announce, view = _shown(verbose)
    if new or not {"name", "experiment"} & words.keys():
        experiment, folder = under_free_name(experiment, folder, announce)
    folder.require_free("pass new=True, which takes the next free name, or another name=")
    return run_experiment(
        experiment,
        folder,
        check=check,
        profile_again=profile_again,
        announce=announce,
        view=view,
        callbacks=callbacks,
    )


def under_free_name(
    experiment: Experiment, folder: ExperimentFolder, announce: Announce
) -> tuple[Experiment, ExperimentFolder]:
    """Return the experiment under the next free name, and its folder."""
    if (free := folder.next_free()).name == folder.name:
        return experiment, folder
    announce(f"the name {folder.name} is taken: this run is {free.name}")
    return experiment.model_copy(update={"name": free.name}), free


def _shown(verbose: int) -> tuple[Announce, View]:
    """Return what shows lines before the run, and its view. Raises InputError for another number than 0, 1, 2."""
    if verbose not in (0, 1, 2):
        raise InputError(f"verbose: {shown(verbose)} is not 0, 1 or 2; 0 is silent, 2 shows most")
    if not verbose:
        return lambda line: None, lambda *_: ()
    from rubberband.views.live.view import NotebookView, is_notebook, open_view

    in_notebook = is_notebook()

    def view(job: Job, clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
        if in_notebook:
            return [stack.enter_context(NotebookView(job, clock, details=verbose > 1))]
        terminal = open_view(job, clock, sys.stderr, sys.stderr.isatty(), details=verbose > 1)
        return [stack.enter_context(terminal)]

    return lambda line: print(line, file=sys.stdout if in_notebook else sys.stderr, flush=True), view


@briefly
def load_result(name: str, *, home: str | os.PathLike[str] | None = None) -> Result:
    """Return the result of an experiment that was run in `home`, also while it runs or after it was cut off.

    `home` is by default RUBBERBAND_HOME, or `~/.rubberband`. Raises InputError if it is not found,
    JournalError if it cannot be read.
    """
    return read(open_folder(name, home_at(home)))


def run_experiment(
    experiment: Experiment,
    folder: ExperimentFolder,
    *,
    search_path: Sequence[str | os.PathLike[str]] = (),
    profile_path: Path | None = None,
    policy: Policy = "optimal",
    most_usd: float | None = None,
    check: bool = True,
    is_beside: bool = False,
    is_admitted: bool = False,
    profile_again: bool = False,
    no_cap: bool = False,
    confirm: Confirm = lambda bill: None,
    announce: Announce = lambda line: None,
    view: View = lambda *_: (),
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Plan an experiment (measuring its profile first if it has none) and run it to its end.

    With `check`, one iteration of the trial is tried first, in a process of its own (`check_first`). A measured profile
    is saved at `profile_path`, and kept for runs of the same content; `is_beside`: the experiment's profile was found
    there, and is used while its content is the same. `is_admitted`: a service has held its plan against the pool's cap
    of a month, and it is not checked again. `profile_again` measures one whatever there is. If there is no plan, the
    advice costs at most `most_usd`. Rented instances need a max_cost, unless `no_cap`; `confirm` is asked before the
    first one. `announce` gets a line on each step before the run begins; `callbacks` are called while it runs. Raises
    the errors of `tune`.
    """
    began_s = elapsed_s()
    check_callbacks(callbacks)
    require_trackers(experiment.track or ())
    require_runnable(experiment, folder.home, no_cap=no_cap)
    experiment = with_trial(experiment, search_path)
    folder.require_free()
    for note in require_home(folder.home):
        announce(note)
    terms = cloud_terms(experiment, folder.home, announce)
    require_rate(experiment, folder.home, terms.table)
    spent, ask = Spent(), confirm if experiment.resources.kind.is_rented else lambda bill: None
    entrypoint = find_entrypoint(experiment, search_path, terms.table, experiment.loaded_profiles())
    announce_device(experiment, announce)
    with cancel_on_signals() as cancelled:
        found_at = profile_path if is_beside else None
        again = profile_again and entrypoint is not None
        profiles = None if again else known_profiles(experiment, entrypoint, folder.home, found_at, announce)
        if check and entrypoint is not None:
            with asked_to_end(folder, cancelled) as asked:
                most = widest_gang(experiment, terms.table, profiles)
                check_first(experiment, entrypoint, folder.home, profiles, announce, asked, max_gpus=most)
        bound, is_known = bound_of(experiment.constraints.max_cost_usd, experiment.resources.pool), profiles is not None
        if not is_known:
            ask(f"{bound}; {'measuring the profile again' if again else UNMEASURED} comes first and counts")
            began_s = elapsed_s()  # the time of the answer is not the run's
        with pledged(experiment, folder):
            if profiles is None:
                announce("measuring the profile again" if again else "no profile yet: measuring one first")
                with asked_to_end(folder, cancelled) as asked:
                    measured = _measured_first(
                        experiment, entrypoint, folder, profile_path, terms.table, announce, asked
                    )
                profiles, spent = measured.profile, Spent(seconds=elapsed_s() - began_s, cost_usd=measured.cost_usd)
            with noting(lambda: spent.cost_usd):
                experiment, job = _planned(experiment, profiles, policy, spent, terms, folder.home, most_usd, announce)
                if is_known or job.max_cost_usd is None:
                    ask(f"{bound}, about {format_usd(spent.cost_usd + job.prediction.cost_usd)}")
                if experiment.resources.pool is not None and not is_admitted:
                    from rubberband.planning.month_cap import require_money

                    pool, expected = Path(experiment.resources.pool), job.prediction
                    require_money(pool, expected.cost_usd, expected.jct_s, "this plan")
                create(folder, job, RunSpec.of(experiment, entrypoint, folder, spent))
        return run(folder, view=view, cancelled=cancelled, callbacks=callbacks)


UNMEASURED = "no profile yet: measuring it"


def bound_of(max_cost_usd: float | None, pool: str | None = None) -> str:
    """Return the limit of a bill in words; `pool` is the folder of the pool that pays it."""
    if max_cost_usd is not None:
        return f"at most {format_usd(max_cost_usd)} (max_cost)"
    return "no max_cost" if pool is None else f"no max_cost, within the caps of pool {Path(pool).name}"


def _planned(
    experiment: Experiment,
    profiles: Profiles,
    policy: Policy,
    spent: Spent,
    terms: Terms,
    home: Path,
    most_usd: float | None,
    announce: Announce,
) -> tuple[Experiment, Job]:
    """Return the experiment with a number as the size of its search, and its job. Raises InfeasibleError."""
    here = replace(terms, starts=local_terms(experiment, home).starts)
    found = planned(experiment, profiles, here, now=time.time(), policy=policy, spent=spent, most_usd=most_usd)
    for line in (*experiment.notes, *found.remarks):
        announce(line)
    job = job_of(found, spent)
    if (sized := found.size) is not None:
        assert sized.number is not None, "there is a plan"
        announce(f"{sized.key}: auto is {sized.number:,}, the largest search within the limits")
        experiment = experiment.sized(sized.key, sized.number)
    notes = [*repeat_notes(experiment), *sampler_notes(experiment, len(lanes_of(job)))]
    notes += batch_notes(experiment, job.profile.goodput)
    notes += async_notes(experiment, job.profile, {stage.gpus_per_trial for stage in job.plan.stages})
    for line in (*notes, _plan_line(job)):
        announce(line)
    return experiment, job


def _measured_first(
    experiment: Experiment,
    entrypoint: Entrypoint | None,
    folder: ExperimentFolder,
    wanted: Path | None,
    table: Table | None,
    announce: Announce,
    cancelled: Callable[[], bool],
) -> MeasuredProfile:
    """Measure a profile briefly, save it at `wanted`, or in the home if that cannot be written, and keep it."""
    measured = measure_profile(
        experiment, entrypoint, folder, briefly=True, table=table, announce=announce, cancelled=cancelled
    )
    measured.keep(folder.home)
    saved_at = folder.home / "profiling" / f"{folder.name}.profile.json" if wanted is None else wanted
    try:
        measured.save(saved_at)
    except InputError:
        saved_at = folder.home / "profiling" / f"{folder.name}.profile.json"
        measured.save(saved_at)
    for line in (*measured.remark_lines(), f"the profile is saved in {saved_at}"):
        announce(line)
    return measured


def known_profiles(
    experiment: Experiment,
    entrypoint: Entrypoint | None,
    home: Path,
    found_at: Path | None,
    announce: Announce = lambda line: None,
) -> Profiles | None:
    """Return the profile that the experiment names, or else one of the same content; None: it must be measured.

    The one that was only found beside the file, at `found_at`, must be of the same content too.
    """
    given = experiment.loaded_profiles()
    if entrypoint is None or (given is not None and found_at is None):
        return given
    content = content_to_measure(experiment, entrypoint)
    if given is not None and found_at is not None:
        is_same, line = beside(found_at, content)
        if line:
            announce(line)
        if is_same:
            return given
    kept = kept_profile(home, content)
    if kept is None:
        return None
    announce(kept[1])
    return kept[0]


@contextmanager
def asked_to_end(folder: ExperimentFolder, cancelled: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Yield a check whether the user asked to cancel, also by a request in the inbox, while there is no journal yet.

    Requests to cancel are removed once they are obeyed; others are left to the driver.
    """
    inbox = Inbox(folder.inbox)
    try:
        yield lambda: cancelled() or any(request.kind == "cancel" for request in inbox.pending())
    except Cancelled:
        inbox.withdraw_cancels()
        raise


def announce_device(experiment: Experiment, announce: Announce) -> None:
    """Announce it if this machine has GPUs and the experiment's trials will not use them.

    Raises InputError if others use them now, or if they cannot train one trial together.
    """
    resources = experiment.resources
    if not resources.kind.is_this_machine:
        return
    for rented in offers(resources):
        found = gpus_to_share(rented)
        free = found if resources.pool is not None else free_gpus(found, rented)
        for note in dict.fromkeys((*found.notes, *free.notes)):
            announce(note)
        most = resources.gpus_per_trial.max or rented.gpus
        if most > 1 and experiment.training.mode != "async" and any(gpu.startswith("MIG-") for gpu in free.ids):
            raise InputError(
                f"gpus_per_trial.max={most}: NCCL does not join MIG instances, as this machine has; "
                "set resources.gpus_per_trial.max to 1"
            )


def find_entrypoint(
    experiment: Experiment,
    search_path: Sequence[str | os.PathLike[str]] = (),
    table: Table | None = None,
    profiles: Profiles | None = None,
) -> Entrypoint | None:
    """Return the experiment's entry point, checked; None for a virtual run.

    `table` has live prices, if they were asked for. `profiles` is one for all types, or type -> profile; None: it is
    not measured yet.

    Raises EntrypointError or InputError.
    """
    if experiment.resources.kind.is_simulated:
        return None
    found = named_entrypoint(experiment, search_path)
    found.check(
        widest_gang(experiment, table, profiles),
        adaptive=experiment.batch.policy == "goodput",
        asynchronous=experiment.training.mode == "async",
    )
    return found


def _plan_line(job: Job) -> str:
    markets = {"spot": " on spot", "on_demand": " on demand"} if job.offer.spot else {}
    each = [
        f"{chosen.instances} x {job.offer.gpus} GPU{markets.get(chosen.market, '')} "
        f"({counted(stage.trials, 'trial')} x {chosen.gpus_per_trial} GPU)"
        for stage, chosen in zip(job.stages, job.plan.stages, strict=True)
    ]
    lanes: dict[int, list[str]] = {}
    for bracket in job.all_brackets():
        lanes.setdefault(bracket.lane, []).extend(each[bracket.first_stage : bracket.end_stage])
    stages = ", beside ".join(" -> ".join(lane) for lane in lanes.values())
    predicted = f"{format_duration(job.prediction.jct_s)}, {format_usd(job.prediction.cost_usd)}"
    return f"plan: {stages}; predicted {predicted}"
