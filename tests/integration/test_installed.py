"""What ships is what is tested: the wheel has every file, runs without a checkout, and is typed for its users."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import tests.builders

ROOT = Path(__file__).parents[2]
LINKED = ("planner", "executor", "cloud", "api")
WALK = """
import importlib, pkgutil, sys
import rubberband
for found in pkgutil.walk_packages(rubberband.__path__, "rubberband."):
    file = importlib.import_module(found.name).__file__
    assert file.startswith(sys.argv[1]), file
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made from the source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("rubberband/")}
    folders = {folder: f"rubberband/{folder}" for folder in LINKED} | {"rubberband": "rubberband"}
    ours = {
        f"{there}/{path.relative_to(ROOT / here).as_posix()}"
        for here, there in folders.items()
        for path in (ROOT / here).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(ROOT / here).parts[0] not in LINKED
    }
    assert packed == ours


def test_every_module_of_the_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "there")
    there = str(tmp_path / "there")
    done = subprocess.run(
        [sys.executable, "-P", "-c", WALK, there],
        env=os.environ | {"PYTHONPATH": there},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_a_type_checker_finds_the_slips_of_a_user(wheel: Path, tmp_path: Path, editable: bool) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv/bin/python")
    what = ["--no-build-isolation", "-e", str(ROOT)] if editable else [str(wheel)]
    # The packages that it needs are those of this process: only rubberband is installed in the user's environment.
    own = next(path for path in sys.path if path.endswith("site-packages"))
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    env = os.environ | {"PYTHONPATH": own} if editable else dict(os.environ)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *what], check=True, env=env, timeout=300)
    for needed in ("pydantic", "pydantic_core", "annotated_types", "typing_extensions.py", "typing_inspection", "rich"):
        (site / needed).symlink_to(Path(own, needed))
    script = tmp_path / "user.py"
    shutil.copy(Path(tests.builders.__file__).with_name("typed_user.py"), script)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    lines = {int(number) for number in re.findall(r"^user\.py:(\d+): error", found.stdout, re.MULTILINE)}
    text = script.read_text(encoding="utf-8").splitlines()
    assert lines == {number for number, line in enumerate(text, 1) if line.endswith("# fault")}, found.stdout
