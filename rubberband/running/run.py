"""From an experiment to its result, for `run` and `tune`: check, measure a profile if there is none, plan, run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, Unpack

from rubberband.errors import InputError, briefly
from rubberband.executor.journal.folder import ExperimentFolder, open_folder
from rubberband.executor.journal.journal import Header
from rubberband.executor.result.result import Result
from rubberband.executor.run.allowance import require_rate, require_runnable
from rubberband.executor.run.callbacks import Callback, check_callbacks
from rubberband.executor.run.driver import Observer
from rubberband.executor.run.early import clear
from rubberband.executor.run.follower import read
from rubberband.executor.run.session import cancel_on_signals, run
from rubberband.executor.training.entrypoint import with_trial
from rubberband.features import parts
from rubberband.files import require_home
from rubberband.installation import home_at
from rubberband.planning.clusters import on_cluster
from rubberband.planning.fetching import fetched
from rubberband.planning.prices_and_quotas import cloud_prices_and_quotas
from rubberband.running.check import named_entrypoint
from rubberband.running.estimating import experiment_of
from rubberband.running.laps import Laps
from rubberband.running.pace import OtherLoad
from rubberband.running.profile_cache import Announce
from rubberband.running.starting import RunOptions, Start, View, announce_device, find_entrypoint, is_here
from rubberband.running.warm_start import warm_started
from rubberband.spec.experiment import Experiment, entrypoint_words
from rubberband.units import shown

if TYPE_CHECKING:
    from rubberband.types import TuneDict


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
        >>> result.outcome, len(result.trials)
        ('done', 8)
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
    from rubberband.views.document import print_remark
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
    return lambda line: print_remark(line, sys.stdout if in_notebook else sys.stderr), view, steps


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


def run_experiment(experiment: Experiment, folder: ExperimentFolder, options: RunOptions | None = None) -> Result:
    """Plan an experiment (measuring its profile first if it has none) and run it to its end.

    A measured profile is kept for runs of the same content. Raises the errors of `tune`.
    """
    options = options or RunOptions()
    laps, load = Laps(options.began_s), OtherLoad()
    laps.lap("imports")
    with ExitStack() as starting:
        experiment = _settled(experiment, folder, options, starting)
        if experiment.resources.fetch is not None:
            experiment = fetched(experiment, folder.home, options.announce, options.step)
            laps.lap("fetch")
        resources = experiment.resources
        if resources.kind.is_elsewhere:
            options.step(f"asking provider {resources.provider} for prices and quotas")
        prices = cloud_prices_and_quotas(experiment, folder.home, options.announce)
        require_rate(experiment, folder.home, prices.table)
        laps.lap("prices and quotas" if resources.kind.is_elsewhere else "plan")
        entrypoint = None
        if is_here(experiment):  # it is imported once the rest has begun to start, by the check in a process of its own
            entrypoint = named_entrypoint(experiment, options.search_path)
        elif not resources.kind.is_simulated:
            options.step(f"importing {entrypoint_words(experiment.entrypoint)}")
            entrypoint = find_entrypoint(experiment, options.search_path, prices.table, experiment.loaded_profiles())
        announce_device(experiment, options.announce)
        laps.lap("plan" if is_here(experiment) else "import of the trial")
        with cancel_on_signals() as cancelled, ExitStack() as ending:
            start = Start(experiment, entrypoint, folder, options, prices, cancelled, laps)
            tried = start.tried(load, ending)
            start.create(tried)
            starting.close()  # from here the journal is followed
            options.step("")
            return run(folder, view=options.view, cancelled=cancelled, callbacks=options.callbacks, early=tried.early)


def _settled(experiment: Experiment, folder: ExperimentFolder, options: RunOptions, starting: ExitStack) -> Experiment:
    """Return the experiment with what this installation and home add to it. Raises what makes it impossible here."""
    for around in parts("start"):
        starting.enter_context(
            around(folder, experiment.notify or (), is_rehearsal=experiment.resources.kind.is_simulated)
        )
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
    return experiment
