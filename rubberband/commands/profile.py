"""`rubberband profile`: measure how fast an experiment's trials train, and how long things take to start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rubberband.commands.estimate import Overrides


def profile(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="Where to write it. [default: FILE's stem .profile.json beside it]"
        ),
    ] = None,
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="Iterations to measure at each number of GPUs.")
    ] = 3,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            min=1,
            help="Trials to measure at each number of GPUs, in turn where they do not fit side by side: what trials "
            "differ by is surer with more. [default: as many as train side by side, or up to 16 within seconds]",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Measure the profile that planning needs.

    Runs trials for a few iterations at 1, 2, 4 and more GPUs, on its own instances. Measures their speed, its variation
    between trials and between iterations, their start-up, and the start times of instances. With batch.policy goodput,
    trials also measure batch sizes: the time of steps, the noise of gradients, and the useful number of GPUs.
    """
    from rubberband.app.measure import measure_profile
    from rubberband.app.run import announce_device, cloud_terms, find_entrypoint
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.session import cancel_on_signals
    from rubberband.spec.loading import default_profile_path, load_experiment

    experiment = load_experiment(file, overrides or [])
    experiment.require_runnable()
    target = output or default_profile_path(file)
    folder = open_folder(experiment.name)
    table = cloud_terms(experiment, folder.home, _announce).table
    entrypoint = find_entrypoint(experiment, (file.absolute().parent, Path.cwd()), table)
    announce_device(experiment, _announce)
    with cancel_on_signals() as cancelled:
        measured = measure_profile(
            experiment,
            entrypoint,
            folder,
            iterations=iterations,
            least_trials=trials,
            table=table,
            cancelled=cancelled,
        )
    measured.save(target)
    for line in measured.lines():
        print(line)
    print(f"written to {target}", file=sys.stderr)


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
