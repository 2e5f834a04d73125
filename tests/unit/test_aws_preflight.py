"""What is refused before anything is rented, and the remedy that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud import offers
from rubberband.cloud.aws import client
from rubberband.cloud.aws.calls import open_aws
from rubberband.cloud.aws.preflight import check_clock, check_store, preflight
from rubberband.cloud.aws.provider import AwsProvider, open_cluster
from rubberband.cloud.offers import fallback_offers
from rubberband.cloud.provider import ClusterRequest, Head
from rubberband.cloud.ray_head.ray_node import RayHead
from rubberband.errors import InputError, ProviderError
from rubberband.spec.loading import load_experiment
from rubberband.spec.resources import Resources
from rubberband.values.offer import Offer
from tests.builders.aws_account import Account, offer, started
from tests.builders.fake_ec2 import START_AT
from tests.ec2 import FakeAws, Fault
from tests.ec2.faults import FakeCall, FakeError

EXAMPLES = Path(__file__).parents[2] / "examples"


def looked_at(account: Account, *offers: Offer, aws: dict[str, Any] | None = None, **words: Any) -> list[str]:
    resources = account.resources(aws=aws, **words)
    return preflight(resources, offers or [offer()], session=account.session, place=account.place)


def test_preflight_passes_and_rents_nothing(account: Account) -> None:
    notes = looked_at(account, market="spot")
    assert account.fake.instances == ()
    assert [note for note in notes if "TerminateInstances" not in note and "install: none" not in note] == []
    assert {call.params.get("DryRun") for call in account.fake.calls if call.operation == "RunInstances"} == {True}
    assert account.fake.world.buckets[account.bucket] == {}


def test_the_example_can_be_rented_for_on_the_fake_ec2(account: Account) -> None:
    example = load_experiment(
        EXAMPLES / "digits-aws.yaml", ["resources.aws.install=none", f"resources.checkpoints=s3://{account.bucket}/c"]
    )
    preflight(example.resources, [offer("g4dn.xlarge")], session=account.session, place=account.place)
    (asked,) = {call.params["InstanceType"] for call in account.fake.calls if call.operation == "RunInstances"}
    assert asked == example.resources.instance_type


def broken(call: FakeCall) -> Fault | None:
    return Fault(error=FakeError("InternalError", "An internal error has occurred", 500)) if call.index else None


def expired(call: FakeCall) -> Fault | None:
    return Fault(error=FakeError("ExpiredToken", "The security token is expired", 403))


def allow(account: Account, **vcpus: float) -> None:
    """Set quotas of the account, `L_DB2E81BA=…`."""
    account.fake.world.quotas_vcpus.update({code.replace("_", "-"): most for code, most in vcpus.items()})


Before = Callable[[Account], None] | None


@pytest.mark.parametrize(
    ("before", "words", "text"),
    [
        (None, {"instance_type": "g5.xlage"}, r"EC2 has no type 'g5\.xlage' in us-east-1; did you mean 'g5\.xlarge'"),
        (None, {"checkpoints": None}, r"resources\.checkpoints: .*give s3://bucket/prefix"),
        (None, {"checkpoints": "s3://nowhere/c"}, "there is no bucket|put its name into"),
        (None, {"checkpoints": "ftp://host/c"}, r"the checkpoint store ftp://host/c is not supported"),
        (None, {"aws": {"image": "ami-00000000000000000"}}, r"set resources\.aws\.image to an image of this region"),
        (None, {"aws": {"image": "ssm:/aws/service/none"}}, r"correct the ssm: parameter of resources\.aws\.image"),
        (
            None,
            {"aws": {"subnets": ["subnet-00000000000000000"]}},
            r"does not exist\); correct resources\.aws\.subnets",
        ),
        (None, {"aws": {"security_group": "sg-0"}}, r"does not exist\); correct resources\.aws\.security_group"),
        (None, {"aws": {"volume_gb": 8}}, r"expect size >= 75GB\); raise resources\.aws\.volume_gb"),
        (None, {"aws": {"key_name": "lost"}}, r"'lost' does not exist\); correct resources\.aws\.key_name"),
        (
            None,
            {"aws": {"worker_profile": "no"}},
            r"resources\.aws\.worker_profile: EC2 knows no instance profile 'no'",
        ),
        (None, {"lease": "60s"}, r"resources\.lease: 60 s is too short .* at least 127 s"),
        (None, {"aws": {"owner": "me"}}, r"may not ec2:CreateSecurityGroup.*aws setup.*--owner"),
        (None, {"gpus": 2}, "2 are more than the 1 GPU"),
        (lambda account: setattr(account.fake, "fault", expired), {}, "the credentials have expired"),
        (lambda account: setattr(account.fake, "fault", broken), {}, "AWS is busy or broken"),
        (lambda account: allow(account, L_DB2E81BA=3), {}, r"request-service-quota-increase.*--quota-code L-DB2E81BA"),
        (lambda account: allow(account, L_DB2E81BA=3), {"market": "spot"}, r"increase.*--quota-code L-DB2E81BA"),
        (lambda account: allow(account, L_3819A6DF=3), {"market": "spot"}, r"increase.*--quota-code L-3819A6DF"),
        (
            lambda account: setattr(account, "session", account.fake.session("nobody")),
            {},
            r"there are no AWS credentials.*aws configure",
        ),
    ],
)
def test_bad_input_is_refused_with_the_remedy_in_one_line(
    account: Account, before: Before, words: dict[str, Any], text: str
) -> None:
    if before is not None:
        before(account)
    gpus = words.pop("gpus", 1)
    with pytest.raises(InputError, match=text) as refused:
        looked_at(account, offer(words.get("instance_type", "g5.xlarge"), gpus=gpus), **words)
    assert "\n" not in str(refused.value)
    assert account.fake.instances == ()


def private(account: Account) -> None:
    """The machine's subnet is one of the user's own, without public addresses."""
    subnets, own = account.fake.world.subnets, account.place.subnet
    subnets[own] = replace(subnets[own], default=False, public=False)


@pytest.mark.parametrize(
    ("before", "offers", "text"),
    [
        (None, [offer("g5.12xlarge", gpus=2)], "has 4 GPUs, of which 2 are used"),
        (None, [offer("m7i.large")], "has no GPUs: trials train on its 2 vCPUs"),
        (lambda account: allow(account, L_DB2E81BA=3), [offer(), offer("m7i.large")], "0 more g5.xlarge on demand"),
        (lambda account: allow(account, L_DB2E81BA=8), [offer()], "2 more g5.xlarge on demand"),
        (private, [offer()], "NAT gateway"),
        (None, [offer()], "ec2:TerminateInstances"),
    ],
)
def test_a_surprise_is_reported_once(account: Account, before: Before, offers: list[Offer], text: str) -> None:
    if before is not None:
        before(account)
    assert len([note for note in looked_at(account, *offers) if text in note]) == 1


def test_instances_need_the_driver_and_the_credentials_of_another_cloud_s_bucket(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rubberband.installation.find_spec", lambda _: object())
    notes = list(check_store(account.session, account.resources(checkpoints="gs://bucket/c")))
    assert notes == [
        "checkpoints go to gs://bucket/c: every instance needs gcsfs (resources.aws.install) and its credentials "
        "(resources.secrets)"
    ]


def test_a_region_that_there_is_not_is_refused_with_near_ones() -> None:
    with pytest.raises(InputError, match=r"resources\.region: 'us-east-11' .*did you mean 'us-east-1'"):
        open_aws("us-east-11")


def test_a_driver_that_instances_cannot_reach_is_sent_to_the_head(account: Account) -> None:
    resources = account.resources()
    with pytest.raises(InputError, match=r"is not in EC2: they cannot reach it; let a head .*run FILE --on head"):
        preflight(resources, [offer()], session=account.session)
    elsewhere = replace(account.place, region="eu-west-1", vpc="vpc-elsewhere")
    with pytest.raises(InputError, match=r"this machine is in vpc-elsewhere \(eu-west-1\)"):
        preflight(resources, [offer()], session=account.session, place=elsewhere)
    found = account.resources(aws={"driver_address": "127.0.0.1"})
    notes = preflight(found, [offer()], session=account.session)
    assert any("must reach this machine at 127.0.0.1" in note for note in notes)


def test_a_machine_outside_of_the_instances_group_is_reported(account: Account) -> None:
    place = replace(account.place, security_groups=("sg-other",))
    notes = preflight(account.resources(), [offer()], session=account.session, place=place)
    assert any("is not in the instances' security group sg-" in note for note in notes)


def test_whether_instances_may_be_ended_is_known_once_there_is_one(account: Account) -> None:
    started(account)
    assert not any("TerminateInstances" in note for note in looked_at(account))
    assert all(one.lives() for one in account.fake.instances)


def test_directories_must_be_shared_and_on_spot_outlive_the_instances(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "1 0 0:1 / / rw - ext4 root rw",
        "2 1 0:2 / /mnt/shared rw - nfs4 fs rw",
        "3 1 0:3 / /mnt/s3 rw - fuse s3 rw",
    )
    (tmp_path / "mounts").write_text("\n".join(lines))
    monkeypatch.setattr("rubberband.files._MOUNTS", tmp_path / "mounts")
    plain, on_spot = account.resources(checkpoints="/tmp/c"), {"market": "spot"}
    for path, kind in (("/mnt/shared/c", "nfs4"), ("/mnt/s3/c", "fuse")):
        shared = account.resources(checkpoints=path, **on_spot)
        assert [f"({kind})" in note for note in check_store(account.session, shared)] == [True]
    assert ["not a network mount" in note for note in check_store(account.session, plain)] == [True]
    with pytest.raises(InputError, match=r"directory of one machine \(ext4\).*or set market: on_demand"):
        list(check_store(account.session, account.resources(checkpoints="file:///tmp/c", **on_spot)))


@pytest.mark.parametrize(("now", "text"), [(90.0, "90 s ahead of AWS's"), (-400.0, "400 s behind AWS's")])
def test_a_clock_that_is_off_is_reported(now: float, text: str) -> None:
    answer = {"ResponseMetadata": {"HTTPHeaders": {"date": "Thu, 01 Jan 1970 00:00:00 GMT"}}}
    check_clock(answer, 5.0)
    check_clock({}, now)
    check_clock({"ResponseMetadata": {"HTTPHeaders": {"date": "today"}}}, now)
    with pytest.raises(InputError, match=text):
        check_clock(answer, now)


SETUP = """
rubberband: 18:14:22 i-001 boots
rubberband: 18:14:22 setup: pip install nothing
Looking in indexes: https://packages.example.org/simple
\x1b[31mERROR: No matching distribution found for nothing\x1b[0m\r

rubberband: 18:14:25 ending
18:14:25 the system is going down for poweroff now
"""


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (
            SETUP,
            "it powered itself off: its boot script failed at `setup: pip install nothing`: "
            "ERROR: No matching distribution found for nothing",
        ),
        (
            "[ 1.2] bash[7]: rubberband: 18:14:22 joining 10.0.0.1:1 as i-001\nno route\nrubberband: 18:14:25 ending",
            "it powered itself off: Ray ended there: no route",
        ),
        (
            "rubberband: 18:14:22 setup: false\nrubberband: 18:14:22 ending",
            "it powered itself off: its boot script failed at `setup: false`: it said nothing",
        ),
        ("rubberband: 18:14:22 joining x as i-001\nrubberband: the lease has ended\n", "lease expired"),
        ("rubberband: 18:14:22 setup: false\n", ""),
        ("rubberband: 18:14:22 ending", ""),
        ("", ""),
    ],
)
def test_the_last_words_name_the_step_and_what_it_said(shown: str, text: str) -> None:
    assert client.last_words(shown) == text


def machine_of(account: Account) -> dict[str, Any]:
    """What EC2 shows of an instance that powered itself off."""
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "rubberband:owner", "Value": "rubberband"}]}]
    words = {"InstanceInitiatedShutdownBehavior": "terminate", "TagSpecifications": tags}
    machine = account.fake.launched("g5.xlarge", **words)
    account.sleep(60)
    account.fake.power_off(machine.instance_id)
    return machine.as_dict(account.now)


def test_the_driver_reads_the_console_of_what_powered_itself_off() -> None:
    account = Account()
    machine = machine_of(account)
    account.fake.world.console = lambda _: SETUP
    assert "`setup: pip install nothing`" in client.why_ended(account.session, machine, lease_over=False)
    assert client.why_ended(account.session, machine, lease_over=True) == "lease expired"


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "InternalError", "UnsupportedOperation"])
def test_where_the_console_cannot_be_read_the_command_that_shows_it_is_reported(code: str) -> None:
    account = Account()
    machine = machine_of(account)
    account.fake.fault = lambda call: (
        Fault(error=FakeError(code, "no", 400)) if call.operation == "GetConsoleOutput" else None
    )
    why = client.why_ended(account.session, machine, lease_over=False)
    assert f"get-console-output --latest --instance-id {machine['InstanceId']}" in why


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ("", ""),
        ("Linux boots\n", ""),
        ("rubberband: 01:02:03 i-001 boots\n", "its boot script is at `i-001 boots`"),
        (
            "rubberband: 01:02:03 i-001 boots\nrubberband: 01:02:04 setup: sleep 1000\nwaits for the disk\n\n",
            "its boot script is at `setup: sleep 1000`: waits for the disk",
        ),
    ],
)
def test_a_boot_step_that_takes_too_long_is_named(shown: str, text: str) -> None:
    assert client.current_step(shown) == text


G5 = ["g5.xlarge", "g5.2xlarge", "g6.xlarge", "g5.12xlarge"]


def resources(**words: Any) -> Resources:
    aws = {"install": "none", "driver_address": "127.0.0.1", **words.pop("aws", {})}
    return Resources(**{"provider": "aws", "instance_type": "g5.xlarge", "aws": aws, **words})


@pytest.fixture
def fake(off_ec2: Path) -> FakeAws:
    """An account; this machine is nowhere in it."""
    return FakeAws(lambda: START_AT)


@pytest.fixture
def opened(fake: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens providers, and closes them; the head is a name only."""
    providers: list[AwsProvider] = []
    head = Head(address="10.0.0.5:6379", temp_dir=None, environment={})
    monkeypatch.setattr(RayHead, "ensure", lambda _: head)
    monkeypatch.setattr(RayHead, "living", lambda _: head)

    def opened(words: Resources, environment: dict[str, str] | None = None, **more: Any) -> AwsProvider:
        offer = offers.offer(words, instance_type="g5.xlarge")
        session = fake.session("driver")
        request = ClusterRequest(
            experiment="digits",
            run="r",
            directory=tmp_path / "local",
            home=tmp_path,
            resources=words,
            offer=offer,
            **more,
        )
        providers.append(open_cluster(request, session=session, environment=environment or {}))
        return providers[-1]

    yield opened
    for provider in providers:
        provider.close()


def test_it_launches_by_the_file_s_words(fake: FakeAws, opened: Any) -> None:
    provider = opened(resources(aws={"key_name": "me", "volume_gb": 200}))
    provider.launch("a")
    (instance,) = fake.living
    assert instance.machine_type.name == "g5.xlarge"
    assert instance.key_name == "me"
    assert "HEAD_ADDRESS=10.0.0.5:6379" in instance.user_data.replace("'", "")
    assert (provider.device, provider.remote) == ("cuda", True)


def test_a_driver_may_say_that_there_are_no_gpus(opened: Any) -> None:
    assert opened(resources(), {"RUBBERBAND_DEVICE": "cpu"}).device == "cpu"


@pytest.mark.parametrize(
    ("words", "device", "text"),
    [
        ({}, "tpu", "a device is cpu or cuda"),
        ({"aws": {"driver_address": None}}, "cpu", "rubberband cloud up FILE"),
        (
            {"aws": {"driver_address": "192.0.2.1"}},
            "cpu",
            r"driver_address: '192\.0\.2\.1' is no address of this machine",
        ),
        ({"lease": "60s"}, "cpu", r"resources\.lease: 60 s is too short .* at least 127 s"),
    ],
)
def test_a_provider_that_cannot_be_opened_is_bad_input(
    opened: Any, words: dict[str, Any], device: str, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        opened(resources(**words), {"RUBBERBAND_DEVICE": device})


def test_a_lease_need_not_last_while_an_instance_installs(opened: Any) -> None:
    assert opened(resources(init_delay="15m", lease="130s")).describe() == []


def test_one_driver_at_a_time(opened: Any) -> None:
    opened(resources())
    with pytest.raises(ProviderError, match="another driver"):
        opened(resources())


def test_types_with_the_same_gpus_replace_each_other() -> None:
    words = resources(instance_type=None, instance_types=G5)
    others = fallback_offers(words, offers.offer(words, instance_type="g5.xlarge"))
    assert [offer.instance_type for offer in others] == ["g5.2xlarge"]


@pytest.mark.parametrize(("highest_price_usd_per_hour", "bought"), [(None, []), (2.0, ["g5.2xlarge"])])
def test_a_dearer_type_is_used_only_where_the_budget_covers_it(
    fake: FakeAws, opened: Any, highest_price_usd_per_hour: float | None, bought: list[str]
) -> None:
    fake.set_capacity(0, instance_type="g5.xlarge")
    provider = opened(
        resources(instance_type=None, instance_types=G5), highest_price_usd_per_hour=highest_price_usd_per_hour
    )
    with nullcontext() if bought else pytest.raises(ProviderError, match="no room"):
        provider.launch("a")
    assert [instance.machine_type.name for instance in fake.living] == bought
