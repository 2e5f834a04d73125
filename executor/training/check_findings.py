"""Order of the check of a trial, and its findings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.segment import Segment
from rubberband.values.command import text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """A trial to check."""

    entrypoint: Entrypoint
    segment: Segment
    """Its first iteration, on one worker; a trial of no more than one is not continued."""
    max_gpus: int
    gangs: tuple[int, ...] = (1,)
    """The numbers of GPUs that a plan may give a trial."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Parameter -> its extreme values or its options, of which a program's first iteration is tried."""
    values_s: float = 120.0
    """The longest time for other values."""
    extremes: tuple[Mapping[str, Any], ...] = ()
    """Configurations of extreme values, of which a program's first iteration is tried too."""
    forks: tuple[Mapping[str, Any], ...] = ()
    """Configurations with which a trial may continue from its checkpoint; each is tried."""
    booleans: tuple[str, ...] = ()
    """Parameters that are true or false, which the program may read as other words."""
    device_id: str = ""
    """The GPU in CUDA_VISIBLE_DEVICES; empty: the CPU."""
    only_memory: bool = False
    """Whether only an iteration is trained, for the memory that it takes."""
    is_timed: bool = False
    """Whether a few more iterations are trained to know how long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFault:
    """A fault of a trial."""

    line: str
    """The fault and the fix, in one line."""
    details: str = ""
    """Its trace-back, from the user's code on; empty if there is none."""
    is_final: bool = True
    """Whether another configuration would fail as well."""
    may_be_here: bool = False
    """Whether it may be only that this machine has no GPU, or too little memory."""


def read_alike(name: str, reader: str, style: str, better: str | None) -> str:
    """Return the line for a boolean whose two words, in this `style`, a `reader` takes for one, with the fix.

    `better`: a style that the reader distinguishes; None: it takes every text for true.
    """
    line = f"{name} is read alike for true and false: {reader}"
    if better is not None:
        return f"{line} distinguishes {better}; write booleans: {{style: {better}}} in entrypoint"
    return (
        f"{line} takes every text for true, as bool does; compare the text there (text == '{text_of(True, style)}'), "
        "or make it a switch, with booleans: {style: flag} in entrypoint"
    )


@dataclass(slots=True, kw_only=True)
class TrialCheck:
    """Findings about a trial."""

    kind: str = ""
    """TorchTrial, Trial, function or program."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint_bytes: int | None = None
    begun_bytes: int = 0
    """Resident memory of the trial's process before its set-up; 0 if its memory is that on a GPU."""
    peak_bytes: int | None = None
    """The most memory in its first iteration, on its GPU or resident; None: not measured, as of a program."""
    takes_parts: bool = False
    """Whether it goes on with fewer samples at once where it runs out of memory."""
    checkpoint_every: int | None = None
    """Iterations between the checkpoints of its class; None: a function chooses them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Step -> its seconds: import, set-up, iteration, save, restore; perhaps next, continue, fork, restart and gang.

    A program's start is in `set-up` if a second iteration (next) shows how long it takes, and else in `iteration`."""
    own: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Step -> its seconds less those in which another process had its CPU, and the seconds that CPUs computed."""
    first_extra_s: float | None = None
    """Seconds of a later start within its first iteration, and `cold_extra_s` of the first start: a program's or a
    distributed function's imports and data. None if it has no such part, or it is not known."""
    cold_extra_s: float = 0.0
    problems: list[TrialFault] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    tried: int = 0
    """Parameters and extreme configurations that were tried, `to_try` of which were due."""
    to_try: int = 0
    line: str = ""
    resumes: bool | None = None
    """Whether a second start goes on from the checkpoint; None: it is not known."""
    restart: str = ""
    """One line on what a second start did, such as `resumes exactly`; empty: there was none."""
    unsaved: str = ""
    """Why it has no checkpoint: the rest of a sentence about it; empty: it has one, or needs none."""
    is_once: bool = False
    """Whether the program reports once, at its end, so that an iteration is a whole training."""
    waits: str = ""
    """The event that the step waits for, with the last lines of the program's output; empty: it is not known."""
    step: str = "import"
    is_finished: bool = False
    """Whether every step was reached in the time."""


def brief(configuration: Mapping[str, Any]) -> str:
    """Return a configuration in one line, numbers with six digits."""
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in configuration.items()
    )


def difference(one: Any, other: Any, place: str, tolerance: float = 0.0) -> str | None:
    """Return the first place where plain data, arrays or tensors differ; objects of other kinds are not compared.

    Numbers may differ by the `tolerance`, relative to the largest element.
    """
    if type(one) is not type(other):
        return place
    if isinstance(one, (list, tuple)):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return place
        places = {key: f"{place}[{key!r}]" if place else str(key) for key in one}
        return next((found for key in one if (found := difference(one[key], other[key], places[key], tolerance))), None)
    if hasattr(one, "shape"):
        if one.shape != other.shape:
            return place
        same = bool(((one == other) | (one != one) & (other != other)).all())  # NaN is NaN
        if not same and tolerance and ("float" in str(one.dtype) or "complex" in str(one.dtype)):
            same = bool(abs(one - other).max() <= tolerance * abs(one).max())
    elif tolerance and isinstance(one, float):
        same = math.isclose(one, other, rel_tol=tolerance)
    else:
        same = not isinstance(one, (bool, int, float, str, bytes)) or repr(one) == repr(other)
    return None if same else place
