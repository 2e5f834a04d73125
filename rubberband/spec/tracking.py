"""The `track` of an experiment file: where its trials are recorded while it runs, beside its own journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rubberband.spec.fields import Words, fault
from rubberband.units import shown


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


def _written(value: Any) -> Any:
    """Return `tensorboard` as `{type: tensorboard}`."""
    if not isinstance(value, str | Mapping | Words):
        raise fault(f"{shown(value)} is not a tracker; write csv, tensorboard, mlflow or wandb")
    return {"type": value} if isinstance(value, str) else value


AnyTracker = CsvTracker | TensorboardTracker | MlflowTracker | WandbTracker
TrackerName = Literal["csv", "tensorboard", "mlflow", "wandb"]
_Entry = Annotated[
    Annotated[AnyTracker, Field(discriminator="type")],
    BeforeValidator(_written, json_schema_input_type=AnyTracker | TrackerName),
]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | Mapping | Words) else value


def _differ(found: tuple[AnyTracker, ...]) -> tuple[AnyTracker, ...]:
    for number, entry in enumerate(found):
        if entry in found[:number]:
            raise fault(f"{entry.type} is listed twice; remove one", at=number)
    return found


Trackers = Annotated[tuple[_Entry, ...], BeforeValidator(_listed), AfterValidator(_differ)]
"""One tracker, or a list of them; a name alone is one with its defaults."""
