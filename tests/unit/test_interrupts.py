"""Ctrl-C while a command starts is obeyed at once, and is not lost where an import swallows it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from rubberband.errors import Cancelled
from rubberband.executor.session import cancel_on_signals
from rubberband.interrupts import AtOnce


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where tests run in the background
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_lost_while_a_command_started_ends_the_experiment(number):
    AtOnce(Cancelled("asked to")).handle([signal.SIGINT, signal.SIGTERM])
    with suppress(Cancelled):
        signal.raise_signal(number)
    with cancel_on_signals() as cancelled:
        assert cancelled()


def test_it_raises_at_once():
    AtOnce(KeyboardInterrupt()).handle([signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_without_a_signal_nothing_is_cancelled():
    AtOnce(KeyboardInterrupt()).handle([signal.SIGINT])
    with cancel_on_signals() as cancelled:
        assert not cancelled()


def test_an_ignored_entry_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    AtOnce(KeyboardInterrupt()).handle([signal.SIGINT])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
