"""The search space: Ray Tune's domains, and conditional parameters as options of a choice.

The constructors have Ray Tune's names and positional arguments (`uniform(0, 1)`, `choice(["a", "b"])`); a bare value is
a constant. Domains of Ray Tune and distributions of Optuna are taken as they are. An option `{name: ..., space: ...}`
of a choice has parameters of its own; a configuration is flat: the option's name, and its parameters beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc, signature
from statistics import NormalDist
from typing import Any

from rubberband.errors import InputError
from rubberband.spec import quantiles
from rubberband.spec.quantiles import grid_index, multiple
from rubberband.units import nearest, shown, whole

_LARGEST_INTEGER = 2**53
_DEEPEST = 16
"""Levels of a nested constant, and of nested sub-spaces."""


@dataclass(frozen=True, slots=True)
class SubSpace:
    """An option of a choice with parameters of its own: a configuration that has it gets them too."""

    name: str
    """The value of the choice in a configuration."""
    space: Mapping[str, Any]

    def __repr__(self) -> str:
        return repr({"name": self.name, "space": dict(self.space)})

    def to_words(self) -> dict[str, Any]:
        """Return the option as an experiment file writes it."""
        return {"name": self.name, "space": {name: to_words(value) for name, value in self.space.items()}}


@dataclass(frozen=True, slots=True)
class Domain:
    """A parameter that differs from trial to trial: its `type` in an experiment file, and its arguments there.

    Raises InputError for arguments that do not fit.
    """

    kind: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        if "values" in self.arguments:
            object.__setattr__(self, "arguments", {"values": _options(self.kind, self.arguments["values"])})
        else:
            if DOMAINS[self.kind].whole:
                object.__setattr__(self, "arguments", {name: whole(each) for name, each in self.arguments.items()})
            _check_numbers(self.kind, self.arguments)

    def __repr__(self) -> str:
        """Return what one writes in Python: `rubberband.loguniform(0.0001, 0.1)`."""
        row = DOMAINS[self.kind]
        given = {name: list(each) if name == "values" else each for name, each in self.arguments.items()}
        needed = [repr(each) for name, each in given.items() if row.arguments[name] is ...]
        rest = [f"{name}={each!r}" for name, each in given.items() if row.arguments[name] not in (..., each)]
        return f"rubberband.{row.make.__name__}({', '.join(needed + rest)})"

    def to_words(self) -> dict[str, Any]:
        """Return the arguments as an experiment file writes them, `type` first."""
        return {"type": self.kind} | {
            name: [to_words(each) for each in value] if isinstance(value, tuple) else value
            for name, value in self.arguments.items()
        }

    @property
    def options(self) -> tuple[Any, ...]:
        """The values of a choice or a grid; empty for other domains."""
        values: tuple[Any, ...] = self.arguments.get("values", ())
        return values

    @property
    def sub_spaces(self) -> list[SubSpace]:
        """The options that have parameters of their own."""
        return [option for option in self.options if isinstance(option, SubSpace)]

    def rounded(self, value: float) -> Any:
        """Return a number within the domain as one that it draws: a multiple of its quantum."""
        q = self.arguments.get("q")
        if q is None:
            return value
        return q * round(value / q) if DOMAINS[self.kind].whole else multiple(value, q)

    def probability(self, value: float) -> float:
        """Return the share of a normal distribution below a value."""
        return NormalDist(self.arguments["mean"], self.arguments["sd"]).cdf(value)

    def find(self, value: Any) -> Any:
        """Return `value` as `draw` would, which is the option for the name of one with parameters of its own.

        Raises InputError for a value outside the domain.
        """
        if self.options:
            return self.options[self.index(value)]
        if DOMAINS[self.kind].whole:
            value = whole(value)
        _check_within(self, value)
        return value

    def index(self, value: Any) -> int:
        """Return the place of a value among the options: of the very one, else of the same number, as 1 is for 1.0.

        Raises InputError for a value that is not one of them.
        """
        known = [option.name if isinstance(option, SubSpace) else option for option in self.options]
        for text_of in (canonical, _as_a_number):
            texts = list(map(text_of, known))
            if text_of(value) in texts:
                return texts.index(text_of(value))
        raise InputError(f"{shown(value)} is not one of the values; write one of {shown(known)}")

    def draw(self, u: float) -> Any:
        """Return the value at `u` in (0, 1) of the distribution."""
        return DOMAINS[self.kind].draw(u, **self.arguments)


def uniform(lower: float, upper: float) -> Domain:
    """A float between `lower` and `upper`, uniformly."""
    return Domain("uniform", {"lower": lower, "upper": upper})


def quniform(lower: float, upper: float, q: float) -> Domain:
    """A multiple of `q` from `lower` to `upper`, uniformly."""
    return Domain("quniform", {"lower": lower, "upper": upper, "q": q})


def loguniform(lower: float, upper: float, base: float = 10) -> Domain:
    """A float between `lower` and `upper`, uniformly in its logarithm; `base` is Ray Tune's and changes nothing."""
    return Domain("loguniform", {"lower": lower, "upper": upper, "base": base})


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Domain:
    """A multiple of `q` from `lower` to `upper`, uniformly in its logarithm; `base` changes nothing."""
    return Domain("qloguniform", {"lower": lower, "upper": upper, "q": q, "base": base})


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """A normally distributed float."""
    return Domain("randn", {"mean": mean, "sd": sd})


def qrandn(mean: float, sd: float, q: float) -> Domain:
    """A normally distributed float, rounded to a multiple of `q`."""
    return Domain("qrandn", {"mean": mean, "sd": sd, "q": q})


def randint(lower: int, upper: int) -> Domain:
    """A whole number from `lower` to `upper - 1`, uniformly."""
    return Domain("randint", {"lower": lower, "upper": upper})


def lograndint(lower: int, upper: int, base: float = 10) -> Domain:
    """A whole number from `lower` to `upper - 1`, uniformly in its logarithm; `base` changes nothing."""
    return Domain("lograndint", {"lower": lower, "upper": upper, "base": base})


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """A multiple of `q` from `lower` to `upper` (included), uniformly.

    Ray Tune leaves out `upper` where `q` is 1; a domain that its `qrandint` made does so here too.
    """
    return Domain("qrandint", {"lower": lower, "upper": upper, "q": q})


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> Domain:
    """A multiple of `q` from `lower` to `upper` (included), uniformly in its logarithm; `base` changes nothing."""
    return Domain("qlograndint", {"lower": lower, "upper": upper, "q": q, "base": base})


def choice(categories: Sequence[Any]) -> Domain:
    """One of the values, each as likely as the next."""
    return Domain("choice", {"values": categories})


def grid_search(values: Sequence[Any]) -> Domain:
    """Every one of `values`, under the grid sampler."""
    return Domain("grid", {"values": values})


@dataclass(frozen=True, slots=True)
class DomainType:
    """One row of the table of domains; the first line of its constructor's docstring is in the JSON Schema."""

    name: str
    """Name in the JSON Schema; in lower case it is the `type` in an experiment file."""
    make: Callable[..., Domain]
    draw: Callable[..., Any]
    """The inverse of the distribution function, of a number in (0, 1) and the arguments."""
    arguments: Mapping[str, Any]
    """Argument -> its default; `...` (as in pydantic) where it has none."""
    example: tuple[Any, ...]
    """Arguments of the example in its docstring."""
    whole: bool = False
    """Whether the arguments (but for `base`) are whole numbers."""


_BOUNDS = {"lower": ..., "upper": ...}

DOMAINS = {
    row.name.lower(): row
    for row in (
        DomainType("Uniform", uniform, quantiles.between, _BOUNDS, (0.5, 0.99)),
        DomainType(
            "QUniform",
            quniform,
            lambda u, lower, upper, q: multiple(quantiles.between(u, lower, upper), q, lower, upper),
            _BOUNDS | {"q": ...},
            (0.0, 0.5, 0.1),
        ),
        DomainType("LogUniform", loguniform, quantiles.log_between, _BOUNDS | {"base": 10}, (1e-4, 1e-1)),
        DomainType(
            "QLogUniform",
            qloguniform,
            lambda u, lower, upper, q, base: multiple(quantiles.log_between(u, lower, upper), q, lower, upper),
            _BOUNDS | {"q": ..., "base": 10},
            (0.001, 1.0, 0.001),
        ),
        DomainType("Randn", randn, quantiles.normal, {"mean": 0.0, "sd": 1.0}, (0.0, 1.0)),
        DomainType(
            "QRandn",
            qrandn,
            lambda u, mean, sd, q: multiple(quantiles.normal(u, mean, sd), q),
            {"mean": ..., "sd": ..., "q": ...},
            (0.0, 1.0, 0.5),
        ),
        DomainType("Randint", randint, quantiles.whole, _BOUNDS, (1, 9), whole=True),
        DomainType("LogRandint", lograndint, quantiles.whole_log, _BOUNDS | {"base": 10}, (16, 1025), whole=True),
        DomainType("QRandint", qrandint, quantiles.whole_multiple, _BOUNDS | {"q": 1}, (16, 256, 16), whole=True),
        DomainType(
            "QLogRandint",
            qlograndint,
            quantiles.whole_log_multiple,
            _BOUNDS | {"q": ..., "base": 10},
            (16, 1024, 16),
            whole=True,
        ),
        DomainType("Choice", choice, quantiles.one_of, {"values": ...}, (["sgd", "adam"],)),
        DomainType("Grid", grid_search, quantiles.one_of, {"values": ...}, ([0.01, 0.1],)),
    )
}
"""Every domain under its `type` in an experiment file. A logarithmic one has a `base`."""

_MEANINGS = {
    "lower": "The least value",
    "upper": "The largest value",
    "q": "The step between values",
    "base": "Has no effect; Ray Tune has it",
    "mean": "The mean",
    "sd": "The standard deviation",
    "categories": "The values: numbers, texts, lists, or options with a `name` and a `space` of their own",
    "values": "The values, each of which is tried",
}


def _document(row: DomainType) -> None:
    """Complete the docstring of a constructor: its arguments, its words in a file, its errors and its example."""
    meanings = dict(_MEANINGS)
    if "base" in row.arguments:
        meanings["lower"] += ", at least 1" if row.whole else ", more than 0"
    if row.whole and "q" not in row.arguments:
        meanings["upper"] = "One more than the largest value"
    given = (*row.example, *[*row.arguments.values()][len(row.example) :])
    words = {"type": row.name.lower(), **dict(zip(row.arguments, given, strict=True))}
    written = ", ".join(f"{name}: {value}" for name, value in words.items() if name != "base").replace("'", "")
    sections = {
        "Args": [f"{name}: {meanings[name]}." for name in signature(row.make).parameters],
        "Returns": [f"The domain; in a file, `{{{written}}}`."],
        "Raises": ["InputError: For arguments that leave no value."],
        "Examples": [f">>> rubberband.{row.make.__name__}{row.example!r}.to_words()".replace(",)", ")"), repr(words)],
    }
    more = [f"{name}:\n    " + "\n    ".join(lines) for name, lines in sections.items()]
    row.make.__doc__ = "\n\n".join([cleandoc(row.make.__doc__ or ""), *more])


for _row in DOMAINS.values():
    _document(_row)


def _check_numbers(kind: str, given: Mapping[str, Any]) -> None:
    whole = DOMAINS[kind].whole
    for name, value in given.items():
        _check_number(kind, name, value, whole=whole and name != "base")
        if value <= 0 and (name in ("q", "sd") or (name == "lower" and "base" in given)):
            raise InputError(f"{kind}: {name}={value} must be more than 0; raise it")
    if "lower" in given:
        lower, upper = given["lower"], given["upper"]
        if lower > upper or (lower == upper and not (whole and "q" in given)):
            raise InputError(f"{kind}: lower={lower} must be less than upper={upper}; swap or widen them")
    else:
        lower, upper = given["mean"] - 10 * given["sd"], given["mean"] + 10 * given["sd"]
    if "q" in given:
        _check_quantum(kind, lower, upper, given["q"])


def _check_quantum(kind: str, lower: float, upper: float, q: float) -> None:
    if not math.isfinite(lower / q) or not math.isfinite(upper / q):
        raise InputError(f"{kind}: q={q} is too small for its bounds; raise it")
    if math.ceil(grid_index(lower, q)) > math.floor(grid_index(upper, q)):
        raise InputError(f"{kind}: no multiple of q={q} lies from {lower} to {upper}; lower q or widen them")


def canonical(value: Any) -> str:
    """Return a text that equal values share, and no others: `==` takes 1, 1.0 and true for one."""
    return json.dumps(value, sort_keys=True)


def _as_a_number(value: Any) -> str:
    """Return the text of a value with which a whole number and the same float are one."""
    is_whole = isinstance(value, float) and value.is_integer()
    return canonical(int(value) if is_whole else value)


def plain(value: Any, *, depth: int = 0) -> Any:
    """Return a constant as JSON holds it (a tuple becomes a list). Raises InputError if JSON cannot hold it."""
    if depth > _DEEPEST:
        raise InputError(f"a constant is nested more than {_DEEPEST} deep; flatten it")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{value} is not a finite number; write one that is")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item, depth=depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, depth=depth + 1) for key, item in value.items()}
    raise InputError(f"{shown(value)} is not a plain value; use numbers, strings, true, false, null, or lists of them")


def _options(kind: str, values: Any, depth: int = 0) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"{kind}: values={shown(values)} is not a list of at least one value; write [a, b]")
    options = tuple(_option(f"{kind}: values[{index}]", value, depth) for index, value in enumerate(values))
    named = [option.name for option in options if isinstance(option, SubSpace)]
    for name in named:
        if named.count(name) > 1 or name in options:
            raise InputError(f"{kind}: two of its values are called {shown(name)}; rename one")
    return options


def _option(at: str, value: Any, depth: int) -> Any:
    """Return a plain value, or the sub-space that `{name: ..., space: ...}` writes."""
    if isinstance(value, SubSpace):
        return value
    if not isinstance(value, Mapping) or "space" not in value:
        if _is_domain(value) or (isinstance(value, Mapping) and any(map(_is_domain, value.values()))):
            raise InputError(f"{at} has parameters of its own; write it as {{name: NAME, space: {{...}}}}")
        return plain(value)
    if depth >= _DEEPEST:
        raise InputError(f"{at}: spaces are nested more than {_DEEPEST} deep; flatten them")
    name, space = value.get("name"), value["space"]
    if not isinstance(name, str) or not name:
        raise InputError(f"{at} has a space but no name; write it as {{name: NAME, space: {{...}}}}")
    if other := [key for key in value if key not in ("name", "space")]:
        raise InputError(f"{at}: unknown key {shown(other[0])}; put it into the space of {shown(name)}")
    if not isinstance(space, Mapping) or not all(isinstance(key, str) for key in space):
        raise InputError(f"{at}: space={shown(space)} is not a mapping of parameters; write {{lr: ...}}")
    return SubSpace(name, {key: parse(each, depth=depth + 1) for key, each in space.items()})


def _is_domain(value: Any) -> bool:
    is_words = isinstance(value, Mapping) and isinstance(value.get("type"), str) and value["type"] in DOMAINS
    return is_words or isinstance(value, Domain) or foreign(value) is not None


def _check_within(domain: Domain, value: Any) -> None:
    whole, arguments = DOMAINS[domain.kind].whole, domain.arguments
    _check_number(domain.kind, "value", value, whole=whole)
    if "lower" in arguments:
        lower, upper = arguments["lower"], arguments["upper"]
        upper -= whole and "q" not in arguments  # as in Ray Tune, the end of a range of whole numbers is outside
        if not lower <= value <= upper:
            raise InputError(f"{value} is outside {domain.kind} from {lower} to {upper}; move it inside, or widen that")
    if "q" in arguments and not math.isclose(value, multiple(value, arguments["q"]), rel_tol=1e-9, abs_tol=1e-12):
        raise InputError(f"{value} is no multiple of q={arguments['q']}; round it")


def _check_number(kind: str, name: str, value: Any, *, whole: bool = False) -> None:
    allowed = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise InputError(f"{kind}: {name}={shown(value)} is not a {'whole ' if whole else ''}number; write one")
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise InputError(f"{kind}: {name}={shown(value)} is beyond 2**53; scale the parameter")
    if not math.isfinite(value):
        raise InputError(f"{kind}: {name}={value} is not finite; write a finite number")


def parse(value: object, *, depth: int = 0) -> Any:
    """Return a parameter of the search space, written as a domain, a mapping with a `type`, or a constant.

    A domain of Ray Tune and a distribution of Optuna count as domains; `depth` is that of a nested space.

    Raises InputError for an unknown type, missing, unknown or wrong arguments, and constants that JSON does not hold.
    """
    if isinstance(value, Domain):
        return value
    if (domain := foreign(value)) is not None:
        return domain
    if isinstance(value, str) and (line := domain_meant(value)):
        raise InputError(
            f"{shown(value)} is a text, not a domain; write {line}, or {{type: choice, values: [{shown(value)}]}} if "
            "the text is meant"
        )
    if not isinstance(value, Mapping):
        if isinstance(value, list | tuple) and any(map(_is_domain, value)):
            raise InputError("a domain in a list is not drawn; give each a name of its own in the space")
        return plain(value)
    given = dict(value)
    kind = given.pop("type", None)
    if kind is None:
        raise InputError(f"{shown(value)} has no type; {_type_meant(given)}")
    if not isinstance(kind, str) or kind not in DOMAINS:
        raise InputError(f"type {shown(kind)} is not a kind of parameter; {nearest(str(kind), DOMAINS)}")
    arguments = DOMAINS[kind].arguments
    for name in given:
        if name not in arguments:
            raise InputError(f"unknown key {shown(name)} of a {kind}; {nearest(str(name), arguments)}")
    missing = [name for name, default in arguments.items() if default is ... and name not in given]
    if missing:
        raise InputError(f"a {kind} needs {' and '.join(missing)}; add {'them' if missing[1:] else 'it'}")
    if "values" in given:
        given["values"] = _options(kind, given["values"], depth)
    return Domain(kind, {**arguments, **given})


NUMBER = r"[-+]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?"
_RANGE = re.compile(rf"({NUMBER}) ?(\.\.\.?|\u2026|\u2013|~|-|to) ?({NUMBER})", re.ASCII)
_NUMBERS = re.compile(rf"{NUMBER}(?: ?, ?{NUMBER})+", re.ASCII)
_CALL = re.compile(r"(?:\w{1,30}\.)?(\w{1,30})\((.{0,200})\)", re.ASCII)
_MOST_TEXT = 200


def domain_meant(text: str) -> str:
    """Return the line to write for a text that stands for a domain, such as `1e-4..1e-1`; "" for other texts."""
    text = " ".join(text.split()) if len(text) <= _MOST_TEXT else ""
    if match := _RANGE.fullmatch(text):
        lower, sign, upper = match.groups()
        if sign != "-" or not (lower + upper).isdigit():  # 10-20 may be a name
            return range_meant(lower, upper)
    if _NUMBERS.fullmatch(text):
        return f"{{type: choice, values: [{text}]}}"
    if match := _CALL.fullmatch(text):
        kind = "grid" if match[1] == "grid_search" else match[1]
        return _call_meant(kind, match[2]) if kind in DOMAINS else ""
    return ""


def range_meant(lower: str, upper: str) -> str:
    """Return the domain between two numbers, as a file writes it; floats far apart have a logarithmic one."""
    lower, upper = sorted((lower, upper), key=float)
    least, most = float(lower), float(upper)
    if lower.isdigit() and upper.isdigit():
        return f"{{type: randint, lower: {lower}, upper: {int(upper) + 1}}}"
    kind = "loguniform" if least > 0 and most / least >= _LOG_FROM else "uniform"
    return f"{{type: {kind}, lower: {lower}, upper: {upper}}}"


_LOG_FROM = 100
"""A text such as `1e-4..1e-1` is taken for a logarithmic range from this ratio of its ends."""


def _call_meant(kind: str, arguments: str) -> str:
    names = DOMAINS[kind].arguments
    if "values" in names:
        inner = arguments.strip().removeprefix("[").removesuffix("]")
        return f"{{type: {kind}, values: [{inner}]}}"
    given = [argument.strip() for argument in arguments.split(",") if argument.strip()]
    words = [
        each.replace("=", ": ", 1) if "=" in each else f"{name}: {each}"
        for name, each in zip(names, given, strict=False)
    ]
    return "{" + ", ".join([f"type: {kind}", *words]) + "}"


def _type_meant(words: Mapping[Any, Any]) -> str:
    """Return the advice for a mapping without a type, such as `{loguniform: [1e-4, 1e-1]}`."""
    kind, arguments = next(iter(words.items()), (None, None))
    kind = "grid" if kind == "grid_search" else kind
    if any(map(_is_domain, words.values())):
        return "move its parameters up, as a space is flat, or into an option {name: ..., space: {...}} of a choice"
    if len(words) == 1 and kind in DOMAINS and isinstance(arguments, list):
        return f"write {_call_meant(kind, ', '.join(map(str, arguments)))}"
    return f"add one of {', '.join(DOMAINS)}, as in {{type: uniform, lower: 0, upper: 1}}"


def to_words(value: Any) -> Any:
    """Return a parameter as an experiment file writes it; `parse` reads it back."""
    return value.to_words() if isinstance(value, Domain | SubSpace) else value


def check_names(space: Mapping[str, Any]) -> set[str]:
    """Return the names of all parameters. Raises InputError if two that a trial may have at once are called alike."""
    found = set(space)
    for name, value in space.items():
        inner: set[str] = set()
        for option in value.sub_spaces if isinstance(value, Domain) else ():
            inner |= check_names(option.space)
        if both := sorted(inner & found):
            raise InputError(
                f"space.{name} has a parameter {shown(both[0])} of its own, and so does the space around it; rename one"
            )
        found |= inner
    return found


# Domains of other libraries. They are recognised by the name of their module: nothing is imported.

_OPTUNA, _RAY = "optuna.distributions", "ray.tune.search.sample"


def foreign(value: object) -> Domain | None:
    """Return the domain that an object of Ray Tune or Optuna stands for; None for any other object.

    Raises InputError for those without a counterpart.
    """
    match type(value).__module__:
        case module if module == _OPTUNA:
            return _of_optuna(value)
        case module if module == _RAY:
            return _of_ray(value)
    if isinstance(value, Mapping) and len(value) == 1 and isinstance(value.get("grid_search"), list):
        return grid_search(value["grid_search"])  # what tune.grid_search returns
    return None


def _of_optuna(value: Any) -> Domain:
    kinds = {each.__name__ for each in type(value).__mro__}  # UniformDistribution and others are subclasses
    if "CategoricalDistribution" in kinds:
        return choice(list(value.choices))
    if not kinds & {"FloatDistribution", "IntDistribution"}:
        name = type(value).__name__
        raise InputError(f"{name} of Optuna has no counterpart; use FloatDistribution, IntDistribution or Categorical…")
    whole, low, high, step = "IntDistribution" in kinds, value.low, value.high, value.step
    if low == high and (not whole or step != 1):
        return choice([low])
    if step is not None and grid_index(low, step) % 1:
        raise InputError(f"{value}: low={low} is no multiple of step={step}; write choice([...]) with its values")
    return between(low, high, whole=whole, step=step, log=value.log)


def between(low: Any, high: Any, *, whole: bool, step: Any = None, log: bool = False) -> Domain:
    """Return the domain of numbers from `low` to `high`, both included, that are multiples of `step` or any."""
    if step is not None and (not whole or step != 1):
        return qrandint(low, high, step) if whole else quniform(low, high, step)
    if whole:
        return (lograndint if log else randint)(low, high + 1)
    return (loguniform if log else uniform)(low, high)


def _of_ray(value: Any) -> Domain:
    kind = type(value).__name__
    if kind == "Categorical":
        return (grid_search if value.is_grid() else choice)(list(value.categories))
    if kind not in ("Float", "Integer"):
        raise InputError("tune.sample_from has no counterpart; compute the value in the trial, from its configuration")
    sampler, arguments = value.get_sampler(), dict[str, Any]()
    if (quantum := getattr(sampler, "q", None)) is not None:
        sampler = sampler.sampler
        if kind == "Float" or quantum != 1:  # whole numbers with a quantum of 1 leave out `upper`, others have it
            arguments = {"q": quantum}
    name = type(sampler).__name__.lstrip("_")
    if name == "Normal":
        return Domain("qrandn" if arguments else "randn", {"mean": sampler.mean, "sd": sampler.sd, **arguments})
    if name not in ("Uniform", "LogUniform"):
        raise InputError(f"tune's sampler {name} has no counterpart; write uniform(…), loguniform(…) or randint(…)")
    if kind == "Float" and value.lower == value.upper:
        return choice([float(value.lower)])
    log = "log" if name == "LogUniform" else ""
    bounds = {"lower": value.lower, "upper": value.upper, **arguments}
    if log:
        bounds["base"] = getattr(sampler, "base", 10)
    return Domain(f"{'q' * bool(arguments)}{log}{'uniform' if kind == 'Float' else 'randint'}", bounds)
