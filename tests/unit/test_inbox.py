"""Requests to a driver: on disk and in memory alike; on disk, whatever else lies in the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rubberband.errors import InputError
from rubberband.executor import DriverRequest, Inbox
from tests.builders.memory import MemoryInbox
from tests.builders.power_cut import PowerCut

LATER = DriverRequest(id="a-1", kind="extend", asked_at=20.0, deadline_s=60.0, max_cost_usd=1.5)
CANCEL = DriverRequest(id="b-2", kind="cancel", asked_at=10.0)


@pytest.fixture(params=["disk", "memory"])
def inbox(request: pytest.FixtureRequest, tmp_path: Path) -> Inbox | MemoryInbox:
    return MemoryInbox() if request.param == "memory" else Inbox(tmp_path / "an inbox")


def test_requests_come_back_whole_in_the_order_in_which_they_were_asked(inbox: Inbox | MemoryInbox) -> None:
    assert inbox.pending() == []
    inbox.put(CANCEL)
    inbox.put(LATER)
    assert inbox.pending() == [CANCEL, LATER]
    assert inbox.pending({"b-2"}) == [LATER]


def test_the_order_stays_where_the_clock_steps_back_between_two_requests(inbox: Inbox | MemoryInbox) -> None:
    for id, asked_at in (("c", 1000.0), ("b", 999.8), ("a", 999.9)):
        inbox.put(DriverRequest(id=id, kind="limit", asked_at=asked_at, max_instances=0))
    assert [request.id for request in inbox.pending()] == ["c", "b", "a"]


def test_a_request_repeated_by_id_counts_once(inbox: Inbox | MemoryInbox) -> None:
    inbox.put(LATER)
    inbox.put(DriverRequest(id=LATER.id, kind="cancel", asked_at=30.0))
    assert inbox.pending() == [LATER]


def test_a_discarded_checkpoint_is_gone_and_may_be_discarded_again(inbox: Inbox | MemoryInbox) -> None:
    inbox.put(LATER)
    inbox.discard(LATER.id)
    inbox.discard(LATER.id)
    assert inbox.pending() == []


def test_cancels_can_be_withdrawn_and_nothing_else_with_them(inbox: Inbox | MemoryInbox) -> None:
    inbox.put(CANCEL)
    inbox.put(LATER)
    inbox.withdraw_cancels()
    assert inbox.pending() == [LATER]


@pytest.mark.parametrize("id", ["", "../up", "a/b", "a.b", "a b", "é", "x" * 81])
def test_an_id_that_is_none_is_refused(inbox: Inbox | MemoryInbox, id: str) -> None:
    with pytest.raises(InputError, match="letters, digits and -"):
        inbox.put(DriverRequest(id=id, kind="cancel", asked_at=1.0))
    assert inbox.pending() == []


def test_only_whole_requests_ever_lie_in_the_folder(tmp_path: Path) -> None:
    Inbox(tmp_path).put(CANCEL)
    assert os.listdir(tmp_path) == ["b-2.json"]


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"id": "x", "kind": "cancel"}',
        b'{"id": "other", "kind": "cancel", "asked_at": 1.0}',
        b'{"id": "x", "kind": "explode", "asked_at": 1.0}',
        b'{"id": "x", "kind": "cancel", "asked_at": "1.0"}',
        b'{"id": "x", "kind": "extend", "asked_at": NaN}',
        b'{"id": "x", "kind": "extend", "asked_at": 1.0, "deadline_s": Infinity}',
        b'{"id": "x", "kind": "extend", "asked_at": 1.0, "max_cost_usd": -1.0}',
        b'{"id": "x", "kind": "cancel", "asked_at": 1.0}' + b" " * 20_000,
    ],
)
def test_files_that_are_no_requests_are_left_alone(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "x.json").write_bytes(written)
    Inbox(tmp_path).put(LATER)
    assert Inbox(tmp_path).pending() == [LATER]
    assert (tmp_path / "x.json").read_bytes() == written


def test_links_pipes_folders_and_other_names_are_left_out(tmp_path: Path) -> None:
    inbox, body = Inbox(tmp_path / "inbox"), json.dumps({"id": "x", "kind": "cancel", "asked_at": 1.0})
    inbox.put(LATER)
    (tmp_path / "elsewhere").write_text(body)
    (tmp_path / "inbox" / "x.json").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "inbox" / "x.txt").write_text(body)
    (tmp_path / "inbox" / ".x.json").write_text(body)
    (tmp_path / "inbox" / "folder.json").mkdir()
    os.mkfifo(tmp_path / "inbox" / "pipe.json")
    assert inbox.pending() == [LATER]
    inbox.discard("folder")


def test_a_request_outlives_a_power_cut_also_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    power, inbox = PowerCut(tmp_path, monkeypatch), Inbox(tmp_path / "one" / "inbox")
    for asked in (CANCEL, LATER):
        inbox.put(asked)
        power.cut()
        assert asked in inbox.pending()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "inbox").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        Inbox(tmp_path / "inbox").put(CANCEL)
