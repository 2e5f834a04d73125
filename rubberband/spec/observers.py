"""The `notify` and `track` of an experiment file: who gets a notice of it, and where its trials are recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from rubberband.spec.fields import Words, fault
from rubberband.units import shown

NoticeKind = Literal["done", "failed", "late", "near_max_cost", "trouble"]
NOTICE_KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
_T = TypeVar("_T")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def notify_variable(name: Any) -> str:
    """Return the name of a variable that holds an address. Raises a fault for the address itself, which is a secret."""
    if isinstance(name, str) and "://" in name:
        raise fault(
            "is an address, which files and journals do not keep; run `export NOTIFY_URL=…` and write NOTIFY_URL here"
        )
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise fault(f"{shown(name)} is no name of an environment variable; write one, such as SLACK_WEBHOOK_URL")
    return name


def _differ(entries: tuple[_T, ...]) -> tuple[_T, ...]:
    for number, entry in enumerate(entries):
        if entry in entries[:number]:
            raise fault("is listed twice; remove one", at=number)
    return entries


class NotifyAddress(Words):
    """An address that gets notices by POST."""

    url_from: Annotated[str, BeforeValidator(notify_variable, json_schema_input_type=str)]
    """Name of the environment variable that holds the URL, where the experiment's process runs."""
    kinds: Annotated[tuple[NoticeKind, ...], Field(min_length=1), AfterValidator(_differ)] = NOTICE_KINDS
    """Kinds of its notices; all by default."""


def _written(value: Any) -> Any:
    """Return a name as `{url_from: NAME}`."""
    return value if isinstance(value, Mapping | Words) else {"url_from": notify_variable(value)}


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


_Entry = Annotated[NotifyAddress, BeforeValidator(_written, json_schema_input_type=NotifyAddress | str)]
Notify = Annotated[tuple[_Entry, ...], BeforeValidator(_listed), AfterValidator(_differ)]
"""One address, or a list of them; a name alone is one with all kinds."""


# `track`: where the trials are recorded while the experiment runs, beside its own journal.


class CsvTracker(Words):
    """A CSV file, `reports.csv`, with a row for each report of each trial."""

    type: Literal["csv"] = "csv"
    folder: str | None = None
    """Folder of the file; by default `csv` in the experiment's folder."""


class TensorboardTracker(Words):
    """Event files for TensorBoard, a folder for each trial; needs tensorboardX or tensorboard."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: str | None = None
    """Folder of the trials' folders; by default `tensorboard` in the experiment's folder."""


class MlflowTracker(Words):
    """A run of MLflow for each trial, below one of the experiment; needs mlflow."""

    type: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    """Tracking URI; by default MLflow's own, such as MLFLOW_TRACKING_URI."""
    experiment: str | None = None
    """MLflow's experiment; by default the experiment's name."""


class WandbTracker(Words):
    """A run of Weights & Biases for each trial, grouped by the experiment; needs wandb."""

    type: Literal["wandb"] = "wandb"
    project: str | None = None
    """Project; by default WANDB_PROJECT, or `rubberband`."""
    entity: str | None = None
    """User or team; by default that of the login."""
    mode: Literal["online", "offline"] | None = None
    """offline: written to the experiment's folder, for `wandb sync`; by default WANDB_MODE, or online."""


def _tracker(value: Any) -> Any:
    """Return `tensorboard` as `{type: tensorboard}`."""
    if not isinstance(value, str | Mapping | Words):
        raise fault(f"{shown(value)} is not a tracker; write csv, tensorboard, mlflow or wandb")
    return {"type": value} if isinstance(value, str) else value


AnyTracker = CsvTracker | TensorboardTracker | MlflowTracker | WandbTracker
TrackerName = Literal["csv", "tensorboard", "mlflow", "wandb"]
_Tracker = Annotated[
    Annotated[AnyTracker, Field(discriminator="type")],
    BeforeValidator(_tracker, json_schema_input_type=AnyTracker | TrackerName),
]


Trackers = Annotated[tuple[_Tracker, ...], BeforeValidator(_listed), AfterValidator(_differ)]
"""One tracker, or a list of them; a name alone is one with its defaults."""
