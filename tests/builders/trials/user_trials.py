"""Trials as users write them: small models, each with the words and methods that its kind of training needs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import rubberband


class Block(nn.Module):
    """Attention and two layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (samples, tokens, width), as the result."""
        normed = self.norms[0](inputs)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1]).to(inputs)
        inputs = inputs + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return inputs + self.layers(self.norms[1](inputs))


class Gpt(rubberband.TorchTrial):
    """Two blocks in bf16, with AdamW, decay of matrices alone, warm-up and clipping."""

    batch_size = 16
    scheduler_step = "batch"
    precision = "bf16"
    gradient_clip_norm = 1.0

    def build_model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 24), Block(24), Block(24), nn.LayerNorm(24), nn.Linear(24, 16))

    def build_optimizer(self, config: Any, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
        others = [weight for weight in model.parameters() if weight.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))

    def build_scheduler(self, config: Any, optimizer: Any, *, total_steps: int) -> Any:
        def rate(step: int) -> float:
            return (step + 1) / 4 if step < 4 else 0.5 * (1 + math.cos(math.pi * step / total_steps))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def train_dataset(self, config: Any) -> Dataset[Any]:
        starts, steps = torch.randint(16, (96, 1)), torch.randint(1, 4, (96, 1))
        return TensorDataset((starts + steps * torch.arange(13)) % 16)

    def eval_dataset(self, config: Any) -> Dataset[Any]:
        return self.train_dataset(config)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        (tokens,) = batch
        scores = model(tokens[:, :-1]).transpose(1, 2)
        right = (scores.argmax(1) == tokens[:, 1:]).float().mean()
        return functional.cross_entropy(scores, tokens[:, 1:]), {"accuracy": right}


class Pictures(Dataset[Any]):
    """Pictures of bars, across or upright, with noise that is drawn whenever one is loaded."""

    def __init__(self) -> None:
        self.labels = torch.randint(2, (40,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        picture = torch.zeros(1, 8, 8, dtype=torch.float64)
        picture[:, :, int(torch.randint(8, ()))] = 1.0
        if self.labels[index]:
            picture = picture.transpose(1, 2)
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture + 0.1 * torch.randn(1, 8, 8, dtype=torch.float64), self.labels[index]


class Convolutions(rubberband.TorchTrial):
    """A convolutional net, whose pictures are changed at random in loader workers."""

    batch_size = 16
    num_workers = 2
    channels_last = True

    def build_model(self, config: Any) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ).double()

    def build_optimizer(self, config: Any, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def train_dataset(self, config: Any) -> Dataset[Any]:
        return Pictures()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        pictures, labels = batch
        return functional.cross_entropy(model(pictures), labels)


class Tuned(Convolutions):
    """BatchNorm frozen in part: the body keeps the statistics that it came with, the head learns its own."""

    num_workers = 0

    def build_model(self, config: Any) -> nn.Module:
        body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        body.requires_grad_(False)
        head = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(body, head).double()

    def build_optimizer(self, config: Any, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[1].parameters(), lr=0.1)

    def train_mode(self, model: Any) -> None:
        model[0].eval()

    def eval_dataset(self, config: Any) -> Dataset[Any]:
        return Pictures()


class Averaged(Convolutions):
    """Evaluated by an exponential average of the weights, whose decay grows with the steps."""

    num_workers = 0

    def build_optimizer(self, config: Any, model: nn.Module) -> torch.optim.Optimizer:
        def average(old: Any, new: Any, count: Any) -> None:
            decay = min(0.99, (1.0 + int(count)) / (10.0 + int(count)))
            torch._foreach_lerp_(old, new, 1.0 - decay)

        self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average).eval()
        return super().build_optimizer(config, model)

    def eval_dataset(self, config: Any) -> Dataset[Any]:
        return TensorDataset(torch.randn(12, 1, 8, 8, dtype=torch.float64), torch.randint(2, (12,)))

    def on_step(self, model: nn.Module, step: int, batch_size: int) -> None:
        self.average.update_parameters(model)

    def state_dict(self) -> Any:
        return {"average": self.average.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.average.load_state_dict(state["average"])

    def evaluate(self, model: nn.Module, loader: Any) -> Any:
        return {"gap": super().evaluate(model, loader)["loss"], **super().evaluate(self.average, loader)}


class Tagger(nn.Module):
    """A recurrent net with a score for each of six tags of every word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.net = nn.GRU(6, 6, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Shape (samples, words) to (samples, 6, words)."""
        return self.net(self.words(words.clamp(min=0)))[0].transpose(1, 2)


class Sentences(rubberband.TorchTrial):
    """Dicts of unequal lengths, padded in `collate`; the loss is the mean over the words of a step."""

    batch_size = 12
    max_batch_size_per_gpu = 5
    num_workers = 1

    def build_model(self, config: Any) -> nn.Module:
        return Tagger().double()

    def build_optimizer(self, config: Any, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.02)

    def train_dataset(self, config: Any) -> Any:
        return [{"words": torch.randint(9, (length,))} for length in torch.randint(1, 9, (40,)).tolist()]

    def eval_dataset(self, config: Any) -> Any:
        return self.train_dataset(config)

    def collate(self, samples: list[Any]) -> Any:
        words = nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True, padding_value=-1)
        return {"words": words, "tags": torch.where(words < 0, -1, words % 6)}

    def weight(self, batch: Any) -> Any:
        return (batch["words"] >= 0).sum()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        scores, tags = model(batch["words"]), batch["tags"]
        right = (scores.argmax(1) == tags)[tags >= 0].double().mean()
        return functional.cross_entropy(scores, tags, ignore_index=-1), {"accuracy": right}


class Gan(rubberband.TorchTrial):
    """A generator and a critic of points on a circle, with an optimizer each; the noise is drawn in every step."""

    batch_size = 16

    def build_model(self, config: Any) -> nn.Module:
        maker = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
        critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        return nn.ModuleDict({"maker": maker, "critic": critic})

    def build_optimizer(self, config: Any, model: Any) -> Any:
        maker = torch.optim.Adam(model["maker"].parameters(), lr=2e-3, betas=(0.5, 0.999))
        critic = torch.optim.Adam(model["critic"].parameters(), lr=4e-3, betas=(0.5, 0.999))
        return maker, critic

    def train_dataset(self, config: Any) -> Dataset[Any]:
        angles = 2 * math.pi * torch.rand(80, 1)
        return TensorDataset(torch.cat([angles.cos(), angles.sin()], dim=1))

    def step(self, model: Any, optimizers: Any, batch: Any) -> Any:
        (real,), (maker_optimizer, critic_optimizer) = batch, optimizers
        maker, critic = model["maker"], model["critic"]
        made = maker(torch.randn(len(real), 3, device=real.device))
        critic_loss = (functional.softplus(-critic(real)) + functional.softplus(critic(made.detach()))).mean()
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        loss = functional.softplus(-critic(made)).mean()
        maker_optimizer.zero_grad()
        loss.backward()
        maker_optimizer.step()
        return loss, {"critic": critic_loss}

    def evaluate(self, model: Any, loader: Any) -> Any:
        points = torch.cat([model["maker"](noise) for (noise,) in loader])
        return {"off": (points.norm(dim=1) - 1.0).abs().mean()}

    def eval_dataset(self, config: Any) -> Dataset[Any]:
        return TensorDataset(torch.randn(32, 3))
