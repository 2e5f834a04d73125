"""The clients: what is asked, what is made of the answer, and what happens when there is none."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import rubberband
from rubberband.client.asynchronous import AsyncClient
from rubberband.client.calls import self_contained
from rubberband.client.client import Client
from rubberband.commands.common import open_client
from rubberband.errors import (
    InfeasibleError,
    InputError,
    NameTakenError,
    ProfileMissingError,
    RubberbandError,
    ServiceError,
)
from tests.builders.experiment_words import words

Handler = Callable[[httpx.Request], httpx.Response]


def answering(handler: Handler, **options: Any) -> Client:
    waits: list[float] = []

    def service(request: httpx.Request) -> httpx.Response:
        is_who = request.url.path == "/healthz"
        return httpx.Response(200, json={"status": "ok", "checks": {}}) if is_who else handler(request)

    client = Client(
        "http://service", token="rb_a_b", transport=httpx.MockTransport(service), sleep=waits.append, **options
    )
    client.waits = waits  # type: ignore[attr-defined]
    return client


def problem(status: int, slug: str, detail: str = "what is wrong; the remedy", **more: Any) -> httpx.Response:
    body = {"type": f"/problems/{slug}", "title": "t", "status": status, "detail": detail, **more}
    return httpx.Response(status, json=body, headers={"Content-Type": "application/problem+json"})


def recording(answer: Any) -> tuple[Client, list[httpx.Request]]:
    """A client whose every request is answered the same, and its requests."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=answer)

    return answering(handler), seen


def test_a_preview_sends_the_words_and_the_token() -> None:
    client, seen = recording({"feasible": True, "id": "p1"})
    with client:
        assert client.plan(words(), policy="static", frontier=True)["id"] == "p1"
    (request,) = seen
    assert (request.method, request.url.path) == ("POST", "/v1/plans")
    assert dict(request.url.params) == {"policy": "static", "frontier": "true", "size": "false", "seed": "0"}
    assert request.headers["Authorization"] == "Bearer rb_a_b"
    assert json.loads(request.content)["name"] == words()["name"]


def test_a_submission_has_a_key_that_stays_the_same_when_it_is_sent_again() -> None:
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(201, json={"name": "digits", "state": "queued"})

    with answering(handler) as client:
        assert client.submit(words())["state"] == "queued"
        assert len(keys) == 3
        assert len(set(keys)) == 1
        client.submit(words())
    assert keys[-1] != keys[0]


def test_repeatable_requests_are_retried_when_the_service_says_so() -> None:
    busy = httpx.Response(429, headers={"Retry-After": "3"})
    served = problem(409, "idempotency-key-busy")
    answers = iter([busy, httpx.Response(503), served, httpx.Response(200, json={})])
    with answering(lambda _: next(answers)) as client:
        client.submit(words())
        first, second, _ = client.waits  # type: ignore[attr-defined]
    assert first == 3.0
    assert 0.0 < second <= 10.0


def test_a_request_that_changes_something_has_a_key_and_a_preview_none() -> None:
    client, seen = recording({})
    with client:
        client.extend("digits", deadline="40m")
        client.extend("digits", max_cost=5, dry_run=False)
        client.limit("digits", 2)
        client.limit("digits", None)
        client.experiment("../tokens?x=1")
    *changes, odd = seen
    assert [(json.loads(request.content), "Idempotency-Key" in request.headers) for request in changes] == [
        ({"deadline": "40m", "dry_run": True}, False),
        ({"max_cost": 5, "dry_run": False}, True),
        ({"max_instances": 2}, True),
        ({"max_instances": None}, True),
    ]
    assert odd.url.raw_path == b"/v1/experiments/..%2Ftokens%3Fx%3D1", "a name cannot leave its place in the path"


def test_values_that_json_lacks_are_found_before_sending() -> None:
    with answering(lambda request: httpx.Response(500)) as client, pytest.raises(InputError, match="NaN and infinity"):
        client.extend("digits", max_cost=float("inf"))


@pytest.mark.parametrize(
    ("answer", "kind", "match"),
    [
        (problem(409, "name-taken"), NameTakenError, "the remedy"),
        (problem(422, "invalid"), InputError, "the remedy"),
        (problem(422, "profile-missing"), ProfileMissingError, "the remedy"),
        (problem(404, "not-found", "there is no experiment 'x'"), InputError, "no experiment"),
        (problem(401, "unauthenticated"), InputError, "RUBBERBAND_TOKEN"),
        (problem(403, "forbidden", "this needs scope submit"), InputError, "scope submit"),
        (problem(500, "internal", "reference 17"), ServiceError, "answered 500: reference 17"),
        (httpx.Response(502, text="<html>"), ServiceError, "502"),
    ],
)
def test_problems_are_the_errors_that_the_same_mistake_raises_here(
    answer: httpx.Response, kind: type[Exception], match: str
) -> None:
    with answering(lambda _: answer) as client, pytest.raises(kind, match=match):
        client.experiment("x")


def test_an_infeasible_plan_shows_the_nearest_limits() -> None:
    remedy = {"changes": [{"key": "resources.max_instances", "value": 24, "was": 16}], "jct_s": 58.0, "cost_usd": 4.1}
    remedies = [remedy | {"set": ["resources.max_instances=24"], "later_s": 0.0, "extra_usd": 0.0}]
    answer = problem(422, "infeasible", "no plan", nearest={"jct_s": 90.0, "cost_usd": 2.5}, remedies=remedies)
    with answering(lambda _: answer) as client, pytest.raises(InfeasibleError, match="no plan") as caught:
        client.plan(words())
    assert (caught.value.shortest_jct_s, caught.value.cheapest_usd) == (90.0, 2.5)
    assert [change.setting for change in caught.value.remedies[0].changes] == ["resources.max_instances=24"]


@pytest.mark.parametrize(
    ("why", "match"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate", "SSL_CERT_FILE"),
        ("Connection refused", "http://service does not answer"),
    ],
)
def test_a_service_that_is_not_there_is_reported_in_one_line(why: str, match: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(why, request=request)

    with answering(handler) as client, pytest.raises(ServiceError, match=match) as caught:
        client.experiment("digits")
    assert caught.value.status is None
    assert "\n" not in str(caught.value)
    with answering(handler) as client, pytest.raises(ServiceError, match=match):
        next(client.events())


@pytest.mark.parametrize(
    "answer", [httpx.ConnectError("refused"), httpx.ReadTimeout("late"), problem(500, "internal"), problem(404, "no")]
)
def test_the_password_of_an_address_is_in_no_error(answer: Exception | httpx.Response) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    options: dict[str, Any] = {"transport": httpx.MockTransport(handler), "sleep": lambda _: None}
    calls: list[Callable[[Client], Any]] = [
        lambda c: c.experiment("x"),
        lambda c: next(c.events()),
        lambda c: c.submit(words()),
    ]
    for call in calls:
        with Client("http://ann:topsecret@service", **options) as client, pytest.raises(RubberbandError) as caught:
            call(client)
        assert not {"ann", "topsecret"} & set(re.findall(r"\w+", str(caught.value)))


@pytest.mark.parametrize("url", ["ftp://x", "nothing", "http://", "http://[::1"])
@pytest.mark.parametrize("user", ["", "ann:top@secret@"])
def test_an_invalid_address_is_refused_without_its_password(url: str, user: str) -> None:
    with pytest.raises(InputError, match="not the address of a service") as caught:
        Client(url.replace("://", f"://{user}"))
    assert "secret" not in str(caught.value)


def test_the_address_and_the_token_come_from_the_environment_unless_the_local_service_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUBBERBAND_SERVER", "http://there:1234/")
    monkeypatch.setenv("RUBBERBAND_TOKEN", "rb_c_d")
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    with Client(transport=httpx.MockTransport(handler)) as client:
        client.prices("p3.2xlarge", region="eu-west-1")
    assert str(seen[0].url) == "http://there:1234/v1/prices?type=p3.2xlarge&region=eu-west-1"
    assert seen[0].headers["Authorization"] == "Bearer rb_c_d"
    with open_client("local") as here, open_client(None) as there:
        assert (here.url, there.url) == ("http://127.0.0.1:8642", "http://there:1234")


@pytest.mark.parametrize(
    "other",
    [
        httpx.Response(200, text="success"),
        httpx.Response(200, json={"status": "ok"}),
        httpx.Response(404, text="404: Not Found"),
        httpx.Response(200, text="<html></html>"),
    ],
)
def test_another_program_at_the_address_gets_no_experiment(other: httpx.Response) -> None:
    """As Ray's dashboard, which had the port of a service."""
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.path}")
        assert "rb_a_b" not in str(request.headers.raw)
        return httpx.Response(other.status_code, content=other.content)

    line = "^what answers at http://service is no service of RubberBand; start one with `rubberband serve`, and give"
    client = Client("http://service", token="rb_a_b", transport=httpx.MockTransport(handler))
    with client, pytest.raises(ServiceError, match=line):
        client.submit(words())

    async def submit() -> None:
        async with AsyncClient("http://service", token="rb_a_b", transport=httpx.MockTransport(handler)) as client:
            await client.submit(words())

    with pytest.raises(ServiceError, match=line):
        asyncio.run(submit())
    assert seen == ["GET /healthz"] * 2


def test_pages_follow_one_another() -> None:
    pages = {None: (["a", "b"], "2"), "2": (["c"], None)}

    def handler(request: httpx.Request) -> httpx.Response:
        names, following = pages[request.url.params.get("cursor")]
        assert request.url.params.get_list("state") == ["running", "queued"]
        assert request.url.params.get("search") == "res net"
        return httpx.Response(200, json={"items": [{"name": name} for name in names], "next": following})

    with answering(handler) as client:
        assert [view["name"] for view in client.experiments("running", "queued", search="res net")] == ["a", "b", "c"]


def event(id: int) -> bytes:
    data = {"id": id, "experiment": "digits", "seq": id, "kind": "TrialReported", "occurred_at": 0.0, "data": {}}
    return f"id: {id}\nevent: TrialReported\ndata: {json.dumps(data)}\n\n".encode()


RETRY = b"retry: 1000\n\n"
"""How long to wait before a stream is opened again: sent first of all, and no event."""


class Cut(httpx.SyncByteStream):
    """Some events, then the connection is lost."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        raise httpx.ReadError("connection lost")


def test_a_stream_that_is_cut_resumes_where_it_was_and_repeats_nothing() -> None:
    asked: list[str | None] = []
    streams = [
        Cut(b"retry: 1000\n\n", event(1), event(2)[:9]),
        Cut(event(1), event(2)),
        Cut(b": heartbeat\n\n", event(3)),
    ]

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=streams[len(asked) - 1])

    with answering(handler) as client:
        events = client.events("digits")
        assert [next(events)["id"] for _ in range(3)] == [1, 2, 3]
        events.close()  # type: ignore[attr-defined]
    assert asked == [None, "1", "2"]


def test_a_stream_outlives_a_service_whose_store_is_away_for_minutes() -> None:
    answers = [Cut(RETRY, event(1)), *[None] * 20, Cut(RETRY, event(2))]
    sent = iter(answers)

    def handler(request: httpx.Request) -> httpx.Response:
        stream = next(sent)
        if stream is None:
            return httpx.Response(503, json={"detail": "the store does not answer"})
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=stream)

    with answering(handler) as client:
        events = client.events()
        assert [next(events)["id"] for _ in range(2)] == [1, 2]
        events.close()  # type: ignore[attr-defined]


def test_a_stream_whose_events_are_gone_says_so_at_once() -> None:
    answers = iter([httpx.Response(410, json={"detail": "kept no longer"})])

    with answering(lambda request: next(answers)) as client, pytest.raises(ServiceError, match="kept no longer"):
        next(client.events(after=1))


def test_logs_are_followed_until_the_experiment_is_over() -> None:
    pages = iter([(["one"], "1"), ([], "1"), (["two"], "2"), ([], "2"), (["last"], "3"), ([], "3")])
    states = iter(["running", "done"])

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/logs"):
            texts, following = next(pages)
            return httpx.Response(200, json={"lines": [{"trial": 0, "text": t} for t in texts], "next": following})
        return httpx.Response(200, json={"state": next(states)})

    with answering(handler) as client:
        assert [line["text"] for line in client.logs("digits", follow=True)] == ["one", "two", "last"]


def test_logs_of_one_rank_go_on_past_a_page_without_its_lines() -> None:
    pages = iter([([], "1"), ([], "2"), (["late"], "3"), ([], "3")])

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.params["rank"] == "1"
        texts, following = next(pages)
        lines = [{"trial": 0, "rank": 1, "text": text} for text in texts]
        return httpx.Response(200, json={"lines": lines, "next": following})

    with answering(handler) as client:
        assert [line["text"] for line in client.logs("digits", rank=1)] == ["late"]


def test_both_clients_have_the_same_methods() -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        methods = {name: member for name, member in vars(kind).items() if not name.startswith("_") and callable(member)}
        return {name: list(inspect.signature(member).parameters) for name, member in methods.items()}

    assert surface(Client) == surface(AsyncClient)


def test_the_asynchronous_client_asks_and_streams() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/events":
            return httpx.Response(
                200, headers={"Content-Type": "text/event-stream"}, content=b"retry: 1000\n\n" + event(7)
            )
        return httpx.Response(
            200, json={"name": "digits", "state": "done", "items": [{"name": "digits"}], "next": None}
        )

    async def story() -> None:
        async with AsyncClient("http://service", transport=httpx.MockTransport(handler)) as client:
            assert (await client.wait("digits"))["state"] == "done"
            assert [view["name"] async for view in client.experiments()] == ["digits"]
            events = client.events()
            assert (await anext(events))["id"] == 7
            await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(story())


# What is submitted


def test_a_profile_in_a_file_is_written_out_with_the_delays_that_it_measured(tmp_path: Path) -> None:
    profile = {"schema": "rubberband.profile/1", "seconds_per_iteration": {"1": 8.0, "2": 5.0}}
    profile |= {"trial_cv": 0.1, "iteration_cv": 0.05, "startup_cv": 0.2, "mean_cv": 0.05}
    profile |= {"init_delay_s": 12.0, "init_delay_cv": 0.3}
    profile |= {"provision_delay_samples_s": [3.0, 5.0], "provision_delay_s": 4.0}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    found = self_contained({**words(), "profile": str(tmp_path / "p.json")})
    assert found["profile"]["seconds_per_iteration"] == {"1": 8.0, "2": 5.0}
    assert found["profile"]["trial_cv"] == 0.1
    assert found["profile"]["init_delay"] == {"mean": 12.0, "cv": 0.3}
    assert found["profile"]["provision_delay"] == {"samples": [3.0, 5.0]}
    there = rubberband.Experiment(**found).loaded_profile()
    here = rubberband.Experiment(**{**words(), "profile": str(tmp_path / "p.json")}).loaded_profile()
    assert here is not None
    assert there == replace(here, source="inline")


def test_resources_that_are_left_out_are_left_to_the_service() -> None:
    given = {"provider": "local", "gpus_per_trial": {"min": 1, "max": 2}, "init_delay": 3.0}
    assert self_contained({**words(), "resources": given})["resources"] == given


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"resources": {"catalogue": "mine.csv"}}, InputError, "a catalogue of its own"),
        ({"entrypoint": "__main__:Mine"}, InputError, "has no name that the service could import"),
        ({"profile": "/nowhere/none.json"}, ProfileMissingError, "there is no profile at"),
    ],
)
def test_an_experiment_bound_to_this_machine_cannot_be_submitted(
    change: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        self_contained({**words(), **change})
