"""The commands, and both clients, against a real service with real processes of experiments on the virtual provider."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

import rubberband
from rubberband.cli import app
from rubberband.client.asynchronous import AsyncClient
from rubberband.client.client import Client
from rubberband.errors import InfeasibleError, InputError, NameTakenError, RubberbandError
from tests.builders.server_process import serving
from tests.builders.service_runs import experiment

Command = Callable[..., Result]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("service")) as server:
        yield server.address


@pytest.fixture
def command(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs a command that asks the service; its home has nothing."""
    monkeypatch.setenv("RUBBERBAND_SERVER", address)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))

    def run(*words: str, answer: str | None = None) -> Result:
        return CliRunner().invoke(app, list(words), input=answer)

    return run


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    """Writes the file of an experiment."""

    def write(name: str) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(experiment(name).to_words()))
        return str(path)

    return write


@pytest.mark.long
def test_an_experiment_is_submitted_watched_and_reported(command: Command, file: Callable[[str], str]) -> None:
    submitted = command("submit", file("watched"), "--watch")
    assert submitted.exit_code == 0, submitted.output
    assert submitted.stdout.startswith("watched\n")
    assert "watched: done" in submitted.output
    listed = json.loads(command("ps", "-o", "json").stdout)["experiments"]
    assert [(row["name"], row["state"]) for row in listed if row["name"] == "watched"] == [("watched", "done")]
    status = json.loads(command("status", "watched", "-o", "json").stdout)
    report = json.loads(command("report", "watched", "-o", "json").stdout)
    assert status["summary"]["cost_usd"] == pytest.approx(report["actual_cost_usd"])
    assert status["summary"]["best_trial"] == report["best"]["trial"]
    printed = command("report", "watched")
    assert "Stages, planned and actual" in printed.stdout
    assert "done: best" in command("logs", "watched", "--process").stdout


def test_a_refusal_of_the_service_is_the_local_error(address: str, file: Callable[[str], str]) -> None:
    path = file("twice")
    with Client(address) as client:
        client.submit(path)
        with pytest.raises(NameTakenError, match="'twice'"):
            client.submit(path)
        with pytest.raises(InfeasibleError) as caught:
            client.submit(path, overrides=["name=hasty", "constraints.deadline=1s"])
        assert caught.value.shortest_jct_s > 1.0
        with pytest.raises(InputError, match="not allowed here"):
            client.submit(path, overrides=["name=code", "entrypoint=os:system"])
        with pytest.raises(InputError, match="not found"):
            client.experiment("nothing")
        assert "hasty" not in [view["name"] for view in client.experiments()]


def test_limits_are_shown_before_they_are_granted(command: Command, file: Callable[[str], str], address: str) -> None:
    with Client(address) as client:
        client.submit(file("poor"), overrides=["constraints.max_cost=1000"])
        client.wait("poor")
    refused = command("extend", "poor", "--deadline", "100h", answer="n\n")
    assert isinstance(refused.exception, RubberbandError), "it is done, and cannot be extended"
    assert command("extend", "poor").exit_code != 0
    for steered in ("cancel", "resume"):
        assert "'poor' is done" in str(command(steered, "poor").exception)


def test_the_estimate_of_the_service_is_that_of_the_command_line(
    command: Command, file: Callable[[str], str], address: str
) -> None:
    path = file("same")
    here = json.loads(command("estimate", path, "-o", "json").stdout)
    with Client(address) as client:
        there = client.plan(path)
        assert client.stored_plan(there["id"]) == there
        rows = there["options"]
        assert [row["scheduler"] for row in rows if row.get("pending")] == ["asha"]
        there["options"] = [client.plan_option(there["id"]) if row.get("pending") else row for row in rows]
    known = there.pop("id")
    assert known
    assert here | {"planning_s": 0.0} == there | {"planning_s": 0.0}


def test_events_of_a_run_are_streamed_in_order(address: str, file: Callable[[str], str]) -> None:
    async def story() -> list[int]:
        async with AsyncClient(address) as client:
            await client.submit(file("streamed"))
            places = []
            async for event in client.events("streamed"):
                if event["seq"] is not None:
                    places.append(event["seq"])
                if event["kind"] == "state" and event["data"]["state"] == "done":
                    return places
        raise AssertionError("the stream does not end")

    places = asyncio.run(story())
    assert places == list(range(len(places)))
    assert len(places) > 20


def test_leaving_the_events_leaves_nothing_behind(
    address: str, command: Command, file: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    command("submit", file("left"))

    async def look() -> list[int]:
        async with AsyncClient(address) as client:
            kept = client.events("left")
            firsts = [await anext(kept)]
            for _ in range(2):
                async for event in client.events("left"):
                    firsts.append(event)
                    break
            return [event["id"] for event in firsts]

    assert len(set(asyncio.run(look()))) == 1
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_without_a_service_the_commands_are_about_this_machine(
    command: Command, file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rubberband.tune(experiment=experiment("here"))
    assert "here" not in command("ps").stdout
    assert "here" in command("ps", "--server", "local").stdout
    monkeypatch.delenv("RUBBERBAND_SERVER")
    assert "here: done" in command("status", "here").stdout
    assert "here is done: it is over" in command("cancel", "here").output
    gone = command("ps", "--server", "http://127.0.0.1:9")
    assert "does not answer" in str(gone.exception)


@pytest.mark.long
def test_an_experiment_is_labelled_archived_and_deleted(command: Command, file: Callable[[str], str]) -> None:
    assert command("submit", file("cared"), "--watch").exit_code == 0

    def listed(*options: str) -> list[str]:
        found = json.loads(command("ps", "-o", "json", *options).stdout)["experiments"]
        return [row["name"] for row in found if row["name"] == "cared"]

    said = command("tag", "cared", "+Vision", "-old", "--note", "the <b>baseline</b>")
    assert said.stdout == "tags      vision\nnote      the <b>baseline</b>\n"
    assert listed("--tag", "vision", "--search", "baseline") == ["cared"]
    assert command("tag", "cared", "--archive").exit_code == 0
    assert (listed(), listed("--archived")) == ([], ["cared"])
    looked = command("rm", "cared", answer="n\n")
    assert "cared: deletes its journal, logs, report and " in looked.stderr
    assert listed("--archived") == ["cared"]
    assert "cared: deleted" in command("rm", "cared", "--yes").stderr
    assert listed("--archived") == []
    refused = command("rm", "cared", "--yes").exception
    assert isinstance(refused, InputError)
    assert "experiment 'cared' not found" in str(refused)
