"""A head of a fake account, asked by SSM, and commands that ask it."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband.cli import app
from rubberband.cloud.aws.calls import tags_of
from rubberband.cloud.aws.cleanup import end_everything
from rubberband.cloud.aws.head import HeadInstance, RemoteHead, ensure_head, running_head
from rubberband.cloud.aws.network import ensure_group
from rubberband.cloud.clock import Waiting
from tests.builders.aws_account import Account
from tests.ec2.instance import Instance

EXPERIMENT = """
name: digits
entrypoint: digits:Trial
search:
  space: {lr: {type: choice, values: [0.1, 0.2]}}
  metric: accuracy
  mode: max
  scheduler: {type: sha, num_samples: 2, grace_period: 1, max_t: 2, reduction_factor: 2}
constraints: {deadline: 1h}
resources:
  provider: aws
  instance_type: g5.xlarge
  checkpoints: s3://BUCKET/digits
  aws: {install: none}
"""


def sent_made_of(account: Account, instance_id: str) -> str:
    (line,) = re.findall(r"^MADE_OF=(.*)$", account.fake.world.instances[instance_id].user_data, re.MULTILINE)
    return shlex.split(line)[0]


def head_of(account: Account, **aws: Any) -> HeadInstance:
    return ensure_head(account.session, account.resources(aws=aws), clock=lambda: account.now, sleep=account.sleep)


def worker(account: Account, name: str, owner: str = "rubberband", group_of: str | None = None) -> Instance:
    tags = [{"Key": key, "Value": value} for key, value in tags_of("digits", "r", (name,), owner).items()]
    return account.fake.launched(
        "g5.xlarge",
        SubnetId=account.place.subnet,
        SecurityGroupIds=[ensure_group(account.session, group_of or owner, account.vpc)],
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )


@pytest.fixture
def file(request: pytest.FixtureRequest, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment in the folder that commands run in; its limits are those that LIMITS says, if the module has it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "work" / "digits.yaml"
    path.write_text(
        EXPERIMENT.replace("BUCKET", account.bucket).replace(
            "{deadline: 1h}", getattr(request.module, "LIMITS", "{deadline: 1h}")
        )
    )
    (tmp_path / "work" / "digits.py").write_text("class Trial: ...\n")
    return path


def say(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


Work = Callable[[str, dict[str, Any]], dict[str, Any] | tuple[int, str]]


class Head:
    """A head of a fake account whose answers a test writes."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: Work = lambda what, words: {"started": True} if what == "start" else ENDED
        self.made_of: list[str | None] = [None]
        """What it says of itself, one after the other; None: what its boot script says."""
        self.remade, self.remakes, self.fetched = 0, 0, list[str]()
        account.fake.world.runs_command = self._run

    def _run(self, instance_id: str, script: str) -> Callable[[], tuple[int, str, str]]:
        work = shlex.split(script.strip().splitlines()[-1])
        if work[:2] == ["cat", "made-of"]:
            found = self.made_of.pop(0) if len(self.made_of) > 1 else self.made_of[0]
            return lambda: (0, sent_made_of(self.account, instance_id) if found is None else found, "")
        if work[0].startswith("file="):
            self.remade += 1
            return lambda: (self.remakes, "", "")
        if work[0] == "rubberband-fetch":
            self.fetched.append(work[1])
            return lambda: (0, "", "")
        assert work[:3] == ["python3", "-m", "rubberband.cloud.aws.on_head"]
        self.asked.append((work[3], json.loads(work[4])))
        answer = self.answers(*self.asked[-1])
        code, out = answer if isinstance(answer, tuple) else (0, json.dumps(answer))
        return lambda: (code, out, "")

    def remote(self) -> RemoteHead:
        account = self.account
        head = ensure_head(account.session, account.resources(), clock=lambda: account.now, sleep=account.sleep)
        passing: dict[str, Any] = {"clock": lambda: account.now, "sleep": account.sleep}
        waiting = Waiting(**passing)
        store = f"s3://{account.bucket}/heads"
        return RemoteHead(
            session=account.session,
            instance_id=head.instance_id,
            owner="rubberband",
            store=store,
            waiting=waiting,
            clock=passing["clock"],
        )


@pytest.fixture
def account(off_ec2: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """As its administrator, who may start a head."""
    account = Account()
    account.session = account.fake.session("admin")
    monkeypatch.setattr(
        "rubberband.cloud.aws.client.open_session", lambda region: account.fake.session("admin", region=region)
    )
    passing: dict[str, Any] = {"clock": lambda: account.now, "sleep": account.sleep}
    waiting = Waiting(**passing)
    monkeypatch.setattr("rubberband.cloud.aws.head.ensure_head", partial(ensure_head, **passing))
    monkeypatch.setattr("rubberband.cloud.aws.head.running_head", partial(running_head, **passing))
    monkeypatch.setattr("rubberband.cloud.aws.cleanup.end_everything", partial(end_everything, **passing))
    monkeypatch.setattr(
        "rubberband.cloud.aws.head.RemoteHead", partial(RemoteHead, waiting=waiting, clock=passing["clock"])
    )
    monkeypatch.setattr("rubberband.commands.on_head.time.sleep", account.sleep)
    account.fake.world.runs_command = lambda instance_id, script: lambda: (0, sent_made_of(account, instance_id), "")
    return account


def shown(log: bytes, *, exit_code: int | None = None, lives: bool = True, more: bool = False) -> dict[str, Any]:
    return {"log": base64.b64encode(log).decode(), "more": more, "exit": exit_code, "lives": lives}


ENDED = shown(b"", exit_code=0)


@pytest.fixture
def home(file: Path) -> Path:
    """The user's folder, which knows the bucket that `aws setup` made."""
    home = file.parents[1] / "home"
    home.mkdir(exist_ok=True)
    bucket = re.search(r"s3://([^/]+)/", file.read_text())
    assert bucket is not None
    (home / "aws.yaml").write_text(f"bucket: {bucket[1]}\nregion: us-east-1\n")
    return home


@pytest.fixture
def head(account: Account, file: Path) -> Head:
    """One that starts runs, which end at once."""
    return Head(account)
