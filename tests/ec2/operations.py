"""The modules that have the operations of the fake."""

from tests.ec2 import (  # noqa: F401
    account,
    buckets,
    budgets,
    commands,
    describing,
    iam,
    images,
    launching,
    networks,
    offerings,
    parameters,
    placement_groups,
    price_list,
    reservations,
    schedules,
    stacks,
)
from tests.ec2.request import OPERATIONS as OPERATIONS
