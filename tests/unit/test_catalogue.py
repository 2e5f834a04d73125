from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rubberband.cloud.catalogue import InstanceType, catalogue, load_table, parse_table, similar_types
from rubberband.cloud.offers import offer, offers, price_source
from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.fields import word_error
from rubberband.spec.resources import Resources
from rubberband.values.offer import Spot
from rubberband.values.profile import FIXED, Profile, Spread

PROFILE = Profile(seconds_per_iteration={1: 1.0}, trial_startup_s=2.0, provision_delay_s=5.0, init_delay_s=6.0)


def resources(**words: Any) -> Resources:
    return Resources.model_validate({"provider": "aws", **words})


@pytest.mark.parametrize(
    ("name", "region", "gpus", "price_usd_per_hour"),
    [
        ("p3.2xlarge", "us-east-1", 1, 3.06),
        ("p3.8xlarge", "us-east-1", 4, 12.24),
        ("p3.8xlarge", "eu-central-1", 4, 15.292),
        ("p4d.24xlarge", "us-west-2", 8, 21.95764),
        ("p5.48xlarge", "us-east-1", 8, 55.04),
        ("g6e.xlarge", "ap-northeast-1", 1, 2.699),
        ("g4dn.12xlarge", "us-east-1", 4, 3.912),
    ],
)
def test_prices(name: str, region: str, gpus: int, price_usd_per_hour: float) -> None:
    found = offer(resources(instance_type=name, region=region))
    assert (found.gpus, found.price_usd_per_hour) == (gpus, price_usd_per_hour)


def test_every_row_is_sound() -> None:
    table = catalogue()
    assert len(table) >= 60
    for row in table.values():
        if not row.gpus:
            assert row.vcpus
            assert row.memory_gib in (2 * row.vcpus, 4 * row.vcpus, 8 * row.vcpus)
            continue
        assert row.gpu
        assert row.gpu_memory_gib is not None
        assert row.gpu_memory_gib >= 8
        assert row.priced_on
        for price_usd_per_hour in row.prices_usd_per_hour.values():
            assert 0.1 < price_usd_per_hour / row.gpus < 20


def test_no_region_is_far_dearer_than_the_first() -> None:
    for row in catalogue().values():
        prices = list(row.prices_usd_per_hour.values())
        assert all(prices[0] * 0.99 < price < prices[0] * 1.6 for price in prices)


def test_the_files_overrides_come_first_then_the_profile_then_the_catalogue() -> None:
    asked = resources(instance_type="p3.8xlarge", provision_delay="15s", dataset_gb=10, data_price_per_gb=0.1)
    found = offer(asked, PROFILE)
    assert (found.gpus, found.price_usd_per_hour) == (4, 12.24)
    assert (found.provision_delay_s, found.init_delay_s) == (15.0, 6.0)
    assert found.data_usd_per_instance == pytest.approx(1.0)
    assert found.minimum_billed_s == 60.0
    overridden = offer(asked.model_copy(update={"gpus_per_instance": 2, "price_usd_per_hour": 1.0}))
    assert (overridden.gpus, overridden.price_usd_per_hour) == (2, 1.0)


def test_delays_that_vary_are_offered_with_their_spread() -> None:
    measured = Profile(
        seconds_per_iteration={1: 1.0}, init_delay_s=20.0, init_spread=Spread(samples=(0.5, 1.5)), source="file"
    )
    asked = resources(instance_type="g5.xlarge", provision_delay={"mean": "30s", "cv": 0.5})
    found = offer(asked, measured)
    assert (found.provision_delay_s, found.provision_spread) == (30.0, Spread(cv=0.5))
    assert (found.init_delay_s, found.init_spread) == (20.0, Spread(samples=(0.5, 1.5)))
    assert offer(asked.model_copy(update={"init_delay": 9.0}), measured).init_spread == FIXED


def test_local_needs_no_type() -> None:
    found = offer(Resources())
    assert (found.instance_type, found.gpus, found.price_usd_per_hour) == ("local", 1, 0.0)
    assert (found.provision_delay_s, found.init_delay_s) == (3.0, 8.0)
    assert offer(Resources.model_validate({"instance_type": "box", "gpus_per_instance": 4})).gpus == 4


def test_an_instance_of_ec2_is_not_taken_to_be_there_at_once() -> None:
    asked = resources(instance_type="p3.8xlarge")
    assert offer(asked).init_delay_s > 60.0
    assert offer(asked, PROFILE).init_delay_s == 6.0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"instance_type": "p3.9xlarge"}, r"is not in the catalogue; did you mean 'p3.*' or 'p3.* or give gpus_per_"),
        ({"instance_type": "zzz"}, r"it has \d+ types, from g3.16xlarge to p6-b300.48xlarge: or give"),
        (
            {"instance_type": "c5.xlarge"},
            r"did you mean 'c7i.xlarge' or .* or give slots \(2: train 2 trials at a time on one\) and price_per_hour",
        ),
        ({"instance_type": "g5.xlrge"}, "did you mean 'g5.xlarge'"),
        ({}, "provider aws needs one; add it"),
        ({"instance_type": "x", "gpus_per_instance": 1}, "'x' is not in the catalogue; give its price per hour"),
        (
            {"instance_type": "g6.xlarge", "region": "eu-west-1"},
            "a price of g6.xlarge for us-east-1, .*, not for eu-west-1; give price_per_hour",
        ),
        ({"instance_type": "p5e.48xlarge"}, "a price of p5e.48xlarge for no region, not for us-east-1"),
        ({"instance_type": "g6.xlarge", "market": "spot"}, "no spot price of g6.xlarge; give it"),
        ({"instance_types": ["g5.xlarge", "g6.xlarge"]}, "one type is needed here and 2 are given; choose one of g5"),
    ],
)
def test_offers_that_the_catalogue_lacks(words: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        offer(resources(**words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [{"provider": "aws"}, {"provider": "virtual"}])
def test_slots_are_the_places_of_an_instance_without_gpus(words: dict[str, Any]) -> None:
    found = offer(resources(**{**words, "instance_type": "m7i.2xlarge", "slots": 4}))
    assert (found.gpus, found.price_usd_per_hour) == (4, 0.4032)
    asked = resources(instance_type="m7i.2xlarge", slots=4)
    assert Resources.model_validate(asked.model_dump(by_alias=True)).gpus_per_instance == 4


def test_a_rehearsal_of_slots_without_a_type_or_price_is_free() -> None:
    found = offer(resources(provider="virtual", slots=2))
    assert (found.instance_type, found.gpus, found.price_usd_per_hour) == ("virtual", 2, 0.0)
    assert offer(resources(provider="virtual", slots=2, price_per_hour=3)).price_usd_per_hour == 3.0
    with pytest.raises(InputError, match="provider virtual needs one"):
        offer(resources(provider="virtual", gpus_per_instance=2))
    with pytest.raises(InputError, match="mine' is not in the catalogue; give its price per hour"):
        offer(resources(provider="virtual", slots=2, instance_type="mine"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"instance_type": "m7i.large"}, r"m7i.large has no GPUs; give slots \(how many trials train at a time"),
        ({"instance_type": "m7i.large", "slots": 4}, "slots: 4 are more than the 2 vCPUs of m7i.large; lower it to 2"),
        ({"instance_type": "g5.xlarge", "slots": 2}, "slots: 2 are for an instance without GPUs, and g5.xlarge has 1"),
        ({"instance_types": ["m7i.large", "c7i.large"], "slots": 2}, "one type is needed here"),
    ],
)
def test_slots_that_no_instance_has_are_refused(words: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        offer(resources(**words))


@pytest.mark.parametrize("given", [{"slots": 2, "gpus_per_instance": 4}, {"slots": 0}, {"slots": "two"}])
def test_wrong_slots_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Resources.model_validate({"instance_type": "m7i.large", **given})
    assert word_error(caught.value).args[0].startswith("slots: ")


def test_one_profile_does_not_hold_for_two_cpu_types() -> None:
    asked = resources(instance_types=["m7i.2xlarge", "c7i.2xlarge"], slots=2)
    with pytest.raises(InputError, match=r"kind of GPU, and m7i.2xlarge has none, c7i.2xlarge none; write"):
        offers(asked, PROFILE)


def test_a_cpu_type_is_replaced_by_one_with_as_many_cpus_and_as_much_memory() -> None:
    names = ["m7i.2xlarge", "c7i.2xlarge", "r7i.2xlarge", "m7i.4xlarge", "g5.2xlarge"]
    assert similar_types(resources(instance_types=names), "m7i.2xlarge", catalogue()) == ["r7i.2xlarge"]


def test_the_spot_market() -> None:
    asked = {"instance_type": "p3.8xlarge", "market": "spot", "init_delay": "10s"}
    spot = {"price_per_hour": 3.9, "interruptions_per_hour": 0.1, "checkpoint_iterations": 2, "restart": "2m"}
    assert offer(resources(**asked, spot=spot)).spot == Spot(
        price_usd_per_hour=3.9, interruptions_per_hour=0.1, checkpoint_iterations=2, restart_s=120.0
    )
    found = offer(resources(**asked), PROFILE).spot
    assert found is not None
    assert 0.0 < found.price_usd_per_hour < 12.24
    assert found.restart_s == 5.0 + 10.0 + 2.0
    assert offer(resources(**{**asked, "market": "on_demand"}, spot=spot)).spot is None


def test_one_offer_forevery_type_in_order() -> None:
    asked = resources(instance_types=["p3.16xlarge", "p3.2xlarge"], max_instances=3)
    both = offers(asked, PROFILE)
    assert [(found.instance_type, found.gpus, found.max_instances) for found in both] == [
        ("p3.16xlarge", 8, 3),
        ("p3.2xlarge", 1, 3),
    ]
    assert offer(asked, PROFILE, instance_type="p3.2xlarge") == both[1]
    with pytest.raises(InputError, match=r"'p3.8xlarge' is not asked for; did you mean 'p3"):
        offer(asked, PROFILE, instance_type="p3.8xlarge")
    assert offers(resources(instance_type="g5.xlarge"), PROFILE) == (
        offer(resources(instance_type="g5.xlarge"), PROFILE),
    )


def test_a_profile_holds_for_one_kind_of_gpu() -> None:
    asked = resources(instance_types=["p3.2xlarge", "g5.xlarge"])
    with pytest.raises(InputError, match=r"p3.2xlarge has V100 \(16 GiB\), g5.xlarge A10G \(24 GiB\); write profile"):
        offers(asked, PROFILE)
    with pytest.raises(InputError, match=r"V100 \(16 GiB\), p3dn.24xlarge V100 \(32 GiB\)"):
        offers(resources(instance_types=["p3.2xlarge", "p3dn.24xlarge"]), PROFILE)
    slow = Profile(seconds_per_iteration={1: 9.0}, init_delay_s=60.0)
    found = offers(asked, {"p3.2xlarge": PROFILE, "g5.xlarge": slow})
    assert [one.init_delay_s for one in found] == [6.0, 60.0]
    with pytest.raises(ProfileMissingError, match=r"'g5.xlarge' has none"):
        offers(asked, {"p3.2xlarge": PROFILE})
    with pytest.raises(InputError, match="is not in the catalogue"):
        offers(resources(instance_types=["p3.2xlarge", "nothing"]), PROFILE)


def test_a_table_of_ones_own(tmp_path: Any) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("instance_type,gpus,us-east-1,lab-1\nbox,2,,0.5\n")
    other = tmp_path / "other.csv"
    other.write_text("gpus,instance_type,lab-1\n8,box,4\n")
    asked = resources(instance_type="box", region="lab-1")
    environment = {"RUBBERBAND_CATALOGUE": str(table)}
    assert (offer(asked, environment=environment).gpus, offer(asked, environment=environment).price_usd_per_hour) == (
        2,
        0.5,
    )
    named = asked.model_copy(update={"catalogue": str(other)})
    assert offers(named, environment=environment)[0].price_usd_per_hour == 4.0
    with pytest.raises(InputError, match="is not in the catalogue; it has 1 types"):
        offer(resources(instance_type="p3.2xlarge"), environment=environment)


def test_where_a_price_comes_from() -> None:
    assert (
        price_source(resources(instance_type="p3.8xlarge"), "p3.8xlarge")[1] == "the catalogue of 2026-01-19, us-east-1"
    )
    europe = resources(instance_type="p3.16xlarge", region="eu-west-1")
    assert price_source(europe, "p3.16xlarge")[1] == "the catalogue of 2026-01-19, eu-west-1, approximate"
    assert price_source(resources(instance_type="x", price_per_hour=1), "x")[1] == "the file"
    assert price_source(Resources(), "local")[1] == "free of charge"


def test_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "# mine\n\ngpu,instance_type, gpus ,gpu_memory_gib,spot_share,us-east-1,lab-a\n"
        'RTX 4090,"box",2,24,0.5,,~1e-1\nT4,g4dn.xlarge,1,16,,0.526,\n',
        encoding="utf-8-sig",
    )
    assert load_table(path) == {
        "box": InstanceType(
            instance_type="box",
            gpus=2,
            gpu="RTX 4090",
            gpu_memory_gib=24.0,
            spot_share=0.5,
            prices_usd_per_hour={"lab-a": 0.1},
            approximate=frozenset({"lab-a"}),
        ),
        "g4dn.xlarge": InstanceType(
            instance_type="g4dn.xlarge", gpus=1, gpu="T4", gpu_memory_gib=16.0, prices_usd_per_hour={"us-east-1": 0.526}
        ),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "mine.csv has no instance types; write a header line"),
        ("instance_type,gpus\n", "mine.csv has no instance types; write a header line"),
        ("instance_type,gpu\n", "mine.csv:1: column gpus is missing; the first line names the columns, add it"),
        ("# x\ninstance_type,gpus,gpus\n", "mine.csv:2: column 'gpus' occurs twice; remove one"),
        (
            "instance_type,gpus,vcpu\n",
            "mine.csv:1: column 'vcpu' is neither known nor a region such as us-east-1; did ",
        ),
        ("instance_type,gpus\na,1\na,2\n", "mine.csv:3: a occurs twice (first in line 2); remove one"),
        ("instance_type,gpus\na\n", "mine.csv:2: 1 cells, and the header has 2; leave what is unknown empty"),
        ("instance_type,gpus\n,1\n", "mine.csv:2: '' is not the name of an instance type; write one, such as"),
        ("instance_type,gpus\na,\n", "mine.csv:2: gpus: '' is not a whole number; write one, 0 for a CPU type"),
        ("instance_type,gpus\na,1.5\n", "mine.csv:2: gpus: '1.5' is not a whole number; write one, 0 for a CPU type"),
        ("instance_type,gpus,us-east-1\na,1,-2\n", "mine.csv:2: us-east-1: '-2' is not a number from 0 to 1e9; write"),
        ("instance_type,gpus,us-east-1\na,1,nan\n", "mine.csv:2: us-east-1: 'nan' is not a number from 0 to 1e9; "),
        ("instance_type,gpus,us-east-1\na,1,3 USD\n", "mine.csv:2: us-east-1: '3 USD' is not a number from 0 to 1e9"),
        ("instance_type,gpus,us-east-1\na,1,~\n", "mine.csv:2: us-east-1: '~' is no price; write one after the ~"),
        ("instance_type,gpus,spot_share\na,1,1.5\n", "mine.csv:2: spot_share: 1.5 is not in (0, 1]; write the spot"),
        ("instance_type,gpus,efa\na,1,2\n", "mine.csv:2: efa: 2 is neither 0 nor 1; write 1 for a type with EFA, or"),
        ('instance_type,gpus\n"a,1\n', "mine.csv:2: not CSV (unexpected end of data); separate cells by commas"),
    ],
)
def test_a_bad_table_is_reported_with_its_line(content: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_table(content.splitlines(), "mine.csv")
    assert str(caught.value).startswith(message)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\); give a CSV file"):
        load_table(tmp_path / "none.csv")
    path = tmp_path / "mine.csv"
    path.write_bytes(b"instance_type,gpus\n\xff,1\n")
    with pytest.raises(InputError, match=r"mine.csv:2: not UTF-8"):
        load_table(path)
    path.write_bytes(b"#" * (5 << 20))
    with pytest.raises(InputError, match="is larger than 4 MiB"):
        load_table(path)


@given(st.text(max_size=60) | st.text(st.sampled_from("ab,1.\"'# \n-"), max_size=40))
def test_any_text_is_a_table_or_an_input_error(text: str) -> None:
    message = ""
    try:
        parse_table(("instance_type,gpus,us-east-1\n" + text).splitlines(), "mine.csv")
    except InputError as error:
        message = str(error)
    assert "\n" not in message
