"""Text classifier: film reviews that are written here, and a small transformer that says whether they praise the film.

A review has one or three opinions, such as "the ending was not very dull", and most of them decide. So a model has to
learn what "not" and "hardly" do to the next word. One iteration is one epoch. Run it with `rubberband run
examples/text.yaml`. Three methods change for a pretrained model of Hugging Face: `tokens`, `build_model` and `scores`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import rubberband

ASPECTS = ["plot", "cast", "ending", "music", "dialogue", "first half", "camera work", "villain"]
GOOD = ["brilliant", "moving", "funny", "clever", "charming", "gripping", "fresh", "superb"]
BAD = ["dull", "shallow", "clumsy", "tedious", "loud", "predictable", "wooden", "awful"]
PLAIN, TURNED = ["", "really ", "quite ", "very "], ["not ", "hardly ", "not very ", "anything but "]
PAD = 0


def reviews(size: int, seed: int) -> list[tuple[str, int]]:
    """Return reviews, always the same, each with 1 if most of its opinions are good, and else 0."""
    draws = random.Random(seed)
    found = []
    for _ in range(size):
        opinions = [(draws.random() < 0.5, draws.random() < 0.4) for _ in range(draws.choice([1, 1, 3]))]
        found.append((", ".join(_opinion(draws, *each) for each in opinions), int(_balance(opinions) > 0)))
    return found


def _opinion(draws: random.Random, good: bool, turned: bool) -> str:
    """Return a good or bad opinion, by a word of the opposite meaning if it is turned."""
    adjective = draws.choice(GOOD if good != turned else BAD)
    return f"the {draws.choice(ASPECTS)} was {draws.choice(TURNED if turned else PLAIN)}{adjective}"


def _balance(opinions: Sequence[tuple[bool, bool]]) -> int:
    return sum(1 if good else -1 for good, _ in opinions)


WORDS = sorted({word for text, _ in reviews(2000, seed=1) for word in text.replace(",", " ,").split()})
NUMBERS = {word: number for number, word in enumerate(WORDS, PAD + 1)}


class Transformer(nn.Module):
    """Scores of two classes from the mean over the words of a text."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS) + 1, width, padding_idx=PAD)
        self.places = nn.Parameter(torch.randn(64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == PAD
        seen = self.layers(self.words(tokens) + self.places[: tokens.shape[1]], src_key_padding_mask=padding)
        return self.head(seen.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True))


class TextTrial(rubberband.TorchTrial):
    """Configuration: `lr`, `dropout`, `width` and `layers`."""

    batch_size = 64  # over the whole gang; one GPU or eight learn the same
    gradient_clip_norm = 1.0
    num_workers = 0  # the texts are in memory: no process has to load them

    def tokens(self, text: str) -> list[int]:
        """Return the numbers of the words of a text."""
        return [NUMBERS[word] for word in text.replace(",", " ,").split()]

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return Transformer(config["width"], config["layers"], config["dropout"])

    def scores(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the two classes for each text of a batch, whose ends are filled up with PAD."""
        return model(tokens)

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"])

    def train_dataset(self, config: Mapping[str, Any]) -> list[tuple[str, int]]:
        return reviews(2000, seed=1)

    def eval_dataset(self, config: Mapping[str, Any]) -> list[tuple[str, int]]:
        return reviews(500, seed=2)

    def collate(self, samples: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of some samples: their tokens, as long as the longest, and their labels."""
        tokens = pad_sequence([torch.tensor(self.tokens(text)) for text, _ in samples], True, PAD)
        return tokens, torch.tensor([label for _, label in samples])

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch, and its accuracy, which is reported too."""
        tokens, labels = batch
        scores = self.scores(model, tokens)
        return cross_entropy(scores, labels), {"accuracy": (scores.argmax(1) == labels).float().mean()}
