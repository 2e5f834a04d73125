"""Wherever the driver of an image build dies, or whatever a call meets: one image, no builder left, no double build."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubberband.cloud.aws import resolving, wheel
from rubberband.cloud.aws.user_data import Installation
from rubberband.cloud.aws_fake import images
from tests.property import crash_images
from tests.property.crash_images import WEATHERS, ImagePoint, calls_of_a_build, left_alone, tell


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    # What is installed does not matter here, and to find it out takes a second.
    installed = Installation(python="3.11", requirements=("scikit-learn", "ray==2.9.0"))
    for module in (resolving, crash_images):
        monkeypatch.setattr(module, "what_to_install", lambda *_: installed)
    monkeypatch.setattr(wheel, "needs", list)
    monkeypatch.setattr(images, "PENDING_S", 30.0)


@pytest.fixture
def calls(tmp_path: Path) -> int:
    return calls_of_a_build(tmp_path)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("hidden_s", [0.0, 60.0])
def test_killed_at_every_call(tmp_path: Path, calls: int, after: bool, hidden_s: float) -> None:
    points = [
        ImagePoint(at, after=after, hidden_s=hidden_s, gap_s=gap_s) for at in range(calls) for gap_s in (0.0, 900.0)
    ]
    found = {point: wrong for point in points if (wrong := list(tell(tmp_path, point)))}
    assert not found


@pytest.mark.parametrize("weather", [name for name in WEATHERS if name != "ok"])
def test_bad_weather_at_every_call(tmp_path: Path, calls: int, weather: str) -> None:
    found = {at: wrong for at in range(calls) if (wrong := list(tell(tmp_path, ImagePoint(at, weather=weather))))}
    assert not found


def test_a_builder_that_nobody_comes_back_for_ends_itself(tmp_path: Path, calls: int) -> None:
    found = {
        (at, after): wrong
        for at in range(calls)
        for after in (False, True)
        if (wrong := list(left_alone(tmp_path, ImagePoint(at, after=after))))
    }
    assert not found
