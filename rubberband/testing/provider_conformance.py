"""Tests that every provider passes, as a class of pytest (docs/providers.md).

class TestMine(ProviderConformance):
    @pytest.fixture
    def tested(self, tmp_path):
        provider = MyProvider("conformance", tmp_path)
        yield ProviderUnderTest(provider, wait=lambda: time.sleep(0.1), now=time.time, lease_s=2.0)
        provider.close()
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from rubberband.cloud.provider import InstanceDescription, Provider
from rubberband.errors import ProviderError

TAKEN = "taken"
"""Name of the instance that the provider takes away after it began to run, where it does such things."""


@dataclass
class ProviderUnderTest:
    """A provider of an experiment called `conformance`, how time passes for it, and what it cannot do."""

    provider: Provider
    wait: Callable[[], None]
    """Lets some time pass, and all that happens in it."""
    now: Callable[[], float]
    """The provider's clock."""
    lease_s: float
    """A short lease, long enough to ask for an instance and to renew it."""
    leases: bool = True
    """Whether instances end themselves."""
    spot: bool = True
    """Whether markets differ."""
    heard: Callable[[float], None] = lambda _until: None
    """Carries a renewal to the instances, where `renew_lease` does not: on other machines the driver's worker does."""
    take: Callable[[], None] | None = None
    """Takes TAKEN away; None where nothing is taken away."""
    end: Callable[[], None] = lambda: None
    """Ends what the provider leaves running."""

    def status(self, instance: str) -> InstanceDescription:
        """Return what the provider shows of one instance."""
        return next(status for status in self.provider.describe() if status.instance == instance)

    def until(self, instance: str, state: str) -> InstanceDescription:
        """Return what it shows once the instance is in this state."""
        for _ in range(5000):
            if (status := self.status(instance)).state == state:
                return status
            self.wait()
        raise AssertionError(f"{instance} is not {state}: {status}")

    def running(self, instance: str) -> InstanceDescription:
        """Return what it shows once the instance runs."""
        return self.until(instance, "running")

    def renew(self, until: float) -> None:
        """Do what a driver does every few seconds."""
        self.provider.renew_lease(until)
        self.heard(until)


class ProviderConformance:
    """Tests of a provider; a class that derives from this one has the fixture `tested`, a `ProviderUnderTest`."""

    def test_an_instance_is_pending_then_runs(self, tested: ProviderUnderTest) -> None:
        tested.provider.launch("a")
        asked = tested.status("a")
        assert asked.experiment == "conformance"
        assert asked.ended_at is None
        running = tested.running("a")
        assert running.running_at is not None
        assert running.running_at >= running.requested_at == asked.requested_at

    def test_asking_twice_rents_once(self, tested: ProviderUnderTest) -> None:
        tested.provider.launch("a")
        first = tested.running("a")
        tested.provider.launch("a")
        assert list(tested.provider.describe()) == [first]

    def test_two_threads_that_ask_at_once_rent_once(self, tested: ProviderUnderTest) -> None:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: tested.provider.launch("a"), range(4)))
        first = tested.running("a")
        tested.wait()
        assert list(tested.provider.describe()) == [first]

    def test_release_ends_it_and_is_idempotent(self, tested: ProviderUnderTest) -> None:
        tested.provider.launch("a")
        running = tested.running("a")
        released = tested.provider.release("a")
        assert released.state == "terminated"
        assert released.reason == ""
        assert not released.preempted
        assert released.running_at == running.running_at
        assert released.ended_at is not None
        assert released.ended_at >= (running.running_at or 0.0)
        tested.wait()
        assert tested.provider.release("a") == released == tested.status("a")

    def test_a_release_may_come_before_it_runs(self, tested: ProviderUnderTest) -> None:
        tested.provider.launch("a")
        released = tested.provider.release("a")
        assert released.state == "terminated"
        tested.wait()
        assert tested.status("a") == released

    def test_an_ended_name_is_not_rented_again(self, tested: ProviderUnderTest) -> None:
        tested.provider.launch("a")
        released = tested.provider.release("a")
        tested.provider.launch("a")
        tested.wait()
        assert tested.status("a") == released

    def test_releasing_what_was_never_launched_is_an_error(self, tested: ProviderUnderTest) -> None:
        with pytest.raises(ProviderError, match=r"never|no instance"):
            tested.provider.release("a")

    def test_they_are_shown_in_the_order_of_their_launch(self, tested: ProviderUnderTest) -> None:
        for instance in ("b", "c", "a"):
            tested.provider.launch(instance)
            tested.wait()
        tested.provider.release("c")
        assert [status.instance for status in tested.provider.describe()] == ["b", "c", "a"]

    def test_the_price_of_a_purchase_does_not_change(self, tested: ProviderUnderTest) -> None:
        tested.provider.launch("a", "spot")
        running = tested.running("a")
        assert running.market == ("spot" if tested.spot else "on_demand")
        for _ in range(20):
            tested.wait()
        later = tested.status("a")
        bought = ("market", "instance_type", "zone", "price_usd_per_hour", "running_at")
        assert [getattr(later, name) for name in bought] == [getattr(running, name) for name in bought]

    def test_an_instance_whose_lease_is_not_renewed_ends_itself(self, tested: ProviderUnderTest) -> None:
        if not tested.leases:
            pytest.skip("its instances have no operating system")
        tested.renew(tested.now() + 3.0 * tested.lease_s)  # a busy machine may need a while to ask for an instance
        tested.provider.launch("a")
        ended = tested.until("a", "terminated")
        assert "lease" in ended.reason or ended.reason == "the Ray head ended"  # whose lease is the same
        assert not ended.preempted
        assert ended.ended_at is not None
        assert ended.ended_at > (ended.running_at or ended.requested_at)

    def test_a_first_lease_is_no_longer_than_it_was_ordered(self, tested: ProviderUnderTest) -> None:
        if not tested.leases:
            pytest.skip("its instances have no operating system")
        tested.provider.renew_lease(tested.now() + 20.0 * tested.lease_s)
        tested.provider.launch("a", first_lease_s=tested.lease_s)
        ended = tested.until("a", "terminated")
        assert "lease" in ended.reason
        assert ended.ended_at is not None
        assert ended.running_at is not None
        assert ended.ended_at < ended.running_at + 15.0 * tested.lease_s, "it did not have the lease of the others"

    def test_a_renewed_lease_keeps_it(self, tested: ProviderUnderTest) -> None:
        if not tested.leases:
            pytest.skip("its instances have no operating system")
        first_s = 3.0 * tested.lease_s  # a busy machine may need a while to ask for an instance, and to renew
        tested.renew(tested.now() + first_s)
        tested.provider.launch("a")
        tested.renew(tested.now() + 40.0 * tested.lease_s)
        first_ends_at = (tested.running("a").running_at or 0.0) + first_s
        tested.renew(tested.now() + 40.0 * tested.lease_s)
        while tested.now() < first_ends_at + 0.5 * tested.lease_s:
            tested.wait()
        assert tested.status("a").state == "running"

    def test_a_lease_may_be_cut_short(self, tested: ProviderUnderTest) -> None:
        if not tested.leases:
            pytest.skip("its instances have no operating system")
        full = tested.now() + 20.0 * tested.lease_s
        tested.renew(full)
        tested.provider.launch("a")
        tested.running("a")
        end_at = tested.now() + 0.1 * tested.lease_s
        tested.renew(end_at)
        ended = tested.until("a", "terminated")
        assert ended.ended_at is not None
        assert end_at <= ended.ended_at < full

    def test_an_instance_taken_by_the_provider_is_preempted(self, tested: ProviderUnderTest) -> None:
        if tested.take is None:
            pytest.skip("nothing is taken away")
        tested.provider.launch(TAKEN, "spot")
        running = tested.running(TAKEN)
        tested.take()
        ended = tested.until(TAKEN, "terminated")
        assert ended.preempted
        assert ended.reason
        assert ended.running_at == running.running_at
        assert tested.provider.release(TAKEN) == ended

    def test_close_ends_everything_and_is_idempotent(self, tested: ProviderUnderTest) -> None:
        for instance in ("a", "b"):
            tested.provider.launch(instance)
        tested.provider.renew_lease(tested.now() + tested.lease_s)
        tested.provider.close()
        tested.provider.close()
        assert [status.state for status in tested.provider.describe()] == ["terminated", "terminated"]
