"""AWS Budgets: a sum for a month, of which somebody is told."""

from __future__ import annotations

from typing import Any

from tests.ec2.faults import FakeError
from tests.ec2.request import Request, operation


@operation("budgets", "CreateBudget")
def create_budget(request: Request) -> dict[str, Any]:
    request.access.check("budgets:ModifyBudget")
    budget = dict(request.params["Budget"])
    if budget["BudgetName"] in request.world.budgets:
        raise FakeError("DuplicateRecordException", f"Error creating budget: {budget['BudgetName']} - already exists.")
    request.world.budgets[budget["BudgetName"]] = budget
    return {}


@operation("budgets", "DescribeBudget")
def describe_budget(request: Request) -> dict[str, Any]:
    request.access.check("budgets:ViewBudget")
    return {"Budget": request.world.budgets[_known(request)]}


@operation("budgets", "DeleteBudget")
def delete_budget(request: Request) -> dict[str, Any]:
    request.access.check("budgets:ModifyBudget")
    del request.world.budgets[_known(request)]
    return {}


def _known(request: Request) -> str:
    name: str = request.params["BudgetName"]
    if name not in request.world.budgets:
        raise FakeError("NotFoundException", f"Unable to get budget: {name} - the budget doesn't exist.")
    return name
