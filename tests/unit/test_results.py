"""Results beyond the report: as rows and data frames, as files, and as the trained trial."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import rubberband
from rubberband import cli, installation
from rubberband.errors import CheckpointError, InputError, StoreAwayError
from rubberband.executor import (
    Entrypoint,
    Faults,
    FolderCheckpoint,
    Result,
    SegmentReport,
    TrialResult,
    make_store,
    rows,
    run_segment,
)
from rubberband.executor.result.restoring import _save_safetensors
from tests.builders.journalled_runs import recorded
from tests.builders.results import EVERY_RESULT, a_job, a_result
from tests.builders.segments import SEGMENT
from tests.builders.tables import cases


@pytest.mark.parametrize("kind", sorted(EVERY_RESULT))
def test_shares_of_the_bill_add_up_to_it(kind: str) -> None:
    result = EVERY_RESULT[kind]()
    found = rows.trial_rows(result)
    assert [row["trial"] for row in found] == list(range(12))
    assert all(list(row) == list(found[0]) for row in found)
    if any(row["gpu_s"] for row in found):
        assert sum(row["cost_usd"] for row in found) == pytest.approx(result.actual_cost_usd)
    assert sum(row["gpu_s"] for row in found) == pytest.approx(sum(use.end_s - use.start_s for use in result.busy))


@pytest.mark.parametrize("kind", sorted(EVERY_RESULT))
def test_every_result_is_short_where_it_is_shown(kind: str) -> None:
    result = EVERY_RESULT[kind]()
    assert re.fullmatch(rf"<Result {result.name}: [a-z]+(, score=[-\d.e]+)?, [\d.]+ (USD|GPU-h)>", repr(result))
    assert len(str(result).splitlines()) <= 12
    assert all(len(repr(trial)) < 200 for trial in result.trials)


def test_the_best_configuration_of_a_run_without_reports_is_refused() -> None:
    with pytest.raises(InputError, match=r"has no best trial: none has reported; `rubberband logs"):
        _ = replace(a_result(), best=None).best_config


def test_a_nested_configuration_and_a_missing_parameter_have_columns_of_their_own() -> None:
    result = a_result()
    one, other, *rest = result.trials
    one = replace(one, configuration={"model": {"kind": "cnn", "width": 8}, "lr": 0.1}, metrics={"trial": 2.0})
    other = replace(other, configuration={"model": {"kind": "mlp"}, "lr": 0.2, "depth": [1, 2]})
    found = rows.trial_rows(replace(result, trials=(one, other, *rest)))
    names = [name for name in found[0] if name.startswith("config.")]
    assert names == ["config.model.kind", "config.model.width", "config.lr", "config.n", "config.depth"]
    assert (found[0]["trial"], found[0]["metrics.trial"]) == (0, 2.0)
    assert found[1]["config.model.width"] is None


def test_a_data_frame_has_a_row_for_each_trial_or_for_each_report() -> None:
    result = a_result()
    frame = result.to_dataframe()
    assert frame.loc[frame.score.idxmax(), "trial"] == (result.best.trial if result.best else None)
    reports = result.to_dataframe(reports=True)
    assert list(reports.columns) == ["trial", "iterations", "elapsed_s", "score"]
    assert len(reports) == sum(len(trial.curve) for trial in result.trials)
    assert reports.groupby("trial").iterations.max().to_dict() == {t.trial: t.iterations for t in result.trials}


def test_without_pandas_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(InputError, match=r"needs pandas; run pip install 'rubberband-tune\[pandas\]'"):
        a_result().to_dataframe()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=8),
    st.lists(st.integers(0, 5), max_size=3),
)


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries({"trial": st.integers(0, 9), "a": VALUES, "b": VALUES}), min_size=1, max_size=5))
def test_every_file_holds_every_row(found: list[rows.Row]) -> None:
    read = list(csv.DictReader(io.StringIO(rows.to_csv(found))))
    assert [row["trial"] for row in read] == [str(row["trial"]) for row in found]
    assert [row["a"] == "" for row in read] == [row["a"] in (None, "") for row in found]
    assert json.loads(rows.to_json(found)) == found
    frame = pandas.read_parquet(io.BytesIO(rows.to_parquet(found)))
    assert frame.trial.tolist() == [row["trial"] for row in found]
    assert frame.b.isna().tolist() == [row["b"] is None for row in found]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    recorded().put(folder)
    return folder


@pytest.fixture
def says(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RUBBERBAND_HOME", str(home))

    def run(*arguments: str) -> str:
        found = CliRunner().invoke(cli.app, arguments)
        if found.exception is not None:
            raise found.exception
        return found.stdout

    return run


def test_best_prints_the_configuration(says: Any) -> None:
    lines = says("best", "digits-sha").splitlines()
    assert lines[0].startswith("accuracy=0.9")
    assert [line.split(":")[0] for line in lines[1:]] == ["  lr", "  momentum", "  hidden", "  optimizer"]
    answer = json.loads(says("best", "digits-sha", "-o", "json"))
    assert set(answer["configuration"]) == {"lr", "momentum", "hidden", "optimizer"}
    assert lines[0].startswith(f"accuracy={answer['metrics']['accuracy']:.6g} (trial {answer['trial']}, ")


def test_best_of_a_run_without_reports_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded().put(tmp_path, upto=2)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"no best trial: none has reported; `rubberband logs digits-sha` shows why"):
        CliRunner().invoke(cli.app, ["best", "digits-sha"], catch_exceptions=False)


def test_export_writes_what_the_ending_says(says: Any, tmp_path: Path) -> None:
    printed = says("export", "digits-sha")
    assert len(printed.splitlines()) == 28
    for name in ("trials.csv", "trials.json", "trials.parquet"):
        assert says("export", "digits-sha", str(tmp_path / name)) == ""
    assert (tmp_path / "trials.csv").read_text() == printed
    frames = [pandas.read_csv(tmp_path / "trials.csv"), pandas.read_parquet(tmp_path / "trials.parquet")]
    frames.append(pandas.read_json(tmp_path / "trials.json"))
    assert len({tuple(frame.columns) for frame in frames}) == 1
    assert all(math.isclose(frame.accuracy.max(), frames[0].accuracy.max()) for frame in frames)
    assert len(says("export", "digits-sha", "--reports").splitlines()) > 28
    assert json.loads(says("export", "digits-sha", "-o", "json"))[3]["trial"] == 3


@cases("arguments", "error")
def test_export_refuses(says: Any, arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(InputError, match=error):
        says("export", "digits-sha", *arguments)


def test_the_model_of_a_torch_trial_is_written_as_its_state(tmp_path: Path) -> None:
    import torch

    from tests.builders.trials.torch_trials import Line

    found = trained(Line, tmp_path / "store", metric="train_loss", lr=0.3)
    assert found.save_best(tmp_path / "new" / "model.pt") == tmp_path / "new" / "model.pt"
    state, best = torch.load(tmp_path / "new" / "model.pt", weights_only=True), found.load_best(Line).model.state_dict()
    assert state.keys() == best.keys()
    assert all(torch.equal(state[name], best[name]) for name in best)
    with pytest.raises(InputError, match="is there, and is not overwritten"):
        found.save_best(tmp_path / "new" / "model.pt")


def test_the_model_of_a_torch_trial_is_written_as_safetensors_with_its_tied_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors
    import torch
    from safetensors.torch import load_file

    from tests.builders.trials.torch_trials import Line, Tied

    found = trained(Tied, tmp_path / "store", metric="train_loss", lr=0.3)
    file = found.save_best(tmp_path / "new" / "model.safetensors")
    state, model = load_file(file), found.load_best(Tied).model
    assert state.keys() == {"first.weight", "second.weight", "turned"}
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)
    model.load_state_dict(state)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    with pytest.raises(InputError, match="is there, and is not overwritten"):
        found.save_best(file)
    other = trained(Line, tmp_path / "other", metric="train_loss", lr=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(installation, "find_spec", lambda name: None)
        with pytest.raises(InputError, match=r"needs safetensors; run pip install 'rubberband-tune\[safetensors\]'"):
            other.save_best(tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.parametrize(
    ("value", "words"), [("object", "is a dict"), ("sparse", "is a tensor of torch.sparse"), ("type", "complex128")]
)
def test_safetensors_refuses_what_it_cannot_hold(tmp_path: Path, value: str, words: str) -> None:
    import torch

    made = {"object": {"step": 1}, "sparse": torch.eye(2).to_sparse(), "type": torch.zeros(2, dtype=torch.complex128)}[
        value
    ]
    with pytest.raises(InputError, match=f"^safetensors .*{words}.*; write a .pt file instead$"):
        _save_safetensors({"layer.extra": made}, tmp_path / "model.safetensors")
    assert not any(tmp_path.iterdir())


def test_a_safetensors_file_that_is_not_whole_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors
    import torch

    def half(tensors: Any, file: Path, **_: Any) -> None:
        file.write_bytes(b"half")
        raise safetensors.SafetensorError("no more")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="no more"):
        _save_safetensors({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_export_writes_a_study_that_optuna_reads(says: Any, home: Path, tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path}/study.db"
    says("export", "digits-sha", "--to", url)
    study = optuna.load_study(study_name="digits-sha", storage=url)
    result = rubberband.load_result("digits-sha", home=home)
    assert result.best is not None
    assert study.best_value == result.best.metrics["accuracy"]
    assert study.best_params.items() <= result.best.configuration.items()
    assert [trial.state.name for trial in study.trials].count("PRUNED") == 26
    reports = {done: metrics["accuracy"] for _, done, metrics in result.trials[3].curve}
    assert study.trials[3].intermediate_values == reports
    with pytest.raises(InputError, match="has a study 'digits-sha' already; give another database"):
        says("export", "digits-sha", "--to", url)


@cases("outcome", "resumable", "line")
def test_a_run_that_ends_early_says_how_to_continue_it(
    outcome: Any, resumable: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = replace(next(iter(EVERY_RESULT.values()))(), outcome=outcome, resumable=resumable)
    monkeypatch.setattr("rubberband.executor.journal.folder.open_folder", lambda _: SimpleNamespace(driven=True))
    monkeypatch.setattr("rubberband.executor.run.session.run", lambda *_, **__: result)
    assert line in CliRunner().invoke(cli.app, ["resume", "digits"]).stderr


@pytest.mark.parametrize("kind", sorted(EVERY_RESULT))
def test_every_result_is_a_study(kind: str) -> None:
    result = EVERY_RESULT[kind]()
    study = result.to_study()
    assert [trial.number for trial in study.trials] == [trial.trial for trial in result.trials]
    for trial, found in zip(result.trials, study.trials, strict=True):
        assert found.state.name in {"completed": ("COMPLETE",), "failed": ("FAIL",), "stopped": ("PRUNED",)}.get(
            trial.status, ("RUNNING", "WAITING")
        )


@pytest.mark.long
def test_a_study_takes_failed_trials_that_had_reported_and_a_result_without_trials(home: Path, tmp_path: Path) -> None:
    result = rubberband.load_result("digits-sha", home=home)
    failed = replace(result, trials=tuple(replace(trial, status="failed") for trial in result.trials))
    url = f"sqlite:///{tmp_path}/study.db"
    study = failed.to_study(url)
    assert {(trial.state.name, trial.value) for trial in study.trials} == {("FAIL", None)}
    assert study.trials[3].intermediate_values
    assert replace(result, trials=()).to_study().trials == []
    with pytest.raises(InputError, match=r"me:\*\*\*@"):
        result.to_study("nosuchdialect://me:hunter2@localhost/db")


def test_a_result_is_loaded_by_its_name(home: Path) -> None:
    result = rubberband.load_result("digits-sha", home=home)
    assert result.outcome == "done"
    assert result.best is not None
    assert result.best.config == result.best_config
    assert result.trials[3].seed == recorded().setup["seeds"][3]
    with pytest.raises(InputError, match="known: digits-sha"):
        rubberband.load_result("nosuch", home=home)


# The trained trial, from the checkpoint of a segment that ran in this process


class Counter(rubberband.Trial):
    """Counts, from a start that its configuration says."""

    def setup(self, config: Mapping[str, Any], context: rubberband.TrialContext) -> None:
        self.count, self.seed = config["start"], context.seed

    def iterate(self) -> Mapping[str, float]:
        self.count += 1
        return {"loss": 1.0 / self.count}

    def save(self) -> Any:
        return self.count

    def load(self, state: Any) -> None:
        self.count = state


def count(config: dict[str, Any]) -> None:
    for number in range(1, 100):
        rubberband.report({"loss": 1.0 / number}, checkpoint={"number": number})


def forgetful(config: dict[str, Any]) -> None:
    for number in range(1, 100):
        rubberband.report({"loss": 1.0 / number})


def trained(target: Any, folder: Path, *, metric: str = "loss", **config: Any) -> Result:
    """A result whose best trial is a segment of `target`, with its checkpoint in `folder`."""
    store = make_store(str(folder))
    segment = replace(SEGMENT, config=config, metric=metric)
    reports = [
        item for item in run_segment(Entrypoint.from_object(target), segment, store) if isinstance(item, SegmentReport)
    ]
    best = TrialResult(
        trial=segment.trial,
        status="completed",
        configuration=config,
        iterations=reports[-1].iterations,
        metrics=reports[-1].metrics,
        failures=0,
        failure=None,
        checkpoint=reports[-1].checkpoint,
        curve=(),
        seed=segment.seed,
    )
    return replace(a_result(), best=best, provider="local")


def test_a_trial_is_set_up_and_loaded(tmp_path: Path) -> None:
    best = trained(Counter, tmp_path, start=10).load_best(Counter)
    assert isinstance(best, Counter)
    assert (best.count, best.seed) == (14, SEGMENT.seed)


def test_the_checkpoint_of_a_function_is_loaded(tmp_path: Path) -> None:
    assert trained(count, tmp_path).load_best(count) == {"number": 4}
    with pytest.raises(InputError, match=r"reported without a checkpoint.*pass checkpoint= to rubberband.report"):
        trained(forgetful, tmp_path).load_best(forgetful)


def in_files(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.pt").write_text("weights")
        while True:
            rubberband.report({"loss": 1.0}, checkpoint=FolderCheckpoint.from_directory(folder))


def test_the_files_of_a_function_s_folder_are_written(tmp_path: Path) -> None:
    found = trained(in_files, tmp_path / "store")
    assert found.save_best(tmp_path / "best") == tmp_path / "best"
    assert (tmp_path / "best" / "model.pt").read_text() == "weights"
    with pytest.raises(InputError, match="is there, and is not overwritten"):
        found.save_best(tmp_path / "best")
    with pytest.raises(InputError, match=r"is Python, with no folder of files; result.load_best\(\) loads it"):
        trained(count, tmp_path / "plain").save_best(tmp_path / "other")


def test_a_torch_trial_comes_with_its_model(tmp_path: Path) -> None:
    import torch

    from tests.builders.trials.torch_trials import Line

    result = trained(Line, tmp_path, metric="train_loss", lr=0.3)
    best = result.load_best(Line)
    assert best.config == {"lr": 0.3}
    assert not best.model.training
    batch = next(iter(torch.utils.data.DataLoader(best.train_dataset(best.config), batch_size=64)))
    assert result.best is not None
    assert 0.0 < best.loss(best.model, batch).item() < result.best.metrics["train_loss"]
    assert result.load_best("tests.builders.trials.torch_trials:Line").config == best.config
    with pytest.raises(CheckpointError, match="does not fit Wide"):
        result.load_best(type("Wide", (Line,), {"build_model": lambda *_: torch.nn.Linear(2, 1)}))
    with pytest.raises(CheckpointError, match=r"does not fit Counter: .*give the class that was trained"):
        result.load_best(Counter)


def test_a_torch_trial_comes_with_its_own_state(tmp_path: Path) -> None:
    from tests.builders.trials.segment_trials import Weighed

    best = trained(Weighed, tmp_path).load_best(Weighed)
    assert best.average.n_averaged == SEGMENT.until_iterations * 4  # steps


def weigh(config: dict[str, Any]) -> None:
    import torch

    kept = rubberband.get_checkpoint() or {"weight": torch.ones(3), "number": 0}
    for number in range(kept["number"] + 1, 100):
        weight = kept["weight"] * number
        rubberband.report({"loss": weight.sum()}, checkpoint={"weight": weight, "number": number})


class Weighing(Counter):
    """Keeps a tensor."""

    def save(self) -> Any:
        import torch

        return torch.nn.Parameter(torch.full((2,), float(self.count)))

    def load(self, state: Any) -> None:
        self.weight, self.count = state, int(state[0])


@pytest.mark.by_default(1)
@pytest.mark.parametrize("target", [weigh, Weighing])
def test_tensors_of_a_gpu_are_loaded_where_there_is_none(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        result = trained(target, tmp_path, start=10)
    assert result.best is not None
    best = result.load_best(target)
    assert (best["weight"] if target is weigh else best.weight).device.type == "cpu"
    if target is weigh:
        assert result.load_best(target, device="meta")["weight"].device.type == "meta"
    with pytest.raises(InputError, match=r"device='cuda:99' cannot be used here \(.*leave it out to load on the CPU"):
        result.load_best(target, device="cuda:99")
    segment = replace(
        SEGMENT, config={"start": 10}, from_iterations=4, until_iterations=5, checkpoint=result.best.checkpoint
    )
    resumed = list(run_segment(Entrypoint.from_object(target), segment, make_store(str(tmp_path))))
    assert isinstance(resumed[-1], SegmentReport)
    assert resumed[-1].metrics == {"loss": 3 * 4.0 * 5.0 if target is weigh else 1 / 15}


class OfAGpu:
    """Is pickled as a generator of a GPU is."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __reduce__(self) -> Any:
        import torch

        return torch.Generator, (torch.device("cuda"),), (self.seed, 4, torch.zeros(16, dtype=torch.uint8))


def draw(config: dict[str, Any]) -> None:
    import torch

    while True:
        state = {"on_gpu": OfAGpu(config["start"]), "on_cpu": torch.Generator().manual_seed(3)}
        rubberband.report({"loss": 1.0}, checkpoint=state)


def test_a_generator_of_a_gpu_is_loaded_where_there_is_none_with_its_seed(tmp_path: Path) -> None:
    import torch

    best = trained(draw, tmp_path, start=10).load_best(draw)
    assert best["on_gpu"].device.type == "cpu"
    assert best["on_gpu"].initial_seed() == 10
    assert torch.equal(best["on_cpu"].get_state(), torch.Generator().manual_seed(3).get_state())


def test_a_lost_checkpoint_is_not_a_store_that_is_away(tmp_path: Path) -> None:
    result = trained(Counter, tmp_path / "store", start=1)
    for file in (tmp_path / "store").glob("*.ckpt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="is missing; put it back, or run the experiment again"):
        result.load_best(Counter)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreAwayError, match="mount or restore it"):
        result.load_best(Counter)


def test_a_run_without_training_has_nothing_to_load(home: Path) -> None:
    with pytest.raises(InputError, match="a virtual run trains no model"):
        rubberband.load_result("digits-sha", home=home).load_best(Counter)
    failed = a_result(a_job(), Faults(failures={(trial, 1): "not_a_number" for trial in range(12)}))
    with pytest.raises(InputError, match="has no best trial"):
        failed.load_best(Counter)
    with pytest.raises(InputError, match=r"load_best\(\) got 3; give the trial's class"):
        trained(Counter, home / "store", start=1).load_best(3)  # type: ignore[arg-type]
