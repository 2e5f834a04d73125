"""Images of one's own: when they are the same, that runs use them, what they cost, and how they are deleted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from rubberband.cli import app
from rubberband.cloud.aws import boot, calls, cleanup, images
from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import NodeStart
from rubberband.cloud.aws.client import type_facts
from rubberband.cloud.aws.extras import side_costs
from rubberband.cloud.aws.images import builder_type, built_image, delete_image, image_key
from rubberband.cloud.aws.installing import what_to_install
from rubberband.cloud.aws.quotes import side_facts
from rubberband.cloud.aws.s3 import Packages
from rubberband.cloud.catalogue import table_of
from rubberband.cloud.clock import Waiting
from rubberband.spec.resources import Aws, Resources
from tests.ec2 import FakeCall, Fault
from tests.ec2.faults import FakeError
from tests.harness.crash_images import TYPE, BuildWorld, ImagePoint

START = NodeStart(instances=("i-001",), head_address="10.0.0.1:1", gpus=1, lease_s=600.0, lifetime_s=3600.0)


@pytest.fixture
def world(off_ec2: Path, tmp_path: Path) -> BuildWorld:
    return BuildWorld(tmp_path, ImagePoint(kill_at=-1))


def user_data(world: BuildWorld) -> tuple[str, str]:
    """The image that an instance boots now, and its script."""
    machines = resolve(world.session, world.words.aws, TYPE, checkpoints=world.words.checkpoints, place=world.place)
    return machines.image, machines.user_data(START)


@pytest.mark.long
def test_a_run_boots_the_image_once_it_is_built_and_installs_its_own_package_alone(world: BuildWorld) -> None:
    before, plain = user_data(world)
    built = world.build()
    after, script = user_data(world)
    assert (before != built.image_id, after) == (True, built.image_id)
    assert "updating the environment of the image" not in plain
    assert "updating the environment of the image" in script
    assert built.usd_per_month("us-east-1") == pytest.approx(75 * 0.05)
    again = world.build()
    assert again.image_id == built.image_id
    assert len([one for one in world.fake.instances if one.tags["rubberband:role"] == "builder"]) == 1


def test_the_key_covers_the_environment_and_not_the_code(world: BuildWorld) -> None:
    facts = type_facts(world.session, TYPE)
    installed = what_to_install(Packages(world.session, world.words.checkpoints), world.words.aws)
    key = image_key(world.words.aws, installed, facts)
    code = [word.replace("rubberband_tune-", "rubberband_tune-9") for word in installed.requirements]
    assert image_key(world.words.aws, replace(installed, requirements=tuple(code)), facts) == key
    others = [
        image_key(Aws(setup=["true"]), installed, facts),
        image_key(Aws(image="ami-1"), installed, facts),
        image_key(world.words.aws, replace(installed, python="3.12"), facts),
        image_key(world.words.aws, replace(installed, requirements=("torch", *installed.requirements)), facts),
        image_key(world.words.aws, replace(installed, constraints="s3://b/c.txt#sha256=0"), facts),
        image_key(world.words.aws, installed, replace(facts, gpu="T4")),
    ]
    assert len({key, *others}) == len(others) + 1


def test_a_builder_that_fails_says_why_and_does_not_stay(world: BuildWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "BOOT_S", 30.0)
    monkeypatch.setattr(images, "LEASE_S", 30.0)
    with pytest.raises(Exception, match=r"the builder i-\w+ ended before the image was made"):
        world.build()
    assert not world.fake.living
    assert world.own() == []


def test_a_builder_that_never_boots_and_lost_its_driver_is_ended_by_aws(world: BuildWorld) -> None:
    world.fake.world.boot_s = math.inf

    def dies(call: FakeCall) -> Fault | None:
        return Fault(error=KeyboardInterrupt()) if call.operation in ("GetObject", "TerminateInstances") else None

    world.fake.fault = lambda call: dies(call) if world.fake.living else None
    with pytest.raises(KeyboardInterrupt):
        world.build()
    assert len(world.fake.living) == 1
    world.sleep(images.LEASE_S + images.BOOT_S + 1000.0)
    assert not world.fake.living


def test_an_image_is_deleted_with_its_snapshots_also_after_a_crash_between_the_two(world: BuildWorld) -> None:
    key = world.build().key

    def crash(call: FakeCall) -> Fault | None:
        refused = FakeError("InternalError", "no", 500)
        return Fault(error=refused) if call.operation == "DeleteSnapshot" else None

    world.fake.fault = crash
    with pytest.raises(ClientError):
        delete_image(world.session, "rubberband", key)
    assert (world.own(), len(world.fake.world.snapshots)) == ([], 1)
    world.fake.fault = None
    assert len(delete_image(world.session, "rubberband", key)) == 1
    assert not world.fake.world.snapshots
    assert delete_image(world.session, "rubberband", key) == ()


def test_an_image_that_is_being_made_is_not_booted(world: BuildWorld) -> None:
    world.build()
    made = world.own()[0]
    world.fake.world.images[made.image_id] = replace(made, available_at=world.now + 60.0)
    installed = what_to_install(Packages(world.session, world.words.checkpoints), world.words.aws)
    facts = type_facts(world.session, TYPE)
    assert built_image(world.session, world.words.aws, installed, facts) is None
    booted, _ = user_data(world)
    assert booted != made.image_id
    asked = {"InstanceType": TYPE, "MinCount": 1, "MaxCount": 1}
    with pytest.raises(ClientError, match=r"InvalidAMIID\.Unavailable.* is pending, and cannot be run"):
        world.fake.session("admin").client("ec2").run_instances(ImageId=made.image_id, **asked)
    world.sleep(61.0)
    found = built_image(world.session, world.words.aws, installed, facts)
    assert found is not None
    assert found.root_gb == 75


def test_with_a_built_image_nothing_is_installed_through_a_nat_gateway(world: BuildWorld) -> None:
    subnets = world.fake.world.subnets
    subnets.update({name: replace(one, public=False) for name, one in subnets.items()})
    objects = dict(world.fake.world.buckets[world.bucket])
    before = side_facts(world.session, world.words, TYPE, world.place)
    assert world.fake.world.buckets[world.bucket] == objects, "a look"
    world.build()
    after = side_facts(world.session, world.words, TYPE, world.place)
    assert (before.nat, before.installed) == (True, True)
    assert after == replace(before, installed=False)
    lines = {cost.line for cost in side_costs(world.words, after, gpus=True)}
    assert "root volumes" in lines
    assert "NAT gateway (estimated)" not in lines


def test_down_names_the_images_that_stay(world: BuildWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    built = world.build()
    monkeypatch.setattr(calls, "open_aws", lambda region: world.session)
    monkeypatch.setattr(cleanup, "_LOOK_S", 0.0)
    command = ["cloud", "down", "--region", "us-east-1"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert (
        f"kept image {built.key} ({built.image_id}), which costs up to 3.75 USD/month until "
        f"`rubberband cloud image delete {built.key} --region us-east-1 --owner rubberband`" in said.output
    )
    world.fake.fault = lambda call: Fault.throttled() if call.operation == "DescribeImages" else None
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert "whether images of owner rubberband are left is not known" in said.output
    world.fake.fault = None
    delete_image(world.session, "rubberband", built.key)
    assert "kept image" not in CliRunner().invoke(app, command).output


def test_the_builder_is_the_cheapest_type_with_the_same_gpus() -> None:
    table = table_of(Resources())
    assert builder_type(table, "us-east-1", "g5.48xlarge") == "g5.xlarge"
    assert builder_type(table, "us-east-1", "g4dn.12xlarge") == "g4dn.xlarge"
    assert builder_type(table, "us-east-1", "m7i.large") == "m7i.large"


def test_images_from_the_command_line_and_a_snapshot_that_a_deletion_left(
    world: BuildWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*words: str) -> str:
        result = CliRunner().invoke(app, ["cloud", "image", *words, "--region", "us-east-1"])
        assert result.exit_code == 0, result.output
        return result.output

    monkeypatch.setattr(calls, "open_aws", lambda region: world.session)
    for is_left in (False, True):
        built = world.build()
        (snapshot,) = built.snapshots
        if is_left:
            world.session.client("ec2").deregister_image(ImageId=built.image_id)
        listed = said("list")
        assert (f"{built.key}  {snapshot}  deleted" if is_left else built.key) in listed
        assert "75 GB, up to 3.75 USD/month" in listed
        assert (f"deleted {snapshot}" if is_left else built.image_id) in said("delete", built.key)
        assert "has no images" in said("list")


def test_an_image_needs_a_bucket_and_something_to_install(world: BuildWorld) -> None:
    assert images.default_parameter(type_facts(world.session, TYPE)).startswith("/aws/service/deeplearning")
    machines = boot.resolve(world.session, Aws(install="none"), TYPE, place=world.place, builds=True)
    with pytest.raises(Exception, match=r"resources\.checkpoints: a builder reports through the bucket"):
        images.Build(world.session, machines, TYPE, "k", None, Waiting())
