"""The agent of a trial: it comes to the best batch from timings and noise scale, within its limits, and remembers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest

from rubberband.executor.training.goodput.agent import DOUBTED_AFTER, GROWTH, MOST_POINTS, BatchAgent, BatchChoice
from rubberband.planner.goodput import choose, choose_at, step_s
from rubberband.values.adaptive import BatchLimits, BatchPoint, Throughput

LIMITS = BatchLimits(initial=64, max=4096)
OVERHEAD_BOUND = Throughput(alpha_grad_s=0.01, beta_grad_s=1e-5, alpha_local_s=0.02, gamma=2.0)
COMPUTE_BOUND = Throughput(alpha_grad_s=1e-6, beta_grad_s=1e-3)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(limits: BatchLimits = LIMITS, gpus: int = 4, clock: Callable[[], float] | None = None, **more) -> BatchAgent:
    return BatchAgent(limits, instances=1, gpus=gpus, clock=clock or Clock(), **more)


def train(agent: BatchAgent, truth: Throughput, noise_scale: float | None, decisions: int = 20) -> list[BatchChoice]:
    """The choices of an agent whose steps take what `truth` says."""
    choices = [agent.split(agent.limits.initial)]
    for _ in range(decisions):
        used = choices[-1]
        seconds = float(step_s(truth, 1, agent.gpus, used.per_gpu, used.accumulation))
        agent.observe(used, 20, 20 * seconds)
        choices.append(agent.choose(used, noise_scale))
    return choices


@pytest.mark.parametrize("truth", [OVERHEAD_BOUND, COMPUTE_BOUND], ids=["overhead", "compute"])
@pytest.mark.parametrize("noise_scale", [10.0, 300.0, 6400.0])
@pytest.mark.parametrize("gpus", [1, 4])
def test_it_comes_to_a_batch_of_nearly_the_highest_goodput_and_stays(truth, noise_scale, gpus):
    choices = train(make(gpus=gpus), truth, noise_scale)
    best = choose(truth, noise_scale, LIMITS, 1, gpus)
    got = choose_at(truth, noise_scale, LIMITS, 1, gpus, choices[-1].batch_size)
    assert got.goodput >= 0.97 * best.goodput
    assert len(set(choices[-5:])) == 1


def test_where_a_larger_batch_helps_nothing_the_batch_comes_back_to_the_initial_one():
    assert train(make(gpus=1), COMPUTE_BOUND, 10.0)[-1].batch_size == 64


def test_the_batch_grows_step_by_step_and_never_without_a_noise_scale():
    choices = train(make(), OVERHEAD_BOUND, 1e6)
    for before, after in itertools.pairwise(choices):
        assert after.batch_size <= GROWTH * before.batch_size
    assert choices[-1].batch_size == LIMITS.max
    assert set(train(make(), OVERHEAD_BOUND, None)) == {BatchChoice(batch_size=64, per_gpu=16, accumulation=0)}


@pytest.mark.parametrize("accumulation", [True, False])
def test_a_limit_of_memory_is_kept_and_passed_by_accumulation_alone(accumulation):
    limits = BatchLimits(initial=64, max=4096, max_per_gpu=100, accumulation=accumulation)
    choices = train(make(limits), OVERHEAD_BOUND, 1e6)
    assert max(choice.per_gpu for choice in choices) <= 100
    assert choices[-1].batch_size == (4000 if accumulation else 400), "4,096 is not worth a change"


def test_a_batch_beyond_the_memory_is_not_tried_again():
    agent = make()
    agent.forbid(128, 64)
    assert agent.limits.max_per_gpu == 96
    agent.forbid(96, 90)
    assert agent.limits.max_per_gpu == 90
    assert agent.split(1024) == BatchChoice(batch_size=1024, per_gpu=86, accumulation=2)
    agent.forbid(1, 0)
    assert agent.limits.max_per_gpu == 1, "one sample is the least"


def test_old_timings_fade():
    agent = make(gpus=1)
    for seconds in [1.0] * 50 + [2.0] * 8:
        agent.observe(BatchChoice(batch_size=64, per_gpu=64, accumulation=0), 10, 10 * seconds)
    (point,) = agent.points()
    assert point == BatchPoint(instances=1, gpus=1, per_gpu=64, accumulation=0, step_s=2.0)


def test_profiled_batches_help_until_new_measurements():
    known = [
        BatchPoint(instances=1, gpus=4, per_gpu=m, accumulation=0, step_s=float(step_s(OVERHEAD_BOUND, 1, 4, m, 0)))
        for m in (16, 64, 256, 1024)
    ]
    agent = make(known=known)
    assert agent.choose(agent.split(64), 1000.0).batch_size == 128, "without a step of its own"
    agent.observe(agent.split(64), 20, 20 * 1.5 * known[0].step_s)
    assert [point.step_s for point in agent.points()] == pytest.approx([1.5 * point.step_s for point in known])


def test_the_pace_of_a_profile_is_found_at_sizes_that_it_did_not_time():
    known = [
        BatchPoint(instances=1, gpus=1, per_gpu=m, accumulation=0, step_s=float(step_s(COMPUTE_BOUND, 1, 1, m, 0)))
        for m in (64, 256, 1024)
    ]
    agent = make(gpus=1, known=known)
    agent.observe(agent.split(100), 20, 20 * 2.0 * float(step_s(COMPUTE_BOUND, 1, 1, 100, 0)))
    assert [point.step_s for point in agent.points()[:3]] == pytest.approx(
        [2.0 * point.step_s for point in known], rel=0.02
    )


def test_it_resumes_with_what_it_has_learnt_on_another_gang():
    agent = make(gpus=4)
    learnt = train(agent, OVERHEAD_BOUND, 1e6)[-1]
    other = make(gpus=2)
    other.load_state_dict(json.loads(json.dumps(agent.state_dict())))
    assert other.points() == agent.points()
    assert other.choose(other.split(learnt.batch_size), 1e6).batch_size == learnt.batch_size == 4096
    agent.forbid(1024, 512)
    other.load_state_dict(json.loads(json.dumps(agent.state_dict())))
    assert other.limits.max_per_gpu == 768
    assert other.split(4096) == BatchChoice(batch_size=4096, per_gpu=683, accumulation=2)


def test_it_fits_anew_no_more_often_than_it_can_afford():
    clock, fits = Clock(), 0

    def slow_clock() -> float:
        nonlocal fits
        fits += 1
        clock.now += 0.001
        return clock.now

    agent = make(clock=slow_clock)
    train(agent, COMPUTE_BOUND, 64.0, decisions=3)
    before = fits
    train(agent, COMPUTE_BOUND, 64.0, decisions=30)
    assert fits - before <= 45, "a look at the clock for every choice, two more for a fit in a hundred milliseconds"


def test_it_remembers_a_bounded_number_of_configurations():
    agent = make(gpus=1)
    for size in range(64, 64 + 2 * MOST_POINTS):
        agent.observe(BatchChoice(batch_size=size, per_gpu=size, accumulation=0), 1, 1.0)
    assert [point.per_gpu for point in agent.points()] == list(range(64 + MOST_POINTS, 64 + 2 * MOST_POINTS))


@pytest.mark.parametrize("size", [1, 63, 64, 400, 4096, 9999])
def test_a_size_is_made_attainable(size):
    limits = BatchLimits(initial=64, max=4096, max_per_gpu=50, accumulation=False)
    assert make(limits).attainable(size) == min(max(size, 64), 200)


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("max_per_gpu", [1, 2, 3, 8])
def test_where_every_pass_is_full_it_settles_all_the_same(max_per_gpu, gpus):
    limits = BatchLimits(initial=16, max=512, max_per_gpu=max_per_gpu)
    choices = train(make(limits, gpus=gpus), OVERHEAD_BOUND, 100.0, decisions=30)
    best = choose(OVERHEAD_BOUND, 100.0, limits, 1, gpus)
    got = choose_at(OVERHEAD_BOUND, 100.0, limits, 1, gpus, choices[-1].batch_size)
    assert got.goodput >= 0.97 * best.goodput
    assert len(set(choices[-10:])) == 1


def test_one_wild_timing_does_not_keep_the_batch_small():
    agent, choices = make(gpus=1), []
    used, disturbed = agent.split(64), False
    for _ in range(3 * DOUBTED_AFTER):
        seconds = 20 * float(step_s(OVERHEAD_BOUND, 1, 1, used.per_gpu, used.accumulation))
        if used.batch_size > 64 and not disturbed:
            seconds, disturbed = 5 * seconds, True
        agent.observe(used, 20, seconds)
        choices.append(used := agent.choose(used, 1000.0))
    assert choices[3].batch_size == 64
    assert choices[-1].batch_size > 256


def test_timings_of_other_sizes_follow_the_pace_of_unequal_workers():
    pace = [1.0]
    agent = BatchAgent(LIMITS, instances=1, gpus=4, clock=Clock(), pace=lambda: pace[0])
    small, large = agent.split(64), agent.split(256)
    agent.observe(small, 10, 10 * 0.4)
    pace[0] = 1.1
    agent.observe(large, 10, 10 * 1.0)
    assert sorted(point.step_s for point in agent.points()) == pytest.approx([0.4, 1.0]), "that may be noise"
    pace[0] = 0.5  # their shares are balanced now
    agent.observe(large, 30, 30 * 0.5)
    assert sorted(point.step_s for point in agent.points()) == pytest.approx([0.2, 0.5], rel=0.1)
    resumed = BatchAgent(LIMITS, instances=1, gpus=4, clock=Clock(), pace=lambda: 2.0)  # a worker has become slow
    resumed.load_state_dict(agent.state_dict())
    resumed.observe(large, 100, 100 * 1.0)
    assert sorted(point.step_s for point in resumed.points()) == pytest.approx([0.4, 1.0], rel=0.1)
