"""Launches that are asked for at the same moment are bought together: one of their threads does it for all."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rubberband.errors import NoCapacityError, ProviderError
from rubberband.plan import Market

_LOOK_S = 0.05
"""How often a thread looks whether its orders are answered, while another one buys for it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """One launch, as the provider was asked for it."""

    instance: str
    market: Market
    head_address: str
    reach_s: Callable[[], float]
    """For how long from now an instance may be paid."""
    given_up: Callable[[], str]
    """Why it is no longer asked for, as soon as that is so; else empty."""
    answer: Future[None] = field(default_factory=Future)
    """Done once the instance is bought, or is refused: then with a ProviderError."""

    def bought(self) -> None:
        """Say so."""
        if not self.answer.done():
            self.answer.set_result(None)

    def refuse(self, reason: str, *, sold_out: bool = False) -> None:
        """Say why it is not bought."""
        if not self.answer.done():
            self.answer.set_exception(NoCapacityError(reason) if sold_out else ProviderError(reason))

    def follow(self, first: Order) -> None:
        """Answer as `first` was, which asked for the same name."""
        error = first.answer.exception()
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(error)


class Gathering:
    """The orders that wait for each other, by market and head. Safe to use from several threads."""

    def __init__(self, buy: Callable[[Sequence[Order]], None], wait: Callable[[], None]) -> None:
        """`buy` answers all of its orders, which have one market and one head; `wait` lets others come before it."""
        self._buy, self._wait = buy, wait
        self._mutex = threading.Lock()
        self._waiting: defaultdict[tuple[Market, str], list[Order]] = defaultdict(list)
        self._turns: defaultdict[tuple[Market, str], threading.Lock] = defaultdict(threading.Lock)

    def join(self, orders: Sequence[Order]) -> None:
        """Return once all of `orders` are answered, by this thread or by another. They have one market and one head."""
        if not orders:
            return
        key = (orders[0].market, orders[0].head_address)
        with self._mutex:
            self._waiting[key].extend(orders)
            turn = self._turns[key]
        while not all(order.answer.done() for order in orders):
            if turn.acquire(timeout=_LOOK_S):
                try:
                    self._lead(key)
                finally:
                    turn.release()

    def _lead(self, key: tuple[Market, str]) -> None:
        with self._mutex:
            if not self._waiting[key]:
                return
        self._wait()
        with self._mutex:
            orders = self._waiting.pop(key)
        once = {order.instance: order for order in reversed(orders)}  # a name is bought once
        try:
            self._buy([order for order in orders if once[order.instance] is order])
        except BaseException as error:
            for order in orders:  # their threads wait for it
                if not order.answer.done():
                    order.answer.set_exception(error)
            raise
        for order in orders:
            if not order.answer.done():
                order.follow(once[order.instance])
