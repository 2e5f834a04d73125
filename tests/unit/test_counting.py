"""Which lines of a program are new iterations, after a start from its checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rubberband.executor.training.programs.counting import Counting, ReadFiles, Restart, Seen
from rubberband.values.metric_lines import metrics_in, numbers_in


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("epoch 3 loss=1", {"epoch": 3}),
        ("Epoch: 3, loss: 1", {"epoch": 3}),
        ("Epoch [3/10] Step [20/90] loss 1", {"epoch": 3, "step": 20}),
        ("[Epoch 3/10] [Batch 7/90] loss: 1", {"epoch": 3, "batch": 7}),
        ("ep 3 | loss: 1 | it 40", {"epoch": 3, "iteration": 40}),
        ("step 250: train loss 1.9, val loss 2.0", {"step": 250}),
        ('{"epoch": 3, "loss": 1, "global_step": 7}', {"epoch": 3, "step": 7}),
        ("{'eval_loss': 0.5, 'epoch': 1.5}", {"epoch": 1.5}),
        ("epoch 5 loss=1 (best 0.5 at best epoch 3)", {"epoch": 5}),
        ("total_step=90 step=3 loss=1", {"step": 3}),
        ("epochs: 10 loss=1", {}),
        ("batch: 32 loss=1", {}),
        ("loss=1 time/step 0.35 step: 0.35s step=12ms", {}),
        ("loss=1 lr step 1,000", {}),
    ],
)
def test_numbers_of_iterations_are_read(line: str, numbers: dict[str, float]) -> None:
    assert numbers_in(line) == numbers


def test_a_pattern_may_name_the_number_of_the_iteration() -> None:
    pattern = re.compile(r"step \d+, after (?P<iteration>\d+): loss (?P<loss>\S+)")
    assert numbers_in("step 9, after 3: loss 0.5", pattern) == {"iteration": 3}
    assert numbers_in("step 9: no loss", pattern) == {}


def counted(*starts: list[str], has_read: bool | None = True, held: int | None = None) -> tuple[list[str], Restart]:
    """Return the lines of the last start that are new iterations, and what the program does at it.

    A checkpoint has all iterations of the starts before, or `held` of those of the first.
    """
    iterations, kept = 0, None
    for number, lines in enumerate(starts):
        counting, new = Counting("loss"), []
        if kept is not None:
            counting.restore(json.loads(json.dumps(kept)))
        for line in lines:
            if counting.is_new(Seen(metrics_in(line), numbers_in(line)), iterations, lambda: has_read):
                new.append(line)
                if number or held is None or len(new) == held:
                    kept = counting.kept()
        iterations += len(new) if held is None or number else held
    return new, counting.restart


def lines(begin: int, end: int, *, word: str = "epoch", seed: float = 0.0, own: int | None = None) -> list[str]:
    """Return lines of iterations; their numbers begin with `own`."""
    own = begin if own is None else own
    return [f"{word} {own + n - begin} loss={1 / (n + 1.2345 + seed):.4f}".strip() for n in range(begin, end + 1)]


def bare(begin: int, end: int, seed: float = 0.0) -> list[str]:
    return [line.split()[-1] for line in lines(begin, end, seed=seed)]


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("last", [1, 3])
def test_a_program_that_goes_on_is_counted_on(begin: int, last: int) -> None:
    assert counted(lines(begin, last), more := lines(last + 1, last + 2)) == (more, "")
    assert counted(bare(begin, last), more := bare(last + 1, last + 2), has_read=None) == (more, "")


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("has_read", [True, None])
def test_an_evaluation_at_the_start_is_no_iteration(last: int, has_read: bool | None) -> None:
    for make in (lines, bare):
        again, more = make(last, last), make(last + 1, last + 2)
        assert counted(make(1, last), again + more, has_read=has_read) == (more, "evaluates")
    rounded = lines(last, last, seed=1e-3)  # on a GPU
    if last > 1:
        assert counted(lines(1, last), rounded + lines(last + 1, 5), has_read=has_read)[0] == lines(last + 1, 5)
    timed = [f"{line} time=3.21s seconds={n}" for n, line in enumerate([*bare(1, last), *bare(last, 5)])]
    assert counted(timed[:last], timed[last:], has_read=has_read)[0] == timed[last + 1 :]
    fixed = lines(last, last, own=1)  # which prints epoch 1 whatever it has loaded
    assert counted(lines(1, last), fixed + lines(last + 1, 5), has_read=has_read)[0] == lines(last + 1, 5)


def test_steps_that_skip_count_by_line_and_an_evaluation_of_the_last_one_does_not() -> None:
    first = [f"step {step}: val loss: {3 - step / 333:.4f}" for step in (0, 250, 500)]
    later = [f"step {step}: val loss: {3 - step / 333:.4f}" for step in (500, 750, 1000)]
    assert counted(first, later) == (later[1:], "evaluates")
    assert counted(first, later[1:]) == (later[1:], "")


@pytest.mark.parametrize("make", [lines, bare])
@pytest.mark.parametrize("seed", [0.0, 1e-3])
@pytest.mark.parametrize("last", [1, 3])
def test_a_program_that_reads_none_of_its_files_begins_again(make: object, seed: float, last: int) -> None:
    assert callable(make)
    found = counted(make(1, last), make(1, 5, seed=seed), has_read=False)
    assert found == (make(last + 1, 5, seed=seed), "again")


@pytest.mark.parametrize("make", [lines, bare])
def test_a_program_that_prints_its_first_line_again_begins_again(make: object) -> None:
    assert callable(make)
    assert counted(make(1, 3), make(1, 5)) == (make(4, 5), "again")


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_numbers_that_begin_again_at_each_start_are_counted_on(begin: int, last: int) -> None:
    first, later = lines(1, last, own=begin), lines(last + 1, last + 2, own=begin)
    assert counted(first, later) == (later, "numbers")
    assert counted(first, later, lines(last + 3, 9, own=begin)) == (lines(last + 3, 9, own=begin), "numbers")


def test_files_that_are_older_than_was_thought_are_no_new_iterations() -> None:
    """Those of the best model, beside a log of each epoch."""
    assert counted(lines(1, 4), lines(3, 6)) == (lines(5, 6), "again")


def test_iterations_after_the_checkpoint_are_new_at_the_next_start() -> None:
    assert counted(lines(1, 4), lines(3, 6), held=2) == (lines(3, 6), "")


def test_numbers_that_do_not_rise_are_none_of_iterations() -> None:
    fixed = [f"epoch 7 {line}" for line in bare(1, 9)]
    assert counted(fixed[:3], fixed[3:]) == (fixed[3:], "")
    inner = [f"epoch {epoch} batch {batch} loss=0.{epoch}{batch}731" for epoch in (1, 2, 3) for batch in (1, 2)]
    assert counted(inner[:3], inner[3:]) == (inner[3:], "")
    assert counted(inner[:3], inner, has_read=False) == (inner[3:], "again")


def test_a_number_again_at_the_end_is_no_iteration() -> None:
    """The Trainer of Hugging Face evaluates the last epoch, or the best one, once more."""
    first = lines(1, 4)
    assert counted([*first, first[3], "epoch 2 loss=0.3171"]) == (first, "")
    assert counted(first, [*lines(5, 6), "epoch 6 loss=0.3171"]) == (lines(5, 6), "")
    assert counted(folds := [*first, *lines(1, 4, seed=1e-3)]) == (folds, "")
    assert counted(two := [lines(1, 4)[n // 2] for n in range(8)]) == (two, ""), "numbers that do not rise at first"
    assert counted(steps := [f"step {n} loss={n / 7}" for n in (1, 3, 5, 2, 4, 3, 2, 6)])[0] == [*steps[:3], *steps[6:]]


@pytest.mark.parametrize("values", [["0.5", "0.5", "0.5", "0.4"], ["0.1", "0.5", "0.5", "0.4"]])
def test_metrics_that_are_equal_by_chance_are_iterations(values: list[str]) -> None:
    found = [f"loss={value}" for value in values]
    assert counted(found[:2], found[2:]) == (found[2:], "")
    level = [f"loss={value}" for value in ("0.69315", "0.69315", "0.69315", "0.5")]
    assert counted(level[:2], level[2:]) == (level[2:], "")


def test_a_program_has_read_its_files_if_it_has_read_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "below").mkdir(parents=True)
    for name in ("log", "below/state"):
        (folder / name).write_text("content")
    read = ReadFiles(folder, tmp_path / "links", folder / "log")
    assert not read()
    (folder / "log").read_text()
    list(folder.iterdir())
    assert not read()
    (folder / "below/state").read_text()
    (folder / "below/new").write_text("new")
    (folder / "below/new").replace(folder / "below/state")  # as a program saves
    assert read()
    assert ReadFiles(tmp_path / "nothing", tmp_path / "no links", None)() is None


@pytest.mark.parametrize(
    ("metric", "line", "is_new"),
    [
        ("val_loss", "step 0: val_loss 4.2", False),
        ("eval/loss", "iter 0 eval/loss=4.2", False),
        ("loss", "step 0: loss 4.2", True),  # of the first batch
        ("val_loss", "epoch 0: val_loss 4.2", True),  # of the first epoch
        ("val_loss", "step 20: val_loss 4.2", True),
        ("val_loss", "val_loss 4.2", True),
    ],
)
def test_an_evaluation_before_any_step_is_no_iteration(metric: str, line: str, is_new: bool) -> None:
    counting = Counting(metric)
    for expected, each in ((is_new, line), (True, re.sub(r" 0\b", " 40", line))):
        assert counting.is_new(Seen({metric: 4.2}, numbers_in(each)), 0, lambda: None) is expected


def test_an_evaluation_of_the_first_checkpoint_is_no_iteration_after_one_at_step_0() -> None:
    counting = Counting("val_loss")
    begun = [counting.is_new(Seen({"val_loss": 4 - step / 20}, {"step": step}), 0, lambda: None) for step in (0, 20)]
    again = Counting("val_loss")
    again.restore(counting.kept())
    resumed = [again.is_new(Seen({"val_loss": 3.1 - step / 90}, {"step": step}), 1, lambda: True) for step in (20, 40)]
    assert (begun, resumed) == ([False, True], [False, True])
