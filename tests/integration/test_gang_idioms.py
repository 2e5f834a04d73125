"""What people write in trials learns on a gang what it learns in one process, or is refused in one line."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from rubberband.executor import Entrypoint, SegmentFailure, open_store
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import run_gang, run_unequal

SEGMENT = replace(segments.SEGMENT, until_iterations=6, max_iterations=6)
SHARES = [[11, 5], [0, 16], [16, 0], [3, 13], [5, 11]]


def entrypoint(name: str) -> Entrypoint:
    return trials.entrypoint(f"gang_trials:{name}")


def own_state(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), weights_only=False).get("trial")


IDIOMS = {
    "freeze and thaw by iteration": "Thawing",
    "discriminative learning rates": "ByLayer",
    "EMA": "Ema",
    "SWA": "Swa",
    "gradient checkpointing": "Checkpointing",
    "weight tying": "Tying",
    "LoRA-like adapters": "Adapting",
    "mixup": "Mixup",
    "BatchNorm recalibration": "Recalibrating",
    "accumulation by hand": "ByHand",
    "OneCycle": "OneCycle",
    "early stopping": "Patient",
}
MORE = ["ThawingByStep", "Calling", "Twice", "Lazily", "Beside", "Resetting", "OwnThawing"]


@pytest.mark.by_default(8)
@pytest.mark.parametrize("name", [*IDIOMS.values(), *MORE])
def test_it_learns_on_gangs_of_one_two_and_one_with_unequal_shares_what_it_learns_in_one_process(workers, name):
    trial = entrypoint(name)
    straight, weights, whole, _ = run_unequal(trial, SEGMENT, [])
    losses, _, payload, _ = run_unequal(trial, replace(SEGMENT, until_iterations=2), [])
    segment = replace(SEGMENT, from_iterations=2, until_iterations=4)
    results = run_gang(workers, trial, segment, SHARES, payload)
    losses += results[0][0]
    assert len(results[0][1]) == len(results[1][1])
    for own, others in zip(results[0][1].values(), results[1][1].values(), strict=True):
        torch.testing.assert_close(own, others, rtol=0, atol=0)
    rest, got, last, _ = run_unequal(trial, replace(SEGMENT, from_iterations=4), [], results[0][2])
    assert [*losses, *rest] == pytest.approx(straight, rel=1e-6)
    worst = max(float((got[name] - weight).abs().max()) for name, weight in weights.items())
    print(f"{name}: {worst:.1e}")
    assert worst <= 1e-6
    torch.testing.assert_close(own_state(last), own_state(whole), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "Sparse",
            "the gradient of table is sparse, and a gang averages dense ones; build the embedding with sparse=False, "
            "or set resources.gpus_per_trial.max to 1",
        ),
        (
            "ByRank",
            "worker 0 begins or ceases to train 0.weight, and not every worker does; on_iteration(), on_step() and "
            "train_mode() must do the same on every worker",
        ),
        (
            "Drifting",
            "0.weight differs between worker 0 (norm N) and worker 1 (N); change weights in the same way "
            "on every worker: no random draws in on_step() or the optimizer, nothing that depends on the rank or on "
            "evaluate()",
        ),
    ],
)
def test_a_gang_that_would_drift_apart_fails_in_one_line(workers, tmp_path, name, line):
    results = run_gang(workers, entrypoint(name), SEGMENT, open_store(str(tmp_path)))
    failure = next(items[-1] for items in results if not items[-1].secondary)
    assert isinstance(failure, SegmentFailure)
    assert re.sub(r"norm [\d.]+", "norm N", re.sub(r"\(\d[\d.]+\)", "(N)", failure.message)) == line
