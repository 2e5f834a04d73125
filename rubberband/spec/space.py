"""The search space: Ray Tune's domains, and the configurations drawn from them.

The constructors bear Ray Tune's names and positional arguments (`uniform(0, 1)`, `choice(["a", "b"])`); a bare value is
a constant. Sampling is a pure function of (seed, parameter's name, trial): a trial's configuration depends neither on
the order of the parameters nor on the number of trials, and is the same with every version of Python.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from statistics import NormalDist
from typing import Any, ClassVar, Literal, Self

from rubberband.errors import InputError
from rubberband.units import nearest, shown

# The kinds of parameter that a search space may have: plain values that turn a uniform number into a parameter.
#
# Every domain's `draw(u)` is the inverse of its distribution function, so that one number in (0, 1) decides the
# value. Arguments are checked where a domain is made; all errors are InputError.


_LARGEST_INTEGER = 2**53
_DEEPEST_CONSTANT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A parameter that differs from trial to trial."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    @property
    def kind(self) -> str:
        """Its `type` in an experiment file."""
        return str(type(self).__dataclass_fields__["type"].default)

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> Self:
        """Make one of the arguments that an experiment file gives (`type` left out); InputError if they do not fit."""
        arguments = {field.name: field.default for field in fields(cls) if field.name != "type"}
        kind = cls.__dataclass_fields__["type"].default
        for name in words:
            if name not in arguments:
                raise InputError(f"unknown key {shown(name)} of a {kind}; {nearest(str(name), arguments)}")
        missing = [name for name, default in arguments.items() if default is MISSING and name not in words]
        if missing:
            raise InputError(f"a {kind} needs {' and '.join(missing)}; add {'them' if missing[1:] else 'it'}")
        return cls(**words)

    def to_words(self) -> dict[str, Any]:
        """Its arguments as an experiment file writes them, `type` first."""
        words = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "type"}
        return {"type": self.kind, **{name: list(v) if isinstance(v, tuple) else v for name, v in words.items()}}

    def draw(self, u: float) -> Any:
        """The value at `u` in (0, 1) of the distribution."""
        raise AssertionError(f"{self.kind} is enumerated, not drawn")

    def _check_bounds(self, lower: float, upper: float, *, whole: bool = False, inclusive: bool = False) -> None:
        for name, value in (("lower", lower), ("upper", upper)):
            _check_number(self.kind, name, value, whole=whole)
        if not (lower <= upper if inclusive else lower < upper):
            raise InputError(f"{self.kind}: lower={lower} must be less than upper={upper}; swap or widen them")

    def _check_positive(self, name: str, value: float, *, whole: bool = False) -> None:
        _check_number(self.kind, name, value, whole=whole)
        if value <= 0:
            raise InputError(f"{self.kind}: {name}={value} must be more than 0; raise it")

    def _check_quantum(self, lower: float, upper: float, q: float, *, whole: bool = False) -> None:
        self._check_positive("q", q, whole=whole)
        if not math.isfinite(lower / q) or not math.isfinite(upper / q):
            raise InputError(f"{self.kind}: q={q} is too small for its bounds; raise it")
        if math.ceil(lower / q - 1e-9) > math.floor(upper / q + 1e-9):
            raise InputError(f"{self.kind}: no multiple of q={q} lies from {lower} to {upper}; lower q or widen them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Domain):
    """A float between `lower` and `upper`, uniformly."""

    type: Literal["uniform"] = "uniform"
    lower: float
    upper: float

    def __post_init__(self) -> None:
        self._check_bounds(self.lower, self.upper)

    def draw(self, u: float) -> float:
        """The value at `u`."""
        return _between(self.lower, self.upper, u)


@dataclass(frozen=True, slots=True, kw_only=True)
class QUniform(Domain):
    """A multiple of `q` from `lower` to `upper`, uniformly."""

    type: Literal["quniform"] = "quniform"
    lower: float
    upper: float
    q: float

    def __post_init__(self) -> None:
        self._check_bounds(self.lower, self.upper)
        self._check_quantum(self.lower, self.upper, self.q)

    def draw(self, u: float) -> float:
        """The value at `u`."""
        return _multiple(_between(self.lower, self.upper, u), self.q, self.lower, self.upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogUniform(Domain):
    """A float between `lower` and `upper`, uniformly in its logarithm; `base` is Ray Tune's and changes nothing."""

    type: Literal["loguniform"] = "loguniform"
    lower: float
    upper: float
    base: float = 10

    def __post_init__(self) -> None:
        self._check_positive("lower", self.lower)
        self._check_bounds(self.lower, self.upper)

    def draw(self, u: float) -> float:
        """The value at `u`."""
        return _log_between(self.lower, self.upper, u)


@dataclass(frozen=True, slots=True, kw_only=True)
class QLogUniform(Domain):
    """A multiple of `q` from `lower` to `upper`, uniformly in its logarithm; `base` changes nothing."""

    type: Literal["qloguniform"] = "qloguniform"
    lower: float
    upper: float
    q: float
    base: float = 10

    def __post_init__(self) -> None:
        self._check_positive("lower", self.lower)
        self._check_bounds(self.lower, self.upper)
        self._check_quantum(self.lower, self.upper, self.q)

    def draw(self, u: float) -> float:
        """The value at `u`."""
        return _multiple(_log_between(self.lower, self.upper, u), self.q, self.lower, self.upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class Randn(Domain):
    """A normally distributed float."""

    type: Literal["randn"] = "randn"
    mean: float = 0.0
    sd: float = 1.0

    def __post_init__(self) -> None:
        _check_number(self.kind, "mean", self.mean)
        self._check_positive("sd", self.sd)

    def draw(self, u: float) -> float:
        """The value at `u`."""
        return NormalDist(self.mean, self.sd).inv_cdf(u)


@dataclass(frozen=True, slots=True, kw_only=True)
class QRandn(Domain):
    """A normally distributed float, rounded to a multiple of `q`."""

    type: Literal["qrandn"] = "qrandn"
    mean: float
    sd: float
    q: float

    def __post_init__(self) -> None:
        _check_number(self.kind, "mean", self.mean)
        self._check_positive("sd", self.sd)
        reach = 10 * self.sd
        self._check_quantum(self.mean - reach, self.mean + reach, self.q)

    def draw(self, u: float) -> float:
        """The value at `u`."""
        return _multiple(NormalDist(self.mean, self.sd).inv_cdf(u), self.q, -math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Randint(Domain):
    """A whole number from `lower` to `upper - 1`, uniformly."""

    type: Literal["randint"] = "randint"
    lower: int
    upper: int

    def __post_init__(self) -> None:
        self._check_bounds(self.lower, self.upper, whole=True)

    def draw(self, u: float) -> int:
        """The value at `u`."""
        return min(self.lower + math.floor(u * (self.upper - self.lower)), self.upper - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRandint(Domain):
    """A whole number from `lower` to `upper - 1`, uniformly in its logarithm; `base` changes nothing."""

    type: Literal["lograndint"] = "lograndint"
    lower: int
    upper: int
    base: float = 10

    def __post_init__(self) -> None:
        self._check_positive("lower", self.lower, whole=True)
        self._check_bounds(self.lower, self.upper, whole=True)

    def draw(self, u: float) -> int:
        """The value at `u`."""
        return max(self.lower, min(math.floor(_log_between(self.lower, self.upper, u)), self.upper - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class QRandint(Domain):
    """A multiple of `q` from `lower` to `upper` (included), uniformly."""

    type: Literal["qrandint"] = "qrandint"
    lower: int
    upper: int
    q: int = 1

    def __post_init__(self) -> None:
        self._check_bounds(self.lower, self.upper, whole=True, inclusive=True)
        self._check_quantum(self.lower, self.upper, self.q, whole=True)

    def draw(self, u: float) -> int:
        """The value at `u`."""
        first, last = -(-self.lower // self.q), self.upper // self.q
        return self.q * min(first + math.floor(u * (last - first + 1)), last)


@dataclass(frozen=True, slots=True, kw_only=True)
class QLogRandint(Domain):
    """A multiple of `q` from `lower` to `upper` (included), uniformly in its logarithm; `base` changes nothing."""

    type: Literal["qlograndint"] = "qlograndint"
    lower: int
    upper: int
    q: int
    base: float = 10

    def __post_init__(self) -> None:
        self._check_positive("lower", self.lower, whole=True)
        self._check_bounds(self.lower, self.upper, whole=True, inclusive=True)
        self._check_quantum(self.lower, self.upper, self.q, whole=True)

    def draw(self, u: float) -> int:
        """The value at `u`."""
        first, last = -(-self.lower // self.q), self.upper // self.q
        nearest_count = round(_log_between(self.lower, self.upper, u) / self.q)
        return self.q * max(first, min(nearest_count, last))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Domain):
    """One of `values`, each as likely as the next."""

    type: Literal["choice"] = "choice"
    values: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _plain_values(self.kind, self.values))

    def draw(self, u: float) -> Any:
        """The value at `u`."""
        return self.values[min(math.floor(u * len(self.values)), len(self.values) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Domain):
    """Every one of `values`, under the grid sampler."""

    type: Literal["grid"] = "grid"
    values: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _plain_values(self.kind, self.values))


DOMAINS: dict[str, type[Domain]] = {
    str(domain.__dataclass_fields__["type"].default): domain
    for domain in (
        Uniform,
        QUniform,
        LogUniform,
        QLogUniform,
        Randn,
        QRandn,
        Randint,
        LogRandint,
        QRandint,
        QLogRandint,
        Choice,
        Grid,
    )
}
"""Every kind of domain under its `type` in an experiment file."""


def plain(value: Any, *, depth: int = 0) -> Any:
    """A constant as JSON holds it (a tuple becomes a list). Raises InputError if JSON cannot hold it."""
    if depth > _DEEPEST_CONSTANT:
        raise InputError(f"a constant is nested more than {_DEEPEST_CONSTANT} deep; flatten it")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{value} is not a finite number; write one that is")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item, depth=depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, depth=depth + 1) for key, item in value.items()}
    raise InputError(f"{shown(value)} is not a plain value; use numbers, strings, true, false, null, or lists of them")


def _plain_values(kind: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"{kind}: values={shown(values)} is not a list of at least one value; write [a, b]")
    return tuple(plain(value) for value in values)


def _check_number(kind: str, name: str, value: Any, *, whole: bool = False) -> None:
    allowed = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise InputError(f"{kind}: {name}={shown(value)} is not a {'whole ' if whole else ''}number; write one")
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise InputError(f"{kind}: {name}={shown(value)} is beyond 2**53; scale the parameter")
    if not math.isfinite(value):
        raise InputError(f"{kind}: {name}={value} is not finite; write a finite number")


def _between(lower: float, upper: float, u: float) -> float:
    return min(max(lower * (1.0 - u) + upper * u, lower), upper) + 0.0


def _log_between(lower: float, upper: float, u: float) -> float:
    return min(max(math.exp(_between(math.log(lower), math.log(upper), u)), lower), upper) + 0.0


def _multiple(value: float, q: float, lower: float, upper: float) -> float:
    """The multiple of `q` nearest to `value` within the bounds, as the decimal number that people mean by it."""
    count = round(value / q)
    if math.isfinite(lower):
        count = max(math.ceil(lower / q - 1e-9), min(count, math.floor(upper / q + 1e-9)))
    return float(count * Decimal(repr(q)))


SamplerType = Literal["random", "grid"]


def uniform(lower: float, upper: float) -> Uniform:
    """A float between `lower` and `upper`, uniformly."""
    return Uniform(lower=lower, upper=upper)


def quniform(lower: float, upper: float, q: float) -> QUniform:
    """A multiple of `q` from `lower` to `upper`, uniformly."""
    return QUniform(lower=lower, upper=upper, q=q)


def loguniform(lower: float, upper: float, base: float = 10) -> LogUniform:
    """A float between `lower` and `upper`, uniformly in its logarithm (of any base: `base` changes nothing)."""
    return LogUniform(lower=lower, upper=upper, base=base)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> QLogUniform:
    """A multiple of `q` from `lower` to `upper`, uniformly in its logarithm."""
    return QLogUniform(lower=lower, upper=upper, q=q, base=base)


def randn(mean: float = 0.0, sd: float = 1.0) -> Randn:
    """A normally distributed float."""
    return Randn(mean=mean, sd=sd)


def qrandn(mean: float, sd: float, q: float) -> QRandn:
    """A normally distributed float, rounded to a multiple of `q`."""
    return QRandn(mean=mean, sd=sd, q=q)


def randint(lower: int, upper: int) -> Randint:
    """A whole number from `lower` to `upper - 1`, uniformly."""
    return Randint(lower=lower, upper=upper)


def lograndint(lower: int, upper: int, base: float = 10) -> LogRandint:
    """A whole number from `lower` to `upper - 1`, uniformly in its logarithm."""
    return LogRandint(lower=lower, upper=upper, base=base)


def qrandint(lower: int, upper: int, q: int = 1) -> QRandint:
    """A multiple of `q` from `lower` to `upper` (included), uniformly."""
    return QRandint(lower=lower, upper=upper, q=q)


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> QLogRandint:
    """A multiple of `q` from `lower` to `upper` (included), uniformly in its logarithm."""
    return QLogRandint(lower=lower, upper=upper, q=q, base=base)


def choice(categories: Sequence[Any]) -> Choice:
    """One of `categories`, each as likely as the next."""
    return Choice(values=categories)


def grid_search(values: Sequence[Any]) -> Grid:
    """Every one of `values`, under the grid sampler."""
    return Grid(values=values)


def parse(value: object) -> Any:
    """A parameter of the search space: a domain, a mapping with a `type`, or a constant.

    Raises InputError for an unknown type, missing, unknown or wrong arguments, and constants that JSON does not hold.
    """
    if isinstance(value, tuple(DOMAINS.values())):
        return value
    if isinstance(value, str) and (line := _domain_meant(value)):
        raise InputError(
            f"{shown(value)} is a text, not a domain; write {line}, or {{type: choice, values: [{shown(value)}]}} if "
            "the text is meant"
        )
    if not isinstance(value, Mapping):
        return plain(value)
    words = dict(value)
    kind = words.pop("type", None)
    domain_type = DOMAINS.get(kind) if isinstance(kind, str) else None
    if domain_type is None:
        raise InputError(
            f"type {shown(kind)} is not a kind of parameter; {nearest(str(kind), DOMAINS)}"
            if kind is not None
            else f"{shown(value)} has no type; {_type_meant(words)}"
        )
    return domain_type.from_words(words)


_NUMBER = r"[-+]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?"
_RANGE = re.compile(rf"({_NUMBER}) ?(\.\.\.?|\u2026|\u2013|~|-|to) ?({_NUMBER})", re.ASCII)
_NUMBERS = re.compile(rf"{_NUMBER}(?: ?, ?{_NUMBER})+", re.ASCII)
_CALL = re.compile(r"(?:\w{1,30}\.)?(\w{1,30})\((.{0,200})\)", re.ASCII)
_MOST_TEXT = 200


def _domain_meant(text: str) -> str:
    """The line to write for a text that stands for a domain, such as `1e-4..1e-1`; "" for every other text."""
    text = " ".join(text.split()) if len(text) <= _MOST_TEXT else ""
    if match := _RANGE.fullmatch(text):
        lower, sign, upper = match.groups()
        if sign != "-" or not (lower + upper).isdigit():  # 10-20 may be a name
            return _range_meant(lower, upper)
    if _NUMBERS.fullmatch(text):
        return f"{{type: choice, values: [{text}]}}"
    if match := _CALL.fullmatch(text):
        kind = "grid" if match[1] == "grid_search" else match[1]
        return _call_meant(kind, match[2]) if kind in DOMAINS else ""
    return ""


def _range_meant(lower: str, upper: str) -> str:
    lower, upper = sorted((lower, upper), key=float)
    least, most = float(lower), float(upper)
    if lower.isdigit() and upper.isdigit():
        return f"{{type: randint, lower: {lower}, upper: {int(upper) + 1}}}"
    kind = "loguniform" if least > 0 and most / least >= _LOG_FROM else "uniform"
    return f"{{type: {kind}, lower: {lower}, upper: {upper}}}"


_LOG_FROM = 100
"""A range is taken for one on a log scale from this ratio of its ends on."""


def _call_meant(kind: str, arguments: str) -> str:
    names = [field.name for field in fields(DOMAINS[kind]) if field.name != "type"]
    if names == ["values"]:
        inner = arguments.strip().removeprefix("[").removesuffix("]")
        return f"{{type: {kind}, values: [{inner}]}}"
    given = [argument.strip() for argument in arguments.split(",") if argument.strip()]
    words = [
        each.replace("=", ": ", 1) if "=" in each else f"{name}: {each}"
        for name, each in zip(names, given, strict=False)
    ]
    return "{" + ", ".join([f"type: {kind}", *words]) + "}"


def _type_meant(words: Mapping[Any, Any]) -> str:
    """What to write for a mapping without a type, such as `{loguniform: [1e-4, 1e-1]}`."""
    kind, arguments = next(iter(words.items()), (None, None))
    kind = "grid" if kind == "grid_search" else kind
    if len(words) == 1 and kind in DOMAINS and isinstance(arguments, list):
        return f"write {_call_meant(kind, ', '.join(map(str, arguments)))}"
    return f"add one of {', '.join(DOMAINS)}, as in {{type: uniform, lower: 0, upper: 1}}"


def sample(space: Mapping[str, Any], sampler: SamplerType, num_samples: int, seed: int) -> list[dict[str, Any]]:
    """The configurations of trials 0 … num_samples - 1, in that order; the same for the same arguments, for ever.

    `random` draws each parameter from its own stream. `grid` is the cross product of the choices and grids in the order
    of `space`, the last parameter varying fastest; it needs `num_samples` to be the size of the grid.

    Raises InputError as `check` does.
    """
    check(space, sampler, num_samples)
    if sampler == "grid":
        rows = itertools.product(*(_grid_values(value) for value in space.values()))
        return [dict(zip(space, row, strict=True)) for row in rows]
    return [
        {
            name: value.draw(_unit(seed, name, trial)) if isinstance(value, Domain) else value
            for name, value in space.items()
        }
        for trial in range(num_samples)
    ]


def check(space: Mapping[str, Any], sampler: SamplerType, num_samples: int) -> None:
    """Refuse, with InputError, a space that `sampler` cannot draw `num_samples` configurations from."""
    if sampler == "random":
        for name, value in space.items():
            if isinstance(value, Grid):
                raise InputError(
                    f"space.{name} is a grid, which the random sampler does not walk; write "
                    "sampler: {type: grid}, or make it a choice"
                )
        return
    for name, value in space.items():
        if isinstance(value, Domain) and not isinstance(value, Choice | Grid):
            raise InputError(
                f"space.{name} has no grid ({value.kind}); list its values as {{type: grid, values: [...]}}"
            )
    size = grid_size(space)
    if size != num_samples:
        fate = f"{size - num_samples} would be dropped" if size > num_samples else "some would be trained twice"
        raise InputError(
            f"the grid has {size} configurations and the scheduler starts {num_samples} trials: {fate}; leave "
            f"num_samples out, or set it (or the trials of the first stage) to {size}"
        )


def grid_size(space: Mapping[str, Any]) -> int:
    """The number of configurations of a grid: the product of the lengths of its choices and grids."""
    return math.prod(len(_grid_values(value)) for value in space.values())


def is_grid(space: Mapping[str, Any]) -> bool:
    """Whether all that differs from trial to trial is a grid, so that the grid sampler alone can walk it."""
    domains = [value for value in space.values() if isinstance(value, Domain)]
    return bool(domains) and all(isinstance(value, Grid) for value in domains)


def to_words(value: Any) -> Any:
    """A parameter as an experiment file writes it; `parse` reads it back."""
    return value.to_words() if isinstance(value, Domain) else value


def _grid_values(value: Any) -> Sequence[Any]:
    return value.values if isinstance(value, Choice | Grid) else (value,)


def _unit(seed: int, name: str, trial: int) -> float:
    """A float in (0, 1) with 52 bits, by hashing: no library's generator, so no library's release alters it."""
    key = json.dumps([seed, name, trial]).encode()
    return ((int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 12) + 0.5) * 2.0**-52
