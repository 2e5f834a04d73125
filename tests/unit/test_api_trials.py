"""One trial in REST: its place, its gangs and its checkpoint; and lines of logs that are searched for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import rubberband
from rubberband import cli
from rubberband.api.security import Tokens
from rubberband.api.store.schema import SCOPES
from rubberband.errors import InputError
from rubberband.executor import CheckpointRef, make_store, trial_files
from rubberband.executor.checkpoints.folders import pack, write_archive
from rubberband.executor.logs.pages import Wanted, page
from rubberband.executor.result.parts import ArtifactResult, KeptCheckpoint
from rubberband.states import ExperimentState
from tests.builders.fake_runs import FakeService, fake_service
from tests.builders.results import FAULTS, a_result, cut_short

ONE = "/v1/experiments/one/trials"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path) as made:
        made.add("one")
        made.runs.results["one"] = a_result(faults=FAULTS)
        yield made


def trial(service: FakeService, number: int) -> dict[str, Any]:
    found: dict[str, Any] = service.client.get(f"{ONE}/{number}").json()
    return found


def test_the_shares_of_all_trials_are_the_bill(service: FakeService) -> None:
    result = service.runs.results["one"]
    every = [trial(service, number) for number in range(len(result.trials))]
    assert math.fsum(one["cost_usd"] for one in every) == pytest.approx(result.actual_cost_usd)
    held_s = math.fsum(use.end_s - use.start_s for use in result.busy)
    assert math.fsum(one["gpu_s"] for one in every) == pytest.approx(held_s)


def test_a_trial_has_its_rank_its_lead_and_its_gangs(service: FakeService) -> None:
    result = service.runs.results["one"]
    assert result.best is not None
    best = trial(service, result.best.trial)
    assert best["rank"] == 1
    assert "than trial" in best["lead"]
    assert [gang["stage"] for gang in best["gangs"]] == sorted(gang["stage"] for gang in best["gangs"])
    assert best["gangs"][-1]["slots"][0]["instance"].startswith("i-")
    assert best["curve"][-1][1] == best["iterations"]
    failed = next(one for one in result.trials if one.status == "failed")
    assert trial(service, failed.trial)["rank"] is None
    assert trial(service, failed.trial)["lead"] == ""


def with_checkpoints(service: FakeService, *refs: CheckpointRef) -> None:
    """Give trial 0 checkpoints, the latest first."""
    result = a_result()
    kept = (
        KeptCheckpoint(checkpoint=ref, iterations=len(refs) - place, saved_s=10.0 * (len(refs) - place))
        for place, ref in enumerate(refs)
    )
    first = dataclasses.replace(result.trials[0], checkpoint=refs[0] if refs else None, checkpoints=tuple(kept))
    service.runs.results["one"] = dataclasses.replace(result, trials=(first, *result.trials[1:]))


def test_a_checkpoint_is_downloaded_as_it_was_saved(service: FakeService, tmp_path: Path) -> None:
    store = make_store(str(tmp_path / "store"))
    content = b"weights" * 400_000
    ref = store.save(0, 1, content)
    with_checkpoints(service, ref)
    answer = service.client.get(f"{ONE}/0/checkpoint")
    assert answer.content == content
    assert answer.headers["content-disposition"].endswith('.ckpt"')
    assert service.client.request("HEAD", f"{ONE}/0/checkpoint").headers["content-length"] == str(len(content))

    Path(ref.url.removeprefix("file://")).write_bytes(b"others" * 400_000)
    answer = service.client.get(f"{ONE}/0/checkpoint")
    assert answer.status_code == 503
    assert "has changed" in answer.json()["detail"]


def test_a_folder_is_downloaded_as_an_archive(service: FakeService, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.txt").write_text("1 2 3")
    archive = tmp_path / "archive"
    pack(tmp_path / "model", archive, iterations=1, metrics={})
    with_checkpoints(service, make_store(str(tmp_path / "store")).save(0, 1, archive.read_bytes()))
    answer = service.client.get(f"{ONE}/0/checkpoint")
    assert answer.headers["content-disposition"].endswith('.tar"')
    assert b"weights.txt" in answer.content


def test_each_checkpoint_that_is_kept_is_downloaded(service: FakeService, tmp_path: Path) -> None:
    store = make_store(str(tmp_path / "store"))
    with_checkpoints(service, store.save(0, 2, b"second"), store.save(0, 1, b"first"))
    listed = trial(service, 0)["checkpoints"]
    assert [(one["iterations"], one["saved_s"], one["checkpoint"]["size_bytes"]) for one in listed] == [
        (2, 20.0, 6),
        (1, 10.0, 5),
    ]
    page = service.client.get("/experiments/one/trials/0", headers={"Accept": "text/html"}).text
    for query, content, done in (("", b"second", 2), ("?iterations=2", b"second", 2), ("?iterations=1", b"first", 1)):
        answer = service.client.get(f"{ONE}/0/checkpoint{query}")
        assert answer.content == content
        assert f"-iterations-{done}.ckpt" in answer.headers["content-disposition"]
        assert not query or f'href="{ONE}/0/checkpoint{query}"' in page
    answer = service.client.get(f"{ONE}/0/checkpoint?iterations=3")
    assert answer.status_code == 404
    assert answer.json()["detail"].endswith("has no checkpoint of 3 iterations; it has those of 1, 2")


def test_only_tokens_that_may_act_are_offered_to_stop_a_trial(tmp_path: Path) -> None:
    with fake_service(tmp_path, auth=True) as service:
        service.add("one")
        going = dataclasses.replace(a_result(), outcome="unfinished")
        first = dataclasses.replace(going.trials[0], status="running")
        service.runs.results["one"] = dataclasses.replace(going, trials=(first, *going.trials[1:]))
        for scope in SCOPES:
            bearer = {"authorization": f"Bearer {Tokens(service.store).create(scope, scope)[1]}"}
            page = service.client.get("/experiments/one/trials/0", headers=bearer).text
            assert ('data-dialog="stop"' in page) == ('<dialog id="stop"' in page) == (scope != "read")
            status = service.client.post(f"{ONE}/0/stop", headers=bearer).status_code
            assert status == (403 if scope == "read" else 202)
        assert service.runs.stopped == [0, 0]


def test_a_trial_that_is_over_is_not_stopped(service: FakeService) -> None:
    over = service.client.post(f"{ONE}/0/stop")
    assert over.status_code == 409
    status = service.runs.results["one"].trials[0].status_text
    assert over.json()["detail"] == f"experiment 'one' is running: trial 0 is over ({status}); there is nothing to stop"
    assert service.client.post(f"{ONE}/99/stop").status_code == 404
    service.add("two", state=ExperimentState.DONE)
    service.runs.results["two"] = a_result()
    ended = service.client.post("/v1/experiments/two/trials/0/stop")
    assert ended.status_code == 409
    assert "is done: it is over" in ended.json()["detail"]


@pytest.mark.parametrize(
    ("refs", "why"),
    [([], "did not finish"), ([CheckpointRef(url="virtual:0/1", digest="", size_bytes=0)], "trains no model")],
)
def test_a_missing_checkpoint_is_refused(service: FakeService, refs: list[CheckpointRef], why: str) -> None:
    with_checkpoints(service, *refs)
    answer = service.client.get(f"{ONE}/0/checkpoint")
    assert answer.status_code == 409
    assert why in answer.json()["detail"]


def test_a_search_finds_all_lines_of_a_log_in_upper_or_lower_case(tmp_path: Path) -> None:
    lines = [f"Epoch {n} {'LOSS' if n % 50 == 0 else 'ok'} {'x' * 900}" for n in range(4000)]
    (tmp_path / "trial-003.log").write_text("\n".join(lines) + "\n")
    found: list[str] = []
    cursor, following = None, ""
    while cursor != following:
        cursor = following or None
        more, following = page(
            trial_files(tmp_path, 3), (), cursor=cursor, limit=7, is_whole=True, wanted=Wanted(text="loss")
        )
        assert len(more) <= 7
        found += [line.text for line in more]
    assert found == [line for line in lines if "LOSS" in line]


def test_the_page_of_a_trial_that_runs_says_that_its_gang_is_held(service: FakeService) -> None:
    service.runs.results["one"] = cut_short(20, cancel=False)
    running = next(one for one in service.runs.results["one"].trials if one.status == "running")
    assert "now" in service.client.get(f"/experiments/one/trials/{running.trial}").text


def test_artifacts_are_listed_downloaded_and_on_the_page(service: FakeService, tmp_path: Path) -> None:
    store, result = make_store(str(tmp_path / "store")), a_result()
    ref = store.save(0, 3, b"a plot")
    kept = (ArtifactResult(name="plots/roc curve.png", file=ref, iterations=3, saved_s=30.0),)
    first = dataclasses.replace(result.trials[0], artifacts=kept)
    service.runs.results["one"] = dataclasses.replace(result, trials=(first, *result.trials[1:]))
    assert [(one["name"], one["iterations"]) for one in trial(service, 0)["artifacts"]] == [("plots/roc curve.png", 3)]
    address = f"{ONE}/0/artifacts/plots/roc%20curve.png"
    assert f'href="{address}"' in service.client.get("/experiments/one/trials/0", headers={"Accept": "text/html"}).text
    answer = service.client.get(address)
    assert answer.content == b"a plot"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''roc%20curve.png"
    missing = service.client.get(f"{ONE}/0/artifacts/other.png")
    assert missing.status_code == 404
    assert "has no artifact 'other.png'" in missing.json()["detail"]


def through(service: FakeService) -> rubberband.Client:
    """A client whose requests reach the service in this process."""

    def ask(request: httpx.Request) -> httpx.Response:
        answer = service.client.request(request.method, request.url.raw_path.decode())
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

    return rubberband.Client("http://127.0.0.1:8642", transport=httpx.MockTransport(ask))


def test_a_client_downloads_artifacts_and_checkpoints_and_the_commands_write_them(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, result = make_store(str(tmp_path / "store")), a_result()
    assert result.best is not None
    number, done = result.best.trial, result.best.iterations
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "model.txt").write_text("weights")
    packed = tmp_path / "packed"
    pack(tmp_path / "saved", packed, iterations=done, metrics={})
    latest, before = store.save(number, done, packed.read_bytes()), store.save(number, done - 1, b"before")
    best = dataclasses.replace(
        result.best,
        checkpoint=latest,
        checkpoints=(
            KeptCheckpoint(checkpoint=latest, iterations=done, saved_s=2.0),
            KeptCheckpoint(checkpoint=before, iterations=done - 1, saved_s=1.0),
        ),
        artifacts=(
            ArtifactResult(name="plots/a ü.png", file=store.save(number, 3, b"plot"), iterations=3, saved_s=3.0),
        ),
    )
    every = tuple(best if one.trial == number else one for one in result.trials)
    service.runs.results["one"] = dataclasses.replace(result, provider="local", trials=every, best=best)
    with through(service) as client:
        path = client.save_artifact("one", number, "plots/a ü.png", tmp_path / "new" / "a.png")
        assert (path, path.read_bytes()) == (tmp_path / "new" / "a.png", b"plot")
        assert client.save_checkpoint("one", number, tmp_path / "old", iterations=done - 1).read_bytes() == b"before"
        assert client.save_checkpoint("one", number, tmp_path / "latest").read_bytes() == packed.read_bytes()
        with pytest.raises(InputError, match="is there, and is not overwritten"):
            client.save_artifact("one", number, "plots/a ü.png", path)
        with pytest.raises(InputError, match="has no artifact 'other'"):
            client.save_artifact("one", number, "other", tmp_path / "other")
        assert not list(tmp_path.glob("*other*"))

    async def story() -> bytes:
        async with rubberband.AsyncClient(transport=httpx.ASGITransport(service.client.app)) as client:
            return (await client.save_artifact("one", number, "plots/a ü.png", tmp_path / "b.png")).read_bytes()

    assert service.client.wait(story()) == b"plot"

    monkeypatch.setattr("rubberband.commands.report.client_of", lambda server: through(service))
    monkeypatch.chdir(tmp_path)
    for words in (["artifacts", "one", "--to", "files"], ["best", "one", "--out", "out"]):
        assert CliRunner().invoke(cli.app, [*words, "--server", "there"]).exit_code == 0
    assert (tmp_path / "files" / "plots" / "a ü.png").read_bytes() == b"plot"
    assert (tmp_path / "out" / "model.txt").read_text() == "weights"


def test_a_checkpoint_in_parts_is_downloaded_as_one(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, result = make_store(str(tmp_path / "store")), a_result()
    assert result.best is not None
    refs = []
    for rank in range(2):
        (folder := tmp_path / str(rank)).mkdir()
        (folder / f"part-{rank}").write_text(f"weights of {rank}")
        refs.append(store.save(0, 1, partial(write_archive, {"": folder}, kind="program", iterations=1)))
    whole = dataclasses.replace(refs[0], parts=(refs[1],))
    kept = (KeptCheckpoint(checkpoint=whole, iterations=result.best.iterations, saved_s=2.0),)
    best = dataclasses.replace(result.best, checkpoint=whole, checkpoints=kept)
    every = tuple(best if one.trial == best.trial else one for one in result.trials)
    service.runs.results["one"] = dataclasses.replace(result, provider="local", trials=every, best=best)
    monkeypatch.setattr("rubberband.commands.report.client_of", lambda server: through(service))
    done = CliRunner().invoke(cli.app, ["best", "one", "--out", str(tmp_path / "out"), "--server", "there"])
    assert done.exit_code == 0, done.output
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        f"part-{rank}": f"weights of {rank}" for rank in range(2)
    }


def test_the_checkpoint_of_the_best_iteration_is_downloaded_or_said_not_to_be_kept(
    service: FakeService, tmp_path: Path
) -> None:
    store, result = make_store(str(tmp_path / "store")), a_result()
    number = next(one.trial for one in result.trials if len(one.curve) > 2)
    done = len(result.trials[number].curve)
    saved = KeptCheckpoint(checkpoint=store.save(number, done, b"best"), iterations=done, saved_s=1.0, best=True)

    def told(*kept: KeptCheckpoint, score: float) -> Any:
        last = result.trials[number].curve[-1]
        curve = (*result.trials[number].curve[:-1], (last[0], last[1], {"score": score}))
        changed = dataclasses.replace(result.trials[number], checkpoints=kept, curve=curve)
        every = (*result.trials[:number], changed, *result.trials[number + 1 :])
        service.runs.results["one"] = dataclasses.replace(result, trials=every)
        return service.client.get(f"{ONE}/{number}/checkpoint?best=true")

    assert told(saved, score=1e9).content == b"best"
    answer = told(saved, score=-1e9)
    assert answer.status_code == 404
    assert "its checkpoint was not kept" in answer.json()["detail"]
