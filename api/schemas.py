"""What the service answers, as models: they are the OpenAPI document's, and answers are not validated against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rubberband.states import ExperimentState


class Answer(BaseModel):
    """Base of every answer: more may be added to it, so clients leave alone what they do not know."""

    model_config = ConfigDict(extra="allow")


class ProblemAnswer(Answer):
    """An error (RFC 9457)."""

    type: str = Field(description="What kind of problem it is: a path of this service that explains it.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="One line: what, which value, which limit, the remedy.")


class KindView(Answer):
    """A kind of problem."""

    type: str
    title: str
    status: int
    explanation: str = Field(description="When it happens, and what to do.")


class SummaryView(Answer):
    """How an experiment stands. All zero or null before it began."""

    trials: int
    stages: int
    stage: int
    iterations: int
    target_iterations: int
    instances: int
    started_at: float | None
    ended_at: float | None
    jct_s: float
    cost_usd: float
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
    reason: str = Field(description="Why it is where it is, in one line.")
    policy: str
    plan: str | None = Field(description="Id of the plan that it was submitted with.")
    attempt: int = Field(description="How often a process was started for it.")
    entrypoint: str | None
    provider: str | None
    slack_s: float | None = Field(description="Seconds between its (expected) end and its deadline; null without one.")
    summary: SummaryView


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

    words: dict[str, Any] = Field(description="The experiment in the file's words.")
    stages: list[StageView]
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
    metrics: dict[str, float | None] = Field(description="Of its latest report; null for what is no finite number.")
    failures: int
    failure: str | None
    checkpoint: dict[str, Any] | None


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

    line: str = Field(description="What it is for, such as `instances` or `root volumes`.")
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
    """What was decided at each SYNC, and how limits were extended."""

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
    stage: int = Field(description="The first stage that the plans are about.")
    added_s: float | None
    added_usd: float | None
    applied: bool = Field(description="Whether the limits were changed, and not only looked at.")


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
    max_cost: float | None = Field(default=None, gt=0, description="In US dollars.")
    dry_run: bool = Field(default=True, description="Only show what would change; false changes it.")
