"""A program that rented instances would not have is found by every command, before any of them is rented."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.builders.aws_account import Account
from tests.builders.heads import account as account
from tests.builders.heads import file as file
from tests.builders.heads import say

LIMITS = "{deadline: 1h, max_cost: 2}"
DOORS = (("check", "digits.yaml"), ("estimate", "digits.yaml"), ("run", "digits.yaml", "--on", "head", "-y"))
MISSING = {
    "python trian.py ${args}": "entrypoint.command: there is no trian.py in",
    "no-such-program train.py ${args}": "entrypoint.command: no-such-program is not here; install it, or give its path",
    "python ../outside.py ${args}": "entrypoint.command: ../outside.py is not sent to the instances",
}


def with_command(file: Path, command: str) -> None:
    words = yaml.safe_load(file.read_text())
    words |= {"entrypoint": {"command": command}, "profile": {"seconds_per_iteration": {1: 5}, "trial_startup": "10s"}}
    file.write_text(yaml.safe_dump(words))
    for path in (file.with_name("train.py"), file.parents[1] / "outside.py"):
        path.write_text("import rubberband; rubberband.report({'accuracy': 1.0})\n")


@pytest.mark.by_default(3)
@pytest.mark.parametrize("door", DOORS, ids=[door[0] for door in DOORS])
@pytest.mark.parametrize("command", MISSING)
def test_a_missing_program_is_found_before_a_head_is_rented(
    account: Account, file: Path, door: tuple[str, ...], command: str
) -> None:
    with_command(file, command)
    code, text = say(*door)
    assert MISSING[command] in " ".join(text.split())
    assert (code == 0) == (door[0] == "estimate"), text
    assert account.fake.instances == ()


def test_a_program_that_only_the_image_has_is_no_reason_to_refuse(account: Account, file: Path) -> None:
    with_command(file, "/opt/of-the-image/python train.py ${args}")
    code, text = say("estimate", "digits.yaml")
    assert code == 0
    assert "a run is refused now" not in text
