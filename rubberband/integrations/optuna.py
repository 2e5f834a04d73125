"""An objective of Optuna as a trial: its `trial` has the values of a configuration, and reports iterations.

Neither Optuna nor any other library is imported before it is used: a program imports this file into its environment.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import wraps
from typing import Any, Literal, NoReturn

from rubberband.errors import InputError
from rubberband.executor.training.reporting import current_session, report
from rubberband.spec.quantiles import grid_index
from rubberband.spec.space import Domain, between, choice, parse
from rubberband.values.environment import SPACE

_MANY = 1000
"""Values of a range whose steps begin elsewhere than at 0, which is written as a choice."""
Direction = Literal["minimize", "maximize"]


def trial(config: Any, *, direction: Direction = "minimize") -> Any:
    """Return a trial of Optuna that has its values from a configuration.

    With it, an objective becomes a trial of RubberBand by one line. `suggest_…` returns the configuration's value, and
    ends the trial with a line where the experiment's space has another domain than the call. `report` is an iteration;
    a search that stops a trial ends it there, so `should_prune` is false. Given a trial of Optuna, it returns that:
    the same objective runs in a study, too.

    Args:
        config: The configuration.
        direction: The study's direction, for code that reads `trial.study.direction`.

    Returns:
        The trial.

    Examples:
        >>> from rubberband.integrations.optuna import trial
        >>> def objective(config):
        ...     asked = trial(config)
        ...     lr = asked.suggest_float("lr", 1e-4, 1e-1, log=True)
        ...     for epoch in range(2):
        ...         asked.report(lr / (epoch + 1), epoch)
        >>> objective({"lr": 0.01})
        value=0.01
        value=0.005
    """
    return config if hasattr(config, "suggest_float") else Trial(config, direction == "maximize")


def objective(function: Callable[[Any], Any], *, direction: Direction = "minimize") -> Callable[[Any], Any]:
    """Return an objective as a trial of RubberBand, which also reports the value that it returns.

    Args:
        function: The objective, which takes a trial and may report, or only return its value.
        direction: The study's direction, for code that reads `trial.study.direction`.

    Returns:
        A function that takes a configuration, or a trial of Optuna.

    Examples:
        >>> from rubberband.integrations import optuna
        >>> @optuna.objective
        ... def square(trial):
        ...     return trial.suggest_float("x", -1, 1) ** 2
        >>> square({"x": 0.5})
        value=0.25
        0.25
    """

    @wraps(function)
    def train(config: Any) -> Any:
        if hasattr(config, "suggest_float"):
            return function(config)
        return evaluated(function, Trial(config, direction == "maximize"))

    return train


def evaluated(function: Callable[[Any], Any], asked: Trial) -> float:
    """Call an objective, report the value that it returns unless it was its last report, and return it."""
    name = getattr(function, "__name__", "objective")
    try:
        value = function(asked)
    except Exception as error:
        if type(error).__name__ == "TrialPruned":
            _end(f"{name} has pruned this configuration itself")
        raise
    if isinstance(value, list | tuple):
        _end(f"{name} returned {len(value)} values; return the one that ranks trials")
    if not isinstance(value, int | float) and not hasattr(value, "item"):
        _end(f"{name} returned {value!r}, which is no number")
    if asked.latest != float(value):
        asked.hand_over(value)
    return float(value)


def _end(line: str) -> NoReturn:
    raise SystemExit(f"rubberband: {line}")


class Trial:
    """A trial of Optuna that has its values from a configuration."""

    def __init__(self, config: Mapping[str, Any], maximizes: bool) -> None:
        self.params: dict[str, Any] = {}
        self.user_attrs: dict[str, Any] = {}
        self.system_attrs: dict[str, Any] = {}
        self.study = Study(maximizes)
        session: Any = current_session.get(None)
        run = re.match(r"rubberband-(\d+)-", os.environ.get("TORCHELASTIC_RUN_ID", ""))
        self.number: int = session.segment.trial if session is not None else int(run[1]) if run else 0
        self.latest: float | None = None
        """The value that was reported last."""
        self._metric: str = "value" if session is None else session.segment.metric
        self._config = config
        self._recorded = _recorded(config)
        self._steps = set[int]()

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return float(self._within(name, {"low": low, "high": high, "step": step, "log": log, "kind": "float"}))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._within(name, {"low": low, "high": high, "step": step, "log": log, "kind": "int"}))

    suggest_uniform = suggest_float

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        return self.suggest_float(name, low, high, step=q)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        texts = [choice if isinstance(choice, str) else json.dumps(choice, default=repr) for choice in choices]
        value = self._value(name, {"kind": "choice", "values": list(choices), "texts": texts})
        known = [json.dumps(choice, default=repr) for choice in choices]
        if (found := json.dumps(value)) not in known:  # an option that has parameters of its own has a text as name
            known, found = texts, value
        if found not in known:
            _end(
                f"{name}={value!r} is not one of {', '.join(texts)}, the choices of suggest_categorical; run init again"
            )
        self.params[name] = choices[known.index(found)]
        return self.params[name]

    def report(self, value: float, step: int, *, checkpoint: Any = None) -> None:
        """Report an iteration: the first value of each step, as a study does. `checkpoint`: see `rubberband.report`."""
        if int(step) < 0:
            raise ValueError(f"`{step=}` must be non-negative.")
        if int(step) not in self._steps:
            self._steps.add(int(step))
            self.hand_over(value, checkpoint)

    def hand_over(self, value: float, checkpoint: Any = None) -> None:
        """Report an iteration. Where the search stops the trial, this does not return."""
        self.latest = float(value)
        report({self._metric: self.latest}, checkpoint=checkpoint)

    def should_prune(self) -> bool:
        """Return False: a trial that the search has stopped is ended within `report`."""
        return False

    def set_user_attr(self, key: str, value: Any) -> None:
        self.user_attrs[key] = value

    def set_system_attr(self, key: str, value: Any) -> None:
        self.system_attrs[key] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trial.{name} is a study's, and RubberBand runs the objective without one")

    def _within(self, name: str, words: dict[str, Any]) -> float:
        value = self._value(name, words)
        if not words["low"] <= value <= words["high"]:
            _end(f"{name}={value} is outside {words['low']} to {words['high']}, which suggest_… has; run init again")
        self.params[name] = value
        return float(value) if words["kind"] == "float" else value

    def _value(self, name: str, words: dict[str, Any]) -> Any:
        if name not in self._config:
            _end(f"the objective asks for {name}, which the experiment's space lacks; add it there")
        if name in self._recorded:
            _require_same(name, words, self._recorded[name])
        return self._config[name]


class Study:
    """The study of a trial, as far as callbacks ask for it."""

    def __init__(self, maximizes: bool) -> None:
        self._maximizes = maximizes
        self.user_attrs: dict[str, Any] = {}

    @property
    def direction(self) -> Any:
        directions: Any = importlib.import_module("optuna").study.StudyDirection
        return directions.MAXIMIZE if self._maximizes else directions.MINIMIZE

    @property
    def directions(self) -> list[Any]:
        return [self.direction]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"study.{name} needs the other trials, which an objective does not see in RubberBand")


# The domains.


def _recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words of the experiment's space for the parameters of a configuration; none outside a search."""
    found = dict[str, Any]()

    def look(space: Mapping[str, Any]) -> None:
        for name, words in space.items():
            found[name] = words
            values = words.get("values", ()) if isinstance(words, Mapping) else ()
            for option in values:
                if _has_space(option) and option["name"] == config.get(name):
                    look(option["space"])

    look(json.loads(os.environ.get(SPACE, "{}")))
    return found


def _has_space(option: Any) -> bool:
    return isinstance(option, Mapping) and "space" in option


def _require_same(name: str, words: Mapping[str, Any], recorded: Any) -> None:
    """End the trial if a `suggest_…` has another domain than the experiment's space.

    A constant and a grid of the space are values that a user has chosen; they only need to be within the range.
    """
    if not isinstance(recorded, Mapping) or recorded.get("type") == "grid":
        return
    try:
        asked = domain_of(name, words)
    except InputError as error:
        _end(str(error))
    if _written(asked.to_words() if isinstance(asked, Domain) else asked, words) == _written(recorded, words):
        return
    written = repr(parse(recorded)).removeprefix("rubberband.")
    _end(
        f"{name} is {repr(asked).removeprefix('rubberband.')} in the objective and {written} in the experiment's "
        "space; write the same in both, or run init again"
    )


def _text(value: Any) -> str:
    return json.dumps(value, default=repr)


def _written(domain: Any, words: Mapping[str, Any]) -> Any:
    """Return a domain in words that compare: options by their names, without the base, which has no effect."""
    if not isinstance(domain, Mapping) or "values" not in domain:
        return {key: each for key, each in domain.items() if key != "base"} if isinstance(domain, Mapping) else domain
    names = dict(zip(map(_text, words.get("values", ())), words.get("texts", ()), strict=True))
    options = [each["name"] if _has_space(each) else _text(each) for each in domain["values"]]
    return domain["type"], [names.get(option, option) for option in options]


def domain_of(name: str, words: Mapping[str, Any]) -> Any:
    """Return the domain of a `suggest_…`, or a constant."""
    if words["kind"] == "choice":
        values = words["values"]
        if any(
            isinstance(value, str) and re.match(r"<.* at 0x[0-9a-f]+>|<(class|function|built-in)", value)
            for value in values
        ):
            raise InputError(
                f"suggest_categorical({name!r}) has values that are no plain ones; write texts, and look the objects up"
            )
        return choice(values) if len(values) > 1 else values[0]
    low, high, step = words["low"], words["high"], words["step"]
    if low == high:
        return low
    if step is None or grid_index(low, step).is_integer():
        return between(low, high, whole=words["kind"] == "int", step=step, log=words["log"])
    first, each = Decimal(repr(low)), Decimal(repr(step))
    count = int((Decimal(repr(high)) - first) / each) + 1
    if count > _MANY:
        raise InputError(
            f"{name}: steps of {step} from {low} have no counterpart; let the range begin at a multiple of {step}"
        )
    return choice([type(low)(first + at * each) for at in range(count)])
