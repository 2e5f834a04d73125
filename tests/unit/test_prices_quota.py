"""How many instances the account of the fake EC2 may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.cloud.aws.capacity import quota_code, quotas
from rubberband.errors import ProviderError
from rubberband.values.plan import Market
from tests.ec2 import FakeAws, FakeCall, FakeError, Fault
from tests.ec2.quota_codes import QUOTAS
from tests.ec2.quota_codes import quota_code as code_of_the_fake

G_ON_DEMAND, G_SPOT = "L-DB2E81BA", "L-3819A6DF"


@pytest.fixture
def fake() -> FakeAws:
    return FakeAws(lambda: 1_800_000_000.0)


def launch(fake: FakeAws, instance_type: str, market: Market) -> None:
    words = {"InstanceMarketOptions": {"MarketType": "spot"}} if market == "spot" else {}
    image = next(image for image in fake.world.images.values() if image.architecture == "x86_64")
    fake.session("admin").client("ec2").run_instances(
        ImageId=image.image_id, InstanceType=instance_type, MinCount=1, MaxCount=1, **words
    )


def test_a_quota_of_vcpus_is_a_number_of_instances(fake: FakeAws) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 20.0
    fake.world.quotas_vcpus[G_SPOT] = 0.0
    found = quotas(fake.session(), ["g5.xlarge", "g5.2xlarge"], ["on_demand", "spot"])
    assert [(one.instance_type, one.market, one.vcpus, one.instances) for one in found] == [
        ("g5.xlarge", "on_demand", 4, 5),
        ("g5.xlarge", "spot", 4, 0),
        ("g5.2xlarge", "on_demand", 8, 2),
        ("g5.2xlarge", "spot", 8, 0),
    ]


def test_running_instances_are_deducted_by_family_and_market(fake: FakeAws) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 24.0
    launch(fake, "g6.2xlarge", "on_demand")
    launch(fake, "g5.2xlarge", "spot")
    launch(fake, "m7i.xlarge", "on_demand")
    on_demand, spot = quotas(fake.session(), ["g5.xlarge"], ["on_demand", "spot"])
    assert (on_demand.quota.used_vcpus, on_demand.instances) == (8.0, 4)
    assert spot.quota.used_vcpus == 8.0
    for instance in fake.living:
        fake.session("admin").client("ec2").terminate_instances(InstanceIds=[instance.instance_id])
    assert quotas(fake.session(), ["g5.xlarge"], ["on_demand"])[0].instances == 6


def test_the_refusal_names_the_quota_and_how_to_raise_it(fake: FakeAws) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 2.0
    (room,) = quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
    assert room.refusal(16) == (
        "no quota for g5.xlarge on demand in us-east-1: it has 4 vCPUs, and 'Running On-Demand G and VT instances' "
        "(L-DB2E81BA) allows 2, 0 in use; end running instances, or request more: aws service-quotas "
        "request-service-quota-increase --service-code ec2 --quota-code L-DB2E81BA --desired-value 64 --region "
        "us-east-1"
    )
    used = replace(room, quota=replace(room.quota, used_vcpus=None))
    assert "use not known" in used.note()


def test_types_and_families_that_are_not_known_have_no_room(fake: FakeAws) -> None:
    assert quotas(fake.session(), ["nothing.large", "g5.nothing"], ["on_demand"]) == ()
    assert quota_code("p6-b200.48xlarge", "spot") is None
    assert quota_code("", "spot") is None


@pytest.mark.parametrize("market", ["on_demand", "spot"])
@pytest.mark.parametrize(
    "family", ["g4dn", "g5", "g5g", "gr6", "g6e", "p3", "p3dn", "p4d", "p5", "p5en", "m7i", "c7g", "t3", "trn1", "inf2"]
)
def test_every_family_counts_against_its_own_quota(family: str, market: Market) -> None:
    found = quota_code(f"{family}.xlarge", market)
    assert found is not None
    code, name = found
    assert code == code_of_the_fake(family, "spot" if market == "spot" else "on-demand")
    assert QUOTAS[code] == name


@pytest.mark.parametrize(
    ("code", "answer"), [("NoSuchResourceException", "default"), ("AccessDeniedException", "refused")]
)
def test_a_quota_that_cannot_be_read(code: str, answer: str, fake: FakeAws) -> None:
    def fault(call: FakeCall) -> Fault | None:
        message = "User: arn:x is not authorized to perform: servicequotas:GetServiceQuota"
        return Fault(error=FakeError(code, message)) if call.operation == "GetServiceQuota" else None

    fake.fault = fault
    if answer == "refused":
        with pytest.raises(ProviderError, match="may not servicequotas:GetServiceQuota; attach the policy"):
            quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
    else:
        (room,) = quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
        assert room.quota.code == G_ON_DEMAND


def test_a_role_that_may_not_see_what_runs_still_sees_its_quotas(fake: FakeAws) -> None:
    def fault(call: FakeCall) -> Fault | None:
        return Fault(error=FakeError("UnauthorizedOperation", "no", 403)) if "Instances" in call.operation else None

    fake.fault = fault
    (room,) = quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
    assert room.quota.used_vcpus is None
    assert room.instances == 768 // 4
