"""Checkpoints in parts in every kind of store, of a divided model and of a sharded program, on two machines."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from rubberband.executor import CheckpointStore, Entrypoint, SegmentRepeated, SegmentReport, open_store
from rubberband.executor.checkpoints import MARK, LocalCheckpointStore
from rubberband.executor.checkpoints.objects import ObjectStore
from rubberband.values.command import ProgramCommand, words_of
from tests.builders import trials
from tests.builders.buckets import bucket
from tests.builders.command_line import ROOT, CommandLine
from tests.builders.processes.segment_worker import Worker, gang_of, run_gang
from tests.builders.segments import SEGMENT, failure
from tests.builders.sharded_program import FSDP

STORES = (
    "s3",
    pytest.param("path", marks=pytest.mark.long),
    pytest.param("gcs", marks=pytest.mark.long),
    pytest.param("a directory by fsspec", marks=pytest.mark.long),
)


@pytest.fixture(scope="module")
def machines(moto: str, emulator: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Four workers: the first and the third are on one machine, the others on another one."""
    keys = {"AWS_ENDPOINT_URL": moto, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    keys |= {"AWS_DEFAULT_REGION": "us-east-1", "STORAGE_EMULATOR_HOST": emulator, "NO_GCE_CHECK": "true"}
    leases = [str(tmp_path_factory.mktemp("machine") / "lease") for _ in range(2)]
    with ExitStack() as stack:
        yield [stack.enter_context(gang_of(1, RUBBERBAND_LEASE=leases[n % 2], **keys))[0] for n in range(4)]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return open_store(str(tmp_path / "path")) if request.param == "path" else bucket(request.param, request, tmp_path)


@pytest.fixture(params=["divided model", pytest.param("sharded program", marks=pytest.mark.long)])
def entrypoint(request: pytest.FixtureRequest, tmp_path: Path) -> Entrypoint:
    if request.param == "divided model":
        return trials.entrypoint("sharded_trials:Divided")
    (tmp_path / "train.py").write_text(textwrap.dedent(FSDP))
    command = ProgramCommand(words=words_of(f"{sys.executable} train.py ${{checkpoint}}"))
    return Entrypoint(module="", attribute="", search_path=(str(tmp_path),), command=command)


def trained(
    workers: Sequence[Worker],
    entrypoint: Entrypoint,
    store: CheckpointStore,
    until: int,
    last: SegmentReport | None = None,
) -> list[SegmentReport]:
    begin, checkpoint = (0, None) if last is None else (last.iterations, last.checkpoint)
    segment = replace(SEGMENT, from_iterations=begin, checkpoint=checkpoint, until_iterations=until, max_iterations=8)
    (_, *found), *_ = run_gang(workers, entrypoint, segment, store)
    reports = [each for each in found if isinstance(each, SegmentReport)]
    others = [each for each in found if each not in reports]  # a slow program's last save may be taken for a late one
    assert all(isinstance(each, SegmentRepeated) for each in others), found
    return reports


def losses(found: list[SegmentReport]) -> list[float]:
    return [report.metrics["loss"] for report in found]


def names(store: CheckpointStore) -> list[str]:
    if isinstance(store, ObjectStore):
        return store.folder.names()
    assert isinstance(store, LocalCheckpointStore)
    return [path.name for path in store.directory.iterdir()]


def refs(found: list[SegmentReport]) -> list[Any]:
    return [report.checkpoint for report in found if report.checkpoint is not None]


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_checkpoint_of_two_workers_is_read_by_four_and_by_one_and_goes_without_a_rest(
    machines: list[Worker], entrypoint: Entrypoint, store: CheckpointStore, tmp_path: Path
) -> None:
    expected = losses(trained(machines[:1], entrypoint, open_store(str(tmp_path / "alone")), until=6))
    two = trained(machines[:2], entrypoint, store, until=2)
    assert len(refs(two)[-1].parts) == 1
    alone = trained(machines[:1], entrypoint, store, 4, two[-1])
    four = trained(machines, entrypoint, store, 4, two[-1])
    assert len(refs(four)[-1].parts) == (3 if entrypoint.command is None else 1)
    last = trained(machines[:1], entrypoint, store, 6, four[-1])
    assert losses([*two, *alone]) == pytest.approx(expected[:4], rel=1e-9)
    assert losses([*two, *four, *last]) == pytest.approx(expected, rel=1e-9)
    for ref in refs([*two, *alone, *four, *last]):
        store.discard(ref)
        assert not any(store.holds(each) for each in ref.files())
    assert names(store) == []


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_part_that_is_gone_is_a_lost_checkpoint_and_the_one_before_is_whole(
    machines: list[Worker], entrypoint: Entrypoint, store: CheckpointStore
) -> None:
    first = trained(machines[:2], entrypoint, store, until=1)
    second = trained(machines[:2], entrypoint, store, 2, first[-1])
    store.discard(refs(second)[-1].parts[0])
    segment = replace(SEGMENT, from_iterations=2, checkpoint=second[-1].checkpoint, max_iterations=8)
    failures = [failure(end) for end in run_gang(machines[:2], entrypoint, segment, store)]
    assert any(each.lost and "is missing" in each.message for each in failures)
    assert all(each.lost or each.secondary for each in failures)
    again = trained(machines[:2], entrypoint, store, 2, first[-1])
    assert losses(again) == pytest.approx(losses(second), rel=1e-12)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_whose_latest_checkpoint_has_lost_a_part_in_s3_goes_back_to_the_one_before(
    command_line: CommandLine, s3: str
) -> None:
    command_line.environment |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    words = ("-s", f"resources.checkpoints=s3://{s3}/run", "-s", "resources.lease=8s", "-s", "constraints.deadline=1h")
    with command_line.start("run", str(ROOT / "examples" / "sharded.yaml"), *words) as driver:
        command_line.wait_for(driver, lambda result: max(each.iterations for each in result.trials) >= 5, "sharded")
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    assert command_line.nothing_left(within_s=25.0)
    [cut] = [trial for trial in command_line.result("sharded").trials if trial.iterations >= 5]
    assert cut.checkpoint is not None
    bucket_name, _, key = cut.checkpoint.parts[-1].url.removeprefix("s3://").partition("/")
    boto3.client("s3").delete_object(Bucket=bucket_name, Key=key)
    output, _ = command_line("resume", "sharded")
    result = command_line.result("sharded")
    assert result.outcome == "done"
    [back] = result.setbacks
    assert (back.trial, back.from_iterations, back.to_iterations) == (cut.trial, cut.iterations, cut.iterations - 1)
    assert f"trial {cut.trial} went back from iteration {cut.iterations}" in output
    assert result.best is not None
    assert result.best.metrics["accuracy"] > 0.8
    listed = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket_name, Prefix="run/")
    objects = {f"s3://{bucket_name}/{each['Key']}" for page in listed for each in page.get("Contents", ())}
    marks = {url for url in objects if url.endswith(MARK)}
    kept = [saved.checkpoint for trial in result.trials for saved in trial.checkpoints]
    assert objects - marks == {file.url for ref in kept for file in ref.files()}, "parts of cut off saves are gone"
    assert len(marks) == 1
