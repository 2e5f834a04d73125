"""The files of examples/deploy: their commands are ours, and the service starts by them, also behind nginx."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from rubberband.cli import app
from tests.builders.documents import ROOT, blocks
from tests.builders.server_process import ServerProcess, serving

DEPLOY = ROOT / "examples/deploy"
NAME = "tuning.example.org"


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.read(DEPLOY / "rubberband.service", encoding="utf-8")
    return found


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def serve_options() -> list[str]:
    """What the unit gives `rubberband serve`."""
    _, command, *options = shlex.split(unit()["Service"]["ExecStart"])
    assert command == "serve"
    return options


def test_the_page_shows_the_files() -> None:
    shown = {block.title: block.text for block in blocks(ROOT / "docs/examples/deploy.md") if block.title}
    assert shown == {name: (DEPLOY / name).read_text(encoding="utf-8") for name in shown}
    assert set(shown) == {"rubberband.service", "nginx.conf", "compose.yaml", "Dockerfile"}


def test_compose_and_systemd_start_the_same_service() -> None:
    command, *options = shlex.split(compose()["services"]["rubberband"]["command"])
    assert (command, options) == ("serve", serve_options())


def test_commands_in_the_files_are_ours() -> None:
    group: Any = typer.main.get_command(app)
    for path in DEPLOY.iterdir():
        for found in re.findall(r"\brubberband ((?:serve|token create)\b[^`\n]*)", path.read_text(encoding="utf-8")):
            words = shlex.split(found)
            command = group
            while words and hasattr(command, "commands") and words[0] in command.commands:
                command = command.commands[words.pop(0)]
                command = command.made() if hasattr(command, "made") else command
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, f"{path.name}: {found}"


def test_the_image_installs_extras_that_exist_and_keeps_the_home_in_the_volume() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    installed = re.search(r"/src\[([\w,]+)\]", text)
    assert installed is not None
    assert set(installed[1].split(",")) <= extras.keys()
    (home,) = re.findall(r"RUBBERBAND_HOME=(\S+)", text)
    assert f"state:{home}" in compose()["services"]["rubberband"]["volumes"]
    assert unit()["Service"]["Environment"] == f"RUBBERBAND_HOME={home}"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze; apt-get install systemd")
    text = (DEPLOY / "rubberband.service").read_text(encoding="utf-8")
    file = tmp_path / "rubberband.service"
    file.write_text(text.replace("/opt/rubberband/bin/rubberband", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def server(home: Path, tmp_path: Path) -> Iterator[tuple[ServerProcess, str]]:
    """The service as the files start it, once it has a token; and that token."""
    (tmp_path / "trials.py").write_text("def train(config): ...\n", encoding="utf-8")
    options = [str(tmp_path) if word == "/srv/trials" else word for word in serve_options()]
    refused = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert "rubberband token create" in str(refused.exception)
    token = CliRunner().invoke(app, ["token", "create", "ann", "--scope", "admin"]).stdout.strip()
    with serving(home, *options) as started:
        yield started, token


@pytest.mark.long
def test_the_service_is_healthy_and_asks_for_a_token(server: tuple[ServerProcess, str]) -> None:
    started, token = server
    (check,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    subprocess.run(
        [sys.executable, "-c", check.replace(":8642", f":{started.port}").replace("=5)", "=60)")], check=True
    )
    asked = [
        httpx.get(f"{started.address}/v1/experiments", headers=headers, timeout=60).status_code
        for headers in ({"Host": NAME}, {"Host": NAME, "Authorization": f"Bearer {token}"})
    ]
    assert asked == [401, 200]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def nginx(folder: Path, port: int) -> Iterator[str]:
    """The configuration in front of a service on a port; its address."""
    program = shutil.which("nginx")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("there is no nginx, or no openssl; apt-get install nginx openssl")
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    version = tuple(map(int, re.findall(r"\d+", said)[:3]))
    ask = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
    files = ["-keyout", str(folder / "privkey.pem"), "-out", str(folder / "fullchain.pem")]
    subprocess.run([*ask, *files], check=True, capture_output=True)
    secure, plain = free_port(), free_port()
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8").replace("/etc/ssl/tuning", str(folder))
    text = text.replace(":8642", f":{port}").replace("listen 80;", f"listen {plain};")
    text = text.replace("listen 443 ssl;", f"listen {secure} ssl;")
    if version < (1, 25, 1):
        text = re.sub("http2 on;", "", text).replace(f"{secure} ssl;", f"{secure} ssl http2;")
    (folder / "site.conf").write_text(text, encoding="utf-8")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder};" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}} "
        f"http {{ access_log off; {places} include {folder}/site.conf; }}",
        encoding="utf-8",
    )
    words = [program, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr"]
    subprocess.run([*words, "-t"], check=True, capture_output=True)
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"https://127.0.0.1:{secure}"
        finally:
            process.terminate()


@pytest.mark.long
def test_nginx_passes_pages_and_events_on(server: tuple[ServerProcess, str], tmp_path: Path) -> None:
    started, token = server
    headers = {"Host": NAME, "Authorization": f"Bearer {token}"}
    with nginx(tmp_path, started.port) as address, httpx.Client(verify=False, headers=headers, timeout=60) as client:
        for _ in range(100):
            try:
                found = client.get(f"{address}/v1/experiments")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        assert found.status_code == 200
        with client.stream("GET", f"{address}/v1/events") as stream:
            assert next(stream.iter_lines()).startswith("retry: ")
        page = httpx.get(f"{address}/", headers={"Host": NAME}, verify=False, timeout=60)
        assert page.headers.get("location", f"https://{NAME}").startswith(("/", f"https://{NAME}"))
