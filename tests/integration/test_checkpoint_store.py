"""Checkpoint stores that go away, and checkpoints that are damaged, on real Ray nodes through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubberband.executor import Result
from tests.builders.command_line import PATIENCE_S, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


def store_of(command_line: CommandLine) -> Path:
    return command_line.home / "experiments" / "sleepy" / "checkpoints"


def is_in_stage_1(result: Result) -> bool:
    return sum(trial.iterations >= 7 for trial in result.trials) == 2


def kept(store: Path, trial: int) -> list[Path]:
    """A trial's checkpoints, the latest first."""
    return sorted(store.glob(f"trial-{trial:04d}-*.ckpt"), reverse=True)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_after_kill_9_an_unavailable_store_is_waited_for_and_damaged_checkpoints_cost_their_part(
    command_line: CommandLine, tmp_path: Path
) -> None:
    driver = command_line.start("run", "sleepy.yaml", "-s", "resources.lease=8s")
    command_line.wait_for(driver, is_in_stage_1)
    driver.kill()
    driver.communicate()
    assert command_line.nothing_left(within_s=25.0)
    cut, store = command_line.result(), store_of(command_line)

    store.rename(tmp_path / "unmounted")
    for found in ("No such file or directory", "found no file rubberband-store"):
        text = command_line.refused("resume", "sleepy", exit_code=1)
        assert str(store) in text
        assert found in text
        assert text.endswith("mount or restore it, then continue with `rubberband resume sleepy`")
        assert command_line.result() == cut
        if not store.exists():
            store.mkdir()
    assert list(store.iterdir()) == []
    store.rmdir()
    (tmp_path / "unmounted").rename(store)

    flipped, started_anew = (trial for trial in cut.trials if trial.iterations >= 7)
    flip_a_bit(kept(store, flipped.trial)[0])
    latest, before = kept(store, started_anew.trial)[:2]
    latest.write_bytes(latest.read_bytes()[:-1])
    before.unlink()
    output, _ = command_line("resume", "sleepy")
    result = command_line.result()
    assert result.outcome == "done"
    assert {(back.trial, back.from_iterations, back.to_iterations) for back in result.setbacks} == {
        (flipped.trial, flipped.iterations, flipped.iterations - 1),
        (started_anew.trial, started_anew.iterations, started_anew.iterations - 1),
        (started_anew.trial, started_anew.iterations - 1, 0),
    }
    assert [trial.failures for trial in result.trials] == [0] * 4
    for trial in (flipped.trial, started_anew.trial):
        assert [point[1] for point in result.trials[trial].curve] == list(range(1, 15))
    assert (
        f"trial {started_anew.trial} went back from iteration {started_anew.iterations - 1} to its beginning" in output
    )
    assert command_line.nothing_left()


def test_an_empty_folder_in_the_place_of_the_store_stops_a_run_and_fails_no_trial(
    command_line: CommandLine, tmp_path: Path
) -> None:
    store = store_of(command_line)
    with command_line.start("run", "sleepy.yaml") as driver:
        command_line.wait_for(driver, is_in_stage_1)
        store.rename(tmp_path / "unmounted")
        store.mkdir()
        _, errors = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 1
    assert "Traceback" not in errors
    remedy = "mount or restore it, then continue with `rubberband resume sleepy`"
    assert f"found no file rubberband-store; {remedy}" in errors
    assert command_line.nothing_left()
    assert list(store.iterdir()) == []
    text, _ = command_line("report", "sleepy")
    assert text.splitlines()[0].startswith(f"sleepy: stopped: the checkpoint store {store} is not the original one")
    store.rmdir()
    (tmp_path / "unmounted").rename(store)
    command_line("resume", "sleepy")
    result = command_line.result()
    assert (result.outcome, result.setbacks) == ("done", ())
    assert [trial.failures for trial in result.trials] == [0] * 4
    assert command_line.nothing_left()
