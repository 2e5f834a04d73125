"""The pool file: its words, its defaults, and one line for what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubberband.errors import InputError
from rubberband.spec.pool import load_pool


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus_per_instance: 4", "team.yaml: instances: is required; add it"),
        ("instances: 4", "team.yaml: gpus_per_instance: is required; add it, or instance_type"),
        ("instances: 0\ngpus_per_instance: 4", "team.yaml:1: instances: 0 must be at least 1; raise it"),
        ("instances: 4\ngpus: 4", "team.yaml:2: gpus: unknown key"),
        ("", "team.yaml is empty; write a pool: instances"),
    ],
)
def test_a_bad_word_is_reported_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as found:
        load_pool(_file(tmp_path, text))
    assert str(found.value).startswith(said)
    assert "\n" not in str(found.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no pool file"):
        load_pool(tmp_path / "nothing.yaml")
