"""Notices: each goes out once, and no address delays or ends a run."""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rubberband
from rubberband import cli
from rubberband.api.body import require_allowed
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import Settings
from rubberband.errors import Cancelled, EntrypointError, InfeasibleError, InputError
from rubberband.executor import (
    ExperimentFolder,
    Faults,
    InstanceLost,
    InstanceRefused,
    JournalFollower,
    Result,
    TrialFailed,
    session,
)
from rubberband.executor.run import notices as module
from rubberband.executor.run.notices import Address, Notice, NoticeSource, NoticeThread, addresses, noticed_start
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.observers import NotifyAddress
from tests.builders.journalled_runs import Recorded, recorded, words
from tests.builders.receiver import Answer, receiving
from tests.builders.sessions import dying_after
from tests.builders.tables import cases
from tests.builders.virtual_runs import Killed

NAME = "OPS_URL"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "LAST_RETRY_S", "LOOK_S", "PAUSE_S"):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(module, "SENDING_S", 2.0)


def run(home: Path, **options: Any) -> Result:
    experiment = rubberband.Experiment(**words(notify=NAME))
    return run_experiment(experiment, ExperimentFolder(home=home, name=experiment.name), RunOptions(**options))


def sent(home: Path) -> list[str]:
    return list(json.loads((home / "experiments/digits-sha/notices" / f"{NAME}.json").read_text())["sent"])


@pytest.mark.usefixtures("trained_runs")
def test_an_end_is_sent_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv(NAME, receiver.url)
        result = run(tmp_path)
    (body,) = receiver.bodies
    assert result.best is not None
    assert (body["kind"], body["experiment"], body["state"]) == ("done", "digits-sha", "done")
    assert body["summary"]["best_trial"] == result.best.trial
    assert body["summary"]["cost_usd"] == pytest.approx(result.whole_cost_usd)
    assert body["text"].startswith("rehearsal: digits-sha is done after ")
    assert f"by trial {result.best.trial}" in body["text"]
    assert receiver.keys == [body["id"]] == sent(tmp_path)
    assert receiver.url not in "".join(path.read_text("utf-8", "ignore") for path in tmp_path.rglob("*.*"))


@cases("answers", "received", "warning")
def test_a_notice_goes_out_once(
    answers: list[Answer],
    received: int,
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with receiving(*answers) as receiver:
        monkeypatch.setenv(NAME, receiver.url)
        assert run(tmp_path).outcome == "done"
    assert len(receiver.bodies) == received
    assert len({body["id"] for body in receiver.bodies}) == 1
    assert receiver.redirected == 0
    (message,) = caplog.messages
    assert warning in message
    assert message.startswith(f"notify: {NAME} (127.0.0.1) ")
    assert receiver.url not in message


def test_an_address_that_never_answers_delays_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LAST_S", 0.2)
    monkeypatch.setattr(module, "SENDING_S", 60.0)
    with receiving("hangs") as receiver:
        monkeypatch.setenv(NAME, receiver.url)
        result = run(tmp_path)  # the receiver lets go after it
    assert result.outcome == "done"
    assert any("does not answer" in message for message in caplog.messages)


def test_an_address_without_a_server_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver:
        url = receiver.url
    monkeypatch.setenv(NAME, url)
    monkeypatch.setattr(module, "LAST_S", 0.2)
    assert run(tmp_path).outcome == "done"
    assert any("did not get: rehearsal: digits-sha is done" in message for message in caplog.messages)
    assert sent(tmp_path) == []


def test_a_process_that_stops_says_so_and_a_resume_sends_the_end_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv(NAME, receiver.url)
        with pytest.raises(Killed):
            run(tmp_path, view=dying_after(40))
        assert receiver.kinds == ["failed"]
        assert "has stopped before its end: Killed; `rubberband resume digits-sha` continues it" in str(receiver.bodies)
        for _ in range(2):
            session.run(ExperimentFolder(home=tmp_path, name="digits-sha"))
    assert receiver.kinds == ["failed", "done"]


def test_a_driver_that_was_killed_while_sending_does_not_send_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(words(notify=NAME)).put(tmp_path)
    got: list[bytes] = []

    def dying(_url: str, body: bytes, _headers: object) -> None:
        got.append(body)
        raise Killed

    for _ in range(2):
        thread = NoticeThread(folder, Address(variable=NAME, url="http://x/"), send=dying)
        thread.start()
        thread.close()
    assert len(got) == 1


def test_trouble_that_a_killed_driver_was_sending_is_not_sent_again(tmp_path: Path) -> None:
    run = recorded(words(notify=NAME), faults=Faults(refused={"i-002"}))
    folder, half = run.put(tmp_path, upto=len(run.events) // 2), len(run.events) // 2
    got: list[str] = []

    def noting(_url: str, body: bytes, _headers: object) -> None:
        got.append(json.loads(body)["kind"])
        if len(got) == 1:
            raise Killed

    for upto in (half, half + 1, len(run.events)):
        run.grow(folder, half, upto)
        half = upto
        thread = NoticeThread(folder, Address(variable=NAME, url="http://x/"), send=noting)
        thread.start()
        while not got:
            time.sleep(0.001)
        thread.close()
    assert got == ["trouble", "done"]


def source(tmp_path: Path, faults: Faults | None = None, **changes: Any) -> tuple[NoticeSource, JournalFollower]:
    follower = JournalFollower(recorded(words(**changes), faults=faults).put(tmp_path))
    return NoticeSource(follower), follower


def test_trouble_is_one_notice_before_the_end(tmp_path: Path) -> None:
    faults = Faults(
        lost_after_s={"i-001": 60.0}, refused={"i-002"}, failures={(3, attempt): "raised" for attempt in range(1, 9)}
    )
    found, follower = source(tmp_path, faults)
    with closing(follower):
        trouble, end = found.events()
        assert (trouble.kind, end.kind) == ("trouble", "done")
        assert "lost an instance (" in trouble.text
        assert "did not get an instance (no capacity for i-002)" in trouble.text
        assert "trial 3, " in trouble.text
        assert len(follower.controller.state.failed) > 1, "it was tried again"
        assert "; 1 trial failed" in end.text
        assert found.events() == []
    again = JournalFollower(ExperimentFolder(home=tmp_path, name="digits-sha"))
    with closing(again):
        assert NoticeSource(again, after=found.seq).events() == []


TROUBLES = ["lost an instance (", "did not get an instance (no capacity for i-002)", "has a trial that failed: trial 3"]


@pytest.fixture(scope="module")
def troubled() -> tuple[Recorded, list[int]]:
    """A run with three troubles, and up to which of its events each one has been."""
    faults = Faults(lost_after_s={"i-001": 200.0}, refused={"i-002"}, failures={(3, 1): "raised"})
    run = recorded(words(), faults=faults)
    kinds = (InstanceLost, InstanceRefused, TrialFailed)
    return run, [number for number, event in enumerate(run.events, start=1) if isinstance(event, kinds)]


def test_no_trouble_is_lost_wherever_a_driver_is_killed(troubled: tuple[Recorded, list[int]], tmp_path: Path) -> None:
    run, (first, *later) = troubled
    for upto in [first, *later]:  # what came after the first notice waits for the next one
        one = run.named(f"upto-{upto}")
        before = NoticeSource(JournalFollower(folder := one.put(tmp_path, first)))
        assert before.events() == []
        told = before.trouble(0.0)
        assert [notice.kind for notice in told] == ["trouble"]
        one.grow(folder, first, upto)
        assert before.events() == before.trouble(1.0) == []
        one.grow(folder, upto, len(one.events))
        told += NoticeSource(JournalFollower(folder), after=before.seq).events()
        texts = "; ".join(notice.text for notice in told)
        assert [texts.count(text) for text in TROUBLES] == [1, 1, 1]


def test_trouble_waits_until_the_last_notice_of_it_is_old_or_the_end(
    troubled: tuple[Recorded, list[int]], tmp_path: Path
) -> None:
    run, (first, second, third) = troubled
    found = NoticeSource(JournalFollower(folder := run.put(tmp_path, first)))
    assert found.events() == []
    told = found.trouble(0.0)
    run.grow(folder, first, second)
    assert found.events() == found.trouble(module.QUIET_S - 1.0) == []
    told += found.trouble(module.QUIET_S)
    assert found.trouble(math.inf) == []
    run.grow(folder, second, third)
    assert found.events() == []
    run.grow(folder, third, len(run.events))
    told += found.events()
    assert [notice.kind for notice in told] == ["trouble", "trouble", "trouble", "done"]
    assert all(sum(text in notice.text for text in TROUBLES) == 1 for notice in told[:3])


def test_the_same_trouble_is_said_once_with_how_often(tmp_path: Path) -> None:
    found, follower = source(tmp_path, Faults(lost_after_s=dict.fromkeys(("i-001", "i-002", "i-003"), 60.0)))
    with closing(follower):
        trouble, _ = found.events()
    assert trouble.text.endswith(") (3 times)")


def looks_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **figures: Any) -> list[Notice]:
    """The notices of three looks at a run that goes on."""
    run = recorded()
    follower = JournalFollower(run.put(tmp_path, upto=len(run.events) // 2))
    found = NoticeSource(follower)
    with closing(follower):
        assert found.events() == []
        summary = replace(follower.summary(), **figures)
        monkeypatch.setattr(follower, "summary", lambda: summary)
        return [notice for _ in range(3) for notice in found.looks()]


def test_a_run_that_will_be_late_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = looks_at(tmp_path, monkeypatch, deadline_s=3600.0, forecast_jct_s=3780.0)
    assert {notice.id for notice in found} == {found[0].id}
    assert len(found) == 2  # not at the first look: a forecast may pass
    assert found[0].kind == "late"
    assert "is expected to end 3m after its deadline, 25m; `rubberband extend digits-sha --deadline …`" in found[0].text


@pytest.mark.parametrize(
    "figures", [{"deadline_s": 3600.0, "forecast_jct_s": 3630.0}, {"max_cost_usd": 0.0, "cost_usd": 0.0}]
)
def test_a_forecast_at_the_deadline_and_a_free_run_are_no_notice(
    figures: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looks_at(tmp_path, monkeypatch, **figures) == []


@pytest.mark.parametrize(("cost_usd", "kinds"), [(8.9, []), (9.0, ["near_max_cost"] * 3)])
def test_a_bill_near_max_cost_is_a_notice(
    cost_usd: float, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = looks_at(tmp_path, monkeypatch, max_cost_usd=10.0, cost_usd=cost_usd, forecast_cost_usd=9.8)
    assert [notice.kind for notice in found] == kinds
    assert all("has cost 9.00 USD of its max_cost of 10.00 USD; 9.80 USD are expected" in one.text for one in found)


def test_an_address_gets_the_kinds_that_it_asks_for(tmp_path: Path) -> None:
    folder = recorded(words(notify=NAME)).put(tmp_path)
    got: list[bytes] = []
    thread = NoticeThread(
        folder, Address(variable=NAME, url="http://x/", kinds=("late",)), send=lambda _, body, __: got.append(body)
    )
    thread.start()
    thread.close()
    assert got == []


def test_slack_gets_a_text_in_which_no_value_is_markup() -> None:
    notice = Notice(id="a", kind="failed", text="a has failed: <!channel> & <https://x|y>", at=1.0, facts={"b": 1})
    slack = Address(variable=NAME, url="https://hooks.slack.com/services/T/B/x")
    assert json.loads(slack.body(notice)) == {"text": "a has failed: &lt;!channel&gt; &amp; &lt;https://x|y&gt;"}
    other = Address(variable=NAME, url="https://example.org/x")
    assert json.loads(other.body(notice)) == {"id": "a", "kind": "failed", "text": notice.text, "at": 1.0, "b": 1}
    assert "services" not in repr(slack)


@cases("value", "reason")
def test_a_wrong_word_is_refused(value: object, reason: str) -> None:
    with pytest.raises(InputError, match="notify") as caught:
        rubberband.Experiment(**words(notify=value))
    assert reason in str(caught.value)
    assert "services" not in str(caught.value)


@cases("value", "reason")
def test_a_variable_without_an_address_is_refused_before_the_run(
    value: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if value is not None:
        monkeypatch.setenv(NAME, value)
    with pytest.raises(InputError, match="notify") as caught:
        run(tmp_path)
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "experiments" / "digits-sha" / "journal.sqlite").exists()


def test_a_start_that_fails_is_one_notice_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"deadline": "1s", "max_cost": 0.01}
    experiment = rubberband.Experiment(
        **words(notify=[NAME, {"url_from": "LATE", "kinds": ["late"]}], constraints=limits)
    )
    with receiving("busy", "takes") as receiver, receiving() as other:
        monkeypatch.setenv(NAME, receiver.url)
        monkeypatch.setenv("LATE", other.url)
        with pytest.raises(InfeasibleError) as caught:
            run_experiment(experiment, ExperimentFolder(home=tmp_path, name=experiment.name))
    refused, body = receiver.bodies
    assert refused == body, "it is sent again where it was not taken"
    assert receiver.keys == [body["id"]] * 2
    assert (body["kind"], body["state"], body["summary"]["cost_usd"]) == ("failed", "refused", 0.0)
    assert body["text"].startswith(f"rehearsal: digits-sha did not start: {str(caught.value)[:40]}")
    assert other.bodies == []


def test_code_that_cannot_be_imported_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"provider": "local", "gpus_per_instance": 1, "max_instances": 1, "price_per_hour": 1.0}
    mine = words(notify=NAME) | {"entrypoint": "no_such_module:Trial", "resources": local}
    experiment = rubberband.Experiment(**mine | {"constraints": {"deadline": "5h"}})
    with receiving() as receiver:
        monkeypatch.setenv(NAME, receiver.url)
        with pytest.raises(EntrypointError):
            run_experiment(experiment, ExperimentFolder(home=tmp_path, name=experiment.name))
    (body,) = receiver.bodies
    assert "did not start: " in body["text"]
    assert "no_such_module" in body["text"]


def test_a_start_that_the_user_ends_is_no_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ExperimentFolder(home=tmp_path, name="one")
    with receiving() as receiver:
        monkeypatch.setenv(NAME, receiver.url)
        for error in (Cancelled("no"), KeyboardInterrupt()):
            with pytest.raises(type(error)), noticed_start(folder, [NotifyAddress(url_from=NAME)], is_rehearsal=False):
                raise error
    assert receiver.bodies == []


@pytest.mark.parametrize("answer", ["gone", "redirects", "dies", "hangs"])
def test_an_address_that_does_not_take_a_failed_start_hides_no_error(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ExperimentFolder(home=tmp_path, name="one")
    with receiving(answer) as receiver:
        monkeypatch.setenv(NAME, receiver.url)
        monkeypatch.setattr(module, "SENDING_S", 0.2)
        with (
            pytest.raises(InputError, match="no trial"),
            noticed_start(folder, [NotifyAddress(url_from=NAME)], is_rehearsal=False),
        ):
            raise InputError("there is no trial")
    assert len(receiver.bodies) == 1
    assert receiver.redirected == 0
    assert "it did not get: one did not start: there is no trial" in caplog.text
    assert receiver.url not in caplog.text


def test_words_survive_a_journal() -> None:
    asked = rubberband.Experiment(**words(notify=[NAME, {"url_from": "OTHER", "kinds": ["late"]}]))
    assert rubberband.Experiment(**asked.to_words()) == asked
    assert asked.notify == (NotifyAddress(url_from=NAME), NotifyAddress(url_from="OTHER", kinds=("late",)))


# A service


def test_a_submission_names_no_address(tmp_path: Path) -> None:
    with pytest.raises(HttpProblem, match="only the operator says where notices go"):
        require_allowed(rubberband.Experiment(**words(notify=NAME)), Settings(home=tmp_path))


def test_experiments_of_a_service_send_its_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {module.SERVICE_VARIABLE: f"{NAME},OTHER", NAME: "https://a/", "OTHER": "https://b/"}
    own = [NotifyAddress(url_from=NAME, kinds=("late",))]
    found = addresses(module.all_of(own, environment), environment)
    assert [(address.host, address.kinds) for address in found] == [("a", ("late",)), ("b", module.NOTICE_KINDS)]
    assert module.all_of([], {}) == []


def test_a_service_needs_the_addresses_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    done = CliRunner().invoke(cli.app, ["serve", "--notify", NAME])
    assert f"{NAME} is not set" in str(done.exception)
    done = CliRunner().invoke(cli.app, ["serve", "--notify", "https://secret/x"])
    assert "--notify is an address" in str(done.exception)
    assert "secret" not in str(done.exception)
