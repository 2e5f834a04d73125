"""How heavy and how quick is the page of an experiment with many trials?

Run: python -m tests.bench.bench_pages [TRIALS ...] (60, 2000 and 20000 without). Serves virtual runs of `sha`, each
finished and half done, by a process of its own, and opens their pages in Chromium. Prints figures and asserts none:
`page_kb` and `all_kb` were sent for the page and for all of it, `paint_s` is the first paint, `charts_s` the time until
the charts in view are drawn, `longest_s` the longest task, `walked_s` the same after a walk to the end of it, then
`shift` (of the layout), `nodes`, and `page_mb`, the memory that the page's process has to itself. `cpu_s` is the
server's CPU time for one look of a page that is open.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from rubberband.executor import ExperimentFolder
from tests.builders.browser import chromium
from tests.builders.journalled_runs import Recorded, recorded, words
from tests.builders.server_process import serving

_WATCH = """
    window.seen = { longest: 0, shift: 0 };
    const watch = (type, each) =>
        new PerformanceObserver((list) => list.getEntries().forEach(each)).observe({ type, buffered: true });
    watch("longtask", (task) => { seen.longest = Math.max(seen.longest, task.duration); });
    watch("layout-shift", (shift) => { if (!shift.hadRecentInput) seen.shift += shift.value; });
"""
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
_IN_VIEW = """() => {
    const inView = [...document.querySelectorAll(".chart")].filter((chart) => {
        const box = chart.getBoundingClientRect();
        return box.height > 0 && box.top < innerHeight && box.bottom > 0;
    });
    return inView.length > 0 && inView.every((chart) => chart.querySelector(".main-svg"));
}"""
_NODES = "document.getElementsByTagName('*').length"
_SCREEN = {"width": 1440, "height": 900}
_PATIENCE_MS = 120_000
_LOOKS = 3


def run_of(trials: int) -> Recorded:
    """A run of `sha` that promotes a third at each SYNC."""
    scheduler = {"type": "sha", "num_samples": trials, "grace_period": 1, "max_t": 27, "reduction_factor": 3}
    said = words(
        name=f"trials-{trials}",
        search={"scheduler": scheduler},
        constraints={"deadline": f"{max(1, trials // 1000)}h", "max_cost": 1e5},
        resources={"max_instances": 40},
    )
    return recorded(said)


def looked(browser: Any, address: str, name: str) -> dict[str, float]:
    """The figures of one page, from a cold cache."""
    context = browser.new_context(viewport=_SCREEN)
    context.set_default_timeout(_PATIENCE_MS)
    context.add_init_script(_WATCH)
    page = context.new_page()
    sent: dict[str, float] = {}
    network = context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.responseReceived", lambda it: sent.setdefault(it["requestId"], 0.0))
    network.on("Network.loadingFinished", lambda it: sent.__setitem__(it["requestId"], it["encodedDataLength"]))
    began = time.perf_counter()
    page.goto(f"{address}/experiments/{name}", wait_until="commit")
    page.wait_for_load_state("load")
    own = page.evaluate("performance.getEntriesByType('navigation')[0].transferSize")
    page.locator("section.figure:visible").first.scroll_into_view_if_needed()
    page.wait_for_function(_IN_VIEW)
    charts_s = time.perf_counter() - began
    page.wait_for_timeout(6000)  # a look of a page that runs is every five seconds
    found = {"page_kb": own / 1e3, "paint_s": page.evaluate(_PAINT) / 1e3, "charts_s": charts_s}
    found |= {"longest_s": page.evaluate("seen.longest") / 1e3}
    for _ in range(12):
        page.mouse.wheel(0, 700)
        page.wait_for_timeout(400)
    found |= {"walked_s": page.evaluate("seen.longest") / 1e3, "shift": page.evaluate("seen.shift")}
    found |= {"nodes": page.evaluate(_NODES), "all_kb": sum(sent.values()) / 1e3}
    found |= {"page_mb": _memory_mb()}
    context.close()
    return found


def _memory_mb() -> float:
    """Memory that the largest process of a page has to itself."""
    pages = [one for one in psutil.Process().children(recursive=True) if "--type=renderer" in one.cmdline()]
    return max(one.memory_full_info().uss for one in pages) / 1e6


def cpu_per_look_s(address: str, name: str, pid: int) -> float:
    """CPU time of the server for what an open page asks at one look."""
    server = psutil.Process(pid)
    tags: dict[str, str] = {}
    accept = {"Accept-Encoding": "gzip"}

    def ask(path: str) -> httpx.Response:
        answer = httpx.get(address + path, headers=accept | {"If-None-Match": tags.get(path, "")}, timeout=300)
        tags[path] = answer.headers.get("etag", "")
        return answer

    def look() -> None:
        ask(f"/fragments/experiments/{name}")
        ask(f"/experiments/{name}/figures/curves")

    look()
    before = sum(server.cpu_times()[:2])
    for _ in range(_LOOKS):
        look()
    return (sum(server.cpu_times()[:2]) - before) / _LOOKS


def main() -> None:
    """Print a row for each number of trials, finished and running."""
    sizes = [int(word) for word in sys.argv[1:]] or [60, 2000, 20000]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        names = [name for trials in sizes for name in _laid(home, trials, stack)]
        server = stack.enter_context(serving(home))
        browser = stack.enter_context(chromium())
        for name in names:
            _settled(server.address, name)
            found = looked(browser, server.address, name)
            found["cpu_s"] = cpu_per_look_s(server.address, name, server.process.pid)
            print(f"{name:22}", *(f"{what} {figure:.3g}" for what, figure in found.items()), sep="  ", flush=True)


def _laid(home: Path, trials: int, stack: ExitStack) -> list[str]:
    run = run_of(trials)
    run.put(home)
    running = run.named(f"{run.name}-running")
    folder: ExperimentFolder = running.put(home, len(run.events) // 2)
    stack.enter_context(folder.driving())
    return [run.name, running.name]


def _settled(address: str, name: str) -> None:
    state = "running" if name.endswith("-running") else "done"
    deadline = time.monotonic() + _PATIENCE_MS / 1e3
    while httpx.get(f"{address}/v1/experiments/{name}", timeout=300).json().get("state") != state:
        assert time.monotonic() < deadline, f"{name} is not {state}"
        time.sleep(0.5)


if __name__ == "__main__":
    main()
