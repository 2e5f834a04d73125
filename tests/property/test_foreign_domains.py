"""Domains of Ray Tune and Optuna: trials get the values that the installed libraries draw from them."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import optuna
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from optuna import distributions
from ray import tune
from ray.tune.search import sample

from rubberband.errors import InputError
from rubberband.executor import distribution
from rubberband.executor.sampling import external
from rubberband.spec.space import DOMAINS, Domain, parse

DRAWS = 10_000

whole, steps = st.integers(-40, 40), st.integers(1, 9)
natural = st.integers(1, 40)
decimal = st.integers(-400, 400).map(lambda count: count / 100)
fraction = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.7, 1, 2.5])
positive = st.sampled_from([1e-8, 1e-4, 0.01, 0.3, 1.0, 1, 20.0])
values = st.lists(st.sampled_from([0, 1, False, True, 0.0, 1.0, None, "a", "1"]), min_size=1, max_size=5)


def multiples(counts: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Bounds that are multiples of a quantum, as one writes them, and the quantum."""
    written = st.tuples(counts, counts, fraction)
    return written.map(lambda each: (round(each[0] * each[2], 9), round(each[1] * each[2], 9), each[2]))


OF_RAY: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "uniform": st.tuples(decimal, decimal),
    "quniform": multiples(whole),
    "loguniform": st.tuples(positive, positive),
    "qloguniform": multiples(natural),
    "choice": st.tuples(values),
    "randint": st.tuples(whole, whole),
    "lograndint": st.tuples(natural, natural),
    "qrandint": st.tuples(whole, whole, steps),
    "qlograndint": st.tuples(natural, natural, steps),
    "randn": st.tuples(decimal, fraction),
    "qrandn": st.tuples(decimal, fraction, st.sampled_from([0.01, 0.1, 0.5])),
}
OF_OPTUNA: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "FloatDistribution": st.tuples(decimal, decimal, st.just(False), st.none() | fraction)
    | multiples(whole).map(lambda each: (each[0], each[1] + each[2] / 3, False, each[2]))
    | st.tuples(positive, positive, st.just(True)),
    "UniformDistribution": st.tuples(decimal, decimal),
    "LogUniformDistribution": st.tuples(positive, positive),
    "DiscreteUniformDistribution": st.tuples(decimal, decimal, fraction) | multiples(whole),
    "IntDistribution": st.tuples(whole, whole, st.just(False), steps) | st.tuples(natural, natural, st.just(True)),
    "IntUniformDistribution": st.tuples(whole, whole, steps),
    "IntLogUniformDistribution": st.tuples(natural, natural),
    "CategoricalDistribution": st.tuples(values),
}


def test_every_constructor_of_the_installed_libraries_is_compared() -> None:
    functions = {name for name, each in inspect.getmembers(sample, inspect.isfunction) if name in dir(tune)}
    assert functions == {*OF_RAY, "sample_from"}
    assert {each.__name__ for each in distributions.DISTRIBUTION_CLASSES} == set(OF_OPTUNA)


@st.composite
def domains(draw: Callable[..., Any]) -> Any:
    """A domain that its library makes and draws from."""
    name = draw(st.sampled_from([*OF_RAY, *OF_OPTUNA]))
    arguments = draw({**OF_RAY, **OF_OPTUNA}[name])
    try:
        made = _make(name, arguments)
        _theirs(made, 1)
    except (ValueError, AssertionError):
        assume(False)
    return made


@given(domains())
def test_trials_get_what_the_installed_library_draws(theirs: Any) -> None:
    try:
        domain = parse(theirs)
    except InputError as error:
        if not re.search("no multiple of|must be less than upper=", str(error)):
            raise
    else:
        _compare(theirs, domain)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qrandint", (1, 5)),
        ("qlograndint", (1, 5, 1)),
        ("qrandint", (-7, -2, 1)),
        ("qrandint", (-7, 8, 4)),
        ("uniform", (1, 1)),
        ("quniform", (0.3, 0.9, 0.3)),
        ("Float", (0, 1)),
        ("Integer", (0, 4)),
        ("FloatDistribution", (0.5, 1, False, 0.7)),
        ("FloatDistribution", (-0.3, 1, False, 0.3)),
        ("FloatDistribution", (0, 1e9, False, 1e7 + 0.1)),
        ("FloatDistribution", (3.0, 3.0)),
        ("IntDistribution", (-9, -2, False, 3)),
        ("IntDistribution", (5, 5, True)),
        ("CategoricalDistribution", ([0, False, 0.0, 1, True],)),
    ],
)
def test_edges(name: str, arguments: tuple[Any, ...]) -> None:
    theirs = _make(name, arguments)
    _compare(theirs, parse(theirs))


def test_a_grid_that_begins_between_multiples_is_refused_also_where_it_is_far_away() -> None:
    for theirs in (
        _make("IntDistribution", (1_000_000_001, 1_000_000_009, False, 2)),
        _make("FloatDistribution", (1e9 + 0.5, 1e9 + 9.5, False, 1)),
    ):
        with pytest.raises(InputError, match=r"is no multiple of step=.*; write choice\(\[...\]\) with its values"):
            parse(theirs)


def test_a_choice_of_ray_that_is_walked_is_a_grid() -> None:
    assert parse(sample.Categorical([1, 2]).grid()) == parse(tune.grid_search([1, 2]))


def _make(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return a domain of the library that has the name. Raises ValueError or AssertionError as the library does."""
    library = next(each for each in (tune, sample, distributions) if hasattr(each, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(library, name)(*arguments)


def _compare(theirs: Any, domain: Domain) -> None:
    seen = [_plain(each) for each in _theirs(theirs, DRAWS)]
    for ours in (_drawn(domain), _proposed(domain)):
        assert {type(each) for each in ours} == {type(each) for each in seen}
        if not domain.options:
            span, given = max(seen) - min(seen), "mean" not in domain.arguments
            apart = max(abs(max(ours) - max(seen)), abs(min(ours) - min(seen)))
            assert apart <= span * (0.05 if given else 0.5)
        if not _is_continuous(domain):
            # the tails of normal values, and of logarithms whose ends are rounded otherwise, are seldom drawn
            assert _often(ours) <= set(map(_text, seen))
            assert _often(seen) <= set(map(_text, ours))
            assert domain.options or not given or min(seen) - 1e-9 <= min(ours) <= max(ours) <= max(seen) + 1e-9


def _often(values: Sequence[Any]) -> set[str]:
    return {value for value, times in Counter(map(_text, values)).items() if times >= len(values) / 200}


def _is_continuous(domain: Domain) -> bool:
    return not domain.options and not DOMAINS[domain.kind].whole and "q" not in domain.arguments


def _drawn(domain: Domain) -> list[Any]:
    return [domain.draw((index + 0.5) / DRAWS) for index in range(DRAWS)]


def _proposed(domain: Domain) -> list[Any]:
    """What a sampler of Optuna makes of the domain."""
    proposed = _theirs(distribution(domain), DRAWS // 5)
    return (
        [domain.options[each] for each in proposed] if domain.options else [external(domain, each) for each in proposed]
    )


def _theirs(domain: Any, count: int) -> Sequence[Any]:
    if isinstance(domain, sample.Domain):
        found = domain.sample(size=count, random_state=5)
        return [found] if count == 1 else found
    sampler = optuna.samplers.RandomSampler(seed=5)
    study, trial = optuna.create_study(sampler=sampler), optuna.trial.create_trial(value=0.0)
    return [sampler.sample_independent(study, trial, "x", domain) for _ in range(count)]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _text(value: Any) -> str:
    """The value, the same for floats that differ only by rounding."""
    return repr(float(f"{round(value, 12):.9g}") + 0.0) if isinstance(value, float) else repr(value)
