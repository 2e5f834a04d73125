"""What holds for every provider."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rubberband.cloud.local import LocalProvider, ray_node
from rubberband.cloud.provider import InstanceStatus, Provider
from rubberband.cloud.virtual import VirtualClock, VirtualProvider
from rubberband.errors import ProviderError
from tests.integration import fake_nodes


@dataclass
class Rental:
    """A provider and how time passes for it."""

    provider: Provider
    wait: Callable[[], None]

    def status(self, instance: str) -> InstanceStatus:
        """What the provider shows of one instance."""
        return next(status for status in self.provider.describe() if status.instance == instance)

    def running(self, instance: str) -> InstanceStatus:
        """Wait until it runs."""
        for _ in range(1000):
            if (status := self.status(instance)).state == "running":
                return status
            self.wait()
        raise AssertionError(f"{instance} does not run")


def _local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rental:
    monkeypatch.setattr(ray_node, "head_command", fake_nodes.head_command)
    monkeypatch.setattr(ray_node, "instance_command", fake_nodes.instance_command)
    return Rental(LocalProvider("conformance", tmp_path, 2, token_path=tmp_path / "token"), lambda: time.sleep(0.02))


def _virtual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rental:
    clock = VirtualClock(1000.0)
    provider = VirtualProvider("conformance", clock, provision_delay_s=5.0)
    return Rental(provider, lambda: clock.advance_to(clock.now() + 1.0))


PROVIDERS = {"local": _local, "virtual": _virtual}


@pytest.fixture(params=PROVIDERS)
def rental(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rental]:
    """Each provider in turn."""
    rental = PROVIDERS[request.param](tmp_path, monkeypatch)
    yield rental
    rental.provider.close()


def test_an_instance_is_pending_then_runs(rental: Rental) -> None:
    rental.provider.launch("a")
    asked = rental.status("a")
    assert asked.experiment == "conformance"
    assert asked.ended_at is None
    running = rental.running("a")
    assert running.running_at is not None
    assert running.running_at >= running.requested_at == asked.requested_at


def test_asking_twice_rents_once(rental: Rental) -> None:
    rental.provider.launch("a")
    first = rental.running("a")
    rental.provider.launch("a")
    assert list(rental.provider.describe()) == [first]


def test_release_ends_it_and_is_idempotent(rental: Rental) -> None:
    rental.provider.launch("a")
    running = rental.running("a")
    released = rental.provider.release("a")
    assert released.state == "terminated"
    assert released.reason == ""
    assert released.running_at == running.running_at
    assert released.ended_at is not None
    assert released.ended_at >= (running.running_at or 0.0)
    rental.wait()
    assert rental.provider.release("a") == released == rental.status("a")


def test_a_release_may_come_before_it_runs(rental: Rental) -> None:
    rental.provider.launch("a")
    released = rental.provider.release("a")
    assert released.state == "terminated"
    rental.wait()
    assert rental.status("a") == released


def test_an_ended_name_is_not_rented_again(rental: Rental) -> None:
    rental.provider.launch("a")
    released = rental.provider.release("a")
    rental.provider.launch("a")
    rental.wait()
    assert rental.status("a") == released


def test_releasing_what_was_never_launched_is_an_error(rental: Rental) -> None:
    with pytest.raises(ProviderError, match=r"never|no instance"):
        rental.provider.release("a")


def test_they_are_shown_in_the_order_of_their_launch(rental: Rental) -> None:
    for instance in ("b", "c", "a"):
        rental.provider.launch(instance)
        rental.wait()
    rental.provider.release("c")
    assert [status.instance for status in rental.provider.describe()] == ["b", "c", "a"]


def test_close_ends_everything_and_is_idempotent(rental: Rental) -> None:
    for instance in ("a", "b"):
        rental.provider.launch(instance)
    rental.provider.renew_lease(time.time() + 30.0)
    rental.provider.close()
    rental.provider.close()
    assert [status.state for status in rental.provider.describe()] == ["terminated", "terminated"]
