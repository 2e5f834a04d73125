"""HTTP connections that do not wait for ever: who does not send a request whole, or takes no answer, is cut off.

Answers are sent in as few pieces as can be: each costs a call of the system.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0
"""The headers of a request must be there by then; a body has its own time (rubberband.api.security.bodies)."""
HEADERS_BYTES = 32 << 10
"""Of all headers together; more is answered with 400."""
UNREAD_S = 30.0
"""A client that takes nothing of what is sent for so long holds memory for nothing, as a stream does that stands."""
MOST_WAITING = 64
"""Connections of one address that have not sent a request whole; with more, the oldest is cut off."""


class _Gathering:
    """A transport that sends what is written at one go together: uvicorn writes head and body of an answer apart."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send it before the event loop turns again."""
        if not data:
            return
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        """Send what was written, and hang up."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        written, self._written = self._written, []
        if written:
            self._transport.write(b"".join(written))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, with an end to the wait for headers, and for somebody to take what is sent."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _waiting: ClassVar[dict[str, dict[PatientProtocol, None]]] = {}
    """Address -> its connections that owe a request, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(cast(asyncio.Transport, _Gathering(transport, self.loop)))
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a request's headers, from their first byte on; or of a body that nobody reads."""
        super().data_received(data)
        if not self._is_owed():
            self._stop_waiting()
        elif self._late is None:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More is to be sent than the client takes: whoever sends waits, and it is watched that it takes some."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._stop_watching()
        super().resume_writing()

    def _watch(self, owed: int) -> None:
        self._stop_watching()
        self._unread = self.loop.call_later(UNREAD_S, self._look, owed)

    def _look(self, owed: int) -> None:
        now_owed = self.transport.get_write_buffer_size()
        if now_owed < owed:
            self._watch(now_owed)
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _is_owed(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.IDLE or (answered and self.conn.their_state is h11.SEND_BODY)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _expect(self) -> None:
        self._late = self.loop.call_later(HEADERS_S, self._cut_off)
        waiting = self._waiting.setdefault(self._address, {})
        waiting[self] = None
        if len(waiting) > MOST_WAITING:
            next(iter(waiting))._cut_off()

    def _stop_waiting(self) -> None:
        if self._late is None:
            return
        self._late.cancel()
        self._late = None
        waiting = self._waiting.get(self._address, {})
        waiting.pop(self, None)
        if not waiting:
            self._waiting.pop(self._address, None)

    def _cut_off(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.transport.close()
