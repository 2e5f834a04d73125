"""Trials for the tests of segments, small enough to train in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.nn import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import rubberband

NUM_SAMPLES = 50
STUMBLES_AT = 2
"""The batch that fails: later ones may be without a worker that was slow before."""


def rank() -> int:
    """This worker's place in its gang."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class OwnStep(rubberband.TorchTrial):
    """Takes the usual step itself."""

    def step(self, model: torch.nn.Module, optimizers: Any, batch: Any) -> Any:
        optimizers.zero_grad()
        loss: Any = self.loss(model, batch)
        loss.backward()
        optimizers.step()
        return loss


class Regression(rubberband.TorchTrial):
    """A small network on random data; settings and what goes wrong come from the configuration."""

    batch_size = 16

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        self.config = config
        for word, value in config.get("words", {}).items():
            setattr(self, word, value)
        self.batches = 0
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return model.to(getattr(torch, config.get("dtype", "float64")))

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        if config.get("optimizer") == "adam":
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        lr, momentum = config.get("lr", 0.05), config.get("momentum", 0.9)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=1e-3)

    def build_scheduler(self, config: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
        if config.get("scheduler") == "plateau":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        if config.get("scheduler") == "none":
            return None
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        inputs = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64)
        targets = inputs.sum(dim=1, keepdim=True).sin() + 0.1 * torch.randn(NUM_SAMPLES, 1, dtype=torch.float64)
        dtype = getattr(torch, config.get("dtype", "float64"))
        return TensorDataset(inputs.to(dtype), targets.to(dtype))

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return self.train_dataset(config)

    def _stumble(self) -> None:
        self.batches += 1
        if "counted" in self.config:
            with open(Path(self.config["counted"], str(os.getpid())), "ab") as file:
                file.write(b".")
        if self.batches == STUMBLES_AT and self.config.get("raise_on_rank") == rank():
            raise ArithmeticError("no more")
        if self.batches == STUMBLES_AT and self.config.get("exit_on_rank") == rank():
            os._exit(3)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self._stumble()
        inputs, targets = batch
        if self.config.get("noise"):
            inputs = inputs + 0.1 * torch.randn_like(inputs)
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def evaluate(self, model: torch.nn.Module, loader: Any) -> dict[str, Any]:
        if self.config.get("evaluate") == "raise":
            raise ArithmeticError("cannot evaluate")
        if self.config.get("evaluate") == "nan":
            return {"loss": float("nan")}
        assert not model.training
        assert not torch.is_grad_enabled()
        return {**super().evaluate(model, loader), "text": "left out"}


class SyncNorm(torch.nn.SyncBatchNorm):
    """SyncBatchNorm, without affine parameters, as torch has it for GPUs alone."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, affine=False, track_running_stats=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        count = torch.tensor([float(len(input))], dtype=input.dtype)
        sums = torch.cat([input.sum(0), input.square().sum(0), count])
        if self.training and torch.distributed.is_initialized():
            sums = all_reduce(sums)
        mean, square = (sums[:-1] / sums[-1]).split(self.num_features)
        return (input - mean) / (square - mean.square() + self.eps).sqrt()


class Synced(Regression):
    """Takes statistics over the gang in the first layer of its model and in between."""

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # refuses the CPU
        first, *rest = super().build_model(config)  # type: ignore[misc]
        return torch.nn.Sequential(SyncNorm(5), first, SyncNorm(8), *rest).double()


class Ending(Regression):
    """Ends by itself with its second iteration, by the word of rank 0, which evaluates alone."""

    evaluations = 0

    def evaluate(self, model: torch.nn.Module, loader: Any) -> dict[str, Any]:
        self.evaluations += 1
        self.ended = self.evaluations == 2
        return super().evaluate(model, loader)


class Accumulating(Regression):
    """The same in micro-batches of at most three samples."""

    max_batch_size_per_gpu = 3


class Summing(Regression):
    """Every worker evaluates its part: sums of batches whose loss is no mean over samples, and BatchNorm's buffers."""

    eval_batch_size = 4
    eval_on_all_ranks = True
    samples_per_iteration = 16  # after the last batch of an epoch all workers have seen the same samples

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.Sequential(super().build_model(config), torch.nn.BatchNorm1d(1)).double()

    def evaluate(self, model: torch.nn.Module, loader: Any) -> dict[str, Any]:
        errors = torch.tensor([self.loss(model, batch).item() for batch in loader], dtype=torch.float64)
        if self.config.get("evaluate") == "float":
            return {"loss": errors.mean()}
        return {
            "loss": rubberband.Mean(errors.sqrt().sum(), len(errors)),
            "ones": rubberband.Mean(*loader.sizes[:1] * 2),
        }


class Wide(Regression):
    """The default evaluation of a set of two batches."""

    eval_batch_size = 25
    evaluate = rubberband.TorchTrial.evaluate


class Weighed(Accumulating):
    """A mean over the valid places of samples of unequal lengths, with a metric, and an average of the weights."""

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        return super().build_optimizer(config, model)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        inputs, targets = super().train_dataset(config).tensors
        return TensorDataset(inputs, targets, torch.arange(NUM_SAMPLES) % 7)

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        self._stumble()
        inputs, targets, lengths = batch
        squares = (model(inputs) - targets).square().squeeze(1)
        loss = (squares * lengths).sum() / lengths.sum().clamp(min=1)
        return loss, {"twice": 2.0 * loss}

    def weight(self, batch: Any) -> torch.Tensor:
        lengths: torch.Tensor = batch[2]
        return lengths.sum()

    def on_step(self, model: torch.nn.Module, step: int, batch_size: int) -> None:
        self.average.update_parameters(model)

    def state_dict(self) -> Any:
        return self.average.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.average.load_state_dict(state)


class Counted(Weighed):
    """The same without what follows every step."""

    on_step = rubberband.TorchTrial.on_step
    state_dict = rubberband.TorchTrial.state_dict
    load_state_dict = rubberband.TorchTrial.load_state_dict


class Adversarial(rubberband.TorchTrial):
    """Two small networks against each other, with an optimizer each, and their noise among the data."""

    batch_size = 16

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        maker = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        critic = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        critic.requires_grad_(False)
        return torch.nn.ModuleDict({"maker": maker, "critic": critic}).double()

    def build_optimizer(self, config: Mapping[str, Any], model: Any) -> Mapping[str, torch.optim.Optimizer]:
        return {
            name: torch.optim.Adam(model[name].parameters(), lr=rate, betas=(0.5, 0.9))
            for name, rate in (("critic", 0.02), ("maker", 0.01))
        }

    def build_scheduler(self, config: Mapping[str, Any], optimizer: Any, *, total_steps: int) -> Any:
        return [torch.optim.lr_scheduler.ExponentialLR(optimizer["maker"], 0.9)]

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        angles, noise = torch.rand(NUM_SAMPLES, 1, dtype=torch.float64), torch.randn(NUM_SAMPLES, 2).double()
        return TensorDataset(torch.cat([angles.cos(), angles.sin()], dim=1), noise)

    def step(self, model: Any, optimizers: Any, batch: Any) -> Any:
        real, noise = batch
        maker, critic = model["maker"], model["critic"]
        critic.requires_grad_(True)
        optimizers["critic"].zero_grad()
        judged = torch.nn.functional.softplus(-critic(real)).mean()
        judged.backward()  # twice into the same gradients
        made = torch.nn.functional.softplus(critic(maker(noise).detach())).mean()
        made.backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 0.05)
        optimizers["critic"].step()
        critic.requires_grad_(False)
        optimizers["maker"].zero_grad()
        loss = torch.nn.functional.softplus(-critic(maker(noise))).mean()
        loss.backward()
        optimizers["maker"].step()
        return loss, {"critic": judged + made}


class Quasi(Regression):
    """Trained by LBFGS with a line search, with weights of its own."""

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step(self, model: torch.nn.Module, optimizers: Any, batch: Any) -> Any:
        def closure() -> torch.Tensor:
            optimizers.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return optimizers.step(closure)

    def weight(self, batch: Any) -> torch.Tensor:
        inputs: torch.Tensor = batch[0]
        return torch.tensor(2.0 * len(inputs))


class Experts(OwnStep, Regression):
    """Each sample goes to one of three networks, so that a worker's share may not reach all of them."""

    find_unused_parameters = True

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.ModuleList(super(Experts, self).build_model(config) for _ in range(3))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        choice = (inputs[:, 0] > 0.5).long() + (inputs[:, 0] > 1.5).long()
        total = torch.zeros((), dtype=torch.float64)
        for number in choice.unique().tolist():
            mine = choice == number
            total = total + (model[number](inputs[mine]) - targets[mine]).square().sum()
        return total / len(inputs)


class Points(Dataset[Any]):
    """Samples that are augmented at random."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64) * (index / NUM_SAMPLES)
        inputs = inputs + 0.1 * torch.randn(5, dtype=torch.float64)
        return inputs, inputs.sum(dim=0, keepdim=True).sin()


class Lines(IterableDataset[Any]):
    """The same as a stream, perhaps in shards."""

    def __init__(self, num_shards: int, part: slice = slice(None)) -> None:
        self.num_shards, self.part = num_shards, part

    def shard(self, num_shards: int, index: int) -> Lines:
        return Lines(1, slice(index, None, num_shards))

    def __iter__(self) -> Iterator[Any]:
        return map(Points().__getitem__, range(NUM_SAMPLES)[self.part])


class Loaded(Regression):
    """Reads by loader workers, from a `dataset` that the configuration names."""

    samples_per_iteration = NUM_SAMPLES

    def train_dataset(self, config: Mapping[str, Any]) -> Any:
        self.num_workers = config["num_workers"]
        # The tests' processes are daemons, which must have no children; a slot's worker is none.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        return Lines(config["shards"]) if "shards" in config else Points()

    def eval_dataset(self, config: Mapping[str, Any]) -> Any:
        return None
