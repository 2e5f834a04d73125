"""How long instances took to start on this machine: what is kept of it, and what plans make of it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.api.plans.process import planned, question_of
from rubberband.cloud.clock import elapsed_s
from rubberband.executor import ExperimentFolder, session
from rubberband.executor.run.session import _note_starts
from rubberband.planning.candidates import with_start_times
from rubberband.planning.feasible import PlanningOptions
from rubberband.planning.prices_and_quotas import answer, local_prices_and_quotas
from rubberband.planning.startup_history import (
    FILE,
    LATEST,
    MOST_BYTES,
    StartRecord,
    record,
    start_of,
    start_times,
    starts_of,
)
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import delay_of
from rubberband.values.profile import FIXED
from tests.builders.jobs import JOB
from tests.builders.sessions import run_spec

CODE = "code:train"
START = StartRecord(entrypoint=CODE, instances=4, provision_s=2.0, init_s=19.0)


def experiment(**resources: object) -> Experiment:
    """One of four local instances."""
    return Experiment(
        name="starts",
        entrypoint=CODE,
        search={
            "space": {"lr": [0.1]},
            "scheduler": {"type": "stages", "stages": [{"trials": 4, "iterations": 2}]},
            "metric": "loss",
            "mode": "min",
        },
        constraints={"deadline": "10m"},
        resources={"provider": "local", "max_instances": 4, **resources},
        profile={"seconds_per_iteration": {1: 10}},
    )


def test_a_recording_counts_for_its_entry_point_only(tmp_path: Path) -> None:
    assert start_times(tmp_path, CODE, 4) is None
    record(tmp_path, [START], at=1.0)
    found = start_times(tmp_path, CODE, 4)
    assert found is not None
    assert (found.starts, found.instances, found.provision_s, found.init_s) == (1, 4, 2.0, 19.0)
    assert found.provision_spread is FIXED
    assert start_times(tmp_path, "other:train", 4) is None


def test_the_latest_starts_of_the_nearest_number_count(tmp_path: Path) -> None:
    record(tmp_path, [replace(START, instances=1, init_s=5.0), replace(START, instances=8, init_s=40.0)], at=1.0)
    record(tmp_path, [replace(START, init_s=100.0)] + [replace(START, init_s=18.0 + n) for n in range(LATEST)], at=2.0)
    found = [start_times(tmp_path, CODE, number) for number in (1, 4, 5, 100)]
    assert [times and times.init_s for times in found] == [5.0, 20.0, 20.0, 40.0]
    assert found[1] is not None
    assert found[1].starts == LATEST
    spread_s = found[1].provision_spread.cv * found[1].provision_s
    assert spread_s == pytest.approx(2.5**0.5)  # that of the whole start


def test_instances_that_share_a_machine_start_together() -> None:
    found = start_of(CODE, [(0.0, 2.0, 10.0), (0.0, 4.0, 13.0)])
    assert (found.instances, found.provision_s, found.init_s) == (2, 3.0, 10.0)
    instants = [(100.0, 101.0, 105.0), (0.0, 2.0, 10.0), (100.4, 101.4, 106.0), (0.2, 2.0, 9.0)]
    assert [start.instances for start in starts_of(CODE, instants)] == [2, 2]
    assert starts_of(CODE, []) == []


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\x00\xff{",
        b"null",
        b"[" * 10_000,
        json.dumps({"version": "0", "entrypoint": CODE, "instances": 4, "provision_s": 1, "init_s": 1}).encode(),
        b'{"init_s": NaN}',
    ],
)
def test_damaged_lines_count_for_nothing(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE).write_bytes(damage)
    assert start_times(tmp_path, CODE, 4) is None
    record(tmp_path, [START], at=1.0)
    found = start_times(tmp_path, CODE, 4)
    assert found is not None
    assert found.starts == 1


def test_writers_do_not_disturb_one_another_and_the_file_is_bounded(tmp_path: Path) -> None:
    long = replace(START, entrypoint="x" * 400)

    def write() -> None:
        for _ in range(100):
            record(tmp_path, [long], at=1.0)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    record(tmp_path, [START], at=2.0)
    content = (tmp_path / FILE).read_bytes()
    assert len(content) <= MOST_BYTES
    assert all(json.loads(line)["instances"] == 4 for line in content.splitlines())
    assert start_times(tmp_path, CODE, 4) is not None


def test_a_home_that_cannot_be_read_knows_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    assert start_times(tmp_path, CODE, 4) is None


def test_an_estimate_uses_measured_times_and_says_where_the_file_is_wrong(tmp_path: Path) -> None:
    record(tmp_path, [START], at=1.0)
    asked = experiment(provision_delay="2s", init_delay="15s")
    profiles = asked.loaded_profiles()
    assert profiles is not None
    found = answer(
        asked, profiles, local_prices_and_quotas(asked, tmp_path), PlanningOptions(now=0.0, clock=lambda: 0.0)
    )
    assert found.estimate.offer.init_delay_s == 19.0
    assert found.estimate.offer.provision_delay_s == 2.0
    assert found.notes[0] == (
        "resources.init_delay: the file says 15s, and the last start of 4 instances at once on this machine took 19s, "
        "which is assumed; write init_delay: 19s, or leave it out."
    )
    bases = {assumption.name: assumption.basis for assumption in found.assumptions}
    assert bases["initialising of an instance"] == "measured"
    assert bases["provisioning of an instance"] == "given"


def test_a_file_that_says_nothing_or_about_the_same_is_not_remarked_upon(tmp_path: Path) -> None:
    record(tmp_path, [START], at=1.0)
    times = local_prices_and_quotas(experiment(), tmp_path).starts
    planned, remarks, seen = with_start_times(experiment(), times)
    assert planned.resources.provision_delay is not None
    assert delay_of(planned.resources.provision_delay)[0] == 2.0
    assert planned.resources.init_delay_s == 19.0
    assert (remarks, seen) == ((), {"provision_delay", "init_delay"})
    near = experiment(provision_delay="2.5s", init_delay="20s")
    assert with_start_times(near, times) == (near, (), frozenset())


def test_other_providers_know_nothing_of_this_machine(tmp_path: Path) -> None:
    record(tmp_path, [START], at=1.0)
    elsewhere = experiment(provider="virtual", instance_type="p3.2xlarge")
    assert local_prices_and_quotas(elsewhere, tmp_path).starts is None
    assert with_start_times(elsewhere, start_times(tmp_path, CODE, 4)) == (elsewhere, (), frozenset())


def test_the_service_counts_it_and_distinguishes_old_answers_from_new_ones(tmp_path: Path) -> None:
    asked = {
        "body": json.dumps(experiment(init_delay="15s").to_words()),
        "media_type": "application/json",
        "overrides": [],
        "now": 0.0,
        "policy": "optimal",
        "frontier": False,
        "size": False,
        "seed": 0,
        "most_usd": None,
    }
    before = question_of(asked, tmp_path, live=False)
    record(tmp_path, [START], at=1.0)
    after = question_of(asked, tmp_path, live=False)
    assert before.id != after.id
    assert before.words == after.words
    assert before.good_s is not None, "it is asked again, as a run may have seen other starts"
    status, body = planned(after)
    assert status == 200
    assert "the file says 15s" in json.loads(body)["notes"][0]


def test_instances_that_began_before_the_run_are_recorded_with_their_whole_start(tmp_path: Path) -> None:
    """Of those that were ready by then it is not known how long they took."""
    instants = [(100.0, 100.01, 101.4), (100.0, 100.02, 101.6), (100.0, 100.01, 100.03), (150.0, 153.0, 156.0)]
    records = [
        SimpleNamespace(requested_at=asked, running_at=running, ready_at=ready) for asked, running, ready in instants
    ]
    controller: Any = SimpleNamespace(state=SimpleNamespace(instances=dict(enumerate(records))))
    _note_starts(tmp_path, CODE, controller, 100.0, lead_s=4.0)
    first, second = (start_times(tmp_path, CODE, number) for number in (2, 1))
    assert first is not None
    assert second is not None
    assert first.provision_s + first.init_s == pytest.approx(5.6)
    assert (second.provision_s, second.init_s) == (3.0, 3.0)


def test_a_start_beside_the_check_counts_the_seconds_since_it_began(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    job = replace(JOB, offer=replace(JOB.offer, init_delay_s=15.0))
    session.create(folder, job, run_spec(provider="local", checkpoints=str(folder.checkpoints)))
    begun: Any = SimpleNamespace(begun_s=elapsed_s() - 30.0)
    assert session.run(folder, early=begun).outcome == "done"
    found = start_times(tmp_path, "None", 2)
    assert found is not None
    assert found.provision_s + found.init_s == pytest.approx(45.0, abs=5.0)
