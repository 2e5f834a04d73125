"""GPUs of this machine: which of them trials can use, who has taken one, and how much others use.

nvidia-smi lists them, and torch in the trials' own Python says which of them it can use. An instance takes a GPU by a
lock of its id, which the guarding process holds for life: runs at once take different GPUs, and a killed run gives its
own back. Locks are of one user; what others do is seen by the memory that they use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from rubberband.cloud.node import machine_folder
from rubberband.errors import InputError
from rubberband.files import EXCLUSIVE, SHARED, locked, try_lock, write_atomically
from rubberband.units import counted
from rubberband.values.offer import Offer

VISIBLE = "CUDA_VISIBLE_DEVICES"
BUSY_MIB = 1024
"""A GPU of whose memory others use more is not for trials."""

_HUNG_S = 120.0
_FREED_S = 10.0
"""The memory of a process that has just ended is free by then."""
_LOOK_S = 1.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_GPU = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"\s+MIG .*Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")
_PROBE = """
import json, torch
seen = {"torch": torch.__version__, "is_built": torch.version.cuda is not None, "count": 0, "ids": [], "error": ""}
try:
    torch.cuda.init()
    seen["count"] = torch.cuda.device_count()
    seen["ids"] = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(seen["count"])]
except Exception as error:  # no uuid before torch 2.4, no CUDA, no driver for it
    seen["error"] = " ".join(str(error).split())
print(json.dumps(seen))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpus:
    """GPUs that trials of this machine can use."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Id (as in CUDA_VISIBLE_DEVICES) -> its name for people, in the order of CUDA."""
    notes: tuple[str, ...] = ()
    """A line for each reason that there are fewer than the machine has."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, in the order of CUDA."""
        return tuple(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchGpus:
    """The GPUs as torch sees them."""

    torch: str
    is_built: bool
    """Whether it is a build with CUDA."""
    count: int
    ids: list[str]
    error: str


def find_gpus() -> LocalGpus:
    """Return this machine's NVIDIA GPUs, or MIG instances, that trials can use; none without nvidia-smi."""
    visible = os.environ.get(VISIBLE)
    if shutil.which("nvidia-smi") is None:
        return LocalGpus()
    if visible is not None and not visible.strip():
        return LocalGpus(notes=(f"{VISIBLE}= hides all GPUs",))
    listing, trouble = _listing(["-L"])
    listed = _listed(listing)
    if trouble or not listed:
        remedy = "restart this machine, or install its driver again, until nvidia-smi lists its GPUs"
        return LocalGpus(notes=(f"nvidia-smi fails ({trouble or 'it lists no GPU'}); {remedy}",))
    names = {gpu_id: name for gpu in listed for gpu_id, name in gpu.items()}
    ids = [tuple(gpu) for gpu in listed]
    named = tuple(names) if visible is None else visible_ids(visible, ids)
    notes = list[str]()
    if visible is not None and len(named) < len(visible.split(",")):
        notes = [f"{VISIBLE}={visible} gives {counted(len(named), 'GPU')}: CUDA takes no unknown and no doubled names"]
    if named and (seen := _seen(listing, named)) is not None:
        named, note = _seen_of(named, seen)
        notes += note
    return LocalGpus(names={gpu_id: names[gpu_id] for gpu_id in named}, notes=tuple(notes))


def _listing(argv: Sequence[str]) -> tuple[str, str]:
    """Return what nvidia-smi prints, and its complaint; empty if all is well."""
    try:
        done = subprocess.run(["nvidia-smi", *argv], capture_output=True, text=True, check=False, timeout=_HUNG_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_HUNG_S:.0f} s"
    except OSError as error:
        return "", error.strerror or str(error)
    if done.returncode == 0:
        return done.stdout, ""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return "", (lines or [f"exit status {done.returncode}"])[0]


def _listed(listing: str) -> list[dict[str, str]]:
    """Return the ids of each GPU with their names: its own, or those of its MIG instances, which replace it."""
    gpus: list[dict[str, str]] = []
    whole = ""
    for line in listing.splitlines():
        if gpu := _GPU.match(line):
            whole = f"GPU {gpu[1]}"
            gpus.append({gpu[2]: whole})
        elif (instance := _MIG.match(line)) and gpus:
            gpus[-1] = {gpu_id: name for gpu_id, name in gpus[-1].items() if gpu_id.startswith("MIG-")}
            gpus[-1][instance[2]] = f"MIG {instance[1]} of {whole}"
    return gpus


def visible_ids(visible: str, listed: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the ids that CUDA_VISIBLE_DEVICES=`visible` names, of each GPU's ids, as CUDA reads it.

    It has indices of GPUs, or ids or their beginnings; what follows an index is passed over, as in `0;1`. CUDA stops at
    the first that it does not know, and sees nothing if one is named twice.
    """
    ids: list[str] = []
    for name in map(str.strip, visible.split(",")):
        if index := re.match(r"\+?([0-9]+)", name):
            fitting = list(listed[int(index[1])][:1]) if int(index[1]) < len(listed) else []
        else:
            fitting = [gpu_id for gpu in listed for gpu_id in gpu if name and gpu_id.startswith(name)]
        if len(fitting) != 1:
            break
        ids += fitting
    return tuple(ids) if len(set(ids)) == len(ids) else ()


def _seen_of(named: tuple[str, ...], seen: _TorchGpus) -> tuple[tuple[str, ...], list[str]]:
    """Return which of the named GPUs torch can use, in its own order, and a line if it cannot use all."""
    if any(gpu.startswith("MIG-") for gpu in named) and seen.count:
        return named, []  # CUDA shows a process one instance at most
    there = f"this machine's {counted(len(named), 'GPU')}"
    if not seen.is_built:
        return (), [f"torch {seen.torch} is a build without CUDA and cannot use {there}; install one with CUDA"]
    if seen.count == 0:
        reason = seen.error or "it sees none"
        remedy = "update the driver, or install a torch for its version of CUDA"
        return (), [f"torch {seen.torch} cannot use {there} ({reason}); {remedy}"]
    in_order = tuple(seen.ids)
    usable = in_order if len(in_order) == seen.count and set(in_order) <= set(named) else named[: seen.count]
    if len(usable) == len(named):
        return usable, []
    remedy = "nvidia-smi -q says what ails them"
    return usable, [f"torch {seen.torch} sees {len(usable)} of {there}, and the others are left out; {remedy}"]


def _seen(listing: str, named: Sequence[str]) -> _TorchGpus | None:
    """Ask torch, in a process, once per boot and installation; None where it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    environment = {key: value for key, value in os.environ.items() if key != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    if mig := next((gpu for gpu in named if gpu.startswith("MIG-")), ""):
        environment[VISIBLE] = mig  # CUDA shows a process one instance at most
    installed = [sys.executable, spec.origin, os.stat(spec.origin).st_mtime_ns]
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    key = json.dumps([boot, listing, installed, environment.get(VISIBLE), environment.get("CUDA_DEVICE_ORDER")])
    path = _folder() / f"seen-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        return _TorchGpus(**json.loads(path.read_text()))
    seen = _asked(environment)
    if seen.count == len(named) or not seen.is_built:  # troubles may be mended, and are asked for again
        with suppress(OSError):
            write_atomically(path, json.dumps(asdict(seen)).encode(), durable=False)
    return seen


def _asked(environment: Mapping[str, str]) -> _TorchGpus:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=_HUNG_S,
            env=dict(environment),
        )
        return _TorchGpus(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        error = f"no answer in {_HUNG_S:.0f} s"
    except (ValueError, TypeError, IndexError):
        error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return _TorchGpus(torch="of this Python", is_built=True, count=0, ids=[], error=error)


def least_memory_bytes(ids: Sequence[str]) -> int | None:
    """Return the memory of the smallest of these GPUs; None if it is not known, as of MIG instances."""
    listing, trouble = _listing(["--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"])
    rows = dict(line.split(", ") for line in listing.splitlines() if line.count(", ") == 1)
    found = [rows.get(each, "") for each in ids]
    return None if trouble or not all(map(str.isdigit, found)) else min(map(int, found), default=0) << 20 or None


# Locks.


def _folder() -> Path:
    folder = machine_folder() / "gpus"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _lock_of(gpu: str) -> Path:
    return _folder() / f"{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}.lock"


def take(gpu: str, owner: str, directory: Path, wait_s: float = 0.0) -> IO[str] | None:
    """Take a GPU for as long as the file that this returns, or a copy of it, is open.

    None if it is taken, and is not given back within `wait_s`. `owner` (for people) takes it for what lies in
    `directory`. Raises PermissionError if the folder of locks belongs to another user.
    """
    file = open(_lock_of(gpu), "a+")  # noqa: SIM115 - it is the lock
    if not locked(file, EXCLUSIVE, wait_s):
        file.close()
        return None
    file.truncate(0)
    file.write(f"{owner}\n{directory}\n")
    file.flush()
    return file


def holder(gpu: str) -> tuple[str, str] | None:
    """Return (owner, directory) of those who have taken a GPU; None if it is not taken."""
    path = _lock_of(gpu)
    if not path.exists():
        return None
    with open(path) as file:
        if try_lock(file, SHARED):
            return None
        owner, directory, *_ = [*file.read().splitlines(), "", ""]
        return owner, directory


@contextmanager
def one_taken(gpus: Sequence[str], owner: str) -> Iterator[str]:
    """Yield a GPU that is free, and taken while in the block; the first one if none is free, empty if there is none."""
    for gpu in gpus:
        if (file := take(gpu, owner, Path())) is not None:
            with file:
                yield gpu
                return
    yield gpus[0] if gpus else ""


# Shares of an experiment.


def gpus_to_share(offer: Offer, slots: int | None) -> LocalGpus:
    """Return the GPUs that local instances share out, and lines on those that they do not.

    They are shared out if there are enough for all of `max_instances`, whatever the plan holds and others use now, so
    that a profile and the run that it is for are on the same device; otherwise there are none, and trials use the CPU.
    With `slots` they use it in any case.
    """
    if slots is not None:
        return LocalGpus()
    gpus, visible = find_gpus(), os.environ.get(VISIBLE)
    if len(gpus.ids) >= offer.max_instances * offer.gpus:
        return gpus
    if not gpus.ids:
        return LocalGpus(notes=tuple(f"trials use the CPU: {note}" for note in gpus.notes))
    there = f"this machine has {len(gpus.ids)}" if visible is None else f"{VISIBLE}={visible} has {len(gpus.ids)}"
    more = "" if visible is None else "name more devices, or "
    line = (
        f"trials use the CPU: {_wanted(offer)} and {there}; {more}lower resources.max_instances or "
        "resources.gpus_per_instance to use them"
    )
    return LocalGpus(notes=(line, *gpus.notes))


def free_gpus(gpus: LocalGpus, offer: Offer, directory: Path | None = None) -> LocalGpus:
    """Return those of `gpus` that others do not use much, with a line on each of the other ones.

    GPUs that other runs of this user have taken are among them, as they may be given back; those of `directory` count
    as free. Memory in use is no obstacle if the user has named the GPU. Raises InputError if too few are free.
    """
    if not gpus.ids:
        return gpus
    is_named, needed, deadline = VISIBLE in os.environ, offer.max_instances * offer.gpus, time.monotonic() + _FREED_S
    while True:
        holders = {gpu: taker for gpu in gpus.ids if (taker := holder(gpu)) is not None}
        used = {gpu: mib for gpu, mib in _used_mib().items() if gpu in gpus.ids and gpu not in holders}
        taken = {
            gpu: owner
            for gpu, (owner, place) in holders.items()
            if directory is None or place != str(directory.resolve())
        }
        free = len(gpus.ids) - len(taken) - (0 if is_named else len(used))
        if free >= needed or is_named or not used or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)  # it may be memory of a process of ours that has just ended
    users = {gpu: f"others use {mib / 1024:.1f} GiB of {gpus.names[gpu]}" for gpu, mib in used.items()}
    if free < needed:
        said = [*(f"{owner} has taken {gpus.names[gpu]}" for gpu, owner in taken.items()), *users.values()]
        name_them = f", name GPUs in {VISIBLE} to use them too" if users else ""
        raise InputError(
            f"{_wanted(offer)} and {free} of this machine's {len(gpus.ids)} are free ({'; '.join(said)}); wait for the "
            f"others, lower resources.max_instances{name_them}, or train on the CPU by {VISIBLE}="
        )
    if is_named:
        return LocalGpus(names=gpus.names, notes=tuple(f"{said}, and trials use it too" for said in users.values()))
    left = {gpu: name for gpu, name in gpus.names.items() if gpu not in used}
    notes = tuple(f"{said}, which is left out; name it in {VISIBLE} to use it" for said in users.values())
    return LocalGpus(names=left, notes=notes)


def _wanted(offer: Offer) -> str:
    needed = counted(offer.max_instances * offer.gpus, "GPU")
    return f"max_instances={offer.max_instances} and gpus_per_instance={offer.gpus} take {needed}"


def _used_mib() -> dict[str, float]:
    """Return the memory in use (MiB) of each GPU that is busy; not known of MIG instances."""
    listing, _ = _listing(["--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"])
    used_mib = {}
    for line in listing.splitlines():
        gpu, _, used = line.partition(",")
        with suppress(ValueError):  # [N/A]
            if float(used) > BUSY_MIB:
                used_mib[gpu.strip()] = float(used)
    return used_mib
