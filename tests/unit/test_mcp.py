"""The tools of agents in this process: their cap, their refusals, and what they read."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.mcpserver.exceptions import ToolError

from rubberband.commands.local_experiment import local_experiment
from rubberband.errors import InputError
from rubberband.executor.journal.folder import change_labels, open_folder
from rubberband.mcp import place
from rubberband.mcp.caps import TAG, AgentCaps, Bill
from rubberband.mcp.server import make_server
from rubberband.mcp.tools import Tools
from rubberband.running.run import tune
from rubberband.spec.account import AgentPolicy
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import month_begin
from rubberband.values.submission import LabelChange, Summary
from tests.builders.experiment_words import MINIMAL

FILE = {
    "name": "first",
    "search": {
        "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 0.1}},
        "scheduler": {"type": "sha", "num_samples": 8, "max_t": 4, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "10m", "max_cost": 1},
    "resources": {"provider": "virtual", "gpus_per_instance": 1, "price_per_hour": 3, "max_instances": 2},
    "profile": {"seconds_per_iteration": {1: 10}},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(FILE))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def call(tool: str, tools: Tools | None = None, /, **arguments: Any) -> str:
    """What a tool answers. Raises ToolError."""
    server = make_server(tools or Tools(Path.cwd() / "home", None, Path.cwd()))
    found: Any = anyio.run(server.call_tool, tool, arguments)
    (content,) = found.content
    text: str = content.text
    return text


def refusal(tool: str, /, **arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        call(tool, **arguments)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_malformed_arguments_are_refused_in_one_line_each(home: Path) -> None:
    assert refusal("plan") == "file: Field required"
    assert refusal("plan", fil="first.yaml") == "plan has no argument 'fil'; did you mean 'file'?"
    assert (
        refusal("extend", name="first", max_costs=5) == "extend has no argument 'max_costs'; did you mean 'max_cost'?"
    )
    assert refusal("extend", name="first").startswith(
        "extend: nothing to change; give deadline, max_cost, target or num_samples"
    )
    assert refusal("extend", name="first", max_cost="lots").startswith("max_cost: Input should be a valid number")
    assert refusal("status", name="first", wait_s=500) == "wait_s: Input should be less than or equal to 50"
    assert refusal("stop", name="first", trials=["x"]).startswith("trials.0: Input should be a valid integer")
    assert refusal("status", name="first").startswith("experiment 'first' not found in ")
    assert refusal("aws").startswith("there is no tool 'aws'; ")
    assert refusal("submit", file="first.yaml", overrides=["constraints.max_costs=1"]).startswith(
        "-s: constraints.max_costs: unknown key; did you mean"
    )


@pytest.mark.parametrize("file", ["../first.yaml", "/etc/passwd", "home/../../x.yaml", "first.py", "link.yaml"])
def test_a_file_of_another_folder_or_kind_is_not_read(home: Path, tmp_path: Path, file: str) -> None:
    secret = tmp_path.parent / "secret.yaml"
    secret.write_text("token: hidden")
    (tmp_path / "link.yaml").symlink_to(secret)
    for tool in ("plan", "submit"):
        line = refusal(tool, file=file)
        assert "is not a .yaml or .yml or .json file below" in line
        assert "hidden" not in line


@pytest.mark.parametrize("word", ["profile=F", "resources.catalogue=F", "profile={by_instance_type: {virtual: F}}"])
def test_no_file_of_another_folder_is_named_in_an_experiment(home: Path, tmp_path: Path, word: str) -> None:
    secret = tmp_path.parent / "secret.csv"
    secret.write_text("hidden,line\n")
    for tool in ("plan", "submit"):
        line = refusal(tool, file="first.yaml", overrides=[word.replace("F", str(secret))])
        assert line.endswith(f" is not below {tmp_path}; copy it there")


CAPS = [
    ("", {}, ""),
    (
        "{}",
        {"provider": "aws", "instance_type": "g5.xlarge"},
        "agents.providers of policy.yaml: aws is not one of virtu",
    ),
    ("{providers: [aws]}", {"provider": "aws"}, "agents.max_usd_per_run of policy.yaml: missing, and aws is charged; "),
    ("{providers: [aws]}", {}, "agents.providers of policy.yaml: virtual is not one of aws; use one, or ask a person"),
    ("{max_usd_per_run: 1}", {}, ""),
    ("{max_usd_per_run: 0.9}", {}, "agents.max_usd_per_run of policy.yaml: constraints.max_cost is 1.00 USD, more th"),
    ("{max_usd_per_month: 0.9}", {}, ""),  # a simulated one is in no month
    ("{max_usd_per_month: 0.9}", {"provider": "local"}, "agents.max_usd_per_month of policy.yaml: 0.00 USD of 0.90 US"),
    ("{}", {"provider": "local", "secrets": ["TOKEN"]}, "resources.secrets: an agent's experiment gets none; leave th"),
]


@pytest.mark.parametrize(("agents", "resources", "line"), CAPS)
def test_the_cap_of_a_person_holds(home: Path, agents: str, resources: dict[str, Any], line: str) -> None:
    if agents:
        (home / "policy.yaml").write_text(f"agents: {agents}")
    words = {**FILE, "resources": {**FILE["resources"], "aws": {}, **resources}}  # type: ignore[dict-item]
    if resources.get("provider") == "aws":
        words["resources"] |= {"gpus_per_instance": None, "instance_type": "g5.xlarge"}
    experiment = Experiment(**words)
    caps = AgentCaps.of(home)
    if not line:
        caps.require_start(experiment, asks_service=False, bills=[])
        return
    with pytest.raises(InputError) as caught:
        caps.require_start(experiment, asks_service=False, bills=[])
    assert str(caught.value).startswith(line)
    assert "person" in str(caught.value), "the remedy"


def test_a_service_does_not_choose_what_is_charged() -> None:
    caps = AgentCaps(AgentPolicy(), Path("policy.yaml"))
    unsaid = Experiment(**{**MINIMAL, "constraints": {"max_cost": 1}})
    with pytest.raises(InputError, match=r"^resources\.provider: missing, and the service would choose one; write it"):
        caps.require_start(unsaid, asks_service=True, bills=[])
    caps.require_start(Experiment(**FILE), asks_service=True, bills=[])


def bill(name: str, state: str, **summary: Any) -> Bill:
    found = Summary(month_at=month_begin(time.time()), **summary)
    return Bill(name=name, provider="local", state=ExperimentState(state), summary=found)


def test_a_month_counts_what_is_spent_and_what_may_be() -> None:
    caps = AgentCaps(AgentPolicy(max_usd_per_run=10.0, max_usd_per_month=20.0), Path("policy.yaml"))
    experiment = Experiment(**{**FILE, "resources": {**FILE["resources"], "provider": "local"}})  # type: ignore[dict-item]
    runs = bill("a", "running", cost_usd=2.0, month_cost_usd=2.0, max_cost_usd=9.0)
    done = bill("b", "done", cost_usd=10.0, month_cost_usd=10.0, max_cost_usd=10.0)
    caps.require_start(experiment, asks_service=False, bills=[runs, done])  # 9 + 10 + 1
    last = bill("c", "cancelled", cost_usd=0.02, month_cost_usd=0.02, max_cost_usd=5.0)
    with pytest.raises(
        InputError, match=r"19\.02 USD of 20\.00 USD are spent or may be, and this asks for 1\.00 USD; "
    ):
        caps.require_start(experiment, asks_service=False, bills=[runs, done, last])
    caps.require_extension("local", "a", 10.0, [runs, done])
    with pytest.raises(InputError, match=r"max_usd_per_run .* 10\.01 USD, more than 10\.00 USD"):
        caps.require_extension("local", "a", 10.01, [runs, done])
    with pytest.raises(InputError, match=r"max_usd_per_month of policy\.yaml: 10\.02 USD of 20\.00 USD are spent"):
        caps.require_extension("local", "a", 10.0, [runs, done, last])


@given(st.lists(st.tuples(st.floats(0.01, 12.0), st.floats(0.0, 1.0), st.booleans()), max_size=12))
def test_no_order_of_starts_and_ends_spends_more_than_the_month_allows(asked: list[tuple[float, float, bool]]) -> None:
    caps = AgentCaps(AgentPolicy(max_usd_per_run=10.0, max_usd_per_month=20.0), Path("policy.yaml"))
    bills = list[Bill]()
    for number, (most_usd, share, ends) in enumerate(asked):
        words = {**FILE, "name": f"e{number}", "constraints": {"max_cost": most_usd}}
        words["resources"] = {**FILE["resources"], "provider": "local"}  # type: ignore[dict-item]
        open_usd = sum(each.month_usd(time.time()) for each in bills)
        fits = most_usd <= 10.0 and open_usd + most_usd <= 20.0
        try:
            caps.require_start(Experiment(**words), asks_service=False, bills=bills)
            assert fits
        except InputError:
            assert not fits
            continue
        spent_usd = most_usd * share
        state = "done" if ends else "running"
        bills.append(bill(f"e{number}", state, cost_usd=spent_usd, month_cost_usd=spent_usd, max_cost_usd=most_usd))
    assert sum(each.month_usd(time.time()) for each in bills) <= 20.0 + 1e-6


def test_a_running_experiment_without_a_max_cost_counts_in_the_month_with_its_forecast() -> None:
    runs = bill("a", "running", cost_usd=2.0, month_cost_usd=2.0, forecast_cost_usd=9.0)
    assert runs.month_usd(time.time()) == 9.0


def test_an_archived_experiment_of_a_service_counts_in_the_month(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"cost_usd": 9.5, "month_cost_usd": 9.5, "month_at": month_begin(time.time()), "max_cost_usd": 10.0}

    class Archive:
        def experiments(self, *, tags: list[str], archived: bool) -> list[Any]:
            view = {"name": "old", "provider": "local", "state": "done", "summary": summary}
            return [view] if archived and tags == [TAG] else []

    monkeypatch.setattr(place, "Client", lambda server: Archive())
    caps = AgentCaps(AgentPolicy(max_usd_per_month=10.0), Path("policy.yaml"))
    experiment = Experiment(**{**FILE, "resources": {**FILE["resources"], "provider": "local"}})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"9\.50 USD of 10\.00 USD are spent or may be, and this asks for 1\.00 USD"):
        caps.require_start(experiment, asks_service=True, bills=place.Service("http://service").bills())


def test_without_a_max_cost_nothing_starts_below_a_cap(home: Path) -> None:
    (home / "policy.yaml").write_text("agents: {max_usd_per_run: 5}")
    line = "constraints.max_cost: missing, and agents have a cap; write at most 5.00 USD"
    assert refusal("submit", file="first.yaml", overrides=["constraints.max_cost=null"]) == line
    assert list((home / "experiments").glob("*")) == []


@pytest.mark.usefixtures("trained_runs")
def test_an_experiment_of_a_person_is_read_and_not_changed(home: Path) -> None:
    tune(experiment=Experiment(**FILE), home=home, verbose=0)
    assert call("status", name="first").startswith("first: done\n")
    assert call("report", name="first", trials=1).splitlines()[0] == (
        "first: done in 1m30s for 0.1500 USD (planned 1m30s for 0.1500 USD); nothing was charged"
    )
    assert call("status") == "no experiment of an agent yet"
    theirs = "experiment 'first' was not submitted by an agent; ask a person to change it with `rubberband ext"
    assert refusal("extend", name="first", max_cost=2.0).startswith(theirs)
    assert refusal("stop", name="first").startswith(theirs)
    change_labels(open_folder("first", home), LabelChange(add_tags=(TAG,)))
    assert call("status") == "first: done, 0.15 USD of 1.00 USD, best loss=0.2"
    with local_experiment("first") as found:
        assert found.look()["tags"] == [TAG]


@pytest.mark.usefixtures("trained_runs")
def test_a_search_that_has_reached_its_target_goes_on_to_another_within_the_cap(home: Path) -> None:
    words = {**FILE, "search": {**FILE["search"], "stop": {"target": 0.6}}}  # type: ignore[dict-item]
    tune(experiment=Experiment(**words), home=home, verbose=0)
    change_labels(open_folder("first", home), LabelChange(add_tags=(TAG,)))
    assert "best loss=0.5" in call("status")
    (home / "policy.yaml").write_text("agents: {max_usd_per_run: 0.5}")
    line = "agents.max_usd_per_run of policy.yaml: constraints.max_cost is 1.00 USD, more than 0.50 USD"
    assert refusal("extend", name="first", target=0.3).startswith(line), "it would spend more"
    (home / "policy.yaml").unlink()
    tools = Tools(home, None, Path.cwd())
    assert call("extend", tools, name="first", target=0.3).endswith("\napplied; it goes on")
    (process,) = tools._place._started  # type: ignore[attr-defined]
    assert process.wait(30) == 0
    assert "best      loss=0.25 " in call("status", tools, name="first")


def test_an_agent_adds_trials_after_the_end_within_its_cap(home: Path) -> None:
    tune(experiment=Experiment(**FILE), home=home, verbose=0)
    change_labels(open_folder("first", home), LabelChange(add_tags=(TAG,)))
    tools = Tools(home, None, Path.cwd())
    (home / "policy.yaml").write_text("agents: {max_usd_per_run: 0.5}")
    line = "agents.max_usd_per_run of policy.yaml: constraints.max_cost is 1.00 USD, more than 0.50 USD"
    assert refusal("extend", name="first", num_samples="+4").startswith(line)
    assert refusal("add", name="first", configuration={"lr": 0.01}).startswith(line)
    (home / "policy.yaml").unlink()
    assert "outside" in refusal("add", name="first", configuration={"lr": 7.0})
    assert "trial 99" in refusal("clone", name="first", trial=99, changes={"lr": 0.01})
    assert refusal("clone", name="first", trial=0, changes={"lr": 0.01}, from_checkpoint=True).startswith(
        "trial 0 has trained all of its 4 iterations"
    )
    shown = call("clone", tools, name="first", trial=4, changes={"lr": 0.01}, from_checkpoint=True, dry_run=True)
    assert "applied" not in shown
    for number, (tool, arguments) in enumerate(
        [
            ("extend", {"num_samples": "+4"}),
            ("add", {"configuration": {"lr": 0.05}}),
            ("clone", {"trial": 4, "changes": {"lr": 0.01}, "from_checkpoint": True}),
        ]
    ):
        assert call(tool, tools, name="first", **arguments).endswith("\napplied; it goes on")
        assert tools._place._started[-1].wait(30) == 0, number  # type: ignore[attr-defined]
    text = call("status", tools, name="first")
    assert text.startswith("first: done\n")
    assert " 14 trials" in text


AGENT = """
import sys, time
from pathlib import Path
from rubberband.mcp.caps import Bill
from rubberband.mcp.tools import Tools
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary

home, name = Path(sys.argv[1]), sys.argv[2]
tools, experiment = Tools(home, None, Path.cwd()), load_experiment(Path("local.yaml"), [f"name={name}"])

def bills():
    running = ExperimentState("running")
    cap = Summary(max_cost_usd=1.0)
    return [Bill(name=one.stem, provider="local", state=running, summary=cap) for one in home.glob("*.started")]

def start(experiment, path):
    time.sleep(0.5)
    (home / f"{experiment.name}.started").touch()

tools._place.bills, tools._place.start, tools._place.starting = bills, start, lambda name: f"{name}: starting"
print("ready", flush=True)
input()
import anyio
from rubberband.mcp import tools as module
module.START_S = 0.0
try:
    print(anyio.run(tools.submit, "local.yaml", [f"name={name}"]))
except Exception as error:
    print(error)
"""


def test_one_of_two_processes_that_ask_at_once_sees_what_the_other_started(home: Path, tmp_path: Path) -> None:
    words = {**FILE, "entrypoint": "nosuch:train", "resources": {**FILE["resources"], "provider": "local"}}  # type: ignore[dict-item]
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(words))
    (home / "policy.yaml").write_text("agents: {max_usd_per_run: 1, max_usd_per_month: 1.5, providers: [local]}")
    command = [sys.executable, "-c", AGENT, str(home)]
    agents = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("first", "second")
    ]
    for one in agents:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in agents:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    started, refused = sorted((one.communicate(timeout=60)[0] for one in agents), key=lambda text: "agents." in text)
    assert started.endswith(": starting\n")
    assert refused.startswith("agents.max_usd_per_month of policy.yaml: 1.00 USD of 1.50 USD are spent or may be")
    assert len(list(home.glob("*.started"))) == 1


def test_tools_and_their_processes_have_no_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBBERBAND_TOKEN", "hidden-token")
    assert "hidden-token" not in "".join(place._environment().values())
    schema = str(anyio.run(make_server(Tools(home, None, Path.cwd())).list_tools))
    assert "hidden-token" not in schema
