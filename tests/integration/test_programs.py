"""Programs as trials: real processes, through segments of one worker."""

from __future__ import annotations

import gc
import os
import shlex
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import (
    Entrypoint,
    SegmentEnded,
    SegmentFailure,
    SegmentRepeated,
    SegmentReport,
    open_store,
    run_segment,
)
from rubberband.executor.checkpoints.folders import read_manifest
from rubberband.values.command import Metrics, ProgramCommand, words_of
from rubberband.values.environment import Environment
from tests.builders.segments import SEGMENT

RESUMES = """
    import pathlib, sys, time, rubberband
    out = pathlib.Path(sys.argv[1])
    begin = int((out / "n").read_text()) if (out / "n").exists() else 0
    for epoch in range(begin + 1, 6):
        time.sleep(0.12)
"""
"""The beginning of programs whose loop goes on from the file n."""
SAVES_FIRST = f"""{RESUMES}
        (out / "n").write_text(str(epoch))
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
"""
PRINTS_FIRST = f"""{RESUMES}
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
        for name in ("m", "n"):
            with open(out / name, "w") as file:
                time.sleep(0.02)
                file.write(str(epoch))
"""
SAVES_EVALUATES_PRINTS = f"""{RESUMES}
        (out / "n").write_text(str(epoch))
        time.sleep(0.12)
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
"""
PRINTS_EVALUATES_SAVES = f"""{RESUMES}
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
        time.sleep(0.12)
        (out / "n").write_text(str(epoch))
"""
REPORTS = f"""{RESUMES}
        (out / "n").write_text(str(epoch))
        rubberband.report({{"loss": 1 / epoch}})
"""
REPORTS_A_FOLDER = """
    import pathlib, rubberband
    out = pathlib.Path("own")
    out.mkdir(exist_ok=True)
    folder = rubberband.get_checkpoint()
    begin = int(pathlib.Path(folder, "n").read_text()) if folder else 0
    for epoch in range(begin + 1, 6):
        (out / "n").write_text(str(epoch))
        rubberband.report({"loss": 1 / epoch}, checkpoint=out)
"""


class Trial:
    """A program in a folder, and the store of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store(str(folder / "store"))
        self.environment = Environment()
        self.command: dict[str, Any] = {}
        """Further words of the entry point."""

    def run(
        self, source: str, words: str = "${checkpoint}", *, metrics: Metrics | None = None, **changes: Any
    ) -> list[Any]:
        """Return all items of a segment of a program."""
        (self.folder / "train.py").write_text(textwrap.dedent(source))
        line = words_of(f"{sys.executable} train.py {words}")
        command = ProgramCommand(words=line, metrics=metrics or Metrics(), **self.command)
        entrypoint = Entrypoint(
            module="", attribute="", search_path=(str(self.folder),), command=command, environment=self.environment
        )
        segment = replace(SEGMENT, **{"max_iterations": 5, "until_iterations": 2, **changes})
        return list(run_segment(entrypoint, segment, self.store))


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_lines_of_training_and_of_validation_do_not_count_alike_in_a_run(trial: Trial) -> None:
    source = """
        import time
        for epoch in range(5):
            print("Train loss: 1", flush=True)
            time.sleep(0.12)
            print("Val loss: 2", flush=True)
            time.sleep(0.12)
    """
    items = trial.run(source, "", metrics=Metrics(source="stdout"))
    assert losses(items) == [(1, 1.0)]
    assert items[-1].kind == "no_metric"  # so that it is not tried again
    assert items[-1].message.startswith("two kinds of line have loss, 'Train loss: 1' and 'Val loss: 2'")


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("instance", "line"),
    [
        ("", "nosuch is not on this machine (No such file or directory): install it, or give its path"),
        (
            "i-001",
            "nosuch is not on i-001 (No such file or directory): install it there (resources.aws.install or setup), or "
            "put it into the experiment's folder",
        ),
    ],
)
def test_a_program_that_is_not_there_names_the_instance(tmp_path: Path, instance: str, line: str) -> None:
    command = ProgramCommand(words=("nosuch", "${args}"))
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(tmp_path),), command=command)
    items = list(run_segment(entrypoint, replace(SEGMENT, instance=instance), open_store(str(tmp_path / "store"))))
    assert items[-1].message == line
    (tmp_path / "nosuch").touch()
    here = replace(entrypoint, command=replace(command, words=("./nosuch",)))
    items = list(run_segment(here, replace(SEGMENT, instance=instance), open_store(str(tmp_path / "store"))))
    assert items[-1].message.endswith(
        "start ./nosuch (Permission denied): make it executable (chmod +x), and see its first line (#!)"
    )


def losses(items: list[Any]) -> list[tuple[int, float]]:
    return [(item.iterations, item.metrics["loss"]) for item in items if isinstance(item, SegmentReport)]


PRINTED = Metrics(source="stdout")


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("source", "metrics"),
    [
        pytest.param(SAVES_FIRST, PRINTED, id="saves first"),
        pytest.param(PRINTS_FIRST, PRINTED, id="prints first"),
        pytest.param(SAVES_FIRST, Metrics(source="stdout", pattern=r"loss=(?P<loss>\S+)"), id="pattern"),
        pytest.param(REPORTS, Metrics(), id="reports"),
        pytest.param(REPORTS_A_FOLDER, Metrics(), id="reports a folder"),
    ],
)
def test_a_program_goes_on_from_its_files(trial: Trial, source: str, metrics: Metrics) -> None:
    first = trial.run(source, metrics=metrics)
    assert losses(first) == [(1, 1.0), (2, 0.5)]
    assert first[-1].saved_iterations is None  # the checkpoint holds both
    assert resumed(trial, source, metrics, first[-1]) == ([], [(3, 1 / 3), (4, 1 / 4), (5, 1 / 5)])


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    "source", [SAVES_FIRST.replace("time.sleep(0.12)", "pass"), PRINTS_EVALUATES_SAVES, SAVES_EVALUATES_PRINTS]
)
def test_a_program_begins_again_if_the_iteration_of_its_files_is_not_known(
    trial: Trial, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    first = trial.run(source, metrics=PRINTED)
    assert losses(first) == [(1, 1.0), (2, 0.5)]
    assert first[-1].saved_iterations == 0
    assert "trials are trained from zero after every stage" in capfd.readouterr().err
    assert resumed(trial, source, PRINTED, first[-1]) == ([1, 2], [(3, 1 / 3), (4, 1 / 4), (5, 1 / 5)])


@pytest.mark.parametrize("source", [SAVES_FIRST, PRINTS_FIRST, SAVES_EVALUATES_PRINTS, PRINTS_EVALUATES_SAVES])
@pytest.mark.parametrize(
    ("every", "until"), [(2, 3), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, 4), (3, 1)))]
)
def test_a_program_that_saves_seldom_repeats_iterations(trial: Trial, source: str, every: int, until: int) -> None:
    head, source = source[: len(RESUMES)], source[len(RESUMES) :]
    begin = next(at for at, line in enumerate(source.splitlines()) if '(out / "n")' in line or "for name" in line)
    lines = source.splitlines()
    lines[begin] = lines[begin].replace("(out", f"epoch % {every} or (out")
    lines[begin] = lines[begin].replace("for name in", f"for name in () if epoch % {every} else")
    first = trial.run("\n".join([head, *lines]), metrics=PRINTED, until_iterations=until)
    repeated, later = resumed(trial, "\n".join([head, *lines]), PRINTED, first[-1])
    assert later == [(epoch, 1 / epoch) for epoch in range(until + 1, 6)]
    saved = first[-1].saved_iterations
    assert repeated == list(range((until if saved is None else saved) + 1, until + 1))


def resumed(
    trial: Trial, source: str, metrics: Metrics, last: SegmentReport
) -> tuple[list[int], list[tuple[int, float]]]:
    """Return the iterations that a program repeats, and the losses that it reports, until it ends by itself."""
    items = trial.run(
        source,
        metrics=metrics,
        from_iterations=last.iterations,
        until_iterations=9,
        max_iterations=9,
        checkpoint=last.checkpoint,
    )
    assert isinstance(items[-1], SegmentEnded)
    return [item.iterations for item in items if isinstance(item, SegmentRepeated)], losses(items)


@pytest.mark.parametrize("until", [1, 2])
def test_a_program_that_has_its_folder_from_the_environment_saves_after_its_line(trial: Trial, until: int) -> None:
    """Its first files came 30 ms after the line, and were lost."""
    source = PRINTS_FIRST.replace("sys.argv[1]", '__import__("os").environ["RUBBERBAND_CHECKPOINT"]')
    source = source.replace('for name in ("m"', 'time.sleep(0.03)\n        for name in ("m"')
    first = trial.run(source, "", metrics=PRINTED, until_iterations=until)
    assert (losses(first)[-1][0], first[-1].saved_iterations) == (until, None)
    assert resumed(trial, source, PRINTED, first[-1])[0] == []


ENDS = """
    import pathlib, sys, time
    with open("starts", "a") as starts:
        print(file=starts)
    for epoch in range(1, 4):
        time.sleep(0.12)
        print(f"epoch {epoch} loss={1 / epoch}")
    time.sleep(0.1)
    print("epoch 3 loss=0.4 of the best")
    time.sleep(0.05)
    pathlib.Path(sys.argv[1], "final").touch()
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.by_default(2)
@pytest.mark.parametrize(("code", "most", "ended"), [(0, 5, True), (0, 3, False), (1, 5, False), (1, 3, False)])
def test_a_program_that_ends_after_the_last_line_of_a_segment_is_over(
    trial: Trial, code: int, most: int, ended: bool
) -> None:
    """It was ended before it had saved its model, and started again at the next stage."""
    items = trial.run(ENDS, f"${{checkpoint}} {code}", metrics=PRINTED, until_iterations=3, max_iterations=most)
    assert losses(items) == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]
    assert items[-1].ended == ended
    with trial.store.file(items[-1].checkpoint) as path:
        assert [file["path"] for file in read_manifest(path)["files"]] == ["final"] * (code == 0)


def test_a_program_that_goes_on_after_the_last_line_of_a_segment_is_not_waited_for(trial: Trial) -> None:
    source = """
        import pathlib, time
        for epoch in range(1, 99):
            pathlib.Path("epoch").write_text(str(epoch))
            print(f"epoch {epoch} loss={1 / epoch}")
            time.sleep(0.12)
    """
    for most in (3, 9):
        trial.run(source, "", metrics=PRINTED, until_iterations=3, max_iterations=most)
        assert int((trial.folder / "epoch").read_text()) <= 5


EVALUATES = """
    import pathlib, sys, time, rubberband
    out = pathlib.Path(sys.argv[1])
    begin = int((out / "n").read_text()) if (out / "n").exists() else 0
    def show(epoch): {show}
    if begin:
        show(begin)
    for epoch in range(begin + 1, 6):
        time.sleep(0.12)
        (out / "n").write_text(str(epoch))
        show(epoch)
"""


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("show", "metrics"),
    [
        ('print(f"epoch {epoch} loss={1 / epoch}")', PRINTED),
        ('print(f"loss={1 / (epoch + 1.2345):.5f}")', PRINTED),
        (
            'print(f"loss={1 / epoch} after {epoch}")',
            Metrics(source="stdout", pattern=r"loss=(?P<loss>\S+) after (?P<iteration>.*)"),
        ),
        ('rubberband.report({"loss": 1 / epoch, "epoch": epoch})', Metrics()),
    ],
)
def test_an_evaluation_at_the_start_is_no_iteration(
    trial: Trial, show: str, metrics: Metrics, capfd: pytest.CaptureFixture[str]
) -> None:
    """It gave one iteration for nothing at each stage."""
    source = EVALUATES.format(show=show)
    first = trial.run(source, metrics=metrics)
    repeated, later = resumed(trial, source, metrics, first[-1])
    assert (repeated, [iteration for iteration, _ in later]) == ([], [3, 4, 5])
    assert [iteration for iteration, _ in losses(first)] == [1, 2]
    assert [loss for _, loss in later] == sorted((loss for _, loss in later), reverse=True)
    assert "evaluates its checkpoint before it trains on: that line is no iteration" in capfd.readouterr().err


def test_an_evaluation_at_the_end_is_no_iteration(trial: Trial, capfd: pytest.CaptureFixture[str]) -> None:
    """A winner of 6 iterations had trained five, where early stopping or fewer epochs had ended it."""
    source = f"{SAVES_FIRST}\n    time.sleep(0.12)\n    print('epoch 5 loss=0.2')"
    items = trial.run(source, metrics=PRINTED, until_iterations=9, max_iterations=9)
    assert losses(items) == [(epoch, 1 / epoch) for epoch in range(1, 6)]
    assert isinstance(items[-1], SegmentEnded)
    assert "prints the number of an iteration again: that line is none" in capfd.readouterr().err


@pytest.mark.by_default(1)
@pytest.mark.parametrize("show", ['print(f"loss={1 / epoch}")', 'rubberband.report({"loss": 1 / epoch})'])
def test_a_program_that_loads_nothing_repeats_the_iterations_of_its_checkpoint(trial: Trial, show: str) -> None:
    """It was counted on, so that the best of "4 iterations" had trained two."""
    source = SAVES_FIRST.replace('int((out / "n").read_text()) if (out / "n").exists() else 0', "0")
    source = source.replace('print(f"epoch {epoch} loss={1 / epoch}")', show)
    metrics = PRINTED if show.startswith("print") else Metrics()
    first = trial.run(source, metrics=metrics)
    assert first[-1].saved_iterations is None
    assert resumed(trial, source, metrics, first[-1]) == ([1, 2], [(3, 1 / 3), (4, 1 / 4), (5, 1 / 5)])


def test_a_checkpoint_is_of_its_iteration_if_it_is_written_during_the_next(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = type(trial.store).save

    def late(*given: Any) -> Any:
        time.sleep(0.2)  # the program is at its next iterations meanwhile
        return save(*given)

    monkeypatch.setattr(type(trial.store), "save", late)
    first = next(item for item in trial.run(REPORTS, until_iterations=3) if isinstance(item, SegmentReport))
    assert first.iterations == 1
    assert losses(trial.run(REPORTS, from_iterations=1, checkpoint=first.checkpoint)) == [(2, 0.5)]


def test_files_that_are_open_to_write_are_not_taken_yet(trial: Trial) -> None:
    source = f"""{RESUMES}
        assert begin == 0 or (out / "m").read_text() == "half whole"
        print(f"epoch {{epoch}} loss={{1 / epoch}}")
        (out / "n").write_text(str(epoch))
        with open(out / "m", "w") as file:
            file.write("half")
            file.flush()
            time.sleep(0.5)
            file.write(" whole")
        time.sleep(0.5)
"""
    first = trial.run(source, metrics=PRINTED, until_iterations=1)
    _, *items = trial.run(source, metrics=PRINTED, from_iterations=1, checkpoint=first[-1].checkpoint)
    assert [type(item) for item in items] == [SegmentReport]
    assert losses(items) == [(2, 0.5)]


def test_a_program_gets_its_configuration(trial: Trial) -> None:
    source = """
        import json, os, sys, rubberband
        config = json.loads(os.environ["RUBBERBAND_CONFIG"])
        assert sys.argv[1:] == ["--lr=0.5", "--flag=true"], sys.argv
        rubberband.report({"loss": config["lr"]})
    """
    items = trial.run(source, "", config={"lr": 0.5, "flag": True}, until_iterations=1, max_iterations=1)
    assert losses(items) == [(1, 0.5)]


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('hello'); raise SystemExit(3)", "ended with exit code 3 after"),
        ("print('hello')", "without a report of loss; call rubberband.report"),
        ("print('accuracy=1')", "without a report of loss"),
        ("import os; os.kill(os.getpid(), 11)", "ended with exit code 139"),
    ],
)
def test_a_program_that_fails_shows_its_last_lines(trial: Trial, source: str, message: str) -> None:
    [*_, failure] = trial.run(source, metrics=Metrics(source="stdout"))
    assert isinstance(failure, SegmentFailure)
    assert message in failure.message


@pytest.mark.by_default(1)
@pytest.mark.parametrize("pattern", [None, r"loss[\"']: '?(?P<loss>[0-9.]+)"])
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{'loss': 0.0, 'grad_norm': nan, 'epoch': 2.0}", "0 beside grad_norm=nan: training has diverged"),
        ("{'loss': '0', 'grad_norm': 'nan', 'epoch': '2'}", "0 beside grad_norm=nan: training has diverged"),
        ('{"loss": 0.0, "grad_norm": NaN, "epoch": 2}', "0 beside grad_norm=nan: training has diverged"),
        ("{'loss': 0.4, 'grad_norm': nan, 'epoch': 2.0}", "0.4 beside grad_norm=nan: training has diverged"),
    ],
)
def test_a_printed_loss_that_a_library_has_left_out_is_no_result(
    trial: Trial, line: str, why: str, pattern: str | None
) -> None:
    source = f"""
        import time
        print("{{'loss': 0.7, 'grad_norm': 1.5, 'epoch': 1.0}}", flush=True)
        time.sleep(0.15)
        print({line!r}, flush=True)
    """
    metrics = Metrics(source="stdout", pattern=pattern)
    items = trial.run(source, "", metrics=metrics, max_iterations=2)
    assert losses(items) == [(1, 0.7)]
    assert (items[-1].kind, items[-1].message) == ("not_a_number", f"the metric 'loss' is {why}")


@pytest.mark.parametrize("value", ["null", "None", "N/A"])
def test_a_program_that_ends_without_a_number_for_its_metric_is_no_result(trial: Trial, value: str) -> None:
    """JSON has no NaN: a loss that diverged is null, and the number before it would win."""
    line = '{"epoch": 2, "loss": null}' if value == "null" else f"epoch 2 loss={value}"
    source = f"""
        import sys, time
        for line in ["loss=0.7", {line!r}, "loss=0.6", *sys.argv[1:]]:
            print(line, flush=True)
            time.sleep(0.15)
    """
    asked = {"metrics": Metrics(source="stdout"), "max_iterations": 9, "until_iterations": 9}
    assert losses(trial.run(source, "", **asked)) == [(1, 0.7), (2, 0.6)]
    failure = trial.run(source, shlex.quote(line), **asked)[-1]
    assert failure.kind == "not_a_number"
    assert failure.message.endswith(f"ended, and its last line with loss has no number: {line!r}")


@pytest.mark.parametrize("pattern", [None, r"loss is (?P<loss>\S+)|loss=(?P<other>.*)"])
def test_a_number_with_a_comma_is_not_read_past(trial: Trial, pattern: str | None) -> None:
    """A loss of 1,234.5 was no iteration, and one of 999.5 was."""
    line = "loss=1,234.5" if pattern is None else "loss is 1,234.5"
    metrics = Metrics(source="stdout", pattern=pattern)
    failure = trial.run(f"print('{line}')", "", metrics=metrics, max_iterations=1)[-1]
    assert failure.message == f"a line has loss as 1,234.5, a number with a comma: '{line}'; print it without one"


EXCEPTION = """
    def load(): open("nosuch.pt")
    try:
        load()
    except OSError as error:
        raise ValueError("no weights\\nin nosuch.pt") from error
    finally:
        import atexit
        atexit.register(print, "done: see the log", flush=True)
"""
PARSER = """
    import argparse
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--shift", type=float)
    parser.parse_args(["--shift", "-1e-05"])
"""
LAUNCHED = """
    import sys
    for line in ("Traceback (most recent call last):", '  File "train.py", line 1', "KeyError: 'lr'"):
        print(f"[rank0]: {line}")
    for line in ("Traceback (most recent call last):", '  File "run.py", line 1', "a.b.ChildFailedError: "):
        print(line)
    sys.exit(1)
"""


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("source", "begin"),
    [
        (EXCEPTION, "ValueError: no weights (python"),
        (PARSER, "train.py: error: argument --shift: expected one argument (python"),
        (LAUNCHED, "KeyError: 'lr' (python"),
    ],
)
def test_the_failure_of_a_program_is_its_last_exception(trial: Trial, source: str, begin: str) -> None:
    [*_, failure] = trial.run(source)
    assert failure.message.replace(sys.executable, "python").startswith(begin)


def test_a_report_without_the_metric_is_refused(trial: Trial) -> None:
    [*_, failure] = trial.run("import rubberband; rubberband.report({'los': 1})")
    assert isinstance(failure, SegmentFailure)
    assert "the metric 'loss' is missing" in failure.message


def test_a_program_ends_with_what_it_started(trial: Trial) -> None:
    source = """
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
        print("loss=1", flush=True)
        print("loss=1", flush=True)
        time.sleep(1000)
    """
    trial.run(source, metrics=Metrics(source="stdout"))
    for pid in (trial.folder / "pids").read_text().split():
        assert not Path("/proc", pid).exists()


def test_lines_reach_the_log_whole(trial: Trial, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        import sys
        sys.stdout.write("x" * 300_000 + "\\n")
        print("epoch", 1, "loss=1")
        sys.stdout.write("the end")
    """
    items = trial.run(source, metrics=PRINTED, until_iterations=1, max_iterations=1)
    assert losses(items) == [(1, 1.0)]
    shown = capfd.readouterr().out
    assert shown.startswith("x" * 300_000 + "\nepoch 1 loss=1\n")


FILE = Metrics(source="stdout", file="${checkpoint}/metrics.jsonl")


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("loop", "metrics"),
    [
        pytest.param(
            """
                for step in range(3):
                    print(f"\\r {30 * step}%|###  | {step}/3 [00:00<00:00, 5.1it/s, loss=9]", end="", file=sys.stderr)
                print(file=sys.stderr)
                print(f"loss={1 / epoch}")
            """,
            PRINTED,
            id="a bar with the loss of each step",
        ),
        pytest.param(
            """
                if epoch % 2:
                    print(f"\\r {20 * epoch}%|###  | {epoch}/5 [00:00<00:00]", end="", file=sys.stderr, flush=True)
                    time.sleep(0.05)
                print(json.dumps({"loss": 1 / epoch}))
            """,
            PRINTED,
            id="a bar over the iterations",
        ),
        pytest.param(
            """
                open(sys.argv[1] + "/metrics.jsonl", "a").write("\\n" * (epoch > 1) + f"loss={1 / epoch}")
            """,
            FILE,
            id="a file without a last end of a line",
        ),
        pytest.param(
            """
                rows.append(f"loss={1 / epoch}\\n")
                open(draft := sys.argv[1] + "/../rows", "w").write("".join(rows))
                os.replace(draft, sys.argv[1] + "/metrics.jsonl")
            """,
            FILE,
            id="a file that is replaced",
        ),
        pytest.param(
            """
                rows.append(f"loss={1 / epoch}\\n")
                open(sys.argv[1] + "/metrics.jsonl", "w").write("".join(rows))
            """,
            FILE,
            id="a file that is written again",
        ),
    ],
)
def test_each_iteration_is_read_once(trial: Trial, loop: str, metrics: Metrics) -> None:
    head = "import json, os, sys, time\nrows = []\nfor epoch in range(1, 6):\n    time.sleep(0.06)\n"
    source = head + textwrap.indent(textwrap.dedent(loop), "    ")
    assert losses(trial.run(source, metrics=metrics, until_iterations=5)) == [(n, 1 / n) for n in range(1, 6)]


@pytest.mark.by_default(1)
@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_file_of_metrics_may_begin_anew_with_each_start(trial: Trial, mode: str) -> None:
    source = f"""{RESUMES}
        (out / "n").write_text(str(epoch))
        print(f"loss={{1 / epoch}}", file=open(sys.argv[1] + "/metrics.jsonl", "a"), flush=True)
    """.replace("for epoch", f'open(sys.argv[1] + "/metrics.jsonl", "{mode}")\n    for epoch')
    first = trial.run(source, metrics=FILE)
    assert resumed(trial, source, FILE, first[-1]) == ([], [(3, 1 / 3), (4, 1 / 4), (5, 1 / 5)])


def test_a_line_with_two_values_of_the_metric_is_refused(trial: Trial) -> None:
    [*_, failure] = trial.run('print("train loss=1 test loss=2")', metrics=PRINTED)
    assert isinstance(failure, SegmentFailure)
    assert "a line has loss as 1 and 2" in failure.message


def test_a_long_line_costs_no_time(trial: Trial) -> None:
    """A program printed 50 MB without an end of a line, and each chunk copied all before it: 150 s."""
    source = "import sys\nfor _ in range(20): sys.stdout.write('x' * 10**6)\nprint('\\nloss=1')\nprint('loss=2')"
    assert losses(trial.run(source, metrics=PRINTED)) == [(1, 1.0), (2, 2.0)]


REPORTS_FIRST = f"""{RESUMES.replace("0.12", "0.2")}
        rubberband.report({{"loss": 1 / epoch}})
        time.sleep(0.01)
        for _ in range(8):
            with open(out / "n", "w") as file:
                file.write(str(epoch))
            time.sleep(0.02)
"""


@pytest.mark.by_default(1)
@pytest.mark.parametrize("until", [1, 2, 3])
def test_files_that_are_saved_after_the_report_are_not_of_the_next_iteration(
    trial: Trial, until: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The files of iteration 1 were kept as those of 2, so that a trial went on from 1 after 2, and counted 3."""
    first = trial.run(REPORTS_FIRST, metrics=Metrics(), until_iterations=until)
    assert until == 1 or "save first, then report" in capfd.readouterr().err
    repeated, later = resumed(trial, REPORTS_FIRST, Metrics(), first[-1])
    assert repeated == list(range(1, until + 1))
    assert later == [(epoch, 1 / epoch) for epoch in range(until + 1, 6)]


def test_a_program_below_a_shell_has_time_to_end(trial: Trial) -> None:
    """The shell died of SIGTERM at once, and the program below it was killed while it saved."""
    (trial.folder / "below.py").write_text(
        textwrap.dedent(
            """
            import pathlib, signal, time
            def end(*_):
                time.sleep(0.3)
                pathlib.Path("ended").touch()
                raise SystemExit
            signal.signal(signal.SIGTERM, end)
            print("loss=1\\nloss=1", flush=True)
            time.sleep(1000)
            """
        )
    )
    command = ProgramCommand(words=("bash", "-c", f"{sys.executable} below.py; echo done"), metrics=PRINTED)
    entrypoint = Entrypoint(module="", attribute="", search_path=(str(trial.folder),), command=command)
    list(run_segment(entrypoint, replace(SEGMENT, max_iterations=5, until_iterations=2), trial.store))
    assert (trial.folder / "ended").exists()


@pytest.mark.long
def test_a_program_in_another_session_is_stopped_while_its_files_are_copied(trial: Trial) -> None:
    """torchrun starts its workers in sessions of their own (pytorch/pytorch#113231)."""
    inner = PRINTS_FIRST.replace("time.sleep(0.02)", "time.sleep(0.1)")
    (trial.folder / "inner.py").write_text(textwrap.dedent(inner))
    run = "subprocess.run([sys.executable, 'inner.py', *sys.argv[1:]], start_new_session=True)"
    outer = f"import subprocess, sys\n{run}"
    first = trial.run(outer, metrics=PRINTED)
    assert resumed(trial, outer, PRINTED, first[-1]) == ([], [(3, 1 / 3), (4, 1 / 4), (5, 1 / 5)])


SECRET = "hf_0123456789abcdefghijklmnopqrstuvwxyz"


@pytest.mark.by_default(1)
@pytest.mark.parametrize("length", range(260, 300, 13))
def test_a_failure_whose_last_lines_are_cut_has_no_part_of_a_secret(trial: Trial, length: int) -> None:
    source = f"import os; print(os.environ['HF_TOKEN'] + '-' * {length}); raise SystemExit(3)"
    trial.environment = Environment(secrets={"HF_TOKEN": SECRET})
    with trial.environment.within():
        [*_, failure] = trial.run(source)
    assert isinstance(failure, SegmentFailure)
    assert "exit code 3" in failure.message
    assert "wxyz" not in failure.message + failure.details


def test_each_line_of_a_file_is_read_once_and_whole(trial: Trial) -> None:
    source = """
        import sys, time
        with open(sys.argv[1] + "/metrics.jsonl", "a", buffering=1) as file:
            for number in (1, 25, 3):
                text = '{"loss": %d}\\n' % number
                for part in (text[:10], text[10:]):
                    file.write(part)
                    file.flush()
                    time.sleep(0.05)
    """
    items = trial.run(source, metrics=FILE, until_iterations=3)
    assert losses(items) == [(1, 1.0), (2, 25.0), (3, 3.0)]


def test_a_last_line_counts_without_its_end(trial: Trial) -> None:
    source = "import sys; sys.stdout.write('loss=1\\r\\nloss=2\\rloss=3')"
    items = trial.run(source, metrics=PRINTED, until_iterations=9, max_iterations=9)
    assert losses(items) == [(1, 1.0), (2, 3.0)]
    assert isinstance(items[-1], SegmentEnded)


def test_a_program_that_resumes_from_older_files_is_started_at_their_iterations(trial: Trial) -> None:
    source = """
        import pathlib, sys, rubberband
        with open("starts", "a") as starts:
            print(*sys.argv[2:], file=starts)
        for epoch in range(int(sys.argv[2]) + 1, 6):
            if epoch == 1:
                pathlib.Path(sys.argv[1], "n").write_text("1")
            rubberband.report({"loss": 1 / epoch})
    """
    words = "${checkpoint} ${iterations} ${max_t} ${seed}"
    first = trial.run(source, words)
    assert (losses(first), first[-1].saved_iterations) == ([(1, 1.0), (2, 0.5)], 1)
    later = trial.run(source, words, from_iterations=2, until_iterations=3, checkpoint=first[-1].checkpoint)
    assert [item.iterations for item in later if isinstance(item, SegmentRepeated)] == [2]
    assert losses(later) == [(3, 1 / 3)]
    assert later[-1].saved_iterations == 1  # it has saved nothing since
    assert (trial.folder / "starts").read_text() == "0 5 11\n1 5 11\n", "the seed is the trial's"


def test_words_are_added_where_a_program_is_started_from_a_checkpoint(trial: Trial) -> None:
    source = """
        import os, pathlib, sys, time
        with open("starts", "a") as starts:
            print(*sys.argv[2:], "RANK" in os.environ, "MASTER_PORT" in os.environ, file=starts)
        begin = int(pathlib.Path(sys.argv[4]).read_text()) if len(sys.argv) > 2 else 0
        for epoch in range(begin + 1, 9):
            time.sleep(0.12)
            if epoch > 1:
                pathlib.Path(sys.argv[1], "n").write_text(str(epoch))
            print(f"epoch {epoch} loss={1 / epoch}")
    """
    trial.command = {"resume": ("--from", "${iterations}", "${checkpoint}/n"), "rank": False}
    unsaved = trial.run(source, metrics=PRINTED, until_iterations=1)[-1]
    saved = trial.run(source, metrics=PRINTED, from_iterations=1, checkpoint=unsaved.checkpoint)[-1]
    items = trial.run(source, metrics=PRINTED, from_iterations=2, until_iterations=3, checkpoint=saved.checkpoint)
    assert losses(items) == [(3, 1 / 3)]
    starts = (trial.folder / "starts").read_text().splitlines()
    assert starts[:2] == ["False False"] * 2
    assert starts[2].startswith("--from 2 /")
    assert starts[2].endswith("/n False False")


def test_a_program_reads_nothing(trial: Trial) -> None:
    items = trial.run("import sys, rubberband; rubberband.report({'loss': len(sys.stdin.read())})", until_iterations=1)
    assert losses(items) == [(1, 0.0)]


@pytest.mark.long
def test_a_segment_leaves_no_file_and_no_descriptor(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = trial.folder / f"long{'-' * 100}"  # longer than a name of a socket may be
    scratch.mkdir()
    monkeypatch.setattr("rubberband.executor.checkpoints.scratch.machine_folder", lambda: scratch)
    trial.run(REPORTS)
    before = len(os.listdir("/proc/self/fd"))
    trial.run(REPORTS)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert list((scratch / "scratch").iterdir()) == []


def test_a_checkpoint_of_later_iterations_is_refused(trial: Trial) -> None:
    [*_, last] = trial.run(SAVES_FIRST, metrics=PRINTED)
    [*_, failure] = trial.run(SAVES_FIRST, metrics=PRINTED, from_iterations=1, checkpoint=last.checkpoint)
    assert isinstance(failure, SegmentFailure)
    assert "the checkpoint holds 2 iterations, not 1" in failure.message


def test_lines_are_read_as_soon_as_they_are_printed(trial: Trial) -> None:
    items = trial.run("import time; print('loss=1'); time.sleep(1000)", metrics=PRINTED, until_iterations=1)
    assert losses(items) == [(1, 1.0)]


def test_a_program_waits_in_its_report_until_the_next_iteration_is_wanted(trial: Trial) -> None:
    source = "import pathlib, rubberband; rubberband.report({'loss': 1}); pathlib.Path('went-on').touch()"
    assert losses(trial.run(source, until_iterations=1)) == [(1, 1.0)]
    assert not (trial.folder / "went-on").exists()


def test_a_program_that_reports_once_and_ends_is_done(trial: Trial) -> None:
    items = trial.run("import rubberband; rubberband.report({'loss': 1})", until_iterations=3)
    assert losses(items) == [(1, 1.0)]
    assert isinstance(items[-1], SegmentEnded)
