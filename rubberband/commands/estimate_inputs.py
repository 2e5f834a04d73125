"""What `rubberband estimate` reads besides the experiment file: its profile, and a plan of the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rubberband.errors import InputError, ProfileMissingError
from rubberband.experiment import Experiment
from rubberband.plan import Plan
from rubberband.planner.plain import plan_from_json
from rubberband.profile import Profile

MAX_BYTES = 64 << 20
"""Largest JSON file that is read."""


def profiles_of(experiment: Experiment, file: Path) -> Profile | dict[str, Profile]:
    """The experiment's profile, or instance type -> profile. Raises ProfileMissingError with the remedy."""
    remedy = f"measure one with `rubberband profile {file}`, or write profile: {{seconds_per_iteration: {{1: 60}}}}"
    try:
        profiles = experiment.loaded_profiles()
    except ProfileMissingError as error:
        raise ProfileMissingError(f"{str(error).partition(';')[0]}; {remedy}") from None
    if profiles is None:
        raise ProfileMissingError(f"{file} has no profile; {remedy}")
    return profiles


def read_plan(path: Path) -> Plan:
    """The plan that a user wrote. Raises InputError if the file holds none."""
    document = read_json(path, "a plan", 'write {"stages": [{"instances": 4, "gpus_per_trial": 1}]}')
    try:
        return plan_from_json(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_json(path: Path, what: str, remedy: str) -> Any:
    """What a JSON file holds. Raises InputError, with the remedy, if it cannot be read or is none."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read as {what} ({error.strerror}); give a readable file") from None
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB and cannot be {what}; {remedy}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not a JSON file; {remedy}") from None
