"""The site of the documentation, built and looked at in a browser: copying, keys on a phone, and searching."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.staticfiles import StaticFiles

from tests.builders.browser import Visit, chromium, served, visiting
from tests.builders.documents import PAGES, ROOT, blocks, commands

pytest.importorskip("mkdocs", reason="the site needs MkDocs; pip install -e '.[docs]'")
pytestmark = pytest.mark.long
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as CI builds it."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    app = Starlette()
    app.mount("/", StaticFiles(directory=site, html=True))
    with served(app) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


_COPIED = """() => {
    window.copied = [];
    document.addEventListener("copy", () => window.copied.push(document.activeElement.value), true);
}"""


def _copied(visit: Visit, page: str) -> list[str]:
    """The text that each button of a page copies."""
    shown = visit.open(f"/{page}.html")
    shown.evaluate(_COPIED)
    for button in shown.locator("[data-clipboard-target]").all():
        button.evaluate("button => button.click()")
    return [str(text) for text in shown.evaluate("window.copied")]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.is_relative_to(DOCS) and list(blocks(page))], ids=lambda page: page.stem
)
def test_a_button_copies_the_commands_alone(page: Path, address: str, browser: Any) -> None:
    wanted = [
        [each.words for each in commands(block.text)] if block.language == "console" else block.text.rstrip()
        for block in blocks(page)
    ]
    with visiting(browser, address) as visit:
        copied = _copied(visit, str(page.relative_to(DOCS).with_suffix("")))
    assert len(copied) == len(wanted)
    for text, expected in zip(copied, wanted, strict=True):
        if isinstance(expected, list):
            text = text.replace("\\\n", "")
            assert [line.rstrip() for line in text.splitlines() if line.strip()] == expected
        else:
            assert text == expected


def test_a_button_of_any_page_copies_neither_prompts_nor_output(site: Path, address: str, browser: Any) -> None:
    copied = 0
    for file in sorted(site.rglob("*.html")):
        page = str(file.relative_to(site).with_suffix(""))
        with visiting(browser, address) as visit:
            for text in _copied(visit, page):
                prompts = [line for line in text.split("\n") if line.startswith(("$ ", ">>> ", "... "))]
                assert prompts == [], f"{page}: {text}"
                assert text.strip(), page
                copied += 1
    assert copied > 300


def test_examples_of_commands_and_of_python_are_copied_without_prompts(address: str, browser: Any) -> None:
    with visiting(browser, address) as visit:
        shown = _copied(visit, "reference/cli")
        assert len(shown) > 40
        assert all(line.startswith("rubberband ") for text in shown for line in text.split("\n"))
        assert not [line for text in _copied(visit, "reference/python") for line in text.split("\n") if ">>>" in line]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("docker", "faq"),
        ("slurm", "clusters"),
        ("kubernetes", "faq"),
        ("windows", "faq"),
        ("sagemaker", "sagemaker"),
        ("cite", "citing"),
        ("upgrade", "upgrading"),
        ("no plan keeps", "troubleshooting"),
    ],
)
def test_the_search_finds_the_page_of_a_word(words: str, page: str, address: str, browser: Any) -> None:
    with visiting(browser, address) as visit:
        shown = visit.open("/index.html")
        shown.get_by_role("textbox", name="Search").fill(words)
        shown.locator(f'.md-search-result__link[href*="{page}.html"]').first.wait_for(state="attached")


@pytest.mark.parametrize("page", ["experiment-file", "rest", "cli", "python"])
def test_keys_are_whole_on_a_phone(page: str, address: str, browser: Any) -> None:
    with visiting(browser, address, phone=True) as visit:
        shown = visit.open(f"/reference/{page}.html")
        broken = shown.evaluate(
            """() => [...document.querySelectorAll("td:first-child > code")]
                .filter(key => key.getClientRects().length > 1).map(key => key.textContent)"""
        )
        assert broken == []
        assert visit.overflow_px() <= 0
        visit.shot(f"site-{page}-phone", whole=False)


@pytest.mark.parametrize("path", ["index", "write-a-trial", "reference/experiment-file"])
@pytest.mark.parametrize(("phone", "dark"), [(False, False), (True, True)])
def test_pages_fit_the_window_and_ask_no_other_host(
    path: str, phone: bool, dark: bool, address: str, browser: Any
) -> None:
    with visiting(browser, address, phone=phone, dark=dark) as visit:
        visit.open(f"/{path}.html")
        assert visit.overflow_px() <= 0
        visit.shot(f"site-{path.replace('/', '-')}{'-phone' * phone}{'-dark' * dark}", whole=False)
