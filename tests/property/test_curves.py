"""What the rest of a search may bring, from its learning curves: properties that no constant of the model changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.planner.curves import LEAST_CURVES, LEAST_REPORTS, Chain, Curve, Rest, rest_of

VALUES = st.floats(min_value=-1.0, max_value=1.0).map(lambda value: round(value, 3))


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[Curve], list[Chain], float, float | None]:
    """Curves of 3 to 9 trials, a chain of some of them and new ones, the best value, and that of trials at an end."""
    lengths = draw(st.lists(st.integers(LEAST_REPORTS, 9), min_size=LEAST_CURVES, max_size=9))
    curves = [
        Curve(iterations=range(1, length + 1), values=draw(st.lists(VALUES, min_size=length, max_size=length)))
        for length in lengths
    ]
    going = draw(st.integers(0, len(curves)))
    new = draw(st.integers(0 if going else 1, 5))
    rounds = ((going + new, 12), (max(1, (going + new) // 3), 40))
    chains = [Chain(curves=tuple(range(going)), new=new, rounds=rounds[draw(st.integers(0, 1)) :])]
    ended = max(curves[-1].values) if draw(st.booleans()) else None
    return curves, chains, max(curve.values[-1] for curve in curves), ended


def rest(curves: Sequence[Curve], chains: Sequence[Chain], best: float, ended: float | None = None) -> Rest:
    found = rest_of(curves, chains, best, ended=ended)
    assert found is not None
    return found


@given(searches(), st.lists(st.floats(min_value=0.0, max_value=3.0), min_size=2, max_size=6))
def test_larger_improvements_are_less_likely(
    search: tuple[list[Curve], list[Chain], float, float | None], sizes: list[float]
) -> None:
    found = rest(*search)
    chances = [found.chance(size) for size in sorted(sizes)]
    assert chances == sorted(chances, reverse=True)
    assert all(0.0 <= chance <= 1.0 for chance in chances)
    assert found.expected >= max(size * found.chance(size) for size in sizes) - 1e-12  # Markov's inequality


@given(searches(), st.sampled_from([1e-3, 0.5, 8.0, 1024.0]), st.floats(min_value=-4.0, max_value=4.0))
def test_units_of_the_metric_do_not_matter(
    search: tuple[list[Curve], list[Chain], float, float | None], scale: float, offset: float
) -> None:
    curves, chains, best, ended = search

    def put(value: float) -> float:
        return scale * value + offset

    moved = [Curve(iterations=curve.iterations, values=[put(value) for value in curve.values]) for curve in curves]
    before = rest(curves, chains, best, ended)
    after = rest(moved, chains, put(best), None if ended is None else put(ended))
    assert after.gains / scale == pytest.approx(before.gains, abs=1e-5)


@given(searches(), st.integers(0, 99))
def test_the_order_of_trials_does_not_matter(
    search: tuple[list[Curve], list[Chain], float, float | None], seed: int
) -> None:
    curves, chains, best, ended = search
    order = random.Random(seed).sample(range(len(curves)), len(curves))
    place = {at: new for new, at in enumerate(order)}
    moved = [replace(chain, curves=tuple(place[at] for at in chain.curves)) for chain in chains]
    again = rest([curves[at] for at in order], moved, best, ended)
    assert list(again.gains) == pytest.approx(list(rest(curves, chains, best, ended).gains), abs=1e-9)


@given(searches())
def test_a_trial_that_has_ended_is_a_floor_and_more_trials_do_not_hurt(
    search: tuple[list[Curve], list[Chain], float, float | None],
) -> None:
    curves, chains, best, _ = search
    found = rest(curves, chains, best)
    with_floor = rest(curves, chains, best, ended=best)
    assert with_floor.gains.min() >= 0.0
    assert with_floor.expected == pytest.approx(found.expected)
    another = Chain(new=3, rounds=((3, 20),))
    assert rest(curves, [*chains, another], best).expected >= found.expected - 1e-12


@pytest.mark.parametrize("new", [1, 4, 40])
def test_new_trials_beat_all_others_as_often_as_chance_has_it(new: int) -> None:
    begun = 8
    curves = [Curve(iterations=range(1, 6), values=[at / 10.0] * 5) for at in range(begun)]
    found = rest(curves, [Chain(new=new, rounds=((new, 5),))], 0.7, ended=0.7)
    assert found.chance(0.0) == pytest.approx(new / (begun + new), abs=0.04)


def test_a_new_trial_may_be_as_bad_as_those_that_were_given_up() -> None:
    curves = [Curve(iterations=range(1, 6), values=[at / 10.0] * 5) for at in range(8)]
    found = rest_of(curves, [Chain(new=4, rounds=((4, 5),))], 0.7, ended=0.7, given_up=8)
    assert found is not None
    assert found.chance(0.0) == pytest.approx(4 / (8 + 8 + 4), abs=0.04)


def test_the_further_a_noisy_curve_is_continued_the_less_is_left_of_its_level() -> None:
    curves = [
        Curve(iterations=range(1, 11), values=[0.5 - 0.05 * k + 0.02 * (-1) ** t for t in range(10)]) for k in range(4)
    ]
    gains = [rest(curves, [Chain(curves=(0,), rounds=((1, at),))], 0.48).quantile(0.5) for at in (20, 100, 1000)]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("at", [4, 10])
def test_a_curve_that_still_rises_is_continued_and_a_flat_one_is_not(at: int) -> None:
    done = range(1, at + 1)
    rising = [Curve(iterations=done, values=[1.0 - 1.0 / t - 0.01 * k for t in done]) for k in range(4)]
    flat = [Curve(iterations=done, values=[0.9 - 0.01 * k] * at) for k in range(4)]
    chain = [Chain(curves=(0, 1), rounds=((2, 4 * at),))]
    assert rest(rising, chain, 1.0 - 1.0 / at).chance(0.3 / at) > 0.8
    assert rest(flat, chain, 0.9).chance(0.001) == 0.0


def test_only_the_best_of_a_round_go_on() -> None:
    """The trial that rises would be the best at the end, and is left behind by the flat one before."""
    done = range(1, 11)
    curves = [
        Curve(iterations=done, values=values) for values in ([0.9] * 10, [1.1 - 2.5 / t for t in done], [0.1] * 10)
    ]
    all_the_way = rest(curves, [Chain(curves=(0, 1, 2), rounds=((3, 10), (3, 100)))], 0.9)
    halved = rest(curves, [Chain(curves=(0, 1, 2), rounds=((3, 10), (1, 100)))], 0.9)
    assert all_the_way.chance(0.01) > 0.5
    assert halved.chance(0.01) < 0.1


def test_a_curve_that_falls_goes_on_falling() -> None:
    curves = [Curve(iterations=range(1, 11), values=[1.0 - 0.05 * t - 0.01 * k for t in range(10)]) for k in range(4)]
    assert rest(curves, [Chain(curves=(0,), rounds=((1, 40),))], 0.55).worse > 0.9


def test_too_few_reports_or_curves_say_nothing() -> None:
    long = [Curve(iterations=range(1, 9), values=[0.1 * t for t in range(8)]) for _ in range(LEAST_CURVES)]
    short = Curve(iterations=range(1, LEAST_REPORTS), values=[0.1] * (LEAST_REPORTS - 1))
    chain = Chain(curves=(0,), rounds=((1, 20),))
    assert rest_of(long, [chain], 0.7) is not None
    assert rest_of(long[1:], [chain], 0.7) is None
    assert rest_of([*long, short], [Chain(curves=(0, 3), rounds=((2, 20),))], 0.7) is None
    assert rest_of([*long, short], [chain], 0.7) is not None
