"""Profiles as users meet them: inline in an experiment file, or in the JSON file that `rubberband profile` writes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, ValidationError

from rubberband.chance import FIXED, Law
from rubberband.chance import Spread as Varying
from rubberband.delays import Delay, LognormalDelay, SampledDelay, delay_of
from rubberband.errors import InputError, ProfileMissingError
from rubberband.goodput_words import GoodputWords, goodput_document
from rubberband.profile import Profile
from rubberband.units import MAX_DURATION_S, shown
from rubberband.words import Duration, Gpus, Spread, Words, word_error

SCHEMA = "rubberband.profile/1"
MAX_BYTES = 1 << 20


def _gpu_count(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key


GpuKey = Annotated[Gpus, BeforeValidator(_gpu_count)]
"""A number of GPUs as a key: JSON has it as text."""
IterationSeconds = Annotated[float, Field(strict=True, gt=0, le=MAX_DURATION_S)]
Samples = Annotated[tuple[Duration, ...], Field(max_length=10_000)]
ScalingTable = Annotated[dict[GpuKey, IterationSeconds], Field(min_length=1)]


class InlineProfile(Words):
    """A profile that is written in the experiment file."""

    seconds_per_iteration: ScalingTable
    """GPUs -> mean seconds per iteration. Counts may be left out (between measured ones the throughput is interpolated,
    beyond the largest it stays as it is), and more GPUs may be slower."""
    trial_startup_s: Duration = Field(0.0, alias="trial_startup")
    """To gang-start a trial on warm workers; the mean."""
    trial_cv: Spread = 0.0
    """Coefficient of variation between trials: a trial's speed is its own, the same in every stage."""
    iteration_cv: Spread = 0.0
    """Coefficient of variation between the iterations of a trial."""
    startup_cv: Spread = 0.0
    """Coefficient of variation between the starts of trials (lognormal)."""
    mean_cv: Spread = 0.0
    """How unsure `seconds_per_iteration` itself is (lognormal): an error that all trials of a run share."""
    noise: Law = "lognormal"
    """The law of the first two."""
    provision_delay: Delay | None = None
    """From asking for an instance until it runs; `resources.provision_delay` counts where both are written."""
    init_delay: Delay | None = None
    """From a running instance until its workers are warm; `resources.init_delay` counts where both are written."""
    goodput: GoodputWords | None = None
    """Of trials that adapt their batch size; `seconds_per_iteration` is that of a fixed one all the same."""

    def to_profile(self) -> Profile:
        """The plain values that the planner reckons with."""
        provision_delay_s, provision_spread = _inline_delay(self.provision_delay)
        init_delay_s, init_spread = _inline_delay(self.init_delay)
        return Profile(
            seconds_per_iteration=dict(sorted(self.seconds_per_iteration.items())),
            trial_startup_s=self.trial_startup_s,
            trial_cv=self.trial_cv,
            iteration_cv=self.iteration_cv,
            startup_cv=self.startup_cv,
            mean_cv=self.mean_cv,
            law=self.noise,
            provision_delay_s=provision_delay_s,
            provision_spread=provision_spread,
            init_delay_s=init_delay_s,
            init_spread=init_spread,
            source="inline",
            goodput=None if self.goodput is None else self.goodput.to_plain(),
        )


class ProfileFile(Words):
    """What `rubberband profile` writes: the profile and where it comes from."""

    schema_version: Literal["rubberband.profile/1"] = Field(alias="schema")
    seconds_per_iteration: ScalingTable
    iteration_spread: dict[GpuKey, Spread] = Field(default_factory=dict)
    """GPUs -> coefficient of variation of one iteration's time with that many GPUs."""
    trial_startup_s: Duration = 0.0
    trial_cv: Spread = 0.0
    """Between trials: a trial's speed is its own, the same in every stage."""
    iteration_cv: Spread = 0.0
    startup_cv: Spread = 0.0
    """Between the starts of trials."""
    mean_cv: Spread = 0.0
    """How unsure `seconds_per_iteration` itself is: an error that all trials of a run share."""
    noise: Law = "lognormal"
    """The law of `trial_cv` and `iteration_cv`."""
    provision_delay_s: Duration | None = None
    provision_delay_cv: Spread = 0.0
    """Of the lognormal law, where there are no single measurements."""
    provision_delay_samples_s: Samples | None = None
    """The single measurements; where there are any, the mean is theirs."""
    init_delay_s: Duration | None = None
    init_delay_cv: Spread = 0.0
    init_delay_samples_s: Samples | None = None
    goodput: GoodputWords | None = None
    """Of trials that adapt their batch size; `seconds_per_iteration` is that of a fixed one all the same."""
    measured_at: str | None = None
    """When it was measured: ISO 8601 in UTC."""
    entrypoint: str | None = None
    instance_type: str | None = None
    measurement: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything else worth keeping of how it was measured; nothing reads it."""

    def to_profile(self) -> Profile:
        """The plain values that the planner reckons with."""
        provision_delay_s, provision_spread = _inline_delay(self.provision_delay)
        init_delay_s, init_spread = _inline_delay(self.init_delay)
        return Profile(
            seconds_per_iteration=dict(sorted(self.seconds_per_iteration.items())),
            trial_startup_s=self.trial_startup_s,
            trial_cv=self.trial_cv,
            iteration_cv=self.iteration_cv,
            startup_cv=self.startup_cv,
            mean_cv=self.mean_cv,
            law=self.noise,
            provision_delay_s=provision_delay_s,
            provision_spread=provision_spread,
            init_delay_s=init_delay_s,
            init_spread=init_spread,
            source="file",
            goodput=None if self.goodput is None else self.goodput.to_plain(),
        )

    @property
    def provision_delay(self) -> Delay | None:
        """The provisioning of an instance, in the words of an experiment."""
        return _written_delay(self.provision_delay_s, self.provision_delay_cv, self.provision_delay_samples_s)

    @property
    def init_delay(self) -> Delay | None:
        """The initialising of an instance, in the words of an experiment."""
        return _written_delay(self.init_delay_s, self.init_delay_cv, self.init_delay_samples_s)

    def to_inline(self) -> InlineProfile:
        """The profile as it is written in an experiment file."""
        return InlineProfile(
            seconds_per_iteration=self.seconds_per_iteration,
            trial_startup=self.trial_startup_s,
            trial_cv=self.trial_cv,
            iteration_cv=self.iteration_cv,
            startup_cv=self.startup_cv,
            mean_cv=self.mean_cv,
            noise=self.noise,
            provision_delay=self.provision_delay,
            init_delay=self.init_delay,
            goodput=self.goodput,
        )


def _written_delay(mean_s: float | None, cv: float, samples_s: Sequence[float] | None) -> Delay | None:
    if samples_s:
        return SampledDelay.model_validate({"samples": samples_s})
    return LognormalDelay(mean=mean_s, cv=cv) if mean_s is not None and cv > 0.0 else mean_s


def _inline_delay(delay: Delay | None) -> tuple[float | None, Varying]:
    return (None, FIXED) if delay is None else delay_of(delay)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file.

    Raises ProfileMissingError if there is none, and InputError (one line with the path) if it is not one.
    """
    return read_profile_file(path).to_profile()


def read_profile_file(path: str | os.PathLike[str]) -> ProfileFile:
    """Read a profile file with all that it says of its measurement; raises as `load_profile` does."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ProfileMissingError(f"there is no profile at {path}; measure one with `rubberband profile`") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{shown(str(path))} cannot be read as a profile ({reason}); give a file") from None
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no profile; measure it again")
    try:
        return ProfileFile.model_validate(json.loads(content.decode("utf-8-sig")))
    except ValidationError as error:
        raise InputError(f"{path}: {word_error(error)}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not a JSON file of schema {SCHEMA}; measure it again") from None


def save_profile(
    profile: Profile,
    path: str | os.PathLike[str],
    *,
    measured_at: datetime | None = None,
    entrypoint: str | None = None,
    instance_type: str | None = None,
    iteration_spread: Mapping[int, float] | None = None,
    measurement: Mapping[str, Any] | None = None,
) -> None:
    """Write a profile file whole or not at all (a temporary file, then a move). Raises InputError if it cannot."""
    document = {
        "schema": SCHEMA,
        "seconds_per_iteration": {str(gpus): s for gpus, s in sorted(profile.seconds_per_iteration.items())},
        "iteration_spread": {str(gpus): cv for gpus, cv in sorted((iteration_spread or {}).items())},
        "trial_startup_s": profile.trial_startup_s,
        "trial_cv": profile.trial_cv,
        "iteration_cv": profile.iteration_cv,
        "startup_cv": profile.startup_cv,
        "mean_cv": profile.mean_cv,
        "noise": profile.law,
        "provision_delay_s": profile.provision_delay_s,
        "provision_delay_cv": profile.provision_spread.cv or None,
        "provision_delay_samples_s": _samples(profile.provision_delay_s, profile.provision_spread),
        "init_delay_s": profile.init_delay_s,
        "init_delay_cv": profile.init_spread.cv or None,
        "init_delay_samples_s": _samples(profile.init_delay_s, profile.init_spread),
        "goodput": goodput_document(profile.goodput),
        "measured_at": measured_at.astimezone(UTC).isoformat(timespec="seconds") if measured_at else None,
        "entrypoint": entrypoint,
        "instance_type": instance_type,
        "measurement": dict(measurement or {}),
    }
    text = json.dumps({key: value for key, value in document.items() if value is not None}, indent=2, allow_nan=False)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _replace(Path(path), text + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); give another path") from None


def _samples(mean_s: float | None, spread: Varying) -> list[float] | None:
    return [factor * mean_s for factor in spread.samples] if mean_s and spread.samples else None


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
