"""What happened to people with clusters of other tools on AWS: machines that stayed, and errors that were a puzzle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws.cleanup import living
from rubberband.cloud.aws.network import choose_subnets
from rubberband.errors import InputError, ProviderError
from rubberband.executor.ray.code import pack
from rubberband.executor.run.allowance import committed_usd
from tests.builders.aws_account import Account
from tests.builders.heads import Head, head_of, say, shown, worker
from tests.builders.heads import account as account
from tests.builders.heads import file as file
from tests.ec2 import Fault
from tests.ec2.faults import FakeCall, FakeError

LIMITS = "{deadline: 1h, max_cost: 2}"
OTHER = "999999999999"


def test_an_instance_that_is_protected_keeps_no_other_alive(account: Account) -> None:
    head_of(account)
    workers = [worker(account, f"i-00{number}") for number in range(4)]
    mine = workers[0].instance_id
    account.fake.world.instances[mine].protected = True
    account.sleep(60)

    code, text = say("cloud", "down", "-y")

    assert code != 0
    assert [one.instance_id for one in living(account.session, "rubberband")] == [mine]
    assert f"`aws ec2 modify-instance-attribute --instance-id {mine} --no-disable-api-termination" in text
    assert "4 others have ended" in text
    account.fake.world.instances[mine].protected = False
    assert say("cloud", "down", "-y")[0] == 0
    assert living(account.session, "rubberband") == ()


def _in_another_account(account: Account, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Let commands have the credentials of another account from now on."""
    other = Account()
    other.fake.world.account = OTHER
    monkeypatch.setattr(
        "rubberband.cloud.aws.client.open_session", lambda region: other.fake.session("admin", region=region)
    )
    return other


def test_with_credentials_of_another_account_commands_say_so_and_no_money_is_free(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head(account)
    head.answers = lambda what, words: {"started": True} if what == "start" else shown(b"", exit_code=0)
    home = Path.cwd().parent / "home"
    assert say("run", "digits.yaml", "--on", "head")[0] == 0
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
        assert f"digits runs in account {here}, and these credentials are of {OTHER}" in text


def test_down_names_other_owners_where_it_finds_nothing(account: Account) -> None:
    worker(account, "i-001", owner="alice")
    code, text = say("cloud", "down")
    assert code == 0, text
    assert (
        "owner alice has 1 instance there; `rubberband cloud down --region us-east-1 --owner alice` terminates them"
        in text
    )


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("at", "outcome"),
    [
        ("look", "digits continues on the head: `rubberband status digits --on head --watch` follows it"),
        ("start", "whether digits was started is not known: `rubberband status digits --on head` shows it"),
    ],
)
def test_a_login_that_expires_says_what_becomes_of_the_run(account: Account, file: Path, at: str, outcome: str) -> None:
    head, expired = Head(account), []

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        expired.extend([what] if what == at else [])
        return {"started": True} if what == "start" else shown(b"at work\n")

    def fault(call: FakeCall) -> Fault | None:
        return Fault(error=FakeError("ExpiredTokenException", "The token is expired", 400)) if expired else None

    head.answers, account.fake.fault = answers, fault
    code, text = say("run", "digits.yaml", "--on", "head")

    assert code != 0
    assert "the credentials have expired" in text
    assert outcome in text


def test_a_head_that_was_terminated_in_the_console_is_said_at_once(account: Account, file: Path) -> None:
    head = Head(account)

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        if what == "look":
            (one,) = account.fake.living
            account.session.client("ec2").terminate_instances(InstanceIds=[one.instance_id])
        return {"started": True} if what == "start" else shown(b"at work\n")

    head.answers = answers
    begun_at = account.now
    code, text = say("run", "digits.yaml", "--on", "head")

    assert code != 0
    assert "was terminated, and the journals on its disk with it" in text
    assert "`rubberband cloud down` ends what it rented now" in text
    assert "goes on" not in text
    assert account.now - begun_at < 200


def test_a_head_whose_volume_kms_keeps_from_it_names_the_remedy(account: Account) -> None:
    looks = [0]

    def breaks(call: FakeCall) -> Fault | None:
        looks[0] += "InstanceIds" in call.params
        for one in account.fake.living if looks[0] > 1 else ():
            account.fake.break_down(one.instance_id, "Client.InvalidKMSKey.InvalidState")
        return None

    account.fake.fault = breaks
    with pytest.raises(ProviderError, match=r"ended before it ran: .*policies/kms\.json to your own role for"):
        head_of(account)


def test_a_full_subnet_comes_last_and_one_without_ipv4_never(account: Account) -> None:
    world = account.fake.world
    first = next(one for one in world.subnets.values() if one.zone == world.zones[0])
    world.subnets[first.subnet_id] = replace(first, free_addresses=0)
    world.subnets["subnet-2"] = replace(first, subnet_id="subnet-2", default=False)
    world.subnets["subnet-6"] = replace(first, subnet_id="subnet-6", default=False, ipv6_only=True, free_addresses=9999)

    assert choose_subnets(account.session, (), "g5.xlarge", None)[1][world.zones[0]] == "subnet-2"
    assert choose_subnets(account.session, [first.subnet_id, "subnet-2"], "g5.xlarge", None)[1] == {
        world.zones[0]: "subnet-2"
    }
    with pytest.raises(InputError, match="subnet-6 has no IPv4 addresses"):
        choose_subnets(account.session, ["subnet-6"], "g5.xlarge", None)


@pytest.mark.parametrize(
    "name",
    ["prod.env", "rootkey.csv", "me_accessKeys.csv", "new_user_credentials.csv", "server.key", "kaggle.json", "a.p12"],
)
def test_keys_that_consoles_hand_out_are_not_sent(tmp_path: Path, name: str) -> None:
    (tmp_path / "trial.py").write_text("class Trial: ...\n")
    plain = pack([str(tmp_path)]).digest
    (tmp_path / name).write_text("AKIA")
    assert pack([str(tmp_path)]).digest == plain


def test_a_bucket_that_keeps_all_versions_is_said(account: Account) -> None:
    account.fake.world.facts(account.bucket).keeps_versions = True
    code, text = say("aws", "setup", "--bucket", account.bucket, "--dry-run")
    assert code == 0, text
    assert "it keeps every version: checkpoints that are deleted stay, and are paid for" in text
    account.fake.world.facts(account.bucket).lifecycle = [
        {"ID": "mine", "Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    ]
    assert "every version" not in say("aws", "setup", "--bucket", account.bucket, "--dry-run")[1]
