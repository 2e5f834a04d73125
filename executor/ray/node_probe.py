"""A probe of a borrowed cluster's nodes, before GPUs are claimed: does each have rubberband, and see the store?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

import rubberband
from rubberband.cloud.provider import NODE_LABEL, BorrowedProvider
from rubberband.errors import InputError
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.ray.connection import Connection
from rubberband.units import error_line

_ANSWER_S = 180.0
"""The longest wait for a node: a busy one takes a while to start a process."""


def require_nodes(provider: BorrowedProvider, store: CheckpointStore) -> None:
    """Raise InputError unless every node that may be used can train: the first fault, with its fix.

    ProviderError: the cluster does not let the driver in. The process stays as connected as it was.
    """
    connection = Connection()
    try:
        connection.open(provider.ensure_head())
        asked = {}
        for node in provider.nodes:
            asked[_ask(node.node, store)] = f"node {node.address} of the Ray cluster"
        done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
        found = [(asked[answer], *_answer(answer)) for answer in done]
        found += [(asked[answer], *_answer(answer, 0.0)) for answer in silent]
    finally:
        connection.close()
    _require_same_version([(node, version) for node, version, _ in found if version])
    for name, _, fault in found:
        if fault:
            raise InputError(f"{name} {fault}")


def fault_of(provider: BorrowedProvider, store: CheckpointStore, node: str) -> str:
    """Return why a trial cannot train on a node that joined after `require_nodes`; empty: it can, or was asked then.

    The process is connected.
    """
    if node not in provider.joined:
        return ""
    name = next((f"node {known.address} of the Ray cluster" for known in provider.nodes if known.node == node), node)
    version, fault = _answer(_ask(node, store), _ANSWER_S)
    try:
        _require_same_version([(name, version)] if version else [])
    except InputError as error:
        return str(error)
    return fault and f"{name} {fault}"


def _ask(node: str, store: CheckpointStore) -> Any:
    task = ray.remote(_probe()).options(num_cpus=0, max_retries=0, label_selector={NODE_LABEL: node})
    return task.remote(store)


def _answer(reference: Any, timeout_s: float | None = None) -> tuple[str, str]:
    """Return what a node answered: its version, and a fault."""
    try:
        version, fault = ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        return "", f"did not answer in {_ANSWER_S:.0f} s; see `ray status`"
    except Exception as error:
        text = error_line(str(getattr(error, "cause", None) or error))
        return "", f"cannot import rubberband ({text}); install it there: {_INSTALL}"
    return version, fault


_INSTALL = f"pip install 'rubberband-tune[ray]=={rubberband.__version__}'"


def _require_same_version(found: Sequence[tuple[str, str]]) -> None:
    for node, version in found:
        if version != rubberband.__version__:
            raise InputError(
                f"{node} has rubberband-tune {version} and this process {rubberband.__version__}; install the same "
                f"there: {_INSTALL}"
            )


def _probe() -> Callable[[CheckpointStore], tuple[str, str]]:
    """Return the function that a node runs. It is sent by value, for nodes without rubberband.

    It returns the version of rubberband, and why a trial could not train there.
    """

    def probe(store: Any) -> tuple[str, str]:
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
        return rubberband.__version__, ""

    return probe
