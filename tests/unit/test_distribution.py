"""No text installs the project that is called `rubberband` on the package index, or takes it for this one."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.installation import DISTRIBUTION, install_hint

ROOT = Path(__file__).parents[2]
OTHER = "rubberband"
"""Planted lines are put together from it, so that this file has none of them."""

_BINARY = {".png", ".ico", ".gz", ".zip", ".whl", ".woff2"}
_REQUIREMENT = rf"(?<![\w./-]){OTHER}\s*(\[[a-z][a-z, ]*\]|(===?|>=|<=|~=|!=)\s*\d|@\s*(git\+|https?:|file:|s3:))"
_INSTALLED = r"\b(?:pip3?|pipx|uvx?|poetry|pdm|conda)\s+((?:install|add|download|inject|run|tool|-)(?!s)[^&|;`]*)"
_NAMED = rf"(?:^|[\s'\"=]){OTHER}(?:[\s'\",)]|\.?$)"
_LOOKED_UP = rf"\b(version|distribution|requires|files|metadata)\(\s*['\"]{OTHER}['\"]"
_CALLED = rf"^\s*(name|Name|Requires-Dist)\s*[:=]\s*['\"]?{OTHER}['\"]?\s*($|[\[;(])"
_FILE = rf"(?<![\w.-]){OTHER}-\d+(\.\d+)*[\w.+]*(-py\d|\.tar\.gz|\.dist-info|\.whl)"
_LISTED = rf"^\s*(-\s*)?{OTHER}\s*($|[\[=<>~!;#@])"


def lines_that_name_the_other(name: str, text: str) -> list[str]:
    """The lines of a file that install, require or look up the other project."""
    a_list = re.match(r"(requirements|constraints|environment)", Path(name).name)
    return [f"{name}: {line.strip()}" for line in text.splitlines() if _names_the_other(line, a_list is not None)]


def _names_the_other(line: str, in_a_list: bool) -> bool:
    if any(re.search(each, line) for each in (_REQUIREMENT, _LOOKED_UP, _CALLED, _FILE)):
        return True
    if any(re.search(_NAMED, words) for words in re.findall(_INSTALLED, line)):
        return True
    return in_a_list and re.search(_LISTED, line) is not None


def _names() -> Iterator[str]:
    """The files of the project; a source distribution has no git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        yield from listed.stdout.rstrip("\0").split("\0")
        return
    for folder, folders, files in os.walk(ROOT):
        generated = {one for one in folders if one.startswith((".", "__")) or one.endswith(".egg-info")}
        folders[:] = [one for one in folders if one not in generated and not Path(folder, one, "pyvenv.cfg").exists()]
        yield from (str(Path(folder, one).relative_to(ROOT)) for one in files)


def test_no_text_of_the_project_names_the_other_distribution() -> None:
    paths = [ROOT / name for name in _names() if Path(name).suffix not in _BINARY]
    texts = {str(path.relative_to(ROOT)): path for path in paths if path.is_file()}

    assert {"README.md", "pyproject.toml", "cloud/aws/boot.sh", "examples/digits-aws.yaml", ".ci/run"} <= texts.keys()
    assert not [
        line
        for name, path in texts.items()
        for line in lines_that_name_the_other(name, path.read_text(encoding="utf-8", errors="replace"))
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("README.md", f"Run `pip install {OTHER}`."),
        ("README.md", f"pip install '{OTHER}[aws]' first"),
        ("README.md", f"    python -m pip install -q --upgrade scipy {OTHER}"),
        ("README.md", f"uv add {OTHER}"),
        ("README.md", f"pipx install {OTHER}"),
        ("README.md", f"uvx --from {OTHER} tune"),
        ("cloud/aws/boot.sh", f'    uv pip install --quiet "{OTHER}"'),
        ("a.py", f'    raise InputError("install {OTHER}[ray], or plotly itself")'),
        ("a.py", f'own = f"{OTHER}[ray,aws]=={{version}}"'),
        ("a.py", f'importlib.metadata.version("{OTHER}")'),
        ("a.py", f"metadata.distribution('{OTHER}')"),
        ("a.sh", f"cp dist/{OTHER}-0.1.0-py3-none-any.whl ."),
        ("pyproject.toml", f'name = "{OTHER}"'),
        ("pyproject.toml", f'test = ["{OTHER}>=0.1"]'),
        ("experiment.yaml", f"install: {OTHER}==0.1.0"),
        ("experiment.yaml", f"install: '{OTHER} @ https://example.org/a.whl'"),
        ("docs/requirements.txt", OTHER),
        ("environment.yml", f"  - {OTHER}"),
    ],
)
def test_a_line_that_names_the_other_distribution_is_found(name: str, line: str) -> None:
    assert lines_that_name_the_other(name, f"first\n{line}\n") == [f"{name}: {line.strip()}"]
    assert not lines_that_name_the_other(name, line.replace(OTHER, DISTRIBUTION))


@pytest.mark.parametrize(
    "line",
    [
        f"pip install -c constraints.txt -e '.[examples]' && {OTHER} run examples/digits.yaml",
        f"pip install -e . and then `{OTHER} run`",
        f"import {OTHER}.cloud",
        f'prog == "{OTHER}"',
        f"s3://{OTHER}-fake-checkpoints/digits",
    ],
)
def test_the_import_and_the_command_are_ours(line: str) -> None:
    assert not lines_that_name_the_other("README.md", line)


def test_the_project_and_its_hints_have_one_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["name"] == DISTRIBUTION
    assert list(project["scripts"]) == [OTHER]
    assert install_hint("ray", "aws") == f"pip install '{DISTRIBUTION}[ray,aws]'"
