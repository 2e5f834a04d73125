"""RubberBand: hyperparameter tuning in the cloud, by a deadline and within a budget.

Everything public is reached from here and imported when it is first used, so that `import rubberband` is fast and a
program that only estimates imports neither Ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rubberband.client.asynchronous import AsyncClient
    from rubberband.client.client import Client
    from rubberband.errors import (
        CheckpointError,
        EntrypointError,
        InfeasibleError,
        InputError,
        JournalError,
        NameTakenError,
        ProfileMissingError,
        ProviderError,
        RubberbandError,
        ServiceError,
    )
    from rubberband.executor.result.result import Result
    from rubberband.executor.run.callbacks import Callback, FailureInfo, ReportInfo, RunInfo, SyncInfo
    from rubberband.executor.training.distributed import distributed, per_worker
    from rubberband.executor.training.reporting import artifact, get_checkpoint, report
    from rubberband.executor.training.torch_trial import Mean, TorchTrial
    from rubberband.executor.training.trial import Trial, TrialContext
    from rubberband.running.estimating import estimate
    from rubberband.running.run import load_result, tune
    from rubberband.spec.experiment import Experiment
    from rubberband.spec.loading import load_experiment
    from rubberband.spec.program import command
    from rubberband.spec.space import (
        choice,
        grid_search,
        lograndint,
        loguniform,
        qlograndint,
        qloguniform,
        qrandint,
        qrandn,
        quniform,
        randint,
        randn,
        uniform,
    )

__all__ = [
    "AsyncClient",
    "Callback",
    "CheckpointError",
    "Client",
    "EntrypointError",
    "Experiment",
    "FailureInfo",
    "InfeasibleError",
    "InputError",
    "JournalError",
    "Mean",
    "NameTakenError",
    "ProfileMissingError",
    "ProviderError",
    "ReportInfo",
    "Result",
    "RubberbandError",
    "RunInfo",
    "ServiceError",
    "SyncInfo",
    "TorchTrial",
    "Trial",
    "TrialContext",
    "__version__",
    "artifact",
    "choice",
    "command",
    "distributed",
    "estimate",
    "get_checkpoint",
    "grid_search",
    "load_experiment",
    "load_result",
    "lograndint",
    "loguniform",
    "per_worker",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "report",
    "tune",
    "uniform",
]

__version__: str

_MODULES = {
    "rubberband.errors": (
        "CheckpointError EntrypointError InfeasibleError InputError JournalError NameTakenError ProfileMissingError "
        "ProviderError RubberbandError ServiceError"
    ),
    "rubberband.client.asynchronous": "AsyncClient",
    "rubberband.client.client": "Client",
    "rubberband.executor.training.distributed": "distributed per_worker",
    "rubberband.executor.training.torch_trial": "Mean TorchTrial",
    "rubberband.executor.training.reporting": "artifact get_checkpoint report",
    "rubberband.executor.training.trial": "Trial TrialContext",
    "rubberband.executor.run.callbacks": "Callback FailureInfo ReportInfo RunInfo SyncInfo",
    "rubberband.executor.result.result": "Result",
    "rubberband.spec.experiment": "Experiment",
    "rubberband.spec.program": "command",
    "rubberband.spec.loading": "load_experiment",
    "rubberband.spec.space": (
        "choice grid_search lograndint loguniform qlograndint qloguniform qrandint qrandn quniform randint randn "
        "uniform"
    ),
    "rubberband.running.estimating": "estimate",
    "rubberband.running.run": "load_result tune",
}
"""Module -> the public names that live in it."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


if not TYPE_CHECKING:  # or any name would be one to mypy and to editors

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version()
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            from rubberband.installation import remedy_of

            if (remedy := remedy_of(error)) is None:
                raise
            raise ImportError(f"rubberband.{name} needs {error.name}; run {remedy}", name=error.name) from None
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """The installed version; of a checkout that is not installed, 0+unknown."""
    from importlib import metadata

    from rubberband.installation import DISTRIBUTION

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+unknown"
