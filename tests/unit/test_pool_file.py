"""The pool file: its words, its defaults, and one line for what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband import cli, estimate
from rubberband.cloud.offers import offer
from rubberband.errors import InputError
from rubberband.spec.loading import load_experiment, load_pool
from rubberband.spec.pool import PoolFile, on_pool, pool_folder
from rubberband.spec.resources import Resources


def _file(folder: Path, text: str, name: str = "team.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_two_words_are_enough(tmp_path: Path) -> None:
    pool = load_pool(_file(tmp_path, "{instances: 16, gpus_per_instance: 4}"))
    assert (pool.name, pool.instances, pool.gpus_per_instance, pool.provider) == ("team", 16, 4, "local")
    assert pool.max_usd_per_hour is None


def test_a_name_is_made_of_the_files_name(tmp_path: Path) -> None:
    pool = load_pool(_file(tmp_path, "{instances: 1, gpus_per_instance: 1}", "My Team (2).yaml"))
    assert pool.name == "my-team-2"


def test_money_and_times_have_units(tmp_path: Path) -> None:
    text = "instances: 2\ninstance_type: p3.8xlarge\nprovider: aws\nmax_usd_per_hour: $30\nidle: 10m\nname: ml\n"
    pool = load_pool(_file(tmp_path, text))
    assert (pool.name, pool.max_usd_per_hour, pool.idle_s) == ("ml", 30.0, 600.0)


TWO = "instances: 4\ngpus_per_instance: 4\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus_per_instance: 4", "team.yaml: instances: is required; add it"),
        ("instances: 4", "team.yaml: gpus_per_instance: is required; add it, or instance_type"),
        ("instances: 0\ngpus_per_instance: 4", "team.yaml:1: instances: 0 must be at least 1; raise it"),
        ("instances: 4\ngpus: 4", "team.yaml:2: gpus: unknown key"),
        (
            f"{TWO}autoscale: {{lower: .75, upper: .55}}",
            "team.yaml:3: autoscale: lower=0.75 must be less than upper=0.55",
        ),
        (f"{TWO}autoscale: {{lower: 0, upper: .5}}", "team.yaml:3: autoscale.lower: 0 must be more than 0.0"),
        (f"{TWO}autoscale: {{lower: .5, upper: 1}}", "team.yaml:3: autoscale.upper: 1 must be less than 1"),
        (f"{TWO}autoscale: {{lower: .5}}", "team.yaml:3: autoscale.upper: is required"),
        (f"{TWO}autoscale: {{low: .5}}", "team.yaml:3: autoscale.low: unknown key"),
        (f"{TWO}autoscale: true", "team.yaml:3: autoscale: "),
        ("", "team.yaml is empty; write a pool: instances"),
    ],
)
def test_a_bad_word_is_reported_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as found:
        load_pool(_file(tmp_path, text))
    assert str(found.value).startswith(said)
    assert all(line.startswith("team.yaml") for line in str(found.value).splitlines())


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no pool file"):
        load_pool(tmp_path / "nothing.yaml")


def _up(home: Path, **more: Any) -> None:
    words = {"name": "team", "instances": 3, "gpus_per_instance": 4, "instance_type": "local", "price_per_hour": 8.0}
    pool_folder("team", home).write({**words, **more})


def _resources(home: Path, **given: Any) -> dict[str, Any]:
    found: dict[str, Any] = on_pool({"name": "a", "resources": {"pool": "team", **given}}, home)["resources"]
    return found


def test_a_pool_sets_the_resources_of_its_experiments(tmp_path: Path) -> None:
    _up(tmp_path)
    found = _resources(tmp_path, lease="20s")
    assert found["pool"] == str(tmp_path / "pools" / "team")
    assert (found["gpus_per_instance"], found["max_instances"], found["price_per_hour"]) == (4, 3, 8.0)
    assert (found["provider"], found["minimum_billed"], found["lease"]) == ("local", 0.0, "20s")


def test_a_part_of_an_instance_has_its_share_of_the_price(tmp_path: Path) -> None:
    _up(tmp_path)
    found = _resources(tmp_path, gpus_per_instance=1, max_instances=5)
    assert (found["gpus_per_instance"], found["max_instances"], found["price_per_hour"]) == (1, 5, 2.0)


@pytest.mark.parametrize(
    ("given", "cap", "lines", "most"),
    [
        ({"max_instances": 3}, None, [], 3),
        ({}, None, [], 3),
        ({"max_instances": 5}, None, ["pool: team has 3 instances of 4 GPUs; max_instances is 3 instead of 5."], 3),
        (
            {"max_instances": 20, "gpus_per_instance": 2},
            None,
            ["pool: team has 3 instances of 4 GPUs (6 of 2 GPUs); max_instances is 6 instead of 20."],
            6,
        ),
        (
            {},
            20.0,
            [
                "pool: team has 3 instances of 4 GPUs, and its max_usd_per_hour=20.00 USD pays for 2 instances at "
                "once; max_instances is 2."
            ],
            2,
        ),
        ({"max_instances": 2}, 20.0, [], 2),
        ({}, 24.0, [], 3),
    ],
)
def test_a_number_of_instances_above_the_pools_is_lowered_and_said(
    tmp_path: Path, given: dict[str, Any], cap: float | None, lines: list[str], most: int
) -> None:
    _up(tmp_path, **({} if cap is None else {"max_usd_per_hour": cap}))
    notes: list[str] = []
    found = on_pool({"name": "a", "resources": {"pool": "team", **given}}, tmp_path, notes.append)
    assert (found["resources"]["max_instances"], notes) == (most, lines)
    on_pool(found, tmp_path, notes.append)
    assert notes == lines, "once"


def test_a_cap_that_pays_for_no_instance_is_reported() -> None:
    with pytest.raises(InputError, match=r"max_usd_per_hour: 7\.00 USD does not cover one instance \(8\.00 USD\)"):
        PoolFile(instances=1, gpus_per_instance=1, price_per_hour=8, max_usd_per_hour=7).instances_at_once()


def test_a_pool_on_ec2_sets_its_prices_and_settings_and_a_store_for_checkpoints(tmp_path: Path) -> None:
    file = PoolFile(
        name="team",
        provider="aws",
        instance_type="g4dn.12xlarge",
        gpus_per_instance=4,
        instances=2,
        market="spot",
        spot={"price_per_hour": 1.6},
        price_per_hour=4.0,
        side_price_per_hour=0.4,
        checkpoints="s3://bucket/team",
        aws={"install": "scikit-learn"},
    )
    pool_folder("team", tmp_path).write(file.model_dump(mode="json", by_alias=True, exclude_none=True))
    found = _resources(tmp_path, gpus_per_instance=1)
    resources = Resources(**found)
    assert (resources.price_usd_per_hour, resources.spot.price_usd_per_hour) == (pytest.approx(1.1), pytest.approx(0.5))
    assert (resources.side_usd_per_hour, resources.head_price_usd_per_hour, resources.lease_s) == (0.0, 0.0, 60.0)
    assert (resources.market, resources.aws.install) == ("spot", "scikit-learn")
    assert (resources.checkpoints, resources.max_instances) == ("s3://bucket/team", 8)
    assert on_pool({"resources": found}, tmp_path)["resources"] == found
    assert offer(resources).side_usd_per_hour == 0.0, "it is in the price"
    with pytest.raises(InputError, match="contradicts pool team"):
        _resources(tmp_path, aws={"install": "lightgbm"})
    assert _resources(tmp_path, checkpoints="s3://own/one", lease=30.0)["checkpoints"] == "s3://own/one"


def test_words_without_a_pool_stay(tmp_path: Path) -> None:
    assert on_pool({"name": "a"}, tmp_path) == {"name": "a"}
    assert on_pool({"resources": 3}, tmp_path) == {"resources": 3}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"price_per_hour": 1.0}, "resources.price_per_hour: 1.0 contradicts pool team (8.0); leave it out"),
        ({"provider": "aws"}, "resources.provider: 'aws' contradicts pool team ('local')"),
        (
            {"gpus_per_instance": 8},
            "resources.gpus_per_instance: 8 must be 1 to 4: an instance of pool team has 4 GPUs",
        ),
        ({"pool": "other"}, "pool 'other' not found in"),
    ],
)
def test_words_that_contradict_a_pool_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    _up(tmp_path)
    with pytest.raises(InputError) as found:
        _resources(tmp_path, **given)
    assert str(found.value).startswith(said)


def test_a_file_names_its_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _up(tmp_path)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    search = "{space: {x: {type: uniform, lower: 0, upper: 1}}, scheduler: {type: sha, num_samples: 4, max_t: 4}, "
    search += "metric: m, mode: max}"
    text = f"version: 1\nname: a\nsearch: {search}\nresources:\n  pool: team\n"
    path = _file(tmp_path, text, "a.yaml")
    assert load_experiment(path).resources.max_instances == 3
    note = "pool: team has 3 instances of 4 GPUs; max_instances is 3 instead of 9."
    asked = ["resources.max_instances=9", "profile={seconds_per_iteration: {1: 10}}"]
    shown = CliRunner().invoke(cli.app, ["estimate", str(path), "-s", asked[0], "-s", asked[1]]).output
    assert note in " ".join(shown.split())
    assert estimate(experiment=load_experiment(path, asked)).to_json()["notes"][0] == note
    with pytest.raises(InputError, match=r"-s: resources\.price_per_hour: 1 contradicts"):
        load_experiment(path, ["resources.price_per_hour=1"])
