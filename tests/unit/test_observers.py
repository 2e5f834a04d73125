"""What looks on leaves what it looks at as it was, bit by bit: model, gradients, buffers, optimizer, random states.

Classes that time, measure, check, track or copy are found by their names; a new one needs an example here.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from rubberband.executor import (
    CpuTimer,
    GradientNoise,
    HostCopy,
    LapClock,
    Preconditioner,
    TrainedParameters,
    scaled_lr,
)
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.run import trackers
from rubberband.executor.run.callbacks import Callback
from rubberband.executor.training.clocks import ComputeTimer
from rubberband.executor.training.goodput.noise_scale import DENOMINATORS
from rubberband.executor.training.wrapping import check_same_weights, parameters_of
from rubberband.integrations.ray_tune_trials import FailFast, TuneCallbacks
from rubberband.spec.observers import CsvTracker, MlflowTracker, TensorboardTracker, WandbTracker
from tests.builders import segments, walk
from tests.builders.filled import plain
from tests.builders.loops import Noisy, assert_identical
from tests.builders.segments import variant

pytestmark = pytest.mark.usefixtures("one_thread")

LOOKS = re.compile(r"(Clock|Timer|Noise|Check|Tracker|Callback|Observer|Watch|Preconditioner|Copy|Probe)s?$")
WORDS: dict[str, Any] = {
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "SGD": {"momentum": 0.9},
}
OPTIMIZERS = [*(kind for kind, _, _ in DENOMINATORS), torch.optim.SGD, torch.optim.AdamW]


class Scene:
    """A model in training, with gradients and with all that a pass changes."""

    def __init__(self, kind: type[torch.optim.Optimizer], *, is_one: bool) -> None:
        torch.manual_seed(0)
        several = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1))
        self.model = nn.Linear(4, 1, bias=False) if is_one else several
        self.optimizer: Any = kind(self.model.parameters(), lr=0.01, **{} if is_one else WORDS.get(kind.__name__, {}))
        for _ in range(12):
            self.step()

    def loss(self) -> torch.Tensor:
        """Of 16 samples, whose first feature is always 0: some coordinates never have a gradient."""
        samples = torch.randn(16, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0])
        return self.model(samples).square().mean()

    def step(self) -> None:
        """A whole step; its gradients stay."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def state(self) -> Any:
        """Everything that an observer might change."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        modes = [each.training for each in self.model.modules()], [each.requires_grad for each in named.values()]
        places = [each.data_ptr() for each in named.values()], torch.is_grad_enabled(), torch.get_num_threads()
        gradients = [each.grad for each in self.model.parameters()]
        return plain([named, gradients, self.optimizer.state_dict(), modes, places]), random_states()


def random_states() -> Any:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


class Looks:
    """Calls of an observer, each of which must leave the scene as it was."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def __call__(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        before = self.scene.state()
        found = call(*given, **named)
        assert self.scene.state() == before, f"{getattr(call, '__qualname__', call)} changes what it looks at"
        return found


def _noise(scene: Scene, look: Looks, parts: list[int]) -> None:
    noise = look(
        GradientNoise,
        scene.optimizer,
        scene.model,
        rank=0,
        num_workers=1,
        initial_batch=32,
        total=lambda tensor: tensor,
        every=2,
        gradient_scale=lambda: torch.tensor(4.0),
    )
    for _ in range(4):
        scene.optimizer.zero_grad()
        look(noise.before_step, [sum(parts)], parts)
        look(noise.weigh, [1 / len(parts)] * len(parts))
        for _ in parts:
            scene.loss().backward()
            look(noise.after_part)
        look(noise.before_update)
        scene.optimizer.step()
        look(noise.reading)
        look(noise.state_dict)
    assert noise.reading().estimates > 0
    look(noise.load_state_dict, noise.state_dict())
    look(noise.close)


def _accumulating(scene: Scene, look: Looks) -> None:
    _noise(scene, look, [16, 16])


def _differencing(scene: Scene, look: Looks) -> None:
    _noise(scene, look, [32])


def _preconditioning(scene: Scene, look: Looks) -> None:
    found = look(look(Preconditioner, scene.optimizer, lambda: torch.tensor(4.0)).now)
    parameters = list(found.parameters)
    look(found.apply, parameters, [each.grad for each in parameters])
    look(found.apply, parameters, [None] * len(parameters))


def _timing(scene: Scene, look: Looks) -> None:
    for timer in (CpuTimer(Gang(0, 1, None)), ComputeTimer()):
        for _ in range(3):
            look(timer.begin)
            scene.optimizer.zero_grad()
            loss = scene.loss()
            look(timer.watch, loss)
            loss.backward()
            expected = [each.grad.clone() for each in scene.model.parameters()]
            look(timer.averaged)
            scene.optimizer.step()
            look(timer.end, counts=True)
            assert plain([each.grad for each in scene.model.parameters()]) == plain(expected)
        look(timer.take)


def _lapping(scene: Scene, look: Looks) -> None:
    clock = look(LapClock)
    for call in (clock.wait, clock.lap, clock.pause, clock.resume, clock.own, clock.now):
        look(call)


def _copying(scene: Scene, look: Looks) -> None:
    host = look(HostCopy, torch.device("cpu"))
    taken = look(host.take, {"model": scene.model.state_dict(), "optimizer": scene.optimizer.state_dict()})
    look(host.wait)
    kept = plain(taken)
    scene.step()
    assert plain(taken) == kept, "what was copied follows what is trained"
    look(host.close)


def _comparing(scene: Scene, look: Looks) -> None:
    gang: Any = SimpleNamespace(num_workers=2, gather=lambda found: [found, found])
    look(check_same_weights, gang, parameters_of(scene.model, [scene.optimizer]))
    look(TrainedParameters(scene.model, [scene.optimizer]).state_dict)


def _scaling(scene: Scene, look: Looks) -> None:
    def scaled() -> None:
        with scaled_lr(scene.optimizer, 3.0):
            pass

    look(scaled)


EXAMPLES = {
    "GradientNoise": _accumulating,
    "GradientNoise of pairs": _differencing,
    "Preconditioner": _preconditioning,
    "ComputeTimer CpuTimer _GradientTimer": _timing,
    "LapClock": _lapping,
    "HostCopy _Copy": _copying,
    "check_same_weights": _comparing,
    "scaled_lr": _scaling,
}
ELSEWHERE = {
    "TrialCheck": "a record",
    "ProgramCheck": "is of another process",
    "StepwiseCheck": "is in a process of its own",
    "WaitClock": "sees no tensor",
    "CudaTimer": "needs a GPU",
    "CudaLapClock": "needs a GPU",
    "Callback": "does nothing; the others are in TRACKED",
    "Tracker": "does nothing; the others are in TRACKED",
}


def test_every_observer_of_training_has_an_example():
    places = ("executor.training.", "executor.run.", "integrations.")
    named = {walk.name_of(kind): kind for kind in walk.classes() if walk.name_of(kind).startswith(places)}
    found = {kind.__name__ for kind in named.values() if LOOKS.search(kind.__name__) or issubclass(kind, Callback)}
    known = (
        {name for names in EXAMPLES for name in names.split()} | ELSEWHERE.keys() | {each.__name__ for each in TRACKED}
    )
    assert found - known - ELSEWHERE.keys() == set(), "add an example to EXAMPLES in test_observers.py"


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_one", [False, True], ids=["several", "one parameter"])
def test_an_observer_leaves_a_training_as_it_was(kind, is_one):
    for example in EXAMPLES.values():
        scene = Scene(kind, is_one=is_one)
        example(scene, Looks(scene))


# A whole trial: evaluations, checkpoints and pauses change nothing of what is learnt.


@pytest.mark.parametrize(
    "members",
    [{"eval_every": 3}, {"checkpoint_every": 3}, {"eval_dataset": lambda self, config: None}, {"eval_batch_size": 3}],
    ids=["seldom evaluated", "seldom saved", "never evaluated", "evaluated in other batches"],
)
def test_looks_at_a_trial_change_nothing_of_what_it_learns(store, members):
    found = []
    for more in ({}, members):
        trained = segments.train(variant(Noisy, **more), store, until_iterations=3, metric="train_loss")
        found.append(segments.content(store, segments.reports(trained)[-1]))
    for key in ("model", "optimizer", "scheduler", "sampler", "steps"):
        assert_identical(found[0][key], found[1][key])


# Trackers and callbacks get what others use too.


TRACKED: dict[type, Callable[[Path], Any]] = {
    trackers.Csv: lambda folder: trackers.Csv(CsvTracker(), folder, "run"),
    trackers.Tensorboard: lambda folder: trackers.Tensorboard(TensorboardTracker(), folder, "run"),
    trackers.Mlflow: lambda folder: trackers.Mlflow(MlflowTracker(), folder, "run"),
    trackers.Wandb: lambda folder: trackers.Wandb(WandbTracker(), folder, "run"),
    TuneCallbacks: lambda folder: TuneCallbacks([mock.MagicMock()], "train", folder, None, None),
    FailFast: lambda folder: FailFast(mock.MagicMock(inbox=folder / "inbox")),
}


@pytest.mark.parametrize("kind", TRACKED, ids=lambda kind: kind.__name__)
def test_a_tracker_leaves_reports_as_they_were(kind, tmp_path):
    run = SimpleNamespace(name="a", metric="loss", mode="min", num_trials=1, experiment={"name": "a"}, is_resumed=False)
    config, metrics = {"lr": 0.1, "layers": [1, 2]}, {"loss": 0.5}
    about = {"trial": 0, "config": config, "iterations": 1, "elapsed_s": 1.0}
    report = SimpleNamespace(**about, metrics=metrics, stage=0, reported_at=2.0)
    failure = SimpleNamespace(**about, failure="raised")
    sync = SimpleNamespace(stage=0, trials=[0], promoted=[], ranking=[0], elapsed_s=1.0, cost_usd=0.0)
    told = copy.deepcopy([vars(each) for each in (run, report, failure, sync)])
    names = ("mlflow", "mlflow.tracking", "mlflow.entities", "wandb", "tensorboardX", "tensorboardX.summary")
    library = mock.patch.dict(sys.modules, dict.fromkeys(names, mock.MagicMock()))
    with library, mock.patch.object(trackers, "_is_installed"):
        tracker, before = TRACKED[kind](tmp_path), random_states()
        if isinstance(tracker, trackers.Tracker):
            tracker.open({})
        tracker.on_experiment_start(run)
        tracker.on_trial_report(report)
        tracker.on_sync(sync)
        tracker.on_trial_failure(failure)
        if isinstance(tracker, trackers.Tracker):
            tracker.flush()
    assert [vars(each) for each in (run, report, failure, sync)] == told
    assert random_states() == before
