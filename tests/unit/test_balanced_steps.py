"""When a gang looks at its workers, what it does with the shares, and what a machine has for a worker."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rubberband.executor import CpuTimer, CudaLapClock, GlobalBatch, GlobalBatchSampler
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training.balancing import Availability, Balancing, at_least, can_balance
from rubberband.executor.training.clocks import ComputeTimer, CudaTimer
from rubberband.executor.training.sampler import FixedBatching
from rubberband.planner.balancing import Line, Look, ShareLimits
from rubberband.values.balance import Balance, even_shares
from tests.builders import segments
from tests.builders.fake_cuda import FakeCuda

SEGMENT = replace(segments.SEGMENT, num_workers=3)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """What a step allows."""

    least, can_skip = 1, True


class Alone(Gang):
    """Rank 0 of three; the others are as fast, and a look takes `look_s`."""

    def __init__(self, clock: Clock | FakeCuda, look_s: float) -> None:
        super().__init__(0, 3, None)
        self.clock, self.look_s = clock, look_s
        self.looks = 0

    def table(self, row: Any) -> list[list[float]]:
        self.clock.now += self.look_s
        self.looks += 1
        return [list(row)] * 3


class Wanted:
    """A balancer that proposes what the test wants."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.wanted: tuple[int, ...] = (4, 4, 4)
        self.limits: ShareLimits | None = None

    def observe(self, look: Look) -> None:
        self.looks.append(look)

    def shares(self, batch_size: int, limits: ShareLimits) -> tuple[int, ...]:
        self.limits = limits
        return self.wanted

    def lines(self) -> tuple[Line, ...]:
        return ()

    def step_s(self, shares: Any, limits: ShareLimits) -> float:
        return max(shares) / 100.0

    def stragglers(self) -> tuple[int, ...]:
        return (2,)

    def state(self) -> dict[str, Any]:
        return {"wanted": self.wanted}

    def restore(self, state: dict[str, Any]) -> None:
        self.wanted = state["wanted"]


class Run:
    """A gang that trains in simulated time."""

    def __init__(
        self,
        *,
        look_s: float = 0.0005,
        num_samples: int = 1200,
        is_costly: bool = False,
        gpu: FakeCuda | None = None,
        **words: Any,
    ) -> None:
        self.clock, self.balancer = gpu or Clock(), Wanted()
        self.gang = Alone(self.clock, look_s)
        self.batching = FixedBatching(GlobalBatchSampler(1200, 0), 12, 12, 1200)
        clock = gpu.clock if gpu else self.clock
        self.timer = CudaTimer() if gpu else CpuTimer(self.gang, clock)
        self.balancing = Balancing(
            replace(SEGMENT, **({"device": "cuda"} if gpu else {}), **words),
            self.gang,
            self.timer,
            SimpleNamespace(step=Steps(), batching=self.batching),
            12,
            num_samples=num_samples,
            is_costly=is_costly,
            clock=clock,
            balancer=self.balancer,
        )

    def steps(self, number: int, step_s: float, batch_size: int = 12) -> list[tuple[int, ...]]:
        """Take `number` steps, and return the shares of each."""
        found = []
        for _ in range(number):
            shares = tuple(self.balancing.shares(batch_size, 3))
            found.append(shares)
            self.balancing.begin_step()
            self.compute(step_s)
            self.balancing.after_step(GlobalBatch(indices=np.arange(batch_size), shares=shares))
            self.batching.batch_size = batch_size
            self.balancing.pause()
        return found

    def compute(self, step_s: float) -> None:
        self.clock.now += step_s


class GpuRun(Run):
    """The same on a GPU: a twenty-fifth of a step is its hand-over, a tenth is the wait for other workers."""

    def __init__(self, gpu: FakeCuda, **words: Any) -> None:
        super().__init__(gpu=gpu, **words)
        self.gpu = gpu
        self.compiling_s = 0.0
        """What the host takes for kernels before it hands over the next step."""

    def compute(self, step_s: float) -> None:
        self.gpu.compute(self.compiling_s)
        self.gpu.launch(0.8 * step_s, host_s=0.03 * step_s)
        self.timer.computed()
        self.gpu.launch(0.1 * step_s)
        self.timer.averaged()
        self.gpu.launch(0.1 * step_s, host_s=0.01 * step_s)


@pytest.mark.parametrize(("look_s", "step_s"), [(0.0003, 0.1), (0.0005, 0.005), (0.002, 0.001), (0.01, 0.03)])
def test_looks_take_half_a_percent_of_the_time_and_less_on_equal_workers(look_s, step_s):
    run = Run(look_s=look_s)
    run.steps(30, step_s)
    looks, began = run.gang.looks, run.clock.now
    run.steps(20_000, step_s)
    share = (run.gang.looks - looks) * look_s / (run.clock.now - began)
    assert share < 0.005
    assert run.gang.looks > looks + 5, "but they do not end"


def test_long_steps_are_looked_at_after_each_of_them():
    run = Run(look_s=0.0003)
    run.steps(30, 0.2)
    looks = run.gang.looks
    run.balancer.wanted = (6, 4, 2)
    run.steps(10, 0.2)
    assert run.gang.looks == looks + 10


def test_a_decision_after_a_step_holds_for_the_next_one():
    run = Run()
    run.steps(2, 0.1)
    run.balancer.wanted = (7, 5, 0)
    before = run.steps(2, 0.1)
    assert before == [(4, 4, 4)] * 2
    assert run.steps(1, 0.1) == [(7, 5, 0)]
    assert tuple(run.balancing.shares(6, 3)) == (4, 2, 0), "the last batch of an epoch is divided alike"


def test_another_batch_size_is_looked_at_at_once():
    run = Run(look_s=0.01)
    run.steps(100, 0.001)
    run.balancer.wanted = (12, 8, 4)
    assert run.steps(1, 0.001, batch_size=24) == [(8, 8, 8)]
    assert run.steps(1, 0.001, batch_size=24) == [(12, 8, 4)]


def test_the_first_step_and_batches_of_other_sizes_are_not_timed():
    run = Run()
    run.steps(1, 9.0)
    run.steps(1, 0.1)
    assert [look.compute_s for look in run.balancer.looks] == [pytest.approx((0.1, 0.1, 0.1))]
    assert [look.steps for look in run.balancer.looks] == [1]


def test_workers_are_timed_also_if_the_training_set_is_smaller_than_a_batch():
    run = Run(num_samples=9)
    run.balancer.wanted = (6, 2, 1)
    run.batching.batch_size = 12
    for _ in range(3):
        shares = tuple(run.balancing.shares(9, 3))
        run.balancing.begin_step()
        run.clock.now += 0.1
        run.balancing.after_step(GlobalBatch(indices=np.arange(9), shares=shares))
        run.balancing.pause()
    assert shares == (6, 2, 1)
    assert [look.shares for look in run.balancer.looks] == [(3, 3, 3)]


def test_changes_are_rare_where_each_of_them_empties_the_loaders_or_compiles():
    run = Run(is_costly=True)
    shares = []
    for number in range(2000):
        run.balancer.wanted = (4 + number % 2, 4 - number % 2, 4)
        now = tuple(run.balancing.shares(12, 3))
        slow = bool(shares) and shares[-1] != now
        shares += run.steps(1, 0.15 if slow else 0.05)
    changes = sum(one != other for one, other in pairwise(shares))
    assert 5 < changes < 2000 * 0.05 * 0.02 / 0.1 + 12


@pytest.mark.parametrize(("max_share", "caps"), [(None, 12), (0.5, 6), (0.1, 4)])
def test_a_worker_gets_no_more_than_the_settings_allow_but_all_samples_are_taken(max_share, caps):
    limits = Run(balance=Balance(max_share=max_share)).balancing.limits(12)
    assert limits == ShareLimits(caps=(caps,) * 3, least=1, zero_costs_nothing=True)


def test_the_report_adds_up_the_looks_since_the_last_one():
    run = Run()
    assert run.balancing.report() is None
    run.balancer.wanted = (2, 4, 6)
    run.steps(7, 0.1)
    use = run.balancing.report()
    assert use is not None
    assert (use.shares, use.steps, use.stragglers) == ((2, 4, 6), 5, (2,))
    assert use.step_s == pytest.approx(0.1)
    assert use.compute_s == pytest.approx((0.1, 0.1, 0.1))
    assert use.equal_step_s == pytest.approx(0.1 - 0.02)
    assert run.balancing.report() is None


def test_a_state_is_of_use_to_a_gang_of_the_same_size():
    run = Run()
    run.balancer.wanted = (2, 4, 6)
    run.steps(3, 0.1)
    state = run.balancing.state_dict()
    same, other = Run(), Run()
    same.balancing.load_state_dict(state)
    assert same.steps(1, 0.1) == [(2, 4, 6)]
    other.balancing.load_state_dict({**state, "shares": (6, 6)})
    other.balancing.load_state_dict(None)
    assert other.steps(1, 0.1) == [even_shares(12, 3)]


@pytest.mark.parametrize(
    ("words", "has_own_step", "expected"),
    [
        ({}, False, True),
        ({}, True, True),
        ({"device": "cuda"}, False, True),
        ({"device": "cuda"}, True, False),
        ({"num_workers": 1}, False, False),
        ({"balance": Balance(policy="equal")}, False, False),
        ({"batch_mode": "sweep"}, False, False),
    ],
)
def test_some_gangs_are_not_balanced(words, has_own_step, expected):
    assert can_balance(replace(SEGMENT, **words), has_own_step=has_own_step) is expected


@pytest.mark.parametrize(
    ("shares", "least", "expected"),
    [((1, 7, 4), 2, (0, 8, 4)), ((1, 1, 1), 2, (3, 0, 0)), ((1, 7, 4), 1, (1, 7, 4)), ((0, 1, 0), 2, (0, 1, 0))],
)
def test_no_share_is_too_small(shares, least, expected):
    assert at_least(shares, least) == expected


def test_a_timer_leaves_out_what_is_waiting():
    clock = Clock()
    gang = Gang(0, 1, None)
    timer = CpuTimer(gang, clock)
    for counts in (True, False, True):
        timer.begin()
        clock.now += 1.0
        gang.waited_s += 0.25  # a collective
        timer.computed()
        clock.now += 5.0
        timer.averaged()
        clock.now += 0.5
        timer.end(counts=counts)
    times = timer.take()
    assert (times.steps, times.own_s, times.step_s) == (2, pytest.approx(2 * 1.25), pytest.approx(2 * 6.5))
    assert timer.take().steps == ComputeTimer().take().steps == 0


def test_a_step_of_a_gpu_takes_the_time_of_the_gpu_and_not_that_of_its_hand_over(fake_cuda):
    """It was told as the hand-over alone: with equal shares a step would take nine times as long, said the report."""
    run = GpuRun(fake_cuda)
    run.balancer.wanted = (2, 4, 6)
    run.steps(100, 0.1)
    use = run.balancing.report()
    assert use is not None
    assert use.step_s == pytest.approx(0.1, rel=0.05)
    assert use.compute_s == pytest.approx((0.09, 0.09, 0.09), rel=0.05)
    assert use.equal_step_s == pytest.approx(use.step_s - 0.02)


def test_looks_at_gpus_wait_for_them_as_seldom_as_their_steps_are_long(fake_cuda):
    run = GpuRun(fake_cuda)
    run.steps(100, 0.1)
    looks, began, waited_s = run.gang.looks, fake_cuda.now, fake_cuda.waited_s
    run.steps(400, 0.1)
    every_s = (fake_cuda.now - began) / (run.gang.looks - looks)
    assert 1.0 <= every_s <= 2.6
    assert fake_cuda.waited_s - waited_s > 0.9 * (fake_cuda.now - began), "all that the host is ahead of the GPU"


def test_a_look_at_a_gpu_takes_also_the_wait_for_it(fake_cuda):
    """Steps of 5 ms: by the 0.02 ms that the exchange alone takes, there would be a look after each 4 of them."""
    run = GpuRun(fake_cuda, look_s=2e-5)
    run.steps(2000, 0.005)
    looks = run.gang.looks
    run.steps(2000, 0.005)
    assert 2000 / (run.gang.looks - looks) == pytest.approx(2.5 / 0.005, rel=0.3)


def test_changes_are_rare_where_kernels_are_compiled_for_each_of_them(fake_cuda):
    run, shares = GpuRun(fake_cuda), []
    for _ in range(6000):
        now = tuple(run.balancing.shares(12, 3))
        run.balancer.wanted = (5, 3, 4) if now == (4, 4, 4) else (4, 4, 4)
        run.compiling_s = 1.0 if shares and shares[-1] != now else 0.0
        shares += run.steps(1, 0.05)
    changes = sum(one != other for one, other in pairwise(shares))
    assert changes - 10 == pytest.approx(fake_cuda.now * 0.02, rel=0.3)


def test_a_change_that_is_dear_once_does_not_keep_later_ones_away(fake_cuda):
    """The first one with `compile`: torch then compiles for any size."""
    run = GpuRun(fake_cuda)
    run.steps(40, 0.05)
    for wanted, compiling_s in (((5, 3, 4), 0.0), ((6, 2, 4), 60.0), ((4, 4, 4), 0.0)):
        run.balancer.wanted = wanted
        while tuple(run.balancing.shares(12, 3)) != wanted:
            run.steps(1, 0.05)
        run.compiling_s = compiling_s
        run.steps(1, 0.05)
        run.compiling_s = 0.0
        run.steps(200, 0.05)
    assert fake_cuda.now < 110.0


def test_the_first_step_of_another_batch_size_is_not_timed_where_kernels_are_compiled(fake_cuda):
    run = GpuRun(fake_cuda)
    run.steps(40, 0.05)
    run.balancer.wanted = (8, 8, 8)
    run.steps(1, 0.05, batch_size=24)
    seen = len(run.balancer.looks)
    run.compiling_s = 60.0
    run.steps(1, 0.1, batch_size=24)
    run.compiling_s = 0.0
    run.steps(100, 0.1, batch_size=24)
    assert len(run.balancer.looks) > seen
    for look in run.balancer.looks[seen:]:
        assert look.compute_s == pytest.approx((0.09,) * 3, rel=0.05)


def test_a_gpu_that_is_behind_is_not_waited_for_by_its_timer(fake_cuda):
    timer = CudaTimer()
    for step_s in (0.1, 0.2, 0.4):
        timer.begin()
        fake_cuda.launch(step_s, host_s=0.001)
        timer.computed()
        timer.averaged()
        timer.end(counts=step_s < 0.4, has_changed=True)
    assert timer.take().steps == 0
    fake_cuda.sleep(0.15)
    assert timer.take().steps == 1
    torch.cuda.synchronize()
    times = timer.take()
    assert (times.steps, times.step_s, times.changed_s) == (1, pytest.approx(0.2), pytest.approx(0.4))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for path, text in {
        "proc/self/cgroup": "4:memory:/m\n1:cpu,cpuacct:/jobs/one\n0::/two/three\n",
        "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/two/cpu.max": "75000 100000\n",
        "sys/fs/cgroup/two/three/cpu.max": "max 100000\n",
        "proc/thread-self/schedstat": "0 0 0\n",
        "proc/meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_the_quotas_of_control_groups_count_at_once(machine):
    found = Availability(1, root=machine)
    assert found.cpus() == 0.5
    (machine / "sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_quota_us").write_text("-1")
    assert found.cpus() == 0.75
    (machine / "sys/fs/cgroup/two/cpu.max").write_text("max 100000")
    assert found.cpus() == 1.0, "one thread"
    assert found.memory() == 0.25


def test_cpus_are_fewer_where_the_worker_stands_in_the_queue(machine):
    (machine / "proc/self/cgroup").unlink()
    clock = Clock()
    queue = machine / "proc/thread-self/schedstat"
    found = Availability(1, root=machine, clock=clock)
    assert found.cpus() == 1.0
    clock.now += 1.0
    queue.write_text("400000000 200000000 7\n")
    assert found.cpus() == pytest.approx(2 / 3)
    clock.now += 1.0
    queue.write_text("nothing of use\n")
    assert found.cpus() == pytest.approx(2 / 3)
    (machine / "proc/meminfo").unlink()
    assert Availability(1, root=machine, clock=clock).memory() == 1.0


def test_the_pace_is_that_of_the_slowest_worker_at_the_same_batch_size():
    run = Run()
    run.steps(8, 0.4)
    assert run.balancing.pace() == 1.0
    run.balancer.wanted = (2, 4, 6)
    run.steps(2, 0.4)
    run.steps(8, 0.2)
    assert run.balancing.pace() == pytest.approx(0.5)
    run.balancer.wanted = (4, 8, 12)
    run.steps(9, 0.3, batch_size=24)
    assert run.balancing.pace() == pytest.approx(0.5), "the larger batch is no change of pace"
    run.balancer.wanted = (2, 4, 18)
    run.steps(2, 0.3, batch_size=24)
    run.steps(12, 0.6, batch_size=24)
    assert run.balancing.pace() == pytest.approx(1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_timed_without_the_wait_and_without_waiting_for_it():
    timer = CudaTimer()
    matrix = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    weight = torch.ones(4096, 4096, device="cuda")
    (matrix @ weight).sum().backward()  # the first pass of a process sets up cuBLAS, which takes longer than a step
    torch.cuda.synchronize()
    for _ in range(3):
        timer.begin()
        loss = (matrix @ weight).sum()
        timer.watch(loss)
        loss.backward()
        torch.cuda._sleep(200_000_000)  # what waits for other workers
        timer.averaged()
        timer.end(counts=True)
    assert timer.take().steps < 3
    torch.cuda.synchronize()
    times = timer.take()
    assert times.steps >= 1
    assert 0.0 < times.own_s / times.steps < 0.05 < times.step_s / times.steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pause_of_a_gpu_counts_as_far_as_it_works_on():
    clock = CudaLapClock()
    clock.lap()
    torch.cuda._sleep(400_000_000)  # 0.2 s or so
    for pause_s in (0.05, 0.0):
        clock.pause()
        time.sleep(pause_s)  # of a real GPU's time
        clock.resume()
    busy_s, _ = clock.lap()
    clock.pause()
    time.sleep(0.5)  # of a real GPU's time
    clock.resume()
    idle_s, _ = clock.lap()
    assert idle_s < 0.05 < 0.1 < busy_s
