"""The Ray head on the driver's machine, a guarded process like a local instance; instances of any provider join it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rubberband.cloud.local import instance as guard
from rubberband.cloud.local import ray_node
from rubberband.cloud.local.guarding import Guards, end_all, observe
from rubberband.cloud.local.instance import Record
from rubberband.cloud.provider import Head, HeadError
from rubberband.cloud.steady import steady_clock
from rubberband.errors import ProviderError


class RayHead:
    """Holds one directory for one driver, and the head whose record lies in it. Any thread may call it."""

    def __init__(
        self,
        experiment: str,
        directory: Path,
        *,
        host: str = ray_node.LOOPBACK,
        token_path: Path | None = None,
        lease_s: float = 60.0,
        not_before: float = 0.0,
    ) -> None:
        """Take over `directory`; what lives of a head that an earlier driver started is found there.

        `host` is the address of this machine as instances reach it. The token that opens the cluster is one per user
        (see `ray_node.default_token_path`), as Ray remembers it for the life of a process. A lease that is over
        is renewed for `lease_s`. What was written down of the experiment reaches to `not_before`. Raises ProviderError
        if another driver holds the directory, or if the directory or the token cannot be written.
        """
        self._experiment = experiment
        self._directory = directory.resolve()
        self._host = host
        self._mutex = threading.RLock()
        self._exclusive = contextlib.ExitStack()
        try:
            self._take_over(token_path, lease_s, not_before)
        except OSError as error:
            self._exclusive.close()
            where = error.filename or self._directory
            raise ProviderError(
                f"{where} cannot be written ({error.strerror or error}); make room or give access, or set "
                f"RUBBERBAND_HOME to another folder"
            ) from error

    def _take_over(self, token_path: Path | None, lease_s: float, not_before: float) -> None:
        self._heads.mkdir(parents=True, exist_ok=True)
        if not self._exclusive.enter_context(guard.lock(self._directory / "driver")):
            self._exclusive.close()
            raise ProviderError(
                f"another driver is running experiment {self._experiment} ({self._directory}); wait for it, or cancel "
                "it"
            )
        self.token_path = ray_node.ensure_token(token_path or ray_node.default_token_path())
        self.clock = steady_clock(self._directory, not_before=not_before)
        self.guards = Guards(self._experiment, self._directory, self.token_path, lease_s, self.clock)
        if not self.guards.leased():  # else the budget of what an earlier driver left may reach no further
            self.renew_lease(self.clock() + lease_s)

    @property
    def _heads(self) -> Path:
        return self._directory / "heads"

    def renew_lease(self, until: float) -> None:
        """Let the head, and whatever else is guarded in the directory, live until `until` (Unix time), no longer."""
        self.guards.renew_lease(until)

    def living(self) -> Head | None:
        """The living head, or None."""
        with self._mutex:
            path = self._living()
            return None if path is None else self._as_head(guard.load(path))

    def ensure(self, *, wanted: Callable[[], bool] = lambda: True) -> Head:
        """The living head, which is started if there is none; returns once it answers.

        Raises HeadError if it does not start, ProviderError once it is not `wanted` any more.
        """
        with self._mutex:
            path = self._living() or self._start()
        while (record := observe(path)).ended_at is None:  # it gives up by itself, once it has had time enough
            if ray_node.answers(record.address):
                return self._as_head(record)
            if not wanted():
                raise ProviderError("it was released while the Ray head started")
            time.sleep(0.05)
        raise HeadError(f"the Ray head did not start: {record.reason}")

    def close(self) -> None:
        """End the head and let the directory go. Idempotent."""
        with self._mutex:
            self.guards.close()
            end_all(self._heads)
            self.guards.wait()
            self._exclusive.close()

    def _living(self) -> Path | None:
        return next((path for path in self._heads.glob("*.json") if observe(path).ended_at is None), None)

    def _as_head(self, record: Record) -> Head:
        environment = ray_node.authentication(self.token_path)
        return Head(address=record.address, temp_dir=record.temp_dir, environment=environment)

    def _start(self) -> Path:
        path = self._heads / f"head-{len(list(self._heads.glob('*.json')))}.json"
        port, temp_dir = ray_node.free_port(self._host), ray_node.make_temp_dir()
        command = ray_node.head_command(port, temp_dir, self._host)
        self.guards.write(path, command, temp_dir, f"{self._host}:{port}", ())
        self.guards.spawn(path)
        return path
