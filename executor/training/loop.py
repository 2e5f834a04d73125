"""The training loop of a `TorchTrial` on one worker of its gang.

The learning curve does not depend on the gang, except for the order of floating-point sums:

* The global batches come from (seed, epoch) alone (`sampler.py`). Each worker takes its share m_i of the M samples, in
  micro-batches of at most `max_batch_size_per_gpu`. DistributedDataParallel averages gradients over the n workers, so a
  micro-batch of m samples with mean loss L contributes n*m/M * L: every sample counts the same. A worker without a
  share takes no pass, or one of weight 0. A worker that runs out of memory takes smaller ones (`step.py`). Shares
  follow the workers' speed (`balancing.py`).
* Before iteration k the random states are set from (seed, k, rank), so a checkpoint holds none and resuming from it is
  exact; on GPUs it is up to rounding, as their kernels add in no fixed order. Random draws of the model (dropout)
  differ with the number of workers, and are equal only in distribution; so are the statistics of BatchNorm, which see a
  worker's micro-batch. Random draws of the dataset (augmentation) follow from (seed, epoch, position) and are the same.
* Evaluation is described in `metrics.py`.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import Payload
from rubberband.executor.checkpoints.folders import FORMAT
from rubberband.executor.training.balancing import Balancing, can_balance
from rubberband.executor.training.checkpoint import (
    NOTHING,
    HostCopy,
    Model,
    Optimizers,
    Stateful,
    StatefulCalls,
    TrainedParameters,
    on_device,
    on_host,
    read,
    write,
)
from rubberband.executor.training.clocks import ComputeTimer, make_timer
from rubberband.executor.training.data import Feed, iteration_of
from rubberband.executor.training.failures import TrialFailure, refused
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.gpu_rows import Residence
from rubberband.executor.training.loading import LoaderSettings, Part
from rubberband.executor.training.metrics import Evaluation
from rubberband.executor.training.options import build_optimizer, build_scheduler, check_words, fixed_steps
from rubberband.executor.training.runner import Runner, Steps, clean_metrics, expect, positive
from rubberband.executor.training.sampler import (
    Batching,
    FixedBatching,
    GlobalBatch,
    GlobalBatchSampler,
    SharePolicy,
    reseed,
)
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.executor.training.step import OwnStep, Step, TrainStep, check_own_step
from rubberband.executor.training.torch_trial import TorchTrial, override_of
from rubberband.executor.training.worker_process import compute_with, cpus_per_slot
from rubberband.executor.training.wrapping import (
    RunningStatistics,
    check_same_weights,
    lazy_names,
    parameters_of,
    prepare,
)
from rubberband.planner.balancing import even_shares


class TorchRunner(Runner):
    """Trains a `TorchTrial`; `shares`, if given, says how a global batch is split over the workers."""

    maps = True

    def __init__(self, trial: TorchTrial, segment: Segment, gang: Gang, *, shares: SharePolicy | None = None) -> None:
        self.trial = trial
        self._segment = segment
        self._gang = gang
        self._device = torch.device("cuda", 0) if segment.device == "cuda" else torch.device("cpu")
        if segment.device == "cuda" and segment.trials_per_gpu > 1:
            torch.cuda.set_per_process_memory_fraction(1.0 / segment.trials_per_gpu)
        trial.max_iterations = max(segment.max_iterations or 0, segment.until_iterations)
        reseed("setup", segment.seed)
        self._batch_size = positive("global_batch_size()", trial.global_batch_size(segment.config))
        self._limit: int | None = None
        if trial.max_batch_size_per_gpu is not None:
            self._limit = positive("max_batch_size_per_gpu", trial.max_batch_size_per_gpu)
        self._timer = ComputeTimer()
        self._shares = shares or even_shares
        self._build_data()
        self._build_model(balances=shares is None and self._can_balance())
        self._batching = self._step.batching = self._make_batching()
        self._batch_report = BatchReport()
        self._host_copy = HostCopy(self._device)
        self.checkpoint_every = positive("checkpoint_every", trial.checkpoint_every)
        self._steps = 0
        """Optimizer steps of the trial."""
        self._on_step = override_of(trial, "on_step")

    def _build_data(self) -> None:
        segment, trial = self._segment, self.trial
        collate = None if getattr(trial.collate, "__func__", None) is TorchTrial.collate else trial.collate
        reseed("data", segment.data_seed)  # the same data for all trials
        dataset = trial.train_dataset(segment.config)
        settings = LoaderSettings(
            num_workers=trial.num_workers,
            prefetch_factor=trial.prefetch_factor,
            timeout_s=trial.loader_timeout_s,
            cpus=cpus_per_slot(segment.slots_on_machine),
            start=trial.worker_init,
        )
        has_room = self._device.type == "cuda" and segment.most_per_gpu is None
        residence = Residence(self._device, share=1.0 / segment.trials_per_gpu) if has_room else None
        make_feed = partial(
            Feed, device=self._device, collate=collate, seed=segment.seed, settings=settings, residence=residence
        )
        self._feed = make_feed(dataset, batch_size=self._batch_size)
        self._feed.ahead = self._parts_ahead
        if self._device.type == "cuda":  # batches are gathered here, while the GPU works
            compute_with(settings.cpus - self._feed.num_workers)
        self._sampler = self._make_sampler(dataset)
        samples = trial.samples_per_iteration or (
            iteration_of(dataset) if self._feed.is_stream else self._feed.num_samples
        )
        self._samples_per_iteration = positive("samples_per_iteration", samples)
        self._evaluation = Evaluation(trial, segment, self._gang, every=positive("eval_every", trial.eval_every))
        size = min(self._batch_size, self._limit or self._batch_size)
        if trial.eval_batch_size is not None:
            size = positive("eval_batch_size", trial.eval_batch_size)
        self._evaluation.load(make_feed, size)

    def _make_sampler(self, dataset: Any) -> GlobalBatchSampler:
        segment, trial, total = self._segment, self.trial, self._feed.num_samples
        adapts = segment.batch is not None
        if self._feed.is_stream:
            if adapts:
                raise refused(
                    f"train_dataset() returned {type(dataset).__name__}, which is read from front to end and cannot "
                    "have adaptive batches; leave out batch in the experiment, or return a dataset with len and [i]",
                )
            return GlobalBatchSampler(total, segment.seed, in_order=True)
        if trial.drop_last and not adapts and self._batch_size > total:
            raise refused(
                f"drop_last leaves nothing of the {total} samples of train_dataset() in batches of {self._batch_size}; "
                "use smaller batches, or drop_last = False",
            )
        return GlobalBatchSampler(total, segment.seed, crosses=adapts, drop_last=trial.drop_last)

    def _can_balance(self) -> bool:
        if self._feed.is_stream and self._feed.has_workers:  # after a change they would read it from its beginning
            return False
        return can_balance(self._segment, has_own_step=override_of(self.trial, "step") is not None)

    def _build_model(self, *, balances: bool) -> None:
        segment, trial = self._segment, self.trial
        if balances:
            self._timer = make_timer(self._gang, self._device)
        reseed("setup", segment.seed)
        self.module = trial.build_model(segment.config).to(self._device)
        check_words(trial)
        self._materialise()
        self.compiles = trial.compile
        prepare(self.module, trial, has_fixed_sizes=segment.batch is None and not balances)
        reseed("setup", segment.seed)
        self.optimizers = build_optimizer(trial, segment.config, self.module)
        self._schedules = build_scheduler(trial, segment.config, self.optimizers, self._total_steps())
        self._gang.meet()  # one machine may have had to fetch the data, or the weights
        self._step = self._make_step(largest_share=self._batch_size if balances else None)
        self._statistics = RunningStatistics(self.module, self._gang)
        self._balancing: Balancing | None = None
        if balances:
            self._balancing = Balancing(
                segment,
                self._gang,
                self._timer,
                self._step,
                self._batch_size,
                num_samples=self._feed.num_samples,
                is_costly=self._feed.has_workers or trial.compile,
            )
            self._shares = self._balancing.shares

    def _materialise(self) -> None:
        """Give lazy layers their shapes by a pass over two samples, the same on every worker.

        Raises TrialFailure where that cannot be.
        """
        names = lazy_names(self.module)
        if names and not self._feed.is_stream and override_of(self.trial, "step") is None:
            reseed("setup", self._segment.seed)
            with torch.no_grad():
                self.trial.loss(self.module.eval(), self._feed.load(np.arange(min(2, self._feed.num_samples))))
            names = lazy_names(self.module)
        if names:
            raise refused(
                f"build_model() returned lazy layers ({', '.join(names[:3])}), whose shapes are unknown; pass a sample "
                "through the model in build_model()"
            )

    def _make_step(self, largest_share: int | None) -> Step:
        segment, trial = self._segment, self.trial
        place = (trial, segment, self._gang, self.module, self._feed)
        if override_of(trial, "step") is not None:
            check_own_step(trial, segment)
            return OwnStep(*place, optimizers=self.optimizers)
        share = largest_share or max(self._shares(self._batch_size, segment.num_workers))
        return TrainStep(
            *place,
            optimizer=self.optimizers.members[0],
            timer=self._timer,
            is_one_pass=self._limit is None or share <= self._limit,
        )

    def _total_steps(self) -> int:
        """Return how often the LR schedule steps in a trial that trains to the end."""
        segment = self._segment
        iterations = self.trial.max_iterations
        if self.trial.scheduler_step == "iteration":
            return iterations
        if segment.batch is not None:
            return max(1, iterations * self._samples_per_iteration // (segment.batch.initial or self._batch_size))
        return fixed_steps(
            iterations,
            num_samples=self._feed.num_samples,
            batch_size=self._batch_size,
            samples_per_iteration=self._samples_per_iteration,
            drop_last=self.trial.drop_last,
        )

    def _make_batching(self) -> Batching:
        segment = self._segment
        if segment.batch is None:
            limit = min(self._batch_size, self._limit or self._batch_size)
            return FixedBatching(self._sampler, self._batch_size, limit, self._samples_per_iteration, self._gang)
        from rubberband.executor.training.adaptation import make_adaptive, resolve_limits

        assert isinstance(self._step, TrainStep), "batches of an own step are fixed"
        limits = resolve_limits(
            segment.batch,
            batch_size=self._batch_size,
            per_gpu=self._limit,
            num_samples=self._feed.num_samples,
            samples_per_iteration=self._samples_per_iteration,
        )
        return make_adaptive(
            segment,
            self._gang,
            self.optimizers.members[0],
            self._step.wrapped,
            limits=limits,
            samples_per_iteration=self._samples_per_iteration,
            num_samples=self._feed.num_samples,
            least_per_gpu=self._step.least,
            fits=self._step.fits,
            gradient_scale=self._step.precision.scale,
            shares=self._shares,
            **({} if self._balancing is None else {"pace": self._balancing.pace}),
        )

    def begin(self, payload: bytes | Path | None) -> int:
        held = super().begin(payload)
        if self._segment.most_per_gpu is not None:
            self._batching.restrict(self._segment.most_per_gpu)
        self._gang.meet()
        return held

    def _components(self) -> dict[str, Stateful]:
        """Return the components whose states a checkpoint holds, by name, in the order in which they are restored."""
        return {
            "model": Model(self.module, self._device),
            "parameters": TrainedParameters(self.module, self.optimizers.members),
            "optimizer": Optimizers(self.optimizers),
            "scheduler": self._schedules or NOTHING,
            "sampler": self._sampler,
            "readers": self._feed,
            "batching": self._batching,
            "evaluation": self._evaluation,
            "precision": self._step.precision,
            "steps": StatefulCalls(lambda: self._steps, self._load_steps),
            "balancing": self._balancing or NOTHING,
        }

    def _load_steps(self, state: int) -> None:
        self._steps = state

    def restore(self, payload: bytes | Path) -> int:
        """Restore the components. Raises CheckpointError where they do not fit."""
        content = expect(read(payload), "torch", self._segment.from_iterations)
        try:
            for name, component in self._components().items():
                component.load_state_dict(content.get(name))
            self._restore_trial(content)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"the checkpoint does not fit the trial: {type(error).__name__}: {reason}") from error
        held: int = content["iterations"]
        return held

    def _restore_trial(self, content: Mapping[str, Any]) -> None:
        load = override_of(self.trial, "load_state_dict")
        if load is None and "trial" in content:
            raise ValueError(f"it holds what state_dict() returned, and {type(self.trial).__name__} has none")
        if load is not None and "trial" in content:
            state = on_device(content["trial"], content["trial_on_host"], self._device)
            load(state)
        elif load is not None and self._segment.rank == 0:
            print("rubberband: the checkpoint is older than load_state_dict(), which is not called", file=sys.stderr)

    def steps(self, iterations: int) -> Steps:
        """Train one iteration, evaluate, and step the LR schedule."""
        segment = self._segment
        reseed("train", segment.seed, iterations, 0)  # hooks draw the same numbers on all workers
        trained = yield from self._train(iterations)
        evaluated = self._evaluated(iterations)
        metrics: dict[str, float] = {}
        if segment.rank == 0:
            self._require_finite(trained)
            metrics = clean_metrics({**trained, **evaluated}, segment.metric)
        watched = self._watched(metrics) if segment.rank == 0 else ""
        value = self._gang.agree(metrics.get(watched))
        for schedule in [] if self._schedules is None else self._schedules.members:
            if isinstance(schedule, ReduceLROnPlateau):
                if self._evaluation.is_regular(iterations):
                    schedule.step(value)
            elif self.trial.scheduler_step == "iteration":
                schedule.step()
        self.ended = self._ends()
        if segment.verify and (self.ended or iterations == segment.until_iterations):
            check_same_weights(self._gang, parameters_of(self.module, self.optimizers.members))
        return metrics

    def _require_finite(self, trained: Mapping[str, float]) -> None:
        """Raise TrialFailure for a trial that diverged, whose metric may be finite as its evaluation filters losses.

        A loss that is not finite alone is none: a GradScaler leaves out that step.
        """
        loss = trained.get("train_loss", 0.0)
        if math.isfinite(loss):
            return
        for name, weights in self.module.named_parameters():
            if not bool(torch.isfinite(weights).all()):
                raise TrialFailure("not_a_number", f"train_loss is {loss}, and the weights of {name} are not finite")

    def _evaluated(self, iterations: int) -> Mapping[str, Any]:
        """Return the metrics of the evaluation after that many iterations; `evaluate` may change the weights."""
        with self._step.precision.autocast(keeps_casts=False):
            return self._evaluation.metrics(self.module, iterations, ends=self._ends())

    def _ends(self) -> bool:
        """Return whether rank 0 has ended the trial by itself, on every rank."""
        return bool(self._gang.agree(float(self.trial.ended)))

    def _watched(self, metrics: Mapping[str, float]) -> str:
        """Return the metric that ReduceLROnPlateau steps with. Raises ValueError if it is not reported."""
        watched = self.trial.scheduler_metric or self._segment.metric
        if watched not in metrics:
            raise ValueError(f"scheduler_metric {watched!r} is not reported; the trial reports {', '.join(metrics)}")
        return watched

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Payload:
        """Copy the states of all components; the random states follow from (seed, k), so none is saved."""
        content = {
            "format": FORMAT,
            "kind": "torch",
            "iterations": iterations,
            "seed": self._segment.seed,
            "data_seed": self._segment.data_seed,
            "metrics": dict(metrics),
            **self._states(),
        }
        if override_of(self.trial, "state_dict") is not None:
            content["trial"] = state = self.own_state()
            content["trial_on_host"] = on_host(state) if self._device.type == "cuda" else []
        try:
            copied = content if is_last else self._host_copy.take(content)
        except Exception as error:
            raise CheckpointError(f"the checkpoint cannot be copied: {type(error).__name__}: {error}") from error
        return partial(write, copied, self._host_copy)

    def own_state(self) -> Any:
        """Return what the trial's `state_dict()` returns; None where it has none."""
        state_dict = override_of(self.trial, "state_dict")
        return None if state_dict is None else state_dict()

    def _states(self) -> dict[str, Any]:
        """Return the states of the components, for the checkpoint."""
        return {name: component.state_dict() for name, component in self._components().items()}

    def meet(self) -> None:
        self._gang.agree(0.0 if self._gang.rank == 0 else None)

    def part(self) -> None:
        self.close()
        self._gang.part()

    def close(self) -> None:
        """Drop the model and all that refers to it, as the gang requires before it is left."""
        for name in ("_feed", "_evaluation"):
            if hasattr(self, name):
                getattr(self, name).close()
        if hasattr(self, "_batching"):
            self._batching.close()
        if hasattr(self, "_host_copy"):
            self._host_copy.close()
        wrapped = weakref.ref(self._step.wrapped) if hasattr(self, "_step") else None
        if wrapped is not None:
            self._step.close()
            if self.trial.compile:
                torch.compiler.reset()
        for name in (
            "_step",
            "_on_step",
            "module",
            "optimizers",
            "_schedules",
            "trial",
            "_feed",
            "_evaluation",
            "_batching",
            "_balancing",
            "_shares",
            "_statistics",
            "_host_copy",
        ):
            self.__dict__.pop(name, None)
        if wrapped is not None and wrapped() is not None:
            gc.collect()

    def _after_step(self, batch: GlobalBatch) -> None:
        if self._step.has_stepped:
            self._steps += 1
            if self._on_step is not None:
                with torch.no_grad():
                    self._on_step(self.module, self._steps, batch.size)

    def batch_report(self) -> BatchReport:
        return self._batch_report

    def _train(self, iterations: int) -> Generator[None, None, dict[str, float]]:
        """Train until that many iterations are done, one step at least; return the means over them, as `train_…`.

        It pauses after each step.
        """
        means = self._step.begin()
        self.trial.on_iteration(self.module, iterations)
        self._step.follow()
        self._feed.follow()
        self._draw_apart(iterations)
        self._batching.begin(iterations)
        balancing = self._balancing
        over = False
        while not over:
            if balancing is not None:
                balancing.begin_step()
            batch = self._sampler.next_shared(self._batching.batch_size, self._segment.num_workers, self._shares)
            self._step.take(batch, means)
            self._statistics.add(batch.shares[self._segment.rank])
            self._after_step(batch)
            if balancing is not None:
                balancing.end_step(batch)
            batches = self._batching.after_step(batch, has_stepped=self._step.has_stepped)
            if self._schedules is not None and self.trial.scheduler_step == "batch":
                for schedule in self._schedules.members * batches:
                    schedule.step()
            over = self._batching.is_over()
            if balancing is not None:
                balancing.look_if_due(self._batching)
            self._batching.pause()
            yield
            self._batching.resume()
        self._statistics.average()
        self._batch_report = self._batching.end()
        if balancing is not None and self._segment.rank == 0:
            self._batch_report = replace(self._batch_report, balance=balancing.report())
        return {f"train_{name}": mean for name, mean in means.reduce(self._gang).items()}

    def _draw_apart(self, iterations: int) -> None:
        """Let each worker draw its own random numbers in the steps of an iteration."""
        if self._segment.rank > 0:
            reseed("train", self._segment.seed, iterations, self._segment.rank)

    def _parts_ahead(self) -> Iterator[Part]:
        """Iterate over what this worker will load after the present step, if the batches stay as they are."""
        sampler, present = copy.copy(self._sampler), self._step.begun  # now, not when the first part is asked for

        def parts() -> Iterator[Part]:
            for step in itertools.count(present + 1):
                batch = sampler.next_shared(self._batching.batch_size, self._segment.num_workers, self._shares)
                for part in self._step.parts(batch, step - self._step.begun)[0]:
                    yield Part(indices=part, epoch=batch.epoch)

        return parts()


def first_step(device: str) -> None:
    """Take a step of a tiny model: the first one imports much of torch, and would delay the first trial.

    On a GPU it loads the libraries and kernels of usual steps too, each of which takes up to seconds at its first use.
    """
    _tiny_step(torch.nn.Linear(1, 1), torch.zeros(1, 1), torch.device(device), torch.optim.SGD)
    if device == "cuda":
        warm_kernels(torch.device(device), bf16=torch.cuda.is_bf16_supported(including_emulation=False))
        torch.cuda.synchronize()


def warm_kernels(device: torch.device, *, bf16: bool) -> None:
    """Take a step with convolutions and AdamW over all tensors at once, and with `bf16` one in that precision.

    Does nothing more where one fails: a trial that needs it gets the error itself, and others train without it.
    """
    with suppress(RuntimeError):
        for dtype in (None, torch.bfloat16)[: 1 + bf16]:
            model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 8))
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                _tiny_step(model, torch.zeros(8, 8, 8, 8), device, partial(torch.optim.AdamW, foreach=True))


def _tiny_step(
    model: torch.nn.Module, inputs: torch.Tensor, device: torch.device, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    stepped = optimizer(model.to(device).parameters(), lr=0.0)
    model(inputs.to(device)).sum().backward()
    stepped.step()
