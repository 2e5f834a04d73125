"""Compares a gang of two workers with one process over a few steps of a trial, before anything is rented.

The gang has steps in which a worker has no samples, and is made anew from a checkpoint half-way. The one process takes
what each worker takes, in turn: with its random draws and its statistics of BatchNorm. So dropout and BatchNorm make no
difference, though a gang is allowed others than a single worker has; all that is left are faults. Gradients are added
in the same order, so weights differ by no more than rounding.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset

from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor.training.clocks import ComputeTimer
from rubberband.executor.training.components import Component
from rubberband.executor.training.data import cpu_states, set_cpu_states
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import TrialFailure, describe
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.goodput.noise_scale import is_adaptive
from rubberband.executor.training.loop import TorchRunner
from rubberband.executor.training.metrics import Means
from rubberband.executor.training.sampler import GlobalBatch, Indices, reseed
from rubberband.executor.training.segment import Segment, SegmentFailure
from rubberband.executor.training.step import OwnStep, TrainStep
from rubberband.executor.training.torch_trial import TorchTrial, override_of
from rubberband.executor.training.wrapping import differs, parameters_of, statistics_in

ITERATIONS, STEPS = 4, 2
"""Iterations that are trained, and steps of each; the gang is made anew after half of them."""
LIMIT_S = 20.0
"""Most seconds of the one process."""
GANG_LIMIT_S = 10.0
"""Seconds of the gang after the one process has ended, beside four times the seconds of that."""
LEAST_BATCH = 4
_FOLD = 64
_TOLERANCE, _OWN_TOLERANCE = 0.02, 0.05
"""Parts of a tensor's change since the beginning. An own step gets whole batches, rounded otherwise."""
_ROUNDING = 1e-6
"""Part of a tensor's norm."""
_BUFFER = "buffer "
"""Begins the name of a buffer."""
_NEEDS_GPU = "SyncBatchNorm layers only work with GPU modules"
"""DistributedDataParallel's words on the CPU, where gangs on GPUs may be right."""

_EQUAL = (
    "two workers of a gang were compared with each other, and not with one process, as batch.balance.policy is equal: "
    "losses that communicate are others on a gang"
)
Who = Literal["one", "rank 0", "rank 1"]
Rows = dict[str, NDArray[np.float64]]
"""Name -> norm, change since the beginning, and the sums of each 64th element: they differ as the tensors do."""


@dataclass(slots=True)
class _ProcessState:
    """Weights, buffers and metrics of a process at one point."""

    at: str
    is_step: bool
    restored: bool
    rows: Rows
    metrics: Mapping[str, float] = field(default_factory=dict)
    tolerance: float | None = None
    """Difference allowed between one process and the gang; None after random draws of an own step."""


def shares_of(batch_size: int, *, are_equal: bool) -> list[tuple[int, int]]:
    """Return the shares of two workers in a step, in turn."""
    if are_equal:
        return [(batch_size - batch_size // 2, batch_size // 2)]
    less = max(2, batch_size // 3)
    return [(batch_size - less, less), (batch_size, 0), (less, batch_size - less), (0, batch_size)]


class Comparison:
    """Three processes that are forked now, and train when `run` lets them; `close` ends them.

    They are forked before this process trains, as one that used a GPU cannot be.
    """

    def __init__(self, entrypoint: Entrypoint, segment: Segment) -> None:
        iterations = min(ITERATIONS, segment.max_iterations or ITERATIONS)
        self._half = (iterations + 1) // 2
        self._segment = replace(segment, device="cpu", until_iterations=iterations, batch=None, verify=False)
        self._folder = tempfile.TemporaryDirectory(prefix="rubberband-")
        context = multiprocessing.get_context("fork")
        self._jobs: dict[Who, Connection] = {}
        self._processes: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a thread that only waits for the end is not copied
            for who in ("one", "rank 0", "rank 1"):
                self._jobs[who], theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, entrypoint), daemon=False)
                process.start()
                theirs.close()
                self._processes.append(process)

    def run(self) -> tuple[list[SegmentFailure | str], list[str]]:
        """Train and compare; return what is wrong, and what could not be compared."""
        with suppress(BrokenPipeError):
            ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            for who, job in self._jobs.items():
                job.send((who, self._segment, self._half, ports, self._folder.name))
        found, ends = self._received()
        one, gang = ends.get("one"), [ends.get("rank 0"), ends.get("rank 1")]
        if isinstance(one, SegmentFailure):
            return [], [f"a gang of two workers was not compared with one: {one.message}"]
        if "one" not in ends:
            return [], [f"a gang of two workers was not compared with one: its steps take more than {LIMIT_S:g} s"]
        failures = [each for each in gang if isinstance(each, SegmentFailure)]
        primary: list[SegmentFailure | str] = [each for each in failures if not each.secondary]
        if any(_NEEDS_GPU in each.message for each in failures):
            return [], ["a gang of two workers was not compared with one: SyncBatchNorm needs GPUs"]
        faults = primary or list(_faults(found, self._segment.metric))
        if faults:
            return [faults[0]], []
        if failures or len(ends) < 3:
            seen = min(found["rank 0"], found["rank 1"], key=len)
            at = seen[-1].at if seen else "their start"
            return [
                f"two workers do not go on after {at}; loss() and hooks must communicate alike on every worker, and a "
                "loss() that does needs equal shares: batch: {balance: {policy: equal}}"
            ], []
        return [], [_EQUAL] if self._segment.balance.policy == "equal" else []

    def _received(self) -> tuple[dict[Who, list[_ProcessState]], dict[Who, Any]]:
        """Return what the processes sent in time, and how each of them ended."""
        found: dict[Who, list[_ProcessState]] = {who: [] for who in self._jobs}
        ends: dict[Who, Any] = {}
        began_s = time.monotonic()
        until_s = began_s + LIMIT_S
        open_jobs = {job: who for who, job in self._jobs.items()}
        while open_jobs and (left_s := until_s - time.monotonic()) > 0.0:
            for job in wait(list(open_jobs), left_s):
                assert isinstance(job, Connection)
                who = open_jobs[job]
                try:
                    item = job.recv()
                except (EOFError, OSError):
                    item = SegmentFailure(kind="raised", message="its process ended", details="", secondary=True)
                if isinstance(item, _ProcessState):
                    found[who].append(item)
                    continue
                ends[who] = item
                del open_jobs[job]
                if who == "one":
                    until_s = time.monotonic() + GANG_LIMIT_S + 4.0 * (time.monotonic() - began_s)
        return found, ends

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for job in self._jobs.values():
            job.close()
        self._folder.cleanup()


def _faults(found: Mapping[Who, Sequence[_ProcessState]], metric: str) -> Iterator[str]:
    """Yield the first difference."""
    for one, first, second in zip(found["one"], found["rank 0"], found["rank 1"], strict=False):
        name = _difference(_between_workers(first), _between_workers(second), 0.0)
        if name is not None:
            yield f"after {one.at}, {differs(name, 'worker 0', 'worker 1')}"
            return
        if one.tolerance is None:
            continue
        name = _difference(one.rows, first.rows, one.tolerance)
        if name is not None:
            yield _unlike_one(name, one)
            return
        for name in (metric, "train_loss"):
            if name in one.metrics and not math.isclose(
                one.metrics[name], first.metrics.get(name, math.nan), rel_tol=1e-4, abs_tol=1e-7
            ):
                numbers = f"{first.metrics.get(name, math.nan):.6g} and not {one.metrics[name]:.6g}"
                yield (
                    f"after {one.at}, two workers report {name}={numbers} as one does; return means over the samples "
                    "of the batch, or rubberband.Mean(sum, count), and do not reduce over the workers"
                )
                return


def _unlike_one(name: str, one: _ProcessState) -> str:
    what = f"after {one.at}, the weights of {name} are not those of one worker on two"
    if one.at == "build_model()":
        return (
            f"build_model() gives other values of {name} in each process; draw them from the global generators of "
            "torch, NumPy or Python"
        )
    if one.restored:
        return f"{what}, and were before a restore; keep in state_dict() what hooks and the optimizer remember"
    return f"{what}; write loss(), hooks and the optimizer as for one process, without the number or rank of workers"


def _between_workers(seen: _ProcessState) -> Rows:
    """Return what all workers must have; not the buffers after an evaluation, which may be on rank 0 alone."""
    return {name: row for name, row in seen.rows.items() if seen.is_step or not name.startswith(_BUFFER)}


def _difference(ones: Rows, others: Rows, tolerance: float) -> str | None:
    """Return the name of the tensor that differs most; None if all are the same.

    The `tolerance` is relative to their change since the beginning; 0: they are equal.
    """
    if odd := sorted(ones.keys() ^ others.keys()):
        return odd[0]
    found = {}
    for name, row in ones.items():
        apart = float(np.linalg.norm(row[2:] - others[name][2:]))
        norm, change = row[:2].tolist()
        if not apart <= tolerance * change + (_ROUNDING * norm if tolerance else 0.0):
            found[name] = apart / (change + _ROUNDING * norm + 1e-300)
    return max(found, key=lambda name: found[name]) if found else None


# The processes.


def _serve(jobs: Connection, entrypoint: Entrypoint) -> None:
    """Train as the job says, once it comes; send what is seen, and None in the end, or the failure."""
    try:
        who, segment, half, ports, folder = jobs.recv()
    except EOFError:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # the check has shown what the trial prints
        os.dup2(nothing, stream)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    try:
        trial = entrypoint.load()
        assert isinstance(trial, type)
        if who == "one":
            _train_alone(trial(), segment, half, jobs)
        else:
            _train_in_gang(trial, replace(segment, rank=int(who[-1]), num_workers=2), half, ports, folder, jobs)
        jobs.send(None)
    except BaseException as error:
        failure = describe(error, in_gang=who != "one")
        jobs.send(replace(failure, details="") if isinstance(error, TrialFailure) else failure)
    os._exit(0)


def _train_alone(trial: TorchTrial, segment: Segment, half: int, jobs: Connection) -> None:
    runner = _prepared(trial, segment, Gang(0, 1, None), is_alone=True)
    runner.begin(None)
    observer = _Observer(runner, jobs)
    for iterations in range(1, segment.until_iterations + 1):
        if isinstance(runner.step, _InTurn) and iterations == half + 1:
            runner.step.knows_metrics = False
        observer.train(iterations, restored=iterations > half)


def _train_in_gang(
    trial: type[TorchTrial], segment: Segment, half: int, ports: Sequence[str], folder: str, jobs: Connection
) -> None:
    file, observer = Path(folder, "checkpoint"), None
    stages = [(0, half)] + [(half, segment.until_iterations)] * (half < segment.until_iterations)
    for (done, until), rendezvous in zip(stages, ports, strict=False):
        gang = Gang.join(rank=segment.rank, num_workers=2, rendezvous=rendezvous, device="cpu")
        stage = replace(segment, from_iterations=done, until_iterations=until, rendezvous=rendezvous)
        runner = _prepared(trial(), stage, gang)
        runner.begin(file.read_bytes() if done else None)
        observer = _Observer(runner, jobs, observer)
        for iterations in range(done + 1, until + 1):
            metrics = observer.train(iterations, restored=done > 0)
        if segment.rank == 0:
            payload = runner.dump(until, metrics, is_last=True)
            assert callable(payload)
            payload(file)
        runner.part()


class _Few(Subset[Any]):
    """The first samples of a set, which has its attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


def shorten(trial: TorchTrial, segment: Segment) -> int:
    """Give the trial short iterations, in which each share goes through the model at once; return its batch size."""
    own: Any = trial
    reseed("setup", segment.seed)  # as the runner does before: the data may be made for the batch size
    batch_size = max(LEAST_BATCH, trial.global_batch_size(segment.config))
    if trial.max_batch_size_per_gpu is not None:
        batch_size = min(batch_size, trial.max_batch_size_per_gpu)
    own.global_batch_size = lambda config: batch_size
    own.samples_per_iteration, own.checkpoint_every = STEPS * batch_size, 1
    own.max_batch_size_per_gpu = own.gradient_compression = None
    own.num_workers = 0 if override_of(trial, "worker_init") is None else 1
    eval_dataset, most = trial.eval_dataset, 2 * (trial.eval_batch_size or batch_size)

    def few(config: Mapping[str, Any]) -> Any:
        dataset: Any = eval_dataset(config)
        return dataset if dataset is None or len(dataset) <= most else _Few(dataset, range(most))

    build_model = trial.build_model

    def built(config: Mapping[str, Any]) -> nn.Module:
        model = build_model(config)
        if own.precision == "fp16":  # which leaves out a step where a share alone overflows
            own.precision = "32"
        return model

    own.eval_dataset, own.build_model = few, built
    return batch_size


def _prepared(trial: TorchTrial, segment: Segment, gang: Gang, *, is_alone: bool = False) -> TorchRunner:
    """Return a runner of short iterations, in which each share goes through the model at once."""
    batch_size = shorten(trial, segment)
    are_equal = segment.balance.policy == "equal"
    shares = shares_of(batch_size, are_equal=are_equal)
    has_own_step, made = override_of(trial, "step") is not None, list[TorchRunner]()

    def policy(size: int, num_workers: int) -> Sequence[int]:
        if num_workers == 1 and has_own_step:
            return (size,)
        if size != batch_size:
            return (size - size // 2, size // 2) if are_equal else (size, 0)
        return shares[(made[0].counter.count if made and hasattr(made[0], "counter") else 0) % len(shares)]

    made.append((_AloneRunner if is_alone else TorchRunner)(trial, segment, gang, shares=policy))
    if are_equal and isinstance(made[0], _AloneRunner):
        made[0].tolerance = None  # see `_EQUAL`
    return made[0]


class _Observer:
    """Trains iterations, and sends what the process has after every step."""

    def __init__(self, runner: TorchRunner, jobs: Connection, before: _Observer | None = None) -> None:
        self._runner, self._jobs = runner, jobs
        self._first: dict[str, Tensor] = {} if before is None else before._first
        if before is None:
            self._send("build_model()", restored=False)

    def train(self, iterations: int, *, restored: bool) -> Mapping[str, float]:
        """Train an iteration; return its metrics."""
        steps, number = self._runner.steps(iterations), 0
        while True:
            try:
                next(steps)
            except StopIteration as end:
                metrics: Mapping[str, float] = end.value
                if isinstance(self._runner, _AloneRunner) and self._runner.has_drawn(iterations):
                    metrics = {name: value for name, value in metrics.items() if name.startswith("train_")}
                self._send(f"iteration {iterations}", restored=restored, metrics=metrics)
                return metrics
            number += 1
            if isinstance(self._runner, _AloneRunner):
                self._runner.note_draws()
            self._send(f"step {number} of iteration {iterations}", restored=restored)

    def _send(self, at: str, *, restored: bool, metrics: Mapping[str, float] | None = None) -> None:
        runner = self._runner
        named = parameters_of(runner.module, runner.optimizers.members)
        named = {name: each for name, each in named.items() if not is_lazy(each)}
        statistics = {id(each) for each in statistics_in(runner.module)}
        for name, each in runner.module.named_buffers():
            if metrics is not None or id(each) not in statistics:  # those are averaged when the iteration ends
                named[_BUFFER + name] = each
        rows = {name: self._row(name, each) for name, each in named.items()}
        tolerance = runner.tolerance if isinstance(runner, _AloneRunner) else None
        self._jobs.send(_ProcessState(at, metrics is None, restored, rows, metrics or {}, tolerance))

    @torch.no_grad()
    def _row(self, name: str, tensor: Tensor) -> NDArray[np.float64]:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten().double()
        first = self._first.setdefault(name, flat.clone())
        change = torch.linalg.vector_norm(flat - first) if len(first) == len(flat) else flat.new_tensor(math.nan)
        folded = nn.functional.pad(flat, (0, -len(flat) % _FOLD)).view(-1, _FOLD).sum(0)
        return torch.cat([torch.linalg.vector_norm(flat)[None], change[None], folded]).numpy()


# One process that takes what two workers take.

_Place = tuple[nn.Module, str]
"""A buffer: its module, and its name there."""


class _AloneRunner(TorchRunner):
    """Trains by `_InTurn`; or by the trial's own step, which gets whole batches."""

    tolerance: float | None = _TOLERANCE
    """Difference allowed to a gang's weights; None: they cannot be compared."""

    def _make_step(self) -> Any:
        if override_of(self.trial, "step") is not None:
            # Its gradients come in another order, and an optimizer such as Adam makes much of a rounded 0.
            optimizers, has_norm = self.optimizers.members, bool(statistics_in(self.module))
            self.tolerance = None if has_norm or any(map(is_adaptive, optimizers)) else _OWN_TOLERANCE
            return super()._make_step()
        return _InTurn(
            self.trial,
            self.segment,
            self.gang,
            self.module,
            self.feed,
            optimizer=self.optimizers.members[0],
            timer=ComputeTimer(),
            is_one_pass=True,
        )

    def _draw_apart(self, iterations: int) -> None:
        self._begun = cpu_states()
        if isinstance(self.step, _InTurn):
            self.components["statistics"] = _TurnStatistics(self.step)
            reseed("train", self.segment.seed, iterations, 1)
            self.step.begin_turns([self._begun, cpu_states()])
            set_cpu_states(self._begun)

    def note_draws(self) -> None:
        """Note, after a step, whether an own step draws random numbers: other ones on each worker of a gang."""
        if isinstance(self.step, OwnStep) and _differ(cpu_states(), self._begun):
            self.tolerance = None

    def has_drawn(self, iterations: int) -> bool:
        """Return whether the evaluation after that iteration drew random numbers."""
        now = cpu_states()
        reseed("evaluate", self.segment.seed, iterations)
        fresh = cpu_states()
        set_cpu_states(now)
        return _differ(now, fresh)


def _differ(ones: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return pickle.dumps(ones[:2]) != pickle.dumps(others[:2]) or not torch.equal(ones[2], others[2])


class _TurnStatistics(Component):
    """Averages the statistics of each worker, whose samples are counted in its pass."""

    def __init__(self, step: _InTurn) -> None:
        self._step = step

    def end(self) -> Mapping[str, Any]:
        self._step.average()
        return {}


class _InTurn(TrainStep):
    """Takes the part of each of two workers in turn, and one optimizer step.

    The buffers are put in place as new tensors, since backward passes still use the old ones.
    """

    knows_metrics = False
    """Whether a worker without samples takes no pass; in a new gang it takes one, for the names of the metrics."""

    def begin_turns(self, states: list[tuple[Any, ...]]) -> None:
        """Begin an iteration, with the random states of each worker."""
        self._states, self._samples = states, [0, 0]
        self._own = [self._statistics_of(self._buffers()) for _ in states]

    def _buffers(self) -> dict[_Place, Tensor]:
        return {
            (part, name): each.clone()
            for part in self._module.modules()
            for name, each in part._buffers.items()
            if each is not None
        }

    def _statistics_of(self, buffers: Mapping[_Place, Tensor]) -> dict[_Place, Tensor]:
        return {place: each for place, each in buffers.items() if isinstance(place[0], _BatchNorm)}

    def _put(self, buffers: Mapping[_Place, Tensor]) -> None:
        for (part, name), each in buffers.items():
            part._buffers[name] = each.clone()

    def _ranks(self, batch: GlobalBatch) -> list[int]:
        must_pass = self._trial.find_unused_parameters or self._trial.static_graph or not self.knows_metrics
        return [rank for rank, share in enumerate(batch.shares) if share or must_pass]

    def _parts(self, batch: GlobalBatch, per_gpu: int) -> tuple[list[Indices], list[int]]:
        ranks = self._ranks(batch)
        parts = [batch.of(rank) if batch.shares[rank] else batch.indices[:2] for rank in ranks]
        return parts, [batch.shares[rank] for rank in ranks]

    def _passes(self, batch: GlobalBatch, parts: Sequence[Indices], sizes: Sequence[int]) -> Means:
        self._turns, self._first = self._ranks(batch), batch.first
        self._samples = [before + share for before, share in zip(self._samples, batch.shares, strict=True)]
        self._begun = self._kept = self._buffers()
        self.knows_metrics = True
        return super()._passes(batch, parts, sizes)

    def _loss(self, samples: Any) -> Any:
        rank = self._turns.pop(0)
        self._put({**self._begun, **self._own[rank]})
        set_cpu_states(self._states[rank])
        found = super()._loss(samples)
        self._states[rank], now = cpu_states(), self._buffers()
        self._own[rank] = self._statistics_of(now)
        self._kept = now if rank == self._first else self._kept
        self._put(self._kept)
        set_cpu_states(self._states[0])
        return found

    @torch.no_grad()
    def average(self) -> None:
        """Replace the running statistics by their means over the workers, as `RunningStatistics` does."""
        total = sum(self._samples)
        for place in self._own[0]:
            if place[0].training:
                like = self._own[0][place]
                sums = [own[place].double() * count for own, count in zip(self._own, self._samples, strict=True)]
                mean = torch.stack(sums).sum(0) / total
                self._put({place: (mean if like.is_floating_point() else mean.round()).to(like.dtype)})
