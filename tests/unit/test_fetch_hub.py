"""Models and datasets of the hub are planned, fetched once per machine, verified, and found without the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("huggingface_hub", reason="pip install 'rubberband-tune[hf]'")

from rubberband.api.plans.process import planned as preview
from rubberband.api.plans.process import question_of
from rubberband.cloud import fetch
from rubberband.cloud.fetch import bandwidth
from rubberband.cloud.fetch.cache import Fetched
from rubberband.errors import InputError
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, planned
from rubberband.planning.fetching import fetched, with_fetch
from rubberband.spec.experiment import Experiment
from rubberband.spec.fetching import Fetch
from tests.builders.experiment_words import words
from tests.builders.experiments import PROFILE, experiment
from tests.builders.hub import Content, Hub, Repo, served
from tests.unit.test_plans_questions import asked as question

WEIGHTS, CONFIG, COMMIT = "model.safetensors", "config.json", "ab" * 20
RENTED = {"provider": "aws", "instance_type": "g5.xlarge", "gpus_per_instance": None, "checkpoints": "s3://bucket/x"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model, a gated one and a dataset, to which the environment leads, and an empty cache."""
    repos = {
        "models/org/base": Repo(
            {
                CONFIG: Content.of(b'{"a": 1}'),
                WEIGHTS: Content(25_000_000, os.urandom(1 << 16)),
                "x/empty": Content.of(b""),
            }
        ),
        "models/org/gated": Repo({CONFIG: Content.of(b"{}")}, gated=True),
        "datasets/org/My-Data": Repo({"train.jsonl": Content.of(b'{"text": "a"}\n' * 10)}, commit="cd" * 20),
    }
    with served(Hub(repos)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def fetching(*models: str, datasets: tuple[str, ...] = (), **resources: Any) -> Experiment:
    return experiment(fetch={"models": models, "datasets": datasets}, **resources)


def snapshot(tmp_path: Path, name: str = "models--org--base", commit: str = COMMIT) -> Path:
    return tmp_path / "hf" / "hub" / name / "snapshots" / commit


def test_a_bare_name_has_one_commit_for_all_instances_and_its_time_is_in_the_plan(hub: Hub, tmp_path: Path) -> None:
    plain = experiment(provider="virtual", init_delay="5s")
    asked = with_fetch(fetching("org/base", provider="virtual", init_delay="5s"), tmp_path, is_required=True)
    assert asked.resources.fetch is not None
    assert asked.resources.fetch.commits == {"org/base@main": COMMIT}
    assert asked.notes == (
        "fetch: each instance downloads 25 MB once, about 0.281s at 100 MB/s (a guess): org/base at abababa.",
    )
    options = PlanningOptions(now=time.time())
    before, after = (planned(each, PROFILE, PricesAndQuotas(), options).job for each in (plain, asked))
    assert after.prediction.jct_s == pytest.approx(before.prediction.jct_s + 0.28125, abs=1e-3)
    again = Experiment.kept(asked.to_words())
    assert again.resources.fetch == asked.resources.fetch


@pytest.mark.parametrize(
    ("init_s", "measured_s", "ready_s"),
    [("180s", None, 210.0), ("5s", None, 50.0), (None, 180.0, 180.0), (None, 20.0, 50.0)],
)
def test_an_instance_of_ec2_is_ready_once_it_has_started_and_fetched(
    init_s: str | None, measured_s: float | None, ready_s: float
) -> None:
    changed = experiment(**RENTED, max_instances=1, **({} if init_s is None else {"init_delay": init_s}))
    profile = replace(PROFILE, init_delay_s=measured_s)
    found = planned(changed.with_fetch(50.0, 20.0), profile, PricesAndQuotas(), PlanningOptions(now=time.time()))
    assert found.estimate.offer.init_delay_s == pytest.approx(ready_s)


def test_a_trial_on_spot_restarts_once_another_instance_has_fetched() -> None:
    spot = experiment(**RENTED, market="spot", spot={"price_per_hour": 1}, init_delay="180s", provision_delay="10s")
    found = [
        planned(each, PROFILE, PricesAndQuotas(), PlanningOptions(now=time.time())).estimate.offer.spot
        for each in (spot, spot.with_fetch(50.0, 20.0))
    ]
    assert found[1].restart_s == pytest.approx(found[0].restart_s + 30.0)


@pytest.mark.parametrize("resets", [False, True])
def test_a_broken_connection_goes_on_from_where_it_was(hub: Hub, tmp_path: Path, resets: bool) -> None:
    hub.breaks[WEIGHTS], hub.resets = 15_000_000, resets
    lines = list[str]()
    found = fetched(fetching("org/base"), tmp_path / "home", lines.append)
    assert hub.gets == {CONFIG: 1, WEIGHTS: 2}
    assert hub.served < 35_000_000, "what had come before the break does not come again"
    assert (snapshot(tmp_path) / WEIGHTS).stat().st_size == 25_000_000
    assert lines[0].startswith("fetch: this machine downloads 25 MB once")
    assert lines[1].startswith("fetched 25 MB in ")
    assert found.fetch_s == (0.0, 0.0), "no instance waits for it any more"
    variables = found.environment({}).variables
    assert (variables["HF_HUB_OFFLINE"], variables["HF_DATASETS_OFFLINE"]) == ("1", "1")
    hub.requests = 0
    fetched(found, tmp_path / "home", lines.append)
    assert lines[2:] == ["fetch: the cache of this machine has org/base at abababa."]
    assert hub.requests == 0


def test_a_full_cache_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    fetched(fetching("org/base"), tmp_path / "home", print)
    hub.url = ""  # it answers nothing more
    lines = list[str]()
    fetched(fetching("org/base"), tmp_path / "home", lines.append)
    assert lines == ["fetch: the cache of this machine has org/base at abababa."]


def test_wrong_bytes_are_fetched_again_and_never_given_to_trials(hub: Hub, tmp_path: Path) -> None:
    hub.wrong = Counter({CONFIG: 1})
    fetched(fetching("org/base"), tmp_path / "home", print)
    assert (snapshot(tmp_path) / CONFIG).read_bytes() == b'{"a": 1}'
    assert hub.gets[CONFIG] == 2
    hub.repos["models/org/other"] = replace(hub.repos["models/org/base"])
    hub.repos["models/org/other"].digests[CONFIG] = "0" * 40
    with pytest.raises(InputError) as error:
        fetched(fetching("org/other"), tmp_path / "home", print)
    assert str(error.value) == (
        "fetch: org/other was not fetched after 3 attempts: 1 file not as the hub's digests say, such as config.json"
    )
    assert not (snapshot(tmp_path, "models--org--other") / CONFIG).exists()


def test_a_file_that_was_damaged_or_deleted_since_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetched(fetching("org/base"), tmp_path / "home", print)
    (snapshot(tmp_path) / CONFIG).resolve().write_bytes(b"")
    fetched(fetching("org/base"), tmp_path / "home", print)
    assert (snapshot(tmp_path) / CONFIG).read_bytes() == b'{"a": 1}'
    assert hub.gets == {CONFIG: 2, WEIGHTS: 1}


def test_instances_on_one_machine_fetch_once(hub: Hub, tmp_path: Path) -> None:
    order = fetch.order_of(with_fetch(fetching("org/base"), tmp_path, is_required=True).resources)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(fetch.fetch, [order] * 3))
    assert hub.gets == {CONFIG: 1, WEIGHTS: 1}
    assert {each[0].size for each in found} == {25_000_008}
    assert found[0][1] == {**fetch.OFFLINE, "HF_HOME": str(tmp_path / "hf")}


def test_a_rented_machine_keeps_it_beside_its_lease(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = fetch.order_of(with_fetch(fetching("org/base", **RENTED), tmp_path, is_required=True).resources)
    monkeypatch.delenv("HF_HOME")
    (tmp_path / "var").mkdir()
    monkeypatch.setenv("RUBBERBAND_LEASE", str(tmp_path / "var" / "lease"))
    assert fetch.fetch(order)[1]["HF_HOME"] == str(tmp_path / "var" / f"rubberband-{os.getuid()}" / "huggingface")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            {"models": ["org/gated"]},
            "resources.fetch.models: org/gated is gated, and there is no token; accept its terms at",
        ),
        ({"models": ["org/nosuch"]}, "has no model org/nosuch, or it is private; correct the name, or write"),
        ({"datasets": ["org/nosuch"]}, "resources.fetch.datasets: the hub http"),
        ({"models": ["org/base@v9"]}, "org/base has no revision v9; name a branch, a tag or a commit"),
    ],
)
@pytest.mark.parametrize("is_required", [True, False])
def test_a_source_that_the_hub_refuses_is_one_line_before_anything_is_rented(
    hub: Hub, tmp_path: Path, source: dict[str, Any], text: str, is_required: bool
) -> None:
    with pytest.raises(InputError) as error:
        with_fetch(experiment(fetch=source, **RENTED), tmp_path, is_required=is_required)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert sum(hub.gets.values()) == 0


def test_a_gated_model_needs_the_token_of_the_secrets(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    asked = fetching("org/gated", secrets=["HF_TOKEN"], **RENTED)
    with pytest.raises(InputError, match="the token of HF_TOKEN has no access"):
        with_fetch(asked, tmp_path, is_required=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with pytest.raises(InputError, match="there is no token"):  # instances would have none
        with_fetch(fetching("org/gated", **RENTED), tmp_path, is_required=True)
    resources = with_fetch(asked, tmp_path, is_required=True).resources
    assert hub.token not in fetch.boot_order(resources)
    order = fetch.order_of(resources)
    assert hub.token not in repr(order)
    monkeypatch.delenv("HF_TOKEN")
    fetch.fetch(order)
    assert (snapshot(tmp_path, "models--org--gated") / CONFIG).exists()


def test_an_estimate_without_the_hub_says_that_a_size_is_missing_and_a_run_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    asked = fetching("org/base", **RENTED)
    (note,) = with_fetch(asked, tmp_path, is_required=False).notes
    assert note == (
        "fetch: http://127.0.0.1:9 does not answer (ConnectError), so that the size of org/base is not known; the time "
        "to fetch it is not in the plan."
    )
    with pytest.raises(InputError, match="check the network, or HF_ENDPOINT"):
        with_fetch(asked, tmp_path, is_required=True)
    with_fetch(fetching("org/base", provider="virtual"), tmp_path, is_required=True)  # it downloads nothing


def test_a_token_in_env_is_in_no_words_that_other_processes_see(hub: Hub, tmp_path: Path) -> None:
    asked = fetching("org/gated", env={"HF_TOKEN": hub.token, "HF_ENDPOINT": hub.url}, **RENTED)
    resources = with_fetch(asked, tmp_path, is_required=True).resources
    assert hub.token not in fetch.boot_order(resources)
    order = fetch.order_of(resources)
    assert hub.token not in json.dumps(order.words), "the command line of its process"
    fetch.fetch(order)
    assert (snapshot(tmp_path, "models--org--gated") / CONFIG).exists()


def test_a_branch_that_is_gone_since_the_plan_does_not_matter(hub: Hub, tmp_path: Path) -> None:
    order = fetch.order_of(with_fetch(fetching("org/base"), tmp_path, is_required=True).resources)
    hub.repos["models/org/base"].revisions = ()
    fetch.fetch(order)
    assert (snapshot(tmp_path) / CONFIG).exists()


@pytest.mark.parametrize("given", [{"env": {"HF_ENDPOINT": "http://127.0.0.1:9"}}, {"secrets": ["HF_TOKEN"]}], ids=str)
def test_words_of_other_users_name_no_server_that_a_service_asks_and_get_no_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    asked = fetching("org/base", **given, **RENTED)
    (note,) = with_fetch(asked, tmp_path, is_required=False, is_trusted=False).notes
    assert note == "fetch: sizes are asked from the hub when the experiment runs."
    assert hub.requests == 0


def test_a_preview_of_a_service_has_the_note_and_another_id_once_the_hub_has_another_commit(
    hub: Hub, tmp_path: Path
) -> None:
    document = words(resources__fetch={"models": ["org/base"]})
    before = question_of(question(document), tmp_path, live=False)
    status, body = preview(before)
    assert status == 200
    assert any("downloads 25 MB once" in note for note in json.loads(body)["notes"])
    assert question_of(question(document), tmp_path, live=False).id == before.id
    hub.repos["models/org/base"] = Repo({CONFIG: Content.of(b"[]")}, commit="ef" * 20)
    assert question_of(question(document), tmp_path, live=False).id != before.id


def test_a_disk_that_is_too_small_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repos["models/org/base"] = replace(
        hub.repos["models/org/gated"], files={WEIGHTS: Content(9_500, b"x")}, gated=False
    )
    hub.repos["models/org/base"].files[WEIGHTS].__dict__["size"] = 60 * 10**9
    with pytest.raises(InputError, match=r"volume_gb: 50 GB are less than the 60 GB of resources.fetch; raise it"):
        with_fetch(fetching("org/base", aws={"volume_gb": 50}, **RENTED), tmp_path, is_required=True)


def test_a_measured_bandwidth_replaces_the_guess(hub: Hub, tmp_path: Path) -> None:
    resources = experiment(**RENTED).resources
    for rate in (50e6, 60e6, 500e6):
        bandwidth.record(tmp_path, resources, Fetched(size=10**9, seconds=1e9 / rate))
    bandwidth.record(tmp_path, resources, Fetched(size=1000, seconds=1.0))  # of too few bytes
    for _ in range(5):
        bandwidth.record(tmp_path, resources, Fetched(size=10**9, seconds=1.0, is_mirrored=True))
    (note,) = with_fetch(fetching("org/base", **RENTED), tmp_path, is_required=True).notes
    assert "about 0.417s at 60 MB/s (measured)" in note
    assert "(a guess)" in with_fetch(fetching("org/base"), tmp_path, is_required=True).notes[0]
    for _ in range(5):
        bandwidth.record(tmp_path, resources, Fetched(size=10**9, seconds=100.0))
    assert bandwidth.measured(tmp_path, resources) == 1e7, "the latest count"
    (tmp_path / bandwidth.FILE).write_text("damaged")
    assert bandwidth.measured(tmp_path, resources) is None


def test_the_first_instance_fills_the_mirror_and_later_ones_read_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    asked = experiment(fetch={"models": ["org/base"], "from": f"s3://{s3}/hub"}, **RENTED)
    order = fetch.order_of(with_fetch(asked, tmp_path, is_required=True).resources)
    assert not fetch.fetch(order)[0].is_mirrored
    _await_object(s3, f"hub/models--org--base/{COMMIT}/rubberband.json")
    hub.url = ""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "another"))
    mirrored, _ = fetch.fetch(order)
    assert (mirrored.is_mirrored, mirrored.size) == (True, 25_000_008)
    other = tmp_path / "another" / "hub" / "models--org--base"
    assert (other / "refs" / "main").read_text() == COMMIT
    assert (other / "snapshots" / COMMIT / WEIGHTS).stat().st_size == 25_000_000
    assert (other / "snapshots" / COMMIT / "x" / "empty").exists()


def test_a_mirror_that_instances_may_not_use_is_left_out_with_a_line(
    hub: Hub, tmp_path: Path, s3: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = experiment(fetch={"models": ["org/base"], "from": f"s3://{s3}/hub"}, **RENTED)
    order = fetch.order_of(with_fetch(asked, tmp_path, is_required=True).resources)
    found, _ = fetch.fetch(replace(order, words={**order.words, "from": "s3://nosuch/hub"}))
    fetch.record(tmp_path, asked.resources, found)
    assert not found.is_mirrored
    assert "the mirror of resources.fetch is not used: s3://nosuch/hub/models--org--base" in caplog.text


def _await_object(bucket: str, key: str) -> None:
    import boto3
    from botocore.exceptions import ClientError

    until = time.monotonic() + 30.0
    while True:
        try:
            boto3.client("s3").head_object(Bucket=bucket, Key=key)
            return
        except ClientError:
            assert time.monotonic() < until, f"{key} is not written"
            time.sleep(0.1)


def test_a_mirror_that_cannot_be_written_is_refused(hub: Hub, tmp_path: Path, s3: str) -> None:
    asked = experiment(fetch={"models": ["org/base"], "from": "s3://nosuch/hub"}, **RENTED)
    with pytest.raises(InputError, match=r"resources.fetch.from: s3://nosuch/hub/.probe could not be written"):
        with_fetch(asked, tmp_path, is_required=True)


def test_load_dataset_and_snapshot_download_find_what_was_fetched_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="pip install 'rubberband-tune[finetune]'")
    asked = fetched(fetching("org/base", datasets=("org/My-Data",)), tmp_path / "home", print)
    hub.url, hub.requests = "", 0
    program = """
import datasets, huggingface_hub
print(datasets.load_dataset("org/My-Data")["train"][0])
print(huggingface_hub.snapshot_download("org/base"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked.environment({}).variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["{'text': 'a'}", str(snapshot(tmp_path))], done.stderr
    assert hub.requests == 0


@pytest.mark.parametrize("provider", ["local", "ray"])
def test_a_mirror_makes_no_sense_where_machines_keep_a_cache(provider: str) -> None:
    given = {"gpus_per_instance": 1} if provider == "local" else {"minimum_billed": "0s"}
    with pytest.raises(InputError, match=r"resources.fetch.from: a mirror is for instances that begin empty"):
        experiment(fetch={"models": ["org/base"], "from": "s3://bucket/hub"}, **given, provider=provider)


def test_an_order_survives_a_shell(hub: Hub, tmp_path: Path) -> None:
    order = fetch.boot_order(with_fetch(fetching("org/base", **RENTED), tmp_path, is_required=True).resources)
    (source,) = json.loads(order)["sources"]
    assert source == {"kind": "model", "name": "org/base", "revision": "main", "commit": COMMIT}


@pytest.mark.parametrize(
    "name", ["./model", "../model", "own/.base", "own/base-", "own--base", "own/a..b", "own/base/sub"]
)
def test_a_path_and_what_the_hub_takes_for_no_name_are_refused_without_asking_it(name: str) -> None:
    with pytest.raises(ValidationError, match="is no name of the hub"):
        Fetch(models=(name,))


@pytest.mark.parametrize(
    "name", ["gpt2", "own/base", "own/Llama-3.2-1B@main", "_own/b_", "own/base@refs/pr/1", "own/b@a--b"]
)
def test_names_of_the_hub_are_taken(name: str) -> None:
    assert Fetch(models=(name,)).models == (name,)
