"""The fake's instances as real processes on this machine: each boots, runs its UserData, and ends with its instance.

An instance is a process (guest.py) with a directory for a disk and everything that it started. Who ends is told to the
other side: what the fake terminates is killed, and a machine that shuts down, or dies, is powered off in the fake.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import rubberband
from rubberband.cloud.ray_head.instance import DIRECTORY_TAG, INSTANCE_TAG, end_tagged, tagged
from rubberband.cloud.ray_head.ray_node import make_temp_dir
from tests.ec2 import guest
from tests.ec2.commands import Result
from tests.ec2.core import FakeAws
from tests.ec2.instance import Instance

_POLL_S = 0.05
_OBJECT_STORE_BYTES = 80 * 1024**2
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INHERITED = ("LANG", "LC_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_", "UV_", "HTTP", "http")
"""What begins like this is of the network that this computer is in, so a machine's processes need it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    instance_id: str
    root: Path
    temp_dir: str
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]


class Machines:
    """The machines of `fake`, in a directory each under `directory`, whose console is `<id>.log` beside it.

    `environment(id)`: what a machine's processes find in theirs, besides its own; `boot_s`: from running, as EC2 calls
    it, to the start of UserData. A thread of its own ticks the fake's clock.
    """

    def __init__(
        self,
        fake: FakeAws,
        directory: Path,
        *,
        environment: Callable[[str], Mapping[str, str]] = lambda _: {},
        boot_s: float = 0.0,
    ) -> None:
        self._fake, self._directory = fake, directory.resolve()
        self._environment, self._boot_s = environment, boot_s
        self._changes: queue.SimpleQueue[tuple[str, Instance]] = queue.SimpleQueue()
        self._booting: dict[str, tuple[float, Instance]] = {}
        self._machines: dict[str, _Machine] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="fake machines", daemon=True)

    def start(self) -> None:
        """From now on, what the fake launches boots here."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._fake.on_boot = lambda instance: self._changes.put(("boot", instance))
        self._fake.world.console = self.console
        self._fake.world.runs_command = self.run_command
        self._fake.world.agent_s = self._fake.world.command_known_s = self._fake.world.command_s = 0.0
        self._fake.on_end = lambda instance: self._changes.put(("end", instance))
        self._thread.start()

    def close(self) -> None:
        """End every machine, and every instance of the fake; nothing of theirs runs any more once this returns."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        for machine in self._machines.values():
            _signal(machine.process)
        for instance_id in list(self._machines):
            self._clear(instance_id)
        for instance in self._fake.living:
            self._fake.break_down(instance.instance_id)

    def console(self, instance_id: str) -> str:
        path = self._directory / f"{instance_id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def run_command(self, instance_id: str, script: str) -> Result:
        """Start a shell script on a machine, as SSM's agent does."""
        done: list[tuple[int, str, str]] = []

        def run() -> None:
            machine = self._machines.get(instance_id)
            if machine is None:
                done.append((75, "the machine boots", ""))
                return
            command, environment = ["sh", "-c", script], machine.environment
            ran = subprocess.run(
                command, env=environment, cwd=machine.root, capture_output=True, text=True, check=False
            )
            done.append((ran.returncode, ran.stdout, ran.stderr))

        threading.Thread(target=run, name="a command", daemon=True).start()
        return lambda: done[0] if done else None

    def disk(self, instance_id: str) -> Path:
        """The directory that stands for its file system; it is removed when the machine ends."""
        return self._directory / instance_id

    def environment(self, instance_id: str) -> dict[str, str]:
        """What a process that is started from outside needs to be one of the machine's, as a session on it would be; it
        ends with the machine. Raises KeyError unless that runs."""
        return dict(self._machines[instance_id].environment)

    def processes(self, instance_id: str | None = None) -> list[int]:
        """The ids of the processes that run on a machine, or on all of them."""
        return [process.pid for process in tagged(str(self._directory), instance_id)]

    def _live(self) -> None:
        while not self._closing.wait(_POLL_S):
            try:
                self._fake.tick()
                self._follow_the_fake()
                self._boot_what_is_due()
                self._tell_what_ended()
            except Exception:  # a defect, which must not let machines live for ever
                traceback.print_exc()

    def _follow_the_fake(self) -> None:
        while not self._changes.empty():
            kind, instance = self._changes.get()
            if kind == "boot":
                self._booting[instance.instance_id] = (instance.running_at + self._boot_s, instance)
            else:
                self._booting.pop(instance.instance_id, None)
                if (machine := self._machines.get(instance.instance_id)) is not None:
                    _signal(machine.process)

    def _boot_what_is_due(self) -> None:
        now = self._fake.clock()
        due = [instance for at, instance in self._booting.values() if now >= at]
        for instance in due:
            del self._booting[instance.instance_id]
            try:
                self._machines[instance.instance_id] = self._boot(instance)
            except OSError as error:
                self._fake.break_down(instance.instance_id, f"Server.InternalError ({error})")

    def _tell_what_ended(self) -> None:
        for machine in list(self._machines.values()):
            if machine.process.poll() is not None:
                self._clear(machine.instance_id)
                self._fake.power_off(machine.instance_id)

    def _boot(self, instance: Instance) -> _Machine:
        root = self.disk(instance.instance_id)
        programs = guest.make_programs(root)
        again = (root / guest.USER_DATA).exists()  # cloud-init runs what stands for each boot only
        (root / guest.USER_DATA).write_text(_EACH_BOOT if again else instance.user_data)
        (root / "root").mkdir(exist_ok=True)
        shutil.rmtree(root / "run", ignore_errors=True)
        temp_dir = make_temp_dir()
        environment = {
            **_search_path(instance.user_data),
            **self._machine_environment(instance.instance_id, programs, temp_dir),
        }
        with open(self._directory / f"{instance.instance_id}.log", "ab") as console:
            process = subprocess.Popen(
                [sys.executable, "-P", guest.__file__, "boot", str(root)],
                env=environment,
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        return _Machine(
            instance_id=instance.instance_id, root=root, temp_dir=temp_dir, environment=environment, process=process
        )

    def _machine_environment(self, instance_id: str, programs: Path, temp_dir: str) -> dict[str, str]:
        root = self.disk(instance_id)
        python = Path(sys.executable).parent
        return {
            **{name: value for name, value in os.environ.items() if name.startswith(_INHERITED)},
            "PATH": f"{programs}:{python}:{_SYSTEM_PATH}",
            "HOME": str(root / "root"),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "RUBBERBAND_ROOT": str(root),
            "RUBBERBAND_RAY_OPTIONS": f"--temp-dir {temp_dir} --object-store-memory {_OBJECT_STORE_BYTES}",
            DIRECTORY_TAG: str(self._directory),
            INSTANCE_TAG: instance_id,
            "SPT_NOENV": "1",
            **self._environment(instance_id),
        }

    def _clear(self, instance_id: str) -> None:
        """Wait for the machine's end, and leave nothing of it but its console."""
        machine = self._machines.pop(instance_id)
        with contextlib.suppress(subprocess.TimeoutExpired):
            machine.process.wait(timeout=10)
        machine.process.kill()
        machine.process.wait()
        end_tagged(str(self._directory), instance_id)
        instance = self._fake.world.instances[instance_id]
        behavior = instance.shutdown_behavior if instance.ended_at is None else instance.end_behavior
        if behavior == "terminate" or self._closing.is_set():  # else its disk stays
            shutil.rmtree(machine.root, ignore_errors=True)
        shutil.rmtree(machine.temp_dir, ignore_errors=True)


def _search_path(user_data: str) -> dict[str, str]:
    """What lets a machine's Python find this package where it is not installed, unless the machine installs its own."""
    if re.search(r"^REQUIREMENTS=\([^)]", user_data, re.MULTILINE):
        return {}
    home = Path(rubberband.__file__).parent.parent
    installed = home in {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    return {} if installed else {"PYTHONPATH": str(home)}


_EACH_BOOT = """#!/bin/bash
for script in "$RUBBERBAND_ROOT"/var/lib/cloud/scripts/per-boot/*; do [[ ! -x "$script" ]] || "$script"; done
"""


def _signal(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
