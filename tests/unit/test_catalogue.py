from __future__ import annotations

from typing import Any

import pytest

from rubberband.cloud.catalogue import catalogue, offer
from rubberband.errors import InputError
from rubberband.profile import Profile
from rubberband.resources import Resources


@pytest.mark.parametrize(
    ("name", "gpus", "price_usd_per_hour"),
    [("p3.2xlarge", 1, 3.06), ("p3.8xlarge", 4, 12.24), ("p3.16xlarge", 8, 24.48), ("g4dn.12xlarge", 4, 3.912)],
)
def test_prices(name: str, gpus: int, price_usd_per_hour: float) -> None:
    row = catalogue()[name]
    assert (row.gpus, row.price_usd_per_hour) == (gpus, price_usd_per_hour)


def test_every_row_is_sound() -> None:
    for row in catalogue().values():
        assert row.gpus >= 1
        assert row.gpu_memory_gib >= 8
        assert 0.1 < row.price_usd_per_hour / row.gpus < 20


def test_the_files_overrides_come_first_then_the_profile_then_the_catalogue() -> None:
    profile = Profile(seconds_per_iteration={1: 1.0}, provision_delay_s=5.0, init_delay_s=6.0)
    resources = Resources.model_validate(
        {"instance_type": "p3.8xlarge", "provision_delay": "15s", "dataset_gb": 10, "data_price_per_gb": 0.1}
    )
    found = offer(resources, profile)
    assert (found.gpus, found.price_usd_per_hour) == (4, 12.24)
    assert (found.provision_delay_s, found.init_delay_s) == (15.0, 6.0)
    assert found.data_usd_per_instance == pytest.approx(1.0)
    assert found.minimum_billed_s == 60.0
    overridden = offer(resources.model_copy(update={"gpus_per_instance": 2, "price_usd_per_hour": 1.0}))
    assert (overridden.gpus, overridden.price_usd_per_hour) == (2, 1.0)


def test_local_needs_no_type() -> None:
    found = offer(Resources())
    assert (found.instance_type, found.gpus, found.price_usd_per_hour) == ("local", 1, 0.0)
    assert (found.provision_delay_s, found.init_delay_s) == (7.0, 8.0)
    assert offer(Resources.model_validate({"instance_type": "box", "gpus_per_instance": 4})).gpus == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"instance_type": "p3.9xlarge"}, "is not in the catalogue; did you mean 'p3"),
        ({"provider": "virtual"}, "provider virtual needs one; add it"),
        ({"provider": "virtual", "instance_type": "x", "gpus_per_instance": 1}, "give its price per hour"),
        ({"provider": "virtual", "instance_type": "g5.xlarge", "region": "eu-west-1"}, "prices of us-east-1 only"),
    ],
)
def test_what_the_catalogue_cannot_offer(words: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        offer(Resources.model_validate(words))
