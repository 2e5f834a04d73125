"""Do: carries a plan out as a journalled state machine, on Ray or on a virtual clock.

Tests take names from here, so that a module can move. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "checkpoints": "CheckpointStore LocalCheckpointStore make_store open_store",
    "checkpoints.folders": "FolderCheckpoint MANIFEST is_archive read_manifest unpack",
    "core.bill": "bill_lines bill_usd instance_cost_usd lane_bill_usd paid_time spending spending_without_released",
    "core.controller": "Controller",
    "core.events": (
        "AllotmentChanged CancelRequested CheckpointLost CheckpointRef Command DiscardCheckpoint "
        "DriverResumed DriverStopped EndedInstance Event FailureKind Finish Gang InstanceInterrupted "
        "InstanceLost InstancePriced InstanceReady InstanceRefused InstanceReleased InstanceRunning "
        "LaunchInstance LimitsChanged LiveInstance ReleaseInstance RestPlanned Slot StartTrial Started "
        "StopTrial Tick TrialArtifact TrialEnded TrialFailed TrialForked TrialReported TrialStarted TrialStopRequested "
        "TrialsAdded "
        "TrialsDrawn WITHOUT_CHECKPOINT"
    ),
    "core.extending": "Extension Limits Outlook extension limits_of",
    "core.fleet": "InstanceStatus",
    "core.forecast": "Forecast expected_iterations forecast",
    "core.history": "DecisionResult Fork GivenBack InstanceCapChanged LimitsExtended Regrouped Replacement Setback "
    "TrialsJoined",
    "core.job": "Job brackets_of",
    "core.measured": "measured",
    "core.replanning": "decide_replan held_instances decide_within limits remaining",
    "core.state": "GangRun Phase StageRecord State",
    "core.trial_state": "TrialReport TrialStatus",
    "core.ranking": "best_trial is_result rank",
    "journal.folder": "ExperimentFolder Stamp folders open_folder stamp_of",
    "journal.inbox": (
        "DriverRequest Ending HostMark HostedRun Inbox POLL_S RequestQueue Requests behind by_age checked_id "
        "holding is_hosted read_ending read_mark read_order write_ending write_mark write_order"
    ),
    "journal.journal": (
        "begin_journal EventLog Header Journal UnknownWordsError decode_event decode_job encode_event encode_job "
        "from_elsewhere journalled sqlite_url written_by"
    ),
    "logs.pages": "LINE_BYTES LogPlace MAX_FILES PAGE_BYTES PrintedLine TAIL read_cursor trial_files write_cursor",
    "logs.trial_log": "TrialLog",
    "profiling.points": "Cell Fit cell_of",
    "ray.async_attempt": "AsyncAttempt",
    "ray.attempt": "Attempt Gathered HUNG RAN_OUT",
    "ray.backend": "RayBackend",
    "ray.connection": "Beat Connection LogPart RemoteAgent ray_nodes read_new",
    "ray.fleet": "Leases Mailbox RayFleet",
    "ray.fork_server": "ForkServer",
    "ray.slot_worker": "LogPump ServerProcess SlotWorker",
    "ray.workers": "Workers",
    "result.parts": "TrialResult",
    "result.result": "Result",
    "result.rows": "report_rows result_html to_csv trial_rows",
    "result.summary": "jct_s summarise",
    "run.driver": "Observer drive replay",
    "run.follower": "JournalFollower read_at_once read_journal",
    "run.session": "cancel_on_signals cluster_request open_provider",
    "sampling": "distribution",
    "training.checkpoint": "HostCopy TrainedParameters on_device on_host",
    "training.clocks": "CpuTimer CudaLapClock LapClock",
    "training.own_time": "own_time",
    "training.data": "Feed",
    "training.entrypoint": "Entrypoint content_of digest entrypoint_of files_of is_function with_trial",
    "training.failures": "TrialFailure describe",
    "training.gang": "WorkerGang",
    "training.goodput.gradient_noise": "GradientNoise",
    "training.loop": "TorchRunner",
    "training.metrics": "EvalLoader Evaluation Means",
    "training.goodput.noise_scale": "Averages NoiseEstimate NoiseReading NoiseScale Preconditioner",
    "training.goodput.lr_scaling": "make_lr_scaling scaled_lr",
    "training.options": "Group",
    "training.asynchronous.server": "run_server",
    "training.reported": "clean_metrics",
    "training.run": "make_runner run_segment warm_up",
    "training.run_spec": "RunSpec",
    "training.runner": "RUNS_ON Runner Steps unpickled",
    "training.sampler": "GlobalBatch GlobalBatchSampler reseed",
    "training.segment": "Segment SegmentEnded SegmentFailure SegmentRepeated SegmentReport SegmentStarted SegmentUse",
    "training.worker_process": "Leftovers compute_with worker_settings",
    "virtual.backend": "VirtualBackend",
    "virtual.fleet": "Agenda AttemptFaults Faults Noise TrialEnd",
}
"""Module -> its names that tests use."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_PARTS = (
    "core.extending",
    "journal.inbox",
    "logs.pages",
    "ray.attempt",
    "ray.connection",
    "ray.fleet",
    "ray.slot_worker",
    "result.rows",
    "run.session",
    "training.checking",
    "training.checkpoint",
    "training.gang",
    "training.metrics",
    "training.runner",
    "training.worker_process",
)
"""Modules that tests replace parts of, by their own name."""
_OTHER_NAMES = {
    "WorkerGang": "Gang",
    "begin_journal": "begin",
    "decide_replan": "decide",
    "held_instances": "held",
    "read_journal": "read",
}
"""Name here -> name in its module."""
_PART_OF = {module.rpartition(".")[2]: module for module in _PARTS}


if not TYPE_CHECKING:  # or any name would be one to mypy and to editors

    def __getattr__(name: str) -> Any:
        if name in _PART_OF:
            return importlib.import_module(f"{__name__}.{_PART_OF[name]}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        return getattr(module, _OTHER_NAMES.get(name, name))  # kept nowhere: tests replace some of them
