"""From an experiment to its result: check, profile if need be, plan, create, run. What `run` and `tune` do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubberband.app.cases import MARKETS, Room, batch_notes, known_gpus, with_start_times
from rubberband.app.measure import Announce, MeasuredProfile, Spent, make_setup, measure_profile
from rubberband.app.planning import Profiles, plan_job
from rubberband.app.terms import local_terms
from rubberband.cloud.catalogue import Table, offers, types_of
from rubberband.cloud.prices import live_table
from rubberband.cloud.steady import elapsed_s
from rubberband.errors import Cancelled, InputError
from rubberband.executor.core.state import Job
from rubberband.executor.driver import Observer
from rubberband.executor.journal.folder import ExperimentFolder, open_folder
from rubberband.executor.journal.inbox import Inbox
from rubberband.executor.result import Result
from rubberband.executor.session import (
    cancel_on_signals,
    create,
    local_devices,
    run,
)
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.home import default_home as default_home
from rubberband.spec.experiment import Experiment
from rubberband.units import format_duration, format_usd
from rubberband.values.offer import Offer
from rubberband.values.plan import Market, Policy

View = Callable[[Job, Callable[[], float], ExitStack], Sequence[Observer]]


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
        raise InputError(f"tune() got an experiment and also {', '.join(words) or 'an entry point'}; give one of them")
    folder = open_folder(experiment.name, Path(home).expanduser().resolve() if home else None)
    return run_experiment(experiment, folder)


def run_experiment(
    experiment: Experiment,
    folder: ExperimentFolder,
    *,
    search_path: Sequence[str | os.PathLike[str]] = (),
    profile_path: Path | None = None,
    policy: Policy = "optimal",
    most_usd: float | None = None,
    announce: Announce = lambda line: None,
    view: View = lambda *_: (),
) -> Result:
    """Plan an experiment (measuring its profile first if it has none) and run it to its end.

    A profile that is measured is kept at `profile_path`. Where there is no plan, no advice passes `most_usd`.
    `announce` is told, in a line, what is done before the run begins. Raises what `tune` raises.
    """
    began_s = elapsed_s()
    experiment.require_runnable()
    folder.require_free()
    terms = cloud_terms(experiment, folder.home, announce)
    profiles, spent = experiment.loaded_profiles(), Spent()
    entrypoint = find_entrypoint(experiment, search_path, terms.table, profiles)
    announce_device(experiment, announce)
    with cancel_on_signals() as cancelled:
        if profiles is None:
            announce("no profile yet: measuring one first")
            with asked_to_end(folder, cancelled) as asked:
                measured = measure_profile(
                    experiment, entrypoint, folder, table=terms.table, announce=announce, cancelled=asked
                )
            for line in measured.remark_lines():
                announce(line)
            announce(f"the profile is kept in {_keep(measured, profile_path, folder)}")
            profiles = measured.profile
            spent = Spent(seconds=elapsed_s() - began_s, cost_usd=measured.cost_usd)
        planned, remarks, _ = with_start_times(experiment, local_terms(experiment, folder.home).starts)
        for line in remarks:
            announce(line)
        job = plan_job(planned, profiles, policy, spent=spent, table=terms.table, room=terms.room, most_usd=most_usd)
        for note in batch_notes(experiment, job.profile.goodput):
            announce(note)
        announce(_plan_line(job))
        create(folder, job, make_setup(experiment, entrypoint, folder, spent))
        return run(folder, view=view, cancelled=cancelled)


@contextmanager
def asked_to_end(folder: ExperimentFolder, cancelled: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Tells whether an end is asked for, also by a request in the inbox, while there is no journal that could say so.

    A request that was obeyed is let go of; another one is left to the driver.
    """
    inbox = Inbox(folder.inbox)
    try:
        yield lambda: cancelled() or any(request.kind == "cancel" for request in inbox.pending())
    except Cancelled:
        inbox.withdraw_cancels()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudTerms:
    """What a cloud asks and allows today; nothing of it where that is not asked."""

    table: Table | None = None
    room: Room | None = None


def cloud_terms(experiment: Experiment, home: Path, announce: Announce) -> CloudTerms:
    """Look at all that could be amiss with EC2 before anything is rented, and tell what is worth knowing.

    Raises InputError (with the remedy) for what would keep the experiment from being run there.
    """
    resources = experiment.resources
    if not resources.kind.is_rented:
        return CloudTerms()
    from rubberband.cloud.aws.calls import open_aws

    session = open_aws(resources.region)
    from rubberband.cloud.aws.preflight import preflight, sign_in
    from rubberband.cloud.aws.quota import quotas

    sign_in(session)  # without it there are no prices either, and what they are missing for would be told instead
    table = live_table(resources, home, session=session)
    from rubberband.cloud.aws.side_costs import with_side_facts

    table = with_side_facts(table, session, resources)
    for note in (*table.notes, *preflight(resources, offers(resources, table=table), session=session)):
        announce(note)
    room: dict[str, dict[Market, int]] = {}
    for found in quotas(session, types_of(resources), MARKETS):
        room.setdefault(found.instance_type, {})[found.market] = found.instances
    return CloudTerms(table=table, room=room)


def announce_device(experiment: Experiment, announce: Announce) -> None:
    """Say it if this machine has GPUs and the experiment's trials will not use them."""
    if not experiment.resources.kind.is_this_machine:
        return
    for note in dict.fromkeys(local_devices(rented)[1] for rented in offers(experiment.resources)):
        if note:
            announce(note)


def find_entrypoint(
    experiment: Experiment,
    search_path: Sequence[str | os.PathLike[str]] = (),
    table: Table | None = None,
    profiles: Profiles | None = None,
) -> Entrypoint | None:
    """The experiment's entry point, checked; None for a virtual run. `table` is that with live prices, if there is one.

    `profiles` is one for all types, or type -> profile; None: it is to be measured.

    Raises EntrypointError or InputError.
    """
    if experiment.resources.kind.is_simulated:
        return None
    if experiment.entrypoint is None:
        raise InputError("entrypoint: missing; name what to train, such as entrypoint: examples.digits:DigitsTrial")
    if isinstance(experiment.entrypoint, str):
        found = Entrypoint.parse(experiment.entrypoint, search_path=search_path or (os.getcwd(),))
    else:
        found = Entrypoint.from_object(experiment.entrypoint)
    found.check(_widest_gang(experiment, table, profiles), adaptive=experiment.batch.policy == "goodput")
    return found


def _widest_gang(experiment: Experiment, table: Table | None, profiles: Profiles | None) -> int:
    def widest(rented: Offer) -> int:
        profile = profiles.get(rented.instance_type) if isinstance(profiles, Mapping) else profiles
        known = None if profile is None else known_gpus(experiment, rented, profile)
        return experiment.max_gpus_per_trial(rented.gpus, known)

    return max(widest(rented) for rented in offers(experiment.resources, table=table))


def _keep(measured: MeasuredProfile, wanted: Path | None, folder: ExperimentFolder) -> Path:
    """Save a measured profile where it is wanted, or else (a read-only folder, say) in the home; where that was."""
    fallback = folder.home / "profiling" / f"{folder.name}.profile.json"
    if wanted is not None:
        with suppress(InputError):
            measured.save(wanted)
            return wanted
    measured.save(fallback)
    return fallback


def _market(job: Job, market: Market) -> str:
    """Where a stage's instances are bought, if there is more than one market to buy them on."""
    if job.offer.spot is None:
        return ""
    return " on spot" if market == "spot" else " on demand"


def _plan_line(job: Job) -> str:
    stages = " -> ".join(
        f"{chosen.instances} x {job.offer.gpus} GPU{_market(job, chosen.market)} "
        f"({stage.trials} trials x {chosen.gpus_per_trial} GPU)"
        for stage, chosen in zip(job.stages, job.plan.stages, strict=True)
    )
    predicted = f"{format_duration(job.prediction.jct_s)}, {format_usd(job.prediction.cost_usd)}"
    return f"plan: {stages}; predicted {predicted}"
