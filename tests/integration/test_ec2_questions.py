"""Money is asked for on a terminal, before anything is rented from EC2, and nothing without a limit is rented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.builders.ec2_runs import FEW, ON_EC2, Ec2CommandLine, ec2, words
from tests.builders.terminal import on_terminal
from tests.ec2.principals import BUCKET

pytestmark = pytest.mark.timeout(120)
RUN = ("run", "digits.yaml", "--no-check", *words(*ON_EC2, *FEW))
CHECKED = tuple(word for word in RUN if word != "--no-check")
UNPROFILED = (*RUN, "-s", "profile=null")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ec2CommandLine]:
    with ec2(tmp_path_factory.mktemp("ec2")) as found:
        pool = {"provider": "aws", "instance_type": "g4dn.xlarge", "instances": 2, "aws": {"install": "none"}}
        pool |= {"checkpoints": f"s3://{BUCKET}/team", "max_usd_per_hour": 3}
        (found.folder / "team.yaml").write_text(yaml.safe_dump(pool))
        yield found


@pytest.fixture(autouse=True)
def _nothing_is_rented(driver: Ec2CommandLine) -> Iterator[None]:
    yield
    assert not [call for call in driver.aws.fake.calls if call.operation == "RunInstances" and call.took_effect]
    assert not driver.aws.fake.instances


@pytest.mark.long
def test_nothing_is_rented_without_a_max_cost(driver: Ec2CommandLine) -> None:
    line = driver.refused(*RUN, "-s", "constraints.max_cost=null")
    assert "constraints.max_cost: missing" in line
    assert "write max_cost, or --no-cap" in line


@pytest.mark.parametrize(
    ("command", "question"),
    [
        pytest.param(RUN, "at most 1.00 USD (max_cost), about 0.", marks=pytest.mark.long),
        pytest.param(CHECKED, "checked talking:Talking: 1 iteration in ", marks=pytest.mark.long),
        (UNPROFILED, "at most 1.00 USD (max_cost); no profile yet: measuring it comes first and counts; run? [Y/n]"),
        pytest.param(
            ("cloud", "image", "build", "digits.yaml", *words(*(word for word in ON_EC2 if "install" not in word))),
            "after 0.45 USD at the most",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("pool", "up", "team.yaml"), "max_usd_per_hour=3.00 USD; start the pool? [Y/n]", marks=pytest.mark.long
        ),
    ],
)
def test_no_on_a_terminal_rents_nothing(driver: Ec2CommandLine, command: tuple[str, ...], question: str) -> None:
    with on_terminal(*command, folder=driver.folder, environment=driver.environment) as terminal:
        terminal.until(r"\[Y/n\]")
        terminal.type(b"n\n")
        assert terminal.end() == 130
    shown = " ".join(terminal.shown.split())
    assert question in shown
    assert "not confirmed; nothing was rented" in shown
