"""The training loop of a `TorchTrial` on one worker of its gang.

The learning curve does not depend on the gang, except for the order of floating-point sums:

* The global batches come from (seed, epoch) alone (`sampler.py`). Each worker takes its share m_i of the M samples, in
  micro-batches of at most `max_batch_size_per_gpu`. DistributedDataParallel averages gradients over the n workers, so a
  micro-batch of m samples with mean loss L contributes n*m/M * L: every sample counts the same. A worker without a
  share takes no pass, or one of weight 0. Where a worker runs out of memory, the segment begins again
  with smaller ones. Shares
  follow the workers' speed (`balancing.py`).
* Before iteration k the random states are set from (seed, k, rank), so a checkpoint holds none and resuming from it is
  exact; on GPUs it is up to rounding, as their kernels add in no fixed order. Random draws of the model (dropout)
  differ with the number of workers, and are equal only in distribution; so are the statistics of BatchNorm, which see a
  worker's micro-batch. Random draws of the dataset (augmentation) follow from (seed, epoch, position) and are the same.
* Evaluation is described in `metrics.py`.

A step is: the sampler gives a global batch, of the size that the batching says and divided as the division says; the
step (`step.py`) takes this worker's share. All else is done by components, whose list is in `TorchRunner._listed`.
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
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import Payload
from rubberband.executor.checkpoints.folders import FORMAT
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.training.changing import Built, misfit
from rubberband.executor.training.checkpoint import Model, Optimizers, TrainedParameters, on_device, on_host
from rubberband.executor.training.clocks import ComputeTimer
from rubberband.executor.training.components import Component, Division, SharePolicy
from rubberband.executor.training.data import Feed, iteration_of
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import TrialFailure, refused
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.gpu_rows import Residence
from rubberband.executor.training.layout import Layout
from rubberband.executor.training.loading import LoaderSettings, Part
from rubberband.executor.training.metrics import Evaluation
from rubberband.executor.training.options import build_optimizer, check_words
from rubberband.executor.training.reported import clean_metrics
from rubberband.executor.training.runner import Runner, Steps, expect, positive
from rubberband.executor.training.sampler import Batching, FixedBatching, GlobalBatch, GlobalBatchSampler, reseed
from rubberband.executor.training.schedule import LrSchedule, fixed_steps
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.executor.training.step import OwnStep, Step, TrainStep, check_own_step
from rubberband.executor.training.torch_trial import TorchTrial, override_of
from rubberband.executor.training.waits import WaitClock
from rubberband.executor.training.worker_process import compute_with, cpus_per_slot
from rubberband.executor.training.wrapping import RunningStatistics, SameWeights, lazy_names, prepare
from rubberband.features import made_by


def make_runner(entrypoint: Entrypoint, target: type[TorchTrial], segment: Segment, resources: list[Any]) -> Runner:
    """Make the runner of a `TorchTrial`: a feature's, or the loop of its gang."""
    if segment.device == "cpu":
        # A worker stands for one logical GPU: with torch's default every worker would take all cores of the machine,
        # and a gang of four would be slower than one worker.
        torch.set_num_threads(1)
    trial = target()
    if (other := made_by("loop", trial, segment)) is not None:
        return cast("Runner", other)
    gang = Gang.join(
        rank=segment.rank, num_workers=segment.num_workers, rendezvous=segment.rendezvous, device=segment.device
    )
    resources.append(gang)
    return TorchRunner(trial, segment, gang)


class TorchRunner(Runner):
    """Trains a `TorchTrial`. Its components use what is public here.

    `shares`, if given, says how a global batch is split over the workers.
    """

    maps = True
    step: Step
    batching: Batching
    module: torch.nn.Module

    def __init__(self, trial: TorchTrial, segment: Segment, gang: Gang, *, shares: SharePolicy | None = None) -> None:
        self.trial, self.segment, self.gang = trial, segment, gang
        self.device = torch.device("cuda", 0) if segment.device == "cuda" else torch.device("cpu")
        if segment.device == "cuda" and segment.trials_per_gpu > 1:
            torch.cuda.set_per_process_memory_fraction(1.0 / segment.trials_per_gpu)
        trial.max_iterations = max(segment.max_iterations or 0, segment.until_iterations)
        configuration = copy.deepcopy(dict(segment.config))  # as it is before the trial's methods have it
        reseed("setup", segment.seed)
        self.batch_size = positive("global_batch_size()", trial.global_batch_size(segment.config))
        self.limit: int | None = None
        """The trial's own limit of samples that go through the model at once."""
        if trial.max_batch_size_per_gpu is not None:
            self.limit = positive("max_batch_size_per_gpu", trial.max_batch_size_per_gpu)
        self.layout: Layout = made_by("layout", self) or Layout(self)
        self._build_data()
        self._build_model(shares)
        self._batch_report = BatchReport()
        self.checkpoint_every = positive("checkpoint_every", trial.checkpoint_every)
        self.components = self._listed()
        self._built = Built(self, configuration)

    def _build_data(self) -> None:
        segment, trial = self.segment, self.trial
        collate = None if getattr(trial.collate, "__func__", None) is TorchTrial.collate else trial.collate
        reseed("data", segment.data_seed)  # the same data for all trials
        dataset = trial.train_dataset(segment.config)
        settings = LoaderSettings(
            num_workers=trial.num_workers,
            prefetch_factor=trial.prefetch_factor,
            timeout_s=trial.loader_timeout_s,
            cpus=cpus_per_slot(segment.slots_on_machine),
            start=trial.worker_init,
            changes=lambda: trial.data_changes,
        )
        has_room = self.device.type == "cuda" and segment.most_per_gpu is None
        residence = Residence(self.device, share=1.0 / segment.trials_per_gpu) if has_room else None
        waiting = WaitClock()
        self.waited = {"data": waiting.seconds}
        make_feed = partial(
            Feed,
            device=self.device,
            collate=collate,
            seed=segment.seed,
            settings=settings,
            residence=residence,
            waiting=waiting,
        )
        self.feed = make_feed(dataset, batch_size=self.batch_size)
        self.feed.ahead = self._parts_ahead
        if self.device.type == "cuda":  # batches are gathered here, while the GPU works
            compute_with(settings.cpus - self.feed.num_workers)
        self.sampler = self._make_sampler(dataset)
        samples = trial.samples_per_iteration or (
            iteration_of(dataset) if self.feed.is_stream else self.feed.num_samples
        )
        self.samples_per_iteration = positive("samples_per_iteration", samples)
        every = positive("eval_every", trial.eval_every)
        self.evaluation = Evaluation(trial, segment, self.gang, every=every, in_step=self.layout.in_step)
        size = min(self.batch_size, self.limit or self.batch_size)
        if trial.eval_batch_size is not None:
            size = positive("eval_batch_size", trial.eval_batch_size)
        self.evaluation.load(make_feed, size)

    def _make_sampler(self, dataset: Any) -> GlobalBatchSampler:
        segment, trial, total = self.segment, self.trial, self.feed.num_samples
        adapts = segment.batch is not None
        if self.feed.is_stream:
            if adapts:
                raise refused(
                    f"train_dataset() returned {type(dataset).__name__}, which is read from front to end and cannot "
                    "have adaptive batches; leave out batch in the experiment, or return a dataset with len and [i]"
                )
            return GlobalBatchSampler(total, segment.seed, in_order=True)
        if trial.drop_last and not adapts and self.batch_size > total:
            raise refused(
                f"drop_last leaves nothing of the {total} samples of train_dataset() in batches of {self.batch_size}; "
                "use smaller batches, or drop_last = False"
            )
        return GlobalBatchSampler(total, segment.seed, crosses=adapts, drop_last=trial.drop_last)

    def _build_model(self, shares: SharePolicy | None) -> None:
        segment, trial = self.segment, self.trial
        reseed("setup", segment.seed)
        self.module = self.layout.build()
        check_words(trial)
        self._materialise()
        self.compiles = trial.compile
        given = None if shares is None else Division(shares)
        self.division: Division = given or (not self.layout.in_step and made_by("division", self)) or Division()
        if (timer := self.division.timer) is not None:
            gang = self.gang
            self.waited = {**self.waited, "peers": lambda: timer.waited_s + gang.waited_s}
        prepare(self.module, trial, has_fixed_sizes=segment.batch is None and self.division.is_fixed)
        reseed("setup", segment.seed)
        self.optimizers = build_optimizer(trial, segment.config, self.module)
        self.schedule = LrSchedule(self)
        self.gang.meet()  # one machine may have had to fetch the data, or the weights
        self.step = self._make_step()
        self.batching = self.step.batching = self._make_batching()
        self.counter = StepCounter(self)

    def _materialise(self) -> None:
        """Give lazy layers their shapes by a pass over two samples, the same on every worker.

        Raises TrialFailure where that cannot be.
        """
        names = lazy_names(self.module)
        if names and not self.feed.is_stream and override_of(self.trial, "step") is None:
            reseed("setup", self.segment.seed)
            with torch.no_grad():
                self.trial.loss(self.module.eval(), self.feed.load(np.arange(min(2, self.feed.num_samples))))
            names = lazy_names(self.module)
        if names:
            raise refused(
                f"build_model() returned lazy layers ({', '.join(names[:3])}), whose shapes are unknown; pass a sample "
                "through the model in build_model()"
            )

    def _make_step(self) -> Step:
        segment, trial = self.segment, self.trial
        place = (trial, segment, self.gang, self.module, self.feed)
        if override_of(trial, "step") is not None:
            check_own_step(trial, segment)
            return OwnStep(*place, optimizers=self.optimizers)
        share = self.division.largest_share(self.batch_size, segment.num_workers)
        most = min(each for each in (self.limit, segment.most_per_gpu, share) if each is not None)
        return TrainStep(
            *place,
            optimizer=(optimizer := self.optimizers.members[0]),
            timer=self.division.timer or ComputeTimer(),
            exchange=self.layout.exchange(optimizer, is_one_pass=share <= most),
        )

    def _make_batching(self) -> Batching:
        limit = min(self.batch_size, self.limit or self.batch_size)
        fixed = FixedBatching(self.sampler, self.batch_size, limit, self.samples_per_iteration)
        return made_by("batching", self) or fixed

    def _listed(self) -> dict[str, Component]:
        """Return the components by name, in the order in which they are called and restored."""
        return {
            "model": Model(self.module, self.device),
            "parameters": TrainedParameters(self.module, self.optimizers.members),
            "optimizer": Optimizers(self.optimizers),
            "sampler": self.sampler,
            "readers": self.feed,
            "statistics": RunningStatistics(self.module, self.gang),
            "steps": self.counter,
            "balancing": self.division,
            "batching": self.batching,
            "scheduler": self.schedule,
            "evaluation": self.evaluation,
            "precision": self.step.precision,
            **({"weights": SameWeights(self)} if self.segment.verify and not self.layout.in_step else {}),
        }

    def fixed_steps(self, iterations: int) -> int:
        """Return the steps of that many iterations in batches of one size."""
        return fixed_steps(
            iterations,
            num_samples=self.feed.num_samples,
            batch_size=self.batch_size,
            samples_per_iteration=self.samples_per_iteration,
            drop_last=self.trial.drop_last,
        )

    def begin(self, payload: bytes | Path | None) -> int:
        held = super().begin(payload)
        if self.segment.most_per_gpu is not None:
            self.batching.restrict(self.segment.most_per_gpu)
        self.gang.meet()
        return held

    def restore(self, payload: bytes | Path) -> int:
        """Restore the components; what follows from another configuration than the checkpoint's, by the present one.

        Raises CheckpointError where they do not fit.
        """
        content = expect(self.layout.read(payload), "torch", self.segment.from_iterations)
        changes = self._built.changes(content)
        try:
            content = self.layout.placed(self._built.carried(content))
            for name, component in self.components.items():
                component.load_state_dict(content.get(name))
            self._restore_trial(content)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(misfit(changes, f"{type(error).__name__}: {reason}")) from error
        held: int = content["iterations"]
        return held

    def _restore_trial(self, content: Mapping[str, Any]) -> None:
        load = override_of(self.trial, "load_state_dict")
        if load is None and "trial" in content:
            raise ValueError(f"it holds what state_dict() returned, and {type(self.trial).__name__} has none")
        if load is not None and "trial" in content:
            state = on_device(content["trial"], content["trial_on_host"], self.device)
            load(state)
        elif load is not None and self.segment.rank == 0:
            print("rubberband: the checkpoint is older than load_state_dict(), which is not called", file=sys.stderr)

    def steps(self, iterations: int) -> Steps:
        """Train one iteration, and evaluate it."""
        segment = self.segment
        reseed("train", segment.seed, iterations, 0)  # hooks draw the same numbers on all workers
        trained = yield from self._train(iterations)
        evaluated = self.evaluated(iterations)
        metrics: dict[str, float] = {}
        if segment.rank == 0 or self.layout.in_step:
            self._require_finite(trained)
        if segment.rank == 0:
            metrics = clean_metrics({**trained, **evaluated}, segment.metric)
        self.ended = self.ends()
        for each in self.components.values():
            each.after_evaluation(iterations, metrics)
        return metrics

    def _train(self, iterations: int) -> Generator[None, None, dict[str, float]]:
        """Train until that many iterations are done, one step at least; return the means over them, as `train_…`.

        It pauses after each step.
        """
        means = self.step.begin()
        with self.layout.in_hook():
            self.trial.on_iteration(self.module, iterations)
        self.step.follow()
        self.feed.follow()
        if self.segment.rank > 0:  # each worker draws its own numbers in the steps
            reseed("train", self.segment.seed, iterations, self.segment.rank)
        components, over = list(self.components.values()), False
        for each in components:
            each.begin(iterations)
        while not over:
            for each in components:
                each.begin_step()
            batch = self.next_batch(self.sampler)
            self.step.take(batch, means)
            for each in components:
                each.after_step(batch, has_stepped=self.step.has_stepped)
            over = self.batching.is_over()
            for each in components:
                each.pause()
            yield
            for each in components:
                each.resume()
        fields: dict[str, Any] = {}
        for each in components:
            fields |= each.end()
        self._batch_report = BatchReport(**fields)
        return {f"train_{name}": mean for name, mean in means.reduce(self.gang).items()}

    def next_batch(self, sampler: GlobalBatchSampler) -> GlobalBatch:
        """Return the next batch of the loop's sampler, or of a copy that is ahead of it."""
        return sampler.next_shared(self.batching.batch_size, self.segment.num_workers, self.division.shares)

    def _parts_ahead(self) -> Iterator[Part]:
        """Iterate over what this worker will load after the present step, if the batches stay as they are."""
        sampler, present = copy.copy(self.sampler), self.step.begun  # now, not when the first part is asked for

        def parts() -> Iterator[Part]:
            for step in itertools.count(present + 1):
                batch = self.next_batch(sampler)
                for part in self.step.parts(batch, step - self.step.begun)[0]:
                    yield Part(indices=part, epoch=batch.epoch)

        return parts()

    def _require_finite(self, trained: Mapping[str, float]) -> None:
        """Raise TrialFailure for a trial that diverged, whose metric may be finite as its evaluation filters losses.

        A loss that is not finite alone is none: a GradScaler leaves out that step.
        """
        loss = trained.get("train_loss", 0.0)
        if math.isfinite(loss):
            return
        for name, weights in self.module.named_parameters():
            if not bool(torch.isfinite(self.layout.own(weights)).all()):
                raise TrialFailure("not_a_number", f"train_loss is {loss}, and the weights of {name} are not finite")

    def evaluated(self, iterations: int) -> Mapping[str, Any]:
        """Return the metrics of the evaluation after that many iterations; `evaluate` may change the weights."""
        with self.step.precision.autocast(keeps_casts=False):
            return self.evaluation.metrics(self.module, iterations, self.layout.within, ends=self.ends())

    def ends(self) -> bool:
        """Return whether rank 0 has ended the trial by itself, on every rank."""
        return bool(self.gang.agree(float(self.trial.ended)))

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Payload:
        """Copy the states of all components; the random states follow from (seed, k), so none is saved."""
        content = {
            "format": FORMAT,
            "kind": "torch",
            "iterations": iterations,
            "seed": self.segment.seed,
            "data_seed": self.segment.data_seed,
            "metrics": dict(metrics),
            "built": self._built.state,
            **self.states(),
        }
        if override_of(self.trial, "state_dict") is not None:
            content["trial"] = state = self.own_state()
            content["trial_on_host"] = on_host(state) if self.device.type == "cuda" else []
        return self.layout.saved(content, is_last=is_last)

    def dump_part(self, iterations: int, *, is_last: bool = False) -> None:
        self.layout.save_part(iterations, self.save, is_last=is_last)

    def parts(self) -> tuple[CheckpointRef, ...]:
        return self.layout.parts()

    def own_state(self) -> Any:
        """Return what the trial's `state_dict()` returns; None where it has none."""
        state_dict = override_of(self.trial, "state_dict")
        return None if state_dict is None else state_dict()

    def states(self) -> dict[str, Any]:
        """Return the states of the components that have one, for the checkpoint."""
        states = {name: component.state_dict() for name, component in self.components.items()}
        return {name: state for name, state in states.items() if state is not None}

    def batch_report(self) -> BatchReport:
        return self._batch_report

    def meet(self) -> None:
        self.gang.agree(0.0 if self.gang.rank == 0 else None)

    def part(self) -> None:
        gang = self.gang
        self.close()
        gang.part()

    def close(self) -> None:
        """Drop the model and all that refers to it, as the gang requires before it is left."""
        if not hasattr(self, "components"):
            return
        for each in reversed(self.components.values()):
            each.close()
        del each  # it refers to the model
        self.layout.close()
        wrapped = weakref.ref(self.step.wrapped)
        self.step.close()
        if self.trial.compile:
            torch.compiler.reset()
        ended = self.ended
        vars(self).clear()
        self.ended = ended
        if wrapped() is not None:
            gc.collect()


class StepCounter(Component):
    """Counts the optimizer steps of the trial, and calls its `on_step` after each."""

    def __init__(self, loop: TorchRunner) -> None:
        self._module = loop.module
        self._layout = loop.layout
        self._on_step = override_of(loop.trial, "on_step")
        self.count = 0

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool) -> None:
        if has_stepped:
            self.count += 1
            if self._on_step is not None:
                with torch.no_grad(), self._layout.in_hook():
                    self._on_step(self._module, self.count, batch.size)

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int, /) -> None:
        self.count = state


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
