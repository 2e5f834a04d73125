"""EC2 is opened for an experiment: what it is told of the machine, the types and the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud import offers
from rubberband.cloud.aws.provider import AwsProvider, open_provider
from rubberband.cloud.offers import fallback_offers
from rubberband.cloud.provider import Head
from rubberband.cloud.ray_head.ray_node import RayHead
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Resources
from tests.builders.fake_ec2 import START_AT
from tests.ec2 import FakeAws

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
        providers.append(
            open_provider(
                "digits",
                tmp_path / "local",
                words,
                offer,
                run="r",
                session=session,
                environment=environment or {},
                **more,
            )
        )
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


def test_a_device_that_is_none_is_bad_input(opened: Any) -> None:
    with pytest.raises(InputError, match="a device is cpu or cuda"):
        opened(resources(), {"RUBBERBAND_DEVICE": "tpu"})


def test_a_machine_that_instances_cannot_reach_is_bad_input(opened: Any) -> None:
    with pytest.raises(InputError, match="rubberband cloud up FILE"):
        opened(resources(aws={"driver_address": None}))


def test_an_address_that_this_machine_does_not_have_is_bad_input(opened: Any) -> None:
    with pytest.raises(InputError, match=r"driver_address: '192\.0\.2\.1' is no address of this machine"):
        opened(resources(aws={"driver_address": "192.0.2.1"}))


def test_a_lease_that_is_over_before_an_instance_is_of_use_is_bad_input(opened: Any) -> None:
    with pytest.raises(InputError, match=r"resources\.lease: 60 s is too short .* at least 127 s"):
        opened(resources(lease="60s"))


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
