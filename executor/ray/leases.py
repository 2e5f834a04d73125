"""How long instances may live without another word from this driver: the lease, cut off where the budget ends."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from rubberband.cloud.provider import Provider

_log = logging.getLogger(__name__)


class Leases:
    """Renews the lease of a provider's instances in a thread of its own, until it is closed."""

    def __init__(
        self,
        provider: Provider,
        *,
        lease_s: float,
        interval_s: float,
        first_lease_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Every `interval_s` the lease is put off to `lease_s` from now, but not beyond what `hold_until` was told.

        The first lease of an instance, until it is ready, may be `first_lease_s`, if that is longer.

        Not before `hold_until` is called, or the first instance is asked for: what an earlier driver left may have used
        up the budget.
        """
        self._provider = provider
        self._lease_s = lease_s
        self._first_lease_s = max(lease_s, first_lease_s or 0.0)
        self.interval_s = interval_s
        self.former_until = clock() + self._first_lease_s
        """No lease that an earlier driver put off reaches further."""
        self._clock = clock
        self._hold_until = math.inf
        self._begun = False
        self._mutex = threading.Lock()
        self._renewed = -math.inf
        """The latest instant that the provider was told."""
        self._wake = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, daemon=True, name="leases").start()

    @property
    def until(self) -> float | None:
        """The instant at which instances are to end themselves if they hear no more; None: leave it as it is."""
        return min(self._clock() + self._lease_s, self._hold_until) if self._begun else None

    @property
    def held_until(self) -> float:
        """What `hold_until` was told last."""
        return self._hold_until

    def hold_until(self, instant: float) -> bool:
        """Hold nothing past `instant`; where leases reach further, they are cut at once, and that is told."""
        self._hold_until, self._begun = instant, True
        if instant < self._renewed:
            self._wake.set()
        return instant < min(self._renewed, self._clock() + self._lease_s)

    def renew(self) -> None:
        """Tell the provider. A failure is only noted: the lease is long enough for the next time."""
        with self._mutex:
            self._begun = True
            until = min(self._clock() + self._first_lease_s, self._hold_until)
            try:
                self._provider.renew_lease(until)
            except Exception as error:
                _log.debug("the lease was not renewed: %s", error)
            else:
                self._renewed = until

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self.interval_s)
            self._wake.clear()
            if self._begun and not self._closed:
                self.renew()

    def close(self) -> None:
        """Renew no more."""
        self._closed = True
        self._wake.set()
