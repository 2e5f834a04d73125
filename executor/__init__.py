"""Do: carries a plan out as a journalled state machine, on Ray or on a virtual clock.

Tests and extensions take names from here, so that a module can move. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "checkpoints": "CheckpointStore LocalCheckpointStore make_store open_store",
    "checkpoints.folders": "FolderCheckpoint read_manifest",
    "core.budget": "bill_usd instance_cost_usd paid_time",
    "core.controller": "Controller",
    "core.events": (
        "AllotmentChanged CancelRequested CheckpointLost CheckpointRef Command DiscardCheckpoint "
        "DriverResumed DriverStopped EndedInstance Event FailureKind Finish Gang InstanceInterrupted "
        "InstanceLost InstancePriced InstanceReady InstanceRefused InstanceReleased InstanceRunning "
        "LaunchInstance LimitsChanged LiveInstance ReleaseInstance RestPlanned Slot StartTrial Started "
        "StopTrial Tick TrialEnded TrialFailed TrialReported TrialStarted TrialStopRequested TrialsDrawn "
        "WITHOUT_CHECKPOINT"
    ),
    "core.extending": "Extension Limits",
    "core.fleet": "InstanceStatus",
    "core.forecast": "Forecast expected_iterations forecast",
    "core.history": "DecisionResult InstanceCapChanged LimitsExtended Replacement Setback",
    "core.job": "Job brackets_of",
    "core.measured": "measured",
    "core.state": "GangRun Phase StageRecord State TrialReport TrialStatus",
    "core.trials": "best_trial is_result",
    "journal.folder": "ExperimentFolder open_folder",
    "journal.hosting": "HostedRun holding is_hosted read_mark write_order",
    "journal.inbox": "DriverRequest Inbox Requests",
    "journal.journal": "EventLog Header Journal decode_event decode_job encode_event encode_job sqlite_url",
    "journal.reading": "read_journal read_at_once",
    "logs.pages": "PrintedLine",
    "logs.trial_log": "TrialLog",
    "profiling.points": "Cell Fit cell_of",
    "ray.attempt": "Gathered RAN_OUT",
    "ray.backend": "RayBackend",
    "ray.connection": "Connection",
    "ray.fork_server": "ForkServer",
    "ray.workers": "Workers",
    "result.result": "Result TrialResult jct_s summarise",
    "run.driver": "Observer drive replay",
    "run.follower": "JournalFollower",
    "training.clocks": "CpuTimer CudaLapClock LapClock own_time",
    "training.data": "Feed",
    "training.entrypoint": "Entrypoint is_function",
    "training.failures": "TrialFailure describe",
    "training.gradient_noise": "GradientNoise",
    "training.loop": "TorchRunner",
    "training.noise_scale": "NoiseEstimate NoiseReading NoiseScale",
    "training.options": "Group make_lr_scaling scaled_lr",
    "training.run": "run_segment run_server",
    "training.run_spec": "RunSpec",
    "training.runner": "RUNS_ON",
    "training.sampler": "GlobalBatch GlobalBatchSampler reseed",
    "training.segment": "Segment SegmentEnded SegmentFailure SegmentRepeated SegmentReport SegmentStarted",
    "virtual.backend": "VirtualBackend",
    "virtual.fleet": "Agenda AttemptFaults Faults Noise TrialEnd",
}
"""Module -> the names of it that others use."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_OTHER_NAMES = {"read_journal": "read"}
"""Name here -> name in its module."""


if not TYPE_CHECKING:  # or any name would be one to mypy and to editors

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        value = globals()[name] = getattr(module, _OTHER_NAMES.get(name, name))
        return value
