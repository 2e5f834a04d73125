"""Bad input of an account of AWS, through every door: one line each, and nothing is rented."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.cloud.aws import client
from rubberband.errors import RubberbandError
from rubberband.running.run import tune
from rubberband.spec.loading import load_experiment
from tests.builders.command_line import ROOT
from tests.ec2.fake_cloud import FakeCloud, fake_cloud
from tests.ec2.faults import FakeError

pytestmark = pytest.mark.long
FILE = "examples/digits-aws.yaml"
DOORS = {
    "run": ("run", FILE, "--no-check"),
    "run --on head": ("run", FILE, "--on", "head", "-y"),
    "status --on head": ("status", "digits-aws", "--on", "head"),
    "resume --on head": ("resume", "digits-aws", "--on", "head", "-y"),
    "up": ("cloud", "up", FILE),
    "pool up": ("pool", "up", "team.yaml", "-y"),
    "image build": ("cloud", "image", "build", FILE, "-y", "-s", "resources.aws.install=scikit-learn"),
    "image list": ("cloud", "image", "list"),
    "aws setup": ("aws", "setup", "--dry-run"),
    "aws check": ("aws", "check", FILE),
    "aws teardown": ("aws", "teardown", "-y"),
    "down": ("cloud", "down", "-y"),
    "tune()": (),
}
"""Commands that ask AWS and cannot do without it."""


def _answers(aws: FakeCloud, message: str, *, ec2: str, sts: str, s3: str, other: str) -> None:
    codes = {"ec2": ec2, "sts": sts, "iam": sts, "s3": s3}
    aws.server.refuses = lambda service: FakeError(codes.get(service, other), message, 400 if s3 == sts else 403)


def _expired(aws: FakeCloud, folder: Path) -> Mapping[str, str | None]:
    message, expired = "The security token included in the request is expired", "ExpiredToken"
    _answers(aws, message, ec2="RequestExpired", sts=expired, s3=expired, other="ExpiredTokenException")
    return {}


def _clock(aws: FakeCloud, folder: Path) -> Mapping[str, str | None]:
    wrong, message = "SignatureDoesNotMatch", "Signature expired: 20261126T100000Z is now earlier than 20261126T101500Z"
    _answers(
        aws, message, ec2="RequestExpired", sts=wrong, s3="RequestTimeTooSkewed", other="InvalidSignatureException"
    )
    return {}


def _denied(aws: FakeCloud, folder: Path) -> Mapping[str, str | None]:
    """By the organization, but for the question who asks, which nothing can deny."""

    def refusal(service: str) -> FakeError | None:
        because = f"perform: {service}:Anything with an explicit deny in a service control policy"
        code = {"ec2": "UnauthorizedOperation", "s3": "AccessDenied", "iam": "AccessDenied"}
        message = f"User: arn:me is not authorized to {because}"
        return None if service == "sts" else FakeError(code.get(service, "AccessDeniedException"), message, 403)

    aws.server.refuses = refusal
    return {}


def _no_keys(config: str = "", **words: str) -> Callable[[FakeCloud, Path], Mapping[str, str | None]]:
    def prepare(aws: FakeCloud, folder: Path) -> Mapping[str, str | None]:
        (folder / "config").write_text(config)
        file = {"AWS_CONFIG_FILE": str(folder / "config"), "HOME": str(folder)}
        return {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, **file, **words}

    return prepare


_SSO = (
    "[profile me]\nsso_session=s\nsso_account_id=1\nsso_role_name=x\n[sso-session s]\nsso_start_url=https://x.example\n"
)
_MFA = "[profile me]\nrole_arn=arn:aws:iam::1:role/a\nsource_profile=b\nmfa_serial=arn:aws:iam::1:mfa/me\n[profile b]\n"
INPUTS: Mapping[str, tuple[Callable[[FakeCloud, Path], Mapping[str, str | None]], str]] = {
    "no credentials": (_no_keys(), "there are no AWS credentials (Unable to locate credentials); run `aws configure`"),
    "no such profile": (_no_keys(AWS_PROFILE="nobody"), "The config profile (nobody) could not be found; check"),
    "broken settings": (_no_keys("profile me\n nonsense\n"), "Unable to parse config file"),
    "no such program": (
        _no_keys("[profile me]\ncredential_process=/no/such\n", AWS_PROFILE="me"),
        "[Errno 2] No such file or directory: '/no/such'; check ~/.aws/config",
    ),
    "login": (_no_keys(_SSO + "sso_region=us-east-1\n", AWS_PROFILE="me"), "run `aws sso login` (or `aws login`)"),
    "code": (
        _no_keys(_MFA + "aws_access_key_id=k\naws_secret_access_key=s\n", AWS_PROFILE="me"),
        "AWS wants a code here (Enter MFA code for arn:aws:iam::1:mfa/me), and this is no terminal",
    ),
    "expired": (_expired, "the credentials have expired, or this machine's clock is wrong"),
    "clock": (_clock, "the credentials have expired, or this machine's clock is wrong"),
    "denied": (_denied, "service control policy"),
    "no network": (lambda aws, folder: {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "AWS does not answer (Could not"),
    "proxy": (
        lambda aws, folder: {
            **dict.fromkeys(("AWS_ENDPOINT_URL", "NO_PROXY", "no_proxy")),
            "HTTPS_PROXY": "http://127.0.0.1:9",
        },
        "check resources.region, this machine's network and its proxy (HTTPS_PROXY",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "here" / "examples")
    pool = {"provider": "aws", "instance_type": "g4dn.xlarge", "instances": 2, "max_usd_per_hour": 3}
    (tmp_path / "here" / "team.yaml").write_text(json.dumps(pool))
    return tmp_path / "here"


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[FakeCloud]:
    with fake_cloud(tmp_path / "aws") as running:
        for name in [one for one in os.environ if one.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in running.outside().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        # No try is repeated after a pause, and no terminal is asked for a code.
        monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
        monkeypatch.setattr("getpass.getpass", lambda question: _raise(EOFError()))
        yield running
        assert not running.fake.instances


def _raise(error: BaseException) -> str:
    raise error


def line_of(words: tuple[str, ...]) -> str:
    """The line with which a door refuses."""
    if not words:
        with pytest.raises(RubberbandError) as refused:
            tune(experiment=load_experiment(FILE), check=False)
        error: BaseException | None = refused.value
    else:
        error = CliRunner().invoke(cli.app, words).exception
    assert isinstance(error, RubberbandError), (words, error)
    assert error.exit_code in (1, 2)
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize("name", INPUTS)
def test_every_door_names_what_is_wrong_with_the_account(
    aws: FakeCloud, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    prepare, text = INPUTS[name]
    client._known.cache_clear()  # else settings that cannot be read are not read
    for variable, value in prepare(aws, folder).items():
        monkeypatch.delenv(variable, raising=False) if value is None else monkeypatch.setenv(variable, value)
    for door in DOORS:
        line = line_of(DOORS[door])
        if name != "denied" or not door.startswith("aws "):  # they ask for the bucket first, which S3 only forbids
            assert text in line.replace("check region, ", "check resources.region, "), (door, line)


def test_nothing_is_written_to_a_bucket_of_another_account(aws: FakeCloud) -> None:
    aws.fake.world.buckets["theirs"] = {}
    aws.fake.world.facts("theirs").owner = "999999999999"
    line = line_of((*DOORS["run --on head"], "-s", "resources.checkpoints=s3://theirs/x"))
    assert "resources.checkpoints: the role may not s3:PutObject in theirs" in line
    assert "else name one that is" in line
    assert aws.fake.world.buckets["theirs"] == {}
