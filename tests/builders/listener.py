"""A client of the service's events that reconnects with the id of the last one, as a browser does."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

ANSWERED_S = httpx.Timeout(60.0, read=3.0)
"""Read for as long at a time, so that who closes it need not wait for a heartbeat."""


class Listener:
    """Collects all events, in a thread of its own, whatever becomes of the server meanwhile."""

    def __init__(self, address: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.connections = 0
        self._address = address
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def of(self, name: str) -> list[int]:
        """The places in an experiment's journal that were told, in the order in which they were."""
        return [event["seq"] for event in self.events if event["experiment"] == name and event["seq"] is not None]

    def ids(self) -> list[int]:
        """The ids of all events, in the order in which they came."""
        return [event["id"] for event in self.events]

    def ends(self) -> list[str]:
        """The experiments that were told to be done."""
        return [event["experiment"] for event in self.events if event["data"].get("state") == "done"]

    def reporting(self) -> set[str]:
        """The experiments whose trials have reported."""
        return {event["experiment"] for event in self.events if event["kind"] == "TrialReported"}

    def close(self) -> None:
        """Listen no longer."""
        self._closing.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._closing.wait(0.05):
            headers = {"Last-Event-ID": str(self.events[-1]["id"])} if self.events else {}
            try:
                with httpx.stream("GET", f"{self._address}/v1/events", headers=headers, timeout=ANSWERED_S) as answer:
                    self.connections += answer.status_code == 200
                    for line in answer.iter_lines():
                        if line.startswith("data: "):
                            self.events.append(json.loads(line.removeprefix("data: ")))
                        if self._closing.is_set():
                            return
            except httpx.HTTPError:
                continue
