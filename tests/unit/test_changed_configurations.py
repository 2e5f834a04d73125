"""A torch trial that continues from a checkpoint of another configuration: its own settings are in force."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from rubberband import get_checkpoint, report
from rubberband.executor import CheckpointStore, Entrypoint, SegmentFailure, make_runner
from rubberband.executor.training.changing import carried
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck
from rubberband.executor.training.loop import TorchRunner
from rubberband.executor.training.run import close_all
from rubberband.values.adaptive import AdaptiveBatch
from tests.builders.checks import check_here
from tests.builders.loops import Exact
from tests.builders.segments import SEGMENT, content, failure, reports, train

pytestmark = pytest.mark.usefixtures("one_thread")

OLD: Mapping[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.001, "gamma": 0.7, "width": 6}
NEW: Mapping[str, Any] = {**OLD, "lr": 0.03, "momentum": 0.8, "weight_decay": 0.002}
FEW = {"lr": 0.03}


class Tuned(Exact):
    """Everything follows from the configuration; `schedule` and `kind` name what is built."""

    kind = "sgd"
    schedule = ""
    scheduler_step = "batch"

    def build_model(self, config):
        width = config["width"]
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.0), torch.nn.Linear(width, 1)).double()

    def build_optimizer(self, config, model):
        first, last = model[0].parameters(), model[2].parameters()
        groups = [{"params": list(first)}, {"params": list(last), "lr": config["lr"] / 10}]
        kind = config.get("optimizer", self.kind)
        if kind == "adamw":
            betas = (config["momentum"], 0.999)
            return torch.optim.AdamW(groups, lr=config["lr"], betas=betas, weight_decay=config["weight_decay"])
        momentum, decay = config["momentum"], config["weight_decay"]
        return torch.optim.SGD(groups, lr=config["lr"], momentum=momentum, weight_decay=decay)

    def build_scheduler(self, config, optimizer, total_steps):
        lr = config["lr"]
        return {
            "": lambda: None,
            "step": lambda: lr_scheduler.StepLR(optimizer, step_size=2, gamma=config["gamma"]),
            "multi": lambda: lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7], gamma=config["gamma"]),
            "one_cycle": lambda: lr_scheduler.OneCycleLR(
                optimizer, max_lr=[lr * 10, lr], total_steps=total_steps, cycle_momentum=False
            ),
            "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step)),
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps),
            "warm": lambda: lr_scheduler.SequentialLR(
                optimizer,
                [
                    lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
                    lr_scheduler.ExponentialLR(optimizer, gamma=config["gamma"]),
                ],
                milestones=[4],
            ),
        }[self.schedule]()


def of(**members: Any) -> type[Tuned]:
    return type("Of", (Tuned,), {"__module__": __name__, "__qualname__": "<made>.Of", **members})


def begun(trial: type, store: CheckpointStore, checkpoint: Any, config: Mapping[str, Any], iterations: int = 2) -> Any:
    """The runner that has restored a checkpoint, and what closes it."""
    from dataclasses import replace

    segment = replace(SEGMENT, config=config, from_iterations=iterations, checkpoint=checkpoint)
    resources: list[Any] = []
    runner = make_runner(Entrypoint.from_object(trial), segment, resources)
    assert isinstance(runner, TorchRunner)
    runner.begin(store.load(checkpoint))
    return runner, lambda: close_all([*resources, runner], segment)


def groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in state["param_groups"]]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


SCHEDULES = ("", "step", "multi", "one_cycle", "lambda", "cosine", "warm")


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_its_settings_are_those_of_a_trial_that_always_had_them(
    store: CheckpointStore, kind: str, schedule: str
) -> None:
    trial = of(kind=kind, schedule=schedule)
    before = reports(train(trial, store, config=OLD))
    forked = reports(train(trial, store, config=NEW, from_iterations=2, checkpoint=before[1].checkpoint))
    always = reports(train(trial, store, config=NEW))
    for one, other in zip(forked, always[2:], strict=True):
        mine, theirs = content(store, one), content(store, other)
        assert alike(groups(mine["optimizer"]), groups(theirs["optimizer"]))
        assert alike(mine.get("scheduler"), theirs.get("scheduler"))
    assert forked[0].metrics["loss"] != always[2].metrics["loss"], "its weights are the checkpoint's"


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_momentum_and_weights_come_from_the_checkpoint(store: CheckpointStore, kind: str) -> None:
    trial = of(kind=kind, schedule="step")
    before = reports(train(trial, store, config=OLD))
    saved = content(store, before[1])
    runner, close = begun(trial, store, before[1].checkpoint, NEW)
    state = runner.optimizers.state_dict()["state"]
    assert state.keys() == saved["optimizer"]["state"].keys()
    for number, each in state.items():
        for name, value in each.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved["optimizer"]["state"][number][name]))
    for name, weights in runner.module.state_dict().items():
        assert torch.equal(weights, saved["model"][name])
    close()


def test_a_second_fork_and_a_resume_go_on_from_its_own_settings(store: CheckpointStore) -> None:
    trial = of(schedule="lambda")
    before = reports(train(trial, store, config=OLD))
    forked = reports(train(trial, store, config=NEW, from_iterations=2, checkpoint=before[1].checkpoint))
    resumed = reports(train(trial, store, config=NEW, from_iterations=3, checkpoint=forked[0].checkpoint))
    assert resumed[-1].metrics == forked[-1].metrics
    again = {**NEW, "lr": 0.002}
    twice = reports(train(trial, store, config=again, from_iterations=3, checkpoint=forked[0].checkpoint))
    always = reports(train(trial, store, config=again))
    assert alike(groups(content(store, twice[0])["optimizer"]), groups(content(store, always[3])["optimizer"]))


def test_a_value_that_the_trial_has_changed_itself_changes_by_the_ratio(store: CheckpointStore) -> None:
    class Halving(of()):  # type: ignore[misc]
        def on_iteration(self, model: Any, iterations: int) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] /= 2

        def build_optimizer(self, config: Any, model: Any) -> Any:
            self.optimizer = super().build_optimizer(config, model)
            return self.optimizer

    before = reports(train(Halving, store, config=OLD))
    runner, close = begun(Halving, store, before[1].checkpoint, {**OLD, "lr": 0.02})
    assert [group["lr"] for group in runner.optimizers.members[0].param_groups] == [0.005, 0.0005]
    close()


def test_the_factor_of_a_schedule_that_changes_is_in_force(store: CheckpointStore) -> None:
    trial = of(schedule="step")
    before = reports(train(trial, store, config=OLD))
    runner, close = begun(trial, store, before[1].checkpoint, {**OLD, "gamma": 0.1})
    assert runner.schedule.members[0].gamma == 0.1
    assert runner.schedule.members[0].last_epoch == 6
    close()


def test_another_batch_size_keeps_the_place_in_the_schedule(store: CheckpointStore) -> None:
    class Batched(of(schedule="cosine")):  # type: ignore[misc]
        def global_batch_size(self, config: Any) -> int:
            return int(config.get("batch_size", 8))

    before = reports(train(Batched, store, config=OLD))
    runner, close = begun(Batched, store, before[1].checkpoint, {**OLD, "batch_size": 4})
    schedule = runner.schedule.members[0]
    assert (schedule.T_max, schedule.last_epoch) == (20, 10)
    close()
    assert (
        len(
            reports(
                train(
                    Batched, store, config={**OLD, "batch_size": 4}, from_iterations=2, checkpoint=before[1].checkpoint
                )
            )
        )
        == 2
    )


def test_another_optimizer_begins_without_the_state_of_the_first(store: CheckpointStore) -> None:
    trial = of(schedule="lambda")
    before = reports(train(trial, store, config=OLD))
    config = {**OLD, "optimizer": "adamw", "lr": 0.02}
    forked = reports(train(trial, store, config=config, from_iterations=2, checkpoint=before[1].checkpoint))
    always = reports(train(trial, store, config=config))
    mine, theirs = (content(store, one)["optimizer"] for one in (forked[0], always[2]))
    assert alike(groups(mine), groups(theirs))
    assert int(mine["state"][0]["step"]) == 3, "three steps of an iteration"


def test_a_parameter_that_shapes_the_model_is_named(store: CheckpointStore) -> None:
    before = reports(train(Tuned, store, config=OLD))
    items = train(Tuned, store, config={**OLD, "width": 7}, from_iterations=2, checkpoint=before[1].checkpoint)
    found = failure(items)
    assert isinstance(found, SegmentFailure)
    assert found.message.startswith("the checkpoint is of another configuration (width 6 -> 7) and does not fit ")
    assert "name only others in search.scheduler.mutate (RuntimeError: " in found.message


def test_an_adaptive_batch_scales_the_changed_learning_rate(store: CheckpointStore) -> None:
    batch = AdaptiveBatch(max=16)
    trial = of(kind="adamw")
    before = reports(train(trial, store, config=OLD, batch=batch))
    forked = reports(train(trial, store, config=NEW, batch=batch, from_iterations=2, checkpoint=before[1].checkpoint))
    assert groups(content(store, forked[-1])["optimizer"])[0]["lr"] == NEW["lr"]


@pytest.mark.parametrize(
    ("held", "built", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, {"a": 1}, {"a": 1}),
        ({"lr": 0.05}, {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1}),
        ({"lr": 0.0}, {"lr": 0.0}, {"lr": 0.2}, {"lr": 0.2}),
        ({"betas": (0.8, 0.99)}, {"betas": (0.9, 0.99)}, {"betas": (0.45, 0.99)}, {"betas": (0.4, 0.99)}),
        ({"flag": True, "lr": 1.0}, {"flag": True, "lr": 1.0}, {"flag": False, "lr": 1.0}, {"flag": False, "lr": 1.0}),
        ({3: 1}, {3: 1}, {4: 1}, {4: 1}),
        ([{"lr": 0.1}, {"lr": 0.01}], [{"lr": 0.1}], [{"lr": 0.2}], [{"lr": 0.2}, {"lr": 0.02}]),
    ],
)
def test_the_difference_of_what_was_built_is_carried_over(held: Any, built: Any, now: Any, expected: Any) -> None:
    assert alike(carried(held, built, now), expected)


def checked(trial: Any, *forks: Mapping[str, Any]) -> TrialCheck:
    """What `check` finds of a trial that may take over a checkpoint; without a restart in other processes."""
    from dataclasses import replace

    segment = replace(SEGMENT, config=OLD, max_iterations=4, until_iterations=1)
    return check_here(CheckOrder(entrypoint=Entrypoint.from_object(trial), segment=segment, max_gpus=1, forks=forks))


def test_a_check_tries_a_fork() -> None:
    trial = of()
    found = checked(trial, NEW)
    assert "fork" in found.seconds
    assert found.problems == []
    (problem,) = checked(trial, NEW, {**OLD, "width": 7}).problems
    assert problem.line.startswith("fork: the checkpoint is of another configuration (width 6 -> 7)")
    assert problem.is_final


def fitted(sets_lr: bool) -> Any:
    def train(config: Any) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        state = get_checkpoint() or {"epoch": 0}
        if state["epoch"]:
            optimizer.load_state_dict(state["optimizer"])
        if sets_lr:
            for group in optimizer.param_groups:
                group["lr"] = config["lr"]
        for epoch in range(state["epoch"], 4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            report({"loss": 1.0}, checkpoint={"epoch": epoch + 1, "optimizer": optimizer.state_dict()})

    return train


@pytest.mark.parametrize("sets_lr", [True, False])
def test_a_check_finds_a_function_whose_optimizer_keeps_the_old_learning_rate(sets_lr: bool) -> None:
    found = checked(fitted(sets_lr), {**OLD, "lr": 0.03})
    assert found.problems == []
    kept = [remark for remark in found.remarks if "an optimizer still has 0.01" in remark]
    assert len(kept) == (0 if sets_lr else 1)
