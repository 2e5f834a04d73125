"""An experiment with the commits that its instances fetch, and the time that this takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rubberband.features import part
from rubberband.spec.experiment import Experiment


def with_fetch(experiment: Experiment, home: Path, *, is_required: bool, is_trusted: bool = True) -> Experiment:
    """Return the experiment with what it fetches; one that fetches nothing is returned as it is.

    `is_required`: where no size is known, nothing can be run. Not `is_trusted`: it is another user's. Raises InputError
    for what cannot be fetched.
    """
    if experiment.resources.fetch is None:
        return experiment
    is_required &= not experiment.resources.kind.is_simulated
    found: Experiment = part("fetch").planned(experiment, home, is_required=is_required, is_trusted=is_trusted)
    return found


def fetched(
    experiment: Experiment, home: Path, announce: Callable[[str], None], step: Callable[[str], None] = lambda line: None
) -> Experiment:
    """Return the experiment with what it fetches, after this machine has fetched it, if trials run here.

    `announce` gets a line on each result, `step` what is done now. Raises InputError for what cannot be fetched.
    """
    if experiment.resources.fetch is None:
        return experiment
    step("asking the hub for models and data")
    found = with_fetch(experiment, home, is_required=True)
    if not experiment.resources.kind.is_this_machine:
        return found
    announce(found.notes[-1])
    step("fetching models and data")
    part("fetch").fetch_here(found, home, announce)
    return experiment.model_copy(update={"resources": found.resources})  # no instance waits for it any more
