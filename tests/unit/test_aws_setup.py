"""`rubberband aws setup`, `check` and `teardown`, in empty accounts and in others; the policies that we ship."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband.cli import app
from rubberband.cloud.aws.account_parts import (
    Bounds,
    bucket_resource,
    new_bucket_name,
    policies,
    policy,
    role_resources,
)
from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import NodeStart, Purchase, client_token, launch_request, tags_of
from rubberband.cloud.aws.cleanup import end_everything
from rubberband.cloud.aws.client import never_ran, why
from rubberband.cloud.aws.joining import read_token, token_parameter
from rubberband.cloud.aws.network import ensure_cluster
from rubberband.cloud.aws.preflight import preflight
from rubberband.cloud.aws.s3 import put_package
from rubberband.errors import InputError
from rubberband.spec.account import BUCKET_FILE, Remembered, remember, remembered
from rubberband.spec.loading import load_experiment, load_pool
from tests.builders.aws_account import Account, offer, started
from tests.ec2 import BUCKET, FakeError, Fault
from tests.ec2.client import operation_names
from tests.ec2.iam import Role
from tests.ec2.policy import statements
from tests.ec2.world import BucketFacts


@pytest.fixture(autouse=True)
def home(off_ec2: Path) -> Path:
    return off_ec2


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    """One with nothing in it, open to an administrator."""
    account = Account()
    account.fake.world.empty()
    account.session = account.fake.session("admin")
    monkeypatch.setattr("rubberband.cloud.aws.calls.open_aws", lambda region: account.fake.session("admin"))
    monkeypatch.setattr("rubberband.cloud.aws.account_parts._PAUSE_S", 0.0)
    return account


def say(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["aws", *words])
    return result.exit_code, result.output if result.exception is None else f"{result.output}\n{result.exception}"


QUOTAS = {"L-3819A6DF", "L-DB2E81BA"}
READS = ("Get", "List", "Head", "Describe")


def changes(account: Account) -> list[str]:
    """Operations that changed something, or tried to."""
    return [name for name in account.operations() if not name.startswith(READS)]


def left(account: Account) -> dict[str, Any]:
    world = account.fake.world
    return {
        "roles": sorted(world.roles),
        "profiles": world.profiles,
        "buckets": sorted(world.buckets),
        "budgets": sorted(world.budgets),
    }


NOTHING: dict[str, Any] = {"roles": [], "profiles": {}, "buckets": [], "budgets": []}


def test_a_new_account_gets_all_that_a_run_needs_and_no_file_needs_a_bucket(
    account: Account, home: Path, tmp_path: Path
) -> None:
    code, text = say("setup", "--yes", "--budget", "20", "--email", "me@example.org")
    assert code == 0, text
    world = account.fake.world
    (bucket,) = world.buckets
    facts = world.facts(bucket)
    assert set(facts.public_block.values()) == {True}
    days = {one["Id"]: one for one in facts.lifecycle}
    assert days["rubberband-uploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert days["rubberband-packages"]["ExpirationInDays"] == 30
    assert world.profiles == {"rubberband-head": "rubberband-head", "rubberband-worker": "rubberband-worker"}
    assert world.roles["rubberband-head"].tags == {"rubberband:owner": "rubberband"}
    assert (world.scheduler_roles, world.service_roles) == ({"rubberband-guard"}, {"EC2Spot"})
    assert {one["QuotaCode"]: one["DesiredValue"] for one in world.quota_requests} == dict.fromkeys(QUOTAS, 16.0)
    budget = world.budgets["rubberband"]
    assert (budget["TimeUnit"], budget["BudgetLimit"]) == ("MONTHLY", {"Amount": "20", "Unit": "USD"})
    assert remembered(home) == Remembered(bucket=bucket, region="us-east-1")
    file = tmp_path / "digits.yaml"
    file.write_text(Path("examples/digits-aws.yaml").read_text().replace("  region: us-east-1\n", ""))
    resources = load_experiment(file).resources
    assert (resources.checkpoints, resources.region) == (f"s3://{bucket}/digits-aws", "us-east-1")


def test_the_heads_role_passes_the_checks_before_a_run_after_a_setup(account: Account) -> None:
    say("setup", "--yes", "--types", "g5.*")
    world = account.fake.world
    (bucket,) = world.buckets
    for principal in ("driver", "worker"):
        role = world.roles[f"rubberband-{'head' if principal == 'driver' else 'worker'}"]
        account.fake.policies[principal] = [
            one for text in role.policies.values() for one in statements(json.loads(text))
        ]
    world.quotas_vcpus = dict.fromkeys(world.quotas_vcpus, 64.0)
    started(account)
    account.session = account.fake.session("driver")
    resources = account.resources(market="spot", checkpoints=f"s3://{bucket}/digits")
    preflight(resources, [offer()], session=account.session, place=account.place)
    other = account.resources(instance_type="g6.xlarge", checkpoints=f"s3://{bucket}/digits")
    with pytest.raises(InputError, match=r"ec2:RunInstances.*aws setup --types"):
        preflight(other, [offer("g6.xlarge")], session=account.session, place=account.place)


def test_a_second_setup_changes_nothing(account: Account) -> None:
    say("setup", "--yes", "--types", "g5.*")
    before = len(account.fake.calls)
    code, text = say("setup")
    assert code == 0, text
    assert "nothing to do" in text
    assert [call.operation for call in account.fake.calls[before:] if not call.operation.startswith(READS)] == []


def test_quotas_are_not_asked_for_again_once_aws_refused(account: Account) -> None:
    say("setup", "--yes")
    for one in account.fake.world.quota_requests:
        one["Status"] = "DENIED"
    code, text = say("setup")
    assert (code, len(account.fake.world.quota_requests)) == (0, 2), text
    assert "AWS did not grant them" in text


@pytest.mark.parametrize("operation", ["CreateStack", "DescribeStacks", "RequestServiceQuotaIncrease"])
@pytest.mark.parametrize("took_effect", [False, True])
def test_a_half_made_setup_is_completed(account: Account, home: Path, operation: str, took_effect: bool) -> None:
    left_to_fail = [Fault.server_error(took_effect=took_effect)]
    account.fake.fault = lambda call: (
        left_to_fail.pop() if call.operation == operation and changes(account) and left_to_fail else None
    )
    code, text = say("setup", "--yes")
    assert (code, "run it again" in text) == (1, True), text
    assert remembered(home) is None
    code, text = say("setup", "--yes")
    assert code == 0, text
    assert len(account.fake.world.buckets) == 1
    assert account.fake.world.profiles == {name: name for name in ("rubberband-head", "rubberband-worker")}
    assert "nothing to do" in say("setup")[1]


def test_a_resource_that_cannot_be_made_is_named_and_nothing_stays(account: Account, home: Path) -> None:
    account.fake.world.roles["rubberband-worker"] = Role(trust="{}")
    code, text = say("setup", "--yes")
    assert (code, "could not complete it (Worker: rubberband-worker already exists)" in text) == (1, True), text
    assert (left(account), remembered(home)) == ({**NOTHING, "roles": ["rubberband-worker"]}, None)
    account.fake.world.roles.clear()
    assert say("setup", "--yes")[0] == 0


def test_a_stack_that_is_broken_or_of_another_owner_is_not_changed(account: Account) -> None:
    assert say("setup", "--yes", "--owner", "a.b")[0] == 0
    code, text = say("setup", "--yes", "--owner", "a-b")
    assert (code, "stack rubberband-a-b of CloudFormation is not of owner a-b" in text) == (1, True), text
    (stack,) = account.fake.world.stacks.values()
    stack.result = "UPDATE_ROLLBACK_FAILED"
    code, text = say("setup", "--yes", "--owner", "a.b")
    assert (code, "is UPDATE_ROLLBACK_FAILED; run `rubberband aws teardown` first" in text) == (1, True), text
    assert left(account)["roles"] == ["a.b-guard", "a.b-head", "a.b-worker"]


def test_a_later_setup_changes_what_was_made_and_keeps_the_rest(account: Account) -> None:
    say("setup", "--yes", "--types", "g5.*")
    (bucket,) = account.fake.world.buckets
    code, text = say("setup", "--yes", "--types", "g6.xlarge")
    assert (code, "change role rubberband-head (policies: rubberband, session)" in text) == (0, True), text
    assert "g5" not in account.fake.world.roles["rubberband-head"].policies["rubberband"]
    account.fake.world.buckets["mine"] = {}
    assert say("setup", "--yes", "--bucket", "mine")[0] == 0
    assert sorted(account.fake.world.buckets) == ["mine", bucket]


def test_the_template_is_as_cloudformation_has_it() -> None:
    cfnlint = pytest.importorskip("cfnlint.api")
    bounds = Bounds(account="123456789012", owner="team", bucket="b", region="eu-west-1", types=("g5.*",))
    template = json.dumps({"Resources": {**role_resources(bounds), "Bucket": bucket_resource("rubberband-0")}})
    assert [str(one) for one in cfnlint.lint_all(template) if not one.rule.id.startswith("I")] == []
    assert len(template) < 51_200


def test_the_free_plan_is_named_and_changes_nothing(account: Account) -> None:
    assert "free plan" not in say("setup", "--yes")[1]
    account.fake.world.free_plan = True
    code, text = say("check")
    assert (code, "free plan" in text) == (0, True), text


def test_checkpoints_in_the_folder_of_packages_are_refused() -> None:
    account = Account()
    resources = account.resources(checkpoints=f"s3://{account.bucket}/packages")
    with pytest.raises(InputError, match="give another prefix"):
        preflight(resources, [offer()], session=account.session, place=account.place)


def test_a_dry_run_prints_every_policy_and_makes_nothing(account: Account) -> None:
    code, text = say("setup")
    assert code != 0
    assert "--yes" in text
    code, text = say("setup", "--dry-run")
    assert code == 0
    for name in (
        "LaunchOnlyTaggedInstances",
        "ssmmessages:OpenDataChannel",
        "OnlyReadWhatOthersRun",
        "aws:SourceAccount",
    ):
        assert name in text
    assert changes(account) == []


Refusal = Callable[[Account], None]


def _elsewhere(account: Account) -> None:
    account.fake.world.buckets["theirs"] = {}
    account.fake.world.bucket_facts["theirs"] = BucketFacts(region="us-east-1", owner="999999999999", public=True)


def _in_another_region(account: Account) -> None:
    account.fake.world.buckets["theirs"] = {}
    account.fake.world.bucket_facts["theirs"] = BucketFacts(region="eu-west-1")


def _expired(account: Account) -> None:
    error = FakeError("ExpiredToken", "The security token included in the request is expired", 403)
    account.fake.fault = lambda call: Fault(error=error)


@pytest.mark.parametrize(
    ("words", "before", "said"),
    [
        (("--bucket", "theirs"), _elsewhere, "belongs to another account"),
        (("--bucket", "theirs"), _in_another_region, "is in eu-west-1"),
        (("--bucket", "theirs"), None, "there is no bucket theirs"),
        (("--types", "g99.*"), None, "us-east-1 has no g99"),
        (("--budget", "20"), None, "--budget and --email need each other"),
        (("--owner", "a b"), None, "--owner: a b is no owner"),
        ((), _expired, "credentials have expired"),
    ],
)
def test_a_wrong_setup_is_refused_in_one_line(
    account: Account, words: tuple[str, ...], before: Refusal | None, said: str
) -> None:
    if before is not None:
        before(account)
    code, text = say("setup", "--yes", *words)
    assert code == 1
    assert said in text
    assert len(text.strip().splitlines()) == 1
    assert changes(account) == []


@pytest.mark.parametrize(("principal", "said"), [("nobody", "no AWS credentials"), ("worker", "use an administrator")])
def test_a_user_without_the_rights_is_refused(
    account: Account, monkeypatch: pytest.MonkeyPatch, principal: str, said: str
) -> None:
    monkeypatch.setattr("rubberband.cloud.aws.calls.open_aws", lambda region: account.fake.session(principal))
    code, text = say("setup", "--yes")
    assert (code, said in text) == (1, True), text


def test_a_bucket_of_ones_own_keeps_its_settings_and_outlives_a_teardown(account: Account, home: Path) -> None:
    account.fake.world.buckets["mine"] = {}
    assert say("setup", "--yes", "--bucket", "mine")[0] == 0
    assert account.fake.world.facts("mine").lifecycle is None
    assert remembered(home) == Remembered(bucket="mine", region="us-east-1")
    assert "nothing to do" in say("setup")[1]
    assert say("teardown", "--yes")[0] == 0
    assert left(account) == {**NOTHING, "buckets": ["mine"]}
    assert not (home / BUCKET_FILE).exists()


def test_another_region_does_not_take_the_bucket_away_from_the_first(account: Account, home: Path) -> None:
    remember(home, Remembered(bucket="mine", region="eu-west-1"))
    code, text = say("setup", "--yes", "--region", "us-east-1")
    assert (code, "--region eu-west-1" in text) == (1, True), text
    assert changes(account) == []


def test_check_names_what_is_missing_and_checks_a_file_as_before_a_run(account: Account, tmp_path: Path) -> None:
    code, text = say("check")
    assert (code, "missing:" in text, "rubberband aws setup" in text) == (1, True, True), text
    say("setup", "--yes")
    code, text = say("check")
    assert (code, "all is there" in text) == (0, True), text
    file = tmp_path / "digits.yaml"
    file.write_text(Path("examples/digits-aws.yaml").read_text().replace("install: scikit-learn", "install: none"))
    code, text = say("check", str(file))
    assert (code, "no quota for g4dn.xlarge" in text) == (1, True), text
    account.fake.world.quotas_vcpus = dict.fromkeys(account.fake.world.quotas_vcpus, 64.0)
    code, text = say("check", str(file))
    assert (code, "all is there" in text) == (0, True), text
    assert account.fake.living == ()


def test_a_teardown_leaves_nothing_of_its_own(account: Account, home: Path) -> None:
    say("setup", "--yes", "--budget", "20", "--email", "me@example.org")
    (bucket,) = account.fake.world.buckets
    account.fake.world.buckets[bucket]["packages/digits/wheels/a.whl"] = b"1"
    code, text = say("teardown", "--yes")
    assert code == 0, text
    assert left(account) == NOTHING
    assert not (home / BUCKET_FILE).exists()
    assert "nothing to delete" in say("teardown", "--yes")[1]


def test_checkpoints_are_deleted_only_where_that_is_said(account: Account) -> None:
    say("setup", "--yes")
    (bucket,) = account.fake.world.buckets
    account.fake.world.buckets[bucket] |= {f"digits/run/{index}": b"12" for index in range(1001)}
    account.fake.world.facts(bucket).deleted.add("digits/run/old")
    assert say("teardown", "--yes")[0] == 0
    assert left(account) == {**NOTHING, "buckets": [bucket]}
    assert "nothing to delete" in say("teardown", "--yes")[1]
    assert say("setup", "--yes")[0] == 0
    assert list(account.fake.world.buckets) == [bucket]
    code, text = say("teardown", "--yes", "--delete-checkpoints")
    assert (code, left(account)) == (0, NOTHING), text


def test_a_teardown_that_was_cut_off_is_completed(account: Account, home: Path) -> None:
    say("setup", "--yes")
    (bucket,) = account.fake.world.buckets
    cut = [Fault.server_error(took_effect=True)]
    account.fake.fault = lambda call: cut.pop() if call.operation == "DeleteStack" and cut else None
    account.fake.world.buckets[bucket]["packages/late.whl"] = b"1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubberband.cloud.aws.account.empty_bucket", lambda session, bucket: None)
        assert say("teardown", "--yes")[0] == 1
        code, text = say("teardown", "--yes")
    assert (code, "Bucket: The bucket you tried to delete is not empty" in text) == (1, True), text
    assert say("teardown", "--yes")[0] == 0
    assert (left(account), remembered(home)) == (NOTHING, None)


def test_a_teardown_is_refused_while_instances_live(account: Account) -> None:
    say("setup", "--yes")
    started(account)
    code, text = say("teardown", "--yes")
    assert (code, "rubberband cloud down" in text) == (1, True), text
    (instance,) = account.fake.living
    account.fake.break_down(instance.instance_id)
    account.sleep(120.0)
    assert say("teardown", "--yes")[0] == 0
    assert left(account) == NOTHING


def test_a_teardown_sees_instances_of_other_regions(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    say("setup", "--yes")
    far = Account(region="eu-west-1")
    started(far)
    regions = {"us-east-1": account, "eu-west-1": far}
    monkeypatch.setattr(
        "rubberband.cloud.aws.calls.open_aws",
        lambda region: regions.get(region, Account(region=region)).fake.session("admin"),
    )
    code, text = say("teardown", "--yes")
    assert (code, "1 instance in eu-west-1" in text) == (1, True), text
    assert left(account)["roles"]


@pytest.mark.parametrize(("words", "region"), [("", "eu-west-1"), ("region: us-west-2\n", "us-west-2")])
def test_a_pool_has_the_bucket_as_well_and_its_region_unless_the_file_names_one(
    home: Path, tmp_path: Path, words: str, region: str
) -> None:
    remember(home, Remembered(bucket="mine", region="eu-west-1"))
    (tmp_path / "team.yaml").write_text(f"instances: 2\nprovider: aws\ninstance_type: g5.xlarge\n{words}")
    pool = load_pool(tmp_path / "team.yaml")
    assert (pool.checkpoints, pool.region) == ("s3://mine/team", region)


def test_a_worker_writes_checkpoints_and_nothing_that_others_run() -> None:
    account = Account()
    s3 = account.fake.session("worker").client("s3")
    put_package(account.session, f"s3://{account.bucket}/digits", "folders/digits.zip", b"code")
    s3.put_object(Bucket=account.bucket, Key="digits/run/t1", Body=b"1")
    key = "packages/digits/folders/digits.zip"
    assert s3.get_object(Bucket=account.bucket, Key=key)["Body"].read() == b"code"
    with pytest.raises(Exception, match="not authorized to perform: s3:PutObject"):
        s3.put_object(Bucket=account.bucket, Key=key, Body=b"theirs")


def test_roles_of_another_owner_name_only_its_own() -> None:
    made = role_resources(Bounds(account="123456789012", owner="team", bucket="b"))
    names = [one["Properties"]["RoleName"] for one in made.values() if one["Type"] == "AWS::IAM::Role"]
    assert names == ["team-head", "team-worker", "team-guard"]
    text = json.dumps(made)
    for ours in ('rubberband:owner": "rubberband"', "rubberband/rubberband", "role/rubberband", "BUCKET", "OWNER"):
        assert ours not in text
    assert "KEY" in json.dumps(policy("kms", Bounds(account="1", owner="team", bucket="b")))


def test_a_bucket_of_another_account_gets_no_code() -> None:
    account = Account()
    _elsewhere(account)
    with pytest.raises(InputError, match="may not s3:PutObject in theirs; if the bucket is this account's"):
        put_package(account.fake.session("admin"), "s3://theirs/digits", "folders/digits.zip", b"code")
    with pytest.raises(InputError, match="may not s3:PutObject in theirs"):
        preflight(
            account.resources(checkpoints="s3://theirs/x"), [offer()], session=account.session, place=account.place
        )
    assert account.fake.world.buckets["theirs"] == {}


def test_a_bucket_in_another_region_is_a_note() -> None:
    account = Account()
    account.fake.world.facts(account.bucket).region = "eu-west-1"
    notes = preflight(account.resources(), [offer()], session=account.session, place=account.place)
    assert any("is in eu-west-1 and instances are in us-east-1" in note and "0.02 USD" in note for note in notes)


def test_a_bucket_with_a_key_of_kms_names_the_right_and_the_policy() -> None:
    account = Account()
    account.fake.world.facts(account.bucket).kms_key = "arn:aws:kms:us-east-1:123456789012:key/k"
    with pytest.raises(InputError, match=r"may not kms:GenerateDataKey, .*kms\.json"):
        preflight(account.resources(), [offer()], session=account.session, place=account.place)


def test_a_package_that_would_expire_during_a_run_is_written_again() -> None:
    account = Account()
    words = (account.session, f"s3://{account.bucket}/digits", "wheels/a.whl", b"1")
    for _ in range(2):
        put_package(*words, unless_there=True)
    assert account.operations().count("PutObject") == 1
    account.fake.world.facts(account.bucket).written_at["packages/digits/wheels/a.whl"] = 1_700_000_000.0
    put_package(*words, unless_there=True)
    assert account.operations().count("PutObject") == 2


def test_a_driver_that_outlives_its_packages_in_the_bucket_writes_them_anew() -> None:
    account = Account()
    machines = resolve(
        account.session,
        account.resources(aws={"install": None}).aws,
        "g5.xlarge",
        checkpoints=f"s3://{account.bucket}/digits",
        place=account.place,
    )
    start = NodeStart(instances=("a",), head_address="10.0.0.1:1", gpus=1, lease_s=600, lifetime_s=3600)
    text = machines.user_data(start)
    expired = dict(account.fake.world.buckets[account.bucket])
    account.fake.world.buckets[account.bucket].clear()  # as its rules say, after 30 days
    machines.user_data.args[0].renewed_at -= 2 * 86_400.0  # type: ignore[attr-defined]
    assert machines.user_data(start) == text
    assert account.fake.world.buckets[account.bucket] == expired
    assert len(expired) == 2


def test_an_instance_that_kms_keeps_from_starting_names_the_remedy() -> None:
    machine = {"StateReason": {"Code": "Client.InternalError", "Message": "Client error on launch"}}
    assert "kms.json" in why(machine, lease_over=False)
    assert never_ran({"StateReason": {"Code": "Client.InvalidKMSKey.InvalidState"}})
    assert "kms" not in why({"StateReason": {"Code": "Server.InternalError", "Message": "x"}}, lease_over=False)


def test_a_request_that_is_open_is_waited_for_and_holds_up_nothing(account: Account, home: Path) -> None:
    quotas = account.session.client("service-quotas")
    quotas.request_service_quota_increase(ServiceCode="ec2", QuotaCode="L-DB2E81BA", DesiredValue=4.0)
    code, text = say("setup", "--yes")
    assert (code, (home / BUCKET_FILE).exists()) == (0, True), text
    assert "4 were asked for on" in text
    assert "for 16, run this again then" in text
    account.fake.world.quotas_vcpus["L-DB2E81BA"] = 4.0
    account.fake.world.quota_requests[0]["Status"] = "APPROVED"
    assert "ask AWS for 16 vCPUs" in say("setup", "--yes")[1]
    assert "nothing to do" in say("setup", "--yes")[1], "the second page of the history has the second request"


def test_the_name_of_a_bucket_is_random_and_has_its_owners() -> None:
    assert re.fullmatch(r"rubberband-[0-9a-f]{12}", new_bucket_name("rubberband"))
    assert re.fullmatch(r"rubberband-my-team-[0-9a-f]{12}", new_bucket_name("My_Team"))


def test_roles_are_of_this_account_this_region_and_these_types() -> None:
    bounds = Bounds(account="123456789012", owner="team", bucket="b", region="eu-west-1", types=("g5.*",))
    driver = policies(bounds)["head"]["rubberband"]
    (launch,) = (one for one in driver["Statement"] if one.get("Sid") == "LaunchOnlyTaggedInstances")
    assert launch["Condition"]["StringEquals"]["ec2:Region"] == "eu-west-1"
    assert launch["Condition"]["StringLike"] == {"ec2:InstanceType": ["g5.*"]}
    guard = role_resources(bounds)["Guard"]["Properties"]
    (may_assume,) = guard["AssumeRolePolicyDocument"]["Statement"]
    assert may_assume["Principal"] == {"Service": "scheduler.amazonaws.com"}
    assert may_assume["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}


@pytest.mark.parametrize("text", ["", "bucket: mine\n", "- bucket", "bucket: [\n"])
def test_a_broken_memory_is_not_taken_for_none(home: Path, text: str) -> None:
    home.mkdir()
    assert remembered(home) is None
    (home / BUCKET_FILE).write_text(text)
    with pytest.raises(InputError, match="does not say bucket and region; run `rubberband aws setup` again"):
        remembered(home)


# The shipped policies: enough for every call that is made, and nothing that no call needs

PREFLIGHT = [
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:CreatePlacementGroup",
    "ec2:CreateSecurityGroup",
    "ec2:CreateTags",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ec2:RunInstances",
    "ec2:TerminateInstances",
    "iam:PassRole",
    "s3:DeleteObject",
    "s3:GetObject",
    "s3:PutObject",
    "servicequotas:GetServiceQuota",
    "ssm:GetParameter",
    "ssm:PutParameter",
]
"""What a run cannot do without: the checks before it find that it is missing."""


GUARD = ["iam:PassRole", "scheduler:CreateSchedule", "scheduler:DeleteSchedule", "scheduler:UpdateSchedule"]
"""What a run can do without, as the checks before it note."""


OTHERWISE = {
    "ec2:AuthorizeSecurityGroupEgress": "EFA between instances of a trial; without it a note says so",
    "ec2:DeletePlacementGroup": "rubberband cloud down",
    "ec2:DeleteSecurityGroup": "rubberband cloud down",
    "ec2:DescribePlacementGroups": "rubberband cloud down",
    "ec2:DescribeRegions": "rubberband cloud down",
    "ec2:CreateImage": "rubberband cloud image build",
    "ec2:DeleteSnapshot": "rubberband cloud image delete",
    "ec2:DeregisterImage": "rubberband cloud image delete",
    "ec2:DescribeSnapshots": "rubberband cloud image delete",
    "ec2:GetConsoleOutput": "the reason of an instance that powered itself off",
    "ec2:DescribeRouteTables": "whether a NAT gateway charges what instances download; without it a note says so",
    "ec2:DescribeCapacityBlockOfferings": "capacity blocks beside a plan; without it a note says so",
    "ec2:DescribeCapacityReservations": "resources.aws.reservation",
    "pricing:GetProducts": "prices, which have a fallback",
    "s3:AbortMultipartUpload": "large checkpoints",
    "s3:ListBucket": "an object that is not there is then 404, not 403; checkpoints that a killed driver left",
    "s3:ListBucketMultipartUploads": "uploads that a killed driver left",
    "servicequotas:GetAWSDefaultServiceQuota": "quotas that were never changed",
    "ssm:DeleteParameter": "rubberband cloud down",
}
"""What else the driver's policy allows, and what for."""


UP = {"ec2:StartInstances", "ssm:GetCommandInvocation", "ssm:SendCommand"}
"""What the user of `rubberband cloud up` and `--on head` may do besides, and a head may not."""


SERVICES = {
    "ec2": "ec2",
    "pricing": "pricing",
    "s3": "s3",
    "scheduler": "scheduler",
    "service-quotas": "servicequotas",
    "ssm": "ssm",
    "sts": "sts",
}
"""Name of a service's client -> what its actions begin with."""


ACTIONS = {"HeadObject": "GetObject", "HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}
"""Operations whose action has another name."""


def shipped(name: str) -> dict[str, Any]:
    return policy(name, Bounds(account="123456789012", owner="rubberband", bucket=BUCKET))


def actions(document: dict[str, Any]) -> set[str]:
    listed = [one["Action"] for one in document["Statement"]]
    return {action for one in listed for action in ([one] if isinstance(one, str) else one)}


def without(document: dict[str, Any], action: str) -> dict[str, Any]:
    kept = []
    for one in document["Statement"]:
        listed = [one["Action"]] if isinstance(one["Action"], str) else one["Action"]
        if rest := [each for each in listed if each != action]:
            kept.append({**one, "Action": rest})
    return {**document, "Statement": kept}


def held_to(document: dict[str, Any]) -> Account:
    account = Account()
    account.fake.policies["driver"] = statements(document)
    started(account)
    return account


def everything(account: Account) -> None:
    """What is asked of AWS for a run: the checks, a launch on both markets, its end, and the end of everything."""
    resources = account.resources(market="spot", aws={"key_name": "me"})
    preflight(resources, [offer()], session=account.session, place=account.place)
    machines = resolve(account.session, resources.aws, "g5.xlarge", place=account.place)
    ec2 = account.session.client("ec2")
    for market in ("on_demand", "spot"):
        choice = Purchase(
            instance_type="g5.xlarge",
            zone=account.place.zone,
            market=market,  # type: ignore[arg-type]
            price_usd_per_hour=1.0,
            on_demand_usd_per_hour=1.0,
            placement_group=ensure_cluster(account.session, machines.owner, account.place.zone, "g5.xlarge"),
        )
        start = NodeStart(instances=("i-001",), head_address="10.0.0.1:1", gpus=1, lease_s=600, lifetime_s=3600)
        request = launch_request(
            machines,
            choice,
            token=client_token("e", "r", ("i-001",), 0, choice),
            tags=tags_of("e", "r", ("i-001",), machines.owner),
            user_data=machines.user_data(start),
        )
        ec2.run_instances(**request)
    end_everything(account.session, machines.owner, place=account.place, clock=lambda: account.now, sleep=account.sleep)


def test_the_drivers_policy_allows_all_that_a_run_asks_for() -> None:
    account = held_to(shipped("driver"))
    everything(account)
    assert not [call for call in account.fake.calls if call.outcome in ("UnauthorizedOperation", "AccessDenied")]
    assert account.fake.living == ()


def test_the_drivers_policy_allows_nothing_that_is_not_needed() -> None:
    assert actions(shipped("driver")) == {*PREFLIGHT, *GUARD, *OTHERWISE, "sts:GetCallerIdentity"}


@pytest.mark.parametrize("action", PREFLIGHT)
def test_a_role_without_a_right_is_refused_before_anything_is_rented(action: str) -> None:
    account = held_to(without(shipped("driver"), action))
    before = len(account.fake.instances)
    with pytest.raises(InputError, match=f"{action}.*driver\\.json"):
        preflight(account.resources(market="spot"), [offer()], session=account.session, place=account.place)
    assert len(account.fake.instances) == before


@pytest.mark.parametrize("action", GUARD)
def test_a_role_that_may_not_guard_instances_is_reported_so(action: str) -> None:
    kept = shipped("driver")
    kept["Statement"] = [one for one in kept["Statement"] if "Guard" not in one["Sid"]]
    guard = {**shipped("driver"), "Statement": [one for one in shipped("driver")["Statement"] if "Guard" in one["Sid"]]}
    account = held_to({**kept, "Statement": [*kept["Statement"], *without(guard, action)["Statement"]]})
    notes = preflight(account.resources(), [offer()], session=account.session, place=account.place)
    assert len([note for note in notes if f"{action}" in note and "driver.json" in note and "guard_role" in note]) == 1
    unguarded = account.resources(aws={"guard_role": None})
    assert not any(
        "guard" in one for one in preflight(unguarded, [offer()], session=account.session, place=account.place)
    )


def test_schedules_may_end_what_is_ours_and_nothing_else() -> None:
    (allowed,) = shipped("guard")["Statement"]
    (ours,) = (one for one in shipped("driver")["Statement"] if one["Sid"] == "EndOnlyOurInstances")
    assert (allowed["Action"], allowed["Condition"]) == ("ec2:TerminateInstances", ours["Condition"])


def test_every_operation_that_the_code_names_is_allowed_and_no_other_of_ec2() -> None:
    named = operations_named()
    assert named - UP <= actions(shipped("driver"))
    assert {one for one in actions(shipped("driver")) if one.startswith("ec2:")} <= named | {"ec2:CreateTags"}


ADMINISTRATORS = ("account.py", "account_parts.py")
"""Modules that only `rubberband aws` uses, with an administrator's rights."""


def operations_named() -> set[str]:
    """The actions of all operations of AWS that modules of rubberband.cloud.aws mention."""
    found = set()
    known = {name: (service, operation) for service in SERVICES for name, operation in operation_names(service).items()}
    for path in files("rubberband.cloud.aws").iterdir():
        if path.name.endswith(".py") and path.name not in ADMINISTRATORS:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {
                known[node.attr] for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in known
            }
    return {f"{SERVICES[service]}:{ACTIONS.get(operation, operation)}" for service, operation in found}


def test_the_driver_cannot_launch_without_its_tag_or_with_the_old_metadata_service() -> None:
    account = held_to(shipped("driver"))
    resources = account.resources()
    machines = resolve(account.session, resources.aws, "g5.xlarge", place=account.place)
    choice = Purchase(
        instance_type="g5.xlarge",
        zone=account.place.zone,
        market="on_demand",
        price_usd_per_hour=1.0,
        on_demand_usd_per_hour=1.0,
    )
    ours = tags_of("e", "r", ("i-001",), machines.owner)
    for tags, tokens in ((tags_of("e", "r", ("i-001",), "somebody"), "required"), (ours, "optional")):
        request = launch_request(machines, choice, token="t", tags=tags, user_data="#!/bin/bash")
        request["MetadataOptions"]["HttpTokens"] = tokens
        with pytest.raises(Exception, match="not authorized to perform: ec2:RunInstances"):
            account.session.client("ec2").run_instances(**request)


def test_the_driver_cannot_end_or_tag_what_is_not_its_own() -> None:
    account = held_to(shipped("driver"))
    (ours,) = account.fake.instances
    admin, driver = account.fake.session("admin").client("ec2"), account.session.client("ec2")
    other = admin.run_instances(ImageId=ours.image_id, InstanceType="m7i.large", MinCount=1, MaxCount=1)
    theirs = other["Instances"][0]["InstanceId"]
    with pytest.raises(Exception, match="not authorized to perform: ec2:TerminateInstances"):
        driver.terminate_instances(InstanceIds=[theirs])
    with pytest.raises(Exception, match="not authorized to perform: ec2:CreateTags"):
        driver.create_tags(Resources=[theirs], Tags=[{"Key": "rubberband:owner", "Value": "rubberband"}])


def test_instances_may_do_nothing_on_ec2() -> None:
    allowed = actions(shipped("worker"))
    assert not [action for action in allowed if action.startswith(("ec2:", "iam:")) or "*" in action]
    assert "ssm:PutParameter" not in allowed
    assert not [action for action in actions(shipped("driver")) if "*" in action]


@pytest.mark.parametrize("principal", ["driver", "worker"])
def test_no_role_reads_the_token_of_another_owner(principal: str) -> None:
    account = Account()
    admin = account.fake.session("admin").client("ssm")
    for owner in ("rubberband", "another"):
        admin.put_parameter(Name=token_parameter(owner), Value="secret", Type="SecureString")
    session = account.fake.session(principal)
    assert read_token(session, token_parameter("rubberband")) == "secret"
    with pytest.raises(Exception, match="not authorized to perform: ssm:GetParameter"):
        read_token(session, token_parameter("another"))
