"""The gang of a program: its workers meet, share out places and the GPUs of each machine, and end together.

Nothing here imports torch. The workers connect to rank 0's as a star, at the port that it holds; the same connections
are the life lines afterwards. The processes of the programs meet at another port, by torchrun's variables.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rubberband.cloud.node import machine_folder
from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor.training.failures import GangBroken
from rubberband.executor.training.lifeline import Lifeline, Peers, accepted, connected
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.worker_process import release_port, take_port

MEET_S = 60.0
_RETRY_S = 0.05
_ANSWER_LOOK_S = 0.002
_MOST_BYTES = 2**20
_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A worker's place in the gang, as torchrun counts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine: int
    machines: int
    address: str
    """Address of rank 0's machine."""
    port: int
    """Free there."""
    gpus: str | None
    """CUDA_VISIBLE_DEVICES of its program: all GPUs of the gang on its machine. None: as the worker's."""
    folder: str
    """That of the first worker on its machine: all programs there have one folder for checkpoints in it."""

    def variables(self, run: str) -> dict[str, str]:
        """Return torchrun's variables for this worker's process; `run` names the gang.

        Source: PyTorch, torchrun (Elastic Launch), "Environment Variables".
        """
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "NODE_RANK": str(self.machine),
            "GROUP_RANK": str(self.machine),
            "GROUP_WORLD_SIZE": str(self.machines),
            "TORCHELASTIC_RUN_ID": run,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            **self.address_variables(),
        }

    def lightning_defaults(self) -> dict[str, str]:
        """Return the variables from which Lightning takes what a script's Trainer leaves out.

        It takes the number of workers from `devices`, and not from torchrun's variables: without them, each worker
        would train on its own.
        """
        return {
            "PL_TRAINER_DEVICES": str(self.local_size),
            "PL_TRAINER_NUM_NODES": str(self.machines),
            "PL_TRAINER_STRATEGY": "ddp",
        }

    def address_variables(self) -> dict[str, str]:
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}

    def words(self) -> dict[str, str]:
        """Return what stands for `${…}` in a command here, by the names of `PLACES`."""
        return {
            "gpus": str(self.local_size),
            "workers": str(self.size),
            "machines": str(self.machines),
            "machine_rank": str(self.machine),
            "master_addr": self.address,
            "master_port": str(self.port),
        }

    @classmethod
    def alone(cls, gpus: str | None = None, folder: str = "") -> Place:
        """Return the place of a worker that is the only one."""
        return _places([_Worker(0, "", gpus, folder)], "127.0.0.1", free_port(""))[0]


class ProgramGang(Peers):
    """This worker's membership; `close` must be called in the end."""

    def __init__(self, place: Place, line: Lifeline | None, leaders: Sequence[int] = ()) -> None:
        self.place = place
        self.leaders = leaders
        """The first workers of the other machines, if this is rank 0."""
        self._line = line
        self._is_left = False

    @classmethod
    def join(cls, segment: Segment, folder: Path) -> ProgramGang:
        """Meet the other workers of a segment; `folder`: this worker's own. Raises GangBroken if one does not come."""
        mine = _Worker.here(segment, folder)
        if segment.num_workers == 1:
            release_port()
            return cls(Place.alone(mine.gpus, mine.folder), None)
        assert segment.rendezvous is not None
        found = urlsplit(segment.rendezvous)
        host, port = found.hostname or "", found.port or 0
        meet = _meet_others if segment.rank == 0 else _meet_first
        try:
            lines, places = meet(host, port, segment, mine)
        except (OSError, ValueError) as error:
            raise GangBroken(f"the workers did not find each other at {host}: {error}") from error
        others = [each.rank for each in places if each.local_rank == 0 and each.machine > 0]
        line = Lifeline(segment.rank, lines, lambda: None)
        return cls(places[segment.rank], line, others if segment.rank == 0 else ())

    @property
    def is_over(self) -> bool:
        """Whether rank 0 has ended the segment in order."""
        return self._line is not None and self._line.has_farewell

    def ask(self, question: str) -> None:
        """Ask the leaders of the other machines something; called on rank 0."""
        for rank in self.leaders:
            assert self._line is not None
            self._line.tell(rank, question)

    def answers(self, start: str) -> list[str]:
        """Wait for an answer with that start from each leader; return their rests. Raises GangBroken."""
        found = dict[int, str]()
        while len(found) < len(self.leaders):
            self.check()
            if self._is_left:
                raise GangBroken("this worker has left its gang")
            for rank in set(self.leaders) - found.keys():
                assert self._line is not None
                if (answer := self._line.message_of(rank, start)) is not None:
                    found[rank] = answer
            time.sleep(_ANSWER_LOOK_S)
        return [found[rank] for rank in self.leaders]

    def asked(self) -> str | None:
        """Return rank 0's next question, if there is one."""
        return None if self._line is None else self._line.message_of(0)

    def answer(self, answer: str) -> None:
        assert self._line is not None
        self._line.tell(0, answer)

    def leave(self) -> None:
        """Leave in order: rank 0's farewell ends the programs of the others."""
        self._is_left = True
        if self._line is not None:
            self._line.leave()

    def close(self) -> None:
        self._is_left = True
        if self._line is not None:
            self._line.close()

    def has_formed(self) -> bool:
        """Whether a process listens where the programs of the gang are to meet; asked on rank 0's machine."""
        port = f"{self.place.port:04X}"
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            try:
                rows = Path(table).read_text().splitlines()[1:]
            except OSError:
                continue
            if any(row[3] == _LISTENS and row[1].endswith(f":{port}") for row in map(str.split, rows)):
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker, as the others know it."""

    rank: int
    machine: str
    gpus: str | None
    folder: str

    @classmethod
    def here(cls, segment: Segment, folder: Path) -> _Worker:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if segment.device == "cuda" else None
        return cls(segment.rank, f"{socket.gethostname()} {boot} {machine_folder()}", gpus, str(folder))


def _places(workers: list[_Worker], address: str, port: int) -> list[Place]:
    """Return the places of all workers, by rank; machines are numbered in the order of their first ranks."""
    machines = dict[str, list[_Worker]]()
    for worker in workers:
        machines.setdefault(worker.machine, []).append(worker)
    numbers = {name: number for number, name in enumerate(machines)}
    found = []
    for worker in workers:
        here = machines[worker.machine]
        masks = [each.gpus for each in here if each.gpus is not None]
        place = Place(
            rank=worker.rank,
            size=len(workers),
            local_rank=here.index(worker),
            local_size=len(here),
            machine=numbers[worker.machine],
            machines=len(machines),
            address=address,
            port=port,
            gpus=",".join(masks) if len(masks) == len(here) else None,
            folder=here[0].folder,
        )
        found.append(place)
    return found


_Met = tuple[dict[int, socket.socket], list[Place]]


def _meet_others(host: str, port: int, segment: Segment, mine: _Worker) -> _Met:
    held = take_port(port)
    listener = socket.create_server(("", port)) if held is None else socket.socket(fileno=held)
    with listener:
        lines = accepted(listener, segment.num_workers, MEET_S)
    workers = [mine]
    for rank in sorted(lines):
        found = _read(lines[rank])
        workers.append(_Worker(rank, found["machine"], found["gpus"], found["folder"]))
    free = free_port("")
    answer = {"workers": [[worker.machine, worker.gpus, worker.folder] for worker in workers], "port": free}
    for line in lines.values():
        _write(line, answer)
    return lines, _places(workers, host, free)


def _meet_first(host: str, port: int, segment: Segment, mine: _Worker) -> _Met:
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            lines = connected(host, port, segment.rank, MEET_S)
            break
        except ConnectionRefusedError:  # rank 0 does not listen yet
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)
    _write(lines[0], {"machine": mine.machine, "gpus": mine.gpus, "folder": mine.folder})
    answer = _read(lines[0])
    workers = [_Worker(rank, *worker) for rank, worker in enumerate(answer["workers"])]
    return lines, _places(workers, host, answer["port"])


def _write(line: socket.socket, content: Mapping[str, object]) -> None:
    line.sendall(json.dumps(content).encode() + b"\n")


def _read(line: socket.socket) -> Any:
    """Read a line of JSON; not a byte more, as messages of the life line follow. Raises OSError, ValueError."""
    line.settimeout(MEET_S)
    found = bytearray()
    while not found.endswith(b"\n") and len(found) < _MOST_BYTES:
        some = line.recv(1)
        if not some:
            raise ConnectionResetError("a worker is gone")
        found += some
    line.settimeout(None)
    return json.loads(found)
