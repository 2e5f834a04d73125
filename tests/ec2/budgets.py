"""AWS Budgets: a sum for a month, of which somebody is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.request import Operation, Request


def create_budget(request: Request) -> dict[str, Any]:
    """CreateBudget."""
    request.access.check("budgets:ModifyBudget")
    budget = dict(request.params["Budget"])
    if budget["BudgetName"] in request.world.budgets:
        raise FakeError("DuplicateRecordException", f"Error creating budget: {budget['BudgetName']} - already exists.")
    request.world.budgets[budget["BudgetName"]] = budget
    return {}


def describe_budget(request: Request) -> dict[str, Any]:
    """DescribeBudget."""
    request.access.check("budgets:ViewBudget")
    return {"Budget": request.world.budgets[_known(request)]}


def delete_budget(request: Request) -> dict[str, Any]:
    """DeleteBudget."""
    request.access.check("budgets:ModifyBudget")
    del request.world.budgets[_known(request)]
    return {}


def _known(request: Request) -> str:
    name: str = request.params["BudgetName"]
    if name not in request.world.budgets:
        raise FakeError("NotFoundException", f"Unable to get budget: {name} - the budget doesn't exist.")
    return name


BUDGETS: Mapping[tuple[str, str], Operation] = {
    ("budgets", "CreateBudget"): create_budget,
    ("budgets", "DescribeBudget"): describe_budget,
    ("budgets", "DeleteBudget"): delete_budget,
}
