"""`rubberband mcp` as a process: a scripted client of the official package, its protocol, and its ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from rubberband.commands.local_experiment import local_experiment
from rubberband.errors import InputError
from rubberband.mcp.server import SKILL
from tests.builders.agents import Agent, agent, parameters
from tests.builders.server_process import serving
from tests.builders.waiting import eventually

TIGHT = {
    "name": "digits",
    "search": {
        "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 0.1}},
        "scheduler": {"type": "sha", "num_samples": 8, "max_t": 8, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "1h", "max_cost": 0.22, "confidence": 0.5},
    "resources": {"provider": "virtual", "gpus_per_instance": 1, "price_per_hour": 3, "max_instances": 2},
    "profile": {"seconds_per_iteration": {1: 10}, "iteration_cv": 0.6, "trial_cv": 0.6},
}
"""An experiment whose iterations vary: under the name `n2` its max_cost ends it."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("RUBBERBAND_HOME", str(home))
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(TIGHT))
    return home


async def session(scripted: Agent) -> None:
    """Plan, submit, follow, extend, report; and be refused above the cap of 0.50 USD."""
    call = scripted.call
    renamed = ["name=n2"]
    planned = await call("plan", file="digits.yaml", overrides=renamed)
    assert planned.startswith("n2: 4m10s and 0.21 USD predicted (in 95 % at most ")
    assert planned.endswith(
        "submit would start it (cap of agents: 0.50 USD a run, no cap of a month; providers virtual)"
    )
    above = [*renamed, "constraints.max_cost=0.6"]
    line = (
        "agents.max_usd_per_run of policy.yaml: constraints.max_cost is 0.60 USD, more than 0.50 USD; lower it, or ask"
    )
    assert (
        (await call("plan", file="digits.yaml", overrides=above))
        .splitlines()[-1]
        .startswith(f"submit is refused: {line}")
    )
    assert (await call("submit", refused=True, file="digits.yaml", overrides=above)).startswith(line)
    assert (await call("submit", file="digits.yaml", overrides=renamed)).startswith("n2: started\n")
    followed = await call("status", name="n2", wait_s=30)
    assert followed.startswith("n2: budget: "), followed
    assert "; `extend --max-cost` and `resume` continue it" in followed
    more = "agents.max_usd_per_run of policy.yaml: constraints.max_cost is 0.60 USD, more than 0.50 USD; "
    assert (await call("extend", refused=True, name="n2", max_cost=0.6)).startswith(more)
    shown = await call("extend", name="n2", max_cost=0.4, dry_run=True)
    assert "max_cost 0.40 USD" in shown.replace("0.4000", "0.40")
    assert (await call("extend", name="n2", max_cost=0.4)).endswith("\napplied; it goes on")
    assert (await call("status", name="n2", wait_s=30)).startswith("n2: done\n")
    reported = await call("report", name="n2", trials=2)
    assert re.match(r"n2: done in [0-9ms]+ for 0\.\d+ USD \(planned 4m10s for 0\.2082 USD\); nothing was c", reported)
    assert (await call("submit", refused=True, file="digits.yaml", overrides=renamed)).startswith("the name 'n2' is ta")


def test_an_agent_plans_submits_follows_and_extends_below_its_cap(home: Path, tmp_path: Path) -> None:
    (home / "policy.yaml").write_text("agents: {max_usd_per_run: 0.5, providers: [virtual]}")

    async def main() -> None:
        async with agent(home, tmp_path) as scripted:
            await session(scripted)
        words = sum(len(answer) for *_, answer, _ in scripted.transcript)
        assert words / len(scripted.transcript) < 800, "answers are short"
        page = (Path(__file__).parents[2] / "docs/agents.md").read_text(encoding="utf-8")
        (told,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
        answers = "\n".join(answer for *_, answer, _ in scripted.transcript)
        heard = {*answers.replace(str(home), "HOME").splitlines()}
        heard |= {f"> {tool} {json.dumps(arguments)}" for tool, arguments, *_ in scripted.transcript} | {"..."}
        assert [line for line in told.splitlines() if line not in heard] == []

    anyio.run(main)
    assert (home / "policy.yaml").read_text() == "agents: {max_usd_per_run: 0.5, providers: [virtual]}"


@pytest.mark.long
def test_the_skill_is_followed_to_the_letter_in_a_fresh_home(home: Path, tmp_path: Path) -> None:
    text = subprocess.run(
        [sys.executable, "-m", "rubberband.cli", "mcp", "--skill"], capture_output=True, text=True, check=True
    ).stdout
    assert text == SKILL.read_text()
    for name, content in re.findall(r'```yaml title="([\w.]+)"\n(.*?)```', text, re.DOTALL):
        (tmp_path / name).write_text(content)
    calls = [line.partition(" ") for line in re.findall(r"```call\n(.*?)\n```", text, re.DOTALL)]
    assert [tool for tool, _, _ in calls] == ["plan", "plan", "submit", "status", "report"]

    async def main() -> None:
        async with agent(home, tmp_path) as scripted:
            tools = {tool.name: tool for tool in (await scripted.session.list_tools()).tools}
            assert f"The tools are {', '.join(f'`{name}`' for name in list(tools)[:-1])}" in " ".join(text.split())
            for tool, _, arguments in calls:
                await scripted.call(tool, **json.loads(arguments))
        answers = [answer for *_, answer, _ in scripted.transcript]
        assert answers[0].startswith("rehearsal: 1m30s and 0.15 USD predicted ")
        assert answers[3].startswith("rehearsal: done\n")
        assert answers[4].startswith("rehearsal: done in 1m30s for 0.1500 USD (planned 1m30s for 0.1500 USD)")

    anyio.run(main)


def asked(id: int, method: str, **words: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": words}) + "\n"


HELLO = asked(0, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "t", "version": "1"})
LOUD = """
import os
from rubberband.mcp.tools import Tools
look = Tools._look
def loud(self, name):
    print("loud"), os.write(1, b"loud")
    return look(self, name)
Tools._look = loud
from rubberband.cli import main
main()
"""
READY = '{"jsonrpc": "2.0", "method": "notifications/initialized"}\n'


@pytest.mark.long
@pytest.mark.parametrize("how", ["ctrl-c", "closed"])
def test_the_end_of_the_tools_leaves_no_orphan_and_the_experiment_goes_on(home: Path, tmp_path: Path, how: str) -> None:
    """Only the protocol is on stdout, also where a tool prints."""
    scheduler = {"type": "sha", "num_samples": 2000, "max_t": 8, "reduction_factor": 2}
    search = {**TIGHT["search"], "scheduler": scheduler}  # type: ignore[dict-item]
    words = {**TIGHT, "name": "wide", "constraints": {"max_cost": 500}, "search": search}
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump(words))
    environment = os.environ | (parameters(home, tmp_path).env or {})
    piped: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        [sys.executable, "-c", LOUD, "mcp"], cwd=tmp_path, env=environment, text=True, start_new_session=True, **piped
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        calls = [("plan", {"file": "digits.yaml"}), ("submit", {"file": "wide.yaml"})]
        process.stdin.write(HELLO + READY)
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline())]
        for number, (tool, arguments) in enumerate(calls, 1):
            process.stdin.write(asked(number, "tools/call", name=tool, arguments=arguments))
            process.stdin.flush()
            answers.append(json.loads(process.stdout.readline()))
        assert [answer["id"] for answer in answers] == [0, 1, 2]
        assert [answer["result"]["content"] for answer in answers[1:] if answer["result"]["isError"]] == []
        if how == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.stdin.close()
        left = process.stdout.read()
        assert (process.wait(30), left) == (130 if how == "ctrl-c" else 0, "")
        told = process.stderr.read()
        assert "loud" in told
        assert "Traceback" not in told
        with pytest.raises(ProcessLookupError):  # no process of its group is left
            os.killpg(process.pid, 0)

    def is_done() -> bool:
        with local_experiment("wide") as found:
            return found.look()["state"] == "done"

    eventually(is_done, 60.0)


def test_without_the_package_it_is_refused_in_one_line(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['mcp'] = None\nfrom rubberband.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", blocked, "mcp"], capture_output=True, text=True, check=False)
    line = "error: rubberband mcp needs mcp; run pip install 'rubberband-tune[mcp]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.long
def test_an_agent_at_a_service(home: Path, tmp_path: Path) -> None:
    (home / "policy.yaml").write_text("agents: {max_usd_per_run: 0.5, providers: [virtual]}")

    async def main(address: str) -> None:
        async with agent(home, tmp_path, RUBBERBAND_SERVER=address) as scripted:
            await session(scripted)
            assert (await scripted.call("status")).startswith("n2: done, ")
            line = await scripted.call("add", refused=True, name="n2", configuration={"lr": 0.01})
            assert "USD, which exceeds the limits with 50 % confidence; first `rubberband extend n2 --max-cost " in line
            more = await scripted.call("extend", name="n2", num_samples="+1", max_cost=0.5)
            assert more.endswith("\napplied; it goes on")
            assert (await scripted.call("status", name="n2", wait_s=30)).startswith("n2: done\n")
            assert " 9 trials" in (await scripted.call("status", name="n2"))
            over = await scripted.call("stop", refused=True, name="n2")
            assert over.startswith("experiment 'n2' is done: it is over")

    with serving(tmp_path / "service") as server:
        anyio.run(main, server.address)
    with pytest.raises(InputError, match="not found"), local_experiment("n2"):
        pass


SLOW = """
import time
import rubberband

def train(config):
    done = rubberband.get_checkpoint() or 0
    while True:
        time.sleep(0.5)
        done += 1
        rubberband.report({"loss": config["lr"] / done}, checkpoint=done)
"""


def write_slow(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    scheduler = {"type": "none", "num_samples": 4, "max_t": 20}
    words = {
        "name": "real",
        "entrypoint": "slow:train",
        "search": {**TIGHT["search"], "scheduler": scheduler},  # type: ignore[dict-item]
        "constraints": {"deadline": "10m", "max_cost": 1},
        "resources": {"provider": "local", "gpus_per_instance": 2, "price_per_hour": 3, "max_instances": 1},
        "profile": {"seconds_per_iteration": {1: 0.5}},
    }
    (folder / "real.yaml").write_text(yaml.safe_dump(words))


@pytest.mark.long
@pytest.mark.ray
def test_two_agents_that_submit_at_once_do_not_pass_their_cap_together(home: Path, tmp_path: Path) -> None:
    """Each looks at the cap and then starts: one after the other, though they are two processes."""
    write_slow(tmp_path)
    (home / "policy.yaml").write_text("agents: {max_usd_per_run: 1, max_usd_per_month: 1.5, providers: [local]}")
    answers = dict[str, str]()

    async def submit(scripted: Agent, name: str) -> None:
        arguments = {"file": "real.yaml", "overrides": [f"name={name}"]}
        found: Any = await scripted.session.call_tool("submit", arguments)
        answers[name] = found.content[0].text

    async def main() -> None:
        async with agent(home, tmp_path) as one, agent(home, tmp_path) as other:
            async with anyio.create_task_group() as group:
                for number, scripted in enumerate([one, other] * 2):
                    group.start_soon(submit, scripted, f"n{number}")
            started = [name for name, text in answers.items() if text.startswith(f"{name}: start")]
            assert len(started) == 1, answers
            line = "agents.max_usd_per_month of policy.yaml: 1.00 USD of 1.50 USD are spent or may be"
            assert all(text.startswith(line) for name, text in answers.items() if name not in started), answers
            await one.call("stop", name=started[0])
            while "runs" in await one.call("status", name=started[0], wait_s=30):
                pass

    anyio.run(main)


@pytest.mark.long
@pytest.mark.ray
def test_a_real_run_is_stopped_and_extended_in_part_and_outlives_the_session(home: Path, tmp_path: Path) -> None:
    write_slow(tmp_path)

    async def main() -> None:
        async with agent(home, tmp_path) as scripted:
            call = scripted.call
            assert "nothing" not in await call("plan", file="real.yaml")
            await call("submit", file="real.yaml")
            while "2 trials" not in (told := await call("status", name="real")) and "loss=" not in told:
                await anyio.sleep(0.5)
            assert told.startswith("real: runs")
            assert await call("stop", name="real", trials=[1]) == "real: stop of 1 trial requested"
            assert (await call("extend", name="real", deadline="20m")).endswith("\napplied")
            line = await call("stop", refused=True, name="real", trials=[9])
            assert line.startswith("experiment 'real' is running: ")

    anyio.run(main)

    def is_done() -> bool:
        with local_experiment("real") as found:
            return found.look()["state"] == "done"

    eventually(is_done, 120.0)
    with local_experiment("real") as found:
        view = found.look()
    assert view["summary"]["deadline_s"] == 1200.0
    assert view["summary"]["iterations"] < 80, "trial 1 was stopped"
