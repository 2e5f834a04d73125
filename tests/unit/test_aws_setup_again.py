"""`rubberband aws setup` in accounts that have a history: requests, buckets and files of before, and of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubberband.cloud.aws.account_parts import Bounds, is_own, new_name, own_bucket, roles
from rubberband.errors import InputError
from rubberband.spec.account import BUCKET_FILE, Remembered, remember, remembered
from rubberband.spec.loading import load_pool
from tests.builders.aws_account import Account
from tests.builders.aws_setups import account as account
from tests.builders.aws_setups import home as home
from tests.builders.aws_setups import say
from tests.ec2 import FakeError, Fault
from tests.ec2.world import BucketFacts

NOT_YET = FakeError("NoSuchEntity", "The role with name rubberband-worker cannot be found.", 404)


def test_a_request_that_is_open_is_waited_for_and_holds_up_nothing(account: Account, home: Path) -> None:
    quotas = account.session.client("service-quotas")
    quotas.request_service_quota_increase(ServiceCode="ec2", QuotaCode="L-DB2E81BA", DesiredValue=4.0)

    code, told = say("setup", "--yes")

    assert (code, (home / BUCKET_FILE).exists()) == (0, True), told
    assert "4 were asked for on" in told
    assert "for 16, run this again then" in told
    account.fake.world.quotas_vcpus["L-DB2E81BA"] = 4.0
    account.fake.world.quota_requests[0]["Status"] = "APPROVED"
    assert "ask AWS for 16 vCPUs" in say("setup", "--yes")[1]
    assert "nothing to do" in say("setup", "--yes")[1], "the second page of the history has the second request"


def test_a_profile_that_iam_never_settles_is_an_error(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.cloud.aws.account._PAUSES_S", (0.0, 0.0))
    account.fake.fault = lambda call: Fault(error=NOT_YET) if call.operation == "AddRoleToInstanceProfile" else None
    code, told = say("setup", "--yes")
    assert (code, "cannot be found" in told) == (1, True), told
    assert "are left, run it again" in told


def test_a_budget_is_of_a_month(account: Account) -> None:
    assert say("setup", "--yes", "--budget", "20", "--email", "me@example.org")[0] == 0
    (budget,) = account.fake.world.budgets.values()
    assert (budget["TimeUnit"], budget["BudgetLimit"]) == ("MONTHLY", {"Amount": "20", "Unit": "USD"})


def test_a_bucket_of_another_region_or_owner_is_not_taken_for_ones_own(account: Account) -> None:
    world, name = account.fake.world, new_name("rubberband")
    assert is_own(name, "rubberband")
    world.buckets |= {name: {}, new_name("team"): {}, "rubberband-mine": {}}
    world.bucket_facts[name] = BucketFacts(region="eu-west-1")
    assert own_bucket(account.session, "rubberband") is None
    world.bucket_facts[name] = BucketFacts(region="us-east-1")
    assert own_bucket(account.session, "rubberband") == name


def test_roles_are_of_this_account_this_region_and_these_types() -> None:
    bounds = Bounds(account="123456789012", owner="team", bucket="b", region="eu-west-1", types=("g5.*",))
    head, _, guard = roles(bounds)
    (launch,) = (
        one for one in head.policies["rubberband"]["Statement"] if one.get("Sid") == "LaunchOnlyTaggedInstances"
    )
    assert launch["Condition"]["StringEquals"]["ec2:Region"] == "eu-west-1"
    assert launch["Condition"]["StringLike"] == {"ec2:InstanceType": ["g5.*"]}
    (may_assume,) = guard.trust["Statement"]
    assert may_assume["Principal"] == {"Service": "scheduler.amazonaws.com"}
    assert may_assume["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}


def test_a_region_that_the_file_names_stays(home: Path, tmp_path: Path) -> None:
    remember(home, Remembered(bucket="mine", region="eu-west-1"))
    (tmp_path / "team.yaml").write_text("instances: 2\nprovider: aws\ninstance_type: g5.xlarge\nregion: us-west-2\n")
    assert load_pool(tmp_path / "team.yaml").region == "us-west-2"


@pytest.mark.parametrize("text", ["", "bucket: mine\n", "- bucket", "bucket: [\n"])
def test_a_broken_memory_is_not_taken_for_none(home: Path, text: str) -> None:
    home.mkdir()
    assert remembered(home) is None
    (home / BUCKET_FILE).write_text(text)
    with pytest.raises(InputError, match="does not say bucket and region; run `rubberband aws setup` again"):
        remembered(home)
