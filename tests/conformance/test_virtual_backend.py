"""The virtual backend keeps what every backend promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rubberband.executor import Faults, TrialEnd, VirtualBackend
from rubberband.values.offer import Offer
from rubberband.values.profile import Profile
from tests.builders.conversation import Conversation
from tests.conformance.backend import ENDS, RAISES, BackendSuite, require_adoption

OFFER = Offer(
    instance_type="test", gpus=2, price_usd_per_hour=3.6, max_instances=3, provision_delay_s=30.0, init_delay_s=10.0
)
PROFILE = Profile(seconds_per_iteration={1: 10.0, 2: 6.0}, trial_startup_s=1.0)
FAULTS = Faults(failures={(RAISES, 1): "raised"}, refused={"f"}, ends={ENDS: TrialEnd(iterations=2)})


@pytest.fixture(scope="module")
def talk() -> Iterator[Conversation]:
    """One whose backend holds `a` and `b`."""
    talk = Conversation(VirtualBackend("test", OFFER, PROFILE, metric="loss", faults=FAULTS))
    talk.launch("a", "b")
    yield talk
    talk.backend.close()


class TestVirtualBackend(BackendSuite):
    """The suite on a virtual clock."""


def test_a_new_driver_adopts_what_it_knows_and_releases_the_rest() -> None:
    backend = VirtualBackend("test", OFFER, PROFILE, metric="loss")
    Conversation(backend).launch("a", "b")
    later = Conversation(backend)
    require_adoption(later, backend.reconcile(["a", "never-launched"]), known="a", unknown="b")
    for _ in range(2):
        backend.close()
    assert {status.state for status in backend.provider.describe()} == {"terminated"}
