"""The Trainer of Hugging Face in a function trial: epochs are reported, resuming is exact, faults are one line."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from rubberband.executor import SegmentFailure, SegmentReport, read_manifest
from rubberband.executor.training import reporting
from rubberband.integrations import trainer_files
from rubberband.integrations.trainer_order import remark_repeated_samples
from rubberband.integrations.trainer_parts import ignores_items
from rubberband.integrations.trainer_state import BesideState
from rubberband.integrations.transformers import REFUSED, fit
from rubberband.integrations.transformers import _add_random_states as add_random_states
from tests.builders import segments
from tests.builders.tables import cases, table

transformers = pytest.importorskip("transformers", reason="pip install 'rubberband-tune[transformers]'")
pytest.importorskip("accelerate", reason="pip install 'rubberband-tune[transformers]'")

run = partial(segments.train, metric="eval_loss", config={"lr": 0.01}, until_iterations=2)


HONOURED: list[str] = table("test_transformers")["honoured"]
"""Arguments that the Trainer itself acts on, or that `fit` sets or keeps (such as `output_dir`)."""


class Tiny(torch.nn.Module):
    """A model with dropout, which takes and returns what the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 2))

    def forward(self, inputs, labels):
        logits = self.body(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(count: int) -> list[dict[str, Any]]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return [{"inputs": each, "labels": int(each.sum() > 0)} for each in inputs]


def trainer(config: dict[str, Any], **words: Any) -> Any:
    arguments = {"learning_rate": config["lr"], "num_train_epochs": 3, "per_device_train_batch_size": 8} | words
    return transformers.Trainer(
        model_init=Tiny,
        args=transformers.TrainingArguments(report_to="none", use_cpu=True, disable_tqdm=True, **arguments),
        train_dataset=samples(32),
        eval_dataset=samples(8),
    )


def train(config):
    fit(trainer(config), steps_per_iteration=config.get("steps"))


def losses(items: list[Any]) -> list[tuple[float, float]]:
    assert all(isinstance(item, SegmentReport) for item in items[1:]), items
    return [(item.metrics["eval_loss"], item.metrics["loss"]) for item in items[1:]]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"lr": 0.01}, id="epochs"),
        pytest.param({"lr": 0.01, "steps": 3}, id="steps", marks=pytest.mark.long),
    ],
)
def test_a_trial_that_resumes_learns_what_one_never_stopped_learns(store, config):
    whole = run(train, store, config=config)
    first = run(train, store, config=config, until_iterations=1)
    rest = run(train, store, config=config, from_iterations=1, checkpoint=first[-1].checkpoint)
    assert losses(first) + losses(rest) == losses(whole)
    assert losses(whole)[0] != losses(whole)[1]
    assert whole[-1].metrics["epoch"] == (2 if config == {"lr": 0.01} else 1.5)
    files = {file["path"] for file in read_manifest(store.load(first[-1].checkpoint))["files"]}
    assert files >= {
        f"0/{name}"
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
    }


@pytest.mark.parametrize("metric", ["loss", "eval_loss"])
def test_a_loss_that_is_no_number_fails_its_trial(store, metric):
    """The Trainer leaves such losses out by default, and reports 0 for an epoch that has no other."""
    *_, failure = run(train, store, config={"lr": 1e30}, metric=metric, until_iterations=3)
    assert isinstance(failure, SegmentFailure)
    assert failure.kind == "not_a_number"


def poisoned(config):
    """The loss of one step is NaN, of which an accuracy shows nothing."""

    def compute(model, inputs, *args, **words):
        loss = compute_loss(model, inputs, *args, **words)
        return loss * torch.nan if model.training and given.state.global_step == 5 else loss

    given = trainer(config)
    given.compute_metrics = lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}
    compute_loss, given.compute_loss = given.compute_loss, compute
    fit(given)


def test_weights_that_are_no_numbers_fail_a_trial_with_any_metric(store):
    _, first, failure = run(poisoned, store, metric="eval_accuracy")
    assert isinstance(first, SegmentReport)
    assert (failure.kind, failure.message) == (
        "not_a_number",
        "the weights of body.0.weight are not finite: training has diverged",
    )


def test_each_resume_on_another_gang_has_random_numbers_of_its_own(store, monkeypatch):
    """Such a gang has no random states in the checkpoint: here they are taken out of it."""

    def without_states(folder, resumed_in=trainer_files.resumed_in):
        found = resumed_in(folder)
        if found is not None:
            (found / "rng_state.pth").unlink()
        return found

    class Seen(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["seed"] = torch.initial_seed()

    def seeing(config):
        made = trainer(config)
        made.add_callback(Seen())
        fit(made)

    _, one, two = run(seeing, store)
    monkeypatch.setattr(trainer_files, "resumed_in", without_states)
    _, after_one = run(seeing, store, from_iterations=1, checkpoint=one.checkpoint)
    _, after_two = run(seeing, store, from_iterations=2, until_iterations=3, checkpoint=two.checkpoint)
    assert len({each.metrics["seed"] for each in (one, after_one, after_two)}) == 3


def freezing(config):
    class Freezing(transformers.TrainerCallback):
        def __init__(self):
            self.epochs = [0]

        def on_train_begin(self, args, state, control, **kwargs):
            self.epochs = [0]

        def on_epoch_begin(self, args, state, control, model=None, **kwargs):
            self.epochs[0] += 1
            if self.epochs[0] == 2:
                model.body[0].requires_grad_(False)

    made = trainer(config, num_train_epochs=4)
    made.add_callback(Freezing())
    fit(made)


@pytest.mark.long
@pytest.mark.parametrize("at", [1, 2])
def test_frozen_layers_and_what_callbacks_count_are_the_same_after_a_resume(store, at):
    whole = run(freezing, store, until_iterations=4)
    first = run(freezing, store, until_iterations=at)
    rest = run(freezing, store, from_iterations=at, until_iterations=4, checkpoint=first[-1].checkpoint)
    assert losses(first) + losses(rest) == losses(whole)


def without_eval_data(config):
    made = trainer(config)
    made.eval_dataset = None
    fit(made)


def one_epoch(config):
    fit(trainer(config, num_train_epochs=1))


def weights_alone(config):
    fit(trainer(config, save_only_model=True))


def no_steps(config):
    fit(trainer(config), steps_per_iteration=0)


def on_its_own(config):
    made = trainer(config)
    os.environ["WORLD_SIZE"] = "2"
    fit(made)


def no_trainer(config):
    fit(torch.nn.Linear(1, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "line"),
    [
        (without_eval_data, "the Trainer has no eval_dataset, so it has no eval_… metric; give it eval_dataset="),
        (one_epoch, "the Trainer has ended after 1 epochs (4 steps), and the search continues; set num_train_epochs"),
        (weights_alone, "save_only_model=True has no place in a trial: it saves no optimizer, so a trial cannot"),
        (no_steps, "steps_per_iteration=0 is below 1; give the steps of an iteration"),
        (on_its_own, "the Trainer has 1 of the gang's 2 workers, so each would train on its own; make Training"),
        (no_trainer, "fit() got Linear, which is no transformers.Trainer; give one"),
    ],
)
def test_a_trainer_that_cannot_be_a_trial_is_refused_in_one_line(store, function, line):
    last = run(function, store)[-1]
    assert isinstance(last, SegmentFailure)
    assert line in last.message


class Patience(transformers.EarlyStoppingCallback):
    """EarlyStoppingCallback of a loss that no training improves by 100."""

    def __init__(self, early_stopping_patience=2, early_stopping_threshold=100.0):
        super().__init__(early_stopping_patience, early_stopping_threshold)


def patient(config):
    made = trainer(config, num_train_epochs=9, eval_strategy="epoch", metric_for_best_model="loss")
    made.add_callback(Patience())
    fit(made)


def best_at_end(config):  # as tutorials write it; the metric to compare follows from the argument
    words = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    made = trainer(config, num_train_epochs=9, **words)
    made.add_callback(Patience())
    fit(made)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("function", [patient, best_at_end])
def test_a_callback_that_stops_the_trainer_ends_the_trial_and_its_patience_goes_on_after_a_resume(store, function):
    whole = run(function, store, until_iterations=9)
    assert [item.ended for item in whole[1:]] == [False, False, True]
    first = run(function, store, until_iterations=2)
    rest = run(function, store, from_iterations=2, until_iterations=9, checkpoint=first[-1].checkpoint)
    assert [item.ended for item in rest[1:]] == [True]


@cases("words", "line")
def test_an_argument_without_effect_is_refused_by_its_name(monkeypatch, words, line):
    monkeypatch.setenv(reporting.LINE, "any")
    monkeypatch.setattr(transformers.Trainer, "train", lambda self, **_: setattr(self.state, "max_steps", 9))
    made = trainer({"lr": 0.01})
    made.args = transformers.TrainingArguments(report_to="none", use_cpu=True, **words)
    with pytest.raises(ValueError, match=re.escape(line)) if line else nullcontext():
        fit(made)


def with_early_stopping(config):
    made = trainer(config, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
    made.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=9))
    fit(made)


def test_a_trainer_that_would_load_its_best_model_stops_early_as_on_its_own(store, capfd):
    items = run(with_early_stopping, store, until_iterations=3)
    assert [item.ended for item in items[1:]] == [False, True]
    assert "load_best_model_at_end=True has no effect in a trial" in capfd.readouterr().err


def saving_by_steps(config):
    fit(trainer(config, save_strategy="steps", save_steps=1))


def evaluating(config):
    fit(trainer(config, eval_strategy="epoch", metric_for_best_model="loss"))


def saving_the_best(config):
    fit(trainer(config, eval_strategy="epoch", save_strategy="best", metric_for_best_model="loss"))


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("function", "usual", "words"),
    [
        (saving_by_steps, train, "save_strategy=steps with save_steps=1 has no effect"),
        (saving_the_best, evaluating, "save_strategy=best has no effect"),
    ],
)
def test_saves_between_iterations_are_left_out_and_a_trial_resumes_as_without_them(
    store, capfd, function, usual, words
):
    whole, found = run(usual, store), run(function, store, until_iterations=1)
    assert words in capfd.readouterr().err
    rest = run(function, store, from_iterations=1, checkpoint=found[-1].checkpoint)
    assert losses(found) + losses(rest) == losses(whole)


def test_every_argument_of_a_trainer_is_known():
    found = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert found >= REFUSED.keys()
    assert found - REFUSED.keys() == set(HONOURED), "is a new one honoured, or refused by its name?"


def test_without_transformers_the_command_that_installs_it_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    last = run(no_trainer, store)[-1]
    assert "transformers is not installed; run pip install 'rubberband-tune[transformers]'" in last.message


def by_steps(config):
    made = trainer(
        config, num_train_epochs=9, eval_strategy="steps", eval_steps=config["every"], metric_for_best_model="loss"
    )
    seen = made.evaluated = []

    class Count(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    made.add_callback(Patience(early_stopping_patience=5))
    made.add_callback(Count())
    return made


MADE: list[Any] = []


def counting(config):
    MADE.append(by_steps(config))
    fit(MADE[-1])


@pytest.mark.parametrize("every", [3, 4], ids=["between epochs", "at their ends"])
def test_patience_counts_the_evaluations_of_the_users_own_trainer(store, every):
    config = {"lr": 0.01, "every": every}
    alone = by_steps(config)
    alone.train()

    items = run(counting, store, config=config, until_iterations=9)
    assert items[-1].ended
    assert MADE[-1].evaluated == alone.evaluated
    assert MADE[-1].state.best_metric == alone.state.best_metric  # training draws the same numbers
    reported = [item for item in items if isinstance(item, SegmentReport)]
    assert all("eval_loss" in item.metrics for item in reported)
    begun = run(counting, store, config=config, until_iterations=2)[-1].checkpoint
    rest = run(counting, store, config=config, from_iterations=2, until_iterations=9, checkpoint=begun)
    assert [item.metrics for item in rest if isinstance(item, SegmentReport)][-1]["eval_loss"] == (
        reported[-1].metrics["eval_loss"]
    )
    assert MADE[-1].evaluated == alone.evaluated, "what a Trainer keeps in an attribute goes on after a resume"


class Moments:
    """State of a helper, as TRL's running moments are."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(1), 0


class Counting(transformers.Trainer):
    """A subclass that counts in attributes, as TRL's do, and draws from a generator of its own."""

    def __init__(self, *args, **words):
        super().__init__(*args, **words)
        self.tokens, self.seen = 0, {"train": [], "eval": []}
        self.buffer, self.moments = None, Moments()
        self.draws = torch.Generator().manual_seed(1)
        self.label_noise = 0.5  # of the configuration: no training changes it
        self.opened = object()

    def training_step(self, model, inputs, *args):
        self.tokens += inputs["labels"].numel()
        self.seen["train"].append(float(torch.rand(1, generator=self.draws)))
        self.buffer = [{"inputs": inputs["inputs"].detach().clone()}]
        self.moments.mean += inputs["inputs"].mean()
        self.moments.count += 1
        return super().training_step(model, inputs, *args)

    def log(self, logs, *args):
        found = torch.cat(
            [part.flatten() for part in (self.moments.mean, (self.buffer or [{}])[0].get("inputs", torch.zeros(0)))]
        )
        counts = {"tokens": self.tokens, "drawn": sum(self.seen["train"]), "kept": float(found.sum())}
        super().log(logs | counts | {"moments": self.moments.count}, *args)


def counted(config):
    made = trainer(config, logging_strategy="no")
    made = Counting(model_init=Tiny, args=made.args, train_dataset=samples(32), eval_dataset=samples(8))
    made.label_noise = config.get("noise", 0.5)
    MADE.append(made)
    fit(made)


def test_a_subclass_s_attributes_that_training_changes_go_on_after_a_resume(store):
    whole = run(counted, store)
    first = run(counted, store, until_iterations=1)[-1]
    rest = run(counted, store, config={"lr": 0.01, "noise": 0.7}, from_iterations=1, checkpoint=first.checkpoint)[-1]
    names = ("tokens", "drawn", "kept", "moments", "eval_loss")
    assert [rest.metrics[name] for name in names] == [whole[-1].metrics[name] for name in names]
    assert rest.metrics["tokens"] == 64
    assert MADE[-1].label_noise == 0.7, "the configuration's, which another trial may have"


def test_an_attribute_that_cannot_be_saved_is_named_once(store, capfd):
    class Replacing(Counting):
        def training_step(self, *args):
            self.opened = object()
            return super().training_step(*args)

    def replacing(config):
        args = trainer(config).args
        fit(Replacing(model_init=Tiny, args=args, train_dataset=samples(32), eval_dataset=samples(8)))

    run(replacing, store)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "Replacing.opened" in line]
    assert "changes in training and is not saved" in line


def test_objects_in_a_list_stay_objects_after_a_resume(store):
    class Helped(Counting):
        def training_step(self, *args):
            self.helpers[0].count += 1
            return super().training_step(*args)

    def helped(config):
        made = Helped(model_init=Tiny, args=trainer(config).args, train_dataset=samples(32), eval_dataset=samples(8))
        made.helpers = [Moments()]
        fit(made)

    first = run(helped, store, until_iterations=1)[-1]
    assert isinstance(run(helped, store, from_iterations=1, checkpoint=first.checkpoint)[-1], SegmentReport)


def test_a_loss_of_a_subclass_is_not_tried_with_the_trainer_s(monkeypatch):
    """GRPO's batches are lists of prompts, which the Trainer's loss cannot take."""
    made = trainer({"lr": 0.01})
    assert ignores_items(transformers, made), "Tiny takes no num_items_in_batch"
    for other in ({"one": samples(8), "other": samples(4)}, Streamed()):
        made.eval_dataset = other
        assert ignores_items(transformers, made), "a dict or a stream changes nothing in it"
    made.data_collator = lambda rows: rows
    assert not ignores_items(transformers, made)


class Drawn(torch.utils.data.Sampler):
    """Draws the order of each epoch from a generator of its own, as the sampler of TRL's GRPOTrainer does."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        return iter(torch.randperm(32, generator=self.generator).tolist())

    def __len__(self):
        return 32


class Ordered(transformers.Trainer):
    def _get_train_sampler(self, *words):
        return Drawn()


def ordered(config):
    if config["order"] == "own":
        given = trainer(config)
        made = Ordered(model_init=Tiny, args=given.args, train_dataset=samples(32), eval_dataset=samples(8))
    else:
        made = trainer(config, train_sampling_strategy="group_by_length")
        made.train_dataset, made.eval_dataset = (
            [{**row, "input_ids": [0] * (1 + number % 5)} for number, row in enumerate(samples(count))]
            for count in (32, 8)
        )
        collate, kept = transformers.default_data_collator, ("inputs", "labels")
        made.data_collator = lambda rows: collate([{name: row[name] for name in kept} for row in rows])
    fit(made, steps_per_iteration=config["steps"])


@pytest.mark.parametrize("order", ["own", "by length"])
@pytest.mark.parametrize("steps", [None, 3])
def test_the_order_of_samples_goes_on_after_a_resume_between_epochs_and_within_one(store, order, steps):
    config = {"lr": 0.01, "order": order, "steps": steps}
    whole = run(ordered, store, config=config, until_iterations=3)
    first = run(ordered, store, config=config)
    rest = run(ordered, store, config=config, from_iterations=2, until_iterations=3, checkpoint=first[-1].checkpoint)
    assert losses(first) + losses(rest) == losses(whole)


@pytest.mark.parametrize("order", ["own", "by length"])
def test_the_order_of_samples_goes_on_after_a_second_resume_within_an_epoch(store, order):
    config = {"lr": 0.01, "order": order, "steps": 1}
    whole, parts = run(ordered, store, config=config, until_iterations=8), run(ordered, store, config=config)
    for done in (2, 3, 4, 5, 6):
        words = {"from_iterations": done, "until_iterations": done + 1, "checkpoint": parts[-1].checkpoint}
        parts += run(ordered, store, config=config, **words)[1:]
    assert losses(parts) == losses(whole)[:7]


def test_each_worker_of_a_gang_keeps_states_of_its_own(tmp_path, monkeypatch):
    """A gang of two, one after the other: what both have written is put beside each other."""
    args = trainer({"lr": 0.01}).args
    monkeypatch.setattr(type(args), "world_size", 2)
    made = Counting(model_init=Tiny, args=args, train_dataset=samples(32), eval_dataset=samples(8))
    beside, written = BesideState(transformers, made, None), []
    beside.begin()

    def gathered(own):
        written.append(own)
        return [*written, own][:2]

    monkeypatch.setattr(trainer_files, "gathered", gathered)
    for rank in range(2):
        made.tokens, made.moments.mean = 10 + rank, torch.full((1,), float(rank))
        beside.save(made.model, tmp_path)
    for rank in range(2):
        beside.restore(made.model, tmp_path, rank)
        assert (made.tokens, float(made.moments.mean)) == (10 + rank, float(rank))
    written.clear()
    for rank in range(2):
        monkeypatch.setattr(type(args), "process_index", rank)
        (tmp_path / f"rng_state_{rank}.pth").write_bytes(b"%d" % rank)
        add_random_states(tmp_path, args)
    assert [(tmp_path / f"rng_state_{rank}.pth").read_bytes() for rank in range(2)] == [b"0", b"1"]


class Streamed(torch.utils.data.IterableDataset):
    """The samples of training, one after another."""

    def __iter__(self):
        return iter(samples(32))


def streams(config):
    made = trainer(config, max_steps=12)
    made.train_dataset = Streamed()
    fit(made, steps_per_iteration=4)


def test_a_streamed_dataset_is_read_again_to_resume_and_its_seconds_are_said(store, capfd):
    whole = run(streams, store, until_iterations=3)
    first = run(streams, store, until_iterations=1)
    assert "streamed" not in capfd.readouterr().err, "nothing was read again"
    again = run(streams, store, until_iterations=3, from_iterations=1, checkpoint=first[-1].checkpoint)
    assert re.search(r"the Trainer read \d+\.\d s of a streamed dataset again, to resume in it", capfd.readouterr().err)
    assert losses(first) + losses(again) == losses(whole)


def doubles(config):
    fit(trainer(config, gradient_accumulation_steps=2))


def test_a_step_with_other_samples_than_before_is_said(store, capfd):
    first = run(train, store, until_iterations=1)
    run(train, store, until_iterations=2, from_iterations=1, checkpoint=first[-1].checkpoint)
    assert "a step has" not in capfd.readouterr().err
    run(doubles, store, until_iterations=2, from_iterations=1, checkpoint=first[-1].checkpoint)
    assert "a step has 16 samples on 1 worker, and had 8 before, so the trial learns" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("workers", "batch", "words", "line"),
    [
        (2, 5, {}, "the last batch of an epoch has 2 of 10 samples, and the Trainer repeats some on 2 workers"),
        (2, 4, {"per_device_eval_batch_size": 8}, "the last batch of an evaluation has 8 of 16 samples, and the"),
        (2, 4, {"per_device_eval_batch_size": 4}, ""),
        (2, 5, {"dataloader_drop_last": True}, ""),
        (1, 5, {}, ""),
    ],
)
def test_samples_that_are_repeated_on_a_gang_are_said(monkeypatch, capfd, workers, batch, words, line):
    made = trainer({"lr": 0.01}, per_device_train_batch_size=batch, **{"per_device_eval_batch_size": 4, **words})
    monkeypatch.setattr(type(made.args), "world_size", workers)
    remark_repeated_samples(made)
    assert line in (said := capfd.readouterr().err)
    assert said.count("rubberband:") == bool(line)
