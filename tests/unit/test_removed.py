"""What was removed is refused with what to use instead; what earlier versions wrote is still read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cli import main
from rubberband.errors import InputError, JournalError
from rubberband.executor import Journal, decode_job, encode_job
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import REMOVED
from tests.builders.databases import run_sql
from tests.builders.jobs import JOB

WORDS: dict[str, Any] = {
    "name": "sha",
    "search": {
        "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 0.1}},
        "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4},
        "metric": "accuracy",
        "mode": "max",
    },
    "constraints": {"deadline": "1h"},
    "resources": {"provider": "virtual", "instance_type": "p3.8xlarge", "max_instances": 2},
}


def with_key(path: str) -> dict[str, Any]:
    """The words of an experiment that has a key, whatever its value."""
    part, _, key = path.partition(".")
    return {**WORDS, part: {**WORDS.get(part, {}), key: "any"}}


FALSE = ',"is_added":false'
KEYS = [path for path in REMOVED if " " not in path]


@pytest.mark.parametrize("path", KEYS)
def test_a_removed_key_is_refused_with_what_to_use(path: str) -> None:
    with pytest.raises(InputError) as caught:
        Experiment(**with_key(path))
    assert str(caught.value) == f"{path}: {REMOVED[path]}"


@pytest.mark.parametrize("path", KEYS)
def test_an_experiment_that_was_accepted_with_one_is_still_read(path: str) -> None:
    assert Experiment.kept(with_key(path)) == Experiment(**WORDS).model_copy(update={"name": "sha"})


@pytest.mark.parametrize("option", [path for path in REMOVED if " -" in path])
def test_a_removed_option_is_refused_with_what_to_use(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, _, name = option.partition(" ")
    for typed in ([name, "any"], [f"{name}=any"]):
        monkeypatch.setattr("sys.argv", ["rubberband", command, "any.yaml", *typed])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert capsys.readouterr().err == f"error: {name} {REMOVED[option]}\n"


@pytest.mark.parametrize("widening", ["null", '{"type":"sha","num_samples":3,"grace_period":1,"max_t":9}'])
def test_a_job_of_before_is_the_same_job(widening: str) -> None:
    brackets = '[{"bracket":0,"first_stage":0,"num_stages":1,"first_trial":0,"lane":0,"is_added":false}]'
    body = encode_job(JOB)
    assert '"brackets":[]' in body
    old = body.replace('"brackets":[]', f'"brackets":{brackets}')[:-1] + f',"widening":{widening}}}'
    assert decode_job(old) == decode_job(body.replace('"brackets":[]', f'"brackets":{brackets.replace(FALSE, "")}'))


def test_a_job_with_a_name_of_before_is_the_same_job() -> None:
    job = replace(JOB, highest_price_usd_per_hour=9.0)
    old = encode_job(job).replace("highest_price_usd_per_hour", "dearest_usd_per_hour")
    assert decode_job(old) == job


def test_a_journal_whose_search_was_widened_is_refused_in_one_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    journal = Journal(url, "wide", create=True)
    journal.create(created_at=1.0, job=JOB, setup={"provider": "virtual"})
    body = json.dumps({"occurred_at": 1.0, "stages": []})
    run_sql(url, f"INSERT INTO events VALUES ('wide', 0, 1.0, 'SearchWidened', '{body}')")
    with pytest.raises(JournalError, match=r"widened while it ran \(constraints\.spend\), which was removed; run the"):
        list(journal.events())
    journal.close()
