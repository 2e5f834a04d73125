"""The look at a run of a program: the metric in what it prints, when it is stopped, and what is left behind."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rubberband.errors import RubberbandError
from rubberband.running.first_file import TrialFindings, mode_of, text_of
from rubberband.running.programs.looking import Look, look, tidied, with_look
from rubberband.running.programs.seen_lines import Choice, SeenLines
from rubberband.values.metric_lines import ambiguous, metrics_in
from tests.builders.tables import cases


def found_in(lines: list[str]) -> list[Choice]:
    """The metrics in these lines, the best first."""
    seen = SeenLines()
    for number, line in enumerate(lines):
        seen.add(line, float(number))
    return [choice for choice in map(seen.choice_of, seen.kinds()) if choice is not None]


def counted(choice: Choice, lines: list[str]) -> list[int]:
    """The numbers of the lines that count by the file's words."""
    words = yaml.safe_load(choice.metrics)
    pattern = None if words == "stdout" else re.compile(words["pattern"])
    found = [number for number, line in enumerate(lines) if choice.name in metrics_in(line, pattern)]
    assert pattern is not None or not any(ambiguous(lines[number], choice.name) for number in found)
    return found


@cases("text", "metric", "mode")
def test_the_metric_of_an_epoch_is_found_in_what_programs_print(text: str, metric: str, mode: str) -> None:
    marked = text.splitlines()
    lines = [line[2:] for line in marked]
    best = found_in(lines)[0]
    assert (best.name, mode_of(best.name)) == (metric, mode)
    assert counted(best, lines) == [number for number, line in enumerate(marked) if line.startswith(">")]


def test_a_line_with_two_numbers_is_read_for_the_one_of_held_out_data() -> None:
    lines = [f"Epoch {n} | train: loss 0.5{n} acc 0.7{n} | valid: loss 0.4{n} acc 0.8{n}" for n in range(3)]
    for choice, values in zip(found_in(lines), ([0.8, 0.81, 0.82], [0.4, 0.41, 0.42]), strict=False):
        pattern = re.compile(yaml.safe_load(choice.metrics)["pattern"])
        assert [metrics_in(line, pattern)[choice.name] for line in lines] == values, choice


def test_settings_counts_and_times_are_no_metrics() -> None:
    lines = [
        f"device=0 rank: 0 world_size: 1 seed: {seed} lr: 0.{seed} time: 3.{seed} epoch: {seed} grad_norm: 2.{seed} "
        f"total: {seed} version=1.{seed} dev_x=3 took 3.{seed} s"
        for seed in range(3)
    ]
    assert found_in(lines) == []


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("val/acc_top1", "max"),
        ("accumulated_loss", "min"),
        ("valLoss", "min"),
        ("neg_mean_squared_error", "max"),
        ("word_error_rate", "min"),
        ("mAP50", "max"),
        ("rougeL", "max"),
        ("quality", ""),
    ],
)
def test_the_mode_follows_from_the_words_of_a_name(metric: str, mode: str) -> None:
    assert mode_of(metric) == mode


def looked(source: str, folder: Path, *, wait_s: float = 20.0, **more: str) -> tuple[Look, list[str]]:
    (folder / "train.py").write_text(textwrap.dedent(source))
    seen, shown = findings(**more), list[str]()
    return look(seen, folder, wait_s=wait_s, show=shown.append, metric=more.get("metric")), shown


def findings(metrics: str = "stdout", **_: str) -> TrialFindings:
    words = (sys.executable, "train.py")
    space = {"lr": ("{type: uniform, lower: 0, upper: 1}", "")}
    return TrialFindings(command=(*words, "${lr}"), start=words, metrics=metrics, name="x", space=space, metric="")


FOREVER = """
    import itertools, os, time
    for epoch in itertools.count(1):
        time.sleep(0.02)
"""


def test_a_program_is_stopped_in_its_second_epoch(tmp_path: Path) -> None:
    source = FOREVER + '        print(f"epoch {epoch}/90 val_acc={0.5 + epoch / 1000}")\n'
    found, shown = looked(source, tmp_path)
    assert [choice.name for choice in found.choices] == ["val_acc"]
    assert shown[0] == "epoch 1/90 val_acc=0.501"
    assert (found.is_once, found.epochs) == (False, 90)


def test_a_test_below_many_batches_is_waited_for(tmp_path: Path) -> None:
    source = """
    import time
    for epoch in range(1, 9):
        for batch in range(30):
            time.sleep(0.005)
            print(f"Train Epoch: {epoch} [{batch}/30] Loss: {1 / (batch + epoch)}")
        print(f"Test set: Average loss: {1 / epoch}, Accuracy: {90 + epoch}/100 ({90 + epoch}%)")
    """
    found, _ = looked(source, tmp_path)
    assert [choice.name for choice in found.choices[:2]] == ["Accuracy", "loss"]
    assert found.choices[-1].kind.is_batch


def test_a_metric_at_the_end_is_seen_as_one_iteration(tmp_path: Path) -> None:
    found, _ = looked("print('Loading 3 files')\nprint('Accuracy: 0.93')\n", tmp_path)
    choice = found.choices[0]
    assert found.is_once
    seen = with_look(findings(), found, choice, "max")
    assert (seen.metric, seen.most, "type: none" in seen.scheduler) == ("Accuracy", 1, True)


def test_a_whole_training_keeps_the_epochs_of_the_program(tmp_path: Path) -> None:
    found, _ = looked("print('Accuracy: 0.93')\n", tmp_path)
    seen = TrialFindings(
        command=("python", "train.py", "--epochs", "${max_t}", "--lr", "${lr}"), name="x", space={}, metric=""
    )
    assert with_look(seen, found, found.choices[0], "max").command == ("python", "train.py", "--lr", "${lr}")


def test_max_t_is_no_number_of_epochs_where_a_line_comes_every_ten(tmp_path: Path) -> None:
    found, _ = looked("for e in range(10, 100, 10): print(f'epoch {e} loss: {1 / e}')\n", tmp_path)
    seen = TrialFindings(command=("a", "--epochs=${max_t}", "${lr}"), most=100, name="x", space={}, metric="")
    after = with_look(seen, found, found.choices[0], "min")
    assert (after.command, after.most) == (("a", "${lr}"), 10)


def test_the_average_of_a_test_is_its_metric_and_not_the_last_batch() -> None:
    lines = [
        f"Test: [{batch}/2] Loss: {1 - epoch / 10:.2f} ({epoch}.5) Acc@1: {batch}0.0 (5{epoch}.25)"
        for epoch in range(3)
        for batch in (0, 1, 2)
    ]
    best = found_in(lines)[0]
    pattern = re.compile(yaml.safe_load(best.metrics)["pattern"])
    assert [metrics_in(line, pattern).get(best.name) for line in lines] == [
        None,
        None,
        50.25,
        None,
        None,
        51.25,
        None,
        None,
        52.25,
    ]


def test_a_metric_that_comes_twice_an_epoch_leaves_the_epochs_as_they_are(tmp_path: Path) -> None:
    source = """
    for epoch in range(1, 5):
        for half in (1, 2):
            print(f"Epoch {epoch}/4:  {half}0%|##  | 1/2 [00:00<00:00, 9img/s]INFO: Dice score: 0.{epoch}{half}")
    """
    found, _ = looked(source, tmp_path)
    seen = TrialFindings(command=("a", "--epochs=${max_t}", "${lr}"), most=4, name="x", space={}, metric="")
    after = with_look(seen, found, found.choices[0], "max")
    assert (after.command, after.most) == (("a", "${lr}"), 8)


def test_a_program_with_folds_is_ranked_by_the_first_which_is_said(tmp_path: Path) -> None:
    source = """
    for fold in (1, 2):
        print(f"Fold {fold}")
        for epoch in (1, 2, 3):
            print(f"Epoch {epoch}: val_acc={fold / 10 + epoch / 100}")
    """
    found, _ = looked(source, tmp_path)
    after = with_look(findings(), found, found.choices[0], "max")
    assert any("several folds" in remark for remark in after.remarks)


def test_reports_are_recognised_among_other_lines(tmp_path: Path) -> None:
    source = """
    import rubberband
    for number in range(5):
        print("warming up: loss=3 quality=2")
        rubberband.report({"loss": 1 / (number + 1), "quality": number / 2})
    """
    found, _ = looked(source, tmp_path, metrics="report")
    choice = found.choices[0]
    assert (choice.name, choice.metrics, choice.line) == ("loss", "report", "loss=0.2 quality=2.0")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import time; time.sleep(60)", r"printed nothing within .*, and no metric; .*--wait"),
        ("import time; print('hello 3', flush=True); time.sleep(60)", r"within .*its last lines: hello 3; if it needs"),
        ("import time; print('using: 0 cores', flush=True); time.sleep(60)", r"printed no metric within .*using: 0"),
        ("print('hello')", r"ended after .*printed no metric; its last lines: hello; print a line such as"),
        ("print('loss=1')\nraise ValueError('no data')", r"ended with exit code 1 after .*: ValueError: no data"),
    ],
)
def test_a_program_without_a_metric_is_refused_with_what_it_did(source: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(RubberbandError, match=line):
        looked(source, tmp_path, wait_s=0.5)


def test_an_iteration_takes_the_time_between_two_lines(tmp_path: Path) -> None:
    found, _ = looked(
        "import time\nfor e in range(8): time.sleep(0.05); print(f'loss={1 / (e + 1)}', flush=True)", tmp_path
    )
    assert 4.0 * found.iteration_s < found.seconds, "eight of them and a start"


def test_a_program_that_fails_in_a_group_of_one_has_no_rank(tmp_path: Path) -> None:
    source = """
    import os
    if "RANK" in os.environ:
        raise RuntimeError("ProcessGroupNCCL is only supported with GPUs")
    for epoch in range(3):
        print(f"loss={1 / (epoch + 1)}")
    """
    found, _ = looked(source, tmp_path)
    seen = with_look(findings(), found, found.choices[0], "min")
    assert "\n  rank: false # one worker" in text_of(seen, tmp_path / "x.yaml")


def test_a_pattern_of_the_user_is_the_metric_of_the_look(tmp_path: Path) -> None:
    source = "for n in range(9): print(f'Loss: {n / 7}'); print(f'Test set: Average loss: 0.{n}42, Accuracy: {n}/90')"
    pattern = r"{pattern: 'Test set: Average loss: (?P<quality>[0-9\.]+)'}"
    (tmp_path / "train.py").write_text(source)
    seen = replace(findings(pattern), start=(sys.executable, "train.py"), metric="quality", mode="min")
    found = look(seen, tmp_path, wait_s=20.0, show=lambda _: None, metric="quality")
    (choice,) = found.choices
    assert (choice.name, choice.metrics, [each.value for each in choice.kind.seen][:2]) == (
        "quality",
        pattern,
        [0.042, 0.142],
    )


def test_a_parameter_that_is_printed_is_no_metric(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('l1_ratio=0.5')\nprint('quality=0.7')\n")
    seen = replace(
        findings(),
        command=(*findings().start, "${l1_ratio}"),
        space={"l1_ratio": ("{type: uniform, lower: 0, upper: 1}", "")},
    )
    found = look(seen, tmp_path, wait_s=20.0, show=lambda _: None)
    assert [choice.name for choice in found.choices] == ["quality"]


def test_a_metric_that_is_not_printed_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(RubberbandError, match=r"printed no auc, but loss; give one of these by --metric"):
        looked("for e in range(3): print(f'loss={1 / (e + 1)}')\n", tmp_path, metric="auc")


def test_a_program_finds_its_checkpoint_in_a_folder_of_the_look_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    source = """
    import os, pathlib
    assert os.environ["WANDB_MODE"] == "disabled", "a look is no run in the user's account"
    folder = pathlib.Path(os.environ["RUBBERBAND_CHECKPOINT"])
    (folder / "model.pt").write_text("x")
    print(f"loss={len(str(folder))}")
    """
    found, shown = looked(source, tmp_path)
    assert found.saves
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], shown


def test_files_of_models_that_a_look_left_are_moved_away_and_others_stay(tmp_path: Path) -> None:
    for name in ("old.pt", "data/set.pt", "config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    remarks = list[str]()
    with tidied(tmp_path, remarks.append):
        (tmp_path / "old.pt").write_text("newer")
        for name in ("model.pt", "runs/1/state.json", "data/cache.pkl", "notes.json", "log.txt", "out/a.ckpt"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("new")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"old.pt", "data", "data/set.pt", "data/cache.pkl", "config.json", "log.txt"}
    place = re.search(r"moved to (\S+);", remarks[0])
    assert place is not None
    assert (Path(place[1]) / "runs/1/state.json").read_text() == "new"
    with tidied(tmp_path, remarks.append):
        (tmp_path / "log.txt").write_text("more")
    assert len(remarks) == 1
