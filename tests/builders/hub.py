"""A stand-in of the Hugging Face hub over HTTP: what huggingface_hub asks for a snapshot, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_BLOCK = 1 << 20
_LARGE = 10_000
"""Files from this size have a SHA-256, as in LFS; others Git's SHA-1."""


@dataclass(frozen=True)
class Content:
    """A file: one block, repeated up to its size."""

    size: int
    block: bytes

    @classmethod
    def of(cls, content: bytes) -> Content:
        return cls(len(content), content or b"\0")

    def read(self, begin: int, count: int) -> bytes:
        at = begin % len(self.block)
        repeated = self.block * ((at + count) // len(self.block) + 1)
        return repeated[at : at + min(count, self.size - begin)]

    def parts(self, begin: int = 0) -> Iterator[bytes]:
        while begin < self.size:
            part = self.read(begin, _BLOCK)
            yield part
            begin += len(part)

    @property
    def is_large(self) -> bool:
        return self.size >= _LARGE


def digest_of(content: Content) -> str:
    digest = hashlib.sha256() if content.is_large else hashlib.sha1(f"blob {content.size}\0".encode())
    for part in content.parts():
        digest.update(part)
    return digest.hexdigest()


@dataclass
class Repo:
    """A model or a dataset with one commit."""

    files: Mapping[str, Content]
    commit: str = "ab" * 20
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    digests: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.digests = {path: digest_of(content) for path, content in self.files.items()}


@dataclass
class Hub:
    """The repositories (`models/OWNER/NAME`, `datasets/OWNER/NAME`), what was asked, and the faults to come."""

    repos: dict[str, Repo]
    token: str = "hf_right"
    rate: float | None = None
    """Bytes per second of all connections together; None: no limit."""
    breaks: dict[str, int] = field(default_factory=dict)
    """File -> byte behind which its connection breaks, once."""
    resets: bool = False
    """Whether it breaks by a reset (RST), not by an end."""
    wrong: Counter[str] = field(default_factory=Counter)
    """File -> number of answers with a wrong byte."""
    gets: Counter[str] = field(default_factory=Counter)
    """File -> GET requests."""
    requests: int = 0
    served: int = 0
    """Bytes of files."""
    url: str = ""
    mutex: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0

    def spend(self, count: int) -> None:
        """Wait as long as `count` bytes take at the rate."""
        with self.mutex:
            self.served += count
            if self.rate is None:
                return
            now = time.monotonic()
            self.free_at = max(self.free_at, now) + count / self.rate
            wait_s = self.free_at - now
        time.sleep(wait_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        if not hub.url:  # closed, but for connections from before
            self.close_connection = True
            return
        with hub.mutex:
            hub.requests += 1
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/"):
            self._api(path.removeprefix("api/"))
            return
        where, _, rest = path.partition("/resolve/")
        repo = hub.repos.get(where if where.startswith("datasets/") else f"models/{where}")
        revision, _, name = rest.partition("/")
        if repo is None or revision not in (repo.commit, *repo.revisions) or name not in repo.files:
            self._refuse(404, "EntryNotFound")
        elif repo.gated and not self._is_let_in():
            self._refuse(401, "GatedRepo")
        else:
            self._file(repo, name)

    def _is_let_in(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.hub.token}"

    def _api(self, path: str) -> None:
        words = path.split("/")
        at = next((i for i, word in enumerate(words) if word in ("revision", "tree", "auth-check")), len(words))
        repo, asked = self.hub.repos.get("/".join(words[:at])), [*words[at:], "", ""]
        if repo is None:
            self._refuse(404, "RepoNotFound")
        elif asked[0] == "auth-check":
            self._refuse(401, "GatedRepo") if repo.gated and not self._is_let_in() else self._answer({})
        elif asked[1] and "/".join(asked[1:]).strip("/") not in (repo.commit, *repo.revisions):
            self._refuse(404, "RevisionNotFound")
        elif asked[0] == "tree":
            self._answer([self._entry(repo, name) for name in repo.files])
        else:
            files = [{"rfilename": name, **self._sizes(repo, name)} for name in repo.files]
            gated = "manual" if repo.gated else False
            self._answer({"id": "/".join(words[1:at]), "sha": repo.commit, "gated": gated, "siblings": files})

    def _sizes(self, repo: Repo, name: str) -> dict[str, Any]:
        content, digest = repo.files[name], repo.digests[name]
        if not content.is_large:
            return {"size": content.size, "blobId": digest}
        lfs = {"sha256": digest, "size": content.size, "pointerSize": 134}
        return {"size": content.size, "blobId": "cd" * 20, "lfs": lfs}

    def _entry(self, repo: Repo, name: str) -> dict[str, Any]:
        content, digest = repo.files[name], repo.digests[name]
        lfs = {"lfs": {"oid": digest, "size": content.size, "pointerSize": 134}} if content.is_large else {}
        oid = "cd" * 20 if content.is_large else digest
        return {"type": "file", "path": name, "size": content.size, "oid": oid, **lfs}

    def _answer(self, words: Any) -> None:
        body = json.dumps(words).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, repo: Repo, name: str) -> None:
        hub, content = self.hub, repo.files[name]
        begin = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        for key, text in (
            ("ETag", f'"{repo.digests[name]}"'),
            ("X-Repo-Commit", repo.commit),
            ("X-Linked-Size", str(content.size)),
            ("Content-Length", str(content.size - begin)),
            ("Accept-Ranges", "bytes"),
        ):
            self.send_header(key, text)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{content.size - 1}/{content.size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        with hub.mutex:
            hub.gets[name] += 1
            is_wrong, break_at = hub.wrong[name] > 0, hub.breaks.get(name)
            hub.wrong[name] -= is_wrong
        for part in content.parts(begin):
            if break_at is not None and begin + len(part) > break_at:
                with hub.mutex:
                    hub.breaks.pop(name, None)
                self.wfile.write(part[: max(0, break_at - begin)])
                if hub.resets:
                    time.sleep(0.5)  # what was sent is read before
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                self.close_connection = True
                return
            hub.spend(len(part))
            self.wfile.write(bytes([part[0] ^ 1]) + part[1:] if is_wrong and not begin else part)
            begin += len(part)


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """Serve the hub while in the block; afterwards its port refuses all connections."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.url = ""
        server.shutdown()
        server.server_close()
        thread.join()
