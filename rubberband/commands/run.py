"""`rubberband run`, `resume`, `submit` and `profile`: run an experiment here or at a service, or measure it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import (
    FileArgument,
    Name,
    NoCapOption,
    OnOption,
    OtherMachine,
    Overrides,
    PlanPolicy,
    PolicyOption,
    ServerOption,
    ServiceOption,
    YesOption,
    client_of,
    confirm_bill,
    open_client,
    option,
    say,
)
from rubberband.errors import InputError
from rubberband.units import format_usd, in_unit

if TYPE_CHECKING:
    from rubberband.executor.journal.folder import ExperimentFolder
    from rubberband.executor.journal.journal import Header
    from rubberband.executor.result.result import Result
    from rubberband.executor.run.driver import Observer
    from rubberband.spec.experiment import Experiment


NewOption = Annotated[
    bool, typer.Option("--new", help="If the name is taken, use the next free one: digits, digits-2, digits-3.")
]
CheckOption = Annotated[
    bool, typer.Option("--check/--no-check", help="Try one iteration of a trial that is new or has changed first.")
]
ProfileAgainOption = Annotated[
    bool, typer.Option("--profile-again", help="Measure the profile again, even if there is one.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Print the whole report at the end, with each wait by its causes.")
]
OnHeadOption = Annotated[
    OtherMachine | None,
    option(
        "--on",
        "head",
        "Run on the head on EC2, starting it if needed, and follow the run. It continues if this machine"
        " is switched off.",
    ),
]


def run(
    file: FileArgument,
    policy: PolicyOption = PlanPolicy.optimal,
    overrides: Overrides = None,
    new: NewOption = False,
    check: CheckOption = True,
    profile_again: ProfileAgainOption = False,
    no_cap: NoCapOption = False,
    yes: YesOption = False,
    verbose: VerboseOption = False,
    on: OnHeadOption = None,
) -> None:
    """Plan an experiment, run it, and report.

    The report shows the best configuration and the bill, planned against actual. A trial that is new or has changed is
    checked first. If the file has no profile, one is measured, and used again while trial, space and hardware are the
    same. Ctrl-C ends the run cleanly: instances are released, the best so far is reported, and `rubberband resume`
    continues the run.

    A run on EC2 needs a max_cost. On a terminal, the command shows the bill and asks before it rents instances. With
    `--on head`, Ctrl-C stops following, and the run continues; `status`, `logs`, `report`, `cancel` and others take
    `--on head` too.
    """
    from rubberband.views.live.steps import Steps

    with Steps() as step:
        step(f"reading {file}")
        from rubberband.executor.journal.folder import open_folder
        from rubberband.executor.journal.inbox import Inbox
        from rubberband.running.laps import process_began_s
        from rubberband.running.run import run_experiment, under_free_name
        from rubberband.running.starting import RunOptions
        from rubberband.spec.loading import default_profile_path, load_experiment, names_no_profile

        experiment = load_experiment(file, overrides or [])
        if on is not None:
            step("")
            if verbose:
                again = f"rubberband report {experiment.name} --verbose --on head"
                raise InputError(f"--verbose: a run on the head prints one screen; leave it out, and ask `{again}`")
            words = ["--policy", policy.value, *_flags(check, profile_again, no_cap)]
            raise typer.Exit(_run_on_head(file, experiment, overrides or [], words, new=new, no_cap=no_cap, yes=yes))
        folder = open_folder(experiment.name)
        if new:
            experiment, folder = under_free_name(experiment, folder, say)
        if not folder.exists:
            Inbox(folder.inbox).withdraw_cancels()
        options = RunOptions(
            search_path=(file.absolute().parent, Path.cwd()),
            profile_path=default_profile_path(file),
            policy=policy.value,
            check=check,
            is_beside=names_no_profile(file, overrides or []),
            profile_again=profile_again,
            no_cap=no_cap,
            confirm=lambda bill: confirm_bill(bill, "run", yes=yes),
            step=step,
            began_s=process_began_s(),
            announce=say,
            view=live_view,
        )
        result = run_experiment(experiment, folder, options)
    _conclude(result, verbose=verbose)


def _flags(check: bool, profile_again: bool, no_cap: bool) -> list[str]:
    flags = {"--no-check": not check, "--profile-again": profile_again, "--no-cap": no_cap}
    return [flag for flag, is_given in flags.items() if is_given]


def _run_on_head(
    file: Path, experiment: Experiment, overrides: Sequence[str], words: Sequence[str], **options: bool
) -> int:
    """Run on the head of the experiment's provider, and return the exit code. Raises InputError if that has none."""
    from rubberband.values.kinds import part_of

    provider = experiment.resources.provider
    if (head := part_of(provider, "head")) is None:
        raise InputError(f"resources.provider: {provider} needs no head; leave --on head out")
    return int(head.run_on_head(file, experiment, overrides, words, **options))


def resume(
    name: Name,
    server: ServerOption = None,
    no_cap: NoCapOption = False,
    yes: YesOption = False,
    address: Annotated[
        str | None, option("--address", "HOST:PORT", "With provider ray: the cluster's head, if it is elsewhere now.")
    ] = None,
    on: OnOption = None,
) -> None:
    """Resume an interrupted experiment.

    For an experiment that was cancelled, lost its driver or its checkpoint store, or found no instance. If it stopped
    at max_cost, raise that first (`rubberband extend`). Reported iterations are not trained again, unless their
    checkpoint is lost. A service resumes its experiments by itself. On a terminal, the command asks before it rents
    instances.
    """
    client = client_of(server)
    if client is not None:
        if address is not None:
            raise InputError("--address: a service resumes on its own cluster; leave it out")
        with client:
            found = client.resume(name)
        print(f"{name}: {found['state']} at {client.url}", file=sys.stderr)
        return
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.journal.inbox import Inbox
    from rubberband.executor.run import session

    folder = open_folder(name)
    if not folder.driven:
        require_rest(folder, no_cap=no_cap, yes=yes)
        Inbox(folder.inbox).withdraw_cancels()
    with session.cancel_on_signals() as cancelled:
        result = session.run(folder, view=live_view, cancelled=cancelled, address=address)
    _conclude(result)


def require_rest(folder: ExperimentFolder, *, no_cap: bool, yes: bool) -> None:
    """Raise InputError or InfeasibleError where the rest of an experiment may not be paid for, and ask for it."""
    from rubberband.executor.run.allowance import require_going_on
    from rubberband.executor.run.follower import JournalFollower, explaining
    from rubberband.planning.month_cap import require_money
    from rubberband.running.starting import bound_of
    from rubberband.values.kinds import kind_in

    if not folder.exists:
        return
    with explaining(folder), closing(JournalFollower(folder)) as follower:
        follower.refresh(live=False)
        if not follower.goes_on():
            return
        require_going_on(follower, folder.home, max_cost_usd=follower.max_cost_usd, no_cap=no_cap)
        words = follower.header.setup["experiment"]
        path, rented = words.get("resources", {}).get("pool"), kind_in(words).is_rented
        if path is None and not rented:
            return
        spent, whole = follower.summary(), follower.resumed()
        left_usd, left_s = whole.cost_usd - spent.cost_usd, whole.jct_s - spent.jct_s
        if path is not None:
            require_money(Path(path), left_usd, left_s, "the rest of it")
        if rented:
            spending = f"{format_usd(spent.cost_usd)} spent, about {format_usd(left_usd)} more"
            confirm_bill(f"{bound_of(follower.max_cost_usd, path)}, {spending}", "go on", yes=yes)


def live_view(header: Header, clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
    """Show the run on stderr: a live table on a terminal, plain lines elsewhere."""
    from rubberband.views.live.view import open_view

    is_terminal, is_rehearsal = sys.stderr.isatty(), header.kind.is_simulated
    return [stack.enter_context(open_view(header.job, clock, sys.stderr, is_terminal, is_rehearsal=is_rehearsal))]


def _conclude(result: Result, *, verbose: bool = False) -> None:
    from rubberband.views.report.text import print_report

    print_report(result, verbose=verbose)
    if result.outcome in ("cancelled", "failed", "budget"):
        from rubberband.states import ExperimentState, obstacle

        why = obstacle(ExperimentState(result.outcome), "resume", lambda fact: fact != "open" or result.resumable)
        remedy = f"`rubberband resume {result.name}` continues it"
        say(f"{result.name} cannot be resumed: {why}" if why else remedy)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def submit(
    file: FileArgument,
    policy: PolicyOption = PlanPolicy.optimal,
    overrides: Overrides = None,
    server: ServiceOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show its progress until it ends.")] = False,
) -> None:
    """Submit an experiment to a service.

    The service plans it and runs it.

    The service is --server, RUBBERBAND_SERVER, or the one on this machine; its token is RUBBERBAND_TOKEN. A deadline
    counts from now. The code that is trained must be installed at the service. Exit code 3: no plan is within the
    limits; nothing was started.
    """
    with open_client(server) as client:
        found = client.submit(file, overrides=overrides or [], policy=policy.value)
        name = found["name"]
        for line in found["notes"]:
            say(line)
        say(f"{name}: {found['state']} at {client.url}")
        if queue := found.get("queue"):
            from rubberband.views.formatting import local_times
            from rubberband.views.queueing import submitted_line

            say(local_times(f"{name}: {submitted_line(name, queue)}", time.time()))
        print(name)
        if watch:
            from rubberband.commands.experiment import watch_remote

            watch_remote(client, name)
        else:
            say(f"watch it with `rubberband status {name} --watch --server {client.url}`")


OutOption = Annotated[
    Path | None, option("--out", "OUT", "The file to write. [default: FILE with .profile.json as its ending]")
]
IterationsOption = Annotated[
    int, typer.Option("--iterations", min=1, help="Iterations to measure at each number of GPUs.")
]
TrialsOption = Annotated[
    int | None,
    option(
        "--trials",
        None,
        "Trials to measure at each number of GPUs, in turn if they do not fit side by side. With more, "
        "the spread between trials is known better. [default: as many as train side by side, or up to 16"
        " within seconds]",
        min=1,
    ),
]


def profile(
    file: FileArgument,
    out: OutOption = None,
    iterations: IterationsOption = 3,
    trials: TrialsOption = None,
    overrides: Overrides = None,
    no_cap: NoCapOption = False,
    yes: YesOption = False,
) -> None:
    """Measure the profile that planning needs.

    Runs trials for a few iterations at 1, 2, 4 and more GPUs, on its own instances. Measures their speed, its variation
    between trials and between iterations, their start-up, and the start times of instances. With batch.policy goodput,
    trials also measure batch sizes: the time of steps, the noise of gradients, and the useful number of GPUs.
    """
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.run.allowance import pledged, require_rate, require_runnable
    from rubberband.executor.run.session import cancel_on_signals
    from rubberband.executor.training.entrypoint import with_trial
    from rubberband.files import require_home
    from rubberband.installation import default_home
    from rubberband.planning.clusters import on_cluster
    from rubberband.planning.fetching import fetched
    from rubberband.planning.prices_and_quotas import cloud_prices_and_quotas
    from rubberband.running.profile import measure_profile
    from rubberband.running.starting import announce_device, bound_of, find_entrypoint
    from rubberband.spec.loading import default_profile_path, load_experiment

    search_path = (file.absolute().parent, Path.cwd())
    experiment = on_cluster(with_trial(load_experiment(file, overrides or []), search_path))
    experiment = fetched(experiment, default_home(), say)
    target = out or default_profile_path(file)
    folder = open_folder(experiment.name)
    require_runnable(experiment, folder.home, no_cap=no_cap)
    for note in require_home(folder.home):
        say(note)
    table = cloud_prices_and_quotas(experiment, folder.home, say).table
    require_rate(experiment, folder.home, table)
    entrypoint = find_entrypoint(experiment, search_path, table)
    announce_device(experiment, say)
    if experiment.resources.kind.is_rented:
        bound = bound_of(experiment.constraints.max_cost_usd, experiment.resources.pool)
        confirm_bill(f"{bound} for measuring", "measure", yes=yes)
    with cancel_on_signals() as cancelled, pledged(experiment, folder) as held:
        measured = measure_profile(
            experiment, entrypoint, folder, iterations=iterations, least_trials=trials, table=table, cancelled=cancelled
        )
        held.spent_usd = measured.cost_usd
    measured.save(target)
    measured.keep(folder.home)
    for line in measured.lines():
        print(in_unit(line, experiment.resources.unit))
    print(f"written to {target}", file=sys.stderr)
