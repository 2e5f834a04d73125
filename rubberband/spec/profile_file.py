"""Profiles: inline in an experiment file, or in the JSON file that `rubberband profile` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from rubberband.errors import InputError, ProfileMissingError
from rubberband.files import write_atomically
from rubberband.spec.fields import (
    Amount,
    Count,
    Delay,
    Duration,
    Gpus,
    LognormalDelay,
    SampledDelay,
    Spread,
    Tally,
    Words,
    delay_of,
    fault,
    word_error,
)
from rubberband.units import MAX_DURATION_S, counted, shown
from rubberband.values.adaptive import GoodputProfile
from rubberband.values.asynchronous import AsyncProfile
from rubberband.values.profile import FIXED, Law, Profile
from rubberband.values.profile import Spread as Varying

# The model of adaptive batches in the words of a profile: the `goodput` block, inline or in a profile file.


Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_DURATION_S)]
"""Plain seconds: those of a step are too short to be written otherwise."""


class ThroughputWords(Words):
    """The parameters of the time of an optimizer step (Pollux, eqs. 8-12)."""

    alpha_grad_s: Seconds
    """Fixed time of a pass through the model."""
    beta_grad_s: Seconds
    """Time of each sample of a pass."""
    alpha_local_s: Seconds = 0.0
    """Time to synchronise two GPUs of one instance."""
    beta_local_s: Seconds = 0.0
    """Time for each GPU of the instance beyond the second."""
    alpha_node_s: Seconds = 0.0
    """Time to synchronise two GPUs of several instances."""
    beta_node_s: Seconds = 0.0
    """Time for each GPU beyond the second."""
    gamma: Annotated[float, Field(strict=True, ge=1, le=10)] = 1.0
    """Overlap of computing and synchronising: 1 is none, 10 is almost complete."""

    @model_validator(mode="after")
    def _takes_time(self) -> ThroughputWords:
        if self.alpha_grad_s == 0 == self.beta_grad_s:
            raise fault("is 0 like beta_grad_s, so that a step takes no time; raise one of them", at="alpha_grad_s")
        return self


class LimitsWords(Words):
    """The batches that a trial can choose among."""

    initial: Count
    """Samples of the smallest batch."""
    max: Count
    """Samples of the largest one."""
    max_per_gpu: Count | None = None
    """Most samples that go through the model on one GPU at once; by default no limit is known."""
    accumulation: Annotated[bool, Field(strict=True)] = True
    """Whether gradients could be accumulated when it was measured; plans follow `batch.accumulation`."""

    @model_validator(mode="after")
    def _agrees(self) -> LimitsWords:
        if self.max < self.initial:
            raise fault(f"{self.max} is less than initial={self.initial}; raise it, or lower initial", at="max")
        return self


class PointWords(Words):
    """A measured optimizer step."""

    instances: Count
    """Instances that the trial's GPUs were on."""
    gpus: Gpus
    per_gpu: Count
    """Samples that went through the model on one GPU at once."""
    accumulation: Tally
    """Passes beyond the first."""
    step_s: Annotated[float, Field(strict=True, gt=0, le=MAX_DURATION_S)]


class GoodputWords(Words):
    """The model that adaptive batches are planned with; without it they are planned as fixed ones."""

    throughput: ThroughputWords
    """Duration of an optimizer step."""
    noise_scale: Annotated[float, Field(strict=True, gt=0, le=1e15)]
    """The gradient noise scale, in samples: up to about this batch size a sample teaches nearly as much."""
    samples_per_iteration: Annotated[float, Field(strict=True, gt=0, le=1e15)]
    """Training samples of an iteration at the initial batch size."""
    limits: LimitsWords
    """The batches to choose among; the experiment's own `batch` takes precedence."""
    overhead_s: Seconds = 0.0
    """Time of an iteration beside its optimizer steps: evaluation, checkpoint."""
    points: Annotated[tuple[PointWords, ...], Field(max_length=10_000)] = ()
    """Measurements that the throughput was fitted to; empty where it was written by hand."""
    fit_error: Amount = 0.0
    """Mean relative error of the fit over the points."""

    def to_plain(self) -> GoodputProfile:
        """Return the plain values that the planner uses."""
        return TypeAdapter(GoodputProfile).validate_python(self.model_dump())


# Asynchronous training in the words of a profile: the `asynchronous` block, inline or in a profile file.


class AsyncTimesWords(Words):
    """Mean seconds of one update of a worker that trains alone, by the place where they pass."""

    compute_s: Seconds
    """To compute a gradient."""
    up_s: Seconds
    """To send the gradient to the servers."""
    server_s: Seconds
    """To apply it: the longest of the servers."""
    down_s: Seconds
    """To fetch the parameters."""

    @model_validator(mode="after")
    def _takes_time(self) -> AsyncTimesWords:
        if not any((self.compute_s, self.up_s, self.server_s, self.down_s)):
            raise fault("is 0 like the other times, so that an update takes no time; raise one of them", at="compute_s")
        return self


class AsyncWords(Words):
    """The queueing model that asynchronous training is planned with."""

    times: AsyncTimesWords
    """The times of one worker, measured with the servers below."""
    updates_per_iteration: Annotated[float, Field(strict=True, gt=0, le=1e15)]
    """Updates of an iteration, by all workers together."""
    overhead_s: Seconds = 0.0
    """Time that one worker spends on an iteration beside its updates: evaluation, checkpoint."""
    servers: Count = 1
    """Parameter servers."""
    largest_shard: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Share of the model's bytes on the server that holds most; by default they are split evenly."""
    blend: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    """Place of the throughput in its band: 0 is the low end, 1 the high end. Measured gangs of two or more workers
    count instead where they show it."""

    @model_validator(mode="after")
    def _holds_the_model(self) -> AsyncWords:
        if self.largest_shard is not None and self.largest_shard * self.servers < 1.0 - 1e-9:
            raise fault(
                f"{self.largest_shard:g} of the bytes on each of {self.servers} servers is less than the model; raise "
                f"it to at least {1.0 / self.servers:g}",
                at="largest_shard",
            )
        return self

    def to_plain(self) -> AsyncProfile:
        """Return the plain values that the planner uses."""
        return TypeAdapter(AsyncProfile).validate_python(self.model_dump())


SCHEMA = "rubberband.profile/1"
MAX_BYTES = 1 << 20


def _gpu_count(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key


GpuKey = Annotated[Gpus, BeforeValidator(_gpu_count)]
"""A number of GPUs as a key: JSON has it as text."""
IterationSeconds = Annotated[float, Field(strict=True, gt=0, le=MAX_DURATION_S)]
Samples = Annotated[tuple[Duration, ...], Field(max_length=10_000)]
ScalingTable = Annotated[dict[GpuKey, IterationSeconds], Field(min_length=1)]


VARIATIONS = ("trial_cv", "iteration_cv", "startup_cv", "mean_cv")
"""Coefficients of variation, by the same names in files and in a Profile."""


class ScalingWords(Words):
    """The part of a profile that is written alike in an experiment file and in a profile file."""

    seconds_per_iteration: ScalingTable
    """GPUs -> mean seconds per iteration. Counts may be left out (between measured ones the throughput is interpolated,
    beyond the largest it stays as it is), and more GPUs may be slower."""
    resumes: Annotated[bool, Field(strict=True)] = True
    """Whether a trial goes on from its checkpoint. With false, as of a program that saves none, each start of a trial
    is planned to train all earlier iterations again."""
    trial_cv: Spread = 0.0
    """Coefficient of variation between trials: a trial's speed is its own, the same in every stage."""
    iteration_cv: Spread = 0.0
    """Coefficient of variation between the iterations of a trial."""
    startup_cv: Spread = 0.0
    """Coefficient of variation between the starts of trials (lognormal)."""
    mean_cv: Spread = 0.0
    """Uncertainty of `seconds_per_iteration` itself (lognormal): an error that all trials of a run share."""
    noise: Law = "lognormal"
    """The law of `trial_cv` and `iteration_cv`."""
    end_chance: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    """Probability that a trial ends by itself after an iteration. Plans and limits take each trial to train to its end;
    expected times and costs count with it, and so does a rehearsal on the virtual clock."""
    goodput: GoodputWords | None = None
    """For trials that adapt their batch size; `seconds_per_iteration` is still that of a fixed one."""
    asynchronous: AsyncWords | None = None
    """For trials that train asynchronously: plans with gangs that were not measured follow from it."""

    @model_validator(mode="after")
    def _has_time_for_updates(self) -> ScalingWords:
        overhead_s = 0.0 if self.asynchronous is None else self.asynchronous.overhead_s
        for gpus, time_s in self.seconds_per_iteration.items():
            if overhead_s / gpus >= time_s:
                raise fault(
                    f"{overhead_s:g} leaves no time for updates: with {counted(gpus, 'GPU')} an iteration takes "
                    f"{time_s:g} s; lower it",
                    at=("asynchronous", "overhead_s"),
                )
        return self


class InlineProfile(ScalingWords):
    """A profile that is written in the experiment file."""

    trial_startup_s: Duration = Field(0.0, alias="trial_startup")
    """To gang-start a trial on warm workers; the mean."""
    checkpoint_load_s: Duration = Field(0.0, alias="checkpoint_load")
    """Time beyond `trial_startup` in which one machine loads a checkpoint. The machines of a gang share it: each loads
    its part of a sharded model."""
    first_iteration_extra_s: Duration = Field(0.0, alias="first_iteration_extra")
    """The part of `trial_startup` that passes within a first iteration: imports and data of a program or function."""
    cold_iteration_extra_s: Duration = Field(0.0, alias="cold_iteration_extra")
    """The same on a fresh worker."""
    provision_delay: Delay | None = None
    """From asking for an instance until it runs; `resources.provision_delay` counts where both are written."""
    init_delay: Delay | None = None
    """From a running instance until its workers are warm; `resources.init_delay` counts where both are written."""

    def to_profile(self) -> Profile:
        """Return the plain values that the planner uses."""
        provision_delay_s, provision_spread = _inline_delay(self.provision_delay)
        init_delay_s, init_spread = _inline_delay(self.init_delay)
        return Profile(
            seconds_per_iteration=dict(sorted(self.seconds_per_iteration.items())),
            resumes=self.resumes,
            trial_startup_s=self.trial_startup_s,
            checkpoint_load_s=self.checkpoint_load_s,
            first_iteration_extra_s=self.first_iteration_extra_s,
            cold_iteration_extra_s=self.cold_iteration_extra_s,
            **{name: getattr(self, name) for name in VARIATIONS},
            law=self.noise,
            end_chance=self.end_chance,
            provision_delay_s=provision_delay_s,
            provision_spread=provision_spread,
            init_delay_s=init_delay_s,
            init_spread=init_spread,
            source="inline",
            goodput=None if self.goodput is None else self.goodput.to_plain(),
            asynchronous=None if self.asynchronous is None else self.asynchronous.to_plain(),
        )


_EXTRAS = ("checkpoint_load_s", "first_iteration_extra_s", "cold_iteration_extra_s", "cold_start_extra_s")


class ProfileFile(ScalingWords):
    """The file that `rubberband profile` writes: the profile and how it was measured."""

    schema_version: Literal["rubberband.profile/1"] = Field(alias="schema")
    first_iteration_extra_s: Duration = 0.0
    """The part of the start-up that passes within a first iteration."""
    cold_iteration_extra_s: Duration = 0.0
    """The same on a fresh worker."""
    cold_start_extra_s: Duration = 0.0
    """The part of `init_delay_s` that a first start on a fresh worker takes beyond the start-up."""
    iteration_spread: dict[GpuKey, Spread] = Field(default_factory=dict)
    """GPUs -> coefficient of variation of one iteration's time with that many GPUs."""
    trial_startup_s: Duration = 0.0
    checkpoint_load_s: Duration = 0.0
    """The part of a start in which one machine loads a checkpoint, beyond the start-up."""
    provision_delay_s: Duration | None = None
    provision_delay_cv: Spread = 0.0
    """For the lognormal law, if there are no single measurements."""
    provision_delay_samples_s: Samples | None = None
    """The single measurements; where there are any, the mean is theirs."""
    init_delay_s: Duration | None = None
    init_delay_cv: Spread = 0.0
    init_delay_samples_s: Samples | None = None
    measured_at: str | None = None
    """Time of the measurement: ISO 8601 in UTC."""
    entrypoint: str | None = None
    instance_type: str | None = None
    measurement: dict[str, JsonValue] = Field(default_factory=dict)
    """Details of the measurement; nothing reads them."""

    def to_profile(self) -> Profile:
        """Return the plain values that the planner uses."""
        return replace(self.to_inline().to_profile(), cold_start_extra_s=self.cold_start_extra_s, source="file")

    def to_inline(self) -> InlineProfile:
        """Return the profile as it is written in an experiment file."""
        return InlineProfile(
            **{name: getattr(self, name) for name in ScalingWords.model_fields},
            trial_startup=self.trial_startup_s,
            checkpoint_load=self.checkpoint_load_s,
            first_iteration_extra=self.first_iteration_extra_s,
            cold_iteration_extra=self.cold_iteration_extra_s,
            provision_delay=_written_delay(
                self.provision_delay_s, self.provision_delay_cv, self.provision_delay_samples_s
            ),
            init_delay=_written_delay(self.init_delay_s, self.init_delay_cv, self.init_delay_samples_s),
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
        "resumes": None if profile.resumes else False,
        "trial_startup_s": profile.trial_startup_s,
        **{name: getattr(profile, name) or None for name in _EXTRAS},
        **{name: getattr(profile, name) for name in VARIATIONS},
        "noise": profile.law,
        "end_chance": profile.end_chance or None,
        "provision_delay_s": profile.provision_delay_s,
        "provision_delay_cv": profile.provision_spread.cv or None,
        "provision_delay_samples_s": _samples(profile.provision_delay_s, profile.provision_spread),
        "init_delay_s": profile.init_delay_s,
        "init_delay_cv": profile.init_spread.cv or None,
        "init_delay_samples_s": _samples(profile.init_delay_s, profile.init_spread),
        "goodput": profile.goodput and asdict(profile.goodput),
        "asynchronous": profile.asynchronous and asdict(profile.asynchronous),
        "measured_at": measured_at.astimezone(UTC).isoformat(timespec="seconds") if measured_at else None,
        "entrypoint": entrypoint,
        "instance_type": instance_type,
        "measurement": dict(measurement or {}),
    }
    text = json.dumps({key: value for key, value in document.items() if value is not None}, indent=2, allow_nan=False)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), f"{text}\n".encode(), durable=False, mode=0o666)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); give another path") from None


def _samples(mean_s: float | None, spread: Varying) -> list[float] | None:
    return [factor * mean_s for factor in spread.samples] if mean_s and spread.samples else None
