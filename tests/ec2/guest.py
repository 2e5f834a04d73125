"""What runs inside a machine of the fake: its first process, and the programs that a boot script finds on its PATH.

The first process runs the machine's UserData, keeps the timers of `systemd-run`, and ends every process of the machine
when `shutdown` asks for it, when it is terminated (SIGTERM), and when the fake itself has gone, however that happened.
It is run by path and imports only the standard library until its end, and so costs little memory and no start-up time.

    guest.py boot ROOT            be the machine whose disk is the directory ROOT
    guest.py systemd-run ROOT …   what systemd's program of that name does, as far as boot scripts use it
    guest.py shutdown ROOT …      the same of shutdown
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

USER_DATA = "user-data"
PROGRAMS = ("systemd-run", "shutdown", "sudo")

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SPAN_S = {"": 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(slots=True, kw_only=True)
class Unit:
    """A transient unit: a command, now or by a timer."""

    command: list[str]
    environment: dict[str, str]
    due_at: float | None
    """On the monotonic clock; None: when it has ended, it is over."""
    every_s: float | None
    """It starts again so long after it last started; None: once."""
    process: subprocess.Popen[bytes] | None = None


def make_programs(root: Path) -> Path:
    """The directory of the machine's own programs, to go before all others on its PATH."""
    directory = root / "bin"
    directory.mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS:
        path = directory / program
        words = [sys.executable, "-I", "-S", __file__, program, str(root)]
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return directory


def boot(root: Path) -> None:
    """Be the machine, from here to its end."""
    parent = os.getppid()
    ending: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: ending.append(received))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _units_directory(root).mkdir(parents=True, exist_ok=True)
    _pid_file(root).write_text(str(os.getpid()))
    units = {"": _start_user_data(root)}
    while not ending and os.getppid() == parent and root.exists():
        _look_for_units(root, units)
        _run_what_is_due(root, units)
        _reap({unit.process.pid for unit in units.values() if unit.process})
        time.sleep(_POLL_S)  # units come as files, timers by real time, and ends of processes that are not its own
    _say("the machine ends" if os.getppid() == parent else "the cloud is gone: the machine ends")
    _end_processes()


def systemd_run(root: Path, arguments: list[str]) -> None:
    """Make a transient unit. It does not inherit the caller's environment, as the real one's does not."""
    parser = argparse.ArgumentParser(prog="systemd-run", allow_abbrev=False)
    parser.add_argument("--unit", "-u")
    parser.add_argument("--on-active", type=seconds)
    parser.add_argument("--on-boot", type=seconds)
    parser.add_argument("--on-unit-active", type=seconds)
    parser.add_argument("--setenv", "-E", action="append", default=[])
    for ignored in ("--timer-property", "--property", "-p", "--description", "--uid", "--slice"):
        parser.add_argument(ignored, action="append")
    parser.add_argument("--quiet", "-q", "--collect", "-G", "--no-block", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    if not command:
        parser.error("Command line to execute required.")
    name = chosen.unit or f"run-{os.getpid()}"
    first = chosen.on_active if chosen.on_active is not None else chosen.on_boot
    if first is None and chosen.on_unit_active is not None:
        parser.error("a timer with --on-unit-active alone never starts; add --on-active")
    content = {
        "command": command,
        "environment": dict(item.partition("=")[::2] for item in chosen.setenv),
        "due_at": time.monotonic() + (first or 0.0),
        "every_s": chosen.on_unit_active,
    }
    _add_unit(root, name.removesuffix(".service").removesuffix(".timer"), json.dumps(content))
    kind = "service" if first is None else "timer"
    _say(f"Running {'as unit' if kind == 'service' else 'timer as unit'}: {name}.{kind}")


def shutdown(root: Path, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="shutdown", add_help=False)
    parser.add_argument("-h", "-P", "-H", "--poweroff", "--halt", action="store_true")
    parser.add_argument("when", nargs="?", choices=("now", "+0"), default="now")
    parser.add_argument("message", nargs="*")
    parser.parse_args(arguments)
    _say("the system is going down for poweroff now")
    with contextlib.suppress(OSError):
        os.kill(int(_pid_file(root).read_text()), signal.SIGTERM)


def sudo(_: Path, arguments: list[str]) -> NoReturn:
    """Run a command; everybody is root here."""
    while arguments and arguments[0].startswith("-"):
        arguments = arguments[1:]
    os.execvp(arguments[0], arguments)


def seconds(span: str) -> float:
    """A time span as systemd writes it (`5`, `90s`, `1h 30min`)."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)\s*", span)
    if not parts or "".join(number + unit for number, unit in parts) != span.replace(" ", ""):
        raise argparse.ArgumentTypeError(f"cannot read the time span {span!r}")
    return sum(float(number) * _SPAN_S[unit] for number, unit in parts)


def _units_directory(root: Path) -> Path:
    return root / "run" / "units"


def _pid_file(root: Path) -> Path:
    return root / "run" / "init.pid"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S', time.gmtime())} {text}", file=sys.stderr, flush=True)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the tags in the processes' environment must do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def _spawn(command: list[str], root: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def _start_user_data(root: Path) -> Unit:
    """Run the UserData as cloud-init does: a script if it starts with `#!`, else nothing."""
    path = root / USER_DATA
    first_line = path.read_text().partition("\n")[0]
    unit = Unit(command=[*shlex.split(first_line[2:]), str(path)], environment={}, due_at=None, every_s=None)
    if first_line.startswith("#!"):
        unit.process = _start("UserData", unit, root)
    else:
        _say("UserData is no script: nothing to run")
    return unit


def _add_unit(root: Path, name: str, content: str) -> None:
    """Raises SystemExit if there is a unit of this name."""
    path = _units_directory(root) / name
    temporary = path.with_name(f".{name}-{os.getpid()}")
    temporary.write_text(content)
    try:
        os.link(temporary, path)  # unlike a rename, it does not replace
    except FileExistsError:
        raise SystemExit(f"Failed to start transient unit: Unit {name} was already loaded") from None
    finally:
        temporary.unlink()


def _look_for_units(root: Path, units: dict[str, Unit]) -> None:
    for path in _units_directory(root).iterdir():
        if path.name not in units and not path.name.startswith("."):
            units[path.name] = Unit(**json.loads(path.read_text()))


def _run_what_is_due(root: Path, units: dict[str, Unit]) -> None:
    now = time.monotonic()
    for name, unit in list(units.items()):
        if unit.process is not None and unit.process.poll() is None:
            continue
        if unit.due_at is None:
            if name:
                del units[name]
                (_units_directory(root) / name).unlink()
        elif now >= unit.due_at:
            unit.process = _start(name, unit, root)
            unit.due_at = None if unit.every_s is None else now + unit.every_s


def _start(name: str, unit: Unit, root: Path) -> subprocess.Popen[bytes] | None:
    try:
        return _spawn(unit.command, root, unit.environment)
    except OSError as error:
        _say(f"{name}: {error}")
        return None


def _reap(own: set[int]) -> None:
    """Let orphans that have ended go; the first process of a machine inherits them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _end_processes() -> None:
    import psutil

    from rubberband.cloud.ray_head.instance import DIRECTORY_TAG, INSTANCE_TAG, end_tagged

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    end_tagged(os.environ[DIRECTORY_TAG], os.environ[INSTANCE_TAG])


def main(arguments: list[str]) -> None:
    program, root, *rest = arguments
    match program:
        case "boot":
            boot(Path(root))
        case "systemd-run":
            systemd_run(Path(root), rest)
        case "shutdown":
            shutdown(Path(root), rest)
        case "sudo":
            sudo(Path(root), rest)


if __name__ == "__main__":
    main(sys.argv[1:])
