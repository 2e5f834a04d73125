"""`--on head`: a head is asked by SSM, which loses answers, comes late and cuts output."""

from __future__ import annotations

import base64
import io
import json
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband.cli import app
from rubberband.cloud.aws.head import ensure_head
from rubberband.errors import InputError, ProviderError
from rubberband.executor.run.allowance import committed_usd
from rubberband.units import month_end
from tests.builders.aws_account import Account
from tests.builders.heads import Head, say, sent_made_of, shown
from tests.builders.heads import account as account
from tests.builders.heads import file as file
from tests.ec2 import Fault
from tests.ec2.faults import FakeCall, FakeError

LIMITS = "{deadline: 1h, max_cost: 2}"
BAD_WEATHER = [
    Fault(error=FakeError("ThrottlingException", "Rate exceeded", 400)),
    Fault(error=FakeError("InternalServerError", "", 500)),
    Fault.timeout(took_effect=True),
    Fault.timeout(took_effect=False),
]


@pytest.mark.parametrize("fault", BAD_WEATHER)
@pytest.mark.parametrize("operation", ["SendCommand", "GetCommandInvocation"])
def test_a_call_goes_through_bad_weather(account: Account, fault: Fault, operation: str) -> None:
    head = Head(account)
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


def test_a_start_that_is_repeated_has_the_same_key(account: Account) -> None:
    head = Head(account)
    remote, lost = head.remote(), [True]
    account.sleep(60.0)

    def loses(call: FakeCall) -> Fault | None:
        return Fault.timeout(took_effect=True) if call.operation == "SendCommand" and lost and lost.pop() else None

    account.fake.fault = loses
    key = remote.start("digits", ["run", "digits.yaml"], "s3://b/digits.zip#sha256=0", "it")
    assert [(what, words["key"]) for what, words in head.asked] == [("start", key), ("start", key)]


def test_an_agent_that_never_comes_is_an_error_with_the_policy(account: Account) -> None:
    account.fake.world.agent_s = 1e9
    with pytest.raises(ProviderError, match=r"SSM has not reached the head i-.* lacks the policy session\.json"):
        Head(account).remote().look("digits", None, 0)


def test_a_right_that_is_missing_is_said_at_once(account: Account) -> None:
    remote = Head(account).remote()
    account.fake.fault = lambda call: (
        Fault(error=FakeError("AccessDeniedException", "User: x is not authorized to perform: ssm:SendCommand"))
        if call.operation == "SendCommand"
        else None
    )
    with pytest.raises(InputError, match="x may not ssm:SendCommand"):
        remote.look("digits", None, 0)


def test_output_that_ssm_cut_is_an_error_and_no_half_answer(account: Account) -> None:
    head = Head(account)
    head.answers = lambda what, words: shown(b"x" * 30_000)
    with pytest.raises(ProviderError, match="failed"):
        head.remote().look("digits", None, 0)


def test_a_head_of_an_older_version_is_named(account: Account) -> None:
    head = Head(account)
    head.answers = lambda what, words: (1, "No module named rubberband.cloud.aws.on_head")
    with pytest.raises(ProviderError, match=r"No module named rubberband\.cloud\.aws\.on_head.* older than this one"):
        head.remote().look("digits", None, 0)


def test_a_run_on_the_head_sends_the_folder_starts_a_unit_and_follows_it(account: Account, file: Path) -> None:
    head, logs = Head(account), [shown(b"plan\n"), shown(b"best: lr=0.1\n", exit_code=4)]
    head.answers = lambda what, words: {"started": True} if what == "start" else logs.pop(0)

    code, text = say("run", "digits.yaml", "--on", "head", "-s", "constraints.max_cost=1")

    assert code == 4, text
    assert "plan\nbest: lr=0.1\n" in text
    (what, words), *looks = head.asked
    assert (what, words["name"]) == ("start", "digits")
    assert words["words"][:4] == ["run", "digits.yaml", "-s", "constraints.max_cost=1"]
    assert words["words"][-1] == "--yes"
    assert re.fullmatch(
        rf"s3://{account.bucket}/packages/digits/folders/digits\.zip#sha256=[0-9a-f]{{64}}", words["packed"]
    )
    assert [(one, asked["offset"], asked["key"]) for one, asked in looks] == [
        ("look", 0, words["key"]),
        ("look", 5, words["key"]),
    ]
    archive = account.fake.world.buckets[account.bucket]["packages/digits/folders/digits.zip"]
    assert "0/digits.py" in zipfile.ZipFile(io.BytesIO(archive)).namelist()


def test_the_last_pieces_of_a_long_log_are_shown(account: Account, file: Path) -> None:
    head, logs = Head(account), [shown(b"one\n", exit_code=0, more=True), shown(b"two\n", exit_code=0)]
    head.answers = lambda what, words: {"started": True} if what == "start" else logs.pop(0)
    assert "one\ntwo\n" in say("run", "digits.yaml", "--on", "head")[1]


def test_a_run_that_the_month_has_no_room_for_is_not_started(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise InputError("another run was quicker")

    head = Head(account)
    monkeypatch.setattr("rubberband.executor.run.allowance.pledge_on_head", refuses)
    assert "another run was quicker" in say("run", "digits.yaml", "--on", "head")[1]
    assert head.asked == []


def test_a_run_without_a_cap_or_that_is_refused_rents_no_head(account: Account, file: Path) -> None:
    file.write_text(file.read_text().replace(", max_cost: 2", ""))
    code, text = say("run", "digits.yaml", "--on", "head")
    assert code != 0
    assert "max_cost" in text
    assert account.fake.instances == ()


POLICIES = {
    "max_usd_per_run: 1": "max_usd_per_run of policy.yaml: constraints.max_cost is 2.00 USD",
    "max_usd_per_month: 1": "max_usd_per_month of policy.yaml",
    "max_usd_per_hour: 0.01": "max_usd_per_hour of policy.yaml: resources.max_instances=",
    "regions: [eu-west-1]": "regions of policy.yaml: resources.region='us-east-1' is not one of eu-west-1",
    "instance_types: [p5.*]": "instance_types of policy.yaml: 'g5.xlarge' is not one of p5.*",
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("door", [("cloud", "up", "digits.yaml", "-y"), ("run", "digits.yaml", "--on", "head", "-y")])
def test_no_door_rents_a_head_beyond_the_policy(
    account: Account, file: Path, policy: str, door: tuple[str, ...]
) -> None:
    home = file.parents[1] / "home"
    home.mkdir(exist_ok=True)
    (home / "policy.yaml").write_text(policy)
    code, text = say(*door)
    assert code != 0
    assert POLICIES[policy] in text
    assert account.fake.instances == ()


@pytest.mark.parametrize("door", [("cloud", "up", "digits.yaml", "-y"), ("run", "digits.yaml", "--on", "head", "-y")])
def test_a_head_of_a_type_of_one_s_own_is_within_the_policy(
    account: Account, file: Path, door: tuple[str, ...]
) -> None:
    home = file.parents[1] / "home"
    home.mkdir(exist_ok=True)
    (home / "policy.yaml").write_text("instance_types: [g5.*]")
    code, text = say(*door, "-s", "resources.aws.head_instance_type=c7i.xlarge")
    assert code != 0
    assert "instance_types of policy.yaml: 'c7i.xlarge' is not one of g5.*" in text
    assert account.fake.instances == ()


def test_a_run_goes_on_on_a_head_only_within_the_policy_of_today(account: Account, file: Path) -> None:
    head, home = Head(account), file.parents[1] / "home"
    head.answers = lambda what, words: {"start": {"started": True}, "ask": bill(2.0, 0.5)}.get(what, ENDED)
    assert say("run", "digits.yaml", "--on", "head")[0] == 0
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


def test_ctrl_c_leaves_the_run_going_and_says_how_to_follow_it(account: Account, file: Path) -> None:
    head = Head(account)

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        if what == "look":
            raise KeyboardInterrupt
        return {"started": True}

    head.answers = answers
    code, text = say("run", "digits.yaml", "--on", "head")
    assert code != 0
    assert "digits continues on the head: `rubberband status digits --on head --watch` follows it" in text
    assert [what for what, _ in head.asked] == ["start", "look"]
    assert len(account.fake.living) == 1


def test_credentials_that_expire_leave_the_run_going_and_say_how_to_go_on(account: Account, file: Path) -> None:
    head, looks = Head(account), []

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        if what == "look":
            looks.append(words)
            expired = FakeError("ExpiredTokenException", "The security token included in the request is expired")
            account.fake.fault = lambda call: Fault(error=expired)
            return shown(b"epoch 1\n")
        return {"started": True}

    head.answers = answers
    code, text = say("run", "digits.yaml", "--on", "head")
    assert code != 0
    assert len(looks) == 1
    assert "credentials have expired" in text
    assert text.endswith("; digits continues on the head: `rubberband status digits --on head --watch` follows it")
    account.fake.fault = None
    assert len(account.fake.living) == 1


def test_commands_are_asked_as_typed_on_the_head_that_runs_the_experiment(account: Account, file: Path) -> None:
    head = Head(account)
    head.answers, head.made_of = lambda what, words: {"exit": 3, "out": "fine\n", "err": "note\n", "file": None}, ["0"]
    other = account.fake.session("admin", region="eu-west-1")
    resources = account.resources(region="eu-west-1")
    there = ensure_head(other, resources, clock=lambda: account.now, sleep=account.sleep)
    (Path(file.parents[1]) / "home" / "heads").mkdir(parents=True)
    kept = {"region": "eu-west-1", "owner": "rubberband", "checkpoints": f"s3://{account.bucket}/digits"}
    (Path(file.parents[1]) / "home" / "heads" / "digits.json").write_text(json.dumps(kept))
    account.fake.in_region("eu-west-1").world.runs_command = head._run

    code, text = say("status", "-o", "json", "digits", "--on", "head")
    assert (code, text.startswith("fine\nnote\n")) == (3, True)
    assert say("logs", "digits", "1", "--on=head")[0] == 3
    assert [words["words"] for _, words in head.asked] == [
        ["status", "--output", "json", "digits"],
        ["logs", "digits", "1"],
    ]
    assert there.instance_id in {one.instance_id for one in account.fake.in_region("eu-west-1").living}


def test_a_report_of_a_stopped_head_starts_it_and_comes_through_the_bucket(account: Account, file: Path) -> None:
    head = Head(account)
    started = head.remote().instance_id
    account.sleep(60)
    account.fake.power_off(started)
    account.sleep(60)
    page = b"<html>" + b"x" * 100_000
    account.fake.world.buckets[account.bucket]["heads/answers/1.json"] = json.dumps(
        {"exit": 0, "out": "", "err": "", "file": base64.b64encode(page).decode()}
    ).encode()
    head.answers = lambda what, words: {"at": f"s3://{account.bucket}/heads/answers/1.json"}
    home = file.parents[1] / "home"
    home.mkdir(exist_ok=True)
    (home / "aws.yaml").write_text(f"bucket: {account.bucket}\nregion: us-east-1\n")

    code, text = say("report", "digits", "--html", "page.html", "--on", "head")

    assert code == 0, text
    assert f"the head {started} has stopped and is started again" in text
    assert head.asked[0][1]["words"] == ["report", "--html", "{file}.html", "digits"]
    assert (file.parent / "page.html").read_bytes() == page
    assert "heads/answers/1.json" not in account.fake.world.buckets[account.bucket]


ENDED = shown(b"", exit_code=0)


def bill(max_cost_usd: float, cost_usd: float, month: list[float] | None = None) -> dict[str, Any]:
    status = json.dumps({"summary": {"max_cost_usd": max_cost_usd, "cost_usd": cost_usd}, "words": {}})
    return {"exit": 0, "out": status, "err": "", "file": None, "month": month}


def test_runs_on_the_head_count_in_the_month_of_here(account: Account, file: Path) -> None:
    head, home = Head(account), file.parents[1] / "home"
    head.answers = lambda what, words: {"started": True} if what == "start" else shown(b"", lives=False)
    home.mkdir(exist_ok=True)
    (home / "policy.yaml").write_text("max_usd_per_month: 3\n")

    assert "the head stopped" in say("run", "digits.yaml", "--on", "head")[1]
    assert committed_usd(home, time.time()) == pytest.approx(2.0)
    assert committed_usd(home, month_end(time.time())) == pytest.approx(2.0), "it may still run next month"
    code, text = say("run", "digits.yaml", "--on", "head")
    assert code != 0
    assert "max_usd_per_month of policy.yaml: 2.00 USD of 3.00 USD are spent or may be" in text
    assert "`rubberband ps --on head` asks the head for its part anew" in text

    head.answers = lambda what, words: bill(2.0, 0.0, [0.0, 0.0])
    assert say("status", "digits", "--on", "head")[0] == 0
    assert committed_usd(home, time.time()) == pytest.approx(2.0), "it may not know of the run yet"

    head.answers = lambda what, words: {**shown(b"", exit_code=0), "month": [0.25, 0.0]}
    assert say("status", "digits", "--watch", "--on", "head")[0] == 0
    assert committed_usd(home, time.time()) == pytest.approx(0.25)
    assert committed_usd(home, month_end(time.time())) == 0.0


def test_a_resume_on_the_head_may_spend_what_is_left_of_its_max_cost(account: Account, file: Path) -> None:
    head, home = Head(account), file.parents[1] / "home"
    ended = {**ENDED, "month": [0.5, 0.0]}
    head.answers = lambda what, words: {"start": {"started": True}, "ask": bill(2.0, 0.5)}.get(what, ended)
    assert say("run", "digits.yaml", "--on", "head")[0] == 0
    for limit, begins in (("1.99", False), ("2.01", True)):
        (home / "policy.yaml").write_text(f"max_usd_per_month: {limit}\n")
        code, text = say("resume", "digits", "--on", "head")
        assert (code == 0) == begins, text


def test_the_rate_at_live_prices_is_checked_before_a_head_is_rented(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise InputError("too much for an hour")

    monkeypatch.setattr("rubberband.executor.run.allowance.require_rate", refuses)
    assert "too much for an hour" in say("run", "digits.yaml", "--on", "head")[1]
    assert account.fake.instances == ()


def test_down_of_a_stopped_head_asks_it_for_nothing(account: Account, file: Path) -> None:
    head = Head(account)
    account.fake.power_off(head.remote().instance_id)
    account.sleep(60)
    code, text = say("cloud", "down", "digits.yaml", "-y")
    assert (code, head.asked) == (0, [])
    assert "are not copied" not in text, "it did so before it stopped itself"


def test_a_head_that_has_ended_spends_no_more(account: Account, file: Path) -> None:
    head, home = Head(account), file.parents[1] / "home"
    head.answers = lambda what, words: {"at": "s3://b/copy"} if what == "keep" else shown(b"", lives=False)
    say("run", "digits.yaml", "--on", "head")
    assert say("cloud", "down", "digits.yaml", "-y")[0] == 0
    assert committed_usd(home, time.time()) == pytest.approx(2.0), "nobody can say what it has spent"
    assert committed_usd(home, month_end(time.time())) == 0.0


def test_more_money_for_a_run_on_the_head_is_within_the_policy_of_here(account: Account, file: Path) -> None:
    head, home = Head(account), file.parents[1] / "home"
    head.answers = lambda what, words: {"started": True} if what == "start" else ENDED
    assert say("run", "digits.yaml", "--on", "head")[0] == 0
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
    assert committed_usd(home, time.time()) == pytest.approx(2.0), "it was only shown"
    assert say("extend", "digits", "--max-cost", "3", "-y", "--on", "head")[0] == 0


def test_a_head_of_other_code_is_brought_up_to_date_before_a_run(account: Account, file: Path) -> None:
    head = Head(account)
    head.made_of = ["", None]
    head.answers = lambda what, words: {"started": True} if what == "start" else ENDED
    code, text = say("run", "digits.yaml", "--on", "head")
    assert code == 0, text
    assert "the head has other code, packages or settings than digits needs" in text
    assert head.remade == 1
    assert head.asked[0][1]["made_of"] == sent_made_of(account, account.fake.living[0].instance_id)


@pytest.mark.parametrize(("code", "why"), [(73, "something runs there; wait for its end"), (0, "could not be updated")])
def test_a_head_of_other_code_that_stays_so_runs_nothing(account: Account, file: Path, code: int, why: str) -> None:
    head = Head(account)
    head.made_of, head.remakes = ["0123 an older one"], code
    failed, text = say("run", "digits.yaml", "--on", "head")
    assert failed != 0
    assert why in text
    assert head.asked == []


def test_up_gives_a_head_that_runs_the_code_and_the_folder_of_here(account: Account, file: Path) -> None:
    head = Head(account)
    head.remote()
    head.made_of = ["", None]
    code, text = say("cloud", "up", "digits.yaml")
    assert code == 0, text
    assert head.remade == 1
    assert head.fetched[0].startswith(f"s3://{account.bucket}/packages/digits/folders/digits.zip#sha256=")


def test_a_resume_on_a_head_of_other_code_is_refused(account: Account, file: Path) -> None:
    head = Head(account)
    head.answers = lambda what, words: {"start": {"started": True}, "ask": bill(2.0, 0.5)}.get(what, ENDED)
    assert say("run", "digits.yaml", "--on", "head")[0] == 0
    assert say("resume", "digits", "--on", "head")[0] == 0
    assert head.asked[-2][1]["words"] == ["resume", "--yes", "digits"]
    count, head.made_of = len(head.asked), ["another ./wheels/rubberband_tune-0-py3-none-any.whl[ray,aws]"]
    code, text = say("resume", "digits", "--on", "head")
    assert code != 0
    assert "other code or packages than digits was started with" in text
    assert len(head.asked) == count
    head.answers = lambda what, words: {"exit": 0, "out": "", "err": "", "file": None}
    assert "the head's rubberband is ./wheels/rubberband_tune-0-py3" in say("status", "digits", "--on", "head")[1]


def test_a_new_run_has_its_free_name_here_too(account: Account, file: Path) -> None:
    head = Head(account)
    names = json.dumps({"experiments": [{"name": "digits"}, {"name": "digits-2"}]})

    def answers(what: str, words: dict[str, Any]) -> dict[str, Any]:
        if what == "ask":
            return {"exit": 0, "out": names, "err": "", "file": None}
        return {"started": True} if what == "start" else ENDED

    head.answers = answers
    code, text = say("run", "digits.yaml", "--new", "--on", "head")
    assert code == 0, text
    assert "the name digits is taken: this run is digits-3" in text
    (start,) = [words for what, words in head.asked if what == "start"]
    assert start["name"] == "digits-3"
    assert start["words"][2:4] == ["-s", "name=digits-3"]
    assert "--new" not in start["words"]
    assert "folders/digits-3.zip" in start["packed"]
    assert (file.parents[1] / "home" / "heads" / "digits-3.json").exists()


def test_commands_that_ask_for_experiments_are_sent_to_the_head(account: Account, file: Path) -> None:
    head = Head(account)
    head.remote()
    home = file.parents[1] / "home"
    home.mkdir(exist_ok=True)
    (home / "aws.yaml").write_text(f"bucket: {account.bucket}\nregion: us-east-1\n")
    table = base64.b64encode(b"trial\n0\n").decode()
    head.answers = lambda what, words: {"exit": 0, "out": "", "err": "", "file": table}
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
    [
        (("extend", "digits", "--deadline", "2h"), "Apply it?"),
        (("rm", "digits", "other"), "Delete 2 experiments?"),
    ],
)
def test_an_extension_and_a_deletion_are_shown_before_they_are_done(
    account: Account, file: Path, words: tuple[str, ...], question: str
) -> None:
    head = Head(account)
    head.answers = lambda what, words: {"started": True} if what == "start" else ENDED
    assert say("run", "digits.yaml", "--on", "head")[0] == 0
    head.answers = lambda what, words: {"exit": 0, "out": "", "err": "until 2h\n", "file": None}
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
def test_an_option_without_a_meaning_on_the_head_is_refused(
    account: Account, file: Path, words: tuple[str, ...]
) -> None:
    head = Head(account)
    head.remote()
    home = file.parents[1] / "home"
    home.mkdir(exist_ok=True)
    (home / "aws.yaml").write_text(f"bucket: {account.bucket}\nregion: us-east-1\n")
    head.answers = lambda what, words: {"exit": 0, "out": "", "err": "", "file": None}
    assert say(*words, "--on", "head")[0] != 0
    assert head.asked == []


def test_down_copies_the_journals_of_a_head_that_runs(account: Account, file: Path) -> None:
    head = Head(account)
    head.answers = lambda what, words: {"at": words["store"] + "/copies/i-1.zip"}
    head.remote()
    code, text = say("cloud", "down", "digits.yaml", "-y")
    assert code == 0, text
    assert f"copied the head's journals to s3://{account.bucket}/heads/copies/i-1.zip" in text
    assert account.fake.living == ()
