"""Measured profiles that are used again, by their content: the trial, its space and batches, the hardware.

They are in `profiles` of the home. The content holds the source of the entry point and the versions of the packages
that it imports (`content_of`); data files are not looked at. An estimate imports this without
the measuring.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rubberband.cloud.catalogue import types_of
from rubberband.errors import InputError
from rubberband.executor.training.entrypoint import Entrypoint, content_of, digest
from rubberband.spec.experiment import Experiment
from rubberband.spec.profile_file import ProfileFile, load_profile, read_profile_file
from rubberband.units import format_duration
from rubberband.values.profile import Profile, wide_spread

Announce = Callable[[str], None]

SHARED_INSTANCES = 4
"""Instances on one machine share its cores, so up to this many are kept busy while measuring."""
AFRESH = "--profile-again measures it afresh"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileContent:
    """Digests of the things that a measured profile depends on."""

    trial: str
    """Digest of the trial on its hardware: source, packages, space, batches, instance types, machine."""
    key: str
    """Digest that counts the measured numbers of GPUs as well."""

    def words(self) -> dict[str, Any]:
        """Return it as a part of a profile file's `measurement`."""
        return {"trial": self.trial, "key": self.key}


def content_to_measure(experiment: Experiment, entrypoint: Entrypoint) -> ProfileContent | None:
    """Return the content of the profile that would be measured; None if the trial's source is not known."""
    content = content_of(entrypoint)
    if content is None:
        return None
    words = experiment.to_words()
    resources = words.get("resources", {})
    names = ("provider", "region", "catalogue", "gpus_per_instance", "market")
    hardware = {name: resources.get(name) for name in names} | {"types": list(types_of(experiment.resources))}
    if experiment.resources.slots is not None:
        hardware["slots"] = experiment.resources.slots
    if experiment.resources.trials_per_gpu > 1:
        hardware["trials_per_gpu"] = experiment.resources.trials_per_gpu
    if experiment.resources.kind.is_rented:
        hardware["aws"] = {name: resources.get("aws", {}).get(name) for name in ("image", "install", "setup")}
    elif experiment.resources.kind.is_borrowed:
        hardware["nodes"] = words["resources"].get("node_labels")
    else:
        from rubberband.cloud.local.gpus import find_gpus

        hardware["machine"] = [platform.node(), platform.machine(), os.cpu_count(), *find_gpus().ids]
    if experiment.resources.options:
        hardware["options"] = experiment.resources.options
    settings = [words.get("batch")]
    if experiment.resources.env:
        settings.append(experiment.resources.env)
    if experiment.training.mode == "async":
        settings.append(words["training"])
    trial = digest(str(entrypoint), content, words["search"]["space"], *settings, hardware)
    shares = experiment.resources.kind.is_this_machine
    together = None if not shares else min(experiment.resources.max_instances, SHARED_INSTANCES)
    return ProfileContent(trial=trial, key=digest(trial, resources.get("gpus_per_trial"), together))


def cache_path(home: Path, content: ProfileContent) -> Path:
    """Return the path of the cached profile, which may not exist."""
    return home / "profiles" / f"{content.key}.profile.json"


def cached_profile(home: Path, content: ProfileContent | None) -> tuple[Profile, str] | None:
    """Return the profile that was measured of the same content, and a line that says so; None without one."""
    if content is None:
        return None
    path = cache_path(home, content)
    try:
        found, profile = read_profile_file(path), load_profile(path)
    except InputError:  # none, or one that this version does not read
        return None
    line = f"profile: measured {_when(found)} for this trial, space and hardware, and used again; {_afresh(found)}"
    return profile, line


def beside(path: Path, content: ProfileContent | None) -> tuple[bool, str]:
    """Return whether the profile that lies beside an experiment file is still that of its trial, and a line on it.

    A profile without its content (written by hand, or by an earlier version) is used, without a line.
    """
    found = read_profile_file(path)
    was = found.measurement.get("content")
    if content is None or not isinstance(was, dict):
        return True, ""
    if was.get("trial") == content.trial:
        return (
            True,
            f"profile: {path.name}, measured {_when(found)} for this trial, space and hardware; {_afresh(found)}",
        )
    return False, (
        f"{path.name} was measured {_when(found)} for {_ANOTHER}, and is not used; `profile: {path.name}` in the file "
        "uses it all the same"
    )


def find_profiles(
    experiment: Experiment,
    entrypoint: Entrypoint | None,
    home: Path,
    found_at: Path | None,
    announce: Announce = lambda line: None,
    *,
    to_run: bool,
) -> Profile | dict[str, Profile] | None:
    """Return the profile that the experiment names, else a cached one of the same content; None without any.

    A run measures again what was found beside the file, at `found_at`, if the trial has changed since; an estimate uses
    it, and announces that. Raises ProfileMissingError if the named file is missing.
    """
    given = experiment.loaded_profiles()
    if entrypoint is None or (given is not None and found_at is None):
        return given
    content = content_to_measure(experiment, entrypoint)
    if given is not None and found_at is not None:
        is_same, line = beside(found_at, content)
        if line and to_run:
            announce(line)
        if is_same:
            return given
    if (cached := cached_profile(home, content)) is not None:
        profile, line = cached
        announce(line if to_run else line.removesuffix(AFRESH).rstrip("; "))
        return profile
    if to_run:
        return None
    if found_at is not None:
        measured = _when(read_profile_file(found_at))
        announce(f"{found_at.name} was measured {measured} for {_ANOTHER}; a run measures it again")
    return given


_ANOTHER = "another state of the trial, its space or its hardware"


def _afresh(found: ProfileFile) -> str:
    """Return how to measure it again, and whether that is worth it."""
    wide = wide_spread(found.iteration_spread)
    return f"{wide} {AFRESH}" if wide else AFRESH


def _when(found: ProfileFile) -> str:
    try:
        age_s = time.time() - datetime.fromisoformat(found.measured_at or "").timestamp()
    except ValueError:
        return "before"
    return f"{format_duration(max(1.0, age_s))} ago"
