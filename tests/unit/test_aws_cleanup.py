"""What a dead driver left on EC2 is ended, by its own records; what others drive is left alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rubberband.cloud.aws.cleanup import clean_up
from rubberband.cloud.provider import CleanedUp
from rubberband.cloud.ray_head.instance import lock
from rubberband.commands.care import cleanup as cleanup_command
from tests.builders.fake_ec2 import Killed, World
from tests.ec2 import Fault


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An account with a driver's directory."""
    return World(tmp_path / "experiments" / "digits" / "local")


def cleaned(world: World, *others: Path, experiment: str | None = None) -> CleanedUp:
    return clean_up(
        [world.directory, *others],
        lambda _region: world.fake.session("driver"),
        experiment,
        clock=lambda: world.now,
        sleep=world.sleep,
    )


def test_where_there_is_no_run_aws_is_not_asked(world: World) -> None:
    assert cleaned(world) == CleanedUp()
    assert world.fake.calls == []


def test_instances_of_a_dead_driver_are_ended(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    driver.launch("b")
    driver.release("b")
    found = cleaned(world)
    assert [(one.experiment, one.instance) for one in found.ended] == [("digits", "a")]
    assert found.troubles == ()
    assert world.living == []
    assert cleaned(world).ended == ()


def test_a_sweep_with_credentials_of_another_account_says_so_and_ends_no_record(world: World) -> None:
    world.driver(account=world.fake.world.account).launch("a")
    world.sleep(400.0)
    other = World(world.directory)
    other.now, other.fake.world.account = world.now, "999999999999"
    found = cleaned(other)
    assert found.ended == ()
    (trouble,) = found.troubles
    assert f"that is in account {world.fake.world.account}, and these credentials are of 999999999999" in trouble
    assert [str(one).partition(" ")[0] for one in cleaned(world).ended] == ["a"]


def test_an_instance_that_ended_itself_is_not_reported_as_ended_by_sweep(world: World) -> None:
    world.driver().launch("a")
    world.sleep(2000.0)
    assert cleaned(world) == CleanedUp()
    status = world.look(world.driver())["a"]
    assert "lease" in status.reason


@pytest.mark.parametrize("took_effect", [False, True])
def test_a_driver_killed_while_it_asked_leaves_nothing(world: World, took_effect: bool) -> None:
    def kill(call: object) -> Fault | None:
        asks = getattr(call, "operation", "") == "RunInstances"
        return Fault(error=Killed(), took_effect=took_effect, visible_after_s=250.0) if asks else None

    world.fake.fault = kill
    with pytest.raises(Killed):
        world.driver().launch("a")
    world.fake.fault = None
    found = cleaned(world)
    assert world.living == []
    assert [str(one).partition(" ")[0] for one in found.ended] == (["a"] if took_effect else [])
    assert sum(call.operation == "RunInstances" for call in world.fake.calls) == 1


@pytest.mark.parametrize("broken", ["run.json", "instances/a.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"what": "is this"}'])
def test_a_broken_record_is_reported_and_keeps_no_other_run_from_being_swept(
    world: World, tmp_path: Path, broken: str, content: str
) -> None:
    world.driver().launch("a")
    (world.directory / "ec2" / "run-1" / broken).write_text(content)
    world.directory, world.run = tmp_path / "experiments" / "other" / "local", "run-2"
    world.driver().launch("a")
    found = cleaned(world, tmp_path / "experiments" / "digits" / "local")
    assert len(found.ended) == 1
    assert f"{broken} cannot be read" in "; ".join(found.troubles)


def test_instances_of_a_living_driver_are_left_alone(world: World) -> None:
    world.driver().launch("a")
    with lock(world.directory / "driver"):
        assert cleaned(world).ended == ()
    assert world.living == ["a"]


def test_sweep_ends_only_the_named_experiment_of_an_owner(world: World, tmp_path: Path) -> None:
    other = World(tmp_path / "experiments" / "other" / "local", experiment="other", run="run-2")
    other.fake, other.machines = world.fake, world.machines
    other.driver().launch("x")
    world.driver().launch("a")
    assert [str(one).partition(" ")[0] for one in cleaned(world, other.directory, experiment="other").ended] == ["x"]
    assert world.living == ["a"]


def test_files_outside_known_folders_are_reported_and_left(world: World, tmp_path: Path) -> None:
    elsewhere = World(tmp_path / "another machine", run="run-2")
    elsewhere.fake, elsewhere.machines = world.fake, world.machines
    elsewhere.driver().launch("x")
    world.driver().launch("a")
    found = cleaned(world)
    assert found.notes[0].startswith("not touched: x of digits (i-")
    assert world.living == ["x"]


def test_trouble_is_reported_if_something_may_run_and_noted_if_not(world: World) -> None:
    driver = world.driver()
    driver.launch("a")
    world.fake.fault = lambda call: Fault.timeout(took_effect=False)
    assert "does not answer" in cleaned(world).troubles[0]
    world.fake.fault = None
    driver.close()
    world.fake.fault = lambda call: Fault.timeout(took_effect=False)
    found = cleaned(world)
    assert found.troubles == ()
    assert "does not answer" in found.notes[0]


def test_the_command_sweeps_ec2_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    world = World(tmp_path / "experiments" / "digits" / "local", now=time.time())
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    monkeypatch.setattr("rubberband.cloud.aws.calls.open_aws", lambda _region: world.fake.session("driver"))
    app = typer.Typer()
    app.command()(cleanup_command)
    assert CliRunner().invoke(app, []).output == "nothing was left behind\n"
    world.driver().launch("a")
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    assert "ended a of digits (i-" in result.output
    assert world.living == []
