"""Answers as they may look, for the OpenAPI document. None holds a null: FastAPI would leave those out."""

from __future__ import annotations

from typing import Any


def example(description: str, value: Any) -> dict[str, Any]:
    """The `responses` entry of an answer in JSON that may look so."""
    return {"description": description, "content": {"application/json": {"example": value}}}


SUMMARY: dict[str, Any] = {
    "trials": 8,
    "stages": 3,
    "stage": 2,
    "iterations": 26,
    "target_iterations": 26,
    "instances": 0,
    "started_at": 1795291210.0,
    "ended_at": 1795291340.0,
    "jct_s": 124.0,
    "cost_usd": 0.22,
    "planned_jct_s": 120.0,
    "planned_cost_usd": 0.21,
    "forecast_jct_s": 124.0,
    "forecast_cost_usd": 0.22,
    "deadline_s": 1190.0,
    "max_cost_usd": 40.0,
    "metric": "accuracy",
    "mode": "max",
    "best_value": 0.94,
    "best_trial": 3,
}
VIEW: dict[str, Any] = {
    "name": "digits-sha",
    "state": "done",
    "owner": "ci",
    "created_at": 1795291200.0,
    "changed_at": 1795291341.0,
    "reason": "",
    "policy": "optimal",
    "plan": "3q2-7wAAAAA",
    "attempt": 1,
    "entrypoint": "examples.digits:DigitsTrial",
    "provider": "local",
    "slack_s": 1066.0,
    "summary": SUMMARY,
}
PAGE: dict[str, Any] = {"items": [VIEW], "next": "WzE3OTUyOTEyMDAuMCwgImRpZ2l0cy1zaGEiXQ"}
_STAGE: dict[str, Any] = {
    "stage": 0,
    "trials": 8,
    "iterations": 1,
    "gpus_per_trial": 1,
    "planned_instances": 2,
    "instances": 2,
    "planned_s": 40.0,
    "actual_s": 41.5,
    "planned_cost_usd": 0.08,
    "actual_cost_usd": 0.083,
    "promoted": [0, 3, 5],
    "start_s": 0.0,
}
_EXTENDED: dict[str, Any] = {
    "at_s": 50.0,
    "deadline_before_s": 1190.0,
    "deadline_s": 2990.0,
    "max_cost_before_usd": 40.0,
    "max_cost_usd": 40.0,
}
DETAIL: dict[str, Any] = VIEW | {
    "words": {"version": 1, "name": "digits-sha"},
    "stages": [_STAGE],
    "planned": {"jct_s": 120.0, "cost_usd": 0.21},
    "forecast": {"jct_s": 124.0, "cost_usd": 0.22},
    "best": {
        "trial": 3,
        "value": 0.94,
        "iterations": 3,
        "configuration": {"lr": 0.01},
        "metrics": {"accuracy": 0.94, "loss": 0.2},
    },
    "extensions": [_EXTENDED],
}
TRIALS: dict[str, Any] = {
    "items": [
        {
            "trial": 3,
            "status": "completed",
            "configuration": {"lr": 0.01},
            "iterations": 3,
            "metrics": {"accuracy": 0.94, "loss": 0.2},
            "failures": 1,
            "failure": "raised: CUDA out of memory",
            "checkpoint": {"url": "checkpoints/trial-003/3", "digest": "9f86d081", "size_bytes": 20480},
        }
    ],
    "next": "4",
}
_INSTANCE: dict[str, Any] = {
    "instance": "i-1",
    "requested_s": 0.0,
    "running_s": 8.0,
    "ready_s": 11.0,
    "ended_s": 48.0,
    "cost_usd": 0.06,
    "reason": "the stage needs it no more",
    "market": "spot",
    "instance_type": "local",
    "zone": "",
    "price_usd_per_hour": 3.6,
    "interrupted_s": 46.0,
    "preempted": True,
}
ALLOCATIONS: dict[str, Any] = {
    "instances": [_INSTANCE],
    "busy": [{"instance": "i-1", "gpu": 0, "trial": 3, "stage": 0, "start_s": 11.0, "training_s": 13.0, "end_s": 23.0}],
    "planned": [{"stage": 0, "start_s": 0.0, "end_s": 40.0, "instances": 2, "gpus_per_trial": 1}],
}
COSTS: dict[str, Any] = {
    "cost_usd": 0.13,
    "planned_cost_usd": 0.21,
    "max_cost_usd": 40.0,
    "forecast_cost_usd": 0.22,
    "profiling_cost_usd": 0.0,
    "head_cost_usd": 0.0,
    "bill": [{"line": "instances", "usd": 0.13}],
    "paid": {"training_gpu_s": 96.0, "total_gpu_s": 130.0},
    "stages": [{"stage": 0, "planned_cost_usd": 0.08, "actual_cost_usd": 0.083}],
    "instances": [_INSTANCE],
}
DECISIONS: dict[str, Any] = {
    "items": [
        {
            "stage": 1,
            "at_s": 41.5,
            "changed": False,
            "reason": "the plan stays the cheapest that keeps the deadline",
            "plan": {"stages": [{"instances": 2, "gpus_per_trial": 1}]},
            "present_jct_s": 124.0,
            "present_cost_usd": 0.22,
            "jct_s": 124.0,
            "cost_usd": 0.22,
        }
    ],
    "extensions": [_EXTENDED],
}
LOGS: dict[str, Any] = {
    "lines": [{"trial": 3, "text": "epoch 3: accuracy 0.94"}, {"trial": 5, "text": "epoch 3: accuracy 0.91"}],
    "next": "eyIzIjo0MTJ9",
}
_OUTLOOK: dict[str, Any] = {
    "jct_s": 124.0,
    "cost_usd": 0.22,
    "deadline_s": 1190.0,
    "max_cost_usd": 40.0,
    "plan": {"stages": [{"instances": 2, "gpus_per_trial": 1}]},
    "feasible": True,
    "reason": "124 s of 1190 s",
}
EXTENSION: dict[str, Any] = {
    "before": _OUTLOOK,
    "after": _OUTLOOK | {"deadline_s": 2990.0, "jct_s": 190.0, "cost_usd": 0.18},
    "stage": 2,
    "added_s": 66.0,
    "added_usd": -0.04,
    "applied": False,
}
PRICES: dict[str, Any] = {
    "schema": "rubberband.prices/1",
    "region": "us-east-1",
    "types": [
        {
            "instance_type": "g4dn.xlarge",
            "gpus": 1,
            "gpu": "T4",
            "gpu_memory_gib": 16.0,
            "vcpus": 4,
            "memory_gib": 16.0,
            "on_demand_usd_per_hour": 0.526,
            "on_demand_source": "catalogue",
            "spot_usd_per_hour": 0.158,
        }
    ],
    "notes": [],
}
