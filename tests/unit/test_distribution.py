"""No text installs the project that is called `rubberband` on the package index, or takes it for this one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rubberband.installation import DISTRIBUTION, install_hint
from tests.builders.documents import kept_files

ROOT = Path(__file__).parents[2]
OTHER = "rubberband"
"""Planted lines are put together from it, so that this file has none of them."""

_REQUIREMENT = rf"(?<![\w./-]){OTHER}\s*(\[[a-z][a-z, ]*\]|(===?|>=|<=|~=|!=)\s*\d|@\s*(git\+|https?:|file:|s3:))"
_INSTALLED = rf"\b(?:pip3?|pipx|uvx?)\s+(?:install|add|run|tool|-)(?!s)[^&|;`]*[\s'\"=]{OTHER}(?:[\s'\",)`]|\.?$)"
_LOOKED_UP = rf"\b(version|distribution|requires|files|metadata)\(\s*['\"]{OTHER}['\"]"
_FILE = rf"(?<![\w.-]){OTHER}-\d+(\.\d+)*[\w.+]*(-py\d|\.tar\.gz|\.dist-info|\.whl)"


def names_the_other(line: str) -> bool:
    """Return whether a line installs, requires or looks up the other project."""
    return any(re.search(each, line) for each in (_REQUIREMENT, _INSTALLED, _LOOKED_UP, _FILE))


def test_no_text_of_the_project_names_the_other_distribution() -> None:
    folders = ("rubberband", "planner", "executor", "cloud", "api", "examples", "docs", ".ci")
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in kept_files(ROOT / folder))]
    texts = {path: path.read_text(encoding="utf-8", errors="ignore") for path in paths if path.is_file()}
    assert {ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "cloud/aws/boot.sh", ROOT / ".ci/run"} <= texts.keys()
    assert [(path, line) for path, text in texts.items() for line in text.splitlines() if names_the_other(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        f"Run `pip install {OTHER}`.",
        f"pip install '{OTHER}[aws]' first",
        f"uvx --from {OTHER} tune",
        f'own = f"{OTHER}[ray,aws]=={{version}}"',
        f'importlib.metadata.version("{OTHER}")',
        f"cp dist/{OTHER}-0.1.0-py3-none-any.whl .",
        f"install: '{OTHER} @ https://example.org/a.whl'",
    ],
)
def test_a_line_that_names_the_other_distribution_is_found(line: str) -> None:
    assert names_the_other(line)
    assert not names_the_other(line.replace(OTHER, DISTRIBUTION))
    assert not names_the_other(f"pip install -c constraints.txt -e '.[examples]' && {OTHER} run examples/digits.yaml")


def test_the_project_and_its_hints_have_one_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["name"] == DISTRIBUTION
    assert list(project["scripts"]) == [OTHER]
    assert install_hint("ray", "aws") == f"pip install '{DISTRIBUTION}[ray,aws]'"
