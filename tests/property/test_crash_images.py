"""Wherever the driver of an image build dies, or whatever a call meets: one image, no builder left, no double build."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from rubberband.cloud.aws import images
from tests.harness import replay_command
from tests.harness.crash_cases import WEATHERS, parse
from tests.harness.crash_images import ImagePoint, calls_of_a_build, image_points, quick, run_image_point

SOME = 150


@pytest.fixture
def folder() -> Iterator[Path]:
    logging.disable(logging.ERROR)
    with quick() as here:
        yield here
    logging.disable(logging.NOTSET)


def failures(folder: Path, points: list[ImagePoint]) -> list[str]:
    """One line for each point that ends as it must not, with the command that replays it."""
    found = [run_image_point(folder, point) for point in points]
    return [f"{replay_command('crash_images', str(one.point))}  # {'; '.join(one.wrong)}" for one in found if one.wrong]


@pytest.mark.long
def test_at_some_points(folder: Path) -> None:
    every = list(image_points())
    assert {point.weather for point in every} == set(WEATHERS)
    assert all(parse(str(point), ImagePoint) == point for point in every[::100])
    found = failures(folder, Random(0).sample(every, SOME))
    assert not found, "\n".join(found)


def test_a_builder_that_was_bought_in_the_second_zone_is_not_bought_again_in_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver dies before it knows, and the first zone has capacity again before EC2 shows the builder."""
    asked = calls_of_a_build().index("RunInstances")  # the second zone is written down, then asked
    note = 2  # calls: whose the bucket is, and the zone
    next_zone = note + 2  # and which builders there were, and the request
    point = ImagePoint(kill_at=asked + next_zone, after=True, weather="no-capacity", offset=-next_zone, hidden_s=290.0)
    assert run_image_point(folder, point).died_in == ["RunInstances"]
    assert failures(folder, [point]) == []
    monkeypatch.setattr(images.Build, "_note_zone", lambda *_: None)
    forgetful = replace(point, kill_at=asked + 2 - note, offset=-2)  # two notes less
    assert run_image_point(folder, forgetful).died_in == ["RunInstances"]
    assert "was bought while" in failures(folder, [forgetful])[0]
