"""Every operation that the fake has: (service, operation) -> what carries it out."""

from __future__ import annotations

from collections.abc import Mapping

from tests.ec2.account import ACCOUNTS
from tests.ec2.buckets import BUCKETS
from tests.ec2.budgets import BUDGETS
from tests.ec2.commands import COMMANDS
from tests.ec2.describing import DESCRIBING
from tests.ec2.iam import IAM
from tests.ec2.images import IMAGES
from tests.ec2.launching import LAUNCHING
from tests.ec2.networks import NETWORKS
from tests.ec2.offerings import OFFERINGS
from tests.ec2.parameters import PARAMETERS
from tests.ec2.placement_groups import PLACEMENT_GROUPS
from tests.ec2.price_list import PRICE_LIST
from tests.ec2.request import Operation
from tests.ec2.reservations import RESERVATIONS
from tests.ec2.schedules import SCHEDULES

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **LAUNCHING,
    **DESCRIBING,
    **NETWORKS,
    **PLACEMENT_GROUPS,
    **OFFERINGS,
    **IMAGES,
    **PARAMETERS,
    **ACCOUNTS,
    **PRICE_LIST,
    **RESERVATIONS,
    **BUCKETS,
    **BUDGETS,
    **IAM,
    **SCHEDULES,
    **COMMANDS,
}
