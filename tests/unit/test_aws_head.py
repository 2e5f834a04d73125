"""The head comes up once and everything goes down, whatever happens in between."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws.cleanup import Ended, end_everything, living
from rubberband.cloud.aws.head import ensure_head, upload_folder
from rubberband.cloud.aws.joining import publish_token
from rubberband.cloud.aws.network import OwnInstance, choose_subnets
from rubberband.errors import Cancelled, InputError, ProviderError
from rubberband.executor.ray.code import pack
from rubberband.spec.resources import Resources
from tests.builders.aws_account import Account
from tests.builders.heads import account as account
from tests.builders.heads import file as file
from tests.builders.heads import head_of, say, worker
from tests.ec2 import Fault
from tests.ec2.faults import FakeCall, FakeDisconnect, FakeError


def ended(account: Account, owner: str = "rubberband", place: OwnInstance | None = None) -> Ended:
    return end_everything(account.session, owner, place=place, clock=lambda: account.now, sleep=account.sleep)


def is_for_one(call: FakeCall) -> bool:
    """Whether the call describes one instance, by its id."""
    return call.operation == "DescribeInstances" and "'instance-id'" in str(call.params)


def test_the_head_is_started_once_and_found_after_that(account: Account) -> None:
    first, second = head_of(account), head_of(account)
    assert (first.started, second.started) == (True, False)
    assert first.instance_id == second.instance_id
    (machine,) = account.fake.instances
    assert (machine.profile, machine.machine_type.name) == ("rubberband-head", "m7i-flex.large")
    assert machine.metadata_options["HttpTokens"] == "required"
    assert machine.shutdown_behavior == "stop"
    assert machine.tags["rubberband:role"] == "head"


def test_a_head_that_has_ended_is_replaced_even_by_one_just_like_it(account: Account) -> None:
    for _ in range(3):
        head = head_of(account)
        account.session.client("ec2").terminate_instances(InstanceIds=[head.instance_id])
        account.sleep(4000.0)
    assert len({one.instance_id for one in account.fake.instances}) == 3
    assert head_of(account).started


def test_a_launch_without_an_answer_is_found_by_the_next_up(account: Account) -> None:
    def lost(call: FakeCall) -> Fault | None:
        return (
            Fault(error=FakeDisconnect("read_timeout"), took_effect=True) if call.operation == "RunInstances" else None
        )

    account.fake.fault = lost
    account.fake.world.visible_after_s = 200.0
    with pytest.raises(InputError, match="AWS does not answer"):
        head_of(account)
    account.fake.fault = None
    head_of(account)
    assert len(account.fake.instances) == 1


def test_a_throttled_launch_is_asked_for_again_with_its_token(account: Account) -> None:
    tokens: list[str] = []

    def busy(call: FakeCall) -> Fault | None:
        if call.operation == "RunInstances" and len(tokens) < 3:
            tokens.append(call.params["ClientToken"])
            return Fault.throttled() if len(tokens) == 1 else Fault.server_error(took_effect=True)
        return None

    account.fake.fault = busy
    head_of(account)
    assert len(set(tokens)) == 1
    assert len(account.fake.instances) == 1


def test_the_older_of_two_heads_stays(account: Account) -> None:
    def somebody_else(call: FakeCall) -> Fault | None:
        if call.operation == "RunInstances":
            account.fake.fault = None
            head_of(account, setup=("echo another",))
            account.sleep(5.0)
        return None

    account.fake.fault = somebody_else
    head = head_of(account)
    assert not head.started
    assert [one.instance_id for one in account.fake.living] == [head.instance_id]


def test_the_head_is_waited_for_while_ec2_does_not_show_it(account: Account) -> None:
    account.fake.world.visible_after_s = 120.0
    assert head_of(account).started
    assert account.now >= account.fake.instances[0].visible_at


LOSSES = [
    (Fault(error=FakeDisconnect("read_timeout"), took_effect=True), 0.0),
    (Fault(error=FakeDisconnect("read_timeout"), took_effect=True), 40.0),
    (Fault(error=FakeError("InternalError", "An internal error has occurred", 500), took_effect=True), 40.0),
    (Fault(error=FakeError("RequestLimitExceeded", "Request limit exceeded.", 503)), 0.0),
]


@pytest.mark.by_default(2)
@pytest.mark.parametrize(("loss", "visible_after_s"), LOSSES)
def test_up_and_down_that_broke_at_any_call_are_made_good_by_the_next_ones(
    account: Account, tmp_path: Path, loss: Fault, visible_after_s: float
) -> None:
    at = 0
    while at < 60:
        account = Account(visible_after_s=visible_after_s)
        account.session = account.fake.session("admin")
        publish_token(account.session, "rubberband", tmp_path / "token")
        first = len(account.fake.calls)
        broke = [breaks_at(account, first + at, loss, partial(head_of, account))]
        assert len({head_of(account).instance_id for _ in range(2)}) == 1
        assert len(account.fake.living) == 1
        second = len(account.fake.calls)
        broke.append(breaks_at(account, second + at, loss, partial(ended, account)))
        ended(account)
        assert account.fake.living == ()
        assert not [one for one in account.fake.world.groups.values() if one.name == "rubberband"]
        if not any(broke):
            return
        at += 1
    pytest.fail("it never got through")


def breaks_at(account: Account, index: int, loss: Fault, work: Callable[[], Any]) -> bool:
    """Do `work` with a fault at one call; whether that was reached."""
    account.fake.fault = lambda call: loss if call.index == index else None
    try:
        work()
    except (InputError, ProviderError):
        pass
    finally:
        account.fake.fault = None
    return len(account.fake.calls) > index


def test_a_full_zone_is_passed_over_and_none_is_an_error(account: Account) -> None:
    account.fake.set_capacity(0, zone="us-east-1a")
    assert head_of(account).zone == "us-east-1b"
    account.fake.set_capacity(0)
    with pytest.raises(ProviderError, match=r"no zone has a m7i-flex\.large for the head \(us-east-1a: Insuff"):
        head_of(account, owner="me")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"head_profile": "lost"}, r"resources\.aws\.head_profile: EC2 knows no instance profile 'lost'"),
        (
            {"head_instance_type": "m7i-flex.lrge"},
            r"resources\.aws\.head_instance_type: .*did you mean 'm7i-flex\.large'",
        ),
        ({"key_name": "lost"}, r"The key pair 'lost' does not exist\); correct resources\.aws\.key_name"),
    ],
)
def test_a_mismatch_is_refused(account: Account, words: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        head_of(account, **words)
    assert account.fake.instances == ()


def test_the_drivers_role_cannot_start_another_head(account: Account) -> None:
    account.session = account.fake.session("driver")
    with pytest.raises(InputError, match="iam:PassRole"):
        head_of(account)


def test_a_head_that_dies_before_it_runs_is_an_error(account: Account) -> None:
    def breaks(call: FakeCall) -> Fault | None:
        for one in account.fake.living:
            account.fake.break_down(one.instance_id)
        return None

    account.fake.fault = lambda call: breaks(call) if is_for_one(call) else None
    with pytest.raises(ProviderError, match=r"the head i-\w+ ended before it ran: "):
        head_of(account)
    assert len(account.fake.instances) == 1  # or a hundred would be launched, each of which ends


def test_the_experiments_folder_comes_along_through_the_bucket(account: Account) -> None:
    address = upload_folder(account.session, f"s3://{account.bucket}/c/", "digits", b"zip")
    digest = hashlib.sha256(b"zip").hexdigest()
    assert address == f"s3://{account.bucket}/packages/c/folders/digits.zip#sha256={digest}"
    assert account.fake.world.buckets[account.bucket]["packages/c/folders/digits.zip"] == b"zip"
    assert upload_folder(account.session, "/mnt/shared", "digits", b"zip") is None
    with pytest.raises(InputError, match="there is no bucket nowhere"):
        upload_folder(account.session, "s3://nowhere", "digits", b"zip")


def test_down_ends_everything_of_the_owner_and_again_nothing(account: Account, tmp_path: Path) -> None:
    head_of(account)
    workers = [worker(account, f"i-00{number}") for number in (1, 2)]
    mine = worker(account, "i-001", owner="me")
    publish_token(account.session, "rubberband", tmp_path / "token")
    done = ended(account)
    assert [one.role for one in done.instances] == ["head", "worker", "worker"]
    assert {one.instance_id for one in done.instances[1:]} == {one.instance_id for one in workers}
    assert done.token
    assert len(done.security_groups) == 1
    assert [one.instance_id for one in account.fake.living] == [mine.instance_id]
    assert not ended(account)


def test_down_finds_what_ec2_does_not_show_yet(account: Account) -> None:
    account.fake.world.visible_after_s = 250.0
    late = worker(account, "i-001")
    done = ended(account)
    assert [one.instance_id for one in done.instances] == [late.instance_id]
    assert account.fake.living == ()
    assert done.kept_groups == ()


def test_down_looks_twice_where_no_group_of_ours_is_in_use(account: Account) -> None:
    account.fake.world.visible_after_s = 3.0
    worker(account, "i-001", group_of="the-users-own")
    assert len(ended(account).instances) == 1
    assert account.fake.living == ()


def test_the_machine_that_says_down_goes_last(account: Account) -> None:
    head = head_of(account)
    worker(account, "i-001")
    here = replace(account.place, instance_id=head.instance_id)
    done = ended(account, place=here)
    assert [one.role for one in done.instances] == ["worker", "head"]
    assert account.fake.living == ()
    assert len(done.kept_groups) == 1


def test_up_shows_what_the_head_costs_and_the_command_for_a_run(account: Account, file: Path) -> None:
    code, text = say("cloud", "up", "digits.yaml", "-s", "constraints.max_cost=5")
    assert code == 0, text
    (head,) = account.fake.instances
    assert "rubberband run digits.yaml -s constraints.max_cost=5 --on head" in text
    assert re.search(
        r"m7i-flex\.large, 0\.1\d* USD an hour\) costs money until `rubberband cloud down`, and stops itself", text
    )
    assert f"s3://{account.bucket}/packages/digits/folders/digits.zip" in head.user_data


def test_up_asks_before_it_rents_or_starts_a_head_again(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuses(bill: str, what: str, *, yes: bool) -> None:
        asked.append(bill)
        if not yes:
            raise Cancelled("not confirmed")

    monkeypatch.setattr("rubberband.commands.cloud.confirm_bill", refuses)
    assert say("cloud", "up", "digits.yaml")[0] != 0
    assert account.fake.instances == ()
    assert say("cloud", "up", "digits.yaml", "-y")[0] == 0
    (head,) = account.fake.instances
    account.sleep(60)
    account.fake.power_off(head.instance_id)
    account.sleep(60)
    assert say("cloud", "up", "digits.yaml")[0] != 0
    assert account.fake.living == ()
    assert len(asked) == 3
    assert "USD an hour" in asked[0]


def test_up_from_a_folder_beside_the_file_s_takes_the_file_s(
    account: Account, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file.parent / "notes").mkdir()
    monkeypatch.chdir(file.parent / "notes")
    code, text = say("cloud", "up", "../digits.yaml")
    assert code == 0, text
    assert "rubberband run ../digits.yaml --on head" in text
    archive = account.fake.world.buckets[account.bucket]["packages/digits/folders/digits.zip"]
    assert "0/digits.py" in zipfile.ZipFile(io.BytesIO(archive)).namelist()


def test_up_without_prices_works_and_says_why(account: Account, file: Path) -> None:
    account.fake.fault = lambda call: (
        Fault(
            error=FakeError("AccessDeniedException", "User: x is not authorized to perform: pricing:GetProducts", 400)
        )
        if call.operation == "GetProducts"
        else None
    )
    code, text = say("cloud", "up", "digits.yaml")
    assert code == 0, text
    assert "x may not pricing:GetProducts" in text
    assert "the head (m7i-flex.large, its price is not known) costs money until `rubberband cloud down`" in text


def test_up_is_for_ec2(account: Account, file: Path) -> None:
    code, text = say("cloud", "up", "digits.yaml", "-s", "resources.provider=local")
    assert code != 0
    assert "local needs no head" in text


def test_down_asks_before_it_ends_a_run(account: Account, file: Path) -> None:
    worker(account, "i-001")
    code, text = say("cloud", "down", "digits.yaml")
    assert code != 0
    assert "1 of digits; terminate them anyway with --yes" in text
    assert len(living(account.session, "rubberband")) == 1
    code, text = say("cloud", "down", "digits.yaml", "--yes")
    assert code == 0, text
    assert "ended i-001 of digits" in text
    assert say("cloud", "down")[1].startswith("owner rubberband has nothing running in us-east-1")


def test_down_counts_the_head_as_ec2_does(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.fake.world.shutting_down_s = 200.0
    head_of(account)
    account.sleep(3600.0)
    monkeypatch.setattr("time.time", lambda: account.now)
    (expected,) = re.findall(r"the head ran for .*: (\d\.\d+) USD with its address", say("cloud", "down", "-y")[1])
    bill = account.fake.bill()
    charged_usd = bill.rent_usd + bill.side_usd("address")
    assert float(expected) == pytest.approx(charged_usd, abs=0.005), "it is rounded to the cent"


@pytest.mark.parametrize("stopped", [False, True])
def test_down_asks_before_it_ends_a_head_with_its_journals(account: Account, stopped: bool) -> None:
    head = head_of(account)
    account.sleep(60)
    if stopped:
        account.fake.power_off(head.instance_id)
    code, text = say("cloud", "down")
    assert code != 0
    assert f"the head {head.instance_id}, whose disk has the journals and reports" in text
    assert len(living(account.session, "rubberband")) == 1
    code, text = say("cloud", "down", "-y")
    assert code == 0, text
    assert "ended head (i-" in text
    assert ("the head ran for " in text) is not stopped
    assert ("its address, beside its disk; reports have the part" in text) is not stopped


def test_down_names_what_is_left_in_other_regions(account: Account) -> None:
    there = account.fake.session("admin", region="eu-west-1")
    head = ensure_head(there, account.resources(), clock=lambda: account.now, sleep=account.sleep)
    account.fake.fault = lambda call: (
        Fault.unavailable() if call.operation == "DescribeInstances" and call.region == "eu-west-2" else None
    )
    code, text = say("cloud", "down")
    assert code == 0, text
    assert text.startswith("owner rubberband has nothing running in us-east-1")
    assert f"left in eu-west-1: head ({head.instance_id}, m7i-flex.large in eu-west-1a), until" in text
    assert "`rubberband cloud down --region eu-west-1 --owner rubberband`" in text
    assert "whether owner rubberband has instances in eu-west-2 is not known: AWS is busy or broken" in text
    assert len(living(there, "rubberband")) == 1


def test_down_without_the_right_to_list_regions_says_so(account: Account) -> None:
    account.fake.fault = lambda call: (
        Fault(error=FakeError("UnauthorizedOperation", "User: x is not authorized to perform: ec2:DescribeRegions"))
        if call.operation == "DescribeRegions"
        else None
    )
    code, text = say("cloud", "down")
    assert code == 0, text
    assert "in other regions is not known: x may not ec2:DescribeRegions" in text


@pytest.mark.by_default(1)
@pytest.mark.parametrize("stopping", [True, False])
def test_up_starts_a_head_that_stopped_itself(account: Account, file: Path, stopping: bool) -> None:
    head = head_of(account)
    account.sleep(60)
    account.fake.power_off(head.instance_id)
    account.sleep(0 if stopping else 60)
    code, text = say("cloud", "up", "digits.yaml")
    assert code == 0, text
    assert f"head {head.instance_id} (m7i-flex.large, us-east-1a) was stopped and is started again" in text
    assert len(account.fake.instances) == 1
    assert account.fake.instances[0].state(account.now) == "running"


def test_a_stopped_head_whose_zone_is_full_says_so(account: Account) -> None:
    head = head_of(account)
    account.sleep(60)
    account.fake.power_off(head.instance_id)
    account.sleep(60)
    account.fake.set_capacity(0)
    with pytest.raises(InputError, match="EC2 has no room"):
        head_of(account)


def test_up_checks_the_account_before_it_rents_a_head(account: Account, file: Path) -> None:
    account.fake.world.quotas_vcpus["L-DB2E81BA"] = 0.0
    code, text = say("cloud", "up", "digits.yaml")
    assert code != 0
    assert "resources.instance_type" in text
    assert "L-DB2E81BA" in text
    assert account.fake.instances == ()


def test_on_the_free_plan_up_says_what_to_change(account: Account, file: Path) -> None:
    account.fake.world.free_plan = True
    code, text = say("cloud", "up", "digits.yaml")
    assert code != 0
    assert "the account is on AWS's Free plan, which rents no GPUs: upgrade to the paid plan" in text
    assert account.fake.instances == ()


def test_a_head_is_of_a_type_that_the_free_plan_has(account: Account) -> None:
    account.fake.world.free_plan = True
    assert head_of(account).started


def test_up_of_a_network_mount_is_checked_on_the_head(account: Account, file: Path) -> None:
    code, text = say(
        "cloud", "up", "digits.yaml", "-s", "resources.checkpoints=/mnt/efs", "-s", "resources.market=spot"
    )
    assert code == 0, text
    assert "copy the experiment's folder to it" in text


def test_a_head_that_bursts_is_not_charged_for_it(account: Account) -> None:
    head_of(account, head_instance_type="t3.medium")
    asked = [call.params for call in account.fake.calls if call.operation == "RunInstances"]
    assert asked[-1]["CreditSpecification"] == {"CpuCredits": "standard"}


@pytest.mark.parametrize(("words", "seconds"), [({}, 3600.0), ({"head_idle": "30m"}, 1800.0), ({"head_idle": 0}, 0.0)])
def test_how_long_a_head_may_idle(words: dict[str, Any], seconds: float) -> None:
    assert Resources(aws=words).aws.head_idle_s == seconds


def test_a_head_has_time_to_be_set_up() -> None:
    with pytest.raises(ValueError, match="give 10m, or 0"):
        Resources(aws={"head_idle": "5m"})


def test_an_instance_that_is_protected_keeps_no_other_alive(account: Account) -> None:
    head_of(account)
    workers = [worker(account, f"i-00{number}") for number in range(4)]
    mine = workers[0].instance_id
    account.fake.world.instances[mine].protected = True
    account.sleep(60)
    code, text = say("cloud", "down", "-y")
    assert code != 0
    assert [one.instance_id for one in living(account.session, "rubberband")] == [mine]
    assert f"The instance '{mine}' may not be terminated. Modify its 'disableApiTermination'" in text
    assert "4 others have ended" in text
    account.fake.world.instances[mine].protected = False
    assert say("cloud", "down", "-y")[0] == 0
    assert living(account.session, "rubberband") == ()


def test_down_names_other_owners_where_it_finds_nothing(account: Account) -> None:
    worker(account, "i-001", owner="alice")
    code, text = say("cloud", "down")
    assert code == 0, text
    assert (
        "owner alice has 1 instance there; `rubberband cloud down --region us-east-1 --owner alice` terminates them"
        in text
    )


def test_a_head_whose_volume_kms_keeps_from_it_names_the_remedy(account: Account) -> None:
    looks = [0]

    def breaks(call: FakeCall) -> Fault | None:
        looks[0] += is_for_one(call)
        for one in account.fake.living if looks[0] > 1 else ():
            account.fake.break_down(one.instance_id, "Client.InvalidKMSKey.InvalidState")
        return None

    account.fake.fault = breaks
    with pytest.raises(ProviderError, match=r"ended before it ran: .*policies/kms\.json to your own role for"):
        head_of(account)


def test_a_full_subnet_comes_last(account: Account) -> None:
    world = account.fake.world
    first = next(one for one in world.subnets.values() if one.zone == world.zones[0])
    world.subnets[first.subnet_id] = replace(first, free_addresses=0)
    world.subnets["subnet-2"] = replace(first, subnet_id="subnet-2", default=False)
    assert choose_subnets(account.session, (), "g5.xlarge", None)[1][world.zones[0]] == "subnet-2"
    assert choose_subnets(account.session, [first.subnet_id, "subnet-2"], "g5.xlarge", None)[1] == {
        world.zones[0]: "subnet-2"
    }


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
