"""The packages do not grow unnoticed: each folder has a ceiling of lines.

A commit that raises one says in its message what users got for it; one that shortens a folder lowers it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CEILINGS = yaml.safe_load(Path(__file__).with_name("tables").joinpath("ceilings.yaml").read_text())


def lines_of(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


@pytest.mark.parametrize("folder", CEILINGS)
def test_a_folder_is_below_its_ceiling(folder: str) -> None:
    assert lines_of(folder) <= CEILINGS[folder], "shorten it, or say in the commit what users get for the lines"


def test_every_folder_of_the_packages_has_a_ceiling() -> None:
    tops = ("rubberband", "planner", "executor", "cloud", "api")
    inside = (path.relative_to(ROOT) for top in tops for path in (ROOT / top).iterdir() if path.is_dir())
    found = {str(path) for path in inside if not (ROOT / path).is_symlink() and any((ROOT / path).glob("*.py"))}
    assert {*tops, *found} == {*CEILINGS}
