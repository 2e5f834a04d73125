"""From the words of the file to machines that can be launched, in a fake account; and what they install."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from email.message import Message
from importlib.metadata import PackageMetadata, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

import rubberband
from rubberband.cloud import wheel
from rubberband.cloud.aws import installing, s3
from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import Machines, NodeStart
from rubberband.cloud.aws.installing import canonical, constraints, what_to_install
from rubberband.cloud.aws.joining import fetch_token as fetch_token
from rubberband.cloud.aws.joining import publish_token, read_token, token_parameter
from rubberband.cloud.aws.network import delete_groups, ensure_group, own_place
from rubberband.cloud.aws.preflight import preflight
from rubberband.cloud.aws.s3 import Packages
from rubberband.errors import InputError
from rubberband.spec.resources import Aws
from tests.builders.aws_account import Account, offer
from tests.ec2 import Fault
from tests.ec2.faults import FakeCall


def resolved(account: Account, tmp_path: Path, instance_type: str = "g5.xlarge", **words: Any) -> Machines:
    return resolve(
        account.session,
        Aws(**{"install": "none", **words}),
        instance_type,
        checkpoints=f"s3://{account.bucket}/c",
        place=account.place,
        token_path=tmp_path / "token",
        sleep=account.sleep,
    )


def image(account: Account, machines: Machines) -> str:
    return account.fake.world.images[machines.image].name


@pytest.mark.parametrize(
    ("instance_type", "name"),
    [
        ("g5.xlarge", "Deep Learning base-oss-nvidia-driver-gpu (Ubuntu 22.04) x86_64"),
        ("g5g.xlarge", "Deep Learning base-oss-nvidia-driver-gpu (Ubuntu 22.04) arm64"),
        ("m7i.large", "ubuntu-22.04-amd64-server"),
        ("m7g.large", "ubuntu-22.04-arm64-server"),
    ],
)
def test_the_default_image_is_the_latest_one_that_fits_the_type(
    account: Account, tmp_path: Path, instance_type: str, name: str
) -> None:
    assert image(account, resolved(account, tmp_path, instance_type)) == name


def test_an_image_is_given_by_its_id_or_by_a_parameter(account: Account, tmp_path: Path) -> None:
    parameter = "ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    machines = resolved(account, tmp_path, image=parameter)
    assert "24.04" in image(account, machines)
    assert resolved(account, tmp_path, image=machines.image).image == machines.image


def test_an_image_of_another_architecture_is_refused(account: Account, tmp_path: Path) -> None:
    arm = resolved(account, tmp_path, "m7g.large").image
    with pytest.raises(InputError, match="does not match the architecture 'arm64' of the specified AMI"):
        preflight(
            account.resources(aws={"image": arm}), [offer("g5.xlarge")], session=account.session, place=account.place
        )


def test_gpus_that_the_default_images_driver_does_not_know_are_refused(account: Account, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not support the V100 of p3\.2xlarge"):
        resolved(account, tmp_path, "p3.2xlarge", install="torch")
    resolved(account, tmp_path, "p3.2xlarge", install="torch", image=resolved(account, tmp_path).image)


def test_a_plain_image_gets_room_for_the_packages(account: Account, tmp_path: Path) -> None:
    assert resolved(account, tmp_path, "m7i.large", install="torch").volume_gb == 60
    assert resolved(account, tmp_path, "m7i.large").volume_gb is None
    assert resolved(account, tmp_path, install="torch").volume_gb is None
    assert resolved(account, tmp_path, volume_gb=200).volume_gb == 200


def test_further_volumes_of_an_image_are_known(account: Account, tmp_path: Path) -> None:
    machines = resolved(account, tmp_path)
    assert machines.further_disks == ()
    images = account.fake.world.images
    images[machines.image] = replace(images[machines.image], lasting_disks=("/dev/sdf",))
    assert resolved(account, tmp_path).further_disks == ("/dev/sdf",)


def test_subnets_are_those_of_the_drivers_vpc_its_own_first_where_the_type_is_available(
    account: Account, tmp_path: Path
) -> None:
    machines = resolved(account, tmp_path)
    zones = list(machines.subnets)
    assert zones[0] == account.place.zone
    assert machines.subnets[zones[0]] == account.place.subnet
    assert "us-east-1e" not in zones
    assert {account.fake.world.subnets[one].vpc_id for one in machines.subnets.values()} == {account.vpc}


def test_local_zones_are_not_used(account: Account, tmp_path: Path) -> None:
    world = account.fake.world
    ours = next(one for one in world.subnets.values() if one.zone == world.zones[0])
    boston = replace(ours, subnet_id="subnet-0b05707", zone="us-east-1-bos-1a")
    world.subnets[boston.subnet_id] = boston
    world.zones = (*world.zones, boston.zone)
    assert boston.zone not in resolved(account, tmp_path).subnets
    assert resolved(account, tmp_path, subnets=(boston.subnet_id, ours.subnet_id)).subnets == {
        ours.zone: ours.subnet_id
    }
    with pytest.raises(InputError, match=r"and the subnets are in us-east-1-bos-1a; add a subnet there"):
        resolved(account, tmp_path, subnets=(boston.subnet_id,))


@pytest.mark.parametrize("subnets", [True, False])
def test_a_vpc_on_dedicated_hardware_is_refused(account: Account, tmp_path: Path, subnets: bool) -> None:
    chosen = tuple(resolved(account, tmp_path).subnets.values())
    world = account.fake.world
    world.vpcs[account.vpc] = replace(world.vpcs[account.vpc], tenancy="dedicated")
    with pytest.raises(InputError, match=rf"instances in {account.vpc} are on dedicated hardware"):
        resolved(account, tmp_path, **({"subnets": chosen} if subnets else {}))


@pytest.mark.parametrize(
    ("paid", "text"),
    [
        ({"usage": "RunInstances:0010"}, r"as Red Hat Enterprise Linux \(RunInstances:0010\)"),
        ({"product_codes": ("8s1m4e",)}, r"as a product of AWS Marketplace \(8s1m4e\)"),
    ],
)
def test_an_image_that_is_charged_by_the_hour_is_refused(
    account: Account, tmp_path: Path, paid: dict[str, Any], text: str
) -> None:
    image_id = resolved(account, tmp_path).image
    images = account.fake.world.images
    images[image_id] = replace(images[image_id], **paid)
    with pytest.raises(InputError, match=text):
        resolved(account, tmp_path, image=image_id)
    images[image_id] = replace(images[image_id], usage="RunInstances:00g0", product_codes=())
    resolved(account, tmp_path, image=image_id)


def test_without_a_place_the_default_vpc_is_used_and_with_one_its_own(account: Account) -> None:
    other = account.fake.world.add_vpc()
    place = replace(account.place, vpc=other, subnet="")
    for chosen, vpc in ((None, account.vpc), (place, other)):
        found = resolve(account.session, Aws(install="none"), "g5.xlarge", place=chosen)
        assert {account.fake.world.subnets[one].vpc_id for one in found.subnets.values()} == {vpc}


def test_subnets_are_tried_in_the_order_of_the_file(account: Account, tmp_path: Path) -> None:
    chosen = tuple(reversed(resolved(account, tmp_path).subnets.values()))
    assert tuple(resolved(account, tmp_path, subnets=chosen).subnets.values()) == chosen


def test_subnets_of_two_vpcs_are_refused(account: Account, tmp_path: Path) -> None:
    other = account.fake.world.add_vpc()
    theirs = next(one.subnet_id for one in account.fake.world.subnets.values() if one.vpc_id == other)
    with pytest.raises(InputError, match="several VPCs"):
        resolved(account, tmp_path, subnets=(account.place.subnet, theirs))


def test_a_type_that_no_subnets_zone_has_is_refused_with_the_zones_that_have_it(
    account: Account, tmp_path: Path
) -> None:
    lonely = next(one.subnet_id for one in account.fake.world.subnets.values() if one.zone == "us-east-1e")
    with pytest.raises(InputError, match=r"g5\.xlarge is available in us-east-1a, .*the subnets are in us-east-1e"):
        resolved(account, tmp_path, subnets=(lonely,))


def test_the_security_group_is_made_once_and_lets_in_only_itself(account: Account, tmp_path: Path) -> None:
    machines = resolved(account, tmp_path)
    assert resolved(account, tmp_path).security_group == machines.security_group
    ec2 = account.session.client("ec2")
    (group,) = ec2.describe_security_groups(GroupIds=[machines.security_group])["SecurityGroups"]
    assert {"Key": "rubberband:owner", "Value": "rubberband"} in group["Tags"]
    (rule,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [machines.security_group]
    assert not rule.get("IpRanges")
    assert not rule.get("Ipv6Ranges")


def test_a_group_that_lets_itself_in_by_some_ports_only_is_made_good(account: Account) -> None:
    group = account.fake.world.groups[ensure_group(account.session, "rubberband", account.vpc)]
    (rule,) = group.ingress
    group.ingress[:] = [rule._replace(from_port=22, to_port=22)]
    ensure_group(account.session, "rubberband", account.vpc)
    assert rule in group.ingress


def test_a_group_that_another_driver_makes_at_the_same_moment_is_used(account: Account) -> None:
    def another_is_faster(call: FakeCall) -> Fault | None:
        if call.operation == "CreateSecurityGroup":
            account.fake.fault = None
            ensure_group(account.fake.session("admin"), "rubberband", account.vpc)
        return None

    account.fake.fault = another_is_faster
    group = ensure_group(account.session, "rubberband", account.vpc, sleep=account.sleep)
    assert [one.group_id for one in account.fake.world.groups.values() if one.name == "rubberband"] == [group]


def test_a_strangers_group_of_our_name_is_not_touched(account: Account) -> None:
    account.fake.session("admin").client("ec2").create_security_group(
        GroupName="rubberband", Description="of somebody else", VpcId=account.vpc
    )
    with pytest.raises(InputError, match="without the tag rubberband:owner=rubberband"):
        ensure_group(account.session, "rubberband", account.vpc, sleep=account.sleep)


def test_only_the_owners_groups_are_deleted(account: Account, tmp_path: Path) -> None:
    account.fake.policies["driver"] = None
    kept = resolved(account, tmp_path, owner="me").security_group
    gone = resolved(account, tmp_path).security_group
    assert delete_groups(account.session, "rubberband") == ((gone,), ())
    assert delete_groups(account.session, "rubberband") == ((), ())
    assert kept in account.fake.world.groups


def test_a_group_that_was_named_is_used(account: Account, tmp_path: Path) -> None:
    default = next(one for one in account.fake.world.groups.values() if one.vpc_id == account.vpc)
    assert resolved(account, tmp_path, security_group=default.group_id).security_group == default.group_id


def test_the_token_is_published_once_adopted_elsewhere_and_never_overwritten(account: Account, tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "token", tmp_path / "there" / "token"
    publish_token(account.session, "rubberband", here)
    publish_token(account.session, "rubberband", here)
    publish_token(account.session, "rubberband", there)
    assert account.operations().count("PutParameter") == 1
    assert there.read_text() == here.read_text() == read_token(account.session, token_parameter("rubberband"))
    assert there.stat().st_mode & 0o077 == 0
    there.write_text("another")
    with pytest.raises(InputError, match="another driver has published another Ray token"):
        publish_token(account.session, "rubberband", there)


def test_an_instance_reads_the_token_and_nothing_else(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_token(account.session, "rubberband", tmp_path / "token")
    monkeypatch.setattr("rubberband.cloud.aws.client.open_session", lambda _: account.fake.session("worker"))
    monkeypatch.setattr("time.sleep", account.sleep)
    assert fetch_token(token_parameter("rubberband"), "us-east-1", tmp_path / "of" / "worker") == 0
    assert (tmp_path / "of" / "worker").read_text() == (tmp_path / "token").read_text()
    assert (tmp_path / "of" / "worker").stat().st_mode & 0o077 == 0
    assert fetch_token("/rubberband/nobody/ray-token", "us-east-1", tmp_path / "none") == 1
    assert fetch_token("/somewhere/else", "us-east-1", tmp_path / "none") == 1


def test_the_boot_script_knows_the_parameter_and_not_the_token(account: Account, tmp_path: Path) -> None:
    machines = resolved(account, tmp_path)
    start = NodeStart(instances=("i-001",), head_address="10.0.0.5:6379", gpus=1, lease_s=600, lifetime_s=3600)
    text = machines.user_data(start)
    assert text == resolved(account, tmp_path).user_data(start)
    assert "TOKEN=/rubberband/rubberband/ray-token" in text
    assert (tmp_path / "token").read_text() not in text


def test_the_drivers_place_is_what_its_metadata_service_shows() -> None:
    found = {
        "placement/availability-zone": "eu-west-1b",
        "placement/region": "eu-west-1",
        "mac": "0e:aa",
        "network/interfaces/macs/0e:aa/vpc-id": "vpc-1",
        "network/interfaces/macs/0e:aa/subnet-id": "subnet-1",
        "network/interfaces/macs/0e:aa/security-group-ids": "sg-1\nsg-2",
        "local-ipv4": "10.0.0.9",
        "instance-id": "i-1",
    }
    place = own_place(found.get)
    assert place is not None
    assert (place.address, place.vpc, place.region, place.zone) == ("10.0.0.9", "vpc-1", "eu-west-1", "eu-west-1b")
    assert place.security_groups == ("sg-1", "sg-2")
    assert own_place(lambda _: None) is None


# Installed are the driver's versions, its package as a wheel, and what the file asks for


class Package:
    """An installed package; `source`: its direct_url.json."""

    def __init__(self, name: str | None, version: str | None, source: str | None = None) -> None:
        self.metadata = cast(PackageMetadata, Message())
        for key, value in (("Name", name), ("Version", version)):
            if value is not None:
                cast(Any, self.metadata)[key] = value
        self._source = source

    def read_text(self, name: str) -> str | None:
        return self._source if name == "direct_url.json" else None


def of(*packages: Package, install: tuple[str, ...] = ()) -> list[str]:
    return constraints(install, cast(Any, packages)).splitlines()


def test_every_package_is_constrained_to_its_public_version() -> None:
    found = of(Package("torch", "2.9.0+cpu"), Package("Ray_Tools", "2.60.0"), Package("numpy", "2.3.1"))
    assert found == ["numpy==2.3.1", "ray-tools==2.60.0", "torch==2.9.0"]


@pytest.mark.parametrize(
    "package",
    [
        Package("mine", "1.0", source='{"url": "file:///home/me/mine", "dir_info": {"editable": true}}'),
        Package("rubberband-tune", "0.1.0"),
        Package("pip", "25.0"),
        Package("nvidia-cublas-cu12", "12.6.4.1"),
        Package("triton", "3.5.0"),
        Package("distro-info", "1.1ubuntu0.2"),
        Package(None, "1.0"),
        Package("broken", None),
    ],
)
def test_packages_of_no_index_and_those_of_torch_are_left_out(package: Package) -> None:
    assert of(package, Package("numpy", "2.3.1")) == ["numpy==2.3.1"]


def test_the_imported_one_of_two_packages_of_one_name_counts() -> None:
    assert of(Package("numpy", "2.3.1"), Package("NumPy", "1.26.0")) == ["numpy==2.3.1"]


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("scikit-learn", True),
        ("scikit_learn[plots]", True),
        ("scikit-learn; python_version > '3'", True),
        ("scikit-learn>1, <2", False),
        ("Scikit_Learn==1.5", False),
        ("scikit-learn @ https://example.org/a.whl", False),
        ("s3://bucket/scikit_learn-1.5-py3-none-any.whl#sha256=0", False),
        ("https://example.org/other-1.5-py3-none-any.whl", True),
    ],
)
def test_a_version_that_the_file_says_goes_first(word: str, kept: bool) -> None:
    assert of(Package("scikit-learn", "1.7.0"), install=(word,)) == (["scikit-learn==1.7.0"] if kept else [])


def test_names_are_compared_as_an_index_does() -> None:
    assert canonical("Ruamel.YAML__clib") == "ruamel-yaml-clib"


def test_the_drivers_versions_go_to_the_bucket_with_their_digest() -> None:
    account = Account()
    asked = what_to_install(Packages(account.session, f"s3://{account.bucket}/c"), Aws())
    address, _, digest = asked.constraints.partition("#sha256=")
    content = account.fake.world.buckets[account.bucket][address.removeprefix(f"s3://{account.bucket}/")]
    assert hashlib.sha256(content).hexdigest() == digest
    assert f"numpy=={version('numpy')}\n" in content.decode()


def test_without_a_bucket_they_are_in_the_boot_script(tmp_path: Path) -> None:
    words = Aws(index_url="https://packages.example.org/simple/")
    asked = what_to_install(Packages(Account().session, str(tmp_path)), words)
    assert gzip.decompress(base64.b64decode(asked.constraints)).decode() == constraints()
    assert what_to_install(Packages(Account().session, None), Aws(install="none")).constraints == ""


def test_packages_that_were_not_written_anew_are_tried_again_at_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    written, clock = list[float](), SimpleNamespace(now=1e9)

    def put(*_: object, **__: object) -> str:
        written.append(clock.now)
        if len(written) == 2:
            raise InputError("AWS is busy")
        return "s3://b/packages/c/wheel"

    monkeypatch.setattr(s3.time, "time", lambda: clock.now)
    monkeypatch.setattr(s3, "put_package", put)
    packages = Packages(None, "s3://b/c", renewed_at=clock.now)
    packages.put("wheel", b"1")
    for clock.now in (1e9 + 86_399.0, *(1e9 + 86_400.0 + 60.0 * turn for turn in range(4)), 1e9 + 2 * 86_400.0 + 60.0):
        packages.renew()
    assert written == [1e9, 1e9 + 86_400.0, 1e9 + 86_460.0, 1e9 + 2 * 86_400.0 + 60.0]


ROOT = Path(__file__).parents[2]


def test_the_drivers_wheel_is_put_beside_the_checkpoints_once_and_named_with_its_digest(
    account: Account, tmp_path: Path
) -> None:
    start = NodeStart(instances=("i-001",), head_address="10.0.0.5:6379", gpus=1, lease_s=600, lifetime_s=3600)
    words = {"checkpoints": f"s3://{account.bucket}/c", "place": account.place, "token_path": tmp_path / "token"}
    texts = {resolve(account.session, Aws(), "g5.xlarge", **words).user_data(start) for _ in range(2)}
    assert account.operations().count("PutObject") == 2
    versions, (key, content) = sorted(account.fake.world.buckets[account.bucket].items())
    assert versions[0].startswith("packages/c/constraints/")
    assert key.startswith("packages/c/wheels/rubberband_tune-")
    address = f"s3://{account.bucket}/{key}#sha256={hashlib.sha256(content).hexdigest()}"
    assert f"WHEELS=('{address}')" in texts.pop()
    assert not texts


def test_another_file_in_the_place_of_the_wheel_is_replaced(account: Account) -> None:
    address = installing.upload_wheel(Packages(account.session, f"s3://{account.bucket}/c"))
    objects = account.fake.world.buckets[account.bucket]
    (key,) = objects
    content, objects[key] = objects[key], b"another account's"
    assert installing.upload_wheel(Packages(account.session, f"s3://{account.bucket}/c")) == address
    assert objects[key] == content


@pytest.mark.parametrize(
    ("install", "adds"),
    [
        ("scikit-learn", True),
        ("my-rubberband-tune==1", True),
        ("'rubberband-tune @ https://example.org/a.whl'", False),
        ("s3://bucket/rubberband_tune-0.1.0-py3-none-any.whl", False),
        ("none", False),
    ],
)
def test_requirements_of_a_trial_are_installed_beside_the_drivers_package(
    account: Account, install: str, adds: bool
) -> None:
    asked = what_to_install(Packages(account.session, f"s3://{account.bucket}/c"), Aws(install=install))
    assert any("/packages/c/wheels/rubberband_tune-" in one for one in asked.wheels) == adds
    assert (asked.requirements[1:2] == (install,)) == adds


def test_an_index_of_the_users_own_takes_the_place_of_the_wheel(account: Account) -> None:
    words = Aws(index_url="https://packages.example.org/simple/", install="scikit-learn")
    asked = what_to_install(Packages(account.session, "/shared"), words)
    own = f"rubberband-tune[ray,aws]=={wheel.public_version()}"
    assert asked.requirements[:2] == (own, "scikit-learn")
    assert (asked.index_url, asked.wheels) == (words.index_url, ())
    assert "PutObject" not in account.operations()
    other = Aws(index_url=words.index_url, install="rubberband-tune[ray,aws]==9")
    assert what_to_install(Packages(account.session, None), other).requirements[0] == "rubberband-tune[ray,aws]==9"


def test_a_package_that_was_never_installed_has_no_version_to_ask_an_index_for(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.rubberband, "__version__", "0+unknown", raising=False)
    with pytest.raises(InputError, match="was never installed and has no version"):
        what_to_install(Packages(account.session, None), Aws(index_url="https://packages.example.org/simple/"))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://packages.example.org/simple/", r"write https://HOST/PATH"),
        ("https://ann:s3cret@packages.example.org/simple/", r"packages\.example\.org has a user name or a password"),
        ("https://packages.example.org/simple/?token=s3cret", "is no package index"),
        ("file://elsewhere/simple", "is no package index"),
        ("https://[packages", "is no URL"),
    ],
)
def test_an_index_that_instances_cannot_be_given_is_refused_without_its_secret(url: str, text: str) -> None:
    with pytest.raises(ValidationError, match=text) as refused:
        Aws(index_url=url)
    assert "s3cret" not in refused.value.errors()[0]["msg"]


def test_a_store_that_is_no_bucket_has_no_place_for_the_wheel(account: Account) -> None:
    with pytest.raises(InputError, match=r"resources\.checkpoints: .*give s3://bucket/prefix, or .*index_url"):
        resolve(account.session, Aws(), "g5.xlarge", place=account.place, checkpoints="/shared")


def test_the_wheel_holds_the_whole_package_and_can_be_imported(tmp_path: Path) -> None:
    name, content = wheel.build_wheel()
    assert (name, content) == wheel.build_wheel()
    path = tmp_path / name
    path.write_bytes(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        metadata = archive.read(next(one for one in names if one.endswith("METADATA"))).decode()
    assert "rubberband/cloud/aws/policies/driver.json" in names
    assert "rubberband/executor/training/__init__.py" in names
    assert 'Requires-Dist: boto3>=1.35; extra == "aws"' in metadata
    code = "import rubberband.cloud.aws.boot as u; print(u.__file__)"
    shown = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(path), *sys.path]!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout
    assert shown.startswith(str(path))


def test_a_wheel_that_needs_something_else_has_another_name(tmp_path: Path) -> None:
    package = tmp_path / "rubberband"
    package.mkdir()
    (package / "__init__.py").write_text("")
    project = '[project]\nname = "rubberband-tune"\nrequires-python = ">=3.11"\noptional-dependencies = {}\n'
    names = []
    for needs in ('["ray>=2.49"]', '["ray>=2.52"]'):
        (tmp_path / "pyproject.toml").write_text(f"{project}dependencies = {needs}\n")
        names.append(wheel.build_wheel(package)[0])
    assert names[0] != names[1]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as an installer lays it out, and puts down in RECORD."""
    folder = tmp_path / "site-packages"
    with zipfile.ZipFile(io.BytesIO(wheel.build_wheel()[1])) as archive:
        archive.extractall(folder)
    monkeypatch.syspath_prepend(folder)
    return folder / "rubberband"


def test_an_installed_package_is_packed_as_the_checkout_that_it_came_from(installed: Path) -> None:
    (installed / "__pycache__").mkdir()
    (installed / "__pycache__/cli.cpython-311.pyc").write_bytes(b"compiled")
    assert wheel.build_wheel(installed) == wheel.build_wheel(Path(rubberband.__file__).parent)


def test_an_instance_prints_the_digest_of_the_drivers_wheel(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel.main()
    driver = capsys.readouterr().out
    paths = [str(installed.parent), *(path for path in sys.path if path and path != str(ROOT))]
    code = f"import sys; sys.path[:] = {paths!r}; from rubberband.cloud import wheel; wheel.main()"
    there = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert there == driver
    assert driver.split()[0] == hashlib.sha256(wheel.build_wheel()[1]).hexdigest()


def test_files_that_cannot_be_read_or_were_never_installed_are_refused(tmp_path: Path) -> None:
    package = tmp_path / "rubberband"
    package.mkdir()
    (package / "cli.py").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"cli\.py of this rubberband cannot be packed for instances"):
        wheel.build_wheel(package)
    (package / "cli.py").unlink()
    (package / "cli.py").write_text("")
    with pytest.raises(InputError, match="was never installed, so what it needs is unknown"):
        wheel.build_wheel(package)
