"""An experiment as it travels to the service: all in its words, with no file of this machine behind them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rubberband.errors import InputError, ProfileMissingError
from rubberband.experiment import Experiment, ProfilesByType
from rubberband.files import load_experiment
from rubberband.profile_file import ProfileFile, read_profile_file

Submittable = Experiment | Mapping[str, Any] | str | os.PathLike[str]
"""An experiment, its words, or the path of its file."""


def self_contained(experiment: Submittable, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The words of an experiment; a profile that is in a file is written out.

    `overrides` are for a file (`constraints.deadline=30m`). Raises InputError for what does not fit, and for what the
    service cannot be told: a catalogue of one's own, or code that has no name there.
    """
    found = _experiment(experiment, overrides)
    if found.resources.catalogue is not None:
        raise InputError(
            "resources.catalogue: the service has a catalogue of its own; leave it out, and write price_per_hour and "
            "gpus_per_instance instead"
        )
    words = found.to_words()
    if "<locals>" in str(words.get("entrypoint", "")) or str(words.get("entrypoint", "")).startswith("__main__:"):
        raise InputError(
            f"entrypoint: {words['entrypoint']} has no name that the service could import; put it in a module that its "
            "operator installs, and write module:attribute"
        )
    if isinstance(found.profile, str):
        words["profile"] = _inline(found.profile)
    elif isinstance(found.profile, ProfilesByType):
        for name, written in found.profile.by_instance_type.items():
            if isinstance(written, str):
                words["profile"]["by_instance_type"][name] = _inline(written)
    return words


def _experiment(experiment: Submittable, overrides: Sequence[str]) -> Experiment:
    if isinstance(experiment, str | os.PathLike):
        return load_experiment(experiment, overrides)
    if overrides:
        raise InputError("overrides are for the path of a file; change the words themselves")
    return experiment if isinstance(experiment, Experiment) else Experiment(**experiment)


def _read(path: str) -> ProfileFile:
    try:
        return read_profile_file(path)
    except ProfileMissingError as error:
        raise ProfileMissingError(f"profile: {error}") from None


def _inline(path: str) -> dict[str, Any]:
    """A profile file in the experiment's words."""
    return _read(path).to_inline().model_dump(mode="json", by_alias=True, exclude_none=True)
