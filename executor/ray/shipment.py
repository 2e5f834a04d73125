"""The user's code in Ray's object store: put there once for a cluster, fetched once by each instance."""

from __future__ import annotations

import threading
from typing import Any

import ray

from rubberband.executor.ray.code import Code


class Shipment:
    """Any thread may ask for it."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._mutex = threading.Lock()
        self._address = ""
        self._reference: Any = None

    def reference(self) -> Any:
        """What an actor is given in the place of the code; the driver is connected."""
        with self._mutex:
            address = ray.get_runtime_context().gcs_address
            if self._reference is None or address != self._address:  # another head knows nothing of it
                self._address, self._reference = address, ray.put(self._code)
            return self._reference
