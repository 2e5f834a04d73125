"""An HTTP receiver on this machine that takes notices, or does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Answer = Literal["takes", "busy", "gone", "late", "redirects", "dies", "hangs"]


class Receiver:
    """Answers the n-th request as the n-th of `answers` says, and later ones as the last."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.redirected = 0
        self.let_go = threading.Event()
        self._answers = list(answers)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    @property
    def kinds(self) -> list[str]:
        return [body["kind"] for body in self.bodies]

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/hook":
                    receiver.redirected += 1
                    self._status(200)
                    return
                number = len(receiver.bodies)
                receiver.bodies.append(json.loads(body))
                receiver.keys.append(self.headers["Idempotency-Key"])
                match receiver._answers[min(number, len(receiver._answers) - 1)]:
                    case "takes":
                        self._status(204)
                    case "busy":
                        self._status(503)
                    case "gone":
                        self._status(404)
                    case "late":  # of a gateway, behind which it may have been taken
                        self._status(504)
                    case "redirects":
                        self._status(307, Location=receiver.url.replace("/hook", "/other"))
                    case "dies":
                        self.close_connection = True
                    case "hangs":
                        receiver.let_go.wait(60.0)
                        self.close_connection = True

            def do_GET(self) -> None:
                receiver.redirected += 1
                self._status(200)

            def _status(self, status: int, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        return Handler


@contextmanager
def receiving(*answers: Answer) -> Iterator[Receiver]:
    receiver = Receiver(answers or ("takes",))
    try:
        yield receiver
    finally:
        receiver.close()
