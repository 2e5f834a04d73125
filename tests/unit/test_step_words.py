"""The words of a trial about its step: precision, clipping, compilation, schedules by step; and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from rubberband.executor import (
    Entrypoint,
    GlobalBatchSampler,
    Leftovers,
    SegmentReport,
    SegmentStarted,
    TorchRunner,
    describe,
    run_segment,
)
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training.schedule import fixed_steps
from rubberband.values.adaptive import AdaptiveBatch
from tests.builders.loops import Exact, Noisy, content
from tests.builders.segments import SEGMENT, failure, reports, train, variant

pytestmark = pytest.mark.usefixtures("one_thread")


class Plain(Noisy):
    """In single precision, with nothing random but dropout; its gradients are small enough for the first scale."""

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)

    def build_scheduler(self, config, optimizer):
        return None

    def loss(self, model, batch):
        inputs, targets = batch
        self.seen = model(inputs)
        return 0.01 * torch.nn.functional.mse_loss(self.seen, targets)


class Halved(Plain):
    """The precision comes from the configuration; the loss reports the type that the model computes in."""

    def build_model(self, config):
        self.precision = config["precision"]
        return super().build_model(config)

    def evaluate(self, model, loader):
        found = super().evaluate(model, loader)
        return {**found, "bits": torch.finfo(self.seen.dtype).bits, "is_bf16": self.seen.dtype == torch.bfloat16}


@pytest.mark.parametrize(("precision", "bits"), [("32", 32), ("bf16", 16), ("fp16", 16)])
def test_training_and_evaluation_compute_in_the_precision_and_parameters_stay(store, precision, bits):
    *_, last = reports(train(Halved, store, config={"precision": precision}))
    assert last.metrics["bits"] == bits
    assert last.metrics["is_bf16"] == (precision == "bf16")
    saved = content(store, last.checkpoint)
    assert all(value.dtype == torch.float32 for value in saved["model"].values() if value.is_floating_point())
    assert ("precision" in saved) == (precision == "fp16")
    plain = reports(train(Plain, store))[-1]
    assert last.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=0.05)


class Overflowing(Halved):
    """Its gradients overflow in half precision in the third and the fourth step."""

    batch_size = 4
    scheduler_step = "batch"

    def build_optimizer(self, config, model):
        self.steps = 0
        return super().build_optimizer(config, model)

    def build_scheduler(self, config, optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.steps += model.training
        return loss * (math.inf if model.training and self.steps in (3, 4) else 1.0)

    def evaluate(self, model, loader):
        return {"loss": 1.0}


def test_a_step_that_overflows_is_skipped_and_halves_the_scale(store):
    (report,) = reports(train(Overflowing, store, config={"precision": "fp16"}, until_iterations=1))
    saved = content(store, report.checkpoint)
    assert saved["precision"]["scale"] == 65536 / 4
    assert saved["scheduler"]["last_epoch"] == 3  # of five batches
    assert all(torch.isfinite(value).all() for value in saved["model"].values())


def test_skipped_steps_are_no_progress_of_an_adaptive_batch(store):
    changes = {"config": {"precision": "fp16"}, "until_iterations": 1, "batch": AdaptiveBatch(max=4)}
    (report,) = reports(train(Overflowing, store, **changes))
    saved = content(store, report.checkpoint)
    skipped = round(math.log2(65536 / saved["precision"]["scale"]))
    assert skipped in (1, 2)  # an estimate of the noise scale takes two passes in a step
    assert saved["batching"]["progress"] == 20  # an iteration of five useful steps
    assert saved["sampler"] == (1, 4 * skipped)
    assert saved["scheduler"]["last_epoch"] == 5
    assert sum(use.steps * use.batch_size * use.efficiency for use in report.batch.batches) == pytest.approx(20)


def test_gradients_that_never_are_finite_end_the_trial_with_a_remedy(store):
    class Never(Halved):
        samples_per_iteration = 2000

        def loss(self, model, batch):
            return super().loss(model, batch) * math.inf

    found = failure(train(Never, store, config={"precision": "fp16"}, until_iterations=1))
    assert found.kind == "not_a_number"
    assert found.message == (
        'the gradients were not finite in 40 steps in a row with precision = "fp16"; use "bf16" or "32", or a lower '
        "learning rate"
    )


class Steep(Exact):
    """Large gradients, plain steps of size 1 along them."""

    batch_size = 20
    norm: float | None = None

    def build_optimizer(self, config, model):
        self.gradient_clip_norm, self.precision = config.get("norm"), config.get("precision", "32")
        return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1.0))

    def build_scheduler(self, config, optimizer):
        return None

    def loss(self, model, batch):
        return 100.0 * super().loss(model, batch)

    def evaluate(self, model, loader):
        return {"loss": 0.0, "norm": torch.nn.utils.get_total_norm(list(model.parameters())).item()}


@pytest.mark.by_default(2)
@pytest.mark.parametrize(("norm", "precision"), [(0.25, "32"), (0.25, "fp16"), (1e-3, "32")])
def test_a_step_is_no_longer_than_the_clip_norm(store, norm, precision):
    config = {"norm": norm, "precision": precision}
    before = content(store, reports(train(Steep, store, config={"norm": 1e-12}, until_iterations=1))[0].checkpoint)
    after = content(store, reports(train(Steep, store, config=config, until_iterations=1))[0].checkpoint)
    moved = [value - before["model"][name] for name, value in after["model"].items()]
    assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(norm, rel=1e-4)


def test_channels_last_changes_the_layout_and_nothing_else(store):
    class Convolution(Exact):
        def build_model(self, config):
            self.channels_last = config["channels_last"]
            layers = torch.nn.Unflatten(1, (1, 2, 2)), torch.nn.Conv2d(1, 3, 2), torch.nn.Flatten()
            return torch.nn.Sequential(*layers, torch.nn.Linear(3, 1)).double()

    first, last = (reports(train(Convolution, store, config={"channels_last": word})) for word in (False, True))
    assert [report.metrics["loss"] for report in last] == pytest.approx([report.metrics["loss"] for report in first])
    weights = [content(store, runs[-1].checkpoint)["model"]["1.weight"] for runs in (first, last)]
    torch.testing.assert_close(*weights)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("word", "batch", "is_deterministic", "searches"),
    [
        (None, None, False, True),
        (None, AdaptiveBatch(max=20), False, False),
        (None, None, True, False),
        (False, None, False, False),
        (True, AdaptiveBatch(max=20), False, True),
    ],
)
def test_cudnn_looks_for_kernels_where_sizes_are_fixed(word, batch, is_deterministic, searches, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    class Looks(Exact):
        cudnn_benchmark = word

        def build_model(self, config):
            torch.backends.cudnn.deterministic = is_deterministic
            return super().build_model(config)

    leftovers = Leftovers("cpu")
    runner = TorchRunner(Looks(), replace(SEGMENT, batch=batch), Gang(0, 1, None))
    assert torch.backends.cudnn.benchmark is searches
    runner.close()
    leftovers.close()
    assert not torch.backends.cudnn.benchmark, "the next trial begins as this one did"


class Compiled(Exact):
    """The same, compiled."""

    compile = True


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that `torch.compile` makes; they run as they are, without a compiler."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return graphs


def test_a_compiled_model_learns_the_same_under_the_same_names(store, traced):
    compiled, plain = reports(train(Compiled, store)), reports(train(Exact, store))
    assert traced
    for one, other in zip(compiled, plain, strict=True):
        assert one.metrics == pytest.approx(dict(other.metrics), rel=1e-12)
    names = [list(content(store, runs[-1].checkpoint)["model"]) for runs in (compiled, plain)]
    assert names[0] == names[1] == ["0.weight", "0.bias", "2.weight", "2.bias"]


class Tried(Compiled):
    """Notes how many samples go through the model at once; a tenth more than a batch are tried for memory."""

    batch_size = 20
    sizes: ClassVar[list[int]] = []

    def loss(self, model, batch):
        self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


def test_sizes_that_are_only_tried_for_memory_are_not_compiled(traced):
    Tried.sizes.clear()
    segment = replace(SEGMENT, until_iterations=1, batch=AdaptiveBatch(max=20))
    runner = TorchRunner(Tried(), segment, Gang(0, 1, None))
    assert runner.step.fits(20)
    assert Tried.sizes[-1] == 22
    runner.iterate(1)
    runner.close()
    shapes = [tuple(node.meta["example_value"].shape) for graph in traced for node in graph.graph.nodes if node.users]
    assert (20, 4) in shapes
    assert (22, 4) not in shapes


class Untried(Tried):
    """The same, not compiled."""

    compile = False


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("trial", "steps"), [(Tried, 1), (Untried, 0)])
def test_the_step_that_compiles_belongs_to_the_start(store, traced, trial, steps):
    Tried.sizes.clear()
    walk = run_segment(Entrypoint.from_object(trial), SEGMENT, store)
    assert isinstance(next(walk), SegmentStarted)
    assert len(Tried.sizes) == steps
    assert [item.iterations for item in walk if isinstance(item, SegmentReport)] == [1, 2, 3, 4]


def test_without_a_compiler_the_failure_says_what_to_install():
    error = RuntimeError("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found")
    remedy = "; torch.compile needs them: install g++ and python3-dev, or set compile = False"
    assert describe(error, in_gang=False).message.endswith(remedy)


class OneCycle(Exact):
    """Its schedule fails if it steps more often than `total_steps`."""

    scheduler_step = "batch"
    samples_per_iteration = 13

    def build_scheduler(self, config, optimizer, total_steps):
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("batch", [None, AdaptiveBatch(max=8)], ids=["fixed", "adaptive"])
def test_total_steps_are_those_of_the_whole_trial_in_whatever_segments(store, batch):
    changes = {"batch": batch, "max_iterations": 4}
    (first,) = reports(train(OneCycle, store, until_iterations=1, **changes))
    changes |= {"from_iterations": 1, "until_iterations": 4, "checkpoint": first.checkpoint}
    *_, last = reports(train(OneCycle, store, **changes))
    schedule = content(store, last.checkpoint)["scheduler"]
    assert schedule["last_epoch"] == schedule["total_steps"]


def test_a_schedule_of_iterations_has_as_many_steps_as_the_trial_iterations(store):
    class EveryIteration(OneCycle):
        scheduler_step = "iteration"

        def build_scheduler(self, config, optimizer, **words):
            assert words == {"total_steps": 9}
            return OneCycleLR(optimizer, max_lr=0.1, **words)

    assert len(reports(train(EveryIteration, store, max_iterations=9))) == 4


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    samples_per_iteration=st.integers(1, 150),
    iterations=st.integers(1, 8),
    drop_last=st.booleans(),
)
def test_the_steps_of_a_trial_are_counted_without_taking_them(
    num_samples, batch_size, samples_per_iteration, iterations, drop_last
):
    drop_last = drop_last and batch_size <= num_samples
    sampler, steps = GlobalBatchSampler(num_samples, 0, drop_last=drop_last), 0
    for iteration in range(1, iterations + 1):
        is_over = False
        while not is_over:
            sampler.next_shared(batch_size, 1, lambda size, _: [size])
            steps += 1
            is_over = sampler.samples_done >= iteration * samples_per_iteration
    found = fixed_steps(
        iterations,
        num_samples=num_samples,
        batch_size=batch_size,
        samples_per_iteration=samples_per_iteration,
        drop_last=drop_last,
    )
    assert found == steps


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"precision": "16"}, "precision='16' is not known; use '32', 'bf16' or 'fp16'"),
        ({"precision": 32}, "precision=32 is not known; use '32', 'bf16' or 'fp16'"),
        ({"scheduler_step": "epoch"}, "scheduler_step='epoch' is not known; use 'iteration' or 'batch'"),
        ({"gradient_compression": "fp16"}, "gradient_compression='fp16' is not known; use None or 'bf16'"),
        ({"compile": "max-autotune"}, "compile='max-autotune' is not known; use False or True"),
        ({"channels_last": 1}, "channels_last=1 is not known; use False or True"),
        ({"cudnn_benchmark": "auto"}, "cudnn_benchmark='auto' is not known; use None, False or True"),
        ({"static_graph": None}, "static_graph=None is not known; use False or True"),
        *(
            (
                {"gradient_clip_norm": norm},
                f"gradient_clip_norm={norm!r} is no positive number; use one such as 1.0, or None",
            )
            for norm in (0, -1.0, math.nan, math.inf, True, "1")
        ),
        *(
            ({"build_optimizer": lambda self, config, model, made=made: made(model.parameters())}, line)
            for made, line in (
                (
                    torch.optim.LBFGS,
                    "LBFGS needs a closure, which computes the loss again within a step; use another optimizer such as "
                    "AdamW, or override step()",
                ),
                (
                    lambda parameters: [torch.optim.SGD([each], lr=0.1) for each in parameters],
                    "build_optimizer() returned a list of 4; return one optimizer with several parameter groups, or "
                    "override step() for several optimizers",
                ),
                (
                    lambda parameters: (torch.optim.SGD(parameters, lr=0.1), None),
                    "build_optimizer() returned a tuple of 2; return one optimizer with several parameter groups, or "
                    "override step() for several optimizers",
                ),
                (lambda parameters: None, "build_optimizer() returned None; return a torch.optim.Optimizer"),
            )
        ),
        (
            {
                "scheduler_step": "batch",
                "build_scheduler": lambda self, config, optimizer: ReduceLROnPlateau(optimizer),
            },
            'ReduceLROnPlateau needs the metric, which is there once an iteration; use scheduler_step = "iteration"',
        ),
        (
            {"build_scheduler": lambda self, config, optimizer: []},
            "build_scheduler() returned []; return a schedule of torch.optim, or None",
        ),
    ],
)
def test_a_word_that_the_loop_cannot_use_is_refused_in_one_line(store, words, line):
    assert failure(train(variant(Exact, **words), store)).message == line
