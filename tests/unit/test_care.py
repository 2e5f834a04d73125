"""Tags, notes, archive and deletion: in the service's store, over REST, in its runs, and in a home by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.engine import Engine
from typer.testing import CliRunner, Result

from rubberband import cli
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import SharedPool
from rubberband.api.store import Store, open_store
from rubberband.api.store.schema import Entry
from rubberband.commands import local_experiment
from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder, JournalFollower
from rubberband.executor.journal.folder import read_labels, write_labels
from rubberband.states import OVER, ExperimentState
from rubberband.values.submission import (
    LONGEST_NOTE,
    MOST_TAGS,
    LabelChange,
    Labels,
    NoteChangedError,
    Submission,
    Summary,
    same_case,
)
from rubberband.views.experiment import experiment_view
from rubberband.views.live.status import headline
from tests.builders.fake_runs import FakeService
from tests.builders.journalled_runs import recorded, words
from tests.builders.service_runs import DONE, House, count_of, experiment

RUNNING, QUEUED = ExperimentState.RUNNING, ExperimentState.QUEUED
HOSTILE = '<script>alert("x")</script> & \N{GRINNING FACE}'


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()


def add(store: Store, name: str, state: ExperimentState = DONE, at: float = 1.0, **more: Any) -> Submission:
    made = Submission(name=name, state=state, created_at=at, changed_at=at, **more)
    assert store.add(made)
    return made


def names(store: Store, **asked: Any) -> list[str]:
    return [row.name for row in store.submissions(**asked).items]


# Labels


@given(st.lists(st.sampled_from("abcdef")), st.lists(st.sampled_from("ghij")))
def test_a_change_of_tags_that_is_repeated_changes_nothing_more(added: list[str], removed: list[str]) -> None:
    change = LabelChange(add_tags=tuple(added), remove_tags=tuple(removed), note="n")
    once = change.applied(Labels(tags=("g", "z")))
    assert change.applied(once) == once
    assert set(once.tags) == ({"g", "z"} | {*added}) - {*removed}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"add_tags": ("<b>",)}, "a tag has 1 to 32 letters, digits and"),
        ({"add_tags": ("",)}, "a tag has 1 to 32 letters"),
        ({"add_tags": ("-x",)}, "begins with a letter or digit"),
        ({"add_tags": ("a b",)}, "a tag has 1 to 32 letters"),
        ({"add_tags": ("x" * 33,)}, "a tag has 1 to 32 letters"),
        ({"add_tags": ("a",), "remove_tags": ("A",)}, "both added and removed"),
        ({"add_tags": tuple(f"t{at}" for at in range(MOST_TAGS + 1))}, "at most 20 tags, and this makes 21"),
        ({"note": "x" * (LONGEST_NOTE + 1)}, "the note has 1001 characters, and at most 1000"),
        ({"note": "a\x1b[2J"}, "control characters"),
        ({"note": "a \u202egnp.exe"}, "control characters"),
    ],
)
def test_labels_beyond_the_limits_are_refused_in_a_line(change: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        LabelChange(**change).applied(Labels())
    assert "\n" not in str(refused.value)


def test_a_note_is_replaced_only_if_it_is_the_one_that_was_read() -> None:
    theirs = Labels(note="theirs")
    with pytest.raises(NoteChangedError, match="changed meanwhile, to 'theirs'; read it") as refused:
        LabelChange(note="mine", note_before="").applied(theirs)
    assert refused.value.note == "theirs"
    change = LabelChange(note="mine", note_before=" theirs\r\n", add_tags=("a",))
    once = change.applied(theirs)
    assert once.note == "mine"
    assert change.applied(once) == once, "a request that is sent twice counts once"
    with pytest.raises(InputError, match="give both or neither"):
        LabelChange(note_before="theirs").applied(theirs)


@given(st.text(max_size=34))
def test_a_tag_that_is_taken_is_read_again_as_it_is(tag: str) -> None:
    try:
        once = LabelChange(add_tags=(tag,)).applied(Labels())
    except InputError:
        return
    assert LabelChange(add_tags=once.tags).applied(Labels()) == once
    assert same_case(tag) in once.tags


def test_a_tag_whose_lower_case_is_no_tag_is_refused_and_accents_are_one_character(store: Store) -> None:
    with pytest.raises(InputError, match="a tag has 1 to 32 letters"):
        LabelChange(add_tags=("\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}zmir",)).applied(Labels())
    add(store, "one")
    store.upkeep.label("one", LabelChange(add_tags=("cafe\N{COMBINING ACUTE ACCENT}",)))
    assert names(store, tags=["caf\N{LATIN SMALL LETTER E WITH ACUTE}"]) == ["one"]
    assert names(store, tags=["CAFE\N{COMBINING ACUTE ACCENT}"]) == ["one"]


def test_labels_are_found_by_tag_and_by_words(store: Store) -> None:
    for name in ("one", "two", "three"):
        add(store, name)
    assert store.upkeep.label("nothing", LabelChange()) is None
    store.upkeep.label("one", LabelChange(add_tags=("Vision", "größe"), note=HOSTILE))
    store.upkeep.label("two", LabelChange(add_tags=("vision-2",), note="100 % of it"))
    assert store.submission("one").labels == Labels(tags=("größe", "vision"), note=HOSTILE)  # type: ignore[union-attr]
    for asked, found in (
        ({"tags": ["vision"]}, ["one"]),
        ({"tags": ["VISION", "größe"]}, ["one"]),
        ({"tags": ["vision", "old"]}, []),
        ({"tags": ["%"]}, []),
        ({"search": "vision"}, ["two", "one"]),
        ({"search": "<script> done"}, ["one"]),
        ({"search": "100 %"}, ["two"]),
    ):
        assert names(store, **asked) == found, asked
        assert sum(store.count_states(**asked).values()) == len(found)
    store.upkeep.label("one", LabelChange(remove_tags=("vision",), note=""))
    assert names(store, tags=["vision"]) == []


def test_the_archived_leave_the_list_unless_they_run(store: Store) -> None:
    for name, state in (("kept", DONE), ("old", DONE), ("runs", RUNNING)):
        add(store, name, state)
    for name in ("old", "runs"):
        store.upkeep.label(name, LabelChange(archived=True))
    assert names(store, archived=False) == ["runs", "kept"]
    assert names(store, archived=True) == ["old"]
    assert len(names(store)) == 3
    store.upkeep.label("old", LabelChange(archived=False))
    assert names(store, archived=True) == []


# Deletion in the store


def test_a_deleted_experiment_leaves_nothing_but_its_bill(store: Store) -> None:
    words = {"resources": {"provider": "aws"}}
    gone = add(store, "gone", at=10.0, owner="ann", words=words, summary=Summary(cost_usd=3.0, month_cost_usd=3.0))
    add(store, "other")
    events = [Entry(experiment="gone", seq=seq, kind="Tick", occurred_at=1.0, data={}) for seq in range(3)]
    store.append(events)
    last_id, bills = store.last_feed_id(), [store.bills(since=1.0), store.bills(since=1.0, owner="ann")]
    bills.append(store.bills(since=1.0, provider="aws"))
    assert not store.upkeep.delete(gone, expected={RUNNING})
    assert store.upkeep.delete(gone, expected=OVER)
    assert not store.upkeep.delete(gone, expected=OVER)
    assert names(store) == ["other"]
    after = [store.bills(since=1.0), store.bills(since=1.0, owner="ann"), store.bills(since=1.0, provider="aws")]
    assert [sorted(each, key=repr) for each in after] == [sorted(each, key=repr) for each in bills]
    assert store.bills(since=11.0) == []
    assert store.owners(since=10.0) == ["ann"]
    assert store.bills(since=1.0, owner="bob") == []
    assert [event for event in store.feed() if event.experiment == "gone"] == []
    assert store.last_feed_id() == store.last_pruned_id() == last_id, "a reader misses some and sees it"
    assert "gone" not in store.last_seqs()
    add(store, "gone", QUEUED)
    store.append(events)
    assert len(store.feed(experiment="gone")) == 4, "another one of its name has events of its own"


# REST


def test_labels_and_deletion_over_rest(service: FakeService) -> None:
    service.add("one", state=DONE)
    service.add("busy")
    ask = partial(service.client.request, "PATCH")
    labelled = ask("/v1/experiments/one", json={"add_tags": ["vision"], "note": HOSTILE, "archived": True})
    assert labelled.status_code == 200
    assert {name: labelled.json()[name] for name in ("tags", "note", "archived")} == {
        "tags": ["vision"],
        "note": HOSTILE,
        "archived": True,
    }
    for body, status in (({}, 422), ({"tags": []}, 422), ({"note": 3}, 422), ({"add_tags": ["<b>"]}, 422)):
        assert ask("/v1/experiments/one", json=body).status_code == status, body
    assert ask("/v1/experiments/nothing", json={"note": ""}).status_code == 404
    get = service.client.get
    assert [row["name"] for row in get("/v1/experiments").json()["items"]] == ["busy"]
    assert [row["name"] for row in get("/v1/experiments?archived=true&tag=vision").json()["items"]] == ["one"]
    delete = partial(service.client.request, "DELETE")
    looked = delete("/v1/experiments/one?dry_run=true").json()
    assert (looked["deleted"], looked["size_bytes"]) == (False, 5000)
    key = {"Idempotency-Key": "k"}
    deleted = [delete("/v1/experiments/one", headers=key) for _ in range(2)]
    assert [(each.status_code, each.json()["deleted"]) for each in deleted] == [(200, True)] * 2
    assert delete("/v1/experiments/one").status_code == 404
    assert delete("/v1/experiments/busy").status_code == 409


def test_the_list_has_hostile_labels_as_text_and_its_filters_in_links(service: FakeService) -> None:
    service.add("one", state=DONE)
    labels = {"add_tags": ["a/b", "größe"], "note": HOSTILE}
    assert service.client.request("PATCH", "/v1/experiments/one", json=labels).status_code == 200
    page = service.client.get("/?tag=gr%C3%B6%C3%9Fe&show=done").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert 'href="/?show=stopped&amp;tag=gr%C3%B6%C3%9Fe"' in page
    assert 'href="/?show=done"' in page, "without the tag"
    assert 'href="/?tag=a%2Fb"' in page
    assert "<script>alert" not in service.client.get("/experiments/one").text


def test_a_list_of_two_hundred_asks_the_store_no_more_than_one_of_five(service: FakeService) -> None:
    asked: list[str] = []

    def count(*event: Any) -> None:
        asked.append(event[2])

    def page(path: str) -> tuple[int, int]:
        asked.clear()
        return len(service.client.get(path).text), len(asked)

    event.listen(Engine, "before_cursor_execute", count)
    for at in range(5):
        service.add(f"few-{at}", state=DONE)
    few = {path: page(path) for path in ("/", "/?search=few", "/?tag=x")}
    for at in range(195):
        service.add(f"many-{at:03}", state=DONE, created_at=2000.0 + at, words=words())
        service.store.upkeep.label(f"many-{at:03}", LabelChange(add_tags=(f"t{at % 7}",), note="a note of some words"))
    for path, (_, queries) in few.items():
        size, now = page(path)
        assert now == queries, path
        assert size < 60_000, path
    assert page("/v1/experiments?limit=200")[1] == 1
    event.remove(Engine, "before_cursor_execute", count)


# The service's runs


def test_an_ended_experiment_is_deleted_and_another_one_of_its_name_runs(house: House) -> None:
    house.tell(busy="hold")
    with house.open() as runs:
        runs.submit(experiment(), owner="ann")
        runs.submit(experiment("busy"))
        house.wait("one", DONE)
        house.wait("busy", RUNNING)
        folder, spent = ExperimentFolder(home=house.home, name="one"), house.store.bills(since=0.0, owner="ann")
        runs.care.label("one", LabelChange(add_tags=("vision",)))
        assert read_labels(folder).tags == ("vision",), "the commands of the home see it"
        with pytest.raises(HttpProblem, match="only an experiment that has ended is deleted; cancel it"):
            runs.care.delete("busy")
        going = runs.care.removal("one")
        assert going.size_bytes >= folder.journal.stat().st_size
        assert runs.care.delete("one") == going
        assert not folder.path.exists()
        with pytest.raises(HttpProblem, match="not found"):
            runs.care.removal("one")
        assert house.store.bills(since=0.0, owner="ann") == spent
        runs.submit(experiment(), owner="ann")
        row = house.wait("one", DONE)
        house.go()
        house.wait("busy", DONE)
    assert (row.attempt, row.labels) == (1, Labels())
    assert house.seqs("one") == list(range(count_of(house.journal)))
    assert len(house.store.bills(since=0.0, owner="ann")) == 2


def test_a_deletion_waits_for_a_resume_of_the_same_name_alone(house: House) -> None:
    with house.open() as runs, ThreadPoolExecutor(1) as threads:
        for name in ("one", "two"):
            runs.submit(experiment(name))
            house.wait(name, DONE)
        with runs._resuming.of("one"):
            assert runs.care.delete("two").name == "two"
            going = threads.submit(runs.care.delete, "one")
            assert wait([going], timeout=0.3).not_done
            assert ExperimentFolder(home=house.home, name="one").exists
        assert going.result(timeout=60.0).name == "one"


def test_one_that_never_began_is_deleted_too(house: House) -> None:
    house.allow(0)
    with house.open() as runs:
        runs.submit(experiment())
        runs.cancel("one")
        runs.care.label("one", LabelChange(note="never"))
        assert runs.care.delete("one").checkpoints == 0
    assert house.store.submission("one") is None
    assert not ExperimentFolder(home=house.home, name="one").path.exists()


def test_one_that_is_labelled_in_the_queue_runs_with_its_labels(house: House) -> None:
    house.allow(0)
    with house.open() as runs:
        runs.submit(experiment())
        runs.care.label("one", LabelChange(add_tags=("early",)))
    house.allow(1)
    with house.open():
        assert house.wait("one", DONE).labels.tags == ("early",)
    assert read_labels(ExperimentFolder(home=house.home, name="one")).tags == ("early",)


def test_files_that_cannot_be_deleted_leave_the_experiment_and_show_no_path(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", DONE)

        def fails(*_: object) -> None:
            raise InputError(f"{house.home} cannot be deleted (read-only); give access")

        monkeypatch.setattr("rubberband.api.experiments.remove", fails)
        with pytest.raises(HttpProblem, match="the log of the service has the cause") as refused:
            runs.care.delete("one")
        assert str(house.home) not in str(refused.value)
        assert house.row("one").state is DONE


def test_labels_given_before_the_service_are_taken_in(house: House) -> None:
    recorded(words(name="by-hand")).put(house.home)
    run_here(house.home, "tag", "by-hand", "+vision", "--note", "before")
    with house.open():
        row = house.wait("by-hand", DONE)
    assert row.labels == Labels(tags=("vision",), note="before")


def test_a_pools_cap_counts_what_was_deleted(house: House) -> None:
    pool = SharedPool(name="team", provider="virtual", instances=4, gpus_per_instance=1, max_usd_per_month=500.0)
    house.set(pool=pool)
    with house.open() as runs:
        runs.submit(experiment())
        house.wait("one", DONE)
        assert runs.admission is not None
        budgets, now = runs.admission.budgets, house.clock()
        before = dict(budgets.committed_usd(now, bill_usd=None))
        assert sum(before.values()) > 0.0
        runs.care.delete("one")
        assert dict(budgets.committed_usd(now, bill_usd=None)) == before


# The commands in a home


def run_here(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"RUBBERBAND_HOME": str(home)})


def listed(home: Path, *options: str) -> list[str]:
    return [row["name"] for row in json.loads(run_here(home, "ps", "-o", "json", *options).stdout)["experiments"]]


def test_a_home_lists_by_tag_by_note_and_without_the_archived(tmp_path: Path) -> None:
    run = recorded(words(name="one"))
    run.put(tmp_path)
    run.named("two").put(tmp_path)
    said = run_here(tmp_path, "tag", "one", "+Vision", "+hard", "-old", "--note", "the baseline")
    assert "tags      hard vision" in said.stdout
    assert "tags      vision" in run_here(tmp_path, "tag", "one", "-hard").stdout, "-h of -hard is no option"
    assert "note" in run_here(tmp_path, "status", "one").stdout
    assert listed(tmp_path, "--tag", "vision") == ["one"]
    assert listed(tmp_path, "--search", "baseline") == ["one"]
    run_here(tmp_path, "tag", "one", "--archive")
    assert (listed(tmp_path), listed(tmp_path, "--archived")) == (["two"], ["one"])
    run_here(tmp_path, "tag", "one", "--unarchive")
    assert listed(tmp_path) == ["one", "two"]
    assert "no tags and no note" in run_here(tmp_path, "tag", "two").stdout


@pytest.mark.parametrize("state", ExperimentState)
def test_the_reason_of_a_state_is_shown_where_it_says_more_than_the_state(
    state: ExperimentState, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Submission(name="one", state=state, created_at=1.0, changed_at=1.0, reason="why it is so")
    says_all = state in (RUNNING, DONE, ExperimentState.CANCELLED)
    monkeypatch.setattr(local_experiment, "local_experiments", lambda *_: [experiment_view(row)])
    assert ("why it is so" in CliRunner().invoke(cli.app, ["ps"]).stdout) is not says_all
    assert (f"{state}: why it is so" in headline(experiment_view(row))) is not says_all


def test_a_running_experiment_is_listed_once_also_if_it_is_archived(tmp_path: Path) -> None:
    run = recorded(words(name="one"))
    folder = run.put(tmp_path, len(run.events) // 2)
    with folder.driving():
        assert (listed(tmp_path), listed(tmp_path, "--archived")) == (["one"], [])
        write_labels(folder, Labels(archived=True))
        assert (listed(tmp_path), listed(tmp_path, "--archived")) == (["one"], [])
    assert (listed(tmp_path), listed(tmp_path, "--archived")) == ([], ["one"])


@pytest.mark.parametrize("word", ["vision", "--nte"])
def test_a_word_that_is_no_tag_is_refused(tmp_path: Path, word: str) -> None:
    recorded(words(name="one")).put(tmp_path)
    error = run_here(tmp_path, "tag", "one", word).exception
    assert isinstance(error, InputError)
    assert "is neither an option nor a tag; write +TAG to add one" in str(error)


def test_a_tag_given_here_is_in_the_list_of_the_homes_service(tmp_path: Path) -> None:
    folder = recorded(words(name="one")).put(tmp_path)
    store = open_store(None, tmp_path)
    add(store, "one")
    assert run_here(tmp_path, "tag", "one", "+vision").exit_code == 0
    assert names(store, tags=["vision"]) == ["one"]
    assert read_labels(folder) == Labels(tags=("vision",))
    store.close()


def test_a_list_reads_the_journals_of_the_ended_once_and_sees_what_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(words(name="one"))
    folder, cut = run.put(tmp_path), run.named("cut").put(tmp_path, len(run.events) // 2)
    first = run_here(tmp_path, "ps", "-o", "json").stdout
    opened: list[str] = []

    class Counted(JournalFollower):
        def __init__(self, folder: ExperimentFolder) -> None:
            opened.append(folder.name)
            super().__init__(folder)

    monkeypatch.setattr(local_experiment, "JournalFollower", Counted)
    assert run_here(tmp_path, "ps", "-o", "json").stdout == first
    assert opened == ["cut"], "one that is not over is read each time"
    run_here(tmp_path, "tag", "one", "+vision")
    run.named("cut").grow(cut, len(run.events) // 2, len(run.events))
    assert listed(tmp_path, "--tag", "vision") == ["one"]
    assert listed(tmp_path, "--search", "done") == ["cut", "one"]
    opened.clear()
    folder.listed.write_text('{"version": "0", "stamp": []}')
    assert listed(tmp_path) == ["cut", "one"]
    assert opened == ["one"], "another version reads it again"
