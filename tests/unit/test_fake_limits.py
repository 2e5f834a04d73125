"""How fast the fake's EC2 may be asked: a burst, then a rate, for each operation by itself; and what it takes."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.fake_launches import Rental, code_of
from tests.ec2.limits import Limits, Rate

NOW = 1000.0


def limited() -> Rental:
    rental = Rental()
    rental.fake.limits = Limits(sleep=rental.clock.sleep)
    return rental


def test_nothing_is_limited_unless_it_is_asked_for() -> None:
    rental = Rental()
    for _ in range(200):
        rental.look()
    assert rental.clock.now == Rental().clock.now


def test_a_burst_of_launches_is_throttled_and_the_others_are_not() -> None:
    rental = limited()
    assert rental.fake.limits is not None
    rental.fake.limits.latency_s = {}
    ours = [rental.launch() for _ in range(5)]
    with pytest.raises(ClientError) as caught:
        rental.launch()
    assert code_of(caught.value) == "RequestLimitExceeded"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert rental.fake.calls[-1].outcome == "RequestLimitExceeded"
    assert len(rental.look()) == len(ours)
    rental.ec2.terminate_instances(InstanceIds=ours)
    rental.clock.sleep(0.5)
    rental.launch()


def test_a_launch_takes_a_second_and_what_is_throttled_no_time() -> None:
    rental = limited()
    began_at = rental.clock.now
    rental.launch()
    assert rental.clock.now == began_at + 1.0
    assert rental.fake.instances[0].launched_at == began_at + 1.0
    assert rental.fake.limits is not None
    rental.fake.limits.requests["RunInstances"] = Rate(0, 0)
    with pytest.raises(ClientError):
        rental.launch()
    assert rental.clock.now == began_at + 1.0


def test_a_launch_pays_forevery_instance() -> None:
    limits = Limits()
    many = {"MinCount": 1, "MaxCount": 600}
    assert limits.refusal("ec2", "RunInstances", many, NOW) is None
    refusal = limits.refusal("ec2", "RunInstances", many, NOW + 10.0)
    assert refusal is not None
    assert "resource rate" in refusal.message
    assert limits.refusal("ec2", "RunInstances", {"MaxCount": 400}, NOW + 10.0) is None


def test_a_listing_of_everything_has_the_smaller_bucket() -> None:
    def taken(**params: object) -> int:
        limits = Limits()
        return sum(limits.refusal("ec2", "DescribeInstances", params, NOW) is None for _ in range(200))

    assert (taken(), taken(Filters=[{"Name": "client-token", "Values": ["t"]}])) == (50, 100)


def test_other_services_are_not_limited() -> None:
    limits = Limits()
    assert all(limits.refusal("ssm", "GetParameter", {}, NOW) is None for _ in range(1000))


@settings(max_examples=60, deadline=None)
@given(gaps_s=st.lists(st.floats(0.0, 3.0), max_size=80))
def test_no_more_than_the_burst_and_the_refill_is_let_in(gaps_s: list[float]) -> None:
    limits, now, let_in = Limits(), NOW, 0
    for gap_s in gaps_s:
        now += gap_s
        let_in += limits.refusal("ec2", "RunInstances", {"MaxCount": 1}, now) is None
    assert let_in <= 5 + 2 * (now - NOW) + 1e-6
    assert let_in >= min(len(gaps_s), 5)
