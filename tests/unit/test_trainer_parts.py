"""A Trainer that runs out of memory begins again in parts of its batches, and learns what it learns with memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from rubberband.executor import Entrypoint, SegmentFailure, run_segment
from rubberband.executor.training.check_findings import CheckOrder
from rubberband.integrations.transformers import fit
from tests.builders import segments, trials
from tests.builders.checks import check_here
from tests.builders.processes.segment_worker import run_again

transformers = pytest.importorskip("transformers", reason="pip install 'rubberband-tune[transformers]'")
pytest.importorskip("accelerate", reason="pip install 'rubberband-tune[transformers]'")

TOKENS, MASKED = 12, -100


class Tiny(torch.nn.Module):
    """A classifier without dropout that pretends to have memory for `room` rows in training, and in evaluation."""

    def __init__(self, room: int, eval_room: int) -> None:
        super().__init__()
        self.room, self.eval_room = room, eval_room
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def take(self, rows: int) -> None:
        if rows > (self.room if self.training else self.eval_room):
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        self.take(len(inputs))
        logits = self.body(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Words(Tiny):
    """Labels of tokens, some of which do not count: the loss is a mean over those that do."""

    def __init__(self, room: int, eval_room: int) -> None:
        super().__init__(room, eval_room)
        self.body = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8))

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, items: Any = None) -> torch.Tensor:
        found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return found / (labels.ne(MASKED).sum() if items is None else items)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        self.take(len(inputs))
        logits = self.body(inputs)
        return {"loss": self.loss(logits, labels), "logits": logits}


class Counted(Words):
    """The same divided by the tokens of all parts of a step, as transformers' own models do."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **words: Any) -> Any:
        self.take(len(inputs))
        logits = self.body(inputs)
        return {"loss": self.loss(logits, labels, words.get("num_items_in_batch")), "logits": logits}


class Swallowing(Words):
    """The same from a model that takes any words and leaves `num_items_in_batch` out."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **words: Any) -> Any:
        return Words.forward(self, inputs, labels)


MODELS = {model.__name__: model for model in (Tiny, Words, Counted, Swallowing)}


def samples(count: int, *, words: bool) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(count)
    if not words:
        inputs = torch.randn(count, 4, generator=drawn)
        return [{"inputs": each, "labels": int(each.sum() > 0)} for each in inputs]
    rows = torch.randint(0, 8, (count, TOKENS), generator=drawn)
    lengths = torch.randint(2, TOKENS, (count,), generator=drawn)
    return [
        {"inputs": row, "labels": torch.where(torch.arange(TOKENS) < length, row.flip(0), MASKED)}
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean()), "rows": len(found.label_ids)}


def train(config: dict[str, Any]) -> None:
    kind, many = config["model"], 1000
    rows = samples(config.get("samples", 29), words=kind != "Tiny")
    torch.manual_seed(1)
    arguments = {"learning_rate": 0.01, "num_train_epochs": 3, "per_device_train_batch_size": 8}
    arguments |= {"per_device_eval_batch_size": 6, "logging_steps": 1, "include_num_input_tokens_seen": "no"}
    made = transformers.Trainer(
        model=MODELS[kind](config.get("room", many), config.get("eval_room", many)),
        args=transformers.TrainingArguments(
            report_to="none", use_cpu=True, disable_tqdm=True, **arguments, **config.get("words", {})
        ),
        train_dataset=Stream(rows) if config.get("streams") else rows,
        eval_dataset=samples(17, words=kind != "Tiny"),
        compute_metrics=accuracy,
    )
    fit(made, steps_per_iteration=config.get("steps"))


SEGMENT = replace(segments.SEGMENT, metric="eval_loss", until_iterations=2, max_iterations=3)
NAMES = ("loss", "eval_loss", "eval_accuracy", "eval_rows", "grad_norm", "epoch")


def learnt(store: Any, config: dict[str, Any], workers: Any = (), entrypoint: Any = None, **changes: Any) -> Any:
    """The metrics of a trial that begins again where it runs out of memory, and its failures."""
    found, failures = run_again(
        workers, entrypoint or Entrypoint.from_object(train), replace(SEGMENT, config=config, **changes), store
    )
    return [{name: report.metrics[name] for name in NAMES} for report in found], failures, found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("room", "words"),
    [
        (4, {}),
        (3, {"gradient_accumulation_steps": 2}),
        (1, {"dataloader_drop_last": True, "dataloader_num_workers": 1}),
    ],
)
def test_less_memory_leads_to_the_same_loss(store, kind, room, words):
    config = {"model": kind, "words": words}
    whole, none, _ = learnt(store, config)
    parts, failures, _ = learnt(store, {**config, "room": room})
    assert not none
    assert not failures
    assert len(whole) == len(parts) == 2
    for one, other in zip(whole, parts, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_an_evaluation_with_less_memory_finds_the_same(store, kind):
    whole, _, _ = learnt(store, {"model": kind})
    parts, failures, _ = learnt(store, {"model": kind, "eval_room": 2})
    assert not failures
    for one, other in zip(whole, parts, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def test_a_stream_and_iterations_of_steps_are_divided_too(store):
    config = {"model": "Counted", "steps": 3, "streams": True, "samples": 40, "words": {"max_steps": 9}}
    whole, _, _ = learnt(store, config)
    parts, failures, _ = learnt(store, {**config, "room": 5})
    assert not failures
    for one, other in zip(whole, parts, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def test_a_trial_begins_its_later_segments_as_small_and_says_so_once(store, capfd):
    config = {"model": "Counted"}
    whole, _, _ = learnt(store, config, until_iterations=3)
    first, _, reports = learnt(store, {**config, "room": 2}, until_iterations=1)
    said = [line for line in capfd.readouterr().err.splitlines() if "ran out of memory" in line]
    assert said == [
        f"rubberband: a step of {size} samples ran out of memory; the trial begins again from its checkpoint, with at "
        f"most {size // 2} samples at once: the same batch, the same result"
        for size in (8, 4)
    ]
    later = {"from_iterations": 1, "checkpoint": reports[-1].checkpoint, "until_iterations": 3}
    rest, failures, _ = learnt(store, {**config, "room": 2}, **later)
    assert not failures
    assert "ran out of memory" not in capfd.readouterr().err, "its checkpoint remembers it"
    for one, other in zip(whole, first + rest, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def test_each_later_segment_remembers_the_least_that_had_the_memory(store, capfd):
    reports: list[Any] = []
    for done, room in enumerate((2, 2, 1)):
        begin = {"from_iterations": done, "checkpoint": reports[-1].checkpoint} if reports else {}
        config = {"model": "Tiny", "room": room, "samples": 8}
        _, failures, found = learnt(store, config, until_iterations=done + 1, **begin)
        assert not failures
        reports += found
    said = [line for line in capfd.readouterr().err.splitlines() if "ran out of memory" in line]
    assert [re.search(r"a step of (\d+) samples", line)[1] for line in said] == ["8", "4", "2"]


def test_a_sample_that_does_not_fit_ends_the_trial_in_one_line(store):
    reports, failures, _ = learnt(store, {"model": "Counted", "room": 0})
    assert not reports
    (failure,) = failures
    assert (failure.kind, failure.message) == (
        "memory",
        "out of memory with 1 sample at once; use a smaller model, or an instance with more memory",
    )


def test_a_trainer_begins_again_as_a_torch_trial_does(store, capfd):
    growing = trials.entrypoint("memory_trials:Growing")
    told = []
    for entrypoint, config in (
        (growing, {"memory": 200, "samples": 32}),
        (Entrypoint.from_object(train), {"model": "Tiny", "room": 7}),
    ):
        metric = "train_loss" if entrypoint is growing else "eval_loss"
        segment = replace(SEGMENT, metric=metric, config=config)
        failure = list(run_segment(entrypoint, segment, store))[-1]
        done, out = capfd.readouterr()
        (line,) = [each for each in (done + out).splitlines() if "ran out of memory" in each]
        told.append(
            (
                failure.kind,
                failure.message,
                failure.secondary,
                line[line.index("the trial") :].partition(" at most ")[0],
            )
        )
        assert failure.most_per_gpu in (4, 8), "half of what it took"
    assert told[0] == told[1]


def test_a_check_finds_that_a_trainer_takes_parts_and_says_where_it_had_to(store):
    def checked(**config: Any) -> Any:
        segment = replace(SEGMENT, config={"model": "Counted", **config}, until_iterations=1)
        return check_here(CheckOrder(entrypoint=Entrypoint.from_object(train), segment=segment, max_gpus=1))

    found = checked()
    assert found.takes_parts
    assert 0 < found.begun_bytes < found.peak_bytes
    short = checked(room=4)
    assert not short.problems
    assert short.peak_bytes is None, "in parts it takes less"
    (remark,) = [each for each in short.remarks if each.startswith("memory: ")]
    assert remark == (
        "memory: a step ran out of it on this machine; it was trained with at most 4 samples at once, which takes "
        "longer"
    )


class KTOTrainer(transformers.Trainer):
    """A trainer by the name of one of TRL's, whose loss compares samples."""


def comparing(config: dict[str, Any]) -> None:
    args = transformers.TrainingArguments(report_to="none", use_cpu=True, disable_tqdm=True)
    rows = samples(8, words=False)
    fit(KTOTrainer(model=Tiny(2, 9), args=args, train_dataset=rows, eval_dataset=rows))


def test_a_trainer_whose_batches_cannot_be_divided_fails_with_the_words_to_change(store):
    (*_, failure) = segments.train(comparing, store, metric="eval_loss")
    assert isinstance(failure, SegmentFailure)
    assert (failure.kind, failure.message) == (
        "memory",
        "out of memory with 8 at once, and batches of KTOTrainer are not divided: its loss compares the samples of a "
        "batch; set a smaller per_device_train_batch_size, and gradient_accumulation_steps",
    )
