"""Models of the service's answers for the OpenAPI document. Answers are not validated against them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rubberband.spec.fields import Usd
from rubberband.states import ExperimentState


class Answer(BaseModel):
    """Base of every answer: more may be added to it, so clients leave alone what they do not know."""

    model_config = ConfigDict(extra="allow")


class ProblemAnswer(Answer):
    """An error (RFC 9457)."""

    type: str = Field(description="Kind of problem: a path of this service that explains it.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="One line: the problem, the value, the limit and the remedy.")


class KindView(Answer):
    """A kind of problem."""

    type: str
    title: str
    status: int
    explanation: str = Field(description="The cause, and what to do.")


class SummaryView(Answer):
    """How an experiment stands. All zero or null before it started."""

    trials: int
    stages: int
    stage: int = Field(description="The current stage; of several brackets, how many stages are over.")
    brackets: int = Field(description="How many chains of stages there are: one, or several for hyperband.")
    iterations: int
    target_iterations: int
    instances: int
    max_instances: int | None = Field(description="The most that it may hold, if it was limited while it ran.")
    started_at: float | None
    ended_at: float | None
    jct_s: float
    cost_usd: float = Field(description="With the measuring of the profile, like every cost here, and max_cost.")
    profiling_cost_usd: float = Field(description="The part of it for which the profile was measured.")
    month_at: float | None = Field(description="Begin of the calendar month (UTC) in which it spent last.")
    month_cost_usd: float = Field(description="The part of `cost_usd` that was spent in that month.")
    planned_jct_s: float | None
    planned_cost_usd: float | None
    forecast_jct_s: float | None
    forecast_cost_usd: float | None
    deadline_s: float | None = Field(description="Seconds from the start.")
    max_cost_usd: float | None
    metric: str
    mode: Literal["max", "min"]
    best_value: float | None
    best_trial: int | None


class ExperimentView(Answer):
    """An experiment, as lists show it. Instants are Unix time in seconds."""

    name: str
    state: ExperimentState
    owner: str = Field(description="Name of the token that submitted it; empty without one.")
    created_at: float
    changed_at: float
    reason: str = Field(description="Reason for its state, in one line.")
    policy: str
    plan: str | None = Field(description="Id of the plan with which it was submitted.")
    attempt: int = Field(description="Number of processes that were started for it.")
    entrypoint: str | None
    provider: str | None
    slack_s: float | None = Field(description="Seconds between its (expected) end and its deadline; null without one.")
    summary: SummaryView


class SubmittedView(ExperimentView):
    """An experiment that was accepted just now."""

    notes: list[str] = Field(description="Remarks on what was changed, such as fewer instances in a smaller pool.")


class ExperimentPage(Answer):
    """A page of experiments, newest first."""

    items: list[ExperimentView]
    next: str | None = Field(description="The cursor of the next page; null on the last one.")


class StageView(Answer):
    """A stage, planned against actual."""

    stage: int
    trials: int
    iterations: int
    gpus_per_trial: int
    planned_instances: int
    instances: int
    planned_s: float
    actual_s: float | None
    planned_cost_usd: float
    actual_cost_usd: float | None
    promoted: list[int]
    start_s: float | None
    bracket: int | None = Field(description="The bracket that it belongs to; null where there is only one.")
    rung: int = Field(description="Its number within its bracket.")
    lane: int = Field(description="Brackets of one lane run one after another, lanes side by side.")


class RungView(Answer):
    """A rung of a search whose trials climb rungs without a SYNC (asha)."""

    rung: int
    iterations: int = Field(description="Iterations in all that a trial has done at its end.")
    trials: int = Field(description="Trials that started in it, or were promoted to it.")
    ended: int
    promoted: int


class Expectation(Answer):
    """How long it takes and what it costs in the end."""

    jct_s: float | None
    cost_usd: float | None


class Best(Answer):
    """The best trial so far."""

    trial: int
    value: float | None
    iterations: int
    configuration: dict[str, Any]
    metrics: dict[str, float | None]


class GrantedLimits(Answer):
    """More time or money that was granted after the start; null is no limit."""

    at_s: float = Field(description="Seconds from the start.")
    deadline_before_s: float | None
    deadline_s: float | None
    max_cost_before_usd: float | None
    max_cost_usd: float | None


class ExperimentDetail(ExperimentView):
    """An experiment with its words and stages."""

    words: dict[str, Any] = Field(description="The experiment as its file describes it.")
    stages: list[StageView]
    rungs: list[RungView] = Field(description="Those of an asha search; its only stage is the whole run.")
    planned: Expectation
    forecast: Expectation
    best: Best | None
    extensions: list[GrantedLimits]


class TrialView(Answer):
    """A trial."""

    trial: int
    status: str
    configuration: dict[str, Any]
    iterations: int
    metrics: dict[str, float | None] = Field(
        description="Metrics of its latest report; null for values that are not finite."
    )
    failures: int
    failure: str | None
    checkpoint: dict[str, Any] | None
    bracket: int | None = Field(description="The bracket that it belongs to; null where there is only one.")
    seed: int = Field(description="The seed of its initial weights and the order of its data.")
    ended: bool = Field(description="Whether it has ended by itself, after its iterations.")


class TrialPage(Answer):
    """A page of trials, by number."""

    items: list[TrialView]
    next: str | None


class PlannedUse(Answer):
    """What the first plan held in a stage, in seconds from the start."""

    stage: int
    start_s: float
    end_s: float
    instances: int
    gpus_per_trial: int


class Allocations(Answer):
    """Which instances were held when, what their GPUs did, and what was planned."""

    instances: list[dict[str, Any]]
    busy: list[dict[str, Any]]
    planned: list[PlannedUse]


class StageCost(Answer):
    """What a stage costs."""

    stage: int
    planned_cost_usd: float
    actual_cost_usd: float | None


class BillLineView(Answer):
    """An amount of a bill."""

    line: str = Field(description="Purpose of the charge, such as `instances` or `root volumes`.")
    usd: float


class Costs(Answer):
    """The bill so far, against the plan and the cap, in US dollars."""

    cost_usd: float
    planned_cost_usd: float | None
    max_cost_usd: float | None
    forecast_cost_usd: float | None
    profiling_cost_usd: float
    head_cost_usd: float
    bill: list[BillLineView] = Field(description="The lines that add up to `cost_usd`.")
    paid: dict[str, float]
    stages: list[StageCost]
    instances: list[dict[str, Any]]


class Decisions(Answer):
    """Decisions at each SYNC, and extensions of the limits."""

    items: list[dict[str, Any]]
    extensions: list[GrantedLimits]


class LogLine(Answer):
    """A line that was printed."""

    trial: int | None
    text: str


class LogPage(Answer):
    """Lines of logs; ask again with `next` for what came since."""

    lines: list[LogLine]
    next: str


class Report(Answer):
    """What `rubberband report -o json` prints (`rubberband.report/1`)."""

    name: str
    outcome: str


class OutlookView(Answer):
    """What is expected of an experiment under given limits."""

    jct_s: float | None
    cost_usd: float | None
    deadline_s: float | None
    max_cost_usd: float | None
    plan: dict[str, Any]
    feasible: bool
    reason: str


class ExtensionView(Answer):
    """What other limits change."""

    before: OutlookView
    after: OutlookView
    stage: int = Field(description="The first stage that the plans cover.")
    added_s: float | None
    added_usd: float | None
    applied: bool = Field(description="Whether the limits were changed, not only previewed.")


class PriceList(Answer):
    """What instance types have and cost (`rubberband.prices/1`)."""

    region: str
    types: list[dict[str, Any]]
    notes: list[str]


class Health(Answer):
    """Whether the service works; `checks` says of each part."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = {}


class ExtendBody(BaseModel):
    """Other limits for an experiment. Only raising them is granted."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    deadline: str | float | None = Field(
        default=None, description="A duration such as `40m` (from the submission), seconds, or an absolute time."
    )
    max_cost: Annotated[Usd, Field(gt=0)] | None = Field(
        default=None, description="In US dollars, such as `5` or `$5`."
    )
    dry_run: bool = Field(default=True, description="Only show what would change; false changes it.")


class LimitBody(BaseModel):
    """How many instances a running experiment may hold from now on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_instances: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        description="0 pauses it; null lifts the limit: as many as its file allows."
    )


# Examples for the OpenAPI document. They hold no null, which FastAPI would leave out.


def example(description: str, value: Any) -> dict[str, Any]:
    """Return the `responses` entry of an answer in JSON, with an example."""
    return {"description": description, "content": {"application/json": {"example": value}}}


SUMMARY: dict[str, Any] = {
    "trials": 8,
    "stages": 3,
    "stage": 2,
    "brackets": 1,
    "iterations": 26,
    "target_iterations": 26,
    "instances": 0,
    "max_instances": 4,
    "started_at": 1795291210.0,
    "ended_at": 1795291340.0,
    "jct_s": 124.0,
    "cost_usd": 0.22,
    "profiling_cost_usd": 0.0,
    "month_at": 1793491200.0,
    "month_cost_usd": 0.22,
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
    "bracket": 0,
    "rung": 0,
    "lane": 0,
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
    "rungs": [],
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
            "bracket": 0,
            "seed": 7,
            "ended": False,
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
    "reason": "the stage no longer needs it",
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
