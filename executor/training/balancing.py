"""Shares of the workers of a gang that follow their speed (LB-BSP, SoCC '20), step by step.

Every worker times its own part of the steps (`clocks.py`). From time to time there is a look: the times are
exchanged, rank 0 decides about the shares, and all workers divide the next batch by them. Rank 0 alone decides, since
workers with different CPUs may round differently. How often depends on what a look takes: as often as a budget allows,
which on steps of a tenth of a second is after each of them.

The learning does not depend on the shares. So a checkpoint needs none; it holds what the balancer knows.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch

from rubberband.executor.training.clocks import ComputeTimer, StepTimes, make_timer
from rubberband.executor.training.components import Division
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.sampler import Batching, GlobalBatch
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import override_of
from rubberband.planner.balancing import Balancer, Look, ShareLimits, make_balancer
from rubberband.values.balance import BalanceUse, even_shares, scale_shares

if TYPE_CHECKING:
    from rubberband.executor.training.loop import TorchRunner

LOOKS_SHARE = 0.004
QUIET_SHARE = 0.001
"""The same once the shares have not changed in `QUIET_LOOKS` looks."""
SEEN_WITHIN_S, QUIET_WITHIN_S = 1.0, 2.5
"""A slow worker is seen within this time, whatever a look takes: on a busy machine it is long."""
QUIET_LOOKS = 20
FIRST_INTERVAL, MOST_INTERVAL = 2, 1000
"""Steps until the first look, and the most between two; it doubles at most from one to the next."""
FREE_LOOKS = 10
"""The first looks are frequent, at any cost: they find the shares."""
TYPICAL_OF = 5
"""Looks whose times are taken together: for what a look takes, their mean."""
CHANGES_SHARE = 0.02
"""Share of the time for changes of the shares, by what the latest two cost."""


@dataclass(slots=True)
class _BalancedStretch:
    """Times that rank 0 saw since the last report."""

    steps: int = 0
    step_s: float = 0.0
    """Sum over the steps, and of the own seconds of each worker."""
    compute_s: list[float] = field(default_factory=list)


class _Level:
    """max_i t_i at one batch size: with its first shares, and now."""

    def __init__(self) -> None:
        self._first: tuple[int, ...] | None = None
        self._before: deque[float] = deque(maxlen=TYPICAL_OF)
        self._now: deque[float] = deque(maxlen=TYPICAL_OF)

    def add(self, shares: tuple[int, ...], seconds: float) -> None:
        """Note the time of a look."""
        self._first = self._first or shares
        if shares == self._first and not self._now:
            self._before.append(seconds)
        else:
            self._now.append(seconds)

    def change(self) -> float:
        """Return the typical time now, by that before the shares changed."""
        return median(self._now) / median(self._before) if self._now else 1.0


class Balancing(Division):
    """Divides the batches of a gang by the speed of its workers; all of them call it in lockstep."""

    is_fixed = False

    def __init__(
        self,
        segment: Segment,
        gang: Gang,
        timer: ComputeTimer,
        loop: TorchRunner,
        batch_size: int,
        *,
        num_samples: int,
        is_costly: bool,
        clock: Callable[[], float] = time.perf_counter,
        balancer: Balancer | None = None,
    ) -> None:
        """`num_samples`: no batch is larger.

        `is_costly`: a change of the shares takes time, as loaders begin again or the model is compiled for other sizes.
        On a GPU it always may: cuDNN looks for other kernels, which takes long with `torch.backends.cudnn.benchmark`.
        """
        self._segment, self._gang, self._loop = segment, gang, loop
        self.timer: ComputeTimer = timer
        self._clock = clock
        self._is_cuda = segment.device == "cuda"
        self._is_costly = is_costly or self._is_cuda
        self._balancer = balancer or make_balancer(segment.balance, segment.device, segment.num_workers)
        self._availability = None if self._is_cuda else Availability(torch.get_num_threads())
        self._num_samples = num_samples
        self._size = min(batch_size, num_samples)
        self._now = even_shares(self._size, segment.num_workers)
        self._interval, self._since = FIRST_INTERVAL, 0
        self._untimed = 1
        """Steps whose time says nothing: the first one, and those with other sizes than before, if these cost time."""
        self._looks_s: deque[float] = deque(maxlen=TYPICAL_OF)
        self._num_looks = self._quiet = 0
        self._changes, self._since_change, self._rest_steps = 0, 0, 0
        self._changes_s: deque[float] = deque(maxlen=2)
        """Seconds of the first steps after the latest changes. The cheaper counts: the first change with `compile` is
        dear, as torch then compiles for any size."""
        self._stretch = _BalancedStretch()
        self._pace, self._level = 1.0, _Level()

    def shares(self, batch_size: int, num_workers: int) -> Sequence[int]:
        if batch_size == self._size:
            return self._now
        if self._now == even_shares(self._size, num_workers):
            return even_shares(batch_size, num_workers)
        return at_least(scale_shares(self._now, batch_size), self._loop.step.least)

    def largest_share(self, batch_size: int, num_workers: int) -> int:
        return batch_size

    def begin_step(self) -> None:
        self.timer.begin()

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool = True) -> None:
        counts = self._untimed == 0 and batch.shares == self._now
        self.timer.end(counts=counts, has_changed=self._untimed > 0 and self._changes > 0)
        self._untimed = max(0, self._untimed - 1)
        self._since += 1
        self._since_change += 1

    def pause(self) -> None:
        """Exchange the times, if a look is due, and divide the next batches by them."""
        batching = self._loop.batching
        batch_size = min(batching.batch_size, self._num_samples)
        if self._since < self._interval and batch_size == self._size:
            return
        began = self._clock()
        if self._is_cuda:  # part of the look: afterwards the host is no longer ahead of the GPU
            torch.cuda.synchronize()
        self._num_looks += 1
        times = self.timer.take()
        if not math.isnan(times.changed_s):
            self._changes_s.append(times.changed_s)
        change_s = min(self._changes_s) if len(self._changes_s) > 1 else math.nan
        available = self._availability
        cpus, memory = (math.nan, math.nan) if available is None else (available.cpus(), available.memory())
        look_s = fmean(self._looks_s) if self._looks_s else 0.0
        rows = self._gang.table([times.steps, times.own_s, cpus, memory, look_s, change_s])
        decided: list[float] = [0.0] * (len(self._now) + 1)
        if self._gang.rank == 0:
            self._observe(rows, times)
            decided = [*self._decided(batch_size, batching.most_per_worker), self._next_interval(rows, times)]
        *shares, interval = map(round, self._gang.share(decided))
        self._adopt(batching, batch_size, tuple(shares))
        self._interval, self._since = interval, 0
        if self._num_looks > 1:  # the first one takes longer
            self._looks_s.append(self._clock() - began)

    def _observe(self, rows: Sequence[Sequence[float]], times: StepTimes) -> None:
        """Show the times to the balancer, if all workers have some."""
        steps = [row[0] for row in rows]
        if min(steps) < 1:
            return
        own_s = tuple(row[1] / row[0] for row in rows)
        look = Look(
            shares=self._now,
            compute_s=own_s,
            steps=round(min(steps)),
            cpu=None if self._is_cuda else tuple(row[2] for row in rows),
            memory=None if self._is_cuda else tuple(row[3] for row in rows),
        )
        self._balancer.observe(look)
        self._level.add(self._now, max(own_s))
        stretch = self._stretch
        stretch.steps += times.steps
        stretch.step_s += times.step_s
        stretch.compute_s = [
            before + times.steps * seconds
            for before, seconds in zip(stretch.compute_s or [0.0] * len(own_s), own_s, strict=True)
        ]

    def _decided(self, batch_size: int, most: int | None) -> Sequence[int]:
        if batch_size == self._size and self._since_change < self._rest_steps:
            return self._now
        return self._balancer.shares(batch_size, self.limits(batch_size, most))

    def limits(self, batch_size: int, most: int | None = None) -> ShareLimits:
        """Return what the division of a batch must keep; `most`: what a worker can take at once, if it must."""
        num_workers = self._segment.num_workers
        most = min(batch_size, most or batch_size)
        if self._segment.balance.max_share is not None:
            most = min(most, max(int(self._segment.balance.max_share * batch_size), -(-batch_size // num_workers)))
        return ShareLimits(
            caps=(most,) * num_workers, least=self._loop.step.least, zero_costs_nothing=self._loop.step.can_skip
        )

    def _next_interval(self, rows: Sequence[Sequence[float]], times: StepTimes) -> int:
        """Return the steps until the next look. The worker that comes last to a look does not wait in it."""
        look_s = min(row[4] for row in rows)
        if not times.steps or self._num_looks <= FREE_LOOKS:
            return FIRST_INTERVAL
        step_s = times.step_s / times.steps
        change_s = max((row[5] for row in rows if not math.isnan(row[5])), default=0.0) - step_s
        self._rest_steps = math.ceil(max(0.0, change_s) / (CHANGES_SHARE * step_s)) if self._is_costly else 0
        moves = self._quiet < QUIET_LOOKS
        share, within_s = (LOOKS_SHARE, SEEN_WITHIN_S) if moves else (QUIET_SHARE, QUIET_WITHIN_S)
        interval_s = min(look_s / share, within_s)
        return min(max(1, math.ceil(interval_s / step_s)), 2 * self._interval, MOST_INTERVAL)

    def _adopt(self, batching: Batching, batch_size: int, shares: tuple[int, ...]) -> None:
        self._quiet += 1
        if tuple(self.shares(batch_size, len(shares))) == shares:
            if batch_size != self._size and self._is_costly:
                self._untimed = 1
            self._move_to(batch_size, shares)
            return
        batching.before_shares_change()
        self._move_to(batch_size, shares)
        self._quiet, self._since_change = 0, 0
        self._changes += 1
        self._untimed = int(self._is_costly)
        batching.after_shares_change()

    def _move_to(self, batch_size: int, shares: tuple[int, ...]) -> None:
        if batch_size != self._size:
            self._pace, self._level = self.pace(), _Level()
        self._size, self._now = batch_size, shares

    def pace(self) -> float:
        """Return max_i t_i now in relation to what it was at first, each at the same batch sizes, on rank 0.

        1 while the shares are equal: what looks like a change is noise then.
        """
        return self._pace * self._level.change()

    def end(self) -> Mapping[str, Any]:
        return {"balance": self.report()} if self._segment.rank == 0 else {}

    def report(self) -> BalanceUse | None:
        """Return the shares and times since the last report, on rank 0; None without a look."""
        stretch, self._stretch = self._stretch, _BalancedStretch()
        if not stretch.steps:
            return None
        limits = self.limits(self._size)
        step_s = stretch.step_s / stretch.steps
        even = even_shares(self._size, self._segment.num_workers)
        slower_s = self._balancer.step_s(even, limits) - self._balancer.step_s(self._now, limits)
        return BalanceUse(
            shares=self._now,
            compute_s=tuple(seconds / stretch.steps for seconds in stretch.compute_s),
            step_s=step_s,
            equal_step_s=step_s + slower_s if math.isfinite(slower_s) else step_s,
            steps=stretch.steps,
            stragglers=self._balancer.stragglers(),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"shares": self._now, "balancer": self._balancer.state()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from the `state`; a gang of another size begins with equal shares."""
        if state is None or len(state["shares"]) != self._segment.num_workers:
            return
        self._balancer.restore(state["balancer"])
        self._size, self._now = sum(state["shares"]), tuple(state["shares"])


def make_division(loop: TorchRunner) -> Balancing | None:
    """Return what balances the gang of a trial; None where its shares are fixed."""
    segment, feed = loop.segment, loop.feed
    if feed.is_stream and feed.has_workers:  # after a change they would read it from its beginning
        return None
    if not can_balance(segment, has_own_step=override_of(loop.trial, "step") is not None):
        return None
    return Balancing(
        segment,
        loop.gang,
        make_timer(loop.gang, loop.device),
        loop,
        loop.batch_size,
        num_samples=feed.num_samples,
        is_costly=feed.has_workers or loop.trial.compile,
    )


def can_balance(segment: Segment, *, has_own_step: bool) -> bool:
    """Return whether the shares of a gang follow the speed of its workers.

    They do not in a sweep, which times sizes, and in own steps on GPUs, whose waits cannot be separated.
    """
    if segment.num_workers == 1 or segment.balance.policy == "equal" or segment.batch_mode == "sweep":
        return False
    return not (has_own_step and segment.device == "cuda")


def at_least(shares: Sequence[int], least: int) -> tuple[int, ...]:
    """Return shares none of which is between 0 and `least`, if that can be: the largest one takes what is too small."""
    found = list(shares)
    largest = max(range(len(found)), key=lambda rank: (found[rank], -rank))
    for rank, share in enumerate(found):
        if rank != largest and 0 < share < least:
            found[largest] += share
            found[rank] = 0
    return tuple(found)


# The CPUs and the memory that a machine has for a worker at the moment (Linux).
#
# CPUs are limited by the quota of the worker's control groups, which is read anew each time. Without one, they are
# limited by other processes: by how long the worker's thread stood in the queue while it wanted to run. psutil's
# figures would count the worker itself as busy, and all other processes as if they came first.


WINDOW_S = 0.2
"""The time in the queue is measured over at least this long."""
MEMORY_S = 1.0
"""The memory is looked at no more often."""
LEAST_CPUS = 0.01


class Availability:
    """CPUs and memory that this process can use."""

    def __init__(
        self, num_threads: int, *, root: Path = Path("/"), clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`num_threads`: it uses no more CPUs at once. `root` holds `proc` and `sys`."""
        self._num_threads = num_threads
        self._clock = clock
        self._queue, self._meminfo = root / "proc/thread-self/schedstat", root / "proc/meminfo"
        self._quotas = _quota_files(root)
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most = float(min(affinity, num_threads))
        self._contended = 1.0
        self._read_at, self._queued = self._clock(), self._times()
        self._memory, self._memory_until = 1.0, -math.inf

    def cpus(self) -> float:
        """Return the CPUs that this process could use now, at most one for each of its threads."""
        quota = min(map(_quota, self._quotas), default=math.inf)
        if quota < self._most:
            return max(LEAST_CPUS, quota)
        now = self._clock()
        if now - self._read_at >= WINDOW_S:
            before, self._queued = self._queued, self._times()
            self._read_at = now
            ran_s, waited_s = self._queued[0] - before[0], self._queued[1] - before[1]
            if ran_s > 0.0 and waited_s >= 0.0:
                self._contended = ran_s / (ran_s + waited_s)
        return max(LEAST_CPUS, self._most * self._contended)

    def memory(self) -> float:
        """Return the fraction of the machine's memory that is available; 1 if that is not known."""
        if self._clock() >= self._memory_until:
            self._memory_until = self._clock() + MEMORY_S
            try:
                lines = (line.split() for line in self._meminfo.read_text().splitlines())
                sizes = {words[0]: float(words[1]) for words in lines if len(words) > 1}
                self._memory = sizes["MemAvailable:"] / sizes["MemTotal:"]
            except (OSError, ValueError, KeyError, ZeroDivisionError):
                self._memory = 1.0
        return self._memory

    def _times(self) -> tuple[float, float]:
        """Return the seconds that this thread ran, and stood in the queue; zeros if the system does not count them."""
        try:
            ran_ns, waited_ns, *_ = self._queue.read_text().split()
            return int(ran_ns) / 1e9, int(waited_ns) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0


def _quota_files(root: Path) -> list[Path]:
    """Return the files with the CPU quotas of this process's control groups, of version 1 or 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "cpu.max"
        elif "cpu" in controllers.split(","):
            mounts, name = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"], "cpu.cfs_quota_us"
        else:
            continue
        group = Path(path.lstrip("/"))
        for mount in mounts:
            found += [file for each in (group, *group.parents) if (file := root / mount / each / name).exists()]
    return list(dict.fromkeys(found))


def _quota(file: Path) -> float:
    """Return the CPUs that a control group allows; infinite without a limit."""
    try:
        words = file.read_text().split()
        if len(words) == 1:
            words.append((file.parent / "cpu.cfs_period_us").read_text())
        quota_us, period_us = float(words[0].replace("max", "inf")), float(words[1])
    except (OSError, ValueError, IndexError):
        return math.inf
    return quota_us / period_us if quota_us > 0 else math.inf
