"""The rules of the sharing policies: the exact division, KNEE, HELL and fitness, and simulations under them."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.planner.sharing import Capacity, Demand, make_policy
from rubberband.planner.sharing.jobs import CurveJob
from rubberband.planner.sharing.policies import divide
from rubberband.planner.sharing.simulation import SimulatedJob, simulate

some_value = st.floats(-10.0, 10.0) | st.just(-math.inf)


@given(rows=st.lists(st.lists(some_value, min_size=6, max_size=6), min_size=1, max_size=4))
def test_a_division_is_as_good_as_the_best_of_all(rows: list[list[float]]) -> None:
    values = np.asarray([[0.0, *row[1:]] for row in rows])
    found = divide(values, 5)
    assert found.sum() <= 5
    best = max(
        sum(values[row, count] for row, count in enumerate(counts))
        for counts in itertools.product(range(6), repeat=len(rows))
        if sum(counts) <= 5
    )
    assert sum(values[row, count] for row, count in enumerate(found)) == pytest.approx(best, abs=1e-9)


def demand(name: str, seconds: list[float], **more: float) -> Demand:
    return Demand(name=name, arrived_at=0.0, seconds_left=seconds, **more)  # type: ignore[arg-type]


def gpus(policy: str, demands: list[Demand], instances: int, **options: object) -> dict[str, int]:
    capacity = Capacity(instances=instances, gpus_per_instance=1)
    found = make_policy(policy, **options).allocate(demands, capacity, {}, 10.0)
    return {name: sum(where.values()) for name, where in found.items()}


SATURATING = [100.0, 50.0, 40.0, 39.0, 38.9, 38.8]


def test_knee_stops_where_a_gpu_adds_less_than_alpha() -> None:
    other = demand("other", [1000.0] * 6)
    assert gpus("knee", [demand("a", SATURATING), other], 4, alpha=0.1) == {"a": 3, "other": 1}
    assert gpus("knee", [demand("a", SATURATING), other], 5, alpha=0.02) == {"a": 4, "other": 1}


def test_hell_weighs_time_by_efficiency_and_fills_up() -> None:
    # w S(w)^2 / S(1) is 100, 50, 48, 60.8, ...: 3 GPUs, and the rest by filling (eq. 5)
    assert gpus("hell", [demand("a", SATURATING), demand("b", [90.0] * 6)], 4) == {"a": 3, "b": 1}
    assert gpus("hell", [demand("a", SATURATING)], 6) == {"a": 6}


@pytest.mark.parametrize(("alpha", "expected"), [(0.05, 16), (0.02, 28), (0.01, 48)])
def test_knee_of_whole_instances_is_that_of_the_smooth_curve(alpha: float, expected: int) -> None:
    capacity = Capacity(instances=16, gpus_per_instance=4)
    curve = [1000.0 * (0.02 + 0.98 / count) for count in range(1, 65)]
    smooth = demand("job", curve)
    stairs = demand("job", [math.inf] * 3 + [curve[count // 4 * 4 - 1] for count in range(4, 65)], min_gpus=4)
    policy = make_policy("knee", alpha=alpha, resizing="moldable")  # which does not fill up the rest
    knees = [sum(policy.allocate([each], capacity, {}, 0.0)["job"].values()) for each in (smooth, stairs)]
    assert knees[1] == expected
    assert abs(knees[0] - knees[1]) <= 4


def test_alpha_follows_the_load_that_others_make() -> None:
    # 3 GPUs make a 2.5 times as fast, .25 of 10 GPUs, so that b finds alpha = .02 + .25 (.2 - .02) = .065
    demands, held = [demand("a", SATURATING), demand("b", SATURATING)], {"a": {0: 1, 1: 1, 2: 1}}
    capacity, policy = (
        Capacity(instances=10, gpus_per_instance=1),
        make_policy("knee:alpha=0.02..0.2,resizing=moldable"),
    )
    assert len(policy.allocate(demands, capacity, held, 10.0)["b"]) == 3
    assert len(policy.allocate(demands[1:], capacity, {}, 10.0)["b"]) == 4, "alone"
    # on 3 GPUs a alone is .83 of the load, and alpha is .17
    full = policy.allocate(demands, Capacity(instances=3, gpus_per_instance=1), held, 10.0)
    assert full == {"a": {0: 1, 1: 1, 2: 1}}
    # one GPU that a holds counts as one, not as the four that it would like: alpha is .024
    narrow = make_policy("knee:alpha=0.02..0.06,resizing=moldable")
    assert len(narrow.allocate(demands, capacity, {"a": {0: 1}}, 10.0)["b"]) == 4
    # twelve that wait are more than the pool: alpha is .2 and no more, so that the third GPU, 22 %, is given
    waiting = [demand(f"w{number}", [100.0]) for number in range(12)]
    busy = policy.allocate([demand("a", [100.0, 50.0, 39.0]), *waiting], capacity, {}, 10.0)
    assert len(busy["a"]) == 3


@pytest.mark.parametrize("written", ["lod", "0.05..0.01", "0.01..", "..0.05", "0.01..2", "0.1..0.2..0.3", "nan..0.5"])
def test_a_wrong_alpha_is_one_line(written: str) -> None:
    says = (
        f"alpha={written!r} is not a number from 0 to 1, or two of them, the smaller one first, as 0.01..0.05; correct"
    )
    with pytest.raises(InputError, match=re.escape(says)):
        make_policy(f"knee:alpha={written}")
    with pytest.raises(InputError, match=re.escape("gamma='1..2' is not a number from 0 to 10; correct it")):
        make_policy("hell:gamma=1..2")


def test_gain_gives_a_smaller_step_where_the_best_one_does_not_fit() -> None:
    waves = demand("a", [100.0, 99.0, 98.0, 97.0, 20.0])
    assert gpus("gain", [waves, demand("b", [50.0])], 5) == {"a": 4, "b": 1}


@pytest.mark.parametrize("p", [-1.0, -7.0, -10.0, -100.0])
def test_fitness_serves_as_many_as_it_can_whatever_p_is(p: float) -> None:
    many = [demand(f"e{number}", [(number + 1.0) / count for count in range(1, 65)]) for number in range(100)]
    assert gpus("fitness", many, 64, p=p) == {f"e{number}": 1 for number in range(64)}
    held = {f"e{number}": {number - 30: 1} for number in range(30, 80)}
    young = [replace(each, delta_s=30.0, attained_gpu_s=10.0) for each in many]
    found = make_policy("fitness", p=p).allocate(young, Capacity(instances=64, gpus_per_instance=1), held, 100.0)
    assert {name: found.get(name) for name in held} == held, "where it costs nothing, nobody moves"
    assert sum(sum(where.values()) for where in found.values()) == 64


@pytest.mark.parametrize(("free", "expected"), [(5, [2, 2, 1, 0]), (6, [2, 2, 2, 0]), (7, [2, 2, 3, 0])])
def test_a_division_is_right_where_values_differ_by_more_than_a_double_has_digits(
    free: int, expected: list[int]
) -> None:
    needy, choosy = [-1e240, -1.0, -0.9, -0.9], [-3e-3, -2e-3, -1e-3, 0.0]
    rows = [needy, needy, choosy, [-2e-3, -1.5e-3, -1e-3, -1e-3]]
    assert divide(np.asarray([row + row[-1:] * (free - 3) for row in rows]), free).tolist() == expected


def test_gamma_serves_what_has_just_begun_first() -> None:
    new = demand("new", [60.0], progress=0.0)
    near_its_end = demand("old", [50.0], progress=0.6)
    assert gpus("hell", [new, near_its_end], 1) == {"old": 1}
    assert gpus("hell", [new, near_its_end], 1, gamma=1.0) == {"new": 1}


def test_a_moldable_demand_keeps_its_gpus_or_waits() -> None:
    begun = demand("a", SATURATING, started_gpus=2)
    assert gpus("hell", [begun], 6, resizing="moldable") == {"a": 2}
    assert gpus("hell", [begun], 1, resizing="moldable") == {}


def test_ranked_moves_only_what_earns_it_soon() -> None:
    capacity = Capacity(instances=4, gpus_per_instance=1)
    long_one, current = demand("a", [1000.0, 600.0, 580.0, 570.0], attained_gpu_s=1.0), {"a": {0: 1}}
    for delta_s, expected in ((0.0, 4), (30.0, 4), (500.0, 1)):
        found = make_policy("ranked").allocate([replace(long_one, delta_s=delta_s)], capacity, current, 100.0)
        assert sum(found["a"].values()) == expected
    far_from_its_end = demand("a", [1e5 / count for count in range(1, 5)], delta_s=200.0, attained_gpu_s=1.0)
    found = make_policy("ranked").allocate([far_from_its_end], capacity, {"a": {0: 1, 1: 1}}, 100.0)
    assert sum(found["a"].values()) == 4
    near_its_end = demand("a", [60.0, 36.0, 35.0, 34.0], delta_s=30.0, attained_gpu_s=1.0)
    assert make_policy("ranked").allocate([near_its_end], capacity, current, 100.0) == current


def test_ranked_keeps_gpus_for_a_job_that_no_longer_scales() -> None:
    stuck = demand("stuck", [500.0, 490.0, 485.0, 480.0])
    longer = demand("longer", [2000.0 / count for count in range(1, 9)])
    found = gpus("ranked", [longer, stuck], 4)
    assert found == {"longer": 3, "stuck": 1}


def test_fitness_serves_all_alike_and_default_the_short_ones_first() -> None:
    linear = [1.0 / count for count in range(1, 9)]
    long_one = demand("long", [1000.0 * each for each in linear])
    short = demand("short", [10.0 * each for each in linear])
    assert gpus("fitness", [long_one, short], 8) == {"long": 4, "short": 4}
    shares = gpus("default", [long_one, short], 8)
    assert shares["short"] > shares["long"] > 0


def test_a_demand_that_would_move_in_vain_keeps_its_gpus() -> None:
    capacity = Capacity(instances=4, gpus_per_instance=1)
    seconds = [100.0, 51.0, 35.0, 27.0]
    moved_often = [
        Demand(name=name, arrived_at=0.0, seconds_left=seconds, delta_s=30.0, moves=moves, attained_gpu_s=1.0)
        for name, moves in (("a", 3), ("b", 3))
    ]
    current = {"a": {0: 1}, "b": {1: 1, 2: 1}}
    found = make_policy("fitness").allocate(moved_often, capacity, current, 100.0)
    assert found == current


def jobs() -> list[CurveJob]:
    return [
        CurveJob(
            name=f"j{number}",
            submitted_at=40.0 * number,
            kind="curve",
            seconds=[(300.0 + 50.0 * number) / count**0.8 for count in range(1, 9)],
            resize_s=5.0,
        )
        for number in range(6)
    ]


@pytest.mark.parametrize("policy", ["default", "equal", "hell", "fifo"])
@pytest.mark.parametrize("interval_s", [None, 30.0])
def test_a_simulation_ends_every_job_and_counts_every_gpu_second(policy: str, interval_s: float | None) -> None:
    outcome = simulate(jobs(), Capacity(instances=2, gpus_per_instance=4), make_policy(policy), interval_s=interval_s)
    again = simulate(jobs(), Capacity(instances=2, gpus_per_instance=4), make_policy(policy), interval_s=interval_s)
    assert outcome.jobs == again.jobs
    for job in outcome.jobs:
        assert job.started_at is not None
        assert job.submitted_at <= job.started_at < job.submitted_at + job.jct_s
    ends = [*(at for at, _ in outcome.allocated[1:]), outcome.ended_at]
    held_gpu_s = sum(
        sum(counts.values()) * (end_at - at) for (at, counts), end_at in zip(outcome.allocated, ends, strict=True)
    )
    assert sum(job.gpu_s for job in outcome.jobs) <= held_gpu_s + 1e-6
    assert 0.0 < outcome.utilisation <= 1.0 + 1e-9
    assert outcome.summary()["unfinished"] == 0


@pytest.mark.parametrize("interval_s", [None, 30.0])
def test_jobs_that_follow_others_are_submitted_at_their_ends_in_that_order(interval_s: float | None) -> None:
    later, asked = jobs()[3:], list[str]()

    def after(ended: SimulatedJob) -> list[CurveJob]:
        asked.append(ended.name)
        assert ended.done_at is not None
        following = [later.pop(0)] if later else []
        for job in following:
            job.submitted_at = ended.done_at
        return following

    capacity = Capacity(instances=2, gpus_per_instance=4)
    outcome = simulate(jobs()[:3], capacity, make_policy("fifo"), interval_s=interval_s, after=after)

    done = {job.name: job.done_at or math.inf for job in outcome.jobs}
    assert asked == sorted(done, key=done.__getitem__)
    assert [job.name for job in outcome.jobs] == [f"j{number}" for number in range(6)]
    assert [job.submitted_at for job in outcome.jobs[3:]] == sorted(done.values())[:3]
    assert all(job.started_at >= job.submitted_at for job in outcome.jobs if job.started_at is not None)


def test_a_job_that_never_fits_is_counted_as_unfinished() -> None:
    too_large = CurveJob(name="large", submitted_at=0.0, kind="curve", seconds=[math.inf] * 3 + [10.0], min_gpus=4)
    outcome = simulate([too_large], Capacity(instances=1, gpus_per_instance=2), make_policy("default"), interval_s=None)
    assert outcome.summary()["unfinished"] == 1
    assert outcome.summary()["mean_jct_s"] is None
