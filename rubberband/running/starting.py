"""The steps of an experiment before its run: it is planned, tried, measured if it has no profile, and paid."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from rubberband.cloud.catalogue import Table
from rubberband.cloud.clock import elapsed_s
from rubberband.cloud.local.gpus import free_gpus, gpus_to_share
from rubberband.cloud.offers import offers
from rubberband.errors import Cancelled, InputError
from rubberband.executor.core.job import Job
from rubberband.executor.core.state import lanes_of
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.journal.journal import Header
from rubberband.executor.run.allowance import pledged
from rubberband.executor.run.callbacks import Callback
from rubberband.executor.run.driver import Observer
from rubberband.executor.run.early import EarlyStart, early_start
from rubberband.executor.run.session import create, require_cluster
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run_spec import RunSpec
from rubberband.features import parts
from rubberband.planning.candidates import batch_notes, repeat_notes, sampler_notes, stop_notes
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, Profiles, planned
from rubberband.planning.prices_and_quotas import local_prices_and_quotas
from rubberband.running.check import check_first, named_entrypoint, narrowest_gang, widest_gang, with_narrowest_gang
from rubberband.running.job import job_of
from rubberband.running.laps import Laps
from rubberband.running.pace import OtherLoad, Pace, paced
from rubberband.running.profile import MeasuredProfile, measure_profile, noting
from rubberband.running.profile_cache import Announce, find_profiles
from rubberband.running.sending import require_sent
from rubberband.spec.experiment import Experiment
from rubberband.units import counted, format_duration, format_usd, gpus_each, in_unit
from rubberband.values.plan import Policy, Spent
from rubberband.values.profile import Profile

View = Callable[[Header, Callable[[], float], ExitStack], Sequence[Observer]]
Confirm = Callable[[str], None]
"""Is called with what is known of the bill before anything is rented. Raises Cancelled if the user does not want it."""


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
    submitted_at: float | None = None
    """Unix time of its submission to a service; None: it is run by hand."""
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


UNMEASURED = "no profile yet: measuring it"


def bound_of(max_cost_usd: float | None, pool: str | None = None) -> str:
    """Return the limit of a bill in words; `pool` is the folder of the pool that pays it."""
    if max_cost_usd is not None:
        return f"at most {format_usd(max_cost_usd)} (max_cost)"
    return "no max_cost" if pool is None else f"no max_cost, within the caps of pool {Path(pool).name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A trial that was tried, with what is known by then."""

    profiles: Profiles | None
    """None: they are to be measured."""
    first: tuple[Experiment, Job] | None
    """The plan from before, if that holds; `lines` say it."""
    lines: Sequence[str]
    early: EarlyStart | None


@dataclass(frozen=True, slots=True)
class Start:
    """The steps of an experiment before its run."""

    experiment: Experiment
    entrypoint: Entrypoint | None
    folder: ExperimentFolder
    options: RunOptions
    prices: PricesAndQuotas
    cancelled: Callable[[], bool]
    laps: Laps

    @property
    def is_here(self) -> bool:
        """See `is_here`."""
        return is_here(self.experiment)

    @property
    def again(self) -> bool:
        """Whether a profile is measured even if there is one."""
        return self.options.profile_again and self.entrypoint is not None

    def tried(self, load: OtherLoad, ending: ExitStack) -> Tried:
        """Plan, and try one iteration of the trial; beside that, start what a run on this machine needs.

        All that has started ends with `ending`. Raises InfeasibleError and EntrypointError.
        """
        profiles, lines = self.known_profiles(), list[str]()
        first: tuple[Experiment, Job] | None = None
        if profiles is not None:  # what has no plan is refused before anything is tried
            first = replace(self, options=replace(self.options, announce=lines.append)).planned(profiles, Spent())
        holds = not isinstance(self.experiment.constraints.deadline, datetime)  # the check brings an instant nearer
        others = load.cores() if self.is_here and profiles is not None else 0.0
        self.laps.lap("plan")
        early = None
        if self.is_here and first is not None and holds:
            early = ending.enter_context(self._early(*first))
        if self.entrypoint is not None:
            pace = self._check(self.entrypoint, profiles, None if early is None else self.folder.instances)
            if self.is_here and pace is not None and first is not None:
                known, profiles = profiles, self._corrected(profiles, pace, first[1], others)
                holds = holds and profiles is known
        self.laps.lap("check")
        return Tried(profiles=profiles, first=first if holds else None, lines=lines, early=early)

    def create(self, tried: Tried) -> None:
        """Make the journal of its run; before that, measure the profile if there is none, and ask for the money.

        Raises InfeasibleError and Cancelled.
        """
        profiles, spent = tried.profiles, Spent()
        if profiles is not None:  # measuring one asks the nodes as well
            require_cluster(self.experiment, self.folder.home, self.entrypoint)
        else:
            self.ask(f"; {'measuring the profile again' if self.again else UNMEASURED} comes first and counts")
        with pledged(self.experiment, self.folder):
            if profiles is None:
                began_s = elapsed_s()
                measured = self.measured()
                profiles = measured.profile
                spent = Spent(seconds=elapsed_s() - began_s, cost_usd=measured.cost_usd)
                self.laps.lap("profile")
            with noting(lambda: spent.cost_usd):
                sized, job = tried.first or self.planned(profiles, spent)
                for line in tried.lines if tried.first is not None else ():
                    self.options.announce(line)
                if tried.early is not None:
                    job = tried.early.ahead(job)
                self.options.announce(plan_line(job))
                self.laps.lap("plan")
                if tried.profiles is not None or job.max_cost_usd is None:
                    self.ask(f", about {format_usd(spent.cost_usd + job.prediction.cost_usd)}")
                    self.laps.lap("answer")
                self.require_money(job)
                waited_s = {} if self.experiment.resources.kind.is_simulated else dict(self.laps.seconds)
                create(
                    self.folder, job, replace(RunSpec.of(sized, self.entrypoint, self.folder, spent), waited_s=waited_s)
                )

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

    def _early(self, experiment: Experiment, job: Job) -> AbstractContextManager[EarlyStart | None]:
        """Start what the job needs first, while its trial is checked."""
        self.options.step("starting the head and the first instances on this machine")
        return early_start(self.folder, RunSpec.of(experiment, self.entrypoint, self.folder, Spent()), job)

    def _check(self, entrypoint: Entrypoint, profiles: Profiles | None, fork_server: Path | None) -> Pace | None:
        """Try one iteration of the trial, unless that is known to work; import it here if it has not been.

        Returns how fast it trains here, if that is known. Raises EntrypointError.
        """
        with asked_to_end(self.folder, self.cancelled) as asked:
            place = self.experiment, self.prices.table, profiles
            experiment, most = with_narrowest_gang(self.experiment, narrowest_gang(*place)), widest_gang(*place)
            options, home = self.options, self.folder.home
            load = partial(self._load, entrypoint, most)
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

    def _corrected(self, profiles: Profiles | None, pace: Pace, job: Job, others: float) -> Profiles | None:
        """Return the profiles at the level that was measured on this machine; a line says so. See `paced`."""
        found = paced(profiles, pace, job, others) if isinstance(profiles, Profile) else None
        if found is None:
            return profiles
        self.options.announce(found[1])
        return found[0]

    def _load(self, entrypoint: Entrypoint, max_gpus: int) -> None:
        if self.is_here:  # elsewhere it was imported before
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
        job = job_of(found, spent, options.submitted_at)
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


def is_here(experiment: Experiment) -> bool:
    """Whether it runs on this machine, on instances of its own."""
    return experiment.resources.kind.is_this_machine and experiment.resources.pool is None


def plan_line(job: Job) -> str:
    """Return the instances, trials and gangs of each stage, with the predicted time and cost."""
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
