"""The boot scripts, run by bash with stand-ins for the programs of a real machine."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shlex import quote
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.api.experiments.starting import HOSTED
from rubberband.cloud.aws.boot import (
    MAX_BYTES,
    UV_SHA256,
    UV_VERSION,
    Boot,
    head_script,
    made_of,
    remake_script,
    script,
    worker_script,
)
from rubberband.cloud.aws.calls import NodeStart
from rubberband.cloud.aws.client import last_words
from rubberband.cloud.aws.installing import Installation, installation
from rubberband.cloud.aws.joining import WAIT_S, gpu_trouble
from rubberband.cloud.offers import offer
from rubberband.cloud.pool.provider import BROKER_MODULE
from rubberband.errors import InputError
from rubberband.spec.account import Remembered, remembered
from rubberband.spec.resources import Resources
from tests.builders.aws_account import boot_times
from tests.builders.waiting import eventually

START = NodeStart(instances=("i-001",), head_address="10.0.0.5:6379", gpus=4, lease_s=600.9, lifetime_s=7200.0)
NOW = 1_800_000_000
BOOT = Boot(
    region="us-east-1",
    token_parameter="/rubberband/me/ray-token",
    installation=Installation(python="3.11"),
    ray_settings={"RAY_b": "2", "RAY_a": "1"},
)


OTHER = "rubberband"
"""The name of another project's distribution."""


class Machine:
    """A directory that stands for a machine: programs that write down how they were called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "called"
        self.programs = root / "bin"
        self.programs.mkdir(parents=True)
        for name in ("systemd-run", "shutdown", "python3", "uv", "curl"):
            self.program(name)

    def program(self, name: str, body: str = "") -> None:
        """Make `name` do `body` once it has been written down."""
        path = self.programs / name
        path.write_text(f'#!/bin/bash\nLOG={quote(str(self.log))}\necho {name} "$@" >> "$LOG"\n{body}\n')
        path.chmod(0o755)

    def clock(self, now: int, up_s: int = 1000) -> None:
        """Stop its clock at `now`, when it has been up for so long."""
        self.program("cut", f"echo {up_s}")
        for name in ("date", "touch"):
            self.program(name, f'exec /bin/{name} -d @{now} "$@"')

    def run(self, path: Path, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.programs}:{os.environ['PATH']}", "RUBBERBAND_ROOT": str(self.root)}
        return subprocess.run(
            ["bash", str(path), *words], env=environment, cwd=self.root, capture_output=True, text=True, check=False
        )

    def boot(self, text: str) -> subprocess.CompletedProcess[str]:
        path = self.root / "user-data"
        path.write_text(text)
        return self.run(path)

    def work(self) -> subprocess.CompletedProcess[str]:
        """Run what the boot script has left for systemd to start."""
        return self.run(self.folder / "worker")

    @property
    def folder(self) -> Path:
        return self.root / "var/lib/rubberband"

    @property
    def called(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "a machine")


def test_the_lease_is_armed_before_anything_else(machine: Machine) -> None:
    machine.clock(NOW)
    ran = machine.boot(worker_script(BOOT, START))
    assert ran.returncode == 0, ran.stderr
    lease, stop, worker = (line for line in machine.called if line.startswith("systemd-run "))
    assert lease.split()[1:5] == [
        "--unit=rubberband-lease", "--on-active=5", "--on-unit-active=5", "--timer-property=AccuracySec=1s"
    ]  # fmt: skip
    assert stop.startswith("systemd-run --unit=rubberband-stop ")
    assert stop.endswith("--on-active=7200 shutdown -h now")
    assert worker.startswith("systemd-run --unit=rubberband-worker ")
    assert "--property=OOMPolicy=continue" in worker.split(), "a trial that is killed ends no machine"
    assert (machine.folder / "lease").stat().st_mtime == NOW + 600


@pytest.mark.parametrize(("boot_s", "left_s"), [(900.0, 850.0), (300.0, 300.0), (0.0, 600.0)])
def test_a_machine_puts_its_lease_off_while_it_installs_up_to_a_bound(
    machine: Machine, boot_s: float, left_s: float
) -> None:
    start = replace(START, lease_s=min(600.0, boot_s or 600.0), boot_s=boot_s)
    machine.clock(NOW)
    machine.boot(worker_script(replace(BOOT, installation=Installation(python="3.11", requirements=("x",))), start))
    machine.clock(NOW, up_s=1250)
    os.utime(machine.folder / "lease", (NOW, NOW))
    late = f'[[ $(stat -c %Y "$RUBBERBAND_ROOT/var/lib/rubberband/lease") -lt {NOW + left_s:.0f} ]]'
    machine.program("uv", f"for look in {{1..600}}; do {late} || break; sleep 0.05; done")
    assert machine.work().returncode == 0
    assert (machine.folder / "lease").stat().st_mtime == NOW + left_s
    assert machine.called[-1] == "shutdown -h now", "nothing is left that puts the lease off"


def test_a_machine_that_cannot_arm_its_lease_ends_at_once(machine: Machine) -> None:
    machine.program("systemd-run", "exit 1")
    ran = machine.boot(worker_script(BOOT, START))
    assert ran.returncode != 0
    assert machine.called[-1] == "shutdown -h now"
    assert not (machine.folder / "worker").exists()


@pytest.mark.parametrize(
    ("left_s", "clock_s", "ends"),
    [(3600, 0, False), (-3, 0, True), (None, 0, True), (600, 1800, False), (-3, -1800, True)],
)
def test_the_lease_ends_the_machine_when_it_is_over_or_gone_whatever_its_clock_says(
    machine: Machine, left_s: float | None, clock_s: int, ends: bool
) -> None:
    machine.clock(NOW)
    machine.boot(worker_script(BOOT, START))
    lease = machine.folder / "lease"
    if left_s is None:
        lease.unlink()
    else:
        os.utime(lease, (NOW + left_s,) * 2)
    machine.clock(NOW + clock_s)
    assert machine.run(machine.folder / "check-lease").returncode == 0
    assert (machine.called[-1] == "shutdown -h now") == ends


@pytest.mark.parametrize(("instance_id", "ends"), [("i-0123", True), ("i-of-an-image-made-of-it", False)])
def test_a_machine_that_boots_again_ends(machine: Machine, instance_id: str, ends: bool) -> None:
    cloud = machine.root / "var/lib/cloud"
    (cloud / "data").mkdir(parents=True)
    (cloud / "data/instance-id").write_text("i-0123\n")
    machine.boot(worker_script(BOOT, START))
    (cloud / "data/instance-id").write_text(f"{instance_id}\n")
    machine.log.unlink()
    script_of_every_boot = cloud / "scripts/per-boot/rubberband-end"
    assert os.access(script_of_every_boot, os.X_OK)
    assert machine.run(script_of_every_boot).returncode == 0
    assert machine.called == (["shutdown -h now"] if ends else [])


def test_no_upgrade_holds_up_the_end_of_a_machine(machine: Machine) -> None:
    settings_of_apt = machine.root / "etc/apt/apt.conf.d"
    settings_of_apt.mkdir(parents=True)
    assert machine.boot(worker_script(BOOT, START)).returncode == 0
    assert (settings_of_apt / "99rubberband").read_text() == 'APT::Periodic::Unattended-Upgrade "0";\n'
    assert machine.work().returncode == 0
    assert (settings_of_apt / "99rubberband-lock").read_text() == 'DPkg::Lock::Timeout "600";\n', "set-up commands wait"


def test_the_machine_joins_with_token_label_and_settings_and_ends_with_ray(machine: Machine) -> None:
    machine.program("python3", '[[ "$*" == *start* ]] || exit 0; env | grep -E "^(RAY|RUBBERBAND_L)" >> "$LOG"')
    machine.boot(worker_script(replace(BOOT, setup=("echo it\\'s here > setup-ran", "true")), START))
    ran = machine.work()
    assert ran.returncode == 0, ran.stderr
    token = next(line for line in machine.called if "joining token" in line)
    assert token.endswith(f"/rubberband/me/ray-token us-east-1 {machine.folder}/ray-token")
    assert (machine.root / "setup-ran").read_text() == "it's here\n"
    start = next(line for line in machine.called if "scripts start" in line)
    assert "--address=10.0.0.5:6379 --labels rubberband/instance=i-001 --num-cpus=4 --num-gpus=4" in start
    assert "--block" in start
    assert {"RAY_a=1", "RAY_b=2", "RAY_AUTH_MODE=token", f"RUBBERBAND_LEASE={machine.folder}/lease"} <= {
        *machine.called
    }
    assert machine.called[-1] == "shutdown -h now"


@pytest.mark.parametrize("has_library", [True, False])
def test_models_and_data_are_fetched_while_the_machine_joins(machine: Machine, has_library: bool) -> None:
    order = '{"sources":[{"name":"it\'s/base"}]}'
    missing = f'[[ "$*" != *huggingface_hub* ]] || exit {int(not has_library)}'
    machine.program("python3", f'{missing}; [[ "$*" != *cloud.fetch* ]] || env | grep RUBBERBAND_L >> "$LOG"')
    machine.boot(worker_script(replace(BOOT, fetch=order), START))
    assert machine.work().returncode == 0
    eventually(lambda: any(line.startswith("RUBBERBAND_L") for line in machine.called))
    assert f"python3 -m rubberband.cloud.fetch {order}" in machine.called
    assert f"RUBBERBAND_LEASE={machine.folder}/lease" in machine.called
    assert ("uv pip install --quiet huggingface_hub" in machine.called) is not has_library
    assert any("scripts start" in line for line in machine.called)


MANY = replace(START, instances=("i-001", "i-002", "i-003"))
"""Of one request."""


def test_each_of_many_takes_the_name_at_its_own_place_in_the_request(machine: Machine) -> None:
    machine.program("curl", '[[ "$*" == *ami-launch-index ]] && echo 1 || echo a-token')
    machine.boot(worker_script(BOOT, MANY))
    assert machine.work().returncode == 0
    asked = [line for line in machine.called if line.startswith("curl")]
    assert asked[0].endswith("http://169.254.169.254/latest/api/token")
    assert "--request PUT" in asked[0]
    assert "X-aws-ec2-metadata-token: a-token" in asked[1]
    assert any("rubberband/instance=i-002" in line for line in machine.called)


@pytest.mark.parametrize("answer", ["exit 22", "echo", "echo 3"])
def test_a_machine_without_a_name_ends(machine: Machine, answer: str) -> None:
    machine.program("curl", answer)
    machine.boot(worker_script(BOOT, MANY))
    assert machine.work().returncode != 0
    assert machine.called[-1] == "shutdown -h now"
    assert not any("scripts start" in line for line in machine.called)


def test_a_worker_of_an_image_without_uv_installs_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.programs / "uv").unlink()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    machine.boot(worker_script(replace(BOOT, installation=Installation(python="3.11", requirements=("torch",))), START))
    machine.work()
    assert (machine.folder / "uv.txt").read_text().startswith(f"uv=={UV_VERSION} --hash=sha256:")


@pytest.mark.parametrize("failing", ["setup", "token", "uv"])
def test_any_failure_ends_the_machine(machine: Machine, failing: str) -> None:
    boot = replace(BOOT, setup=("exit 3",) if failing == "setup" else ())
    if failing == "token":
        machine.program("python3", "exit 1")
    if failing == "uv":
        boot = replace(BOOT, installation=Installation(python="3.11", requirements=("torch",)))
        machine.program("uv", "exit 1")
    machine.boot(worker_script(boot, START))
    assert machine.work().returncode != 0
    assert machine.called[-1] == "shutdown -h now"
    assert not any("scripts start" in line for line in machine.called)


UV = b"#!/bin/bash\necho uv\n"


def served_uv(served: Path) -> str:
    """Lay out an index with a wheel of uv for this machine; return the wheel's digest."""
    (served / "simple/uv").mkdir(parents=True)
    (served / "files").mkdir()
    name = f"uv-0.9.1-py3-none-manylinux_2_17_{platform.machine()}.manylinux2014_{platform.machine()}.whl"
    with zipfile.ZipFile(served / "files" / name, "w") as wheel:
        wheel.writestr("uv-0.9.1.data/scripts/uv", UV)
        wheel.writestr("uv/__init__.py", "")
    (served / "simple/uv/index.html").write_text(f'<a href="../../files/{name}#sha256=0">{name}</a>')
    return hashlib.sha256((served / "files" / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("scheme", ["http", "file"])
@pytest.mark.parametrize("digest", ["right", "wrong"])
def test_uv_is_installed_only_as_the_version_and_digest_that_are_known(
    machine: Machine, tmp_path: Path, digest: str, scheme: str
) -> None:
    for name in ("python3", "curl"):
        machine.program(name, f'exec {sys.executable if name == "python3" else shutil.which("curl")} "$@"')
    right = served_uv(tmp_path / "served")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}" if scheme == "http" else (tmp_path / "served").as_uri()
        index = f"{root}/simple"
        asked = f'fetch_uv {index} "{machine.root}/uv" 0.9.1 {"0" * 64} {right if digest == "right" else "1" * 64}'
        ran = machine.boot(f"{script({}, 'boot.sh')}\n{asked}\n")
        server.shutdown()
    if digest == "right":
        assert ran.returncode == 0, ran.stderr
        assert subprocess.check_output([machine.root / "uv/uv"]) == b"uv\n"
    else:
        assert ran.returncode != 0
        assert f"another sha256 than rubberband knows: {right}" in ran.stdout
        assert not (machine.root / "uv/uv").exists()


@pytest.mark.parametrize("has_pip", [True, False])
def test_uv_is_installed_by_pip_as_the_version_that_is_known(machine: Machine, has_pip: bool) -> None:
    (machine.programs / "uv").unlink()
    machine.program("python3", "true" if has_pip else 'if [[ "$*" == "-m pip --version" ]]; then exit 1; fi')
    machine.program("apt-get")
    words = {"INDEX_URL": "", "DIR": str(machine.root), "UV_VERSION": UV_VERSION, "UV_SHA256": UV_SHA256}
    path = f"export PATH={quote(str(machine.programs))}:/usr/bin:/bin"
    ran = machine.boot(f"set -euo pipefail\n{path}\n{script(words, 'boot.sh')}\nfind_uv\n")
    assert ran.returncode == 0, ran.stderr
    assert (machine.root / "uv.txt").read_text().split() == [
        f"uv=={UV_VERSION}",
        *(f"--hash=sha256:{digest}" for digest in UV_SHA256),
    ]
    assert machine.called[-1].endswith(f"--require-hashes -r {machine.root}/uv.txt")
    assert any(line.endswith("install --no-install-recommends python3-pip") for line in machine.called) is not has_pip


def test_requirements_are_installed_into_an_environment_of_the_drivers_python(machine: Machine) -> None:
    digest = "0" * 64
    asked = installation(
        f"s3://bucket/a/rubberband_tune-0.1.0-py3-none-any.whl#sha256={digest} 'scikit-learn>1, <2'",
        python="3.11",
        ray="2.60.0",
    )
    machine.boot(worker_script(replace(BOOT, installation=asked), START))
    assert machine.work().returncode == 0
    made, _, installed = [line for line in machine.called if line.startswith("uv ")]
    assert f"--python 3.11 {machine.folder}/venv" in made
    assert installed.endswith("./wheels/rubberband_tune-0.1.0-py3-none-any.whl[ray,aws] scikit-learn>1, <2 ray==2.60.0")
    address = f"s3://bucket/a/rubberband_tune-0.1.0-py3-none-any.whl#sha256={digest} wheels"
    assert any(address in line for line in machine.called)


@pytest.mark.parametrize("index_url", [None, "https://packages.example.org/simple/"])
def test_an_index_of_the_users_own_is_the_only_one(machine: Machine, index_url: str | None) -> None:
    machine.program("uv", 'echo "index=${UV_DEFAULT_INDEX:-} ${PIP_INDEX_URL:-} ${UV_TORCH_BACKEND:-}" >> "$LOG"')
    asked = installation("torch", python="3.11", ray="2.60.0", index_url=index_url)
    for text in (worker_script(replace(BOOT, installation=asked), START), head_script("us-east-1", asked, (), ())):
        machine.boot(text)
    machine.work()
    used = [line for line in machine.called if line.startswith("index=")]
    assert len(used) == 4
    assert set(used) == ({f"index={index_url} {index_url} "} if index_url else {"index=  ", "index=  auto"})


@pytest.mark.parametrize("role", ["worker", "head"])
@pytest.mark.parametrize("content", [b"the driver's", b"somebody else's"])
def test_only_the_very_wheel_of_the_driver_is_installed(machine: Machine, role: str, content: bytes) -> None:
    (machine.root / "boto3.py").write_text(
        "import pathlib, types\n"
        f"fetch = lambda bucket, key, path: pathlib.Path(path).write_bytes({content!r} + (bucket + key).encode())\n"
        "client = lambda _: types.SimpleNamespace(download_file=fetch)\n"
    )
    machine.program("python3", f'[[ "$1" != -c ]] || PYTHONPATH={quote(str(machine.root))} {sys.executable} "$@"')
    digest = hashlib.sha256(b"the driver'sbucketa/rubberband_tune-1-py3-none-any.whl").hexdigest()
    address = f"s3://bucket/a/rubberband_tune-1-py3-none-any.whl#sha256={digest}"
    asked = installation(address, python="3.11", ray="2.60.0")
    if role == "worker":
        machine.boot(worker_script(replace(BOOT, installation=asked), START))
        ran = machine.work()
        printed = ran.stderr
    else:
        ran = machine.boot(head_script("us-east-1", asked, (), ()))
        printed = ran.stdout
    same = content == b"the driver's"
    assert any("./wheels/rubberband_tune" in line for line in machine.called) == same
    assert ("is not what the driver put there" in printed) == (not same)
    if role == "worker":
        assert (ran.returncode == 0) == same


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_folder_of_the_driver_is_unpacked(machine: Machine, same: bool) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as folder:
        folder.writestr("0/digits.py", "mine" if same else "swapped")
    (machine.root / "boto3.py").write_text(
        "import pathlib, types\n"
        f"fetch = lambda bucket, key, path: pathlib.Path(path).write_bytes({archive.getvalue()!r})\n"
        "client = lambda _: types.SimpleNamespace(download_file=fetch)\n"
    )
    machine.program("python3", f'PYTHONPATH={quote(str(machine.root))} {sys.executable} "$@"')
    digest = hashlib.sha256(archive.getvalue() if same else b"mine").hexdigest()
    ran = machine.boot(head_script("us-east-1", BOOT.installation, (), (f"s3://b/folders/digits.zip#sha256={digest}",)))
    assert (machine.root / "opt/rubberband/digits/digits.py").exists() == same
    assert ("is not what the driver put there" in ran.stdout) == (not same)
    assert ("the head is ready" in ran.stdout) == same


def test_a_file_that_is_sent_no_more_goes_and_what_a_run_wrote_stays(machine: Machine) -> None:
    sent = machine.root / "sent.zip"
    (machine.root / "boto3.py").write_text(
        "import shutil, types\n"
        f"fetch = lambda bucket, key, path: shutil.copy({str(sent)!r}, path)\n"
        "client = lambda _: types.SimpleNamespace(download_file=fetch)\n"
    )
    machine.program("python3", f'PYTHONPATH={quote(str(machine.root))} {sys.executable} "$@"')

    def send(*names: str) -> None:
        with zipfile.ZipFile(sent, "w") as folder:
            for name in names:
                entry = zipfile.ZipInfo(f"0/{name}")
                entry.external_attr = (0o755 if name == "start" else 0o644) << 16
                folder.writestr(entry, "sent")

    send("digits.py", "lib/old name.py")
    machine.boot(head_script("us-east-1", BOOT.installation, (), ("s3://b/folders/digits.zip",)))
    folder = machine.root / "opt/rubberband/digits"
    assert (folder / "lib/old name.py").exists()
    (folder / "result.csv").write_text("written by a run")
    send("digits.py", "lib/new.py", "start")
    assert machine.run(machine.root / "usr/local/bin/rubberband-fetch", "s3://b/folders/digits.zip").returncode == 0
    assert not (folder / "lib/old name.py").exists()
    assert all((folder / name).exists() for name in ("digits.py", "lib/new.py", "result.csv"))
    executable = [path.name for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o111]
    assert executable == ["start"]


@pytest.mark.parametrize("in_a_bucket", [True, False])
def test_packages_are_of_the_drivers_versions(machine: Machine, in_a_bucket: bool) -> None:
    versions = "numpy==2.3.1\ntorch==2.9.0\n"
    address = "s3://bucket/c/constraints/0a1b.txt#sha256=" + "0" * 64
    given = address if in_a_bucket else base64.b64encode(gzip.compress(versions.encode())).decode()
    machine.program("python3", '[[ "$1" != -c ]] || { mkdir -p "$4"; touch "$4/0a1b.txt"; echo "to $4" >> "$LOG"; }')
    asked = Installation(python="3.11", requirements=("torch",), constraints=given)
    machine.boot(worker_script(replace(BOOT, installation=asked), START))
    ran = machine.work()
    assert ran.returncode == 0, ran.stderr
    installed = [line for line in machine.called if line.startswith("uv pip install")][-1]
    if in_a_bucket:
        assert "to constraints" in machine.called
        assert installed == "uv pip install --quiet --constraint constraints/0a1b.txt torch"
    else:
        assert (machine.folder / "constraints.txt").read_text() == versions
        assert installed == "uv pip install --quiet --constraint constraints.txt torch"


@pytest.mark.parametrize(("device", "joins"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_a_machine_joins_only_with_the_gpus_that_it_should_have(
    machine: Machine, device: Literal["cpu", "cuda"], joins: bool
) -> None:
    machine.program("nvidia-smi")
    machine.program("python3", f'[[ "$*" != *joining*gpus* ]] || {{ echo "0 of 4 GPUs"; exit {0 if joins else 1}; }}')
    asked = Installation(python="3.11", requirements=("torch",))
    machine.boot(worker_script(replace(BOOT, installation=asked, device=device), START))
    ran = machine.work()
    checked = [line for line in machine.called if "joining gpus" in line]
    assert checked == (["python3 -m rubberband.cloud.aws.joining gpus 4"] if device == "cuda" else [])
    assert ("nvidia-smi -L" in machine.called) == (device == "cuda"), "the driver is there before torch is installed"
    assert any("scripts start" in line for line in machine.called) == joins
    if not joins:
        said = last_words(ran.stdout)
        assert said == "it powered itself off: its boot script failed at `checking 4 GPUs`: 0 of 4 GPUs"


SHELLCHECK = shutil.which("shellcheck")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("role", ["worker", "head", "remake"])
def test_the_assembled_scripts_are_clean_for_shellcheck(tmp_path: Path, role: str) -> None:
    asked = installation("s3://b/rubberband_tune-1-py3-none-any.whl torch", python="3.11", ray="2.60.0")
    boot = replace(BOOT, installation=replace(asked, constraints="s3://b/c.txt"), setup=("echo it's",), device="cuda")
    text = worker_script(boot, START) if role == "worker" else head_script("us-east-1", asked, ("x",), ("s3://b/f",))
    path = tmp_path / "user-data"
    path.write_text(remake_script("0a", text) if role == "remake" else text)
    checked = subprocess.run([str(SHELLCHECK), str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_an_image_that_has_everything_installs_nothing(machine: Machine) -> None:
    asked = installation("none", python="3.11", ray="2.60.0")
    machine.boot(worker_script(replace(BOOT, installation=asked), START))
    machine.work()
    assert not any(line.startswith(("uv", "curl")) for line in machine.called)


@pytest.mark.parametrize(
    ("install", "requirements"),
    [
        (
            "https://example.org/rubberband_tune-0.1.0-py3-none-any.whl",
            ("rubberband-tune[ray,aws] @ https://example.org/rubberband_tune-0.1.0-py3-none-any.whl", "ray==2"),
        ),
        ("https://example.org/mine-1-py3-none-any.whl", ("https://example.org/mine-1-py3-none-any.whl", "ray==2")),
        ("s3://b/mine-1-py3-none-any.whl", ("./wheels/mine-1-py3-none-any.whl", "ray==2")),
        (f"s3://b/mine-1-py3-none-any.whl#sha256={'a' * 64}", ("./wheels/mine-1-py3-none-any.whl", "ray==2")),
        ("none", ()),
    ],
)
def test_install_reads_requirements_wheels_and_none(install: str, requirements: tuple[str, ...]) -> None:
    assert installation(install, python="3.11", ray="2").requirements == requirements


@pytest.mark.parametrize(
    ("install", "text"),
    [
        ("'torch", "unclosed quote"),
        ("s3://b/folder", "is not a wheel"),
        ("s3://b/mine-1-py3-none-any.whl#sha256=0", "is not a wheel"),
        ("rubberband-tune", "does not say where to install from"),
        ("torch Rubberband_Tune[ray]==1", "does not say where to install from"),
        (OTHER, "another project"),
        (f"{OTHER}[ray,aws]==0.1.0", "another project"),
        (f"'{OTHER} @ https://example.org/a.whl'", "another project"),
        (f"https://example.org/{OTHER}-0.1.0-py3-none-any.whl", "another project"),
    ],
)
def test_an_uninstallable_requirement_is_refused(install: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        installation(install, python="3.11", ray="2")


def test_the_same_arguments_give_the_same_text_and_its_times_can_be_read_back() -> None:
    assert worker_script(BOOT, START) == worker_script(replace(BOOT, ray_settings={"RAY_a": "1", "RAY_b": "2"}), START)
    assert boot_times(worker_script(BOOT, START)) == (600.0, 7200.0)
    assert boot_times(worker_script(BOOT, replace(START, boot_s=900.0))) == (900.0, 7200.0)


def test_a_script_that_ec2_would_not_take_is_refused() -> None:
    with pytest.raises(InputError, match=f"EC2 takes {MAX_BYTES}"):
        worker_script(replace(BOOT, setup=("x" * MAX_BYTES,)), START)


def test_the_longest_usual_script_leaves_room_for_set_up_commands() -> None:
    address = f"s3://bucket/wheels/rubberband_tune-0.1.0-py3-none-any.whl#sha256={'a' * 64}"
    asked = installation(address, python="3.11", ray="2.60.0")
    assert len(worker_script(replace(BOOT, installation=asked), START)) < MAX_BYTES * 2 / 3


def test_no_script_has_a_secret() -> None:
    for text in (worker_script(BOOT, START), head_script("us-east-1", BOOT.installation, (), ())):
        assert not re.search(r"AWS_(SECRET|ACCESS)|BEGIN [A-Z ]*PRIVATE KEY|password", text)


@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=4))
def test_every_value_arrives_as_it_is(words: list[str]) -> None:
    text = script({"ONE": "".join(words), "ALL": tuple(words)}).rstrip("\n")
    shows = f'{text}\nprintf "%s\\0" "$ONE" "${{ALL[@]}}"'
    shown = subprocess.run(["bash"], input=shows.encode(), capture_output=True, check=True).stdout.decode()
    assert shown.split("\0")[: len(words) + 1] == ["".join(words), *words]


def test_the_head_installs_fetches_the_folder_and_leaves_commands_behind(machine: Machine) -> None:
    machine.program(
        "python3",
        'mkdir -p "${@: -1}"; [[ "$*" != *zipfile* ]] || { mkdir -p "${@: -1}/0"; echo x > "${@: -1}/0/file"; }',
    )
    setup, folders = ('touch "$RUBBERBAND_ROOT/set-up"',), ("s3://b/f/digits.zip",)
    ran = machine.boot(head_script("us-east-1", BOOT.installation, setup, folders, bucket="mine"))
    assert ran.returncode == 0, ran.stderr
    assert (machine.root / "opt/rubberband/digits/file").read_text() == "x\n"
    assert (machine.root / "set-up").exists()
    (home,) = (path.parent for path in machine.root.rglob("aws.yaml"))
    assert remembered(home) == Remembered(bucket="mine", region="us-east-1")
    assert "the head is ready" in (machine.root / "var/log/rubberband.log").read_text()
    commands = machine.root / "usr/local/bin"
    assert machine.run(commands / "rubberband").returncode == 0
    assert machine.called[-1] == "python3 -m rubberband.cli"
    assert machine.run(commands / "rubberband-fetch").returncode != 0
    assert not any("shutdown" in line for line in machine.called)


@pytest.mark.parametrize(("fails", "runs"), [(False, False), (True, False), (False, True)])
def test_a_head_is_made_anew_if_nothing_runs_or_keeps_what_it_has(machine: Machine, fails: bool, runs: bool) -> None:
    machine.program("pgrep", f"exit {0 if runs else 1}")
    assert machine.boot(head_script("us-east-1", BOOT.installation, (), ())).returncode == 0
    place, log = machine.root / "opt/rubberband", machine.root / "var/log/rubberband.log"
    (place / "venv").mkdir()
    made_of = (place / "made-of").read_text()
    other = head_script("us-east-1", BOOT.installation, ("false" if fails else "true",), ())
    for _ in range(2):  # an answer that was lost
        ran = machine.boot(remake_script("0a1b", other))
        assert ran.returncode == (73 if runs else 0), ran.stderr
    units = [line for line in machine.called if "rubberband-remake-0a1b" in line]
    assert len(units) == (not runs)
    if not runs:
        assert not log.exists(), "while it is made anew it answers nothing"
        machine.run(place / ".remake-0a1b/script")
    assert "the head is ready" in log.read_text()
    assert ((place / "made-of").read_text() == made_of) == (fails or runs)
    assert (place / "venv").exists() == (fails or runs)
    assert ("false" in (log.parent / "rubberband.log.failed").read_text()) if fails else True


def test_a_digest_differs_with_code_packages_and_settings_and_not_with_the_bucket() -> None:
    wheel = "s3://{}/wheels/rubberband_tune-1-py3-none-any.whl#sha256=" + "0" * 64
    one = replace(installation(wheel.format("a/digits"), python="3.11", ray="2.60.0"), constraints="s3://a/c#sha256=1")
    there = replace(installation(wheel.format("b"), python="3.11", ray="2.60.0"), constraints="s3://b/c#sha256=1")
    assert made_of(one, ()) == made_of(there, ())
    assert made_of(one, ()).endswith(" ./wheels/rubberband_tune-1-py3-none-any.whl[ray,aws]")
    others = [
        made_of(replace(one, constraints="s3://a/c#sha256=2"), ()),
        made_of(replace(one, wheels=(one.wheels[0] + "1",)), ()),
        made_of(replace(one, requirements=(*one.requirements, "scikit-learn")), ()),
        made_of(one, ("apt-get install x",)),
        made_of(one, (), idle_s=600.0),
    ]
    assert len({made_of(one, ()), *others}) == 6


@pytest.mark.parametrize(
    ("process", "for_s", "stops"),
    [
        ("-bash", 3500, False),
        ("-bash", 3700, True),
        ("tmux new -s work", 3700, True),
        ("python3 -m rubberband.cli serve --port 8080", 3700, True),
        ("python3 -m rubberband.cli -v run digits.yaml", 3700, False),
        ("python3 -m rubberband.cli resume digits", 3700, False),
        (" ".join(HOSTED) + " digits", 3700, False),
        (f"python3 -P -m {BROKER_MODULE} /root/.rubberband/pool", 3700, False),
        ("/root/venv/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray", 3700, False),
        ("/usr/bin/ssm-session-worker me-0123", 3700, False),
        ("sshd: ubuntu@pts/0", 3700, False),
    ],
)
def test_the_head_stops_when_nothing_has_run_on_it_for_a_while(
    machine: Machine, process: str, for_s: int, stops: bool
) -> None:
    machine.program("pgrep", f'grep -Eq -- "$2" <<< {quote(process)}')
    machine.program("who", 'echo "me pts/0 2026-11-26 08:00 (tmux(5592).%0)"')
    assert machine.boot(head_script("us-east-1", BOOT.installation, (), (), idle_s=3600.0)).returncode == 0
    (timer,) = [line for line in machine.called if "rubberband-idle" in line]
    assert timer.endswith("/opt/rubberband/check-idle")
    stamp = machine.root / "opt/rubberband/busy"
    machine.clock(NOW)
    os.utime(stamp, (NOW - for_s,) * 2)
    assert machine.run(machine.root / "opt/rubberband/check-idle").returncode == 0
    assert ("shutdown -h now" in machine.called) is stops


@pytest.mark.parametrize("works", [True, False])
def test_the_head_copies_its_journals_to_the_bucket_before_it_stops(machine: Machine, works: bool) -> None:
    machine.program("pgrep", "exit 1")
    machine.program("python3", "" if works else "exit 1")
    machine.boot(head_script("us-east-1", BOOT.installation, (), (), idle_s=3600.0, bucket="mine"))
    os.utime(machine.root / "opt/rubberband/busy", (0, 0))
    machine.run(machine.root / "opt/rubberband/check-idle")
    copies = 'python3 -m rubberband.cloud.aws.on_head keep {"store": "s3://mine/heads"}'
    assert machine.called[-2:] == [copies, "shutdown -h now"]


def test_a_head_that_was_stopped_and_started_again_has_its_whole_time(machine: Machine) -> None:
    machine.program("pgrep", "exit 1")
    machine.program("who")
    machine.boot(head_script("us-east-1", BOOT.installation, (), (), idle_s=3600.0))
    os.utime(machine.root / "opt/rubberband/busy", (0, 0))
    machine.run(machine.root / "var/lib/cloud/scripts/per-boot/rubberband-idle")
    machine.run(machine.root / "opt/rubberband/check-idle")
    assert "shutdown -h now" not in machine.called
    assert len([line for line in machine.called if "rubberband-idle" in line]) == 2


def test_a_head_that_is_never_idle_has_no_timer(machine: Machine) -> None:
    machine.boot(head_script("us-east-1", BOOT.installation, (), (), idle_s=0.0))
    assert not any("rubberband-idle" in line for line in machine.called)


@pytest.mark.parametrize("has_device", [True, False])
def test_where_there_is_efa_nccl_finds_amazons_plug_in(machine: Machine, has_device: bool) -> None:
    for folder in ("ofi-nccl/lib", "efa/lib"):
        (machine.root / "opt/amazon" / folder).mkdir(parents=True)
    if has_device:
        (machine.root / "sys/class/infiniband/efa_0").mkdir(parents=True)
    machine.program("python3", 'echo "paths=${LD_LIBRARY_PATH:-}" >> "$LOG"')
    machine.boot(worker_script(BOOT, START))
    machine.work()
    paths = [line for line in machine.called if line.startswith("paths=")][-1]
    assert ("opt/amazon/ofi-nccl/lib" in paths) == ("opt/amazon/efa/lib" in paths) == has_device


# Its GPUs, before it joins

TWO = (True, "GPU 0: Tesla T4 (UUID: GPU-1)\nGPU 1: Tesla T4 (UUID: GPU-2)\n")


NONE = (False, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")


FINE = (True, "")


class Gpus:
    """Answers of nvidia-smi, one after the other, and of torch; a clock that only waiting moves."""

    def __init__(self, *listed: tuple[bool, str], torch: tuple[bool, str] = FINE) -> None:
        self.listed, self.torch, self.now = list(listed), torch, 0.0

    def run(self, command: list[str]) -> tuple[bool, str]:
        if command[0] == sys.executable:
            return self.torch
        assert command == ["nvidia-smi", "-L"]
        return self.listed.pop(0) if len(self.listed) > 1 else self.listed[0]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def trouble(self, gpus: int) -> str:
        return gpu_trouble(gpus, run=self.run, clock=lambda: self.now, sleep=self.sleep)


def test_gpus_that_work_are_fine_at_once() -> None:
    machine = Gpus(TWO)
    assert (machine.trouble(2), machine.trouble(1), machine.now) == ("", "", 0.0)


def test_a_driver_that_is_late_is_waited_for() -> None:
    machine = Gpus(NONE, NONE, TWO)
    assert machine.trouble(2) == ""
    assert machine.now > 0.0


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (Gpus(NONE), r"^0 of 4 GPUs found within 120 s \(NVIDIA-SMI has failed .*\); give an image"),
        (Gpus(TWO), r"^2 of 4 GPUs found within 120 s; give an image with a driver"),
    ],
)
def test_gpus_that_do_not_come_are_said_in_one_line(machine: Gpus, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        raise AssertionError(machine.trouble(4))
    assert WAIT_S <= machine.now < WAIT_S + 60.0


def test_a_build_without_cuda_is_refused_at_once() -> None:
    machine = Gpus(TWO, torch=(False, "torch 2.9.0+cpu is a build without CUDA\n"))
    assert machine.trouble(2).startswith("torch 2.9.0+cpu is a build without CUDA; give a fitting build or driver")
    assert machine.now == 0.0


def test_a_driver_or_gpu_that_torch_is_not_made_for_is_refused_with_its_fix() -> None:
    error = "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update it"
    advice = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    machine = Gpus(TWO, torch=(False, f'Traceback:\n  File "<string>"\n{error}\n{advice}'))
    said = machine.trouble(2)
    assert said.startswith(error[:80])
    assert said.endswith("(resources.aws.index_url, resources.aws.image), or another type")


def test_the_line_fits_into_what_is_reported_of_a_console() -> None:
    for machine in (Gpus(NONE), Gpus(TWO, torch=(False, "x" * 500))):
        assert len(machine.trouble(2)) <= 200 + 20
        assert "\n" not in machine.trouble(2)


@pytest.mark.long
def test_this_torch_is_found_out() -> None:
    """The code that asks torch is run for real: on a machine without GPUs it says so."""
    real = Gpus((True, "GPU 0: x\n"))

    def run(command: list[str]) -> tuple[bool, str]:
        if command[0] != sys.executable:
            return real.run(command)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode == 0, done.stdout or done.stderr

    import torch

    said = gpu_trouble(1, run=run, clock=lambda: real.now, sleep=real.sleep)
    assert (said == "") == (torch.cuda.device_count() >= 1)
    assert said == "" or "is a build without CUDA" in said or "sees 0 of 1 GPUs" in said


@pytest.mark.parametrize("stream", ["1", "2"])
def test_the_reason_is_what_a_command_says_in_either_stream(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho driver/library version mismatch >&{stream}\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    clock = Gpus(NONE)
    assert "(driver/library version mismatch)" in gpu_trouble(1, clock=lambda: clock.now, sleep=clock.sleep)


@pytest.mark.parametrize(
    "instance_type",
    [
        "g5g.xlarge",
        "g4ad.xlarge",
        "dl1.24xlarge",
        "dl2q.24xlarge",
        "inf2.xlarge",
        "trn1.2xlarge",
        "trn2u.48xlarge",
        "vt1.3xlarge",
        "f2.6xlarge",
        "p2.xlarge",
    ],
)
def test_a_type_whose_accelerator_torch_cannot_use_is_refused(instance_type: str) -> None:
    words = {"instance_type": instance_type, "gpus_per_instance": 1, "price_per_hour": 1.0}
    with pytest.raises(InputError, match=rf"{instance_type}.* choose a type with an NVIDIA GPU, such as g4dn"):
        offer(Resources(provider="aws", **words), environment={})
    offer(Resources(provider="virtual", **words), environment={})
    offer(Resources(provider="aws", aws={"image": "ami-1", "install": "none"}, **words), environment={})
