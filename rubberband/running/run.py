"""From an experiment to its result, for `run` and `tune`: check, measure a profile if there is none, plan, run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rubberband.cloud.catalogue import Table, boot_timeouts, types_of
from rubberband.cloud.clock import elapsed_s
from rubberband.cloud.local.gpus import free_gpus, gpus_to_share
from rubberband.cloud.offers import offers
from rubberband.errors import Cancelled, InputError, briefly
from rubberband.executor.core.job import Job, brackets_of
from rubberband.executor.core.state import lanes_of
from rubberband.executor.journal.folder import ExperimentFolder, open_folder
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.journal.journal import Header
from rubberband.executor.result.result import Result
from rubberband.executor.run.allowance import pledged, require_rate, require_runnable
from rubberband.executor.run.callbacks import Callback, check_callbacks
from rubberband.executor.run.driver import Observer
from rubberband.executor.run.early import EarlyStart, clear, early_start
from rubberband.executor.run.follower import read
from rubberband.executor.run.session import cancel_on_signals, create, require_cluster, run
from rubberband.executor.training.entrypoint import Entrypoint, with_trial
from rubberband.executor.training.run_spec import RunSpec
from rubberband.features import parts
from rubberband.files import require_home
from rubberband.installation import home_at
from rubberband.planning.candidates import batch_notes, repeat_notes, sampler_notes, stand_in_speeds, stop_notes
from rubberband.planning.clusters import on_cluster
from rubberband.planning.feasible import PlannedExperiment, PlanningOptions, PricesAndQuotas, Profiles, planned
from rubberband.planning.prices_and_quotas import cloud_prices_and_quotas, local_prices_and_quotas
from rubberband.running.check import check_first, named_entrypoint, narrowest_gang, widest_gang, with_narrowest_gang
from rubberband.running.estimating import experiment_of
from rubberband.running.laps import Laps
from rubberband.running.pace import OtherLoad, Pace, paced
from rubberband.running.profile import MeasuredProfile, measure_profile, noting
from rubberband.running.profile_cache import Announce, find_profiles
from rubberband.running.sending import require_sent
from rubberband.running.warm_start import warm_started
from rubberband.spec.experiment import Experiment, entrypoint_words
from rubberband.spec.program import Program
from rubberband.units import counted, format_duration, format_usd, gpus_each, in_unit, shown
from rubberband.values.plan import Policy, Spent
from rubberband.values.profile import Profile

if TYPE_CHECKING:
    from rubberband.types import TuneDict

START_ATTEMPTS = 3
"""A run stops buying for now after this number of instances in a row that never became ready."""
HUNG_REPLACEMENTS = 3
"""A run replaces at most this number of instances since trials hung on them."""


def job_of(found: PlannedExperiment, spent: Spent) -> Job:
    """Return the job of an experiment that starts now. Raises InfeasibleError if no plan keeps its limits."""
    chosen, experiment, problem = found.job, found.experiment, found.estimate.problem
    constraints, resources = problem.constraints, experiment.resources
    kind = resources.kind
    assert problem.reserve is not None, "the candidates of an experiment have one"
    brackets = brackets_of(experiment.brackets(), [lane.brackets for lane in chosen.lanes])
    return Job(
        name=experiment.name,
        stages=tuple(stage for lane in chosen.lanes for stage in lane.stages),
        plan=chosen.plan,
        prediction=chosen.prediction,
        offer=problem.offer,
        profile=_profile_of_starts(experiment, problem.profile),
        metric=experiment.search.metric,
        mode=experiment.search.mode,
        repeats=experiment.search.repeats,
        keep_best=resources.keep == "best",
        limits=experiment.search.limits,
        deadline_s=constraints.deadline_s,
        deadline_at=None if kind.is_simulated else experiment.constraints.deadline_at,
        max_cost_usd=constraints.max_cost_usd,
        max_failures=experiment.constraints.max_failures,
        iteration_timeout_s=experiment.constraints.iteration_timeout_s,
        release_margin_s=problem.reserve.margin_s,
        replan=found.estimate.policy == "optimal" and problem.has_sync,
        objective=experiment.constraints.objective,
        min_gpus_per_trial=constraints.min_gpus_per_trial,
        max_gpus_per_trial=constraints.max_gpus_per_trial,
        gpus_per_trial_sizes=constraints.gpus_per_trial_sizes,
        confidence=constraints.confidence,
        highest_price_usd_per_hour=problem.reserve.highest_price_usd_per_hour,
        lease_s=None if kind.is_simulated else resources.lease_length_s,
        boot_lease_s=boot_timeouts(types_of(resources), resources.init_delay_s).lease_s if resources.rents else None,
        start_attempts=START_ATTEMPTS,
        hung_replacements=HUNG_REPLACEMENTS,
        draws=experiment.search.sampler.learns,
        brackets=brackets,
        lane_instances=tuple(lane.max_instances for lane in chosen.lanes) if brackets else (),
        balances=experiment.gains_from_mixtures,
        speeds=stand_in_speeds(experiment, problem, found.candidates),
        resize_in_stage=experiment.constraints.resize_in_stage,
        keeps_width=experiment.training.mode == "async",
        profiling_s=spent.seconds,
        stop=experiment.search.stop_rules,
    )


View = Callable[[Header, Callable[[], float], ExitStack], Sequence[Observer]]
Confirm = Callable[[str], None]
"""Is called with what is known of the bill before anything is rented. Raises Cancelled if the user does not want it."""


def _profile_of_starts(experiment: Experiment, profile: Profile) -> Profile:
    """Return the profile with the part of a start that passes within the first iteration."""
    if experiment.resources.kind.is_simulated:  # the start is whole before
        return replace(profile, first_iteration_extra_s=0.0, cold_iteration_extra_s=0.0)
    if isinstance(experiment.entrypoint, Program) and profile.first_iteration_extra_s == 0.0:
        return replace(profile, first_iteration_extra_s=profile.trial_startup_s)  # its imports, before it reports
    return profile


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
    **words: Unpack[TuneDict],
) -> Result:
    """Tune `entrypoint` (a trial class, a function, or `module:attribute`) and return the result.

    Without a profile one is measured first. It is kept, and used again while trial, space and hardware are the same.

    Args:
        entrypoint: The trial: a class, a function, or `module:attribute`.
        home: Where the experiment is kept; by default RUBBERBAND_HOME, or `~/.rubberband`.
        check: Whether a trial that is new or has changed first trains one iteration, in a process of its own.
        profile_again: Whether the profile is measured afresh.
        new: Whether a name that is taken is replaced by the next free one (`digits-2`, `digits-3`).
        verbose: 0 is silent. 1 shows the plan, and the progress as a table (on a terminal, on stderr), a display (in a
            notebook) or a line for each stage. 2 also shows lines about instances.
        callbacks: Called while the experiment runs.
        words: The keys of the experiment file: `name`, `search`, `constraints`, `resources`, `profile`, …; or, as
            `experiment=`, a whole `rubberband.Experiment`. The default name is the trial's with the time, such as
            `train-20261125-1903`.

    Returns:
        The result, also of a run that Ctrl-C ended (its `outcome` is `cancelled`).

    Raises:
        InputError: For wrong words; NameTakenError for a name that is taken.
        InfeasibleError: If no plan meets the constraints.
        ProviderError: If the provider refuses a request or breaks.

    Examples:
        >>> def train(config):
        ...     state = rubberband.get_checkpoint() or {"epoch": 0}
        ...     while True:  # RubberBand ends the loop
        ...         state["epoch"] += 1
        ...         rubberband.report({"loss": config["lr"] / state["epoch"]}, checkpoint=state)
        >>> result = rubberband.tune(
        ...     train,
        ...     name="first",
        ...     search={
        ...         "space": {"lr": rubberband.loguniform(1e-4, 1e-1)},
        ...         "scheduler": {"type": "sha", "num_samples": 8, "max_t": 4, "reduction_factor": 2},
        ...         "metric": "loss",
        ...         "mode": "min",
        ...     },
        ...     constraints={"deadline": "10m", "max_cost": 1},
        ...     resources={"provider": "virtual", "gpus_per_instance": 1, "price_per_hour": 3, "max_instances": 2},
        ...     profile={"seconds_per_iteration": {1: 10}},
        ...     verbose=0,
        ... )
        >>> result.outcome, list(result.best_config)
        ('done', ['lr'])
    """
    place = home_at(home)
    experiment = experiment_of(entrypoint, words, "tune", place, began=f"-{datetime.now():%Y%m%d-%H%M}")
    folder = open_folder(experiment.name, place)
    announce, view, steps = _shown(verbose)
    if new or not {"name", "experiment"} & words.keys():
        experiment, folder = under_free_name(experiment, folder, announce)
    folder.require_free("pass new=True, which takes the next free name, or another name=")
    with steps as step:
        options = RunOptions(
            check=check, profile_again=profile_again, step=step, announce=announce, view=view, callbacks=callbacks
        )
        return run_experiment(experiment, folder, options)


def under_free_name(
    experiment: Experiment, folder: ExperimentFolder, announce: Announce
) -> tuple[Experiment, ExperimentFolder]:
    """Return the experiment under the next free name, and its folder."""
    if (free := folder.next_free()).name == folder.name:
        return experiment, folder
    announce(f"the name {folder.name} is taken: this run is {free.name}")
    return experiment.model_copy(update={"name": free.name}), free


def _shown(verbose: int) -> tuple[Announce, View, AbstractContextManager[Announce]]:
    """Return what shows lines before the run, its view, and what shows steps before it.

    Raises InputError for another number than 0, 1, 2.
    """
    if verbose not in (0, 1, 2):
        raise InputError(f"verbose: {shown(verbose)} is not 0, 1 or 2; 0 is silent, 2 shows most")
    if not verbose:
        return lambda line: None, lambda *_: (), nullcontext(lambda line: None)
    from rubberband.views.live.steps import Steps
    from rubberband.views.live.view import NotebookView, is_notebook, open_view

    in_notebook = is_notebook()

    def view(header: Header, clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
        job, details, is_rehearsal = header.job, verbose > 1, header.kind.is_simulated
        if in_notebook:
            return [stack.enter_context(NotebookView(job, clock, details=details, is_rehearsal=is_rehearsal))]
        is_terminal = sys.stderr.isatty()
        terminal = open_view(job, clock, sys.stderr, is_terminal, details=details, is_rehearsal=is_rehearsal)
        return [stack.enter_context(terminal)]

    steps = nullcontext(lambda line: None) if in_notebook else Steps()
    return lambda line: print(line, file=sys.stdout if in_notebook else sys.stderr, flush=True), view, steps


@briefly
def load_result(name: str, *, home: str | os.PathLike[str] | None = None) -> Result:
    """Return the result of an experiment that was run in `home`, also while it runs or after it was cut off.

    Args:
        name: The experiment's name.
        home: By default RUBBERBAND_HOME, or `~/.rubberband`.

    Returns:
        The result; its `outcome` is `unfinished` while the experiment runs.

    Raises:
        InputError: If it is not found.
        JournalError: If it cannot be read.

    Examples:
        >>> rubberband.load_result("first").best.iterations
        4
    """
    return read(open_folder(name, home_at(home)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How an experiment is run. The command line, Python and the service make the same value."""

    search_path: Sequence[str | os.PathLike[str]] = ()
    """Folders that are searched for the trial."""
    profile_path: Path | None = None
    """Place of a profile that is measured; None: the home."""
    is_beside: bool = False
    """Whether the experiment's profile was found at `profile_path`: it is used while its content is the same."""
    policy: Policy = "optimal"
    most_usd: float | None = None
    """Highest cost that is advised where there is no plan."""
    check: bool = True
    """Whether one iteration of the trial is tried first, in a process of its own (`check_first`)."""
    is_admitted: bool = False
    """Whether a service has held the plan against the pool's cap of a month; it is not checked again."""
    profile_again: bool = False
    """Whether a profile is measured even if there is one."""
    no_cap: bool = False
    """Whether rented instances may have no max_cost."""
    confirm: Confirm = lambda bill: None
    """Asked before the first instance is rented."""
    step: Announce = lambda line: None
    """Gets what is done now, before the run begins; empty: a question or the run's own view follows."""
    began_s: float | None = None
    """Instant on the monotonic clock at which the command began; None: when this is run."""
    announce: Announce = lambda line: None
    """Gets a line on each result before the run begins."""
    view: View = lambda *_: ()
    callbacks: Sequence[Callback] = ()


def run_experiment(experiment: Experiment, folder: ExperimentFolder, options: RunOptions | None = None) -> Result:
    """Plan an experiment (measuring its profile first if it has none) and run it to its end.

    A measured profile is kept for runs of the same content. Raises the errors of `tune`.
    """
    options = options or RunOptions()
    began_s, laps, load = elapsed_s(), Laps(options.began_s), OtherLoad()
    laps.lap("imports")
    with ExitStack() as starting:
        is_rehearsal = experiment.resources.kind.is_simulated
        for around in parts("start"):
            starting.enter_context(around(folder, experiment.notify or (), is_rehearsal=is_rehearsal))
        check_callbacks(options.callbacks)
        for require in parts("installed"):
            require(experiment)
        require_runnable(experiment, folder.home, no_cap=options.no_cap)
        experiment = on_cluster(with_trial(experiment, options.search_path))
        folder.require_free()
        clear(folder)
        experiment = warm_started(experiment, folder.home, options.announce)
        for note in require_home(folder.home):
            options.announce(note)
        if experiment.resources.kind.is_elsewhere:
            options.step(f"asking provider {experiment.resources.provider} for prices and quotas")
        prices = cloud_prices_and_quotas(experiment, folder.home, options.announce)
        require_rate(experiment, folder.home, prices.table)
        laps.lap("prices and quotas" if experiment.resources.kind.is_elsewhere else "plan")
        is_early = experiment.resources.kind.is_this_machine and experiment.resources.pool is None
        entrypoint = None
        if is_early:  # it is imported once the rest has begun to start, by the check in a process of its own
            entrypoint = named_entrypoint(experiment, options.search_path)
        elif not experiment.resources.kind.is_simulated:
            options.step(f"importing {entrypoint_words(experiment.entrypoint)}")
            entrypoint = find_entrypoint(experiment, options.search_path, prices.table, experiment.loaded_profiles())
        announce_device(experiment, options.announce)
        laps.lap("plan" if is_early else "import of the trial")
        with cancel_on_signals() as cancelled, ExitStack() as ending:
            start = _Start(experiment, entrypoint, folder, options, prices, cancelled)
            profiles, lines, is_instant = start.known_profiles(), list[str](), False
            first: tuple[Experiment, Job] | None = None
            if profiles is not None:  # what has no plan is refused before anything is tried
                is_instant = isinstance(experiment.constraints.deadline, datetime)
                first = replace(start, options=replace(options, announce=lines.append)).planned(profiles, Spent())
            others = load.cores() if is_early and profiles is not None else 0.0
            laps.lap("plan")
            early = None
            if is_early and first is not None and not is_instant:
                early = ending.enter_context(start.early(*first))
            if entrypoint is not None:
                fork_server = None if early is None else folder.instances
                pace = start.check(entrypoint, profiles, fork_server, is_loaded=not is_early)
                if is_early and pace is not None and first is not None:
                    known, profiles = profiles, start.corrected(profiles, pace, first[1], others)
                    first = first if profiles is known else None
            laps.lap("check")
            if is_instant:  # which the check has brought nearer
                first = None
            if profiles is not None:  # measuring one asks the nodes as well
                require_cluster(experiment, folder.home, entrypoint)
            else:
                start.ask(f"; {'measuring the profile again' if start.again else UNMEASURED} comes first and counts")
                began_s = elapsed_s()  # the time of the answer is not the run's
            with pledged(experiment, folder):
                spent, is_known = Spent(), profiles is not None
                if profiles is None:
                    measured = start.measured()
                    profiles = measured.profile
                    spent = Spent(seconds=elapsed_s() - began_s, cost_usd=measured.cost_usd)
                    laps.lap("profile")
                with noting(lambda: spent.cost_usd):
                    if first is not None:
                        sized, job = first
                        for line in lines:
                            options.announce(line)
                    else:
                        sized, job = start.planned(profiles, spent)
                    if early is not None:
                        job = early.ahead(job)
                    options.announce(_plan_line(job))
                    laps.lap("plan")
                    if is_known or job.max_cost_usd is None:
                        start.ask(f", about {format_usd(spent.cost_usd + job.prediction.cost_usd)}")
                        laps.lap("answer")
                    start.require_money(job)
                    spec = RunSpec.of(sized, entrypoint, folder, spent)
                    create(folder, job, replace(spec, waited_s={} if is_rehearsal else dict(laps.seconds)))
            starting.close()  # from here the journal is followed
            options.step("")
            return run(folder, view=options.view, cancelled=cancelled, callbacks=options.callbacks, early=early)


UNMEASURED = "no profile yet: measuring it"


def bound_of(max_cost_usd: float | None, pool: str | None = None) -> str:
    """Return the limit of a bill in words; `pool` is the folder of the pool that pays it."""
    if max_cost_usd is not None:
        return f"at most {format_usd(max_cost_usd)} (max_cost)"
    return "no max_cost" if pool is None else f"no max_cost, within the caps of pool {Path(pool).name}"


@dataclass(frozen=True, slots=True)
class _Start:
    """The steps of an experiment before its run."""

    experiment: Experiment
    entrypoint: Entrypoint | None
    folder: ExperimentFolder
    options: RunOptions
    prices: PricesAndQuotas
    cancelled: Callable[[], bool]

    @property
    def again(self) -> bool:
        """Whether a profile is measured even if there is one."""
        return self.options.profile_again and self.entrypoint is not None

    def ask(self, what: str) -> None:
        """Ask for the money of rented instances: its limit, and what is known of it. Raises Cancelled."""
        resources = self.experiment.resources
        if resources.kind.is_rented:
            self.options.step("")
            self.options.confirm(f"{bound_of(self.experiment.constraints.max_cost_usd, resources.pool)}{what}")

    def known_profiles(self) -> Profiles | None:
        """Return the profile that need not be measured; None if there is none."""
        options = self.options
        if self.again:
            return None
        found_at = options.profile_path if options.is_beside else None
        return find_profiles(
            self.experiment, self.entrypoint, self.folder.home, found_at, options.announce, to_run=True
        )

    def early(self, experiment: Experiment, job: Job) -> AbstractContextManager[EarlyStart | None]:
        """Start what the job needs first, while its trial is checked."""
        self.options.step("starting the head and the first instances on this machine")
        return early_start(self.folder, RunSpec.of(experiment, self.entrypoint, self.folder, Spent()), job)

    def check(
        self, entrypoint: Entrypoint, profiles: Profiles | None, fork_server: Path | None, *, is_loaded: bool
    ) -> Pace | None:
        """Try one iteration of the trial, unless that is known to work; import it here if it has not been.

        Returns how fast it trains here, if that is known. Raises EntrypointError.
        """
        with asked_to_end(self.folder, self.cancelled) as asked:
            place = self.experiment, self.prices.table, profiles
            experiment, most = with_narrowest_gang(self.experiment, narrowest_gang(*place)), widest_gang(*place)
            options, home = self.options, self.folder.home
            load = partial(self._load, entrypoint, most, is_loaded=is_loaded)
            if not options.check:
                load()
                return None
            return check_first(
                experiment,
                entrypoint,
                home,
                profiles,
                options.announce,
                asked,
                max_gpus=most,
                step=options.step,
                load=load,
                fork_server=fork_server,
            )

    def corrected(self, profiles: Profiles | None, pace: Pace, job: Job, others: float) -> Profiles | None:
        """Return the profiles at the level that was measured on this machine; a line says so. See `paced`."""
        found = paced(profiles, pace, job, others) if isinstance(profiles, Profile) else None
        if found is None:
            return profiles
        self.options.announce(found[1])
        return found[0]

    def _load(self, entrypoint: Entrypoint, max_gpus: int, *, is_loaded: bool) -> None:
        if not is_loaded:
            self.options.step(f"importing {entrypoint}")
            check_import(self.experiment, entrypoint, max_gpus)

    def measured(self) -> MeasuredProfile:
        """Measure a profile briefly, save it where asked, or in the home if that cannot be written, and keep it."""
        announce, home_path = self.options.announce, self.folder.home / "profiling" / f"{self.folder.name}.profile.json"
        announce("measuring the profile again" if self.again else "no profile yet: measuring one first")
        with asked_to_end(self.folder, self.cancelled) as asked:
            found = measure_profile(
                self.experiment,
                self.entrypoint,
                self.folder,
                briefly=True,
                table=self.prices.table,
                announce=announce,
                cancelled=asked,
            )
        found.keep(self.folder.home)
        saved_at = self.options.profile_path or home_path
        try:
            found.save(saved_at)
        except InputError:
            saved_at = home_path
            found.save(saved_at)
        for line in (*found.remark_lines(), f"the profile is saved in {saved_at}"):
            announce(line)
        return found

    def planned(self, profiles: Profiles, spent: Spent) -> tuple[Experiment, Job]:
        """Return the experiment with a number as the size of its search, and its job. Raises InfeasibleError."""
        experiment, options = self.experiment, self.options
        here = replace(self.prices, starts=local_prices_and_quotas(experiment, self.folder.home).starts)
        asked = PlanningOptions(now=time.time(), policy=options.policy, spent=spent, most_usd=options.most_usd)
        found = planned(experiment, profiles, here, asked)
        for line in (*experiment.notes, *found.remarks):
            options.announce(line)
        job = job_of(found, spent)
        if (sized := found.size) is not None:
            assert sized.number is not None, "there is a plan"
            options.announce(f"{sized.key}: auto is {sized.number:,}, the largest search within the limits")
            experiment = experiment.sized(sized.key, sized.number)
        notes = [*repeat_notes(experiment), *stop_notes(experiment), *sampler_notes(experiment, len(lanes_of(job)))]
        notes += batch_notes(experiment, job.profile.goodput)
        used = {stage.gpus_per_trial for stage in job.plan.stages}
        notes += [note for notes_of in parts("notes") for note in notes_of(experiment, job.profile, used)]
        for line in notes:
            options.announce(line)
        return experiment, job

    def require_money(self, job: Job) -> None:
        """Raise InfeasibleError where the cap of the pool's month does not cover the plan."""
        pool = self.experiment.resources.pool
        if pool is not None and not self.options.is_admitted:
            from rubberband.planning.month_cap import require_money

            require_money(Path(pool), job.prediction.cost_usd, job.prediction.jct_s, "this plan")


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
        found = gpus_to_share(rented, resources.slots)
        free = found if resources.pool is not None else free_gpus(found, rented)
        for note in dict.fromkeys((*found.notes, *free.notes)):
            announce(note)
        most = experiment.max_gpus_per_trial(rented.gpus)
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
    check_import(experiment, found, widest_gang(experiment, table, profiles))
    require_sent(experiment, found)
    return found


def check_import(experiment: Experiment, entrypoint: Entrypoint, max_gpus: int) -> None:
    """Import what is trained. Raises EntrypointError if that fails, or it does not suit the experiment."""
    entrypoint.check(
        max_gpus,
        adaptive=experiment.batch.policy == "goodput",
        asynchronous=experiment.training.mode == "async",
        elsewhere=experiment.resources.kind.is_elsewhere,
    )


def _plan_line(job: Job) -> str:
    offer, markets = job.offer, {"spot": " on spot", "on_demand": " on demand"} if job.offer.spot else {}
    each = [
        f"{chosen.instances} x {offer.gpus} {offer.place}{markets.get(chosen.market, '')} "
        f"({counted(stage.trials, 'trial')} x {gpus_each(chosen.gpus_per_trial, offer.trials_per_gpu)} {offer.place})"
        for stage, chosen in zip(job.stages, job.plan.stages, strict=True)
    ]
    lanes: dict[int, list[str]] = {}
    for bracket in job.all_brackets():
        lanes.setdefault(bracket.lane, []).extend(each[bracket.first_stage : bracket.end_stage])
    stages = ", beside ".join(" -> ".join(lane) for lane in lanes.values())
    predicted = f"{format_duration(job.prediction.jct_s)}, {format_usd(job.prediction.cost_usd)}"
    return f"plan: {stages}; predicted {in_unit(predicted, job.offer.unit)}"
