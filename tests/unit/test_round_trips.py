"""Records: what is written to a file, a line or a row comes back, with every field.

Events and all pairs of functions that write and read are found by a walk; a new one needs an example here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rubberband.api.store import Store, schema
from rubberband.cloud.aws import intents, prices
from rubberband.cloud.pool.journal import PoolEvent, PoolLimits, from_line, to_line
from rubberband.cloud.pool.state import Machine, PoolState, Slice
from rubberband.cloud.ray_head import instance
from rubberband.executor import (
    Entrypoint,
    Event,
    ExperimentFolder,
    Job,
    Result,
    RunSpec,
    checkpoint,
    inbox,
    pages,
    runner,
)
from rubberband.executor.checkpoints import folders
from rubberband.executor.journal import folder, journal
from rubberband.executor.training.sharding import pieces
from rubberband.spec import loading, profile_file
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.values.adaptive import BatchLimits, BatchPoint, GoodputProfile, Throughput
from rubberband.values.asynchronous import AsyncProfile
from rubberband.values.profile import Profile, Spread
from rubberband.values.submission import Labels, Submission
from tests.builders import walk
from tests.builders.experiment_words import EXAMPLE
from tests.builders.filled import filled, plain

EXPERIMENT = loading.parse_experiment(EXAMPLE)
LABELS = Labels(tags=("a", "b"), note="note", archived=True)

PAIRS = (("write_", "read_"), ("encode_", "decode_"), ("save_", "load_"), ("dump_", "load_"))
NAMES = (("save", "load"), ("dump", "load"), ("pack", "unpack"), ("write", "read"), ("to_line", "from_line"))


def _pairs() -> set[str]:
    """The functions that write what another function of their module reads, and the classes that do both."""
    known = {walk.name_of(each) for each in walk.functions()}
    found = set()
    for name in known:
        module, _, own = name.rpartition(".")
        others = [other for mine, other in NAMES if own == mine]
        others += [own.replace(mine, other, 1) for mine, other in PAIRS if own.startswith(mine)]
        found |= {name for other in others if f"{module}.{other}" in known}
    both = (("to_json", "from_json"), ("to_words", "kept"))
    found |= {
        walk.name_of(kind) for kind in walk.classes() for pair in both if all(hasattr(kind, each) for each in pair)
    }
    return found


def _in_file(write: Callable[[Path, Any], object], read: Callable[[Path], Any]) -> Callable[[Any, Path], Any]:
    def there_and_back(value: Any, folder: Path) -> Any:
        write(folder / "file", value)
        return read(folder / "file")

    return there_and_back


def _in_folder(write: Callable[..., object], read: Callable[..., Any]) -> Callable[[Any, Path], Any]:
    def there_and_back(value: Any, folder: Path) -> Any:
        at = ExperimentFolder(home=folder, name="one")
        at.path.mkdir(parents=True)
        write(at, value)
        return read(at)

    return there_and_back


def _mark(value: Any, folder: Path) -> Any:
    at = ExperimentFolder(home=folder, name="one")
    with inbox.holding(at) as lock:
        inbox.write_mark(lock, filled(inbox.HostMark, waits_for="a longer one before" * 9))
        inbox.write_mark(lock, value)
    return inbox.read_mark(at)


def _divided(value: Any, folder: Path) -> Any:
    """In the files of two workers, each with a row more or less of each tensor."""
    cuts = {"model/a": (0, 2, 3), "model/b": (0, 1, 2)}
    state = pieces.mapped(value, lambda path, each: pieces.Whole(path) if path in cuts else each)
    for rank in (0, 1):
        own = {}
        for path, cut in cuts.items():
            whole = value["model"][path[-1]]
            start, end = cut[rank : rank + 2]
            own[path] = pieces.Piece(tuple(whole.shape), (start, 0), whole[start:end])
        words = {"iterations": 3, "rank": rank, "workers": 2, "wait": lambda: None}
        pieces.write(state, own, folder / str(rank), **words)
    return pieces.read_whole(folder / "0", [folder / "1"])


def _intent(value: Any, folder: Path) -> Any:
    run = filled(intents.Run)
    intents.Intents(folder, run).write(value)
    assert intents.runs_in(folder) == [run]
    return intents.Intents(folder, run).all()[0]


def _requested(value: Any, folder: Path) -> Any:
    inbox.Inbox(folder / "inbox").put(value)
    return inbox.Inbox(folder / "inbox").pending()[0]


def _stored(there_and_back: Callable[[Store, Any], Any]) -> Callable[[Any, Path], Any]:
    """Through the service's store."""

    def through(value: Any, folder: Path) -> Any:
        with closing(Store(f"sqlite:///{folder / 'store.db'}")) as store:
            return there_and_back(store, value)

    return through


def _submitted(store: Store, value: Submission, promise: schema.Promise | None = None) -> Submission | None:
    assert store.add(value, promise)
    return store.submission(value.name)


def _without_id(event: schema.FeedEvent) -> dict[str, Any]:
    return {each.name: getattr(event, each.name) for each in fields(schema.Entry)}


def _answered(store: Store, value: schema.KeptAnswer) -> Any:
    claim = {"owner": "ann", "request_hash": "h", "at": 5.0}
    assert store.claim_key("k", **claim) is None
    store.keep_answer("k", owner="ann", answer=value, at=6.0)
    return store.claim_key("k", **claim)


SUBMISSION = filled(Submission, home="", state=ExperimentState.RUNNING, labels=LABELS)


def _packed(value: Mapping[str, bytes], folder: Path) -> Any:
    (folder / "in").mkdir()
    for name, content in value.items():
        (folder / "in" / name).write_bytes(content)
    folders.pack(folder / "in", folder / "packed", iterations=3, metrics={"loss": 0.5})
    manifest = folders.unpack(folder / "packed", folder / "out")
    assert (manifest["iterations"], manifest["metrics"]) == (3, {"loss": 0.5})
    return {each.name: each.read_bytes() for each in (folder / "out").iterdir()}


def _profile() -> Profile:
    """All fields set, in the three ways in which a file keeps what varies."""
    limits = BatchLimits(initial=8, max=64, max_per_gpu=16, accumulation=False)
    points = (filled(BatchPoint), filled(BatchPoint))
    throughput = filled(Throughput, gamma=3.5)
    return filled(
        Profile,
        **dict.fromkeys(profile_file.VARIATIONS, 0.5),
        end_chance=0.125,
        gpus_per_machine=0,  # of an offer, and in no file
        trial_startup_s=9.0,
        first_iteration_extra_s=2.0,
        cold_iteration_extra_s=3.0,
        cold_start_extra_s=5.0,
        provision_spread=Spread(cv=0.25),
        init_delay_s=16.0,
        init_spread=Spread(samples=(0.5, 1.5)),
        source="file",
        goodput=filled(GoodputProfile, points=points, limits=limits, throughput=throughput),
        asynchronous=filled(AsyncProfile, largest_shard=0.5, blend=0.25),
    )


def _pool() -> PoolState:
    """One machine that is held, one that is over with a slice that is too, and a request that waits."""
    state = PoolState(limits=filled(PoolLimits), scales=[(5.0, 2, 0.5), (9.0, 3, 0.75)], past_bill_usd=1.5)
    state.past_machines, state.past_lent_usd = 4, 0.5
    for name, ended_at in (("held", None), ("over", 50.0)):
        status = "ended" if ended_at else "running"
        machine = filled(Machine, name=name, status=status, slices=[], ended_at=ended_at)
        one = filled(Slice, tenant=f"tenant-{name}", machine=machine, ended_at=ended_at)
        _hold(state, one)
        state.machines[name] = machine
        if ended_at is None:
            state.live[name] = machine
            machine.slices.append(one)
    _hold(state, filled(Slice, tenant="tenant-waits", machine=None, ended_at=None))
    return state


def _hold(state: PoolState, one: Slice) -> None:
    key = (one.tenant, one.instance)
    state.slices[key] = one
    state.tenants.setdefault(one.tenant, []).append(one)
    if one.ended_at is None:
        state.held[key] = one


def _run_spec() -> RunSpec:
    return filled(
        RunSpec,
        experiment=EXPERIMENT,
        entrypoint=replace(Entrypoint.parse("examples.digits:DigitsTrial"), pickled=b"\x00code"),
        configurations=[{"lr": 0.1}],
        seeds=[1, 2],
    )


def _bytes(value: Any, folder: Path) -> Any:
    packed = runner.pack("trial", 3, value)
    found = runner.unpack(packed, "trial", 3, None)
    return {key: found[key] for key in value}


def _checkpoint(value: Any, folder: Path) -> Any:
    checkpoint.write(value, checkpoint.HostCopy(torch.device("cpu")), folder / "file")
    return checkpoint.read(folder / "file")


RECORDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Path], Any]]] = {
    "api.store.schema.Entry": (
        lambda: filled(schema.Entry),
        _stored(lambda store, value: (store.append([value]), schema.Entry(**_without_id(store.feed()[0])))[1]),
    ),
    "api.store.schema.KeptAnswer": (lambda: filled(schema.KeptAnswer), _stored(_answered)),
    "api.store.schema.Promise": (
        lambda: filled(schema.Promise, experiment=SUBMISSION.name, spans=[[2, 0.5], [1, 9.5]]),
        _stored(lambda store, value: (_submitted(store, SUBMISSION, value), store.promises()[0])[1]),
    ),
    "api.store.schema.StoredPlan": (
        lambda: filled(schema.StoredPlan),
        _stored(lambda store, value: (store.keep_plans([value]), store.plan(value.id))[1]),
    ),
    "api.store.schema.TokenRecord": (
        lambda: filled(schema.TokenRecord),
        _stored(lambda store, value: (store.add_token(value, "h"), store.find_tokens([value.id])[value.id][0])[1]),
    ),
    "values.submission.Submission": (lambda: SUBMISSION, _stored(_submitted)),
    "cloud.aws.intents.Intent": (lambda: filled(intents.Intent, experiment="one"), _intent),
    "cloud.aws.prices.write_book": (
        lambda: prices.Book(region="r", gpu_types_at=2.5, quotes={"t": filled(prices.Quote)}),
        lambda value, folder: (prices.write_book(folder, value), prices.read_book(folder, "r"))[1],
    ),
    "cloud.pool.state.PoolState": (_pool, lambda value, _: PoolState.from_json(value.to_json(-math.inf))),
    "cloud.ray_head.instance.save": (
        lambda: filled(instance.Record),
        _in_file(lambda path, value: instance.save(path, value, 5.0), instance.load),
    ),
    "executor.checkpoints.folders.pack": (lambda: {"a": b"", "b": b"\x00" * 70_000, "c.txt": b"text"}, _packed),
    "executor.training.sharding.pieces.write": (
        lambda: {"model": {"a": torch.arange(6.0).view(3, 2), "b": torch.ones(2, 0, dtype=torch.bfloat16)}, "at": 3},
        _divided,
    ),
    "executor.journal.inbox.write_ending": (
        lambda: filled(inbox.Ending),
        _in_folder(inbox.write_ending, inbox.read_ending),
    ),
    "executor.journal.inbox.write_mark": (lambda: filled(inbox.HostMark), _mark),
    "executor.journal.inbox.write_order": (
        lambda: filled(inbox.HostedRun, store=None),
        _in_folder(inbox.write_order, inbox.read_order),
    ),
    "executor.journal.inbox.DriverRequest": (lambda: filled(inbox.DriverRequest, kind="cancel", id="a-1"), _requested),
    "executor.journal.journal.encode_job": (
        lambda: filled(Job),
        lambda value, _: journal.decode_job(journal.encode_job(value)),
    ),
    "executor.journal.folder.write_labels": (lambda: LABELS, _in_folder(folder.write_labels, folder.read_labels)),
    "executor.logs.pages.write_cursor": (
        lambda: pages.LogPlace(offsets={0: 7, 12: 9_000_000_000}, failure_seq=4),
        lambda value, _: pages.read_cursor(pages.write_cursor(value)),
    ),
    "executor.result.result.Result": (lambda: filled(Result), lambda value, _: Result.from_json(value.to_json())),
    "executor.training.checkpoint.write": (
        lambda: {
            "half": torch.arange(3.0).bfloat16(),
            "n": 3,
            "nested": [torch.ones(2, dtype=torch.int8), ("a", None)],
        },
        _checkpoint,
    ),
    "executor.training.run_spec.RunSpec": (
        _run_spec,
        lambda value, _: RunSpec.from_json(json.loads(json.dumps(value.to_json()))),
    ),
    "executor.training.runner.pack": (lambda: {"state": {"w": torch.ones(2)}, "metrics": {"loss": 0.5}}, _bytes),
    "spec.experiment.Experiment": (lambda: EXPERIMENT, lambda value, _: Experiment.kept(value.to_words())),
    "spec.loading.dump_experiment": (
        lambda: EXPERIMENT,
        lambda value, _: loading.parse_experiment(loading.dump_experiment(value)),
    ),
    "spec.profile_file.save_profile": (
        _profile,
        _in_file(lambda path, value: profile_file.save_profile(value, path), profile_file.load_profile),
    ),
}


ELSEWHERE = {
    "running.backup.dump_store": "test_backup.py: whole databases",
    "executor.journal.journal.encode_event": "test_an_event_comes_back, for every kind",
    "cloud.pool.journal.to_line": "test_an_event_of_a_pool_comes_back, for every kind",
}


def _kinds(base: type) -> list[type]:
    return [kind for kind in walk.classes() if issubclass(kind, base) and kind is not base]


def test_every_row_of_the_store_has_an_example():
    rows = {walk.name_of(kind) for kind in walk.classes() if kind.__module__ == schema.__name__ and is_dataclass(kind)}
    others = {f"api.store.schema.{name}" for name in ("FeedEvent", "Page", "Principal", "TakenIn")}
    assert rows - RECORDS.keys() - others == set(), "add an example to RECORDS in test_round_trips.py"


def test_every_pair_that_writes_and_reads_has_an_example():
    assert _pairs() - RECORDS.keys() - ELSEWHERE.keys() == set(), "add an example to RECORDS in test_round_trips.py"


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back(name, tmp_path):
    make, there_and_back = RECORDS[name]
    value = make()
    before = plain(value)
    assert plain(there_and_back(value, tmp_path)) == before
    assert plain(value) == before, "writing it changed it"


@pytest.mark.parametrize("kind", _kinds(Event), ids=lambda kind: kind.__name__)
def test_an_event_comes_back(kind):
    event = filled(kind)
    assert plain(journal.decode_event(*journal.encode_event(event))) == plain(event)


@pytest.mark.parametrize("kind", _kinds(PoolEvent), ids=lambda kind: kind.__name__)
def test_an_event_of_a_pool_comes_back(kind):
    event = filled(kind)
    assert plain(from_line(to_line(event))) == plain(event)
