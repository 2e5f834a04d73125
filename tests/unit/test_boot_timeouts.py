"""How long an instance may take to start, by its type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.cloud.catalogue import armed_s, boot_timeouts, firmware_s, reach_s
from rubberband.cloud.offers import offer
from rubberband.spec.resources import Resources


@pytest.mark.parametrize(
    ("instance_type", "seconds"),
    [
        ("g4dn.xlarge", 60.0),
        ("g5.48xlarge", 60.0),
        ("p3.16xlarge", 60.0),
        ("p4d.24xlarge", 600.0),
        ("p4de.24xlarge", 600.0),
        ("p5.48xlarge", 600.0),
        ("p5en.48xlarge", 600.0),
        ("p6-b200.48xlarge", 600.0),
        ("g4dn.metal", 1500.0),
        ("m7i.metal-24xl", 1500.0),
    ],
)
def test_slow_firmware_has_its_own_bound(instance_type: str, seconds: float) -> None:
    assert firmware_s(instance_type) == seconds
    assert boot_timeouts([instance_type]).ready_s == seconds + 900.0


def test_the_limits_of_several_types_are_those_of_the_slowest() -> None:
    assert boot_timeouts(["g5.xlarge", "p4d.24xlarge"]) == boot_timeouts(["p4d.24xlarge"])


def test_a_longer_installation_that_the_file_says_has_room() -> None:
    assert boot_timeouts(["g5.xlarge"], 1200.0).install_s == 1800.0
    assert boot_timeouts(["g5.xlarge"], 60.0).install_s == 900.0


@given(lease_s=st.floats(1.0, 1e6), firmware=st.sampled_from([60.0, 600.0, 1500.0]))
def test_the_reach_of_the_budget_arms_at_least_the_lease(lease_s: float, firmware: float) -> None:
    assert lease_s - 1.0 < armed_s(reach_s(lease_s, firmware), firmware) <= lease_s + 1.0
    assert armed_s(reach_s(lease_s, firmware), firmware) + firmware <= reach_s(lease_s, firmware)


def test_plans_assume_longer_starts_of_slow_types() -> None:
    delays = {
        name: offer(Resources(provider="aws", instance_type=name), environment={}).init_delay_s
        for name in ("g5.xlarge", "p4d.24xlarge", "g4dn.metal")
    }
    assert delays == {"g5.xlarge": 180.0, "p4d.24xlarge": 450.0, "g4dn.metal": 900.0}
