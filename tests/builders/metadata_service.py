"""An instance metadata service (IMDSv2) that says what a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Metadata(BaseHTTPRequestHandler):
    said: dict[str, str]

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, "token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "token":
            self._answer(401, "")
        elif (name := self.path.removeprefix("/machine/latest/meta-data/")) in self.said:
            self._answer(200, self.said[name])
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def metadata_service() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a service, and what it says: path below meta-data -> text."""
    said: dict[str, str] = {}
    handler = type("Handler", (_Metadata,), {"said": said})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/machine/", said
    server.shutdown()
    thread.join()
    server.server_close()
