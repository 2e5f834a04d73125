"""The space of a define-by-run function of Optuna, as `OptunaSearch(space=function)` takes it.

The function is called with trials that try every choice. Its parameters become a space: one that it asks for only after
some choice belongs to those options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rubberband.errors import InputError
from rubberband.spec.samplers import configured
from rubberband.spec.space import Domain, choice, foreign

_TRIES = 200
"""Random calls that compare the space with the function."""
_MOST_CALLS = 2000

Distributions = dict[str, Any]


def space_of_function(function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the space of a define-by-run function. Raises InputError if its parameters depend on more than choices."""
    name = getattr(function, "__name__", "the define-by-run function")
    traced = _Traced(function, name)
    space = {**traced.space({}, ()), **traced.constants}
    for seed in range(_TRIES):
        asked, params = traced.call({}, seed)
        try:
            drawn = configured(space, lambda path, domain: domain.find(params[path[-1]]))  # noqa: B023
        except (KeyError, InputError):
            drawn = {}
        if drawn.keys() != {*asked, *traced.constants}:
            raise InputError(
                f"{name}: which parameters a trial has depends on more than a choice; give the space as param_space, "
                "with an option {name: ..., space: {...}} of a choice"
            )
    return space


class _Traced:
    """A define-by-run function that is called again and again."""

    def __init__(self, function: Callable[[Any], Any], name: str) -> None:
        self._function, self._name, self._calls = function, name, 0
        self._known: Distributions = {}
        self.constants: dict[str, Any] = {}

    def call(self, fixed: Mapping[str, Any], seed: int = 0) -> tuple[Distributions, dict[str, Any]]:
        """Return the distributions and the values of a trial in which some choices are fixed."""
        import optuna

        from rubberband.executor.sampling import quiet

        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise InputError(f"{self._name} has too many choices to try them all; give the space as param_space")
        with quiet():
            at_random = optuna.samplers.RandomSampler(seed=seed)
            trial = optuna.create_study(sampler=optuna.samplers.PartialFixedSampler(dict(fixed), at_random)).ask()
            constants = self._function(trial) or {}
        if self._calls == 1:
            self.constants = dict(constants)
        elif dict(constants) != self.constants:
            raise InputError(f"{self._name} returns other constants for other trials; suggest them instead")
        for each, distribution in trial.distributions.items():
            if self._known.setdefault(each, distribution) != distribution:
                raise InputError(
                    f"{self._name}: {each} has other bounds for other trials; give it another name in each case"
                )
        return dict(trial.distributions), dict(trial.params)

    def space(self, fixed: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
        """Return the space of the parameters beside the `known` ones, where some choices are fixed."""
        asked, _ = self.call(fixed)
        options = {
            name: {value: self.call({**fixed, name: value})[0] for value in asked[name].choices}
            for name in asked
            if name not in known and hasattr(asked[name], "choices")
        }
        for name, by_value in options.items():
            every = [set(each) for each in by_value.values()]
            if set.intersection(*every) != set.union(*every):
                return self._branching(fixed, known, name, by_value)
        return {name: self._domain(name, asked[name]) for name in asked if name not in known}

    def _branching(
        self, fixed: Mapping[str, Any], known: tuple[str, ...], name: str, by_value: Mapping[Any, Distributions]
    ) -> dict[str, Any]:
        """Return the space of a choice whose options have parameters of their own, and of what all options have."""
        common = set.intersection(*(set(each) for each in by_value.values()))
        shared: dict[str, Any] = {}
        values: list[Any] = []
        for value, asked in by_value.items():
            inner = self.space({**fixed, name: value}, (*known, name))
            shared |= {each: domain for each, domain in inner.items() if each in common}
            own = {each: domain for each, domain in inner.items() if each in asked and each not in common}
            if own and not isinstance(value, str):
                raise InputError(
                    f"{self._name}: the option {value!r} of {name} has parameters of its own; name it by a text"
                )
            values.append({"name": value, "space": own} if own else value)
        return {name: choice(values), **shared}

    def _domain(self, name: str, distribution: Any) -> Domain:
        try:
            domain = foreign(distribution)
        except InputError as error:
            raise InputError(f"{self._name}: {name}: {error}") from None
        assert domain is not None, "a distribution of Optuna"
        return domain
