"""A real browser for tests: Debian's Chromium, headless, driven by playwright, against an app served from a thread.

Every page notes what it must not do: errors in the console, and requests to other hosts.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

CHROMIUM = "/usr/bin/chromium"
ELSEWHERE = "rb.test"
"""A name of this machine in the browser, whose pages are not secure by http, as those of another host."""
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
]
PATIENCE_S = 60.0
"""How long a page may take to do anything: it ends a test that waits in vain, and is no claim about speed."""
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. The test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}; apt-get install chromium")
    api.expect.set_options(timeout=1000 * PATIENCE_S)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS, timeout=2000 * PATIENCE_S)
        try:
            yield browser
        finally:
            browser.close()


def expect(*found: Any) -> Any:
    """What a page shall show in the end: playwright's assertions, which wait."""
    from playwright.sync_api import expect as of_playwright

    return of_playwright(*found)


def drawn(page: Any, *names: str) -> None:
    """Scroll to charts, which draws them. The one of a comparison is drawn at once."""
    for name in names:
        page.locator(f"#c-{name}").scroll_into_view_if_needed()
        page.locator(f"#c-{name} .main-svg").first.wait_for()


class Visit:
    """A page at one address, and what it did that it must not."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.context.set_default_timeout(1000 * PATIENCE_S)
        page.on("console", lambda message: self._note(message) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._leaves(request.url))

    def open(self, path: str) -> Any:
        """Go to a path of the service; returns the page."""
        self.page.goto(self.address + path)
        return self.page

    def _note(self, message: Any) -> None:
        """The browser calls every answer an error that refuses a user's input, and what it gives to https only."""
        expected = ("status of 400", "status of 422", "Cross-Origin-Opener-Policy header has been ignored")
        if not any(part in message.text for part in expected):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _leaves(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != urlsplit(self.address).netloc:
            self.foreign.append(url)

    def shot(self, name: str, *, whole: bool = True) -> None:
        """Keep a screenshot in the folder that RUBBERBAND_SCREENSHOTS names; nothing without one."""
        folder = os.environ.get("RUBBERBAND_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=whole, animations="disabled")

    def overflow_px(self) -> int:
        """By how much the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@contextmanager
def visiting(browser: Any, address: str, *, phone: bool = False, dark: bool = False, **options: Any) -> Iterator[Visit]:
    """A fresh profile of the browser with one page; at the end it must have had no error and asked no other host."""
    context = browser.new_context(
        viewport=PHONE if phone else DESKTOP,
        is_mobile=phone,
        has_touch=phone,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        **options,
    )
    try:
        visit = Visit(context.new_page(), address)
        yield visit
        assert visit.errors == [], "errors in the console"
        assert visit.foreign == [], "requests that leave the host"
    finally:
        context.close()


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an app that is served from a thread, on a free port."""
    listening = socket.create_server(("127.0.0.1", 0))
    # As rubberband.api.app.serving does: uvicorn writes head and body of an answer apart.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE_S)
        listening.close()
