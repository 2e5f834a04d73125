"""The building blocks of user input (files and REST): strict numbers, units, and errors of one line.

All input is a `Words` model: frozen, without unknown keys, without infinity or NaN. An error of pydantic becomes one
WordError with the full key path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from rubberband.errors import InputError
from rubberband.units import (
    MAX_USD,
    did_you_mean,
    format_instant,
    near,
    nearest,
    parse_bytes,
    parse_deadline,
    parse_duration,
    parse_usd,
    shown,
    whole,
)
from rubberband.values.profile import FIXED, measured
from rubberband.values.profile import Spread as Varying

Path = tuple[str | int, ...]
"""Keys from the top of a document to a value."""

MODULE_ATTRIBUTE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""The name of a class or function of the user's: `examples.digits:DigitsTrial`."""

_TAGS = {"scheduler", "profile", "provision_delay", "init_delay", "num_samples", "max_t", "entrypoint", "metrics"}


class WordError(InputError):
    """A value that does not fit, at `path` from the top of the document; `reason` is the message without the path.

    `others` are further faults of the same document, each of which has a line of its own.
    """

    def __init__(self, path: Path, reason: str, others: Sequence[WordError] = ()) -> None:
        own = f"{dotted(path)}: {reason}" if path else reason
        super().__init__("\n".join([own, *map(str, others)]))
        self.path, self.reason, self.others = path, reason, others

    def each(self) -> Iterator[WordError]:
        """Iterate over this fault, alone, and the others."""
        yield WordError(self.path, self.reason)
        yield from self.others


class DocumentError(InputError):
    """All faults of a document, a line for each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class Words(BaseModel):
    """A mapping that a user wrote, read strictly.

    A docstring below a field describes it in the JSON Schema. Sources are read for a schema only, and validators are
    built at their first use: a command that reads one file waits for neither.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        resolved = handler.resolve_ref_schema(found)
        if "description" in resolved:
            resolved["description"] = resolved["description"].partition("\n\nExamples:")[0]
        properties = resolved["properties"]
        for name, description in _docstrings(cls).items():
            properties[cls.model_fields[name].alias or name].setdefault("description", description)
        return found

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        known = cls._keys()
        if not isinstance(data, Mapping):
            first = next(iter(known))
            meant = (
                _of_type(data)
                if first == "type" and isinstance(data, str)
                else f"keys and values, such as {first}: ..."
            )
            raise fault(f"{shown(data)} is not a mapping; write {meant}")
        if unknown := [key for key in data if key not in known]:
            found = {key: _meant(key, known) for key in unknown}
            first = unknown[0]
            raise fault(found[first][0], at=first if isinstance(first, int) else str(first), unknown=found)
        return data

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield what was written, by its key in the file."""
        for name, field in type(self).model_fields.items():
            if name in self.model_fields_set:
                yield field.alias or name, getattr(self, name)

    @classmethod
    @cache
    def defaults(cls) -> Any:
        """Return what a file that leaves a mapping out gets: the same object each time, as it cannot change."""
        return cls.model_construct()

    @classmethod
    @cache
    def _keys(cls) -> dict[str, FieldInfo]:
        return {field.alias or name: field for name, field in cls.model_fields.items()}


_OF_PEERS = {
    **dict.fromkeys(("n_trials", "num_trials", "num_samples"), "search.scheduler.num_samples"),
    **dict.fromkeys(("n_jobs", "max_concurrent", "max_concurrent_trials", "parallelism"), "resources.max_instances"),
    **dict.fromkeys(("direction", "goal"), "search.mode, such as mode: min"),
    "objective": "search.metric and search.mode",
    "program": "entrypoint, such as {command: python train.py}",
    "method": "search.sampler, such as {type: random}",
    **dict.fromkeys(("algorithm", "algo", "search_alg"), "search.sampler, such as {type: optuna, sampler: tpe}"),
    **dict.fromkeys(("pruner", "early_terminate"), "search.scheduler, such as {type: asha, num_samples: 64, max_t: 9}"),
    **dict.fromkeys(("parameters", "param_space", "params"), "search.space"),
    **dict.fromkeys(("budget", "max_budget"), "constraints.max_cost"),
    **dict.fromkeys(("timeout", "time_budget_s", "time_limit"), "constraints.deadline"),
    "eta": "search.scheduler.reduction_factor",
    **dict.fromkeys(("min_resource", "min_iter"), "search.scheduler.grace_period"),
    **dict.fromkeys(("max_t", "max_resource", "max_iter", "max_iterations"), "search.scheduler.max_t"),
    "seed": "search.sampler.seed",
    "gpus": "resources.gpus_per_instance",
    "accelerators": "resources.instance_type, such as g5.xlarge",
}
"""Key of other tools -> what is written for it here."""
_VALUES_OF_PEERS = {
    "minimize": "min",
    "maximize": "max",
    "fifo": "{type: none, num_samples: 16, max_t: 27}, which trains each trial to its end",
    "median": "{type: asha, num_samples: 64, max_t: 27}",
}
"""Value of other tools -> what is written for it here."""


def _meant(key: Any, known: Mapping[str, FieldInfo]) -> tuple[str, str]:
    """Return the line for a key that is not among the `known` ones of its mapping, and the one that is meant; or ""."""
    below = [f"{name}.{key}" for name, field in known.items() if key in _keys_of(field.annotation)]
    written = below[0] if below else _OF_PEERS.get(str(key).lower(), "")
    own = written.split(",")[0].rpartition(".")[2]
    if own in known:
        return f"unknown key; write {own}", own
    if written:
        return f"unknown key; write {written}", ""
    return f"unknown key; {nearest(str(key), known)}", next(iter(near(str(key), known)), "")


def _keys_of(annotation: Any) -> Collection[str]:
    return annotation._keys() if isinstance(annotation, type) and issubclass(annotation, Words) else ()


def _docstrings(model: type[Words]) -> dict[str, str]:
    """Return field -> the docstring below it in the source of its model; none where no sources are installed."""
    import ast
    import inspect

    found = {}
    for each in reversed(model.__mro__[: model.__mro__.index(Words)]):
        try:
            (tree,) = ast.parse(inspect.getsource(each)).body
        except OSError:
            return {}
        assert isinstance(tree, ast.ClassDef), "models stand at the top of their modules"
        for above, below in pairwise(tree.body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


def fault(
    reason: str, *, at: str | int | Path | None = None, unknown: Mapping[Any, tuple[str, str]] | None = None
) -> PydanticCustomError:
    """Return the error to raise from a validator; `at` is a key (or a path of keys) below the validated value.

    `unknown`: the keys there that no field has, with the reason of each, and the key that is meant.
    """
    return PydanticCustomError("fault", "{reason}", {"reason": reason, "at": at, "unknown": unknown or {}})


def input_checked(check: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function that raises InputError as a pydantic validator."""

    def validate(value: Any) -> Any:
        try:
            return check(value)
        except InputError as error:
            raise fault(str(error)) from None

    return validate


def word_error(
    error: ValidationError, words: Any = None, validate: Callable[[Any], object] = lambda words: None
) -> WordError:
    """Return the errors of pydantic in our words: one, with all others of the document.

    `validate` is called again for the `words` with the meant keys in place of unknown ones, which hide what is wrong
    beside them.
    """
    details = error.errors(include_url=False)
    inside = {each["loc"][:end] for each in details for end in range(len(each["loc"]))}
    # pydantic counts the valid entries of a list alone.
    details = [each for each in details if each["type"] != "too_short" or each["loc"] not in inside]
    missing = [dotted(_path(each)) for each in details if each["type"] == "missing"]
    found, rest = list[WordError](), words
    for each in details:
        path, unknown = _path(each), each.get("ctx", {}).get("unknown", {})
        for key, (reason, meant) in unknown.items():
            at = (*path[:-1], key if isinstance(key, int) else str(key))
            found.append(WordError(at, reason))
            rest = _renamed(rest, (*path[:-1], key), meant)
        if not unknown and (each["type"] != "missing" or dotted(path) == missing[0]):
            lacking = f", and {', '.join(missing[1:])}" if each["type"] == "missing" and missing[1:] else ""
            found.append(WordError(path, f"{_reason(each)}{lacking}"))
    if rest != words:
        try:
            validate(rest)
        except ValidationError as further:
            found += word_error(further, rest, validate).each()
        except WordError as further:
            found += further.each()
    first, *others = {str(each): each for each in found}.values()
    if len(others) > _MOST_FAULTS:
        others = [*others[:_MOST_FAULTS], WordError((), f"{len(others) - _MOST_FAULTS} more; correct these first")]
    return WordError(first.path, first.reason, others)


_MOST_FAULTS = 20
"""Lines of faults beside the first."""


def _renamed(words: Any, path: Path, meant: str) -> Any:
    """Return the words with the key that is meant in place of the one at a path, which goes if that is there, or ""."""
    key, *below = path
    if isinstance(words, list) and isinstance(key, int) and key < len(words) and below:
        return [*words[:key], _renamed(words[key], tuple(below), meant), *words[key + 1 :]]
    if not isinstance(words, Mapping) or key not in words:
        return words
    if below:
        return {**words, key: _renamed(words[key], tuple(below), meant)}
    rest = {name: value for name, value in words.items() if name != key}
    return rest if not meant or meant in rest else {**rest, meant: words[key]}


def dotted(path: Path) -> str:
    """Return a path as it is typed after `-s`: `search.space.lr`."""
    return ".".join(key if isinstance(key, str) and key.isprintable() else shown(key) for key in path)


def _path(details: ErrorDetails) -> Path:
    loc = [key for index, key in enumerate(details["loc"]) if not _is_tag(details["loc"], index)]
    if loc and loc[-1] == "[key]":
        loc.pop()
    at = "type" if details["type"].startswith("union_tag") else details.get("ctx", {}).get("at")
    below = at if isinstance(at, tuple) else () if at is None else (at,)
    return (*loc, *below)


def _is_tag(loc: Path, index: int) -> bool:
    """Return whether pydantic added this key: it puts the tag of a union's member after the key of the union."""
    union = index > 0 and (loc[index - 1] in _TAGS or loc[max(0, index - 2) : index] == ("gpus_per_trial", "min"))
    return union or (index > 1 and loc[index - 2] in ("by_instance_type", "track"))


_LEARNING = ("tpe", "gp", "cmaes", "nsgaii")
"""Samplers of Optuna, which are not types of their own."""


def _of_type(name: str) -> str:
    """Return a mapping as it is written for its type, or for a sampler of Optuna: `{type: sha}`."""
    return f"{{type: optuna, sampler: {name}}}" if name in _LEARNING else f"{{type: {name}, …}}"


def _reason(details: ErrorDetails) -> str:
    kind, context, value = details["type"], details.get("ctx", {}), shown(details["input"])
    match kind:
        case "fault":
            return str(context["reason"])
        case "missing":
            return "is required; add it"
        case "literal_error" | "union_tag_invalid":
            allowed = str(context.get("expected") or context.get("expected_tags")).replace("'", "")
            options = [option.strip() for option in allowed.replace(" or ", ", ").split(",")]
            wrong = str(context.get("tag", details["input"]))
            own = f"; write {_of_type(wrong) if wrong in _LEARNING else 'one of them'}"
            if (written := _VALUES_OF_PEERS.get(wrong.lower())) is not None:
                return f"{shown(wrong)} is not one of {', '.join(options)}; write {written}"
            return f"{shown(wrong)} is not one of {', '.join(options)}{did_you_mean(wrong, options) or own}"
        case "union_tag_not_found":
            return "is required; add it, such as type: sha"
        case "greater_than_equal" | "greater_than":
            least = context.get("ge", context.get("gt"))
            return f"{value} must be {'at least' if 'ge' in context else 'more than'} {least}; raise it"
        case "less_than_equal" | "less_than":
            most = context.get("le", context.get("lt"))
            return f"{value} must be {'at most' if 'le' in context else 'less than'} {most}; lower it"
        case "too_short":
            return "is empty; write at least one entry"
        case "int_type" | "int_parsing" | "int_from_float":
            or_auto = ", or auto" if details["loc"][-1:] == ("number",) else ""
            return f"{value} is not a whole number; write one, such as 3{or_auto}"
        case "float_type" | "finite_number" | "float_parsing":
            return f"{value} is not a finite number; write one, such as 0.5"
        case "bool_type" | "bool_parsing":
            return f"{value} is neither true nor false; write one of them"
        case "string_type" | "string_unicode":
            is_nested = isinstance(details["input"], Mapping | list)
            return f"{value} is not a text; {'write one' if is_nested else 'put it in quotes'}"
        case "dict_type" | "list_type" | "tuple_type":
            written = "nothing" if details["input"] is None else value
            needed = "mapping; write one, as {key: 1}" if kind == "dict_type" else "list; write one, as [1, 2]"
            return f"{written} is not a {needed}"
        case "model_attributes_type" if isinstance(details["input"], str):
            return f"{value} is not a mapping; write {_of_type(details['input'])}"
    message = details["msg"]
    return f"{value} does not fit: {message[:1].lower()}{message[1:]}"


_NAME_PATTERN = "^[a-z0-9][a-z0-9-]{0,62}$"
"""Names with a leading dash look like options of a command."""


def name_like(text: str) -> str:
    """Return the name that is nearest to a text; empty if none is near."""
    return re.sub(r"[^a-z0-9]+", "-", text[:80].lower()).strip("-")[:63]


def name_of_trial(entrypoint: Any) -> str:
    """Return a name for a trial, such as `digits` for DigitsTrial and `train` for `python train.py`; maybe empty."""
    command = entrypoint.get("command") if isinstance(entrypoint, Mapping) else getattr(entrypoint, "command", None)
    if command is not None:
        words = command.split() if isinstance(command, str) else [str(word) for word in command]
        files = [word for word in words if word.endswith((".py", ".sh"))]
        return name_like(re.split(r"[/.]", (files or words)[0])[-2 if files else -1]) if words else ""
    text = entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__qualname__", "")
    dashed = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", re.split(r"[:.]", text)[-1])
    return name_like(dashed).removesuffix("-trial")


def _name(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(_NAME_PATTERN, value, re.ASCII):
        return value
    near = name_like(value) if isinstance(value, str) else ""
    raise fault(
        f"{shown(value)} is not a name; use 1 to 63 of a-z, 0-9 and - (not first), such as {near or 'digits-sha'}"
    )


Name = Annotated[str, PlainValidator(_name, json_schema_input_type=Annotated[str, Field(pattern=_NAME_PATTERN)])]
"""Name of an experiment or of a pool."""

MAX_GPUS_PER_TRIAL = 4096
"""Most GPUs that one trial may ask for."""


WHOLE = BeforeValidator(whole)
"""Lets a whole number be written as 1e2."""
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000_000), WHOLE]
"""A whole number of at least one."""
Gpus = Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS_PER_TRIAL), WHOLE]
"""A number of GPUs."""
AUTO = "auto"
BY_KIND = Discriminator(lambda value: AUTO if value == AUTO else "number")
Auto = Annotated[Literal["auto"], Tag(AUTO)]
"""A number that is found when the experiment is planned."""
Tally = Annotated[int, Field(strict=True, ge=0, le=1_000_000_000), WHOLE]
"""A whole number of at least zero."""
Usd = Annotated[
    float,
    BeforeValidator(input_checked(parse_usd), json_schema_input_type=Annotated[float, Field(ge=0, le=MAX_USD)] | str),
]
"""US dollars, written as 5, 0.50, $5 or 5 USD."""
Amount = Annotated[float, Field(strict=True, ge=0, le=1e12)]
"""A number that is not negative."""
Spread = Annotated[float, Field(strict=True, ge=0, le=10)]
"""A coefficient of variation: standard deviation over mean."""
Duration = Annotated[
    float, BeforeValidator(input_checked(parse_duration), json_schema_input_type=Annotated[float, Field(ge=0)] | str)
]
"""Seconds, written as 90s, 20m, 1h30m or plain seconds."""
Bytes = Annotated[
    int, BeforeValidator(input_checked(parse_bytes), json_schema_input_type=Annotated[float, Field(ge=0)] | str)
]
"""Bytes, written as 64MB, 10MiB or plain bytes."""
Deadline = Annotated[
    float | datetime,
    PlainValidator(input_checked(parse_deadline), json_schema_input_type=Annotated[float, Field(gt=0)] | str),
    PlainSerializer(lambda value: format_instant(value) if isinstance(value, datetime) else value),
]
"""Seconds from the start (float), or an instant with its zone (datetime)."""


# Delays: fixed, with a coefficient of variation, or measured one by one.


class LognormalDelay(Words):
    """A delay that differs from one time to the next: its mean and coefficient of variation."""

    mean_s: Duration = Field(alias="mean")
    cv: Spread = 0.0


class SampledDelay(Words):
    """A measured delay: each of the `samples` is as likely as the others."""

    samples_s: Annotated[tuple[Duration, ...], Field(alias="samples", min_length=1, max_length=10_000)]


def _delay_kind(value: Any) -> str:
    if isinstance(value, SampledDelay) or (isinstance(value, Mapping) and "samples" in value):
        return "samples"
    return "mean" if isinstance(value, LognormalDelay | Mapping) else "duration"


Delay = Annotated[
    Annotated[Duration, Tag("duration")]
    | Annotated[LognormalDelay, Tag("mean")]
    | Annotated[SampledDelay, Tag("samples")],
    Discriminator(_delay_kind),
]
"""A duration, `{mean: 30s, cv: 0.5}`, or `{samples: [12s, 15s, 31s]}`."""


def delay_of(delay: float | LognormalDelay | SampledDelay) -> tuple[float, Varying]:
    """Return the mean of a delay in seconds, and its spread."""
    if isinstance(delay, SampledDelay):
        return measured(delay.samples_s)
    if isinstance(delay, LognormalDelay):
        return delay.mean_s, Varying(cv=delay.cv) if delay.mean_s > 0.0 else FIXED
    return delay, FIXED
