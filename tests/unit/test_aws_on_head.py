"""`--on head`: a head is asked by SSM, which loses answers, comes late and cuts output; secrets go by a parameter."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rubberband.cli import app
from rubberband.cloud.aws import on_head
from rubberband.cloud.aws.handover import MOST_BYTES, delete_secrets, packed_secrets, put_secrets, take_secrets
from rubberband.cloud.aws.head import ensure_head
from rubberband.cloud.aws.s3 import S3Folder
from rubberband.errors import InputError, ProviderError
from rubberband.executor.run.allowance import committed_usd
from rubberband.units import month_end
from tests.builders.aws_account import Account
from tests.builders.heads import ENDED, Head, say, sent_made_of, shown
from tests.builders.heads import account as account
from tests.builders.heads import file as file
from tests.builders.heads import head as head
from tests.builders.heads import home as home
from tests.builders.waiting import eventually
from tests.ec2 import Fault
from tests.ec2.faults import FakeCall, FakeError

LIMITS = "{deadline: 1h, max_cost: 2}"
RUN = ("run", "digits.yaml", "--on", "head")
BAD_WEATHER = [
    Fault(error=FakeError("ThrottlingException", "Rate exceeded", 400)),
    Fault(error=FakeError("InternalServerError", "", 500)),
    Fault.timeout(took_effect=True),
    Fault.timeout(took_effect=False),
]


def bill(max_cost_usd: float, cost_usd: float, month: list[float] | None = None, **words: Any) -> dict[str, Any]:
    """What a head answers to a question for the status."""
    status = json.dumps({"summary": {"max_cost_usd": max_cost_usd, "cost_usd": cost_usd}, "words": words})
    return {"exit": 0, "out": status, "err": "", "file": None, "month": month}


def told(out: str = "", err: str = "", file: str | None = None, code: int = 0) -> dict[str, Any]:
    return {"exit": code, "out": out, "err": err, "file": file}


# The way to a head


@pytest.mark.parametrize("fault", BAD_WEATHER)
@pytest.mark.parametrize("operation", ["SendCommand", "GetCommandInvocation"])
def test_a_call_goes_through_bad_weather(account: Account, head: Head, fault: Fault, operation: str) -> None:
    head.answers = lambda what, words: shown(b"hello")
    remote, left = head.remote(), [3]

    def weather(call: FakeCall) -> Fault | None:
        if call.operation == operation and left[0]:
            left[0] -= 1
            return fault
        return None

    account.fake.fault = weather
    assert remote.look("digits", None, 0).log == b"hello"
    assert left == [0]


def test_a_start_that_is_repeated_has_the_same_key(account: Account, head: Head) -> None:
    remote, lost = head.remote(), [True]
    account.sleep(60.0)

    def loses(call: FakeCall) -> Fault | None:
        return Fault.timeout(took_effect=True) if call.operation == "SendCommand" and lost and lost.pop() else None

    account.fake.fault = loses
    key = remote.start("digits", ["run", "digits.yaml"], "s3://b/digits.zip#sha256=0", "it")
    assert [(what, words["key"]) for what, words in head.asked] == [("start", key), ("start", key)]


def test_an_agent_that_never_comes_is_an_error_with_the_policy(account: Account, head: Head) -> None:
    account.fake.world.agent_s = 1e9
    with pytest.raises(ProviderError, match=r"SSM has not reached the head i-.* lacks the policy session\.json"):
        head.remote().look("digits", None, 0)


def test_a_right_that_is_missing_is_said_at_once(account: Account, head: Head) -> None:
    remote = head.remote()
    denied = FakeError("AccessDeniedException", "User: x is not authorized to perform: ssm:SendCommand")
    account.fake.fault = lambda call: Fault(error=denied) if call.operation == "SendCommand" else None
    with pytest.raises(InputError, match="x may not ssm:SendCommand"):
        remote.look("digits", None, 0)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (shown(b"x" * 30_000), "failed"),  # SSM cuts it
        (
            (1, "No module named rubberband.cloud.aws.on_head"),
            r"No module named rubberband\.cloud\.aws\.on_head.* older than this one",
        ),
    ],
)
def test_half_an_answer_and_that_of_an_older_version_are_errors(head: Head, answer: Any, text: str) -> None:
    head.answers = lambda what, words: answer
    with pytest.raises(ProviderError, match=text):
        head.remote().look("digits", None, 0)


# Runs


def test_a_run_on_the_head_sends_the_folder_starts_a_unit_and_follows_it(account: Account, head: Head) -> None:
    logs = [shown(b"plan\n"), shown(b"best: lr=0.1\n", exit_code=4, more=True), shown(b"two\n", exit_code=4)]
    head.answers = lambda what, words: {"started": True} if what == "start" else logs.pop(0)
    code, text = say(*RUN, "-s", "constraints.max_cost=1")
    assert code == 4, text
    assert "plan\nbest: lr=0.1\ntwo\n" in text
    (what, words), *looks = head.asked
    assert (what, words["name"]) == ("start", "digits")
    assert words["words"][:4] == ["run", "digits.yaml", "-s", "constraints.max_cost=1"]
    assert words["words"][-1] == "--yes"
    packed = rf"s3://{account.bucket}/packages/digits/folders/digits\.zip#sha256=[0-9a-f]{{64}}"
    assert re.fullmatch(packed, words["packed"])
    assert [(one, asked["offset"], asked["key"]) for one, asked in looks] == [
        ("look", offset, words["key"]) for offset in (0, 5, 18)
    ]
    archive = account.fake.world.buckets[account.bucket]["packages/digits/folders/digits.zip"]
    assert "0/digits.py" in zipfile.ZipFile(io.BytesIO(archive)).namelist()


@pytest.mark.parametrize("refuses", ["pledge_on_head", "require_rate"])
def test_a_run_that_the_month_or_the_hour_has_no_room_for_is_not_started(
    account: Account, head: Head, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    def refusing(*_: Any) -> None:
        raise InputError("another run was quicker")

    monkeypatch.setattr(f"rubberband.executor.run.allowance.{refuses}", refusing)
    assert "another run was quicker" in say(*RUN)[1]
    assert head.asked == []
    assert (account.fake.instances == ()) == (refuses == "require_rate")


def test_a_run_without_a_cap_rents_no_head(account: Account, file: Path) -> None:
    file.write_text(file.read_text().replace(", max_cost: 2", ""))
    code, text = say(*RUN)
    assert (code != 0, "max_cost" in text) == (True, True)
    assert account.fake.instances == ()


HEAD_TYPE = ("-s", "resources.aws.head_instance_type=c7i.xlarge")


@pytest.mark.parametrize(
    ("policy", "words", "text"),
    [
        ("max_usd_per_run: 1", (), "max_usd_per_run of policy.yaml: constraints.max_cost is 2.00 USD"),
        ("max_usd_per_month: 1", (), "max_usd_per_month of policy.yaml"),
        ("max_usd_per_hour: 0.01", (), "max_usd_per_hour of policy.yaml: resources.max_instances="),
        ("regions: [eu-west-1]", (), "regions of policy.yaml: resources.region='us-east-1' is not one of eu-west-1"),
        ("instance_types: [p5.*]", (), "instance_types of policy.yaml: 'g5.xlarge' is not one of p5.*"),
        ("instance_types: [g5.*]", HEAD_TYPE, "instance_types of policy.yaml: 'c7i.xlarge' is not one of g5.*"),
    ],
)
@pytest.mark.parametrize("door", [("cloud", "up", "digits.yaml", "-y"), (*RUN, "-y")])
def test_no_door_rents_a_head_beyond_the_policy(
    account: Account, home: Path, policy: str, words: tuple[str, ...], text: str, door: tuple[str, ...]
) -> None:
    (home / "policy.yaml").write_text(policy)
    code, line = say(*door, *words)
    assert (code != 0, text in line) == (True, True), line
    assert account.fake.instances == ()


def test_a_run_goes_on_on_a_head_only_within_the_policy_of_today(account: Account, home: Path, head: Head) -> None:
    head.answers = lambda what, words: {"start": {"started": True}, "ask": bill(2.0, 0.5)}.get(what, ENDED)
    assert say(*RUN)[0] == 0
    for policy, text in (("max_usd_per_run: 1", "max_cost is 2.00 USD"), ("instance_types: [p5.*]", "'g5.xlarge'")):
        (home / "policy.yaml").write_text(policy)
        assert f"{policy.partition(':')[0]} of policy.yaml: {text}" in say("resume", "digits", "--on", "head", "-y")[1]
    (home / "policy.yaml").write_text("regions: [eu-west-1]")
    assert say("status", "digits", "--on", "head")[0] == 0, "one that runs is not rented anew"
    account.fake.power_off(account.fake.living[0].instance_id)
    account.sleep(60)
    assert "regions of policy.yaml" in say("status", "digits", "--on", "head")[1]
    assert account.fake.living == ()
    assert [words["words"][0] for what, words in head.asked if what == "start"] == ["run"]


def test_ctrl_c_leaves_the_run_going_and_says_how_to_follow_it(account: Account, head: Head) -> None:
    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        if what == "look":
            raise KeyboardInterrupt
        return {"started": True}

    head.answers = answers
    code, text = say(*RUN)
    assert code != 0
    assert "digits continues on the head: `rubberband status digits --on head --watch` follows it" in text
    assert [what for what, _ in head.asked] == ["start", "look"]
    assert len(account.fake.living) == 1


def test_a_new_run_has_its_free_name_here_too(home: Path, head: Head) -> None:
    names = told(json.dumps({"experiments": [{"name": "digits"}, {"name": "digits-2"}]}))
    head.answers = lambda what, words: {"ask": names, "start": {"started": True}}.get(what, ENDED)
    code, text = say("run", "digits.yaml", "--new", "--on", "head")
    assert code == 0, text
    assert "the name digits is taken: this run is digits-3" in text
    (start,) = [words for what, words in head.asked if what == "start"]
    assert start["name"] == "digits-3"
    assert start["words"][2:4] == ["-s", "name=digits-3"]
    assert "--new" not in start["words"]
    assert "folders/digits-3.zip" in start["packed"]
    assert (home / "heads" / "digits-3.json").exists()


# Money


@pytest.fixture
def now(account: Account, monkeypatch: pytest.MonkeyPatch) -> float:
    """The time on the account's clock, which this machine's goes by."""
    monkeypatch.setattr(time, "time", lambda: account.now)
    return account.now


def test_runs_on_the_head_count_in_the_month_of_here(home: Path, head: Head, now: float) -> None:
    head.answers = lambda what, words: {"started": True} if what == "start" else shown(b"", lives=False)
    (home / "policy.yaml").write_text("max_usd_per_month: 3\n")
    assert "the head stopped" in say(*RUN)[1]
    assert committed_usd(home, now) == pytest.approx(2.0)
    assert committed_usd(home, month_end(now)) == pytest.approx(2.0), "it may still run next month"
    code, text = say(*RUN)
    assert code != 0
    assert "max_usd_per_month of policy.yaml: 2.00 USD of 3.00 USD are spent or may be" in text
    assert "`rubberband ps --on head` asks the head for its part anew" in text
    head.answers = lambda what, words: bill(2.0, 0.0, [0.0, 0.0])
    assert say("status", "digits", "--on", "head")[0] == 0
    assert committed_usd(home, now) == pytest.approx(2.0), "it may not know of the run yet"
    head.answers = lambda what, words: {**ENDED, "month": [0.25, 0.0]}
    assert say("status", "digits", "--watch", "--on", "head")[0] == 0
    assert committed_usd(home, now) == pytest.approx(0.25)
    assert committed_usd(home, month_end(now)) == 0.0


def test_a_resume_on_the_head_may_spend_what_is_left_of_its_max_cost(home: Path, head: Head) -> None:
    ended = {**ENDED, "month": [0.5, 0.0]}
    head.answers = lambda what, words: {"start": {"started": True}, "ask": bill(2.0, 0.5)}.get(what, ended)
    assert say(*RUN)[0] == 0
    for limit, begins in (("1.99", False), ("2.01", True)):
        (home / "policy.yaml").write_text(f"max_usd_per_month: {limit}\n")
        code, text = say("resume", "digits", "--on", "head")
        assert (code == 0) == begins, text


def test_a_head_that_has_ended_spends_no_more(home: Path, head: Head, now: float) -> None:
    head.answers = lambda what, words: {"at": "s3://b/copy"} if what == "keep" else shown(b"", lives=False)
    say(*RUN)
    assert say("cloud", "down", "digits.yaml", "-y")[0] == 0
    assert committed_usd(home, now) == pytest.approx(2.0), "what it has spent is not known"
    assert committed_usd(home, month_end(now)) == 0.0


def test_more_money_for_a_run_on_the_head_is_within_the_policy_of_here(home: Path, head: Head, now: float) -> None:
    assert say(*RUN)[0] == 0
    head.answers = lambda what, words: bill(2.0, 0.5)
    (home / "policy.yaml").write_text("max_usd_per_run: 4\n")
    code, text = say("extend", "digits", "--max-cost", "5", "-y", "--on", "head")
    assert code != 0
    assert "max_usd_per_run of policy.yaml" in text
    assert all(words["words"][0] == "status" for what, words in head.asked if what == "ask")
    (home / "policy.yaml").write_text("max_usd_per_month: 3\n")
    code, text = say("extend", "digits", "--max-cost", "4", "-y", "--on", "head")
    assert code != 0
    assert "this may cost 2.00 USD" in text
    assert say("extend", "digits", "--max-cost", "3", "--dry-run", "--on", "head")[0] == 0
    assert committed_usd(home, now) == pytest.approx(2.0), "it was only shown"
    assert say("extend", "digits", "--max-cost", "3", "-y", "--on", "head")[0] == 0


# Questions


def test_commands_are_asked_as_typed_on_the_head_that_runs_the_experiment(
    account: Account, home: Path, head: Head
) -> None:
    head.answers, head.made_of = lambda what, words: told("fine\n", "note\n", code=3), ["0"]
    other = account.fake.session("admin", region="eu-west-1")
    resources = account.resources(region="eu-west-1")
    there = ensure_head(other, resources, clock=lambda: account.now, sleep=account.sleep)
    (home / "heads").mkdir()
    kept = {"region": "eu-west-1", "owner": "rubberband", "checkpoints": f"s3://{account.bucket}/digits"}
    (home / "heads" / "digits.json").write_text(json.dumps(kept))
    account.fake.in_region("eu-west-1").world.runs_command = account.fake.world.runs_command
    code, text = say("status", "-o", "json", "digits", "--on", "head")
    assert (code, text.startswith("fine\nnote\n")) == (3, True)
    assert say("logs", "digits", "1", "--on=head")[0] == 3
    assert [words["words"] for _, words in head.asked] == [
        ["status", "--output", "json", "digits"],
        ["logs", "digits", "1"],
    ]
    assert there.instance_id in {one.instance_id for one in account.fake.in_region("eu-west-1").living}


def test_a_report_of_a_stopped_head_starts_it_and_comes_through_the_bucket(
    account: Account, file: Path, home: Path, head: Head
) -> None:
    started = head.remote().instance_id
    account.sleep(60)
    account.fake.power_off(started)
    account.sleep(60)
    page = b"<html>" + b"x" * 100_000
    account.fake.world.buckets[account.bucket]["heads/answers/1.json"] = json.dumps(
        told(file=base64.b64encode(page).decode())
    ).encode()
    head.answers = lambda what, words: {"at": f"s3://{account.bucket}/heads/answers/1.json"}
    code, text = say("report", "digits", "--html", "page.html", "--on", "head")
    assert code == 0, text
    assert f"the head {started} has stopped and is started again" in text
    assert head.asked[0][1]["words"] == ["report", "--html", "{file}.html", "digits"]
    assert (file.parent / "page.html").read_bytes() == page
    assert "heads/answers/1.json" not in account.fake.world.buckets[account.bucket]


def test_commands_that_ask_for_experiments_are_sent_to_the_head(file: Path, home: Path, head: Head) -> None:
    head.remote()
    head.answers = lambda what, words: told(file=base64.b64encode(b"trial\n0\n").decode())
    for words, sent in {
        ("ps", "--search", "mine"): ["ps", "--search", "mine"],
        ("best", "digits", "-o", "json"): ["best", "--output", "json", "digits"],
        ("export", "digits", "t.csv", "--reports"): ["export", "--reports", "digits", "{file}.csv"],
        ("scale", "digits", "--max-instances", "2"): ["scale", "--max-instances", "2", "digits"],
        ("stop", "digits", "3", "8"): ["stop", "digits", "3", "8"],
        ("cancel", "digits"): ["cancel", "digits"],
        ("tag", "digits", "+good", "-old", "--note", "a b"): ["tag", "--note", "a b", "digits", "+good", "-old"],
        ("tag", "digits", "--unarchive"): ["tag", "--unarchive", "digits"],
        ("rm", "digits", "other", "-n"): ["rm", "--dry-run", "digits", "other"],
        ("rm", "digits", "--yes"): ["rm", "--yes", "digits"],
        ("extend", "digits", "--deadline", "2h", "-n"): ["extend", "--deadline", "2h", "--dry-run", "digits"],
    }.items():
        code, text = say(*words, "--on", "head")
        assert code == 0, text
        assert head.asked[-1][1]["words"] == sent
    assert (file.parent / "t.csv").read_bytes() == b"trial\n0\n"


@pytest.mark.parametrize(
    ("words", "question"),
    [(("extend", "digits", "--deadline", "2h"), "Apply it?"), (("rm", "digits", "other"), "Delete 2 experiments?")],
)
def test_an_extension_and_a_deletion_are_shown_before_they_are_done(
    head: Head, words: tuple[str, ...], question: str
) -> None:
    assert say(*RUN)[0] == 0
    head.answers = lambda what, words: told(err="until 2h\n")
    for answer, sent in (("n", ["--dry-run"]), ("y", ["--dry-run", "--yes"])):
        head.asked.clear()
        result = CliRunner().invoke(app, [*words, "--on", "head"], input=f"{answer}\n")
        assert "until 2h" in result.output
        assert question in result.output
        assert [words["words"][1] for _, words in head.asked] == sent


@pytest.mark.parametrize(
    "words",
    [
        ("status", "digits", "--server", "http://here"),
        ("logs", "digits", "--follow"),
        ("status", "digits", "-wo", "json"),
        ("profile", "digits.yaml"),
    ],
)
def test_an_option_without_a_meaning_on_the_head_is_refused(home: Path, head: Head, words: tuple[str, ...]) -> None:
    head.remote()
    assert say(*words, "--on", "head")[0] != 0
    assert head.asked == []


# What a head is made of, and its end


def test_a_head_of_other_code_is_brought_up_to_date_before_a_run(account: Account, head: Head) -> None:
    head.made_of = ["", None]
    code, text = say(*RUN)
    assert code == 0, text
    assert "the head has other code, packages or settings than digits needs" in text
    assert head.remade == 1
    assert head.asked[0][1]["made_of"] == sent_made_of(account, account.fake.living[0].instance_id)


@pytest.mark.parametrize(("code", "why"), [(73, "something runs there; wait for its end"), (0, "could not be updated")])
def test_a_head_of_other_code_that_stays_so_runs_nothing(head: Head, code: int, why: str) -> None:
    head.made_of, head.remakes = ["0123 an older one"], code
    failed, text = say(*RUN)
    assert (failed != 0, why in text) == (True, True), text
    assert head.asked == []


def test_up_gives_a_head_that_runs_the_code_and_the_folder_of_here(account: Account, head: Head) -> None:
    head.remote()
    head.made_of = ["", None]
    code, text = say("cloud", "up", "digits.yaml")
    assert code == 0, text
    assert head.remade == 1
    assert head.fetched[0].startswith(f"s3://{account.bucket}/packages/digits/folders/digits.zip#sha256=")


def test_a_resume_on_a_head_of_other_code_is_refused(head: Head) -> None:
    head.answers = lambda what, words: {"start": {"started": True}, "ask": bill(2.0, 0.5)}.get(what, ENDED)
    assert say(*RUN)[0] == 0
    assert say("resume", "digits", "--on", "head")[0] == 0
    assert head.asked[-2][1]["words"] == ["resume", "--yes", "digits"]
    count, head.made_of = len(head.asked), ["another ./wheels/rubberband_tune-0-py3-none-any.whl[ray,aws]"]
    code, text = say("resume", "digits", "--on", "head")
    assert code != 0
    assert "other code or packages than digits was started with" in text
    assert len(head.asked) == count


def test_down_copies_the_journals_of_a_head_that_runs_and_asks_a_stopped_one_for_nothing(
    account: Account, head: Head
) -> None:
    head.answers = lambda what, words: {"at": words["store"] + "/copies/i-1.zip"}
    head.remote()
    code, text = say("cloud", "down", "digits.yaml", "-y")
    assert code == 0, text
    assert f"copied the head's journals to s3://{account.bucket}/heads/copies/i-1.zip" in text
    assert account.fake.living == ()
    account.sleep(3600.0)
    head.asked.clear()
    account.fake.power_off(head.remote().instance_id)
    account.sleep(60)
    code, text = say("cloud", "down", "digits.yaml", "-y")
    assert (code, head.asked) == (0, [])
    assert "are not copied" not in text, "it did so before it stopped itself"


# Secrets

TOKEN = "hf_aVery$ecret/token"
SECRETS = ("-s", "resources.secrets=[HF_TOKEN]")


def kept(account: Account) -> list[str]:
    """The parameters with secrets that the account has."""
    return [name for name in account.fake.world.parameters if "/secrets/" in name]


def put(account: Account, **values: str) -> str:
    return put_secrets(
        account.fake.session("admin"), "rubberband", "0" * 32, packed_secrets(values), clock=lambda: account.now
    )


@given(values=st.dictionaries(st.from_regex(r"[A-Z_]{1,10}", fullmatch=True), st.text(min_size=4), max_size=4))
def test_a_head_reads_any_values_once(values: dict[str, str]) -> None:
    account = Account()
    if not values:
        assert packed_secrets(values) == ""
        return
    name = put(account, **values)
    assert take_secrets(account.fake.session("driver"), name) == values
    assert kept(account) == []
    with pytest.raises(InputError, match=r"are not in SSM .*give the command again"):
        take_secrets(account.fake.session("driver"), name, sleep=account.sleep)


def test_values_that_no_head_reads_expire(account: Account) -> None:
    name = put(account, HF_TOKEN=TOKEN)
    account.sleep(3500.0)
    assert kept(account) == [name]
    account.sleep(200.0)
    with pytest.raises(InputError, match="within an hour"):
        take_secrets(account.fake.session("driver"), name, sleep=account.sleep)
    assert kept(account) == []


def test_instances_may_not_read_what_is_sent_to_their_head(account: Account) -> None:
    name = put(account, HF_TOKEN=TOKEN)
    with pytest.raises(InputError, match="may not ssm:GetParameter"):
        take_secrets(account.fake.session("worker"), name)
    delete_secrets(account.fake.session("driver"), name)
    assert kept(account) == []


def test_values_that_are_too_long_for_a_parameter_are_refused(account: Account) -> None:
    longest = MOST_BYTES - len(json.dumps({"KEY": ""}))
    put(account, KEY="x" * longest)
    with pytest.raises(InputError, match=f"have {MOST_BYTES + 1} bytes, and {MOST_BYTES} can be sent to a head"):
        packed_secrets({"KEY": "x" * (longest + 1)})


@pytest.mark.parametrize(
    ("value", "word", "line"),
    [
        ("", "name=a", "resources.secrets: HF_TOKEN is not set; run `export HF_TOKEN=…` before this command"),
        ("x" * 7000, "name=a", f"and {MOST_BYTES} can be sent to a head; leave --on head out, or put"),
        (
            TOKEN,
            f"entrypoint={{command: [python, train.py, '{TOKEN}', '${{lr}}']}}",
            "entrypoint.command: it holds the value",
        ),
        (
            TOKEN,
            f"search.space={{lr: {{type: choice, values: ['{TOKEN}', x]}}}}",
            "-s: a setting holds the value of a secret",
        ),
    ],
)
def test_a_run_whose_secrets_cannot_be_sent_rents_no_head(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch, value: str, word: str, line: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", value)
    code, text = say(*RUN, *SECRETS, "-s", word)
    assert (code != 0, line in text) == (True, True), text
    assert account.fake.instances == ()


def test_a_run_and_its_resume_send_secrets_by_a_parameter(
    account: Account, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, scripts = list[dict[str, str]](), list[str]()

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        scripts.append(json.dumps(words))
        if what == "start":
            found.append(take_secrets(account.fake.session("driver"), words["secrets"]))
            return {"started": True}
        return bill(2.0, 0.5, resources={"secrets": ["HF_TOKEN"]}) if what == "ask" else ENDED

    head.answers = answers
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, text = say(*RUN, *SECRETS)
    assert code == 0, text
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN is not set" in say("resume", "digits", "--on", "head", "-y")[1]
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}, another")
    assert say("resume", "digits", "--on", "head", "-y")[0] == 0
    assert found == [{"HF_TOKEN": TOKEN}, {"HF_TOKEN": f"{TOKEN}, another"}]
    assert not any(TOKEN in script or packed_secrets(found[0]) in script for script in scripts)
    assert kept(account) == []


@pytest.mark.by_default(2)
@pytest.mark.parametrize("refusal", ["head", "Ctrl-C", "AWS"])
def test_secrets_of_a_run_that_does_not_start_are_deleted(
    account: Account, head: Head, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    there = list[str]()
    denied = FakeError("AccessDeniedException", "User: x is not authorized to perform: ssm:GetCommandInvocation")

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        there.extend(kept(account))
        if refusal != "head":
            fault = Fault(error=denied if refusal == "AWS" else KeyboardInterrupt())
            account.fake.fault = lambda call: fault if call.operation == "GetCommandInvocation" else None
        return {"error": "digits runs on the head already"}

    head.answers = answers
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert say(*RUN, *SECRETS)[0] != 0
    assert len(there) == 1
    assert kept(account) == []


def test_a_driver_on_the_head_begins_with_the_values_or_says_that_they_are_gone(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[tuple[list[str], dict[str, str]]]()
    monkeypatch.setattr(on_head, "open_session", lambda region: account.fake.session("driver", region=region))
    monkeypatch.setattr(on_head.os, "execve", lambda path, words, environment: begun.append((words, environment)))
    monkeypatch.setattr("rubberband.cloud.aws.handover._PAUSE_S", 0.0)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = put(account, HF_TOKEN=TOKEN)
    on_head.drive(words=["run", "digits.yaml"], secrets=name)
    ((words, environment),) = begun
    assert words[1:] == ["-m", "rubberband.cli", "run", "digits.yaml"]
    assert environment == {**os.environ, "HF_TOKEN": TOKEN}
    assert kept(account) == []
    with pytest.raises(SystemExit, match=r"error: the values of resources\.secrets are not in SSM"):
        on_head.drive(words=["run", "digits.yaml"], secrets=name)
    assert len(begun) == 1


# Other credentials, and a head that is gone

OTHER = "999999999999"


def _in_another_account(account: Account, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Let commands have the credentials of another account from now on."""
    other = Account()
    other.fake.world.account = OTHER
    monkeypatch.setattr(
        "rubberband.cloud.aws.client.open_session", lambda region: other.fake.session("admin", region=region)
    )
    return other


def test_with_credentials_of_another_account_commands_say_so_and_no_money_is_free(
    account: Account, home: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say(*RUN)[0] == 0
    pledged = committed_usd(home, account.now)
    here = account.fake.world.account
    _in_another_account(account, monkeypatch)
    code, text = say("cloud", "down", "-y")
    assert code == 0, text
    assert f"owner rubberband has nothing running in us-east-1 of account {OTHER}" in text
    assert f"not looked at: account {here} (us-east-1, owner rubberband)" in text
    assert "AWS_PROFILE" in text
    assert committed_usd(home, account.now) == pledged > 0.0
    for command in ("status", "resume"):
        code, text = say(command, "digits", "--on", "head")
        assert code != 0
        assert f"owner rubberband has no head in us-east-1 of account {OTHER}" in text


@pytest.mark.by_default(1)
@pytest.mark.parametrize("at", ["look", "start"])
def test_a_login_that_expires_says_how_to_see_what_becomes_of_the_run(account: Account, head: Head, at: str) -> None:
    expired = list[str]()

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        expired.extend([what] if what == at else [])
        return {"started": True} if what == "start" else shown(b"at work\n")

    def fault(call: FakeCall) -> Fault | None:
        return Fault(error=FakeError("ExpiredTokenException", "The token is expired", 400)) if expired else None

    head.answers, account.fake.fault = answers, fault
    code, text = say("run", "digits.yaml", "--on", "head")
    assert code != 0
    assert "the credentials have expired" in text
    assert "digits may run on the head: `rubberband status digits --on head --watch` follows it" in text


def test_a_head_that_was_terminated_in_the_console_is_an_error_after_minutes(account: Account, head: Head) -> None:
    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        if what == "look":
            (one,) = account.fake.living
            account.session.client("ec2").terminate_instances(InstanceIds=[one.instance_id])
        return {"started": True} if what == "start" else shown(b"at work\n")

    head.answers = answers
    begun_at = account.now
    code, text = say("run", "digits.yaml", "--on", "head")
    assert code != 0
    assert "is offline or was terminated" in text
    assert account.now - begun_at < 400


# On the head itself


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    fetches = 'mkdir -p "$RUBBERBAND_ROOT/opt/rubberband/digits"'
    runs = 'shift 2; while [[ $1 == --* ]]; do shift; done; setsid "$@" &'
    for name, body in {"systemd-run": runs, "rubberband-fetch": fetches}.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("RUBBERBAND_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    return tmp_path / "root"


def whole(key: str) -> tuple[bytes, int]:
    log = b""
    while True:
        seen = on_head.look(key=key, name="digits", offset=len(log))
        log += base64.b64decode(seen["log"])
        if seen["exit"] is not None and not seen["more"]:
            return log, seen["exit"]


def test_a_command_is_started_once_and_its_output_comes_in_pieces(root: Path) -> None:
    first = {"key": "0" * 8, "name": "digits", "words": ["--version"], "packed": "s3://b/digits.zip"}
    assert on_head.start(**first) == {"started": True}
    assert on_head.start(**first) == {"started": False}
    log, code = whole("0" * 8)
    assert code == 0
    assert log.startswith(b"rubberband ")
    (root / "opt/rubberband/runs" / ("0" * 8) / "log").write_bytes(b"\xc3\xa4" * 20_000)
    assert whole("0" * 8)[0] == b"\xc3\xa4" * 20_000


def test_a_head_that_was_made_anew_meanwhile_starts_nothing(root: Path) -> None:
    on_head.folder().mkdir(parents=True, exist_ok=True)
    (on_head.folder() / "made-of").write_text("other\n")
    words: dict[str, Any] = {"key": "c" * 8, "name": "digits", "words": ["ps"], "packed": None}
    with pytest.raises(InputError, match="given other code or packages just now"):
        on_head.start(**words, made_of="this")
    assert on_head.start(**words, made_of="other") == {"started": True}


def test_a_second_run_of_a_name_is_refused_while_the_first_runs(root: Path) -> None:
    run = root / "opt/rubberband/runs" / ("1" * 8)
    run.mkdir(parents=True)
    (run / "name").write_text("digits")
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", str(run / "script")], stdin=subprocess.PIPE
    )
    try:
        (run / "pid").write_text(str(process.pid))
        eventually(lambda: str(run) in Path(f"/proc/{process.pid}/cmdline").read_text(), "the program that it is to be")
        with pytest.raises(InputError, match="digits runs on the head already"):
            on_head.start(key="2" * 8, name="digits", words=["--version"], packed=None)
        assert on_head.look(key=None, name="digits", offset=0)["lives"]
    finally:
        process.kill()
        process.communicate()
    assert not on_head.look(key=None, name="digits", offset=0)["lives"]


def test_a_folder_that_cannot_be_fetched_is_an_error_and_may_be_tried_again(root: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "rubberband-fetch"
    fetch = program.read_text()
    program.write_text("#!/bin/bash\necho 'it is not what the driver put there' >&2; exit 1\n")
    first = {"key": "3" * 8, "name": "digits", "words": ["--version"], "packed": "s3://b/digits.zip"}
    with pytest.raises(InputError, match="not what the driver put there"):
        on_head.start(**first)
    program.write_text(fetch)
    assert on_head.start(**first) == {"started": True}
    assert whole("3" * 8)[1] == 0


def test_a_long_answer_goes_through_the_bucket(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put: dict[str, bytes] = {}
    monkeypatch.setattr(S3Folder, "put", lambda self, name, payload: put.setdefault(name, payload) and f"s3://{name}")
    assert on_head.ask(words=["--version"], store="s3://b/heads")["out"].startswith("rubberband ")
    found = on_head.ask(words=["--help"], store="s3://b/heads")
    assert found.keys() == {"exit", "out", "err", "file"}
    monkeypatch.setattr(on_head, "MOST_CHARACTERS", 100)
    (name,) = [on_head.ask(words=["--help"], store="s3://b/heads")["at"].removeprefix("s3://")]
    assert json.loads(put[name]) == found


def test_an_error_is_one_line_of_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_head.main("look", json.dumps({"key": None, "name": "digits", "offset": 0}))
    assert json.loads(capsys.readouterr().out)["error"].startswith("nothing was started for digits on the head")


def test_a_head_reports_the_bill_of_its_month(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_head.main("ask", json.dumps({"words": ["ps"], "store": "s3://b/heads"}))
    assert json.loads(capsys.readouterr().out)["month"] == [0.0, 0.0]
