"""Secrets on their way to a head: the head gets a parameter's name, and nothing is left of the values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.cloud.aws import on_head
from rubberband.cloud.aws.handover import MOST_BYTES, delete_secrets, packed_secrets, put_secrets, take_secrets
from rubberband.errors import InputError
from tests.builders.aws_account import Account
from tests.builders.heads import Head, say, shown
from tests.builders.heads import account as account
from tests.builders.heads import file as file
from tests.ec2 import Fault
from tests.ec2.faults import FakeError

LIMITS = "{deadline: 1h, max_cost: 2}"
TOKEN = "hf_aVery$ecret/token"
SECRETS = ("-s", "resources.secrets=[HF_TOKEN]")


def kept(account: Account) -> list[str]:
    """The parameters with secrets that the account has."""
    return [name for name in account.fake.world.parameters if "/secrets/" in name]


def put(account: Account, principal: str = "admin", **values: str) -> str:
    session = account.fake.session(principal)
    return put_secrets(session, "rubberband", "0" * 32, packed_secrets(values), clock=lambda: account.now)


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


def test_values_that_are_too_long_for_a_parameter_are_refused(account: Account, file: Path) -> None:
    longest = MOST_BYTES - len(json.dumps({"KEY": ""}))
    put(account, KEY="x" * longest)
    with pytest.raises(InputError, match=f"have {MOST_BYTES + 1} bytes, and {MOST_BYTES} can be sent to a head"):
        packed_secrets({"KEY": "x" * (longest + 1)})


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("", "resources.secrets: HF_TOKEN is not set; run `export HF_TOKEN=…` before this command"),
        ("x" * 7000, f"and {MOST_BYTES} can be sent to a head; leave --on head out, or put"),
    ],
)
def test_a_run_whose_secrets_cannot_be_sent_rents_no_head(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch, value: str, line: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", value)
    code, text = say("run", "digits.yaml", "--on", "head", *SECRETS)
    assert code != 0
    assert line in text
    assert account.fake.instances == ()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (f"entrypoint={{command: [python, train.py, '{TOKEN}', '${{lr}}']}}", "entrypoint.command: it holds the value"),
        (f"search.space={{lr: {{type: choice, values: ['{TOKEN}', x]}}}}", "-s: a setting holds the value of a secret"),
    ],
)
def test_a_secret_in_a_command_line_is_refused(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch, word: str, line: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, text = say("run", "digits.yaml", "--on", "head", *SECRETS, "-s", word)
    assert code != 0
    assert line in text
    assert account.fake.instances == ()


def test_a_run_and_its_resume_send_secrets_by_a_parameter(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, found, scripts = Head(account), list[dict[str, str]](), list[str]()
    status = {"summary": {"max_cost_usd": 2.0, "cost_usd": 0.5}, "words": {"resources": {"secrets": ["HF_TOKEN"]}}}

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        scripts.append(json.dumps(words))
        if what == "start":
            found.append(take_secrets(account.fake.session("driver"), words["secrets"]))
            return {"started": True}
        return {"exit": 0, "out": json.dumps(status), "err": "", "file": None} if what == "ask" else ENDED

    head.answers = answers
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, text = say("run", "digits.yaml", "--on", "head", *SECRETS)
    assert code == 0, text
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN is not set" in say("resume", "digits", "--on", "head", "-y")[1]
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}, another")
    assert say("resume", "digits", "--on", "head", "-y")[0] == 0
    assert found == [{"HF_TOKEN": TOKEN}, {"HF_TOKEN": f"{TOKEN}, another"}]
    assert not any(TOKEN in script or packed_secrets(found[0]) in script for script in scripts)
    assert kept(account) == []


ENDED = shown(b"", exit_code=0)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("refusal", ["head", "AWS"])
def test_secrets_of_a_run_that_does_not_start_are_deleted(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    head, there = Head(account), list[str]()

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        there.extend(kept(account))
        if refusal == "AWS":
            denied = FakeError(
                "AccessDeniedException", "User: x is not authorized to perform: ssm:GetCommandInvocation"
            )
            account.fake.fault = lambda call: Fault(error=denied) if call.operation == "GetCommandInvocation" else None
        return {"error": "digits runs on the head already"}

    head.answers = answers
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert say("run", "digits.yaml", "--on", "head", *SECRETS)[0] != 0
    assert len(there) == 1
    assert kept(account) == []


def test_a_driver_on_the_head_begins_with_the_values(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[list[str], dict[str, str]]]()
    monkeypatch.setattr(on_head, "open_session", lambda region: account.fake.session("driver", region=region))
    monkeypatch.setattr(on_head.os, "execve", lambda path, words, environment: begun.append((words, environment)))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = put(account, HF_TOKEN=TOKEN)
    on_head.drive(words=["run", "digits.yaml"], secrets=name)
    ((words, environment),) = begun
    assert words[1:] == ["-m", "rubberband.cli", "run", "digits.yaml"]
    assert environment == {**os.environ, "HF_TOKEN": TOKEN}
    assert kept(account) == []


def test_a_driver_whose_values_are_gone_says_so_and_does_not_begin(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_head, "open_session", lambda region: account.fake.session("driver", region=region))
    monkeypatch.setattr("rubberband.cloud.aws.handover._PAUSE_S", 0.0)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(SystemExit, match=r"error: the values of resources\.secrets are not in SSM"):
        on_head.drive(words=["run", "digits.yaml"], secrets="/rubberband/rubberband/secrets/none")
