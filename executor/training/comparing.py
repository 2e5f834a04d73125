"""Compares real segments of a trial before anything is rented: after a restart, and on two workers.

Two short iterations are trained in one go, and the second one again from the checkpoint of the first, in a fresh
process with another order of sets. Where a trial may get several GPUs, a gang of two workers does both, and one worker
trains the first iteration too, in micro-batches that are the shares of the gang. `loss` draws the same numbers in each
call then, and BatchNorm takes means over all batches, so that dropout and BatchNorm make no difference: checkpoints are
equal up to rounding, and all that is left are faults.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Subset

from rubberband.executor.checkpoints import Payload
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.training.check_findings import TrialFault, difference
from rubberband.executor.training.check_workers import FreshServer, TrainServer, WorkerRun, failure_of, gang_of
from rubberband.executor.training.checkpoint import read
from rubberband.executor.training.data import kept_random_states
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.loop import TorchRunner
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import TorchTrial, has_override, override_of
from rubberband.executor.training.wrapping import STATISTICS
from rubberband.values.environment import HASH_SEED

STEPS = 2
LIMIT_S = 20.0
_LEAST_BATCH = 4
_REPEATED, _ON_TWO = 1e-6, 1e-5
"""Differences between runs on as many workers, which repeat themselves bit by bit on one machine, and between one and
two, relative to the largest element of a tensor. Micro-batches are the shares, so only the order of their sum differs;
it differs in nothing for two of the same size."""
_ROUNDED = "rounded"
"""A file beside the checkpoints: the weights of a gang are rounded."""
_NEEDS_GPU = "SyncBatchNorm layers only work with GPU modules"
"""DistributedDataParallel's words on the CPU, where gangs on GPUs may be right."""
_NOT_RESTARTED = "a restart was not compared with training in one go: "
_NOT_REPEATABLE = "not repeatable: two runs from one seed differ in "
_DRAWS = "; draw from the global generators of torch, NumPy or Python, which follow from the seed, and use no clock"

Findings = tuple[list[TrialFault], list[str]]


class Comparison:
    """Two processes that let others train, when `run` says; `close` ends them.

    One is forked now, before this process trains, as one that used a GPU cannot be. The other one is fresh.
    """

    def __init__(self, entrypoint: Entrypoint, segment: Segment, *, is_gang: bool, limit_s: float = LIMIT_S) -> None:
        """`is_gang`: the trial may get several GPUs. `limit_s`: the most seconds of one worker."""
        self._is_gang, self._limit_s, until = is_gang, limit_s, min(2, segment.max_iterations or 2)
        self._entrypoint = entrypoint
        self._segment = replace(segment, device="cpu", until_iterations=until, batch=None, attempt=0)
        self._folder = tempfile.TemporaryDirectory(prefix="rubberband-")
        train = partial(_train, entrypoint, Path(self._folder.name), is_gang)
        self._here = TrainServer(entrypoint, train, limit_s=limit_s)
        self._elsewhere = FreshServer(entrypoint, train, limit_s=limit_s)

    def run(self) -> Findings:
        alone = self._gang(1)
        if not self._is_gang:
            (one,) = self._here.train(alone)
            if len(one.items) < 2:
                return [], [_NOT_RESTARTED + self._why_not(one)]
            faults, remarks = self._restarted(alone)
            return [], [*(fault.line for fault in faults), *remarks]
        together = self._gang(2)
        one, *gang = self._here.train([replace(alone[0], until_iterations=1), *together])
        beside = "a gang of two workers was not compared with one: "
        if not one.is_over:
            return [], [beside + self._why_not(one)]
        if (fault := _fault_of(gang)) is not None:
            return ([], [f"{beside}SyncBatchNorm needs GPUs"]) if _NEEDS_GPU in fault.line else ([fault], [])
        faults, remarks = self._restarted(together) if len(gang[0].items) == 2 else ([], [])
        return (faults, remarks) if faults or remarks else self._compared(alone[0], together[0])

    def _compared(self, alone: Segment, together: Segment) -> Findings:
        """Compare the first iteration of one worker with that of a gang."""
        one, two = self._content(alone, 1), self._content(together, 1)
        if (place := difference(_trained(one), _trained(two), "", _ON_TWO)) is None:
            return [], []
        why, target = "", self._entrypoint.load()
        if together.balance.policy == "equal":
            why = "batch.balance.policy is equal, and losses that communicate are others on a gang"
        elif isinstance(target, type) and has_override(target, "step"):
            why = "its own step() gets whole batches"
        elif Path(self._folder.name, _ROUNDED).exists():
            why = 'gangs round divided weights with precision = "bf16"'
        elif difference(_others(one), _others(two), "", _ON_TWO) is not None:
            why = "buffers of its model change with each pass"
        elif place.startswith("metrics") and "train_" not in place and any(map(_is_statistic, one["model"])):
            why = "its evaluation may use statistics of BatchNorm of one worker"
        if why:
            beside = "two workers of a gang were compared with each other and after a restart, and not with one: "
            return [], [beside + why]
        (again,) = self._gang(1, attempt=1)
        self._here.train([again])
        if (moved := self._difference(alone, again, 1)) is not None:
            return [], [_NOT_REPEATABLE + moved + _DRAWS]
        if place.startswith("metrics"):
            fix = "return means over the samples of the batch, or rubberband.Mean(sum, count), and reduce nothing"
        else:
            fix = "write loss(), hooks and the optimizer as for one process, without the number or rank of workers"
        return [TrialFault(line=f"after an iteration on two workers, {place} is not that of one worker; {fix}")], []

    def _why_not(self, run: WorkerRun) -> str:
        if run.failure is not None:
            return run.failure.message
        return "it ends by itself" if run.is_over else f"its steps take more than {self._limit_s:.2g} s"

    def _restarted(self, segments: Sequence[Segment]) -> Findings:
        """Train the second iteration of segments from the checkpoint of the first, and compare."""
        first, workers = segments[0], len(segments)
        again = self._gang(workers, attempt=1, done=1)
        runs = self._elsewhere.train(again)
        if (fault := _fault_of(runs)) is not None:
            return [replace(fault, line=f"after a restart, {fault.line}")], []
        if not runs[0].is_over:
            return [], [_NOT_RESTARTED + self._why_not(runs[0])]
        if (place := self._difference(first, again[0], 2)) is None:
            return [], []
        here, anew = self._gang(workers, attempt=2, done=1), self._gang(workers, attempt=3)
        self._here.train(here)
        if self._difference(first, here[0], 2) is None:
            return [], [
                f"{place} follows the order of a set, or hash(): another {HASH_SEED} gives another one. A run sets it "
                "to 0, but other processes that load a checkpoint do not; sort what comes from a set"
            ]
        self._here.train(anew)
        if (moved := self._difference(first, anew[0], 2)) is not None:
            return [], [_NOT_REPEATABLE + moved + _DRAWS]
        line = (
            f"{place} is another one after a restart, as at each SYNC; return what training changes in attributes, "
            "such as schedules, counts and generators, in state_dict(), and let datasets draw from torch, NumPy or "
            "random without a generator"
        )
        return [TrialFault(line=line)], []

    def _gang(self, num_workers: int, attempt: int = 0, done: int = 0) -> list[Segment]:
        return gang_of(replace(self._segment, attempt=attempt, from_iterations=done), num_workers)

    def _content(self, segment: Segment, iterations: int) -> dict[str, Any]:
        """Return what is compared of a segment's checkpoint; nothing if there is none."""
        file = _file(Path(self._folder.name), segment, iterations)
        if not file.exists():
            return {}
        content = read(file, _parts(file))
        kept = {name: content[name] for name in ("model", "parameters", "optimizer")}
        known = (segment.metric, "train_loss")
        return {**kept, "metrics": {name: value for name, value in content["metrics"].items() if name in known}}

    def _difference(self, one: Segment, other: Segment, iterations: int) -> str | None:
        """Return the first place where the checkpoints of two segments differ; None if none does, or one is missing."""
        ones, others = self._content(one, iterations), self._content(other, iterations)
        return difference(ones, others, "", _REPEATED) if ones and others else None

    def close(self) -> None:
        self._here.close()
        self._elsewhere.close()
        self._folder.cleanup()


def _trained(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a gang must have as one worker has it."""
    trained = content["parameters"]["trained"]
    return {**content, "model": {name: content["model"].get(name) for name in trained}}


def _others(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the buffers and the frozen weights, but no statistics of BatchNorm."""
    known = set(content["parameters"]["trained"])
    model = content["model"]
    return {name: model[name] for name in model if name not in known and not _is_statistic(name)}


def _is_statistic(name: str) -> bool:
    return name.endswith(STATISTICS)


def _fault_of(gang: Sequence[WorkerRun]) -> TrialFault | None:
    """Return the failure of a gang that is not another's consequence, or the fault of one that does not go on."""
    failure = failure_of(gang)
    if failure is not None and not failure.secondary:
        return TrialFault(line=failure.message, details=failure.details)
    if len(gang) == 1 or all(run.is_over for run in gang):
        return None
    done = min(len(run.items) for run in gang)
    line = (
        f"two workers do not go on after {f'iteration {done}' if done else 'their start'}; loss() and hooks must "
        "communicate alike on every worker, and a loss() that does needs equal shares: batch: {balance: {policy: "
        'equal}}; with sharding = "fsdp", loss() must call the same parts of the model on every worker'
    )
    return TrialFault(line=line)


# A worker's process.


def _file(folder: Path, segment: Segment, iterations: int) -> Path:
    return folder / f"{segment.attempt}-{segment.num_workers}-{iterations}"


def _parts(file: Path) -> list[Path]:
    """Return the files that the other workers have saved of a checkpoint."""
    return sorted(file.parent.glob(f"{file.name}-part-*"))


def _train(entrypoint: Entrypoint, folder: Path, is_gang: bool, segment: Segment) -> Iterator[int]:
    """Train a segment of short iterations; rank 0 writes a checkpoint after each of them."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    target, done = entrypoint.load(), segment.from_iterations
    assert isinstance(target, type)
    short = _Shortened(target(), segment, is_gang=is_gang)
    gang = Gang.join(rank=segment.rank, num_workers=segment.num_workers, rendezvous=segment.rendezvous, device="cpu")
    runner = TorchRunner(short.trial, segment, gang, shares=short.shares)

    def save(iterations: int, payload: Payload) -> CheckpointRef:
        path = _file(folder, segment, iterations)
        path = path.with_name(f"{path.name}-part-{segment.rank}")
        assert callable(payload)
        payload(path)
        return CheckpointRef(url=str(path), digest="", size_bytes=0)

    if short.trial.sharding and short.trial.precision == "bf16":
        Path(folder, _ROUNDED).touch()
    held = _file(folder, replace(segment, attempt=0), done) if done else None
    runner.parts_held = [] if held is None else _parts(held)
    runner.begin(held)
    for short.iteration in range(done + 1, segment.until_iterations + 1):
        metrics = runner.iterate(short.iteration)
        if segment.rank == 0:
            is_last = runner.ended or short.iteration == segment.until_iterations
            payload = runner.dump(short.iteration, metrics, is_last=is_last)
            assert callable(payload)
            payload(_file(folder, segment, short.iteration))
            runner.parts()
        else:
            runner.save = save
            runner.dump_part(short.iteration)
        yield short.iteration
        if runner.ended:
            break
        runner.meet()
    runner.part()


class _Few(Subset[Any]):
    """The first samples of a set, which has its attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


class _Shortened:
    """Gives a trial short iterations, in which one worker takes the shares of two in turn."""

    def __init__(self, trial: TorchTrial, segment: Segment, *, is_gang: bool) -> None:
        own: Any = trial
        self.trial, self.iteration = trial, segment.from_iterations + 1
        self._is_equal = segment.balance.policy == "equal"
        reseed("setup", segment.seed)  # as the runner does before: the data may be made for the batch size
        size, limit = max(_LEAST_BATCH, trial.global_batch_size(segment.config)), trial.max_batch_size_per_gpu
        size = size if limit is None else min(size, limit)
        self._size = size = max(2, size - size % 2) if is_gang else size
        own_step = has_override(type(trial), "step")
        is_divided = is_gang and segment.num_workers == 1 and not own_step
        own.max_batch_size_per_gpu = size // 2 if is_divided else None
        own.global_batch_size = lambda config: size
        own.samples_per_iteration, own.checkpoint_every, own.gradient_compression = STEPS * size, 1, None
        own.num_workers = 0 if override_of(trial, "worker_init") is None else 1
        own.eval_batch_size = trial.eval_batch_size or size
        eval_dataset, most = trial.eval_dataset, 2 * own.eval_batch_size

        def few(config: Mapping[str, Any]) -> Any:
            dataset: Any = eval_dataset(config)
            return dataset if dataset is None or len(dataset) <= most else _Few(dataset, range(most))

        build_model = trial.build_model

        def built(config: Mapping[str, Any]) -> nn.Module:
            model = build_model(config)
            if own.precision == "fp16":  # which leaves out a step where a share alone overflows
                own.precision = "32"
            for each in model.modules():
                if is_gang and isinstance(each, _BatchNorm):
                    each.momentum = None  # means over all batches do not depend on their order
            return model

        loss = trial.loss

        def drawn(*given: Any, **named: Any) -> Any:
            with kept_random_states():
                reseed("train", segment.seed)
                return loss(*given, **named)

        own.eval_dataset, own.build_model = few, built
        if not own_step:
            own.loss = drawn

    def shares(self, size: int, num_workers: int) -> Sequence[int]:
        """Divide a batch: by halves, and in the second iteration, and where it is smaller, for one worker alone."""
        if num_workers == 1:
            return (size,)
        if self._is_equal or (size == self._size and self.iteration == 1):
            return (size - size // 2, size // 2)
        return (size, 0)
