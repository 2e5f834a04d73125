"""The service's store, on SQLite and on PostgreSQL: what is kept comes back, in order, once, whoever else writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rubberband.api.settings import Keeping
from rubberband.api.store import ACT_KEPT_S, Store
from rubberband.api.store.schema import METADATA, NUMBERS, Entry, KeptAnswer, Page, Promise, StoredPlan, TokenRecord
from rubberband.errors import InputError, JournalError
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary, matches
from tests.builders.databases import BOTH, run_sql

QUEUED, STARTING, RUNNING, DONE = (
    ExperimentState.QUEUED,
    ExperimentState.STARTING,
    ExperimentState.RUNNING,
    ExperimentState.DONE,
)
DAY_S = 24 * 3600.0
ANSWER = KeptAnswer(status=201, headers={"location": "/v1/experiments/a"}, body=b'{"name":"a"}\x00\xff')
TOKEN = TokenRecord(id="t1", name="ann's", scope="submit", created_at=1.0, expires_at=100.0)
on_one_store = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()


def empty(url: str) -> None:
    """Make the store as a new one would be."""
    run_sql(url, *(f"DELETE FROM {table.name}" for table in METADATA.sorted_tables if table is not NUMBERS))


def submission(name: str, at: float = 1.0, state: ExperimentState = QUEUED) -> Submission:
    return Submission(name=name, state=state, created_at=at, changed_at=at)


def entry(experiment: str, seq: int | None) -> Entry:
    return Entry(experiment=experiment, seq=seq, kind="Tick", occurred_at=float(seq or 0), data={"seq": seq})


def names(page: Page) -> list[str]:
    return [item.name for item in page.items]


@BOTH
def test_an_experiment_comes_back_as_it_was(store: Store) -> None:
    whole = Submission(
        name="digits",
        state=STARTING,
        created_at=0.1 + 0.2,
        changed_at=1763756400.123456,
        owner="ann",
        words={"name": "digits", "search": {"space": {"ü": [1, 2.5, None, True]}}},
        policy="greedy",
        plan="p1",
        request="r1",
        reason="a \N{GRINNING FACE}",
        attempt=2,
        summary=Summary(trials=4, cost_usd=0.1 + 0.2, best_value=-1.5, best_trial=3, metric="loss", mode="min"),
    )
    assert store.submission("digits") is None
    assert store.add(whole)
    assert store.submission("digits") == whole
    assert store.submissions().items == [whole]


def test_a_name_is_given_once(store: Store) -> None:
    assert store.add(submission("a", 1.0))
    assert not store.add(submission("a", 2.0, RUNNING))
    assert store.submission("a") == submission("a", 1.0)
    assert [event.data["state"] for event in store.feed()] == ["queued"]


def test_lists_are_newest_first_by_state_and_page(store: Store) -> None:
    for number, state in enumerate((QUEUED, RUNNING, DONE, RUNNING, QUEUED)):
        store.add(submission(f"x{number}", number // 2, state))
    assert names(store.submissions()) == ["x4", "x3", "x2", "x1", "x0"]
    assert names(store.submissions(states={RUNNING, DONE})) == ["x3", "x2", "x1"]
    assert names(store.submissions(states=[])) == []
    first = store.submissions(limit=2)
    assert names(first) == ["x4", "x3"]
    second = store.submissions(limit=2, after=first.next)
    assert names(second) == ["x2", "x1"]
    last = store.submissions(limit=2, after=second.next)
    assert (names(last), last.next) == (["x0"], None)
    assert store.submissions(limit=5).next is None


def test_a_promise_that_moves_moves_no_other(store: Store) -> None:
    first = Promise(experiment="one", start_at=10.0, spans=[[1, 60.0]], cost_usd=0.1)
    second = dataclasses.replace(first, experiment="two", start_at=70.0)
    for promise in (first, second):
        assert store.add(submission(promise.experiment), promise)
    later = dataclasses.replace(second, start_at=90.0, spans=[[2, 30.0]])
    store.move(later)
    assert store.promises() == [first, later]


@BOTH
def test_a_promise_to_an_experiment_that_stays_interrupted_lapses_and_its_reason_says_so(store: Store) -> None:
    for name in ("late", "just-now", "runs"):
        assert store.add(submission(name), Promise(experiment=name, start_at=10.0, spans=[[1, 60.0]]))
    assert store.add(submission("bare"))
    for name, at in (("late", 50.0), ("just-now", 51.0), ("bare", 50.0)):
        store.change(name, at=at, state=ExperimentState.INTERRUPTED, reason="killed")
    store.lapse(before=50.0, note="; lapsed")
    assert {promise.experiment for promise in store.promises()} == {"just-now", "runs"}
    reasons = {name: found.reason for name in ("late", "just-now", "bare") if (found := store.submission(name))}
    assert reasons == {"late": "killed; lapsed", "just-now": "killed", "bare": "killed"}
    store.change("late", at=60.0, state=QUEUED, reason="")
    assert {promise.experiment for promise in store.promises()} == {"just-now", "runs"}


def test_a_promise_that_ended_with_its_experiment_does_not_come_back_with_a_resume(store: Store) -> None:
    assert store.add(submission("one"), Promise(experiment="one", start_at=10.0, spans=[[1, 60.0]]))
    store.change("one", at=2.0, state=ExperimentState.CANCELLED)
    store.change("one", at=3.0, state=QUEUED)
    assert store.promises() == []


@BOTH
def test_a_search_is_for_all_its_words_in_names_owners_and_states(store: Store) -> None:
    for name, owner, state in [("resnet-a", "Ann", DONE), ("resnet-b", "bob", RUNNING), ("50_percent", "ann", DONE)]:
        store.add(dataclasses.replace(submission(name, 1.0, state), owner=owner))
    for search, found in {
        "": ["resnet-b", "resnet-a", "50_percent"],
        "RES": ["resnet-b", "resnet-a"],
        "net ann": ["resnet-a"],
        "done": ["resnet-a", "50_percent"],
        " 0_p ": ["50_percent"],
        "%": [],
        "_": ["50_percent"],
        "res\0ann": ["resnet-a"],
        "\\'": [],
    }.items():
        assert names(store.submissions(search=search)) == found, search
        assert sum(store.count_states(search=search).values()) == len(found)
        rows = {"resnet-a": ("Ann", DONE), "resnet-b": ("bob", RUNNING), "50_percent": ("ann", DONE)}
        assert {name for name, texts in rows.items() if matches(search, name, *texts)} == set(found)
    first = store.submissions(search="res", limit=1)
    assert names(store.submissions(search="res", limit=1, after=first.next)) == ["resnet-a"]


def test_a_forged_cursor_is_refused(store: Store) -> None:
    shapes = ["W10", "WzFd", "bnVsbA", "WzEsICJhIl0", "W05hTiwgImEiXQ", "WzEuMCwgMl0"]
    for cursor in ["", "x", "ü", "[]", "=", "\0", "A" * 5000, *shapes]:
        with pytest.raises(InputError, match="cursor"):
            store.submissions(after=cursor)


@BOTH
@on_one_store
@given(
    before=st.lists(st.integers(0, 5), max_size=12),
    between=st.lists(st.integers(0, 5), max_size=12),
    limit=st.integers(1, 5),
)
def test_pages_hold_every_entry_once_and_in_order_despite_new_ones(
    store: Store, store_url: str, before: list[int], between: list[int], limit: int
) -> None:
    empty(store_url)
    for number, at in enumerate(before):
        store.add(submission(f"old-{number}", at))
    coming = iter(enumerate(between))
    seen: list[Submission] = []
    cursor: str | None = None
    while True:
        page = store.submissions(limit=limit, after=cursor)
        seen += page.items
        for number, at in coming:
            store.add(submission(f"new-{number}", at))
            break
        cursor = page.next
        if cursor is None:
            break
    assert all((a.created_at, a.name) > (b.created_at, b.name) for a, b in pairwise(seen))
    assert {f"old-{number}" for number in range(len(before))} <= {item.name for item in seen}


@BOTH
@on_one_store
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "nobody"]),
            st.none() | st.sampled_from(list(ExperimentState)),
            st.none() | st.sets(st.sampled_from(list(ExperimentState))),
            st.none() | st.sampled_from(["", "why"]),
            st.none() | st.integers(0, 3),
        ),
        max_size=10,
    )
)
def test_a_change_changes_what_it_names_if_it_may_and_shows_each_new_state(
    store: Store,
    store_url: str,
    changes: list[tuple[str, ExperimentState | None, set[ExperimentState] | None, str | None, int | None]],
) -> None:
    empty(store_url)
    model = {name: submission(name) for name in "ab"}
    for one in model.values():
        store.add(one)
    lines = [(name, "queued", None, "") for name in "ab"]
    for at, (name, state, expected, reason, attempt) in enumerate(changes, start=2):
        now = model.get(name)
        may = now is not None and (expected is None or now.state in expected)
        assert store.change(name, at=at, state=state, expected=expected, reason=reason, attempt=attempt) is may
        if now is None or not may:
            continue
        given = {"state": state, "reason": reason, "attempt": attempt}
        kept = {key: value for key, value in given.items() if value is not None}
        model[name] = dataclasses.replace(now, changed_at=float(at), **kept)  # type: ignore[arg-type]
        if model[name].state is not now.state:
            lines.append((name, model[name].state, now.state, model[name].reason))
    assert {name: store.submission(name) for name in "ab"} == model
    events = [(e.experiment, e.data["state"], e.data["before"], e.data["reason"]) for e in store.feed()]
    assert events == lines


def test_changed_values_come_back(store: Store) -> None:
    store.add(submission("a"))
    summary = Summary(iterations=7, forecast_jct_s=12.5)
    assert store.change("a", at=2.0, summary=summary, words={"name": "a"})
    assert store.submission("a") == dataclasses.replace(
        submission("a"), changed_at=2.0, summary=summary, words={"name": "a"}
    )


@BOTH
def test_the_feed_is_in_order_and_holds_nothing_twice(store: Store) -> None:
    assert (store.feed(), store.last_feed_id(), store.last_seqs(), store.last_seqs(["a"])) == ([], 0, {}, {})
    store.append([entry("a", seq) for seq in range(3)])
    store.append([entry("b", 0), entry("a", None)])
    store.append([entry("a", 2), entry("a", 3), entry("a", 3)])
    store.append([])
    found = store.feed()
    assert [(event.experiment, event.seq) for event in found] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
        ("a", None),
        ("a", 3),
    ]
    assert all(a.id < b.id for a, b in pairwise(found))
    assert (found[1].kind, found[1].occurred_at, found[1].data) == ("Tick", 1.0, {"seq": 1})
    assert store.feed(after=found[2].id) == found[3:]
    assert store.feed(after=found[2].id, limit=1) == [found[3]]
    assert store.feed(experiment="b") == [found[3]]
    assert store.feed(after=10**30) == []
    assert store.last_feed_id() == found[-1].id
    assert store.last_seqs() == {"a": 3, "b": 0}
    assert store.last_seqs(["b", "c"]) == {"b": 0}


def test_an_entry_too_large_to_keep_is_dropped_whole(store: Store) -> None:
    broken = dataclasses.replace(entry("a", 1), data={"x": object()})
    with pytest.raises(JournalError, match="cannot be written"):
        store.append([entry("a", 0), broken])
    assert store.feed() == []


@BOTH
def test_values_that_json_lacks_become_null(store: Store) -> None:
    store.append([dataclasses.replace(entry("a", 0), data={"x": [float("nan"), -float("inf"), (1, 2.0)]})])
    assert store.feed()[0].data == {"x": [None, None, [1, 2.0]]}


@BOTH
def test_odd_names_are_just_not_there(store: Store) -> None:
    store.add(submission("a"))
    for odd in ("\0", "a\0b", "\ud800", "a" * 10_000, "' OR 1=1 --", "ä", ""):
        assert store.submission(odd) is None
        assert store.plan(odd) is None
        assert store.find_tokens([odd]) == {}
        assert store.find_sessions([odd], at=1.0) == {}
        assert store.feed(experiment=odd) == []
        assert not store.change(odd, at=2.0, state=DONE)
        assert not store.revoke_token(odd, at=2.0)


@BOTH
def test_odd_texts_are_kept_readable(store: Store) -> None:
    store.add(dataclasses.replace(submission("a"), reason="a\0b\udcff", owner="\0", words={"k": "a\0b"}))
    found = store.submission("a")
    assert found is not None
    assert found.reason[0] == "a"
    assert found.words == {"k": "a\0b"}
    assert "\0" not in found.reason
    found.reason.encode()


@BOTH
def test_plans_are_kept_and_the_oldest_let_go(store_url: str) -> None:
    store = Store(store_url, Keeping(plans=2, plans_s=20.0))
    plan = StoredPlan(id="p0", created_at=0.0, words={"name": "a"}, options={"seed": 1}, status=422, body=b"{\x00\xff}")
    for number in range(4):
        store.keep_plans([dataclasses.replace(plan, id=f"p{number}", created_at=float(number))])
    store.keep_plans([dataclasses.replace(plan, created_at=9.0)])
    store.prune(at=10.0)
    assert store.plan("p0") == dataclasses.replace(plan, created_at=9.0)
    assert [store.plan(f"p{number}") is not None for number in range(4)] == [True, False, False, True]
    assert store.plan_ids() == ["p3", "p0"]
    store.prune(at=23.0)
    assert [store.plan(f"p{number}") is not None for number in range(4)] == [True, False, False, False]
    store.close()


@BOTH
def test_one_token_signs_a_limited_number_of_browsers_in(store_url: str) -> None:
    store = Store(store_url, Keeping(sessions=2))
    for token in ("t1", "t2"):
        store.add_token(dataclasses.replace(TOKEN, id=token, expires_at=None), "hash")
    store.add_session("other", token="t2", expires_at=10.0)
    for number in range(4):
        store.add_session(f"s{number}", token="t1", expires_at=50.0 + number)
    assert store.find_sessions({"s0", "s1", "s2", "s3", "other"}, at=1.0).keys() == {"s2", "s3", "other"}
    store.close()


@BOTH
def test_events_of_long_ended_runs_are_dropped_little_by_little(store: Store) -> None:
    store.append([entry("old", seq) for seq in range(5)])
    store.append([entry(name, seq) for name in ("waits", "new") for seq in range(2)])
    store.add(submission("old", 1.0, DONE))
    store.add(submission("waits", 1.0, RUNNING))
    store.add(submission("new", 5 * DAY_S, DONE))
    before = store.feed()
    assert store.prune_feed(at=30 * DAY_S) == 0
    gone = []
    while removed := store.prune_feed(at=30 * DAY_S + 1.0, limit=4):
        gone.append((removed, store.last_pruned_id("old"), store.last_pruned_id(), store.last_pruned_id("new")))
    assert gone == [(4, before[3].id, before[3].id, 0), (2, before[9].id, before[9].id, 0)]
    assert store.feed() == [event for event in before if event.experiment != "old"]
    assert store.last_seqs() == {"old": 4, "waits": 1, "new": 1}
    assert store.last_seqs(["old", "nobody"]) == {"old": 4}


def test_a_run_whose_events_were_dropped_continues_from_there(store: Store) -> None:
    store.append([entry("a", seq) for seq in range(3)])
    store.add(submission("a", 1.0, DONE))
    last = store.last_feed_id()
    assert store.prune_feed(at=40 * DAY_S) == 4
    assert (store.feed(), store.last_feed_id(), store.last_pruned_id()) == ([], last, last)
    store.change("a", at=40 * DAY_S, state=QUEUED)
    store.append([entry("a", 3)])
    assert [(event.seq, event.id > last) for event in store.feed()] == [(None, True), (3, True)]
    assert store.last_seqs() == {"a": 3}
    assert store.prune_feed(at=90 * DAY_S) == 0
    store.change("a", at=41 * DAY_S, state=DONE)
    assert store.prune_feed(at=90 * DAY_S) == 3
    assert (store.last_seqs(), store.last_pruned_id("a")) == ({"a": 3}, last + 3)


@BOTH
def test_a_token_is_kept_used_and_revoked(store: Store) -> None:
    later = dataclasses.replace(TOKEN, id="t0", created_at=2.0, expires_at=None, scope="admin")
    store.add_token(later, "hash0")
    store.add_token(TOKEN, "hash1")
    assert store.find_tokens(["t1", "nobody"]) == {"t1": (TOKEN, "hash1")}
    assert store.tokens() == [TOKEN, later]
    store.touch_token("t1", at=5.0)
    store.touch_token("nobody", at=5.0)
    assert store.revoke_token("t1", at=6.0)
    assert store.revoke_token("t1", at=7.0)
    assert not store.revoke_token("nobody", at=7.0)
    assert store.find_tokens(["t1", "nobody"]) == {
        "t1": (dataclasses.replace(TOKEN, last_used_at=5.0, revoked_at=6.0), "hash1")
    }
    with pytest.raises(JournalError):
        store.add_token(TOKEN, "another")


@BOTH
def test_a_session_lasts_as_long_as_it_may_and_its_token_does(store: Store) -> None:
    store.add_token(TOKEN, "hash")
    store.add_session("s1", token="t1", expires_at=50.0)
    store.add_session("s2", token="t1", expires_at=500.0)
    assert store.find_sessions(["s1"], at=49.0) == {"s1": TOKEN}
    assert store.find_sessions(["s1"], at=50.0) == {}
    assert store.find_sessions(["s2"], at=99.0) == {"s2": TOKEN}
    assert store.find_sessions(["s2"], at=100.0) == {}
    store.end_session("s1")
    store.end_session("s1")
    assert store.find_sessions(["s1"], at=1.0) == {}
    store.revoke_token("t1", at=60.0)
    assert store.find_sessions(["s2"], at=61.0) == {}


def test_pruning_ends_old_sessions_and_keys_only(store: Store) -> None:
    store.add_token(TOKEN, "hash")
    store.add_session("s1", token="t1", expires_at=50.0)
    store.add_session("s2", token="t1", expires_at=51.0)
    store.prune(at=50.0)
    assert store.find_sessions(["s1", "s2"], at=1.0) == {"s2": TOKEN}
    assert store.claim_key("k", owner="ann", request_hash="h", at=0.0) is None
    store.prune(at=86_400.0)
    assert store.claim_key("k", owner="ann", request_hash="other", at=5.0) is None


@BOTH
def test_a_key_is_claimed_once_and_answered_from_then_on(store: Store) -> None:
    assert store.claim_key("k", owner="ann", request_hash="h", at=0.0) is None
    assert store.claim_key("k", owner="ann", request_hash="h", at=1.0) == "busy"
    assert store.claim_key("k", owner="ann", request_hash="other", at=1.0) == "reused"
    assert store.claim_key("k", owner="bob", request_hash="other", at=1.0) is None
    store.keep_answer("k", owner="ann", answer=ANSWER, at=2.0)
    store.keep_answer("k", owner="ann", answer=dataclasses.replace(ANSWER, status=500), at=3.0)
    store.free_key("k", owner="ann")
    assert store.claim_key("k", owner="ann", request_hash="h", at=100.0) == ANSWER
    assert store.claim_key("k", owner="ann", request_hash="other", at=100.0) == "reused"
    assert store.claim_key("k", owner="bob", request_hash="other", at=2.0) == "busy"


def test_a_server_that_starts_finds_no_request_being_served(store: Store) -> None:
    for key in ("answered", "cut-off"):
        assert store.claim_key(key, owner="ann", request_hash="h", at=0.0) is None
    store.keep_answer("answered", owner="ann", answer=ANSWER, at=0.0)
    store.free_keys()
    assert store.claim_key("answered", owner="ann", request_hash="h", at=1.0) == ANSWER
    assert store.claim_key("cut-off", owner="ann", request_hash="h", at=1.0) is None


def test_a_key_is_free_again_after_failure_after_a_minute_without_answer_and_after_a_day(store: Store) -> None:
    def claim(at: float) -> object:
        return store.claim_key("k", owner="ann", request_hash="h", at=at)

    assert claim(0.0) is None
    store.free_key("k", owner="ann")
    assert claim(1.0) is None
    assert claim(60.9) == "busy"
    assert claim(61.0) is None
    assert claim(62.0) == "busy"
    store.keep_answer("k", owner="ann", answer=ANSWER, at=70.0)
    assert claim(86_400.0) == ANSWER
    store.prune(at=86_400.0)
    assert claim(86_400.0) == ANSWER
    assert claim(86_470.0) is None


def test_another_process_finds_all_of_it(store: Store, store_url: str) -> None:
    store.add(submission("a"))
    store.append([entry("a", 0)])
    again = Store(store_url)
    try:
        again.check()
        assert again.submission("a") == submission("a")
        again.append([entry("a", 0), entry("a", 1)])
        assert [event.seq for event in store.feed()] == [None, 0, 1]
    finally:
        again.close()
        again.close()


def test_a_request_has_acted_if_what_it_changes_was_changed(store: Store) -> None:
    assert store.add(submission("a"))
    assert not store.change("a", at=2.0, state=QUEUED, expected={RUNNING}, request="r1")
    assert not store.has_acted("r1", since=0.0)
    assert store.change("a", at=3.0, state=RUNNING, expected={QUEUED}, request="r1")
    assert store.has_acted("r1", since=3.0)
    assert not store.has_acted("r1", since=3.5)
    assert not store.has_acted("r2", since=0.0)


def test_requests_that_acted_are_noted_again_and_forgotten_in_time(store: Store) -> None:
    for at in (1.0, 2.0):
        store.note_act("r1", at=at)
    store.prune(at=ACT_KEPT_S + 1.5)
    assert store.has_acted("r1", since=2.0)
    store.prune(at=ACT_KEPT_S + 2.0)
    assert not store.has_acted("r1", since=0.0)
