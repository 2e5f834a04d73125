"""Trainers of TRL as trials: a gang that is killed and resized learns what one process does, and counts the same."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import ForkServer, SegmentReport, read_manifest
from tests.builders import segments, trials
from tests.builders.command_line import CommandLine
from tests.builders.documents import ROOT, blocks
from tests.builders.processes.segment_worker import gang_of, resized, run_again, run_gang

pytest.importorskip("trl", reason="pip install 'rubberband-tune[finetune]'")
pytest.importorskip("peft", reason="pip install 'rubberband-tune[finetune]'")

TRAIN = trials.entrypoint("finetuned:train")
SAME_ON_ANY_GANG = ("sft", "dpo", "reward", "kto")
"""GRPO draws completions in each worker."""
OWN_WEIGHTS = {"lora", "dora", "saved", "ia3", "prompt"}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of workers of an instance on this machine, on which functions are forked."""
    directory = tmp_path_factory.mktemp("instances")
    server = ForkServer("test", directory, None)
    try:
        yield {"RUBBERBAND_DIRECTORY": str(directory), "PYTHONHASHSEED": "0"}
    finally:
        server.close()


def part(instance: Any, segment: Any, store: Any, workers: int, until: int, done: list[SegmentReport]) -> None:
    """Train on workers of their own, which are killed afterwards."""
    with gang_of(workers, **instance) as gang:
        rest = replace(segment, from_iterations=len(done), checkpoint=done[-1].checkpoint if done else None)
        (_, *reports), *_ = run_gang(gang, TRAIN, replace(rest, until_iterations=until), store)
        assert all(isinstance(report, SegmentReport) for report in reports), reports
        done += reports


def killed_in_the_middle(instance: Any, segment: Any, store: Any, workers: int, done: list[SegmentReport]) -> None:
    """Kill -9 a worker before its segment ends; what it had reported is left out."""
    with gang_of(workers, **instance) as gang:
        timer = threading.Timer(4.0, os.kill, (gang[-1].pid, signal.SIGKILL))
        timer.start()
        rest = replace(segment, from_iterations=len(done), until_iterations=3, checkpoint=done[-1].checkpoint)
        *_, last = run_gang(gang, TRAIN, rest, store)
        timer.join()
        assert last is None, "it was killed before its end"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("sft", "saved"), ("sft", "all"), ("dpo", "lora"), ("reward", "dora"), ("kto", "lora"), ("grpo", "lora")],
)
def test_a_trainer_of_trl_that_is_killed_and_resized_learns_what_one_process_learns(
    instance: Any, store: Any, kind: str, adapter: str
) -> None:
    config = {"kind": kind, "adapter": adapter}
    segment = replace(segments.SEGMENT, metric="eval_loss", max_iterations=3, config=config)
    with gang_of(1, **instance) as alone:
        whole = resized(alone, TRAIN, segment, store, [(1, 3)])
    wide = 2 if kind in SAME_ON_ANY_GANG else 1
    done: list[SegmentReport] = []
    part(instance, segment, store, 1, 1, done)
    killed_in_the_middle(instance, segment, store, wide, done)
    part(instance, segment, store, wide, 2, done)
    part(instance, segment, store, 1, 3, done)
    names = [name for name in ("loss", "eval_loss", "num_tokens", "epoch") if name in whole[0].metrics]
    assert {"eval_loss", "epoch"} <= {*names}
    for straight, again in zip(whole, done, strict=True):
        known = {name: straight.metrics[name] for name in names}
        assert {name: again.metrics[name] for name in names} == pytest.approx(known, rel=1e-6, abs=1e-6)
    assert whole[0].metrics["eval_loss"] != whole[2].metrics["eval_loss"], "it learns something"
    files = {Path(file["path"]).name for file in read_manifest(store.load(done[-1].checkpoint))["files"]}
    assert ("adapter_model.safetensors" in files) == (adapter in OWN_WEIGHTS)
    assert ("model.safetensors" in files) == (adapter not in OWN_WEIGHTS), "frozen weights are not in it"


GIVEN = """
from examples.finetune import EPOCHS, base_model, stories, tokenizer
from datasets import Dataset

base_model().save_pretrained("model")
tokenizer().save_pretrained("model")
model = "model"
train_set = Dataset.from_dict({"text": stories(64, seed=1)})
eval_set = Dataset.from_dict({"text": stories(16, seed=2)})
"""


@pytest.mark.long
def test_the_script_of_the_page_trains_with_the_model_and_the_data_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a search, `fit` trains to the end."""
    (block,) = [block for block in blocks(ROOT / "docs/finetune.md") if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    given = {"__name__": "page"}
    exec(
        compile(
            GIVEN + block.text.replace("args=SFTConfig(", "args=SFTConfig(use_cpu=True,bf16=False,"), str(block), "exec"
        ),
        given,
    )
    given["train"]({"lr": 1e-3, "r": 4, "alpha": 2})
    assert [*tmp_path.glob("*/checkpoint-*/adapter_model.safetensors")], "it has saved as the Trainer does"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_base_of_half_a_gigabyte_is_in_no_checkpoint_and_a_resume_reads_it_once(
    instance: Any, store: Any, tmp_path: Path
) -> None:
    size: int = trials.entrypoint("big_base:make_base").load()(tmp_path / "base")
    assert size > 500e6
    config = {"base": str(tmp_path / "base"), "out": str(tmp_path / "out"), "lr": 1e-3}
    segment = replace(segments.SEGMENT, metric="eval_loss", max_iterations=3, config=config)
    with gang_of(1, **instance) as alone:
        *_, last = resized(alone, trials.entrypoint("big_base:train"), segment, store, [(1, 1), (1, 2)])
    assert last.checkpoint.total_bytes < 5e6
    assert last.metrics["base_opened"] == 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "wide"), [("sft", 2), ("dpo", 1)])
def test_a_trainer_of_trl_that_runs_out_of_memory_learns_the_same_in_parts(
    instance: Any, store: Any, kind: str, wide: int
) -> None:
    config = {"kind": kind, "adapter": "lora"}
    segment = replace(segments.SEGMENT, metric="eval_loss", max_iterations=3, config=config, until_iterations=2)
    with gang_of(wide, **instance) as gang:
        whole, none = run_again(gang, TRAIN, segment, store)
        short = {"room": {"training": 6, "evaluation": 2}}  # rows; a pair of DPO's has two
        parts, failures = run_again(gang, TRAIN, replace(segment, config={**config, **short}), store)
    assert not none
    assert not failures
    names = ("loss", "eval_loss", "num_tokens", "epoch", "grad_norm")
    for one, other in zip(whole, parts, strict=True):
        known = {name: one.metrics[name] for name in names if name in one.metrics}
        assert {name: other.metrics[name] for name in known} == pytest.approx(known, rel=1e-6)


SEARCH = """
version: 1
name: adapters
entrypoint: finetuned:train
search:
  space: {lr: {type: loguniform, lower: 1e-3, upper: 1e-2}, kind: sft, adapter: ADAPTER}
  scheduler: {type: sha, num_samples: 3, grace_period: 1, max_t: 3, reduction_factor: 3}
  metric: eval_loss
  mode: min
constraints: {deadline: 10m, max_cost: 1}
resources: {provider: local, gpus_per_instance: 1, price_per_hour: 0.5, max_instances: 2}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("adapter", "line"), [("lora", "resumes exactly"), ("random", "resumes; other random numbers (eval_loss ")]
)
def test_check_says_whether_an_adapter_resumes(tmp_path: Path, adapter: str, line: str) -> None:
    command_line = CommandLine(tmp_path)
    shutil.copy(trials.FOLDER / "finetuned.py", tmp_path)
    (tmp_path / "adapters.yaml").write_text(SEARCH.replace("ADAPTER", adapter))
    said = "".join(command_line("check", "adapters.yaml", "--limit", "3m"))
    assert f"restart        {line}" in said
