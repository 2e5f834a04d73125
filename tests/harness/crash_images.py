"""Image builds whose driver is killed at a call, or meets bad weather there; what must hold in the end."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Literal

import pytest

from rubberband.cloud import wheel
from rubberband.cloud.aws import boot
from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.client import type_facts
from rubberband.cloud.aws.errors import in_one_line
from rubberband.cloud.aws.fleet import VISIBILITY_S
from rubberband.cloud.aws.images import BOOT_S, LEASE_S, Build, OwnImage, delete_image, image_key, listed_images
from rubberband.cloud.aws.installing import Installation, what_to_install
from rubberband.cloud.aws.s3 import Packages
from rubberband.cloud.clock import Waiting
from rubberband.errors import RubberbandError
from tests.builders.aws_account import START_AT, Account, boot_times
from tests.ec2 import FakeCall, Fault, images
from tests.harness.crash_cases import WEATHERS, Death, parse
from tests.harness.crash_world import Killed

TYPE = "g5.xlarge"
INSTALLS_S = 40.0
STEP_S = 5.0
MOST_ATTEMPTS = 60
Then = Literal["resume", "nobody", "delete"]
AFTERWARDS: tuple[Then, ...] = ("resume", "nobody", "delete")
HIDDEN_S = (0.0, 60.0, 290.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePoint(Death):
    """One death of the driver of a build, and what comes afterwards."""

    then: Then = "resume"
    """The user builds again, never comes back, or deletes the image when it is built."""


def image_points(seed: int = 0) -> Iterator[ImagePoint]:
    """Every call of a build and a deletion x before or after x weather x visibility x what comes then."""
    source = Random(f"{seed} images")
    every = itertools.product(range(len(calls_of_a_build())), (False, True), WEATHERS, HIDDEN_S, AFTERWARDS)
    for kill_at, after, weather, hidden_s, then in every:
        yield ImagePoint(
            kill_at=kill_at,
            after=after,
            weather=weather,
            offset=source.choice([-1, -1, 1]),
            lasts=source.choice([1, 1, 1, 3, 30]),
            hidden_s=hidden_s,
            gap_s=source.choice([0.0, 30.0, 900.0]),
            then=then,
            again=source.choice([-1, -1, source.randrange(40)]),
        )


class BuildWorld(Account):
    """An account, in which builders really install."""

    def __init__(self, folder: Path, point: ImagePoint) -> None:
        super().__init__(reads=boot_times, validates=False)
        self.folder, self.point, self.first = folder, point, -1
        self.kill_at, self.kills_after = point.kill_at, point.after
        self.kills_left = (point.kill_at >= 0) + (point.again >= 0)
        self.died_in: list[str] = []
        self.dead = False
        self.log: Callable[[str], None] = lambda line: None
        self.words = self.resources(aws={"install": "scikit-learn"})
        self.fake.fault = self._fault

    def _fault(self, call: FakeCall) -> Fault | None:
        if self.dead:  # no call of what is dead is made
            return Fault(error=Killed())
        if self.first < 0:
            return None
        at, point = call.index - self.first, self.point
        begins_at = point.kill_at + point.offset
        met = WEATHERS[point.weather](call) if begins_at <= at < begins_at + point.lasts else None
        if point.weather == "no-capacity" and call.params.get("ClientToken") in self.fake.world.launched_by_token:
            met = None  # EC2 has what this token bought
        fault = replace(met or Fault(), visible_after_s=point.hidden_s)
        fault = replace(fault, stale_s=min(fault.stale_s, VISIBILITY_S - point.hidden_s))
        if at == self.kill_at and self.kills_left:
            self.kills_left, self.dead = self.kills_left - 1, True
            self.kill_at, self.kills_after = at + 1 + point.again, not self.kills_after
            self.died_in.append(call.operation)
            takes_effect = not self.kills_after and (met is None or met.error is None or met.took_effect)
            fault = replace(fault, error=Killed(), took_effect=takes_effect)
        self.log(f"{self.now - START_AT:8.1f} {at:4} {call.service} {call.operation} {fault.error or ''}")
        return fault

    def sleep(self, seconds: float) -> None:
        """Time passes; a builder that has run for a while says that it is done."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + STEP_S)
            for one in self.fake.living:
                marker = re.search(r"^IMAGE_MARKER=s3://[^/]+/(\S+)$", one.user_data, re.MULTILINE)
                if marker and one.running_at + INSTALLS_S <= self.now < one.running_at + INSTALLS_S + 2 * STEP_S:
                    self.fake.world.buckets[self.bucket][marker[1]] = one.instance_id.encode()

    def build(self) -> OwnImage:
        self.dead = False
        aws, checkpoints = self.words.aws, self.words.checkpoints
        installed = what_to_install(Packages(self.session, checkpoints), aws)
        key = image_key(aws, installed, type_facts(self.session, TYPE))
        machines = resolve(
            self.session,
            aws,
            TYPE,
            checkpoints=checkpoints,
            place=self.place,
            token_path=self.folder / "token",
            sleep=self.sleep,
            builds=True,
        )
        self.first = len(self.fake.calls) if self.first < 0 else self.first
        now = Waiting(clock=lambda: self.now % 1e6, sleep=self.sleep)  # as a clock of elapsed time
        build = Build(
            self.session,
            machines,
            TYPE,
            key,
            checkpoints,
            now,
            announce=lambda line: None,
            guard_role=self.words.aws.guard_role,
            wall_clock=lambda: self.now,
        )
        return build.run()

    def delete(self) -> None:
        """What the user does who needs it no more: delete whatever is listed."""
        self.dead = False
        for key in sorted({image.key for image in listed_images(self.session, self.words.aws.owner)}):
            delete_image(self.session, self.words.aws.owner, key)

    def own(self) -> list[images.Image]:
        return [image for image in self.fake.world.images.values() if image.owner == images.SELF]

    def unlisted(self) -> Iterator[str]:
        """What costs money every month, and `image list` does not show it."""
        fault, self.fake.fault = self.fake.fault, None
        listed = listed_images(self.session, self.words.aws.owner)
        self.fake.fault = fault
        known = {image.image_id for image in listed} | {one for image in listed for one in image.snapshots}
        for one in {*(image.image_id for image in self.own()), *self.fake.world.snapshots} - known:
            yield f"{one} is not listed"


@contextmanager
def quick() -> Iterator[Path]:
    """What is installed does not matter here, and to find it out takes a second; a folder for all stories."""
    installed = Installation(python="3.11", requirements=("scikit-learn", "ray==2.9.0"))
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv("RUBBERBAND_HOME", f"{folder}/home")
        for module in (boot, sys.modules[__name__]):
            patch.setattr(module, "what_to_install", lambda *_: installed)
        patch.setattr(wheel, "needs", list)
        patch.setattr(images, "PENDING_S", 30.0)
        yield Path(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOutcome:
    point: ImagePoint
    ended: str
    instances: int
    """Builders."""
    wrong: Sequence[str]
    died_in: Sequence[str]


def run_image_point(folder: Path, point: ImagePoint, log: Callable[[str], None] = lambda line: None) -> ImageOutcome:
    """Tell a point's story and judge it. `folder`: as `quick` gives it."""
    world = BuildWorld(folder, point)
    world.log = log
    wrong = []
    ended = _attempts(world, world.build, wrong)
    if ended == "done" and point.then == "delete":
        ended = _attempts(world, world.delete, wrong).replace("done", "deleted")
    world.sleep(3600.0)
    wrong += judged(world, ended)
    return ImageOutcome(
        point=point, ended=ended, instances=len(world.fake.instances), wrong=wrong, died_in=world.died_in
    )


def _attempts(world: BuildWorld, attempt: Callable[[], object], wrong: list[str]) -> str:
    for _ in range(MOST_ATTEMPTS):
        try:
            with in_one_line():
                attempt()
        except Killed:
            wrong += world.unlisted()
            if world.point.then == "nobody":
                return "left alone"
            world.sleep(world.point.gap_s)
        except RubberbandError as error:
            world.log(f"told the user: {error}")
            world.sleep(60.0)
        else:
            return "done"
    return "never done"


def judged(world: BuildWorld, ended: str) -> Iterator[str]:
    """What is wrong in the end, an hour after the last driver; nothing if all is well."""
    images_left, snapshots_left = len(world.own()), len(world.fake.world.snapshots)
    if ended == "never done":
        yield f"nothing came of {MOST_ATTEMPTS} attempts"
    expected = {"done": (1, 1), "deleted": (0, 0)}.get(ended, (images_left, images_left))
    if (images_left, snapshots_left) != expected or images_left > 1:
        yield f"{images_left} images, {snapshots_left} snapshots"
    yield from world.unlisted()
    for builder in world.fake.living:
        yield f"the builder {builder.instance_id} lives on"
    if any(line.billed_s > BOOT_S + LEASE_S for line in world.fake.bill().lines):
        yield "a builder was billed for longer than its bound"
    for one, other in itertools.pairwise(world.fake.instances):
        if one.ended_at is None or other.launched_at < one.ended_at:
            yield f"{other.instance_id} was bought while {one.instance_id} lived"
        if any(image.created_at < other.launched_at for image in world.own()):
            yield f"{other.instance_id} was bought though there was an image"


@lru_cache
def calls_of_a_build() -> Sequence[str]:
    """The calls of a build, and of deleting it, when nothing happens."""
    with quick() as folder:
        world = BuildWorld(folder, ImagePoint(kill_at=-1))
        world.build()
        world.delete()
        return world.operations()[world.first :]


def tell(words: str) -> None:
    with quick() as folder:
        outcome = run_image_point(folder, parse(words, ImagePoint), print)
    print(f"{outcome.ended}: {outcome.instances} builders bought")
    for what in outcome.wrong:
        print(f"WRONG: {what}")
