"""Image builds whose driver is killed at a call, or meets bad weather there; what must hold in the end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rubberband.cloud.aws.images import type_facts
from rubberband.cloud.aws.own_images import Build, OwnImage, Passing, image_key
from rubberband.cloud.aws.resolving import in_one_line, resolve, what_to_install
from rubberband.cloud.aws.user_data import boot_times
from rubberband.cloud.aws_fake import FakeCall, Fault
from rubberband.errors import RubberbandError
from tests.builders.aws_account import Account
from tests.property.crash_world import Killed

TYPE = "g5.xlarge"
INSTALLS_S = 40.0
STEP_S = 5.0
WEATHERS = {
    "ok": None,
    "throttled": Fault.throttled(),
    "lost": Fault.timeout(took_effect=True),
    "late": Fault.timeout(took_effect=False),
}


@dataclass(frozen=True, slots=True)
class ImagePoint:
    """One story: what happens at which call, counted from the first of the build."""

    kill_at: int
    after: bool = False
    """Whether the call took effect."""
    weather: str = "ok"
    hidden_s: float = 0.0
    """Until EC2 shows what was launched."""
    gap_s: float = 0.0
    """From the death until the next driver."""


class BuildWorld(Account):
    """An account, in which builders really install."""

    def __init__(self, folder: Path, point: ImagePoint) -> None:
        super().__init__(reads=boot_times, visible_after_s=point.hidden_s)
        self.folder, self.point, self.first = folder, point, 0
        self.kills_left, self.met, self.dead = 1, 0, False
        self.words = self.resources(aws={"install": "scikit-learn"})
        self.fake.fault = self._fault

    def _fault(self, call: FakeCall) -> Fault | None:
        if self.dead:  # no call of what is dead is made
            return Fault(error=Killed())
        at = call.index - self.first
        weather = WEATHERS[self.point.weather]
        if not self.first or at != self.point.kill_at or call.service != "ec2":
            return None
        if weather is not None and not self.met:
            self.met = 1
            return weather
        if weather is None and self.kills_left:
            self.kills_left, self.dead = 0, True
            return replace(Fault(), error=Killed(), took_effect=self.point.after)
        return None

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
        """One driver."""
        self.dead = False
        aws, checkpoints = self.words.aws, self.words.checkpoints
        installed = what_to_install(self.session, aws, checkpoints)
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
        self.first = self.first or len(self.fake.calls)
        passing = Passing(clock=lambda: self.now, sleep=self.sleep, announce=lambda line: None)
        return Build(self.session, machines, TYPE, key, checkpoints, passing).run()

    def own(self) -> list[str]:
        """Ids of the images that were made."""
        return [image.image_id for image in self.fake.world.images.values() if image.owner == "self"]


def tell(folder: Path, point: ImagePoint) -> Iterator[str]:
    """What is wrong in the end; nothing if all is well."""
    world = BuildWorld(folder, point)
    image: OwnImage | None = None
    for _ in range(4):
        try:
            with in_one_line():
                image = world.build()
        except Killed:
            world.sleep(point.gap_s)
        except RubberbandError:
            world.sleep(60.0)
        else:
            break
    if image is None:
        yield "no image in four attempts"
    if len(world.own()) != 1 or len(world.fake.world.snapshots) != 1:
        yield f"{len(world.own())} images, {len(world.fake.world.snapshots)} snapshots"
    world.sleep(600.0)
    if world.fake.living:
        yield f"{len(world.fake.living)} builders live on"
    builders = [one for one in world.fake.instances if one.tags.get("rubberband:role") == "builder"]
    allowed = 1 if point.gap_s < INSTALLS_S else 2
    if len(builders) > allowed:
        yield f"{len(builders)} builders were launched"


def left_alone(folder: Path, point: ImagePoint) -> Iterator[str]:
    """The same where nobody comes back: the builder ends itself, by its bound at the latest."""
    world = BuildWorld(folder, point)
    try:
        world.build()
    except Killed:
        world.sleep(3600.0)
    if world.fake.living:
        yield "a builder lives on"
    if any(line.billed_s > 3000.0 for line in world.fake.bill().lines):
        yield "a builder was billed for longer than its bound"


def calls_of_a_build(folder: Path) -> int:
    """How many there are, when nothing happens."""
    world = BuildWorld(folder, ImagePoint(-1))
    world.build()
    return len(world.fake.calls) - world.first
