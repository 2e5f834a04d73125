"""A probe of a borrowed cluster's nodes, before GPUs are claimed: have they what a trial needs, and see the store?"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ray
from ray._private.runtime_env.packaging import package_exists, pin_runtime_env_uri, upload_package_to_gcs
from ray.exceptions import GetTimeoutError

import rubberband
from rubberband.cloud.provider import NODE_LABEL, BorrowedProvider
from rubberband.cloud.wheel import build_wheel
from rubberband.errors import InputError
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.ray.connection import Connection
from rubberband.units import error_line

_ANSWER_S = 180.0
"""The longest wait for a node: a busy one takes a while to start a process."""


@dataclass(eq=False)
class NodeProbe:
    """Asks nodes whether trials can train there: those without this rubberband get that of this process."""

    provider: BorrowedProvider
    store: CheckpointStore
    modules: Mapping[str, str] = field(default_factory=dict)
    """Module -> file here of each that trials import and that is not sent, so that a node must have it."""
    brings: bool = field(default=False, init=False)
    """Whether processes on nodes get the rubberband of this one."""

    def require_nodes(self) -> None:
        """Raise InputError unless every node that may be used can train: the first fault, with its fix.

        ProviderError: the cluster does not let the driver in. The process stays as connected as it was.
        """
        connection = Connection()
        try:
            connection.open(self.provider.ensure_head())
            faults = self._faults([node.node for node in self.provider.nodes])
        finally:
            connection.close()
        if fault := next(filter(None, faults.values()), ""):
            raise InputError(fault)

    def fault_of(self, node: str) -> str:
        """Return why a trial cannot train on a node that joined since then; empty: it can, or was asked then.

        The process is connected.
        """
        return self._faults([node])[node] if node in self.provider.joined else ""

    def options(self) -> dict[str, Any]:
        """Return options of Ray for processes on nodes."""
        return {"runtime_env": _runtime_env()} if self.brings else {}

    def _faults(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return node -> fault, empty without one."""
        answers = self._ask(nodes)
        lacking = [node for node in nodes if answers[node].lacks_rubberband]
        if lacking and not self.brings:
            self.brings = True
            answers |= self._ask(lacking)
        names = {node.node: f"node {node.address} of the Ray cluster" for node in self.provider.nodes}
        return {node: answers[node].fault and f"{names.get(node, node)} {answers[node].fault}" for node in nodes}

    def _ask(self, nodes: Sequence[str]) -> dict[str, _Answer]:
        """Ask nodes, side by side."""
        given = {"num_cpus": 0, "max_retries": 0, **self.options()}
        asked = {
            node: ray.remote(_probe())
            .options(label_selector={NODE_LABEL: node}, **given)
            .remote(self.store, dict(self.modules))
            for node in nodes
        }
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
        return {node: _answer(answer) for node, answer in asked.items()}


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer of a node."""

    fault: str
    lacks_rubberband: bool = False


def _answer(reference: Any) -> _Answer:
    try:
        version, fault = ray.get(reference, timeout=0.0)
    except GetTimeoutError:
        return _Answer(f"did not answer in {_ANSWER_S:.0f} s; see `ray status`")
    except Exception as error:
        text = error_line(str(getattr(error, "cause", None) or error))
        return _Answer(f"cannot import what a trial needs ({text}); install it there: {_INSTALL}", True)
    if version.partition("+")[0] != rubberband.__version__.partition("+")[0]:
        return _Answer(
            f"has rubberband-tune {version} and this process {rubberband.__version__}; install the same there: "
            f"{_INSTALL}",
            True,
        )
    return _Answer(fault)


_INSTALL = f"pip install 'rubberband-tune[ray]=={rubberband.__version__}'"


def _probe() -> Callable[[CheckpointStore, Mapping[str, str]], tuple[str, str]]:
    """Return the function that a node runs. It is sent by value, for nodes without rubberband.

    It returns the version of rubberband, and why a trial could not train there.
    """

    def probe(store: Any, modules: Any) -> tuple[str, str]:
        import importlib.util

        import rubberband
        from rubberband.errors import RubberbandError
        from rubberband.executor import checkpoints
        from rubberband.executor.ray import slot_worker  # noqa: F401 (its packages may be missing)

        try:
            checkpoints.probe(store)
        except RubberbandError as error:
            return rubberband.__version__, (
                f"does not share the checkpoint store {store.url} with this machine ({error}); name one that all nodes "
                "see as resources.checkpoints: a directory of a shared file system, or a bucket"
            )
        for module, file in modules.items():
            if importlib.util.find_spec(module) is None:
                return rubberband.__version__, (
                    f"has no module {module}, which the trial imports from {file}, and which is not sent; start "
                    "rubberband in the folder that has it, or install it there"
                )
        return rubberband.__version__, ""

    return probe


# Nodes of a borrowed cluster with no rubberband, or another one, get this process's by Ray's runtime_env: a zip in the
# head's store, which a node unpacks once. Other imports of a worker (numpy, those of the trial) must be on the node.

_sending = threading.Lock()


def _runtime_env() -> dict[str, Any]:
    """Return the environment of a process that has it; it is sent, unless the head has it. The driver is connected.

    Ray drops it once no process uses it. Raises InputError if its files cannot be read.
    """
    content = _zip()
    uri = f"gcs://_ray_pkg_{hashlib.sha1(content).hexdigest()}.zip"
    with _sending:
        pin_runtime_env_uri(uri)
        if not package_exists(uri):
            upload_package_to_gcs(uri, content)
    return {"py_modules": [uri]}


@cache
def _zip() -> bytes:
    return build_wheel()[1]
