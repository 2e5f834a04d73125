"""The overhead of orchestration, on a real run of the scaling example (1-2 minutes). Prints figures, asserts none.

* predicted against actual JCT and cost,
* the share of the paid GPU-seconds that trained,
* seconds from the last report of a stage to the first step of the next one, with warm workers.

Run: python tests/bench/bench_orchestration.py [FILE], such as examples/hyperband.yaml
"""

from __future__ import annotations

import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from rubberband.executor.core.controller import Controller
from rubberband.executor.core.state import State
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.journal import Journal, sqlite_url
from rubberband.executor.journal.reading import read
from rubberband.executor.run.driver import replay
from rubberband.running.run import RunOptions, run_experiment
from rubberband.spec.loading import load_experiment

ROOT = Path(__file__).parents[2]


def stage_gaps(state: State) -> list[tuple[int, bool, float, float]]:
    """(stage, whether it grew, seconds to its first step, and to its last gang's) of every stage but the first."""
    gaps = []
    for before, stage in (pair for lane in state.lanes for pair in pairwise(lane.stages)):
        assert before.ended_at is not None
        first_wave = [
            use.training_at - before.ended_at
            for use in state.allocations
            if use.stage == stage.stage and use.training_at is not None and use.started_at - stage.started_at < 0.01
        ]
        grew = any(record.requested_at >= stage.started_at for record in state.instances.values())
        if first_wave:
            gaps.append((stage.stage, grew, min(first_wave), max(first_wave)))
    return gaps


def replayed(folder: ExperimentFolder) -> State:
    """The state that the journal folds to."""
    journal = Journal(sqlite_url(folder.journal), folder.name)
    header = journal.header()
    assert header is not None
    controller = Controller(header.job)
    replay(controller, journal)
    journal.close()
    return controller.state


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "examples" / "scaling.yaml"
    with tempfile.TemporaryDirectory() as home:
        experiment = load_experiment(file)
        folder = ExperimentFolder(home=Path(home), name=experiment.name)
        run_experiment(experiment, folder, RunOptions(search_path=(file.resolve().parent, ROOT), check=False))
        result, state = read(folder), replayed(folder)
    for what, planned, actual in (
        ("JCT, s", result.planned_jct_s, result.actual_jct_s),
        ("cost, USD", result.planned_cost_usd, result.actual_cost_usd),
    ):
        print(f"{what:<12} predicted {planned:9.4f}  actual {actual:9.4f}  difference {actual / planned - 1:+.1%}")
    paid = result.paid
    held = paid.total_gpu_s - paid.provisioning_gpu_s - paid.minimum_gpu_s
    after = paid.training_gpu_s / held
    print(f"paid GPU-seconds that trained: {paid.training_share:.1%}; of those after provisioning {after:.1%}")
    print(
        f"  training {paid.training_gpu_s:.1f}, start-up {paid.startup_gpu_s:.1f}, provisioning "
        f"{paid.provisioning_gpu_s:.1f}, idle {paid.idle_gpu_s:.1f}, minimum {paid.minimum_gpu_s:.1f}"
    )
    for stage, grew, first_s, last_s in stage_gaps(state):
        note = " (instances were added)" if grew else ""
        print(f"SYNC to the first step of stage {stage}: {first_s:.3f} s, of its last gang {last_s:.3f} s{note}")


if __name__ == "__main__":
    main()
