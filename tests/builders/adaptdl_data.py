"""Measurements and workloads in AdaptDL's format, of a model that nobody trained."""

from __future__ import annotations

from pathlib import Path

BATCHES = (32, 128)
STEP_S, SAMPLE_S, SYNC_S = 0.01, 0.001, 0.02
"""Of a step: without samples, for each sample, and to synchronise for each instance."""
NUM_EPOCHS = 4
HEADER = "name,time,application,num_replicas,batch_size"


def write_data(folder: Path, num_jobs: int = 6) -> Path:
    """Write `traces/toy` and `workloads/workload-1.csv`; return the folder."""
    placements = ["placement,local_bsz,step_time,sync_time"]
    for name in ("1", "2", "3", "4", "11", "22", "44"):
        sync_s = 0.0 if name == "1" else SYNC_S * len(name)
        placements += [f"{name},{size},{STEP_S + SAMPLE_S * size + sync_s},{sync_s}" for size in (8, 16, 32)]
    larger = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    for instances in (6, 8):
        larger += [f"{instances},{4 * instances},{size},{0.1 + SAMPLE_S * size},0.09" for size in (8, 16, 32)]
    model = folder / "traces" / "toy"
    _write(model / "placements.csv", placements)
    _write(model / "scalability.csv", larger)
    for batch in BATCHES:
        ends = [1000 * (epoch + 1) for epoch in range(NUM_EPOCHS)]
        rows = [f"{end},{end * 40 // batch},0.5,1.0,{4.0 + epoch}" for epoch, end in enumerate(ends)]
        _write(model / f"validation-{batch}.csv", ["progress,iteration,metric,grad_sqr,grad_var", *rows])
    jobs = [f"toy-{number},{70 * number},toy,{1 + number % 4},{BATCHES[number % 2]}" for number in range(num_jobs)]
    _write(folder / "workloads" / "workload-1.csv", [HEADER, *jobs])
    return folder


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
