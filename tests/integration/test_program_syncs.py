"""Programs through two SYNCs on real local instances: the winner is what the program does by hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.builders.command_line import CommandLine

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(300)]

TRAINS = """
import os, pathlib, sys, time
lr, epochs, out = float(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
FILE, epoch, x = out / "state", 0, 0.0

def load():
    global epoch, x
    if FILE.exists():
        n, text = FILE.read_text().split()
        epoch, x = int(n), float(text)
    return epoch

def train():
    global epoch, x
    time.sleep({epoch_s})
    epoch, x = epoch + 1, x - lr * (x - 2)
    with open("trained", "a") as file:
        print(lr, epoch, os.environ.get("PYTHONHASHSEED"), file=file)

def save():
    draft = out / "draft"
    draft.write_text(f"{{epoch}} {{x!r}}")
    draft.replace(FILE)

def loss():
    return (x - 2) ** 2
"""
LOOP = """
while epoch < epochs:
    train()
    save()
    print(f"epoch {epoch}/{epochs} loss={loss()}")
"""
EVALUATES = f"""
if load():
    print(f"epoch {{epoch}}/{{epochs}} loss={{loss()}}")
{LOOP}
"""
SAVES_LATE = """
FILE = pathlib.Path(os.environ["RUBBERBAND_CHECKPOINT"], "state")
load()
while epoch < epochs:
    train()
    print(f"loss={loss()}")
    time.sleep({late_s})
    FILE.write_text(f"{epoch} {x!r}")
"""
COUNTS_EACH_START = """
begin = load()
while epoch < epochs:
    train()
    save()
    print(f"epoch {epoch - begin} loss={loss()}")
"""
SAVES_AT_ITS_END = f"""
load()
{LOOP}
time.sleep(0.3)
(out / "final").write_text(f"{{x!r}}")
"""


@pytest.mark.parametrize(
    ("source", "epoch_s", "repeats"),
    [
        pytest.param(EVALUATES, 0.3, False, id="evaluates what it has loaded"),
        pytest.param(EVALUATES.replace("epoch {epoch}/{epochs} ", ""), 0.3, False, id="evaluates without a number"),
        pytest.param(SAVES_LATE.replace("{late_s}", "0.03"), 0.3, False, id="saves 30 ms after its line"),
        pytest.param(SAVES_LATE.replace("{late_s}", "0.09"), 2.4, False, id="saves the later the longer it trains"),
        pytest.param(COUNTS_EACH_START, 0.3, False, id="counts from 1 at each start"),
        pytest.param(LOOP, 0.3, True, id="loads nothing"),
        pytest.param(SAVES_AT_ITS_END, 0.3, False, id="saves at its end"),
    ],
)
def test_the_winner_is_what_the_program_does_by_hand(
    command_line: CommandLine, source: str, epoch_s: float, repeats: bool
) -> None:
    folder = command_line.folder
    program = folder / "train.py"
    program.write_text(TRAINS.format(epoch_s=epoch_s) + source)
    settings = [
        f"entrypoint={{command: '{sys.executable} train.py ${{lr}} ${{max_t}} ${{checkpoint}}', metrics: stdout}}",
        "search.space={lr: {type: uniform, lower: 0.1, upper: 0.9}}",
        "search.scheduler={type: sha, num_samples: 4, max_t: 4, grace_period: 1, reduction_factor: 2}",
        "search.metric=loss",
        "search.mode=min",
        f"profile.seconds_per_iteration={{1: {epoch_s}}}",
        "resources.max_instances=1",
    ]
    command_line("run", "sleepy.yaml", "--no-check", *[word for setting in settings for word in ("-s", setting)])
    best = command_line.result().best
    assert best is not None
    assert best.iterations == 4

    lr = best.config["lr"]
    starts = [line.split() for line in (folder / "trained").read_text().splitlines()]
    assert {seed for *_, seed in starts} == {"3"}, "it follows from the experiment's seed at every start"
    trained = [epoch for other, epoch, _ in starts if other == str(lr)]
    assert (trained.count("1"), trained.count("4")) == (3 if repeats else 1, 1)

    place = folder / "by hand"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "train.py", str(lr), "4", str(place)],
        cwd=folder,
        env={**os.environ, "RUBBERBAND_CHECKPOINT": str(place)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert best.metrics["loss"] == float(done.stdout.split("loss=")[-1])
    command_line("best", "sleepy", "--out", "best")
    kept = {path.name: path.read_text() for path in (folder / "best").iterdir()}
    assert {path.name: path.read_text() for path in place.iterdir()} == kept
    assert command_line.nothing_left()
