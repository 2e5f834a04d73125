"""Ctrl-C while a command starts is obeyed at once, and is not lost where an import swallows it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from rubberband.errors import Cancelled
from rubberband.executor import cancel_on_signals
from rubberband.interrupts import AtOnce, uninterrupted

EACH = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in EACH}
    for number in EACH:  # SIGINT is ignored where tests run in the background
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", EACH)
def test_a_request_lost_while_a_command_started_ends_the_experiment(number):
    AtOnce(Cancelled("asked to")).handle(EACH)
    with suppress(Cancelled):
        signal.raise_signal(number)
    with cancel_on_signals() as cancelled:
        assert cancelled()


def test_it_raises_at_once_and_without_a_signal_nothing_is_cancelled():
    AtOnce(KeyboardInterrupt()).handle([signal.SIGINT])
    with cancel_on_signals() as cancelled:
        assert not cancelled()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_entry_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    AtOnce(KeyboardInterrupt()).handle([signal.SIGINT])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _send(number):
    """Send a signal that must not interrupt, which would end pytest."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        raise AssertionError("it interrupts") from None


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 3), (signal.SIGHUP, 3)])
def test_the_first_signal_asks_for_a_clean_end_and_supervisors_may_send_several(number, times):
    with cancel_on_signals() as cancelled:
        for _ in range(times):
            _send(number)
            assert cancelled()


def test_a_second_ctrl_c_interrupts():
    with cancel_on_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_closed_terminal_changes_nothing_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with cancel_on_signals() as cancelled:
        _send(signal.SIGHUP)
        assert not cancelled()


def test_a_release_is_not_interrupted():
    released = []

    def release():
        _send(signal.SIGINT)
        released.append(True)

    with cancel_on_signals():
        signal.raise_signal(signal.SIGINT)
        uninterrupted(release)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert released
