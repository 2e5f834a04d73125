"""Experiments in request bodies: parsed as strictly as the file, and checked against the operator's settings.

A body is the experiment file, in JSON or in YAML. It may name no file of the server, and only code that the operator
allows. All errors are Problems.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rubberband.api.problems import INVALID, MALFORMED, MEDIA, REFUSED, TOO_LARGE, HttpProblem, problem_of
from rubberband.api.settings import Settings
from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment, ProfilesByType
from rubberband.spec.loading import MAX_BYTES, MAX_DEPTH, experiment_of, parse_experiment
from rubberband.spec.program import Program
from rubberband.spec.resources import Aws
from rubberband.units import format_usd, shown
from rubberband.values.adaptive import LR_SCALINGS

JSON_TYPE = "application/json"
YAML_TYPES = ("application/yaml", "text/yaml", "application/x-yaml", "text/plain")
_CHARSETS = ("", "utf-8", "utf8", "us-ascii")
_OPTION = "set"
_SMALL_BYTES = 16 << 10
_MAX_DIGITS = 300
_MAX_OVERRIDES = 100
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_experiment(body: bytes, media_type: str, overrides: Sequence[str] = ()) -> Experiment:
    """Parse a request's body; `overrides` such as `constraints.deadline=30m` replace single values.

    Raises Problem: MEDIA for another media type, TOO_LARGE, MALFORMED for broken JSON or YAML, and INVALID for bad
    values, with the key (and in YAML the line).
    """
    kind = _essence(media_type)
    if len(body) > MAX_BYTES:
        raise HttpProblem(
            TOO_LARGE, f"the experiment has {len(body):,} bytes; at most {MAX_BYTES:,} are allowed; shorten it"
        )
    if len(overrides) > _MAX_OVERRIDES:
        raise HttpProblem(
            INVALID, f"{len(overrides)} values are set; at most {_MAX_OVERRIDES} are allowed; write them into the body"
        )
    try:
        if kind == JSON_TYPE:
            return experiment_of(json_object(body), overrides=overrides, option=_OPTION)
        return parse_experiment(body, overrides=overrides, option=_OPTION)
    except InputError as error:
        raise problem_of(error) from None


def require_json(body: bytes, media_type: str) -> None:
    """Raise the Problem of `read_experiment` for a small JSON body that is no object.

    This takes at most two milliseconds, so the server needs no planning process for it.
    """
    if _essence(media_type) == JSON_TYPE and len(body) <= _SMALL_BYTES:
        json_object(body)


def require_allowed(experiment: Experiment, settings: Settings) -> None:
    """Raise Problem REFUSED, with the key and the remedy, for an experiment that the operator does not allow to run.

    No request makes the service read a file of its machine. An experiment uses only allowed providers and code, and a
    max_cost within the limit.
    """
    require_no_paths(experiment)
    _require_provider(experiment, settings)
    _require_entrypoint(experiment, settings)
    _require_variables(experiment, settings)
    _require_checkpoints(experiment, settings)
    _require_trackers(experiment)
    if experiment.notify:
        raise _refused("notify", "only the operator says where notices go (serve --notify); leave it out")
    _require_budget(experiment, settings)


def allows_code(name: str, allowed: Sequence[str]) -> bool:
    """Whether `module:attribute` is in the operator's list, by itself or by `module:*`.

    The star covers public names of the module: no attribute of an attribute, no private name.
    """
    module, _, attribute = name.partition(":")
    public = "." not in attribute and not attribute.startswith("_")
    return name in allowed or (public and f"{module}:*" in allowed)


def _essence(media_type: str) -> str:
    """Return the media type without its parameters. Raises Problem MEDIA."""
    kind, *parameters = (part.strip().lower() for part in media_type.split(";"))
    charset = next(
        (value.strip('"') for name, _, value in (p.partition("=") for p in parameters) if name == "charset"), ""
    )
    if kind not in (JSON_TYPE, *YAML_TYPES):
        raise HttpProblem(
            MEDIA, f"Content-Type {shown(media_type)} is not supported; send {JSON_TYPE} or {YAML_TYPES[0]}"
        )
    if charset not in _CHARSETS:
        raise HttpProblem(MEDIA, f"charset {shown(charset)} is not supported; send UTF-8")
    return kind


class _Refused(ValueError):
    """JSON that the standard allows and the service refuses."""


def json_object(
    body: bytes, wanted: str = "an experiment; send an object: name, search, constraints, ..."
) -> dict[str, Any]:
    """Parse a body that is a JSON object, strictly. Raises Problem MALFORMED or INVALID."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HttpProblem(MALFORMED, f"the body is not UTF-8 (byte {error.start}); send UTF-8") from None
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} (line {error.lineno}, column {error.colno})"
        raise HttpProblem(MALFORMED, f"the body is not JSON: {reason}; check quotes, brackets and commas") from None
    except _Refused as error:
        raise HttpProblem(MALFORMED, str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise HttpProblem(INVALID, f"{shown(value)} is not {wanted}")
    _require_shallow(value)
    if _SURROGATE.search(text):
        _require_characters(value)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"key {shown(twice)} occurs twice in one object; remove one")
    return value


def _constant(text: str) -> Any:
    raise _Refused(f"{text} is not a JSON number; write a finite one")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"{shown(text)} is too large for a number; write a smaller one")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _Refused(f"{shown(text)} has too many digits; write a smaller number")
    return int(text)


_decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float, parse_int=_integer)


def _require_shallow(value: object) -> None:
    # Level by level: depth costs no stack.
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> HttpProblem:
    return HttpProblem(MALFORMED, f"the body is nested more than {MAX_DEPTH} deep; flatten it")


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _require_characters(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HttpProblem(
            MALFORMED, "a text of the body holds half of a surrogate pair; write the character itself"
        ) from None


def _refused(key: str, reason: str) -> HttpProblem:
    return HttpProblem(REFUSED, f"{key}: {reason}", key=key)


def require_no_paths(experiment: Experiment) -> None:
    """Raise Problem REFUSED if an experiment names a file of the server."""
    if experiment.resources.pool is not None:
        raise _refused("resources.pool", "requests may not name a pool of the server; leave it out")
    for key, value in _paths(experiment).items():
        if isinstance(value, str):
            remedy = "leave it out" if key.endswith("catalogue") else "write the profile itself in its place"
            raise _refused(key, f"{shown(value)} names a file of the server, which requests may not use; {remedy}")


def _paths(experiment: Experiment) -> Mapping[str, object]:
    """Return key -> value of all settings that may hold a path."""
    found: dict[str, object] = {"resources.catalogue": experiment.resources.catalogue}
    profile = experiment.profile
    if isinstance(profile, ProfilesByType):
        return found | {f"profile.by_instance_type.{name}": each for name, each in profile.by_instance_type.items()}
    return found | {"profile": profile}


def _require_provider(experiment: Experiment, settings: Settings) -> None:
    resources = experiment.resources
    if resources.provider not in settings.providers:
        allowed = " or ".join(settings.providers) or "none"
        raise _refused("resources.provider", f"{resources.provider} is not allowed here; use {allowed}")
    require_own_cluster(experiment)
    if resources.aws != Aws():
        key = next(name for name in Aws.model_fields if getattr(resources.aws, name) != getattr(Aws(), name))
        raise _refused(f"resources.aws.{key}", "only the operator sets up instances; leave it out")
    if resources.options:
        key = next(iter(resources.options))
        raise _refused(f"resources.options.{key}", "only the operator sets up instances; leave it out")
    if resources.kind.is_rented and settings.limits.max_cost_usd is not None:
        _require_true_prices(experiment)


def require_own_cluster(experiment: Experiment) -> None:
    """Raise Problem REFUSED for another Ray cluster than the one that the service is on, or for one without a price.

    A request makes the service connect to no address of its choice.
    """
    resources = experiment.resources
    if not resources.kind.is_borrowed:
        return
    if resources.address != "auto":
        raise _refused("resources.address", "the service uses its own Ray cluster only; leave it out")
    if resources.unit != "USD":
        raise _refused(
            "resources.price_per_hour",
            "a service counts in USD; write the GPUs of an instance as the price, which counts a GPU-hour as 1 USD",
        )


def _require_true_prices(experiment: Experiment) -> None:
    # A limit on spending would be void if requests could set prices.
    resources = experiment.resources
    prices = {
        "resources.price_per_hour": resources.price_usd_per_hour,
        "resources.spot.price_per_hour": resources.spot.price_usd_per_hour,
        "resources.side_price_per_hour": resources.side_usd_per_hour,
    }
    for key, price in prices.items():
        if price is not None:
            raise _refused(key, "the service limits spending by the provider's own prices; leave it out")


def _require_entrypoint(experiment: Experiment, settings: Settings) -> None:
    allowed = ", ".join(settings.entrypoints) or "nothing; ask the operator to list it (rubberband serve --allow)"
    if experiment.entrypoint is None and not experiment.resources.kind.is_simulated:
        raise _refused("entrypoint", f"is required to run an experiment; allowed is {allowed}")
    named = experiment.entrypoint
    if isinstance(named, Program):
        if not settings.allow_commands:
            raise _refused(
                "entrypoint.command",
                "commands are not allowed here, as each is a shell on the service's machine; name a module:attribute, "
                "or ask the operator (rubberband serve --allow-commands)",
            )
    elif named is not None and not (isinstance(named, str) and allows_code(named, settings.entrypoints)):
        raise _refused("entrypoint", f"{shown(named)} is not allowed here; allowed is {allowed}")
    scaling = experiment.batch.lr_scaling
    if scaling is not None and scaling not in LR_SCALINGS and not allows_code(scaling, settings.entrypoints):
        raise _refused("batch.lr_scaling", f"{shown(scaling)} is not allowed here; use one of {', '.join(LR_SCALINGS)}")


def _require_variables(experiment: Experiment, settings: Settings) -> None:
    """Raise a problem for a variable that the operator did not name: some turn what a trial starts into a shell."""
    resources = experiment.resources
    for key, option, names, allowed in (
        ("env", "--env", resources.env, settings.env),
        ("secrets", "--secret", resources.secrets, settings.secrets),
    ):
        for name in names:
            if name not in allowed:
                known = ", ".join(allowed) or f"none; ask the operator to list it (rubberband serve {option})"
                raise _refused(f"resources.{key}", f"{name} is not allowed here; allowed is {known}")


def _require_checkpoints(experiment: Experiment, settings: Settings) -> None:
    url = experiment.resources.checkpoints
    if url is None:
        return
    below = any(f"{url}/".startswith(f"{prefix.rstrip('/')}/") for prefix in settings.checkpoints)
    plain = "::" not in url and "%" not in url and "\\" not in url and ".." not in url.split("/")
    if not (below and plain):
        allowed = ", ".join(settings.checkpoints)
        more = "ask the operator to list it (rubberband serve --checkpoints)"
        kept = more if experiment.resources.kind.is_rented else "leave it out: they are kept with the experiment"
        remedy = f"use a plain path below {allowed}" if allowed else kept
        raise _refused("resources.checkpoints", f"{shown(url)} is not allowed here; {remedy}")


def _require_trackers(experiment: Experiment) -> None:
    for number, tracker in enumerate(experiment.track or ()):
        for key in ("folder", "uri"):
            if getattr(tracker, key, None) is not None:
                raise _refused(f"track.{number}.{key}", "only the operator says where runs are tracked; leave it out")


def _require_budget(experiment: Experiment, settings: Settings) -> None:
    most, asked = settings.limits.max_cost_usd, experiment.constraints.max_cost_usd
    if most is None:
        return
    if asked is None:
        raise _refused("constraints.max_cost", f"is required; write at most {format_usd(most)}")
    if asked > most:
        raise _refused(
            "constraints.max_cost", f"{format_usd(asked)} is more than {format_usd(most)}, the limit here; lower it"
        )
