"""Whatever has a state: another object that is given it has the same one, and goes on as the first does.

Classes with `state_dict` and `load_state_dict`, or `state` and `restore`, are found by a walk; a new one needs an
example here. Runners, which take whole trials through segments, are compared in the tests of their kinds.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from rubberband.executor import (
    Averages,
    CpuTimer,
    Evaluation,
    Feed,
    GlobalBatch,
    GlobalBatchSampler,
    GradientNoise,
    Group,
    LapClock,
    NoiseEstimate,
    NoiseScale,
    checkpoint,
    make_lr_scaling,
)
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training.asynchronous.runner import Updates
from rubberband.executor.training.balancing import Balancing
from rubberband.executor.training.components import Component
from rubberband.executor.training.goodput.adaptation import AdaptiveBatching
from rubberband.executor.training.goodput.agent import BatchAgent
from rubberband.executor.training.loop import StepCounter
from rubberband.executor.training.options import Precision
from rubberband.executor.training.sampler import FixedBatching
from rubberband.planner.balancing import Line, Look, measured, paper, speed_balancer
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits
from tests.builders import segments, walk
from tests.builders.balancing import even_limits
from tests.builders.filled import plain
from tests.builders.loops import Noisy

pytestmark = pytest.mark.usefixtures("one_thread")

GANG = Gang(0, 1, None)


@dataclass(frozen=True)
class Example:
    """A class with a state."""

    make: Callable[[], Any]
    """Returns a new object, perhaps with others that it needs; two are equal."""
    go: Callable[[Any, int], Any]
    """Takes it through step `at`, and returns what it shows of itself."""
    own: Callable[[Any], Any] = lambda made: made
    """Returns the object itself of what `make` returned."""
    steps: int = 12
    """Before the state is taken, and afterwards."""
    anew: tuple[str, ...] = ()
    """Attributes that begin anew with every object: what is measured, and what goes with a batch under way."""
    only: tuple[str, ...] = ()
    """The attributes that do not, where they are few."""
    goes_on: bool = True
    """Whether it does exactly what it would have done."""
    settings: tuple[str, ...] = ()
    """Keys of its state that do not change."""


# Balancers and their parts (planner/balancing).


def _look(at: int) -> Look:
    """A gang of three whose last worker slows down, and which has looks at many shares."""
    shares = ((4, 4, 4), (6, 4, 2), (5, 5, 2), (8, 4, 0))[at % 4]
    pace = (0.01, 0.012, 0.02 + 0.002 * at)
    times = tuple(
        0.05 + own * share * (1.0 + 0.03 * math.sin(7.0 * at + own)) for own, share in zip(pace, shares, strict=True)
    )
    cpu = tuple(1.0 + 0.5 * math.cos(at + rank) ** 2 for rank in range(3))
    return Look(shares=shares, compute_s=times, steps=3 + at, cpu=cpu, memory=(0.5, 0.6, 0.7 - 0.01 * at))


def _balance(balancer: Any, at: int) -> Any:
    balancer.observe(_look(at))
    limits = even_limits(3, 12)
    found = balancer.shares(12, limits)
    return found, balancer.lines(), balancer.stragglers(), balancer.step_s(found, limits)


def _forecast(predictor: Any, at: int) -> Any:
    look = _look(at)
    speeds = np.array(look.shares) / np.array(look.compute_s)
    predictor.observe(np.where(speeds > 0.0, speeds, np.nan), np.array(look.cpu), np.array(look.memory))
    return plain((predictor.forecast(), predictor.noise_share))


def _fit(fit: Any, at: int) -> Any:
    look, factor = _look(at), 10.0 if at == 39 else 1.0  # the last look before the state is an outlier
    fit.observe(replace(look, compute_s=(factor * look.compute_s[0], *look.compute_s[1:])))
    return fit.lines(), fit.error(), plain(fit.largest_shares())


def _time(times: measured.WorkerTimes, at: int) -> Any:
    look, line = _look(at), Line(0.05, 0.01)
    times.observe(look.shares[0], look.compute_s[0], 4.0, line)
    return [times.time_s(share, line) for share in range(9)]


def _fixed(part: speed_balancer.FixedPart, at: int) -> float:
    look = _look(at)
    shares = np.array(look.shares, dtype=float)
    part.observe(shares, np.where(shares > 0.0, look.compute_s, np.nan), np.zeros(3))
    return part.samples


# The noise scale.


def _estimate(at: int) -> NoiseEstimate:
    trace, norm = 100.0 + 3.0 * math.sin(at), (2.0 if at < 30 else -1.0) + 0.1 * math.cos(3.0 * at)
    return NoiseEstimate(kind="accumulation", preconditioner="adam", steps=1.5, trace=trace, squared_norm=norm)


def _noise(scale: NoiseScale, at: int) -> Any:
    scale.add(_estimate(at))
    return scale.reading()


def _average(averages: Averages, at: int) -> Any:
    averages.add((float(at), -1.0 / (1 + at)), 1.5)
    return plain((averages.means(), averages.errors()))


def _seen_gradients(pair: tuple[GradientNoise, nn.Module, torch.optim.Optimizer], at: int) -> Any:
    noise, model, optimizer = pair
    torch.manual_seed(at)
    optimizer.zero_grad()
    noise.before_step([32], [16, 16])
    for _ in range(2):
        (model(torch.randn(16, 4)).square().mean() / 2).backward()
        noise.after_part()
    noise.before_update()
    optimizer.step()
    return noise.reading()


def _observed() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = GradientNoise(optimizer, model, rank=0, num_workers=1, initial_batch=32, total=lambda each: each, every=2)
    return noise, model, optimizer


# Batches.


def _choose(agent: BatchAgent, at: int) -> Any:
    used = agent.split((64, 96, 128, 256)[at % 4])
    agent.observe(used, 20, 20 * (0.01 + 1e-5 * used.per_gpu * (1.0 + 0.1 * math.sin(at))))
    if at == 5:
        agent.forbid(200, 64)
    return agent.choose(used, 300.0), agent.points(), agent.most_gain(used, 500.0), agent.constant_share()


class _Device:
    """A device with room for 100 samples at once, whose steps take 10 ms and 0.1 ms for each sample."""

    def __init__(self) -> None:
        self.now = 0.0
        self.iterations = 0

    def fits(self, per_gpu: int) -> bool:
        return per_gpu <= 100

    def clock(self) -> float:
        return self.now


def _adaptive() -> Any:
    device = _Device()
    noise, model, optimizer = _observed()
    made = AdaptiveBatching(
        segment=replace(segments.SEGMENT, batch=AdaptiveBatch(interval=4)),
        limits=BatchLimits(initial=32, max=1024),
        samples_per_iteration=4096,
        num_samples=4096,
        gang=GANG,
        noise=noise,
        scaling=make_lr_scaling("adascale", optimizer, 1.0),
        least_per_gpu=1,
        fits=device.fits,
        clock=LapClock(device.clock, device.clock),
    )
    return made, model, optimizer, device


def _adapt(run: Any, at: int) -> Any:
    batching, model, optimizer, device = run
    torch.manual_seed(at)
    if device.iterations == 0 or batching.is_over():
        device.iterations += 1
        batching.begin(device.iterations)
    size, passes = batching.batch_size, -(-batching.batch_size // batching.per_gpu)
    parts = [size // passes] * (passes - 1)
    parts.append(size - sum(parts))
    optimizer.zero_grad()
    batch = GlobalBatch(indices=np.arange(size), shares=(size,))
    batching.before_step(batch, parts)
    for part in parts:
        (model(torch.randn(part, 4) + 0.1).sum() / size).backward()
        batching.after_part()
        device.now += 0.01 + 0.0001 * part
    batching.update(optimizer, lambda: True)
    batching.after_step(batch)
    return batching.batches_due, batching.batch_size, batching.per_gpu


def _fixed_batching(kind: type[FixedBatching]) -> FixedBatching:
    return kind(GlobalBatchSampler(64, 3), 16, 16, 64)


def _restrict(batching: FixedBatching, at: int) -> Any:
    batching.restrict(15 - at)
    if isinstance(batching, Updates):
        batching.data["next_ticket"] += 1
        batching.data["returned"].append(at)
    return batching.per_gpu


def _draw(sampler: GlobalBatchSampler, at: int) -> Any:
    batch = sampler.next_batch([3, 4])
    return batch.epoch, batch.shares, batch.indices.tolist(), sampler.samples_done


def _balancing() -> tuple[Balancing, FixedBatching]:
    class Three(Gang):
        def __init__(self) -> None:
            super().__init__(0, 3, None)

        def table(self, row: Any) -> list[list[float]]:
            return [[row[0], row[1] * slower, 1.0, 0.5, *row[4:]] for slower in (1.0, 1.0, 3.0)]

    class Steps:
        least, can_skip = 1, True

    gang, now = Three(), [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    segment = replace(segments.SEGMENT, num_workers=3)
    batching = FixedBatching(GlobalBatchSampler(1200, 0), 12, 12, 1200)
    timer: Any = CpuTimer(gang, clock)
    loop: Any = SimpleNamespace(step=Steps(), batching=batching)
    return Balancing(segment, gang, timer, loop, 12, num_samples=1200, is_costly=False, clock=clock), batching


def _balanced_step(pair: tuple[Balancing, FixedBatching], at: int) -> Any:
    balancing, _ = pair
    balancing.pause()
    shares = tuple(balancing.shares(12, 3))
    balancing.begin_step()
    balancing.after_step(GlobalBatch(indices=np.arange(12), shares=shares))
    return shares


# Data, models, optimizers.


class Counting(IterableDataset[Any]):
    """Thirty samples, then again; it keeps its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 30:
            self.at += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def _feed() -> Feed:
    return Feed(Counting(), device=torch.device("cpu"), collate=None, seed=3, batch_size=4)


def _read(feed: Feed, at: int) -> Any:
    part = np.arange(4 * at, 4 * at + 4)
    feed.expect([part], 0)
    return plain(feed.load(part))


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def _trained(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], at: int) -> Any:
    torch.manual_seed(at)
    loss = module(torch.randn(8, 4)).square().mean()
    module.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item(), plain(module)


def _counter() -> StepCounter:
    loop: Any = SimpleNamespace(module=nn.Identity(), trial=Noisy(), layout=None)
    return StepCounter(loop)


def _with_optimizers() -> Any:
    module = _module()
    both = {
        "adam": torch.optim.Adam(module[0].parameters(), lr=torch.tensor(0.01)),
        "sgd": torch.optim.SGD(module[2].parameters(), lr=0.01, momentum=0.9),
    }
    return module, both


def _thaw(run: Any, at: int) -> Any:
    """Freeze a layer and give another one to the optimizer, as hooks do."""
    _, module, optimizer = run
    if at == 3:
        module[0].requires_grad_(requires_grad=False)
        optimizer.add_param_group({"params": list(module[1].parameters())})
        optimizer.param_groups[0]["params"] = list(module[0].parameters())[:1]
    named = {id(each): name for name, each in module.named_parameters()}
    groups = [[named[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    return groups, [each.requires_grad for each in module.parameters()]


def _scaled(run: Any, at: int) -> Any:
    precision, module, _ = run
    module.zero_grad()
    loss = module(torch.full((8, 4), math.inf if at % 3 == 1 else 0.1)).sum()
    precision.backward(loss)
    return precision.step(), precision.scale().item()


def _fp16() -> Any:
    module = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    return Precision("fp16", torch.device("cpu"), optimizer, None), module, optimizer


def _evaluation() -> Evaluation:
    trial: Any = Noisy()
    made = Evaluation(trial, replace(segments.SEGMENT, until_iterations=99), GANG, every=5)
    made._evaluated = lambda module, iterations, within: {"loss": 1.0 / iterations}  # type: ignore[method-assign]
    return made


def _one() -> Any:
    module = _module()
    return module, [torch.optim.Adam(module.parameters(), lr=0.01)]


def _frozen() -> Any:
    module = _module()
    optimizer = torch.optim.SGD(module[2].parameters(), lr=0.1)
    return checkpoint.TrainedParameters(module, [optimizer]), module, optimizer


def _first(made: Any) -> Any:
    return made[0]


_MEASURED = ("_lines", "_steps")
"""Lines of a balancer, and the number of steps of its last look."""
_GROUP = Example(_with_optimizers, lambda made, at: _trained(made[0], [*made[1].values()], at))
EXAMPLES: dict[str, Example] = {
    "executor.training.goodput.adaptation.AdaptiveBatching": Example(
        _adaptive,
        _adapt,
        _first,
        steps=90,
        anew=("_news", "_fit_due_at"),
        only=("_progress", "_noise_scale", "_scheduled", "_proven", "batch_size", "per_gpu", "_agent"),
        goes_on=False,
    ),
    "executor.training.goodput.agent.BatchAgent": Example(
        lambda: BatchAgent(BatchLimits(initial=64, max=4096), instances=1, gpus=1, clock=lambda: 0.0),
        _choose,
        anew=("_news",),
    ),
    "executor.training.asynchronous.runner.Updates": Example(lambda: _fixed_batching(Updates), _restrict, steps=6),
    "executor.training.balancing.Balancing": Example(
        _balancing, _balanced_step, _first, steps=60, anew=_MEASURED, only=("_size", "_now", "_balancer"), goes_on=False
    ),
    "executor.training.checkpoint.Model": Example(
        _one, lambda made, at: _trained(*made, at), lambda made: checkpoint.Model(made[0], "cpu"), goes_on=False
    ),
    "executor.training.checkpoint.Optimizers": replace(
        _GROUP, own=lambda made: checkpoint.Optimizers(Group(made[1])), goes_on=False
    ),
    "executor.training.checkpoint.TrainedParameters": Example(_frozen, _thaw, _first),
    "executor.training.data.Feed": Example(_feed, _read, anew=("_stream", "_epoch", "waiting")),
    "executor.training.goodput.gradient_noise.GradientNoise": Example(
        _observed, _seen_gradients, _first, anew=("_since", "_since_at_initial"), goes_on=False
    ),
    "executor.training.loop.StepCounter": Example(
        _counter, lambda made, at: made.after_step(None, has_stepped=at != 3)
    ),
    "executor.training.metrics.Evaluation": Example(
        _evaluation,
        lambda made, at: dict(made.metrics(nn.Identity(), at + 1, lambda compute: compute())),
        steps=8,
        anew=("_latest",),
    ),
    "executor.training.goodput.noise_scale.Averages": Example(lambda: Averages(2), _average),
    "executor.training.goodput.noise_scale.NoiseScale": Example(NoiseScale, _noise, steps=40),
    "executor.training.options.Group": replace(_GROUP, own=lambda made: Group(made[1]), goes_on=False),
    "executor.training.options.Precision": Example(
        _fp16, _scaled, _first, anew=("_has_stepped",), settings=("growth_factor", "backoff_factor", "growth_interval")
    ),
    "executor.training.sampler.FixedBatching": Example(lambda: _fixed_batching(FixedBatching), _restrict, steps=6),
    "executor.training.sampler.GlobalBatchSampler": Example(
        lambda: GlobalBatchSampler(20, 3), _draw, steps=13, anew=("_order",)
    ),
    "planner.balancing.measured.LineBalancer": Example(
        lambda: measured.LineBalancer(3), _balance, anew=_MEASURED, settings=("num_workers",)
    ),
    "planner.balancing.measured.LineFit": Example(lambda: measured.LineFit(3), _fit, steps=40),
    "planner.balancing.measured.WorkerTimes": Example(measured.WorkerTimes, _time),
    "planner.balancing.paper.Algorithm2": Example(
        lambda: paper.Algorithm2(3),
        lambda made, at: made.update(_look(at).shares, _look(at).compute_s, (0.5, 0.5, 0.5)),
    ),
    "planner.balancing.paper.Narx": Example(
        lambda: paper.Narx(3), _forecast, steps=200, anew=("_inputs", "_targets", "_random"), goes_on=False
    ),
    "planner.balancing.paper.OwnNarx": Example(
        lambda: paper.OwnNarx(3), _forecast, steps=80, anew=("_inputs", "_targets", "_random"), goes_on=False
    ),
    "planner.balancing.paper.PaperCpuBalancer": Example(
        lambda: paper.PaperCpuBalancer(3),
        _balance,
        anew=(*_MEASURED, "_inputs", "_targets", "_random"),
        settings=("num_workers", "fixed_samples"),
    ),
    "planner.balancing.paper.PaperGpuBalancer": Example(
        lambda: paper.PaperGpuBalancer(3), _balance, anew=_MEASURED, settings=("num_workers",)
    ),
    "planner.balancing.speed_balancer.Ema": Example(lambda: speed_balancer.Ema(3), _forecast),
    "planner.balancing.speed_balancer.FixedPart": Example(speed_balancer.FixedPart, _fixed),
    "planner.balancing.speed_balancer.ForecastBalancer": Example(
        lambda: speed_balancer.ForecastBalancer(3, speed_balancer.Ema(3)),
        _balance,
        anew=_MEASURED,
        settings=("num_workers", "fixed_samples"),
    ),
    "planner.balancing.speed_balancer.Gated": Example(
        lambda: speed_balancer.Gated(speed_balancer.NormalisedEma(3), 3), _forecast
    ),
    "planner.balancing.speed_balancer.Memoryless": Example(lambda: speed_balancer.Memoryless(3), _forecast),
    "planner.balancing.speed_balancer.NormalisedEma": Example(lambda: speed_balancer.NormalisedEma(3), _forecast),
    "planner.balancing.speed_balancer.SpeedBalancer": Example(
        lambda: speed_balancer.SpeedBalancer(3), _balance, anew=_MEASURED, settings=("num_workers",)
    ),
}
PAIRS = (("state_dict", "load_state_dict"), ("state", "restore"))


def _pair(kind: type) -> tuple[str, str] | None:
    """Return the names by which a class saves and loads its own state."""
    own = [kind for kind in kind.__mro__ if kind is not Component]
    return next((pair for pair in PAIRS if all(any(each in vars(kind) for kind in own) for each in pair)), None)


def test_every_class_with_a_state_has_an_example():
    kinds = [
        kind
        for kind in walk.classes()
        if _pair(kind) and not inspect.isabstract(kind) and not issubclass(kind, nn.Module)
    ]
    plain_ones = {walk.name_of(kind) for kind in kinds if not getattr(kind, "_is_protocol", False)}
    users = {"planner.balancing.shares.Remembering", "executor.training.schedule.LrSchedule"}
    missing = plain_ones - EXAMPLES.keys() - users
    assert missing == set(), "add an example to EXAMPLES in test_states.py"


def _differences(one: Any, other: Any, at: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in _differences(one[key], other[key], f"{at}.{key}")]
    return [] if one == other else [f"{at.lstrip('.')}: {one} is {other}"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_another_one_has_the_state_and_goes_on_from_it(name):
    example = EXAMPLES[name]
    one, other = example.make(), example.make()
    first, second = example.own(one), example.own(other)
    save, load = _pair(type(first))
    new = copy.deepcopy(getattr(first, save)())
    for at in range(example.steps):
        example.go(one, at)
    state = pickle.loads(pickle.dumps(getattr(first, save)()))
    for key in state if isinstance(state, dict) and new is not None else ():
        assert key in example.settings or plain(state[key]) != plain(new.get(key)), f"the example leaves {key!r} alone"
    kept = plain(state)

    getattr(second, load)(copy.deepcopy(state))
    assert plain(getattr(second, save)()) == kept
    before, after = (plain(each, example.anew) for each in (first, second))
    if example.only:
        before, after = ({name: each[name] for name in example.only} for each in (before, after))
    assert "\n".join(_differences(before, after)) == ""
    if example.goes_on:
        for at in range(example.steps, 2 * example.steps):
            assert example.go(other, at) == example.go(one, at)
        assert plain(getattr(second, save)()) == plain(getattr(first, save)())
    assert plain(state) == kept, "going on changes a state that was taken"
