"""The versions that instances install: those of the driver's environment."""

from __future__ import annotations

import base64
import gzip
import hashlib
from email.message import Message
from importlib.metadata import PackageMetadata, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rubberband.cloud.aws import s3
from rubberband.cloud.aws.installing import canonical, constraints, what_to_install
from rubberband.cloud.aws.s3 import Packages
from rubberband.errors import InputError
from rubberband.spec.resources import Aws
from tests.builders.aws_account import Account


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
