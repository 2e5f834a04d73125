"""The pure samplers: configurations drawn at random, from a low-discrepancy sequence, or as a grid.

Sampling is a pure function of (seed, path of the parameter, trial): a trial's configuration depends neither on the
order of the parameters nor on the number of trials, and is the same with every version of Python and SciPy.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rubberband.errors import InputError
from rubberband.spec.quantiles import grid_index
from rubberband.spec.space import DOMAINS, Domain, SubSpace, canonical
from rubberband.units import nearest, shown

SamplerType = Literal["random", "grid", "quasi", "optuna"]
Configuration = dict[str, Any]
Path = tuple[str, ...]
"""A parameter: its name; before it, of one that an option of a choice has, that choice and the option's name."""
Draw = Callable[[Path, Domain], Any]
"""Returns a value of a domain, or one of its options with parameters of its own."""
Unit = Callable[[Path, int], float]
"""Returns the number in (0, 1) from which a parameter of a trial is drawn."""

MAX_GRID = 1_000_000
"""Most configurations of a grid: as many as an experiment may have trials."""
_MOST_AXES = 21_201
"""Dimensions of SciPy's Sobol sequence."""
_BITS = 30


def configured(space: Mapping[str, Any], draw: Draw, *, path: Path = ()) -> Configuration:
    """Return a configuration whose values `draw` chooses, with the parameters of the chosen options."""
    found: Configuration = {}
    for name, value in space.items():
        drawn = draw((*path, name), value) if isinstance(value, Domain) else value
        if isinstance(drawn, SubSpace):
            found |= {name: drawn.name, **configured(drawn.space, draw, path=(*path, name, drawn.name))}
        else:
            found[name] = drawn
    return found


def sample(
    space: Mapping[str, Any],
    sampler: SamplerType,
    num_samples: int,
    seed: int,
    points: Sequence[Mapping[str, Any]] = (),
) -> list[Configuration]:
    """Return the configurations of trials 0 … num_samples - 1; no release changes those of the same arguments.

    `random` draws each parameter from its own stream, and so does `optuna` before there are results. `quasi` takes the
    points of a Sobol sequence. `grid` is the cross product of the choices and grids in the order of `space`, the last
    parameter varying fastest; it needs `num_samples` to be the size of the grid. The first trials have the values of
    the `points`; what these leave out is drawn.

    Raises InputError as `check` does.
    """
    check(space, sampler, num_samples, points)
    if sampler == "grid":
        return _points_first(list(_grid_rows(space)), [check_point(space, point) for point in points])
    unit = _sobol(space, num_samples, seed) if sampler == "quasi" else _units(seed)
    return [
        configured(space, _drawer(unit, trial, points[trial] if trial < len(points) else {}))
        for trial in range(num_samples)
    ]


def _drawer(unit: Unit, trial: int, point: Mapping[str, Any]) -> Draw:
    def draw(path: Path, domain: Domain) -> Any:
        return domain.find(point[path[-1]]) if path[-1] in point else domain.draw(unit(path, trial))

    return draw


def completed(
    space: Mapping[str, Any], point: Mapping[str, Any], seed: int, number: int, base: Mapping[str, Any] | None = None
) -> Configuration:
    """Return the configuration of a trial that is added: the point's values, then those of `base`, the rest drawn.

    `number` is the trial's, from which what is drawn follows, beside what the sampler of this seed draws for others.
    Raises InputError for a value outside the space, a parameter that it has not, or one that the trial has not.
    """
    unit = _units(hashed(seed, "added") >> 1)

    def draw(path: Path, domain: Domain) -> Any:
        name = path[-1]
        given = point if name in point else base or {}
        if name not in given:
            if domain.kind == "grid":
                raise InputError(f"{name}: give one of its values, as a grid has no other to draw from")
            return domain.draw(unit(path, number))
        try:
            return domain.find(given[name])
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    found = configured(space, draw)
    if left := {name: value for name, value in point.items() if name not in found}:
        check_point(space, left, "the trial")
    for name, value in point.items():
        if name in space and not isinstance(space[name], Domain):
            check_point(space, {name: value}, "the trial")
    return found


def check(
    space: Mapping[str, Any], sampler: SamplerType, num_samples: int, points: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Refuse, with InputError, a space that `sampler` cannot draw `num_samples` configurations from."""
    for index, point in enumerate(points):
        check_point(space, point, f"points_to_evaluate[{index}]")
    if sampler != "grid":
        for path, domain in leaves(space):
            if domain.kind == "grid":
                raise InputError(
                    f"space.{'.'.join(path)} is a grid, which the {sampler} sampler does not walk; write "
                    "sampler: {type: grid}, or make it a choice"
                )
        _check_count(space, sampler, num_samples, points)
        return
    for path, domain in leaves(space):
        if not domain.options:
            raise InputError(
                f"space.{'.'.join(path)} has no grid ({domain.kind}); list its values as {{type: grid, values: [...]}}"
            )
    size = grid_size(space)
    if size > MAX_GRID:
        raise InputError(
            f"the grid has {size:,} configurations, more than {MAX_GRID:,}; list fewer values, or write them as choice "
            "and draw some with sampler: {type: random}"
        )
    if size != num_samples:
        consequence = f"{size - num_samples} would be dropped" if size > num_samples else "some would be trained twice"
        raise InputError(
            f"the grid has {size:,} configurations and the scheduler starts {num_samples} trials: {consequence}; leave "
            f"num_samples out, or set it (or the trials of the first stage) to {size}"
        )


def _check_count(
    space: Mapping[str, Any], sampler: SamplerType, num_samples: int, points: Sequence[Mapping[str, Any]]
) -> None:
    if len(points) > num_samples:
        raise InputError(
            f"points_to_evaluate has {len(points)} points and the scheduler starts {num_samples} trials; leave "
            f"{len(points) - num_samples} out or start more trials"
        )
    if sampler == "quasi" and (axes := sum(1 for _ in leaves(space))) > _MOST_AXES:
        raise InputError(f"the quasi sampler has {_MOST_AXES:,} dimensions and the space {axes:,}; use type: random")


def check_point(
    space: Mapping[str, Any], point: Mapping[str, Any], at: str = "the point", *, complete: bool = False
) -> Configuration:
    """Return a point with its values as the space writes them.

    The name of an option with parameters of its own comes with the point that gives values to these. Raises InputError
    for values outside the space, and (`complete`) for a point without a parameter that it needs.
    """
    known: set[str] = set()
    values: Configuration = {}

    def look(space: Mapping[str, Any]) -> None:
        known.update(space)
        for name, value in space.items():
            if name not in point:
                if complete and isinstance(value, Domain):
                    raise InputError(f"{at} has no value of {name}; add it")
                continue
            try:
                found = value.find(point[name]) if isinstance(value, Domain) else _same(value, point[name])
            except InputError as error:
                raise InputError(f"{at}.{name}: {error}") from None
            values[name] = found.name if isinstance(found, SubSpace) else found
            if isinstance(found, SubSpace):
                look(found.space)

    look(space)
    for name in point:
        if name not in known:
            owner = next((path for path, _ in leaves(space) if path[-1] == name and path[1:]), ())
            if owner:
                raise InputError(
                    f"{at}.{name}: only trials with {owner[-3]}={owner[-2]} have it; add that, or leave it out"
                )
            raise InputError(f"{at} has an unknown parameter {shown(name)}; {nearest(str(name), known)}")
    return values


def _same(constant: Any, value: Any) -> Any:
    if constant != value or isinstance(constant, bool) != isinstance(value, bool):
        raise InputError(f"{shown(value)} is not the constant {shown(constant)}; leave it out")
    return constant


def leaves(space: Mapping[str, Any], path: Path = ()) -> Iterable[tuple[Path, Domain]]:
    """Yield (path, domain) of all parameters that are no constants, also of those that only some trials have."""
    for name, value in space.items():
        if isinstance(value, Domain):
            yield (*path, name), value
            for option in value.sub_spaces:
                yield from leaves(option.space, (*path, name, option.name))


_DRAWS = 1000
_MOST_EXTREMES = 16


def extremes(space: Mapping[str, Any]) -> tuple[Configuration, ...]:
    """Return configurations that have the extreme values of each range and each option, all parameters in turn."""
    values = {path: extreme_values(domain) for path, domain in leaves(space)}
    turns = min(max(map(len, values.values()), default=0), _MOST_EXTREMES)

    def extreme(turn: int) -> Configuration:
        return configured(space, lambda path, domain: values[path][turn % len(values[path])])

    return tuple(map(extreme, range(turns)))


def extreme_values(domain: Domain) -> Sequence[Any]:
    """Return the options, or the least and the largest of many draws, and the negative one next to 0: -1.4e-05."""
    drawn = [domain.draw(draw / _DRAWS) for draw in range(1, _DRAWS)]
    below = [value for value in drawn if value < 0] if not domain.options else []
    return domain.options or list(dict.fromkeys([drawn[0], drawn[-1], *below[-1:]]))


# The grid.


def grid_size(space: Mapping[str, Any]) -> int:
    """Return the number of configurations of a grid: the product over the parameters of the number of their values.

    An option with parameters of its own counts as often as its own grid has configurations.
    """
    return math.prod(
        sum(grid_size(option.space) if isinstance(option, SubSpace) else 1 for option in _grid_values(value))
        for value in space.values()
    )


def num_configurations(space: Mapping[str, Any]) -> float:
    """Return how many configurations differ from each other; infinity with a parameter that is not counted out."""
    return math.prod(_num_values(value) for value in space.values() if isinstance(value, Domain))


def _num_values(domain: Domain) -> float:
    if domain.options:
        named = [option for option in domain.options if not isinstance(option, SubSpace)]
        return len({canonical(option) for option in named}) + sum(
            num_configurations(option.space) for option in domain.sub_spaces
        )
    lower, upper, q = (domain.arguments.get(name) for name in ("lower", "upper", "q"))
    if lower is None or upper is None or (q is None and not DOMAINS[domain.kind].whole):
        return math.inf
    return float(upper - lower) if q is None else math.floor(grid_index(upper, q)) - math.ceil(grid_index(lower, q)) + 1


def is_grid(space: Mapping[str, Any]) -> bool:
    """Return whether every domain is a grid, so that only the grid sampler can walk the space."""
    kinds = {domain.kind for _, domain in leaves(space)}
    return kinds == {"grid"}


def _grid_rows(space: Mapping[str, Any]) -> Iterable[Configuration]:
    columns = [list(_grid_column(name, value)) for name, value in space.items()]
    for row in itertools.product(*columns):
        yield {name: value for part in row for name, value in part.items()}


def _grid_column(name: str, value: Any) -> Iterable[Configuration]:
    for option in _grid_values(value):
        if isinstance(option, SubSpace):
            yield from ({name: option.name, **row} for row in _grid_rows(option.space))
        else:
            yield {name: option}


def _grid_values(value: Any) -> Sequence[Any]:
    return (value.options or (value,)) if isinstance(value, Domain) else (value,)


def _points_first(rows: list[Configuration], points: Sequence[Mapping[str, Any]]) -> list[Configuration]:
    """Return the rows, those that have the values of a point first."""

    wanted = [{(name, canonical(value)) for name, value in point.items()} for point in points]

    def place(row: Configuration) -> int:
        own = {(name, canonical(value)) for name, value in row.items()}
        return next((index for index, point in enumerate(wanted) if point <= own), len(points))

    return sorted(rows, key=place) if points else rows


# Numbers in (0, 1).


def _units(seed: int) -> Unit:
    """Return floats in (0, 1) with 52 bits, by hashing: a library's generator may change with its release."""
    return lambda path, trial: ((hashed(seed, *path, trial) >> 12) + 0.5) * 2.0**-52


def trial_seed(sampler_seed: int, trial: int) -> int:
    """Return the seed of a trial: initial weights and data order follow from it."""
    return random.Random(f"{sampler_seed}/{trial}").getrandbits(31)


def hashed(*key: object) -> int:
    """Return 64 bits that follow from the key, whatever the version of Python."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big")


def _sobol(space: Mapping[str, Any], num_samples: int, seed: int) -> Unit:
    """Return the points of a Sobol sequence with a digital shift, which keeps it evenly spread (L'Ecuyer 2009, 3.2).

    The shift of each dimension comes from (seed, path), so that another seed has other points.
    """
    from scipy.stats.qmc import Sobol

    axes = {path: axis for axis, (path, _) in enumerate(leaves(space))}
    if not axes or not num_samples:
        return _units(seed)
    points = Sobol(len(axes), scramble=False, bits=_BITS).random_base2((num_samples - 1).bit_length())
    whole = (points * 2.0**_BITS).round().astype("int64")
    shifts = {path: hashed(seed, "sobol", path) >> (64 - _BITS) for path in axes}
    return lambda path, trial: ((int(whole[trial, axes[path]]) ^ shifts[path]) + 0.5) * 2.0**-_BITS
