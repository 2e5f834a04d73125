"""The cap of agents: `agents` in `policy.yaml` of this machine's home. No tool writes that file.

An experiment that a tool has submitted has the tag `agent`, by which the month counts it and other tools know it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rubberband.errors import InputError
from rubberband.spec.account import POLICY_FILE, AgentPolicy
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_policy
from rubberband.states import ACTIVE, ExperimentState
from rubberband.units import MONEY_SLACK_USD, format_usd
from rubberband.values.kinds import KINDS, NOT_INSTALLED
from rubberband.values.submission import Summary

TAG = "agent"
"""Tag of the experiments that agents have submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """An experiment of an agent, with its cost so far and its max_cost."""

    name: str
    provider: str
    state: ExperimentState
    summary: Summary
    """With its `max_cost_usd`, also before it has begun."""

    def month_usd(self, now: float) -> float:
        """Return what counts of it in the month of `now` (Unix time): the whole rest of its max_cost while it runs."""
        if KINDS.get(self.provider, NOT_INSTALLED).is_simulated:
            return 0.0
        spent_usd, most_usd = self.summary.month_usd(now), self.summary.max_cost_usd
        if self.state not in ACTIVE:
            return spent_usd
        most_usd = self.summary.forecast_cost_usd if most_usd is None else most_usd
        return spent_usd + max(0.0, (most_usd or 0.0) - self.summary.cost_usd)


@dataclass(frozen=True, slots=True)
class AgentCaps:
    """The limits of agents, as `policy.yaml` has them now."""

    policy: AgentPolicy
    path: Path

    @classmethod
    def of(cls, home: Path) -> AgentCaps:
        """Read them. Raises InputError for a broken file."""
        policy = load_policy(home)
        return cls((None if policy is None else policy.agents) or AgentPolicy(), home / POLICY_FILE)

    def words(self) -> str:
        """Return the limits in one line."""
        run_usd, month_usd = self.policy.max_usd_per_run, self.policy.max_usd_per_month
        caps = [
            "no cap of a run" if run_usd is None else f"{format_usd(run_usd)} a run",
            "no cap of a month" if month_usd is None else f"{format_usd(month_usd)} a month",
        ]
        return f"cap of agents: {', '.join(caps)}; providers {', '.join(self.policy.providers)}"

    def require_start(self, experiment: Experiment, *, asks_service: bool, bills: Iterable[Bill]) -> None:
        """Raise InputError for an experiment that an agent may not start. `bills`: those of all agents."""
        resources = experiment.resources
        if asks_service and "provider" not in resources.model_fields_set:
            raise InputError("resources.provider: missing, and the service would choose one; write it")
        if resources.provider not in self.policy.providers:
            allowed = ", ".join(self.policy.providers)
            raise self._beyond("providers", f"{resources.provider} is not one of {allowed}", "use one")
        if resources.secrets:
            raise InputError(
                "resources.secrets: an agent's experiment gets none; leave them out, or ask a person to run it: "
                "rubberband run FILE"
            )
        charged = resources.kind.is_rented or resources.kind.is_borrowed
        if charged and self.policy.max_usd_per_run is None:
            raise self._beyond("max_usd_per_run", f"missing, and {resources.provider} is charged", "use provider local")
        self._require_usd(experiment.name, resources.provider, experiment.constraints.max_cost_usd, None, bills)

    def require_extension(self, provider: str, name: str, max_cost_usd: float | None, bills: Iterable[Bill]) -> None:
        """Raise InputError for a max_cost with which an experiment of an agent may not go on."""
        found = list(bills)
        own = next((bill for bill in found if bill.name == name), None)
        self._require_usd(name, provider, max_cost_usd, own, found)

    def _require_usd(
        self, name: str, provider: str, most_usd: float | None, own: Bill | None, bills: Iterable[Bill]
    ) -> None:
        run_usd, month_usd = self.policy.max_usd_per_run, self.policy.max_usd_per_month
        what = "constraints.max_cost"
        caps_usd = [cap_usd for cap_usd in (run_usd, month_usd) if cap_usd is not None]
        if most_usd is None:
            if caps_usd:
                raise InputError(f"{what}: missing, and agents have a cap; write at most {format_usd(min(caps_usd))}")
            return
        if run_usd is not None and most_usd > run_usd + MONEY_SLACK_USD:
            why = f"{what} is {format_usd(most_usd)}, more than {format_usd(run_usd)}"
            raise self._beyond("max_usd_per_run", why, "lower it")
        if month_usd is None or KINDS.get(provider, NOT_INSTALLED).is_simulated:
            return
        now = time.time()
        others_usd = sum(bill.month_usd(now) for bill in bills if bill.name != name)
        spent = Summary() if own is None else own.summary
        asked_usd = spent.month_usd(now) + max(0.0, most_usd - spent.cost_usd)
        if others_usd + asked_usd > month_usd + MONEY_SLACK_USD:
            used = f"{format_usd(others_usd)} of {format_usd(month_usd)} are spent or may be"
            left = f"this asks for {format_usd(asked_usd)}"
            raise self._beyond("max_usd_per_month", f"{used}, and {left}", "lower max_cost, or wait for others to end")

    def _beyond(self, key: str, why: str, fix: str) -> InputError:
        return InputError(f"agents.{key} of {POLICY_FILE}: {why}; {fix}, or ask a person to raise it in {self.path}")
